"""Rows whose tokens several ranks share: the numbers of one rank with whole rows, what is sent, and what is refused."""

from pathlib import Path

import pytest
import torch

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.batches import lay_end_to_end
from common.data.rows import IGNORED_LABEL
from common.models.families import suited_to_model
from common.models.separate_rows import KINDS, without_mask
from common.planning.architectures import check_shares_heads
from common.training.answer_logits import own_tokens
from tests.unit.ranks import found_by_ranks
from tests.unit.sequence_worker import IN_FP32, LENGTHS, RANKS, rows

CASES = [f"{family}, {size}" for family in sorted(KINDS) for size in (2, RANKS)]
HEADS, KEY_HEADS, WIDTH, LAYERS = 4, 2, 16, 2
"""Of the tiny models."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    return found_by_ranks("sequence_worker.py", RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_rows_find_one_ranks_loss_and_gradients(case: str, found: dict[str, list]) -> None:
    """With windows that reach over a seam, and with fewer key heads than ranks, which are repeated."""
    tolerance = 1e-6 if case.partition(",")[0] in IN_FP32 else 1e-12
    for of_rank in found[case]:
        assert of_rank["loss"] < tolerance
        assert of_rank["gradients"] < tolerance


@pytest.mark.parametrize("size", [2, RANKS])
def test_a_rank_sends_what_the_formula_says(size: int, found: dict[str, list]) -> None:
    """Of each layer's queries, keys, values and results those of its tokens, but for its own heads; and back."""
    tokens = -(-sum(LENGTHS) // size)
    heads = 2 * HEADS + 2 * max(KEY_HEADS, size)
    expected = 2 * LAYERS * (size - 1) / size * tokens * heads * WIDTH * 8  # fp64
    assert [of_rank["sent_bytes"] for of_rank in found[f"llama, {size}"]] == pytest.approx([expected] * RANKS)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 37, 50])
def test_parts_of_a_batch_have_all_its_tokens_and_predictions_once(parts: int) -> None:
    whole = lay_end_to_end(rows())
    own = [own_tokens(without_mask(whole), part, parts) for part in range(parts)]
    tokens = sum(LENGTHS)
    joined = torch.cat([each["input_ids"] for each in own], dim=1)
    assert torch.equal(joined[:, :tokens], whole["input_ids"])
    assert len({each["input_ids"].shape[1] for each in own}) == 1
    positions = torch.cat([each["position_ids"] for each in own], dim=1)
    assert torch.equal(positions[:, :tokens], whole["position_ids"])
    predicted = []
    for part, each in enumerate(own):
        size = each["input_ids"].shape[1]
        for position, target in zip(each["logits_to_keep"].tolist(), each["labels"][0].tolist(), strict=True):
            if target != IGNORED_LABEL:
                predicted.append((part * size + position + 1, target))
    labels = whole["labels"][0].tolist()
    assert predicted == [(place, label) for place, label in enumerate(labels) if place and label != IGNORED_LABEL]
    for each in own:
        borders = each["cu_seq_lens_q"]
        assert borders[: len(LENGTHS) + 1].equal(whole["cu_seq_lens_q"])
        assert borders[-1] == joined.shape[1]
        assert each["max_length_q"] >= borders.diff().max()


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "said"),
    [
        (9, 3, 2, "3, 9"),
        (4, 4, 3, "2, 4"),
        (12, 4, 3, "2, 4, 12"),
        (7, 7, 2, "7"),
        (1, 1, 2, "without"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_what_would_do(
    heads: int, key_heads: int, ranks: int, said: str
) -> None:
    with pytest.raises(BadInputError, match=said):
        check_shares_heads(ranks, heads, key_heads)


SP = {"technique": "full", "target_modules": "all", "parallel": "ddp", "devices": 2, "sp_size": 2}


def test_a_run_is_refused_whose_models_heads_do_not_divide() -> None:
    with pytest.raises(BadInputError, match="sp_size is 7"):
        suited_to_model(RunConfig(**SP | {"devices": 7, "sp_size": 7}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sp_size": 3, "devices": 4}, "--sp 2"),
        ({"parallel": "single", "devices": 1}, "leave --sp_size out"),
        ({"parallel": "zero3"}, "leave --sp_size out"),
        ({"padding_free": "no"}, "leave it out"),
        ({"attention": "eager"}, "--attention sdpa"),
        ({"attention": "flash", "device": "cuda", "precision": "bf16"}, "--attention sdpa"),
        ({"pad_to_multiple_of": 64}, "leave one"),
        ({"torch_compile": True}, "--torch_compile false"),
        ({"task": "preferences"}, "leave --sp_size out"),
    ],
)
def test_settings_that_exclude_it_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        RunConfig(**{**SP, **settings})


def test_groups_of_ranks_share_a_step() -> None:
    run = RunConfig(**{**SP, "devices": 8, "per_device_train_batch_size": 4, "learning_rate_scaling": "linear"})
    assert (run.data_parallel_ranks, run.effective_batch_size, run.world_size) == (4, 16, 8)
    assert run.peak_learning_rate == 4 * run.learning_rate
    assert run.sharing == "ddp-sp2"


@pytest.mark.parametrize("family", ["falcon", "qwen3_5_text", "olmo_hybrid", "lfm2"])
def test_a_family_whose_rows_cannot_be_separated_is_refused(family: str, tmp_path: Path) -> None:
    """Falcon's attention adds more to its mask than rows' borders tell; others' layers hand a state on, row to row."""
    from tests.families import make_tiny

    folder = make_tiny(family, tmp_path / family)
    with pytest.raises(BadInputError, match="leave --sp_size out"):
        suited_to_model(RunConfig(**SP, model=folder))
