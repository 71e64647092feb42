"""The tables of QLoRA (2.3): quality of both merges, time, memory beside LoRA; full, LoRA and QLoRA side by side."""

import pandas as pd

from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import TECHNIQUES
from common.hardware.devices import find_gpu
from common.planning.job import BatchShape
from common.planning.plans import plan_run
from common.records.store import Record
from common.reporting.rows import (
    FULL,
    KIND_NAMES,
    LORA,
    NOT_RUN,
    QLORA,
    QLORA_DDP,
    QLORA_FSDP,
    Row,
    approach,
    clock,
    completed,
    devices_of,
    mean_and_range,
    measured_quality,
    measured_speed,
    percent,
    planned_memory,
    score,
    table_of,
)

PROJECTED = "projected"
PROJECTED_LENGTH = 1024
"""Tokens of a row in projections for GPU folders."""
SEEDS = (42, 7, 8)
OFTEN_SAID = {FULL: "best", LORA: "good", QLORA: "OK"}
MEASURED_HERE = (QLORA, QLORA_DDP)
NEEDS_GPUS = {
    QLORA_DDP: '`make run FOLDER=2.3_qlora_finetuning/run_1_a5000_24g_x1 ARGS="--parallel ddp --devices 2"`',
    QLORA_FSDP: '`make run FOLDER=2.6_full_finetuning_with_fsdp/run_1_a100_80g_x2 ARGS="--technique qlora"`',
}
"""Ways that have no run folder of their own on GPUs, and how they are started."""
FSDP_FOLDER = "2.6_full_finetuning_with_fsdp/run_1_a100_80g_x2"
SMALL_GPU_FOLDER = "2.3_qlora_finetuning/run_1_a5000_24g_x1"


def _name(record: Record) -> str:
    """The approach, with what a QLoRA run has set in other ways than others."""
    if not TECHNIQUES[record["technique"]].quantizes:
        return approach(record)
    usual = RunConfig()
    config = {name: record["config"][name] for name in ("quantization", "optim")}
    return ", ".join([approach(record), *(value for name, value in config.items() if value != getattr(usual, name))])


def qlora_quality(records: list[Record]) -> pd.DataFrame:
    """2.3: quality before, and after with either base, beside LoRA's."""
    rows = []
    for record in completed(records, LORA, *MEASURED_HERE):
        row = measured_quality(record)
        other = record["quality"].get("after_original_base") or {}
        losses = record.get("merged_validation_losses") or {}
        shown = ("Figures", "Seed", "Devices", "Epochs", "Batch size", "Similarity score before (lower is better)",
                 "Similarity score (lower is better)", "By MiniLM before", "By MiniLM", "Facts said before",
                 "Facts said (higher is better)", "Validation loss")  # fmt: skip
        rows.append({
            "Approach": _name(record),
            **{name: row[name] for name in shown},
            **_of_other_base(record, other, losses),
        })  # fmt: skip
    return _with_gpu_rows(table_of(records, (QLORA,), rows, []))


def _of_other_base(record: Record, other: dict[str, float], losses: dict[str, float]) -> Row:
    """What the adapter is worth on the original base."""
    names = ("Original base: MiniLM", "Original base: facts said", "Original base: validation loss")
    if TECHNIQUES[record["technique"]].has_plain_adapters:
        return dict.fromkeys(names, "the same base")
    if not other:
        return dict.fromkeys(names, NOT_RUN)
    values = (score(other["similarity_score_minilm"]), percent(other["facts_said_share"]),
              f"{losses['merged_into_original']:.4f}")  # fmt: skip
    return dict(zip(names, values, strict=True))


def qlora_speed(records: list[Record]) -> pd.DataFrame:
    """2.3: time and memory beside LoRA's."""
    columns = ["Training speedup factor", "Machine's ceiling", "CUDA scaling factor", "VRAM scaling factor"]
    rows = []
    for record in completed(records, LORA, *MEASURED_HERE):
        row = {**measured_speed(record, record, "strong"), "Approach": _name(record)}
        stored = record.get("quantization")
        row["Bits per quantized weight"] = f"{stored['bits_per_quantized_weight']:.2f}" if stored else "-"
        rows.append(row)
    return _with_gpu_rows(table_of(records, (QLORA,), rows, []).drop(columns=columns))


def _with_gpu_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The table and a row for each way that nobody has run on GPUs yet."""
    waiting = []
    for kind, command in NEEDS_GPUS.items():
        run = _run_of(FSDP_FOLDER if kind == QLORA_FSDP else SMALL_GPU_FOLDER)
        known = {"Approach": KIND_NAMES[kind], "Figures": NOT_RUN, "Seed": str(run.seed), "Devices": f"{run.gpu} x2",
                 "Batch size": f"{run.per_device_train_batch_size} x2", "Epochs": str(run.num_train_epochs), "Command": command}  # fmt: skip
        waiting.append({column: known.get(column, NOT_RUN) for column in table.columns})
    return pd.concat([table, pd.DataFrame(waiting)])


def _run_of(run_folder: str) -> RunConfig:
    return next(run for run in run_folders().values() if run.run_folder == run_folder)


def qlora_memory(records: list[Record]) -> pd.DataFrame:
    """2.3: memory beside LoRA's: of the base's weights as stored, and of training on the GPU folders' model."""
    return pd.DataFrame([*_measured_memory(records), *_projected_memory()])


def _measured_memory(records: list[Record]) -> list[Row]:
    rows = []
    for record in completed(records, QLORA):
        stored, config = record["quantization"], record["config"]
        if record["launcher"] != "python" or config["seed"] != SEEDS[0]:
            continue
        before, after = stored["unquantized_gib"], stored["weights_gib"]
        rows.append({
            "Run": f"{_name(record)}, {devices_of(record)}",
            "Of": f"the base's weights ({stored['quantized_share']:.0%} of them quantized)",
            "LoRA (GiB)": f"{before:.4f}",
            "QLoRA (GiB)": f"{after:.4f}",
            "Factor": f"{before / after:.2f}x",
            "Saved (GiB)": f"{before - after:.4f}",
            "LoRA fits": "-",
            "QLoRA fits": "-",
            "Figures": "measured",
        })  # fmt: skip
    return rows


def _projected_memory() -> list[Row]:
    rows = []
    for run in run_folders().values():
        if (run.technique, run.parallel, run.device) != (*QLORA, "cuda"):
            continue
        batch, gpu = BatchShape(run.per_device_train_batch_size, PROJECTED_LENGTH, PROJECTED_LENGTH), find_gpu(run.gpu)
        lora, qlora = (plan_run(run.changed_to(technique=technique), batch) for technique in ("lora", "qlora"))
        for what in ("weights", "training's peak"):
            before, after = (
                plan.devices[0].parts_gib["weights"] if what == "weights" else plan.devices[0].peak_gib
                for plan in (lora, qlora)
            )
            fits = ["-" if what == "weights" else "yes" if gib <= gpu.memory_gib else "no" for gib in (before, after)]
            rows.append({
                "Run": f"`{run.run_folder.split('/')[1]}`, {run.quantization}, {run.per_device_train_batch_size} rows of "
                f"{PROJECTED_LENGTH:,} tokens",
                "Of": f"{what}, 7B model" if what == "weights" else what,
                "LoRA (GiB)": f"{before:.1f}",
                "QLoRA (GiB)": f"{after:.1f}",
                "Factor": f"{before / after:.2f}x",
                "Saved (GiB)": f"{before - after:.1f}",
                "LoRA fits": fits[0],
                "QLoRA fits": fits[1],
                "Figures": PROJECTED,
            })  # fmt: skip
    return rows


def best_good_ok(records: list[Record]) -> pd.DataFrame:
    """2.3: full fine-tuning, LoRA and QLoRA on the same rows and seeds, each by its own recipe; mean, and range."""
    rows = []
    for kind, said in OFTEN_SAID.items():
        found = {record["config"]["seed"]: record for record in completed(records, kind) if _is_recipe(record)}
        runs = [found[seed] for seed in SEEDS if seed in found]
        if len(runs) < len(SEEDS):
            rows.append({"Approach": KIND_NAMES[kind], "Often said": said, "Figures": NOT_RUN})
            continue
        after = [run["quality"]["after"] for run in runs]
        facts, minilm = ([each[name] for each in after] for name in ("facts_said_share", "similarity_score_minilm"))
        rows.append({
            "Approach": KIND_NAMES[kind],
            "Often said": said,
            "Seeds": ", ".join(map(str, SEEDS)),
            "Learning rate": f"{runs[0]['config']['learning_rate']:g}",
            "Trained weights": f"{runs[0]['trained_parameters']:,}",
            "Validation loss": mean_and_range([run["best_validation_loss"] for run in runs], "{:.4f}"),
            "Facts said (higher is better)": mean_and_range(facts, "{:.1%}"),
            "By MiniLM (lower is better)": mean_and_range(minilm, "{:.4f}"),
            "Training time": " / ".join(clock(run["train_time_s"]) for run in runs),
            "Training's peak, planned / measured (GiB)": planned_memory(runs[0]),
            "Figures": "measured",
        })  # fmt: skip
    return pd.DataFrame(rows).fillna(NOT_RUN)


def _is_recipe(record: Record) -> bool:
    """A run by command whose settings are its folder's, but for the seed."""
    if record["launcher"] != "python":
        return False
    literal, config = _run_of(record["run_folder"]).to_dict(), record["config"]
    free = {"seed", "run_name", "results_root", "run_folder"}
    return all(config[name] == value for name, value in literal.items() if name in config and name not in free)


TABLES = {
    "qlora-quality": qlora_quality,
    "qlora-speed": qlora_speed,
    "qlora-memory": qlora_memory,
    "best-good-ok": best_good_ok,
}
