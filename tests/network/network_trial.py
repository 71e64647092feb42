"""What a slow network costs a step across machines, and what is won back by sending during the backward pass.

    python -m tests.network.network_trial

Two virtual hosts are joined by links that are not limited, and by links of 100 Mbit/s. Every run is 3.2's own, cut to
some steps, with its global batch; each leaves its record in the results of 3.2's run_0_cpu_x2. It needs root, and to
measure time a quiet machine with a core for each host.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from bench.tables.summarization import EXCHANGES
from common.base.command_line import refused_in_one_sentence
from common.base.paths import REPOSITORY
from common.records.store import RECORD_NAME, Record, load_record
from common.reporting.rows import step_s
from tests.network.virtual_hosts import virtual_network
from tests.network.workers import Place

WORKFLOW = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2" / "my_workflow_summarization_machines.py"
SLOW_MBIT = 100
RUN_S = 600  # longest time that one run may take
# evaluation is cut short, as it is not measured
SHORT = ("--max_steps", "30", "--eval_steps", "0.5", "--validation_rows", "32", "--test_rows", "4", "--max_new_tokens",
         "8", "--num_beams", "1", "--report_to", "none")  # fmt: skip


def measure(mbit: int, results_root: Path) -> list[Record]:
    """Return the record of one run for each exchange of gradients, on hosts that such links join; 0: not limited."""
    link, records = f"{mbit} Mbit/s" if mbit else "not limited", []
    for exchange in EXCHANGES:
        name = f"machines-{exchange}-{link.replace(' Mbit/s', 'mbit').replace(' ', '-')}"
        named = ("--gradient_exchange", exchange, "--link", link, "--run_name", name)
        with virtual_network(2, mbit) as network, tempfile.TemporaryDirectory() as logs:
            place = Place(Path(logs), WORKFLOW, (*SHORT, *named), network, disk=results_root)
            place.start_all()
            place.finish_well(RUN_S)
        records.append(load_record(results_root / "results" / name / RECORD_NAME))
    return records


def gain(records: Sequence[Record]) -> float:
    """Return the speed-up of the best exchange over sending after the backward pass, of runs over one link."""
    (after,) = (step_s(record) for record in records if record["config"]["gradient_exchange"] == "after")
    return after / min(map(step_s, records))


def table(records: Sequence[Record]) -> str:
    """Return a table with one line for each run, and what the best exchange gains."""
    rows = [[record["config"]["link"], record["config"]["gradient_exchange"], step_s(record)] for record in records]
    drawn = tabulate(rows, ["link", "gradients are sent", "s per step"], floatfmt=".3f")
    return f"{drawn}\nthe best exchange is {gain(records):.2f} times as fast as sending after the backward pass\n"


@refused_in_one_sentence()
def main() -> None:
    """Measure, and print."""
    for mbit in (0, SLOW_MBIT):
        print(table(measure(mbit, WORKFLOW.parent)))


if __name__ == "__main__":
    main()
