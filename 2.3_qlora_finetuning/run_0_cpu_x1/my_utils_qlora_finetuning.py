"""What only QLoRA needs: what weights in 4 bits take, the two ways to merge, and a picture of the 16 levels.

The quantization's own settings are in `common.models.quantization.quantization_config`: preflight needs them, too, and
`common` imports no run folder.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import torch
from accelerate.utils import wait_for_everyone
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.batches import make_collator, within_budget
from common.hardware.devices import GIB
from common.models.loading import load_base_model, waiting_on_host, weight_dtype
from common.models.merging import check_equal_logits, comparing, next_token_logits, reloaded_difference, tokens_at_once
from common.models.quantization import dequantized
from common.models.shards import byte_count, free_model
from common.planning.device_maps import whole_model_on
from common.runtime.recorder import RunRecorder
from common.tasks.objectives import answer_results
from common.training.export import save_and_free
from common.training.loop import TrainingLoop

if TYPE_CHECKING:
    from peft import PeftModel

BLOCK = 64  # weights that share a scale
ON_ORIGINAL = "merged_into_original"  # folder of the adapter merged into the original base


def stored_weights(model: torch.nn.Module, unquantized_dtype: torch.dtype) -> dict[str, Any]:
    """Return what a quantized model's weights take, adapters left out, and what they would in `unquantized_dtype`."""
    quantized = {id(weight): weight for weight in model.parameters() if hasattr(weight, "quant_type")}
    plain = ((name, weight) for name, weight in model.named_parameters() if id(weight) not in quantized)
    others = [weight for name, weight in plain if "lora_" not in name]
    weights = sum(weight.quant_state.shape.numel() for weight in quantized.values())
    size, other_size = sum(map(_quantized_bytes, quantized.values())), sum(weight.nbytes for weight in others)
    other_weights = sum(weight.numel() for weight in others)
    return {
        "stored_dtype": str(next(iter(quantized.values())).dtype).removeprefix("torch."),
        "quantized_weights": weights,
        "quantized_bytes": size,
        "bits_per_quantized_weight": 8 * size / weights,
        "other_weights": other_weights,
        "other_bytes": other_size,
        "unquantized_gib": (weights + other_weights) * unquantized_dtype.itemsize / GIB,
        "quantized_share": weights / (weights + other_weights),
        "weights_gib": (size + other_size) / GIB,
    }


def _quantized_bytes(weight: Any) -> int:
    # the 4-bit numbers, their scales (and the scales of these), and the tables of levels
    state = weight.quant_state
    of_scales = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return byte_count([weight.data, state.absmax, state.code, *of_scales])


@dataclass
class Merged:
    """The models that saving and merging gave, and how they compare with the trained one.

    Attributes:
        tuned: What was trained: merged into the de-quantized base, or without room for it the adapter on the base in
            4 bits.
        has_room: The merge into the original base is evaluated, too, and the original base judges.
        differences: Largest absolute differences of logits from the trained model's.
        validation_losses: Of each merged model: similarity scores of good answers are all near 0, losses still tell
            them apart.
        relative_error: Of the quantized weights; None on ranks that did not look.
        without_adapter: Entered, it makes `tuned` the 4-bit base again, where that is the base with the adapter.
    """

    tuned: PreTrainedModel
    has_room: bool
    differences: dict[str, float]
    validation_losses: dict[str, float]
    relative_error: float | None
    without_adapter: Callable[[], AbstractContextManager] = nullcontext


def merge_both_ways(log: RunRecorder, loop: TrainingLoop, tokenizer: PreTrainedTokenizerBase, has_room: bool) -> Merged:
    """Save the adapter, and merge it into the de-quantized base (`merged`) and the original (`merged_into_original`).

    Rank 0 writes, and merges in the host's memory, as there are two unquantized models. The adapter on a newly
    quantized base and `merged` must have the trained model's logits; `merged_into_original` has others, as the adapter
    also learnt to compensate for quantization's errors: how far they are off is recorded.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    run, folder, device = log.run, log.folder, whole_model_on(log.rank.device)
    batch, expected, _ = save_and_free(loop, folder / "adapter")
    differences, error = {}, None
    if log.rank.is_main:
        load = partial(load_base_model, run, device)
        differences["adapter"] = reloaded_difference(run, folder / "adapter", load, batch, expected, log.memory)
        error = _save_merged(run, folder, tokenizer)
    wait_for_everyone()
    if not has_room:
        adapted = with_adapter(load_base_model(run, device), folder / "adapter")
        return Merged(adapted.get_base_model().eval(), False, differences, {}, error, adapted.disable_adapter)
    tuned = load_base_model(run, device, source=folder / "merged")
    with comparing(tuned, expected, log.memory):
        differences["merged"] = check_equal_logits(expected, tuned, batch, "merged model", run.precision)
    losses = {"merged": validation_loss(tuned, loop, tokenizer)}
    with waiting_on_host(tuned):
        on_original = load_base_model(run, device, source=folder / ON_ORIGINAL)
        differences[ON_ORIGINAL] = (next_token_logits(on_original, batch) - expected).abs().max().item()
        losses[ON_ORIGINAL] = validation_loss(on_original, loop, tokenizer)
        free_model(on_original)
    return Merged(tuned, True, differences, losses, error)


def validation_loss(model: torch.nn.Module, loop: TrainingLoop, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the mean over the answer tokens of the loop's validation rows, as in training, on this device."""
    rows = list(loop.validation_rows)
    collate, sums = make_collator(tokenizer), torch.zeros(2)  # with whole rows, not what training keeps of them
    for places in within_budget([len(row["input_ids"]) for row in rows], tokens_at_once(model)):
        batch = collate([rows[place] for place in places])
        sums += answer_results(next_token_logits(model, batch).cpu()[:, :-1], batch["labels"][:, 1:]).sum(0)
    return (sums[0] / sums[1]).item()


def with_adapter(base: PreTrainedModel, adapter: Path) -> "PeftModel":
    """Put a saved adapter on a base."""
    from peft import PeftModel  # here: `common` is to come before it

    return PeftModel.from_pretrained(base, adapter)


def _save_merged(run: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> float:
    """Merge both ways, save with the tokenizer, and return the relative error of the quantized weights."""
    place = whole_model_on("cpu")
    plain = dequantized(load_base_model(run, place), weight_dtype(run))
    original = load_base_model(run, place, quantized=False)
    error = relative_error(original, plain)
    tokenizer.save_pretrained(folder / "adapter")
    for base, name in ((plain, "merged"), (original, ON_ORIGINAL)):
        with_adapter(base, folder / "adapter").merge_and_unload().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return error


def relative_error(original: torch.nn.Module, quantized: torch.nn.Module) -> float:
    """Return the 2-norm of what de-quantized layers' weights have changed by, over that of the original weights."""
    changed = wanted = 0.0
    others = dict(quantized.named_parameters())
    for name, weight in original.named_parameters():
        if weight.ndim > 1 and not torch.equal(weight, others[name]):
            changed += (weight.float() - others[name].float()).square().sum().item()
            wanted += weight.float().square().sum().item()
    return (changed / wanted) ** 0.5 if wanted else 0.0


def block_levels(weight: torch.Tensor) -> torch.Tensor:
    """Return de-quantized weights over their block's largest absolute one, in NF4 16 levels; shape (blocks, 64)."""
    blocks = weight.detach().float().cpu().reshape(-1, BLOCK)
    return blocks / blocks.abs().amax(1, keepdim=True)


def plot_levels(original: torch.Tensor, dequantized: torch.Tensor) -> Figure:
    """Plot a weight matrix before and after quantization, each weight over its block's largest absolute one."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    levels, counts = block_levels(dequantized).mul(1e4).round().div(1e4).unique(return_counts=True)
    before = block_levels(original).flatten()
    axes.hist(before.tolist(), bins=200, weights=[1 / len(before)] * len(before), color="#9ecae1", label="original")
    other = axes.twinx()
    other.vlines(levels.tolist(), 0, (counts / counts.sum()).tolist(), color="#e6550d", label=f"{len(levels)} levels")
    axes.set(xlabel="weight over its block's largest absolute weight", ylabel="share per bin, original")
    other.set(ylabel="share per level, NF4", ylim=(0, None))
    figure.legend(loc="outside upper right", ncols=2)
    return figure
