"""The tables of QLoRA (2.3): quality of both merges, time, memory beside LoRA; full, LoRA and QLoRA side by side."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from bench.tables.chats import SPEED, WHERE
from bench.tables.full import PROJECTED_LENGTH, fits, projected_plan
from bench.tables.table import (
    FULL,
    LORA,
    PROJECTED,
    QLORA,
    QLORA_DDP,
    Table,
    approach,
    column,
    pretrained,
)
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import TECHNIQUES
from common.planning.terms import Kind
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import NOT_RUN, Row, completed, devices_of

SEEDS = (42, 7, 8)


def _name(row: Row) -> str:
    """Return the approach, with those settings of a QLoRA run that differ from the defaults."""
    names = ("quantization", "optim") if TECHNIQUES[row["technique"]].quantizes else ()
    unusual = [row["config"][name] for name in names if row["config"][name] != getattr(RunConfig, name)]
    return ", ".join([approach(row), *unusual])


def _original_base(title: str, found: Column) -> Column:
    """Return the column of what an adapter is worth that was merged into the base before it was quantized."""
    return Column(
        f"Original base: {title}",
        lambda row: "the same base" if TECHNIQUES[row["technique"]].has_plain_adapters else found.cell(row),
    )


NAME = Column("Approach", _name)
QUALITY = (
    NAME,
    *("seed", "score", "facts", "loss", *WHERE, "epochs", "rows"),
    *("score_before", "minilm_before", "minilm", "facts_before"),
    _original_base("MiniLM", replace(column("minilm"), value="quality.after_original_base.similarity_score_minilm")),
    _original_base("fact recall", column("facts_of_original_base")),
    _original_base(
        "validation loss",
        replace(
            column("loss"),
            value=lambda row: (
                row["quality"]["after_original_base"] and row["merged_validation_losses"]["merged_into_original"]
            ),
        ),
    ),
)


def _runs(records: list[Record]) -> list[Record]:
    return pretrained(completed(records, LORA, QLORA, QLORA_DDP))


def _memory(records: list[Record]) -> Iterator[Row]:
    """Yield memory beside LoRA's: of the base's weights as stored, and of training on the GPU folders' model."""
    for record in completed(records, QLORA):
        if record["launcher"] == "python" and record["config"]["seed"] == SEEDS[0] and "quantization" in record:
            stored = record["quantization"]
            yield {
                "run": f"{_name(record)}, {devices_of(record)}",
                "of": f"the base's weights ({stored['quantized_share']:.0%} of them quantized)",
                "lora_gib": stored["unquantized_gib"],
                "qlora_gib": stored["weights_gib"],
                "digits": 4,
            }
    for folder, run in run_folders().items():
        if (run.technique, run.parallel, run.device) == (*QLORA, "cuda"):
            lora, qlora = (projected_plan(run.changed_to(technique=name)).devices[0] for name, _ in (LORA, QLORA))
            rows = f"{run.per_device_train_batch_size} rows of {PROJECTED_LENGTH:,} tokens"
            projected = {"run": f"`{folder.name}`, {run.quantization}, {rows}", "digits": 1, "figures": PROJECTED}
            weights = {"lora_gib": lora.parts_gib[Kind.WEIGHTS], "qlora_gib": qlora.parts_gib[Kind.WEIGHTS]}
            fit = {"lora_fits": fits(lora.safe_gib, run.gpu), "qlora_fits": fits(qlora.safe_gib, run.gpu)}
            fit |= {"card": run.gpu, "batch_size": run.per_device_train_batch_size}
            yield {**projected, "of": "weights, 7B model", **weights}
            yield {**projected, "of": "training's peak", "lora_gib": lora.peak_gib, "qlora_gib": qlora.peak_gib, **fit}


def _techniques(records: list[Record]) -> Iterator[Row]:
    """Yield each technique on the same rows and seeds, by its own recipe, if there is a run with each seed."""
    literals = {folder: run.to_dict() for folder, run in run_folders().items()}
    for kind, said in {FULL: "best", LORA: "good", QLORA: "OK"}.items():
        found = {
            record["config"]["seed"]: record for record in completed(records, kind) if _is_recipe(record, literals)
        }
        known = {"technique": kind[0], "parallel": kind[1], "said": said}
        if found.keys() >= set(SEEDS):
            runs = [found[seed] for seed in SEEDS]
            yield {**runs[0], **known, "seeds": runs}
        else:
            yield {**known, "status": NOT_RUN, "figures": NOT_RUN}


def _is_recipe(record: Record, literals: dict[Path, dict[str, object]]) -> bool:
    """Return whether a run was started by command with its folder's settings, but for the seed.

    A record says what the model takes of padding, and how many rows the plan lets answer at once, where the folder
    leaves that open; whether the base was evaluated changes nothing.
    """
    literal, config = literals.get(REPOSITORY / record["run_folder"]), record["config"]
    if literal is None:  # of a run folder that is not here
        return False
    named = {"seed", "run_name", "results_root", "run_folder"}
    chosen = {"padding_free", "per_device_eval_batch_size", "baseline"}
    compared = (literal.keys() & config.keys()) - named - chosen
    return record["launcher"] == "python" and all(config[name] == literal[name] for name in compared)


def _gib(title: str, value_of: Callable[[Row], float]) -> Column:
    return Column(title, lambda row: f"{value_of(row):.{row['digits']}f}")


TABLES = {
    "qlora-quality": Table(_runs, QUALITY),
    "qlora-speed": Table(
        _runs,
        (
            NAME,
            *SPEED[1:],
            Column(
                "Bits per quantized weight", "quantization.bits_per_quantized_weight", "{:.2f}", none="-", missing="-"
            ),
        ),
    ),
    "qlora-memory": Table(
        _memory,
        (
            Column("Run", "run"),
            Column("Of", "of"),
            _gib("LoRA (GiB)", lambda row: row["lora_gib"]),
            _gib("QLoRA (GiB)", lambda row: row["qlora_gib"]),
            Column("Factor", lambda row: row["lora_gib"] / row["qlora_gib"], "{:.2f}x"),
            _gib("Saved (GiB)", lambda row: row["lora_gib"] - row["qlora_gib"]),
            Column("LoRA fits", "lora_fits", missing="-"),
            Column("QLoRA fits", "qlora_fits", missing="-"),
            "figures",
        ),
    ),
    # which cards hold what, of the table above
    "qlora-cards": Table(
        lambda records: [row for row in _memory(records) if "lora_fits" in row],
        (
            Column("Card", "card"),
            Column("Batch size", "batch_size"),
            _gib("LoRA (GiB)", lambda row: row["lora_gib"]),
            _gib("QLoRA (GiB)", lambda row: row["qlora_gib"]),
            Column("LoRA fits", "lora_fits"),
            Column("QLoRA fits", "qlora_fits"),
            "figures",
        ),
    ),
    # full fine-tuning, LoRA and QLoRA on the same rows and seeds: mean, and range
    "best-good-ok": Table(
        _techniques,
        (
            "short_approach",
            Column("Often said", "said"),
            Column("Trained weights", "trained_parameters", "{:,}"),
            replace(column("loss"), over_seeds=True),
            replace(column("facts"), format="{:.1%}", over_seeds=True),
            "figures",
        ),
    ),
}
