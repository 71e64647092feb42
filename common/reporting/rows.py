"""What the tables' rows say of a record, of a published result, and of a run folder that nobody has run.

Every row is `measured` (from a committed record), `published` (with its source), `projected` or `not run`.
"""

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.hardware.devices import gpu_of_device
from common.records.store import PREVIOUS, RECORD_NAME, UNFINISHED, Record, load_record

PUBLISHED_FILE = REPOSITORY / "assets" / "published.json"
NOT_RUN, NOT_PUBLISHED, NO_GPU = "not run", "not published", "no GPU"
PLANNED = "Training's peak, planned / measured (GiB)"

Kind = tuple[str, str]
"""Technique and way to share the work."""
LORA, LORA_DDP, LORA_PP = ("lora", "single"), ("lora", "ddp"), ("lora", "pp")
QLORA, QLORA_DDP, QLORA_FSDP = ("qlora", "single"), ("qlora", "ddp"), ("qlora", "fsdp")
FULL, FULL_MP, FULL_PP = ("full", "single"), ("full", "mp"), ("full", "pp")
FULL_DDP = ("full", "ddp")
FULL_FSDP, LORA_FSDP = ("full", "fsdp"), ("lora", "fsdp")
ZERO = [way.name for way in PARALLELISMS.values() if way.uses_deepspeed]
FULL_ZERO, LORA_ZERO = ([(technique, way) for way in ZERO] for technique in ("full", "lora"))
KIND_NAMES: dict[Kind, str] = {
    (technique.name, way.name): technique.title + ("" if way.is_single else f" with {way.label}")
    for technique, way in product(TECHNIQUES.values(), PARALLELISMS.values())
}
FREE_SETTINGS = {
    *(
        "parallel",
        "devices",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "use_reentrant",
    ),
    *("stages", "device_map", "schedule", "micro_batches", "wrap", "prefetch", "offload"),
    *("loop", "partitions", "gradient_exchange", "bucket_cap_mb", "step_timeout_s", "link", "log_format"),
    *("run_folder", "run_name", "results_root"),
}
"""Settings that two runs need not share to be compared in time: how the work is divided, and what it is called."""

Row = dict[str, str]


def results_of_this_machine(root: Path = REPOSITORY) -> list[Record]:
    """The records of the last runs, whether kept or not."""
    records = [record for results in root.glob("*/run_*/results") for record in results_in(results)]
    return sorted(
        records,
        key=lambda record: (record["run_folder"], record["config"]["per_device_train_batch_size"], record["run_name"]),
    )


def results_in(folder: Path) -> list[Record]:
    """The records of the last runs that wrote into one `results` folder."""
    found = folder.glob(f"*/{RECORD_NAME}")
    return [load_record(path) for path in found if not path.parent.name.endswith((PREVIOUS, UNFINISHED))]


def published_results(*kinds: Kind) -> list[dict[str, Any]]:
    """Results that others published of these kinds (none named: of all), on questions and answers, with sources."""
    found = json.loads(PUBLISHED_FILE.read_text(encoding="utf-8"))
    return [result for result in found if "similarity_score" in result and (not kinds or kind_of(result) in kinds)]


def kind_of(result: dict[str, Any]) -> Kind:
    """Technique and way to share the work of a record or of a published result."""
    return result["technique"], result["parallel"]


def training_time(record: Record) -> str:
    """How long training took; of a run that resumed from a checkpoint, since then."""
    before = record.get("checkpoints", {}).get("went_on_from")
    return clock(record["train_time_s"]) + (f" (since {before})" if before else "")


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`: hours, minutes and seconds, rounded."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clock_seconds(text: str) -> int:
    """Seconds of `1:02:03` or `2:03`."""
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds


def percent(share: float | None) -> str:
    """`63%`; data without facts have no share."""
    return "no facts in the data" if share is None else f"{share:.0%}"


def devices_of(record: Record) -> str:
    """`AMD EPYC, 1 thread x2`: two CPU devices of one thread each."""
    count, name = record["config"]["devices"], record["environment"]["devices"][0]
    return f"{name}, 1 thread x{count}" if record["config"]["device"] == "cpu" else f"{name} x{count}"


def data_parallel_ranks(record: Record) -> int:
    """Ranks that worked on rows of their own; the stages of a model work on the same ones."""
    return len(record["world"]) if PARALLELISMS[record["parallel"]].splits_rows else 1


def peak_memory_gib(record: Record) -> str:
    """Peak memory of each device: allocated on a GPU, resident (RSS) on CPU."""
    peaks = [entry["peak_allocated_gib"] or entry["peak_rss_gib"] for entry in record["memory"]]
    return " / ".join(f"{peak:.2f}" for peak in peaks)


def planned_memory(record: Record) -> str:
    """`0.64 / 0.63 (+1%)`: training's peak as planned and as measured, in GiB, of the device that is furthest off."""
    pairs = [(entry["planned_gib"], entry.get("peak_training_gib")) for entry in record["memory"]]
    known = [(planned, measured) for planned, measured in pairs if planned is not None and measured is not None]
    if not known:
        return NOT_RUN
    planned, measured = max(known, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return f"{planned:.2f} / {measured:.2f} ({planned / measured - 1:+.0%})"


def ceiling_of(record: Record, scaling: str) -> str:
    """The run's own measurement of the highest speed-up to expect; `scaling` is `strong` or `weak`."""
    ceiling = record.get("machine_ceiling")
    return f"{ceiling[scaling]:.2f}x" if ceiling else NOT_RUN


def workload(record: Record) -> dict[str, object]:
    """What two runs must share to be compared in time: every setting but the free ones, and the kind of device."""
    config, environment = {**RunConfig().to_dict(), **record["config"]}, record["environment"]  # older: fewer settings
    return {
        **{name: value for name, value in config.items() if name not in FREE_SETTINGS},
        "recomputes_activations": config["gradient_checkpointing"],
        "device_name": environment["devices"][0],
        "threads_per_rank": environment["threads_per_rank"],
    }


def baseline_of(record: Record, records: Iterable[Record], same: str) -> Record | None:
    """The one-device run that `record`'s speed-up is stated against: same work, seed and `same` batch size.

    A run by command comes before a notebook's, as the others are runs by command, too.

    `same` is `effective_batch_size` (strong scaling) or `batch_size` (rows per device: weak scaling).
    """

    def rows(run: Record) -> int:
        return (
            run["effective_batch_size"]
            if same == "effective_batch_size"
            else run["config"]["per_device_train_batch_size"]
        )

    found = [
        candidate
        for candidate in completed(records, LORA, FULL, task=task_of(record))
        if workload(candidate) == workload(record) and rows(candidate) == rows(record)
    ]
    return min(found, key=lambda candidate: candidate["launcher"] != "python", default=None)


def completed(records: Iterable[Record], *kinds: Kind, task: str = "chat") -> list[Record]:
    """The completed runs among `records`, of the given kinds and task."""
    return [
        record
        for record in records
        if record["status"] == "completed" and kind_of(record) in kinds and task_of(record) == task
    ]


def task_of(record: Record) -> str:
    """What a run learnt; older records know one task only."""
    return record["config"].get("task", "chat")


def mean_and_range(values: list[float], form: str) -> str:
    """`0.92 (0.90 to 0.93)`: the mean, and the lowest and highest."""
    mean, low, high = (form.format(value) for value in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def over_seeds(values: list[float], form: str) -> str:
    """One value as it is; of several the mean, and the lowest and highest."""
    return mean_and_range(values, form) if len(values) > 1 else form.format(values[0])


def score(value: float | None) -> str:
    """A similarity score; None where nobody judged."""
    return NOT_RUN if value is None else f"{value:.3f}"


def learning_rate_scaling(record: Record) -> str:
    """`1x (0.001)`: the peak learning rate, and how much of it comes from scaling with the ranks."""
    peak = record["peak_learning_rate"]
    return f"{peak / record['config']['learning_rate']:.3g}x ({peak:.3g})"


def model_of(record: Record) -> str:
    """The model's name; random weights are told apart from the real ones."""
    config = record["config"]
    return Path(config["model"]).name + (", random weights" if config["weights"] == "random" else "")


def trained_on(record: Record) -> str:
    """The data, and how often they were gone through."""
    config = record["config"]
    samples = sum(share["samples"] for share in record["world"][: data_parallel_ranks(record)])
    return f"{Path(config['data']).name}, {samples:,} rows in up to {config['num_train_epochs']} epochs"


def hardware_factors(record: Record, baseline: Record | None) -> Row:
    """CUDA cores and memory of a run's GPUs, as multiples of its baseline's."""
    gpu, other = (gpu_of_device(run["environment"]["devices"][0]) if run else None for run in (record, baseline))
    if gpu is None:
        return {"CUDA scaling factor": NO_GPU, "VRAM scaling factor": NO_GPU}
    count, base_count = record["config"]["devices"], baseline["config"]["devices"] if baseline else 1
    base = other if baseline else gpu
    if base is None:
        return {"CUDA scaling factor": "another kind of device", "VRAM scaling factor": "another kind of device"}
    cores = count * gpu.cuda_cores / (base_count * base.cuda_cores)
    memory = count * gpu.memory_gib / (base_count * base.memory_gib)
    return {
        "CUDA scaling factor": f"{cores:.3g}x ({gpu.cuda_cores:,} x{count})",
        "VRAM scaling factor": f"{memory:.3g}x ({gpu.memory_gib:.0f} GiB x{count})",
    }


def approach(record: Record) -> str:
    """What was done, and how it was started."""
    return f"{KIND_NAMES[record['technique'], record['parallel']]}, {record['launcher']}"


def measured_quality(record: Record) -> Row:
    """A run's quality, before and after."""
    config, before, after = record["config"], record["quality"]["before"], record["quality"]["after"]
    return {
        "Approach": approach(record),
        "Figures": "measured",
        "Seed": str(record["config"]["seed"]),
        "Devices": devices_of(record),
        "Epochs": str(config["num_train_epochs"]),
        "Batch size": str(config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]),
        "Effective batch size": f"{config['per_device_train_batch_size'] * config['gradient_accumulation_steps']} x{data_parallel_ranks(record)}",
        "Learning rate scaling": learning_rate_scaling(record),
        "Similarity score before (lower is better)": score(before["similarity_score"]),
        "Similarity score (lower is better)": score(after["similarity_score"]),
        "By the tuned model": score(after["similarity_score_tuned"]),
        "By MiniLM before": score(before["similarity_score_minilm"]),
        "By MiniLM": score(after["similarity_score_minilm"]),
        "Answers shuffled": score(after["shuffled_score"]),
        "Shuffled, by MiniLM": score(after["shuffled_score_minilm"]),
        "Facts said before": percent(before["facts_said_share"]),
        "Facts said (higher is better)": percent(after["facts_said_share"]),
        "Validation loss": f"{record['best_validation_loss']:.4f}",
    }


def published_quality(result: dict[str, Any]) -> Row:
    """The same of a published result."""
    return {
        "Approach": KIND_NAMES[kind_of(result)],
        "Figures": f"published: {result['source']}",
        "Seed": NOT_PUBLISHED,
        "Devices": f"{result['gpu']} x{result['devices']}",
        "Epochs": str(result["epochs"]),
        "Batch size": str(result["batch_size"]),
        "Effective batch size": _published_batch(result),
        "Learning rate scaling": f"1x ({result['learning_rate']:g})" if "learning_rate" in result else NOT_PUBLISHED,
        "Similarity score before (lower is better)": NOT_PUBLISHED,
        "Similarity score (lower is better)": score(result["similarity_score"]),
        **dict.fromkeys(
            ("By the tuned model", "By MiniLM before", "By MiniLM", "Answers shuffled", "Shuffled, by MiniLM"),
            NOT_PUBLISHED,
        ),
        "Facts said before": NOT_PUBLISHED,
        "Facts said (higher is better)": NOT_PUBLISHED,
        "Validation loss": NOT_PUBLISHED,
    }


def measured_speed(record: Record, baseline: Record | None, ceiling: str) -> Row:
    """A run's time and memory, beside a baseline's; `ceiling` is `strong` or `weak`."""
    speedup = baseline["train_time_s"] / record["train_time_s"] if baseline else None
    return {
        "Approach": approach(record),
        "Figures": "measured",
        "Seed": str(record["config"]["seed"]),
        "Devices": devices_of(record),
        **hardware_factors(record, baseline),
        "Batch size": f"{record['config']['per_device_train_batch_size']} x{data_parallel_ranks(record)}",
        "Steps": str(record["steps"]),
        "Training time": training_time(record),
        "Of that, validation and checkpoints": clock(record["reporting_s"]),
        "Training speedup factor": f"{speedup:.2f}x" if speedup else NOT_RUN,
        "Machine's ceiling": "1x" if PARALLELISMS[record["parallel"]].is_single else ceiling_of(record, ceiling),
        "Tokens per second": f"{record['tokens_per_s']:,.0f}",
        "Peak memory per device (GiB)": peak_memory_gib(record),
        PLANNED: planned_memory(record),
        "Command": f"`{record['command']}`" if record["command"] != "the notebook" else "the notebook",
    }


def published_speed(result: dict[str, Any], baseline: dict[str, Any]) -> Row:
    """The same of a published result."""
    speedup = clock_seconds(baseline["train_time"]) / clock_seconds(result["train_time"])
    return {
        "Approach": KIND_NAMES[kind_of(result)],
        "Figures": f"published: {result['source']}",
        "Seed": NOT_PUBLISHED,
        "Devices": f"{result['gpu']} x{result['devices']}",
        **published_factors(result, baseline),
        "Batch size": _published_batch(result),
        "Steps": NOT_PUBLISHED,
        "Training time": clock(clock_seconds(result["train_time"])),
        "Of that, validation and checkpoints": NOT_PUBLISHED,
        "Training speedup factor": f"{speedup:.2f}x",
        "Machine's ceiling": NOT_PUBLISHED,
        "Tokens per second": NOT_PUBLISHED,
        "Peak memory per device (GiB)": NOT_PUBLISHED,
        PLANNED: NOT_PUBLISHED,
        "Command": NOT_PUBLISHED,
    }


def _published_batch(result: dict[str, Any]) -> str:
    ranks = result["devices"] if PARALLELISMS[result["parallel"]].splits_rows else 1
    return f"{result['batch_size']} x{ranks}"


def published_factors(result: dict[str, Any], baseline: dict[str, Any]) -> Row:
    """CUDA cores and memory of all GPUs, as multiples of the baseline's."""
    cores, memory = (
        result[name] * result["devices"] / (baseline[name] * baseline["devices"]) for name in ("cuda_cores", "vram_gb")
    )
    return {
        "CUDA scaling factor": f"{cores:.3g}x ({result['cuda_cores']:,} x{result['devices']})",
        "VRAM scaling factor": f"{memory:.3g}x ({result['vram_gb']}G x{result['devices']})",
    }


def not_run(folder: Path, run: RunConfig) -> Row:
    """What is known of a run folder without a record: its settings and its command."""
    return {
        "Approach": KIND_NAMES[run.technique, run.parallel],
        "Figures": NOT_RUN,
        "Seed": str(run.seed),
        "Model": Path(run.model).name,
        "Devices": f"{run.gpu or 'CPU, 1 thread'} x{run.devices}",
        "Epochs": str(run.num_train_epochs),
        "Batch size": f"{run.per_device_train_batch_size} x{run.data_parallel_ranks}",
        "Effective batch size": f"{run.per_device_train_batch_size * run.gradient_accumulation_steps} x{run.data_parallel_ranks}",
        "Learning rate scaling": f"{run.peak_learning_rate / run.learning_rate:.3g}x ({run.peak_learning_rate:.3g})",
        "Trained on": f"{run.num_train_epochs} epochs",
        "Command": f"`make run FOLDER={folder.relative_to(REPOSITORY)}`",
    }


def table_of(records: list[Record], kinds: Iterable[Kind], measured: list[Row], published: list[Row]) -> pd.DataFrame:
    """Measured rows, a row for each run folder of these kinds without any record, and published rows."""
    done = {record["run_folder"] for record in completed(records, *kinds)}
    waiting = [
        not_run(folder, run)
        for folder, run in run_folders().items()
        if run.goal.chats and (run.technique, run.parallel) in kinds and run.run_folder not in done
    ]
    columns = list((measured + published + waiting)[0])
    return pd.DataFrame(measured + waiting + published, columns=columns).fillna(NOT_RUN)
