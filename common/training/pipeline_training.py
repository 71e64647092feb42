"""Training with a pipeline: what the stages do in a step and agree on, and the parts saved as one model."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object, wait_for_everyone
from peft import PeftModel, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from common.data.rows import IGNORED_LABEL, Tokens, without_labels
from common.models.loading import check_equal_logits, load_base_model
from common.planning.device_maps import whole_model_on
from common.runtime.recorder import RunLog
from common.runtime.world import Rank
from common.training.export import give_up
from common.training.loop_training import Batch, LoopTrainer
from common.training.pipeline import Pipeline


class PipelineTrainer(LoopTrainer):
    """The trainer of one stage; every rank goes through the same rows in the same order."""

    divides = True

    def __init__(self, *, pipeline: Pipeline, **kwargs: Any) -> None:
        """`pipeline` holds the stage; the rest goes to the trainer of one device."""
        super().__init__(rank=pipeline.rank, **kwargs)
        self.pipeline, self.optimizer_file = pipeline, f"optimizer-stage{pipeline.rank.rank}.pt"

    def start_step_maker(self) -> None:
        """Passes are timed from here on."""
        self.pipeline.clock.forget()

    def add_gradients(self, batch: Batch, labelled: int, is_last: bool) -> torch.Tensor:
        """Every micro-batch through all stages; the loss is known to the last stage."""
        return self.pipeline.train_step(batch, labelled)

    def sums_of(self, batch: Batch) -> torch.Tensor:
        """Known to the last stage."""
        if self.pipeline.keeps_logits:  # of a large vocabulary, only where some row has a label
            labelled = (batch["labels"][:, 1:] != IGNORED_LABEL).sum().float().to(self.rank.device)
            return torch.stack([self.pipeline.validate(batch), labelled])
        logits = self.pipeline.logits(batch)
        labels = batch["labels"].to(self.rank.device)
        if logits is None:
            logits = torch.zeros(len(labels), self.pipeline.module.causal.config.num_labels, device=self.rank.device)
        return self.objective.results(logits, labels).sum(0)

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The last stage's `value`, on every rank."""
        dist.broadcast(value, src=self.rank.world_size - 1)
        return value

    def save_weights(self, folder: Path) -> None:
        """The stages as parts of one model, and each stage's optimizer."""
        save_parts(self.model, folder, self.rank)
        torch.save(self.optimizer.state_dict(), folder / self.optimizer_file)

    def load_weights(self, folder: Path) -> None:
        """This stage's part of the weights, and its optimizer."""
        load_parts(self.model, folder)
        states = torch.load(folder / self.optimizer_file, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(states)

    def collated(self, rows: list[Tokens]) -> Batch:
        """Rows as one batch, filled up with rows without labels until the micro-batches divide it."""
        missing = -len(rows) % self.pipeline.micro_batches
        return self.data_collator([*rows, *[without_labels(rows[-1])] * missing])

    # -- what stages must agree on

    def complete_gradients(self) -> None:
        """What follows the passes of a step: the gradients become those of the whole model, and are clipped."""
        self._add_up_tied_gradients()
        self._clip_gradients()

    def _add_up_tied_gradients(self) -> None:
        """First and last stage each have a copy of tied embeddings; its gradient is the sum of both."""
        weight = self._tied_weight()
        if weight is not None:
            weight.grad = sum_of_first_and_last(weight.grad, self.rank)

    def _tied_weight(self) -> torch.nn.Parameter | None:
        """This stage's copy of trained embeddings that are also the head; None elsewhere."""
        causal = self.pipeline.module.causal
        if not causal.ends_are_tied or not (self.rank.is_main or self.pipeline.module.is_last):
            return None
        # an encoder's last stage has the head, but no embeddings that would be the same weight
        ends = causal.get_input_embeddings() if self.rank.is_main else causal.get_output_embeddings()
        return ends.weight if ends.weight.requires_grad else None

    def _clip_gradients(self) -> None:
        """Scale all gradients so that their norm over the whole model is at most `max_grad_norm`."""
        if not self.args.max_grad_norm:
            return
        trained = [weight for weight in self.model.parameters() if weight.grad is not None]
        copy = self._tied_weight() if not self.rank.is_main else None  # counted on the first stage
        squares = get_total_norm([weight.grad for weight in trained if weight is not copy]).float() ** 2
        dist.all_reduce(squares)
        clip_grads_with_norm_(trained, self.args.max_grad_norm, squares.sqrt())

    def of_own_rows(self, of_ranks: list[Any]) -> list[Any]:
        """All stages work on the same rows, so that one speaks for all.

        Raises:
            RuntimeError: stages worked on different rows.
        """
        if any(other != of_ranks[0] for other in of_ranks):
            raise RuntimeError("The pipeline's stages did not all work on the same rows.")
        return of_ranks[:1]

    def stage_figures(self) -> dict[str, object]:
        """For the record: each stage's seconds of work, and its share of the steps' time in which it waited.

        None of a run that resumed from its last step, and took none.

        Raises:
            RuntimeError: a stage computed nothing.
        """
        if self.state.global_step == self.first_step:
            return {"stages": None}
        busy_s, _ = self.pipeline.clock.busy_and_total_s()
        stages = [{"stage": stage, "busy_s": busy_s} for stage, busy_s in enumerate(gather_object([busy_s]))]
        for stage, idle_share in zip(stages, self.idle_shares(), strict=True):
            if stage["busy_s"] == 0:
                raise RuntimeError(f"Stage {stage['stage']} of {len(stages)} computed nothing.")
            stage["idle_share"] = idle_share
        return {"stages": stages}

    def idle_shares(self) -> list[float]:
        """By stage, the share of the steps' time in which it waited; a step ends for all with its last stage."""
        of_stages = gather_object([self.pipeline.clock.busy_and_total_s()])
        longest_s = max(total_s for _, total_s in of_stages)
        return [1 - busy_s / longest_s for busy_s, _ in of_stages]

    def parameter_counts(self) -> tuple[int, int]:
        """Of all stages together: trained parameters, and all that multiply."""
        causal, copy = self.pipeline.module.causal, None
        if self.pipeline.module.is_last and causal.ends_are_tied:
            copy = causal.get_output_embeddings().weight
        looked_up = causal.get_input_embeddings().weight if self.rank.is_main else None
        is_head_elsewhere = causal.ends_are_tied
        counts = [0, 0]
        for weight in self.model.parameters():
            counts[0] += weight.numel() * (weight.requires_grad and weight is not copy)
            counts[1] += weight.numel() * (weight is not copy and (weight is not looked_up or is_head_elsewhere))
        trained, multiplied = (sum(column) for column in zip(*gather_object([counts]), strict=True))
        return trained, multiplied


def sum_of_first_and_last(gradient: torch.Tensor, rank: Rank) -> torch.Tensor:
    """`gradient`, which becomes the sum of the first and the last stage's."""
    other = rank.world_size - 1 if rank.is_main else 0
    received = torch.empty_like(gradient)
    # in one batch: on GPUs both ends would else wait in their sending for the other's receiving
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, gradient, other), dist.P2POp(dist.irecv, received, other)]
    ):
        work.wait()
    return gradient.add_(received)


# -- the parts as one model


def save_parts(model: PreTrainedModel | PeftModel, folder: Path, rank: Rank) -> None:
    """Save all stages as one model that plain Transformers (or PEFT) loads: call it on every rank.

    Each rank writes its stage's weights as a part of a model in several files; no weight is sent. Of adapters, which
    are small, rank 0 writes all.
    """
    if rank.is_main:
        folder.mkdir(parents=True, exist_ok=True)
    wait_for_everyone()
    if isinstance(model, PeftModel):
        own = get_peft_model_state_dict(model, save_embedding_layers=False)
        parts = gather_object([{name: weight.cpu() for name, weight in own.items()}])
        if rank.is_main:
            model.save_pretrained(folder, save_embedding_layers=False)  # configuration, and weights of this stage only
            every = {name: weight.contiguous() for part in parts for name, weight in part.items()}
            save_file(every, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    else:
        _save_stage(model, folder, rank)
    wait_for_everyone()


def _save_stage(model: PreTrainedModel, folder: Path, rank: Rank) -> None:
    file_name = f"model-{rank.rank + 1:05}-of-{rank.world_size:05}.safetensors"
    weights = {name: weight.detach().contiguous() for name, weight in model.state_dict().items()}
    if model.ends_are_tied and not rank.is_main:
        copies = ("embed_tokens.weight", "lm_head.weight")  # the first stage saves them
        weights = {name: weight for name, weight in weights.items() if not name.endswith(copies)}
    save_file(weights, folder / file_name, metadata={"format": "pt"})
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    parts = gather_object([(file_name, list(weights), size)])
    if rank.is_main:
        model.whole_config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        index = {
            "metadata": {"total_size": sum(size for _, _, size in parts)},
            "weight_map": {name: file_name for file_name, names, _ in parts for name in names},
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def load_parts(model: PreTrainedModel | PeftModel, folder: Path) -> None:
    """Load this stage's weights from what `save_parts` wrote."""
    if isinstance(model, PeftModel):
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
        return
    own = model.state_dict()
    for path in folder.glob("model-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in set(file.keys()) & own.keys():
                own[name].copy_(file.get_tensor(name))


def save_parts_and_reload(
    log: RunLog, trainer: PipelineTrainer, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the stages (with LoRA the adapter, and the merged model) as one, load it as any user would, and compare.

    Returns:
        The model as plain Transformers loads it, whole on each rank's device, and the largest absolute differences of
        logits from those of the pipeline.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    run, rank, model = log.run, log.rank, trainer.pipeline.module.model
    batch = trainer.collated(list(trainer.eval_dataset)[: run.per_device_eval_batch_size])
    expected = trainer.pipeline.logits(batch)
    device_map, differences = whole_model_on(rank.device), {}
    is_lora = isinstance(model, PeftModel)
    if is_lora:
        save_parts(model, log.folder / "adapter", rank)
        model = model.merge_and_unload()
    folder = log.folder / ("merged" if is_lora else "model")
    save_parts(model, folder, rank)
    if rank.is_main:
        tokenizer.save_pretrained(folder)
    give_up(trainer, rank.device)
    wait_for_everyone()
    if is_lora and expected is not None:
        reloaded = PeftModel.from_pretrained(load_base_model(run, device_map), log.folder / "adapter")
        differences["adapter"] = check_equal_logits(expected, reloaded, batch, "adapter", run.precision)
        del reloaded
    tuned = load_base_model(run, device_map, source=folder)
    if expected is not None:
        differences[folder.name] = check_equal_logits(expected, tuned, batch, "model", run.precision)
    return tuned, {name: value for part in gather_object([differences]) for name, value in part.items()}
