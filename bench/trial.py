"""One trial, in the process that `bench.training` starts for it: `python -m bench.trial '{"tool": "ours", ...}'`.

Prints the result as the last line of its standard output, as JSON.
"""

import json
import sys

import torch

from bench.clock import Clock, reached, tokens_per_s
from bench.recipe import Trial, material_of
from bench.tools import TOOLS


def run_trial(trial: Trial) -> dict[str, object]:
    """Train, and say how long the target took (None: not reached), and how many tokens per second went through."""
    torch.set_num_threads(1)
    material = material_of(trial)
    clock = Clock(trial, material)
    TOOLS[trial.tool](clock)
    end = reached(clock.checks, trial.target_loss)
    return {
        "seconds_to_loss": end.seconds if end else None,
        "steps_to_loss": end.step if end else None,
        "tokens_per_s": tokens_per_s(clock.checks, material.train_tokens, clock.steps_per_epoch),
    }


if __name__ == "__main__":
    print(json.dumps(run_trial(Trial(**json.loads(sys.argv[1])))))
