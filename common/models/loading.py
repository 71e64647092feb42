"""Base model and tokenizer: checked, loaded, or made with random weights."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import dispatch_model, init_empty_weights
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from peft.utils import CONFIG_NAME as ADAPTER_CONFIG_NAME
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import is_liger_kernel_available

from common.base.errors import BadInputError, check_installed, reading
from common.base.loggers import silent
from common.base.paths import REPOSITORY, find_here
from common.base.run_config import RunConfig
from common.data.answer_ends import stops_of
from common.data.row_checks import say_once
from common.data.splits import label_names_of
from common.data.templates import with_chat_template
from common.models.module_by_module import EachModule, draw_weights, each_as_it_is_read, ending_with
from common.models.quantization import forked_random_numbers, prepare_quantized, quantization_config, quantize_experts
from common.models.real_models import MINILM, SMOLLM2, check_minilm, minilm_folder, smollm2_folder
from common.models.shards import has_fused_experts
from common.models.weight_files import LOADING_LOGGERS
from common.planning.model_configs import (
    PUBLISHED,
    find_config,
    is_hub_id,
    reach_of_positions,
    read_config,
    refuse_quantized,
    refuse_revision,
)

ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2", "flash3": "flash_attention_3"}
# by our names: what is imported, and how it is installed
FLASH_PACKAGES = {
    "flash": ("flash_attn", "`pip install flash-attn --no-build-isolation`"),
    "flash3": ("flash_attn_interface", "`python setup.py install` in the folder hopper of flash-attention's source"),
}
ASSETS = REPOSITORY / "assets"
EMBEDDED_BASE, EMBEDDED_SUMMARIZER = ASSETS / "embedded_base", ASSETS / "embedded_summarizer"
HUB_TIMEOUT_S = 10
A_WORD = "Clock"
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
# read a text in both directions, and have a classifier in Transformers; of these some also write
ENCODERS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES} & {*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}
SEEING = ("idefics2", "idefics3", "smolvlm")  # whose vision tower takes `pixel_values` and their mask alone
# by `Task.model_kind`: which models are of this kind, and what the refusal of another one says
MODEL_KINDS: dict[str, tuple[Callable[[PretrainedConfig], bool], str]] = {
    "decoder": (
        lambda config: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) in (config.architectures or []),
        "which is no decoder of texts alone: pass --model with a shape such as qwen2.5-7b, or go to 3.1 with an "
        "encoder or 3.2 with an encoder-decoder, which the planner plans with --classes or --target-len",
    ),
    "encoder": (
        lambda config: config.model_type in ENCODERS and not config.is_encoder_decoder,
        f"but labels are predicted by encoders, such as BERT and RoBERTa: pass --model {MINILM} or roberta-large",
    ),
    "encoder-decoder": (
        lambda config: config.is_encoder_decoder,
        "but summaries are written by encoder-decoders: pass --model assets/embedded_summarizer or "
        "facebook/bart-large-cnn",
    ),
    "vision-language": (
        lambda config: config.model_type in SEEING,
        "which is not one of the kinds that see (Idefics2, Idefics3, SmolVLM): pass --model "
        "assets/embedded_vision_base or HuggingFaceTB/SmolVLM-Instruct, or go to 2.1 to learn from texts alone",
    ),
}


def what_to_load(run: RunConfig, source: str | Path | None = None) -> dict[str, object]:
    """Return what each `from_pretrained` of Transformers is told to load: the run's base, or the model in `source`."""
    revision = "main" if source or not run.model_revision else run.model_revision  # which no folder has
    model = source or check_model(run.model, run.model_revision)
    return {"pretrained_model_name_or_path": model, "revision": revision, "trust_remote_code": False}


def check_model(model: str, revision: str = "") -> str:
    """Return what to load for the setting `model`: a folder (MiniLM and SmolLM2 have one), or the Hub id as it is."""
    refuse_revision(model, revision)
    if model == MINILM:
        check_minilm(f"model is {MINILM}", "another --model")
        return str(minilm_folder())
    if model == SMOLLM2:
        return str(smollm2_folder())
    if folder := find_here(model, os.path.isdir):
        return str(_check_folder(folder, model))
    if not is_hub_id(model):
        raise BadInputError(f"The model {model} is no folder, nor an id like Qwen/Qwen2.5-7B-Instruct: correct it.")
    if not isinstance(try_to_load_from_cache(model, "config.json", revision=revision or None), str):
        _check_hub(model, revision)
    return model


def _check_hub(model: str, revision: str) -> None:
    try:
        HfApi().model_info(model, revision=revision or None, timeout=HUB_TIMEOUT_S)
        HfApi().auth_check(model)  # everybody may read about a gated model, but not its files
    except GatedRepoError:
        raise BadInputError(f"The model {model} is gated: ask for access on the Hub, then `hf auth login`.") from None
    except RepositoryNotFoundError:
        raise BadInputError(f"The model {model} is not on the Hugging Face Hub, or not for you: correct it.") from None
    except RevisionNotFoundError:
        raise BadInputError(f"The model {model} has no revision {revision}: pass another --model_revision.") from None
    except Exception as error:  # offline, or whatever the network library of this version of huggingface_hub raises
        which, option = (f" at the revision {revision}", f" --revision {revision}") if revision else ("", "")
        raise BadInputError(
            f"The model {model}{which} is not in the cache ({HF_HUB_CACHE}) and the Hub cannot be reached ({error}): "
            f"fetch it where there is a network, once, with `hf download {model}{option}`, or try a published shape "
            "without weights: --weights random."
        ) from None


def _check_folder(folder: Path, model: str) -> Path:
    """Refuse a folder that lacks a part, or whose model only code of its own could load: no such code is run."""
    if not (folder / "config.json").is_file():
        lacks = "has no config.json: pass a folder that save_pretrained wrote"
        if (folder / ADAPTER_CONFIG_NAME).is_file():
            lacks = "is a PEFT adapter, and no whole model: pass the folder merged of its run"
        raise BadInputError(f"The model folder {model} {lacks}.")
    if not any(True for pattern in WEIGHT_FILES for _ in folder.glob(pattern)):
        names = " or ".join(WEIGHT_FILES)
        raise BadInputError(f"The model folder {model} has no weights ({names}): copy them there, or pass another.")
    config = read_config(folder / "config.json", model)
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise BadInputError(
            f"The folder {model} brings code of its own (auto_map), which is not run: pass another --model."
        )
    return folder


def check_attention(run: RunConfig) -> None:
    """Refuse flash attention where its package is missing."""
    if run.attention in FLASH_PACKAGES:
        module, install = FLASH_PACKAGES[run.attention]
        instead = f"{install} (it compiles on a machine with CUDA), or pass --attention sdpa"
        check_installed(module, f"attention is {run.attention}", instead)


def check_liger(run: RunConfig) -> None:
    """Refuse Liger's kernels where their package is missing, or has none for the run's model."""
    if not run.use_liger_kernel:
        return
    if not is_liger_kernel_available():
        raise BadInputError("use_liger_kernel is True, but not installed: `pip install liger-kernel`, or leave it out.")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # here: few runs have it

    kind = any_shape_config(run.model, run.model_revision).model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise BadInputError(
            f"use_liger_kernel is True, but model is of the kind {kind}, and Liger has kernels for "
            f"{', '.join(MODEL_TYPE_TO_APPLY_LIGER_FN)}: leave --use_liger_kernel out."
        )


def load_tokenizer(run: RunConfig) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with a pad token; for random weights an embedded one, except MiniLM's own."""
    if run.weights == "random" or run.goal.sees or not run.goal.chats:  # what chats has a template
        checked_config(run)
    if run.goal.sees:
        tokenizer = _tokenizer_with_processor(run)
    elif run.weights == "random" and run.model != MINILM:
        return AutoTokenizer.from_pretrained(ASSETS / run.goal.tokenizer, trust_remote_code=False)
    else:
        tokenizer = read_tokenizer(run.model, what_to_load(run))
    if run.goal.chats:
        say_once(with_chat_template(tokenizer, run.model))
    _give_pad_token(tokenizer, run.model)
    return tokenizer


def read_tokenizer(model: str | Path, source: dict[str, object] | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder, or of where `source` leads `from_pretrained` to; it must take a word."""
    with reading(f"The tokenizer of {model}", "Correct it, or pass another model."):
        source = source or {"pretrained_model_name_or_path": model, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        tokenizer.decode(tokenizer(A_WORD)["input_ids"])
    return tokenizer


def _give_pad_token(tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """Let an end token pad, where no token does: padding is masked, whatever it is."""
    if tokenizer.pad_token is None:
        ends = stops_of(tokenizer).token_ids
        if not ends:
            raise BadInputError(
                f"The tokenizer of {model} has neither a pad nor an end token: give it one, or pass another --model."
            )
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ends[0])


def _tokenizer_with_processor(run: RunConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a vision-language model, with its `processor`: of random weights the embedded one."""
    source = what_to_load(run, ASSETS / run.goal.tokenizer if run.weights == "random" else None)
    with reading(f"The processor of {run.model}", "Correct it, or pass another --model."):
        processor = AutoProcessor.from_pretrained(**source)
        tokenizer = processor.tokenizer
        tokenizer.decode(tokenizer(A_WORD)["input_ids"])
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    if tokenizer.chat_template is None:
        raise BadInputError(
            f"The processor of {run.model} has no chat template: pass a --model such as HuggingFaceTB/SmolVLM-Instruct."
        )
    if run.weights == "random":  # it makes one square of each picture, as large as the model reads
        config = checked_config(run)
        if not hasattr(config, "scale_factor"):
            raise BadInputError(f"random weights are not made for {config.model_type}: pass --model smolvlm-instruct.")
        side, patch = config.vision_config.image_size, config.vision_config.patch_size
        processor.image_seq_len = (side // patch // config.scale_factor) ** 2
        processor.image_processor.size = processor.image_processor.max_image_size = {"longest_edge": side}
    tokenizer.processor = processor
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer as plain Transformers loads it, with the processor beside it where there is one."""
    getattr(tokenizer, "processor", tokenizer).save_pretrained(folder)


def weight_dtype(run: RunConfig) -> torch.dtype:
    """Return the base's dtype: mixed precision trains fp32 weights, but weights that LoRA freezes may stay in fp16."""
    if run.precision == "fp16-mixed" and run.method.has_plain_adapters:
        return torch.float16
    return torch.bfloat16 if run.precision == "bf16" else torch.float32


def load_base_model(
    run: RunConfig,
    device_map: dict[str, str | int],
    source: str | Path | None = None,
    quantized: bool = True,
    each: EachModule | None = None,
    unread: Callable[[PreTrainedModel], None] | None = None,
    quantization: BitsAndBytesConfig | None = None,
) -> PreTrainedModel:
    """Load the base model (or the model in `source`, say a merged one) in the run's precision, placed by `device_map`.

    With qlora its layers are in 4 bits, by `quantization` or else the run's settings, unless `quantized` is False.

    `unread` is called with the model before its files are read. With `each` alone, or random weights, the model comes
    module by module: `each` is called with name and module as soon as that has all weights of its own, and may replace
    these. A module whose weights are tied to another's is left out, unless files have them twice.
    """
    quantized = quantized and run.method.quantizes and source is None
    if quantized and not each and any(map(has_fused_experts, model_without_weights(run).modules())):
        each = partial(quantize_experts, quantization or quantization_config(run))
    if run.weights == "random" and source is None:
        model = _random_model(run, device_map, quantized, each)
        return prepare_quantized(model) if quantized else model
    settings = {"quantization_config": quantization or quantization_config(run)} if quantized else {}
    kind = getattr(transformers, run.goal.auto_class)
    if each or unread:
        kind = model_class(run, any_shape_config(str(source or run.model), "" if source else run.model_revision))
    at_once = ending_with(kind, unread) if unread else kind
    with each_as_it_is_read(kind, each) if each and not unread else nullcontext(at_once) as kind:
        model = load_pretrained(kind, run, device_map, source, **settings)
    return prepare_quantized(model) if quantized else model


def load_pretrained(
    kind: type, run: RunConfig, device_map: dict[str, str | int], source: str | Path | None = None, **more: Any
) -> PreTrainedModel:
    """Load the run's base (or the model in `source`) with `kind`, a class of Transformers.

    `more` goes to `from_pretrained`. Random numbers that are drawn for weights that a checkpoint lacks do not count
    afterwards: one stage of a pipeline may draw them and others not, whose adapters would then start from other numbers
    than on one device.

    Raises:
        BadInputError: it cannot be loaded.
    """
    labels = {} if source else class_names(run)
    expected = LOADING_LOGGERS if run.goal.classifies else ()
    of_model = reading(f"The model {source or run.model}", "Correct its files, or pass another --model.", "loaded")
    with of_model, silent(*expected), forked_random_numbers(*device_map.values()):
        model, loading = kind.from_pretrained(
            **what_to_load(run, source),
            dtype=weight_dtype(run),
            attn_implementation=ATTENTION[run.attention],
            device_map=device_map,
            output_loading_info=True,
            ignore_mismatched_sizes=bool(labels),  # a head for other labels is started anew
            **labels,
            **more,
        )
    if labels:
        start_head(model, loading, run.seed)
    return model.eval()


def class_names(run: RunConfig) -> dict[str, object]:
    """Return the labels of the run's data, as a model's config has them; with other tasks there are none."""
    if not run.goal.classifies:
        return {}
    names = dict(enumerate(label_names_of(run)))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: number for number, name in names.items()}}


def start_head(model: PreTrainedModel, loading: dict[str, Any], seed: int) -> None:
    """Give weights that a checkpoint lacks their start: the same on every rank, and with any number of ranks.

    Matrices are normal with the config's `initializer_range`, as the models' own start (Devlin et al. 2019). Vectors
    are as Transformers has started them: biases are zero, and scales of norms one.
    """
    generator = torch.Generator().manual_seed(seed)
    for name in sorted([*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])]):
        weight = model.get_parameter(name)
        if weight.ndim > 1:
            start = torch.empty(weight.shape).normal_(0, model.config.initializer_range, generator=generator)
            with torch.no_grad():
                weight.copy_(start)


def model_class(run: RunConfig, config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a run's model: with classification the library's classifier on its layers, else its own."""
    if run.goal.classifies:
        return getattr(transformers, run.goal.auto_class)._model_mapping[type(config)]
    name = next(iter(config.architectures or ()), "")
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise BadInputError(f"architectures of {run.model} begins with {name!r}, no model of Transformers. {PUBLISHED}")
    return kind


def checked_config(run: RunConfig) -> PretrainedConfig:
    """Return the architecture of the run's model, if it can do the run's task, with as many tokens as asked for."""
    is_here = run.weights == "random" or run.model == MINILM  # nothing of it is to be fetched
    model = run.model if is_here else check_model(run.model, run.model_revision)
    config = any_shape_config(model, run.model_revision)
    refuse_quantized(run.model, {**vars(config), "text_config": vars(config.get_text_config())})
    is_of_kind, refusal = MODEL_KINDS[run.goal.model_kind]
    if not is_of_kind(config):
        raise BadInputError(f"{run.model} is of the kind {config.model_type}, {refusal}.")
    longest = longest_readable(config)
    for name in run.goal.limited:
        if longest and getattr(run, name) > longest:
            raise BadInputError(
                f"{name} is {getattr(run, name)}, but {run.model} has positions for {longest} tokens: pass --{name} "
                f"{longest} or less."
            )
    return config


def longest_readable(config: PretrainedConfig) -> int | None:
    """Return how many tokens a model can read at once, or None if there is no limit."""
    texts = config.get_text_config()
    positions, ropes = (getattr(texts, name, None) for name in ("max_position_embeddings", "rope_parameters"))
    return reach_of_positions(config.model_type, positions, ropes) if positions else None


def any_shape_config(model: str, revision: str = "") -> PretrainedConfig:
    """Return the architecture of `model`: a config.json, a folder with one, or what `find_config` finds."""
    path = find_config(model, revision)
    read_config(path, model)
    with reading(f"{path.name} of {model}", PUBLISHED):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        vars(config.get_text_config())  # of some kinds it stands in a part, which may be none
    config._attn_implementation = None  # a file may name a kernel of the Hub, which is code: each run names its own
    return config


def model_without_weights(run: RunConfig) -> PreTrainedModel:
    """Return the run's model on `meta`: names and shapes."""
    config = any_shape_config(run.model, run.model_revision)
    with reading(f"The model of config.json of {run.model}", PUBLISHED, "built"), torch.device("meta"):
        model = model_class(run, config)._from_config(config, dtype=weight_dtype(run))
        model.tie_weights()
    return model


def _random_model(
    run: RunConfig, device_map: dict[str, str | int], quantized: bool, each: EachModule | None
) -> PreTrainedModel:
    """Make a model of `run.model`'s shape on its device, or on the host for several; the same weights each time."""
    tokenizer, config = load_tokenizer(run), checked_config(run)
    config.update(class_names(run))
    texts = config.get_text_config() if run.goal.sees else config
    texts.pad_token_id, texts.eos_token_id, texts.bos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id, None
    if run.goal.sees:
        config.image_token_id = tokenizer.processor.image_token_id
    if config.is_encoder_decoder:
        config.decoder_start_token_id, config.forced_bos_token_id = tokenizer.eos_token_id, None
    config.name_or_path = ""  # else PEFT looks for a whole model where the shape came from
    kind, dtype = getattr(transformers, run.goal.auto_class), weight_dtype(run)
    how = {"dtype": dtype, "attn_implementation": ATTENTION[run.attention], "trust_remote_code": False}
    with init_empty_weights(include_buffers=False):
        model = kind.from_config(config, **how)
    quantizer = AutoHfQuantizer.from_config(quantization_config(run), pre_quantized=False) if quantized else None
    if quantizer:
        quantizer.preprocess_model(model=model, device_map=device_map)
    draw_weights(model, run.seed, device_map.get("", "cpu"), each)
    if quantizer:
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    return model.eval() if "" in device_map else dispatch_model(model.eval(), device_map)


@contextmanager
def waiting_on_host(model: PreTrainedModel) -> Iterator[None]:
    """Keep a model that is whole on one GPU in the host's memory meanwhile; any other, or a freed one, stays."""
    devices = {weight.device for weight in model.parameters()}
    moves = len(devices) == 1 and not {"cpu", "meta"} & {device.type for device in devices}
    if moves:
        model.to("cpu")
    yield
    if moves:
        model.to(devices.pop())
