"""A model in stages: each rank has the model with the other stages' layers taken out before any weight is read."""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.models.loading import load_base_model, model_class
from common.models.trained_weights import add_lora
from common.planning.device_maps import whole_model_on

StageMap = dict[str, int]  # which stage, and so which device, holds which module


def stage_of(module: str, stage_map: StageMap) -> int:
    """Return the stage of a module: the longest entry that its name begins with decides."""
    return stage_map[max((name for name in stage_map if f"{module}.".startswith(f"{name}.") or not name), key=len)]


@dataclass(frozen=True)
class Sharing:
    """How ranks share a model in stages: this rank's `stage` of so many, held by one of several groups of ranks."""

    stage: int
    stages: int
    group: int
    groups: int

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the head, and so knows what the model computes."""
        return self.stage == self.stages - 1


class PassThrough(torch.nn.Module):
    """Stands where another stage has a module, and hands on what it gets."""

    def forward(
        self, hidden: torch.Tensor | None = None, *_: object, inputs_embeds: torch.Tensor | None = None, **__: object
    ) -> torch.Tensor | None:
        """Return the hidden state: layers get it first, embeddings by name."""
        return inputs_embeds if hidden is None else hidden

    @property
    def word_embeddings(self) -> "PassThrough":
        """Stand for those of an encoder's embeddings, which gradient checkpointing asks for."""
        return self


def cut(model: PreTrainedModel, stage_map: StageMap, stage: int) -> None:
    """Take out of `model` what other stages hold; the last one keeps a copy of embeddings that are tied to its head."""
    is_last = stage == max(stage_map.values())
    if not hasattr(model, "whole_config"):  # with adapters a model is cut twice
        model.whole_config = deepcopy(model.config)
        vars(model.whole_config).pop("quantization_config", None)  # what is saved is dequantized
        library = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
        model.whole_config.architectures = [library.__name__]  # what plain Transformers loads what is saved with
        model.ends_are_tied = bool(model.all_tied_weights_keys)  # a classifier's config may say so of another head
    keeps_embeddings = is_last and model.ends_are_tied
    for name, holder in stage_map.items():
        is_shared = name.endswith("rotary_emb") or (keeps_embeddings and name.endswith("embed_tokens"))
        if holder != stage and not is_shared:
            model.set_submodule(name, PassThrough())
    if not is_last:  # nothing is left to be tied
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}


def load_stage(
    run: RunConfig,
    stage_map: StageMap,
    stage: int,
    device: str,
    source: str | Path | None = None,
    quantized: bool = True,
) -> PreTrainedModel:
    """Return one stage of the base model, or of the model in `source`; nothing else of it is read into memory."""

    def cut_unread(model: PreTrainedModel) -> None:
        cut(model, stage_map, stage)
        model._keys_to_ignore_on_load_unexpected = {r".*"}  # other stages' weights

    def drop_unheld(name: str, module: torch.nn.Module) -> None:  # of random weights, alike at any number of stages
        is_copied = stage == max(stage_map.values()) and name.endswith("embed_tokens")  # the head's, if they are tied
        if stage_of(name, stage_map) != stage and not is_copied:
            for key, weight in module.named_parameters(recurse=False):
                nothing = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                module.register_parameter(key, torch.nn.Parameter(nothing, requires_grad=weight.requires_grad))

    model = load_base_model(run, whole_model_on(device), source, quantized, each=drop_unheld, unread=cut_unread)
    if run.weights == "random" and source is None:
        cut(model, stage_map, stage)
    return model


def add_lora_to_stage(model: PreTrainedModel, run: RunConfig, stage_map: StageMap, stage: int) -> PeftModel:
    """Put adapters on this stage's layers, with the starting values that they would have on one device."""
    # adapters draw random numbers: those of other stages are made, too, beside layers on `meta`, and taken out
    with torch.device("meta"):
        whole = model_class(run, model.config)(model.config)
    for name in stage_map:
        if isinstance(model.get_submodule(name), PassThrough) and not name.endswith("lm_head"):
            model.set_submodule(name, whole.get_submodule(name))
    adapted = add_lora(model, run)
    cut(model, stage_map, stage)
    return adapted
