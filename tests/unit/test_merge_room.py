"""An adapter is merged where machines have room for the merged model's stages, and left out with a word elsewhere."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.base.run_config import RunConfig
from common.data.rows import Splits
from common.data.splits import load_splits, tokens_of
from common.hardware.devices import GIB
from common.models.loading import load_base_model, load_tokenizer
from common.models.merging import MergeNeed, merge_need, next_token_logits, why_not_merged
from common.models.trained_weights import add_lora
from common.runtime.rank import end_rank
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.training.export import save
from common.training.loop import TrainingLoop
from tests.unit.toys import train

ALONE = Rank(0, 1, "cpu", "python")


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


def test_what_this_machine_has_is_looked_at(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (merge_need(run_config, replace(ALONE, rank=rank), 2, tmp_path) for rank in range(3))
    assert (first.stage_bytes, third.stage_bytes) == (first.disk_bytes // 2, 0)
    assert why_not_merged([first, second, third]) == ""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=first.stage_bytes))
    assert "of its memory are free" in why_not_merged(
        [merge_need(run_config, replace(ALONE, rank=rank), 2, tmp_path) for rank in range(3)]
    )


def test_without_room_the_base_answers_with_the_adapter(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("common.training.export.why_not_merged", lambda needs: "There is no room.")
    run = replace(
        run_config, results_root=str(tmp_path), validation_rows=4, max_steps=2, warmup_steps=0, eval_steps=0.5
    )
    tokenizer, log = load_tokenizer(run), RunRecorder(run, ALONE)
    adapted = add_lora(load_base_model(run, {"": "cpu"}), run)
    rows = tokens_of(load_splits(run).validation, tokenizer, run)
    loop = train(TrainingLoop(adapted, tokenizer, Splits(rows, rows, []), log))
    batch = loop.collated(rows[:2])
    trained = next_token_logits(adapted, batch)
    tuned, differences = save(log, loop, tokenizer)
    assert torch.equal(next_token_logits(tuned, batch), trained)
    assert (list(differences), (log.folder / "merged").exists()) == (["adapter"], False)
    assert "note: There is no room." in capsys.readouterr().out
    end_rank()
