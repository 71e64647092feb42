"""The tables of full fine-tuning: one device (2.4), model parallel (2.5), sharding (2.6) and pipelines (2.7)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from bench.tables.chats import MEMORY, QUALITY, SPEED, TIMES, WHAT, WHERE, milliseconds
from bench.tables.table import (
    FULL,
    FULL_DDP,
    FULL_MP,
    FULL_PP,
    LORA,
    LORA_PP,
    PROJECTED,
    Table,
    approach,
    copies_of,
    kind_of_run,
    not_run,
    published,
)
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of, run_folders
from common.base.specs import PARALLELISMS
from common.hardware.devices import GIB, MIB, find_gpu
from common.planning.job import BatchShape
from common.planning.plans import DEFAULT_ROWS_PER_EPOCH, Plan, plan_run
from common.planning.shares import trained_parameters
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import (
    SCHEDULES,
    STRONG,
    WEAK,
    Kind,
    Row,
    beside_one_device,
    clock,
    completed,
    groups_of,
    kind_of,
    model_of,
    step_s,
)

PROJECTED_LENGTH = 1024  # tokens of a row in projections for GPU folders
SMALL_LEARNING_RATE = 1e-5  # at which pure bf16 is compared with other precisions: that of the GPU folders
SHARDING_FOLDER = "2.6_full_finetuning_with_fsdp"


# -- columns


FULL_QUALITY = [name for name in QUALITY if name not in ("learning_rate", "shuffled_minilm", "shuffled")]
SIZE = (
    Column("Model", lambda row: f"{model_of(row)}, {row['trained_parameters'] / 1e6:.1f}M trained"),
    Column("Examples per step", "config.per_device_train_batch_size"),
)
SCHEDULE = (
    Column("Schedule", "schedule", SCHEDULES.get),
    Column("Micro-batches", "parts"),
    Column("A step", lambda row: row["in_schedule"]["step_s"] * 1e3, "{:,.0f} ms"),
    Column(
        "Against naive MP", lambda row: row["pipeline"]["step_s"]["naive"] / row["in_schedule"]["step_s"], "{:.2f}x"
    ),
    Column("Formula", lambda row: row["pipeline"]["stages"] * row["parts"] / row["passes"], "{:.2f}x"),
    Column(
        "Idle per stage",
        "in_schedule.idle_share",
        lambda shares: " / ".join(f"{share:.0%}" for share in shares),
    ),
)
ACTIVATIONS = Column(
    "Activations at once per stage (MiB)",
    "in_schedule.peak_activations_mib",
    lambda stages: " / ".join(f"{mib:.1f}" for mib in stages),
)
PRECISION = (Column("Precision", "config.precision"), Column("Learning rate", "config.learning_rate", "{:g}"))


def _of_whole(row: Row, key: str) -> str:
    """Return what the fullest rank holds of a part, beside what one device would."""
    return f"{row['fullest'][key] / MIB:.2f} of {row['held']['whole'][key] / MIB:.2f}"


# -- rows


def recipes(records: list[Record], *kinds: Kind) -> list[Record]:
    """Return the completed runs that show what a recipe learns; trials of speed and precision show that only."""
    return [
        record
        for record in completed(records, *kinds)
        if record["config"]["weights"] != "random" and record["config"]["learning_rate"] != SMALL_LEARNING_RATE
    ]


def projected_plan(run: RunConfig) -> Plan:
    """Return the plan of a GPU folder's run, with rows of `PROJECTED_LENGTH` tokens."""
    return plan_run(run, BatchShape(run.per_device_train_batch_size, PROJECTED_LENGTH, PROJECTED_LENGTH))


def fits(needed_gib: float, gpu: str) -> str:
    """Return whether a GPU of the catalogue has so much memory."""
    return "yes" if needed_gib <= find_gpu(gpu).memory_gib else "no"


def _precisions(records: list[Record]) -> list[Record]:
    usual = {"seed": RunConfig.seed, "per_device_train_batch_size": RunConfig.per_device_train_batch_size}
    return [
        record
        for record in completed(records, FULL)
        if record.get("updated_share") is not None and usual.items() <= record["config"].items()
    ]


def _projected_precisions(_: list[Record]) -> Iterator[Row]:
    """Yield each precision on the GPU folders' model, with checkpointing and AdamW's states as wide as the weights."""
    folder = literal_of(REPOSITORY / "2.4_full_finetuning/run_2_h200_141g_x1")
    run = replace(folder, optim=RunConfig.optim, gradient_checkpointing=True)
    trained = {"all-linear": "linear layers", "all": "every weight"}
    for (target_modules, what), precision in product(trained.items(), ("bf16", "bf16-mixed", "fp32")):
        plan = projected_plan(replace(run, precision=precision, target_modules=target_modules))
        gradients_gib = trained_parameters(plan.architecture, plan.job) * plan.job.trained_bytes / GIB
        yield {
            "trained": what,
            "precision": precision,
            "gradients_gib": gradients_gib,
            "device": plan.devices[0],
            "figures": PROJECTED,
        }


def _gpu_folders(*kinds: Kind) -> list[tuple[str, Row, RunConfig]]:
    """Return the run folders for GPUs of these kinds: the name, the row, and the run."""
    return [
        (f"`{folder.name}`", not_run(folder, run), run)
        for folder, run in run_folders().items()
        if run.device == "cuda" and not run.goal.reporting and kind_of_run(run) in kinds
    ]


def _maps(_: list[Record]) -> Iterator[Row]:
    """Yield Accelerate's map, an even split and the balanced one on the GPU folders."""
    from common.checks.folder_training import workflow_of  # here: it imports torch

    for name, _, run in _gpu_folders(FULL_MP):
        batch = BatchShape(run.per_device_train_batch_size, PROJECTED_LENGTH, PROJECTED_LENGTH)
        table = workflow_of(run).placement_table(run, batch).drop(columns=["Highest (GiB)", "Embeddings, head"])
        yield from ({"Run": name, **row} for row in table.to_dict("records"))


def _batch_sizes(records: list[Record]) -> Iterator[Row]:
    """Yield what a smaller batch takes, which means more steps: measured on one CPU device, projected on GPUs."""
    runs = [record for record in recipes(records, FULL) if record["config"]["seed"] == RunConfig.seed]
    for record in sorted(runs, key=lambda record: -record["config"]["per_device_train_batch_size"]):
        epochs = record["config"]["num_train_epochs"]
        yield {**record, "name": approach(record), "rows": f"{epochs} x {record['world'][0]['samples'] // epochs:,}"}
    for folder, row, run in _gpu_folders(FULL, FULL_MP, FULL_PP):
        steps = -(-DEFAULT_ROWS_PER_EPOCH // run.per_device_train_batch_size)
        yield {
            **row,
            "figures": PROJECTED,
            "name": f"{approach(row)}, {folder}",
            "rows": f"1 x {DEFAULT_ROWS_PER_EPOCH:,} of {PROJECTED_LENGTH:,} tokens",
            "steps": steps,
            "train_time_s": steps * projected_plan(run).time.total_s,
            "reporting_s": 0,
        }


def _sharding_kinds(*techniques: str) -> list[Kind]:
    return list(product(techniques, [name for name, parallelism in PARALLELISMS.items() if parallelism.shards]))


def _sharded_runs(records: list[Record]) -> list[Record]:
    """Return the runs of 2.6 that show what the recipe learns, and with DDP what sharding is compared with."""
    runs = recipes(records, FULL_DDP, *_sharding_kinds("full", "lora"))
    return [record for record in runs if record["run_folder"].startswith(SHARDING_FOLDER)]


def _looked_into(records: list[Record], key: str) -> list[Record]:
    """Return one run of each kind and model that has `key`: what is held and sent does not depend on the rest."""
    kinds = [FULL_DDP, *_sharding_kinds("full", "lora")]
    known = groups_of(
        (record for record in completed(records, *kinds) if record.get(key)),
        lambda run: (*kind_of(run), model_of(run), run["config"]["target_modules"], copies_of(run)),
    )
    firsts = [group[0] for group in known.values()]
    return sorted(firsts, key=lambda run: (model_of(run), run["technique"], kinds.index(kind_of(run))))


def _parallelisms_on_gpus(_: list[Record]) -> Iterator[Row]:
    """Yield the GPU folders' model on the same GPUs with each parallelism."""
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
        yield {
            "technique": "full",
            "parallel": shared.name,
            "gpus": f"{run.gpu} x{run.devices}",
            "rows_per_step": rows_per_step,
            "plan": plan,
            "device": plan.devices[plan.tightest],
            "gpu": plan.cluster.gpus[plan.tightest],
            "figures": PROJECTED,
        }


def _pipelines(records: list[Record]) -> list[Record]:
    runs = completed(records, FULL_PP, LORA_PP)
    return [run for run in runs if run["config"]["seed"] == RunConfig.seed and run.get("pipeline")]


def _schedules(records: list[Record]) -> Iterator[Row]:
    """Yield naive model parallel, GPipe and 1F1B on the same batches, measured in the runs themselves."""
    for record, schedule in product(_pipelines(records), SCHEDULES):
        pipeline = record["pipeline"]
        parts, stages = 1 if schedule == "naive" else pipeline["micro_batches"], pipeline["stages"]
        yield {
            **record,
            "schedule": schedule,
            "parts": parts,
            "passes": parts + stages - 1,  # in the time of one micro-batch on one stage
            "in_schedule": {name: values[schedule] for name, values in pipeline.items() if isinstance(values, dict)},
        }


TABLES = {
    # 2.4
    "full-quality": Table(
        lambda records: recipes(records, LORA, FULL), FULL_QUALITY, waiting=(FULL,), published=(LORA, FULL)
    ),
    "full-speed": Table(lambda records: recipes(records, LORA, FULL), SPEED, waiting=(FULL,), published=(LORA, FULL)),
    # how many weights a step really changes, by precision and learning rate
    "full-precision": Table(
        _precisions,
        (
            *PRECISION,
            Column("Batch size", "config.per_device_train_batch_size"),
            "steps",
            Column("Weights changed", "updated_share", "{:.0%}"),
            "loss",
            "facts",
            "whole_time",
            "figures",
        ),
    ),
    "full-precision-commands": Table(
        _precisions, (*PRECISION, "command"), line="- {Precision}, learning rate {Learning rate}: {Command}"
    ),
    "full-memory": Table(
        _projected_precisions,
        (
            Column("Trained", "trained"),
            Column("Precision", "precision"),
            Column("Weights", "device.parts_gib.weights", "{:.1f}"),
            Column("Gradients", "gradients_gib", "{:.1f}"),
            Column("Optimizer", "device.parts_gib.optimizer", "{:.1f}"),
            Column(
                "Activations",
                lambda row: row["device"].parts_gib["activations"] + row["device"].parts_gib["logits"],
                "{:.1f}",
            ),
            Column("Peak", "device.peak_gib", "{:.1f}"),
            Column("A100", lambda row: fits(row["device"].safe_gib, "A100 80GB SXM")),
            Column("H200", lambda row: fits(row["device"].safe_gib, "H200 141GB")),
        ),
    ),
    # 2.5
    "mp-quality": Table(
        lambda records: recipes(records, FULL, FULL_MP), FULL_QUALITY, waiting=(FULL_MP,), published=(FULL, FULL_MP)
    ),
    "mp-speed": Table(
        lambda records: beside_one_device(recipes(records, FULL_MP), records, WEAK),
        (*WHAT, *TIMES, *WHERE, "cuda", "vram", "memory_needed", "command"),
        waiting=(FULL_MP,),
        published=(FULL, FULL_MP),
    ),
    "mp-maps": Table(_maps),
    "mp-price": Table(
        _batch_sizes,
        (
            Column("Approach", "name"),
            "devices",
            Column("Batch size", "config.per_device_train_batch_size"),
            Column("Examples", "rows"),
            Column("Steps", "steps", "{:,}"),
            Column("A step", lambda row: f"{step_s(row):.2f} s" if "figures" in row else milliseconds(step_s(row))),
            Column("Training without validation", lambda row: row["train_time_s"] - row["reporting_s"], clock),
            "figures",
        ),
    ),
    # 2.6
    "sharding-quality": Table(
        lambda records: [
            *(run for run in recipes(records, FULL) if run["config"]["per_device_train_batch_size"] in (16, 32)),
            *_sharded_runs(records),
        ],
        [name for name in QUALITY if name not in ("score_tuned", "shuffled_minilm", "shuffled")],
        waiting=_sharding_kinds("full"),
    ),
    "sharding-speed": Table(
        lambda records: beside_one_device(
            [run for run in _sharded_runs(records) if run["config"]["learning_rate_scaling"] == "none"], records, STRONG
        ),
        (*WHAT, *TIMES, "speedup as Against one device", "ceiling", "loss", *WHERE, *MEMORY),
    ),
    # bytes that each rank holds between two passes
    "sharding-held": Table(
        lambda records: [
            {**run, "fullest": max(run["held"]["per_rank"], key=lambda rank: sum(rank.values()))}
            for run in _looked_into(records, "held")
        ],
        (
            "kind",
            "model",
            Column("Ranks", lambda row: len(row["held"]["per_rank"])),
            Column("Weights (MiB)", partial(_of_whole, key="weights_bytes")),
            Column("Gradients (MiB)", partial(_of_whole, key="gradients_bytes")),
            Column("Optimizer (MiB)", partial(_of_whole, key="optimizer_bytes")),
            Column(
                "All together",
                lambda row: sum(row["fullest"].values()) / sum(row["held"]["whole"].values()),
                "{:.2f} of one device's",
            ),
            "figures",
        ),
    ),
    # bytes that a rank sends in a step, counted call by call, beside the formula
    "sharding-traffic": Table(
        lambda records: _looked_into(records, "sent"),
        (
            "kind",
            "model",
            Column("Ranks", lambda row: len(row["world"])),
            Column("Sent per rank and step (MiB), counted", lambda row: row["sent"]["bytes"] / MIB, "{:.3f}"),
            Column("By the formula", lambda row: row["planned"]["sent_bytes"] / MIB, "{:.3f}"),
            Column("Difference", lambda row: row["sent"]["bytes"] / row["planned"]["sent_bytes"] - 1, "{:+.1%}"),
            Column(
                "Whole tensors, by collective (MiB)",
                "sent.by_collective",
                lambda sizes: ", ".join(
                    f"{name.strip('_')} {size / MIB:.2f}" for name, size in sizes.items() if size / MIB >= 0.005
                ),
            ),
            "figures",
        ),
    ),
    "sharding-memory": Table(
        _parallelisms_on_gpus,
        (
            Column("GPUs", "gpus"),
            "kind",
            Column("Precision", "plan.job.precision"),
            Column("Rows per step", "rows_per_step"),
            Column("Weights (GiB)", "device.parts_gib.weights", "{:.1f}"),
            Column("Optimizer (GiB)", "device.parts_gib.optimizer", "{:.1f}"),
            Column("Peak per GPU (GiB)", lambda row: f"{row['device'].peak_gib:.1f} of {row['gpu'].memory_gib:.1f}"),
            Column("Fits", "plan.verdict"),
            Column("A step", "plan.time.total_s", "{:.1f} s"),
            Column("Sent per rank and step (GB)", "plan.time.sent_gb", "{:.1f}"),
            "figures",
        ),
    ),
    # 2.7
    "pp-quality": Table(
        lambda records: recipes(records, FULL, FULL_PP, LORA_PP),
        FULL_QUALITY,
        waiting=(FULL_PP, LORA_PP),
        published=(FULL, FULL_PP, LORA_PP),
    ),
    "pp-speed": Table(
        lambda records: beside_one_device(recipes(records, FULL_PP, LORA_PP), records, STRONG),
        (*WHAT, *TIMES, "micro_batches", "speedup as Against one device", "idle", *WHERE, *MEMORY),
        waiting=(FULL_PP,),
    ),
    "pp-schedules": Table(
        _schedules,
        (
            *SIZE,
            *SCHEDULE,
            Column("The formula's idle share", lambda row: (row["pipeline"]["stages"] - 1) / row["passes"], "{:.0%}"),
            ACTIVATIONS,
            "figures",
        ),
    ),
    # the same of the larger model alone: a readme's table
    "pp-gain": Table(
        lambda records: _schedules([run for run in records if run["config"]["weights"] == "random"]),
        (*SCHEDULE, ACTIVATIONS.titled("Activations, MiB")),
    ),
    # from the formula's speed-up to the one that was reached: where the rest goes
    "pp-losses": Table(
        _pipelines,
        (
            Column("Run", approach),
            *SIZE,
            Column("The formula's speed-up", "pipeline.ideal_speedup", "{:.2f}x"),
            Column("Upper bound", "pipeline.machine_ceiling", "{:.2f}x"),
            Column("Allowed", "pipeline.allowed_speedup", "{:.2f}x"),
            Column("Lost to small micro-batches", "pipeline.small_micro_batches_factor", "{:.2f}"),
            Column("Lost to unequal stages", "pipeline.unequal_stages_factor", "{:.2f}"),
            Column("Lost to sending and waiting", "pipeline.sending_and_waiting_factor", "{:.2f}"),
            Column("Naive step over its passes", "pipeline.naive_factor", "{:.2f}"),
            Column("Reached by 1F1B", "pipeline.speedup", "{:.2f}x"),
            Column("Share of allowed", "pipeline.share_of_allowed", "{:.2f}"),
        ),
    ),
    # a published naive split by layers against one device, on RoBERTa-large
    "pp-published": Table(
        lambda _: [row for row in published(metric="accuracy") if not PARALLELISMS[row["parallel"]].replicates],
        (
            "approach",
            "devices as GPUs",
            "epochs",
            Column("Accuracy", "best_accuracy", "{:.2%}"),
            Column("Memory per GPU", "memory_gb", lambda sizes: " / ".join(f"{gb} GB" for gb in sizes)),
            Column("Training time", "train_time"),
            "figures",
        ),
    ),
}
