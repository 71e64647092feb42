"""Which checkpoint a run can resume from."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.runtime.rank import end_rank
from common.training.checkpoints import (
    MANIFEST_FILE,
    DamagedCheckpointError,
    about_run,
    check_checkpoint,
    found_in,
    write_manifest,
)
from common.training.trainer import CheckpointedTrainer

ROWS = 96
FSDP = RunConfig(technique="full", parallel="fsdp", devices=2, run_folder="2.6_full_finetuning_with_fsdp/run_0_cpu_x2")


def _checkpoint(root: Path, run: RunConfig = FSDP, **about: object) -> str:
    folder = root / "checkpoint-3"
    folder.mkdir(parents=True)
    write_manifest(folder, {**about_run(run, ROWS), **about})
    return str(folder)


def _check(run: RunConfig, rows: int = ROWS) -> None:
    check_checkpoint(run, "torchrun", rows)


def test_a_checkpoint_of_the_same_rows_per_step_can_have_other_ranks(tmp_path: Path) -> None:
    run = replace(FSDP, resume_from_checkpoint=_checkpoint(tmp_path))
    _check(run)
    _check(replace(run, devices=4, per_device_train_batch_size=8))


def test_one_device_and_replicas_go_on_from_each_other(tmp_path: Path) -> None:
    ddp = RunConfig(parallel="ddp", devices=2, per_device_train_batch_size=8)
    one_device = RunConfig(resume_from_checkpoint=_checkpoint(tmp_path, ddp))
    _check(one_device)
    with pytest.raises(BadInputError, match="steps of 16 rows, but this run's have 8"):
        _check(replace(one_device, per_device_train_batch_size=8))


PP = {"parallel": "pp", "micro_batches": 4}


@pytest.mark.parametrize(
    ("changes", "about", "said"),
    [
        ({"per_device_train_batch_size": 8}, {}, r"steps of 32 rows, but this run's have 16 \(per_device_train"),
        ({"devices": 4}, {}, "steps of 32 rows, but this run's have 64"),
        ({"parallel": "zero3"}, {}, "a checkpoint of fsdp, but parallel is zero3: pass --parallel fsdp"),
        ({"technique": "lora"}, {}, "a checkpoint of full, but technique is lora: pass --technique full"),
        ({"max_steps": 3}, {}, "a checkpoint after step 3, and this run has 3: nothing is left to train; raise"),
        ({"num_train_epochs": 1}, {}, "a checkpoint after step 3, and this run has 3"),
        ({"seed": 43}, {}, "with 42 as seed, but this run has 43"),
        ({}, {"rows": 95}, "with 95 training rows, but this run has 96"),
        ({}, {"loop": "plain"}, "of another loop .plain., which this workflow cannot read"),
        ({"parallel": "zero3"}, {"parallel": "zero1"}, "a checkpoint of zero1, but parallel is zero3: pass --par"),
        ({"parallel": "zero3", "devices": 4, "per_device_train_batch_size": 8}, {"parallel": "zero3"},
         "a checkpoint of 2 ranks, but there are 4, and the parts of zero3 fit no other number: pass --devices 2"),
        ({**PP, "devices": 4}, {"parallel": "pp", "rows_per_step": 16}, "of 2 ranks, but there are 4, and the parts"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], about: dict[str, object], said: str
) -> None:
    folder = _checkpoint(tmp_path, **about)
    with pytest.raises(BadInputError, match=said):
        _check(replace(FSDP, resume_from_checkpoint=folder, **changes))


def test_no_checkpoint_and_one_in_the_way_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match=f"has no {MANIFEST_FILE} that can be read"):
        _check(replace(FSDP, resume_from_checkpoint=str(tmp_path)))
    run = replace(FSDP, results_root=str(tmp_path), run_name="same")
    own = _checkpoint(tmp_path / "results" / "same" / "checkpoints")
    with pytest.raises(BadInputError, match=r"in the results of a run called same.*pass --resume_from_checkpoint last"):
        _check(replace(run, resume_from_checkpoint=own))
    _check(replace(run, resume_from_checkpoint=own, run_name="other"))
    _check(replace(run, resume_from_checkpoint="last"))


# -- which one


class Rows(torch.nn.Module):
    """A model of one weight, whose loss is its product with a row's number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * number).mean()}


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[CheckpointedTrainer]:
    """Four steps with a checkpoint after each, and no validation: so none is the best."""
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "checkpoints"), max_steps=4, per_device_train_batch_size=1, save_steps=1,
        save_strategy="steps", use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    rows = [{"number": float(number)} for number in range(4)]
    trainer = CheckpointedTrainer(model=Rows(), args=arguments, train_dataset=rows)
    trainer.about = about_run(RunConfig(), len(rows))
    yield trainer
    end_rank()


def test_without_a_best_checkpoint_the_two_newest_are_kept(trainer: CheckpointedTrainer) -> None:
    trainer.train()
    assert [folder.name for folder in found_in(Path(trainer.args.output_dir))] == ["checkpoint-4", "checkpoint-3"]


def test_a_run_started_again_before_its_first_checkpoint_goes_on_from_the_one_it_names(
    trainer: CheckpointedTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = tmp_path / "other" / "checkpoint-3"
    log = SimpleNamespace(resumes=True, run=RunConfig(resume_from_checkpoint="last"))
    assert trainer.find_resume_checkpoint(log) is None
    assert "there is no checkpoint to resume from: training starts at the beginning" in capsys.readouterr().out
    log.run = RunConfig(resume_from_checkpoint=str(named))
    assert trainer.find_resume_checkpoint(log) == named
    trainer.train()
    assert trainer.find_resume_checkpoint(log).name == "checkpoint-4", "its own, once there is one"
    log.resumes = False
    assert trainer.find_resume_checkpoint(log) == named
