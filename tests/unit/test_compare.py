"""Runs are compared by what differs first; each number is the record's own, and what does not compare is said."""

import json
import sys
from pathlib import Path

import pytest

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.records.store import load_record
from common.reporting.compare import Comparison, found_runs, labels_of, main, text_of
from common.reporting.rows import called
from common.reporting.screen import fitted

RECORDS = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2" / "records"
SMALL, LARGE, SEED_7 = (
    RECORDS / f"torchrun-{name}.json" for name in ("batch8-seed42", "batch16-seed42", "batch8-seed7")
)


def compared(*files: Path) -> Comparison:
    runs = [load_record(file) for file in files]
    return Comparison(runs, labels_of(runs))


def test_settings_that_differ_are_named_and_no_others() -> None:
    lines = {line.name: line.values for line in compared(SMALL, LARGE).settings()}
    assert lines["per_device_train_batch_size"] == [8, 16]
    assert not {"seed", "learning_rate", "run_name"} & lines.keys()


def test_numbers_are_those_of_the_records() -> None:
    comparison, (small, large) = compared(SMALL, LARGE), map(load_record, (SMALL, LARGE))
    time = {line.name: line.values for line in comparison.time()}
    assert time["training time"] == [small["train_time_s"], large["train_time_s"]]
    assert "status" not in time  # both completed
    quality = {line.name: line.values for line in comparison.quality()}
    facts = next(values for name, values in quality.items() if name.startswith("facts said"))
    assert facts == [
        [run["quality"][when]["facts_said_share"] for when in ("before", "after")] for run in (small, large)
    ]
    memory = {line.name: line.values for line in comparison.memory()}
    peaks = [max(rank["peak_training_gib"] for rank in run["memory"]) for run in (small, large)]
    assert memory["training's peak, measured (GiB)"] == peaks


def test_runs_that_do_not_compare_are_said_first() -> None:
    assert compared(SMALL, LARGE).warning() == ""
    assert "seed (42 / 7)" in compared(SMALL, SEED_7).warning()
    assert text_of(compared(SMALL, SEED_7), Path("p.png")).startswith("These runs do not compare")


def test_a_table_is_never_wider_than_the_screen_and_loses_nothing() -> None:
    headers, rows = (
        ["", *(f"run {number}" for number in range(9))],
        [["steps", *(str(10**number) for number in range(9))]],
    )
    text = fitted(headers, rows, width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert all(word in text.split() for word in (*map(str, range(9)), *rows[0]))


def test_the_command_draws_a_picture_and_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "losses.png"
    monkeypatch.setattr(sys, "argv", ["compare", str(SMALL), str(LARGE), "--picture", str(picture), "--json"])
    main()
    answer = json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert answer["settings"]["per_device_train_batch_size"] == [8, 16]
    assert answer["curves"]["validation_losses"][0] == load_record(SMALL)["validation_losses"]


def test_runs_are_named_by_patterns_and_a_wrong_name_gets_the_closest() -> None:
    records = [load_record(file) for file in (SMALL, LARGE, SEED_7)]
    assert called(records, ["*-batch8-*"]) == [records[0], records[2]]
    assert called(records, ["2.2/torchrun-batch16-seed42"]) == [records[1]]
    with pytest.raises(BadInputError, match="did you mean torchrun-batch16-seed42"):
        called(records, ["torchrun-batch16-seed4"])
    with pytest.raises(BadInputError, match="1 run is named"):
        found_runs([str(SMALL)])
