"""The table of what went wrong on purpose: each fault, how it ended, and where a test sees to it."""

import json
from pathlib import Path

import pandas as pd

from common.base.paths import REPOSITORY
from common.records.store import Record

OUTCOMES = REPOSITORY / "tests" / "faults" / "outcomes.json"
"""What `make soak` measured: a list of `fault`, `technique`, `outcome`, `noticed_s`, `ended_s`, `lost_steps`."""
FAULTS = {
    1: "a rank is killed (SIGKILL)",
    2: "killed while a checkpoint is written, at any write or rename",
    3: "killed while an asynchronous save goes on",
    4: "a checkpoint is cut short",
    5: "one byte of a checkpoint is another",
    6: "the state of the random numbers is missing",
    7: "the disk is full",
    8: "going on with another number of ranks",
    9: "stopped and resumed: is it exact?",
    10: "one rank raises an error",
    11: "a rank is stopped (SIGSTOP)",
    12: "a rank sleeps outside of any exchange",
    13: "the port is taken",
    14: "a wrong master's address",
    15: "two runs into one results folder",
    16: "a results folder that cannot be written",
    17: "rows without keys, or with wrong roles",
    18: "an empty answer",
    19: "rows too long to leave an answer",
    20: "not UTF-8, or cut JSONL",
    21: "an id twice",
    22: "a test row in the training rows",
    23: "a loss that is no number, on one rank",
    24: "out of memory",
    25: "ended by the kernel's memory killer",
    26: "a wrong device map",
    27: "an unknown model, or offline and not cached",
    28: "a notebook's cell is interrupted",
    29: "the kernel, launcher or agent is killed",
    30: "a kernel that dies or hangs under papermill",
    31: "a hostile pickle in a checkpoint",
    32: "a model folder with code of its own",
    33: "a run name that leads elsewhere",
    34: "an error with a token in it",
}
ELSEWHERE = (
    (3, "all", "cannot be: every save is done before the next step", "common/training/checkpoints.py"),
    (11, "single", "cannot be seen: nobody else is there; SIGCONT lets it go on", "common/runtime/watch.py"),
    (13, "machines", "refused; launchers look for another", "tests/network/test_machines.py"),
    (14, "machines", "refused in time, with what to try", "tests/network/test_machines.py"),
    (26, "mp, pp", "refused before anything is loaded", "tests/unit/test_device_maps.py"),
    (27, "all", "refused at once, with the command that fetches it", "tests/unit/test_models.py"),
)
"""Faults whose tests keep no figures: technique, outcome, and where to look."""


def faults(_: list[Record]) -> pd.DataFrame:
    """One line per fault and technique; seconds count from the fault on."""
    measured = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else []
    if not measured:
        return pd.DataFrame()
    keys = ("fault", "technique", "outcome", "noticed_s", "ended_s", "lost_steps", "test")
    others = [dict(zip(keys, (*line[:3], None, None, None, line[3]), strict=True)) for line in ELSEWHERE]
    return pd.DataFrame([_line(row) for row in sorted([*measured, *others], key=lambda row: row["fault"])])


def _line(row: dict[str, object]) -> dict[str, str]:
    test = Path(str(row["test"])).name
    return {
        "": str(row["fault"]),
        "Fault": FAULTS[int(str(row["fault"]))],
        "Technique": str(row["technique"]),
        "Outcome": str(row["outcome"]),
        "Noticed (s)": _seconds(row["noticed_s"]),
        "Ended (s)": _seconds(row["ended_s"]),
        "Steps lost": "" if row["lost_steps"] is None else str(row["lost_steps"]),
        "Where": f"[{test}]({row['test']})",
    }


def _seconds(value: object) -> str:
    return "" if value is None else f"{value:.1f}"


TABLES = {"faults": faults}
