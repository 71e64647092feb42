"""Where ranks divide the weights, none of two ever holds more than half of them and a layer: in no phase of a run.

Each way trains a small model first, whose resident memory is Python's and the libraries' (the base), then a model that
is large beside them, and cheap: few rows of few tokens. What a rank holds is counted by `held`.
"""

import csv
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.hardware.devices import GIB, MIB
from common.planning.between_steps import FSDP_GATHERED_IN_FORWARD
from common.planning.phases import PHASES, TRAINING
from tests.fixtures import Trained
from tests.recipes.deep import save_deep_decoder, save_deep_encoder
from tests.recipes.folders import CLASSIFICATION, PP, SHARDED
from tests.recipes.held import FILE

pytestmark = pytest.mark.slow

SHAPES = {
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    "large": {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12},
}
NEW_TOKENS = 2
FEW_ROWS = (
    "--train_rows", "8", "--validation_rows", "2", "--test_rows", "3", "--batch_size", "2", "--max_steps", "2",
    "--eval_steps", "2", "--per_device_eval_batch_size", "1", "--learning_rate", "1e-4", "--report_to", "none",
)  # fmt: skip
CHAT = (*FEW_ROWS, "--independent_judge", "none", "--max_new_tokens", str(NEW_TOKENS))
LABELS = (*FEW_ROWS, "--max_length", "32", "--parallel", "tp")
WAYS = {
    "fsdp": (SHARDED, CHAT),
    "zero3": (SHARDED, (*CHAT, "--parallel", "zero3")),
    "pp": (PP, (*CHAT, "--micro_batches", "2")),
    "tp": (CLASSIFICATION, LABELS),
}
CASES = [f"{way}, {technique}" for way in WAYS for technique in ("full", "lora")]
IN_TRAINING = (TRAINING, "validation")
"""Phases in which what layers keep, and with full fine-tuning a new gradient, come on top: their bound is the plan."""
GATHERING = ("saving", "merging")
"""Phases in which FSDP and ZeRO compute, or save, by what they gather: `FSDP_GATHERED_IN_FORWARD` layers at most."""
PLAN, LITTLE_BYTES = 1.1, 16 * MIB
"""How far above its plan a phase may be; and what rows, activations and Python's own objects may take beside."""
WHOLE_SHARE = 0.6
"""Of the whole model, what a process may have of its own beside training, above its base."""


@dataclass(frozen=True)
class Watched:
    """A run of a large model, and one of a small model before it in the same processes."""

    small: Trained
    large: Trained
    base: Path
    """Folder of the large model before training."""

    @property
    def weights(self) -> dict[str, int]:
        """Bytes of the weights by name: the base's, and an adapter's."""
        sizes = {}
        for folder in (self.base, self.large.results / "adapter"):
            for file in folder.glob("*.safetensors"):
                with safe_open(file, framework="pt") as opened:
                    sizes |= {name: opened.get_tensor(name).nbytes for name in opened.keys()}  # noqa: SIM118
        return sizes

    @property
    def whole_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def layer_bytes(self) -> int:
        return sum(size for name, size in self.weights.items() if ".0." in name)

    @property
    def phases_beside_training(self) -> set[str]:
        return {*self.held(0), *self.held(1)} - {*IN_TRAINING}

    def layers_in(self, phase: str) -> int:
        """How many whole layers a rank may have in a phase, beside its half."""
        gathers = self.large.record["parallel"] in ("fsdp", "zero3") and phase in GATHERING
        return FSDP_GATHERED_IN_FORWARD if gathers else 1

    @property
    def saved(self) -> Path:
        """Folder of what was trained, as one model."""
        return next(self.large.results / name for name in ("merged", "model") if (self.large.results / name).is_dir())

    def held(self, rank: int) -> dict[str, dict[str, dict[str, object]]]:
        """What a rank held at most in each phase, by what was counted."""
        return json.loads((self.large.results / FILE.format(rank)).read_text())

    def base_bytes(self, rank: int, phase: str) -> int:
        """Resident memory of a rank with the small model, in a phase or before it; or before there is a model."""
        phases = json.loads((self.small.results / FILE.format(rank)).read_text())
        before = [phases.get(phase, phases["loading"]), phases["loading"], self.held(rank)["start"]]
        return max(each["resident"]["bytes"] for each in before)

    def planned_bytes(self, rank: int, phase: str) -> float:
        """What was planned for a phase; with training the plan of the phases that are counted in it."""
        planned = self.large.record["memory"][rank]["planned_gib_by_phase"]
        return GIB * max(planned[name] for name in ((*IN_TRAINING, "saving") if phase == TRAINING else (phase,)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """By task and size, folders of models in several files."""
    made: dict[str, dict[str, Path]] = {"chat": {}, "classification": {}}
    for size, shape in SHAPES.items():
        for task, save in (("chat", save_deep_decoder), ("classification", save_deep_encoder)):
            made[task][size] = tmp_path_factory.mktemp(f"{size}-{task}")
            save(made[task][size], **shape)
    return made


@pytest.fixture(scope="module", params=CASES)
def run(
    request: pytest.FixtureRequest,
    models: dict[str, dict[str, Path]],
    run_several: Callable[..., dict[str, Trained]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Watched:
    """A run on two ranks; its files take as much as ten models, and go when the next one begins."""
    way, technique = request.param.split(", ")
    if way == "zero3":
        request.getfixturevalue("needs_deepspeed")
    (place, settings), folder = WAYS[way], tmp_path_factory.mktemp("watched")
    of_task = models["classification" if place == CLASSIFICATION else "chat"]
    runs = {
        size: (place, (*settings, "--technique", technique, "--model", str(model))) for size, model in of_task.items()
    }
    yield Watched(**run_several(folder, runs, 2, "tests.recipes.held"), base=of_task["large"])
    shutil.rmtree(folder)


def check_bounds(run: Watched, count: str, bound_of: Callable[[int, str], float], phases: Iterable[str]) -> None:
    """Check a count of each phase on both ranks; where it is above its bound, say what was held, and where it came."""
    above = {}
    for rank in (0, 1):
        held = run.held(rank)
        assert set(PHASES) <= set(held)
        for phase in held.keys() & set(phases):
            found, bound = held[phase][count], bound_of(rank, phase)
            if found["bytes"] > bound:
                said = f"{found['bytes'] / MIB:.0f} MiB, above {bound / MIB:.0f}"
                above[f"rank {rank}, {phase}"] = f"{said}: {found['where']}; {found['largest']}"
    assert above == {}


def test_no_rank_holds_more_than_half_of_the_model_and_a_layer(run: Watched) -> None:
    """Beside gradients and optimizer states, in all phases but training."""

    def bound_of(_: int, phase: str) -> float:
        return run.whole_bytes / 2 + run.layers_in(phase) * run.layer_bytes + LITTLE_BYTES

    check_bounds(run, "of_model", bound_of, run.phases_beside_training)


def test_no_phase_holds_more_tensors_than_its_plan(run: Watched) -> None:
    check_bounds(run, "tensors", lambda *where: PLAN * run.planned_bytes(*where) + LITTLE_BYTES, PHASES)


def test_a_process_has_no_more_memory_of_its_own_than_planned_beside_its_base(run: Watched) -> None:
    """What a file's weights are read from is the system's, and not counted here."""

    def bound_of(rank: int, phase: str) -> float:
        return run.base_bytes(rank, phase) + PLAN * run.planned_bytes(rank, phase) + LITTLE_BYTES

    check_bounds(run, "resident", bound_of, PHASES)


def test_a_process_has_little_more_than_half_of_the_model_of_its_own(run: Watched) -> None:
    def bound_of(rank: int, phase: str) -> float:
        gathered = run.layers_in(phase) - 1
        copied = bool(gathered)  # a layer that is gathered, by gloo
        return run.base_bytes(rank, phase) + WHOLE_SHARE * run.whole_bytes + (gathered + copied) * run.layer_bytes

    check_bounds(run, "resident_of_model", bound_of, run.phases_beside_training)


# -- what was found is what one device finds


def test_answers_are_those_of_one_device(run: Watched) -> None:
    """The saved model, loaded whole by plain Transformers, says what the ranks said; so does the base before."""
    if run.large.record["config"]["task"] == "chat":
        for when, folder in (("before", run.base), ("after", run.saved)):
            model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
            found = predictions(run, when)
            said = [greedy(model, tokenizer, row["question"]) for row in found]
            assert said == [row["answer"] for row in found]
            assert any(said)
        return
    model = AutoModelForSequenceClassification.from_pretrained(run.saved).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.saved)
    for row in predictions(run, "after"):
        batch = tokenizer(row["text"], truncation=True, max_length=32, return_tensors="pt")
        with torch.no_grad():
            assert model.config.id2label[model(**batch).logits.argmax().item()] == row["found"]


def predictions(run: Watched, when: str) -> list[dict[str, str]]:
    with (run.large.results / f"predictions_{when}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@torch.no_grad()
def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    made = model.generate(**prompt, do_sample=False, max_new_tokens=NEW_TOKENS)
    return tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def test_saved_weights_are_those_of_the_base_where_they_were_not_trained(run: Watched) -> None:
    """To the last bit: embeddings and norms of a full fine-tuning of linear layers, of any technique the norms."""
    base, saved = (
        {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
        for folder in (run.base, run.saved)
    )
    if run.large.record["config"]["target_modules"] == "all":
        pytest.skip("every weight is trained")
    kept = [name for name in base if "norm" in name.lower()]
    assert kept
    prefix = "" if kept[0] in saved else "bert."
    assert [name for name in kept if not torch.equal(saved[f"{prefix}{name}"], base[name])] == []
