"""How much faster two gloo ranks step than one, as a share of what this machine allows."""

import json
import os
import statistics
import subprocess
import sys
import tempfile

from bench.entries import Entry, measured
from bench.recipe import Technique
from common.base.paths import REPOSITORY
from common.base.torchrun import nodes_command

BARS = {16: 0.85, 64: 0.93}
"""By rows of the global batch: least share of the machine's ceiling."""
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", *nodes_command(1, 2)[1:]]
STEPS = {16: 8, 64: 3}
"""By rows of the global batch: optimizer steps of a turn, about a second."""


def entries(technique: Technique, global_batch_rows: int, turns: int, launches: int) -> list[Entry]:
    """The speed-up, the machine's ceiling, and the first as a share of the second: medians of all turns.

    Both worlds are started `launches` times: of one start all turns may be slower than of the next.
    """
    trial = [technique, str(global_batch_rows), "--turns", str(turns)]
    speedups, ceilings = [], []
    for _ in range(launches):
        one, two = _take_turns(trial, STEPS[global_batch_rows])
        speedups += [one_s / two_s for one_s, two_s in zip(one["step_times_s"], two["step_times_s"], strict=True)]
        ceilings += two["ceilings"]
    shares = [speedup / ceiling for speedup, ceiling in zip(speedups, ceilings, strict=True)]
    name = f"scaling, {technique}, DDP of 2 ranks against 1, global batch {global_batch_rows}"
    command = f"python -m bench scaling --technique {technique} --rows {global_batch_rows}"
    print(f"{name}: shares of the ceiling {', '.join(f'{share:.2f}' for share in sorted(shares))}", file=sys.stderr)
    return [
        measured(f"{name}: steps per second", statistics.median(speedups), "ratio", command),
        measured(f"{name}: the machine's ceiling", statistics.median(ceilings), "ratio", command),
        measured(
            f"{name}: share of the ceiling",
            statistics.median(shares),
            "ratio",
            command,
            at_least=BARS[global_batch_rows],
        ),
    ]


def _take_turns(arguments: list[str], steps: int) -> list[dict[str, list[float]]]:
    """Start one rank and two, which take turns of so many steps; return the figures of both."""
    with tempfile.TemporaryDirectory() as folder:
        trial = ["-m", "bench.scaling_trial", *arguments, "--steps", str(steps), "--folder", folder]
        worlds = [_start([sys.executable, *trial]), _start([*TWO_RANKS, *trial])]
        return [_figures(world) for world in worlds]


def _start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipes)


def _figures(world: subprocess.Popen[str]) -> dict[str, list[float]]:
    said, errors = world.communicate()
    if world.returncode != 0:
        raise RuntimeError(f"{' '.join(world.args)} failed:\n{errors[-3000:]}")
    return json.loads(said.splitlines()[-1])
