"""The measured tables of summarization (3.2): three ways to write the loop, and what a network takes from a step."""

from collections.abc import Iterable
from itertools import product

import pandas as pd

from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import TASKS
from common.records.store import Record
from common.reporting.rows import (
    NOT_RUN,
    Row,
    completed,
    devices_of,
    model_of,
    over_seeds,
    planned_memory,
    training_time,
)

TASK = next(task for task in TASKS.values() if task.summarizes)
KINDS = tuple(product(TASK.techniques, TASK.parallelisms))
LOOPS = {
    "trainer": "Seq2SeqTrainer, by torchrun",
    "accelerate": "plain loop, Accelerate",
    "machines": "plain loop, torch.distributed",
}
EXCHANGES = {
    "after": "after the backward pass, in buckets",
    "overlapped": "while it goes on, in buckets (DDP)",
    "overlapped-bf16": "while it goes on, in buckets, as bf16",
}
"""`RunConfig.gradient_exchange` in words."""
BRIEF = (
    "Loop",
    "Devices",
    "ROUGE-L before -> after",
    "To the letter",
    "Validation loss",
    "Training time",
    "Tokens per second",
)
"""Of the columns those that fit a terminal."""


def summarized(records: Iterable[Record]) -> list[Record]:
    """The completed summarization runs, in the order of folders, devices and loops."""
    found = completed(records, *KINDS, task=TASK.name)
    order = list(LOOPS)
    return sorted(
        found, key=lambda r: (r["run_folder"], r["config"]["devices"], order.index(r["config"]["loop"]), r["run_name"])
    )


def of_no_link(records: Iterable[Record]) -> list[Record]:
    """Runs whose ranks no network held up, and which took the whole run's steps."""
    return [record for record in summarized(records) if not record["config"]["link"]]


def loops_table(records: list[Record]) -> pd.DataFrame:
    """3.2: each way to write the loop, measured; and the GPU folders that were not run."""
    runs = of_no_link(records)
    measured = [_loop(group) for group in _by_setting(runs).values()]
    return pd.DataFrame([*measured, *_not_run(runs)]).fillna(NOT_RUN)


def front(records: list[Record]) -> pd.DataFrame:
    """Root README: the measured loops, in brief."""
    table = loops_table(records)
    return table[table["Figures"] == "measured"].reindex(columns=list(BRIEF))


def _by_setting(runs: list[Record]) -> dict[tuple[object, ...], list[Record]]:
    """Runs that differ in their seed alone."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for run in runs:
        same = {name: value for name, value in run["config"].items() if name not in ("seed", "run_name")}
        groups.setdefault((run["launcher"], *same.items()), []).append(run)
    return groups


def _loop(runs: list[Record]) -> Row:
    first = min(runs, key=lambda run: run["config"]["seed"])
    before, after = first["quality"]["before"], first["quality"]["after"]
    scores = {
        f"{name.replace('rouge', 'ROUGE-')} before -> after": f"{before[name]:.3f} -> "
        + over_seeds([run["quality"]["after"][name] for run in runs], "{:.3f}")
        for name in after
        if name.startswith("rouge")
    }
    return {
        "Loop": LOOPS[first["config"]["loop"]],
        "Figures": "measured",
        "Model": model_of(first),
        "Devices": devices_of(first),
        "Seeds": str(len(runs)),
        **scores,
        "To the letter": f"{before['exact_share']:.0%} -> {after['exact_share']:.0%}",
        "Validation loss": f"{first['best_validation_loss']:.4f}",
        "Training time": training_time(first),
        "Tokens per second": f"{first['tokens_per_s']:,.0f}",
        "Training's peak, planned / measured (GiB)": planned_memory(first),
        "Command": f"`{first['command']}`",
    }


def _not_run(runs: list[Record]) -> list[Row]:
    done = {run["run_folder"] for run in runs}
    return [
        {"Loop": loop, "Figures": NOT_RUN, "Model": run.model.rpartition("/")[2], "Devices": _gpus(run)}
        for run in run_folders().values()
        if run.goal.summarizes and run.run_folder not in done
        for name, loop in LOOPS.items()
        if (run.loop == "machines") == (name == "machines")
    ]


def _gpus(run: RunConfig) -> str:
    return f"{run.gpu} x1 in {run.devices} machines" if run.loop == "machines" else f"{run.gpu} x{run.devices}"


def network_table(records: list[Record]) -> pd.DataFrame:
    """3.2: seconds per step over a network, by how gradients are exchanged, at the same global batch."""
    runs = [record for record in summarized(records) if record["config"]["link"]]
    slowest = {run["config"]["link"]: step_s(run) for run in runs if run["config"]["gradient_exchange"] == "after"}
    order = list(EXCHANGES)
    return pd.DataFrame(
        {
            "Link": run["config"]["link"],
            "Gradients are sent": EXCHANGES[run["config"]["gradient_exchange"]],
            "Figures": "measured",
            "Machines": f"{run['config']['devices']} network namespaces, {devices_of(run)}",
            "Rows per step": str(run["effective_batch_size"]),
            "Steps": str(run["steps"]),
            "Step (s)": f"{step_s(run):.3f}",
            "Faster than after the backward pass": f"{slowest[run['config']['link']] / step_s(run):.2f}x",
            "Training loss at the end": f"{run['training_losses'][-1][1]:.4f}",
        }
        for run in sorted(runs, key=lambda r: (r["config"]["link"], order.index(r["config"]["gradient_exchange"])))
    )


def step_s(record: Record) -> float:
    """Mean seconds of a training step, without validation and checkpoints."""
    return (record["train_time_s"] - record["reporting_s"]) / record["steps"]


def results_text(records: list[Record]) -> str:
    """The table of the last runs on this machine, for a terminal: a line for each."""
    return front(records).to_markdown(tablefmt="simple", index=False, disable_numparse=True)


TABLES = {"summarization-loops": loops_table, "summarization-network": network_table, "summarization-front": front}
