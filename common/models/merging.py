"""What was saved, loaded again as any user would: equal logits; and adapters merged into their base."""

import math
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import psutil
import torch
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import PretrainedConfig, PreTrainedModel

from common.base.run_config import RunConfig
from common.data.row_checks import say_once
from common.hardware.devices import GIB, read_memory, size_text
from common.models.answering import load_answering, sharing_of
from common.models.loading import model_without_weights, weight_dtype
from common.models.quantization import dequantized, weight_counts
from common.models.saved_files import save_parts
from common.models.shards import byte_count, free_model, tensors_of
from common.planning.host_memory import PLAIN_FILE_BYTES, file_bytes
from common.planning.job import LOGITS_AT_ONCE
from common.planning.phases import has_room_for_whole
from common.runtime.recorder import PeakMemory
from common.runtime.world import Rank

# by merging, which rounds once more: largest difference of logits, over the largest logit
LOGIT_TOLERANCES = {"fp32": 1e-5, "bf16": 0.05, "bf16-mixed": 0.05, "fp16-mixed": 0.05}
EMBEDDED_WIDTH, EMBEDDED_LAYERS = 128, 4
LATER = "the adapter is saved, and can be merged where there is room, with PEFT's merge_and_unload"


@torch.no_grad()
def next_token_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a batch's logits, fp32, without dropout, shape (rows, decoder's tokens, vocabulary) or (rows, classes)."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    names = ("input_ids", "attention_mask", "decoder_input_ids", "pixel_values", "pixel_attention_mask")
    inputs = {name: batch[name].to(device) for name in names if name in batch}
    logits = model(**inputs, use_cache=False).logits.float()
    model.train(was_training)
    return logits


def logit_tolerance(precision: str, config: PretrainedConfig) -> float:
    """Return how far a reloaded model's logits may be off by rounding, relative to the largest logit.

    In fp32 it grows from the embedded base's: errors of a sum of H products as sqrt(H), and those of layers add up.
    (llama-3.2-1b's were 12 to 32 times as far apart as the embedded base's, here 16 times: LOG.md.)
    """
    if precision != "fp32":
        return LOGIT_TOLERANCES[precision]
    config = config.get_text_config()
    layers = getattr(config, "num_hidden_layers", EMBEDDED_LAYERS)
    growth = math.sqrt(config.hidden_size / EMBEDDED_WIDTH) * layers / EMBEDDED_LAYERS
    return LOGIT_TOLERANCES[precision] * max(1.0, growth)


def check_equal_logits(
    expected: torch.Tensor | None, reloaded: torch.nn.Module, batch: dict[str, torch.Tensor], what: str, precision: str
) -> float | None:
    """Return `largest_difference` of a trained model's logits and the `reloaded` one's; None where `expected` is."""
    found = next_token_logits(reloaded, batch)  # on every rank that has a part of it
    if expected is None:
        return None
    return largest_difference(expected, found, what, logit_tolerance(precision, reloaded.config))


def largest_difference(trained: torch.Tensor, reloaded: torch.Tensor, what: str, tolerance: float) -> float:
    """Return the largest absolute difference of two models' logits, at most `tolerance` times the largest logit."""
    difference = (trained - reloaded).abs().max().item()
    limit = tolerance * trained.abs().max().item()
    if not difference <= limit:
        raise RuntimeError(
            f"The logits of the reloaded {what} differ by {difference:.2e} from the trained model's, "
            f"above {limit:.0e}: what was saved is not what was trained."
        )
    return difference


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
    """Load what `save_and_free` wrote as any user would, return `check_equal_logits` of it, and free it."""
    reloaded = PeftModel.from_pretrained(load(), folder) if run.method.has_adapters else load(source=folder)
    what = "adapter" if run.method.has_adapters else "model"
    with comparing(reloaded, expected, memory):
        difference = check_equal_logits(expected, reloaded, batch, what, run.precision)
        if run.method.has_adapters:
            check_changes_logits(reloaded, batch, folder)
    free_model(reloaded)
    return difference


def check_changes_logits(adapted: PeftModel, batch: dict[str, torch.Tensor], folder: Path) -> None:
    """Check that a trained adapter, loaded from `folder`, changes what its base computes."""
    with_adapter = next_token_logits(adapted, batch)
    with adapted.disable_adapter():
        if not torch.equal(with_adapter, next_token_logits(adapted, batch)):
            return
    saved = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    if any(weight.any() for name, weight in saved.items() if "lora_B" in name):
        raise RuntimeError(
            f"The adapter in {folder.name} was trained, but changes no logit when loaded again: PEFT did not find its "
            "weights; pass other --target_modules."
        )
    say_once("WARNING: the adapter changes nothing, as in a run whose few steps have a learning rate of 0")


def save_merged(run: RunConfig, rank: Rank, adapter: Path, load: Callable[..., PreTrainedModel], folder: Path) -> bool:
    """Save the base with an adapter merged into it, on the first ranks that share one, each its own layers.

    A base in 4 bits is dequantized first: on the host, where the GPU has no room. Return whether it has.
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


@dataclass(frozen=True)
class MergeNeed:
    """What one rank would take of its machine to write its stage of the merged model, and what is free there."""

    host: str
    stage_bytes: int  # of memory; 0 of a rank that writes none
    free_bytes: int
    disk_bytes: int  # of the results' disk, whichever rank writes there
    free_disk_bytes: int


def merge_need(run: RunConfig, rank: Rank, stages: int, results: Path) -> MergeNeed:
    """Return what this rank would take, and what its machine has now; in `stages` the first ranks write one each."""
    whole_bytes = model_without_weights(run).num_parameters() * weight_dtype(run).itemsize
    own_bytes = whole_bytes // stages
    if run.method.quantizes and rank.device != "cpu":  # dequantized on the host, where the GPU has no room
        written = own_bytes
    else:  # file by file
        written = min(own_bytes, file_bytes(own_bytes) if stages > 1 else int(PLAIN_FILE_BYTES))
    free, disk = psutil.virtual_memory().available, shutil.disk_usage(results).free
    return MergeNeed(socket.gethostname(), written if rank.rank < stages else 0, free, whole_bytes, disk)


def why_not_merged(needs: Sequence[MergeNeed]) -> str:
    """Return why an adapter is not merged, of what all ranks need; empty where each machine has room."""
    for host, of_host in groupby(sorted(needs, key=lambda need: need.host), lambda need: need.host):
        here = list(of_host)
        stages, free = sum(need.stage_bytes for need in here), min(need.free_bytes for need in here)
        if stages > free:
            return (
                f"The adapter is not merged: {host} would hold {size_text(stages)} of the merged model while it is "
                f"written, but {size_text(free)} of its memory are free; {LATER}."
            )
        disk, free_disk = max(need.disk_bytes for need in here), min(need.free_disk_bytes for need in here)
        if disk > free_disk:
            return (
                f"The adapter is not merged: the merged model takes {size_text(disk)}, but {size_text(free_disk)} are "
                f"free on the results' disk of {host}; {LATER}."
            )
    return ""
