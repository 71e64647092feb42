"""A run writes its record also when a phase fails; only records are kept."""

import errno
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.run_record import keep_record
from common.base.errors import BadInputError, RunStoppedError
from common.base.paths import command_here
from common.base.run_config import RunConfig
from common.hardware import devices
from common.hardware.devices import MemoryReading
from common.models.placement import place_stages
from common.planning.job import BatchShape
from common.planning.plans import plan_run
from common.records.store import RECORD_NAME, STUDY, default_run_name, kept_records, load_record
from common.runtime.disks import MARK
from common.runtime.recorder import RunRecorder, beyond_plan, command_of
from common.runtime.world import Rank

RANK = Rank(rank=0, world_size=1, device="cpu", launcher="python")


@pytest.fixture
def run(run_config: RunConfig, tmp_path: Path) -> RunConfig:
    """A run that writes below `tmp_path`."""
    return replace(run_config, results_root=str(tmp_path))


@pytest.fixture
def log(run: RunConfig) -> RunRecorder:
    return RunRecorder(run, RANK)


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("x"), "failed"), (KeyboardInterrupt(), "interrupted"), (torch.OutOfMemoryError("x"), "oom")],
)
def test_a_failed_phase_leaves_a_record_with_its_status(
    log: RunRecorder, tmp_path: Path, error: BaseException, status: str
) -> None:
    with pytest.raises(RunStoppedError if status == "oom" else type(error)), log.phase("training"):
        raise error
    record = load_record(log.folder / RECORD_NAME)
    assert (record["status"], record["failed_phase"]) == (status, "training")
    assert str(tmp_path) not in json.dumps(record | {"config": {**record["config"], "results_root": ""}, "command": ""})


def test_a_disk_that_fills_in_a_phase_ends_it_with_a_next_step(log: RunRecorder) -> None:
    said = r"is full .*--results_root; --resume_from_checkpoint last"
    with pytest.raises(RunStoppedError, match=said), log.phase("merge"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert load_record(log.folder / RECORD_NAME)["status"] == "failed"


def test_a_second_run_of_the_same_name_starts_empty_and_keeps_the_one_before(run: RunConfig) -> None:
    for text in ("first", "second"):
        log = RunRecorder(run, RANK)
        (log.folder / "model.txt").write_text(text)
        log.complete()
    for _ in range(2):  # the third one, and one after it has failed
        folder = RunRecorder(run, RANK).folder
        assert [path.name for path in folder.iterdir()] == [MARK]
        assert (folder.with_name(f"{folder.name}.previous") / "model.txt").read_text() == "second"
        (folder / "model.txt").write_text("third, which fails")
    assert not folder.with_name(f"{folder.name}.unfinished").exists()


def test_a_run_that_is_refused_while_it_is_prepared_leaves_the_run_before(run: RunConfig, tmp_path: Path) -> None:
    for before in ([], [default_run_name(run, "python")]):
        with pytest.raises(BadInputError), RunRecorder(run, RANK).phase("build trainer"):
            raise BadInputError("no such thing")
        assert [path.name for path in (tmp_path / "results").iterdir() if not path.name.startswith(".")] == before
        if not before:
            RunRecorder(run, RANK).complete()
    assert load_record(tmp_path / "results" / before[0] / RECORD_NAME)["status"] == "completed"


def test_checkpoints_of_an_unfinished_run_are_kept_and_it_is_said(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(run, run_name="mine")
    RunRecorder(run, RANK).complete()
    folder = RunRecorder(run, RANK).folder
    (folder / "checkpoints" / "checkpoint-7").mkdir(parents=True)
    assert [path.name for path in RunRecorder(run, RANK).folder.iterdir()] == [MARK]
    assert "an unfinished run of this name (checkpoint-7) is kept as mine.unfinished" in capsys.readouterr().out
    assert (folder.with_name("mine.unfinished") / "checkpoints" / "checkpoint-7").is_dir()
    assert (folder.with_name("mine.previous") / RECORD_NAME).is_file()


def test_a_record_names_what_it_read_so_that_it_is_found_again_and_a_kept_one_without_its_path(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "my_data"
    data.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # of another test: here nothing is a notebook
    run = replace(run_config, data="my_data", model="assets/embedded_base", results_root="here", run_name="mine")
    log = RunRecorder(run, RANK)
    log.complete()
    read = {"data": str(data), "model": "assets/embedded_base", "results_root": str(tmp_path / "here")}
    assert read.items() <= load_record(log.folder / RECORD_NAME)["config"].items()
    assert f"--data {data}" in command_of(run, RANK)
    assert "--learning_rate" not in command_of(run, RANK)
    monkeypatch.setattr(sys.modules["__main__"], "RUN", run_config, raising=False)
    other = replace(run, model="someone/theirs")  # without it the rule would choose another rate
    assert f"--learning_rate {run.learning_rate}" in command_of(other, RANK)
    file = keep_record(log.folder)
    kept = load_record(file)
    assert str(tmp_path) not in file.read_text()
    assert kept["config"]["data"] == "my_data"
    assert kept["command"].endswith("--data my_data")


def test_a_records_command_does_not_set_the_rows_that_the_plan_chose(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "RUN", run, raising=False)
    log = RunRecorder(replace(run, per_device_eval_batch_size=7), RANK)
    log.command_rows = run.per_device_eval_batch_size
    record = log.complete()
    assert record["config"]["per_device_eval_batch_size"] == 7
    assert "per_device_eval_batch_size" not in record["command"]


def test_a_run_of_several_threads_is_not_kept(run: RunConfig) -> None:
    log = RunRecorder(replace(run, threads=2), RANK)
    log.complete()
    with pytest.raises(BadInputError, match="2 threads"):
        keep_record(log.folder)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"parallel": "fsdp", "devices": 2}, "torchrun-fsdp-batch16-seed42"),
        ({"parallel": "ddp", "technique": "full", "devices": 2, "sp_size": 2}, "torchrun-ddp-sp2-batch16-seed42"),
        ({"task": "classification", "technique": "full", "train_rows": 9}, "torchrun-full-single-9rows-seed42"),
        ({"task": "classification", "parallel": "pp", "devices": 2, "micro_batches": 4},
         "torchrun-lora-pp-micro4-seed42"),
        ({"task": "visual_questions"}, "torchrun-lora-single-seed42"),
        ({"task": "summarization", "technique": "full", "parallel": "ddp", "devices": 2, "train_rows": 9},
         "torchrun-trainer-x2-seed42"),
    ],
)  # fmt: skip
def test_a_run_name_has_what_its_task_says(settings: dict[str, object], name: str) -> None:
    assert default_run_name(RunConfig().changed_to(**settings), "torchrun") == name


def test_a_record_is_kept_under_its_run_name(log: RunRecorder, tmp_path: Path) -> None:
    log.complete(steps=1)
    of_docs = keep_record(log.folder, tmp_path / "docs" / "records")
    assert (of_docs.parent, (tmp_path / "records").exists()) == (tmp_path / "docs" / "records", False)
    kept = keep_record(log.folder)
    assert kept == tmp_path / "records" / "python-batch16-seed42.json"
    assert load_record(kept)["memory"][0]["peak_rss_gib"] > 0


def test_a_record_of_the_docs_is_no_run_folders_record() -> None:
    studied, own = ({(run["run_name"], run["run_folder"]) for run in kept_records(*where)} for where in ([STUDY], []))
    assert studied
    assert not studied & own


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is no record"):
        keep_record(tmp_path)
    (tmp_path / RECORD_NAME).write_text('{"schema_version": 99}')
    with pytest.raises(BadInputError, match="schema version 99"):
        load_record(tmp_path / RECORD_NAME)


def entry(rank: int, device: str, planned_gib: float | None, peak_gib: float | None) -> dict[str, object]:
    return {"rank": rank, "device": device, "planned_gib": planned_gib, "peak_training_gib": peak_gib}


@pytest.mark.parametrize(
    ("planned_gib", "peak_gib", "said"),
    [
        (10.0, 11.2, "peaked at 11.20 GiB, +12% of the 10.00 GiB planned"),
        (10.0, 8.5, "peaked at 8.50 GiB, -15% of the 10.00 GiB planned"),
        (10.0, 10.9, None),
        (10.0, 9.1, None),
        (None, 20.0, None),
        (10.0, None, None),
    ],
)
def test_a_peak_beyond_its_plan_is_said_aloud(
    planned_gib: float | None, peak_gib: float | None, said: str | None
) -> None:
    lines = beyond_plan([entry(0, "cuda:0", 10.0, 10.0), entry(1, "cuda:1", planned_gib, peak_gib)])
    assert [line.partition(": `")[0] for line in lines] == (
        [f"WARNING: rank 1, cuda:1: training {said}"] if said else []
    )


@pytest.mark.parametrize(("counted_gib", "said"), [(0.0182, []), (0.0252, ["+44%"]), (0.0122, ["-30%"])])
def test_on_a_cpu_tensors_are_compared_with_tensors_whatever_the_process_holds(
    counted_gib: float, said: list[str]
) -> None:
    on_cpu = entry(0, "cpu", 0.64, 0.76)
    on_cpu |= {"planned_gib_by_phase": {"training": 0.0175}, "peak_gib_by_phase": {"training": counted_gib}}
    unplanned = entry(1, "cpu", None, 0.76) | {"planned_gib_by_phase": {}, "peak_gib_by_phase": {"training": 1.0}}
    lines = beyond_plan([on_cpu, unplanned])
    assert [difference in line for line, difference in zip(lines, said, strict=True)] == [True] * len(said)


def test_the_plan_on_a_cpu_begins_with_what_the_process_holds(log: RunRecorder) -> None:
    held_gib = log.memory.process_gib
    assert held_gib == pytest.approx(devices.read_memory("cpu").now_gib, rel=0.1)
    plans = [plan_run(log.run, BatchShape(16, 40, 20), gpu) for gpu in (log.gpu(), devices.cpu_device(held_gib + 1))]
    own, other = (plan.devices[0] for plan in plans)
    assert held_gib < own.parts_gib["overhead"] < held_gib + 0.3
    assert other.peak_gib - own.peak_gib == pytest.approx(1)
    log.training_starts(plans[0])
    (found,) = log.complete()["memory"]
    assert found["process_gib"] == held_gib
    assert found["planned_gib"] == own.peak_gib > held_gib


def test_every_device_of_a_rank_has_its_memory_and_its_plan(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Model parallel: one rank, several devices."""
    names = ("cuda:0", "cuda:1", "cuda:2")
    peaks_gib = {"cuda:0": 4.0, "cuda:1": 5.0, "cuda:2": 9.0, "cpu": 1.0}
    forgotten: list[str] = []
    monkeypatch.setattr(
        "common.runtime.recorder.devices.read_memory",
        lambda device: MemoryReading(now_gib=1.0, peak_gib=peaks_gib[device], peak_reserved_gib=2.0, total_gib=24.0),
    )
    monkeypatch.setattr("common.runtime.recorder.devices.forget_peak", forgotten.append)
    log = RunRecorder(run, replace(RANK, device=names[0], further_devices=names[1:]))
    divided = RunConfig(technique="full", parallel="mp", stages=3)
    log.memory.enter("baseline evaluation")
    log.training_starts(place_stages(divided, BatchShape(16, 40, 20)).divided)
    planned = [memory.allocated_gib for memory in log.plan.devices]
    peaks_gib |= {"cuda:0": planned[0], "cuda:1": planned[1], "cuda:2": 1.2 * planned[2]}
    with log.memory.phase("validation"):
        peaks_gib |= dict.fromkeys(names, 1e-3)
    log.memory.training_ended()
    memory = log.complete()["memory"]
    assert forgotten[: len(names)] == list(names)
    found = [
        (
            each["rank"], each["device"], each["planned_gib"], each["planned_gib_by_phase"]["training"],
            each["peak_gib_by_phase"]["baseline evaluation"], each["peak_gib_by_phase"]["validation"],
            each["peak_allocated_gib"], each["peak_training_gib"],
        )
        for each in memory
    ]  # fmt: skip
    assert found == [
        (0, name, own, own, before, 1e-3, before, factor * own)  # the highest peak was before training
        for name, own, before, factor in zip(names, planned, (4.0, 5.0, 9.0), (1, 1, 1.2), strict=True)
    ]
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert ["cuda:2" in line and "+20%" in line for line in warnings] == [True]


def test_a_sigterm_while_a_failure_is_written_down_waits_until_it_is(
    log: RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = log.stop
    monkeypatch.setattr(log, "stop", lambda: (signal.raise_signal(signal.SIGTERM), stop()))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    try:
        with pytest.raises(SystemExit), log.phase("training"):
            raise ValueError("the first failure")
    finally:
        signal.signal(signal.SIGTERM, before)
    record = load_record(log.folder / RECORD_NAME)
    assert (record["status"], record["error"]) == ("failed", "ValueError: the first failure")


def test_a_signal_between_a_phase_and_its_bookkeeping_is_an_interruption(log: RunRecorder) -> None:
    """Python then closes the phase that nobody leaves any more: that says nothing about what went wrong."""
    entered = log.phase("training")
    entered.__enter__()
    del entered
    record = load_record(log.folder / RECORD_NAME)
    assert (record["status"], record["error"]) == ("interrupted", "SystemExit: was told to end by a signal")


def test_every_kept_record_is_a_run_of_today() -> None:
    records = kept_records() + kept_records(STUDY)
    assert len(records) > 50
    runs = [RunConfig.of_record(record["config"]) for record in records]
    assert [(run.technique, run.parallel) for run in runs] == [(run["technique"], run["parallel"]) for run in records]


@pytest.mark.parametrize(
    ("task", "last"),
    [
        ({}, f"talk to it: {command_here('chat')} '{{folder}}'"),
        ({"task": "classification", "technique": "full"}, f"record: {RECORD_NAME} in results/mine"),
    ],
)
def test_the_last_line_of_a_run_that_chats_is_the_command_that_talks_to_it(
    run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: dict[str, str], last: str
) -> None:
    log = RunRecorder(run_config.changed_to(results_root=str(tmp_path / "my place"), run_name="mine", **task), RANK)
    log.complete()
    assert capsys.readouterr().out.splitlines()[-1] == last.format(folder=log.folder)
