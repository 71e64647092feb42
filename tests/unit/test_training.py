"""The truth checks fail when they should; the loop trains as the library does, and stops, and resumes."""

import ast
import copy
import importlib
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    Trainer,
    TrainerState,
    TrainingArguments,
)

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.base.specs import PARALLELISMS
from common.data.batches import make_collator
from common.data.rows import IGNORED_LABEL, Splits
from common.data.splits import load_splits, tokenized, tokens_of
from common.hardware.devices import GIB
from common.models.loading import load_base_model, load_tokenizer
from common.models.merging import next_token_logits
from common.models.real_models import minilm_folder
from common.models.trained_weights import add_lora
from common.planning.step_speed import COUNTED
from common.runtime.rank import end_rank
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.tasks.objectives import ACCURACY, VALIDATION_LOSS, answer_results
from common.training.checkpoints import (
    BAD,
    FULL_STATE,
    HOLDS,
    STATE_FILE,
    WEIGHTS,
    UnfinishedCheckpoint,
    found_in,
    holds,
    newest_whole,
    steps_at,
    verify,
)
from common.training.export import rows_to_compare
from common.training.loop import TrainingLoop
from common.training.optimizers import make_optimizer, make_schedule, training_arguments
from common.training.part import Part
from common.training.results import check_rows_seen, check_training, count_steps, training_flops
from tests.pace import patient
from tests.unit.toys import train


@pytest.mark.parametrize(
    ("rows_by_rank", "row_uses", "said"),
    [
        ([[0, 2], [1, 3]], 4, ""),
        ([[0, 2, 1, 3], [1, 3, 2, 0]], 8, ""),
        ([[0], [2]], 2, ""),
        ([[0, 1], [2, 3, 0]], 4, "5 rows were used, but the steps had room for 4"),
        ([[0, 1], [2]], 4, "3 rows were used, but the steps had room for 4"),
        ([[0, 1], [0, 1]], 4, "Row 2 was used 0 times, but row 1 2 times"),
        ([[0, 1, 2], [2]], 4, "Row 3 was used 0 times, but row 2 2 times"),
        ([[0, 2], [1, 3]], 8, "4 rows were used, but the steps had room for 8"),
    ],
    ids=["an epoch", "two epochs", "half an epoch", "one row repeated",
         "one row dropped", "both ranks used the same rows",
         "one row twice, one never",
         "an epoch dropped"],
)  # fmt: skip
def test_rows_skipped_or_repeated_are_refused(rows_by_rank: list[list[int]], row_uses: int, said: str) -> None:
    with pytest.raises(RuntimeError, match=said) if said else nullcontext():
        check_rows_seen(rows_by_rank, row_count=4, row_uses=row_uses)


SMALL_LLAMA = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
SMALL_BERT = {**SMALL_LLAMA, "model_type": "bert", "num_hidden_layers": 1, "type_vocab_size": 2}
SMALL_BART = {
    "model_type": "bart", "d_model": 8, "vocab_size": 32, "max_position_embeddings": 64,
    **{f"{side}_{what}": value for side in ("encoder", "decoder")
       for what, value in (("layers", 1), ("ffn_dim", 16), ("attention_heads", 2))},
}  # fmt: skip
LEARNT_ROWS = [{"input_ids": [1] * length, "labels": [1] * length} for length in (3, 5)]
LABELLED_ROW, SUMMARY_ROW = {"input_ids": [1] * 4, "labels": 2}, {"input_ids": [1] * 4, "labels": [1] * 3}


def run_of_shape(folder: Path, config: dict[str, Any], **settings: Any) -> RunConfig:
    """A run with a model of a config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    return RunConfig(model=str(folder), weights="random", **{"technique": "full", "target_modules": "all", **settings})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("settings", "per_weight", "of_head", "adapters"),
    [
        ({}, 6, 6, 0),
        ({"target_modules": "all-linear"}, 6, 4, 0),
        # of rank 2: (inputs + outputs) * 2 in each of seven projections
        (
            {"technique": "lora", "target_modules": "all-linear", "lora_r": 2},
            4,
            4,
            2 * 2 * (16 + 12 + 12 + 16 + 3 * 24),
        ),
        ({"gradient_checkpointing": True}, 6, 6, 0),
        ({"parallel": "pp", "devices": 2, "micro_batches": 4, "schedule": "gpipe"}, 6, 6, 0),
    ],
    ids=["full", "linear layers", "LoRA", "checkpointed", "micro-batches"],
)
def test_a_token_takes_six_operations_per_trained_weight_and_four_per_frozen_one(
    tmp_path: Path, settings: dict[str, Any], per_weight: int, of_head: int, adapters: int, tied: bool
) -> None:
    """Attention takes six per layer, channel and earlier token; the last token of a row has no label for the head."""
    run = run_of_shape(tmp_path, {**SMALL_LLAMA, "tie_word_embeddings": tied}, **settings)
    layers, head = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16), 32 * 8
    expected = sum(
        (per_weight * layers + 6 * adapters) * length + of_head * head * (length - 1) + 6 * 2 * 8 * length**2
        for length in (3, 5)
    )
    flops = training_flops(run, LEARNT_ROWS, 1, 1)
    assert flops == {"flops_per_token": expected / 8, "flops_formula": COUNTED}


def test_of_a_classifier_the_head_reads_one_token_and_attention_the_whole_text(tmp_path: Path) -> None:
    run = run_of_shape(tmp_path, SMALL_BERT, task="classification")
    expected = 6 * (4 * 64 + 2 * 128) * 4 + 6 * 3 * 8 + 12 * 8 * 4**2
    assert training_flops(run, [LABELLED_ROW], 1, 1)["flops_per_token"] == expected / 4
    other = {**LABELLED_ROW, "labels": 0}  # of the same three classes
    assert training_flops(run, [LABELLED_ROW, other], 1, 1)["flops_per_token"] == expected / 4


def test_of_an_encoder_decoder_texts_and_summaries_are_counted_each_in_its_half(tmp_path: Path) -> None:
    run = run_of_shape(tmp_path, SMALL_BART, task="summarization")
    attention, mlp, head = 4 * 64, 2 * 128, 32 * 8
    reads_text = attention + mlp + attention / 2  # cross attention's keys and values, too
    reads_summary = attention + attention / 2 + mlp + head
    scores = 4 * 4 + 3 * 3 / 2 + 3 * 4
    expected = 6 * (reads_text * 4 + reads_summary * 3) + 12 * 8 * scores
    assert training_flops(run, [SUMMARY_ROW], 1, 1)["flops_per_token"] == round(expected / (4 + 3))


@pytest.mark.parametrize(
    ("shape", "settings"),
    [({"model_type": "unheard-of"}, {}), ({}, {"optim": "adafactor"})],
    ids=["model", "optimizer"],
)
def test_of_what_the_planner_does_not_know_the_weights_alone_are_counted(
    tmp_path: Path, shape: dict[str, str], settings: dict[str, str]
) -> None:
    run = run_of_shape(tmp_path, {**SMALL_LLAMA, **shape}, **settings)
    assert training_flops(run, LEARNT_ROWS, 10, 100) == {
        "flops_per_token": 6 * 10 + 4 * 90,
        "flops_formula": "6 per trained weight, 4 per frozen one; attention's scores are not counted",
    }
    with_lookup = training_flops(run, LEARNT_ROWS, 110, 100)
    assert with_lookup["flops_per_token"] == 6 * 100


def test_of_many_rows_some_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of_shape(tmp_path, SMALL_LLAMA)
    every, one = (training_flops(run, rows, 1, 1) for rows in (LEARNT_ROWS * 5, LEARNT_ROWS[:1]))
    assert every == training_flops(run, LEARNT_ROWS, 1, 1)
    monkeypatch.setattr("common.training.results.COUNTED_ROWS", 5)
    assert training_flops(run, LEARNT_ROWS * 5, 1, 1) == one


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gradient_checkpointing": True, "use_reentrant": True}, (True, {"use_reentrant": True})),
        ({"gradient_checkpointing": True, "use_reentrant": False}, (True, {"use_reentrant": False})),
        ({}, (False, None)),
    ],
    ids=["reentrant", "not reentrant", "none"],
)
def test_the_way_of_checkpointing_is_set_explicitly(
    run_config: RunConfig, tmp_path: Path, settings: dict[str, bool], expected: tuple
) -> None:
    arguments = training_arguments(replace(run_config, **settings), tmp_path)
    assert (arguments.gradient_checkpointing, arguments.gradient_checkpointing_kwargs) == expected


# -- one loop


def test_no_class_is_a_trainer_of_transformers_and_none_of_its_private_methods_is_called() -> None:
    """Nor read or replaced: by the modules' classes, and by the names in their syntax trees, but those of `self`."""
    private = {name for name in vars(Trainer) if name.startswith("_") and not name.startswith("__")}
    assert "_inner_training_loop" in private
    found = []
    for file in (REPOSITORY / "common").rglob("*.py"):
        name = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        members = vars(importlib.import_module(name.removesuffix(".__init__"))).values()
        kinds = [each for each in members if isinstance(each, type) and each.__module__.startswith("common.")]
        found += [each for each in kinds if issubclass(each, Trainer)]
        reached = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        found += [
            f"{name}: {node.attr}" for node in reached if node.attr in private and ast.unparse(node.value) != "self"
        ]
    assert not found


def test_the_recipes_losses_and_weights_are_those_of_transformers_own_trainer(tmp_path: Path) -> None:
    """Of the same rows, padded where ours are packed, and in accumulated batches; dropout draws other numbers."""
    run = replace(
        literal_of(Path("2.1_lora_finetuning/run_0_cpu_x1")), lora_dropout=0.0, train_rows=40, validation_rows=8,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1, eval_steps=0.2,
        report_to="none", results_root=str(tmp_path),
    )  # fmt: skip
    tokenizer = load_tokenizer(run)
    data = tokenized(load_splits(run), tokenizer, run)
    ours = add_lora(load_base_model(run, {"": "cpu"}), run)
    theirs, loop = copy.deepcopy(ours), TrainingLoop(ours, tokenizer, data, RunRecorder(run, ALONE))
    order = [row for rows in loop.batches.steps() for row in rows]
    train(loop)
    arguments = training_arguments(run, tmp_path, kind=TrainingArguments, train_sampling_strategy="sequential")
    arguments = replace(arguments, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    rows, optimizer = [data.train[row] for row in order], make_optimizer(theirs, run)
    trainer = Trainer(
        theirs, arguments, make_collator(tokenizer), rows,
        optimizers=(optimizer, make_schedule(optimizer, run, len(order) // 8)),
    )  # fmt: skip
    trainer.train()
    losses, expected = ([each["loss"] for each in log if "loss" in each] for log in
                        (loop.state.log_history, trainer.state.log_history))  # fmt: skip
    assert len(set(expected)) == 5
    assert losses == pytest.approx(expected, rel=1e-5)
    end_rank()


TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ALONE = Rank(0, 1, "cpu", "python")
NOTHING_LEARNED = 1e-12
"""A rate of learning that changes nothing: the first validation is the best."""


@pytest.fixture
def loop_of(tmp_path: Path) -> Iterator[Callable[..., TrainingLoop]]:
    """The loop of a tiny classifier, four steps an epoch; what differs is told."""

    def make(**settings: Any) -> TrainingLoop:
        run = RunConfig(
            task="classification",
            technique="full",
            target_modules="all",
            per_device_train_batch_size=4,
            model="all-minilm-l6-v2",
            report_to="none",
            results_root=str(tmp_path),
            **{"num_train_epochs": 1, "learning_rate": 0.01, "eval_steps": 0.1, **settings},
        )
        tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
        rows = tokens_of([{"text": "a ticket " * n, "class": n % 2} for n in range(16)], tokenizer, run)
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **TINY, **NO_DROPOUT))
        return TrainingLoop(model, tokenizer, Splits(rows, rows[:5], []), RunRecorder(run, ALONE))

    yield make
    end_rank()


@pytest.fixture
def trained(loop_of: Callable[..., TrainingLoop]) -> Callable[..., TrainingLoop]:
    """As `loop_of`, after its training."""
    return lambda **settings: train(loop_of(**settings))


def losses_of(loop: TrainingLoop) -> list[float]:
    return [entry["loss"] for entry in loop.state.log_history if "loss" in entry]


def test_loader_processes_change_no_loss(trained: Callable[..., TrainingLoop]) -> None:
    straight, by_workers = (trained(num_train_epochs=2, dataloader_num_workers=workers) for workers in (0, 2))
    assert losses_of(by_workers) == losses_of(straight)
    assert len(set(losses_of(straight))) == 8
    assert check_training(by_workers)[0]["samples"] == 32


@pytest.mark.parametrize("parallel", PARALLELISMS)
def test_every_parallelism_takes_loader_processes_and_an_early_stop(parallel: str) -> None:
    needed = {"single": {}, "mp": {"stages": 2}, "pp": {"devices": 2, "micro_batches": 2},
              "tp": {"devices": 2, "task": "classification"}}.get(parallel, {"devices": 2})  # fmt: skip
    run = RunConfig(technique="full", parallel=parallel, dataloader_num_workers=2, early_stopping_patience=2, **needed)
    assert (run.parallel, run.dataloader_num_workers, run.early_stopping_patience) == (parallel, 2, 2)


@pytest.mark.parametrize(("early_stop", "steps"), [(2, 3), (0, 8)])
def test_training_ends_after_validations_without_a_better_model(
    trained: Callable[..., TrainingLoop], early_stop: int, steps: int
) -> None:
    loop = trained(learning_rate=NOTHING_LEARNED, num_train_epochs=2, early_stopping_patience=early_stop)
    assert (loop.state.global_step, Path(loop.state.best_model_checkpoint).name) == (steps, "checkpoint-1")
    assert [share["samples"] for share in check_training(loop)] == [4 * steps]


@pytest.mark.parametrize("best", ["there", "gone", "damaged"])
def test_what_was_trained_to_its_end_can_be_trained_longer(
    trained: Callable[..., TrainingLoop], best: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a run of another name; no later model is better than the first one's best, or the next one is."""
    folder = trained(learning_rate=NOTHING_LEARNED).saver.folder
    first = folder / "checkpoint-1"
    if best == "gone":
        shutil.rmtree(first)
    if best == "damaged":
        (first / STATE_FILE).write_text("{}")
    again = {"run_name": "longer", "resume_from_checkpoint": str(folder / "checkpoint-4")}
    longer = trained(learning_rate=NOTHING_LEARNED, num_train_epochs=2, **again)
    assert longer.state.global_step == 8
    assert ("checkpoint-1, is gone or damaged" in capsys.readouterr().out) == (best != "there")
    own = longer.saver.folder / "checkpoint-5"
    assert Path(longer.state.best_model_checkpoint) == (first if best == "there" else own)


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_short_run_saves_its_best_weights_and_a_full_state_at_the_end(
    trained: Callable[..., TrainingLoop],
) -> None:
    loop = trained(learning_rate=NOTHING_LEARNED)
    folder, saves = loop.saver.folder, loop.saver.for_record()
    assert {path.name: holds(path) for path in found_in(folder)} == {
        "checkpoint-1": WEIGHTS,
        "checkpoint-4": FULL_STATE,
    }
    assert (saves["best_weights"], saves["full_states"]) == (1, 1)
    assert saves["bytes"] > bytes_below(folder) * 0.9
    assert 0 < saves["longest_s"] < saves["held_up_s"] < loop.work.reporting_s
    assert bytes_below(folder / "checkpoint-1") < 0.6 * bytes_below(folder / "checkpoint-4")


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_run_ends_with_its_best_weights_also_where_they_are_written_while_it_goes_on(
    loop_of: Callable[..., TrainingLoop], monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """The third of four validations is the best; what is written meanwhile takes until the next one has ended."""
    monkeypatch.setattr("common.training.saver.LITTLE_BYTES", 0 if goes_on else GIB)
    loop, seen = loop_of(save_steps=4), {}
    write = loop.part.write

    def accuracy_at(step: int) -> float:
        seen[step] = copy.deepcopy(loop.model.state_dict())
        return (0.1, 0.2, 0.3, 0.0)[step - 1]

    def write_late(folder: Path, *given: Any) -> list[Path]:
        deadline_s = time.monotonic() + patient(60)
        while goes_on and steps_at(folder) == max(seen) < 4 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return write(folder, *given)

    monkeypatch.setattr(loop.part, "write", write_late)
    train(with_accuracies(loop, accuracy_at))
    assert {found.name: verify(found)[HOLDS] for found in found_in(loop.saver.folder)} == {
        "checkpoint-3": WEIGHTS,
        "checkpoint-4": FULL_STATE,
    }
    assert {held: len(sizes) for held, sizes in loop.saver.sizes.items()} == {WEIGHTS: 3, FULL_STATE: 1}
    assert TrainerState.load_from_json(str(loop.saver.folder / "checkpoint-3" / STATE_FILE)).global_step == 3
    torch.testing.assert_close(dict(loop.model.state_dict()), dict(seen[3]), rtol=0, atol=0)
    loop.part.load(loop.saver.folder / "checkpoint-4", is_full=True)
    torch.testing.assert_close(dict(loop.model.state_dict()), dict(seen[4]), rtol=0, atol=0)
    assert any(not torch.equal(seen[4][weight], seen[3][weight]) for weight in seen[3])


def when_written(unfinished: UnfinishedCheckpoint) -> bool:
    """As `is_written`, but on a machine whose disk is fast."""
    if unfinished.written:
        unfinished.written.result()
    return True


def with_accuracies(loop: TrainingLoop, accuracy_at: Callable[[int], float]) -> TrainingLoop:
    """The loop, whose validation after a step finds the accuracy that is told."""
    own = loop.validate
    loop.validate = lambda: {**own(), ACCURACY: accuracy_at(loop.state.global_step)}
    return loop


def test_no_more_minutes_than_allowed_are_lost(trained: Callable[..., TrainingLoop]) -> None:
    assert trained(learning_rate=NOTHING_LEARNED, max_lost_minutes=1e-9).saver.for_record()["full_states"] == 4


@pytest.mark.parametrize("little_bytes", [0, pytest.param(GIB, marks=pytest.mark.slow)])
def test_a_run_that_lost_some_steps_finds_the_best_weights_of_a_straight_one(
    loop_of: Callable[..., TrainingLoop], little_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best weights are newer than the full state that is resumed.

    What is not little is written while training goes on.
    """
    monkeypatch.setattr("common.training.saver.LITTLE_BYTES", little_bytes)
    monkeypatch.setattr(UnfinishedCheckpoint, "is_written", when_written)
    settings = {"learning_rate": 0.003, "num_train_epochs": 2, "save_steps": 3}
    monkeypatch.setenv("FAULT", "raise step=6 point=batch")
    monkeypatch.setattr("common.runtime.faults._arrivals", Counter())
    lost = with_accuracies(loop_of(**settings), lambda step: step)
    with pytest.raises(ValueError, match="on purpose"):
        train(lost)
    monkeypatch.delenv("FAULT")
    folder = lost.saver.folder
    newest = "checkpoint-5" if little_bytes else "checkpoint-4"  # the last one was not committed yet
    assert {path.name: holds(path) for path in found_in(folder)} == {"checkpoint-3": FULL_STATE, newest: WEIGHTS}
    resumed = loop_of(**settings, run_name="resumed", resume_from_checkpoint=str(folder / "checkpoint-3"))
    straight = loop_of(**settings, run_name="straight")
    for loop in (resumed, straight):
        assert train(with_accuracies(loop, lambda step: step)).state.best_global_step == 8
    torch.testing.assert_close(resumed.model.state_dict(), straight.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("killed_at", "kept"), [(5, 2), (6, 4)])
def test_killed_while_a_full_state_is_being_written_the_one_before_is_used(
    loop_of: Callable[..., TrainingLoop], monkeypatch: pytest.MonkeyPatch, killed_at: int, kept: int
) -> None:
    """That of step 4 has its name after step 5."""
    monkeypatch.setattr("common.training.saver.LITTLE_BYTES", 0)
    monkeypatch.setattr(UnfinishedCheckpoint, "is_written", when_written)
    monkeypatch.setenv("FAULT", f"kill step={killed_at} point=batch")
    loop = with_accuracies(loop_of(num_train_epochs=2, save_steps=2), lambda step: step)
    child = os.fork()
    if not child:
        try:
            train(loop)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    folder = loop.saver.folder
    assert newest_whole(folder) == folder / f"checkpoint-{kept}"
    assert not list(folder.glob(f"*{BAD}"))


def test_when_to_report_and_how_long_to_wait_are_the_settings_of_the_run_that_goes_on(
    trained: Callable[..., TrainingLoop],
) -> None:
    """Three validations without a better model before, one after each step, and two after, one after two steps each."""
    short = trained(learning_rate=NOTHING_LEARNED, early_stopping_patience=3)
    settings = {"run_name": "longer", "resume_from_checkpoint": str(short.saver.folder / "checkpoint-4")}
    longer = trained(learning_rate=NOTHING_LEARNED, num_train_epochs=3, early_stopping_patience=5, **settings)
    assert longer.state.global_step == 8


@pytest.mark.parametrize(("schedule", "rate"), [("cosine", 0.001)])
def test_a_schedule_goes_on_as_in_a_run_that_had_its_learning_rate_from_the_start(
    loop_of: Callable[..., TrainingLoop], schedule: str, rate: float
) -> None:
    """Shown by the rates that are logged, which are those of the optimizer; no validation finds a better model."""

    def rates(**settings: Any) -> tuple[Path, list[float]]:
        loop = with_accuracies(loop_of(lr_scheduler_type=schedule, eval_steps=1, **settings), lambda _: 0.5)
        logged = [each for each in train(loop).state.log_history if "loss" in each and each["step"] > 4]
        return loop.saver.folder, [each["learning_rate"] for each in logged] + loop.schedule.get_last_lr()

    folder, _ = rates(learning_rate=0.003)
    settings = {"learning_rate": rate, "num_train_epochs": 4}
    _, straight = rates(**settings, run_name="straight")
    assert len(set(straight)) > 1
    again = {"run_name": "resumed", "resume_from_checkpoint": str(folder / "checkpoint-4")}
    assert rates(**settings, **again)[1] == straight


@pytest.mark.parametrize(
    "optim",
    ["adamw_torch", "sgd", "adafactor", "adamw_8bit", *(pytest.param(each, marks=pytest.mark.slow) for each in (
        "adamw_torch_fused", "adagrad", "rmsprop", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit",
        "paged_adamw_32bit", "paged_adamw_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit",
    ))],
)  # fmt: skip
def test_an_optimizers_states_come_back_from_a_checkpoint_as_they_were(
    trained: Callable[..., TrainingLoop], loop_of: Callable[..., TrainingLoop], optim: str
) -> None:
    settings = {"optim": optim, "learning_rate": 1e-4, "save_steps": 4}
    before = trained(**settings)
    again = loop_of(**settings, run_name="again")
    for loop in (before, again):
        loop.part.load(before.saver.folder / "checkpoint-4", is_full=True)
    first, second = (loop.optimizer.state_dict() for loop in (before, again))
    assert first["state"] or optim == "sgd"
    torch.testing.assert_close(second["state"], first["state"], rtol=0, atol=0)
    straight, resumed = (
        trained(**settings, num_train_epochs=2, run_name=name, resume_from_checkpoint=checkpoint)
        for name, checkpoint in (("straight", ""), ("resumed", str(before.saver.folder / "checkpoint-4")))
    )
    torch.testing.assert_close(resumed.model.state_dict(), straight.model.state_dict(), rtol=0, atol=0)


def test_a_step_that_overflowed_is_none_of_the_schedules(loop_of: Callable[..., TrainingLoop]) -> None:
    """With fp16 the optimizer's step is skipped then, losses are scaled less, and both is known where one resumes."""

    def overflows_at(step: int, **settings: Any) -> TrainingLoop:
        loop = loop_of(precision="fp16-mixed", **settings)
        loop.model.classifier.bias.register_hook(lambda of: of / (loop.state.global_step != step))
        return train(loop)

    short = overflows_at(2)
    longer = overflows_at(
        -1, num_train_epochs=2, run_name="longer", resume_from_checkpoint=str(short.saver.folder / "checkpoint-4")
    )
    for loop, steps in ((short, 4), (longer, 8)):
        check_training(loop)
        assert (loop.state.global_step, loop.schedule.last_epoch, loop.skipped_steps) == (steps, steps - 1, 1)
        assert {int(state["step"]) for state in loop.optimizer.state.values()} == {steps - 1}
        assert loop.scaler.get_scale() == 2**15


def test_weights_that_are_given_up_take_no_memory_whoever_still_has_them(trained: Callable[..., TrainingLoop]) -> None:
    """As an optimizer's groups have them, and DDP's wrapper."""
    loop = trained()
    held, optimizer = list(loop.model.parameters()), loop.optimizer
    assert sum(weight.untyped_storage().nbytes() for weight in held) > 0
    loop.free()
    held += [weight for group in optimizer.param_groups for weight in group["params"]]
    assert {(weight.untyped_storage().nbytes(), weight.grad) for weight in held} == {(0, None)}
    assert not optimizer.state
    assert all(weight.is_meta for weight in loop.model.parameters())


def test_a_batch_knows_its_answers_before_it_is_on_the_device() -> None:
    """To find them there (`nonzero`) the host would have to wait for a GPU."""

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(operation.name())
            return operation(*args, **(kwargs or {}))

    names: list[str] = []
    ids = torch.arange(12).view(2, 6)
    part = Part(AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=16, **TINY)), RunConfig(), ALONE)
    batch = part.inputs_for_loss({"input_ids": ids, "labels": ids.masked_fill(ids < 3, IGNORED_LABEL)})
    with Operations():
        part.loss(batch, 9).backward()
        part.sums(batch)
    assert {"aten::index.Tensor", "aten::mm", "aten::nonzero"} & set(names) == {"aten::index.Tensor", "aten::mm"}


def test_validation_computes_logits_at_answers_alone_and_the_same_loss(run_config: RunConfig, tmp_path: Path) -> None:
    run = replace(
        run_config, validation_rows=9, per_device_eval_batch_size=4, results_root=str(tmp_path), report_to="none"
    )
    tokenizer, model = load_tokenizer(run), load_base_model(run, {"": "cpu"})
    rows = tokens_of(load_splits(run).validation, tokenizer, run)
    batch, positions = make_collator(tokenizer)(rows), []
    sums = answer_results(next_token_logits(model, batch)[:, :-1], batch["labels"][:, 1:]).sum(0)
    model.lm_head.register_forward_hook(lambda _, __, logits: positions.append(logits.shape[1]))
    loop = TrainingLoop(add_lora(model, run), tokenizer, Splits(rows, rows, []), RunRecorder(run, ALONE))
    assert loop.evaluate()[VALIDATION_LOSS] == pytest.approx((sums[0] / sums[1]).item(), rel=1e-6)
    assert len(positions) == 3
    assert max(positions) < max(len(row["input_ids"]) for row in rows) - 1
    end_rank()


def test_logits_of_a_few_tokens_are_compared_where_the_vocabulary_is_large(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.models.merging.LOGITS_AT_ONCE", 1000)
    rows = [dict.fromkeys(("input_ids", "attention_mask", "labels"), [1] * length) for length in (6, 30, 3)]
    config = LlamaConfig(vocab_size=100)
    loop = SimpleNamespace(
        run=run_config,
        model=SimpleNamespace(config=config),
        validation_rows=rows,
        args=SimpleNamespace(per_device_eval_batch_size=3),
    )
    assert [len(row["input_ids"]) for row in rows_to_compare(loop)] == [6, 3]
    config.vocab_size = 250
    assert [{len(tokens) for tokens in row.values()} for row in rows_to_compare(loop)] == [{4}]


def test_counting_a_phases_tensors_leaves_the_run_as_it_was(trained: Callable[..., TrainingLoop]) -> None:
    def held() -> tuple:
        weights = [(weight.detach().clone(), weight.grad) for weight in loop.model.parameters()]
        return weights, torch.get_rng_state(), list(loop.work.rows)

    loop = trained()
    before = held()
    count_steps(loop)
    torch.testing.assert_close(held(), before, rtol=0, atol=0)
    peaks = {phase: of_devices["cpu"] for phase, of_devices in loop.log.memory.by_phase.items() if of_devices}
    assert peaks.keys() == {"saving", "training", "validation"}
    assert peaks["saving"] < peaks["validation"] < peaks["training"]
