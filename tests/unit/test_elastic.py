"""Ranks that torchrun starts again: each start counts anew, and other numbers of ranks take the same steps."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest
from torch.distributed import HashStore, Store

from common.base.errors import BadInputError, RunStoppedError
from common.base.run_config import RunConfig
from common.records.store import default_run_name
from common.runtime.disks import LAUNCHERS, leave_mark, started_before
from common.runtime.elastic import part_of_this_start, run_as_started
from common.runtime.world import detect_launcher
from tests.pace import patient

DDP = RunConfig(technique="lora", parallel="ddp", devices=8, nodes=4, per_device_train_batch_size=6,
                learning_rate_scaling="sqrt", learning_rate=1e-3)  # fmt: skip
HYBRID = replace(DDP, technique="full", parallel="fsdp", dp_replicate_size=4)
SUMMARIES = RunConfig(task="summarization", technique="full", parallel="ddp", loop="machines", devices=4, nodes=4)


def meet(store: Store, ranks: list[int], world_size: int, within_s: float = patient(5)) -> list[Store | str]:
    """The part of a store that each of these ranks has found, or what it said of those that are missing."""

    def take_part(rank: int) -> Store | str:
        try:
            return part_of_this_start(store, rank, world_size, within_s)
        except RunStoppedError as refusal:
            return str(refusal)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(take_part, ranks))


def test_each_start_has_a_part_of_the_store_of_its_own() -> None:
    """Also one whose first rank comes last: the others must not take the first start's roll for theirs."""
    store = HashStore()
    assert [part.add("met", 1) for part in meet(store, [2, 0, 1], 3)] == [1, 2, 3]

    def late() -> list[Store | str]:
        sleep(0.5)
        return meet(store, [0], 2)

    with ThreadPoolExecutor() as pool:
        late_first = pool.submit(late)
        others = meet(store, [1], 2)
        assert [part.add("met", 1) for part in (*others, *late_first.result())] == [1, 2]
    assert [part.add("met", 1) for part in meet(store, [3, 1, 0, 2], 4)] == [1, 2, 3, 4]
    assert not store.check(["met"])


@pytest.mark.parametrize(("ranks", "missing"), [([0, 2], "1, 3"), ([1, 2], "0")])
def test_ranks_that_do_not_start_are_named(ranks: list[int], missing: str) -> None:
    for said in meet(HashStore(), ranks, 4, within_s=0.3):
        assert f"Rank {missing} did not start within 0.3 s (start_timeout_s)" in said


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make so many ranks start, by a torchrun that may start them again."""

    def start(ranks: int, on_each: int = 2, restarts: int = 3) -> None:
        said = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": on_each, "TORCHELASTIC_MAX_RESTARTS": restarts}
        for name, value in {**said, "TORCHELASTIC_RUN_ID": "test"}.items():
            monkeypatch.setenv(name, str(value))

    return start


@pytest.mark.parametrize(
    ("ranks", "rows", "accumulation"), [(4, 6, 2), (6, 4, 2), (2, 6, 4), (12, 4, 1), (16, 3, 1), (1, 6, 8)]
)
def test_other_ranks_take_the_same_steps(started: pytest.MonkeyPatch, ranks: int, rows: int, accumulation: int) -> None:
    started(ranks, on_each=min(2, ranks))
    run = run_as_started(DDP)
    assert (run.devices, run.nodes) == (ranks, max(1, ranks // 2))
    assert (run.per_device_train_batch_size, run.gradient_accumulation_steps) == (rows, accumulation)
    assert (run.effective_batch_size, run.peak_learning_rate) == (48, DDP.peak_learning_rate)
    assert run.run_name == default_run_name(DDP, detect_launcher())  # where the checkpoints of the ranks before are


@pytest.mark.parametrize(
    ("run", "ranks", "on_each", "said"),
    [
        (DDP, 10, 2, "10 ranks started, which cannot share the 48 rows of a step equally: start 2 or 4 or 6 or 8 ranks,"
         " or"),
        (HYBRID, 3, 1, "3 ranks started, which are no whole copies of 2 ranks"),
        (HYBRID, 1, 1, "1 rank started, but fsdp divides the model among two or more"),
        (SUMMARIES, 5, 1, "partitions is 4, but there are 5 ranks"),
        (DDP.changed_to(learning_rate=-1), DDP.world_size, 1, "learning_rate is chosen by the model"),
    ],
    ids=["a step", "copies", "a model", "partitions", "a rate"],
)  # fmt: skip
def test_ranks_that_cannot_share_what_the_run_has_are_refused(
    started: pytest.MonkeyPatch, run: RunConfig, ranks: int, on_each: int, said: str
) -> None:
    started(ranks, on_each)
    with pytest.raises(BadInputError, match=said):
        run_as_started(run)


@pytest.mark.parametrize(("ranks", "copies"), [(4, 2), (2, 1)])
def test_copies_of_a_sharded_model_stay_whole(started: pytest.MonkeyPatch, ranks: int, copies: int) -> None:
    started(ranks)
    assert run_as_started(HYBRID).dp_replicate_size == copies


def test_a_run_of_summaries_keeps_its_partitions(started: pytest.MonkeyPatch) -> None:
    started(3, on_each=1)
    again = run_as_started(SUMMARIES)
    found = (again.devices, again.nodes, again.partitions, again.effective_batch_size)
    assert found == (3, 3, 4, SUMMARIES.effective_batch_size)


@pytest.mark.parametrize(
    ("run", "changes"),
    [(DDP, {"restarts": 0}), (DDP, {"ranks": 8}), (replace(DDP, technique="full", parallel="zero1"), {})],
    ids=[
        "torchrun does not start ranks again",
        "as many as asked for",
        "refused with the number that it asks for, as its parts fit no other",
    ],
)
def test_the_run_stays_as_it_is(started: pytest.MonkeyPatch, run: RunConfig, changes: dict[str, int]) -> None:
    started(**{"ranks": 4, **changes})
    assert run_as_started(run) is run


def test_ranks_that_one_launcher_starts_again_find_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert started_before(tmp_path) == (False, False)
    leave_mark(tmp_path)
    assert started_before(tmp_path) == (True, True)
    added = tmp_path / "on a machine that was added"
    assert started_before(added) == (False, False)
    found_by_another_rank = [mark.name for mark in (tmp_path / LAUNCHERS).iterdir()]
    with monkeypatch.context() as of_two_ranks:
        of_two_ranks.setattr("common.runtime.disks.gather_object", lambda own: own + found_by_another_rank)
        assert started_before(added) == (True, False)
    monkeypatch.setattr("os.getppid", os.getpid)  # another launcher
    assert started_before(tmp_path) == (False, False)


def test_a_launcher_that_starts_no_ranks_again_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one looked for: a container's first process has a parent that it cannot see."""
    monkeypatch.setattr("os.getppid", lambda: 0)
    assert started_before(tmp_path) == (False, False)
    leave_mark(tmp_path)
    assert not list(tmp_path.iterdir())
