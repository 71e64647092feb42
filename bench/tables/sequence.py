"""The tables of sequence parallel (2.8)."""

from bench.tables.chats import MEMORY, QUALITY, TIMES, WHAT, WHERE
from bench.tables.full import recipes
from bench.tables.table import FULL, FULL_FSDP_SP, FULL_SP, LORA_SP, QLORA_SP, Table
from common.hardware.devices import MIB
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import STRONG, Row, beside_one_device, completed

KINDS = (FULL_SP, FULL_FSDP_SP, LORA_SP, QLORA_SP)


def activations_mib(record: Row) -> float:
    """Return what the first rank holds in a step beside weights, gradients and optimizer states, counted."""
    held = record["held"]["per_rank"][0] if "held" in record else record["baseline_held"]
    return 1024 * record["memory"][0]["peak_gib_by_phase"]["training"] - sum(held.values()) / MIB


def _long_rows(records: list[Record]) -> list[Row]:
    """Return the runs with long rows, the shortest first, with what one device holds and takes for the same."""
    runs = [run for run in completed(records, FULL_SP) if run["config"]["weights"] == "random"]
    found = []
    for run in sorted(runs, key=lambda run: (run["config"]["max_length"], run["config"].get("tiled_mlp", False))):
        one = beside_one_device([run], records, STRONG)[-1]["baseline"]
        if one:
            whole = activations_mib({**one, "baseline_held": run["held"]["whole"]})
            found.append({**run, "whole_mib": whole, "own_mib": activations_mib(run)})
    return found


def _seconds(title: str, name: str) -> Column:
    return Column(title, f"machine_ceiling.{name}_step_s", "{:.2f} s")


TABLES = {
    "sp-quality": Table(
        lambda records: [
            *(run for run in recipes(records, FULL) if run["config"]["per_device_train_batch_size"] == 16),
            *recipes(records, *KINDS),
        ],
        [name for name in QUALITY if name not in ("score_tuned", "shuffled_minilm", "shuffled")],
        waiting=KINDS,
    ),
    "sp-speed": Table(
        lambda records: beside_one_device(recipes(records, *KINDS), records, STRONG),
        (*WHAT, *TIMES, "speedup as Against one device", "ceiling", "loss", *WHERE, *MEMORY),
    ),
    "sp-long-rows": Table(
        _long_rows,
        (
            Column("Tokens of a row", "config.max_length", "{:,}"),
            Column("Activations of one device", "whole_mib", "{:,.0f} MiB"),
            Column("of each rank", "own_mib", "{:,.0f} MiB"),
            Column("Share", lambda row: row["own_mib"] / row["whole_mib"], "{:.2f}"),
            _seconds("One device, a step", "one_rank_global_batch"),
            _seconds("Two ranks", "synchronised_share"),
            Column("Upper bound", "machine_ceiling.strong", "{:.2f}x"),
            Column("Reached of it", "machine_ceiling.reached", "{:.2f}"),
        ),
    ),
}
