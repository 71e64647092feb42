"""What a slow network costs a step across machines, and what is won back by sending during the backward pass.

    python -m common.network_trial                      two virtual hosts, links not limited and held to 100 Mbit/s
    python -m common.network_trial --mbit 100 --delay_ms 50 --steps 60
Every run is the folder's own, cut to some steps, with its global batch; each leaves its record in the folder's results.
It needs root, and to measure time a quiet machine with a core for each host.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from common.base.command_line import refused_in_one_sentence
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.base.torchrun import nodes_command
from common.records.store import RECORD_NAME, Record, load_record
from common.reporting.rows import step_s
from common.reporting.summarization import EXCHANGES
from common.runtime.virtual_hosts import VirtualHost, VirtualNetwork, virtual_network

WORKFLOW = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2" / "my_workflow_summarization_machines.py"
HOSTS, STEPS, SLOW_MBIT = 2, 30, 100.0
BAR = 1.5  # least speed-up of the best exchange over sending after the backward pass, at `SLOW_MBIT`
RUN_S = 600.0  # longest time that one run may take
# evaluation is cut short, as it is not measured
SHORT = ("--eval_steps", "0.5", "--validation_rows", "32", "--test_rows", "4", "--max_new_tokens", "8", "--num_beams",
         "1", "--report_to", "none")  # fmt: skip


def link_name(mbit: float, delay_ms: float) -> str:
    """Return what a link is called: `100 Mbit/s, 50 ms`, or `not limited`.

    `mbit` is its rate in each direction in 10^6 bit/s (0 = not limited), `delay_ms` the delay of each packet.
    """
    rate = f"{mbit:g} Mbit/s" if mbit else "not limited"
    return f"{rate}, {delay_ms:g} ms" if delay_ms else rate


def measure(mbit: float, delay_ms: float, exchanges: Sequence[str], steps: int, results_root: Path) -> list[Record]:
    """Return the record of one run for each exchange of gradients, on hosts that such links join."""
    link = link_name(mbit, delay_ms)
    with virtual_network(HOSTS, mbit, delay_ms) as network:
        return [_run(network, link, exchange, steps, results_root) for exchange in exchanges]


def _run(network: VirtualNetwork, link: str, exchange: str, steps: int, results_root: Path) -> Record:
    """Run the workflow on every host, whose output goes to `host0.log` and so on, and return the record.

    Raises:
        RuntimeError: A host failed, or took too long.
    """
    in_folder_name = link.replace(" Mbit/s", "mbit").replace(" ms", "ms").replace(", ", "-").replace(" ", "-")
    name = f"machines-{exchange}-{in_folder_name}"
    logs = results_root / "results" / f"{name}-logs"
    logs.mkdir(parents=True, exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes_command(HOSTS, 1, network.hosts[0].address)[1:]]
    command = [
        WORKFLOW.name, "--devices", str(HOSTS), "--nodes", str(HOSTS), "--max_steps", str(steps),
        "--gradient_exchange", exchange, "--link", link, "--run_name", name, *SHORT,
        "--results_root", str(results_root),
    ]  # fmt: skip
    started = [
        host.start(
            [*torchrun, *own_address(host), *command], logs / f"host{host.number}.log", {"OMP_NUM_THREADS": "1"},
            WORKFLOW.parent,
        )
        for host in network.hosts
    ]  # fmt: skip
    deadline_s = time.monotonic() + RUN_S
    codes = [process.wait(max(0.0, deadline_s - time.monotonic())) for process in started]
    if any(codes):
        raise RuntimeError(f"The run {name} ended with the exit codes {codes}: {logs} has the output of each host.")
    return load_record(results_root / "results" / name / RECORD_NAME)


def own_address(host: VirtualHost) -> list[str]:
    """Return torchrun's options that say which host this is, where its name may not lead to it."""
    return ["--local_addr", host.address, "--rdzv_conf", f"is_host={int(host.number == 0)}"]


def gain(records: Sequence[Record]) -> float:
    """Return the speed-up of the best exchange over sending after the backward pass, of runs over one link."""
    (after,) = (step_s(record) for record in records if record["config"]["gradient_exchange"] == "after")
    return after / min(map(step_s, records))


def table(records: Sequence[Record]) -> str:
    """Return a table with one line for each run."""
    rows = [[record["config"]["link"], record["config"]["gradient_exchange"], step_s(record)] for record in records]
    return tabulate(rows, ["link", "gradients are sent", "s per step"], floatfmt=".3f")


@refused_in_one_sentence()
def main() -> None:
    """Measure, print, and exit with 1 where the bar is missed."""
    parser = OneSentenceParser(description=__doc__)
    parser.add_argument("--mbit", type=float, nargs="+", default=[0.0, SLOW_MBIT], help="links to try; 0: not limited")
    parser.add_argument("--delay_ms", type=float, default=0.0, help="delay of each packet on every link, in ms")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each run")
    parser.add_argument("--results_root", type=Path, default=WORKFLOW.parent, help="folder that takes results/")
    options = parser.parse_args()
    gains = {}
    for mbit in options.mbit:
        records = measure(mbit, options.delay_ms, tuple(EXCHANGES), options.steps, options.results_root.absolute())
        gains[mbit] = gain(records)
        print(table(records))
        print(f"the best exchange is {gains[mbit]:.2f} times as fast as sending after the backward pass\n")
    if gains.get(SLOW_MBIT, BAR) < BAR:
        sys.exit(f"error: at {SLOW_MBIT:g} Mbit/s that should be at least {BAR:g}")


if __name__ == "__main__":
    main()
