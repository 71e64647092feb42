"""The tables of what tests measured: how exactly strategies agree with one device, and how faults end."""

import json
from pathlib import Path

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.specs import TECHNIQUES
from common.records.store import Record
from common.reporting.rows import NOT_RUN

Outcome = dict[str, object]
EQUIVALENCE = REPOSITORY / "tests" / "recipes" / "equivalence.json"
"""What tests/recipes/test_equivalence.py measured: a list of `task`, `strategy`, `technique`, `note`, and the largest
`loss_difference` (relative) and `weight_difference` (absolute), or None where a case was skipped."""
ENDED_FAULTS = REPOSITORY / "tests" / "faults" / "outcomes.json"
"""What `make soak` measured: a list of `fault`, `technique`, `outcome`, `noticed_s`, `ended_s`, `lost_steps`;
of a run that resumes also `lost_minutes`, and the longest wait for one of its saves, `held_up_s`."""
FAMILIES_FILE = REPOSITORY / "tests" / "recipes" / "families.json"
"""What tests/recipes/test_families.py found: a list of `family`, `model_type`, and for each way to train what came of
it."""
LLAMA_CPP_FILE = REPOSITORY / "bench" / "llama_cpp.json"
"""What bench/llama_cpp_answers.py found: `packages`, and `compared`, a list with the fields of its `Compared`."""
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
FAULT_FIGURES = {
    "Noticed (s)": ("noticed_s", "{:.1f}"),
    "Ended (s)": ("ended_s", "{:.1f}"),
    "Steps lost": ("lost_steps", "{}"),
    "Minutes lost": ("lost_minutes", "{:.2f}"),
    "A save holds up (s)": ("held_up_s", "{:.2f}"),
}
"""Of the table's columns: where a row has the figure, and how it is written."""
ELSEWHERE = (
    {
        "fault": 3,
        "technique": "all",
        "outcome": "the checkpoint before is used: a name is given when all is written",
        "test": "tests/unit/test_training.py",
    },
    {
        "fault": 11,
        "technique": "single",
        "outcome": "cannot be seen: nobody else is there; SIGCONT lets it go on",
        "test": "common/runtime/watch.py",
    },
    {
        "fault": 13,
        "technique": "machines",
        "outcome": "refused; launchers look for another",
        "test": "tests/network/test_machines.py",
    },
    {
        "fault": 14,
        "technique": "machines",
        "outcome": "refused in time, with what to try",
        "test": "tests/network/test_machines.py",
    },
    {
        "fault": 26,
        "technique": "mp, pp",
        "outcome": "refused before anything is loaded",
        "test": "tests/unit/test_device_maps.py",
    },
    {
        "fault": 27,
        "technique": "all",
        "outcome": "refused at once, with the command that fetches it",
        "test": "tests/unit/test_models.py",
    },
)
"""Faults whose tests measure no time."""


def read_outcomes(path: Path) -> list[Outcome]:
    """Return what is in the file; nothing if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def equivalence(_: list[Record]) -> pd.DataFrame:
    """Return one line per task and strategy; a cell has the largest differences of losses and of weights."""
    columns = ["task", "strategy", "technique", "loss_difference", "weight_difference"]
    cases = pd.DataFrame(read_outcomes(EQUIVALENCE), columns=columns)
    return pd.DataFrame(
        {
            "Task": task,
            "Strategy": strategy,
            **{each.short[0].upper() + each.short[1:]: _cell(rows[rows["technique"] == each.name])
               for each in TECHNIQUES.values()},
        }
        for (task, strategy), rows in cases.groupby(["task", "strategy"], sort=False)
    )  # fmt: skip


def _cell(cases: pd.DataFrame) -> str:
    found = cases[["loss_difference", "weight_difference"]].dropna()
    if found.empty:
        return "" if cases.empty else NOT_RUN
    return " / ".join(f"{value:.0e}" if value else "0" for value in found.max())


def families(_: list[Record]) -> pd.DataFrame:
    """Return one line per family of decoders: which workflows train it, and how it is planned."""
    return _families({"2.1": "2.1 LoRA", "2.3": "2.3 QLoRA", "2.4": "2.4 full", "2.5": "2.5 MP"})


def families_of_tasks(_: list[Record]) -> pd.DataFrame:
    """Return one line per family of encoders (trained by 3.1) and of encoder-decoders (3.2)."""
    return _families({"3.1 full": "3.1 full", "3.1 LoRA": "3.1 LoRA", "3.2": "3.2 full"}, elsewhere="")


def _families(ways: dict[str, str], elsewhere: str = NOT_RUN) -> pd.DataFrame:
    """Return a line for each family that one of `ways` was tried with; `elsewhere` fills the cells of the others."""
    headers = {"family": "Family", "model_type": "`model_type`", **ways, "planner": "Planner"}
    rows = [row for row in read_outcomes(FAMILIES_FILE) if row.keys() & ways.keys()]
    return pd.DataFrame(rows, columns=list(headers)).fillna(elsewhere).rename(columns=headers)


def llama_cpp(_: list[Record]) -> pd.DataFrame:
    """Return one line per tuned model and type of weights: what llama.cpp makes as Transformers does."""
    found = json.loads(LLAMA_CPP_FILE.read_text(encoding="utf-8"))["compared"] if LLAMA_CPP_FILE.exists() else []
    return pd.DataFrame(
        {
            "Base": row["base"],
            "`model_type`": row["model_type"],
            "Pre-tokenizer": row["pre_tokenizer"],
            "Weights": row["weight_type"],
            "Same answers": f"{row['equal_answers']} of {row['questions']}",
            "Prompts with equal tokens": f"{row['equal_prompts']} of {row['questions']}",
            "Unusual texts with equal tokens": f"{row['equal_texts']} of {row['texts']}",
            "Largest difference of logits": f"{row['logit_difference']:.0e}",
        }
        for row in found
    )


def faults(_: list[Record]) -> pd.DataFrame:
    """Return one line per fault and technique; seconds count from the fault on. Columns without any are left out."""
    table = pd.DataFrame(
        {
            "": str(row["fault"]),
            "Fault": FAULTS[row["fault"]],
            "Technique": row["technique"],
            "Outcome": row["outcome"],
            **{header: _figure(row.get(name), form) for header, (name, form) in FAULT_FIGURES.items()},
            "Where": f"[{Path(row['test']).name}]({row['test']})",
        }
        for row in sorted([*read_outcomes(ENDED_FAULTS), *ELSEWHERE], key=lambda row: row["fault"])
    )
    return table.loc[:, [header not in FAULT_FIGURES or (table[header] != "").any() for header in table]]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
