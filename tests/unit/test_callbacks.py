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


def train(
    dtype: torch.dtype, learning_rate: float, steps: int = 4, logging_steps: int = 2, size: int = 64
) -> tuple[UpdateReport, list[float]]:
    """Some steps of a toy model as the Trainer takes them, and the share that each really changed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(size, size, bias=False), torch.nn.Linear(size, 1, bias=False)).to(dtype)
    model[1].requires_grad_(False)  # frozen weights are not looked at
    optimizer = torch.optim.SGD(model[0].parameters(), learning_rate)
    report, arguments, control = UpdateReport(), TrainingArguments(use_cpu=True, report_to="none"), TrainerControl()
    state, shares = TrainerState(logging_steps=logging_steps), []
    for _ in range(steps):
        weight = model[0].weight
        weight.grad, before = weight.detach().sign(), weight.detach().clone()
        report.on_pre_optimizer_step(arguments, state, control, model=model, optimizer=optimizer)
        optimizer.step()
        report.on_optimizer_step(arguments, state, control, model=model)
        state.global_step += 1
        shares.append((weight != before).float().mean().item())
    return report, shares


def test_bfloat16_loses_most_of_small_updates_and_fp32_none() -> None:
    """Weights of up to 1/8 and updates of 1e-5: mostly below half of bfloat16's last place, all above fp32's."""
    lost, lost_shares = train(torch.bfloat16, 1e-5)
    kept, kept_shares = train(torch.float32, 1e-5)
    assert lost.figures()["updated_share"] < 0.1
    assert kept.figures()["updated_share"] > 0.99
    for report, shares in ((lost, lost_shares), (kept, kept_shares)):
        by_step = dict(report.figures()["updated_share_by_step"])
        assert list(by_step) == [2, 4]  # the steps that are logged
        assert list(by_step.values()) == pytest.approx([shares[1], shares[3]])


def test_bfloat16_keeps_large_updates() -> None:
    report, _ = train(torch.bfloat16, 1e-2)
    assert report.figures()["updated_share"] > 0.99


def test_of_large_weights_a_sample_is_looked_at() -> None:
    size = 300  # 90,000 elements
    assert size * size > SAMPLED_PER_WEIGHT
    report, shares = train(torch.bfloat16, 5e-5, size=size)
    assert 0.2 < shares[1] < 0.98
    assert report.figures()["updated_share"] == pytest.approx((shares[1] + shares[3]) / 2, abs=0.02)


def test_nothing_was_measured_where_nothing_was_logged() -> None:
    report, _ = train(torch.float32, 1e-2, steps=1, logging_steps=5)
    assert report.figures() == {"updated_share": None, "updated_share_by_step": []}
    assert report.before == []


def test_rows_that_fill_a_batch_up_are_no_work() -> None:
    work = WorkDone()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    first = {"input_ids": torch.zeros(3, 4), "attention_mask": mask}
    work.count(torch.tensor([7, 3, NO_ROW]), first)
    assert (work.rows, work.tokens) == ([7, 3], 5)
    work.count(torch.tensor([NO_ROW, NO_ROW, NO_ROW]), first)
    assert (work.rows, work.tokens) == ([7, 3], 5)
    work.count(torch.tensor([1, 0, 2]), first)
    assert (work.rows, work.tokens) == ([7, 3, 1, 0, 2], 14)
    assert work.first_batch["row"].tolist() == [7, 3, NO_ROW]


def test_a_step_of_the_warm_up_at_rate_0_is_not_measured() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    report, control = UpdateReport(), TrainerControl()
    arguments, state = TrainingArguments(use_cpu=True, report_to="none"), TrainerState(logging_steps=1)
    report.on_pre_optimizer_step(arguments, state, control, model=model, optimizer=optimizer)
    report.on_optimizer_step(arguments, state, control, model=model)
    assert report.figures()["updated_share"] is None


def report_progress(rank: int, figures: str, *logs: dict[str, float]) -> None:
    """What a rank prints of step 5 of 20, prefix and all."""
    report, control = ProgressReport(Rank(rank, 2, "cpu", "torchrun"), figures), TrainerControl()
    arguments = TrainingArguments(use_cpu=True, report_to="none")
    state = TrainerState(global_step=5, max_steps=20, num_train_epochs=2)
    with printing_with_prefix(f"[RANK{rank}:CPU]"):
        report.on_train_begin(arguments, state, control)
        for each in logs:
            report.on_log(arguments, state, control, logs=each)


TRAINED, VALIDATED = {"loss": 0.5, "grad_norm": 2.0}, {"eval_mean_loss": 0.25, "eval_loss": 0.3}


def test_progress_is_told_to_readers_or_as_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    report_progress(0, "text", TRAINED, VALIDATED)
    start, line = capsys.readouterr().out.splitlines()
    assert start == "[RANK0:CPU] 20 steps, 2 epochs"
    assert line == "[RANK0:CPU] step 5/20: loss 0.5000, validation loss 0.2500; 0 s, about 0 s left"
    report_progress(0, "json", TRAINED, VALIDATED, {**VALIDATED, "eval_accuracy": 0.75})
    start, *lines = capsys.readouterr().out.splitlines()
    assert start == "[RANK0:CPU] 20 steps, 2 epochs"
    first, second = (json.loads(line) for line in lines)  # whole lines, without a prefix
    assert first == {"step": 5, "loss": 0.5, "elapsed_s": 0.0, "eval_mean_loss": 0.25}
    assert second == {**first, "eval_accuracy": 0.75}


def test_a_figure_that_is_no_number_is_left_out_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    report_progress(0, "json", VALIDATED)  # validation before any loss was logged
    report_progress(0, "json", TRAINED, {"eval_mean_loss": float("inf")})
    _, unknown, _, diverged = capsys.readouterr().out.splitlines()
    assert json.loads(unknown) == {"step": 5, "elapsed_s": 0.0, "eval_mean_loss": 0.25}
    assert json.loads(diverged) == {"step": 5, "loss": 0.5, "elapsed_s": 0.0}


@pytest.mark.parametrize("figures", ["text", "json"])
def test_other_ranks_say_nothing_of_progress(capsys: pytest.CaptureFixture[str], figures: str) -> None:
    report_progress(1, figures, TRAINED, VALIDATED)
    assert capsys.readouterr().out == ""


def test_the_memory_of_each_device_of_a_rank_is_reported(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With model parallel one process works on several."""
    gib = {"cuda:0": 1.25, "cuda:1": 2.5}
    monkeypatch.setattr(
        "common.training.callbacks.read_memory", lambda device: MemoryReading(gib[device], gib[device], None, 48)
    )
    work = WorkDone()
    work.count(torch.tensor([3]), {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2).long()})
    report = FirstStepReport(Rank(0, 1, "cuda:0", "python", ("cuda:1",)), work, load_tokenizer(run_config))
    arguments = TrainingArguments(use_cpu=True, report_to="none")
    report.on_step_end(arguments, TrainerState(global_step=1), TrainerControl())
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in said[:2]] == [
        "memory on cuda:0: now 1.25 GiB", "memory on cuda:1: now 2.50 GiB",
    ]  # fmt: skip
