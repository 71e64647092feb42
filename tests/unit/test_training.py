"""The truth checks fail when they should; both loops stop, and go on, alike."""

import copy
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from common.training.digests import digest_of
from common.training.strategy import Strategy, strategy_class
from common.training.trainer import AuditedTrainer, make_trainer, training_arguments
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    TrainerState,
)

from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TASKS, Parallelism
from common.data.batches import EpochBatches, make_collator
from common.data.rows import IGNORED_LABEL
from common.data.splits import load_splits, tokens_of
from common.hardware.devices import GIB
from common.models.loading import load_base_model, load_tokenizer, next_token_logits
from common.models.minilm import minilm_folder
from common.models.trained_weights import add_lora
from common.planning.step_speed import COUNTED
from common.runtime.rank import end_rank
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.tasks.answers import whole_row_results
from common.tasks.objectives import ACCURACY, VALIDATION_LOSS
from common.training.checkpoints import (
    BAD,
    FULL_STATE,
    PARTIAL,
    STATE_FILE,
    WEIGHTS,
    UnfinishedCheckpoint,
    found_in,
    holds,
    newest_whole,
    verify,
)
from common.training.counted_steps import count_steps
from common.training.export import rows_to_compare
from common.training.loop import LoopTrainer
from common.training.results import check_rows_seen, check_training, steps_have_rows, training_flops

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize(
    ("rows_by_rank", "row_uses"), [([[0, 2], [1, 3]], 4), ([[0, 2, 1, 3], [1, 3, 2, 0]], 8), ([[0], [2]], 2)]
)
def test_rows_used_once_per_epoch_pass(rows_by_rank: list[list[int]], row_uses: int) -> None:
    check_rows_seen(rows_by_rank, row_count=4, row_uses=row_uses)


@pytest.mark.parametrize(
    ("rows_by_rank", "row_uses", "said"),
    [
        ([[0, 1], [2, 3, 0]], 4, "5 rows were used, but the steps had room for 4"),
        ([[0, 1], [2]], 4, "3 rows were used, but the steps had room for 4"),
        ([[0, 1], [0, 1]], 4, "4 of 4 rows were used another number of times than 1; row 0: 2 times"),
        ([[0, 1, 2], [2]], 4, "2 of 4 rows were used another number of times than 1; row 2: 2 times"),
        ([[0, 2], [1, 3]], 8, "4 rows were used, but the steps had room for 8"),
    ],
    ids=["one row repeated", "one row dropped", "both ranks used the same rows", "one row twice, one never",
         "an epoch dropped"],
)  # fmt: skip
def test_rows_skipped_or_repeated_are_refused(rows_by_rank: list[list[int]], row_uses: int, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
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


def test_of_a_model_that_the_planner_does_not_know_the_weights_alone_are_counted(tmp_path: Path) -> None:
    run = run_of_shape(tmp_path, {**SMALL_LLAMA, "model_type": "unheard-of"})
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
    assert arguments.ddp_find_unused_parameters is False


def test_of_several_gpus_the_trainer_takes_one(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would put the model into `DataParallel`, or multiply the loss by the number of GPUs."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    arguments = training_arguments(replace(run_config, device="cuda"), tmp_path)
    assert (arguments.n_gpu, arguments.train_batch_size) == (1, run_config.per_device_train_batch_size)


TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


class OneRank(Strategy):
    """A strategy from outside of `common`: a model that nobody divides, and no other rank to agree with."""

    def backward(self, batch: dict[str, torch.Tensor], num_items_in_batch: int, is_last: bool) -> torch.Tensor:
        loss = self.loss(batch, num_items_in_batch)
        loss.backward()
        return loss.detach()


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LOOPS = pytest.mark.parametrize("loop", ["the Trainer's", "ours"])
ALONE = Rank(0, 1, "cpu", "python")
NOTHING_LEARNED = 1e-12
"""A rate of learning that changes nothing: the first validation is the best."""


@pytest.fixture
def trainer_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AuditedTrainer]]:
    """A trainer with one of the two loops and a tiny classifier, four steps an epoch; what differs is told.

    Our loop is that of a parallelism which is registered here, and whose strategy is found by its name.
    """
    toy = Parallelism("toy", "a toy", "it is at hand", in_one_process=True, strategy=f"{__name__}:OneRank")
    classification = TASKS["classification"]
    monkeypatch.setitem(PARALLELISMS, toy.name, toy)
    monkeypatch.setitem(
        TASKS, "classification", replace(classification, parallelisms=(*classification.parallelisms, toy.name))
    )

    def make(loop: str, **settings: Any) -> AuditedTrainer:
        run = RunConfig(
            task="classification",
            technique="full",
            parallel="single" if loop == "the Trainer's" else toy.name,
            target_modules="all",
            per_device_train_batch_size=4,
            model="all-minilm-l6-v2",
            eval_steps=0.1,
            report_to="none",
            results_root=str(tmp_path),
            **{"num_train_epochs": 1, "learning_rate": 0.01, **settings},
        )
        tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
        rows = tokens_of([{"text": "a ticket " * n, "class": n % 2} for n in range(16)], tokenizer, run)
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **TINY, **NO_DROPOUT))
        strategy = strategy_class(run)(run, ALONE)
        trainer_class = LoopTrainer if strategy.takes_steps else AuditedTrainer
        return make_trainer(
            model, tokenizer, rows, rows[:5], RunRecorder(run, ALONE), strategy=strategy, trainer_class=trainer_class
        )

    yield make
    end_rank()


@pytest.fixture
def trained(trainer_of: Callable[..., AuditedTrainer]) -> Callable[..., AuditedTrainer]:
    """As `trainer_of`, after its training."""

    def make_and_train(loop: str, **settings: Any) -> AuditedTrainer:
        trainer = trainer_of(loop, **settings)
        trainer.train()
        return trainer

    return make_and_train


def test_loader_processes_and_a_parallelism_from_outside_change_no_loss(trained: Callable[..., AuditedTrainer]) -> None:
    losses = []
    for loop, workers in (("the Trainer's", 0), ("the Trainer's", 2), ("ours", 0)):
        trainer = trained(loop, num_train_epochs=2, max_grad_norm=0.5, dataloader_num_workers=workers)
        assert trainer.get_train_dataloader().num_workers == workers
        assert check_training(trainer, ALONE)[0]["samples"] == 32
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    straight, by_workers, ours = losses
    assert by_workers == straight
    assert ours == pytest.approx(straight, rel=1e-5)
    assert (type(trainer.strategy).__name__, len(set(straight))) == ("OneRank", 8)


@LOOPS
@pytest.mark.parametrize(("early_stop", "steps"), [(2, 3), (0, 8)])
def test_training_ends_after_validations_without_a_better_model(
    trained: Callable[..., AuditedTrainer], loop: str, early_stop: int, steps: int
) -> None:
    trainer = trained(loop, learning_rate=NOTHING_LEARNED, num_train_epochs=2, early_stopping_patience=early_stop)
    assert (trainer.state.global_step, Path(trainer.state.best_model_checkpoint).name) == (steps, "checkpoint-1")
    assert [share["samples"] for share in check_training(trainer, ALONE)] == [4 * steps]


@pytest.mark.parametrize(
    ("loop", "best"),
    [("the Trainer's", "there"), ("ours", "there"), ("the Trainer's", "gone"), ("ours", "damaged")],
)
def test_what_was_trained_to_its_end_can_be_trained_longer(
    trained: Callable[..., AuditedTrainer], loop: str, best: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a run of another name; no later model is better than the first one's best, or the next one is."""
    folder = Path(trained(loop, learning_rate=NOTHING_LEARNED).args.output_dir)
    first = folder / "checkpoint-1"
    if best == "gone":
        shutil.rmtree(first)
    if best == "damaged":
        (first / STATE_FILE).write_text("{}")
    longer = trained(
        loop,
        learning_rate=NOTHING_LEARNED,
        num_train_epochs=2,
        run_name="longer",
        resume_from_checkpoint=str(folder / "checkpoint-4"),
    )
    assert longer.state.global_step == 8
    assert ("checkpoint-1, is gone or damaged" in capsys.readouterr().out) == (best != "there")
    own = Path(longer.args.output_dir) / "checkpoint-5"
    assert Path(longer.state.best_model_checkpoint) == (first if best == "there" else own)


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@LOOPS
def test_a_short_run_saves_its_best_weights_and_a_full_state_at_the_end(
    trained: Callable[..., AuditedTrainer], loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is large is not read again."""
    read_again: list[int] = []

    def digest(path: Path) -> str:
        read_again.append(path.stat().st_size if PARTIAL in path.parts else 0)
        return digest_of(path)

    monkeypatch.setattr("common.training.checkpoints.digest_of", digest)
    trainer = trained(loop, learning_rate=NOTHING_LEARNED)
    folder, saves = Path(trainer.args.output_dir), trainer.saves.for_record()
    assert {path.name: holds(path) for path in found_in(folder)} == {
        "checkpoint-1": WEIGHTS,
        "checkpoint-4": FULL_STATE,
    }
    assert max(read_again) < 100_000, "random numbers and texts; the weights alone have 0.9 MiB"
    assert (saves["best_weights"], saves["full_states"]) == (1, 1)
    assert saves["bytes"] > bytes_below(folder) * 0.9
    assert 0 < saves["longest_s"] < saves["held_up_s"] < trainer.work.reporting_s
    assert bytes_below(folder / "checkpoint-1") < 0.6 * bytes_below(folder / "checkpoint-4")


@LOOPS
def test_training_does_not_wait_for_the_disk_and_ends_with_its_best_weights(
    trainer_of: Callable[..., AuditedTrainer], loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of four validations is the best, and the first one's weights are being written until training ends."""
    kept, saved, seen = {}, {}, {}

    def accuracy_at(step: int) -> float:
        seen[step] = copy.deepcopy(trainer.model.state_dict())
        return (0.1, 0.2, 0.3, 0.0)[step - 1]

    for name in ("waits", "goes-on"):
        trainer = with_accuracies(trainer_of(loop, run_name=name), accuracy_at)
        if name == "goes-on":
            trainer.saves_in_background = True
            monkeypatch.setattr(UnfinishedCheckpoint, "is_written", lambda _: False)
        trainer.train()
        folder = Path(trainer.args.output_dir)
        verified = {found.name: verify(found) for found in found_in(folder)}
        kept[name] = {checkpoint: digests_of_tensors(folder / checkpoint) for checkpoint in verified}
        saved[name] = (trainer.saves.best_weights, trainer.saves.full_states)
        assert TrainerState.load_from_json(str(folder / "checkpoint-3" / STATE_FILE)).global_step == 3
        assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-3"
        torch.testing.assert_close(dict(trainer.model.state_dict()), dict(seen[3]), rtol=0, atol=0)
        assert any(not torch.equal(seen[4][weight], seen[3][weight]) for weight in seen[3])
    assert saved == {"waits": (3, 1), "goes-on": (2, 1)}, "the second one's weights had no need to be written"
    assert set(kept["waits"]) == {"checkpoint-3", "checkpoint-4"}
    assert kept["goes-on"] == kept["waits"]


def when_written(unfinished: UnfinishedCheckpoint) -> bool:
    """As `is_written`, but on a machine whose disk is fast."""
    if unfinished.background:
        unfinished.background.result()
    return True


def digests_of_tensors(folder: Path) -> dict[str, str]:
    """Of a checkpoint's files with weights and optimizer."""
    files = [*folder.rglob("*.safetensors"), *folder.rglob("optimizer.pt"), *folder.rglob("*.distcp")]
    assert files
    return {file.name: digest_of(file) for file in files}


def with_accuracies(trainer: AuditedTrainer, accuracy_at: Callable[[int], float]) -> AuditedTrainer:
    """The trainer, whose validation after a step finds the accuracy that is told."""
    own = trainer.evaluate
    trainer.evaluate = lambda *args, **others: {
        **own(*args, **others), ACCURACY: accuracy_at(trainer.state.global_step)
    }  # fmt: skip
    return trainer


@LOOPS
def test_what_is_written_later_is_as_it_was_copied(trained: Callable[..., AuditedTrainer], loop: str) -> None:
    trainer = trained(loop)
    copied = trainer.copied_parts(is_full=True)
    with torch.no_grad():
        trainer.model.classifier.weight.zero_()
    (weight,) = (copied["model"][name] for name in copied["model"] if name.endswith("classifier.weight"))
    assert weight.abs().sum() > 0
    assert ("optimizer" in copied, "optimizer" in trainer.copied_parts(is_full=False)) == (True, False)


@LOOPS
def test_no_more_minutes_than_allowed_are_lost(trained: Callable[..., AuditedTrainer], loop: str) -> None:
    assert trained(loop, learning_rate=NOTHING_LEARNED, max_lost_minutes=1e-9).saves.full_states == 4


@pytest.mark.parametrize(
    ("loop", "little_bytes"),
    [
        *((loop, 0) for loop in ("the Trainer's", "ours")),
        *(pytest.param(loop, GIB, marks=pytest.mark.slow) for loop in ("the Trainer's", "ours")),
    ],
)
def test_a_run_that_lost_some_steps_finds_the_best_weights_of_a_straight_one(
    trainer_of: Callable[..., AuditedTrainer], loop: str, little_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best weights are newer than the full state that is resumed.

    What is not little is written while training goes on.
    """
    monkeypatch.setattr("common.training.trainer.LITTLE_BYTES", little_bytes)
    monkeypatch.setattr(UnfinishedCheckpoint, "is_written", when_written)
    settings = {"learning_rate": 0.003, "num_train_epochs": 2, "save_steps": 3}
    monkeypatch.setenv("FAULT", "raise step=6 point=batch")
    monkeypatch.setattr("common.runtime.faults._arrivals", Counter())
    lost = with_accuracies(trainer_of(loop, **settings), lambda step: step)
    with pytest.raises(ValueError, match="on purpose"):
        lost.train()
    monkeypatch.delenv("FAULT")
    folder = Path(lost.args.output_dir)
    newest = "checkpoint-5" if little_bytes else "checkpoint-4"  # the last one was not committed yet
    assert {path.name: holds(path) for path in found_in(folder)} == {"checkpoint-3": FULL_STATE, newest: WEIGHTS}
    resumed = trainer_of(loop, **settings, run_name="resumed", resume_from_checkpoint=str(folder / "checkpoint-3"))
    straight = trainer_of(loop, **settings, run_name="straight")
    for trainer in (resumed, straight):
        with_accuracies(trainer, lambda step: step).train()
        assert trainer.state.best_global_step == 8
    torch.testing.assert_close(resumed.model.state_dict(), straight.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("killed_at", "kept"), [(5, 2), (6, 4)])
def test_killed_while_a_full_state_is_being_written_the_one_before_is_used(
    trainer_of: Callable[..., AuditedTrainer], monkeypatch: pytest.MonkeyPatch, killed_at: int, kept: int
) -> None:
    """That of step 4 has its name after step 5."""
    monkeypatch.setattr("common.training.trainer.LITTLE_BYTES", 0)
    monkeypatch.setattr(UnfinishedCheckpoint, "is_written", when_written)
    monkeypatch.setenv("FAULT", f"kill step={killed_at} point=batch")
    trainer = with_accuracies(trainer_of("ours", num_train_epochs=2, save_steps=2), lambda step: step)
    child = os.fork()
    if not child:
        try:
            trainer.train()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    folder = Path(trainer.args.output_dir)
    assert newest_whole(folder) == folder / f"checkpoint-{kept}"
    assert not list(folder.glob(f"*{BAD}"))


@LOOPS
def test_when_to_report_and_how_long_to_wait_are_the_settings_of_the_run_that_goes_on(
    trained: Callable[..., AuditedTrainer], loop: str
) -> None:
    """Three validations without a better model before, one after each step, and two after, one after two steps each."""
    short = trained(loop, learning_rate=NOTHING_LEARNED, early_stopping_patience=3)
    checkpoint = Path(short.args.output_dir) / "checkpoint-4"
    settings = {"run_name": "longer", "resume_from_checkpoint": str(checkpoint), "early_stopping_patience": 5}
    longer = trained(loop, learning_rate=NOTHING_LEARNED, num_train_epochs=3, **settings)
    assert longer.state.global_step == 8


@pytest.mark.slow
@LOOPS
def test_a_new_learning_rate_is_that_of_the_steps_that_follow(
    trained: Callable[..., AuditedTrainer], loop: str
) -> None:
    """Shown by the rates that are logged, which are those of the optimizer: as of a run that had it from the start."""
    short = trained(loop, learning_rate=0.003)
    settings = {"num_train_epochs": 2, "learning_rate": 0.001}
    checkpoint = Path(short.args.output_dir) / "checkpoint-4"
    resumed = trained(loop, **settings, run_name="resumed", resume_from_checkpoint=str(checkpoint))
    straight = trained(loop, **settings, run_name="straight")

    def rates(trainer: AuditedTrainer) -> dict[int, float]:
        logged = (each for each in trainer.state.log_history if "learning_rate" in each)
        return {each["step"]: each["learning_rate"] for each in logged if each["step"] > 4}

    assert len(rates(straight)) == 4
    assert rates(resumed) == rates(straight)
    schedules = [each.lr_scheduler for each in (resumed, straight)]
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()


def test_a_step_that_overflowed_is_none_of_the_schedules(
    trainer_of: Callable[..., AuditedTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fp16 Accelerate skips the optimizer and the schedule then, and the Trainer counts the step; also before."""
    short = trainer_of("the Trainer's")
    overflows = property(lambda _: short.state.global_step == 2)
    monkeypatch.setattr(Accelerator, "optimizer_step_was_skipped", overflows)
    short.train()
    check_training(short, ALONE)
    assert (short.state.global_step, short.lr_scheduler.last_epoch, short.skips.steps) == (4, 3, 1)
    checkpoint = Path(short.args.output_dir) / "checkpoint-4"
    longer = trainer_of("the Trainer's", num_train_epochs=2, run_name="longer", resume_from_checkpoint=str(checkpoint))
    longer.train()
    check_training(longer, ALONE)
    assert (longer.state.global_step, longer.skips.steps) == (8, 1)
    longer.skips.steps = 2
    with pytest.raises(RuntimeError, match="took 7 steps, training 8, of which 2 were skipped"):
        check_training(longer, ALONE)


def test_a_rank_that_resumes_before_a_step_with_fewer_rows_than_ranks_may_have_none() -> None:
    """Of 33 rows, 16 a step, the third step has one."""

    def has_rows(first_step: int, rank: int) -> bool:
        batches = EpochBatches([9] * 33, batch_size=8, world_size=2, rank=0, seed=0)
        trainer = SimpleNamespace(batches=batches, first_step=first_step, state=SimpleNamespace(global_step=6))
        return steps_have_rows(trainer, rank)

    assert [has_rows(step, rank) for step in (4, 5) for rank in (0, 1)] == [True, True, True, False]


@LOOPS
def test_weights_that_are_given_up_take_no_memory_whoever_still_has_them(
    trained: Callable[..., AuditedTrainer], loop: str
) -> None:
    """As an optimizer's groups have them, and DDP's wrapper."""
    trainer = trained(loop)
    held, optimizer = list(trainer.model.parameters()), trainer.optimizer
    assert sum(weight.untyped_storage().nbytes() for weight in held) > 0
    trainer.free()
    held += [weight for group in optimizer.param_groups for weight in group["params"]]
    assert {(weight.untyped_storage().nbytes(), weight.grad) for weight in held} == {(0, None)}
    assert not optimizer.state
    assert all(weight.is_meta for weight in trainer.model.parameters())


def test_a_batch_knows_its_answers_before_it_is_on_the_device() -> None:
    """To find them there (`nonzero`) the host would have to wait for a GPU."""

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(operation.name())
            return operation(*args, **(kwargs or {}))

    names: list[str] = []
    strategy, ids = OneRank(RunConfig(), ALONE), torch.arange(12).view(2, 6)
    strategy.attach(AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=16, **TINY)))
    batch = strategy.inputs_for_loss({"input_ids": ids, "labels": ids.masked_fill(ids < 3, IGNORED_LABEL)})
    with Operations():
        strategy.backward(batch, 9, is_last=True)
        strategy.sums(batch)
    assert {"aten::index.Tensor", "aten::mm", "aten::nonzero"} & set(names) == {"aten::index.Tensor", "aten::mm"}


def test_validation_computes_logits_at_answers_alone_and_the_same_loss(run_config: RunConfig, tmp_path: Path) -> None:
    run = replace(
        run_config, validation_rows=9, per_device_eval_batch_size=4, results_root=str(tmp_path), report_to="none"
    )
    tokenizer, model = load_tokenizer(run), load_base_model(run, {"": "cpu"})
    rows = tokens_of(load_splits(run).validation, tokenizer, run)
    batch, positions = make_collator(tokenizer)(rows), []
    sums = whole_row_results(next_token_logits(model, batch), batch["labels"]).sum(0)
    model.lm_head.register_forward_hook(lambda _, __, logits: positions.append(logits.shape[1]))
    trainer = make_trainer(add_lora(model, run), tokenizer, rows, rows, RunRecorder(run, ALONE))
    assert trainer.evaluate()[VALIDATION_LOSS] == pytest.approx((sums[0] / sums[1]).item(), rel=1e-6)
    assert len(positions) == 3
    assert max(positions) < max(len(row["input_ids"]) for row in rows) - 1
    end_rank()


def test_logits_of_a_few_tokens_are_compared_where_the_vocabulary_is_large(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.training.export.LOGITS_AT_ONCE", 1000)
    rows = [dict.fromkeys(("input_ids", "attention_mask", "labels"), [1] * length) for length in (6, 30, 3)]
    config = LlamaConfig(vocab_size=100)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(run=run_config),
        model=SimpleNamespace(config=config),
        eval_dataset=rows,
        args=SimpleNamespace(per_device_eval_batch_size=3),
    )
    assert [len(row["input_ids"]) for row in rows_to_compare(trainer)] == [6, 3]
    config.vocab_size = 250
    assert [{len(tokens) for tokens in row.values()} for row in rows_to_compare(trainer)] == [{4}]


@LOOPS
def test_counting_a_phases_tensors_leaves_the_run_as_it_was(trained: Callable[..., AuditedTrainer], loop: str) -> None:
    def held() -> tuple:
        weights = [(weight.detach().clone(), weight.grad) for weight in trainer.model.parameters()]
        return weights, torch.get_rng_state(), list(trainer.work.rows)

    trainer = trained(loop)
    before = held()
    count_steps(trainer, trainer.memory)
    torch.testing.assert_close(held(), before, rtol=0, atol=0)
    peaks = {phase: of_devices["cpu"] for phase, of_devices in trainer.memory.by_phase.items() if of_devices}
    assert peaks.keys() == {"saving", "training", "validation"}
    assert peaks["saving"] < peaks["validation"] < peaks["training"]
