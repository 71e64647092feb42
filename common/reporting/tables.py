"""Runs side by side: what `make demo` and `python -m common.report --results` print of chats."""

from dataclasses import replace
from functools import partial

import pandas as pd

from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.records.store import Record
from common.reporting.columns import Column, column
from common.reporting.rows import STRONG, WEAK, Row, beside_one_device


def _has_adapters(row: Row) -> bool:
    return TECHNIQUES[row["technique"]].has_adapters


_of_some = partial(Column, none=None, missing=None)  # means nothing for other runs
# What stands of a completed run beside others
SIDE_BY_SIDE = (
    "kind as approach",
    "devices as devices",
    Column("rows per device and step", "config.per_device_train_batch_size", int),
    Column("effective batch size", "effective_batch_size", int),
    Column("steps", "steps", int),
    Column("learning rate", "config.learning_rate", "{:g}"),
    _of_some(
        "rank of the adapters",
        lambda row: row["config"].get("lora_r", RunConfig.lora_r) if _has_adapters(row) else None,
    ),
    "score_before as similarity score before",
    "score as similarity score after",
    "judged_before as by MiniLM before",
    "judged as by MiniLM after",
    "shuffled as answers shuffled",
    "judged_shuffled as shuffled, by MiniLM",
    "facts_before as fact recall before",
    "facts as fact recall after",
    "loss as lowest validation loss",
    "whole_time as training time",
    "reporting as of that, validation and checkpoints",
    "tokens_per_s as tokens per second",
    "peak as peak memory per device (GiB)",
    "planned as training's peak, planned / measured",
    _of_some("weights that a step changes", lambda row: None if _has_adapters(row) else row["updated_share"], "{:.0%}"),
    _of_some(
        "weights of the base, in 4 bits / not (MiB)",
        "quantization",
        lambda stored: f"{2**10 * stored['weights_gib']:,.2f} / {2**10 * stored['unquantized_gib']:,.2f}",
    ),
    _of_some(
        "fact recall, merged into the original base",
        lambda row: column("facts_of_original_base").cell(row) if row["quantization"] else None,
    ),
    replace(column("idle"), title="idle share per stage", none=None, missing=None),
)


def side_by_side(records: list[Record]) -> pd.DataFrame:
    """Return runs as columns, their settings and results as rows: what `make demo` prints."""
    table = pd.DataFrame({
        f"{record['run_folder'].split('_')[0]} {record['run_name']}": _said_of(record, records) for record in records
    })  # fmt: skip
    settings = table.index.intersection(["learning rate", "rank of the adapters"])  # shown where they differ
    same = [name for name in settings if table.loc[name].dropna().nunique() < 2]
    return table.drop(index=same).dropna(how="all").fillna("")


def _said_of(record: Record, records: list[Record]) -> dict[str, object]:
    if record["status"] != "completed":
        return {"status": f"{record['status']}: {record.get('error', '')[:60]}"}
    said = {each.title: each.cell(record) for each in map(column, SIDE_BY_SIDE)}
    for same, words in ((STRONG, "at the same effective batch"), (WEAK, "at the same rows per device")):
        row = beside_one_device([record], records, same)[-1]
        if row["baseline"] and not PARALLELISMS[record["parallel"]].in_one_process:
            said[f"speed-up {words}"] = column("speedup").cell(row)
            said[f"upper bound {words}"] = column("ceiling").cell(row)
    return said
