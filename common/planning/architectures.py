"""What a model's config.json says about its size: layers, their linear projections, and parameters by part.

Reads the file alone: no torch, no weights, no network. A family of models is one entry in `FAMILIES`, at the end.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common.base.errors import BadInputError, NotPlannedError, begin_of, reading
from common.base.paths import REPOSITORY, find_here

MODEL_CONFIGS = REPOSITORY / "assets" / "model_configs"
SPLIT = 4
"""Squares along an edge of a picture that a processor cuts, beside the whole one: its longest edge is 4 of them.

(transformers/models/idefics3/image_processing_idefics3.py; SmolVLM's has 1536 pixels.)
"""
COUNTED_FROM_PADDING = (
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Kinds whose positions begin behind their padding token's: two are never taken."""
COLOURS = 3
"""Channels of a pixel where the config.json does not say."""
POSITIVE_KEYS = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "type_vocab_size"),
    *("d_model", "encoder_layers", "encoder_ffn_dim", "encoder_attention_heads"),
    *("decoder_layers", "decoder_ffn_dim", "decoder_attention_heads"),
    *("image_size", "patch_size", "num_channels", "scale_factor"),
}


COUNTED = {re.compile(r"(^|_)layers?$|^depth$"): 1_000, re.compile(r"^num_labels$"): 10**6}
"""Keys of which libraries make as many parts, and the most that any model has: a million layers, by a slip in its
config.json, take minutes even without weights."""
LARGEST_SIZE = 2**31 - 1
PUBLISHED = "Take the config.json as published, or pass another --model."


@dataclass(frozen=True)
class Linear:
    """One linear projection, of shape (outputs, inputs).

    Attributes:
        block: The part of the layer that it belongs to.
        ends_block: Its input is that block's own result, not the hidden state. Tensor parallelism divides the inputs of
            these projections among the ranks, and the outputs of the others.
        reads_encoder: Its input is the encoder's output, not the hidden state of its own layer.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    block: Literal["attention", "mlp"] = "attention"
    ends_block: bool = False
    reads_encoder: bool = False

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.outputs * (self.inputs + self.bias)

    def lora_parameters(self, rank: int) -> int:
        """Return how many parameters an adapter has: matrices of shape (rank, inputs) and (outputs, rank)."""
        return rank * (self.inputs + self.outputs)


@dataclass(frozen=True)
class Stack:
    """Layers of one kind, one after the other.

    Attributes:
        kind: Layers of a `cross-decoder` also attend to an encoder's output.
        linears: The projections of one layer.
        norm_parameters: Parameters of one layer's norms.
    """

    kind: Literal["decoder", "encoder", "cross-decoder"]
    layers: int
    linears: tuple[Linear, ...]
    norm_parameters: int

    @property
    def matrix_weights(self) -> int:
        """Weights of one layer's projections, without their biases."""
        return sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        return sum(linear.parameters for linear in self.linears) + self.norm_parameters


@dataclass(frozen=True)
class Architecture:
    """A model's dimensions, and its parameters by part.

    Attributes:
        max_length: Tokens that it can read; of a tower's encoder patches.
        embedding_parameters: Of the word embeddings alone.
        other_embedding_parameters: Of positions, token types, and the norms after them.
        final_parameters: Of what follows the last layer: final norm, and the head's parts besides its matrix.
        tied: The head's matrix is that of the word embeddings.
        classes: Labels that the head tells apart, and its `vocab`; 0 = it predicts tokens.
        tower: What makes tokens of pictures; None = it reads texts alone.
    """

    name: str
    model_type: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_length: int
    stacks: tuple[Stack, ...]
    embedding_parameters: int
    other_embedding_parameters: int
    final_parameters: int
    tied: bool
    dropout: float = 0.0
    classes: int = 0
    tower: "Tower | None" = None

    @property
    def family(self) -> "Family":
        """What it shares with all models of its type."""
        return FAMILIES.get(self.model_type) or TOWERS[self.model_type]

    @property
    def head_parameters(self) -> int:
        """Of the head's matrix, if it has one of its own."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return sum(self.by_part().values())

    @property
    def layers(self) -> int:
        """Of all stacks together."""
        return sum(stack.layers for stack in self.stacks)

    def by_part(self) -> dict[str, int]:
        """Return the parameters of embeddings, each kind of projection over all layers, norms, head, and tower."""
        parts = {"embeddings": self.embedding_parameters + self.other_embedding_parameters}
        for stack in self.stacks:
            for linear in stack.linears:
                parts[linear.name] = parts.get(linear.name, 0) + stack.layers * linear.parameters
        norms = sum(stack.layers * stack.norm_parameters for stack in self.stacks) + self.final_parameters
        return parts | {"norms": norms, "head": self.head_parameters} | (self.tower.by_part() if self.tower else {})

    @property
    def tower_parameters(self) -> int:
        """Of the vision tower and its connector; 0 without."""
        return sum(self.tower.by_part().values()) if self.tower else 0


@dataclass(frozen=True)
class Tower:
    """What makes tokens of pictures: an encoder, which reads the patches of a square, and a connector behind it.

    Attributes:
        encoder: It has no words: its embeddings are those of patches and of their places.
        tile: Width and height of the square, in pixels.
        channels: Of a pixel: its colours.
        connector: The projection that makes a token of some neighbouring patches.
    """

    encoder: Architecture
    tile: int
    channels: int
    connector: Linear

    @property
    def tokens(self) -> int:
        """Of a square, as the decoder reads it."""
        return self.encoder.max_length * self.encoder.hidden // self.connector.inputs

    def by_part(self) -> dict[str, int]:
        """Return the parameters of encoder and connector."""
        return {"vision tower": self.encoder.parameters, "connector": self.connector.parameters}


def find_config(model: str, revision: str = "") -> Path:
    """Find the config.json of `model`: a file, a folder, a Hub id in the cache, or a name in assets/model_configs.

    A Hub id that is not in the cache is found among these by its last part, with or without `-Instruct`:
    Qwen/Qwen2.5-7B-Instruct is qwen2.5-7b.
    With a `revision`, which may differ from what is published, only the cache is searched.

    Raises:
        BadInputError: It is none of these, or has a `revision` and is no Hub id.
    """
    if revision and not is_hub_id(model):
        refuse_revision(model, revision)
    if revision:
        if path := _cached_config(model, revision):
            return path
        raise BadInputError(
            f"There is no shape of {model} at the revision {revision} in the Hub's cache: `hf download {model} "
            f"config.json --revision {revision}` gets it."
        )
    path = next((place for place in _places_of_config(model) if place.is_file()), None)
    if path is None:
        known = ", ".join(sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))
        get = f"hf download {model if _looks_like_id(model) else 'ID'} config.json"
        raise BadInputError(
            f"There is no shape of {model}: pass --model with one of {known}, a config.json, a folder with one, or the "
            f"id of a model in the Hub's cache (`{get}` gets it)."
        )
    return path


def _places_of_config(model: str) -> Iterator[Path]:
    yield from filter(None, (find_here(place, os.path.isfile) for place in (model, Path(model) / "config.json")))
    if _looks_like_id(model) and (cached := _cached_configs(model)):  # its own, whatever is here under its name
        yield from (path for path in (_cached_config(model), *cached) if path)
    name = model.rpartition("/")[2].lower()
    yield from (MODEL_CONFIGS / f"{each}.json" for each in (name, name.removesuffix("-instruct")))


def refuse_revision(model: str, revision: str) -> None:
    """Refuse the revision of a model that is no Hub id; an empty one passes.

    Raises:
        BadInputError: with both.
    """
    if revision:
        raise BadInputError(
            f"model_revision is {revision!r}, but it is for models of the Hub, and {model} is not the id of "
            "one: leave --model_revision out."
        )


def is_hub_id(model: str) -> bool:
    """Return whether `model` is the id of a model on the Hub, as `owner/name`, and not a file or folder here."""
    return _looks_like_id(model) and find_here(model) is None


def cached_commit(model: str, revision: str = "") -> str | None:
    """Return the commit that a revision of a Hub id (its main branch by default) has in the cache.

    None where `model` is no Hub id, or that revision is not in the cache.
    """
    config = _cached_config(model, revision) if is_hub_id(model) else None
    return config.parent.name if config else None


# The Hub's library is imported where it is needed: it takes 0.2 s, and the models of the planner have shapes here.


def _looks_like_id(model: str) -> bool:
    if "/" not in model:  # models without an owner are under names of their own by now
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def _cached_config(model: str, revision: str = "") -> Path | None:
    """Return the config.json of a revision (the main branch by default) in the cache, in a folder called by its commit.

    None where the cache lacks it.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", constants.HF_HUB_CACHE, revision or None)
    return Path(found) if isinstance(found, str) else None


def _cached_configs(model: str) -> list[Path]:
    """Return the config.json of every commit in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=model, repo_type="model")
    return sorted(Path(constants.HF_HUB_CACHE, folder).glob("snapshots/*/config.json"))


def read_architecture(model: str, revision: str = "", classes: int = 0) -> Architecture:
    """Return the architecture of `model`, as `find_config` finds it; with `classes` with a classifier's head.

    Raises:
        BadInputError: There is no such config, it lacks a key, its weights are stored quantized, or it is no encoder
            and cannot classify.
        NotPlannedError: Its model_type is none of `FAMILIES`.
    """
    path = find_config(model, revision)
    config = read_config(path, model)
    if "model_type" not in config:
        raise BadInputError(f"{path.name} of {model} has no key model_type: pass the config.json of a model.")
    refuse_quantized(model, config)
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise NotPlannedError(
            f"The architecture {kind!r} of {model} is not known to the closed form, which knows {', '.join(FAMILIES)}."
        )
    for key, value in _values_in(config):
        is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE
        if key in POSITIVE_KEYS and value is not None and not is_whole:
            raise BadInputError(
                f"{key} in {path.name} of {model} is {begin_of(repr(value), 60)}, but must be a whole number above 0, "
                f"at most {LARGEST_SIZE:,}."
            )
    name = path.parent.name if path.name == "config.json" else path.stem
    if path.parent.parent.name == "snapshots":  # of the Hub's cache, whose folders are called by commits
        name = model.rpartition("/")[2]
    try:
        architecture = FAMILIES[kind].read(name, config)
    except KeyError as missing:
        raise BadInputError(
            f"{path.name} of {model} lacks the key {missing}: take the config.json as published."
        ) from None
    return as_classifier(architecture, classes) if classes else architecture


def read_config(path: Path, model: str) -> dict[str, Any]:
    """Return what the config.json of `model` holds, before any library makes something of it.

    Raises:
        BadInputError: It is no object of JSON, or has more layers or labels than any model.
    """
    with reading(f"{path.name} of {model}", PUBLISHED):
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    names = config.get("architectures") or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in [config.get("model_type", ""), *names])):
        raise BadInputError(
            f"model_type in {path.name} of {model} must be a text, and architectures a list of such. {PUBLISHED}"
        )
    for key, value in _values_in(config):
        most = next((count for keys, count in COUNTED.items() if keys.search(key)), math.inf)
        if isinstance(value, int) and value > most:
            raise BadInputError(
                f"{key} in {path.name} of {model} is {value:,}, but can be {most:,} at most. {PUBLISHED}"
            )
    return config


def _values_in(config: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield all values of a config with their names, those of its parts, such as a vision tower's, as well."""
    parts = [config]
    for part in parts:
        parts += (value for value in part.values() if isinstance(value, dict))
        yield from part.items()


def refuse_quantized(model: str, config: dict[str, Any]) -> None:
    """Refuse a model that is published in a quantized form, by its config.json.

    Libraries load some of these forms, and train adapters beside them, but such a base cannot take a merge.

    Raises:
        BadInputError: with the method, and what to pass instead.
    """
    parts = (config, config.get("text_config"))
    stored = next(filter(None, (part.get("quantization_config") for part in parts if isinstance(part, dict))), None)
    if not stored:
        return
    facts = stored if isinstance(stored, dict) else {}
    bits = facts.get("bits") or (4 if facts.get("load_in_4bit") else 8 if facts.get("load_in_8bit") else None)
    method = f"{facts.get('quant_method', 'an unknown method')}{f', {bits} bits' if bits else ''}"
    raise BadInputError(
        f"The weights of {model} are stored quantized ({method}, by quantization_config in its config.json), and "
        "adapters could not be merged into them, nor they be trained: pass --model with the model that it was made "
        "from (its page on the Hub names that); --technique qlora (2.3) stores that one in 4 bits while it trains."
    )


def reach_of_positions(kind: str, positions: int, rope: Any = None) -> int:
    """Return how many tokens the positions of a kind of model reach; rotary ones may be stretched by a factor.

    `rope`: what its config has as `rope_parameters`, or as `rope_scaling` in older ones; of some models one for each
    kind of layer.
    """
    positions -= 2 * (kind in COUNTED_FROM_PADDING)
    if not isinstance(rope, Mapping):
        return positions
    kinds = [each for each in rope.values() if isinstance(each, Mapping)] or [rope]
    stretched = [
        int(each["factor"] * (each.get("original_max_position_embeddings") or positions))
        for each in kinds
        if each.get("factor")
    ]
    return max([positions, *stretched])


def usual_tiles(model: str, revision: str = "") -> int:
    """Return how many squares a square picture becomes, as the processor beside the model's config.json cuts it.

    Where there is none, as many as with the published models of Idefics3's kind: `SPLIT` times `SPLIT`, and the whole.
    """
    folder = find_config(model, revision).parent
    files = [folder / name for name in ("processor_config.json", "preprocessor_config.json")]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        return SPLIT**2 + 1
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings = settings.get("image_processor", settings)
    if not settings.get("do_image_splitting", True):
        return 1
    side = -(-settings["size"]["longest_edge"] // settings["max_image_size"]["longest_edge"])
    return side**2 + 1 if side > 1 else 1


def is_known_architecture(model: str, revision: str = "") -> bool:
    """Return whether the closed form knows `model`.

    Raises:
        BadInputError: There is no such config, or it lacks a key.
    """
    try:
        read_architecture(model, revision)
    except NotPlannedError:
        return False
    return True


def as_classifier(architecture: Architecture, classes: int) -> Architecture:
    """Return the encoder with a head for one of `classes` labels per text: a dense layer, tanh, the labels' matrix.

    BERT calls the dense layer its pooler, RoBERTa a part of its classifier (`*ForSequenceClassification`).

    Raises:
        NotPlannedError: It is no encoder.
    """
    if not architecture.family.classifier:
        raise NotPlannedError(
            f"{architecture.name} is of kind {architecture.model_type}, but classifiers are planned for encoders "
            "(BERT, RoBERTa) alone: pass --model roberta-large or another of them."
        )
    final = architecture.hidden * (architecture.hidden + 1) + classes  # dense, and the labels' biases
    return replace(architecture, vocab=classes, classes=classes, tied=False, final_parameters=final)


def slice_of_rank(architecture: Architecture, ranks: int) -> Architecture:
    """Return what each of `ranks` ranks holds with tensor parallelism (Shoeybi et al. 2019, "Megatron-LM", section 3).

    The layers' matrices are divided; embeddings, norms, head, and the biases of sums over ranks are whole.

    Raises:
        NotPlannedError: It is no encoder.
        BadInputError: Heads or the MLP's size cannot be divided evenly.
    """
    if not architecture.family.classifier:
        raise NotPlannedError(
            "--parallel tp is planned for encoders (BERT, RoBERTa) alone: pass --parallel ddp, fsdp or pp."
        )
    for size, what in ((architecture.heads, "attention heads"), (architecture.intermediate, "columns in its MLP")):
        if size % ranks:
            raise BadInputError(
                f"{architecture.name} has {size:,} {what}, which {ranks} ranks of tensor parallel cannot share evenly: "
                "take a number of devices that divides them."
            )

    def sliced(linear: Linear) -> Linear:
        side = "inputs" if linear.ends_block else "outputs"
        return replace(linear, **{side: getattr(linear, side) // ranks})

    return replace(
        architecture,
        intermediate=architecture.intermediate // ranks,
        heads=architecture.heads // ranks,
        kv_heads=architecture.kv_heads // ranks,
        stacks=tuple(
            replace(stack, linears=tuple(sliced(linear) for linear in stack.linears)) for stack in architecture.stacks
        ),
    )


@dataclass(frozen=True)
class Family:
    """What models with the same `model_type` in their config.json have in common.

    Attributes:
        read: Makes the architecture from a name and the contents of a config.json.
        is_llama_like: Norms come before attention and MLP, the MLP has a gate, positions are rotary. Otherwise layers
            end with a norm, as in BERT and BART.
        attention_bias: The biases of queries, keys and values where the config.json does not say.
        normalizes_queries: Queries and keys have norms of their own.
        has_pooler: A classifier reads the last hidden state's first token through a pooler, without dropout before it.
        embeddings, layers, heads: Names of modules, for device maps: the embeddings, the list of layers, and what
            follows them in a model that predicts tokens.
        classifier: What follows the layers in a model that classifies; empty = classifiers are not planned.
    """

    read: Callable[[str, dict[str, Any]], Architecture]
    is_llama_like: bool = True
    attention_bias: bool = False
    normalizes_queries: bool = False
    has_pooler: bool = False
    embeddings: str = "model.embed_tokens"
    layers: str = "model.layers"
    heads: tuple[str, ...] = ("lm_head",)
    classifier: tuple[str, ...] = ()


def _llama_like(name: str, config: dict[str, Any]) -> Architecture:
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    wide, queries, keys = config["intermediate_size"], heads * head_dim, kv_heads * head_dim
    biased = config.get("attention_bias", FAMILIES[kind].attention_bias)
    mlp_biased = config.get("mlp_bias", False)
    linears = (
        Linear("q_proj", hidden, queries, biased),
        Linear("k_proj", hidden, keys, biased),
        Linear("v_proj", hidden, keys, biased),
        Linear("o_proj", queries, hidden, config.get("attention_bias", False), ends_block=True),
        Linear("gate_proj", hidden, wide, mlp_biased, "mlp"),
        Linear("up_proj", hidden, wide, mlp_biased, "mlp"),
        Linear("down_proj", wide, hidden, mlp_biased, "mlp", ends_block=True),
    )
    norms = 2 * hidden + (2 * head_dim if FAMILIES[kind].normalizes_queries else 0)
    return Architecture(
        name=name,
        model_type=kind,
        hidden=hidden,
        intermediate=wide,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        max_length=reach_of_positions(
            kind, config["max_position_embeddings"], config.get("rope_parameters") or config.get("rope_scaling")
        ),
        stacks=(Stack("decoder", config["num_hidden_layers"], linears, norms),),
        embedding_parameters=config["vocab_size"] * hidden,
        other_embedding_parameters=0,
        final_parameters=hidden,
        tied=config.get("tie_word_embeddings", False),
    )


def _bert_like(name: str, config: dict[str, Any]) -> Architecture:
    kind, hidden, wide = config["model_type"], config["hidden_size"], config["intermediate_size"]
    linears = (
        *(Linear(part, hidden, hidden, True) for part in ("query", "key", "value")),
        Linear("attention.output.dense", hidden, hidden, True, ends_block=True),
        Linear("intermediate.dense", hidden, wide, True, "mlp"),
        Linear("output.dense", wide, hidden, True, "mlp", ends_block=True),
    )
    return Architecture(
        name=name,
        model_type=kind,
        hidden=hidden,
        intermediate=wide,
        heads=config["num_attention_heads"],
        kv_heads=config["num_attention_heads"],
        head_dim=hidden // config["num_attention_heads"],
        vocab=config["vocab_size"],
        max_length=reach_of_positions(kind, config["max_position_embeddings"]),
        stacks=(Stack("encoder", config["num_hidden_layers"], linears, 4 * hidden),),
        embedding_parameters=config["vocab_size"] * hidden,
        other_embedding_parameters=(config["max_position_embeddings"] + config["type_vocab_size"] + 2) * hidden,
        final_parameters=hidden * (hidden + 1) + 2 * hidden + config["vocab_size"],  # dense, norm, the head's bias
        tied=config.get("tie_word_embeddings", True),
        dropout=config.get("hidden_dropout_prob", 0.1),
    )


def _bart(name: str, config: dict[str, Any]) -> Architecture:
    hidden, vocab, positions = config["d_model"], config["vocab_size"], config["max_position_embeddings"]
    attention = [Linear(part, hidden, hidden, True) for part in ("q_proj", "k_proj", "v_proj")]
    attention.append(Linear("out_proj", hidden, hidden, True, ends_block=True))
    cross_attention = [replace(linear, reads_encoder=linear.name in ("k_proj", "v_proj")) for linear in attention]

    def stack(kind: Literal["encoder", "cross-decoder"], side: str, attentions: list[Linear]) -> Stack:
        wide, norms = config[f"{side}_ffn_dim"], len(attentions) // len(attention) + 1
        mlp = Linear("fc1", hidden, wide, True, "mlp"), Linear("fc2", wide, hidden, True, "mlp", ends_block=True)
        return Stack(kind, config[f"{side}_layers"], (*attentions, *mlp), 2 * hidden * norms)

    return Architecture(
        name=name,
        model_type="bart",
        hidden=hidden,
        intermediate=config["decoder_ffn_dim"],
        heads=config["decoder_attention_heads"],
        kv_heads=config["decoder_attention_heads"],
        head_dim=hidden // config["decoder_attention_heads"],
        vocab=vocab,
        max_length=positions,
        stacks=(stack("encoder", "encoder", attention), stack("cross-decoder", "decoder", attention + cross_attention)),
        embedding_parameters=vocab * hidden,
        other_embedding_parameters=2 * ((positions + 2) * hidden + 2 * hidden),  # BART's positions start at 2
        final_parameters=0,
        tied=True,
        dropout=config.get("dropout", 0.1),
    )


def _with_tower(name: str, config: dict[str, Any]) -> Architecture:
    text, vision = config["text_config"], config["vision_config"]
    tied = text.get("tie_word_embeddings", False) or config.get("tie_word_embeddings", False)
    decoder = _llama_like(name, {"model_type": "llama", **text, "tie_word_embeddings": tied})
    encoder = _tower_encoder(name, {**vision, "model_type": f"{config['model_type']}_vision"})
    merged = config["scale_factor"] ** 2
    connector = Linear("connector", encoder.hidden * merged, decoder.hidden)
    tower = Tower(encoder, vision["image_size"], vision.get("num_channels", COLOURS), connector)
    return replace(decoder, model_type=config["model_type"], tower=tower)


def _tower_encoder(name: str, config: dict[str, Any]) -> Architecture:
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    patches = (config["image_size"] // config["patch_size"]) ** 2
    numbers = config.get("num_channels", COLOURS) * config["patch_size"] ** 2
    linears = (
        *(Linear(part, hidden, hidden, True) for part in ("q_proj", "k_proj", "v_proj")),
        Linear("out_proj", hidden, hidden, True, ends_block=True),
        Linear("fc1", hidden, wide, True, "mlp"),
        Linear("fc2", wide, hidden, True, "mlp", ends_block=True),
    )
    return Architecture(
        name=f"{name}'s vision tower",
        model_type=config["model_type"],
        hidden=hidden,
        intermediate=wide,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=0,
        max_length=patches,
        stacks=(Stack("encoder", config["num_hidden_layers"], linears, 4 * hidden),),
        embedding_parameters=0,
        other_embedding_parameters=(numbers + 1 + patches) * hidden,
        final_parameters=2 * hidden,
        tied=True,
    )


_ROBERTA = Family(
    _bert_like, False, embeddings="roberta.embeddings", layers="roberta.encoder.layer",
    classifier=("classifier",),
)  # fmt: skip
FAMILIES = {
    "llama": Family(_llama_like),
    "mistral": Family(_llama_like),
    "qwen2": Family(_llama_like, attention_bias=True),
    "qwen3": Family(_llama_like, normalizes_queries=True),
    "bert": Family(
        _bert_like, False, has_pooler=True, embeddings="bert.embeddings", layers="bert.encoder.layer",
        heads=("cls",), classifier=("bert.pooler", "classifier"),
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "bart": Family(_bart, False),
    "idefics3": Family(_with_tower),
    "smolvlm": Family(_with_tower),
}  # fmt: skip
TOWERS = {f"{kind}_vision": Family(_tower_encoder, False) for kind in ("idefics3", "smolvlm")}
"""Parts of other models, which cannot be planned alone; their layers are as BERT's, but start with the norms."""
