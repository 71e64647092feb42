"""Stages of a model that several ranks hold, written as one model that plain libraries load."""

from pathlib import Path

from accelerate.utils import gather_object, wait_for_everyone
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from transformers import PreTrainedModel

from common.models.saved_files import planned_files, write_index
from common.models.shards import byte_count
from common.models.stages import Sharing


def save_parts(model: PreTrainedModel | PeftModel, folder: Path, sharing: Sharing) -> None:
    """Save all stages as one model that plain Transformers (or PEFT) loads: call it on every rank that has one.

    Other ranks call `wait_for_parts`.

    Each rank writes its stage's weights as a part of a model in several files; no weight is sent. Of adapters, which
    are small, the first writes all.
    """
    if sharing.is_first:
        folder.mkdir(parents=True, exist_ok=True)
    wait_for_everyone()
    if isinstance(model, PeftModel):
        own = get_peft_model_state_dict(model, save_embedding_layers=False)
        parts = gather_object([{name: weight.cpu() for name, weight in own.items()}])
        if sharing.is_first:
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
    """Write a stage file by file, so that the host never has all of it, and on the first stage the index of all."""
    weights = model.state_dict()
    if model.ends_are_tied and not sharing.is_first:
        copies = ("embed_tokens.weight", "lm_head.weight")  # the first stage saves them
        weights = {name: weight for name, weight in weights.items() if not name.endswith(copies)}
    planned = list(planned_files(weights).values())
    counts = gather_object([len(planned)])
    file_of: dict[str, str] = {}
    for number, names in enumerate(planned, sum(counts[: sharing.stage]) + 1):
        file_name = f"model-{number:05}-of-{sum(counts):05}.safetensors"
        save_file({name: weights[name].contiguous() for name in names}, folder / file_name, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file_name)
    parts = gather_object([(file_of, byte_count(weights.values()), sum(each.numel() for each in weights.values()))])
    if sharing.is_first:
        model.whole_config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        file_of_all = {name: file for files, *_ in parts for name, file in files.items()}
        write_index(folder, file_of_all, *(sum(part[place] for part in parts) for place in (1, 2)))
