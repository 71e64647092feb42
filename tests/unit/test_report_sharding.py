"""The tables of 2.6: what is held and sent is of the records, and every parallelism is projected."""

import copy

import pytest

from common.records.store import Record, kept_records
from common.reporting.full import sharding_held, sharding_memory, sharding_quality, sharding_speed, sharding_traffic

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
    assert row["Weights (MiB)"] == "1.00 of 2.00"
    assert row["Optimizer (MiB)"] == "4.00 of 8.00"
    assert row["All together"] == "0.50 of one device's"


def test_what_was_sent_stands_beside_the_formula(record: Record) -> None:
    record["sent"] = {"bytes": 3 * MIB, "by_collective": {"_allgather_base_": 5 * MIB, "allreduce_": 8}}
    record["planned"]["sent_bytes"] = 2 * MIB
    (row,) = sharding_traffic([record]).to_dict("records")
    assert row["Difference"] == "+50.0%"
    assert row["Whole tensors, by collective (MiB)"] == "allgather_base 5.00"  # a norm's eight bytes are left out


def test_speed_is_stated_at_the_same_global_batch_and_rate() -> None:
    table = sharding_speed(kept_records())
    assert table["Approach"].iloc[0] == "Full fine-tuning"
    assert set(table["Against one device"].str.fullmatch(r"\d+\.\d\dx")) == {True}
    assert len(table) >= 6


def test_quality_has_every_folder() -> None:
    devices = set(sharding_quality(kept_records())["Devices"])
    assert {"A100 80GB SXM x2", "RTX A6000 48GB x4"} <= devices


def test_every_parallelism_is_projected() -> None:
    table = sharding_memory([])
    assert len(table) == 14
    assert set(table["Figures"]) == {"projected"}
    peaks = {row["Approach"]: float(row["Peak per GPU (GiB)"].split()[0]) for row in table[:7].to_dict("records")}
    assert peaks["Full fine-tuning with FSDP"] < peaks["Full fine-tuning with ZeRO-2"]
    assert peaks["Full fine-tuning with ZeRO-2"] < peaks["Full fine-tuning with DDP"]
