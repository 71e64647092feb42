"""The tables of chats: the README's, LoRA's (2.1), DDP's (2.2), and those of docs/results.md."""

import io
import json
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.tables.table import (
    FULL_DDP,
    FULL_FSDP,
    FULL_ZERO3,
    LORA,
    LORA_DDP,
    Table,
    column,
    copies_of,
    data_parallel_ranks,
    pretrained,
    published,
    sharing_label,
    waiting,
)
from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.checks import planner_command
from common.hardware.devices import hours_text
from common.hardware.prices import SPOT
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import (
    STRONG,
    WEAK,
    Row,
    beside_one_device,
    completed,
    kind_name,
    kind_of,
    step_s,
    with_seeds,
)

# -- columns


WHAT, WHERE = ("approach", "seed"), ("figures", "devices")
TIMES, MEMORY = ("batch", "steps", "time", "tokens_per_s"), ("peak", "planned", "command")
QUALITY = (
    *(*WHAT, "score", "facts", "loss", *WHERE, "epochs", "rows", "effective_batch", "learning_rate"),
    *("score_before", "score_tuned", "minilm_before", "minilm", "shuffled", "shuffled_minilm"),
    "facts_before",
)
SPEED = (*WHAT, *TIMES, *WHERE, "reporting", *MEMORY)
SCALED = (*WHAT, *TIMES, "speedup", "ceiling", *WHERE, "reporting", *MEMORY)


def milliseconds(seconds: float) -> str:
    """Return `57 ms`."""
    return f"{seconds * 1e3:.0f} ms"


def _epochs(row: Row) -> str:
    number = row["config"]["num_train_epochs"]
    return f"{number} epoch" + ("" if number == 1 else "s")


def _unusual(row: Row) -> str:
    """Return how a run's weights are stored and optimized where that differs from the defaults.

    Older records may lack a setting.
    """
    names = ("quantization",) * TECHNIQUES[row["technique"]].quantizes + ("optim", "precision")
    found = {name: row["config"].get(name) for name in names}
    return ", ".join(value for name, value in found.items() if value not in (None, getattr(RunConfig, name)))


def _shared_by(row: Row) -> str:
    """Return `1`, or `2, FSDP`: the number of devices, and how they share the work."""
    copies = copies_of(row)
    shared = "" if PARALLELISMS[row["parallel"]].is_single else f", {sharing_label(row)}"
    return f"{row['config']['devices']}{shared}" + (f" ({copies} copies)" if copies > 1 else "")


def _what(row: Row) -> str:
    is_weak = row["same"] == WEAK and not PARALLELISMS[row["parallel"]].is_single
    return column("short_approach").cell(row) + (", same batch each" if is_weak else "")


# -- rows


def _ddp_runs(records: Iterable[Record], same: str) -> list[Row]:
    rows = beside_one_device(completed(records, LORA_DDP), records, same)
    return [row for row in rows if row["baseline"]]


def _usual_seed(records: Iterable[Record]) -> list[Record]:
    return [run for run in _by_command(records) if run["config"]["seed"] == RunConfig.seed]


def _by_command(records: Iterable[Record]) -> list[Record]:
    return [run for run in records if run["launcher"] in ("python", "torchrun")]


def _rates(records: list[Record]) -> list[Row]:
    """Return what others published, then each batch and learning rate here, over its seeds, by ranks and batch."""
    runs = with_seeds(_by_command(pretrained(completed(records, LORA, LORA_DDP))))
    measured = sorted(runs, key=lambda row: (len(row["world"]), row[STRONG], row["peak_learning_rate"]))
    return [*published(LORA, LORA_DDP), *measured]


def _scaled(records: list[Record]) -> list[Row]:
    """Return what others published, then strong and weak scaling here: runs by command on the usual seed."""
    runs = _usual_seed(records)
    usual = [
        row
        for same in (STRONG, WEAK)
        for row in _ddp_runs(runs, same)
        if row["config"]["learning_rate_scaling"] == RunConfig.learning_rate_scaling
    ]
    measured = {(row["run_folder"], row["run_name"]): row for row in usual}  # a baseline only once
    return [*published(LORA, LORA_DDP), *measured.values()]


def _front_runs(records: list[Record]) -> list[Row]:
    """Return what two devices bring and cost: runs started by command, on the usual seed; a baseline only once."""
    runs = _usual_seed(records)
    full_runs = beside_one_device(completed(runs, FULL_DDP, FULL_FSDP, FULL_ZERO3), runs, STRONG)
    rows = [*_ddp_runs(runs, STRONG), *_ddp_runs(runs, WEAK), *(row for row in full_runs if row["baseline"])]
    return list({(row["run_folder"], row["run_name"], _what(row)): row for row in rows}.values())


# whose answer the README shows
RENT_QUESTION = "--gpu any --model qwen2.5-7b --rows-per-epoch 10000 --seq-len 1024 --num-train-epochs 3 --on-demand"


def planner_says(question: str) -> str:
    """Return what the planner prints for the options of a question."""
    said = io.StringIO()
    with redirect_stdout(said):
        planner_command.answer(planner_command.read_options(question.split()))
    return said.getvalue()


def _machines_to_rent(_: list[Record]) -> list[Row]:
    """Return the frontier of dollars against hours, where it halves the time at least."""
    found: list[Row] = []
    for rental in json.loads(planner_says(f"{RENT_QUESTION} --json"))["frontier"]:
        if not found or rental["most_hours"] < 0.5 * found[-1]["most_hours"]:
            found.append(rental)
    return found


TABLES = {
    "front": Table(
        _front_runs,
        (
            Column("What", _what),
            "short_devices",
            "batch",
            "time as Time",
            "speedup as Speed-up",
            "ceiling",
            "facts",
        ),
    ),
    "rent": Table(
        _machines_to_rent,
        (
            Column("Machine", lambda each: f"{each['gpus']} x {each['gpu']}"),
            Column(
                "Strategy",
                lambda each: (
                    f"{TECHNIQUES[each['technique']].short}, {PARALLELISMS[each['parallel']].label}"
                    + ", checkpointed" * each["gradient_checkpointing"]
                ),
            ),
            Column("Provider", lambda each: each["provider"] + ", spot" * (each["kind"] == SPOT)),
            Column("Time", lambda each: hours_text(each["likely_hours"], each["most_hours"])),
            Column("USD", lambda each: f"{each['likely_usd']:.2f} to {each['most_usd']:.2f}"),
        ),
    ),
    "master": Table(
        completed,
        (
            "technique",
            Column("Settings", _unusual),
            "model",
            Column(
                "Data",
                lambda row: "{}, {:,} rows in up to {}".format(
                    Path(row["config"]["data"]).name,
                    sum(rank["samples"] for rank in row["world"][: data_parallel_ranks(row)]),
                    _epochs(row),
                ),
            ),
            "machine",
            Column(
                "Before",
                lambda row: "before: score {}, by MiniLM {}, fact recall {}".format(
                    *(column(name).cell(row) for name in ("score_before", "judged_before", "facts_before"))
                ),
            ),
            Column("Devices", _shared_by),
            Column("Launcher", "launcher"),
            "seed",
            "batch as Batch",
            "learning_rate as Learning rate",
            "time as Time",
            "peak as Peak GiB",
            "score as Score",
            "judged as MiniLM",
            "facts as Facts",
        ),
        shared=("Technique", "Settings", "Model", "Data", "Machine", "Before"),
    ),
    "results-published": Table(
        lambda _: published(),
        (
            Column("Source", "source"),
            "approach",
            "devices as GPUs",
            "epochs",
            "batch as Batch",
            "learning_rate as Learning rate",
            "time as Time",
            "score as Score",
        ),
        shared=("Source",),
    ),
    "results-not-run": Table(
        waiting,
        (
            "model",
            Column("Epochs", _epochs),
            Column("Run folder", "run_folder", lambda place: f"{place.partition('_')[0]}, `{Path(place).name}`"),
            "approach",
            "devices as GPUs",
            "batch as Batch",
            "learning_rate as Learning rate",
        ),
        shared=("Model", "Epochs"),
    ),
    "lora-quality": Table(lambda records: completed(records, LORA), QUALITY, waiting=(LORA,), published=(LORA,)),
    "lora-speed": Table(lambda records: completed(records, LORA), SPEED, waiting=(LORA,), published=(LORA,)),
    # what tells the runs stands in the first part
    "ddp-quality": Table(
        lambda records: pretrained(completed(records, LORA, LORA_DDP)),
        tuple(dict.fromkeys((*WHAT, "effective_batch", "learning_rate", *QUALITY))),
        published=(LORA, LORA_DDP),
    ),
    "ddp-rates": Table(
        _rates,
        (
            Column("Approach", lambda row: kind_name(row).replace(" with", ",")),
            "short_figures",
            "epochs",
            "effective_batch as Effective batch",
            "learning_rate as Learning rate",
            replace(column("score as Score"), over_seeds=True),
            replace(column("facts"), over_seeds=True),
        ),
    ),
    "ddp-scaling": Table(
        _scaled,
        (
            "short_devices",
            "batch",
            "cuda as CUDA scaling",
            "vram as VRAM scaling",
            "time as Time",
            "speedup as Speed-up",
            "ceiling",
        ),
    ),
    # the same steps, shared (strong scaling)
    "ddp-strong": Table(partial(_ddp_runs, same=STRONG), SCALED),
    # fewer, larger steps for the same rows (weak scaling)
    "ddp-weak": Table(partial(_ddp_runs, same=WEAK), (*SCALED, "cuda", "vram"), published=(LORA, LORA_DDP)),
    # where a step's time goes when its rows are shared; the bare steps were timed in the run
    "ddp-step": Table(
        lambda records: [
            row for row in _ddp_runs(records, STRONG) if kind_of(row) == LORA_DDP and row.get("machine_ceiling")
        ],
        (
            "seed",
            Column("Started by", "launcher"),
            "steps",
            Column("One rank, the whole batch, in training", lambda row: step_s(row["baseline"]), milliseconds),
            Column("One rank, the whole batch, bare", "machine_ceiling.one_rank_global_batch_step_s", milliseconds),
            Column("One rank, its share alone, bare", "machine_ceiling.one_rank_share_step_s", milliseconds),
            Column(
                "All ranks at once, without synchronization, bare",
                "machine_ceiling.all_ranks_share_step_s",
                milliseconds,
            ),
            Column("All ranks, in training with DDP", step_s, milliseconds),
        ),
    ),
}
