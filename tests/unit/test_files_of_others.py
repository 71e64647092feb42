"""What no run has made is neither moved nor removed: results folders, what lies in them, exports and pictures."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench import compare
from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.inputs import check_results_folder
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.training.checkpoints import newest_whole, rotate, write_manifest

RANK = Rank(rank=0, world_size=1, device="cpu", launcher="python")
NAMES = ("figures", "mine", "a.b", "run_record.json", "UPPER")


@pytest.fixture(autouse=True)
def _without_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking git and packages takes longer than all the rest."""
    monkeypatch.setattr("common.records.store.ask_git", lambda *_: "")
    monkeypatch.setattr("common.records.store.package_version", lambda _: "1")


def started(run: RunConfig, is_complete: bool = True) -> Path:
    """The results folder of a run that has begun, and ended."""
    log = RunRecorder(run, RANK)
    (log.folder / "adapter").mkdir(exist_ok=True)
    if is_complete:
        log.complete()
    else:
        log.results.lock.release(force=True)  # as a killed process does
    return log.folder


def of_user(place: Path) -> None:
    place.mkdir(parents=True)
    (place / "notes.txt").write_text(f"mine, in {place.name}")


def picture_of_user(place: Path) -> None:
    (place / "ranks").mkdir(parents=True)
    (place / "ranks" / "notes.txt").write_text("mine")
    (place / "checkpoints" / "checkpoint-7").mkdir(parents=True)
    (place / "checkpoints" / "checkpoint-7" / "notes.txt").write_text("mine")


def record_of_another_tool(place: Path) -> None:
    of_user(place)
    (place / "run_record.json").write_text('{"runs": 3}')


def file_of_user(place: Path) -> None:
    place.write_text("mine")


def link_of_user(place: Path) -> None:
    of_user(place.with_name("elsewhere"))
    place.symlink_to(place.with_name("elsewhere"))


def dangling_link(place: Path) -> None:
    place.symlink_to(place.with_name("nowhere"))


def contents(root: Path) -> dict[str, str]:
    """Every file of the user's below a folder, with what it says."""
    files = [path for path in root.rglob("*") if path.is_file() and path.read_bytes().startswith(b"mine")]
    return {str(path): path.read_text() for path in files}


def tried(run: RunConfig) -> bool:
    """Whether a run begins, after the check that precedes it."""
    try:
        check_results_folder(run)
    except BadInputError:
        with pytest.raises(BadInputError, match=run.run_name):
            RunRecorder(run, RANK)  # nor without the check
        return False
    started(run)
    return True


@pytest.mark.parametrize("resumes", ["", "last"])
@pytest.mark.parametrize(
    "make", [of_user, picture_of_user, record_of_another_tool, file_of_user, link_of_user, dangling_link]
)
def test_no_file_of_a_user_is_touched_whatever_the_run_is_called(
    make: Callable[[Path], None], resumes: str, run_config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "results").mkdir()
    for name in NAMES:
        run = replace(run_config, results_root=str(tmp_path / name), run_name=name, resume_from_checkpoint=resumes)
        folder = tmp_path / name / "results"
        folder.mkdir(parents=True)
        make(folder / name)
        before = contents(tmp_path)
        assert not tried(run)
        assert not tried(run)
        assert contents(tmp_path) == before


@pytest.mark.parametrize("make", [of_user, file_of_user, link_of_user])
@pytest.mark.parametrize("suffix", [".previous", ".unfinished", ".previous-2"])
def test_nor_is_one_that_is_called_as_earlier_runs_are(
    make: Callable[[Path], None], suffix: str, run_config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "results").mkdir()
    make(tmp_path / "results" / f"mine{suffix}")
    before, run = contents(tmp_path), replace(run_config, results_root=str(tmp_path), run_name="mine")
    for is_complete in (True, True, False, True, False, False):
        started(run, is_complete)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("ending", [".previous", ".unfinished", ".bad", ".previous-2", ".Previous"])
def test_a_run_is_not_called_as_what_is_set_aside(ending: str) -> None:
    with pytest.raises(BadInputError, match="set aside"):
        RunConfig(run_name=f"mine{ending}")
    assert RunConfig(run_name=f"mine{ending}s").run_name


@pytest.mark.parametrize("placed", ["exported", "exported_adapter", "ollama", "tuned-f16.gguf", "notes.txt"])
@pytest.mark.parametrize("is_complete", [True, False])
def test_what_was_put_into_a_run_stays_when_others_follow(
    placed: str, is_complete: bool, run_config: RunConfig, tmp_path: Path
) -> None:
    run = replace(run_config, results_root=str(tmp_path), run_name="mine")
    file = started(run) / placed
    if file.suffix:
        file.write_text("mine")
    else:
        of_user(file)
    texts = sorted(contents(tmp_path).values())
    for _ in range(3):
        started(run, is_complete)
        assert sorted(contents(tmp_path).values()) == texts
    kept = {path.name for path in (tmp_path / "results").iterdir() if path.name.startswith("mine")}
    assert len(kept) <= 4  # others make way for each other


def test_a_resumed_run_does_not_take_what_was_put_there_for_its_own(run_config: RunConfig, tmp_path: Path) -> None:
    run = replace(run_config, results_root=str(tmp_path), run_name="mine")
    (started(run) / "notes.txt").write_text("mine")
    started(replace(run, resume_from_checkpoint="last"))
    for _ in range(3):
        started(run)
    assert list(contents(tmp_path).values()) == ["mine"]


def test_a_run_that_was_killed_is_one_and_an_empty_folder_may_be_taken(run_config: RunConfig, tmp_path: Path) -> None:
    run = replace(run_config, results_root=str(tmp_path), run_name="mine")
    (tmp_path / "results" / "mine").mkdir(parents=True)
    for is_complete in (True, False, False, True):
        check_results_folder(run)
        assert (started(run, is_complete) / "adapter").is_dir()
    assert not list((tmp_path / "results").glob("mine.*-2"))


def test_checkpoints_that_no_run_wrote_stay(tmp_path: Path) -> None:
    for number in (3, 7):
        of_user(tmp_path / f"checkpoint-{number}")
    of_user(tmp_path / "checkpoint-7.bad")
    (tmp_path / "checkpoint-5").mkdir()
    write_manifest(tmp_path / "checkpoint-5", {})
    before = sorted(contents(tmp_path).values())
    rotate(tmp_path, set())
    assert not (tmp_path / "checkpoint-5").exists()
    assert newest_whole(tmp_path) is None  # it is named, and set aside
    assert sorted(contents(tmp_path).values()) == before


def test_a_picture_does_not_replace_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.png"
    file.write_text("mine")
    runs = sorted(Path("docs/records").glob("*.json"))[:2]
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, runs), "--picture", str(file)])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert file.read_text() == "mine"


def test_a_record_decides_about_no_place(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    for folder in ("../../elsewhere", str(tmp_path / "there"), "docs", "", "2.1_lora_finetuning/../.."):
        assert compare.default_picture(file, {"run_folder": folder}).parent == tmp_path
    inside = compare.default_picture(file, {"run_folder": "2.1_lora_finetuning/run_0_cpu_x1"})
    assert inside.parts[-4:] == ("2.1_lora_finetuning", "run_0_cpu_x1", "results", "compare.png")
