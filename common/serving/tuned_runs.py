"""A finished run, found by its name, and its models, loaded as it trained them."""

import json
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.errors import BadInputError, begin_of, closest, reading
from common.base.paths import REPOSITORY, find_here
from common.base.run_config import RunConfig
from common.data.rows import shown
from common.models.loading import load_base_model, load_tokenizer
from common.models.real_models import SMOLLM2
from common.planning.device_maps import whole_model_on
from common.planning.model_configs import is_hub_id, read_config
from common.records.store import RECORD_NAME, Record, load_record

# settings of an adapter that a run sets, or PEFT for its model; all others are at their defaults
MADE_BY_RUNS = {
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights", "fan_in_fan_out", "modules_to_save",
    "target_modules", "target_parameters", "rank_pattern", "alpha_pattern",
    "trainable_token_indices",
}  # fmt: skip
AGAIN = "Repeat the run, or take the adapter as it was saved."
PATTERNS = ("target_modules", "rank_pattern", "alpha_pattern")
# Of a regular expression: several may have it compared without end. Runs and PEFT write one, `.*`, for each name.
QUANTIFIER, MOST_QUANTIFIERS = re.compile(r"[*+{]"), 1


@dataclass(frozen=True)
class TunedRun:
    """A run that ended well: its results folder, its record, and its settings as for one device."""

    folder: Path
    record: Record
    run: RunConfig

    @property
    def recorded_base(self) -> str:
        """The base as the record names it, wherever it is now."""
        return self.record["config"]["model"]

    @property
    def whole_model(self) -> Path:
        """The folder of the tuned model as plain Transformers loads it."""
        return self.folder / ("merged" if self.run.method.has_adapters else "model")


def find_run(name: str, base: str = "") -> TunedRun:
    """Return the run of a results folder, by its path from here or from the repository, or by its name alone.

    `base`: where the base model is now, if it has moved since.

    Raises:
        BadInputError: there is no such run, or several, or it did not end well, or it does not chat.
    """
    folder = _find_folder(name)
    record = load_record(folder / RECORD_NAME, whole=True)
    if record["status"] != "completed":
        raise BadInputError(f"The run in {name} is {record['status']}: resume or repeat it, or name another run.")
    try:
        run = RunConfig.of_record(record["config"])
    except BadInputError as error:
        raise BadInputError(f"{RECORD_NAME} of {name}: {error}") from None
    if not run.goal.chats:
        how = "as section 4 of 3.3's readme shows" if run.goal.sees else "with transformers.pipeline"
        raise BadInputError(f"The run in {name} is for {run.task}, and does not chat: load its model {how}.")
    # the commit that it trained: a branch may have moved since
    revision = "" if base else record.get("model_commit") or run.model_revision
    run = run.changed_to(
        parallel="single", devices=1, learning_rate_scaling="none", model=base or run.model, model_revision=revision
    )
    if run.device == "cuda" and not torch.cuda.is_available():
        print("the run was on a GPU, and there is none here: the CPU answers")
        run = run.changed_to(device="cpu", gpu="", attention="eager" if run.attention == "eager" else "sdpa")
    return TunedRun(folder, record, run)


def _find_folder(name: str) -> Path:
    for place in (name, Path("results") / name):
        if record := find_here(Path(place) / RECORD_NAME, os.path.isfile):
            return record.parent.resolve()
    known = [file.parent.relative_to(REPOSITORY) for file in REPOSITORY.glob(f"*/run_*/results/*/{RECORD_NAME}")]
    found = [place for place in known if place.name == name]
    if len(found) == 1:
        return REPOSITORY / found[0]
    if found:
        raise BadInputError(f"Several runs are called {name}: pass one of {', '.join(map(str, found))}.")
    meant = closest(name, [place.name for place in known])
    likely = chain((place for place in known if place.name == meant), known)
    example = next(likely, "2.1_lora_finetuning/run_0_cpu_x1/results/NAME")
    raise BadInputError(f"There is no run {name} with a {RECORD_NAME}: pass a results folder such as {example}.")


@dataclass(frozen=True)
class TunedModels:
    """Base and tuned model: with adapters one model, which is the base while `without_adapter` is entered."""

    base: PreTrainedModel | PeftModel
    tuned: PreTrainedModel | PeftModel
    without_adapter: Callable[[], AbstractContextManager]
    tokenizer: PreTrainedTokenizerBase


def load_models(tuned: TunedRun) -> TunedModels:
    """Load base and tuned model of a run; an adapter of another base is refused."""
    _check_base(tuned)
    run, device = tuned.run, whole_model_on("cuda:0" if tuned.run.device == "cuda" else "cpu")
    tokenizer = load_tokenizer(run)
    if not run.method.has_adapters:
        model = load_base_model(replace(run, weights="pretrained"), device, source=tuned.whole_model)
        return TunedModels(load_base_model(run, device), model, nullcontext, tokenizer)
    adapter, trained = tuned.folder / "adapter", tuned.whole_model / "config.json"
    _check_rank(adapter, check_adapter(adapter))
    base = load_base_model(run, device)
    of_run = read_config(trained, tuned.folder.name) if trained.is_file() else {}
    what, onto = f"The adapter of {tuned.folder.name}", f"put on {run.model}{_shape(base.config.to_dict())}"
    again = (
        f"It was trained on {tuned.recorded_base}{_shape(of_run)}: pass --base with the folder where that is now, or "
        "repeat the run."
    )
    with reading(what, again, onto):
        model = PeftModel.from_pretrained(base, adapter).eval()
        lacking = get_peft_model_state_dict(model, save_embedding_layers=False).keys() - _shapes_in(adapter).keys()
    if lacking:
        raise BadInputError(f"{what} lacks {shown(sorted(lacking))}, and cannot be {onto}. {again}")
    return TunedModels(model, model, model.disable_adapter, tokenizer)


def check_adapter(adapter: Path) -> dict[str, Any]:
    """Return an adapter's settings, if runs make such: others may have PEFT import a module, which is code."""
    with reading(f"{CONFIG_NAME} of {adapter}", AGAIN):
        settings = dict(json.loads((adapter / CONFIG_NAME).read_text(encoding="utf-8")))
    plain = LoraConfig().to_dict()
    set_so = {name for name, value in settings.items() if value and value != plain.get(name)}
    others = sorted(set_so - MADE_BY_RUNS)
    patterns = chain.from_iterable(_texts(settings.get(name)) for name in PATTERNS)
    slow = [pattern for pattern in patterns if len(QUANTIFIER.findall(pattern)) > MOST_QUANTIFIERS]
    kind, found = settings.get("peft_type"), f"{CONFIG_NAME} of {adapter}"
    if kind != "LORA":
        raise BadInputError(f"{found} is of the kind {kind!r}, and runs make LORA. {AGAIN}")
    if others:
        why = "which no run does"
        if set_so & {"megatron_core", "megatron_config"}:
            why = "by which PEFT would import a module, and no code of others is run"
        raise BadInputError(
            f"{found} sets {shown(others)} ({begin_of([settings[name] for name in others])}), {why}. {AGAIN}"
        )
    if slow:
        raise BadInputError(f"{found} has the pattern {begin_of(shown(slow), 60)!r}, which no run makes. {AGAIN}")
    return settings


def _check_rank(adapter: Path, settings: dict[str, Any]) -> None:
    """Refuse a rank above that of the weights, for which memory would be taken before they are read."""
    with reading(f"The weights of {adapter}", AGAIN):
        most = max(shape[0] for name, shape in _shapes_in(adapter).items() if "lora_" in name and "_A." in name)
        asked = max([settings["r"], *(settings.get("rank_pattern") or {}).values()])
        is_above = asked > most
    if is_above:
        raise BadInputError(f"{CONFIG_NAME} of {adapter} has the rank {asked}, but its weights have {most}. {AGAIN}")


def _shapes_in(adapter: Path) -> dict[str, list[int]]:
    with safe_open(adapter / SAFETENSORS_WEIGHTS_NAME, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (it is no dict)


def _texts(names: object) -> list[str]:
    return [names] if isinstance(names, str) else list(map(str, names)) if isinstance(names, list | dict) else []


def _check_base(tuned: TunedRun) -> None:
    base = tuned.run.model
    if find_here(base, os.path.isdir) or is_hub_id(base) or base == SMOLLM2 or tuned.run.weights == "random":
        return
    if base == tuned.recorded_base:
        raise BadInputError(f"The base of {tuned.folder.name} was {base}, which is not there: pass --base.")
    raise BadInputError(
        f"--base is {base}, which is no folder, nor an id of the Hub: correct it (the run had {tuned.recorded_base})."
    )


def _shape(config: dict[str, object]) -> str:
    size, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    return f" (hidden size {size}, {layers} layers)" if size and layers else ""
