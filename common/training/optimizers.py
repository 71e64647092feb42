"""Transformers' settings, optimizer and schedule of the learning rate of a training, from the run's."""

from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from common.base.run_config import RunConfig, names_in
from common.runtime.world import BACKENDS
from common.tasks.objectives import objective_of

SHARED = (  # settings that a run and Transformers have under one name
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "max_grad_norm",
    "gradient_checkpointing", "eval_steps", "save_steps", "dataloader_num_workers", "seed", "optim",
    "lr_scheduler_type", "warmup_steps", "weight_decay",
)  # fmt: skip
NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


class LoopArguments(TrainingArguments):
    """Transformers' settings of a training, without the devices and process groups that they would look for."""

    def __post_init__(self) -> None:
        """Check and start nothing."""

    def place_on(self, device: str) -> None:
        """Tell callbacks that ask of this process's `device`, and of its place among the ranks."""
        self.distributed_state, self._n_gpu = PartialState(), int(device != "cpu")
        vars(self)["_setup_devices"] = torch.device(device)  # else they would set up devices, and forget Accelerate's


def training_arguments(
    run: RunConfig,
    output_folder: Path | str = "",
    keeps: bool = True,
    kind: type[TrainingArguments] = LoopArguments,
    **more: Any,
) -> TrainingArguments:
    """Return Transformers' settings of a training, which callbacks and trackers read, from the run's.

    `keeps`: whether the training reports, validates and saves, in `output_folder`. `more`: settings beside the run's.
    """
    every, trackers = "steps" if keeps else "no", names_in(run.report_to if keeps else "none")
    return kind(
        output_dir=str(output_folder),
        per_device_eval_batch_size=run.rows_evaluated_at_once,
        gradient_checkpointing_kwargs={"use_reentrant": run.use_reentrant} if run.gradient_checkpointing else None,
        bf16=run.precision.startswith("bf16"),
        fp16=run.precision == "fp16-mixed",
        use_cpu=run.device == "cpu",
        ddp_backend=BACKENDS[run.device] if run.world_size > 1 else None,
        eval_strategy=every,
        logging_strategy=every,
        logging_steps=run.eval_steps,
        save_strategy="best" if keeps else "no",  # and where `SaveSchedule` asks for it
        load_best_model_at_end=keeps,
        metric_for_best_model=objective_of(run).best_metric,
        greater_is_better=objective_of(run).higher_is_better,
        remove_unused_columns=False,
        report_to=trackers[0] if len(trackers) == 1 else list(trackers),
        disable_tqdm=True,
        learning_rate=run.peak_learning_rate,
        **{name: getattr(run, name) for name in SHARED},
        **more,
    )


def make_optimizer(model: torch.nn.Module, run: RunConfig) -> torch.optim.Optimizer:
    """Return the run's optimizer of what `model` trains; biases and norms decay no weights, as in Transformers.

    Divided weights (DTensors) have groups of their own: PyTorch's `foreach` steps take no list with both kinds.
    """
    kind, settings = optimizer_class(model, run)
    decaying = set(get_parameter_names(model, [torch.nn.LayerNorm], NOT_DECAYED))
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            groups.setdefault((name not in decaying, isinstance(weight, DTensor)), []).append(weight)
    optimizer = kind(
        [
            {"params": weights, "weight_decay": 0.0 if is_exempt else run.weight_decay}
            for (is_exempt, _), weights in sorted(groups.items(), key=lambda group: group[0])
        ],
        **settings,
    )
    if settings.get("optim_bits") == 8:  # bitsandbytes' are unstable for embeddings in 8 bits
        from bitsandbytes.optim import GlobalOptimManager  # here: it takes seconds

        manager = GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    return optimizer


def optimizer_class(model: torch.nn.Module, run: RunConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the run's optimizer for `model`, and its settings, as Transformers' Trainer has them."""
    from transformers import Trainer  # here: it imports `datasets`, which takes seconds

    return Trainer.get_optimizer_cls_and_kwargs(training_arguments(run), model)


def make_schedule(optimizer: torch.optim.Optimizer, run: RunConfig, steps: int) -> LRScheduler:
    """Return the run's schedule of the learning rate, over `steps` of the optimizer."""
    return get_scheduler(run.lr_scheduler_type, optimizer, training_arguments(run).get_warmup_steps(steps), steps)
