"""What a model's family asks for, before its weights load: other defaults, and refusals of what cannot work."""

import math
from collections import Counter
from dataclasses import replace

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import GradientCheckpointingLayer, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY, is_embedded
from common.base.run_config import RunConfig, is_expression
from common.base.run_folders import lora_of
from common.base.settings import BY_MODEL
from common.data.row_checks import say_once
from common.models.loading import checked_config, model_class, model_without_weights
from common.models.real_models import SMOLLM2
from common.models.separate_rows import separates_rows
from common.models.shards import EXPERTS_NDIM, has_fused_experts
from common.models.trained_weights import add_lora, idle_weights, language_part, layers_called, with_trained_weights
from common.planning.architectures import check_shares_heads
from common.planning.job import is_planned, why_not_in_4_bits

LEAST_QUANTIZED_SHARE = 0.9
LEAST_REACHED_SHARE = 0.5  # of the layers, by adapters
Changes = tuple[dict[str, object], str]  # settings, and why they are others


def suited_to_model(run: RunConfig) -> RunConfig:
    """Return the run with defaults changed that cannot work with its model, said once; what was asked for stays."""
    config = checked_config(run)
    check_heads(run)
    if run.sp_size > 1:
        of_text = config.get_text_config()
        heads = of_text.num_attention_heads
        check_shares_heads(run.sp_size, heads, getattr(of_text, "num_key_value_heads", None) or heads)
    for suited in (_attention, _padding, _recomputation, _targets, _dropout, _device_map, _rate):
        changes, why = suited(run, config)
        run = replace(run, **changes)
        if why:
            say_once(f"{run.model}: {why}")
    return run


def warn_of_strange_rows(run: RunConfig) -> None:
    """Say that the embedded base cannot do much with other rows than its own."""
    if run.goal.chats and run.weights == "pretrained" and is_embedded(run.model) and not is_embedded(run.data):
        said = f"{run.model} knows sentences about a museum and nothing else: for other rows pass --model {SMOLLM2}"
        say_once(f"{said} (`make real` fetches it once), or a model of your own")


def _attention(run: RunConfig, config: PretrainedConfig) -> Changes:
    if run.attention != RunConfig.attention or model_class(run, config)._supports_sdpa:
        return {}, ""
    return {"attention": "eager"}, f"Transformers has no SDPA for the kind {config.model_type}: attention is eager"


def _padding(run: RunConfig, config: PretrainedConfig) -> Changes:
    if not run.goal.learns_answers or run.parallelism.pipelines or run.pad_to_multiple_of or run.padding_free == "no":
        return {}, ""
    if run.attention != "eager" and separates_rows(config):
        has_kernel = run.device == "cpu" or run.precision.startswith("bf16")
        packs = has_kernel or run.padding_free == "yes" or run.sp_size > 1
        return {"padding_free": "yes" if packs else "no"}, ""
    attention = f"its attention ({config.model_type}, {run.attention})"
    name = "sp_size" if run.sp_size > 1 else "padding_free"
    if run.sp_size > 1 or run.padding_free == "yes":
        raise BadInputError(
            f"{name} is {getattr(run, name)}, but of {run.model} {attention} cannot separate rows: leave --{name} out."
        )
    return {"padding_free": "no"}, f"rows are padded, as {attention} cannot separate them"


def _recomputation(run: RunConfig, config: PretrainedConfig) -> Changes:
    """Turn the reentrant kind of checkpointing off where layers read more than their inputs (Gemma 3n, Gemma 4).

    It computes layers without gradients first, and such keys and values would stay without: wrong, and nothing fails.
    """
    shares_keys = getattr(config.get_text_config(), "num_kv_shared_layers", 0)
    if not (shares_keys and run.gradient_checkpointing and run.use_reentrant):
        return {}, ""
    return {"use_reentrant": False}, "use_reentrant is False, as it would lose gradients of keys that layers share"


def _targets(run: RunConfig, config: PretrainedConfig) -> Changes:
    if run.method.quantizes and run.target_modules == "all-linear":
        linears = layers_called(model_without_weights(run), "all-linear")
        plain = [name for name, module in linears.items() if not has_fused_experts(module)]
        targets = ",".join(dict.fromkeys(name.rpartition(".")[2] for name in plain))
        said = f"its experts are in 4 bits, and take no adapters: these are on {targets}"
        return ({"target_modules": targets}, said) if len(plain) < len(linears) else ({}, "")
    if not run.method.has_adapters or run.target_modules == "all-linear" or is_expression(run.target_modules):
        return {}, ""
    is_asked_for, model = run.target_modules != recipe_targets(run), model_without_weights(run)
    try:
        layers_called(model, run.target_modules, with_head=True)
    except BadInputError:  # of names that no layer has
        if is_asked_for:
            return {}, ""  # `check_targets` refuses them
    else:
        return _reaching(run, model, is_asked_for)
    known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(config.model_type)
    targets = ",".join(known) if isinstance(known, list) else "all-linear"  # of some kinds it is an expression
    lacks = f"no layer of the kind {config.model_type} is called {run.target_modules}"
    return {"target_modules": targets}, f"{lacks}: adapters are on {targets} (--target_modules takes other names)"


def _reaching(run: RunConfig, model: PreTrainedModel, is_asked_for: bool) -> Changes:
    """Refuse names that leave most layers without an adapter, as in hybrids whose layers differ; else say how many.

    Of names that were not asked for, adapters are on all linear layers instead.
    """
    linears, part = layers_called(model, "all-linear"), language_part(model)
    adapted = layers_called(model, run.target_modules, with_head=True)
    names_of: dict[str, set[str]] = {}  # of each layer's linear ones
    for layer, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and layer.startswith(part):
            names_of[layer] = {name.rpartition(".")[2] for name in linears if name.startswith(f"{layer}.")}
    missed = {layer for layer in names_of if not any(name.startswith(f"{layer}.") for name in adapted)}
    if not missed:
        return {}, ""
    reached = len(names_of) - len(missed)
    in_missed, in_others = (
        set().union(*(names_of[layer] for layer in layers)) for layers in (missed, names_of.keys() - missed)
    )
    reaches = f"target_modules {run.target_modules} reaches {reached} of {len(names_of)} layers"
    others = f"those of the rest are called {', '.join(sorted(in_missed - in_others or in_missed))}"
    if reached >= LEAST_REACHED_SHARE * len(names_of):
        return {}, f"{reaches}; {others}"
    if is_asked_for:
        raise BadInputError(f"Of {run.model} {reaches}: add some ({others}), or pass --target_modules all-linear.")
    return {"target_modules": "all-linear"}, f"{reaches}: adapters are on all linear layers ({others})"


def _dropout(run: RunConfig, config: PretrainedConfig) -> Changes:
    if not run.method.has_adapters or not _adapts_experts(run):
        return {}, ""
    changes = {"lora_dropout": 0.0} if run.lora_dropout == RunConfig.lora_dropout else {}
    without = ", and these take no dropout: lora_dropout is 0" if changes else ""
    adapted = f"with target_modules {run.target_modules} its experts get adapters, too{without}"
    return changes, f"{adapted} (--target_modules q_proj,v_proj leaves them out)"


def _device_map(run: RunConfig, config: PretrainedConfig) -> Changes:
    is_balanced = run.parallelism.layers_in_turn and run.device_map == "balanced"
    if not is_balanced or is_planned(run):
        return {}, ""
    return {"device_map": "even"}, f"device_map is even, as the closed form does not know the kind {config.model_type}"


def _rate(run: RunConfig, config: PretrainedConfig) -> Changes:
    """Choose a learning rate where none was passed with another model.

    "LoRA Without Regret" (Schulman and Thinking Machines Lab 2025): of full fine-tuning 5e-5 x (2000 / width) ^ 0.781,
    the exponent of the Llama models, or 0.0775 of Qwen's; of LoRA ten times that, where adapters are multiplied by
    32 / rank, and A starts with a standard deviation of 1 / sqrt(3 x width). Adam's steps do not depend on the
    gradients' size: with another factor, and another start (ours: 1 / rank), the rate changes inversely.
    """
    if run.learning_rate != BY_MODEL:
        return {}, ""
    width = config.get_text_config().hidden_size
    rate = 5e-5 * (2000 / width) ** (0.0775 if config.model_type.startswith("qwen") else 0.781)
    if run.method.has_adapters:
        factor = run.lora_alpha / (math.sqrt(run.lora_r) if run.use_rslora else run.lora_r)
        rate *= 10 * 32 / (factor * math.sqrt(3 * width))  # the rank is in both, and falls out
    rate = float(f"{rate:.1e}")
    rule = f"the rule for {run.method.label} and a width of {width}"
    return {"learning_rate": rate}, f"learning_rate is {rate:g}, by {rule} (--learning_rate takes another)"


def check_heads(run: RunConfig) -> None:
    """Refuse a classifier whose head would start at random, and not be learnt: parts of it are not in `Task.heads`."""
    trains_all = not run.method.has_adapters and run.target_modules in ("all", "all-linear")
    if not run.goal.classifies or trains_all:
        return
    model = model_without_weights(run)
    parts = [name for name, part in model.named_children() if any(True for _ in part.parameters())]
    if unknown := [name for name in parts if name not in (model.base_model_prefix, *run.goal.heads)]:
        raise BadInputError(
            f"{run.model} is of the kind {model.config.model_type}, whose head has the part {' and '.join(unknown)}, "
            "that would not be trained: pass --technique full --target_modules all, or another --model."
        )


def recipe_targets(run: RunConfig) -> str:
    """Return the layers that the run folder's recipe for adapters names; empty where it names none."""
    recipe = lora_of(REPOSITORY / run.run_folder) if run.run_folder else {}
    return str(recipe.get("target_modules", ""))


def check_targets(run: RunConfig) -> None:
    """Refuse a run whose `target_modules` cannot be trained, by its model without weights."""
    with torch.random.fork_rng(devices=[]):  # adapters draw their start, which the run's own are to draw
        with_trained_weights(model_without_weights(run), run)


def _adapts_experts(run: RunConfig) -> bool:
    # fused experts are weights, which PEFT wraps
    model = model_without_weights(run)
    if not any(map(has_fused_experts, model.modules())):
        return False
    with torch.random.fork_rng(devices=[]):  # adapters draw their start, which the run's own are to draw
        adapted = add_lora(model, replace(run, lora_dropout=0))
    return any(isinstance(module, ParamWrapper) for module in adapted.modules())


def experts_at_work(model: PreTrainedModel) -> str:
    """Return how many parameters a model has, and of a mixture of experts how many work on one token."""
    total, idle = sum(weight.numel() for weight in model.parameters()), idle_weights(model)
    at_work = f", {(total - idle) / 1e9:.3g}B of them at work on a token" if idle else ""
    return f"{total / 1e9:.3g}B parameters{at_work}"


def check_quantizable(run: RunConfig) -> None:
    """Refuse a model with less than 90 % of its layers' matrices in 4 bits, or experts that a run cannot hold so."""
    if not run.method.quantizes:
        return
    model = model_without_weights(run)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    quantized, others = 0, Counter()
    for module in model.modules():
        if module in ends or isinstance(module, torch.nn.Embedding):
            continue
        is_linear = type(module) in (torch.nn.Linear, Conv1D)  # which `replace_with_bnb_linear` replaces
        for weight in module.parameters(recurse=False):
            if is_linear or (weight.ndim == EXPERTS_NDIM and has_fused_experts(module)):
                quantized += weight.numel() * (weight.ndim > 1)
            else:
                others[type(module).__name__] += weight.numel() * (weight.ndim > 1)
    share = quantized / (quantized + others.total())
    if share < LEAST_QUANTIZED_SHARE:
        raise BadInputError(
            f"Only {share:.0%} of the weights in the layers of {run.model} would be stored in 4 bits, not those in "
            f"{others.most_common(1)[0][0]}: pass --technique lora in a folder of 2.1."
        )
    if any(map(has_fused_experts, model.modules())):
        on_experts = "take no adapters: pass --target_modules with layers of attention alone, such as q_proj,v_proj"
        why_not = why_not_in_4_bits(run.parallelism, run.gradient_checkpointing)
        if why_not := why_not or on_experts * _adapts_experts(run):
            raise BadInputError(f"{run.model} is a mixture, whose experts in 4 bits {why_not}.")
