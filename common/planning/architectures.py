"""What a model's config.json says of its size: layers, their linear projections, and parameters by part.

Reads the file alone: no torch, no weights, no network.
"""

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY

MODEL_CONFIGS = REPOSITORY / "assets" / "model_configs"
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
BERT_LIKE = ("bert", "roberta")
POSITIVE_KEYS = {
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("vocab_size", "max_position_embeddings", "type_vocab_size", "d_model", "encoder_layers", "decoder_layers"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads"),
}
KNOWN_TYPES = (*LLAMA_LIKE, *BERT_LIKE, "bart")
SPLIT_BY_COLUMNS = ("query", "key", "value", "intermediate.dense")
"""With tensor parallel each rank has some of an encoder layer's outputs of these, and of the others some inputs."""


class UnknownArchitectureError(BadInputError):
    """The closed form does not know a model's architecture; the dry run may."""


@dataclass(frozen=True)
class Linear:
    """One linear projection, of shape (outputs, inputs)."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    reads_encoder: bool = False
    """Its input is the encoder's output, not the hidden state of its own layer."""

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.outputs * (self.inputs + self.bias)

    def lora_parameters(self, rank: int) -> int:
        """Of an adapter's two matrices, (rank, inputs) and (outputs, rank)."""
        return rank * (self.inputs + self.outputs)


@dataclass(frozen=True)
class Stack:
    """Layers of one kind, one after the other."""

    kind: Literal["decoder", "encoder", "cross-decoder"]
    """`cross-decoder` layers also attend to an encoder's output."""
    layers: int
    linears: tuple[Linear, ...]
    """Of one layer."""
    norm_parameters: int
    """Of one layer."""

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        return sum(linear.parameters for linear in self.linears) + self.norm_parameters

    @property
    def parameters(self) -> int:
        """Of all layers."""
        return self.layers * self.layer_parameters


@dataclass(frozen=True)
class Architecture:
    """A model's dimensions, and its parameters by part."""

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
    """Of the word embeddings alone."""
    other_embedding_parameters: int
    """Of positions, token types, and the norms after them."""
    final_parameters: int
    """Of what follows the last layer: final norm, and the head's parts besides its matrix."""
    tied: bool
    """The head's matrix is that of the word embeddings."""
    dropout: float = 0.0
    classes: int = 0
    """Labels that the head tells apart, and its `vocab`; 0 = it predicts tokens."""

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

    @property
    def is_llama_like(self) -> bool:
        """Norm before, rotary positions, gated MLP, no biases but in q, k and v."""
        return self.model_type in LLAMA_LIKE

    def by_part(self) -> dict[str, int]:
        """Parameters of the embeddings, each kind of projection over all layers, the norms, and the head."""
        parts = {"embeddings": self.embedding_parameters + self.other_embedding_parameters}
        for stack in self.stacks:
            for linear in stack.linears:
                parts[linear.name] = parts.get(linear.name, 0) + stack.layers * linear.parameters
        parts["norms"] = sum(stack.layers * stack.norm_parameters for stack in self.stacks) + self.final_parameters
        parts["head"] = self.head_parameters
        return parts


def find_config(model: str) -> Path:
    """The config.json of `model`: a file, a folder with one, a Hub id in the cache, or a name of assets/model_configs.

    A Hub id is also found among these by its last part without `-Instruct`: Qwen/Qwen2.5-7B-Instruct is qwen2.5-7b.

    Raises:
        BadInputError: none of these.
    """
    name = re.sub("-instruct$", "", model.rpartition("/")[2].lower())
    here = [Path(model).expanduser(), REPOSITORY / model]
    places = [*here, *(place / "config.json" for place in here), MODEL_CONFIGS / f"{name}.json", *_cached(model)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        known = ", ".join(sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))
        hub_id = model if model.count("/") == 1 and not model.startswith((".", "/", "~")) else "ID"
        raise BadInputError(
            f"There is no shape of {model}: pass --model with one of {known}, a config.json, a folder with one, or the "
            f"id of a model in the Hub's cache (`hf download {hub_id} config.json` gets it)."
        )
    return path


def _cached(model: str) -> list[Path]:
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        return []
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return sorted(cache.glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"))


def read_architecture(model: str) -> Architecture:
    """The architecture of `model`, as `find_config` finds it.

    Raises:
        BadInputError: there is no such config, or it lacks a key.
        UnknownArchitectureError: its kind is none of `KNOWN_TYPES`.
    """
    path = find_config(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path.name} of {model} is not JSON ({error}): pass the config.json of a model.") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise BadInputError(f"{path.name} of {model} has no key model_type: pass the config.json of a model.")
    kind = config["model_type"]
    if kind not in KNOWN_TYPES:
        raise UnknownArchitectureError(
            f"The architecture {kind!r} of {model} is not known to the closed form, which knows "
            f"{', '.join(KNOWN_TYPES)}."
        )
    for key, value in config.items():
        if key in POSITIVE_KEYS and not (isinstance(value, int) and value > 0) and value is not None:
            raise BadInputError(f"{key} in {path.name} of {model} is {value!r}, but must be a whole number above 0.")
    name = path.parent.name if path.name == "config.json" else path.stem
    try:
        return (_bart if kind == "bart" else _bert_like if kind in BERT_LIKE else _llama_like)(name, config)
    except KeyError as missing:
        raise BadInputError(
            f"{path.name} of {model} lacks the key {missing}: take the config.json as published."
        ) from None


def as_classifier(architecture: Architecture, classes: int) -> Architecture:
    """The same encoder with a head for one of `classes` labels per text: a dense layer, tanh, and the labels' matrix.

    BERT calls the dense layer its pooler, RoBERTa a part of its classifier (`*ForSequenceClassification`).

    Raises:
        BadInputError: it is no encoder.
    """
    if architecture.model_type not in BERT_LIKE:
        raise BadInputError(
            f"{architecture.name} is of kind {architecture.model_type}, but classifiers are planned for encoders "
            "(BERT, RoBERTa) alone: pass --model roberta-large or another of them."
        )
    final = architecture.hidden * (architecture.hidden + 1) + classes  # dense, and the labels' biases
    return replace(architecture, vocab=classes, classes=classes, tied=False, final_parameters=final)


def slice_of_rank(architecture: Architecture, ranks: int) -> Architecture:
    """What each of `ranks` ranks has with tensor parallel (Shoeybi et al. 2019, "Megatron-LM", section 3).

    The layers' matrices are divided; embeddings, norms, head, and the biases of sums over ranks are whole.

    Raises:
        BadInputError: it is no encoder, or heads or the MLP's size cannot be divided evenly.
    """
    if architecture.model_type not in BERT_LIKE:
        raise BadInputError(
            "--parallel tp is planned for encoders (BERT, RoBERTa) alone: pass --parallel ddp, fsdp or pp."
        )
    for size, what in ((architecture.heads, "attention heads"), (architecture.intermediate, "columns in its MLP")):
        if size % ranks:
            raise BadInputError(
                f"{architecture.name} has {size:,} {what}, which {ranks} ranks of tensor parallel cannot share evenly: "
                "take a number of devices that divides them."
            )
    stacks = tuple(
        replace(stack, linears=tuple(_slice_of_linear(linear, ranks) for linear in stack.linears))
        for stack in architecture.stacks
    )
    return replace(
        architecture,
        intermediate=architecture.intermediate // ranks,
        heads=architecture.heads // ranks,
        kv_heads=architecture.kv_heads // ranks,
        stacks=stacks,
    )


def _slice_of_linear(linear: Linear, ranks: int) -> Linear:
    if linear.name in SPLIT_BY_COLUMNS:
        return replace(linear, outputs=linear.outputs // ranks)
    return replace(linear, inputs=linear.inputs // ranks)


def _llama_like(name: str, config: dict[str, Any]) -> Architecture:
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    wide, queries, keys = config["intermediate_size"], heads * head_dim, kv_heads * head_dim
    biased, out_biased = config.get("attention_bias", kind == "qwen2"), config.get("attention_bias", False)
    mlp_biased = config.get("mlp_bias", False)
    linears = (
        Linear("q_proj", hidden, queries, biased),
        Linear("k_proj", hidden, keys, biased),
        Linear("v_proj", hidden, keys, biased),
        Linear("o_proj", queries, hidden, out_biased),
        Linear("gate_proj", hidden, wide, mlp_biased),
        Linear("up_proj", hidden, wide, mlp_biased),
        Linear("down_proj", wide, hidden, mlp_biased),
    )
    norms = 2 * hidden + (2 * head_dim if kind == "qwen3" else 0)
    return Architecture(
        name=name,
        model_type=kind,
        hidden=hidden,
        intermediate=wide,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        max_length=config["max_position_embeddings"],
        stacks=(Stack("decoder", config["num_hidden_layers"], linears, norms),),
        embedding_parameters=config["vocab_size"] * hidden,
        other_embedding_parameters=0,
        final_parameters=hidden,
        tied=config.get("tie_word_embeddings", False),
    )


def _bert_like(name: str, config: dict[str, Any]) -> Architecture:
    kind, hidden, wide = config["model_type"], config["hidden_size"], config["intermediate_size"]
    attention = [Linear(part, hidden, hidden, True) for part in ("query", "key", "value", "attention.output.dense")]
    mlp = [Linear("intermediate.dense", hidden, wide, True), Linear("output.dense", wide, hidden, True)]
    return Architecture(
        name=name,
        model_type=kind,
        hidden=hidden,
        intermediate=wide,
        heads=config["num_attention_heads"],
        kv_heads=config["num_attention_heads"],
        head_dim=hidden // config["num_attention_heads"],
        vocab=config["vocab_size"],
        max_length=config["max_position_embeddings"] - (2 if kind == "roberta" else 0),
        stacks=(Stack("encoder", config["num_hidden_layers"], (*attention, *mlp), 4 * hidden),),
        embedding_parameters=config["vocab_size"] * hidden,
        other_embedding_parameters=(config["max_position_embeddings"] + config["type_vocab_size"] + 2) * hidden,
        final_parameters=hidden * (hidden + 1) + 2 * hidden + config["vocab_size"],  # dense, norm, the head's bias
        tied=config.get("tie_word_embeddings", True),
        dropout=config.get("hidden_dropout_prob", 0.1),
    )


def _bart(name: str, config: dict[str, Any]) -> Architecture:
    hidden, vocab, positions = config["d_model"], config["vocab_size"], config["max_position_embeddings"]

    attention = [Linear(part, hidden, hidden, True) for part in ("q_proj", "k_proj", "v_proj", "out_proj")]
    cross_attention = [replace(linear, reads_encoder=linear.name in ("k_proj", "v_proj")) for linear in attention]

    def stack(kind: Literal["encoder", "cross-decoder"], side: str, attentions: list[Linear]) -> Stack:
        wide = config[f"{side}_ffn_dim"]
        mlp = [Linear("fc1", hidden, wide, True), Linear("fc2", wide, hidden, True)]
        norms = len(attentions) // len(attention) + 1
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
