"""The tables of sequence parallel (2.8)."""

from bench.tables.chats import MEMORY, QUALITY, TIMES, WHAT, WHERE
from bench.tables.full import recipes
from bench.tables.table import FULL, FULL_DDP, FULL_FSDP_SP, FULL_SP, LORA_SP, QLORA_SP, Table
from common.hardware.devices import MIB
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import NOT_RUN, Row, completed

KINDS = (FULL_SP, FULL_FSDP_SP, LORA_SP, QLORA_SP)


def _long_rows(records: list[Record]) -> list[Row]:
    """Return the runs with long rows, the shortest first, with what a rank holds of whole rows (with DDP alone)."""
    runs = [run for run in completed(records, FULL_SP) if run["config"]["weights"] == "random"]
    found = []
    for run in sorted(runs, key=lambda run: run["config"]["max_length"]):
        held = sum(run["held"]["per_rank"][0].values()) / MIB  # of replicas: what each has, whatever its rows
        same = {name: run["config"][name] for name in ("run_folder", "max_length", "tiled_mlp")}
        whole = [each for each in completed(records, FULL_DDP) if same.items() <= each["config"].items()]
        mib = {"own_mib": _training_mib(run) - held}
        found.append({**run, **mib, "whole_mib": _training_mib(whole[0]) - held if whole else None})
    return found


def _in_tiles(run: Record) -> str:
    return ", MLPs in tiles" if run["config"]["tiled_mlp"] else ""


def _training_mib(record: Record) -> float:
    return 1024 * record["memory"][0]["peak_gib_by_phase"]["training"]


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
        lambda records: recipes(records, *KINDS),
        (
            *WHAT,
            *TIMES,
            Column("Upper bound", "machine_ceiling.strong", "{:.2f}x"),
            Column("Reached", "machine_ceiling.reached", "{:.2f}"),
            "loss",
            *WHERE,
            *MEMORY,
        ),
    ),
    "sp-long-rows": Table(
        _long_rows,
        (
            Column("Tokens", lambda run: f"{run['config']['max_length']:,}{_in_tiles(run)}"),
            Column("Whole row", "whole_mib", lambda mib: f"{mib:,.0f} MiB" if mib else NOT_RUN),
            Column("Half of it", "own_mib", "{:,.0f} MiB"),
            _seconds("One rank", "one_rank_global_batch"),
            _seconds("Two ranks", "synchronised_share"),
            Column("Bound", "machine_ceiling.strong", "{:.2f}x"),
            Column("Reached", "machine_ceiling.reached", "{:.2f}"),
        ),
    ),
}
