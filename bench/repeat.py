"""Run the commands of kept records again, and keep their new records in the place of the old ones.

    python -m bench.repeat                                   # all of them: one to two hours on two cores
    python -m bench.repeat 2.1_lora_finetuning 2.2_lora_finetuning_with_ddp/run_0_cpu_x2

One after the other, unattended, on a machine that does nothing else. A run that fails leaves its old record where it
is, and is named at the end. Left out are records of notebooks (`make notebooks` runs them, `make record` keeps them),
runs on virtual hosts (`python -m tests.network.network_trial`), and those below docs (`python docs/measure.py`).
"""

import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

from assets.siblings import TORCHRUN
from bench.run_record import keep_record
from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.base.run_folders import folder_named
from common.records import store
from common.records.store import RECORD_NAME, Record, load_record, words_of_command
from common.runtime.launchers import stream_command

LOOKED_AT_S, BUSY_PERCENT = 5.0, 15.0
NOTEBOOK = "the notebook"
# what stands for a launcher's program, by this Python
PROGRAMS = {"torchrun": ["-m", "torch.distributed.run"], "accelerate": ["-m", "accelerate.commands.accelerate_cli"]}
# commands that a record may have run here: they start a workflow of its run folder
OF_A_FOLDER = re.compile(
    rf"(python|torchrun --nproc_per_node \d+|{TORCHRUN.strip()}"
    r"|accelerate launch --config_file my_accelerate_config\.yaml) my_workflow_\w+\.py( .*)?"
)


def records_below(folders: Sequence[str]) -> dict[Path, Record]:
    """Return the kept records by path: those below some folders, each of which must have one, or all."""
    found: dict[Path, Record] = {}
    for folder in folders or [str(REPOSITORY)]:
        place = folder_named(Path(folder))
        paths = [path for path in store.kept_files() if path.is_relative_to(place)]
        if not paths:
            raise BadInputError(f"There is no kept record below {folder}: pass a technique's folder or a run folder.")
        found |= dict(store.records_in(paths))
    return found


def is_repeatable(record: Record) -> bool:
    """Return whether a record's command alone makes the run: not a notebook's, nor that of one host of several."""
    return record["command"] != NOTEBOOK and not record["config"].get("link")


def check_quiet() -> None:
    """Refuse to measure beside other work."""
    busy = psutil.cpu_percent(interval=LOOKED_AT_S)
    if busy > BUSY_PERCENT:
        raise BadInputError(
            f"This machine's processors were {busy:.0f} % busy in the last {LOOKED_AT_S:g} s, and times are measured "
            "without other work: end it, and start again."
        )


def repeat(record: Record) -> Path:
    """Run a record's command in its run folder, and keep the new record; return where.

    Raises:
        RuntimeError: the run failed, or left no new record of this name.
        BadInputError: its record is none to keep, or its command starts anything but a workflow of its folder.
    """
    if not OF_A_FOLDER.fullmatch(record["command"]):
        raise BadInputError(f"{record['command']!r} starts no workflow of {record['run_folder']}: remove the record.")
    begins = datetime.now(UTC).isoformat(timespec="seconds")
    program, *words = words_of_command(record)
    folder = REPOSITORY / record["run_folder"]
    stream_command([sys.executable, *PROGRAMS.get(program, []), *words], cwd=folder)
    results = folder / "results" / record["run_name"]
    if load_record(results / RECORD_NAME)["started_at"] < begins:
        raise RuntimeError(f"{results} is of an earlier run: this one wrote elsewhere.")
    return keep_record(results)


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    parser = OneSentenceParser(prog="python -m bench.repeat", description=__doc__)
    parser.add_argument("folders", nargs="*", help="technique folders or run folders; without any, all records")
    records = records_below(parser.parse_args().folders)
    commands = {path: record for path, record in records.items() if is_repeatable(record)}
    check_quiet()
    failed = []
    for number, (path, record) in enumerate(commands.items(), 1):
        print(f"== {number} of {len(commands)}: {record['run_folder']}: {record['command']}", flush=True)
        try:
            repeat(record)
        except (RuntimeError, BadInputError) as error:
            failed.append(f"{path.relative_to(REPOSITORY)}: {error}")
    for path in sorted(records.keys() - commands.keys()):
        print(f"left out: {path.relative_to(REPOSITORY)}")
    said = "\n".join(f"FAILED: {line}" for line in failed)
    print(said or f"{len(commands)} records are new; `make tables` renders them")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
