"""A model in stages: each rank holds some of its layers, and the others' are left out before any weight is read.

A stage is the model itself with the layers of the other stages taken out, so that names, adapters, masks and rotary
positions are those of the whole model.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, PreTrainedModel

from common.base.run_config import RunConfig
from common.models.loading import load_base_model, load_pretrained, model_class, what_to_load
from common.models.module_by_module import ending_with
from common.models.quantization import prepare_quantized, quantization_config
from common.models.trained_weights import add_lora
from common.planning.device_maps import whole_model_on

StageMap = dict[str, int]
"""Which stage, and so which device, holds which module."""


def stage_of(module: str, stage_map: StageMap) -> int:
    """Return the stage of a module: the longest entry that its name begins with decides."""
    return stage_map[max((name for name in stage_map if f"{module}.".startswith(f"{name}.") or not name), key=len)]


@dataclass(frozen=True)
class Sharing:
    """How ranks share a model in stages, and the rows that it works on.

    Attributes:
        stage: Of the model, this rank's.
        stages: Ranks that hold the model together, and so work on the same rows.
        group: This rank's, among the groups of so many; each has rows of its own.
        groups: How many there are among all ranks.
    """

    stage: int
    stages: int
    group: int
    groups: int

    @property
    def is_first(self) -> bool:
        """Whether this rank reads token ids; the others get hidden states."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the head, and so knows what the model computes."""
        return self.stage == self.stages - 1

    @property
    def first_rank(self) -> int:
        """The rank that holds the first stage."""
        return self.group * self.stages


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
    """Take out of `model` what other stages hold; of the whole model it keeps `whole_config` and `ends_are_tied`.

    The last stage of a model whose head is tied to its embeddings keeps a copy of them.
    """
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
    """Return one stage of the base model, or of the model in `source`; nothing else of it is read into memory.

    Other arguments as `load_base_model`'s. (Random weights are drawn for all modules, one after the other, so that they
    are the same at any number of stages.)
    """
    place, quantizes = whole_model_on(device), quantized and run.method.quantizes and source is None
    if run.weights == "random" and source is None:
        model = load_base_model(run, place, quantized=quantized, each=partial(_drop_unheld, stage_map, stage))
        cut(model, stage_map, stage)
        return model
    whole = model_class(run, AutoConfig.from_pretrained(**what_to_load(run, source)))

    def cut_unread(model: PreTrainedModel) -> None:
        cut(model, stage_map, stage)
        model._keys_to_ignore_on_load_unexpected = {r".*"}  # other stages' weights

    settings = {"quantization_config": quantization_config(run)} if quantizes else {}
    model = load_pretrained(ending_with(whole, cut_unread), run, place, source, **settings)
    return prepare_quantized(model) if quantizes else model


def _drop_unheld(stage_map: StageMap, stage: int, name: str, module: torch.nn.Module) -> None:
    """Forget a module's weights if another stage holds it; the last one may need a copy of the embeddings."""
    is_copied = stage == max(stage_map.values()) and name.endswith("embed_tokens")
    if stage_of(name, stage_map) != stage and not is_copied:
        for key, weight in module.named_parameters(recurse=False):
            nothing = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            module.register_parameter(key, torch.nn.Parameter(nothing, requires_grad=weight.requires_grad))


def add_lora_to_stage(model: PreTrainedModel, run: RunConfig, stage_map: StageMap, stage: int) -> PeftModel:
    """Put adapters on this stage's layers, with the starting values that they would have on one device.

    Each adapter draws random numbers when it is made; so those of other stages are made, too, beside layers on `meta`,
    and taken out again.
    """
    with torch.device("meta"):
        whole = model_class(run, model.config)(model.config)
    for name in stage_map:
        if isinstance(model.get_submodule(name), PassThrough) and not name.endswith("lm_head"):
            model.set_submodule(name, whole.get_submodule(name))
    adapted = add_lora(model, run)
    cut(model, stage_map, stage)
    return adapted
