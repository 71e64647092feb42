"""Every technique computes the steps of one device: fp32, dropout off, the same rows, uneven.

33 rows at a global batch of 8 leave one for the last of five steps: of two ranks one has none then, and a pipeline
fills its micro-batches up with rows that have no label; so do 9 validation rows at 4 rows of a rank. Some steps'
gradients are clipped, and others are not: clipping alone would hide gradients that are wrong by a factor.

To cover another technique, add a `Case` to `CASES`. Of a selection of tests only the selected cases and their
references are run.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.tables.outcomes import EQUIVALENCE
from common.base.run_config import RunConfig
from tests.fixtures import Trained
from tests.outcomes import merged
from tests.recipes.folders import (
    CLASSIFICATION,
    DDP,
    FULL,
    LORA,
    MP,
    PICTURES,
    PP,
    PREFERENCES,
    QLORA,
    REWARDED,
    SHARDED,
    SP,
    SUMMARIZATION,
)

KEEP = "KEEP_OUTCOMES"
"""Set by `make soak`: the differences are kept, for docs/results.md."""
TORCHRUN, ACCELERATE, MACHINES = (
    SUMMARIZATION / f"my_workflow_summarization_{way}.py" for way in ("torchrun", "accelerate", "machines")
)

SAME = ("--train_rows", "33", "--validation_rows", "9", "--per_device_eval_batch_size", "4", "--test_rows", "1",
        "--report_to", "none", "--learning_rate_scaling", "none",
        "--train_sampling_strategy", "group_by_length")  # fmt: skip
RECIPES = {
    "SGD": ("--optimizer", "sgd", "--warmup_steps", "0", "--max_steps", "5", "--eval_steps", "0.2"),
    "AdamW": ("--learning_rate", "1e-3", "--max_steps", "20", "--eval_steps", "0.05"),
}
OF_TASK = {
    "chat": ("--independent_judge", "none", "--max_new_tokens", "1"),
    "classification": ("--test_rows", "2"),
    "summarization": ("--max_new_tokens", "2", "--num_beams", "1"),
    "visual_questions": ("--independent_judge", "none", "--max_new_tokens", "1"),
    "preferences": ("--max_new_tokens", "1"),
    "rewards": ("--max_new_tokens", "6", "--num_generations", "2", "--reward", "tests.recipes.varied_reward:varied"),
}
ALL = ("--target_modules", "all")
WHOLE_BATCH = ("--batch_size", "8")
OF_RANK = ("--batch_size", "4")
TWO_COPIES = ("--batch_size", "2", "--devices", "4", "--dp_replicate_size", "2")
TWO_COPIES_ACCUMULATED = (*TWO_COPIES, "--batch_size", "1", "--gradient_accumulation_steps", "2")
TWO_ANSWERS = ("--batch_size", "16")
"""Of rewards: to each of eight prompts."""
ACCUMULATED = ("--batch_size", "2", "--gradient_accumulation_steps", "2")
STAGES = (*WHOLE_BATCH, "--micro_batches", "4")
STAGES_ACCUMULATED = ("--batch_size", "4", "--gradient_accumulation_steps", "2", "--micro_batches", "2")
GPIPE = ("--schedule", "gpipe")
TWO_GPUS = ("--device", "cuda", "--devices", "2", "--stages", "0", "--attention", "eager")
"""Fake ones; PyTorch's fused attention does not know them."""
TWO_PARTS = ("--parallel", "single", "--devices", "1", "--partitions", "2")
SOME_LOGITS = 2**15
"""Of a chunk of the loss on several devices, where each micro-batch has several chunks; one device has one."""
OVERLAPPED = ("--gradient_exchange", "overlapped", "--bucket_cap_mb", "0.05")


@dataclass(frozen=True)
class Case:
    """A run whose work is shared in some way, and its single-device reference."""

    strategy: str
    technique: str
    place: Path
    """A run folder, or one of its workflows."""
    overrides: tuple[str, ...]
    task: str = "chat"
    note: str = ""
    model: str = ""
    """Of the tiny models, where it is not the task's own."""
    launch: str = "two_ranks"
    """The fixture that runs it."""
    reference: "Case | None" = None
    sgd: tuple[str, ...] = ()
    """Of a reference: SGD's learning rate, and a `max_grad_norm` at which some steps are clipped and others not."""
    recipe: str = "SGD"

    def __str__(self) -> str:
        task = "" if self.task == "chat" else self.task
        recipe = "" if self.recipe == "SGD" else self.recipe
        return ", ".join(filter(None, (task, self.strategy, self.technique, self.note, recipe)))

    def settings(self, model: str) -> tuple[str, ...]:
        """Of its run, which trains the tiny `model`."""
        sgd = (self.reference or self).sgd if self.recipe == "SGD" else ()
        dropout = () if self.technique == "full" else ("--lora_dropout", "0")
        return ("--model", model, *SAME, *dropout, *RECIPES[self.recipe], *sgd, *OF_TASK[self.task], *self.overrides)

    def with_adamw(self) -> "Case":
        """The same with another optimizer, and more steps."""
        return replace(self, recipe="AdamW", reference=self.reference and self.reference.with_adamw())


def one_device_of(technique: str, place: Path, *overrides: str, **other: Any) -> Case:
    return Case("one device", technique, place, overrides, launch="one_device", **other)


def sgd(clip: str, learning_rate: str) -> tuple[str, ...]:
    return ("--max_grad_norm", clip, "--learning_rate", learning_rate)


ONE = {
    "full": one_device_of("full", FULL, *WHOLE_BATCH, sgd=sgd("2.9", "0.05")),
    "every weight": one_device_of("full", FULL, *WHOLE_BATCH, *ALL, note="every weight", sgd=sgd("3.4", "0.05")),
    "lora": one_device_of("lora", LORA, *WHOLE_BATCH, sgd=sgd("19", "0.003")),
    "qlora": one_device_of("qlora", QLORA, *WHOLE_BATCH, sgd=sgd("19", "0.003")),
    **{
        f"classification, {technique}": one_device_of(
            technique, CLASSIFICATION, "--technique", technique, "--parallel", "single", *WHOLE_BATCH,
            task="classification", sgd=sgd(clip, "0.03"),
        )
        for technique, clip in (("full", "4.3"), ("lora", "3.3"))
    },
    **{
        f"{task}, {technique}": one_device_of(
            technique, place, "--technique", technique, *WHOLE_BATCH, task=task, sgd=sgd(clip, rate)
        )
        for task, place, technique, clip, rate in (
            ("visual_questions", PICTURES, "full", "3.5", "0.05"),
            ("visual_questions", PICTURES, "lora", "15", "0.003"),
            ("preferences", PREFERENCES, "full", "1.6", "0.05"),
            ("preferences", PREFERENCES, "lora", "15", "0.003"),
        )
    },
    **{
        f"rewards, {technique}": one_device_of(
            technique, REWARDED, "--technique", technique, *TWO_ANSWERS, task="rewards", sgd=sgd(clip, rate)
        )
        for technique, clip, rate in (("full", "1.83", "0.05"), ("lora", "13.7", "0.003"))
    },
    "summarization": one_device_of(
        "full", TORCHRUN, *TWO_PARTS, *OF_RANK, task="summarization", sgd=sgd("0.92", "0.1")
    ),
}  # fmt: skip
"""What the others are compared with."""


def chat(
    strategy: str, technique: str, place: Path, *overrides: str, note: str = "", launch: str = "two_ranks"
) -> Case:
    reference = ONE["every weight" if "all" in overrides else technique]
    return Case(strategy, technique, place, overrides, note=note, launch=launch, reference=reference)


def sharded(strategy: str, technique: str, *overrides: str, note: str = "", launch: str = "two_ranks") -> Case:
    return chat(strategy, technique, SHARDED, "--technique", technique, *overrides, note=note, launch=launch)


def zero(strategy: str, technique: str, *overrides: str, note: str = "") -> Case:
    stage = f"zero{strategy[len('ZeRO-')]}"
    return sharded(strategy, technique, "--parallel", stage, *overrides, note=note, launch="deepspeed")


def pipeline(strategy: str, technique: str, *overrides: str, note: str = "") -> Case:
    return chat(strategy, technique, PP, "--technique", technique, *overrides, note=note)


def sequence(strategy: str, technique: str, *overrides: str, note: str = "", launch: str = "two_ranks") -> Case:
    return chat(strategy, technique, SP, "--technique", technique, *overrides, note=note, launch=launch)


def classifying(strategy: str, technique: str, *overrides: str, reference: Case | None = None) -> Case:
    settings = ("--technique", technique, "--parallel", strategy.partition(",")[0].lower(), *overrides)
    one = reference or ONE[f"classification, {technique}"]
    return Case(strategy, technique, CLASSIFICATION, settings, one.task, one.note, one.model, reference=one)


def summarizing(strategy: str, place: Path, *overrides: str, reference: Case | None = None, **other: str) -> Case:
    one = reference or ONE["summarization"]
    return Case(strategy, "full", place, overrides, one.task, **{"note": one.note, **other}, reference=one)


def of_task(task: str, strategy: str, technique: str, *overrides: str) -> Case:
    settings = ("--technique", technique, "--parallel", strategy.partition(",")[0].lower(), *overrides)
    one = ONE[f"{task}, {technique}"]
    return Case(strategy, technique, one.place, settings, task, reference=one)


def of_family(one: Case, strategy: str, place: Path, *overrides: str, launch: str = "two_ranks") -> Case:
    return Case(strategy, "full", place, (*ALL, *overrides), one.task, one.note, one.model, launch, reference=one)


def divided(note: str, *overrides: str) -> Case:
    return chat("MP", "full", MP, *WHOLE_BATCH, *TWO_GPUS, *overrides, note=note, launch="fake_machine")


CASES = [
    *(
        chat("one device, padded", technique, place, *WHOLE_BATCH, "--padding_free", "no", launch="one_device")
        for technique, place in (("full", FULL), ("lora", LORA), ("qlora", QLORA))
    ),
    divided("", "--device_map", "even"),
    divided("every weight, checkpointed", *ALL, "--gradient_checkpointing", "--use_reentrant"),
    sharded("DDP", "full", "--parallel", "ddp", *OF_RANK),
    chat("DDP", "lora", DDP, *OF_RANK),
    chat("DDP", "qlora", QLORA, "--parallel", "ddp", "--devices", "2", *OF_RANK),
    sharded("DDP, accumulated", "full", "--parallel", "ddp", *ACCUMULATED),
    chat("DDP, accumulated", "lora", DDP, *ACCUMULATED),
    sharded("FSDP2", "full", *OF_RANK),
    sharded("FSDP2", "full", *OF_RANK, *ALL, "--gradient_checkpointing", note="every weight, checkpointed"),
    sharded("FSDP2", "lora", *OF_RANK),
    sharded("FSDP2", "qlora", *OF_RANK),
    sharded("FSDP2, hybrid", "full", *TWO_COPIES, launch="four_ranks"),
    sharded("FSDP2, hybrid", "lora", *TWO_COPIES, launch="four_ranks"),
    sharded("FSDP2, hybrid, accumulated", "full", *TWO_COPIES_ACCUMULATED, launch="four_ranks"),
    sharded("FSDP2, accumulated", "full", *ACCUMULATED),
    sharded("FSDP2, accumulated", "lora", *ACCUMULATED),
    *(zero(f"ZeRO-{stage}", technique, *OF_RANK) for stage in (1, 2, 3) for technique in ("full", "lora")),
    zero("ZeRO-3, accumulated", "full", *ACCUMULATED, *ALL, note="every weight"),
    pipeline("PP, 1F1B", "full", *STAGES),
    pipeline("PP, 1F1B", "full", *STAGES, *ALL, note="every weight"),
    pipeline("PP, 1F1B", "lora", *STAGES),
    pipeline("PP, GPipe", "full", *STAGES, *GPIPE),
    pipeline("PP, GPipe", "lora", *STAGES, *GPIPE),
    pipeline("PP, GPipe, accumulated", "full", *STAGES_ACCUMULATED, *GPIPE),
    sequence("SP", "full", *WHOLE_BATCH),
    sequence("SP", "full", *WHOLE_BATCH, *ALL, "--gradient_checkpointing", note="every weight, checkpointed"),
    sequence("SP", "lora", *WHOLE_BATCH),
    sequence("SP", "qlora", *WHOLE_BATCH),
    sequence("SP, accumulated", "full", *OF_RANK, "--gradient_accumulation_steps", "2"),
    sequence("SP, FSDP2", "full", *WHOLE_BATCH, "--parallel", "fsdp"),
    sequence("SP, FSDP2", "lora", *WHOLE_BATCH, "--parallel", "fsdp"),
    sequence("SP, two groups", "full", *OF_RANK, "--devices", "4", launch="four_ranks"),
    sequence("SP, two groups, FSDP2", "lora", *OF_RANK, "--devices", "4", "--parallel", "fsdp", launch="four_ranks"),
    *(
        classifying(way, technique, *size)
        for way, size in (("DDP", OF_RANK), ("PP", STAGES), ("TP", WHOLE_BATCH))
        for technique in ("full", "lora")
    ),
    classifying("TP, accumulated", "full", *OF_RANK, "--gradient_accumulation_steps", "2"),
    *(of_task("visual_questions", "DDP", technique, *OF_RANK) for technique in ("full", "lora")),
    *(
        of_task("preferences", way, technique, *size)
        for way, size in (("DDP", OF_RANK), ("DDP, accumulated", ACCUMULATED))
        for technique in ("full", "lora")
    ),
    of_task("rewards", "DDP", "full", "--batch_size", "8"),
    of_task("rewards", "DDP", "lora", "--batch_size", "8"),
    of_task("rewards", "DDP, accumulated", "full", "--batch_size", "4", "--gradient_accumulation_steps", "2"),
    summarizing("Seq2SeqTrainer", TORCHRUN, *OF_RANK),
    summarizing("plain loop, Accelerate", ACCELERATE, *OF_RANK),
    summarizing("plain loop, torch.distributed", MACHINES, *OF_RANK),
    summarizing("Seq2SeqTrainer, accumulated", TORCHRUN, *ACCUMULATED),
    summarizing("plain loop, Accelerate, accumulated", ACCELERATE, *ACCUMULATED),
    summarizing("plain loop, torch.distributed, accumulated", MACHINES, *ACCUMULATED),
    summarizing("plain loop, torch.distributed, accumulated", MACHINES, *ACCUMULATED, *OVERLAPPED, note="overlapped"),
    summarizing("plain loop, one device", ACCELERATE, *TWO_PARTS, *OF_RANK, launch="one_device"),
]
IN_TEST_ALL = {
    "MP, full, every weight, checkpointed",
    "DDP, accumulated, full", "FSDP2, hybrid, lora", "FSDP2, hybrid, accumulated, full",
    "FSDP2, accumulated, lora", "ZeRO-1, lora", "ZeRO-2, full", "ZeRO-3, lora", "PP, GPipe, lora",
    "classification, DDP, full", "classification, PP, lora",
    "classification, TP, accumulated, full", "visual_questions, DDP, full", "preferences, DDP, lora",
    "preferences, DDP, accumulated, full", "rewards, DDP, lora", "rewards, DDP, accumulated, full",
    "SP, lora", "SP, FSDP2, full", "SP, two groups, FSDP2, lora",
    "summarization, Seq2SeqTrainer, accumulated, full",
    "summarization, plain loop, torch.distributed, accumulated, full",
}  # fmt: skip
"""Cases that `make test` leaves out: it has their strategy, technique and way to accumulate in other pairs."""
ROBERTA = one_device_of(
    "full", CLASSIFICATION, "--parallel", "single", *WHOLE_BATCH, task="classification", note="RoBERTa",
    model="roberta", sgd=sgd("4.2", "0.03"),
)  # fmt: skip
THREE_PARTS = one_device_of(
    "full", TORCHRUN, *TWO_PARTS, "--partitions", "3", *OF_RANK, task="summarization", note="three parts",
    sgd=sgd("0.85", "0.1"),
)  # fmt: skip
QWEN3_5, GEMMA4 = (
    one_device_of("full", FULL, *WHOLE_BATCH, *ALL, note=name, model=model, sgd=sgd(clip, "0.05"))
    for name, model, clip in (("Qwen3.5", "qwen3_5_text", "6.6"), ("Gemma 4", "gemma4_text", "6.2"))
)
MORE_CASES = [
    classifying("PP", "full", *STAGES, reference=ROBERTA),
    classifying("TP", "full", *WHOLE_BATCH, reference=ROBERTA),
    summarizing("Seq2SeqTrainer", TORCHRUN, *OF_RANK, "--partitions", "3", reference=THREE_PARTS),
    summarizing("plain loop, torch.distributed", MACHINES, *OF_RANK, "--partitions", "3", reference=THREE_PARTS),
    of_family(QWEN3_5, "FSDP2", SHARDED, *OF_RANK, "--gradient_checkpointing"),
    of_family(GEMMA4, "MP", MP, *WHOLE_BATCH, *TWO_GPUS, "--device_map", "even", launch="fake_machine"),
    of_family(GEMMA4, "FSDP2", SHARDED, *OF_RANK, "--gradient_checkpointing"),
]
"""Another model of a kind, parts of the rows that ranks cannot share evenly, and two families whose layers differ."""
CONTROL = chat("rows in another order", "full", FULL, *WHOLE_BATCH, "--seed", "7", launch="one_device")
STATES_ARE_SHARED_BY = (
    "DDP, lora", "FSDP2, full", "FSDP2, lora", "FSDP2, hybrid, full", "ZeRO-1, full", "ZeRO-2, lora", "ZeRO-3, full",
    "ZeRO-3, lora", "PP, 1F1B, full", "PP, 1F1B, lora", "SP, lora",
    "SP, two groups, full", "classification, PP, full", "classification, TP, full",
    "classification, TP, lora",
    "classification, DDP, lora", "visual_questions, DDP, lora", "preferences, DDP, lora",
    "summarization, Seq2SeqTrainer, full", "summarization, plain loop, Accelerate, full",
    "summarization, plain loop, torch.distributed, full",
)  # fmt: skip
"""Cases that each have the optimizer's states, and the schedule of its rate, in a way of their own: divided, wrapped by
a library, or stepped in a loop of ours. The others differ in their gradients, which SGD shows as well."""
BY_NAME = {str(case): case for case in CASES}
OVER_20_STEPS = [BY_NAME[name].with_adamw() for name in STATES_ARE_SHARED_BY]
Runs = dict[str, Trained]
Weights = dict[str, torch.Tensor]
Differences = dict[Case, tuple[float, float]]
Launch = Callable[..., Runs]


@pytest.fixture(scope="module")
def launch(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    run_several: Callable[..., Runs],
    tiny_models: dict[str, str],
) -> Launch:
    """Run, of the selected cases and their references, those of a launch in one start."""
    found = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    selected = [case for case in found if isinstance(case, Case)]
    needed = dict.fromkeys([case.reference for case in selected if case.reference] + selected)

    def launched(name: str, ranks: int, starter: str = "") -> Runs:
        runs = {
            str(case): (case.place, case.settings(tiny_models[case.model or case.task]))
            for case in needed
            if case.launch == name
        }
        logits_at_once = 0 if name == "one_device" else SOME_LOGITS
        return run_several(tmp_path_factory.mktemp(name), runs, ranks, starter, logits_at_once)

    return launched


@pytest.fixture(scope="module")
def one_device(launch: Launch) -> Runs:
    return launch("one_device", 1)


@pytest.fixture(scope="module")
def two_ranks(launch: Launch) -> Runs:
    return launch("two_ranks", 2)


@pytest.fixture(scope="module")
def four_ranks(launch: Launch) -> Runs:
    return launch("four_ranks", 4)


@pytest.fixture(scope="module")
def deepspeed(needs_deepspeed: None, launch: Launch) -> Runs:
    """In processes without the others' runs: it changes PyTorch's own functions."""
    return launch("deepspeed", 2)


@pytest.fixture(scope="module")
def fake_machine(fake_gpus: None, launch: Launch) -> Runs:
    """One process, and a model on two devices."""
    return launch("fake_machine", 1, "tests.fake_gpus.run")


@pytest.fixture
def one(case: Case, one_device: Runs) -> Trained:
    """The single-device reference, or the case itself where it is one."""
    return one_device[str(case.reference or case)]


@pytest.fixture
def other(case: Case, request: pytest.FixtureRequest) -> Trained:
    """The case."""
    return request.getfixturevalue(case.launch)[str(case)]


@pytest.fixture(scope="module")
def differences() -> Iterator[Differences]:
    """Largest ones of losses and weights, by case; kept in a file where that is asked for."""
    found: Differences = {}
    yield found
    if KEEP in os.environ:
        measured = []
        for case in CASES:
            about = {name: getattr(case, name) for name in ("task", "strategy", "technique", "note")}
            losses, weights = found.get(case, (None, None))
            measured.append({**about, "loss_difference": losses, "weight_difference": weights})
        EQUIVALENCE.write_text(json.dumps(merged(measured), indent=1) + "\n", encoding="utf-8")


def saved_weights(run: Trained) -> Weights:
    """Of the best checkpoint, as it was saved for plain libraries: the adapter, or the model."""
    adapter = run.results / "adapter"
    files = (adapter if adapter.exists() else run.results / "model").glob("*.safetensors")
    return {name: weight for file in files for name, weight in load_file(file).items()}


def weight_difference(one: Trained, other: Trained) -> float:
    """After five steps; where an earlier checkpoint was the best, what was saved of that is equal, too."""
    mine, theirs = saved_weights(one), saved_weights(other)
    assert mine.keys() == theirs.keys()
    if other.record["checkpoints"]["best"] == "checkpoint-5":
        return largest_difference(mine, theirs)
    assert largest_difference(mine, theirs) < 1e-5
    return largest_difference(one.weights(5), other.weights(5))


def largest_difference(mine: Weights, theirs: Weights) -> float:
    """Of all that is `mine`: `theirs` may have frozen weights, too."""
    return torch.stack([(mine[name] - theirs[name]).abs().max() for name in mine]).max().item()


def loss_difference(one: Trained, other: Trained, steps: int) -> float:
    """Relative, of the steps' losses and of the validations, before the first and after each.

    With rewards a step's loss is a mean of advantages, and near 0: its difference is absolute.
    """
    found = []
    for kind in ("training_losses", "validation_losses"):
        mine, theirs = one.losses(kind), other.losses(kind)
        assert len(mine) == len(theirs) == steps + (kind == "validation_losses")
        size = 1 if one.record["config"]["task"] == "rewards" and kind == "training_losses" else None
        found += [abs(a - b) / (size or abs(a)) for a, b in zip(mine, theirs, strict=True)]
    return torch.tensor(found).max().item()  # Python's own would pass over what is no number


def counted(run: Trained) -> dict[str, Any]:
    """What is equal without rounding; of an evaluation, only what is no measured time."""
    names = ["effective_batch_size", "steps", "trained_parameters", "flops_per_token"]
    if "best_accuracy" in run.record:
        names += ["validation_accuracies", "best_accuracy"]
    if run.record["config"]["task"] == "classification":
        names.append("quality")
    return {name: run.record[name] for name in names}


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES if str(case) not in IN_TEST_ALL),
        *(pytest.param(case, marks=pytest.mark.slow) for case in [*map(BY_NAME.get, sorted(IN_TEST_ALL)), *MORE_CASES]),
    ],
    ids=str,
)
def test_five_sgd_steps_are_one_devices(case: Case, one: Trained, other: Trained, differences: Differences) -> None:
    assert counted(other) == counted(one)
    assert other.record["checkpoints"] == one.record["checkpoints"]
    found = loss_difference(one, other, 5), weight_difference(one, other)
    assert all(difference < 1e-5 for difference in found)
    differences[case] = found
    assert forgotten(other) == pytest.approx(forgotten(one), rel=1e-4, abs=1e-6)


def forgotten(run: Trained) -> list[float]:
    """Loss on general texts and divergence from the base, before and after; nothing of other tasks than chats."""
    if run.record["config"]["task"] != RunConfig.task:
        return []
    quality = run.record["quality"]
    return [quality[when][name] for when in ("before", "after") for name in ("general_loss", "answer_drift")]


@pytest.mark.parametrize("case", ONE.values(), ids=str)
def test_one_devices_steps_are_fit_to_compare_with(case: Case, one: Trained, tiny_models: dict[str, str]) -> None:
    """Some are clipped and some are not, the best checkpoint is the best by validation, and the weights move."""
    record, clip = one.record, one.record["config"]["max_grad_norm"]
    state = json.loads((one.results / "checkpoints" / "checkpoint-5" / "trainer_state.json").read_text())
    norms = [entry["grad_norm"] for entry in state["log_history"] if "grad_norm" in entry][:4]  # the last rate is small
    assert min(norms) < 0.95 * clip < 1.05 * clip < max(norms), norms
    losses = [(loss, step) for step, loss in record["validation_losses"] if step]
    accuracies = [(-accuracy, step) for step, accuracy in record.get("validation_accuracies") or [] if step]
    _, best = min(accuracies if case.task == "classification" else losses)  # of equals the first
    assert record["checkpoints"]["best"] == f"checkpoint-{best}"
    same = case.task == "rewards"  # the last rate is small, and greedy answers may not change
    assert len({loss for loss, _ in losses}) >= 5 - same
    assert largest_difference(*start_and_end(case, one, tiny_models)) > 1e-3


def start_and_end(case: Case, one: Trained, tiny_models: dict[str, str]) -> tuple[Weights, Weights]:
    """The last of five steps' weights, and what they were before; half of each adapter starts at 0."""
    trained = {name.removeprefix("bert."): weight for name, weight in one.weights(5).items()}
    zeros = {name: torch.zeros_like(weight) for name, weight in trained.items() if "lora_B" in name}
    base = load_file(Path(tiny_models[case.task]) / "model.safetensors")
    start = zeros or {name: weight for name, weight in base.items() if name in trained}
    return start, trained


@pytest.mark.parametrize("case", [CONTROL], ids=str)
def test_rows_in_another_order_are_told_apart(one: Trained, other: Trained) -> None:
    assert loss_difference(one, other, 5) > 1e-3
    assert weight_difference(one, other) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", OVER_20_STEPS, ids=str)
def test_losses_of_20_adamw_steps_are_one_devices(one: Trained, other: Trained) -> None:
    assert counted(other) == counted(one)
    assert loss_difference(one, other, 20) < 1e-5
    first, *_, last = one.losses("training_losses")
    assert last < first
