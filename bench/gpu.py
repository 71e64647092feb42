"""Training steps of an 8B model on a GPU: parts of `python -m bench.lease`, which `python -m bench gpu` judges.

Random weights of the real shape, rows of 4,096 tokens of which all but the first are learnt, and the run folder's own
trainer. Memory and time of its steps stand beside the plan's.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from bench.entries import Entry, measured, read_kept
from bench.gpu_check import NotDoneError
from bench.levers import LEVERS, pulled
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.base.specs import TECHNIQUES
from common.checks.folder_training import tried_by_folder
from common.checks.measured_steps import StepClock
from common.checks.preflight import planned_step_s
from common.checks.tried_rows import batch_of_length, rows_of_length
from common.hardware.devices import Gpu, forget_peak, read_memory
from common.models.families import suited_to_model
from common.planning.plans import Plan, plan_run
from common.reporting.rows import NOT_RUN
from common.runtime import recorder
from common.runtime.rank import rank_started
from common.training.loop import TrainingLoop
from common.training.results import speed_figures

TRIALS_PATH = REPOSITORY / "bench" / "gpu_trials.json"
FOLDERS = {"full": "2.4_full_finetuning/run_2_h200_141g_x1", "lora": "2.1_lora_finetuning/run_2_h200_141g_x1"}
STEPS = 5  # of the optimizer; the first one also warms up, and is not timed


@dataclass(frozen=True)
class Scale:
    """What is trained, and where: `rows` of a micro-batch at most, each of `length` tokens."""

    model: str
    length: int
    rows: int
    device: str


MODEL, LENGTH, ROWS = "llama-3.1-8b", 4096, 3  # rows of a micro-batch: four may not fit in 141 GB with full fine-tuning
GPU_SCALE = Scale(MODEL, LENGTH, ROWS, "cuda")
REHEARSED_SCALE = Scale("assets/embedded_base", 64, 2, "cpu")


@dataclass(frozen=True)
class Trial:
    """A variant of training: its technique, the settings that differ from its folder's, and what `bench.levers` has."""

    technique: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    levers: tuple[str, ...] = ()

    def run(self, scale: Scale = GPU_SCALE) -> RunConfig:
        """Return the run whose steps these are, packed without padding; full fine-tuning has no fp32 weights to fit."""
        own = {"precision": "bf16", "gradient_accumulation_steps": 1} if self.technique == "full" else {}
        asked = {"model": scale.model, "weights": "random", "max_length": scale.length, "device": scale.device,
                 "per_device_train_batch_size": scale.rows}  # fmt: skip
        without_evaluation = {"report_to": "none", "independent_judge": "none"}
        folder = literal_of(REPOSITORY / FOLDERS[self.technique])
        return suited_to_model(replace(folder, **asked, **own | self.settings, **without_evaluation))

    def planned(self, gpu: Gpu, scale: Scale = GPU_SCALE) -> Plan:
        """Return the plan with the most rows that have room on the GPU; `NotDoneError` where not even one has."""
        with pulled(self.levers):
            for rows in range(scale.rows, 0, -1):
                run = self.run(replace(scale, rows=rows))
                plan = plan_run(run, batch_of_length(run, scale.length), gpu)
                if plan.fits:
                    return plan
        raise NotDoneError(
            f"by the plan one row needs {plan.fullest[0].peak_gib:.1f} GiB, and {gpu.name} has {gpu.memory_gib:.1f}"
        )


LIGER, COMPILED = {"use_liger_kernel": True}, {"torch_compile": True}
FUSED_ADAMW, FOUR_BATCHES = {"optim": "adamw_torch_fused"}, {"gradient_accumulation_steps": 4}
NO_NORM, LOGITS, CUDNN = LEVERS
# What a user can set
TRIALS = (
    Trial("lora", "as it comes"),
    Trial("lora", "Liger's kernels", LIGER),
    Trial("lora", "compiled", COMPILED),
    Trial("full", "as it comes"),
    Trial("full", "Liger's kernels", LIGER),
    Trial("full", "compiled", COMPILED),
    Trial("full", "compiled, 4 micro-batches a step", COMPILED | FOUR_BATCHES),
)
# What the loop may get: the most promising first
LEVER_TRIALS = (
    Trial("full", "compiled, fused AdamW, 4 micro-batches", COMPILED | FUSED_ADAMW | FOUR_BATCHES, (NO_NORM,)),
    Trial("lora", "compiled, large chunks", COMPILED, (LOGITS, NO_NORM)),
    Trial("lora", "compiled, cuDNN", COMPILED, (CUDNN, NO_NORM)),
    Trial("lora", "compiled, large chunks, cuDNN", COMPILED, (LOGITS, CUDNN, NO_NORM)),
    Trial("full", "compiled, fused AdamW, large chunks, cuDNN, 4 micro-batches", COMPILED | FUSED_ADAMW | FOUR_BATCHES,
          (LOGITS, CUDNN, NO_NORM)),
    Trial("full", "compiled, fused AdamW", COMPILED | FUSED_ADAMW, (NO_NORM,)),
)  # fmt: skip


def measure(trial: Trial, gpu: Gpu, scale: Scale = GPU_SCALE) -> dict[str, Any]:
    """Return a trial's record: its steps' times, tokens per second, MFU and peak memory, beside the plan's.

    Raises:
        NotDoneError: by the plan not even one row has room on the GPU.
    """
    plan = trial.planned(gpu, scale)
    run = trial.run(replace(scale, rows=plan.job.batch.rows))
    tokens = run.effective_batch_size * run.max_length
    with pulled(trial.levers), trial_started(run) as log:
        clock = StepClock(log.rank.devices, partial(forget_peak, log.rank.device))
        loop = take_steps(log, clock)
        return {
            **asdict(trial),
            "rows": run.per_device_train_batch_size,
            "tokens": tokens,
            "step_time_s": clock.step_time_s,
            **speed_figures(loop, tokens / clock.step_time_s, gpu),
            "peak_gib": read_memory(log.rank.device).peak_gib,
            "planned_step_time_s": planned_step_s(run, plan),
            "planned_gib": plan.fullest[0].allocated_gib,
            "gpu": gpu.name,
            "torch": torch.__version__,
        }


@contextmanager
def trial_started(run: RunConfig) -> Iterator[recorder.Trial]:
    """Start what stands in for the log of `STEPS` steps; callbacks may be put into it."""
    with rank_started(run) as rank, tempfile.TemporaryDirectory() as folder:
        yield recorder.Trial(replace(run, max_steps=STEPS), rank, Path(folder))


def take_steps(log: recorder.Trial, *callbacks: TrainerCallback) -> TrainingLoop:
    """Train on rows of the run's `max_length` by the run folder's own function, and return its loop."""
    log.callbacks += callbacks
    return tried_by_folder(log, rows_of_length(log.run, log.run.max_length))


# -- what is kept of them, against the bars

GPU = "H200 141GB SXM"
COMMAND = "python -m bench.lease --only steps"
MFU_BARS = {"full": 0.58, "lora": 0.51}  # least share of the GPU's dense peak
LORA_OVER_FULL = 1.25


def entries(quick: bool) -> list[Entry]:
    """Return what `judged` says of kept trials: nothing is run, `quick` or not."""
    return judged(read_kept(TRIALS_PATH))


def judged(records: Sequence[dict[str, Any]]) -> list[Entry]:
    """Return the MFU of each technique's fastest variant, and LoRA's speed over full fine-tuning's in the same variant.

    Without records they are not run.
    """
    on_gpu = [record for record in records if record["gpu"] == GPU]
    by = {name: {each["name"]: each for each in on_gpu if each["technique"] == name} for name in MFU_BARS}
    found = []
    for technique, bar in MFU_BARS.items():
        fastest = max(by[technique].values(), key=lambda record: record["mfu"], default={"mfu": None})
        words = [TECHNIQUES[technique].title, *([fastest["name"]] if "name" in fastest else [])]
        found.append(_entry(f"{', '.join(words)}: MFU", fastest["mfu"], "share", bar))
    full, lora = by["full"], by["lora"]
    ratio = min((lora[name]["tokens_per_s"] / full[name]["tokens_per_s"] for name in lora.keys() & full), default=None)
    found.append(_entry("LoRA over full, least of all variants: tokens per second", ratio, "ratio", LORA_OVER_FULL))
    return found


def _entry(figure: str, value: float | None, unit: str, bar: float) -> Entry:
    name = f"gpu, {MODEL} on one {GPU}, rows of {LENGTH:,} tokens, {figure}"
    return measured(name if value is not None else f"{name} {NOT_RUN}", value, unit, COMMAND, at_least=bar)
