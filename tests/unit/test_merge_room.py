"""An adapter is merged where machines have room for the merged model's stages, and left out with a word elsewhere."""

from pathlib import Path

import pytest

from common.hardware.devices import GIB
from common.training.merge_room import MergeNeed, merge_need, why_not_merged


def need(host: str = "a", stage: int = 10, free: int = 100, disk: int = 40, free_disk: int = 100) -> MergeNeed:
    return MergeNeed(host, *(number * GIB for number in (stage, free, disk, free_disk)))


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ([need()] * 4, ""),
        ([need(stage=25)] * 4, ""),  # just so
        ([need(stage=26)] * 4, "a would hold 104.0 GiB of the merged model while it is written, but 100.0 GiB"),
        ([need("b", stage=60), need("a", stage=60)], ""),  # each has a memory of its own
        ([need("a", stage=60), need("b", stage=60), need("a", stage=60)], "a would hold 120.0 GiB"),
        ([need("a", stage=60), need("b", free=5)], "b would hold 10.0 GiB of the merged model"),
        ([need(stage=0, free=0)], ""),  # another rank writes
        ([need(disk=101)] * 2, "takes 101.0 GiB, but 100.0 GiB are free on the results' disk of a"),
        ([need(), need(free_disk=39)], "takes 40.0 GiB, but 39.0 GiB are free"),
    ],
)  # fmt: skip
def test_ranks_of_a_machine_share_its_memory_and_its_disk(needs: list[MergeNeed], said: str) -> None:
    found = why_not_merged(needs)
    assert said in found
    assert bool(found) == bool(said)
    assert "merge_and_unload." in found or not said


def test_what_this_machine_has_is_looked_at(tmp_path: Path) -> None:
    assert why_not_merged([merge_need(1, 1, tmp_path)]) == ""
    assert "of its memory are free" in why_not_merged([merge_need(2**60, 1, tmp_path)])
    assert "results' disk" in why_not_merged([merge_need(1, 2**60, tmp_path)])
