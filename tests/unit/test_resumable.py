"""Which checkpoint a run can resume from."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.rows import Splits
from common.models.loading import EMBEDDED_BASE
from common.training.checkpoints import (
    FULL_STATE,
    HOLDS,
    MANIFEST_FILE,
    WEIGHTS,
    DamagedCheckpointError,
    UnfinishedCheckpoint,
    read_manifest,
    write_manifest,
)
from common.training.resuming import about_run, check_checkpoint, check_resumable, digests_of, say_changes
from common.training.saver import Saver

ROWS = 96
SINGLE = RunConfig()
KINDS = {"training": "96 rows, digest a", "validation": "8 rows, digest b"}
FSDP = RunConfig(technique="full", parallel="fsdp", devices=2, run_folder="2.6_full_finetuning_with_fsdp/run_0_cpu_x2")


def _saved(root: Path, run: RunConfig = SINGLE, data: dict[str, str] = KINDS, **about: object) -> str:
    folder = root / "checkpoint-3"
    folder.mkdir(parents=True)
    write_manifest(folder, {**about_run(run, ROWS, data), **about})
    return str(folder)


def _check(run: RunConfig) -> None:
    check_checkpoint(run, "torchrun", {})
    if run.resume_from_checkpoint != "last":  # once the rows are counted
        folder = Path(run.resume_from_checkpoint)
        check_resumable(run, about_run(run, ROWS), folder, read_manifest(folder)["about"])


def test_a_checkpoint_of_the_same_rows_per_step_can_have_other_ranks(tmp_path: Path) -> None:
    run = replace(FSDP, resume_from_checkpoint=_saved(tmp_path, FSDP))
    _check(run)
    _check(replace(run, devices=4, per_device_train_batch_size=8))


def test_one_device_and_replicas_go_on_from_each_other(tmp_path: Path) -> None:
    ddp = RunConfig(parallel="ddp", devices=2, per_device_train_batch_size=8)
    one_device = RunConfig(resume_from_checkpoint=_saved(tmp_path, ddp))
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
        ({}, {HOLDS: WEIGHTS}, "with the best weights alone"),
        ({}, {"form": None, "loop": "plain"}, "older version .* files that this one does not read.* to begin anew"),
        ({"parallel": "zero3"}, {"parallel": "zero1"}, "a checkpoint of zero1, but parallel is zero3: pass --par"),
        ({"parallel": "zero3", "devices": 4, "per_device_train_batch_size": 8}, {"parallel": "zero3"},
         "a checkpoint of 2 ranks, but there are 4, and the parts of zero3 fit no other number: pass --devices 2"),
        ({**PP, "devices": 4}, {"parallel": "pp", "rows_per_step": 16}, "of 2 ranks, but there are 4, and the parts"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], about: dict[str, object], said: str
) -> None:
    folder = _saved(tmp_path, FSDP, **about)
    with pytest.raises(BadInputError, match=said):
        _check(replace(FSDP, resume_from_checkpoint=folder, **changes))


def test_no_checkpoint_and_one_in_the_way_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match=f"has no {MANIFEST_FILE} that can be read"):
        _check(replace(FSDP, resume_from_checkpoint=str(tmp_path)))
    run = replace(FSDP, results_root=str(tmp_path), run_name="same")
    own = _saved(tmp_path / "results" / "same" / "checkpoints", FSDP)
    with pytest.raises(BadInputError, match=r"in the results of a run called same.*pass --resume_from_checkpoint last"):
        _check(replace(run, resume_from_checkpoint=own))
    _check(replace(run, resume_from_checkpoint=own, run_name="other"))
    _check(replace(run, resume_from_checkpoint="last"))


# -- the same run


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"lora_r": 16}), ({}, {"lora_alpha": 32}), ({}, {"lora_dropout": 0.0}),
        ({}, {"target_modules": "q_proj,v_proj"}), ({}, {"technique": "qlora"}), ({}, {"precision": "bf16"}),
        ({}, {"max_length": 128}), ({}, {"train_on": "all"}), ({}, {"lr_scheduler_type": "linear"}),
        ({}, {"warmup_steps": 0.1}), ({}, {"optim": "adamw_torch"}), ({}, {"weight_decay": 0.0}),
        ({}, {"max_grad_norm": 1.0}),
        ({"technique": "qlora", "quantization": "nf4"}, {"quantization": "nf4-double"}),
    ],
)  # fmt: skip
def test_another_setting_is_refused_by_name_with_both_values(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any]
) -> None:
    was = replace(SINGLE, **before)
    run = replace(was, **now, resume_from_checkpoint=_saved(tmp_path, was))
    ((name, value),) = now.items()
    with pytest.raises(BadInputError, match=name) as refusal:
        check_checkpoint(run, "python", KINDS)
    assert str(getattr(was, name)) in str(refusal.value)
    assert str(value) in str(refusal.value)


def test_how_far_and_how_fast_and_what_is_reported_may_change(tmp_path: Path) -> None:
    folder = _saved(tmp_path, replace(SINGLE, target_modules="v_proj, q_proj"))
    run = replace(
        SINGLE, target_modules="q_proj,v_proj", num_train_epochs=9, learning_rate=1e-5, eval_steps=2, save_steps=3.0,
        max_new_tokens=5, report_to="none", step_timeout_s=9.0, gradient_checkpointing=True, test_rows=3,
        independent_judge="none", attention="eager", resume_from_checkpoint=folder,
    )  # fmt: skip
    check_checkpoint(run, "python", KINDS)
    said = say_changes(about_run(run, ROWS), read_manifest(Path(folder))["about"])
    assert "1e-05" in said
    assert "0.001" in said
    assert f"{run.total_steps(ROWS)}" in said
    assert not say_changes(about_run(SINGLE, ROWS), read_manifest(Path(folder))["about"])


@pytest.mark.parametrize("split", KINDS)
def test_other_rows_are_refused(tmp_path: Path, split: str) -> None:
    run = replace(SINGLE, resume_from_checkpoint=_saved(tmp_path))
    check_checkpoint(run, "python", KINDS)
    with pytest.raises(BadInputError, match=rf"other {split} rows \({KINDS[split]}\) than this run's \(96 rows, dig"):
        check_checkpoint(run, "python", {**KINDS, split: "96 rows, digest c"})


def test_rows_are_told_apart_by_their_texts_and_order_and_not_by_their_file() -> None:
    rows = [{"where": f"a.csv, row {number}", "text": f"{number}"} for number in range(3)]
    elsewhere = [{**row, "where": "b.csv"} for row in rows]
    changed = [*rows[:2], {**rows[2], "text": "other"}]
    digests = [digests_of(Splits(each, rows, rows))["training"] for each in (rows, elsewhere, changed, rows[::-1])]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_another_model_or_tokenizer_is_refused_and_one_that_has_moved_is_not(tmp_path: Path) -> None:
    model = Path(shutil.copytree(EMBEDDED_BASE, tmp_path / "moved"))
    run = replace(SINGLE, model=str(model), resume_from_checkpoint=_saved(tmp_path))
    check_checkpoint(run, "python", KINDS)
    weights = model / "model.safetensors"
    for file, content in ((weights, weights.read_bytes()[:-1] + b"\0"), (model / "chat_template.jinja", b"other")):
        before = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(BadInputError, match="another model or tokenizer"):
            check_checkpoint(run, "python", KINDS)
        file.write_bytes(before)


# -- which one


def test_a_run_started_again_before_its_first_checkpoint_goes_on_from_the_one_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver, named = object.__new__(Saver), tmp_path / "other" / "checkpoint-3"
    saver.folder, saver.writes, saver.rank = tmp_path, True, SimpleNamespace(is_main=True)
    saver.log = SimpleNamespace(resumes=True, run=RunConfig(resume_from_checkpoint="last"))
    assert saver._find_checkpoint() is None
    assert "there is no checkpoint to resume from: training starts at the beginning" in capsys.readouterr().out
    saver.log.run = RunConfig(resume_from_checkpoint=str(named))
    assert saver._find_checkpoint() == named
    UnfinishedCheckpoint(tmp_path / "checkpoint-4", {HOLDS: FULL_STATE}, commits=True).commit()
    assert saver._find_checkpoint() == tmp_path / "checkpoint-4", "its own, once there is one"
    saver.log.resumes = False
    assert saver._find_checkpoint() == named
