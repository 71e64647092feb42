"""The tables of sharding: the fullest rank, and what was sent beside the formula."""

import copy

import pytest

from bench.tables.full import TABLES
from common.records.store import Record, kept_records
from common.reporting.rows import completed

MIB = 2**20


@pytest.fixture
def sharded() -> Record:
    return copy.deepcopy(
        next(each for each in completed(kept_records(), ("full", "fsdp")) if each["run_folder"].startswith("2.6"))
    )


def test_the_fullest_rank_is_shown_beside_the_whole(sharded: Record) -> None:
    part = {"weights_bytes": MIB, "gradients_bytes": 2 * MIB, "optimizer_bytes": 4 * MIB}
    sharded["held"] = {
        "per_rank": [dict.fromkeys(part, 0), part],
        "whole": {name: 2 * count for name, count in part.items()},
    }
    (row,) = TABLES["sharding-held"]([sharded]).to_dict("records")
    shown = [row[name] for name in ("Weights (MiB)", "Optimizer (MiB)", "All together")]
    assert shown == ["1.00 of 2.00", "4.00 of 8.00", "0.50 of one device's"]


def test_what_was_sent_stands_beside_the_formula(sharded: Record) -> None:
    sharded["sent"] = {"bytes": 3 * MIB, "by_collective": {"_allgather_base_": 5 * MIB, "allreduce_": 8}}
    sharded["planned"]["sent_bytes"] = 2 * MIB
    (row,) = TABLES["sharding-traffic"]([sharded]).to_dict("records")
    assert row["Difference"] == "+50.0%"
    assert row["Whole tensors, by collective (MiB)"] == "allgather_base 5.00"  # a norm's eight bytes are left out
