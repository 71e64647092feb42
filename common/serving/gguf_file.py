"""Write a tuned model as a GGUF file, which llama.cpp, Ollama and LM Studio run, and a Modelfile for Ollama.

llama.cpp goes by names: that of the family says how it computes, that of the pre-tokenizer how a text is divided before
its byte pairs are merged. What is not listed here is refused, as llama.cpp would load it and answer wrongly.
"""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.base.errors import BadInputError, check_installed, reading
from common.data.answer_ends import saved_stops
from common.data.templates import begins_by_itself
from common.models.loading import any_shape_config, read_tokenizer
from common.planning.serving_plan import GGUF_FAMILIES

if TYPE_CHECKING:
    from gguf import GGUFWriter

# whose rotary embeddings turn neighbouring features in llama.cpp, in Transformers those of a head's two halves
INTERLEAVED = ("llama",)
BEGINS, WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's names (src/llama-vocab.cpp), by the regular expression in a tokenizer.json
PRE_TOKENIZERS = {
    "": "gpt-2",  # ByteLevel's own expression
    f"{BEGINS}{WORDS}{SPACES}": "qwen2",
    f"{BEGINS}{{1,3}}{WORDS}{SPACES}": "llama-bpe",
}
WEIGHT_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}  # by our names: `gguf.LlamaFileType`
MODELFILE = "Modelfile"
OLLAMA = "0.30.0"  # the first that renders a file's own chat template (server/images.go: `HasChatTemplate`)
OTHERWISE = "use convert_hf_to_gguf.py of llama.cpp on the folder that --to merged makes."


def export_gguf(folder: Path, file: Path, weight_type: str) -> Path:
    """Write the model and tokenizer in `folder` as one GGUF file; say what ends answers and the file cannot hold."""
    written = _write_gguf(folder, file, weight_type)
    for text in saved_stops(folder, read_tokenizer(folder)).texts:
        print(f"note: answers end with {text!r}, which no GGUF file holds: pass it as a stop with each request")
    return written


def export_ollama(model: Path, folder: Path, weight_type: str) -> Path:
    """Write `model` into a new folder for `ollama create`; its Modelfile leaves the template to the GGUF file."""
    tokenizer, name = read_tokenizer(model), f"model-{weight_type}.gguf"
    stops = saved_stops(model, tokenizer)
    stop_texts = filter(None, [*(tokenizer.decode([number]) for number in stops.token_ids), *stops.texts])
    lines = [
        f"FROM ./{name}",
        f"REQUIRES {OLLAMA}",
        *(f"PARAMETER stop {_modelfile_text(text)}" for text in stop_texts),
        "# as the answers of the run's scores: the likeliest token each time, whether it was said before or not",
        "PARAMETER temperature 0",
        "PARAMETER repeat_penalty 1",
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder.parent) as aside:
        made = _write_gguf(model, Path(aside) / folder.name / name, weight_type).parent
        (made / MODELFILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return made.rename(folder)


def _modelfile_text(text: str) -> str:
    # a value ends at the first triple quote before a line break
    if '"""' in text or not text.isprintable():
        raise BadInputError(f"Answers end with {text!r}, whose characters no Modelfile can hold: use --to gguf.")
    return f'"""{text}"""'


def _write_gguf(folder: Path, file: Path, weight_type: str) -> Path:
    """Write the model and tokenizer in `folder` as one GGUF file, where llama.cpp would compute the same; return it."""
    check_installed("gguf", f"{file.name} is to be written", "`python3 install.py gguf`")
    if os.path.lexists(file):
        raise BadInputError(f"{file} exists already: name another --output.")
    from gguf import GGUFWriter, LlamaFileType  # here: an extra

    config, tokenizer = any_shape_config(str(folder)), read_tokenizer(folder)
    _check_family(config)
    pre_tokenizer = check_tokenizer(tokenizer)
    unfinished = file.with_name(f".{file.name}.{uuid4().hex}")
    writer = GGUFWriter(unfinished, config.model_type, use_temp_file=True)  # else it holds all weights until the end
    writer.add_name("tuned")
    writer.add_file_type(LlamaFileType[WEIGHT_TYPES[weight_type]])
    _add_shape(writer, config)
    writer.add_tokenizer_pre(pre_tokenizer)
    _add_tokenizer(writer, folder, tokenizer, config.vocab_size)
    how = {"dtype": "auto", "attn_implementation": "eager", "trust_remote_code": False}
    with reading(f"The model {folder}", "Repeat the run.", "loaded"):
        model = AutoModelForCausalLM.from_pretrained(folder, **how)
    _add_weights(writer, model, weight_type)
    file.parent.mkdir(parents=True, exist_ok=True)  # now that nothing is refused any more
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file(progress=True)
        writer.close()
        return unfinished.rename(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _check_family(config: PretrainedConfig) -> None:
    if config.model_type not in GGUF_FAMILIES:
        raise BadInputError(
            f"Models of the kind {config.model_type} are not written as GGUF here ({', '.join(GGUF_FAMILIES)} are): "
            f"{OTHERWISE}"
        )
    rope = config.rope_parameters["rope_type"]
    window = getattr(config, "sliding_window", None)
    for what, value in (("scaled rotary embeddings", "" if rope == "default" else rope), ("a sliding window", window)):
        if value:
            raise BadInputError(f"The model has {what} ({value}), which is not written as GGUF here: {OTHERWISE}")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return llama.cpp's name for how a tokenizer divides a text before it merges byte pairs, or refuse it."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    step = state["pre_tokenizer"] or {}
    steps = step.get("pretokenizers", [step])
    kinds = [each.get("type") for each in steps]
    expressions = [each["pattern"].get("Regex") for each in steps if each.get("type") == "Split"]
    by_itself = kinds == ["ByteLevel"] and steps[0]["use_regex"]
    expression = "" if by_itself else expressions[0] if kinds == ["Split", "ByteLevel"] else None
    if state["model"]["type"] != "BPE" or expression not in PRE_TOKENIZERS:
        raise BadInputError(
            f"The tokenizer is {state['model']['type']} and divides texts by {' and '.join(map(str, kinds))}"
            f"{f' ({expressions[0]})' if expressions else ''}, for which no name in llama.cpp is known here (there are "
            f"{', '.join(PRE_TOKENIZERS.values())}): {OTHERWISE}"
        )
    return PRE_TOKENIZERS[expression]


def _add_shape(writer: "GGUFWriter", config: PretrainedConfig) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: "GGUFWriter", folder: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Add tokens, merges, special tokens and chat templates; embeddings without a token get a name of their own."""
    from gguf import SpecialVocab, TokenType

    names = {number: name for name, number in tokenizer.get_vocab().items()}
    types = dict.fromkeys(names, TokenType.NORMAL)
    for number, token in tokenizer.added_tokens_decoder.items():
        types[number] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    numbers = range(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in numbers])
    writer.add_token_types([types.get(number, TokenType.UNUSED) for number in numbers])
    vocabulary = SpecialVocab(folder, load_merges=True, special_token_types=())
    # llama.cpp stops at the ends of a text, a turn and a message alike, but at no text
    ends = zip(("eos", "eot", "eom"), saved_stops(folder, tokenizer).token_ids, strict=False)
    special = {"bos": tokenizer.bos_token_id, "pad": tokenizer.pad_token_id, **dict(ends)}
    vocabulary.special_token_ids = {kind: number for kind, number in special.items() if number is not None}
    vocabulary.add_special_token = {"bos": begins_by_itself(tokenizer)}
    templates = tokenizer.chat_template
    named = templates.items() if isinstance(templates, dict) else [("default", templates)]
    vocabulary.chat_template = [{"name": name, "template": without_marks(each)} for name, each in named]
    vocabulary.add_to_gguf(writer, quiet=True)


def without_marks(template: str) -> str:
    """Return a chat template without `{% generation %}`, which only Transformers knows; comments keep its spaces."""
    return re.sub(r"{%(-?)\s*(?:end)?generation\s*(-?)%}", r"{#\1 \2#}", template)


def _add_weights(writer: "GGUFWriter", model: PreTrainedModel, weight_type: str) -> None:
    """Add every weight under llama.cpp's name, vectors in fp32, but for a head that is the embeddings."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map, quantize

    config = model.config
    architecture = next(key for key in MODEL_ARCH if MODEL_ARCH_NAMES[key] == config.model_type)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise BadInputError(f"The model has the weight {name}, which llama.cpp does not know: use --to merged.")
        stored = GGMLQuantizationType[weight_type.upper() if weight.ndim > 1 else "F32"]
        if stored is GGMLQuantizationType.Q8_0 and weight.shape[-1] % 32:
            raise BadInputError(
                f"Rows of {name} have {weight.shape[-1]} weights, and q8_0 stores 32 at once: pass --weight_type f16."
            )
        if config.model_type in INTERLEAVED and (projection := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if projection[1] == "q" else config.num_key_value_heads
            by_half = weight.reshape(heads, 2, -1, *weight.shape[1:])  # as `permute` in llama.cpp's conversion/llama.py
            weight = by_half.transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(known, quantize(weight.float().contiguous().numpy(), stored), raw_dtype=stored)
