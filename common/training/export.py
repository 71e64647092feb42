"""Save a trained model or adapter, load it again as any user would, and compare the logits."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import gather_object, wait_for_everyone
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.batches import within_budget
from common.data.messages import first_tokens
from common.data.rows import Tokens
from common.models.loading import (
    check_equal_logits,
    load_base_model,
    next_token_logits,
    save_tokenizer,
    weight_dtype,
)
from common.models.quantization import dequantized
from common.models.shards import tensors_of
from common.planning.device_maps import whole_model_on
from common.planning.job import LOGITS_AT_ONCE
from common.runtime.disks import broadcast_folder
from common.runtime.recorder import PeakMemory, RunRecorder
from common.training.counted_steps import resting
from common.training.strategy import as_computed
from common.training.trainer import AuditedTrainer, free_model

DeviceMap = dict[str, str | int]


def save_and_reload(
    log: RunRecorder, trainer: AuditedTrainer, tokenizer: PreTrainedTokenizerBase, device_map: DeviceMap | None = None
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the model (with LoRA the adapter, and the merged model), load it as any user would, and compare the logits.

    The results folder gets `model`, or `adapter` and `merged`, on each disk and with the tokenizer. The trainer's own
    model is freed on the way, so that a device holds no more than two models at a time. Called on every rank.

    Returns:
        The model as plain Transformers loads it, on every rank by `device_map` (by default whole on its device), and
        the largest absolute differences of logits from the trained one's.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    run = as_computed(log.run) if trainer.strategy.reloads_as_computed else log.run
    device_map = device_map or whole_model_on(log.rank.device)
    saved = [log.folder / name for name in (("adapter", "merged") if run.method.has_adapters else ("model",))]
    first, folder = saved[0], saved[-1]
    batch, expected, compares = save_and_free(trainer, first)
    differences: dict[str, float] = {}
    if run.method.has_adapters:
        if compares:
            differences["adapter"] = reloaded_difference(run, first, device_map, batch, expected, log.memory)
        if log.rank.is_main:
            save_tokenizer(tokenizer, first)
            merged(run, first, device_map).save_pretrained(folder)
    if log.rank.is_main:
        save_tokenizer(tokenizer, folder)
    wait_for_everyone()
    for each in saved:
        broadcast_folder(each, source=0, lacks=log.writes and not log.rank.is_main)
    tuned = load_base_model(run, device_map, source=folder)
    with comparing(tuned, expected, log.memory):
        if expected is not None:
            what = "merged model" if run.method.has_adapters else "model"
            differences[folder.name] = check_equal_logits(expected, tuned, batch, what, run.precision)
    of_ranks = gather_object([differences])
    return tuned, {name: value for of_rank in reversed(of_ranks) for name, value in of_rank.items()}


def comparing(
    model: torch.nn.Module, expected: torch.Tensor | None, memory: PeakMemory
) -> AbstractContextManager[object]:
    """Count the memory of a comparison of `model`'s logits with the `expected` ones, where this rank has them."""
    return memory.counting("merging", {"weights": tensors_of(model), "logits": [] if expected is None else [expected]})


def save_and_free(trainer: AuditedTrainer, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, bool]:
    """Save the trained model or adapter in `folder`, and free the trainer's memory; called on every rank.

    Returns:
        Validation rows as a batch; the trained model's logits of it, fp32, shape (rows, tokens, vocabulary), None on
        ranks that do not know them; and whether this rank is the first that does.
    """
    batch = trainer.collated(rows_to_compare(trainer))
    with trainer.memory.counting("merging", resting(trainer)):
        expected = trainer.strategy.logits(batch)
    trainer.strategy.export(folder)
    if trainer.strategy.rank.is_main:
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's: an empty card, with the base's path on this machine
    trainer.free()
    wait_for_everyone()
    first = gather_object([expected is not None]).index(True)
    return batch, expected, trainer.strategy.rank.rank == first


def rows_to_compare(trainer: AuditedTrainer) -> list[Tokens]:
    """Return the first validation rows, as many as have no more logits than a chunk of the loss; a longer one is cut.

    Logits are compared at all positions: those of a whole batch could take more memory than training did.
    """
    goal, most = trainer.strategy.run.goal, tokens_at_once(trainer.model)
    rows = list(islice(trainer.eval_dataset, trainer.args.per_device_eval_batch_size))  # the others may be on disk
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
    device_map: DeviceMap,
    batch: dict[str, torch.Tensor],
    expected: torch.Tensor,
    memory: PeakMemory,
) -> float:
    """Load what `save_and_free` wrote as any user would, return the largest absolute difference of logits, and free it.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    if run.method.has_adapters:
        reloaded = PeftModel.from_pretrained(load_base_model(run, device_map), folder)
    else:
        reloaded = load_base_model(run, device_map, source=folder)
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
    print("WARNING: the adapter changes nothing, as in a run whose few steps have a learning rate of 0")


def merged(run: RunConfig, adapter: Path, device_map: DeviceMap) -> PreTrainedModel:
    """Return the base with an adapter merged into it; a base in 4 bits has no room for the sum, and is dequantized."""
    base = load_base_model(run, device_map)
    if run.method.quantizes:
        base = dequantized(base, weight_dtype(run))
    return PeftModel.from_pretrained(base, adapter).merge_and_unload()
