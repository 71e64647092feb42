"""A run writes its record also when a phase fails; only records are kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.launch import Rank
from common.run_config import BadInputError, RunConfig
from common.run_record import RECORD_NAME, RunLog, keep_record, load_record

RANK = Rank(rank=0, world_size=1, device="cpu", launcher="python")


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("x"), "failed"), (KeyboardInterrupt(), "interrupted"), (torch.OutOfMemoryError("x"), "oom")],
)
def test_a_failed_phase_leaves_a_record_with_its_status(
    run_config: RunConfig, tmp_path: Path, error: BaseException, status: str
) -> None:
    log = RunLog(replace(run_config, results_root=str(tmp_path)), RANK)
    with pytest.raises(type(error)), log.phase("training"):
        raise error
    record = load_record(log.folder / RECORD_NAME)
    assert (record["status"], record["failed_phase"]) == (status, "training")
    assert str(tmp_path) not in json.dumps(record)


def test_a_second_run_of_the_same_name_starts_empty_and_keeps_the_one_before(
    run_config: RunConfig, tmp_path: Path
) -> None:
    run = replace(run_config, results_root=str(tmp_path))
    for text in ("first", "second"):
        log = RunLog(run, RANK)
        (log.folder / "model.txt").write_text(text)
        log.complete()
    third = RunLog(run, RANK).folder
    previous = third.with_name(third.name + ".previous")
    assert list(third.iterdir()) == []
    assert (previous / "model.txt").read_text() == "second"
    (third / "model.txt").write_text("third, which fails")
    assert list(RunLog(run, RANK).folder.iterdir()) == []
    assert (previous / "model.txt").read_text() == "second"


def test_a_record_names_a_folder_elsewhere_without_its_path(run_config: RunConfig, tmp_path: Path) -> None:
    run = replace(run_config, data=str(tmp_path / "my_data"), results_root=str(tmp_path))
    log = RunLog(run, RANK)
    log.complete()
    text = (log.folder / RECORD_NAME).read_text()
    assert json.loads(text)["config"]["data"] == "my_data"
    assert str(tmp_path) not in text


def test_the_run_name_tells_launcher_batch_and_seed(run_config: RunConfig, tmp_path: Path) -> None:
    run = replace(run_config, results_root=str(tmp_path))
    assert RunLog(run, RANK).folder == tmp_path / "results" / "python-batch16-seed42"
    assert RunLog(replace(run, run_name="mine"), RANK).run_name == "mine"


def test_a_record_is_kept_under_its_run_name(run_config: RunConfig, tmp_path: Path) -> None:
    log = RunLog(replace(run_config, results_root=str(tmp_path)), RANK)
    log.complete(steps=1)
    kept = keep_record(log.folder)
    assert kept == tmp_path / "records" / "python-batch16-seed42.json"
    assert load_record(kept)["memory"][0]["peak_rss_gib"] > 0


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is no record"):
        keep_record(tmp_path)
    (tmp_path / RECORD_NAME).write_text('{"schema_version": 99}')
    with pytest.raises(BadInputError, match="schema version 99"):
        load_record(tmp_path / RECORD_NAME)
