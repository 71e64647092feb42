"""Base model and tokenizer, with LoRA adapters: checked, loaded, or made with random weights; and logits compared."""

import importlib.util
import json
import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import dispatch_model
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
from huggingface_hub.errors import RepositoryNotFoundError
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.splits import label_names_of
from common.models.minilm import MINILM, check_minilm, minilm_folder
from common.models.quantization import prepare_quantized, quantization_config, random_model, weight_counts
from common.models.shards import global_numel
from common.planning.architectures import BERT_LIKE, find_config

LOGIT_TOLERANCES = {"fp32": 1e-5, "bf16": 0.05, "bf16-mixed": 0.05, "fp16-mixed": 0.05}
"""Merging rounds the sum of base and adapter once more: largest difference of logits, over the largest logit. In fp32
that of the embedded base: see `rounding_growth`."""
EMBEDDED_WIDTH, EMBEDDED_LAYERS = 128, 4
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2", "flash3": "flash_attention_3"}
"""Our names and those of Transformers."""
FLASH_PACKAGES = {
    "flash": ("flash_attn", "`pip install flash-attn --no-build-isolation`"),
    "flash3": ("flash_attn_interface", "`python setup.py install` in the folder hopper of flash-attention's source"),
}
"""By our names: what is imported, and how it is installed."""
LOADING_LOGGERS = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel")
"""They list what a checkpoint lacks (of a classifier the head, which `start_head` starts), and, wherever several ranks
run, what the library's own tensor parallel, which is not asked for, does not divide."""
EMBEDDED_BASE = REPOSITORY / "assets" / "embedded_base"
EMBEDDED_SUMMARIZER = REPOSITORY / "assets" / "embedded_summarizer"
HUB_TIMEOUT_S = 10
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def check_model(model: str) -> str:
    """What to load for the setting `model`: a folder's path, or the Hub id as it is; MiniLM's package is a folder, too.

    Raises:
        BadInputError: the folder lacks a part of a model, or the id is neither a folder nor on the Hub.
    """
    if model == MINILM:
        check_minilm(f"model is {MINILM}", "another --model")
        return str(minilm_folder())
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
    _check_no_code(folder, model)
    return folder


def _check_no_code(folder: Path, model: str) -> None:
    """Refuse a model that only code of its own could load: nothing of a model's folder is run, or asked for."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        brings_code = "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING
    except (ValueError, TypeError, AttributeError):
        return  # loading says what is wrong with it
    if brings_code:
        raise BadInputError(
            f"The model folder {model} brings code of its own (auto_map of its config.json), which is not run: pass a "
            "--model of a kind that Transformers knows."
        )


def check_attention(run: RunConfig) -> None:
    """Refuse flash attention where its package is missing.

    Raises:
        BadInputError: with the command that installs it.
    """
    if run.attention not in FLASH_PACKAGES:
        return
    module, install = FLASH_PACKAGES[run.attention]
    if importlib.util.find_spec(module) is None:
        raise BadInputError(
            f"attention is {run.attention}, but {module} is not installed: {install} (it compiles on a machine with "
            "CUDA), or pass --attention sdpa."
        )


def load_tokenizer(run: RunConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a pad token; for random weights the embedded one, but for MiniLM, which is here.

    Raises:
        BadInputError: it cannot be loaded, or lacks a chat template that the task needs.
    """
    if run.goal.classifies:
        check_classifier(run)
    if run.goal.summarizes:
        check_summarizer(run)
    if run.weights == "random" and run.model != MINILM:
        if run.goal.chats:
            shape_config(run.model)
        return AutoTokenizer.from_pretrained(EMBEDDED_SUMMARIZER if run.goal.summarizes else EMBEDDED_BASE)
    source = check_model(run.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _cannot_be_loaded("tokenizer", run.model, error) from error
    if run.goal.chats and tokenizer.chat_template is None:
        raise BadInputError(f"The tokenizer of {run.model} has no chat template: use an instruction-tuned model.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def weight_dtype(run: RunConfig) -> torch.dtype:
    """Of the base's weights: mixed precision trains them in fp32, but weights that LoRA freezes may stay in fp16."""
    if run.precision == "fp16-mixed" and run.method.has_plain_adapters:
        return torch.float16
    return torch.bfloat16 if run.precision == "bf16" else torch.float32


def load_base_model(
    run: RunConfig, device_map: dict[str, str | int], source: str | Path | None = None, quantized: bool = True
) -> PreTrainedModel:
    """The base model (or the model in `source`, say a merged one) in the run's precision, placed by `device_map`.

    With qlora the base's layers are in 4 bits, unless `quantized` is False; a `source` is taken as it is. With
    classification it has a head for the labels of the run's data, which starts at random where the base has none.

    Raises:
        BadInputError: it cannot be loaded.
    """
    if run.goal.classifies:
        return _load_classifier(run, device_map, source)
    quantized = quantized and run.method.quantizes and source is None
    if run.weights == "random" and source is None:
        model = _random_model(run, device_map, quantized)
        return prepare_quantized(model) if quantized else model
    try:
        model = getattr(transformers, run.goal.auto_class).from_pretrained(
            source or check_model(run.model),
            dtype=weight_dtype(run),
            attn_implementation=ATTENTION[run.attention],
            device_map=device_map,
            quantization_config=quantization_config(run) if quantized else None,
            trust_remote_code=False,
        )
    except (OSError, SafetensorError, ValueError) as error:
        raise _cannot_be_loaded("weights", run.model, error) from error
    return prepare_quantized(model.eval()) if quantized else model.eval()


def _load_classifier(
    run: RunConfig, device_map: dict[str, str | int], source: str | Path | None = None
) -> PreTrainedModel:
    if run.weights == "random" and source is None:
        return _random_model(run, device_map, quantized=False)
    named = {} if source else class_names(run)
    try:
        with silent(*LOADING_LOGGERS), same_random_numbers_after(device_map):
            model, about = getattr(transformers, run.goal.auto_class).from_pretrained(
                source or check_model(run.model),
                dtype=weight_dtype(run),
                attn_implementation=ATTENTION[run.attention],
                device_map=device_map,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # a head for other labels is started anew
                trust_remote_code=False,
                **named,
            )
    except (OSError, SafetensorError, ValueError) as error:
        raise _cannot_be_loaded("weights", run.model, error) from error
    start_head(model, about, run.seed)
    return model.eval()


@contextmanager
def silent(*logger_names: str) -> Iterator[None]:
    """No warnings of a library's loggers: what they would say is expected, or said better by us."""
    loggers = [logging.getLogger(name) for name in logger_names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def same_random_numbers_after(device_map: dict[str, str | int]) -> AbstractContextManager[None]:
    """What is drawn within counts for nothing afterwards.

    The library draws a start for weights that a checkpoint lacks: of a classifier, on one stage of a pipeline, but not
    on others, whose adapters would then start from other numbers than on one device.
    """
    devices = [torch.device(device) for device in device_map.values()]
    return torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"])


def class_names(run: RunConfig) -> dict[str, object]:
    """The labels of the run's data, as a model's config has them."""
    names = label_names_of(run)
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def start_head(model: PreTrainedModel, loading: dict[str, Any], seed: int) -> None:
    """Give weights that a checkpoint lacks their start: the same on every rank, and with any number of ranks.

    Normal with the config's `initializer_range`, biases zero, as the models' own start (Devlin et al. 2019). `loading`
    is what `from_pretrained` says of itself.
    """
    generator = torch.Generator().manual_seed(seed)
    for name in sorted([*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])]):
        weight = model.get_parameter(name)
        start = torch.zeros(weight.shape)
        if weight.ndim > 1:
            start.normal_(0, model.config.initializer_range, generator=generator)
        with torch.no_grad():
            weight.copy_(start)


def head_modules(model: PreTrainedModel) -> list[str]:
    """What follows the layers of a classifier, by its name: trained in full beside adapters."""
    return [name for name in ("pooler", "classifier") if any(part.endswith(name) for part, _ in model.named_modules())]


def model_class(run: RunConfig, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of a run's model: with classification the library's own classifier on the same layers."""
    if run.goal.classifies:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    return getattr(transformers, config.architectures[0])


def check_classifier(run: RunConfig) -> None:
    """Refuse a model that is no encoder, and texts longer than it can read.

    Raises:
        BadInputError: with its kind, or with both lengths.
    """
    config = any_shape_config(run.model if run.model == MINILM or run.weights == "random" else check_model(run.model))
    if config.model_type not in BERT_LIKE:
        raise BadInputError(
            f"{run.model} is of the kind {config.model_type}: classification is done with encoders, of the kinds "
            f"{' and '.join(BERT_LIKE)}; pass --model {MINILM} or roberta-large."
        )
    longest = longest_readable(config)
    if longest and run.max_length > longest:
        raise BadInputError(
            f"max_length is {run.max_length}, but {run.model} reads {longest} tokens at most: pass --max_length "
            f"{longest} or less; longer texts are cut."
        )


def check_summarizer(run: RunConfig) -> None:
    """Refuse a model that is no encoder-decoder, and texts or summaries longer than it can read or write.

    Raises:
        BadInputError: with its kind, or with both lengths.
    """
    config = any_shape_config(run.model if run.weights == "random" else check_model(run.model))
    if not config.is_encoder_decoder:
        raise BadInputError(
            f"{run.model} is of the kind {config.model_type}: summaries are learnt by encoder-decoders; pass --model "
            "assets/embedded_summarizer or facebook/bart-large-cnn."
        )
    longest = longest_readable(config)
    for name in ("max_length", "max_target_length", "max_new_tokens"):
        if longest and getattr(run, name) > longest:
            raise BadInputError(
                f"{name} is {getattr(run, name)}, but {run.model} has room for {longest} tokens: pass --{name} "
                f"{longest} or less."
            )


def longest_readable(config: PretrainedConfig) -> int | None:
    """Tokens that a model can read at once; None: as many as there are."""
    positions = getattr(config, "max_position_embeddings", None)
    return positions - 2 if config.model_type == "roberta" else positions  # RoBERTa counts from behind its padding's


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
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise BadInputError(
            f"Transformers cannot read {path.name} of {model} ({str(error).splitlines()[0]})."
        ) from None


def _random_model(run: RunConfig, device_map: dict[str, str | int], quantized: bool) -> PreTrainedModel:
    """A model of `run.model`'s shape, made on its device, or on the host for several.

    The weights are the same each time, so that adapters can be reloaded. The embedded tokenizer's ids stand below any
    real vocabulary, so that nothing has to be resized.
    """
    classifies = run.goal.classifies
    tokenizer = load_tokenizer(run)
    config = shape_config(run.model) if run.goal.chats else any_shape_config(run.model)
    if classifies:
        config.update(class_names(run))
    config.pad_token_id, config.eos_token_id, config.bos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id, None
    if config.is_encoder_decoder:
        config.decoder_start_token_id, config.forced_bos_token_id = tokenizer.eos_token_id, None
    config.name_or_path = ""  # else PEFT looks for a whole model where the shape came from
    device = torch.device(device_map.get("", "cpu"))
    if run.method.quantizes:
        return random_model(run, config, weight_dtype(run), ATTENTION[run.attention], device, quantized)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(run.seed)
        model = getattr(transformers, run.goal.auto_class).from_config(
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
        task_type="SEQ_CLS" if run.goal.classifies else "CAUSAL_LM" if model.can_generate() else None,
        modules_to_save=head_modules(model) if run.goal.classifies else None,
        r=run.lora_r,
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


def train_own_weights(model: PreTrainedModel, run: RunConfig) -> None:
    """Switch on the weights that full fine-tuning trains: `target_modules`, and with classification the head always.

    Raises:
        BadInputError: a name matches no linear layer.
    """
    train_linear_layers(model, run.target_modules)
    if run.goal.classifies:
        for name, weight in model.named_parameters():
            if any(f"{head}." in name for head in head_modules(model)):
                weight.requires_grad_(True)


def with_trained_weights(model: PreTrainedModel, run: RunConfig) -> PreTrainedModel | PeftModel:
    """Switch on what the run trains: adapters on a frozen base, or the model's own weights.

    Raises:
        BadInputError: the model has no module, or no linear layer, of such a name.
    """
    if run.method.has_adapters:
        return add_lora(model, run)
    train_own_weights(model, run)
    return model


def _has_name(module_name: str, asked: str) -> bool:
    """As PEFT matches: the whole name, or its last parts."""
    return module_name == asked or module_name.endswith("." + asked)


def parameter_counts(model: PreTrainedModel) -> tuple[int, int]:
    """Trainable parameters, and all that multiply: an input embedding that is not also the head only looks up."""
    trained = sum(global_numel(weight) for weight in model.parameters() if weight.requires_grad)
    multiplied = weight_counts(model)
    lookup, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    return trained, multiplied if head is not None and lookup is head.weight else multiplied - global_numel(lookup)


@torch.no_grad()
def next_token_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of one collated batch, fp32, dropout off: (rows, tokens, vocabulary), of a classifier (rows, classes).

    Of an encoder-decoder those of the decoder's tokens.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    inputs = {name: batch[name].to(device) for name in names if name in batch}
    logits = model(**inputs, use_cache=False).logits.float()
    model.train(was_training)
    return logits


def rounding_growth(config: PretrainedConfig) -> float:
    """How many times as far as the embedded base's a model's fp32 logits are off by rounding, at least 1.

    Errors of a sum of H products grow as sqrt(H), and those of layers add up: after a merge the logits of
    llama-3.2-1b's shape were 12 to 32 times as far apart as the embedded base's, which this says is 16 times (LOG.md).
    """
    layers = getattr(config, "num_hidden_layers", EMBEDDED_LAYERS)
    return max(1.0, math.sqrt(config.hidden_size / EMBEDDED_WIDTH) * layers / EMBEDDED_LAYERS)


def logit_tolerance(precision: str, config: PretrainedConfig) -> float:
    """How far a reloaded model's logits may be off, over the largest logit."""
    return LOGIT_TOLERANCES[precision] * (rounding_growth(config) if precision == "fp32" else 1)


def check_equal_logits(
    expected: torch.Tensor, reloaded: torch.nn.Module, batch: dict[str, torch.Tensor], what: str, precision: str
) -> float:
    """The largest absolute difference between a trained model's logits of a batch and the `reloaded` one's.

    Raises:
        RuntimeError: it is above the precision's rounding, so that what was saved is not what was trained.
    """
    found = next_token_logits(reloaded, batch)
    return largest_difference(expected, found, what, logit_tolerance(precision, reloaded.config))


def largest_difference(trained: torch.Tensor, reloaded: torch.Tensor, what: str, tolerance: float) -> float:
    """The largest absolute difference of two models' logits; `tolerance` is over the largest logit.

    Raises:
        RuntimeError: it is above that.
    """
    difference = (trained - reloaded).abs().max().item()
    limit = tolerance * trained.abs().max().item()
    if not difference <= limit:
        raise RuntimeError(
            f"The logits of the reloaded {what} differ by {difference:.2e} from the trained model's, "
            f"above {limit:.0e}: what was saved is not what was trained."
        )
    return difference
