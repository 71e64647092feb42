"""Files of a model's weights: which holds which, and whether all is there, by their headers, before any is read."""

import json
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from common.base.errors import BadInputError, reading
from common.base.loggers import silent
from common.base.run_config import RunConfig
from common.data.row_checks import say_once

AGAIN = "copy or download it again (`hf download`, or `git lfs pull` what is only a pointer), or pass another --model."
# one lists what a checkpoint lacks (a classifier's head), the other what the library's own tensor parallel leaves whole
LOADING_LOGGERS = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel")


@dataclass(frozen=True)
class WeightInFile:
    """Where a weight is, and its shape there."""

    file: Path
    shape: tuple[int, ...]


def weights_in_files(source: str | Path, revision: str = "") -> dict[str, WeightInFile]:
    """Return where each weight of a model is, by its name; empty if they are pickled, or not all in the cache yet."""
    single = _find(source, SAFE_WEIGHTS_NAME, revision)
    index = _find(source, SAFE_WEIGHTS_INDEX_NAME, revision)
    if single:
        if index and set(_places(index).values()) != {single.name}:
            say_once(f"{source}: {single.name} is loaded, and not the files of {index.name}: Transformers takes one")
        return _header(single)
    if not index:
        return {}
    places = _places(index)
    files = {name: _find(source, name, revision) for name in sorted(set(places.values()))}
    lost = [name for name, path in files.items() if path is None]
    if lost and not Path(source).is_dir():  # the Hub has it, and it is downloaded when it is loaded
        return {}
    if lost:
        count = sum(place == lost[0] for place in places.values())
        raise BadInputError(
            f"{source} lacks {_and_more(lost)}, in which {index.name} has {count} of its {len(places)} weights: {AGAIN}"
        )
    return _agreeing(index, places, {name: _header(path) for name, path in files.items() if path})


def check_weight_files(
    run: RunConfig, source: str | Path, kind: type[PreTrainedModel], config: PretrainedConfig
) -> None:
    """Check that the files of the run's base, in a folder or the Hub's cache, hold what its class `kind` needs."""
    stored = weights_in_files(source, run.model_revision)
    pickled = [_find(source, name, run.model_revision) for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)]
    if not stored and any(pickled):
        _check_readable_in_parts(run)
    elif not stored and Path(source).is_dir():
        raise BadInputError(
            f"The model folder {run.model} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}: pass one "
            "that save_pretrained wrote."
        )
    if not stored:
        return
    with reading(f"The model of config.json of {run.model}", "Take it as published.", "built"):
        model, loading = _as_loaded(stored, kind, config)
    needed = dict(model.named_parameters())
    lost = [name for name in sorted(loading["missing_keys"]) if name in needed and not _starts_anew(name, run, model)]
    if lost:
        raise BadInputError(
            f"The files of {run.model} lack {_and_more(lost)} of the {len(needed)} weights that a {kind.__name__} has: "
            "pass a folder that save_pretrained wrote, or another --model."
        )
    for name, there, wanted in sorted(loading["mismatched_keys"]):
        if not _starts_anew(name, run, model):
            raise BadInputError(
                f"{name} of {run.model} has the shape {tuple(there)} in its file, but {tuple(wanted)} by config.json: "
                "correct that, or pass another --model."
            )
    if loading["unexpected_keys"]:
        names = _and_more(sorted(loading["unexpected_keys"]))
        say_once(f"{run.model}: its files also have {names}, which a {kind.__name__} has no use for")


def _check_readable_in_parts(run: RunConfig) -> None:
    sharing = run.parallelism
    if not (sharing.shards_weights or sharing.splits_matrices or sharing.pipelines):
        return
    reader = "AutoProcessor" if run.goal.sees else "AutoTokenizer"
    model = "AutoModel" if run.goal.classifies else run.goal.auto_class  # a classifier's head would start at random
    convert = (
        f"import transformers as t; [kind.from_pretrained('{run.model}', trust_remote_code=False)"
        f".save_pretrained('converted') for kind in (t.{model}, t.{reader})]"
    )
    raise BadInputError(
        f"The weights of {run.model} are pickled (.bin), which each rank would read whole, but parallel is "
        f'{run.parallel}: convert them once, with `python -c "{convert}"`, and pass --model converted.'
    )


def _find(source: str | Path, name: str, revision: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    found = try_to_load_from_cache(str(source), name, revision=revision or None)
    return Path(found) if isinstance(found, str) else None  # else a mark that there is none


def _places(index: Path) -> dict[str, str]:
    with reading(f"The index of weights {index}", AGAIN.capitalize()):
        content = json.loads(index.read_text())
        places = {str(name): str(file) for name, file in content["weight_map"].items()}
        content["metadata"]  # which Transformers reads as well
    return places


def _header(file: Path) -> dict[str, WeightInFile]:
    said = f"{file}, which has {file.stat().st_size:,} bytes,"
    remedy = f"It was not copied to its end, or is no safetensors file: {AGAIN}"
    with reading(said, remedy), safe_open(file, "pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 (no dict)
        return {name: WeightInFile(file, tuple(shape)) for name, shape in shapes.items()}


def _agreeing(
    index: Path, places: dict[str, str], headers: dict[str, dict[str, WeightInFile]]
) -> dict[str, WeightInFile]:
    """Return the weights of an index's files, each of which is in one of them, and where the index has it."""
    stored: dict[str, WeightInFile] = {}
    for weights in headers.values():
        for name in weights.keys() & stored.keys():
            raise BadInputError(
                f"{name} is both in {stored[name].file.name} and in {weights[name].file.name} of {index.parent}: "
                "remove it from one, or pass another --model."
            )
        stored |= weights
    if wrong := [name for name, place in places.items() if name not in headers[place]]:
        raise BadInputError(f"{index} has {_and_more(wrong)} in {places[wrong[0]]}, which does not hold it: {AGAIN}")
    return stored


def _as_loaded(
    stored: dict[str, WeightInFile], kind: type[PreTrainedModel], config: PretrainedConfig
) -> tuple[PreTrainedModel, dict]:
    """Return a model on `meta`, and what Transformers says of its loading from weights of these names and shapes."""
    weights = {name: torch.empty(weight.shape, device="meta") for name, weight in stored.items()}
    with silent(*LOADING_LOGGERS), torch.random.fork_rng(devices=[]), ExitStack() as afterwards:
        if is_progress_bar_enabled():
            disable_progress_bar()
            afterwards.callback(enable_progress_bar)
        return kind.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )


def _starts_anew(name: str, run: RunConfig, model: PreTrainedModel) -> bool:
    """Return whether a weight is of a classifier's head, or of the pooling before it: such start at random."""
    return run.goal.classifies and (not name.startswith(f"{model.base_model_prefix}.") or "pooler" in name)


def _and_more(names: Collection[str]) -> str:
    first = next(iter(names))
    return f"{first} and {len(names) - 1} more" if len(names) > 1 else first
