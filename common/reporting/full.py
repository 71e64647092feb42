"""The tables of full fine-tuning: on one device (2.4), with model parallel (2.5), and with a pipeline (2.7)."""

import json
from typing import Any

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import read_literal, run_folders
from common.base.specs import PARALLELISMS
from common.hardware.devices import GIB, find_gpu
from common.planning.job import BatchShape
from common.planning.plans import Plan, plan_run
from common.planning.shares import trained_parameters
from common.records.store import Record
from common.reporting.rows import (
    FULL,
    FULL_MP,
    FULL_PP,
    KIND_NAMES,
    LORA,
    LORA_PP,
    NOT_PUBLISHED,
    PUBLISHED_FILE,
    Kind,
    Row,
    approach,
    baseline_of,
    clock,
    completed,
    devices_of,
    kind_of,
    measured_quality,
    measured_speed,
    model_of,
    percent,
    published_factors,
    published_quality,
    published_results,
    published_speed,
    table_of,
)

PROJECTED = "projected"
PROJECTED_LENGTH = 1024
"""Tokens of a row in projections for GPU folders."""
PROJECTED_ROWS = 10_000
"""Of an epoch in projections."""
SMALL_LEARNING_RATE = 1e-5
"""At which pure bf16 is compared with other precisions: that of the GPU folders."""


def by_command(records: list[Record], *kinds: Kind) -> list[Record]:
    """Runs with pretrained weights and the folder's own precision and rate, started by command or notebook."""
    return [record for record in completed(records, *kinds) if not _is_trial(record)]


def _is_trial(record: Record) -> bool:
    """A run that shows speed or precision, and not what the recipe learns."""
    config = record["config"]
    return config["weights"] == "random" or config["learning_rate"] == SMALL_LEARNING_RATE


def _quality(records: list[Record], shown: tuple[Kind, ...], beside: tuple[Kind, ...]) -> pd.DataFrame:
    measured = [measured_quality(record) for record in by_command(records, *beside, *shown)]
    published = [published_quality(result) for result in published_results(*beside, *shown)]
    columns = ["Learning rate scaling", "Shuffled, by MiniLM", "Answers shuffled"]
    return table_of(by_command(records, *shown), shown, measured, published).drop(columns=columns)


def full_quality(records: list[Record]) -> pd.DataFrame:
    """2.4: quality beside LoRA's."""
    return _quality(records, (FULL,), (LORA,))


def full_speed(records: list[Record]) -> pd.DataFrame:
    """2.4: time and memory beside LoRA's."""
    kinds = (LORA, FULL)
    measured = [measured_speed(record, record, "strong") for record in by_command(records, *kinds)]
    published = [published_speed(result, result) for result in published_results(*kinds)]
    columns = ["Training speedup factor", "Machine's ceiling", "CUDA scaling factor", "VRAM scaling factor"]
    return table_of(records, (FULL,), measured, published).drop(columns=columns)


def full_precision(records: list[Record]) -> pd.DataFrame:
    """2.4: how many weights a step really changes, by precision and learning rate."""
    rows = []
    for record in completed(records, FULL):
        config, after = record["config"], record["quality"]["after"]
        if record.get("updated_share") is None or (config["seed"], config["per_device_train_batch_size"]) != (
            42,
            RunConfig().per_device_train_batch_size,
        ):
            continue
        rows.append({
            "Precision": config["precision"],
            "Learning rate": f"{config['learning_rate']:g}",
            "Batch size": str(config["per_device_train_batch_size"]),
            "Steps": str(record["steps"]),
            "Weights that a step changes": percent(record["updated_share"]),
            "Validation loss": f"{record['best_validation_loss']:.4f}",
            "Facts said (higher is better)": percent(after["facts_said_share"]),
            "Training time": clock(record["train_time_s"]),
            "Figures": "measured",
            "Command": f"`{record['command']}`" if record["command"] != "the notebook" else "the notebook",
        })  # fmt: skip
    return pd.DataFrame(rows)


def full_memory(records: list[Record]) -> pd.DataFrame:
    """2.4: the memory of each precision on the GPU folders' model, part by part; projected."""
    run = read_literal(REPOSITORY / "2.4_full_finetuning/run_2_h200_141g_x1/my_workflow_full_finetuning.py")
    rows = []
    for target_modules in ("all-linear", "all"):
        for precision in ("bf16", "bf16-mixed", "fp32"):
            settings = {**run.to_dict(), "precision": precision, "target_modules": target_modules}
            plan = plan_run(
                RunConfig(**settings), BatchShape(run.per_device_train_batch_size, PROJECTED_LENGTH, PROJECTED_LENGTH)
            )
            parts = plan.devices[0].parts_gib
            rows.append({
                "Trained": "linear layers" if target_modules == "all-linear" else "every weight",
                "Precision": precision,
                "Weights (GiB)": f"{parts['weights']:.1f}",
                "Gradients, all together (GiB)": f"{_gradients_gib(plan):.1f}",
                "Optimizer (GiB)": f"{parts['optimizer']:.1f}",
                "Activations, logits (GiB)": f"{parts['activations'] + parts['logits']:.1f}",
                "Peak (GiB)": f"{plan.devices[0].peak_gib:.1f}",
                "Fits an A100 80GB": _fits(plan, "A100 80GB SXM"),
                "Fits an H200 141GB": _fits(plan, "H200 141GB"),
                "Figures": PROJECTED,
            })  # fmt: skip
    return pd.DataFrame(rows)


def _gradients_gib(plan: Plan) -> float:
    return trained_parameters(plan.architecture, plan.job) * plan.job.trained_bytes / GIB


def _fits(plan: Plan, gpu: str) -> str:
    return "yes" if plan.devices[0].peak_gib <= find_gpu(gpu).memory_gib else "no"


# -- model parallel


def mp_quality(records: list[Record]) -> pd.DataFrame:
    """2.5: quality beside one device."""
    return _quality(records, (FULL_MP,), (FULL,))


def mp_speed(records: list[Record]) -> pd.DataFrame:
    """2.5: hardware, time, and what each GPU must have, beside one device."""
    shown = _beside_one_device(by_command(records, FULL_MP), records, "per_device_train_batch_size")
    rows = [_mp_row(record, baseline) for record, baseline in shown]
    baseline = published_results(FULL)[0]
    published = [_published_mp_row(result, baseline) for result in published_results(FULL, FULL_MP)]
    return table_of(records, (FULL_MP,), rows, published)


def _mp_row(record: Record, baseline: Record | None) -> Row:
    speed = measured_speed(record, baseline, "strong")
    columns = ("Approach", "Figures", "Seed", "Devices", "CUDA scaling factor", "VRAM scaling factor", "Batch size")
    on_cpu = " (the process's memory)" if record["config"]["device"] == "cpu" else ""
    needed_gib = max(each["peak_allocated_gib"] or each["peak_rss_gib"] for each in record["memory"])
    return {
        **{name: speed[name] for name in columns},
        "Steps": str(record["steps"]),
        "Training time": speed["Training time"],
        "VRAM requirement per GPU": f"{needed_gib:.2f} GiB{on_cpu}",
        "Command": speed["Command"],
    }


def _published_mp_row(result: dict[str, Any], baseline: dict[str, Any]) -> Row:
    return {
        "Approach": KIND_NAMES[kind_of(result)],
        "Figures": f"published: {result['source']}",
        "Seed": NOT_PUBLISHED,
        "Devices": f"{result['gpu']} x{result['devices']}",
        **published_factors(result, baseline),
        "Batch size": f"{result['batch_size']} x1",
        "Steps": NOT_PUBLISHED,
        "Training time": result["train_time"],
        "VRAM requirement per GPU": f"{result['vram_gb'] / baseline['vram_gb']:.2g}x ({result['vram_gb']} GB cards)",
        "Command": NOT_PUBLISHED,
    }


def mp_maps(records: list[Record]) -> pd.DataFrame:
    """2.5: Accelerate's map, an even split and the balanced one on the GPU folders; projected."""
    from common.training.placement import placement_table  # here: it imports torch

    tables = []
    for folder, run in _gpu_folders(FULL_MP):
        table = placement_table(run, BatchShape(run.per_device_train_batch_size, PROJECTED_LENGTH, PROJECTED_LENGTH))
        table.insert(0, "Run", folder)
        tables.append(table.drop(columns="Highest (GiB)"))
    return pd.concat(tables).assign(Figures=PROJECTED)


def _gpu_folders(*kinds: Kind) -> list[tuple[str, RunConfig]]:
    return [
        (f"`{folder.name}`", run)
        for folder, run in run_folders().items()
        if run.device == "cuda" and (run.technique, run.parallel) in kinds
    ]


def mp_price(records: list[Record]) -> pd.DataFrame:
    """2.5: a smaller batch means more steps for the same rows: measured on one CPU device, projected on GPUs."""
    rows = []
    measured = [record for record in by_command(records, FULL) if record["config"]["seed"] == 42]
    for record in sorted(measured, key=lambda record: -record["config"]["per_device_train_batch_size"]):
        config, seconds = record["config"], record["train_time_s"] - record["reporting_s"]
        rows.append({
            "Approach": approach(record),
            "Devices": devices_of(record),
            "Batch size": str(config["per_device_train_batch_size"]),
            "Rows": f"{config['num_train_epochs']} x {record['world'][0]['samples'] // config['num_train_epochs']:,}",
            "Steps": f"{record['steps']:,}",
            "A step": f"{seconds / record['steps'] * 1e3:.0f} ms",
            "Training without validation": clock(seconds),
            "Figures": "measured",
        })  # fmt: skip
    for folder, run in _gpu_folders(FULL, FULL_MP, FULL_PP):
        plan = plan_run(run, BatchShape(run.per_device_train_batch_size, PROJECTED_LENGTH, PROJECTED_LENGTH))
        steps = -(-PROJECTED_ROWS // run.per_device_train_batch_size)
        rows.append({
            "Approach": f"{KIND_NAMES[run.technique, run.parallel]}, {folder}",
            "Devices": f"{run.gpu} x{run.devices}",
            "Batch size": str(run.per_device_train_batch_size),
            "Rows": f"1 x {PROJECTED_ROWS:,} of {PROJECTED_LENGTH:,} tokens",
            "Steps": f"{steps:,}",
            "A step": f"{plan.time.total_s:.2f} s",
            "Training without validation": clock(steps * plan.time.total_s),
            "Figures": PROJECTED,
        })  # fmt: skip
    return pd.DataFrame(rows)


# -- pipeline


def pp_quality(records: list[Record]) -> pd.DataFrame:
    """2.7: quality beside one device."""
    return _quality(records, (FULL_PP, LORA_PP), (FULL,))


def pp_speed(records: list[Record]) -> pd.DataFrame:
    """2.7: time, idle share and memory of training, beside one device at the same global batch."""
    shown = _beside_one_device(by_command(records, FULL_PP, LORA_PP), records, "effective_batch_size")
    return table_of(records, (FULL_PP,), [_pp_row(record, baseline) for record, baseline in shown], [])


def _beside_one_device(divided: list[Record], records: list[Record], same: str) -> list[tuple[Record, Record | None]]:
    """Each run, after the one-device run that it is stated against, with that one."""
    pairs: list[tuple[Record, Record | None]] = []
    for record in divided:
        baseline = baseline_of(record, records, same)
        if baseline and all(baseline is not shown for shown, _ in pairs):
            pairs.append((baseline, baseline))
        pairs.append((record, baseline))
    return pairs


def _pp_row(record: Record, baseline: Record | None) -> Row:
    speed, config = measured_speed(record, baseline, "strong"), record["config"]
    columns = ("Approach", "Figures", "Seed", "Devices", "Batch size", "Steps", "Training time")
    stages = record.get("stages") or []
    return {
        **{name: speed[name] for name in columns},
        "Micro-batches": f"{config['micro_batches']}, {config['schedule']}" if stages else "-",
        "Against one device": speed["Training speedup factor"],
        "Idle share per stage": " / ".join(f"{stage['idle_share']:.0%}" for stage in stages) or "-",
        "Peak memory per device (GiB)": speed["Peak memory per device (GiB)"],
        "Training's peak, planned / measured (GiB)": speed["Training's peak, planned / measured (GiB)"],
        "Command": speed["Command"],
    }


def _measured_pipelines(records: list[Record]) -> list[tuple[Record, dict[str, Any]]]:
    """Of the first seed, the runs that measured their pipeline, and what they measured."""
    first_seed = [record for record in completed(records, FULL_PP, LORA_PP) if record["config"]["seed"] == 42]
    return [(record, record["pipeline"]) for record in first_seed if record.get("pipeline")]


def pp_schedules(records: list[Record]) -> pd.DataFrame:
    """2.7: naive model parallel, GPipe and 1F1B on the same batches, measured in the runs themselves."""
    rows = []
    for record, pipeline in _measured_pipelines(records):
        for name, words in (("naive", "naive MP"), ("gpipe", "GPipe"), ("1f1b", "1F1B")):
            parts = 1 if name == "naive" else pipeline["micro_batches"]
            stages = pipeline["stages"]
            speedup = pipeline["step_s"]["naive"] / pipeline["step_s"][name]
            rows.append({
                "Model": _size(record),
                "Rows per step": str(record["config"]["per_device_train_batch_size"]),
                "Schedule": words,
                "Micro-batches": str(parts),
                "A step": f"{pipeline['step_s'][name] * 1e3:,.0f} ms",
                "Against naive MP": f"{speedup:.2f}x",
                "The formula's": f"{stages * parts / (parts + stages - 1):.2f}x",
                "Idle share per stage": " / ".join(f"{share:.0%}" for share in pipeline["idle_share"][name]),
                "The formula's idle share": f"{(stages - 1) / (parts + stages - 1):.0%}",
                "Activations at once per stage (MiB)": " / ".join(
                    f"{mib:.1f}" for mib in pipeline["peak_activations_mib"][name]
                ),
                "Figures": "measured",
            })  # fmt: skip
    return pd.DataFrame(rows)


def pp_losses(records: list[Record]) -> pd.DataFrame:
    """2.7: from the formula's speed-up to the one that was reached: where the rest goes."""
    rows = []
    for record, pipeline in _measured_pipelines(records):
        rows.append({
            "Run": approach(record),
            "Model": _size(record),
            "Rows per step": str(record["config"]["per_device_train_batch_size"]),
            "The formula's speed-up": f"{pipeline['ideal_speedup']:.2f}x",
            "Machine's ceiling": f"{pipeline['machine_ceiling']:.2f}x",
            "Allowed": f"{pipeline['allowed_speedup']:.2f}x",
            "Lost to small micro-batches": f"{pipeline['small_micro_batches_factor']:.2f}",
            "Lost to unequal stages": f"{pipeline['unequal_stages_factor']:.2f}",
            "Lost to sending and waiting": f"{pipeline['sending_and_waiting_factor']:.2f}",
            "Naive step over its passes": f"{pipeline['naive_factor']:.2f}",
            "Reached by 1F1B": f"{pipeline['speedup']:.2f}x",
            "Share of allowed": f"{pipeline['share_of_allowed']:.2f}",
        })  # fmt: skip
    return pd.DataFrame(rows)


def _size(record: Record) -> str:
    return f"{model_of(record)}, {record['trained_parameters'] / 1e6:.1f}M trained"


def pp_published(records: list[Record]) -> pd.DataFrame:
    """2.7: a published naive split by layers against one device, on RoBERTa-large."""
    found = json.loads(PUBLISHED_FILE.read_text(encoding="utf-8"))
    return pd.DataFrame([
        {
            "Approach": KIND_NAMES[kind_of(result)],
            "GPUs": f"{result['gpu']} x{result['devices']}",
            "Epochs": str(result["epochs"]),
            "Accuracy": f"{result['accuracy']:.2%}",
            "Memory per GPU": " / ".join(f"{gb} GB" for gb in result["memory_gb"]),
            "Training time": result["train_time"],
            "Figures": f"published: {result['source']}",
        }
        for result in found
        if "accuracy" in result and not PARALLELISMS[result["parallel"]].replicates
    ])  # fmt: skip


TABLES = {
    "full-quality": full_quality,
    "full-speed": full_speed,
    "full-precision": full_precision,
    "full-memory": full_memory,
    "mp-quality": mp_quality,
    "mp-speed": mp_speed,
    "mp-maps": mp_maps,
    "mp-price": mp_price,
    "pp-quality": pp_quality,
    "pp-speed": pp_speed,
    "pp-schedules": pp_schedules,
    "pp-losses": pp_losses,
    "pp-published": pp_published,
}
