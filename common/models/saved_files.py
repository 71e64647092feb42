"""Write a model of which each rank holds a part, or a stage, as Transformers (or PEFT) loads it.

`save_pretrained` wants all weights on one host. Here no process holds more than a file beside its part.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate.utils import gather_object, wait_for_everyone
from huggingface_hub import split_state_dict_into_shards_factory, split_torch_state_dict_into_shards
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from common.models.shards import byte_count, full_weights, return_freed_memory
from common.models.stages import Sharing
from common.planning.host_memory import file_bytes

OF_LAYER = re.compile(r"(.*?\.\d+)\.")


def save_model(model: PreTrainedModel, folder: Path, is_main: bool) -> None:
    """Write the model as `save_pretrained` does, the configuration last; called on every rank."""
    weights = weights_to_save(model)
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("model*.safetensors*"), *folder.glob("config.json")):
            old.unlink()
    save_weights(weights, folder, is_main, of_model=model)
    if is_main:
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        model.config.save_pretrained(folder)


def weights_to_save(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights and buffers that `save_pretrained` writes, by name: a tied one once, under its main name."""
    state = model.state_dict(keep_vars=True)
    planned = {name: _described(weight) for name, weight in state.items()}
    for name in model._keys_to_ignore_on_save or ():
        planned.pop(name, None)
    return {name: state[name] for name in remove_tied_weights_from_state_dict(planned, model)}


def save_weights(
    weights: Mapping[str, torch.Tensor], folder: Path, is_main: bool, of_model: PreTrainedModel | None = None
) -> list[Path]:
    """Write weights by the names of `of_model`'s checkpoints, and return the files; called on every rank."""
    file_of: dict[str, str] = {}
    for file_name, names in _planned_files(weights, of_model).items():
        whole = full_weights(((name, weights[name]) for name in names), is_main)
        if is_main:
            stored = revert_weight_conversion(of_model, whole) if of_model else whole
            save_file({name: each.contiguous() for name, each in stored.items()}, folder / file_name, {"format": "pt"})
            file_of |= dict.fromkeys(stored, file_name)
            del whole, stored  # before the next file's
        return_freed_memory()
    files = [folder / name for name in dict.fromkeys(file_of.values())]
    if len(files) > 1:
        planned = list(map(_described, weights.values()))
        _write_index(folder, file_of, byte_count(planned), sum(each.numel() for each in planned))
    return files


def _write_index(folder: Path, file_of: Mapping[str, str], total_bytes: int, parameters: int) -> None:
    index = {"metadata": {"total_parameters": parameters, "total_size": total_bytes}, "weight_map": file_of}
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text + "\n", encoding="utf-8")


def _planned_files(
    weights: Mapping[str, torch.Tensor], of_model: PreTrainedModel | None = None
) -> dict[str, list[str]]:
    """Return which weights are in which file; a layer's stay together where checkpoints have other names for them."""
    planned = {name: _described(weight) for name, weight in weights.items()}
    most = file_bytes(byte_count(planned.values()))
    if of_model is None or revert_weight_conversion(of_model, planned).keys() == planned.keys():
        return split_torch_state_dict_into_shards(planned, max_shard_size=most).filename_to_tensors
    together: dict[str, list[str]] = {}
    for name in planned:
        layer = OF_LAYER.match(name)
        together.setdefault(layer[1] if layer else name, []).append(name)
    split = split_state_dict_into_shards_factory(
        together,
        get_storage_size=lambda names: byte_count(planned[name] for name in names),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most,
    )
    return {
        file_name: [name for layer in layers for name in together[layer]]
        for file_name, layers in split.filename_to_tensors.items()
    }


def _described(weight: torch.Tensor) -> torch.Tensor:
    # the whole weight's shape and type, without values; DeepSpeed (stage 3) has it beside
    return torch.empty(getattr(weight, "ds_shape", weight.shape), dtype=weight.dtype, device="meta")


def save_parts(model: PreTrainedModel | PeftModel, folder: Path, sharing: Sharing) -> None:
    """Save all stages as one model: call it on every rank that has one, and `wait_for_parts` on the others."""
    if sharing.stage == 0:
        folder.mkdir(parents=True, exist_ok=True)
    wait_for_everyone()
    if isinstance(model, PeftModel):
        own = get_peft_model_state_dict(model, save_embedding_layers=False)
        parts = gather_object([{name: weight.cpu() for name, weight in own.items()}])
        if sharing.stage == 0:
            model.save_pretrained(folder, save_embedding_layers=False)  # configuration, and weights of this stage only
            every = {name: weight.contiguous() for part in parts for name, weight in part.items()}
            save_file(every, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    else:
        _save_stage(model, folder, sharing)
    wait_for_everyone()


def wait_for_parts() -> None:
    """Wait on a rank that has none of the parts while others call `save_parts`."""
    wait_for_everyone()
    for _ in ("files", "weights"):
        gather_object([])
    wait_for_everyone()


def _save_stage(model: PreTrainedModel, folder: Path, sharing: Sharing) -> None:
    weights = model.state_dict()
    if model.ends_are_tied and sharing.stage > 0:
        copies = ("embed_tokens.weight", "lm_head.weight")  # the first stage saves them
        weights = {name: weight for name, weight in weights.items() if not name.endswith(copies)}
    planned = list(_planned_files(weights).values())
    counts = gather_object([len(planned)])
    file_of: dict[str, str] = {}
    for number, names in enumerate(planned, sum(counts[: sharing.stage]) + 1):
        file_name = f"model-{number:05}-of-{sum(counts):05}.safetensors"
        save_file({name: weights[name].contiguous() for name in names}, folder / file_name, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file_name)
    parts = gather_object([(file_of, byte_count(weights.values()), sum(each.numel() for each in weights.values()))])
    if sharing.stage == 0:
        model.whole_config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        file_of_all = {name: file for files, *_ in parts for name, file in files.items()}
        _write_index(folder, file_of_all, *(sum(part[place] for part in parts) for place in (1, 2)))
