"""What a slow network costs a step across machines, and what sending while the backward pass goes on gives back.

    python -m common.network_trial                      two virtual hosts, links not limited and held to 100 Mbit/s
    python -m common.network_trial --mbit 100 --delay_ms 50 --steps 60
Every run is the folder's own, cut to some steps, with its global batch; each keeps its record in the folder's results.
Needs root, and for figures a quiet machine with a core for each host.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from common.base.command_line import exit_with
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.records.store import RECORD_NAME, Record, load_record
from common.reporting.loops import EXCHANGES, step_s
from common.runtime.rendezvous import PORT
from common.runtime.virtual_hosts import VirtualNetwork, virtual_network

WORKFLOW = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2" / "my_workflow_summarization_machines.py"
HOSTS, STEPS, SLOW_MBIT = 2, 30, 100.0
BAR = 1.5
"""How many times as fast the best way must be as sending after the backward pass, at `SLOW_MBIT`."""
RUN_S = 600.0
"""How long one run may take."""
SHORT = ("--eval_steps", "0.5", "--validation_rows", "32", "--test_rows", "4", "--max_new_tokens", "8", "--num_beams",
         "1", "--report_to", "none")  # fmt: skip
"""What surrounds the steps, cut short: it is not measured."""


@dataclass(frozen=True)
class Link:
    """What joins a host to the others."""

    mbit: float
    """In each direction, in 10^6 bits per second; 0 = not limited."""
    delay_ms: float
    """Of each packet, on its way from one host."""

    def __str__(self) -> str:
        """For a reader."""
        rate = f"{self.mbit:g} Mbit/s" if self.mbit else "not limited"
        return f"{rate}, {self.delay_ms:g} ms" if self.delay_ms else rate

    @property
    def name(self) -> str:
        """For a folder."""
        return str(self).replace(" Mbit/s", "mbit").replace(" ms", "ms").replace(", ", "-").replace(" ", "-")


def measure(link: Link, exchanges: Sequence[str], steps: int, results_root: Path) -> list[Record]:
    """The records of one run each, on hosts that such links join."""
    with virtual_network(HOSTS, link.mbit, link.delay_ms) as network:
        return [_run(network, link, exchange, steps, results_root) for exchange in exchanges]


def _run(network: VirtualNetwork, link: Link, exchange: str, steps: int, results_root: Path) -> Record:
    """One run, and what it said in `host0.log` and so on of its results.

    Raises:
        RuntimeError: a host failed, or took too long.
    """
    name = f"machines-{exchange}-{link.name}"
    logs = results_root / "results" / f"{name}-logs"
    logs.mkdir(parents=True, exist_ok=True)
    overrides = ["--max_steps", str(steps), "--gradient_exchange", exchange, "--link", str(link), "--run_name", name]
    started = [
        host.start(
            [
                sys.executable, WORKFLOW.name, "--master", f"{network.hosts[0].address}:{PORT}",
                "--machines", str(HOSTS), "--machine_rank", str(host.number), *SHORT, *overrides,
                "--results_root", str(results_root),
            ],
            logs / f"host{host.number}.log", {"OMP_NUM_THREADS": "1"}, WORKFLOW.parent,
        )
        for host in network.hosts
    ]  # fmt: skip
    deadline_s = time.monotonic() + RUN_S
    codes = [process.wait(max(0.0, deadline_s - time.monotonic())) for process in started]
    if any(codes):
        raise RuntimeError(f"The run {name} ended with the exit codes {codes}: {logs} has what each host said.")
    return load_record(results_root / "results" / name / RECORD_NAME)


def gain(records: Sequence[Record]) -> float:
    """How many times as fast the best way is as sending after the backward pass, of runs over one link."""
    (after,) = (step_s(record) for record in records if record["config"]["gradient_exchange"] == "after")
    return after / min(map(step_s, records))


def table(records: Sequence[Record]) -> str:
    """One line for each run."""
    rows = [[record["config"]["link"], record["config"]["gradient_exchange"], step_s(record)] for record in records]
    return tabulate(rows, ["link", "gradients are sent", "s per step"], floatfmt=".3f")


def main() -> None:
    """`python -m common.network_trial`: measure, print, and exit with 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[0.0, SLOW_MBIT], help="links to try; 0: not limited")
    parser.add_argument("--delay_ms", type=float, default=0.0, help="delay of each packet on every link, in ms")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each run")
    parser.add_argument("--results_root", type=Path, default=WORKFLOW.parent, help="folder that takes results/")
    options = parser.parse_args()
    holds = True
    try:
        for mbit in options.mbit:
            records = measure(Link(mbit, options.delay_ms), tuple(EXCHANGES), options.steps, options.results_root)
            print(table(records))
            print(f"the best way is {gain(records):.2f} times as fast as sending after the backward pass\n")
            if mbit == SLOW_MBIT:
                holds = gain(records) >= BAR
    except BadInputError as mistake:
        exit_with(mistake)
    if not holds:
        print(f"error: at {SLOW_MBIT:g} Mbit/s that should be at least {BAR:g}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
