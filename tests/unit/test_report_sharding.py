"""The tables of 2.6: what is held and sent is of the records."""

import copy

import pytest

from common.records.store import Record, kept_records
from common.reporting.full import sharding_held, sharding_traffic

MIB = 2**20


@pytest.fixture
def record() -> Record:
    return copy.deepcopy(
        next(
            record
            for record in kept_records()
            if record["run_folder"].startswith("2.6") and record["parallel"] == "fsdp" and record["technique"] == "full"
        )
    )


def test_the_fullest_rank_is_shown_beside_the_whole(record: Record) -> None:
    part = {"weights_bytes": MIB, "gradients_bytes": 2 * MIB, "optimizer_bytes": 4 * MIB}
    record["held"] = {
        "per_rank": [dict.fromkeys(part, 0), part],
        "whole": {name: 2 * count for name, count in part.items()},
    }
    (row,) = sharding_held([record]).to_dict("records")
    shown = [row[name] for name in ("Weights (MiB)", "Optimizer (MiB)", "All together")]
    assert shown == ["1.00 of 2.00", "4.00 of 8.00", "0.50 of one device's"]


def test_what_was_sent_stands_beside_the_formula(record: Record) -> None:
    record["sent"] = {"bytes": 3 * MIB, "by_collective": {"_allgather_base_": 5 * MIB, "allreduce_": 8}}
    record["planned"]["sent_bytes"] = 2 * MIB
    (row,) = sharding_traffic([record]).to_dict("records")
    assert row["Difference"] == "+50.0%"
    assert row["Whole tensors, by collective (MiB)"] == "allgather_base 5.00"  # a norm's eight bytes are left out
