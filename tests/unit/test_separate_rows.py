"""Rows that lie end to end: each is computed as if it were alone, and they are divided within a budget of tokens."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.batches import EpochBatches, lay_end_to_end, longest_batch, within_budget
from common.data.messages import tokenize_messages
from common.data.rows import NO_ROW, Tokens
from common.models.families import suited_to_model
from common.models.loading import any_shape_config, load_tokenizer
from common.models.separate_rows import SEPARATE_ROWS, separate_rows, separates_rows, without_mask
from common.planning.job import BatchShape
from tests.families import DECODERS, make_tiny

LENGTHS = (37, 5, 21, 2)
TAKEN = slice(37, 42)
"""Places of the second row's tokens."""
SIZES = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
SEPARATED = [name for name in DECODERS if name not in ("gpt_oss", "falcon")]


def rows_of(seed: int = 0, vocabulary: int = 101) -> list[Tokens]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in ids]


@torch.no_grad()
def losses(model: PreTrainedModel, rows: list[Tokens], has_mask: bool = False) -> torch.Tensor:
    """Return the loss of each token but each row's first."""
    batch = lay_end_to_end(rows)
    targets = batch.pop("labels")[0, 1:]
    given = batch if has_mask else without_mask(batch)
    logits = model(**given, use_cache=False).logits[0, :-1]
    return cross_entropy(logits.float(), targets, reduction="none")[targets != -100]


@torch.no_grad()
def losses_alone(model: PreTrainedModel, rows: list[Tokens]) -> torch.Tensor:
    found = []
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        found.append(cross_entropy(logits.float(), ids[0, 1:], reduction="none"))
    return torch.cat(found)


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreTrainedModel]:
    def make(family: str) -> PreTrainedModel:
        folder = make_tiny(family, tmp_path_factory.mktemp(family))
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()

    return make


def others(losses: torch.Tensor) -> torch.Tensor:
    """All but those of the second row: 36 of the first row are before it, 4 its own."""
    return torch.cat([losses[:36], losses[40:]])


@pytest.mark.parametrize("family", SEPARATED)
def test_a_row_is_computed_as_if_it_were_alone_and_no_other_sees_it(
    family: str, tiny: Callable[[str], PreTrainedModel]
) -> None:
    model, rows = tiny(family), rows_of()
    alone = losses_alone(model, rows)
    separate_rows(model)
    together = losses(model, rows)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    changed = [*rows]
    changed[1] = rows_of(seed=1)[1]
    after = losses(model, changed)
    assert torch.equal(others(after), others(together))
    assert not torch.equal(after[36:40], together[36:40])


def test_without_separation_rows_see_each_other() -> None:
    """The negative control: attention that is not told of the borders."""
    torch.manual_seed(0)
    model, rows = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval(), rows_of()
    together = losses(model, rows)
    assert (together - losses_alone(model, rows)).abs().max() > 1e-3
    changed = [*rows]
    changed[1] = rows_of(seed=1)[1]
    assert not torch.equal(others(losses(model, changed)), others(together))


def test_a_window_of_attention_reaches_no_further_than_it() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MistralConfig(**SIZES, sliding_window=8)).eval()
    alone = losses_alone(model, rows_of())
    separate_rows(model)
    torch.testing.assert_close(losses(model, rows_of()), alone, rtol=1e-5, atol=1e-5)
    model.config.sliding_window = None
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert (losses(model, rows_of()) - alone).abs().max() > 1e-3  # the negative control


def test_padded_rows_and_generation_are_as_before() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=1)).eval()
    ids = torch.randint(2, 101, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    before = model(input_ids=ids, attention_mask=mask).logits[:, 4:]
    answers = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    separate_rows(model)
    assert model.config._attn_implementation == SEPARATE_ROWS
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits[:, 4:], before)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False), answers)


def test_the_name_of_the_attention_is_not_saved(tmp_path: pytest.TempPathFactory) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    separate_rows(model)
    model.save_pretrained(tmp_path)
    assert SEPARATE_ROWS not in (tmp_path / "config.json").read_text()
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation != SEPARATE_ROWS


@pytest.mark.parametrize("family", DECODERS)
def test_auto_separates_rows_where_the_attention_can(family: str, tmp_path: pytest.TempPathFactory) -> None:
    run = RunConfig(technique="full", model=make_tiny(family, tmp_path / family))
    config = any_shape_config(run.model)
    assert separates_rows(config) == (family in SEPARATED)
    assert suited_to_model(run).is_padding_free == (family in SEPARATED)
    assert not suited_to_model(run.changed_to(padding_free="no")).is_padding_free


@pytest.mark.parametrize(("precision", "is_free"), [("bf16", True), ("bf16-mixed", True), ("fp32", False)])
def test_auto_separates_rows_on_a_gpu_where_there_is_a_kernel(precision: str, is_free: bool) -> None:
    run = RunConfig(technique="full", device="cuda", precision=precision)
    assert suited_to_model(run).is_padding_free == is_free
    assert suited_to_model(run.changed_to(max_batch_tokens=512)).is_padding_free  # a budget needs it
    assert suited_to_model(run.changed_to(padding_free="yes")).is_padding_free


@pytest.mark.parametrize("settings", [{"padding_free": "yes"}, {"max_batch_tokens": 512}])
def test_a_model_that_cannot_is_refused_where_it_was_asked_for(
    settings: dict[str, object], tmp_path: pytest.TempPathFactory
) -> None:
    run = RunConfig(technique="full", model=make_tiny("falcon", tmp_path / "falcon"), **settings)
    with pytest.raises(BadInputError, match=rf"{next(iter(settings))} is .*falcon, sdpa. cannot separate rows"):
        suited_to_model(run)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"padding_free": "yes", "attention": "eager"}, "attention is eager, which does not separate rows"),
        ({"padding_free": "no", "max_batch_tokens": 64}, "max_batch_tokens is 64, but padding_free is no"),
        ({"technique": "full", "task": "classification", "padding_free": "yes"}, "which is for rows of messages"),
        ({"pad_to_multiple_of": 8, "max_batch_tokens": 64}, "max_batch_tokens is 64, but pad_to_multiple_of is 8"),
        ({"max_batch_tokens": -1}, "max_batch_tokens is -1, but must be at least 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        RunConfig(**settings)


def test_a_row_longer_than_the_budget_is_refused_by_its_place() -> None:
    run = RunConfig(padding_free="yes", max_batch_tokens=16)
    turns = [{"role": "user", "content": "Where is it? " * 9}, {"role": "assistant", "content": "Here."}]
    row = {"messages": turns, "where": "rows.csv, row 7"}
    with pytest.raises(BadInputError, match=r"rows\.csv, row 7 has \d+ tokens, but max_batch_tokens is 16"):
        tokenize_messages([row], load_tokenizer(run), run)


def test_groups_stay_within_the_budget_and_hold_each_row_once() -> None:
    lengths = [9, 7, 6, 4, 3, 3, 1]
    groups = within_budget(lengths, 10)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in group) <= 10 for group in groups)
    assert len(groups) == 4
    assert within_budget(lengths, 0) == [list(range(len(lengths)))]


def test_all_ranks_have_as_many_batches_within_the_budget() -> None:
    lengths = [40, 30, 3, 3, 3, 3, 3, 3]
    ranks = [EpochBatches(lengths, 4, 2, rank, seed=0, sorted_steps=1, max_tokens=40) for rank in range(2)]
    own = [batches.own_within_budget(list(range(8))) for batches in ranks]
    assert own == [[[0], [3, 4, 7]], [[1, 2, 5, 6], [NO_ROW]]]
    assert sorted(row for batches in own for batch in batches for row in batch if row != NO_ROW) == list(range(8))


def test_the_largest_batch_end_to_end_has_all_tokens_of_the_longest_rows() -> None:
    run = RunConfig(padding_free="yes")
    rows = rows_of()
    assert longest_batch(rows, 2, run) == BatchShape(2, 29, 28)
    assert longest_batch(rows, 4, run.changed_to(max_batch_tokens=40)) == BatchShape(2, 20, 20)
    assert longest_batch(rows, 4, run.changed_to(max_batch_tokens=60)) == BatchShape(3, 20, 20)
    assert longest_batch(rows, 2, run, is_training=False).padded
