"""Rows packed without padding: each is computed as if it were alone, and they are divided within a budget of tokens."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.batches import lay_end_to_end, longest_batch, within_budget
from common.data.rows import Tokens
from common.models.families import suited_to_model
from common.models.known_padding import padding_known
from common.models.loading import any_shape_config
from common.models.separate_rows import SEPARATE_ROWS, separate_rows, separates_rows, without_mask
from common.planning.job import BatchShape
from tests.families import DECODERS, make_tiny

LENGTHS = (37, 5, 21, 2)
SIZES = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
PADDED = ("gpt_oss", "falcon", "qwen3_5_text", "olmo_hybrid", "lfm2")
"""Whose attention adds to its mask, or whose other layers hand a state on from token to token."""
SEPARATED = [name for name in DECODERS if name not in PADDED]
FILLER = 7  # a token that rows have, too
LARGER = {"initializer_range": 0.2}


def rows_of(seed: int = 0, vocabulary: int = 101) -> list[Tokens]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in ids]


@torch.no_grad()
def losses(model: PreTrainedModel, rows: list[Tokens]) -> torch.Tensor:
    """Return the loss of each token but each row's first."""
    batch = lay_end_to_end(rows)
    targets = batch.pop("labels")[0, 1:]
    logits = model(**without_mask(batch), use_cache=False).logits[0, :-1]
    return cross_entropy(logits.float(), targets, reduction="none")[targets != -100]


@torch.no_grad()
def losses_alone(model: PreTrainedModel, rows: list[Tokens]) -> torch.Tensor:
    ids = [torch.tensor([row["input_ids"]]) for row in rows]
    logits = torch.cat([model(input_ids=each, use_cache=False).logits[0, :-1].float() for each in ids])
    return cross_entropy(logits, torch.cat([each[0, 1:] for each in ids]), reduction="none")


def made(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def losses_with_another_row(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of the other rows, and of the second one, with another second row."""
    rows = rows_of()
    rows[1] = rows_of(seed=1)[1]
    return divided(losses(model, rows))


def divided(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of the other rows, and of the second: 36 of the first row are before it, 4 its own."""
    return torch.cat([losses[:36], losses[40:]]), losses[36:40]


@pytest.mark.parametrize("family", SEPARATED)
def test_a_row_is_computed_as_if_it_were_alone_and_no_other_sees_it(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    alone = losses_alone(model, rows_of())
    separate_rows(model)
    together = losses(model, rows_of())
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    (others, own), (others_after, own_after) = divided(together), losses_with_another_row(model)
    assert torch.equal(others_after, others)
    assert not torch.equal(own_after, own)


def test_without_separation_rows_see_each_other() -> None:
    """The negative control: attention that is not told of the borders."""
    model = made(LlamaConfig(**SIZES))
    together = losses(model, rows_of())
    assert (together - losses_alone(model, rows_of())).abs().max() > 1e-3
    assert not torch.equal(losses_with_another_row(model)[0], divided(together)[0])


def test_a_window_of_attention_reaches_no_further_than_it() -> None:
    model = made(MistralConfig(**SIZES, sliding_window=8))
    alone = losses_alone(model, rows_of())
    separate_rows(model)
    torch.testing.assert_close(losses(model, rows_of()), alone, rtol=1e-5, atol=1e-5)
    for each in (model.config, *(layer.self_attn for layer in model.model.layers)):
        each.sliding_window = None
    assert (losses(model, rows_of()) - alone).abs().max() > 1e-3  # the negative control


def test_padded_rows_and_generation_are_as_before_and_the_attention_s_name_is_not_saved(tmp_path: Path) -> None:
    model = made(LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=1))
    ids = torch.randint(2, 101, (2, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][0, :4] = 0
    before, answers = model(**batch).logits[:, 4:], model.generate(**batch, max_new_tokens=5, do_sample=False)
    separate_rows(model)
    assert model.config._attn_implementation == SEPARATE_ROWS
    torch.testing.assert_close(model(**batch).logits[:, 4:], before)
    assert torch.equal(model.generate(**batch, max_new_tokens=5, do_sample=False), answers)
    model.save_pretrained(tmp_path)
    assert SEPARATE_ROWS not in (tmp_path / "config.json").read_text()
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation != SEPARATE_ROWS


@pytest.mark.parametrize("family", DECODERS)
def test_auto_separates_rows_where_the_attention_can(family: str, tmp_path: Path) -> None:
    run = RunConfig(technique="full", model=make_tiny(family, tmp_path / family))
    assert separates_rows(any_shape_config(run.model)) == (family in SEPARATED)
    assert suited_to_model(run).is_padding_free == (family in SEPARATED)
    assert not suited_to_model(run.changed_to(padding_free="no")).is_padding_free


@pytest.mark.parametrize(
    ("settings", "is_free"),
    [
        ({"precision": "bf16"}, True),
        ({"precision": "bf16-mixed"}, True),
        ({"precision": "fp32"}, False),
        ({"precision": "fp32", "padding_free": "yes"}, True),
    ],
)
def test_auto_separates_rows_on_a_gpu_where_there_is_a_kernel(settings: dict[str, object], is_free: bool) -> None:
    assert suited_to_model(RunConfig(technique="full", device="cuda", **settings)).is_padding_free == is_free


@pytest.mark.parametrize("family", ["falcon", "qwen3_5_text", "lfm2"])
def test_a_model_that_cannot_is_refused_where_it_was_asked_for(family: str, tmp_path: Path) -> None:
    run = RunConfig(technique="full", model=make_tiny(family, tmp_path / family), padding_free="yes")
    with pytest.raises(BadInputError, match=rf"padding_free is .*{family}, sdpa. cannot separate rows"):
        suited_to_model(run)


def test_a_convolution_reaches_over_the_border_of_packed_rows(tmp_path: Path) -> None:
    """Why such models are padded: Transformers packs them without an error, and the losses are wrong."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny("lfm2", tmp_path / "lfm2", **LARGER)).eval()
    alone = losses_alone(model, rows_of())
    separate_rows(model)
    assert (losses(model, rows_of()) - alone).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", PADDED)
def test_padding_enters_no_row_s_losses(family: str, side: str, tmp_path: Path) -> None:
    """On the right, as in training, and on the left, with positions as `generate` counts them."""
    folder = make_tiny(family, tmp_path / family, **LARGER)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    length = max(LENGTHS)
    ids, mask = (torch.full((len(LENGTHS), length), fill) for fill in (FILLER, 0))
    for number, row in enumerate(rows_of()):
        own = slice(length - LENGTHS[number], None) if side == "left" else slice(LENGTHS[number])
        ids[number, own], mask[number, own] = torch.tensor(row["input_ids"]), 1
    batch = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad(), padding_known(batch):
        logits, blind = (model(input_ids=ids, use_cache=False, **about).logits for about in (batch, {}))
    is_learnt = mask[:, 1:].bool() & mask[:, :-1].bool()
    found, wrong = (cross_entropy(each[:, :-1][is_learnt], ids[:, 1:][is_learnt], reduction="none")
                    for each in (logits, blind))  # fmt: skip
    alone = losses_alone(model, rows_of())
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    assert side == "right" or (wrong - alone).abs().max() > 1e-3  # the negative control


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"padding_free": "yes", "attention": "eager"}, "attention is eager, which does not separate rows"),
        ({"technique": "full", "task": "classification", "padding_free": "yes"}, "which is for rows of messages"),
        (
            {"pad_to_multiple_of": 8, "padding_free": "yes"},
            r"pad_to_multiple_of is 8, but rows are packed \(padding_free is yes",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        RunConfig(**settings)


def test_groups_stay_within_the_budget_and_hold_each_row_once() -> None:
    lengths = [9, 7, 6, 4, 3, 3, 1]
    assert within_budget(lengths, 10) == [[0, 6], [1, 4], [2, 3], [5]]


def test_the_largest_batch_end_to_end_has_all_tokens_of_the_longest_rows() -> None:
    run = RunConfig(padding_free="yes")
    rows = rows_of()
    assert longest_batch(rows, 2, run) == BatchShape(2, 29, 28)
    assert longest_batch(rows, 2, run, is_training=False).padded
