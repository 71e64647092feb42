"""A model's size by its config.json: layers, projections, parameters; a family is one entry of `FAMILIES`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from common.base.errors import BadInputError, NotPlannedError
from common.planning.model_configs import check_sizes, find_config, reach_of_positions, read_config, refuse_quantized

COLOURS = 3  # channels of a pixel where the config.json does not say
LAYER_TYPES = {"full_attention", "sliding_attention"}  # which are equal but for a mask


class Block(StrEnum):
    """A part of a layer."""

    ATTENTION = "attention"
    MLP = "mlp"
    ROUTER = "router"  # which chooses a mixture's experts; it is trained where every weight is, and takes no adapter


class StackKind(StrEnum):
    """What layers attend to: the tokens so far, all tokens, or the tokens so far and an encoder's output."""

    DECODER = "decoder"
    ENCODER = "encoder"
    CROSS_DECODER = "cross-decoder"


@dataclass(frozen=True)
class Linear:
    """One linear projection, of shape (outputs, inputs)."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    block: Block = Block.ATTENTION
    # reads its block's own result, not the hidden state; tensor parallelism divides its inputs, the others' outputs
    ends_block: bool = False
    reads_encoder: bool = False  # not the hidden state of its own layer
    experts: int = 1  # matrices of this shape that a mixture has of it, as one parameter
    chosen: int = 1  # of these for a token

    @property
    def weights(self) -> int:
        """Without biases."""
        return self.experts * self.inputs * self.outputs

    @property
    def weights_at_work(self) -> int:
        """Those that a token is multiplied with."""
        return self.chosen * self.inputs * self.outputs

    @property
    def cast_weights(self) -> int:
        """Those that autocast copies; it does not know the grouped product of experts."""
        return self.weights * (self.experts == 1)

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.weights + self.experts * self.outputs * self.bias

    def lora_parameters(self, rank: int) -> int:
        """Return how many parameters an adapter has: matrices of shape (rank, inputs) and (outputs, rank)."""
        return rank * (self.inputs + self.outputs)


@dataclass(frozen=True)
class Stack:
    """Layers of one kind, one after the other; `linears` and `norm_parameters` are those of one layer."""

    kind: StackKind
    layers: int
    linears: tuple[Linear, ...]
    norm_parameters: int

    @cached_property
    def matrix_weights(self) -> int:
        """Weights of one layer's projections, without their biases, and without a mixture's router."""
        return sum(linear.weights for linear in self.linears if linear.block != Block.ROUTER)

    @cached_property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        return sum(linear.parameters for linear in self.linears) + self.norm_parameters


@dataclass(frozen=True)
class Architecture:
    """A model's dimensions, and its parameters by part."""

    name: str
    model_type: str
    hidden: int
    intermediate: int  # the MLP's; of a mixture that of all experts together that are chosen for a token
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_length: int  # tokens that it can read; of a tower's encoder patches
    stacks: tuple[Stack, ...]
    embedding_parameters: int  # of the word embeddings alone
    other_embedding_parameters: int = 0  # of positions, token types, and the norms after them
    final_parameters: int = 0  # of what follows the last layer: norm, and the head's parts besides its matrix
    tied: bool = True  # the head's matrix is that of the word embeddings
    dropout: float = 0.0
    classes: int = 0  # labels that the head tells apart, and its `vocab`; 0 = it predicts tokens
    window: int = 0  # tokens that attention looks back, in some layers at least; 0 = all
    tower: "Tower | None" = None  # what makes tokens of images
    experts: int = 0  # of a mixture, in each layer
    chosen: int = 0  # of these for a token

    @property
    def family(self) -> "Family":
        """What it shares with all models of its type."""
        return FAMILIES.get(self.model_type) or TOWERS[self.model_type]

    @property
    def query_size(self) -> int:
        """Of a token's queries in all heads together."""
        return self.heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Of its keys, or its values."""
        return self.kv_heads * self.head_dim

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
    def matrix_weights(self) -> int:
        """Of all layers' projections, which QLoRA keeps in 4 bits, without their biases."""
        return sum(stack.layers * stack.matrix_weights for stack in self.stacks)

    @property
    def expert_weights(self) -> int:
        """Of all layers' experts; 0 where it is no mixture."""
        return sum(
            stack.layers * linear.weights for stack in self.stacks for linear in stack.linears if linear.experts > 1
        )

    @property
    def widest_matrix(self) -> int:
        """Weights of the largest matrix in a layer."""
        return max(linear.weights for stack in self.stacks for linear in stack.linears)

    def by_part(self) -> dict[str, int]:
        """Return the parameters of embeddings, each kind of projection over all layers, norms, head, and tower."""
        parts = {"embeddings": self.embedding_parameters + self.other_embedding_parameters}
        for stack in self.stacks:
            for linear in stack.linears:
                parts[linear.name] = parts.get(linear.name, 0) + stack.layers * linear.parameters
        norms = sum(stack.layers * stack.norm_parameters for stack in self.stacks) + self.final_parameters
        return parts | {"norms": norms, "head": self.head_parameters} | (self.tower.by_part() if self.tower else {})

    @property
    def names_to_adapt(self) -> tuple[str, ...]:
        """Projections that adapters are planned on: all, of a mixture those of attention."""
        linears = (linear for stack in self.stacks for linear in stack.linears)
        return tuple(dict.fromkeys(each.name for each in linears if each.block == Block.ATTENTION or not self.experts))

    @property
    def tower_parameters(self) -> int:
        """Of the vision tower and its connector; 0 without."""
        return sum(self.tower.by_part().values()) if self.tower else 0


@dataclass(frozen=True)
class Tower:
    """What makes tokens of images: an encoder, which reads the patches of a tile, and a connector behind it."""

    encoder: Architecture  # without words: its embeddings are those of patches and of their places
    tile: int  # width and height, in pixels
    channels: int  # of a pixel
    connector: Linear  # makes a token of some neighbouring patches

    @property
    def tokens(self) -> int:
        """Of a tile, as the decoder reads it."""
        return self.encoder.max_length * self.encoder.hidden // self.connector.inputs

    def by_part(self) -> dict[str, int]:
        """Return the parameters of encoder and connector."""
        return {"vision tower": self.encoder.parameters, "connector": self.connector.parameters}


def read_architecture(model: str, revision: str = "", classes: int = 0) -> Architecture:
    """Return the architecture of `model`, as `find_config` finds it; with `classes` with a classifier's head.

    Raises:
        BadInputError: There is no such config, it lacks a key, or its weights are stored quantized.
        NotPlannedError: Its model_type is none of `FAMILIES`, or it is no encoder and cannot classify.
    """
    path = find_config(model, revision)
    config, place = read_config(path, model), f"{path.name} of {model}"
    if "model_type" not in config:
        raise BadInputError(f"{place} has no key model_type: pass the config.json of a model.")
    refuse_quantized(model, config)
    kind = config["model_type"]
    if kind not in FAMILIES:
        has_known_text = config.get("text_config", {}).get("model_type") in FAMILIES
        instead = "pass its text_config, saved as a config.json" if has_known_text else "pass a model of these"
        raise NotPlannedError(
            f"The architecture {kind!r} of {model} is not known to the planner's formulas, which know "
            f"{', '.join(FAMILIES)}: {instead}."
        )
    check_sizes(config, place)
    name = path.parent.name if path.name == "config.json" else path.stem
    if path.parent.parent.name == "snapshots":  # of the Hub's cache, whose folders are called by commits
        name = model.rpartition("/")[2]
    try:
        architecture = FAMILIES[kind].read(name, config)
    except KeyError as missing:
        raise BadInputError(f"{place} lacks the key {missing}: take the config.json as published.") from None
    return as_classifier(architecture, classes) if classes else architecture


def as_classifier(architecture: Architecture, classes: int) -> Architecture:
    """Return an encoder with a head for one of `classes` labels per text: a dense layer, tanh, the labels' matrix."""
    if not architecture.family.classifier:
        raise NotPlannedError(
            f"{architecture.name} is of kind {architecture.model_type}, but classifiers are planned for encoders "
            "(BERT, RoBERTa) alone: pass --model roberta-large or another of them."
        )
    final = architecture.hidden * (architecture.hidden + 1) + classes  # dense, and the labels' biases
    return replace(architecture, vocab=classes, classes=classes, tied=False, final_parameters=final)


def slice_of_rank(architecture: Architecture, ranks: int) -> Architecture:
    """Return what each of `ranks` ranks holds with tensor parallelism (Shoeybi et al. 2019, "Megatron-LM", section 3).

    The layers' matrices are divided; embeddings, norms, head, and the biases of sums over ranks are whole. Refused are
    decoders, and sizes that cannot be divided evenly.
    """
    if not architecture.family.classifier:
        raise NotPlannedError(
            "--parallel tp is planned for encoders (BERT, RoBERTa) alone: pass --parallel ddp, fsdp or pp."
        )
    sizes = {field: getattr(architecture, field) for field in ("heads", "kv_heads", "intermediate")}
    for field, what in (("heads", "attention heads"), ("intermediate", "columns in its MLP")):
        if sizes[field] % ranks:
            raise BadInputError(
                f"{architecture.name} has {sizes[field]:,} {what}, which {ranks} ranks of tensor parallel cannot share "
                "evenly: take a number of devices that divides them."
            )

    def sliced(linear: Linear) -> Linear:
        side = "inputs" if linear.ends_block else "outputs"
        return replace(linear, **{side: getattr(linear, side) // ranks})

    stacks = (replace(stack, linears=tuple(map(sliced, stack.linears))) for stack in architecture.stacks)
    return replace(architecture, stacks=tuple(stacks), **{field: size // ranks for field, size in sizes.items()})


def sp_sizes(heads: int, kv_heads: int) -> list[int]:
    """Return how many ranks may share attention heads evenly (sequence parallel); too few grouped ones are repeated."""
    return [n for n in range(1, heads + 1) if heads % n == 0 and 0 in (kv_heads % n, n % kv_heads)]


def check_shares_heads(ranks: int, heads: int, kv_heads: int) -> None:
    """Refuse ranks that cannot share so many attention and key-value heads evenly."""
    possible = sp_sizes(heads, kv_heads)[1:]
    if ranks > 1 and ranks not in possible:
        instead = f"pass --sp {', '.join(map(str, possible))}" if possible else "pass --parallel fsdp without --sp"
        raise BadInputError(
            f"sp_size is {ranks}, but so many ranks cannot share the model's {heads} attention heads and {kv_heads} "
            f"key-value heads evenly: {instead}."
        )


def exchanged_keys(architecture: Architecture, ranks: int) -> int:
    """Return the size of a token's keys, or its values, as so many ranks exchange them: a head for each at least."""
    return max(architecture.kv_heads, ranks) * architecture.head_dim


# -- families of models


@dataclass(frozen=True)
class Family:
    """What models with the same `model_type` in their config.json have in common."""

    read: Callable[[str, dict[str, Any]], Architecture]  # from a name and the contents of a config.json
    # norms come before attention and MLP, the MLP has a gate, positions are rotary; otherwise layers end with a norm
    is_llama_like: bool = True
    is_gpt2_like: bool = False  # norms come first as well; PyTorch computes activation and softmax step by step
    attention_bias: bool = False  # of queries, keys and values, where the config.json does not say
    tied: bool = False  # the head's matrix is that of the embeddings, where the config.json does not say
    norms: int = 2  # of a layer's hidden states; wherever they are, each keeps what it reads
    has_wide_norms: bool = False  # their weights multiply what is in fp32 still, and is then cast
    normalizes_queries: bool = False  # queries and keys have norms of their own: one for all heads
    normalizes_whole_queries: bool = False  # of all heads at once
    fuses_linears: bool = False  # queries, keys and values come from one projection, gate and up from another one
    routes_in_fp32: bool = False  # a mixture weighs what its experts make with numbers in fp32
    # attention has a learnt sink per head, which of eager, SDPA and flash-attn only eager computes, in the scores' own
    # format; experts have biases, and what they read of gate and up is clamped first
    is_gpt_oss_like: bool = False
    has_pooler: bool = False  # through which a classifier reads the first token, without dropout before it
    positions: str = ""  # name of the module that embeds places; empty = none of its own. It cannot be cut into stages
    # names of modules: the last two follow the layers, to predict tokens, or to classify (empty = not planned)
    embeddings: str = "model.embed_tokens"
    layers: str = "model.layers"
    heads: tuple[str, ...] = ("lm_head",)
    classifier: tuple[str, ...] = ()


def _llama_like(name: str, config: dict[str, Any]) -> Architecture:
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    if unknown := sorted(set(config.get("layer_types") or ()) - LAYER_TYPES):
        raise NotPlannedError(
            f"{name} has layers of the kind {', '.join(map(repr, unknown))}, but the closed form knows "
            f"{' and '.join(sorted(LAYER_TYPES))} alone."
        )
    family = FAMILIES[kind]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    wide, queries, keys = config["intermediate_size"], heads * head_dim, kv_heads * head_dim
    biased = config.get("attention_bias", family.attention_bias)
    mlp_biased = config.get("mlp_bias", False)
    if family.fuses_linears:
        inputs = (Linear("qkv_proj", hidden, queries + 2 * keys),)
        gate_and_up = (Linear("gate_up_proj", hidden, 2 * wide, block=Block.MLP),)
    else:
        named = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        inputs = tuple(Linear(each, hidden, size, biased) for each, size in named.items())
        gate_and_up = tuple(Linear(each, hidden, wide, mlp_biased, Block.MLP) for each in ("gate_proj", "up_proj"))
    linears = (
        *inputs,
        Linear("o_proj", queries, hidden, config.get("attention_bias", family.is_gpt_oss_like), ends_block=True),
        *gate_and_up,
        Linear("down_proj", wide, hidden, mlp_biased, Block.MLP, ends_block=True),
    )
    of_queries = queries + keys if family.normalizes_whole_queries else 2 * head_dim
    norms = family.norms * hidden + of_queries * family.normalizes_queries
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return Architecture(
        name=name,
        model_type=kind,
        hidden=hidden,
        intermediate=wide,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        max_length=reach_of_positions(kind, config["max_position_embeddings"], rope),
        stacks=(Stack(StackKind.DECODER, config["num_hidden_layers"], linears, norms),),
        embedding_parameters=config["vocab_size"] * hidden,
        final_parameters=hidden,
        tied=config.get("tie_word_embeddings", family.tied),
        window=(config.get("sliding_window") or 0) * config.get("use_sliding_window", True),
    )


def _mixture(name: str, config: dict[str, Any]) -> Architecture:
    """Return a decoder whose MLPs are mixtures: a router, and the experts' matrices, each kind as one parameter."""
    if config.get("clip_qkv"):
        raise NotPlannedError(f"{name} clips queries, keys and values (clip_qkv), which the closed form does not know.")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise NotPlannedError(
            f"Only some layers of {name} are mixtures of experts, which the closed form does not know."
        )
    dense = _llama_like(name, config)
    (stack,), hidden, chosen = dense.stacks, dense.hidden, config["num_experts_per_tok"]
    experts = config.get("num_local_experts") or config["num_experts"]
    wide = config.get("moe_intermediate_size") or dense.intermediate
    biased = FAMILIES[dense.model_type].is_gpt_oss_like
    of_experts = {"bias": biased, "block": Block.MLP, "experts": experts, "chosen": chosen}
    linears = (
        *(linear for linear in stack.linears if linear.block == Block.ATTENTION),
        Linear("gate", hidden, experts, biased, Block.ROUTER),
        Linear("experts", hidden, 2 * wide, **of_experts),
        Linear("experts", wide, hidden, **of_experts, ends_block=True),
    )
    stacks = (replace(stack, linears=linears, norm_parameters=stack.norm_parameters + dense.heads * biased),)
    return replace(dense, intermediate=chosen * wide, stacks=stacks, experts=experts, chosen=chosen)


BERT_NAMES = ("query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense")
BART_NAMES = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


def _biased_linears(names: tuple[str, ...], hidden: int, wide: int) -> tuple[Linear, ...]:
    """Return the projections of a layer with biases and without a gate: queries, keys, values, result, MLP."""
    *inputs, result, up, down = names
    return (
        *(Linear(name, hidden, hidden, True) for name in inputs),
        Linear(result, hidden, hidden, True, ends_block=True),
        Linear(up, hidden, wide, True, Block.MLP),
        Linear(down, wide, hidden, True, Block.MLP, ends_block=True),
    )


def _equal_heads(hidden: int, wide: int, heads: int, vocab: int) -> dict[str, int]:
    """Return the sizes where each query has a key of its own, and all heads make up the hidden state."""
    of_heads = {"heads": heads, "kv_heads": heads, "head_dim": hidden // heads}
    return {"hidden": hidden, "intermediate": wide, **of_heads, "vocab": vocab, "embedding_parameters": vocab * hidden}


def _bert_like(name: str, config: dict[str, Any]) -> Architecture:
    kind, hidden, wide = config["model_type"], config["hidden_size"], config["intermediate_size"]
    vocab, positions = config["vocab_size"], config["max_position_embeddings"]
    linears = _biased_linears(BERT_NAMES, hidden, wide)
    return Architecture(
        name,
        kind,
        **_equal_heads(hidden, wide, config["num_attention_heads"], vocab),
        max_length=reach_of_positions(kind, positions),
        stacks=(Stack(StackKind.ENCODER, config["num_hidden_layers"], linears, 4 * hidden),),
        other_embedding_parameters=(positions + config["type_vocab_size"] + 2) * hidden,
        final_parameters=hidden * (hidden + 1) + 2 * hidden + vocab,  # dense, norm, the head's bias
        tied=config.get("tie_word_embeddings", True),
        dropout=config.get("hidden_dropout_prob", 0.1),
    )


def _bart(name: str, config: dict[str, Any]) -> Architecture:
    hidden, vocab, positions = config["d_model"], config["vocab_size"], config["max_position_embeddings"]
    wide = config["decoder_ffn_dim"]
    *attention, up, down = _biased_linears(BART_NAMES, hidden, wide)
    cross_attention = (replace(linear, reads_encoder=linear.name in ("k_proj", "v_proj")) for linear in attention)
    of_decoder = (*attention, *cross_attention, up, down)
    of_encoder = _biased_linears(BART_NAMES, hidden, config["encoder_ffn_dim"])
    encoder = Stack(StackKind.ENCODER, config["encoder_layers"], of_encoder, 2 * 2 * hidden)
    decoder = Stack(StackKind.CROSS_DECODER, config["decoder_layers"], of_decoder, 3 * 2 * hidden)
    return Architecture(
        name,
        "bart",
        **_equal_heads(hidden, wide, config["decoder_attention_heads"], vocab),
        max_length=positions,
        stacks=(encoder, decoder),
        other_embedding_parameters=2 * ((positions + 2) * hidden + 2 * hidden),  # BART's positions start at 2
        dropout=config.get("dropout", 0.1),
    )


def _gpt2(name: str, config: dict[str, Any]) -> Architecture:
    hidden, positions, wide = config["n_embd"], config["n_positions"], config.get("n_inner") or 4 * config["n_embd"]
    dropouts = [config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    activation = config.get("activation_function", "gelu_new")
    if activation != "gelu_new" or 0 < dropouts.count(0) < len(dropouts) or config.get("add_cross_attention"):
        raise NotPlannedError(
            f"{name} has the activation {activation}, dropouts of {dropouts}, or reads an encoder: of GPT-2 the closed "
            "form knows gelu_new, dropout everywhere or nowhere, and no encoder."
        )
    linears = (
        Linear("c_attn", hidden, 3 * hidden, True),
        *_biased_linears(("c_proj", "c_fc", "c_proj"), hidden, wide),
    )
    return Architecture(
        name,
        "gpt2",
        **_equal_heads(hidden, wide, config["n_head"], config["vocab_size"]),
        max_length=positions,
        stacks=(Stack(StackKind.DECODER, config["n_layer"], linears, 2 * 2 * hidden),),
        other_embedding_parameters=positions * hidden,
        final_parameters=2 * hidden,
        tied=config.get("tie_word_embeddings", True),
        dropout=max(dropouts),
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
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    patches = (config["image_size"] // config["patch_size"]) ** 2
    of_patch = config.get("num_channels", COLOURS) * config["patch_size"] ** 2
    linears = _biased_linears(BART_NAMES, hidden, wide)
    return Architecture(
        f"{name}'s vision tower",
        config["model_type"],
        **_equal_heads(hidden, wide, config["num_attention_heads"], vocab=0),
        max_length=patches,
        stacks=(Stack(StackKind.ENCODER, config["num_hidden_layers"], linears, 4 * hidden),),
        other_embedding_parameters=(of_patch + 1 + patches) * hidden,
        final_parameters=2 * hidden,
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
    "smollm3": Family(_llama_like, tied=True),
    "ministral3": Family(_llama_like),
    **dict.fromkeys(
        ("olmo2", "olmo3"),
        Family(_llama_like, has_wide_norms=True, normalizes_queries=True, normalizes_whole_queries=True),
    ),
    "gemma3_text": Family(_llama_like, tied=True, norms=4, has_wide_norms=True, normalizes_queries=True),
    "phi3": Family(_llama_like, fuses_linears=True),
    "mixtral": Family(_mixture, routes_in_fp32=True),
    "qwen3_moe": Family(_mixture, normalizes_queries=True),
    "olmoe": Family(_mixture, normalizes_queries=True, normalizes_whole_queries=True),
    "gpt_oss": Family(_mixture, attention_bias=True, has_wide_norms=True, is_gpt_oss_like=True),
    "bert": Family(
        _bert_like, False, has_pooler=True, embeddings="bert.embeddings", layers="bert.encoder.layer",
        heads=("cls",), classifier=("bert.pooler", "classifier"),
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "bart": Family(_bart, False),
    "gpt2": Family(
        _gpt2, False, is_gpt2_like=True, positions="transformer.wpe", embeddings="transformer.wte",
        layers="transformer.h", heads=("transformer.ln_f", "lm_head"),
    ),
    "idefics3": Family(_with_tower),
    "smolvlm": Family(_with_tower),
}  # fmt: skip
# parts of other models, which cannot be planned alone; their layers are as BERT's, but start with the norms
TOWERS = {f"{kind}_vision": Family(_tower_encoder, False) for kind in ("idefics3", "smolvlm")}
