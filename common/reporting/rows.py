"""Runs as the rows of tables: which are on this machine, which stand in a table, and what they are compared with.

A row is a record, or has its shape, with what it is compared with: as "baseline" the run on one device, as "seeds" the
runs that differ in their seed.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from common.base.errors import BadInputError, closest
from common.base.paths import REPOSITORY, command_here
from common.base.run_config import DEFAULTS, SET_ASIDE, idle_settings
from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES, Task
from common.records.store import RECORD_NAME, Record, records_in

NOT_RUN = "not run"
# What runs on one device and on several share when they are compared: strong scaling, or weak
STRONG, WEAK = "effective_batch_size", "per_device_train_batch_size"
SCHEDULES = {"naive": "naive MP", "gpipe": "GPipe", "1f1b": "1F1B"}
# What CPUs have in their names that says nothing: `Intel(R) Xeon(R) Processor` is an Intel Xeon
MARKS = re.compile(r"\((R|TM)\)| (CPU|Processor)\b.*")

Kind = tuple[str, str]  # technique and parallelism
WITH_SP = "+sp"
# Settings that say where results go and what they are called: no cause of a difference
NAMING = (
    *("run_folder", "run_name", "results_root", "resume_from_checkpoint", "report_to", "log_format", "log_level"),
    "link",
)
# Settings that two runs need not share to be compared in time: how the work is divided, and what the run is called
FREE_SETTINGS = {
    *("parallel", "devices", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("gradient_checkpointing", "use_reentrant", "padding_free", "per_device_eval_batch_size", "baseline"),
    *("stages", "device_map", "schedule", "micro_batches", "offload", "dp_replicate_size", "sp_size"),
    *("loop", "partitions", "gradient_exchange", "bucket_cap_mb", "step_timeout_s", "link", "log_format", "log_level"),
    *("run_folder", "run_name", "results_root"),
}

T = TypeVar("T")
Row = Mapping[str, Any]  # a record, or what has its shape


@dataclass(frozen=True)
class Metric:
    """How good a run's answers are, by its name in the record; `shown` is the form of a value."""

    name: str
    label: str
    direction: str
    shown: str


# Of answers to questions; the one to look at first before the others
ANSWER_METRICS = (
    Metric("facts_said_share", "fact recall", "higher", "{:.0%}"),
    Metric("rougeL", "ROUGE-L", "higher", "{:.3f}"),
    Metric("similarity_score", "similarity score", "lower", "{:.3f}"),
    Metric("similarity_score_minilm", "similarity score by MiniLM", "lower", "{:.3f}"),
    Metric("general_loss", "loss on general texts", "lower", "{:.3f}"),
    Metric("answer_drift", "KL divergence from the base", "lower", "{:.3f}"),
)


# -- what is on this machine


def result_files(*folders: Path) -> list[Path]:
    """Return the files of the records of the last runs in these `results` folders; none given: of all run folders."""
    return [
        run / RECORD_NAME
        for folder in folders or sorted(REPOSITORY.glob("*/run_*/results"))
        for run in sorted(folder.glob("*"))
        if not SET_ASIDE.fullmatch(run.name)
        if os.path.lexists(run / RECORD_NAME)  # a link that leads nowhere is to be named, too
    ]


def results_of_this_machine(*folders: Path) -> list[Record]:
    """Return the records of the last runs in these `results` folders; none given: of all run folders."""
    return sorted(
        (record for _, record in records_in(result_files(*folders))),
        key=lambda run: (run["run_folder"], run["config"].get("per_device_train_batch_size", 0), run["run_name"]),
    )


def called(records: Sequence[Record], names: Sequence[str]) -> list[Record]:
    """Return the records of the runs, run folders or techniques with these names, or that fit these patterns.

    A name is such as `python-batch16-seed42`, `2.1_lora_finetuning/run_0_cpu_x1`, `2.1`, `2.1/python-batch16-seed42`.

    Raises:
        BadInputError: a name fits no record; with the closest.
    """
    for name in names:
        if not any(_is_called(record, name) for record in records):
            meant = closest(name, {each for record in records for each in _names_of(record)})
            question = f"did you mean {meant}?" if meant else f"`{command_here('report')} --results` lists all."
            raise BadInputError(f"No run here is called {name}: {question}")
    return [record for record in records if any(_is_called(record, name) for name in names)]


def _names_of(record: Record) -> list[str]:
    folder, run = record["run_folder"], record["run_name"]
    technique = folder.partition("/")[0]
    number = technique.partition("_")[0]
    return [run, folder, technique, number, *(f"{place}/{run}" for place in (folder, technique, number)),
            f"{folder}/results/{run}"]  # fmt: skip


def _is_called(record: Record, name: str) -> bool:
    return any(fnmatch(each, name.rstrip("/")) for each in _names_of(record))


# -- tasks with a table of their own


def own_table(task: Task) -> Any:
    """Return the `common.reporting.tasks.OwnTable` that `Task.reporting` names, as `module:name`."""
    return resolve_name(task.reporting)


def metrics_of(record: Record) -> tuple[Metric, ...]:
    """Return how good the answers of a run's task are; a task from outside has those of chats."""
    task = TASKS.get(task_of(record))
    return own_table(task).metrics if task and task.reporting else ANSWER_METRICS


# -- which runs a table has


def kind_of(row: Row) -> Kind:
    """Return technique and parallelism, `ddp+sp` where ranks share rows as well."""
    return row["technique"], row["parallel"] + WITH_SP * (sp_size_of(row) > 1)


def sp_size_of(row: Row) -> int:
    """Return how many ranks share a row's tokens (sequence parallel); older records, and rows of plans, do not say."""
    return row.get("config", {}).get("sp_size", 1)


def task_of(record: Record) -> str:
    """Return the name of the task that a run learnt; older records know one task only."""
    return record["config"].get("task", "chat")


def completed(records: Iterable[Record], *kinds: Kind, task: str = "chat") -> list[Record]:
    """Return the completed runs of these kinds (none: of all) in the tables of `task`; in chats', what has no own."""
    return [
        record
        for record in records
        if record["status"] == "completed" and TASKS[task_of(record)].reporting == TASKS[task].reporting
        if not kinds or kind_of(record) in kinds
    ]


def in_order(records: Iterable[Record], task: str) -> list[Record]:
    """Return a task's completed runs in the order of folders and settings, each control after its setting."""
    order = [(technique, way + sp) for technique, way, sp in product(TECHNIQUES, PARALLELISMS, ("", WITH_SP))]
    return sorted(
        completed(records, task=task),
        key=lambda record: (
            record["run_folder"],
            order.index(kind_of(record)),
            record["config"]["micro_batches"],
            record["config"].get("exchange_answers", False),
        ),
    )


def groups_of(rows: Iterable[T], key: Callable[[T], object]) -> dict[Any, list[T]]:
    """Return the rows with the same key together, keys and rows in their order."""
    groups: dict[Any, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def grouped(runs: Iterable[Record], key: Callable[[Record], object]) -> list[Row]:
    """Return a row for the runs with the same key: the one with the lowest seed, with all of them as "seeds"."""
    groups = [sorted(group, key=lambda run: run["config"]["seed"]) for group in groups_of(runs, key).values()]
    return [{**group[0], "seeds": group} for group in groups]


def with_seeds(runs: Iterable[Record]) -> list[Row]:
    """Return a row for runs that differ in their seed alone, see `grouped`."""
    named = ("seed", "run_name", "results_root")
    return grouped(
        runs, lambda run: (run["launcher"], *(each for each in run["config"].items() if each[0] not in named))
    )


def settings_of_task(records: list[Record], task: str) -> list[Row]:
    """Return a row for each setting of a task's runs by command, with the run on one device as "baseline"."""
    by_command = [run for run in in_order(records, task) if run["launcher"] in ("python", "torchrun", "acclaunch")]
    return [
        {**row, "baseline": row if PARALLELISMS[row["parallel"]].is_single else baseline_of(row, records, STRONG)}
        for row in with_seeds(by_command)
    ]


def settings_of(run: Record) -> dict[str, Any]:
    """Return the settings that may cause a difference (old records': defaults); None: it means nothing for this run."""
    config = {name: run["config"].get(name, default) for name, default in DEFAULTS.items() if name not in NAMING}
    idle = idle_settings(config)
    return {name: None if name in idle else value for name, value in config.items()}


def workload(record: Row, same: str) -> dict[str, object]:
    """Return what two runs must share to be compared in time; `same`: `STRONG` or `WEAK`."""
    config = {**DEFAULTS, **record["config"]}  # older: fewer settings
    return {
        **{name: value for name, value in config.items() if name not in FREE_SETTINGS},
        "rows": record[same] if same == STRONG else config[same],
        "recomputes_activations": config["gradient_checkpointing"],
        "device_name": first_device(record),
        "threads_per_rank": record["environment"]["threads_per_rank"],
    }


def baseline_of(record: Row, records: Iterable[Record], same: str) -> Record | None:
    """Return the one-device run of the same `workload`, preferably by command; a base in 4 bits has none."""
    shared = workload(record, same)
    found = [
        candidate
        for candidate in records
        if candidate["status"] == "completed" and PARALLELISMS[candidate["parallel"]].is_single
        if workload(candidate, same) == shared and not TECHNIQUES[record["technique"]].quantizes
    ]
    return min(found, key=lambda candidate: candidate["launcher"] != "python", default=None)


def beside_one_device(runs: Iterable[Record], records: Iterable[Record], same: str) -> list[Row]:
    """Return each run, after its "baseline" (see `baseline_of`), with its "ceiling", the highest speed-up to expect."""
    rows: list[Row] = []
    shown: list[Record] = []
    for run in runs:
        baseline = baseline_of(run, records, same)
        if baseline and all(baseline is not each for each in shown):
            shown.append(baseline)
            rows.append({**baseline, "baseline": baseline, "ceiling": 1, "same": same})
        ceiling = (run.get("machine_ceiling") or {}).get("strong" if same == STRONG else "weak")
        rows.append({**run, "baseline": baseline, "ceiling": ceiling, "same": same})
    return rows


# -- what a run is called


def kind_name(row: Row) -> str:
    """Return what technique and parallelism are called: `Full fine-tuning`, `LoRA with DDP`."""
    how = PARALLELISMS[row["parallel"]]
    also = " and SP" * (sp_size_of(row) > 1)
    return TECHNIQUES[row["technique"]].title + ("" if how.is_single else f" with {how.label}{also}")


def setting_name(row: Row) -> str:
    """Return `LoRA with PP, 8 micro-batches`, or `LoRA, exchanged (control)`, which learns the rejected answers."""
    config = row["config"]
    loss = {"sft": ", chosen answers alone", "grpo": ", mean of answers"}.get(config.get("loss_type", ""), "")
    turned = "exchanged" if config.get("exchange_answers") else "turned" * ("-" in config.get("reward_weights", ""))
    return kind_name(row) + in_parts(row) + loss + (f", {turned} (control)" if turned else "")


def in_parts(row: Row) -> str:
    """Return `, 8 micro-batches` of a pipeline; with a single one, stages wait for each other as in naive MP."""
    parts = row["config"].get("micro_batches")
    if not parts or not PARALLELISMS[row["parallel"]].pipelines:  # the former of a run folder that nobody has run
        return ""
    return f", {parts} micro-batches" if parts > 1 else ", 1 micro-batch (naive MP)"


def model_of(row: Row) -> str:
    """Return the model's name; random weights are told apart from the real ones."""
    config = row["config"]
    return Path(config["model"]).name + (", random weights" if config["weights"] == "random" else "")


def first_device(row: Row) -> str:
    """Return the first device as it calls itself; a driver may have told no name."""
    return next(iter(row["environment"]["devices"]), "a device without a name")


def device_name(row: Row) -> str:
    """Return what one device is called, without what says nothing: `AMD EPYC, 1 thread`."""
    threads = row["config"].get("threads", 1)  # older records had one
    name = MARKS.sub("", first_device(row))
    return name + (f", {threads} thread{'s' * (threads > 1)}" if row["config"]["device"] == "cpu" else "")


def devices_of(row: Row) -> str:
    """Return `AMD EPYC, 1 thread x2`: two CPU devices of one thread each."""
    return f"{device_name(row)} x{row['config']['devices']}"


# -- times


def clock(seconds: float) -> str:
    """Return `1:02:03` or `2:03`: hours, minutes and seconds, rounded."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clock_seconds(text: str) -> int:
    """Return the seconds of `1:02:03` or `2:03`."""
    return sum(int(part) * 60**place for place, part in enumerate(reversed(text.split(":"))))


def step_s(record: Row) -> float:
    """Return the mean seconds of a training step, without validation and checkpoints."""
    return (record["train_time_s"] - record["reporting_s"]) / record["steps"]
