"""Finds and reads a model's config.json: the file alone, without torch, weights or the network."""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.base.errors import BadInputError, begin_of, reading
from common.base.paths import REPOSITORY, find_here

MODEL_CONFIGS = REPOSITORY / "assets" / "model_configs"
# tiles along the longest edge of an image that a processor cuts, beside the whole one (transformers/models/idefics3/
# image_processing_idefics3.py; SmolVLM's edge has 1536 pixels)
SPLIT = 4
# kinds whose positions begin behind their padding token's: two are never taken
COUNTED_FROM_PADDING = (
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
# keys of the models that the closed form knows, which are whole numbers from 1 to `LARGEST_SIZE`
SIZES = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "type_vocab_size"),
    *("d_model", "encoder_layers", "encoder_ffn_dim", "encoder_attention_heads"),
    *("decoder_layers", "decoder_ffn_dim", "decoder_attention_heads"),
    *("image_size", "patch_size", "num_channels", "scale_factor", "n_embd", "n_layer", "n_head", "n_inner"),
    *("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_positions"),
}
LARGEST_SIZE = 2**31 - 1
# keys of which libraries make as many parts, and the most that any model has: a million layers, by a slip in its
# config.json, take minutes even without weights
COUNTED = {re.compile(r"(^|_)layers?$|^depth$"): 1_000, re.compile(r"^num_labels$"): 10**6}
PUBLISHED = "Take the config.json as published, or pass another --model."


def find_config(model: str, revision: str = "") -> Path:
    """Find the config.json of `model`: a file, a folder, a Hub id in the cache, or a name in assets/model_configs.

    A Hub id that is not in the cache is found among these by its last part: Qwen/Qwen2.5-7B-Instruct as qwen2.5-7b.
    With a `revision`, which may differ from what is published, only the cache is searched.

    Raises:
        BadInputError: It is none of these, or has a `revision` and is no Hub id.
    """
    refuse_revision(model, revision)
    places = _places_of_config(model) if not revision else [_cached_config(model, revision)]
    path = next((place for place in places if place and place.is_file()), None)
    if path:
        return path
    if revision:
        raise BadInputError(
            f"There is no shape of {model} at the revision {revision} in the Hub's cache: `hf download {model} "
            f"config.json --revision {revision}` gets it."
        )
    known = ", ".join(sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))
    get = f"hf download {model if _looks_like_id(model) else 'ID'} config.json"
    raise BadInputError(
        f"There is no shape of {model}: pass --model with one of {known}, a config.json, a folder with one, or the "
        f"id of a model in the Hub's cache (`{get}` gets it)."
    )


def _places_of_config(model: str) -> Iterator[Path | None]:
    yield from (find_here(place, os.path.isfile) for place in (model, Path(model) / "config.json"))
    if _looks_like_id(model) and (cached := _cached_configs(model)):  # its own, whatever is here under its name
        yield from (_cached_config(model), *cached)
    name = model.rpartition("/")[2].lower()
    yield from (MODEL_CONFIGS / f"{each}.json" for each in (name, *map(name.removesuffix, ("-instruct", "-it"))))


def refuse_revision(model: str, revision: str) -> None:
    """Raise BadInputError for the revision of a model that is no Hub id; an empty one passes."""
    if revision and not is_hub_id(model):
        raise BadInputError(
            f"model_revision is {revision!r}, but it is for models of the Hub, and {model} is not the id of "
            "one: leave --model_revision out."
        )


def is_hub_id(model: str) -> bool:
    """Return whether `model` is the id of a model on the Hub, as `owner/name`, and not a file or folder here."""
    return _looks_like_id(model) and find_here(model) is None


def cached_commit(model: str, revision: str = "") -> str | None:
    """Return the commit that a revision of a Hub id (its main branch by default) has in the cache, if any."""
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
    """Return the config.json of a revision in the cache, in a folder called by its commit; None where it lacks it."""
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", constants.HF_HUB_CACHE, revision or None)
    return Path(found) if isinstance(found, str) else None


def _cached_configs(model: str) -> list[Path]:
    from huggingface_hub import constants

    folder = f"models--{model.replace('/', '--')}"  # as `repo_folder_name` has it, whose module takes 0.1 s
    return sorted(Path(constants.HF_HUB_CACHE, folder).glob("snapshots/*/config.json"))


def read_config(path: Path, model: str) -> dict[str, Any]:
    """Return what the config.json of `model` holds, before any library makes something of it.

    Raise BadInputError where it is no object of JSON, or has more layers or labels than any model.
    """
    place = f"{path.name} of {model}"
    with reading(place, PUBLISHED):
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    names = config.get("architectures") or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in [config.get("model_type", ""), *names])):
        raise BadInputError(f"model_type in {place} must be a text, and architectures a list of such. {PUBLISHED}")
    for key, value in _values_in(config):
        most = next((count for keys, count in COUNTED.items() if keys.search(key)), math.inf)
        if isinstance(value, int) and value > most:
            raise BadInputError(f"{key} in {place} is {value:,}, but can be {most:,} at most. {PUBLISHED}")
    return config


def check_sizes(config: dict[str, Any], place: str) -> None:
    """Raise BadInputError, with the key and its value, for sizes of a model of a known kind that are no sizes."""
    for key, value in _values_in(config):
        is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE
        if key in SIZES and value is not None and not is_whole:
            raise BadInputError(
                f"{key} in {place} is {begin_of(repr(value), 60)}, but must be a whole number above 0, at most "
                f"{LARGEST_SIZE:,}."
            )


def _values_in(config: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield all values of a config with their names, those of its parts, such as a vision tower's, as well."""
    parts = [config]
    for part in parts:
        parts += (value for value in part.values() if isinstance(value, dict))
        yield from part.items()


def refuse_quantized(model: str, config: dict[str, Any]) -> None:
    """Refuse a model that is published in a quantized form: libraries load some of these, but cannot merge into them.

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
    if not isinstance(rope, dict):
        return positions
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    reaches = (
        int(each["factor"] * (each.get("original_max_position_embeddings") or positions))
        for each in kinds
        if each.get("factor")
    )
    return max([positions, *reaches])


def usual_tiles(model: str, revision: str = "") -> int:
    """Return how many tiles a square image becomes, as the processor beside the model's config.json cuts it.

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
