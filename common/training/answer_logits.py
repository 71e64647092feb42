"""Batches as a model takes them: on its device, with logits computed only where there is a label."""

from inspect import signature
from typing import Any

import torch
from peft import PeftModel
from torch.nn.functional import pad
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL
from common.models.chunked_loss import takes_chunks
from common.tasks.objectives import objective_of

Batch = dict[str, Any]  # tensors; of rows packed without padding the longest row's tokens, too
Model = PreTrainedModel | PeftModel


def on_device(batch: Batch, device: str | torch.device) -> Batch:
    """Return the model's inputs on `device`, without a wait for a GPU: copied from pinned memory."""
    inputs = {name: value for name, value in batch.items() if name != "row"}
    if torch.device(device).type == "cpu":
        return inputs
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            pinned = value.pin_memory() if value.device.type == "cpu" else value
            inputs[name] = pinned.to(device, non_blocking=True)
    return inputs


def takes_logits_to_keep(model: torch.nn.Module) -> bool:
    """Return whether the model can be told where to compute logits."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return "logits_to_keep" in signature(base.forward).parameters


def loss_is_chunked(run: RunConfig, model: torch.nn.Module) -> bool:
    """Return whether the loss comes without whole logits."""
    is_told = takes_logits_to_keep(model) or model.config.is_encoder_decoder
    return objective_of(run).needs_losses_alone and is_told and takes_chunks(model.config)


def tell_of_answers(batch: Batch, model: Model) -> Batch:
    """Return a collated batch with the positions where logits are needed, or an encoder-decoder's `shift_labels`."""
    if takes_logits_to_keep(model):
        return keep_answer_logits(batch)
    if model.config.is_encoder_decoder and takes_chunks(model.config):
        return {**batch, "shift_labels": batch["labels"]}  # a decoder beside an encoder has its inputs shifted
    return batch


def keep_answer_logits(inputs: Batch) -> Batch:
    """Return the batch, told to compute logits only where some row has an answer token to be predicted.

    Other positions have no label. `inputs` holds tensors of shape (rows, tokens); position t predicts token t + 1.
    """
    return predict(inputs, inputs["labels"][:, 1:])


def own_tokens(inputs: Batch, part: int, parts: int) -> Batch:
    """Return one of equal parts of the tokens of a batch that is packed without padding, told where to compute logits.

    Labels are shifted before they are divided: the last token of a part predicts the first of the next one. Borders of
    rows stay those of all tokens, which are filled up to a multiple of `parts` by a row without labels.
    """
    tokens, filler = inputs["input_ids"].shape[1], -inputs["input_ids"].shape[1] % parts
    size, borders = (tokens + filler) // parts, inputs["cu_seq_lens_q"]
    if filler:
        borders = torch.cat([borders, borders.new_tensor([tokens + filler])])
    longest = max(inputs["max_length_q"], filler)

    def own(values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        filled = pad(values, (0, tokens + filler - values.shape[1]), value=fill)
        return filled[:, part * size : (part + 1) * size].contiguous()

    whole = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}
    divided = {name: own(inputs[name]) for name in ("input_ids", "position_ids")}
    return predict({**inputs, **whole, **divided}, own(inputs["labels"][:, 1:], IGNORED_LABEL))


def predict(inputs: Batch, targets: torch.Tensor) -> Batch:
    """Return inputs that are told what to predict, and to compute logits only where some row has a target."""
    positions = (targets != IGNORED_LABEL).any(0).nonzero().squeeze(1)
    if not len(positions):  # kernels such as Liger's do not take none
        positions = torch.zeros(1, dtype=torch.long)
    targets = targets[:, positions]
    return {**inputs, "labels": targets, "shift_labels": targets, "logits_to_keep": positions}
