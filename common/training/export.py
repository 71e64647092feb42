"""Save a trained model or adapter, load it again, and compare the logits."""

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import wait_for_everyone
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.base.run_config import RunConfig
from common.models.loading import check_equal_logits, load_base_model, next_token_logits
from common.models.quantization import drop_quantized
from common.runtime.disks import broadcast_folder
from common.runtime.recorder import RunLog
from common.training.trainer import CountingTrainer


def merge_and_reload(
    log: RunLog, trainer: CountingTrainer, tokenizer: PreTrainedTokenizerBase, device_map: dict[str, str]
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the adapter and the merged model, load both again as any user would, and compare them with what was trained.

    Rank 0 writes `adapter` and `merged` into the results folder; every rank loads the merged model. The trainer's own
    model is given up on the way, so that a device holds no more than two models at a time.

    Returns:
        The merged model as plain Transformers loads it, and the largest absolute differences of logits.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    run, adapter_folder, merged_folder = log.run, log.folder / "adapter", log.folder / "merged"
    trained = trainer.accelerator.unwrap_model(trainer.model)
    batch, expected = validation_logits(trainer, run)
    differences: dict[str, float] = {}
    if log.rank.is_main:
        trained.save_pretrained(adapter_folder)
    give_up(trainer, log.rank.device)
    if log.rank.is_main:
        reloaded = PeftModel.from_pretrained(load_base_model(run, device_map), adapter_folder)
        differences["adapter"] = check_equal_logits(expected, reloaded, batch, "adapter", run.precision)
        reloaded.merge_and_unload().save_pretrained(merged_folder)
        tokenizer.save_pretrained(merged_folder)
        del reloaded
    wait_for_everyone()
    tuned = load_base_model(run, device_map, source=merged_folder)
    differences["merged"] = check_equal_logits(expected, tuned, batch, "merged model", run.precision)
    return tuned, differences


def validation_logits(trainer: CountingTrainer, run: RunConfig) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The first batch of validation rows, and the trained model's logits of it, shape (rows, tokens, vocabulary)."""
    batch = trainer.data_collator(trainer.eval_dataset[: run.per_device_eval_batch_size])
    return batch, next_token_logits(trainer.accelerator.unwrap_model(trainer.model), batch)


def give_up(trainer: CountingTrainer, device: str) -> None:
    """Free the memory of a trainer's model, gradients and optimizer, also where a notebook still has names for them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    trainer.optimizer.state.clear()
    trainer.model_wrapped = model  # DDP's wrapper has buckets as large as all gradients
    trainer.accelerator.free_memory()
    give_up_model(model, device)


def give_up_model(model: torch.nn.Module, device: str) -> None:
    """Free a model's memory, whoever else still has its weights: an optimizer's groups have, and DDP's wrapper."""
    remove_hook_from_module(model, recurse=True)  # Accelerate's, of a model on several devices: they forbid the move
    drop_quantized(model)
    for weight in model.parameters():
        if isinstance(weight, DTensor):  # FSDP keeps a view of its shard
            storage = weight.to_local().untyped_storage()
            if storage.resizable():
                storage.resize_(0)
    held = [*model.parameters(), *model.buffers()]
    model.to("meta")  # puts other tensors in their place
    for tensor in held:
        tensor.data, tensor.grad = tensor.new_empty(0), None
    if device != "cpu":
        torch.accelerator.empty_cache()


def save_and_reload(
    log: RunLog, trainer: CountingTrainer, tokenizer: PreTrainedTokenizerBase, device_map: dict[str, str | int]
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the trained model as it is, load it again as any user would, and compare it with what was trained.

    Rank 0 writes `model` into the results folder, which each disk gets. The trainer's own model is given up on the way.

    Returns:
        The model as plain Transformers loads it, and the largest absolute difference of logits.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    run, folder = log.run, log.folder / "model"
    batch, expected = validation_logits(trainer, run)
    if log.rank.is_main:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    give_up(trainer, log.rank.device)
    wait_for_everyone()
    broadcast_folder(folder, source=0, lacks=log.writes and not log.rank.is_main, rank=log.rank)
    tuned = load_base_model(run, device_map, source=folder)
    difference = check_equal_logits(expected, tuned, batch, "model", run.precision)
    return tuned, {"model": difference}
