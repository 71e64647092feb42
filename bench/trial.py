"""One trial, in the process that `bench.training` starts for it: `python -m bench.trial '{"tool": "ours", ...}'`.

Prints the result as the last line of its standard output, as JSON.
"""

import json
import sys

import torch

from bench.clock import Clock, reached, tokens_per_s
from bench.recipe import BATCH_SIZE, Trial, load_material
from bench.tools import TOOLS


def run_trial(trial: Trial) -> dict[str, object]:
    """Train, and say how long the target took (None: not reached), and how many tokens per second went through."""
    torch.set_num_threads(1)
    material = load_material(trial.run_config())
    clock = Clock(trial, material)
    TOOLS[trial.tool](clock)
    tokens_per_epoch = sum(len(row["input_ids"]) for row in material.train)
    end = reached(clock.checks, trial.target_loss)
    return {
        "seconds_to_loss": end.seconds if end else None,
        "steps_to_loss": end.step if end else None,
        "tokens_per_s": tokens_per_s(clock.checks, tokens_per_epoch, -(-len(material.train) // BATCH_SIZE)),
    }


if __name__ == "__main__":
    print(json.dumps(run_trial(Trial(**json.loads(sys.argv[1])))))
