"""Save a trained model or adapter, load it again as any user would, and compare the logits."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import gather_object, wait_for_everyone
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.answer_ends import save_stops
from common.data.batches import within_budget
from common.data.messages import first_tokens
from common.data.row_checks import say_once
from common.data.rows import Tokens
from common.hardware.devices import GIB, read_memory
from common.models.answering import answering_run, answering_stages, load_answering, sharing_of
from common.models.freeing import free_model
from common.models.loading import (
    check_equal_logits,
    next_token_logits,
    save_tokenizer,
    weight_dtype,
)
from common.models.merge_room import merge_need, why_not_merged
from common.models.quantization import dequantized, weight_counts
from common.models.shards import byte_count, tensors_of
from common.planning.job import LOGITS_AT_ONCE
from common.planning.phases import has_room_for_whole
from common.runtime.disks import broadcast_folder
from common.runtime.recorder import PeakMemory, RunRecorder
from common.runtime.world import Rank
from common.training.counted_steps import resting
from common.training.loop import TrainingLoop
from common.training.pipeline_parallel import save_parts, wait_for_parts

DeviceMap = dict[str, str | int]


def save_and_reload(
    log: RunRecorder, loop: TrainingLoop, tokenizer: PreTrainedTokenizerBase, device_map: DeviceMap | None = None
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the model (with LoRA the adapter, and the merged model), load it as any user would, and compare the logits.

    The results folder gets `model`, or `adapter` and where there is room `merged`, on each disk and with the tokenizer.
    The trained model is freed on the way, so that a device holds no more than two models at a time. Called on
    every rank.

    Returns:
        What was saved, loaded to answer by `device_map` or as `load_answering` does, and the largest absolute
        differences of logits from the trained one's. Without a merged model it is the base with the adapter's layers.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    run, load = answering_run(log.run), partial(load_answering, log.run, log.rank, device_map=device_map)
    saved = [log.folder / ("adapter" if run.method.has_adapters else "model")]
    batch, expected, compares = save_and_free(loop, saved[0])
    differences: dict[str, float | None] = {}
    merged_answers = not run.method.has_adapters
    if run.method.has_adapters:
        in_stages = not device_map and answering_stages(run) > 1
        if compares or in_stages:
            differences["adapter"] = reloaded_difference(run, saved[0], load, batch, expected, log.memory)
        stages = answering_stages(run) if in_stages else 1
        why_not = why_not_merged(gather_object([merge_need(run, log.rank, stages, log.folder)]))
        if not why_not:
            saved.append(log.folder / "merged")
            answers = save_merged(run, log.rank, saved[0], load, saved[1]) if log.rank.rank < stages else True
            if log.rank.rank >= stages > 1:  # of another group
                wait_for_parts()
            merged_answers = all(gather_object([answers]))
        elif log.rank.is_main:
            print(f"note: {why_not}")
    if log.rank.is_main:
        for each in saved:
            save_tokenizer(tokenizer, each)
            if run.goal.converses:
                save_stops(each, tokenizer, getattr(loop.model, "generation_config", None))
    wait_for_everyone()
    for each in saved:
        broadcast_folder(each, source=0, lacks=log.writes and not log.rank.is_main)
    if not merged_answers:
        tuned = PeftModel.from_pretrained(load(), saved[0]).get_base_model().eval()
    else:
        tuned = load(source=saved[-1])
        with comparing(tuned, expected, log.memory):
            what = "merged model" if run.method.has_adapters else "model"
            differences[saved[-1].name] = check_equal_logits(expected, tuned, batch, what, run.precision)
    of_ranks = gather_object([{name: value for name, value in differences.items() if value is not None}])
    return tuned, {name: value for of_rank in reversed(of_ranks) for name, value in of_rank.items()}


def comparing(
    model: torch.nn.Module, expected: torch.Tensor | None, memory: PeakMemory
) -> AbstractContextManager[object]:
    """Count the memory of a comparison of `model`'s logits with the `expected` ones, where this rank has them."""
    return memory.counting("merging", {"weights": tensors_of(model), "logits": [] if expected is None else [expected]})


def save_and_free(loop: TrainingLoop, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, bool]:
    """Save the trained model or adapter in `folder`, and free the loop's memory; called on every rank.

    Returns:
        Validation rows as a batch; the trained model's logits of it, fp32, shape (rows, tokens, vocabulary), None on
        ranks that do not know them; and whether this rank is the first that does.
    """
    batch = loop.collated(rows_to_compare(loop))
    with loop.log.memory.counting("merging", resting(loop)):
        expected = loop.part.logits(batch)
    loop.part.export(folder)
    if loop.rank.is_main:
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's: an empty card, with the base's path on this machine
    loop.free()
    wait_for_everyone()
    first = gather_object([expected is not None]).index(True)
    return batch, expected, loop.rank.rank == first


def rows_to_compare(loop: TrainingLoop) -> list[Tokens]:
    """Return the first validation rows, as many as have no more logits than a chunk of the loss; a longer one is cut.

    Logits are compared at all positions: those of a whole batch could take more memory than training did.
    """
    goal, most = loop.run.goal, tokens_at_once(loop.model)
    rows = list(islice(loop.validation_rows, loop.args.per_device_eval_batch_size))  # the others may be on disk
    if goal.chats:  # what precedes a token decides on its logits; a picture stays whole
        rows = [first_tokens(row, most) for row in rows]
    tokens = [len(row["labels"] if goal.summarizes else row["input_ids"]) for row in rows]
    return [rows[place] for place in within_budget(tokens, most)[0]]


def tokens_at_once(model: torch.nn.Module) -> int:
    """Return how many tokens have whole logits that are held at once: as many as a chunk of the loss has."""
    return LOGITS_AT_ONCE // model.config.get_text_config().vocab_size


def whole_logits_at_once(tokens: Sequence[int], model: torch.nn.Module) -> list[list[int]]:
    """Return the places of rows with so many `tokens` in groups whose logits at all positions are held at once."""
    return within_budget(tokens, tokens_at_once(model))


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
