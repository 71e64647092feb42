"""The tables of sharded fine-tuning (2.6): beside one device, DDP, model parallel and a pipeline."""

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import read_literal
from common.base.specs import PARALLELISMS
from common.hardware.devices import MIB
from common.planning.job import BatchShape
from common.planning.plans import plan_run
from common.records.store import Record
from common.reporting.full import PROJECTED, PROJECTED_LENGTH, by_command
from common.reporting.rows import (
    FULL,
    FULL_DDP,
    FULL_FSDP,
    FULL_ZERO,
    KIND_NAMES,
    LORA_FSDP,
    LORA_ZERO,
    PLANNED,
    Kind,
    Row,
    baseline_of,
    completed,
    kind_of,
    measured_quality,
    measured_speed,
    model_of,
    table_of,
)

KINDS: tuple[Kind, ...] = (FULL_DDP, FULL_FSDP, *FULL_ZERO, LORA_FSDP, *LORA_ZERO)
FOLDER = "2.6_full_finetuning_with_fsdp"


def _own_runs(records: list[Record]) -> list[Record]:
    """Runs of 2.6 that show what the recipe learns: with the folder's own weights."""
    return [record for record in by_command(records, *KINDS) if record["run_folder"].startswith(FOLDER)]


def sharding_quality(records: list[Record]) -> pd.DataFrame:
    """2.6: quality beside one device."""
    baselines = [
        record for record in by_command(records, FULL) if record["config"]["per_device_train_batch_size"] in (16, 32)
    ]
    measured = [measured_quality(record) for record in (*baselines, *_own_runs(records))]
    columns = ["Shuffled, by MiniLM", "Answers shuffled", "By the tuned model"]
    return table_of(_own_runs(records), (FULL_FSDP, *FULL_ZERO), measured, []).drop(columns=columns, errors="ignore")


def sharding_speed(records: list[Record]) -> pd.DataFrame:
    """2.6: time and memory at the same global batch, beside one device, DDP, and a pipeline."""
    rows = []
    shown = [record for record in _own_runs(records) if record["config"]["learning_rate_scaling"] == "none"]
    baselines: list[Record] = []
    for record in shown:
        baseline = baseline_of(record, records, "effective_batch_size")
        if baseline and all(baseline is not other for other in baselines):
            baselines.append(baseline)
            rows.append(_speed_row(baseline, baseline))
        rows.append(_speed_row(record, baseline))
    return pd.DataFrame(rows)


def _speed_row(record: Record, baseline: Record | None) -> Row:
    speed = measured_speed(record, baseline, "strong")
    columns = ("Approach", "Figures", "Seed", "Devices", "Batch size", "Steps", "Training time")
    after = ("Peak memory per device (GiB)", PLANNED, "Command")
    return {
        **{name: speed[name] for name in columns},
        "Against one device": speed["Training speedup factor"],
        "Machine's ceiling": speed["Machine's ceiling"],
        "Tokens per second": speed["Tokens per second"],
        "Validation loss": f"{record['best_validation_loss']:.4f}",
        **{name: speed[name] for name in after},
    }


def _looked_into(records: list[Record], key: str) -> list[Record]:
    """One run of each kind and model that knows `key`: what is held and sent does not depend on the rest."""
    seen: dict[tuple[str, ...], Record] = {}
    for record in completed(records, *KINDS):
        if record.get(key):
            config = record["config"]
            seen.setdefault((*kind_of(record), model_of(record), config["target_modules"]), record)
    return sorted(
        seen.values(), key=lambda record: (model_of(record), record["technique"], KINDS.index(kind_of(record)))
    )


def sharding_held(records: list[Record]) -> pd.DataFrame:
    """2.6: bytes that each rank holds between two passes, counted in the runs, beside what one device would."""
    rows = []
    for record in _looked_into(records, "held"):
        fullest = max(record["held"]["per_rank"], key=lambda each: sum(each.values()))
        whole = record["held"]["whole"]
        cells = {
            f"{part.capitalize()} (MiB)": f"{fullest[f'{part}_bytes'] / MIB:.2f} of {whole[f'{part}_bytes'] / MIB:.2f}"
            for part in ("weights", "gradients", "optimizer")
        }
        together = sum(fullest.values()) / sum(whole.values())
        rows.append({
            "Approach": KIND_NAMES[kind_of(record)],
            "Model": model_of(record),
            "Ranks": str(len(record["held"]["per_rank"])),
            **cells,
            "All together": f"{together:.2f} of one device's",
            "Figures": "measured",
        })  # fmt: skip
    return pd.DataFrame(rows)


def sharding_traffic(records: list[Record]) -> pd.DataFrame:
    """2.6: bytes that a rank sends in a step, counted call by call, beside the formula."""
    rows = []
    for record in _looked_into(records, "sent"):
        counted, formula = record["sent"]["bytes"], record["planned"]["sent_bytes"]
        calls = record["sent"]["by_collective"]
        rows.append({
            "Approach": KIND_NAMES[kind_of(record)],
            "Model": model_of(record),
            "Ranks": str(len(record["world"])),
            "Sent per rank and step (MiB), counted": f"{counted / MIB:.3f}",
            "By the formula": f"{formula / MIB:.3f}",
            "Difference": f"{counted / formula - 1:+.1%}",
            "Collectives, each of the whole (MiB)": ", ".join(
                f"{name.strip('_')} {size / MIB:.2f}" for name, size in calls.items() if size / MIB >= 0.005
            ),
            "Figures": "measured",
        })  # fmt: skip
    return pd.DataFrame(rows)


def sharding_memory(records: list[Record]) -> pd.DataFrame:
    """2.6: the GPU folders' model on the same GPUs, each way of sharing; projected."""
    folders = (REPOSITORY / FOLDER / name for name in ("run_1_a100_80g_x2", "run_2_a6000_48g_x4"))
    shown = [name for name, way in PARALLELISMS.items() if not (way.is_single or way.splits_matrices)]
    runs = [read_literal(folder / "my_workflow_full_finetuning_with_fsdp.py") for folder in folders]
    return pd.DataFrame([_projected(run, parallel) for run in runs for parallel in shown])


def _projected(run: RunConfig, parallel: str) -> Row:
    way = PARALLELISMS[parallel]
    precision = "bf16" if way.uses_deepspeed else run.precision  # DeepSpeed's copy is in fp32
    rows = run.per_device_train_batch_size * (run.devices if way.splits_layers else 1)
    micro_batches = {"micro_batches": 2 * run.devices} if way.pipelines else {}
    asked = run.changed_to(
        parallel=parallel, precision=precision, per_device_train_batch_size=rows, run_folder="", **micro_batches
    )
    plan = plan_run(asked, BatchShape(rows, PROJECTED_LENGTH, PROJECTED_LENGTH))
    memory, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
    parts = memory.parts_gib
    return {
        "GPUs": f"{run.gpu} x{run.devices}",
        "Approach": KIND_NAMES["full", parallel],
        "Precision": precision,
        "Rows per step": str(rows if way.splits_layers else rows * run.devices),
        "Weights (GiB)": f"{parts['weights']:.1f}",
        "Optimizer (GiB)": f"{parts['optimizer']:.1f}",
        "Peak per GPU (GiB)": f"{memory.peak_gib:.1f} of {gpu.memory_gib:.1f}",
        "Fits": "yes" if plan.fits else "no",
        "A step": f"{plan.time.total_s:.1f} s",
        "Sent per rank and step (GB)": f"{plan.time.sent_gb:.1f}",
        "Figures": PROJECTED,
    }


TABLES = {
    "sharding-quality": sharding_quality,
    "sharding-speed": sharding_speed,
    "sharding-held": sharding_held,
    "sharding-traffic": sharding_traffic,
    "sharding-memory": sharding_memory,
}
