"""Training steps of an 8B model on the GPU here: `python -m bench.gpu_trial` keeps what `python -m bench gpu` judges.

Random weights of the real shape, rows of 4,096 tokens of which all but the first are learnt, and the run folder's own
trainer. Memory and time of its steps stand beside the plan's. Each variant has a process of its own, because Liger's
kernels stay in the model's classes. One that fails is named, and the others go on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.planner_points import gpu_here
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.checks.preflight import StepClock, planned_step_s, trainer_of_longest_batch
from common.checks.tried_rows import batch_of_length, rows_of_length
from common.hardware.devices import Gpu, forget_peak, read_memory
from common.planning.plans import plan_run
from common.runtime.rank import rank_started
from common.runtime.world import Rank
from common.training.results import model_flops_utilization, training_flops

TRIALS_PATH = REPOSITORY / "bench" / "gpu_trials.json"
MODEL, LENGTH, ROWS = "llama-3.1-8b", 4096, 3
"""Rows of a micro-batch: four may not fit in 141 GB with full fine-tuning."""
FOLDERS = {"full": "2.4_full_finetuning/run_2_h200_141g_x1", "lora": "2.1_lora_finetuning/run_2_h200_141g_x1"}
STEPS = 5
"""Of the optimizer; the first one also warms up, and is not timed."""


@dataclass(frozen=True)
class Trial:
    """A variant of training: its technique, and the settings that differ from its folder's."""

    technique: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> RunConfig:
        """The run whose steps these are; full fine-tuning in bf16 without fp32 weights, so that `ROWS` fit."""
        own = {"precision": "bf16", "gradient_accumulation_steps": 1} if self.technique == "full" else {}
        asked = {"model": MODEL, "weights": "random", "max_length": LENGTH, "per_device_train_batch_size": ROWS}
        without_evaluation = {"report_to": "none", "independent_judge": "none"}
        folder = literal_of(REPOSITORY / FOLDERS[self.technique])
        return replace(folder, **asked, **own | self.settings, **without_evaluation)


LIGER, COMPILED = {"use_liger_kernel": True}, {"torch_compile": True}
TRIALS = (
    Trial("lora", "as it comes"),
    Trial("lora", "Liger's kernels", LIGER),
    Trial("lora", "compiled", COMPILED),
    Trial("full", "as it comes"),
    Trial("full", "Liger's kernels", LIGER),
    Trial("full", "compiled", COMPILED),
    Trial("full", "compiled, 4 micro-batches a step", {**COMPILED, "gradient_accumulation_steps": 4}),
)


def measure(trial: Trial, gpu: Gpu) -> dict[str, Any]:
    """Return a trial's record: its steps' times, tokens per second, MFU and peak memory, beside the plan's."""
    run = trial.run
    plan, rows = plan_run(run, batch_of_length(run, LENGTH), gpu), rows_of_length(run, LENGTH)
    with rank_started(run) as rank, tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of_longest_batch(run, rows, {}, rank, Path(folder), STEPS)
        found = _timed(run, trainer, rank, gpu)
    return {
        **asdict(trial),
        **found,
        "planned_step_time_s": planned_step_s(run, plan),
        "planned_gib": plan.fullest[0].allocated_gib,
        "gpu": gpu.name,
        "torch": torch.__version__,
    }


def _timed(run: RunConfig, trainer: Any, rank: Rank, gpu: Gpu) -> dict[str, Any]:
    clock = StepClock(rank.devices)
    trainer.add_callback(clock)
    forget_peak(rank.device)
    trainer.train()
    tokens = run.effective_batch_size * LENGTH
    weights = list(trainer.model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    flops = training_flops(trained, sum(weight.numel() for weight in weights) - trained)
    tokens_per_s = tokens / clock.step_time_s
    return {
        "tokens": tokens,
        "step_time_s": clock.step_time_s,
        "tokens_per_s": tokens_per_s,
        "mfu": model_flops_utilization(tokens_per_s * flops["flops_per_token"], gpu, run.compute_dtype),
        "peak_gib": read_memory(rank.device).peak_gib,
    }


def keep(records: Sequence[dict[str, Any]], path: Path = TRIALS_PATH) -> None:
    """Put records into the file at `path`, in place of older ones of the same trial and GPU."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    by = {(each["technique"], each["name"], each["gpu"]): each for each in [*kept, *records]}
    path.write_text(json.dumps(list(by.values()), indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_trial", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--technique", choices=FOLDERS, help="one of them; without it, both")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=TRIALS_PATH, help="the file of records, which is added to")
    options = parser.parse_args(arguments)
    try:
        gpu = gpu_here()
    except BadInputError as mistake:
        parser.exit(2, f"error: {mistake}\n")
    if options.one is not None:
        print(json.dumps(measure(TRIALS[options.one], gpu)))
        return
    for number, trial in enumerate(TRIALS):
        if options.technique in (None, trial.technique):
            try:
                record = _in_own_process(number)
            except RuntimeError as failure:
                print(f"{trial.technique}, {trial.name}: {failure}", flush=True)
                continue
            keep([record], options.out)
            print(line(record), flush=True)


def line(record: dict[str, Any]) -> str:
    """A record for a reader."""
    return (
        f"{record['technique']}, {record['name']}: {record['tokens_per_s']:,.0f} tokens/s, MFU {record['mfu']:.1%}; "
        f"{record['step_time_s']:.3f} s a step (planned {record['planned_step_time_s']:.3f}), "
        f"{record['peak_gib']:.1f} GiB (planned {record['planned_gib']:.1f})"
    )


def _in_own_process(number: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.gpu_trial", "--one", str(number)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
