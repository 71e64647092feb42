"""What the tables' rows say of a record, of a published result, and of a run folder that nobody has run.

Every row is `measured` (from a committed record), `published` (with its source), `projected` or `not run`.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

import pandas as pd

from common.base.errors import BadInputError, closest
from common.base.paths import REPOSITORY
from common.base.run_config import DEFAULTS, SET_ASIDE, RunConfig
from common.base.run_folders import run_folders
from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES, Task, is_registered
from common.hardware.devices import find_gpu, gpu_of_device
from common.planning.job import BatchShape
from common.planning.plans import Plan, plan_run
from common.records.store import RECORD_NAME, Record, records_in

PUBLISHED_FILE = REPOSITORY / "assets" / "published.json"
NOT_RUN, NOT_PUBLISHED, NO_GPU, PROJECTED, OFF = "not run", "not published", "no GPU", "projected", "off"
NO_BASELINE = "-"
"""Of what is said of the model before training, where that was not evaluated."""
PROJECTED_LENGTH = 1024
"""Tokens of a row in projections for GPU folders."""
GIB_PER_DEVICE = "GiB per device"
PLANNED = "Training's peak, planned / measured (GiB)"
LAUNCHERS = {"python": "", "acclaunch": "accelerate launch", "nblaunch": "notebook_launcher", "ray": "Ray Train"}
"""By their names in records: what users call them."""
WHAT, WHERE = ("Approach", "Seed"), ("Figures", "Devices")
FACTORS = ("CUDA scaling factor", "VRAM scaling factor")
STEPS = ("Batch size", "Steps", "Training time", "Tokens per second")
REPORTING = "Of that, validation and checkpoints"
MEMORY = ("Peak memory per device (GiB)", PLANNED, "Command")
SPEED = (*WHAT, *STEPS, *WHERE, REPORTING, *MEMORY)
"""Columns of the tables of time and memory."""
STRONG, WEAK = "effective_batch_size", "per_device_train_batch_size"
"""What runs on one device and on several share when they are compared: strong scaling, or weak."""

SCHEDULES = {"naive": "naive MP", "gpipe": "GPipe", "1f1b": "1F1B"}

Kind = tuple[str, str]
"""Technique and parallelism."""
LORA, LORA_DDP, LORA_PP = ("lora", "single"), ("lora", "ddp"), ("lora", "pp")
QLORA, QLORA_DDP, QLORA_FSDP = ("qlora", "single"), ("qlora", "ddp"), ("qlora", "fsdp")
FULL, FULL_DDP, FULL_MP, FULL_PP = ("full", "single"), ("full", "ddp"), ("full", "mp"), ("full", "pp")
FULL_FSDP, FULL_ZERO3 = ("full", "fsdp"), ("full", "zero3")
FREE_SETTINGS = {
    *("parallel", "devices", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("gradient_checkpointing", "use_reentrant", "padding_free", "per_device_eval_batch_size", "baseline"),
    *("stages", "device_map", "schedule", "micro_batches", "wrap", "prefetch", "offload", "dp_replicate_size"),
    *("loop", "partitions", "gradient_exchange", "bucket_cap_mb", "step_timeout_s", "link", "log_format"),
    *("run_folder", "run_name", "results_root"),
}
"""Settings that two runs need not share to be compared in time: how the work is divided, and what the run is called."""

Row = dict[str, str]
MARKS = re.compile(r"\((R|TM)\)| (CPU|Processor)\b.*")
"""What CPUs have in their names that says nothing: `Intel(R) Xeon(R) Processor` is an Intel Xeon."""


@dataclass(frozen=True)
class Metric:
    """How good a run's answers are, by its name in the record; `shown` is the form of a value."""

    name: str
    label: str
    direction: str
    shown: str


ANSWER_METRICS = (
    Metric("facts_said_share", "facts said", "higher", "{:.0%}"),
    Metric("similarity_score", "similarity score", "lower", "{:.3f}"),
    Metric("similarity_score_minilm", "similarity score by MiniLM", "lower", "{:.3f}"),
)
"""Of answers to questions; the one to look at first before the others."""


def as_table(rows_of: Callable[..., Iterable[Row]]) -> Callable[..., pd.DataFrame]:
    """Make a function that yields the rows of a table return a `DataFrame`, with `not run` in cells without a value."""

    @wraps(rows_of)
    def table(records: list[Record], **chosen: Any) -> pd.DataFrame:
        return pd.DataFrame(rows_of(records, **chosen)).fillna(NOT_RUN)

    return table


# -- what is on this machine, and what others published


def result_files(*folders: Path) -> list[Path]:
    """Return the files of the records of the last runs that wrote into these `results` folders."""
    return [
        run / RECORD_NAME
        for folder in folders
        for run in sorted(folder.glob("*"))
        if not SET_ASIDE.fullmatch(run.name)
        if os.path.lexists(run / RECORD_NAME)  # a link that leads nowhere is to be named, too
    ]


def results_in(*folders: Path) -> list[Record]:
    """Return the records of the last runs that wrote into these `results` folders."""
    return [record for _, record in records_in(result_files(*folders))]


def results_folders() -> list[Path]:
    """Return where the runs of each run folder write."""
    return sorted(REPOSITORY.glob("*/run_*/results"))


def results_of_this_machine() -> list[Record]:
    """Return the records of the last runs in every run folder, whether kept or not."""
    return sorted(
        results_in(*results_folders()),
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
            question = (
                f"did you mean {meant}?" if meant else "`python -m common.report --results` lists those there are."
            )
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


def published_results(*kinds: Kind, metric: str = "similarity_score") -> list[dict[str, Any]]:
    """Return what others published with this metric, with sources, of these kinds; none given: of all kinds."""
    return [
        result
        for result in json.loads(PUBLISHED_FILE.read_text(encoding="utf-8"))
        if metric in result and (not kinds or kind_of(result) in kinds)
    ]


# -- which runs a table has


def kind_of(result: dict[str, Any]) -> Kind:
    """Return technique and parallelism of a record or of a published result."""
    return result["technique"], result["parallel"]


def task_of(record: Record) -> str:
    """Return the name of the task that a run learnt; older records know one task only."""
    return record["config"].get("task", "chat")


def completed(records: Iterable[Record], *kinds: Kind, reporting: str = "") -> list[Record]:
    """Return the completed runs of these kinds, or of all kinds if none is given.

    `reporting` is the module with the tables of their task, as `Task.reporting` names it; empty = those that share the
    tables of all chats. Tasks from outside of this repository have neither.
    """
    return [
        record
        for record in records
        if is_comparable(record) and TASKS[task_of(record)].reporting == reporting
        if not kinds or kind_of(record) in kinds
    ]


def is_comparable(record: Record) -> bool:
    """Return whether a run completed, and did what is registered here."""
    return record["status"] == "completed" and is_registered(record)


def by_setting(runs: Iterable[Record]) -> list[list[Record]]:
    """Group runs that differ in their seed alone; a group begins with its lowest seed."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for run in runs:
        named = ("seed", "run_name", "results_root")
        same = {name: value for name, value in run["config"].items() if name not in named}
        groups.setdefault((run["launcher"], *same.items()), []).append(run)
    return [sorted(group, key=lambda run: run["config"]["seed"]) for group in groups.values()]


def by_setting_of_commands(runs: Iterable[Record]) -> list[list[Record]]:
    """Group runs by their setting; those of a notebook are left to it."""
    return by_setting(run for run in runs if run["launcher"] in ("python", "torchrun", "acclaunch"))


def speedup_over_one_device(record: Record, records: Iterable[Record]) -> str:
    """Return how many times as fast a run was as the one on one device with as many rows a step: `1.56x`."""
    is_single = PARALLELISMS[record["parallel"]].is_single
    baseline = record if is_single else baseline_of(record, records, STRONG)
    return f"{baseline['train_time_s'] / record['train_time_s']:.2f}x" if baseline else "no run on one device"


def not_run_rows(reporting: str, done: Iterable[Record]) -> list[Row]:
    """Return a row for each run folder for GPUs that nobody has run, of the task with the tables of `reporting`."""
    folders = {record["run_folder"] for record in done}
    return [
        {
            "Setting": kind_name(run.technique, run.parallel),
            "Model": run.model,
            "Figures": NOT_RUN,
            "Devices": f"{run.gpu} x{run.devices}",
        }
        for run in run_folders().values()
        if run.goal.reporting == reporting and run.device == "cuda" and run.run_folder not in folders
    ]


def workload(record: Record, same: str) -> dict[str, object]:
    """Return what two runs must share to be compared in time: settings that are not free, devices and batch size.

    `same` is `STRONG` or `WEAK`.
    """
    config = {**DEFAULTS, **record["config"]}  # older: fewer settings
    return {
        **{name: value for name, value in config.items() if name not in FREE_SETTINGS},
        "rows": record[same] if same == STRONG else config[same],
        "recomputes_activations": config["gradient_checkpointing"],
        "device_name": first_device(record),
        "threads_per_rank": record["environment"]["threads_per_rank"],
    }


def baseline_of(record: Record, records: Iterable[Record], same: str) -> Record | None:
    """Return the one-device run of the same `workload` that `record` is compared with.

    A run by command is preferred to a notebook's, as the others are runs by command, too. A base in 4 bits has no
    baseline.
    """
    shared = workload(record, same)
    found = [
        candidate
        for candidate in records
        if is_comparable(candidate) and PARALLELISMS[candidate["parallel"]].is_single
        if workload(candidate, same) == shared and not TECHNIQUES[record["technique"]].quantizes
    ]
    return min(found, key=lambda candidate: candidate["launcher"] != "python", default=None)


def beside_one_device(
    runs: Iterable[Record], records: Iterable[Record], same: str
) -> list[tuple[Record, Record | None]]:
    """Return each run with its baseline (see `baseline_of`); before the first run of a baseline stands the baseline."""
    pairs: list[tuple[Record, Record | None]] = []
    for run in runs:
        baseline = baseline_of(run, records, same)
        if baseline and all(baseline is not shown for shown, _ in pairs):
            pairs.append((baseline, baseline))
        pairs.append((run, baseline))
    return pairs


# -- tasks with tables of their own


class OwnTables(Protocol):
    """What the module has that `Task.reporting` names.

    Attributes:
        TABLES: By their names in the pages' markers.
        SHARED: By a table's name the columns whose values stand above its parts.
        METRICS: How good its runs are, the one to look at first before the others.
    """

    TABLES: dict[str, Callable[[list[Record]], pd.DataFrame]]
    SHARED: dict[str, tuple[str, ...]]
    METRICS: tuple[Metric, ...]

    @staticmethod
    def results_text(records: list[Record]) -> str:
        """Return the table of the last runs on this machine, for a terminal; records of other tasks are passed over."""


def own_tables(task: Task) -> OwnTables:
    """Return the module of a task with tables of its own; it is imported here, so that no list names it."""
    return resolve_name(task.reporting)


def all_own_tables() -> list[OwnTables]:
    """Return all such modules, in the order of the tasks."""
    return [own_tables(task) for task in TASKS.values() if task.has_own_tables]


def loss_per(record: Record) -> str:
    """Return what the loss of a run's task is a mean over."""
    task = TASKS.get(task_of(record))
    return task.loss_per if task else Task.loss_per


def metrics_of(record: Record) -> tuple[Metric, ...]:
    """Return how good the answers of a run's task are; a task from outside has those of chats."""
    task = TASKS.get(task_of(record))
    return own_tables(task).METRICS if task and task.has_own_tables else ANSWER_METRICS


# -- cells


def kind_name(technique: str, parallel: str) -> str:
    """Return what a technique and a parallelism are called: `Full fine-tuning`, `LoRA with DDP`.

    What another program has registered is called as it is in the record.
    """
    how = PARALLELISMS.get(parallel)
    title = TECHNIQUES[technique].title if technique in TECHNIQUES else technique
    return title + ("" if how and how.is_single else f" with {how.label if how else parallel}")


def approach(record: Record) -> str:
    """Return what was done, what started it, unless `python` did, and whether weights were random.

    Such as `LoRA with DDP, torchrun`.
    """
    hybrid = f" ({copies_of(record)} copies)" if copies_of(record) > 1 else ""
    launcher = LAUNCHERS.get(record["launcher"], record["launcher"])
    weights = "random weights" if record["config"].get("weights") == "random" else ""
    return ", ".join(filter(None, (f"{kind_name(*kind_of(record))}{hybrid}", launcher, weights)))


def copies_of(record: Record) -> int:
    """Return how many sharded copies of the model the ranks held; older records have no such setting."""
    return record["config"].get("dp_replicate_size", 1)


def training_time(record: Record) -> str:
    """Return how long training took; of a run that resumed from a checkpoint, since then."""
    before = record.get("checkpoints", {}).get("went_on_from")
    return clock(record["train_time_s"]) + (f" (since {before})" if before else "")


def clock(seconds: float) -> str:
    """Return `1:02:03` or `2:03`: hours, minutes and seconds, rounded."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clock_seconds(text: str) -> int:
    """Return the seconds of `1:02:03` or `2:03`."""
    return sum(int(part) * 60**place for place, part in enumerate(reversed(text.split(":"))))


def step_s(record: Record) -> float:
    """Return the mean seconds of a training step, without validation and checkpoints."""
    return (record["train_time_s"] - record["reporting_s"]) / record["steps"]


def percent(share: float | None) -> str:
    """Return `63%`; data without facts have no share."""
    return "no facts in the data" if share is None else f"{share:.0%}"


def score(value: float | None) -> str:
    """Return a similarity score; None = nobody judged."""
    return NOT_RUN if value is None else f"{value:.3f}"


def judged(value: float | None) -> str:
    """Return a score of the independent judge; None = it was switched off."""
    return OFF if value is None else f"{value:.3f}"


def before_training(record: Record, name: str, shown: Callable[[Any], str]) -> str:
    """Return a score before training, as `shown` has it; `-` where the base was not evaluated (`--baseline none`)."""
    scores = record["quality"].get("before")
    return shown(scores[name]) if scores else NO_BASELINE


def over_seeds(values: Sequence[float | None], form: str) -> str:
    """Return a single value, or `0.92 (0.90 to 0.93)` of several: the mean, the lowest and the highest.

    Where one of them has none, nothing can be said.
    """
    if None in values:
        return NOT_RUN
    mean, low, high = (form.format(value) for value in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def devices_of(record: Record) -> str:
    """Return `AMD EPYC, 1 thread x2`: two CPU devices of one thread each."""
    return f"{_name_of_device(record)} x{record['config']['devices']}"


def device_of(record: Record) -> str:
    """Return `AMD EPYC, 1 thread per device`: one of a run's devices."""
    return _name_of_device(record) + (" per device" if record["config"]["device"] == "cpu" else "")


def short_devices_of(record: Record) -> str:
    """Return `AMD EPYC x2`: the same as `devices_of`, where the single thread of a CPU device goes without saying."""
    return devices_of(record).replace(", 1 thread x", " x")


def first_device(record: Record) -> str:
    """Return the first device as it calls itself; a driver may have told no name."""
    return next(iter(record["environment"]["devices"]), "a device without a name")


def _name_of_device(record: Record) -> str:
    threads = record["config"].get("threads", 1)  # older records had one
    name = MARKS.sub("", first_device(record))
    return name + (f", {threads} thread{'s' * (threads > 1)}" if record["config"]["device"] == "cpu" else "")


def model_of(record: Record) -> str:
    """Return the model's name; random weights are told apart from the real ones."""
    config = record["config"]
    return Path(config["model"]).name + (", random weights" if config["weights"] == "random" else "")


def data_parallel_ranks(record: Record) -> int:
    """Return the number of ranks that worked on rows of their own; the stages of a model work on the same rows."""
    return len(record["world"]) if PARALLELISMS[record["parallel"]].splits_rows else 1


def peak_memory_gib(record: Record) -> str:
    """Return the peak memory of each device: allocated on a GPU, resident (RSS) on CPU."""
    return " / ".join(f"{entry['peak_allocated_gib'] or entry['peak_rss_gib']:.2f}" for entry in record["memory"])


def planned_memory(record: Record) -> str:
    """Return `0.64 / 0.63 (+1%)`: training's peak as planned and measured, in GiB, of the device that is off most."""
    pairs = [(entry["planned_gib"], entry.get("peak_training_gib")) for entry in record["memory"]]
    known = [pair for pair in pairs if None not in pair]
    if not known:
        return NOT_RUN
    planned, measured = max(known, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return f"{planned:.2f} / {measured:.2f} ({planned / measured - 1:+.0%})"


def idle_shares(record: Record) -> str:
    """Return `25% / 50%`: the share of the time in which each stage waited; `-` = there are no stages."""
    return " / ".join(f"{stage['idle_share']:.0%}" for stage in record.get("stages") or []) or "-"


def ceiling_of(record: Record, same: str) -> str:
    """Return the run's own measurement of the highest speed-up to expect at the `same` batch, `STRONG` or `WEAK`."""
    ceiling = record.get("machine_ceiling")
    return f"{ceiling['strong' if same == STRONG else 'weak']:.2f}x" if ceiling else NOT_RUN


def learning_rate_scaling(peak: float, base: float) -> str:
    """Return `1.41x (0.00141)`: how much of the peak learning rate comes from scaling with the ranks, and the peak."""
    return f"{peak / base:.3g}x ({peak:.3g})"


def hardware_factors(record: Record, baseline: Record | None) -> Row:
    """Return CUDA cores and memory of a run's GPUs, as multiples of its baseline's, which are of the same kind."""
    gpu, count = gpu_of_device(first_device(record)), record["config"]["devices"]
    if gpu is None:
        return dict.fromkeys(FACTORS, NO_GPU)
    factor = count / (baseline["config"]["devices"] if baseline else 1)
    sizes = (f"{gpu.cuda_cores:,} x{count}", f"{gpu.memory_gib:.0f} GiB x{count}")
    return {name: f"{factor:.3g}x ({size})" for name, size in zip(FACTORS, sizes, strict=True)}


# -- rows


def measured_quality(record: Record) -> Row:
    """Return a run's quality, before and after."""
    config, after = record["config"], record["quality"]["after"]
    rows = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    return {
        "Approach": approach(record),
        "Seed": str(config["seed"]),
        "Similarity score": score(after["similarity_score"]),
        "Facts said": percent(after["facts_said_share"]),
        "Validation loss": f"{record['best_validation_loss']:.4f}",
        "Figures": "measured",
        "Devices": devices_of(record),
        "Epochs": str(config["num_train_epochs"]),
        "Batch size": str(rows),
        "Effective batch size": f"{rows} x{data_parallel_ranks(record)}",
        "Learning rate scaling": learning_rate_scaling(record["peak_learning_rate"], config["learning_rate"]),
        "Similarity score before": before_training(record, "similarity_score", score),
        "By the tuned model": score(after["similarity_score_tuned"]),
        "By MiniLM before": before_training(record, "similarity_score_minilm", score),
        "By MiniLM": score(after["similarity_score_minilm"]),
        "Answers shuffled": score(after["shuffled_score"]),
        "Shuffled, by MiniLM": score(after["shuffled_score_minilm"]),
        "Facts said before": before_training(record, "facts_said_share", percent),
    }


def published_quality(result: dict[str, Any]) -> Row:
    """Return the same of a published result."""
    return {
        "Approach": kind_name(*kind_of(result)),
        "Figures": f"published: {result['source']}",
        "Seed": NOT_PUBLISHED,
        "Devices": f"{result['gpu']} x{result['devices']}",
        "Epochs": str(result["epochs"]),
        "Batch size": str(result["batch_size"]),
        "Effective batch size": _published_batch(result),
        "Learning rate scaling": f"{result.get('learning_rate_factor', 1):g}x ({result['learning_rate']:g})"
        if "learning_rate" in result
        else NOT_PUBLISHED,
        "Similarity score before": NOT_PUBLISHED,
        "Similarity score": score(result["similarity_score"]),
        **dict.fromkeys(
            ("By the tuned model", "By MiniLM before", "By MiniLM", "Answers shuffled", "Shuffled, by MiniLM",
             "Facts said before", "Facts said", "Validation loss"),
            NOT_PUBLISHED,
        ),
    }  # fmt: skip


def measured_speed(record: Record, baseline: Record | None = None, same: str = STRONG) -> Row:
    """Return a run's time and memory, compared with those of a baseline with the `same` batch (`STRONG` or `WEAK`)."""
    config, stored = record["config"], record.get("quantization")
    speedup = f"{baseline['train_time_s'] / record['train_time_s']:.2f}x" if baseline else NOT_RUN
    needed_gib = max(entry["peak_allocated_gib"] or entry["peak_rss_gib"] for entry in record["memory"])
    return {
        "Approach": approach(record),
        "Figures": "measured",
        "Seed": str(config["seed"]),
        "Devices": devices_of(record),
        **hardware_factors(record, baseline),
        "Batch size": f"{config['per_device_train_batch_size']} x{data_parallel_ranks(record)}",
        "Steps": str(record["steps"]),
        "Training time": training_time(record),
        REPORTING: clock(record["reporting_s"]),
        "Training speedup factor": speedup,
        "Against one device": speedup,
        "Machine's ceiling": "1x" if PARALLELISMS[record["parallel"]].is_single else ceiling_of(record, same),
        "Tokens per second": f"{record['tokens_per_s']:,.0f}",
        "Validation loss": f"{record['best_validation_loss']:.4f}",
        "Micro-batches": f"{config['micro_batches']}, {config['schedule']}" if record.get("stages") else "-",
        "Idle share per stage": idle_shares(record),
        "VRAM requirement per GPU": f"{needed_gib:.2f} GiB"
        + (" (the process's memory)" if config["device"] == "cpu" else ""),
        "Peak memory per device (GiB)": peak_memory_gib(record),
        PLANNED: planned_memory(record),
        "Bits per quantized weight": f"{stored['bits_per_quantized_weight']:.2f}" if stored else "-",
        "Command": f"`{record['command']}`" if record["command"] != "the notebook" else "the notebook",
    }


def published_speed(result: dict[str, Any], baseline: dict[str, Any]) -> Row:
    """Return the same of a published result."""
    speedup = clock_seconds(baseline["train_time"]) / clock_seconds(result["train_time"])
    cores, memory = (
        result[name] * result["devices"] / (baseline[name] * baseline["devices"]) for name in ("cuda_cores", "vram_gb")
    )
    return {
        **dict.fromkeys((*SPEED, "Machine's ceiling"), NOT_PUBLISHED),
        "Approach": kind_name(*kind_of(result)),
        "Figures": f"published: {result['source']}",
        "Devices": f"{result['gpu']} x{result['devices']}",
        "CUDA scaling factor": f"{cores:.3g}x ({result['cuda_cores']:,} x{result['devices']})",
        "VRAM scaling factor": f"{memory:.3g}x ({result['vram_gb']}G x{result['devices']})",
        "Batch size": _published_batch(result),
        "Training time": clock(clock_seconds(result["train_time"])),
        "Training speedup factor": f"{speedup:.2f}x",
        "VRAM requirement per GPU": f"{result['vram_gb'] / baseline['vram_gb']:.2g}x ({result['vram_gb']} GB cards)",
    }


def _published_batch(result: dict[str, Any]) -> str:
    ranks = result["devices"] if PARALLELISMS[result["parallel"]].splits_rows else 1
    return f"{result['batch_size']} x{ranks}"


def not_run(folder: Path, run: RunConfig) -> Row:
    """Return what is known of a run folder without a record: its settings and its command."""
    rows = run.per_device_train_batch_size
    return {
        "Approach": kind_name(run.technique, run.parallel),
        "Figures": NOT_RUN,
        "Seed": str(run.seed),
        "Model": Path(run.model).name,
        "Devices": f"{run.gpu or 'CPU, 1 thread'} x{run.devices}",
        "Epochs": str(run.num_train_epochs),
        "Batch size": f"{rows} x{run.data_parallel_ranks}",
        "Effective batch size": f"{rows * run.gradient_accumulation_steps} x{run.data_parallel_ranks}",
        "Learning rate scaling": learning_rate_scaling(run.peak_learning_rate, run.learning_rate),
        "Trained on": f"{run.num_train_epochs} epochs",
        "Command": f"`make run FOLDER={folder.relative_to(REPOSITORY)}`"
        if run.nodes == 1
        else f"a torchrun on each of {run.nodes} machines",
    }


# -- tables


def table_of(
    records: list[Record],
    kinds: Sequence[Kind],
    measured: list[Row],
    published: Sequence[Row] = (),
    columns: Sequence[str] = (),
) -> pd.DataFrame:
    """Return measured rows, a row for each run folder of these kinds without any record, and published rows.

    `columns` are those of the first row, if none are given.
    """
    done = {record["run_folder"] for record in completed(records, *kinds)}
    waiting = [
        not_run(folder, run)
        for folder, run in run_folders().items()
        if not run.goal.has_own_tables and (run.technique, run.parallel) in kinds and run.run_folder not in done
    ]
    columns = columns or list([*measured, *published, *waiting][0])
    return pd.DataFrame([*measured, *waiting, *published], columns=columns, dtype=object).fillna(NOT_RUN)


def quality_table(records: list[Record], shown: tuple[Kind, ...], beside: tuple[Kind, ...] = ()) -> pd.DataFrame:
    """Return the quality of runs of the kinds `shown`, with their run folders, and `beside` them of other kinds."""
    return table_of(
        records,
        shown,
        measured=[measured_quality(record) for record in completed(records, *beside, *shown)],
        published=[published_quality(result) for result in published_results(*beside, *shown)],
    )


def speed_table(records: list[Record], shown: tuple[Kind, ...], beside: tuple[Kind, ...] = ()) -> pd.DataFrame:
    """Return the same runs' time and memory, each by itself."""
    return table_of(
        records,
        shown,
        measured=[measured_speed(record) for record in completed(records, *beside, *shown)],
        published=[published_speed(result, result) for result in published_results(*beside, *shown)],
        columns=SPEED,
    )


def speedup_table(
    records: list[Record],
    pairs: Iterable[tuple[Record, Record | None]],
    same: str,
    columns: Sequence[str],
    waiting: Sequence[Kind] = (),
    published: Sequence[Kind] = (),
) -> pd.DataFrame:
    """Return time and memory of runs, each compared with its baseline: `pairs`, as from `beside_one_device`.

    With a row for each run folder of the kinds `waiting` without a record, and the results of the kinds `published`,
    compared with the first of them.
    """
    found = published_results(*published) if published else []
    return table_of(
        records,
        waiting,
        measured=[measured_speed(*pair, same) for pair in pairs],
        published=[published_speed(result, found[0]) for result in found],
        columns=columns,
    )


def fits(needed_gib: float, gpu: str) -> str:
    """Return whether a GPU of the catalogue has so much memory."""
    return "yes" if needed_gib <= find_gpu(gpu).memory_gib else "no"


def projected_plan(run: RunConfig) -> Plan:
    """Return the plan of a GPU folder's run, with rows of `PROJECTED_LENGTH` tokens."""
    return plan_run(run, BatchShape(run.per_device_train_batch_size, PROJECTED_LENGTH, PROJECTED_LENGTH))
