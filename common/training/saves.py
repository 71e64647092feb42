"""When a run saves a full state, and how large it is."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from common.base.asked_to_save import is_asked_to_save
from common.base.errors import AskedToEndError
from common.base.run_config import RunConfig
from common.hardware.devices import size_text
from common.models.shards import global_numel
from common.planning.host_memory import LITTLE_BYTES
from common.planning.job import OPTIMIZER_BYTES

MOST_FULL_STATES, MOST_BEST_WEIGHTS = 3, 2
"""On the disk at the same time (`checkpoints.to_keep`): two full states and the one that is written; the best weights,
and those that were the best when the newest full state was written."""
MEET_S = 20.0
"""At most so many seconds lie between two meetings of the ranks, or one step where that takes longer."""


# -- how large


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of a checkpoint on the disk: of the best weights alone, and of a full state, with the optimizer."""

    weights_bytes: int
    state_bytes: int


def checkpoint_size(run: RunConfig, model_weights: Iterable[torch.Tensor]) -> CheckpointSize:
    """Return the size of `run`'s checkpoints; `model_weights`: all of the model's, also where a rank holds parts.

    A checkpoint has what is trained alone.
    """
    trained = [weight for weight in model_weights if weight.requires_grad]
    saved_bytes = sum(map(_whole_bytes, trained))
    # DeepSpeed's bf16 has momentum, variance and a copy of the weights in fp32
    per_weight = 3 * 4 if run.parallelism.uses_deepspeed else OPTIMIZER_BYTES.get(run.optim)
    # None: two states as wide as the weight, as Adam has
    states = (2 * _whole_bytes(each) if per_weight is None else global_numel(each) * per_weight for each in trained)
    return CheckpointSize(saved_bytes, saved_bytes + math.ceil(sum(states)))


def _whole_bytes(weight: torch.Tensor) -> int:
    return global_numel(weight) * weight.element_size()


# -- when


class SaveSchedule(TrainerCallback):
    """Asks for a full state after each `save_steps` steps, or where more minutes than allowed would be lost.

    A SIGUSR1 also asks for one, after which the run ends.

    Ranks have clocks of their own, may get the signal at different times or not at all, and must save at the same step.
    They meet after 1, 2, 4, 8 ... steps since the last full state, but at most 20 s apart, after each validation and
    after the last step: they turn the minutes that are left into steps, at the slowest rank's pace, and hear whether
    one was asked.

    Attributes:
        is_asked: Whether a rank was asked to save, as far as all of them know.
        met_step: The step after which the ranks met last.
        saves_at_end: Without save_steps: whether a full state is saved at the end of training.
        due_step: Without save_steps: the step after which the next one is to be saved, as far as that is known.
    """

    def __init__(self, max_lost_minutes: float) -> None:
        """Without save_steps a full state is due before `max_lost_minutes` of training would be lost."""
        self.max_lost_s, self.saves_at_end = 60 * max_lost_minutes, False
        self.is_asked, self.pace_s = False, 0.0
        self.saved(0)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begin to count.

        Raises:
            AskedToEndError: A rank was asked to save before the first step.
        """
        self.saved(state.global_step)  # what this run resumes from is saved already
        if any(gather_object([is_asked_to_save()])):
            raise AskedToEndError(
                f"ended before step {state.global_step + 1} of training, as asked by SIGUSR1: nothing was to be saved."
            )

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step >= self.next_meeting or control.should_training_stop:
            self.meet(state)
        control.should_save = control.should_save or self.is_due(state, control)

    def is_due(self, state: TrainerState, control: TrainerControl) -> bool:
        """Return whether a full state is to be saved after the step that was taken last."""
        if self.is_asked:
            return True
        if state.save_steps:
            return control.should_training_stop or state.global_step % state.save_steps == 0
        return state.global_step >= self.due_step or (control.should_training_stop and self.saves_at_end)

    def meet(self, state: TrainerState) -> None:
        """Have the ranks agree when the next full state is due and when they meet again; called on every rank."""
        now_s, step = time.perf_counter(), state.global_step
        if step > self.met_step:
            self.pace_s = (now_s - self.met_s) / (step - self.met_step)
        of_ranks = gather_object([(now_s - self.saved_s, self.pace_s, is_asked_to_save())])
        lost_s, pace_s, self.is_asked = (max(of_each) for of_each in zip(*of_ranks, strict=True))
        self.due_step = step + max(0, math.floor((self.max_lost_s - lost_s) / pace_s))
        self.next_meeting = step + max(1, min(step - self.saved_step, math.floor(MEET_S / pace_s)))
        self.met_step, self.met_s = step, now_s

    def saved(self, step: int) -> None:
        """Count minutes from now on, as a full state is saved."""
        self.saved_step, self.met_step, self.next_meeting = step, step, step + 1
        self.saved_s = self.met_s = time.perf_counter()
        self.due_step = math.inf


# -- what is said before


def describe_saves(run: RunConfig, state: TrainerState, size: CheckpointSize, waits: bool = True) -> str:
    """Return one line: how often a run saves, in the steps that `state` counts, and what that takes on the disk.

    `waits`: whether training does not go on meanwhile.
    """
    full, weights = size_text(size.state_bytes), size_text(size.weights_bytes)
    validations = math.ceil(state.max_steps / state.eval_steps)
    if state.save_steps:
        count = math.ceil(state.max_steps / state.save_steps)
        states = f"{count} full states ({full} each), one after every {state.save_steps:g} steps"
    else:
        at_end = ", and one at the end" if size.state_bytes <= LITTLE_BYTES else ""
        states = f"a full state ({full}) every {run.max_lost_minutes:g} minutes{at_end}"
    on_disk = size_text(MOST_FULL_STATES * size.state_bytes + MOST_BEST_WEIGHTS * size.weights_bytes)
    return (
        f"saves: {states}; the best weights ({weights}) after at most {validations} validations"
        f"{'' if waits else '; training goes on meanwhile'}; {on_disk} on the disk at most"
    )
