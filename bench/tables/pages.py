"""Every table by its name, and how they come into the pages."""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from bench.tables import (
    chats,
    findings,
    full,
    lengths,
    outcomes,
    own_data,
    publications,
    qlora,
    real,
    sequence,
    summarization,
    tasks,
)
from bench.tables.chats import planner_says
from bench.tables.markdown import WIDEST, as_list, as_markdown, with_footnotes
from bench.tables.table import Table
from common.base.paths import REPOSITORY
from common.records.store import Record
from common.reporting.layout import fitted
from common.reporting.rows import NOT_RUN
from common.reporting.tables import side_by_side

MARKED_TABLE = re.compile(r"(<!-- table: (?P<name>[\w .-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
PLANNER_QUESTION = "--model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 4 --seq-len 1024"
# Of the runs of `make demo` those that the README shows
DEMO_RUNS = (
    ("2.1_lora_finetuning/run_0_cpu_x1", "python-batch16-seed42"),
    ("2.2_lora_finetuning_with_ddp/run_0_cpu_x2", "torchrun-batch8-seed42"),
)
DEMO_LINES = (
    "fact recall before",
    "fact recall after",
    "training time",
    "peak memory per device (GiB)",
    "speed-up at the same effective batch",
    "upper bound at the same effective batch",
)

MODULES = (
    chats,
    full,
    sequence,
    qlora,
    tasks,
    summarization,
    findings,
    lengths,
    publications,
    own_data,
    real,
    outcomes,
)
TABLES: dict[str, Table] = {name: table for module in MODULES for name, table in module.TABLES.items()}


def _demo(records: list[Record]) -> str:
    """Return what `make demo` prints at its end, of the kept records of its runs; shortened."""
    runs = {(record["run_folder"], record["run_name"]): record for record in records}
    shown = side_by_side([runs[name] for name in DEMO_RUNS if name in runs])
    return on_screen(shown.reindex(DEMO_LINES).dropna(how="all"), WIDEST)


def _planner_answer(_: list[Record]) -> str:
    """Return what the planner says, of its assumptions the first alone."""
    return re.sub(
        r"(?<=assumed:\n)(- .*\n)((?:- .*\n)+)",
        lambda found: f"{found[1]}({found[2].count(chr(10))} more)\n",
        planner_says(PLANNER_QUESTION),
    )


# What is no table, but printed
BLOCKS: dict[str, Callable[[list[Record]], str]] = {
    "planner-answer": _planner_answer,
    "demo": _demo,
}


def rendered(name: str, records: list[Record]) -> str:
    """Return a table as Markdown, or what a command prints."""
    if name in BLOCKS:
        lines = BLOCKS[name](records).strip("\n")
        return f"```text\n{lines}\n```\n"
    table = TABLES[name]
    rows = table.rows(records)
    cells = table.cells(rows)
    if cells.empty:
        return f"{NOT_RUN}\n"
    if table.footnote:
        return with_footnotes(cells, [table.footnote(row) for row in rows], name)
    return as_list(cells, table.line) if table.line else as_markdown(cells, table.shared)


def with_tables(text: str, records: list[Record]) -> str:
    """Return `text` with each marked table replaced by what the records say."""
    return MARKED_TABLE.sub(lambda found: found[1] + rendered(found["name"], records) + found[3], text)


def readmes() -> list[Path]:
    """Return the pages with tables: the README, the benchmark's, those of docs, and the technique folders'."""
    places = ("README.md", "bench/README.md", "docs/*.md", "docs/results/*.md", "[0-9].[0-9]_*/*_readme.md")
    pages = [page for place in places for page in sorted(REPOSITORY.glob(place))]
    return [page for page in pages if MARKED_TABLE.search(page.read_text(encoding="utf-8"))]


def on_screen(table: pd.DataFrame, width: int | None = None) -> str:
    """Return a table of `side_by_side` for a terminal, as `fitted` prints it."""
    return fitted(["", *table.columns], list(table.reset_index().itertuples(index=False)), width)
