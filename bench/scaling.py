"""How much faster two gloo ranks step than one, as a share of what this machine allows."""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

from bench.entries import Entry, measured
from bench.recipe import Technique
from common.base.paths import REPOSITORY

BARS = {16: 0.85, 64: 0.93}
"""By rows of the global batch: least share of the machine's ceiling."""
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
STEPS = {16: 48, 64: 20}


@dataclass(frozen=True)
class Round:
    """One rank, then two, one right after the other."""

    speedup: float
    ceiling: float


def entries(technique: Technique, global_batch_rows: int, rounds: int, steps: int) -> list[Entry]:
    """The speed-up, the machine's ceiling, and the first as a share of the second: medians of the rounds."""
    done = [_round(technique, global_batch_rows, steps) for _ in range(rounds)]
    name = f"scaling, {technique}, DDP of 2 ranks against 1, global batch {global_batch_rows}"
    command = f"python -m bench scaling --technique {technique} --rows {global_batch_rows}"
    speedup, ceiling = (statistics.median(getattr(each, part) for each in done) for part in ("speedup", "ceiling"))
    share = statistics.median(each.speedup / each.ceiling for each in done)
    return [
        measured(f"{name}: steps per second", speedup, "ratio", command),
        measured(f"{name}: the machine's ceiling", ceiling, "ratio", command),
        measured(f"{name}: share of the ceiling", share, "ratio", command, at_least=BARS[global_batch_rows]),
    ]


def _round(technique: Technique, global_batch_rows: int, steps: int) -> Round:
    arguments = [technique, str(global_batch_rows), str(steps)]
    one = _run([sys.executable, "-m", "bench.scaling_trial", *arguments])
    two = _run([*TWO_RANKS, "-m", "bench.scaling_trial", *arguments])
    done = Round(one["step_s"] / two["step_s"], two["ceiling"])
    print(
        f"{technique}, {global_batch_rows} rows: one rank {one['step_s'] * 1e3:.1f} ms, two {two['step_s'] * 1e3:.1f} "
        f"ms; {done.speedup:.2f} times, ceiling {done.ceiling:.2f}",
        file=sys.stderr,
        flush=True,
    )
    return done


def _run(command: list[str]) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])
