"""The loss in chunks is the whole loss, and its gradients are the whole loss's, whatever head the model has."""

import copy
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CohereConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedModel,
    T5Config,
)

from common.data.rows import IGNORED_LABEL
from common.models import chunked_loss
from common.models.chunked_loss import BART_LIKE, compute_loss_in_chunks, takes_chunks
from common.tasks.objectives import answer_results, step_loss

SIZES = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "max_position_embeddings": 32}  # fmt: skip


def llama(tied: bool) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def with_lora(*targets: str) -> torch.nn.Module:
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=list(targets), init_lora_weights=False)
    return get_peft_model(llama(tied=False), adapters)


MODELS = {
    "tied": lambda: llama(tied=True),
    "untied": lambda: llama(tied=False),
    "head with a bias": lambda: AutoModelForCausalLM.from_config(PhiConfig(**SIZES)),
    "projected": lambda: AutoModelForCausalLM.from_config(OPTConfig(vocab_size=101, hidden_size=32, ffn_dim=48,
        num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16, max_position_embeddings=32)),
    "LoRA": lambda: with_lora("q_proj", "v_proj"),
    "LoRA on the head": lambda: with_lora("q_proj", "lm_head"),
}  # fmt: skip


def summarizer(kind: str) -> PreTrainedModel:
    """A tiny encoder-decoder of BART's kin, with a bias of its logits that is not zero."""
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    config = AutoConfig.for_model(
        kind, vocab_size=101, d_model=32, max_position_embeddings=64, attention_window=8, pad_token_id=1, **sides
    )
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.final_logits_bias.normal_()
    return model


def batch_with_summaries() -> dict[str, torch.Tensor]:
    batch, ids = batch_with_answers(), torch.randint(2, 101, (3, 9), generator=torch.Generator().manual_seed(1))
    targets = ids.masked_fill(torch.arange(9) >= torch.tensor([[9], [4], [7]]), IGNORED_LABEL)
    return {name: batch[name] for name in ("input_ids", "attention_mask")} | {
        "decoder_input_ids": ids.roll(1, dims=1), "labels": targets, "shift_labels": targets}  # fmt: skip


def batch_with_answers() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 101, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[2, 8:] = 0
    targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED_LABEL)
    targets[0, :5] = IGNORED_LABEL
    kept = torch.arange(2, 11)
    return {"input_ids": ids, "attention_mask": mask, "shift_labels": targets[:, kept], "labels": targets[:, kept],
            "logits_to_keep": kept}  # fmt: skip


Gradients = dict[str, torch.Tensor]


def loss_and_gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, Gradients]:
    model.zero_grad()
    return with_gradients(model(**batch, num_items_in_batch=40, use_cache=False).loss, model)


def with_gradients(loss: torch.Tensor, model: torch.nn.Module) -> tuple[float, Gradients]:
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("tokens_at_once", [1, 10, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_whole_logits(
    name: str, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", tokens_at_once * 101)
    model, batch = MODELS[name]().eval(), batch_with_answers()
    chunked = copy.deepcopy(model)
    compute_loss_in_chunks(chunked)
    (wanted, gradients), (loss, found) = (loss_and_gradients(each, batch) for each in (model, chunked))
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert found.keys() == gradients.keys()
    of_all = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for each, gradient in found.items():
        # a bias of keys moves all scores alike: its gradient is rounding alone
        allowed = 1e-5 * max(gradients[each].norm(), 1e-4 * of_all)
        assert (gradient - gradients[each]).norm() <= allowed, each


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "bart" else pytest.mark.slow)
                                  for kind in BART_LIKE])  # fmt: skip
def test_summaries_have_the_loss_and_gradients_of_whole_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 5 * 101)
    model, batch = summarizer(kind).eval(), batch_with_summaries()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
    outputs = model(**inputs, use_cache=False)
    wanted, gradients = with_gradients(step_loss(outputs, batch["labels"], 40), model)
    with torch.no_grad():  # which takes other kernels, so that bits may differ
        logits = model(**inputs).logits
    compute_loss_in_chunks(model)
    found, found_gradients = loss_and_gradients(model, batch)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert found_gradients.keys() == gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for each, gradient in found_gradients.items():
        assert (gradient - gradients[each]).abs().max() <= 1e-5 * largest, each
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits)
        losses = model(**batch).token_losses
    of_rows = answer_results(outputs.logits, batch["labels"])[:, 0]
    assert torch.allclose(losses.sum(1), of_rows, rtol=1e-6)


@torch.no_grad()
def test_validation_has_each_tokens_loss_and_generation_the_models_own_logits() -> None:
    torch.manual_seed(0)
    model, batch = llama(tied=True).eval(), batch_with_answers()
    plain = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**plain).logits
    written = model.generate(**plain, max_new_tokens=4, do_sample=False, pad_token_id=0)
    compute_loss_in_chunks(model)
    losses = model(**batch).token_losses
    kept = logits[:, batch["logits_to_keep"]].flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(
        kept, batch["shift_labels"].flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    assert torch.allclose(losses.flatten(), wanted, rtol=1e-6)
    assert torch.equal(model(**plain).logits, logits)
    assert torch.equal(model.generate(**plain, max_new_tokens=4, do_sample=False, pad_token_id=0), written)


def test_a_batch_without_a_label_has_gradients_of_zero() -> None:
    model, batch = llama(tied=False), batch_with_answers()
    compute_loss_in_chunks(model)
    nothing = torch.full_like(batch["labels"], IGNORED_LABEL)
    loss, gradients = loss_and_gradients(model, {**batch, "labels": nothing, "shift_labels": nothing})
    assert loss == 0
    assert [gradient.any().item() for gradient in gradients.values()] == [False] * len(list(model.parameters()))


def test_no_more_logits_are_alive_than_those_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = Mock(wraps=chunked_loss.chunk_losses)
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 10 * 101)
    monkeypatch.setattr(chunked_loss, "chunk_losses", losses)
    model = llama(tied=True)
    compute_loss_in_chunks(model)
    loss_and_gradients(model, batch_with_answers())
    assert [len(call.args[1]) for call in losses.call_args_list] == [9, 9, 9]


def test_families_that_scale_their_logits_keep_their_own_loss() -> None:
    assert [takes_chunks(config()) for config in (LlamaConfig, CohereConfig, T5Config)] == [True, False, False]
