"""A training's checkpoints: when one is due, it is written aside and committed; a resumed run finds where it begins.

What a checkpoint is made of is `Part.state`'s; that it is there whole or not at all, `common.training.checkpoints`'.
"""

import os
import random
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch.utils._pytree import tree_leaves
from transformers import TrainerControl, TrainerState

from common.base.errors import AskedToEndError, BadInputError
from common.base.run_config import LAST
from common.data.row_checks import say_once
from common.models.shards import byte_count, host_copy, local_part
from common.runtime.disks import broadcast_folder
from common.runtime.rank import exchange_timeout
from common.runtime.recorder import RunRecorder
from common.runtime.world import BACKENDS
from common.training.checkpoints import (
    BEST,
    FULL_STATE,
    HOLDS,
    STATE_FILE,
    WEIGHTS,
    DamagedCheckpointError,
    UnfinishedCheckpoint,
    newest_whole,
    read_manifest,
    rotate,
    steps_at,
    to_keep,
    verify_once,
)
from common.training.part import Part
from common.training.resuming import about_run, check_resumable, say_changes
from common.training.saves import (
    LITTLE_BYTES,
    CheckpointSize,
    SaveSchedule,
    checkpoint_size,
    describe_saves,
)

RANDOM = "rng_state_{}.pth"
"""A rank's file: its random numbers, and what else is its own."""


class Saver:
    """Writes the checkpoints of a training, and finds the one to resume from.

    Attributes:
        folder: Where the checkpoints are.
        schedule: When a full state is due.
        sizes: Bytes of each checkpoint that this run has written, by what it holds.
        waits_s: Seconds that training waited for them.
        first_step: Optimizer steps that were taken before, by the run whose checkpoint this one resumes from.
        resumes_from: The checkpoint that training resumes from, if it does.
        in_background: Whether training goes on while a checkpoint is written, from a copy on the host.
    """

    def __init__(self, part: Part, log: RunRecorder, rows: int) -> None:
        """Save `part` in the results folder of `log`; `rows`: of training. Called on every rank."""
        self.part, self.log, self.rank = part, log, log.rank
        self.folder, self.writes = log.folder / "checkpoints", log.writes
        self.schedule = SaveSchedule(log.run.max_lost_minutes)
        self.sizes: dict[str, list[int]] = {FULL_STATE: [], WEIGHTS: []}
        self.waits_s: list[float] = []
        self.about = about_run(log.run, rows, log.row_digests)
        self.first_step, self.resumes_from = 0, None
        self.unfinished: UnfinishedCheckpoint | None = None
        self.group: dist.ProcessGroup | None = None
        self.thread, self.in_background = ThreadPoolExecutor(1, "checkpoint"), False

    def begin(self, state: TrainerState) -> None:
        """Find where training begins, and say on rank 0 how many checkpoints there will be; called on every rank.

        `state` has the steps of the whole training.

        Raises:
            BadInputError: the checkpoint to resume from is damaged, or of another run.
        """
        run = self.log.run
        size = checkpoint_size(run, self.part.model.parameters())
        if run.parallelism.pipelines:  # a rank has its own stage
            stages = gather_object([size])
            size = CheckpointSize(sum(each.weights_bytes for each in stages), sum(each.state_bytes for each in stages))
        self.schedule.saves_at_end = size.state_bytes <= LITTLE_BYTES
        self.in_background = run.parallelism.saves_in_background and size.state_bytes > LITTLE_BYTES
        if self.rank.is_main:
            print(describe_saves(run, state, size, waits=not self.in_background))
        if folder := self._find_checkpoint():
            about = verify_once(folder, self.rank.is_main)
            check_resumable(run, self.about, folder, about)
            say_once(say_changes(self.about, about))
            self._check_random_numbers(folder, about["ranks"])
            self.resumes_from, self.first_step = folder, steps_at(folder)

    # -- writing

    @contextmanager
    def _holding_up(self) -> Iterator[None]:
        """Count the seconds of this context: training waits for a checkpoint."""
        start_s = time.perf_counter()
        yield
        self.waits_s.append(time.perf_counter() - start_s)

    def for_record(self) -> dict[str, float]:
        """Return how many checkpoints there were, their bytes, and how long training waited, in all and at most."""
        return {
            "full_states": len(self.sizes[FULL_STATE]),
            "best_weights": len(self.sizes[WEIGHTS]),
            "bytes": sum(map(sum, self.sizes.values())),
            "held_up_s": sum(self.waits_s),
            "longest_s": max(self.waits_s),
        }

    def save(self, state: TrainerState, control: TrainerControl, of_rank: Mapping[str, Any]) -> None:
        """Write a full state, if one is due, or else the weights alone; then remove what is needed no more.

        Where training goes on meanwhile, it waits for a copy on the host alone, and for the checkpoint before.
        Called on every rank; `of_rank` is kept for it beside its random numbers.

        Raises:
            AskedToEndError: The run was asked to save and to end; all is written.
        """
        with self._holding_up():
            self.wait_and_commit()
            is_full = self.schedule.is_due(state, control)
            folder, best = self.folder / f"checkpoint-{state.global_step}", state.best_global_step or 0
            if best > self.first_step:
                state.best_model_checkpoint = str(folder.with_name(f"checkpoint-{best}"))
            about = {**self.about, HOLDS: FULL_STATE if is_full else WEIGHTS, BEST: best}
            self.unfinished = UnfinishedCheckpoint(folder, about, self.writes)
            with self.unfinished.being_written() as partial_folder:
                if is_full:
                    self._save_of_rank(partial_folder, of_rank)
                if self.writes:
                    state.save_to_json(str(partial_folder / STATE_FILE))
                self._write(partial_folder, is_full)
            if is_full:
                self.schedule.saved(state.global_step)
            if self.schedule.is_asked:
                self.wait_and_commit()
                raise AskedToEndError(
                    f"saved after step {state.global_step}, as asked by SIGUSR1; --resume_from_checkpoint {LAST} "
                    "resumes there."
                )

    def _write(self, folder: Path, is_full: bool) -> None:
        """Write weights, and optimizer, now or in the background; where all ranks have all, one of each disk does."""
        writes_part = self.writes or not self.part.is_whole
        parts = self.part.state(is_full)
        if self.in_background and self._has_room_to_copy(parts):
            if self.rank.world_size > 1 and not (self.part.is_whole or self.group):
                # of its own, on the CPU: collectives of the thread that writes would come among those of training
                self.group = dist.new_group(backend=BACKENDS["cpu"], timeout=exchange_timeout(self.log.run))
            if writes_part:
                write = partial(self.part.write, folder, host_copy(parts), self.group)
                self.unfinished.written = self.thread.submit(self.unfinished.write_and_hash, write)
            return
        if writes_part:
            self.unfinished.digests = self.unfinished.write_and_hash(partial(self.part.write, folder, parts))
        self.wait_and_commit()

    def commit_if_written(self, evaluates: bool, step: int) -> None:
        """Commit what is written where the ranks meet anyway; called on every rank, after each step."""
        meets = evaluates or step == self.schedule.met_step
        if self.unfinished and meets and self.unfinished.is_written():
            with self._holding_up():
                self.wait_and_commit()

    def wait_and_commit(self) -> None:
        """Wait until all is written, and commit it; called on every rank."""
        if not self.unfinished:
            return
        unfinished, self.unfinished = self.unfinished, None
        unfinished.commit()
        if self.writes:
            files = read_manifest(unfinished.folder)["files"].values()
            self.sizes[unfinished.about[HOLDS]].append(sum(file["bytes"] for file in files))
            rotate(self.folder, to_keep(self.folder, unfinished.about[BEST]))

    def _has_room_to_copy(self, parts: Mapping[str, Any]) -> bool:
        """Return whether the hosts of all ranks can hold a copy of what they write; called on every rank."""
        ranks_here = 1 if self.part.is_whole else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        copied = byte_count(map(local_part, filter(torch.is_tensor, tree_leaves(parts))))
        return all(gather_object([ranks_here * copied < psutil.virtual_memory().available]))

    def _save_of_rank(self, folder: Path, of_rank: Mapping[str, Any]) -> None:
        """Write what is a rank's own; every disk gets every rank's, so that any of them can start all ranks again."""
        own = folder / RANDOM.format(self.rank.rank)
        torch.save({**random_numbers(), **of_rank}, own)
        if len(self.log.results.hosts) > 1:
            for name, content in gather_object([(own.name, own.read_bytes())]):
                if self.writes and not (folder / name).exists():
                    (folder / name).write_bytes(content)

    # -- resuming

    def _find_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint, where the run resumes, or the one that it names; None: the beginning.

        The newest that any disk has is on every disk afterwards.
        """
        asked, resumes = self.log.run.resume_from_checkpoint, self.log.resumes
        kept = newest_whole(self.folder) if resumes and self.writes else None
        newest = max(gather_object([steps_at(kept) if kept else 0]))
        if newest:
            folder = self.folder / f"checkpoint-{newest}"
            self._share(folder, has_it=kept == folder)
            return folder
        if asked not in ("", LAST):
            return Path(asked).expanduser()
        if resumes and self.rank.is_main:
            print("there is no checkpoint to resume from: training starts at the beginning")
        return None

    def _share(self, folder: Path, has_it: bool) -> None:
        """Have a folder that some disks have on every one; `has_it`: this rank's, if it writes for its disk."""
        of_ranks = gather_object([has_it])
        if any(of_ranks):
            broadcast_folder(folder, of_ranks.index(True), self.writes and not has_it)

    def _check_random_numbers(self, folder: Path, ranks_then: int) -> None:
        """Refuse a checkpoint without a rank's random numbers: what follows would be another run's."""
        ranks = self.rank.world_size
        missing = [name for name in map(RANDOM.format, range(ranks)) if not (folder / name).is_file()]
        if ranks_then == ranks and missing:
            raise BadInputError(f"{folder} lacks {', '.join(missing)}, and cannot be resumed exactly.")
        if ranks_then != ranks and self.rank.is_main:
            print(f"{folder.name} is of {ranks_then} ranks: rows stay in order, but dropout will be another.")

    def load(self) -> tuple[TrainerState, dict[str, Any]]:
        """Take back weights, optimizer and random numbers of the checkpoint that the run resumes from.

        Returns:
            The history until then, and what was saved beside the random numbers, which all ranks have alike.
        """
        folder = self.resumes_from
        self.part.load(folder, is_full=True)
        state = TrainerState.load_from_json(str(folder / STATE_FILE))
        self._find_best(folder, state)
        own = folder / RANDOM.format(self.rank.rank)
        if own.is_file():
            load_random_numbers(own)
        return state, torch.load(folder / RANDOM.format(0), weights_only=True)

    def _find_best(self, folder: Path, state: TrainerState) -> None:
        """Find the best checkpoint so far: beside the one that is resumed, or where that one says.

        One that is gone or damaged is forgotten, with a word, at the start rather than when training has ended.
        """
        if not state.best_global_step:
            return
        best = folder.with_name(f"checkpoint-{state.best_global_step}")
        self._share(best, has_it=self.writes and best.is_dir())
        if not best.is_dir():
            best = Path(state.best_model_checkpoint)
        try:
            if best != folder:
                verify_once(best, self.rank.is_main)
            state.best_model_checkpoint = str(best)
        except DamagedCheckpointError:
            if self.rank.is_main:
                print(f"the best checkpoint so far, {best}, is gone or damaged: the next steps' best takes its place")
            state.best_model_checkpoint = state.best_global_step = state.best_metric = None

    def load_best(self, state: TrainerState) -> None:
        """Finish what is being written, and take back the best weights so far, if there are any."""
        with self._holding_up():
            self.wait_and_commit()
        if state.best_model_checkpoint:
            verify_once(Path(state.best_model_checkpoint), self.rank.is_main)
            self.part.load(Path(state.best_model_checkpoint), is_full=False)


def random_numbers() -> dict[str, Any]:
    """Return where the generators of random numbers are that training draws from."""
    kind, keys, *rest = np.random.get_state()
    numbers = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        numbers["cuda"] = torch.cuda.get_rng_state_all()
    return numbers


def load_random_numbers(file: Path) -> None:
    """Take back what `random_numbers` returned, from a rank's file."""
    held = torch.load(file, weights_only=True)
    random.setstate(held["python"])
    np.random.set_state(held["numpy"])
    torch.set_rng_state(held["torch"])
    if "cuda" in held and len(held["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(held["cuda"])
