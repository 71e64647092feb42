"""The tests stay within their time, and every slow one is in one of three successive slices."""

from collections import Counter
from itertools import chain

import pytest

from tests import pace
from tests.conftest import SLOW_TESTS
from tests.durations import (
    FAST_MINUTES,
    SLICE_MINUTES,
    TURNS,
    WORKERS,
    Durations,
    added_said,
    concerns,
    kept_from,
    read_kept,
    scope_of,
    slice_of,
)

PIPELINE = "2.7_full_finetuning_with_pp"
NOTEBOOK = "tests/notebooks/test_notebooks.py::test_the_notebook_runs[run_0_cpu_x2-full_finetuning_with_pp_nblaunch]"
RENEW = "`make test-all` keeps them; of a few new tests: pytest --measured FILE, then python -m tests.durations FILE"


@pytest.fixture
def skip_while_measuring(request: pytest.FixtureRequest) -> None:
    """Skip where this very run renews what is kept."""
    if request.config.getoption("measured"):
        pytest.skip("this run renews the durations")


@pytest.mark.usefixtures("skip_while_measuring")
def test_the_fast_tests_stay_within_their_minutes() -> None:
    assert 0.5 < read_kept().fast_minutes <= FAST_MINUTES


@pytest.mark.usefixtures("skip_while_measuring")
def test_each_slow_test_has_a_kept_duration(request: pytest.FixtureRequest) -> None:
    assert set(request.config.stash[SLOW_TESTS]) - set(read_kept().slow) == set(), RENEW


@pytest.mark.usefixtures("skip_while_measuring")
def test_successive_slices_have_every_slow_test_and_none_takes_too_long() -> None:
    slow, seen = read_kept().slow, set[str]()
    for number in range(TURNS):
        chosen = [*chain(*slice_of(slow, ["common/training/loop.py"], number))]
        seen |= {*chosen}
        assert len({*chosen}) == len(chosen)
        assert 0 < sum(slow[test] for test in chosen) <= 60 * WORKERS * SLICE_MINUTES
        assert sum(slow[test] for test in chosen if scope_of(test) == "timed") <= 60 * SLICE_MINUTES
    assert seen == {*slow}


def test_what_changed_is_added_as_far_as_there_is_time() -> None:
    slow = {f"tests/unit/test_{name}.py::test_it[{n}]": 30.0 for name in ("loud", "quiet") for n in range(45)}
    turn, more = slice_of(slow, ["tests/unit/test_loud.py"], 0)
    assert {test.partition("[")[0] for test in more} == {"tests/unit/test_loud.py::test_it"}
    assert (len(turn), len(more)) == (
        len(slow) / TURNS,
        2 * WORKERS * SLICE_MINUTES - len(turn),
    )  # of half a minute each
    assert slice_of(slow, ["tests/unit/test_loud.py"], TURNS)[1] != more, "where there is no time for all, others"
    assert slice_of(slow, [], 0) == (turn, [])


def test_tests_that_share_ranks_run_all_or_none() -> None:
    slow = {f"tests/recipes/test_{name}.py::test_it[{n}]": 600.0 - n for name in "abcdef" for n in range(2)}
    turn, more = slice_of(slow, ["tests/recipes/test_b.py"], 0)
    assert Counter(test.partition("::")[0] for test in turn) == {f"tests/recipes/test_{name}.py": 2 for name in "ad"}
    assert more == []  # of 40 minutes of a worker


@pytest.mark.parametrize(
    ("test", "changed", "expected"),
    [
        (NOTEBOOK, "tests/notebooks/test_notebooks.py", True),
        (NOTEBOOK, f"{PIPELINE}/run_0_cpu_x2/my_workflow_full_finetuning_with_pp.py", True),
        (NOTEBOOK, "common/records/store.py", True),
        (NOTEBOOK, "2.3_qlora_finetuning/run_0_cpu_x1/my_utils_qlora_finetuning.py", False),
        (NOTEBOOK, "common/serving/gguf_file.py", False),
        (NOTEBOOK, "docs/gpus.md", False),
        (
            "tests/recipes/test_pipeline.py::test_it",
            f"{PIPELINE}/run_0_cpu_x2/full_finetuning_with_pp_nblaunch.ipynb",
            True,
        ),
        ("tests/faults/test_processes.py::test_it[pp]", f"{PIPELINE}/full_finetuning_with_pp_readme.md", True),
        ("tests/faults/test_processes.py::test_it[pp]", "tests/faults/cases.py", True),
        ("tests/faults/test_processes.py::test_it[pp]", "tests/faults/conftest.py", True),
        ("tests/network/test_nodes.py::test_it", "tests/network/workers.py", True),
        ("tests/unit/test_pipeline.py::test_it", "tests/unit/pipeline_worker.py", True),
        ("tests/unit/test_hub.py::test_it", "tests/unit/pipeline_worker.py", False),
    ],
)
def test_a_test_is_concerned_by_its_files_and_folders_and_by_what_these_import(
    test: str, changed: str, expected: bool
) -> None:
    assert concerns(test, [changed]) == expected


def test_durations_are_kept_by_file_and_slow_ones_by_test() -> None:
    fast, slow = "tests/unit/test_one.py::test_it", "tests/unit/test_one.py::test_slow"
    measured = {fast: (1.0, False), f"{fast}[2]": (2.0, False), slow: (30.04, True), f"{slow}[2]": (None, True)}
    before = Durations(slow={f"{slow}[2]": 7.0, f"{slow}[gone]": 9.0})
    kept = kept_from(measured, "abc", before)
    assert kept == Durations("abc", {"tests/unit/test_one.py": 3.0}, {slow: 30.0, f"{slow}[2]": 7.0})
    newer = Durations("def", kept.fast, {slow: 10.0, f"{slow}[2]": 12.0})
    said = added_said(kept, newer)
    assert "-20.0 s" in said
    assert "+5.0 s" in said


def test_limits_are_longer_on_a_slow_machine_and_never_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit_of(measured_s: float) -> float:
        monkeypatch.delenv(pace.VARIABLE, raising=False)
        monkeypatch.setattr(pace, "_measured_s", lambda: measured_s)
        pace.slowness.cache_clear()
        return pace.patient(5)

    limits = [limit_of(times * pace.REFERENCE_S) for times in (0.5, 1, 3)]
    monkeypatch.undo()
    pace.slowness.cache_clear()
    assert limits == [5, 5, 15]
