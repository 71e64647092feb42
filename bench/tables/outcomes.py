"""The tables of what tests and `make bench` measured: equivalence, how faults end, families, and bars."""

import re
from collections.abc import Iterable, Iterator
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import fmean

from bench.entries import read_kept
from bench.page.runs import compared_phases
from bench.tables.table import Table
from common.base.paths import REPOSITORY
from common.base.specs import TECHNIQUES
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import NOT_RUN, Row, groups_of

Outcome = dict[str, object]
# What tests/recipes/test_equivalence.py measured: a list of `task`, `strategy`, `technique`, `note`, and the largest
# `loss_difference` (relative) and `weight_difference` (absolute), or None where a case was skipped.
EQUIVALENCE = REPOSITORY / "tests" / "recipes" / "equivalence.json"
# What `make soak` measured: a list of `fault`, `technique`, `outcome`, `noticed_s`, `ended_s`, `lost_steps`; of a run
# that resumes also `lost_minutes`, and the longest wait for one of its saves, `held_up_s`.
ENDED_FAULTS = REPOSITORY / "tests" / "faults" / "outcomes.json"
# What tests/recipes/test_families.py found: a list of `family`, `model_type`, and for each way to train what came of
# it.
FAMILIES_FILE = REPOSITORY / "tests" / "recipes" / "families.json"
# What bench/llama_cpp_answers.py found: `packages`, and `compared`, a list of what its `compare` returns
LLAMA_CPP_FILE = REPOSITORY / "bench" / "llama_cpp.json"
BENCH_FILE = REPOSITORY / "bench" / "bench.json"  # what `make bench` measured
FAULTS = {
    1: "a rank is killed (SIGKILL)",
    2: "killed while a checkpoint is written, at any write or rename",
    3: "killed while an asynchronous save goes on",
    4: "a checkpoint file is truncated",
    5: "one byte of a checkpoint is changed",
    6: "the random number state is missing",
    7: "the disk is full",
    8: "resuming with another number of ranks",
    9: "stopping and resuming: is the result the same?",
    10: "one rank raises an error",
    11: "a rank is stopped (SIGSTOP)",
    12: "a rank hangs outside of any collective",
    13: "the port is taken",
    14: "a wrong address of the first machine",
    15: "two runs write into one results folder",
    16: "a results folder that is not writable",
    17: "rows without keys, or with wrong roles",
    18: "an empty answer",
    19: "rows that are too long to keep an answer",
    20: "a file that is not UTF-8, or truncated JSONL",
    21: "an id that occurs twice",
    22: "a test row among the training rows",
    23: "a loss that is not finite, on one rank",
    24: "out of memory",
    25: "killed by the kernel because memory ran out",
    26: "a wrong device map",
    27: "an unknown model, or offline and not cached",
    28: "a notebook's cell is interrupted",
    29: "the kernel, launcher or agent is killed",
    30: "a kernel that dies or hangs under papermill",
    31: "a hostile pickle in a checkpoint",
    32: "a model folder with code of its own",
    33: "a run name that points outside of the results folder",
    34: "an error message with a secret token in it",
    35: "resuming with another setting, row or model",
    36: "a user's files where results should go",
    37: "others on the network while ranks of one machine meet",
    38: "the terminal or connection is closed (SIGHUP)",
    39: "half of a launcher's variables in the environment",
    40: "settings that cannot be built: optimizers, schedules, targets, positions",
    41: "an odd or hostile model folder or adapter",
    42: "a file that another program wrote",
    43: "a file that unpacks to far more, or nests without end",
    44: "a damaged record among others",
    45: "a text that would steer a page, terminal or spreadsheet",
    46: "control tokens in a text",
    47: "a base whose answers end with another token than its tokenizer's",
}
# Faults whose tests measure no time: the number, with which technique, the outcome, and the test
ELSEWHERE = (
    (3, "all", "the previous checkpoint is used: a checkpoint gets its name when it is complete",
     "tests/unit/test_training.py"),
    (11, "single", "not noticed, as no other process watches; SIGCONT resumes", "common/runtime/watch.py"),
    (13, "machines", "on one machine torchrun needs none, and others choose one; on several it waits for the listener",
     "docs/several_machines.md"),
    (14, "machines", "ends in time, with the address", "tests/network/test_machines.py"),
    (26, "mp, pp", "refused before anything is loaded", "tests/unit/test_device_maps.py"),
    (27, "all", "refused at once, with the command that fetches it", "tests/unit/test_models.py"),
    (36, "all", "refused; nothing is moved or removed", "tests/unit/test_files_of_others.py"),
    (37, "all", "nothing listens to them", "tests/unit/test_torchrun.py"),
    (38, "all", "a sentence and a record; it resumes", "tests/faults/test_processes.py"),
    (39, "all", "refused before anything starts", "tests/unit/test_torchrun.py"),
    (40, "all", "refused before a model loads", "tests/unit/test_bad_settings.py"),
    (41, "all", "refused in one sentence, or trained", "tests/faults/test_fuzzed.py"),
    (42, "all", "read, or refused with what to do", "tests/unit/test_files_of_users.py"),
    (43, "all", "refused within its first part", "tests/unit/test_files_of_users.py"),
    (44, "all", "named and left out", "tests/unit/test_records.py"),
    (45, "all", "shown as text", "tests/unit/test_inert.py"),
    (46, "all", "learnt as text, or refused, and counted", "tests/unit/test_learnt_as_meant.py"),
    (47, "all", "learnt from the chat template", "tests/unit/test_answer_ends.py"),
)  # fmt: skip


# -- rows


def _equivalence(_: list[Record]) -> list[Row]:
    """Return each task and strategy; a cell has the largest differences of losses and of weights."""
    return [
        {
            "Task": task,
            "Strategy": strategy,
            **{
                each.short[0].upper() + each.short[1:]: _largest(row for row in cases if row["technique"] == each.name)
                for each in TECHNIQUES.values()
            },
        }
        for (task, strategy), cases in groups_of(read_kept(EQUIVALENCE), itemgetter("task", "strategy")).items()
    ]


def _largest(cases: Iterable[Outcome]) -> str:
    pairs = [(case["loss_difference"], case["weight_difference"]) for case in cases]
    largest = [max(values) for values in zip(*(pair for pair in pairs if None not in pair), strict=True)]
    none = NOT_RUN if pairs else ""
    return " / ".join(f"{value:.0e}" if value else "0" for value in largest) or none


def _families(ways: dict[str, str], elsewhere: str = NOT_RUN) -> Table:
    """Return the table of the families that one of `ways` was tried with; `elsewhere` fills the cells of the others."""
    headers = {"family": "Family", "model_type": "`model_type`", **ways, "planner": "Planner"}
    columns = [Column(header, itemgetter(key), missing=elsewhere) for key, header in headers.items()]
    return Table(lambda _: [row for row in read_kept(FAMILIES_FILE) if row.keys() & ways.keys()], columns)


def _ended_faults(_: list[Record]) -> list[Row]:
    """Return each technique of each fault that ends a run or costs it steps; seconds count from the fault on."""
    same_fault = groups_of(_faults(have_figures=True), itemgetter("fault")).values()
    return [{**row, "tests": _tests(same)} for same in same_fault for row in same]


def _other_faults(_: list[Record]) -> list[Row]:
    """Return each outcome of each fault that is refused, or undone, without a time to tell."""
    return [
        {**same[0], "technique": ", ".join(row["technique"] for row in same), "tests": _tests(same)}
        for same in groups_of(_faults(have_figures=False), itemgetter("fault", "outcome")).values()
    ]


def _faults(have_figures: bool) -> list[Outcome]:
    """Return the outcomes of the faults that have a figure with some technique, or of the others, by number."""
    elsewhere = [dict(zip(("fault", "technique", "outcome", "test"), row, strict=True)) for row in ELSEWHERE]
    known = sorted([*read_kept(ENDED_FAULTS), *elsewhere], key=itemgetter("fault"))
    timed = {row["fault"] for row in known if any(column.value_in(row) is not None for column in FIGURES)}
    return [row for row in known if (row["fault"] in timed) == have_figures]


def _tests(rows: Iterable[Outcome]) -> str:
    """Return links, from a page of docs, to what tests these outcomes."""
    return ", ".join(f"[{Path(test).name}](../{test})" for test in dict.fromkeys(row["test"] for row in rows))


# -- rows of the benchmark


def _entries(_: list[Record]) -> Iterator[Row]:
    """Yield what `make bench` wrote, with the part that measures it, and without the point of a worst error."""
    for entry in read_kept(BENCH_FILE):
        name = re.sub(r"(?<=worst error) \(.*\)", "", entry["name"]).removesuffix(f" {NOT_RUN}")
        part, rest = re.match(r"(\w*)(.*)", name).groups()
        found = {"status": NOT_RUN} if NOT_RUN in entry["name"] else {"found": entry}
        yield {"part": part.capitalize(), "what": rest.lstrip(", "), "bar": _bar(entry), **found}


def _errors_by_phase(records: list[Record]) -> Iterator[Row]:
    """Yield how many were compared, and by how much plans were off: for each phase, for all, and the bars."""
    every = [each for record in records for each in compared_phases(record)]
    for phase, compared in {**groups_of(every, attrgetter("phase")), "all phases": every}.items():
        worst = max(compared, key=lambda each: abs(each.error), default=None)
        yield {
            "Phase": phase,
            "Compared": len(compared),
            "Mean error": f"{fmean(abs(each.error) for each in compared):.1%}" if worst else NOT_RUN,
            "Worst error": f"{worst.error:+.1%}" if worst else NOT_RUN,
            "Worst in": worst.run if worst else "",
        }
    yield {"Phase": "bar", "Compared": "", "Mean error": "≤ 3%", "Worst error": "≤ 10%", "Worst in": ""}


def _measured(entry: Outcome) -> str:
    """Return a value in short: shares in per cent, runs as whole numbers."""
    value, unit = entry["value"], entry["unit"]
    if value is None:
        return "not reached"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "runs":
        return f"{value:g} {unit}"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3f} {unit}"


def _bar(entry: Outcome) -> str:
    if entry["bar"] is None:
        return ""
    shown = f"{100 * entry['bar']:g}%" if entry["unit"] == "share" else f"{entry['bar']:g}"
    return f"{'≥' if entry['bar_is'] == 'at least' else '≤'} {shown}"


# -- tables


FIGURES = (
    Column("Noticed", "noticed_s", "{:.1f}", none="", missing=""),
    Column("Ended", "ended_s", "{:.1f}", none="", missing=""),
    Column("Steps", "lost_steps", none="", missing=""),
    Column("Min", "lost_minutes", "{:.2f}", none="", missing=""),
    Column("Save", "held_up_s", "{:.2f}", none="", missing=""),
)
ABOUT = (
    Column("Fault", lambda row: f"{row['fault']}. {FAULTS[row['fault']]}"),
    Column("Tests", "tests"),
    Column("With", "technique"),
    Column("Outcome", "outcome"),
)
BENCH_FIGURES = (
    Column("What", "what"),
    Column("Measured", "found", _measured),
    Column("Bar", "bar"),
    Column("Holds", "found.holds", {True: "yes", False: "**no**"}.get, none=""),
)
TABLES = {
    "equivalence": Table(_equivalence),
    # which workflows train a family of decoders, and how it is planned
    "families": _families({"2.1": "2.1 LoRA", "2.3": "2.3 QLoRA", "2.4": "2.4 full", "2.5": "2.5 MP"}),
    # of encoders (3.1) and of encoder-decoders (3.2)
    "families-of-tasks": _families({"3.1 full": "3.1 full", "3.1 LoRA": "3.1 LoRA", "3.2": "3.2 full"}, elsewhere=""),
    "faults": Table(_ended_faults, (*ABOUT, *FIGURES), shared=("Fault", "Tests")),
    "faults-others": Table(_other_faults, ABOUT, line="- **{Fault}** ({With}): {Outcome}. {Tests}"),
    # what llama.cpp makes of a tuned model and type of weights as Transformers does
    "llama-cpp": Table(
        lambda _: read_kept(LLAMA_CPP_FILE)["compared"],
        (
            Column("Base", lambda row: f"{row['base']} ({row['model_type']})"),
            Column("Pre-tokenizer", "pre_tokenizer"),
            Column("Weights", "weight_type"),
            Column("Same answers", lambda row: f"{row['equal_answers']} of {row['questions']}"),
            Column("Same prompts", lambda row: f"{row['equal_prompts']} of {row['questions']}"),
            Column("Same texts", lambda row: f"{row['equal_texts']} of {row['texts']}"),
            Column("Logits", "logit_difference", "{:.0e}"),
        ),
    ),
    # of bench/README.md, and 1.1's of the planner
    "bench": Table(
        lambda records: [entry for entry in _entries(records) if entry["bar"]],
        (Column("Part", "part"), *BENCH_FIGURES),
        shared=("Part",),
    ),
    "bench-planner": Table(
        lambda records: [entry for entry in _entries(records) if entry["part"] == "Planner"], BENCH_FIGURES
    ),
    "memory-by-phase": Table(_errors_by_phase),
}
