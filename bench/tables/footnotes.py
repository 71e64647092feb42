"""Where a row of a readme's table comes from: the notebook of its run folder, its record, or who published it."""

import re
from pathlib import Path

from bench.tables.table import NOT_PUBLISHED, kind_of_run
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.reporting.rows import NOT_RUN, Row, kind_of


def footnote(row: Row) -> str:
    """Return where a row comes from, with links from a technique's folder."""
    if row["status"] == NOT_PUBLISHED:
        copy, launcher = _folder_like(row), "" if "task" in row else "nblaunch"  # as the chats' were started
        return f"P{row['figures'][1:]}." + (
            f" The same settings here{_if_not_run(copy)}: {_notebook(copy, launcher)}." if copy else ""
        )
    seeds = row.get("seeds", [row])
    shown = next((run for run in seeds if run["config"]["seed"] == RunConfig.seed), row)
    also = f", and {len(seeds) - 1} more with other seeds" if len(seeds) > 1 else ""
    record = f"[record]({_from_technique(Path(shown['run_folder'], 'records', shown['run_name']))}.json)"
    return f"Measured: {_notebook(shown['run_folder'], shown['launcher'])}, {record}{also}."


def _if_not_run(run_folder: str) -> str:
    return "" if any((REPOSITORY / run_folder / "records").glob("*.json")) else f", {NOT_RUN}"


def _notebook(run_folder: str, launcher: str = "") -> str:
    """Return a link to the run folder's first notebook, or to that of a launcher; where it has none to its workflow."""
    notebooks = sorted((REPOSITORY / run_folder).glob("*.ipynb"))
    of_launcher = [path for path in notebooks if launcher and path.stem.endswith(launcher)]
    workflows = sorted((REPOSITORY / run_folder).glob("my_workflow_*.py"))
    path, *_ = of_launcher or notebooks or workflows
    return f"[{'notebook' if notebooks else 'workflow'}]({_from_technique(path.relative_to(REPOSITORY))})"


def _from_technique(path: Path) -> str:
    return f"../{path}"


def _words(gpu: str) -> set[str]:
    """Return what tells a GPU: `A6000` and `48` of `RTX A6000 (48G)` as of `RTX A6000 48GB`."""
    return {word.rstrip("GB") for word in re.findall(r"\w+", gpu)}


def _folder_like(row: Row) -> str | None:
    """Return the run folder for GPUs with the settings of a published run; one for a task has several."""
    gpu, devices = row["environment"]["devices"][0], row["config"]["devices"]

    def is_like(run: RunConfig) -> bool:
        if run.goal.reporting:
            return row.get("task", "").startswith(run.task)
        return "task" not in row and (*kind_of_run(run), run.devices) == (*kind_of(row), devices)

    return next(
        (
            run.run_folder
            for run in run_folders().values()
            if run.device == "cuda" and is_like(run) and _words(gpu) <= _words(run.gpu)
        ),
        None,
    )
