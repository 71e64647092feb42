"""The tables of QLoRA (2.3): quality of both merges, time, memory beside LoRA; full, LoRA and QLoRA side by side."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of, run_folders
from common.base.specs import TECHNIQUES
from common.records.store import Record
from common.reporting.rows import (
    FULL,
    LORA,
    NOT_RUN,
    PLANNED,
    PROJECTED,
    PROJECTED_LENGTH,
    QLORA,
    QLORA_DDP,
    QLORA_FSDP,
    SPEED,
    WHAT,
    WHERE,
    Kind,
    Row,
    approach,
    as_table,
    clock,
    completed,
    devices_of,
    fits,
    kind_name,
    measured_quality,
    measured_speed,
    over_seeds,
    percent,
    planned_memory,
    projected_plan,
    score,
    table_of,
)

SEEDS = (42, 7, 8)
OFTEN_SAID = {FULL: "best", LORA: "good", QLORA: "OK"}
SHOWN = (LORA, QLORA, QLORA_DDP)
NEEDS_GPUS = {
    QLORA_DDP: ("2.3_qlora_finetuning/run_1_a5000_24g_x1", "--parallel ddp --devices 2"),
    QLORA_FSDP: ("2.6_full_finetuning_with_fsdp/run_1_a100_80g_x2", "--technique qlora"),
}
"""Kinds that have no run folder of their own on GPUs: the folder and the options that start them."""
ORIGINAL_BASE = tuple(f"Original base: {name}" for name in ("MiniLM", "facts said", "validation loss"))
QUALITY = (*WHAT, "Similarity score", "Facts said", "Validation loss", *WHERE, "Epochs", "Batch size",
           "Similarity score before", "By MiniLM before", "By MiniLM", "Facts said before", *ORIGINAL_BASE)  # fmt: skip


def _name(record: Record) -> str:
    """Return the approach, with those settings of a QLoRA run that differ from the defaults."""
    shown = ("quantization", "optim") if TECHNIQUES[record["technique"]].quantizes else ()
    unusual = [record["config"][name] for name in shown if record["config"][name] != getattr(RunConfig, name)]
    return ", ".join([approach(record), *unusual])


def qlora_quality(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.3: quality before, and after with either base, beside LoRA's."""
    rows = [
        {**measured_quality(record), "Approach": _name(record), **_of_original_base(record)}
        for record in completed(records, *SHOWN)
    ]
    return _with_gpu_rows(table_of(records, (QLORA,), rows, columns=QUALITY))


def _of_original_base(record: Record) -> Row:
    if TECHNIQUES[record["technique"]].has_plain_adapters:
        return dict.fromkeys(ORIGINAL_BASE, "the same base")
    after = record["quality"].get("after_original_base")
    if not after:
        return {}
    loss = record["merged_validation_losses"]["merged_into_original"]
    values = (score(after["similarity_score_minilm"]), percent(after["facts_said_share"]), f"{loss:.4f}")
    return dict(zip(ORIGINAL_BASE, values, strict=True))


def qlora_speed(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.3: time and memory beside LoRA's."""
    rows = [{**measured_speed(record), "Approach": _name(record)} for record in completed(records, *SHOWN)]
    return _with_gpu_rows(table_of(records, (QLORA,), rows, columns=(*SPEED, "Bits per quantized weight")))


def _with_gpu_rows(table: pd.DataFrame) -> pd.DataFrame:
    waiting = [_waiting(kind, folder, options) for kind, (folder, options) in NEEDS_GPUS.items()]
    return pd.concat([table, pd.DataFrame(waiting, columns=table.columns, dtype=object).fillna(NOT_RUN)])


def _waiting(kind: Kind, folder: str, options: str) -> Row:
    run = literal_of(REPOSITORY / folder)
    return {
        "Approach": kind_name(*kind),
        "Seed": str(run.seed),
        "Devices": f"{run.gpu} x2",
        "Batch size": f"{run.per_device_train_batch_size} x2",
        "Epochs": str(run.num_train_epochs),
        "Command": f'`make run FOLDER={folder} ARGS="{options}"`',
    }


@as_table
def qlora_memory(records: list[Record]) -> Iterator[Row]:
    """Return the table of 2.3.

    Memory beside LoRA's: of the base's weights as stored, and of training on the GPU folders' model.
    """
    for record in completed(records, QLORA):
        if record["launcher"] == "python" and record["config"]["seed"] == SEEDS[0]:
            stored = record["quantization"]
            yield {
                "Run": f"{_name(record)}, {devices_of(record)}",
                "Of": f"the base's weights ({stored['quantized_share']:.0%} of them quantized)",
                **_saved(stored["unquantized_gib"], stored["weights_gib"], 4),
                "Figures": "measured",
            }
    for folder, run in run_folders().items():
        if (run.technique, run.parallel, run.device) == (*QLORA, "cuda"):
            lora, qlora = (projected_plan(run.changed_to(technique=name)).devices[0] for name, _ in (LORA, QLORA))
            rows = f"{run.per_device_train_batch_size} rows of {PROJECTED_LENGTH:,} tokens"
            compared = {
                "weights, 7B model": _saved(lora.parts_gib["weights"], qlora.parts_gib["weights"], 1),
                "training's peak": {
                    **_saved(lora.peak_gib, qlora.peak_gib, 1),
                    "LoRA fits": fits(lora.safe_gib, run.gpu),
                    "QLoRA fits": fits(qlora.safe_gib, run.gpu),
                },
            }
            name = f"`{folder.name}`, {run.quantization}, {rows}"
            yield from ({"Run": name, "Of": what, **saved, "Figures": PROJECTED} for what, saved in compared.items())


def _saved(lora_gib: float, qlora_gib: float, digits: int) -> Row:
    return {
        "LoRA (GiB)": f"{lora_gib:.{digits}f}",
        "QLoRA (GiB)": f"{qlora_gib:.{digits}f}",
        "Factor": f"{lora_gib / qlora_gib:.2f}x",
        "Saved (GiB)": f"{lora_gib - qlora_gib:.{digits}f}",
        "LoRA fits": "-",
        "QLoRA fits": "-",
    }


@as_table
def best_good_ok(records: list[Record]) -> Iterator[Row]:
    """Return the table of 2.3.

    Full fine-tuning, LoRA and QLoRA on the same rows and seeds, each by its own recipe; mean, and range.
    """
    for kind, said in OFTEN_SAID.items():
        found = {record["config"]["seed"]: record for record in completed(records, kind) if _is_recipe(record)}
        if not found.keys() >= set(SEEDS):
            yield {"Approach": kind_name(*kind), "Often said": said, "Figures": NOT_RUN}
            continue
        runs = [found[seed] for seed in SEEDS]
        after = pd.DataFrame([run["quality"]["after"] for run in runs])
        yield {
            "Approach": kind_name(*kind),
            "Often said": said,
            "Seeds": ", ".join(map(str, SEEDS)),
            "Learning rate": f"{runs[0]['config']['learning_rate']:g}",
            "Trained weights": f"{runs[0]['trained_parameters']:,}",
            "Validation loss": over_seeds([run["best_validation_loss"] for run in runs], "{:.4f}"),
            "Facts said": over_seeds(after["facts_said_share"], "{:.1%}"),
            "By MiniLM (lower is better)": over_seeds(after["similarity_score_minilm"], "{:.4f}"),
            "Training time": " / ".join(clock(run["train_time_s"]) for run in runs),
            PLANNED: planned_memory(runs[0]),
            "Figures": "measured",
        }


def _is_recipe(record: Record) -> bool:
    """Return whether a run was started by command with its folder's settings, but for the seed.

    A record says what the model takes of padding, and how many rows the plan lets answer at once, where the folder
    leaves that open; whether the base was evaluated changes nothing.
    """
    literal, config = _literals().get(REPOSITORY / record["run_folder"]), record["config"]
    if literal is None:  # of a run folder that is not here
        return False
    named = {"seed", "run_name", "results_root", "run_folder"}
    chosen = {"padding_free", "per_device_eval_batch_size", "baseline"}
    compared = (literal.keys() & config.keys()) - named - chosen
    return record["launcher"] == "python" and all(config[name] == literal[name] for name in compared)


@cache
def _literals() -> dict[Path, dict[str, object]]:
    return {folder: run.to_dict() for folder, run in run_folders().items()}
