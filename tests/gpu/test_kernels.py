"""Kernels that only CUDA has compute what plain PyTorch does in fp32: outputs, losses and gradients."""

from collections.abc import Callable
from copy import deepcopy
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import trl.trainer.utils
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from trl.kernels import chunked_logprob

from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL
from common.models import separate_rows
from common.models.separate_rows import attend_within_rows
from common.models.trained_weights import add_lora
from common.runtime.world import Rank
from common.tasks.preferences import answer_log_probs, pair_results, prepare_for_log_probs
from common.training.part import Part

TECHNIQUES = pytest.mark.parametrize("technique", ["full", "lora"])
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])
ROUNDING = {"fp32": 1e-4, "bf16": 0.01}
"""By how much more than plain PyTorch's of the same precision a kernel's result may be off, relative to its norm."""
Found = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A loss, and the gradients of what is trained, by name."""


@pytest.fixture
def llama(device: str, rehearses: bool) -> Callable[[str], torch.nn.Module]:
    """A Llama in fp32, with adapters that are not zero for LoRA; its vocabulary fills no block of a kernel."""
    sizes = {"vocab_size": 4099, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    small = {"vocab_size": 1103, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(**(small if rehearses else sizes), num_hidden_layers=2, num_key_value_heads=2,
                         initializer_range=0.1)  # fmt: skip

    def make(technique: str) -> torch.nn.Module:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        if technique == "lora":
            model = add_lora(model, RunConfig(technique="lora", target_modules="all-linear", lora_dropout=0.0))
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.1)
        return model.to(device).train()

    return make


def rows_of(model: torch.nn.Module, device: str) -> dict[str, torch.Tensor]:
    """Four padded rows; what is predicted of each are its last tokens."""
    lengths = (29, 17, 23, 8)
    ids = torch.randint(2, model.config.vocab_size, (len(lengths), max(lengths)), generator=torch.manual_seed(1))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    answers = mask & (torch.arange(max(lengths)) >= 5)
    tensors = {"input_ids": ids, "attention_mask": mask.long(), "completion_mask": answers.long()}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def with_gradients(model: torch.nn.Module, loss: torch.Tensor) -> Found:
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def check_near(found: Found, plain: Found, exact: Found, precision: str) -> None:
    """Compare with `exact`, in fp32: in 16 bits `plain` is off, too."""
    assert found[1].keys() == plain[1].keys() == exact[1].keys()
    pairs = {"loss": (found[0], plain[0], exact[0])}
    pairs |= {name: (found[1][name], plain[1][name], exact[1][name]) for name in exact[1]}
    for name, (of_kernel, of_plain, wanted) in pairs.items():
        assert wanted.norm() > 0, name
        off, usual = ((each.float() - wanted).norm() / wanted.norm() for each in (of_kernel, of_plain))
        assert off <= 2 * usual + ROUNDING[precision], f"{name}: {off:.2g}, of plain PyTorch {usual:.2g}"


# -- Liger


@pytest.fixture
def liger(rehearses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's kernels; in a rehearsal Transformers' own loss, as Triton's interpreter does not take them."""
    if rehearses:
        monkeypatch.setattr("common.training.part.apply_liger_kernel", lambda *_: None)
    else:
        pytest.importorskip("liger_kernel", reason="needs Liger's kernels: pip install liger-kernel")
    for name, value in list(vars(modeling_llama).items()):  # Liger replaces some for good
        monkeypatch.setattr(modeling_llama, name, value)


def trained_on(batch: dict[str, torch.Tensor], model: torch.nn.Module, device: str, **settings: Any) -> Found:
    """The loss of a step as a run on a GPU computes it."""
    run = RunConfig(device="cuda", target_modules="all-linear", **settings)
    part = Part(model, run, Rank(0, 1, device, "python"))
    ids, answers = batch["input_ids"].cpu(), batch["completion_mask"].cpu()
    labels = ids.masked_fill(answers == 0, IGNORED_LABEL)
    rows = {"input_ids": ids, "attention_mask": batch["attention_mask"].cpu(), "labels": labels}
    return with_gradients(model, part.loss(part.inputs_for_loss(rows), int(answers[:, 1:].sum())))


def two_copies(model: torch.nn.Module, precision: str) -> list[torch.nn.Module]:
    """The model in a precision, to compute by PyTorch's own operations and by kernels."""
    return [deepcopy(model).to(torch.bfloat16 if precision == "bf16" else torch.float32) for _ in range(2)]


@pytest.mark.usefixtures("liger")
@TECHNIQUES
@PRECISIONS
def test_ligers_loss_and_gradients_are_plain_ones(
    device: str, rehearses: bool, llama: Callable, technique: str, precision: str
) -> None:
    model = llama(technique)
    batch, settings = rows_of(model, device), {"technique": technique, "precision": precision}
    plain, with_kernels = two_copies(model, precision)
    exact = trained_on(batch, model, device, **settings)
    without = trained_on(batch, plain, device, **settings)
    found = trained_on(batch, with_kernels, device, use_liger_kernel=True, **settings)  # the last: see `liger`
    norms = [module for name, module in with_kernels.named_modules() if name.endswith("norm")]
    assert {"liger_kernel" in norm.forward.__func__.__module__ for norm in norms} == {not rehearses}
    check_near(found, without, exact, precision)


# -- attention of rows packed without padding


@pytest.fixture
def varlen_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """What counts the calls of `varlen_attn`; in a rehearsal attention by one mask of all tokens stands in for it."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0")
    kernel = separate_rows.varlen_attn if device == "cuda" else attention_by_mask
    calls = mock.Mock(wraps=kernel)
    monkeypatch.setattr(separate_rows, "varlen_attn", calls)
    if device == "cpu":
        monkeypatch.setattr(separate_rows, "_kernel_takes", lambda _, value: value.element_size() == 2)
    return calls


def attention_by_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: torch.Tensor, *_: Any,
    scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Reference for `varlen_attn`: tensors of shape (tokens, heads, width)."""
    place = torch.arange(len(query))
    row, behind = torch.bucketize(place, borders[1:], right=True), place[:, None] - place
    left = window_size[0] if window_size[0] >= 0 else len(query)
    mask = (row[:, None] == row) & (behind >= -window_size[1]) & (behind <= left)
    heads_first = (each.transpose(0, 1)[None] for each in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, mask, scale=scale, enable_gqa=enable_gqa or query.shape[1] != key.shape[1]
    )
    return attended[0].transpose(0, 1)


@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 1, 256)], ids=["Llama's heads", "Gemma 3's heads"])
@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        ((512, 512, 512), None),
        ((100, 800, 300), None),
        ((100, 800, 1, 300), 8),
        ((100, 800, 1, 300), 300),
        ((100, 800, 1, 300), 4096),
    ],
)
def test_the_kernel_attends_as_row_by_row(
    device: str, varlen_kernel: mock.Mock, lengths: tuple[int, ...], window: int | None, heads: tuple[int, int, int]
) -> None:
    """Outputs and gradients in bf16; the window of Gemma 3, Mistral and others may be smaller or larger than rows."""
    torch.manual_seed(0)
    query_heads, key_heads, width = heads
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    given = [
        torch.randn(1, count, sum(lengths), width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (query_heads, key_heads, key_heads)
    ]
    settings = {"cu_seq_lens_q": borders, "max_length_q": max(lengths), "scaling": width**-0.5}
    found, _ = attend_within_rows(None, *given, None, **settings, sliding_window=window)
    assert varlen_kernel.call_count == 1
    in_fp32 = [each.float() for each in given]
    expected, _ = attend_within_rows(None, *in_fp32, None, **settings, sliding_window=window)
    assert varlen_kernel.call_count == 1, "of fp32 there is no kernel"
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
    if window and window < max(lengths):
        whole, _ = attend_within_rows(None, *in_fp32, None, **settings)
        assert (whole - expected).norm() > 0.1 * expected.norm(), "the window makes no difference"
    ours, exact = (torch.autograd.grad(each.square().sum(), given) for each in (found, expected))
    for gradient, other in zip(ours, exact, strict=True):
        assert (gradient - other).norm() < 0.02 * other.norm()


# -- DPO


@pytest.fixture
def small_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """TRL's kernels, in tiles of which a step has several; in a rehearsal without Triton its own PyTorch code."""
    if device == "cuda":
        assert chunked_logprob._use_triton(torch.device(device))
    elif chunked_logprob._TRITON_AVAILABLE:
        for module in (chunked_logprob, trl.trainer.utils):
            monkeypatch.setattr(module, "_use_triton", lambda _: True)
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 16)
    return lambda vocabulary: monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", vocabulary // 2 + 7)


def pair_loss(log_probs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """DPO's loss of two pairs, by a reference for which the answers were as likely as this."""
    reference = [torch.full_like(each, -40.0) for each in log_probs]
    return pair_results(log_probs, reference, 0.02)[:, 0].mean()


def plain_log_probs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
    of_tokens = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return (of_tokens * batch["completion_mask"][:, 1:]).sum(1).chunk(2)


@TECHNIQUES
@PRECISIONS
def test_trls_loss_and_gradients_are_plain_ones(
    device: str, llama: Callable, small_tiles: Callable, technique: str, precision: str
) -> None:
    model = llama(technique)
    batch = rows_of(model, device)
    plain, with_kernels = two_copies(model, precision)
    exact = with_gradients(model, pair_loss(plain_log_probs(model, batch)))
    without = with_gradients(plain, pair_loss(plain_log_probs(plain, batch)))
    prepare_for_log_probs(with_kernels)
    small_tiles(model.config.vocab_size)
    found = with_gradients(with_kernels, pair_loss(answer_log_probs(with_kernels, batch)))
    check_near(found, without, exact, precision)
