"""What is trained of a model: adapters on its frozen layers, or its own weights."""

import re

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.base.errors import BadInputError, begin_of, closest
from common.base.run_config import RunConfig, is_expression, names_in
from common.models.quantization import weight_counts
from common.models.shards import global_numel, has_fused_experts


def head_modules(model: PreTrainedModel, run: RunConfig) -> list[str]:
    """Return the names of the model's modules that are trained in full, also beside adapters: the task's heads."""
    here = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return [head for head in run.goal.heads if head in here]


def language_part(model: PreTrainedModel) -> str:
    """Return how the names of a model's language layers begin: `model.text_model.`; empty where it is all of them."""
    if not hasattr(model.config, "vision_config"):
        return ""
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    return f"{name}." if "." in name else ""  # else it has no part beside, whatever its config says


def vision_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of what turns pictures into tokens, tower and connector: all beside the language layers."""
    part, head = language_part(model), model.get_output_embeddings()
    if not part:
        return []
    parent = part.removesuffix(".").rpartition(".")[0]
    return [
        f"{parent}.{name}"
        for name, module in model.get_submodule(parent).named_children()
        if module is not head and f"{parent}.{name}." != part and any(True for _ in module.parameters())
    ]


def lora_targets(model: PreTrainedModel, run: RunConfig) -> str | list[str]:
    """Return target modules as PEFT takes them: of a vision-language model those of its language layers alone.

    `all-linear`, or a name such as `q_proj`, would also match layers of the vision tower.
    """
    part, takes_all = language_part(model), run.target_modules == "all-linear"
    layers = layers_called(model, run.target_modules, with_head=not takes_all)
    _refuse_tied(model, layers)
    if is_expression(run.target_modules):
        return list(layers)
    if not part:
        return "all-linear" if takes_all else list(run.target_names)
    chosen = sorted({name.rpartition(".")[2] for name in layers}) if takes_all else run.target_names
    return rf"{re.escape(part)}.*\.({'|'.join(map(re.escape, chosen))})"


def layers_called(model: PreTrainedModel, target_modules: str, with_head: bool = False) -> dict[str, torch.nn.Module]:
    """Return the linear layers, `Conv1D` and experts too, of the language part that `target_modules` names."""
    part, head = language_part(model), model.get_output_embeddings()
    linears = {
        name: module for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Linear | Conv1D) or has_fused_experts(module))
        and name.startswith(part) and (with_head or module is not head)
    }  # fmt: skip
    if target_modules == "all-linear":
        return linears
    if is_expression(target_modules):
        return _matching(linears, target_modules)
    targets = names_in(target_modules)
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in linears):
            known = dict.fromkeys(name.rpartition(".")[2] for name in linears)
            meant = closest(target, known)
            raise BadInputError(
                f"target_modules has {begin_of(target)!r}, but no linear layer{f' of {part[:-1]}' if part else ''} is "
                f"called so: choose some of {', '.join(known)}{f' (did you mean {meant}?)' if meant else ''}."
            )
    endings = tuple(f".{target}" for target in targets)
    return {name: linear for name, linear in linears.items() if f".{name}".endswith(endings)}


def _matching(linears: dict[str, torch.nn.Module], expression: str) -> dict[str, torch.nn.Module]:
    try:
        found = {name: linear for name, linear in linears.items() if re.fullmatch(expression, name)}
    except re.error as error:
        raise BadInputError(f"target_modules is {expression!r}, no regular expression ({error}): correct it.") from None
    if not found:
        raise BadInputError(
            f"target_modules is {expression!r}, which no linear layer's whole name fits: they are such as "
            f"{next(iter(linears))}."
        )
    return found


def token_indices(model: PreTrainedModel, run: RunConfig) -> list[int] | None:
    """Return the numbers of the tokens whose embeddings are trained beside the adapters, as PEFT takes them.

    Raises:
        BadInputError: the model has no token of such a number.
    """
    vocabulary = model.config.get_text_config().vocab_size
    indices = names_in(run.trainable_token_indices) if run.trainable_token_indices else ()
    for index in indices:
        if not index.isdecimal() or int(index) >= vocabulary:
            numbers = f"tokens have numbers from 0 to {vocabulary - 1}"
            raise BadInputError(f"trainable_token_indices has {index!r}, but {numbers}: correct it.")
    return list(map(int, indices)) or None


def _refuse_tied(model: PreTrainedModel, layers: dict[str, torch.nn.Module]) -> None:
    """Refuse adapters on layers whose weights other modules have, too: merged, these would no longer be the same."""
    owners: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(weight), []).append(name.removesuffix(".weight"))
    for name, layer in layers.items():
        if others := [owner for owner in owners.get(id(getattr(layer, "weight", None)), []) if owner != name]:
            raise BadInputError(
                f"target_modules has {name}, whose weights are also those of {', '.join(others)} (tied), and an "
                f"adapter on one of them could not be merged: leave {name.rpartition('.')[2]} out."
            )


def add_lora(model: PreTrainedModel, run: RunConfig) -> PeftModel:
    """Freeze `model` and put adapters on the run's target modules; they start Gaussian, and add nothing yet.

    A vision-language model gets them in its language layers alone; its tower and connector are trained in full or not.

    Raises:
        BadInputError: the model has no linear layer or token of such a name, or one whose weights another module has.
    """
    config = LoraConfig(
        task_type=run.goal.peft_type if run.goal.heads or model.can_generate() else None,
        modules_to_save=[*head_modules(model, run), *thawed_modules(model, run)] or None,
        r=run.lora_r,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        use_rslora=run.use_rslora,
        init_lora_weights="gaussian",
        target_modules=lora_targets(model, run),
        trainable_token_indices=token_indices(model, run),
    )
    try:
        adapted = get_peft_model(model, config, revision=run.model_revision or None)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        if run.lora_dropout and "lora_dropout" in reason:  # of fused experts, which PEFT wraps as weights
            raise BadInputError(
                f"lora_dropout is {run.lora_dropout}, but {run.model} is a mixture of experts, whose adapters take no "
                "dropout: pass --lora_dropout 0, or --target_modules with layers of attention alone, such as "
                "q_proj,v_proj."
            ) from None
        raise BadInputError(f"target_modules is {run.target_modules!r}: {reason}") from None
    leave_casts_to_autocast(adapted)
    return adapted


def thawed_modules(model: PreTrainedModel, run: RunConfig) -> list[str]:
    """Return the names of tower and connector where the run trains them."""
    return [] if run.freeze_vision_tower else vision_modules(model)


def leave_casts_to_autocast(model: PeftModel) -> None:
    """Let adapters take their inputs as they are under autocast: PEFT casts each to fp32, and autocast casts it back.

    The numbers are the same, except for dropout on a CPU, which then scales by a factor in 16 bits.
    """
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module._cast_input_dtype = _cast_without_autocast


def _cast_without_autocast(inputs: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if inputs is None or torch.is_autocast_enabled(inputs.device.type):
        return inputs
    return inputs.to(dtype)


def train_linear_layers(model: PreTrainedModel, target_modules: str = "all-linear") -> list[str]:
    """Freeze `model` except for its linear layers of the given names (`layers_called`), without the head; list them.

    `all`: every weight, also of embeddings, norms and head; of a vision-language model those of its language part.

    Raises:
        BadInputError: a name matches no linear layer.
    """
    part = language_part(model)
    if target_modules == "all":
        model.requires_grad_(not part)
        if part:
            model.get_submodule(part[:-1]).requires_grad_(True)
            model.get_output_embeddings().requires_grad_(True)
        return [name for name, weight in model.named_parameters() if weight.requires_grad]
    linears = layers_called(model, target_modules)
    model.requires_grad_(False)
    for linear in linears.values():
        linear.requires_grad_(True)
    return list(linears)


def train_own_weights(model: PreTrainedModel, run: RunConfig) -> None:
    """Switch on the weights that full fine-tuning trains: `target_modules`, and in any case a classifier's head."""
    train_linear_layers(model, run.target_modules)
    heads = [*head_modules(model, run), *thawed_modules(model, run)]
    for name, weight in model.named_parameters():
        if any(f"{head}." in name for head in heads):
            weight.requires_grad_(True)


def with_trained_weights(model: PreTrainedModel, run: RunConfig) -> PreTrainedModel | PeftModel:
    """Switch on what the run trains: adapters on a frozen base, or the model's own weights."""
    if run.freeze_vision_tower:
        _leave_tower_without_gradients(model)
    if run.method.has_adapters:
        return add_lora(model, run)
    train_own_weights(model, run)
    return model


def _leave_tower_without_gradients(model: PreTrainedModel) -> None:
    # gradient checkpointing lets all input embeddings' outputs require gradients: the tower's backward pass for nothing
    for name in vision_modules(model):
        for module in model.get_submodule(name).modules():
            if isinstance(module, PreTrainedModel):
                module.get_input_embeddings = lambda: None


def idle_weights(model: PreTrainedModel) -> int:
    """Return how many of a mixture's weights do not work on a token: all experts are held, some are chosen for it."""
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    held = sum(weight_counts(module) for module in model.modules() if has_fused_experts(module))
    return held - held * config.num_experts_per_tok // experts if held else 0


def parameter_counts(model: PreTrainedModel) -> tuple[int, int]:
    """Return how many parameters are trained, and how many multiply a token: neither lookups nor a vision tower do."""
    trained = sum(global_numel(weight) for weight in model.parameters() if weight.requires_grad)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    seeing = sum(weight_counts(base.get_submodule(name)) for name in vision_modules(base))
    multiplied = weight_counts(model) - idle_weights(model) - seeing
    lookup, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    return trained, multiplied if head is not None and lookup is head.weight else multiplied - global_numel(lookup)
