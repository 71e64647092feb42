"""Where the time of a step on a GPU goes, by kernel and by the shapes of what it is given."""

from collections.abc import Callable
from typing import Any

from torch.profiler import profile, schedule
from transformers import TrainerCallback

from bench.gpu_trial import GPU_SCALE, Scale, Trial, take_steps, trial_started
from bench.levers import pulled
from common.checks.measured_steps import StepClock
from common.hardware.devices import Gpu

MOST_ROWS = 40
"""Of the table, whose first ones took longest."""
ONE_STEP = schedule(wait=1, warmup=1, active=1, repeat=1)
"""The third: what is done once is over."""


class AfterEachStep(TrainerCallback):
    """Calls a function at the end of each optimizer step."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def on_step_end(self, *_: object, **__: object) -> None:
        """Call it."""
        self.call()


def profiled(trial: Trial, gpu: Gpu, scale: Scale = GPU_SCALE) -> dict[str, Any]:
    """Return PyTorch's table of one step's kernels (on a CPU of its operators), the longest first."""
    plan = trial.planned(gpu, scale)
    run = trial.run(scale).changed_to(per_device_train_batch_size=plan.job.batch.rows)
    with pulled(trial.levers), trial_started(run) as log, profile(schedule=ONE_STEP, record_shapes=True) as profiler:
        wait_for_device = StepClock(log.rank.devices)
        take_steps(log, wait_for_device, AfterEachStep(profiler.step))
    by = "self_cpu_time_total" if log.rank.device == "cpu" else "self_device_time_total"
    table = profiler.key_averages(group_by_input_shape=True).table(sort_by=by, row_limit=MOST_ROWS)
    return {"technique": trial.technique, "name": trial.name, "table": table.splitlines()}
