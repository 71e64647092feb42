"""The tables of full fine-tuning: one device (2.4), model parallel (2.5), sharding (2.6) and pipelines (2.7)."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of, run_folders
from common.base.specs import PARALLELISMS
from common.hardware.devices import GIB, MIB
from common.planning.job import BatchShape
from common.planning.plans import DEFAULT_ROWS_PER_EPOCH
from common.planning.shares import trained_parameters
from common.records.store import Record
from common.reporting.rows import (
    FACTORS,
    FULL,
    FULL_DDP,
    FULL_MP,
    FULL_PP,
    LORA,
    LORA_PP,
    MEMORY,
    NOT_RUN,
    PROJECTED,
    PROJECTED_LENGTH,
    SCHEDULES,
    STEPS,
    STRONG,
    WEAK,
    WHAT,
    WHERE,
    Kind,
    Row,
    approach,
    as_table,
    beside_one_device,
    clock,
    completed,
    copies_of,
    devices_of,
    fits,
    kind_name,
    kind_of,
    measured_quality,
    measured_speed,
    model_of,
    percent,
    projected_plan,
    published_results,
    quality_table,
    speed_table,
    speedup_table,
    step_s,
    table_of,
)

SMALL_LEARNING_RATE = 1e-5
"""At which pure bf16 is compared with other precisions: that of the GPU folders."""
SHARDING_FOLDER = "2.6_full_finetuning_with_fsdp"


def recipes(records: list[Record], *kinds: Kind) -> list[Record]:
    """Return the completed runs that show what a recipe learns; trials of speed and precision show that only."""
    return [
        record
        for record in completed(records, *kinds)
        if record["config"]["weights"] != "random" and record["config"]["learning_rate"] != SMALL_LEARNING_RATE
    ]


def full_quality(records: list[Record], shown: tuple[Kind, ...], beside: tuple[Kind, ...]) -> pd.DataFrame:
    """Return the table of 2.4, 2.5 and 2.7: quality beside another kind's."""
    table = quality_table(recipes(records), shown, beside)
    return table.drop(columns=["Learning rate scaling", "Shuffled, by MiniLM", "Answers shuffled"])


def full_speed(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.4: time and memory beside LoRA's."""
    return speed_table(recipes(records), (FULL,), (LORA,))


def full_precision(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.4: how many weights a step really changes, by precision and learning rate."""
    usual = {"seed": RunConfig.seed, "per_device_train_batch_size": RunConfig.per_device_train_batch_size}
    return pd.DataFrame(
        {
            "Precision": record["config"]["precision"],
            "Learning rate": f"{record['config']['learning_rate']:g}",
            "Batch size": str(record["config"]["per_device_train_batch_size"]),
            "Steps": str(record["steps"]),
            "Weights that a step changes": percent(record["updated_share"]),
            "Validation loss": f"{record['best_validation_loss']:.4f}",
            "Facts said": percent(record["quality"]["after"]["facts_said_share"]),
            "Training time": clock(record["train_time_s"]),
            "Figures": "measured",
            "Command": measured_speed(record)["Command"],
        }
        for record in completed(records, FULL)
        if record.get("updated_share") is not None and usual.items() <= record["config"].items()
    )


@as_table
def full_memory(records: list[Record]) -> Iterator[Row]:
    """Return the table of 2.4: the memory of each precision on the GPU folders' model, part by part; projected.

    With checkpointing and AdamW's states as wide as the weights, so that precisions compare.
    """
    folder = literal_of(REPOSITORY / "2.4_full_finetuning/run_2_h200_141g_x1")
    run = replace(folder, optim=RunConfig.optim, gradient_checkpointing=True)
    trained = {"all-linear": "linear layers", "all": "every weight"}
    for (target_modules, what), precision in product(trained.items(), ("bf16", "bf16-mixed", "fp32")):
        plan = projected_plan(replace(run, precision=precision, target_modules=target_modules))
        parts = plan.devices[0].parts_gib
        gradients_gib = trained_parameters(plan.architecture, plan.job) * plan.job.trained_bytes / GIB
        yield {
            "Trained": what,
            "Precision": precision,
            "Weights (GiB)": f"{parts['weights']:.1f}",
            "Gradients, all together (GiB)": f"{gradients_gib:.1f}",
            "Optimizer (GiB)": f"{parts['optimizer']:.1f}",
            "Activations, logits (GiB)": f"{parts['activations'] + parts['logits']:.1f}",
            "Peak (GiB)": f"{plan.devices[0].peak_gib:.1f}",
            "Fits an A100 80GB": fits(plan.devices[0].safe_gib, "A100 80GB SXM"),
            "Fits an H200 141GB": fits(plan.devices[0].safe_gib, "H200 141GB"),
            "Figures": PROJECTED,
        }


# -- model parallel


def mp_speed(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.5: hardware, time, and what each GPU must have, beside one device."""
    pairs = beside_one_device(recipes(records, FULL_MP), records, WEAK)
    columns = (*WHAT, *STEPS, *WHERE, *FACTORS, "VRAM requirement per GPU", "Command")
    return speedup_table(records, pairs, WEAK, columns, waiting=(FULL_MP,), published=(FULL, FULL_MP))


def mp_maps(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.5: Accelerate's map, an even split and the balanced one on the GPU folders; projected."""
    from common.models.placement import placement_table  # here: it imports torch

    tables = {
        folder: placement_table(run, BatchShape(run.per_device_train_batch_size, PROJECTED_LENGTH, PROJECTED_LENGTH))
        for folder, run in _gpu_folders(FULL_MP)
    }
    table = pd.concat(tables, names=["Run"]).reset_index(level="Run")
    return table.drop(columns="Highest (GiB)").assign(Figures=PROJECTED)


def _gpu_folders(*kinds: Kind) -> list[tuple[str, RunConfig]]:
    return [
        (f"`{folder.name}`", run)
        for folder, run in run_folders().items()
        if run.device == "cuda" and not run.goal.has_own_tables and (run.technique, run.parallel) in kinds
    ]


@as_table
def mp_price(records: list[Record]) -> Iterator[Row]:
    """Return the table of 2.5.

    A smaller batch means more steps for the same rows: measured on one CPU device, projected on GPUs.
    """
    runs = [record for record in recipes(records, FULL) if record["config"]["seed"] == RunConfig.seed]
    for record in sorted(runs, key=lambda record: -record["config"]["per_device_train_batch_size"]):
        epochs = record["config"]["num_train_epochs"]
        yield {
            "Approach": approach(record),
            "Devices": devices_of(record),
            "Batch size": str(record["config"]["per_device_train_batch_size"]),
            "Rows": f"{epochs} x {record['world'][0]['samples'] // epochs:,}",
            "Steps": f"{record['steps']:,}",
            "A step": f"{step_s(record) * 1e3:.0f} ms",
            "Training without validation": clock(record["train_time_s"] - record["reporting_s"]),
            "Figures": "measured",
        }
    for folder, run in _gpu_folders(FULL, FULL_MP, FULL_PP):
        step_time_s = projected_plan(run).time.total_s
        steps = -(-DEFAULT_ROWS_PER_EPOCH // run.per_device_train_batch_size)
        yield {
            "Approach": f"{kind_name(run.technique, run.parallel)}, {folder}",
            "Devices": f"{run.gpu} x{run.devices}",
            "Batch size": str(run.per_device_train_batch_size),
            "Rows": f"1 x {DEFAULT_ROWS_PER_EPOCH:,} of {PROJECTED_LENGTH:,} tokens",
            "Steps": f"{steps:,}",
            "A step": f"{step_time_s:.2f} s",
            "Training without validation": clock(steps * step_time_s),
            "Figures": PROJECTED,
        }


# -- sharding


def _sharding_kinds(*techniques: str) -> list[Kind]:
    return list(product(techniques, [name for name, parallelism in PARALLELISMS.items() if parallelism.shards]))


def _sharded_runs(records: list[Record]) -> list[Record]:
    """Return the runs of 2.6 that show what the recipe learns, and with DDP what sharding is compared with."""
    runs = recipes(records, FULL_DDP, *_sharding_kinds("full", "lora"))
    return [record for record in runs if record["run_folder"].startswith(SHARDING_FOLDER)]


def sharding_quality(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.6: quality beside one device."""
    runs = _sharded_runs(records)
    baselines = [
        record for record in recipes(records, FULL) if record["config"]["per_device_train_batch_size"] in (16, 32)
    ]
    table = table_of(runs, _sharding_kinds("full"), [measured_quality(record) for record in (*baselines, *runs)])
    return table.drop(columns=["Shuffled, by MiniLM", "Answers shuffled", "By the tuned model"], errors="ignore")


def sharding_speed(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.6: time and memory at the same global batch and learning rate, beside one device."""
    runs = [record for record in _sharded_runs(records) if record["config"]["learning_rate_scaling"] == "none"]
    compared = ("Against one device", "Machine's ceiling", "Validation loss")
    pairs = beside_one_device(runs, records, STRONG)
    return speedup_table(records, pairs, STRONG, (*WHAT, *STEPS, *compared, *WHERE, *MEMORY))


def _looked_into(records: list[Record], key: str) -> list[Record]:
    """Return one run of each kind and model that has `key`: what is held and sent does not depend on the rest."""
    kinds = [FULL_DDP, *_sharding_kinds("full", "lora")]
    seen: dict[tuple[str, ...], Record] = {}
    for record in completed(records, *kinds):
        if record.get(key):
            targets = record["config"]["target_modules"]
            seen.setdefault((*kind_of(record), model_of(record), targets, copies_of(record)), record)
    return sorted(seen.values(), key=lambda run: (model_of(run), run["technique"], kinds.index(kind_of(run))))


@as_table
def sharding_held(records: list[Record]) -> Iterator[Row]:
    """Return the table of 2.6.

    Bytes that each rank holds between two passes, counted in the runs, beside what one device would.
    """
    for record in _looked_into(records, "held"):
        ranks, whole = record["held"]["per_rank"], record["held"]["whole"]
        fullest = max(ranks, key=lambda rank: sum(rank.values()))
        yield {
            "Approach": kind_name(*kind_of(record)),
            "Model": model_of(record),
            "Ranks": str(len(ranks)),
            **{
                f"{part.capitalize()} (MiB)": f"{fullest[f'{part}_bytes'] / MIB:.2f} of "
                f"{whole[f'{part}_bytes'] / MIB:.2f}"
                for part in ("weights", "gradients", "optimizer")
            },
            "All together": f"{sum(fullest.values()) / sum(whole.values()):.2f} of one device's",
            "Figures": "measured",
        }


@as_table
def sharding_traffic(records: list[Record]) -> Iterator[Row]:
    """Return the table of 2.6: bytes that a rank sends in a step, counted call by call, beside the formula."""
    for record in _looked_into(records, "sent"):
        counted, formula = record["sent"]["bytes"], (record["planned"] or {}).get("sent_bytes")
        yield {
            "Approach": kind_name(*kind_of(record)),
            "Model": model_of(record),
            "Ranks": str(len(record["world"])),
            "Sent per rank and step (MiB), counted": f"{counted / MIB:.3f}",
            "By the formula": f"{formula / MIB:.3f}" if formula else NOT_RUN,
            "Difference": f"{counted / formula - 1:+.1%}" if formula else NOT_RUN,
            "Whole tensors, by collective (MiB)": ", ".join(
                f"{name.strip('_')} {size / MIB:.2f}"
                for name, size in record["sent"]["by_collective"].items()
                if size / MIB >= 0.005
            ),
            "Figures": "measured",
        }


@as_table
def sharding_memory(records: list[Record]) -> Iterator[Row]:
    """Return the table of 2.6: the GPU folders' model on the same GPUs with each parallelism; projected."""
    runs = [literal_of(REPOSITORY / SHARDING_FOLDER / name) for name in ("run_1_a100_80g_x2", "run_2_a6000_48g_x4")]
    shown = [PARALLELISMS[name] for name in runs[0].goal.parallelisms if not PARALLELISMS[name].is_single]
    for run, shared in product(runs, shown):
        rows_per_step = run.per_device_train_batch_size * run.devices
        settings = {
            "parallel": shared.name,
            "precision": "bf16" if shared.uses_deepspeed else run.precision,  # DeepSpeed's own copy is in fp32
            "per_device_train_batch_size": rows_per_step if shared.splits_layers else run.per_device_train_batch_size,
            "micro_batches": 2 * run.devices if shared.pipelines else 1,
        }
        plan = projected_plan(run.changed_to(run_folder="", **settings))
        memory, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
        yield {
            "GPUs": f"{run.gpu} x{run.devices}",
            "Approach": kind_name("full", shared.name),
            "Precision": plan.job.precision,
            "Rows per step": str(rows_per_step),
            "Weights (GiB)": f"{memory.parts_gib['weights']:.1f}",
            "Optimizer (GiB)": f"{memory.parts_gib['optimizer']:.1f}",
            "Peak per GPU (GiB)": f"{memory.peak_gib:.1f} of {gpu.memory_gib:.1f}",
            "Fits": plan.verdict,
            "A step": f"{plan.time.total_s:.1f} s",
            "Sent per rank and step (GB)": f"{plan.time.sent_gb:.1f}",
            "Figures": PROJECTED,
        }


# -- pipeline


def pp_speed(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.7: time, idle share and memory of training, beside one device at the same global batch."""
    pairs = beside_one_device(recipes(records, FULL_PP, LORA_PP), records, STRONG)
    columns = (*WHAT, *STEPS, "Micro-batches", "Against one device", "Idle share per stage", *WHERE, *MEMORY)
    return speedup_table(records, pairs, STRONG, columns, waiting=(FULL_PP,))


def _measured_pipelines(records: list[Record]) -> list[tuple[Record, dict[str, Any]]]:
    runs = completed(records, FULL_PP, LORA_PP)
    return [(run, run["pipeline"]) for run in runs if run["config"]["seed"] == RunConfig.seed and run.get("pipeline")]


def _size(record: Record) -> Row:
    return {
        "Model": f"{model_of(record)}, {record['trained_parameters'] / 1e6:.1f}M trained",
        "Rows per step": str(record["config"]["per_device_train_batch_size"]),
    }


@as_table
def pp_schedules(records: list[Record]) -> Iterator[Row]:
    """Return the table of 2.7.

    Naive model parallel, GPipe and 1F1B on the same batches, measured in the runs themselves.
    """
    for (record, pipeline), (name, words) in product(_measured_pipelines(records), SCHEDULES.items()):
        stages, step_time_s = pipeline["stages"], pipeline["step_s"]
        parts = 1 if name == "naive" else pipeline["micro_batches"]
        yield {
            **_size(record),
            "Schedule": words,
            "Micro-batches": str(parts),
            "A step": f"{step_time_s[name] * 1e3:,.0f} ms",
            "Against naive MP": f"{step_time_s['naive'] / step_time_s[name]:.2f}x",
            "The formula's": f"{stages * parts / (parts + stages - 1):.2f}x",
            "Idle share per stage": " / ".join(f"{share:.0%}" for share in pipeline["idle_share"][name]),
            "The formula's idle share": f"{(stages - 1) / (parts + stages - 1):.0%}",
            "Activations at once per stage (MiB)": " / ".join(
                f"{mib:.1f}" for mib in pipeline["peak_activations_mib"][name]
            ),
            "Figures": "measured",
        }


def pp_losses(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.7: from the formula's speed-up to the one that was reached: where the rest goes."""
    return pd.DataFrame(
        {
            "Run": approach(record),
            **_size(record),
            "The formula's speed-up": f"{pipeline['ideal_speedup']:.2f}x",
            "Machine's ceiling": f"{pipeline['machine_ceiling']:.2f}x",
            "Allowed": f"{pipeline['allowed_speedup']:.2f}x",
            "Lost to small micro-batches": f"{pipeline['small_micro_batches_factor']:.2f}",
            "Lost to unequal stages": f"{pipeline['unequal_stages_factor']:.2f}",
            "Lost to sending and waiting": f"{pipeline['sending_and_waiting_factor']:.2f}",
            "Naive step over its passes": f"{pipeline['naive_factor']:.2f}",
            "Reached by 1F1B": f"{pipeline['speedup']:.2f}x",
            "Share of allowed": f"{pipeline['share_of_allowed']:.2f}",
        }
        for record, pipeline in _measured_pipelines(records)
    )


def pp_published(_: list[Record]) -> pd.DataFrame:
    """Return the table of 2.7: a published naive split by layers against one device, on RoBERTa-large."""
    return pd.DataFrame(
        {
            "Approach": kind_name(*kind_of(result)),
            "GPUs": f"{result['gpu']} x{result['devices']}",
            "Epochs": str(result["epochs"]),
            "Accuracy": f"{result['accuracy']:.2%}",
            "Memory per GPU": " / ".join(f"{gb} GB" for gb in result["memory_gb"]),
            "Training time": result["train_time"],
            "Figures": f"published: {result['source']}",
        }
        for result in published_results(metric="accuracy")
        if not PARALLELISMS[result["parallel"]].replicates
    )
