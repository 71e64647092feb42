"""Base model and tokenizer, LoRA adapters, and the merged model: loaded, saved, reloaded and compared."""

import importlib.util
from pathlib import Path

import torch
from accelerate import dispatch_model
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
from huggingface_hub.errors import RepositoryNotFoundError
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.architectures import find_config
from common.quantization import prepare_quantized, quantization_config, random_model, weight_counts
from common.run_config import REPOSITORY, BadInputError, RunConfig
from common.sharding import whole_size

LOGIT_TOLERANCES = {"fp32": 1e-5, "bf16": 0.05, "bf16-mixed": 0.05, "fp16-mixed": 0.05}
"""Merging rounds the sum of base and adapter once more: largest difference of logits, over the largest logit."""
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
"""Our names and those of Transformers."""
EMBEDDED_BASE = REPOSITORY / "assets" / "embedded_base"
HUB_TIMEOUT_S = 10
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def check_model(model: str) -> str:
    """What to load for the setting `model`: a folder's path, or the Hub id as it is. Reads no weights.

    Raises:
        BadInputError: the folder lacks a part of a model, or the id is neither a folder nor to be had.
    """
    for folder in (Path(model).expanduser(), REPOSITORY / model):
        if folder.is_dir():
            return str(_check_folder(folder, model))
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise BadInputError(
            f"The model {model} is no folder, nor an id such as Qwen/Qwen2.5-7B-Instruct: mend --model."
        )
    if not isinstance(try_to_load_from_cache(model, "config.json"), str):
        _check_hub(model)
    return model


def _check_hub(model: str) -> None:
    """Refuse an id that is not cached and cannot be fetched now."""
    fetch = f"fetch it where there is a network, once, with `hf download {model}`"
    if HF_HUB_OFFLINE:
        raise BadInputError(
            f"The model {model} is not in the cache ({HF_HUB_CACHE}), and HF_HUB_OFFLINE forbids the network: "
            f"unset it, and {fetch}."
        )
    try:
        HfApi().model_info(model, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise BadInputError(
            f"The model {model} is not on the Hugging Face Hub, or not for you: mend --model."
        ) from None
    except Exception as error:  # whatever the network library of this version of huggingface_hub raises
        raise BadInputError(
            f"The model {model} is not in the cache ({HF_HUB_CACHE}) and the Hub cannot be reached ({error}): {fetch}."
        ) from None


def _check_folder(folder: Path, model: str) -> Path:
    if not (folder / "config.json").is_file():
        raise BadInputError(f"The model folder {model} has no config.json: pass a folder that save_pretrained wrote.")
    if not any(True for pattern in WEIGHT_FILES for _ in folder.glob(pattern)):
        raise BadInputError(
            f"The model folder {model} has no weights ({' or '.join(WEIGHT_FILES)}): "
            "copy them there, or pass another --model."
        )
    return folder


def check_attention(run: RunConfig) -> None:
    """Refuse flash attention where its package is missing.

    Raises:
        BadInputError: with the command that installs it.
    """
    if run.attention == "flash" and importlib.util.find_spec("flash_attn") is None:
        raise BadInputError(
            "attention is flash, but flash-attn is not installed: `pip install flash-attn --no-build-isolation` (it "
            "compiles on a machine with CUDA), or pass --attention sdpa."
        )


def load_tokenizer(run: RunConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a pad token; for random weights the embedded one.

    Raises:
        BadInputError: it cannot be loaded, or has no chat template.
    """
    if run.weights == "random":
        shape_config(run.model)
        return AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    source = check_model(run.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise _cannot_be_loaded("tokenizer", run.model, error) from error
    if tokenizer.chat_template is None:
        raise BadInputError(f"The tokenizer of {run.model} has no chat template: use an instruction-tuned model.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def weight_dtype(run: RunConfig) -> torch.dtype:
    """Of the base's weights: mixed precision trains them in fp32, but weights that LoRA freezes may stay in fp16."""
    if run.precision == "fp16-mixed" and run.technique == "lora":
        return torch.float16
    return torch.bfloat16 if run.precision == "bf16" else torch.float32


def load_base_model(
    run: RunConfig, device_map: dict[str, str | int], source: str | Path | None = None, quantized: bool = True
) -> PreTrainedModel:
    """The base model (or the model in `source`, say a merged one) in the run's precision, placed by `device_map`.

    With qlora the base's layers are in 4 bits, unless `quantized` is False; a `source` is taken as it is.

    Raises:
        BadInputError: it cannot be loaded.
    """
    quantized = quantized and run.technique == "qlora" and source is None
    if run.weights == "random" and source is None:
        model = _random_model(run, device_map, quantized)
        return prepare_quantized(model) if quantized else model
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source or check_model(run.model),
            dtype=weight_dtype(run),
            attn_implementation=ATTENTION[run.attention],
            device_map=device_map,
            quantization_config=quantization_config(run) if quantized else None,
        )
    except (OSError, SafetensorError) as error:
        raise _cannot_be_loaded("weights", run.model, error) from error
    return prepare_quantized(model.eval()) if quantized else model.eval()


def shape_config(model: str) -> PretrainedConfig:
    """The architecture of `model`, as `any_shape_config` finds it, if it is a language model that continues a text.

    Raises:
        BadInputError: no shape is known, or of another kind of model.
    """
    config = any_shape_config(model)
    if not any(name.endswith("ForCausalLM") for name in config.architectures or []):
        raise BadInputError(
            f"{model} is a {', '.join(config.architectures or ['?'])}, which does not continue a text: "
            "pass --model with a shape such as qwen2.5-7b."
        )
    return config


def any_shape_config(model: str) -> PretrainedConfig:
    """The architecture of `model`: a config.json, a folder with one, a name or Hub id that `find_config` finds.

    Raises:
        BadInputError: there is none, or Transformers does not know its kind.
    """
    path = find_config(model)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise BadInputError(
            f"Transformers cannot read {path.name} of {model} ({str(error).splitlines()[0]})."
        ) from None


def _random_model(run: RunConfig, device_map: dict[str, str | int], quantized: bool) -> PreTrainedModel:
    """A model of `run.model`'s shape, made on its device, or on the host for several.

    The weights are the same each time, so that adapters can be reloaded. The embedded tokenizer's ids stand below any
    real vocabulary, so that nothing has to be resized.
    """
    tokenizer, config = AutoTokenizer.from_pretrained(EMBEDDED_BASE), shape_config(run.model)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id, None
    config.name_or_path = ""  # else PEFT looks for a whole model where the shape came from
    device = torch.device(device_map.get("", "cpu"))
    if run.technique == "qlora":
        return random_model(run, config, weight_dtype(run), ATTENTION[run.attention], device, quantized)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(run.seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=weight_dtype(run), attn_implementation=ATTENTION[run.attention]
        )
    return model.eval() if "" in device_map else dispatch_model(model.eval(), device_map)


def _cannot_be_loaded(part: str, model: str, error: Exception) -> BadInputError:
    first_line = str(error).strip().splitlines()[0]
    return BadInputError(
        f"The {part} of {model} cannot be loaded ({first_line}): put them right, or pass another --model."
    )


def add_lora(model: PreTrainedModel, run: RunConfig) -> PeftModel:
    """Freeze `model` and put adapters on the run's target modules; they start Gaussian, and add nothing yet.

    Raises:
        BadInputError: the model has no module of such a name.
    """
    modules = run.target_modules if run.target_modules == "all-linear" else run.target_modules.split(",")
    config = LoraConfig(
        task_type="CAUSAL_LM" if model.can_generate() else None,
        r=run.lora_rank,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        use_rslora=True,
        init_lora_weights="gaussian",
        target_modules=modules,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise BadInputError(f"target_modules is {run.target_modules!r}: {str(error).splitlines()[0]}") from None


def with_adapter(base: PreTrainedModel, folder: Path) -> PeftModel:
    """`base` with the adapter that was saved in `folder`."""
    return PeftModel.from_pretrained(base, folder)


def train_linear_layers(model: PreTrainedModel, target_modules: str = "all-linear") -> list[str]:
    """Freeze `model` but for its linear layers of the given names, as `RunConfig.target_modules` says; list them.

    `all-linear`: all but the head; `all`: every weight, also of embeddings, norms and head.

    Raises:
        BadInputError: a name matches no linear layer; with the names that there are.
    """
    if target_modules == "all":
        model.requires_grad_(True)
        return [name for name, _ in model.named_parameters()]
    head = model.get_output_embeddings()
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    asked = target_modules.split(",")
    if target_modules != "all-linear":
        for pattern in asked:
            if not any(_has_name(name, pattern) for name in linears):
                known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
                raise BadInputError(
                    f"target_modules has {pattern!r}, but no linear layer is called so: choose some of {known}."
                )
        linears = {name: linear for name, linear in linears.items() if any(_has_name(name, each) for each in asked)}
    model.requires_grad_(False)
    for linear in linears.values():
        linear.requires_grad_(True)
    return list(linears)


def _has_name(module_name: str, asked: str) -> bool:
    """As PEFT matches: the whole name, or its last parts."""
    return module_name == asked or module_name.endswith("." + asked)


def parameter_counts(model: PreTrainedModel) -> tuple[int, int]:
    """Trainable parameters, and all that multiply: an input embedding that is not also the head only looks up."""
    trained = sum(whole_size(weight) for weight in model.parameters() if weight.requires_grad)
    multiplied = weight_counts(model)
    lookup, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return trained, multiplied if lookup is head else multiplied - whole_size(lookup)


@torch.no_grad()
def next_token_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of one collated batch, fp32, shape (rows, tokens, vocabulary), with dropout off."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits.float()
    model.train(was_training)
    return logits


def check_equal_logits(trained: torch.Tensor, reloaded: torch.Tensor, what: str, precision: str) -> float:
    """The largest absolute difference of two models' logits.

    Raises:
        RuntimeError: it is above the precision's rounding, so that what was saved is not what was trained.
    """
    difference = (trained - reloaded).abs().max().item()
    tolerance = LOGIT_TOLERANCES[precision] * trained.abs().max().item()
    if not difference <= tolerance:
        raise RuntimeError(
            f"The logits of the reloaded {what} differ by {difference:.2e} from the trained model's, "
            f"above {tolerance:.0e}: what was saved is not what was trained."
        )
    return difference
