"""What a run says of its steps is what happened."""

import json

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from common.base.print_prefix import printing_with_prefix
from common.base.run_config import RunConfig
from common.data.rows import NO_ROW
from common.hardware.devices import MemoryReading
from common.models.loading import load_tokenizer
from common.runtime.world import Rank
from common.training.callbacks import SAMPLED_PER_WEIGHT, FirstStepReport, ProgressReport, UpdateReport, WorkDone

ARGUMENTS, CONTROL = TrainingArguments(use_cpu=True, report_to="none"), TrainerControl()


def train(
    dtype: torch.dtype, learning_rate: float, steps: int = 4, logging_steps: int = 2, size: int = 64
) -> tuple[UpdateReport, list[float]]:
    """Some steps of a toy model as the Trainer takes them, and the share that each really changed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(size, size, bias=False), torch.nn.Linear(size, 1, bias=False)).to(dtype)
    model[1].requires_grad_(False)  # frozen weights are not looked at
    optimizer, weight = torch.optim.SGD(model[0].parameters(), learning_rate), model[0].weight
    report, state, shares = UpdateReport(), TrainerState(logging_steps=logging_steps), []
    for _ in range(steps):
        weight.grad, before = weight.detach().sign(), weight.detach().clone()
        report.on_pre_optimizer_step(ARGUMENTS, state, CONTROL, model=model, optimizer=optimizer)
        optimizer.step()
        report.on_optimizer_step(ARGUMENTS, state, CONTROL, model=model)
        state.global_step += 1
        shares.append((weight != before).float().mean().item())
    return report, shares


@pytest.mark.parametrize(
    ("dtype", "learning_rate", "least", "most"),
    [(torch.bfloat16, 1e-5, 0, 0.1), (torch.float32, 1e-5, 0.99, 1), (torch.bfloat16, 1e-2, 0.99, 1)],
    ids=["small in bf16", "small in fp32", "large in bf16"],
)
def test_bfloat16_loses_most_of_small_updates_and_fp32_none(
    dtype: torch.dtype, learning_rate: float, least: float, most: float
) -> None:
    """Weights of up to 1/8 and updates of 1e-5: mostly below half of bfloat16's last place, all above fp32's."""
    report, shares = train(dtype, learning_rate)
    assert least <= report.figures()["updated_share"] <= most
    by_step = dict(report.figures()["updated_share_by_step"])
    assert by_step == pytest.approx({2: shares[1], 4: shares[3]})  # the steps that are logged


def test_of_large_weights_a_sample_is_looked_at() -> None:
    report, shares = train(torch.bfloat16, 5e-5, size=300)
    assert SAMPLED_PER_WEIGHT < 300 * 300
    assert 0.2 < shares[1] < 0.98
    assert report.figures()["updated_share"] == pytest.approx((shares[1] + shares[3]) / 2, abs=0.02)


@pytest.mark.parametrize(("learning_rate", "logging_steps"), [(1e-2, 5), (0.0, 1)], ids=["not logged", "at rate 0"])
def test_nothing_was_measured_where_nothing_was_logged_or_learned(learning_rate: float, logging_steps: int) -> None:
    report, _ = train(torch.float32, learning_rate, steps=1, logging_steps=logging_steps)
    assert (report.figures(), report.before) == ({"updated_share": None, "updated_share_by_step": []}, [])


def test_rows_that_fill_a_batch_up_are_no_work() -> None:
    work, mask = WorkDone(), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    counted = []
    for rows in ([7, 3, NO_ROW], [NO_ROW, NO_ROW, NO_ROW], [1, 0, 2]):
        work.count(torch.tensor(rows), {"input_ids": torch.zeros(3, 4), "attention_mask": mask})
        counted.append((list(work.rows), work.tokens))
    assert counted == [([7, 3], 5), ([7, 3], 5), ([7, 3, 1, 0, 2], 14)]
    assert work.first_batch["row"].tolist() == [7, 3, NO_ROW]


def said_of_progress(
    capsys: pytest.CaptureFixture[str], figures: str, *logs: dict[str, float], rank: int = 0
) -> list[str]:
    """What a rank prints of step 5 of 20, prefix and all."""
    report = ProgressReport(Rank(rank, 2, "cpu", "torchrun"), figures)
    state = TrainerState(global_step=5, max_steps=20, num_train_epochs=2)
    with printing_with_prefix(f"[RANK{rank}:CPU]"):
        report.on_train_begin(ARGUMENTS, state, CONTROL)
        for each in logs:
            report.on_log(ARGUMENTS, state, CONTROL, logs=each)
    return capsys.readouterr().out.splitlines()


TRAINED, VALIDATED = {"loss": 0.5, "grad_norm": 2.0}, {"eval_mean_loss": 0.25, "eval_loss": 0.3}


START = "[RANK0:CPU] 20 steps, 2 epochs"


def test_progress_is_told_to_readers(capsys: pytest.CaptureFixture[str]) -> None:
    line = "[RANK0:CPU] step 5/20: loss 0.5000, validation loss 0.2500; 0 s"
    assert said_of_progress(capsys, "text", TRAINED, VALIDATED) == [START, line]


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ((TRAINED, VALIDATED), [{"loss": 0.5, "eval_mean_loss": 0.25}]),
        (
            (TRAINED, {**VALIDATED, "eval_accuracy": 0.75}),
            [{"loss": 0.5, "eval_mean_loss": 0.25, "eval_accuracy": 0.75}],
        ),
        ((VALIDATED,), [{"eval_mean_loss": 0.25}]),
        ((TRAINED, {"eval_mean_loss": float("inf")}), [{"loss": 0.5}]),
    ],
    ids=["losses", "accuracy", "validated before any loss was logged", "no number"],
)
def test_progress_is_told_as_whole_lines_of_json_without_a_prefix(
    capsys: pytest.CaptureFixture[str], logs: tuple[dict[str, float], ...], expected: list[dict[str, float]]
) -> None:
    start, *lines = said_of_progress(capsys, "json", *logs)
    assert start == START
    assert [json.loads(line) for line in lines] == [{"step": 5, "elapsed_s": 0.0, **each} for each in expected]


@pytest.mark.parametrize("figures", ["text", "json"])
def test_other_ranks_say_nothing_of_progress(capsys: pytest.CaptureFixture[str], figures: str) -> None:
    assert said_of_progress(capsys, figures, TRAINED, VALIDATED, rank=1) == []


@pytest.mark.parametrize("tells", [True, False])
def test_a_mini_batch_of_several_ranks_is_told_by_one_but_memory_by_each(
    run_config: RunConfig, capsys: pytest.CaptureFixture[str], tells: bool
) -> None:
    """The stages of a pipeline work on the same rows."""
    work = WorkDone()
    work.count(torch.tensor([3]), {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2).long()})
    report = FirstStepReport(Rank(1, 2, "cpu", "torchrun"), work, load_tokenizer(run_config), tells)
    report.on_step_end(ARGUMENTS, TrainerState(global_step=1), CONTROL)
    assert len(capsys.readouterr().out.splitlines()) == 1 + tells


def test_the_memory_of_each_device_of_a_rank_is_reported(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With model parallel one process works on several."""
    gib, work = {"cuda:0": 1.25, "cuda:1": 2.5}, WorkDone()
    monkeypatch.setattr(
        "common.training.callbacks.read_memory", lambda device: MemoryReading(gib[device], gib[device], None, 48)
    )
    work.count(torch.tensor([3]), {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2).long()})
    report = FirstStepReport(Rank(0, 1, "cuda:0", "python", ("cuda:1",)), work, load_tokenizer(run_config))
    report.on_step_end(ARGUMENTS, TrainerState(global_step=1), CONTROL)
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()[:2]] == [
        "memory on cuda:0: now 1.25 GiB", "memory on cuda:1: now 2.50 GiB",
    ]  # fmt: skip
