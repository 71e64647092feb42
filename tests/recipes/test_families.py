"""Tiny models of the families that people bring go through training, dry run and planner, or are refused in a sentence.

Each workflow loads again what it saved, and fails unless logits are those of the trained model.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from bench.entries import read_kept
from bench.tables.outcomes import FAMILIES_FILE
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.specs import TASKS, TECHNIQUES
from common.checks.dry_run import dry_run
from common.checks.folder_runs import setting_of_folder
from common.checks.inputs import check_settings
from common.checks.planner_command import answer, read_options
from common.data.row_checks import say_once
from common.models.families import check_quantizable, suited_to_model
from common.models.loading import model_without_weights
from common.models.trained_weights import idle_weights, parameter_counts, with_trained_weights
from common.planning.job import BatchShape, is_planned
from tests.families import DECODERS, ENCODER_DECODERS, ENCODERS, FAMILIES, TinyFamily, make_tiny
from tests.fixtures import Trained

KEEP = "KEEP_OUTCOMES"
STEPS = 4
SETTINGS = ("--max_steps", str(STEPS), "--eval_steps", "1", "--test_rows", "2",
            "--warmup_steps", "0", "--report_to", "none")  # fmt: skip
FEW = ("--train_rows", "16", "--validation_rows", "4", "--batch_size", "4", "--max_new_tokens", "2")
CHAT = (*FEW, "--independent_judge", "none")
ALONE = ("--parallel", "single", "--devices", "1")
LABELS = ("--train_rows", "128", "--validation_rows", "64", "--batch_size", "32", *ALONE)  # fewer lack some label
SUMMARIES = (*FEW, *ALONE)


@dataclass(frozen=True)
class Workflow:
    """A run folder, or one of its workflows, and the families that it is for."""

    place: str
    families: dict[str, TinyFamily]
    settings: tuple[str, ...]
    learning_rate: str


WORKFLOWS = {
    "2.1": Workflow("2.1_lora_finetuning/run_0_cpu_x1", DECODERS, CHAT, "0.01"),
    # at 0.005 some adapters grow so large beside tiny weights that merging rounds beyond the tolerance
    "2.3": Workflow("2.3_qlora_finetuning/run_0_cpu_x1", DECODERS, CHAT, "0.001"),
    "2.4": Workflow("2.4_full_finetuning/run_0_cpu_x1", DECODERS, CHAT, "0.001"),
    "2.5": Workflow("2.5_full_finetuning_with_mp/run_0_cpu_x1", DECODERS, CHAT, "0.001"),
    "3.1 full": Workflow("3.1_text_classification/run_0_cpu_x2", ENCODERS, (*LABELS, "--technique", "full"), "0.003"),
    "3.1 LoRA": Workflow("3.1_text_classification/run_0_cpu_x2", ENCODERS, (*LABELS, "--technique", "lora"), "0.003"),
    "3.2": Workflow(
        "3.2_summarization/run_0_cpu_x2/my_workflow_summarization_torchrun.py", ENCODER_DECODERS, SUMMARIES, "0.001"
    ),
}
NOT_IN_4_BITS = {"falcon": "FalconLinear"}
"""Families of which QLoRA is refused, and the class that holds most of their weights."""
IN_SHORT = ("gpt2", "mixtral")
"""Those that `make test` sees: of each the most differs from the Llamas that all other tests use."""
BY_ANOTHER = {
    "2.1": [family for family in DECODERS if family not in (*IN_SHORT, *NOT_IN_4_BITS)],
    **{workflow: ["olmo_hybrid"] for workflow in ("2.3", "2.5")},
    "2.4": [family for family in DECODERS if family not in IN_SHORT],
    "3.1 full": [family for family in ENCODERS if family not in ("bert", "deberta-v2", "distilbert")],
}
"""Left to `make soak`, as another workflow does as much with the family in `make test-all`: QLoRA adapts the layers
that LoRA does, MP trains the weights that one device does, and LoRA the head for labels; or as another family has its
kinds of layers."""

Runs = dict[str, Trained]


def case(family: str, workflow: str = "") -> Any:
    """The parameters of a test, which `make test` leaves out but of a few families."""
    marks = [] if family in IN_SHORT else [pytest.mark.slow]
    if family in BY_ANOTHER.get(workflow, ()):
        marks.append(pytest.mark.soak)
    return pytest.param(*filter(None, (family, workflow)), marks=marks)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a family's tiny model, made when it is first asked for."""
    root = tmp_path_factory.mktemp("families")
    return lambda family: str(root / family) if (root / family).exists() else make_tiny(family, root / family)


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    run_several: Callable[..., Runs],
    models: Callable[[str], str],
) -> Runs:
    """The runs of the selected tests, in one start."""
    params = [item.callspec.params for item in request.session.items if getattr(item, "callspec", None)]
    asked = [(each["family"], each["workflow"], WORKFLOWS[each["workflow"]]) for each in params if "workflow" in each]
    runs = {
        f"{family}-{name}": (
            REPOSITORY / workflow.place,
            (*SETTINGS, *workflow.settings, "--learning_rate", workflow.learning_rate, "--model", models(family)),
        )
        for family, name, workflow in asked
        if not is_refused(family, name)
    }
    return run_several(tmp_path_factory.mktemp("runs"), runs, 1)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, dict[str, str]]]:
    """By family, what was found; kept in a file where that is asked for."""
    found: dict[str, dict[str, str]] = {name: {} for name in FAMILIES}
    yield found
    if KEEP in os.environ:
        kept = {row["family"]: row for row in read_kept(FAMILIES_FILE)}  # of what was not selected this time
        rows = [
            {**kept.get(FAMILIES[name].name, {}), "family": FAMILIES[name].name,
             "model_type": FAMILIES[name].model_type, **ways}
            for name, ways in found.items()
        ]  # fmt: skip
        FAMILIES_FILE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def is_refused(family: str, workflow: str) -> bool:
    return workflow == "2.3" and family in NOT_IN_4_BITS


@pytest.mark.parametrize(
    ("family", "workflow"), [case(family, name) for name, workflow in WORKFLOWS.items() for family in workflow.families]
)
def test_a_family_is_trained_or_refused(
    family: str,
    workflow: str,
    trained: Runs,
    models: Callable[[str], str],
    outcomes: dict[str, dict[str, str]],
) -> None:
    if is_refused(family, workflow):
        sentence = rf"Only \d+% .* in 4 bits.* {NOT_IN_4_BITS[family]}: .*--technique lora"
        with pytest.raises(BadInputError, match=sentence):
            check_settings(RunConfig(technique="qlora", model=models(family)))
        outcomes[family][workflow] = "refused: not in 4 bits"
        return
    run = trained[f"{family}-{workflow}"]
    losses = [loss for _, loss in run.record["validation_losses"]]
    assert len(losses) == 1 + STEPS  # the first is before training
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]  # at this learning rate each learns something in four steps
    outcomes[family][workflow] = "yes"


@pytest.mark.parametrize("family", [case(family) for family in FAMILIES])
def test_a_family_is_planned(
    family: str, models: Callable[[str], str], outcomes: dict[str, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    model, known = models(family), is_planned(RunConfig(technique="full", model=models(family)))
    batch, options = shape_of(family)
    dry = [name for name in TASKS[batch.task].techniques if not TECHNIQUES[name].quantizes]
    for technique in dry:
        targets = {"target_modules": "all"} if technique == "full" else {}
        run = suited_to_model(RunConfig(task=batch.task, technique=technique, model=model, **targets))
        assert dry_run(run, batch).peak_gib > 0
    capsys.readouterr()
    asked = ("--model", model, "--gpu", "a6000", "--batch-size", "2", "--seq-len", "32", "--json")
    assert answer(read_options([*asked, *options])) == 0
    ranked = json.loads(capsys.readouterr().out)["ranked"]
    closed = [name for name, each in TECHNIQUES.items() if not (batch.classes and each.quantizes)]
    assert {entry["technique"] for entry in ranked} == set(closed if known else dry)
    assert all(entry["max_batch_size"] > 2 and entry["per_device"][0]["fits"] for entry in ranked)
    outcomes[family]["planner"] = "memory, time, cost" if known else "memory, by dry runs"


def shape_of(family: str) -> tuple[BatchShape, list[str]]:
    """Two rows of the family's task, and the options by which the planner knows of it."""
    if family in ENCODERS:
        return BatchShape(2, 32, labelled=1, classes=6, task="classification"), ["--classes", "6"]
    if family in ENCODER_DECODERS:
        return BatchShape(2, 32, labelled=8, target_length=8, task="summarization"), ["--target-len", "8"]
    return BatchShape(2, 32, labelled=31), []


def test_a_recipes_adapters_are_on_the_layers_of_the_family(
    models: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = setting_of_folder(REPOSITORY / WORKFLOWS["3.1 LoRA"].place, "lora", "single")
    assert recipe.target_modules == "query,value"
    for family, expected in (("electra", "query,value"), ("deberta-v2", "query_proj,value_proj"),
                             ("distilbert", "all-linear")):  # fmt: skip
        run = suited_to_model(replace(recipe, model=models(family)))
        assert run.target_modules == expected
        assert (f"adapters are on {expected}" in capsys.readouterr().out) == (expected != recipe.target_modules)
    asked = replace(recipe, model=models("distilbert"), target_modules="q_lin,key")
    assert suited_to_model(asked).target_modules == "q_lin,key"


@pytest.mark.parametrize("parallel", ["pp", "tp"])
def test_layers_that_cannot_be_divided_are_refused(models: Callable[[str], str], parallel: str) -> None:
    recipe = setting_of_folder(REPOSITORY / WORKFLOWS["3.1 LoRA"].place, "full", parallel)
    for family in ("bert", "xlm-roberta"):
        check_settings(replace(recipe, model=models(family)))
    with pytest.raises(BadInputError, match="--parallel ddp"):
        check_settings(replace(recipe, model=models("distilbert")))


def test_a_task_that_the_planner_was_not_told_is_asked_for(models: Callable[[str], str]) -> None:
    options = ("--gpu", "a6000", "--model")
    with pytest.raises(BadInputError, match="--classes or --target-len"):
        answer(read_options([*options, models("t5")]))


def test_whether_experts_are_adapted_is_said(models: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    for chosen, is_said in (({}, True), ({"lora_dropout": 0.0}, True), ({"target_modules": "q_proj,v_proj"}, False)):
        say_once.cache_clear()
        suited_to_model(RunConfig(model=models("mixtral"), **chosen))
        said = capsys.readouterr().out
        assert ("experts get adapters" in said and "--target_modules q_proj,v_proj" in said) == is_said, chosen


def test_experts_in_4_bits_take_no_adapters_and_are_dequantized_layer_by_layer(
    models: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunConfig(technique="qlora", model=models("mixtral"), gradient_checkpointing=True, independent_judge="none")
    assert check_settings(run).target_modules == "q_proj,k_proj,v_proj,o_proj"
    assert "take no adapters" in capsys.readouterr().out
    for changes, said in (
        ({"gradient_checkpointing": False}, "turn gradient checkpointing on"),
        ({"target_modules": "q_proj,experts"}, "target_modules is 'q_proj,experts'"),
        ({"target_modules": "all-linear"}, "take no adapters: pass --target_modules"),
        ({"parallel": "mp", "stages": 2}, "--parallel ddp"),
    ):
        with pytest.raises(BadInputError, match=said):
            check_quantizable(replace(run, **changes))


def test_experts_are_held_all_and_some_are_at_work(models: Callable[[str], str]) -> None:
    run = suited_to_model(RunConfig(model=models("mixtral")))
    assert run.lora_dropout == 0
    model = model_without_weights(run)
    experts = 2 * 4 * 3 * 64 * 128  # layers, experts, matrices
    assert idle_weights(model) == experts / 2
    total = sum(weight.numel() for weight in model.parameters())
    lookup = model.get_input_embeddings().weight.numel()
    assert parameter_counts(model)[1] == total - lookup - experts / 2
    adapted = with_trained_weights(model, run)
    names = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert any("experts" in name for name in names)
    assert any("q_proj" in name for name in names)
