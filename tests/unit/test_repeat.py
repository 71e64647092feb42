"""Kept records are made again by their own commands; one that fails stays as it was."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from bench import repeat
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.records.store import RECORD_NAME
from common.runtime.torchrun import nodes_command

FOLDER = "2.1_lora_finetuning/run_0_cpu_x1"
RECORDS = f"{FOLDER}/records"
NEW, OLD = "2999-01-01T00:00:00+00:00", "2001-01-01T00:00:00+00:00"


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with four of the kept records, on a quiet machine, whose runs take no time.

    Seed 7 fails; seed 8 leaves the record of an earlier run where it was.
    """
    records = tmp_path / RECORDS
    records.mkdir(parents=True)
    for name in ("python-batch16-seed42", "python-batch16-seed7", "python-batch16-seed8", "notebook-batch16-seed42"):
        (records / f"{name}.json").write_bytes((REPOSITORY / RECORDS / f"{name}.json").read_bytes())

    def run(command: list[str], cwd: Path) -> None:
        assert (command[0], cwd) == (sys.executable, tmp_path / FOLDER)
        if "7" in command:
            raise RuntimeError("The command above ended with exit code 1; its last lines say why.")
        name, started = ("python-batch16-seed8", OLD) if "8" in command else ("python-batch16-seed42", NEW)
        results = cwd / "results" / name
        results.mkdir(parents=True)
        record = json.loads((records / f"{name}.json").read_text())
        (results / RECORD_NAME).write_text(json.dumps({**record, "started_at": started}))

    for module in (repeat, repeat.store):
        monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    monkeypatch.setattr(repeat, "stream_command", run)
    monkeypatch.setattr(repeat.psutil, "cpu_percent", lambda interval: 1.0)
    monkeypatch.setattr(sys, "argv", ["repeat"])
    return records


def test_each_record_is_made_again_or_stays(copies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        repeat.main()
    assert ended.value.code == 1
    started = {path.stem: json.loads(path.read_text())["started_at"] for path in copies.iterdir()}
    assert started.pop("python-batch16-seed42") == NEW
    assert not {NEW, OLD} & set(started.values())
    said = capsys.readouterr().out
    for line in (f"{RECORDS}/python-batch16-seed7.json: ", f"{RECORDS}/python-batch16-seed8.json: ",
                 f"left out: {RECORDS}/notebook-batch16-seed42.json"):  # fmt: skip
        assert line in said


def test_records_of_ranks_are_made_again_by_the_command_of_now_and_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(repeat, "stream_command", lambda command, cwd: started.append(command))
    monkeypatch.setattr(repeat, "load_record", lambda path: {"started_at": NEW})
    monkeypatch.setattr(repeat, "keep_record", lambda results: tmp_path)
    record = {"run_folder": "2.2_lora_finetuning_with_ddp/run_0_cpu_x2", "run_name": "some"}
    for start in (shlex.join(nodes_command(1, 2)), "torchrun --nproc_per_node 2"):
        command = f"{start} my_workflow_lora_finetuning_with_ddp.py --seed 7"
        assert repeat.repeat({**record, "command": command}) == tmp_path
        assert started.pop()[1:] == ["-m", "torch.distributed.run", *shlex.split(command)[1:]]
    for command in ("torchrun --nproc_per_node 2 --rdzv_endpoint there my_workflow_x.py", "torchrun my_workflow_x.py"):
        with pytest.raises(BadInputError, match="starts no workflow"):
            repeat.repeat({**record, "command": command})
    assert not started


def test_runs_on_virtual_hosts_are_left_out() -> None:
    records = repeat.records_below(["3.2_summarization"])
    left_out = [path.stem for path, record in records.items() if not repeat.is_repeatable(record)]
    assert left_out
    assert all(name.startswith("machines-") for name in left_out)


@pytest.mark.usefixtures("copies")
def test_a_busy_machine_or_a_folder_without_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInputError, match=r"no kept record below 2\.9_nothing"):
        repeat.records_below(["2.9_nothing"])
    monkeypatch.setattr(repeat.psutil, "cpu_percent", lambda interval: 80.0)
    with pytest.raises(BadInputError, match="80 % busy"):
        repeat.check_quiet()
