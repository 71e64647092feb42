"""What was saved, loaded again as any user would: equal logits; and adapters merged into their base."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.data.row_checks import say_once
from common.hardware.devices import GIB, read_memory
from common.models.answering import load_answering, sharing_of
from common.models.freeing import free_model
from common.models.loading import check_equal_logits, next_token_logits, weight_dtype
from common.models.quantization import dequantized, weight_counts
from common.models.saved_stages import save_parts
from common.models.shards import byte_count, tensors_of
from common.planning.job import LOGITS_AT_ONCE
from common.planning.phases import has_room_for_whole
from common.runtime.recorder import PeakMemory
from common.runtime.world import Rank


def comparing(
    model: torch.nn.Module, expected: torch.Tensor | None, memory: PeakMemory
) -> AbstractContextManager[object]:
    """Count the memory of a comparison of `model`'s logits with the `expected` ones, where this rank has them."""
    return memory.counting("merging", {"weights": tensors_of(model), "logits": [] if expected is None else [expected]})


def tokens_at_once(model: torch.nn.Module) -> int:
    """Return how many tokens have whole logits that are held at once: as many as a chunk of the loss has."""
    return LOGITS_AT_ONCE // model.config.get_text_config().vocab_size


def reloaded_difference(
    run: RunConfig,
    folder: Path,
    load: Callable[..., PreTrainedModel],
    batch: dict[str, torch.Tensor],
    expected: torch.Tensor | None,
    memory: PeakMemory,
) -> float | None:
    """Load what `save_and_free` wrote as any user would, return the largest absolute difference of logits, and free it.

    `load` loads the base, or the model in its `source`, on every rank that shares it. None where the trained model's
    logits are not known.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    reloaded = PeftModel.from_pretrained(load(), folder) if run.method.has_adapters else load(source=folder)
    what = "adapter" if run.method.has_adapters else "model"
    with comparing(reloaded, expected, memory):
        difference = check_equal_logits(expected, reloaded, batch, what, run.precision)
        if run.method.has_adapters:
            check_changes_logits(reloaded, batch, folder)
    free_model(reloaded)
    return difference


def check_changes_logits(adapted: PeftModel, batch: dict[str, torch.Tensor], folder: Path) -> None:
    """Check that an adapter, loaded from `folder`, changes what its base computes; one that was not trained may not.

    Raises:
        RuntimeError: its weights were trained, and change no logit: PEFT has not put them where they belong.
    """
    with_adapter = next_token_logits(adapted, batch)
    with adapted.disable_adapter():
        if not torch.equal(with_adapter, next_token_logits(adapted, batch)):
            return
    saved = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    if any(weight.any() for name, weight in saved.items() if "lora_B" in name):
        raise RuntimeError(
            f"The adapter in {folder.name} was trained, but changes no logit of its base after it was loaded again: "
            "PEFT did not find its weights; pass other --target_modules."
        )
    say_once("WARNING: the adapter changes nothing, as in a run whose few steps have a learning rate of 0")


def save_merged(run: RunConfig, rank: Rank, adapter: Path, load: Callable[..., PreTrainedModel], folder: Path) -> bool:
    """Save the base with an adapter merged into it, on the first ranks that share one, each its own layers.

    A base in 4 bits has no room for the sum, and is dequantized: on the host, where the GPU has no room for that.

    Returns:
        Whether this rank's device has room for what was merged.
    """
    base, has_room = load(), True
    if run.method.quantizes:
        has_room = has_room_for_plain(run, rank, base)
        if not has_room:
            free_model(base)
            base = load_answering(run, replace(rank, device="cpu"))
        base = dequantized(base, weight_dtype(run))
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    sharing = sharing_of(merged, rank)
    if sharing.stages > 1:
        save_parts(merged, folder, sharing)
    else:
        merged.save_pretrained(folder)
    free_model(merged)
    return has_room


def has_room_for_plain(run: RunConfig, rank: Rank, quantized: PreTrainedModel) -> bool:
    """Return whether a device has room for what it holds of a base in 4 bits and, beside it, in its 16 bits."""
    if rank.device == "cpu":
        return True
    plain_gib = weight_counts(quantized) * weight_dtype(run).itemsize / GIB
    return has_room_for_whole(plain_gib, byte_count(tensors_of(quantized)) / GIB, read_memory(rank.device).total_gib)
