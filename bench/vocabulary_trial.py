"""Measures one tool's steps, in bytes and seconds, in the process that `bench.vocabulary` or `bench.training` starts.

It says `turn` before each step that is timed, and takes it once it is told to: other tools' steps come between. Its
last line is the result, as JSON.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field

import torch

from bench.clock import Clock
from bench.recipe import Trial, material_of
from bench.tools import TOOLS
from common.runtime.memory_tracker import MemoryTracker

WARM_UP_STEP, COUNTED_STEP = 1, 2
"""The optimizer has its states after the first. Bytes are counted in the second, which takes longer by that."""
TURN = "turn"


@dataclass
class StepMeter(Clock):
    """Counts the bytes of tensors in one step, and the seconds of those after it.

    Attributes:
        peak_bytes: The most that weights, gradients, optimizer states and all that a step makes take at once; without
            the batch itself.
        seconds: Of each timed step, from its batch to the optimizer's update.
    """

    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    tracker: MemoryTracker | None = None

    def step_begins(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin to count bytes, or wait for this tool's turn."""
        if self.step + 1 == COUNTED_STEP:
            self.tracker = MemoryTracker(vocab_size=0, rounded_to=1)
            states = [value for state in optimizer.state.values() for value in state.values()]
            for tensor in (*model.parameters(), *model.buffers(), *filter(torch.is_tensor, states)):
                self.tracker.add(tensor, "weights")
            self.tracker.__enter__()
        if self.step + 1 > COUNTED_STEP:
            print(TURN, flush=True)
            os.read(0, 1)  # a byte of standard input
            self.start_s = time.perf_counter()

    def step_done(self, model: torch.nn.Module) -> bool:
        """Whether this was the last step."""
        self.step += 1
        if self.step == COUNTED_STEP:
            self.tracker.__exit__(None, None, None)
            self.peak_bytes = max(sum(parts.values()) for parts in self.tracker.timeline.values())
            self.tracker = None
        if self.step > COUNTED_STEP:
            self.seconds.append(time.perf_counter() - self.start_s)
        return self.step >= self.trial.most_steps


def measure(trial: Trial) -> dict[str, object]:
    """Train for the trial's steps by its tool; its peak in bytes, and the seconds of each timed step."""
    torch.set_num_threads(1)
    meter = StepMeter(trial, material_of(trial))
    TOOLS[trial.tool](meter)
    return {"peak_bytes": meter.peak_bytes, "seconds": meter.seconds}


if __name__ == "__main__":
    print(json.dumps(measure(Trial(**json.loads(sys.argv[1])))), flush=True)
