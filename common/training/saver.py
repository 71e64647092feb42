"""A training's checkpoints: when one is due, how large it is, how it is written, and where a resumed run begins."""

import math
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from common.base.errors import AskedToEndError, BadInputError
from common.base.run_config import LAST, RunConfig
from common.base.signals import is_asked_to_save
from common.data.row_checks import say_once
from common.hardware.devices import size_text
from common.models.shards import byte_count, global_numel, host_copy, local_part
from common.planning.host_memory import LITTLE_BYTES
from common.planning.job import OPTIMIZER_BYTES
from common.runtime.disks import broadcast_folder
from common.runtime.rank import exchange_timeout
from common.runtime.recorder import RunRecorder
from common.runtime.world import BACKENDS
from common.training import checkpoints
from common.training.checkpoints import BEST, FULL_STATE, HOLDS, WEIGHTS, DamagedCheckpointError, steps_at
from common.training.part import Part
from common.training.resuming import about_run, check_resumable, say_changes

# on the disk at the same time (`checkpoints.to_keep`): two full states and the one that is written; the best weights,
# and those that were the best when the newest full state was written
MOST_FULL_STATES, MOST_BEST_WEIGHTS = 3, 2
MEET_S = 20.0  # at most so many seconds lie between two meetings of the ranks, or one step where that takes longer
RANDOM = "rng_state_{}.pth"  # a rank's file: its random numbers, and what all ranks have alike


class Saver:
    """Writes the checkpoints of a training, and finds the one to resume from; methods are called on every rank.

    Attributes:
        first_step: Optimizer steps that were taken before, by the run whose checkpoint this one resumes from.
        in_background: Whether training goes on while a checkpoint is written, from a copy on the host.
    """

    def __init__(self, part: Part, log: RunRecorder, rows: int) -> None:
        self.part, self.log, self.rank = part, log, log.rank
        self.folder, self.writes = log.folder / "checkpoints", log.writes
        self.schedule = SaveSchedule(log.run.max_lost_minutes, log.run.pause_at_step)
        self.sizes: dict[str, list[int]] = {FULL_STATE: [], WEIGHTS: []}
        self.waits_s: list[float] = []
        self.about = about_run(log.run, rows, log.row_digests)
        self.first_step, self.resumes_from = 0, None
        self.unfinished: checkpoints.UnfinishedCheckpoint | None = None
        self.group: dist.ProcessGroup | None = None
        self.thread, self.in_background = ThreadPoolExecutor(1, "checkpoint"), False

    def begin(self, state: TrainerState) -> None:
        """Find where training begins; rank 0 says how often it will save. `state` has the steps of all training."""
        run = self.log.run
        size = checkpoint_size(run, self.part.model.parameters())
        if run.parallelism.pipelines:  # a rank has its own stage
            size = CheckpointSize(*map(sum, zip(*gather_object([size]), strict=True)))
        self.schedule.saves_at_end = size.state_bytes <= LITTLE_BYTES
        self.in_background = run.parallelism.saves_in_background and size.state_bytes > LITTLE_BYTES
        if self.rank.is_main:
            print(describe_saves(run, state, size, waits=not self.in_background))
        if folder := self._find_checkpoint():
            about = checkpoints.verify_once(folder, self.rank.is_main)
            check_resumable(run, self.about, folder, about)
            say_once(say_changes(self.about, about))
            self._check_random_numbers(folder, about["ranks"])
            self.resumes_from, self.first_step = folder, steps_at(folder)

    # -- writing

    @contextmanager
    def _holding_up(self) -> Iterator[None]:
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
            "longest_s": max(self.waits_s, default=0.0),
        }

    def save(self, state: TrainerState, control: TrainerControl, of_all: Mapping[str, Any]) -> None:
        """Write a full state, if one is due, or else the weights alone; training waits at least for a copy on the host.

        `of_all`: what all ranks have alike, kept beside each one's random numbers. An AskedToEndError may follow.
        """
        with self._holding_up():
            self._wait_and_commit()
            is_full = self.schedule.is_due(state, control)
            folder, best = self.folder / f"checkpoint-{state.global_step}", state.best_global_step or 0
            if best > self.first_step:
                state.best_model_checkpoint = str(folder.with_name(f"checkpoint-{best}"))
            about = {**self.about, HOLDS: FULL_STATE if is_full else WEIGHTS, BEST: best}
            self.unfinished = checkpoints.UnfinishedCheckpoint(folder, about, self.writes)
            with self.unfinished.being_written() as partial_folder:
                if is_full:
                    self._save_of_rank(partial_folder, of_all)
                if self.writes:
                    state.save_to_json(str(partial_folder / checkpoints.STATE_FILE))
                self._write(partial_folder, is_full)
            if is_full:
                self.schedule.saved(state.global_step)
            if self.schedule.is_asked:
                self._wait_and_commit()
                raise AskedToEndError(
                    f"saved after step {state.global_step}, as asked by {self.schedule.asked_by(state)}; "
                    f"--resume_from_checkpoint {LAST} resumes there."
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
        self._wait_and_commit()

    def commit_if_written(self, evaluates: bool, step: int) -> None:
        """Commit, after a step, what is written where the ranks meet anyway."""
        meets = evaluates or step == self.schedule.met_step
        if self.unfinished and meets and self.unfinished.is_written():
            with self._holding_up():
                self._wait_and_commit()

    def _wait_and_commit(self) -> None:
        if not self.unfinished:
            return
        unfinished, self.unfinished = self.unfinished, None
        unfinished.commit()
        if self.writes:
            files = checkpoints.read_manifest(unfinished.folder)["files"].values()
            self.sizes[unfinished.about[HOLDS]].append(sum(file["bytes"] for file in files))
            checkpoints.rotate(self.folder, checkpoints.to_keep(self.folder, unfinished.about[BEST]))

    def _has_room_to_copy(self, parts: Mapping[str, Any]) -> bool:
        ranks_here = 1 if self.part.is_whole else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        copied = byte_count(map(local_part, filter(torch.is_tensor, tree_leaves(parts))))
        return all(gather_object([ranks_here * copied < psutil.virtual_memory().available]))

    def _save_of_rank(self, folder: Path, of_all: Mapping[str, Any]) -> None:
        """Write what is a rank's own; every disk gets every rank's, so that any of them can start all ranks again."""
        own = folder / RANDOM.format(self.rank.rank)
        torch.save({**random_numbers(), **of_all}, own)
        if len(self.log.results.hosts) > 1:
            for name, content in gather_object([(own.name, own.read_bytes())]):
                if self.writes and not (folder / name).exists():
                    (folder / name).write_bytes(content)

    # -- resuming

    def _find_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint, which all disks then have, if the run resumes, or the one it names."""
        asked, resumes = self.log.run.resume_from_checkpoint, self.log.resumes
        kept = checkpoints.newest_whole(self.folder) if resumes and self.writes else None
        if newest := max(gather_object([steps_at(kept) if kept else 0])):
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
        ranks = self.rank.world_size
        names = list(map(RANDOM.format, range(ranks)))
        missing = sorted(set(gather_object([name for name in names if not (folder / name).is_file()])))
        if ranks_then == ranks and missing:
            raise BadInputError(f"{folder} lacks {', '.join(missing)}, and cannot be resumed exactly.")
        if ranks_then != ranks and self.rank.is_main:
            print(f"{folder.name} is of {ranks_then} ranks: rows stay in order, but dropout will be another.")

    def load(self) -> tuple[TrainerState, dict[str, Any]]:
        """Take back the checkpoint to resume from; return the history, and what was kept beside the random numbers."""
        folder = self.resumes_from
        self.part.load(folder, is_full=True)
        state = TrainerState.load_from_json(str(folder / checkpoints.STATE_FILE))
        self._find_best(folder, state)
        own = folder / RANDOM.format(self.rank.rank)
        if own.is_file():
            load_random_numbers(own)
        return state, torch.load(folder / RANDOM.format(0), weights_only=True)

    def _find_best(self, folder: Path, state: TrainerState) -> None:
        """Find the best checkpoint so far, beside the one that is resumed or where that says; forget a damaged one."""
        if not state.best_global_step:
            return
        best = folder.with_name(f"checkpoint-{state.best_global_step}")
        self._share(best, has_it=self.writes and best.is_dir())
        if not best.is_dir():
            best = Path(state.best_model_checkpoint)
        try:
            if best != folder:
                checkpoints.verify_once(best, self.rank.is_main)
            state.best_model_checkpoint = str(best)
        except DamagedCheckpointError:
            if self.rank.is_main:
                print(f"the best checkpoint so far, {best}, is gone or damaged: the next steps' best takes its place")
            state.best_model_checkpoint = state.best_global_step = state.best_metric = None

    def load_best(self, state: TrainerState) -> None:
        """Finish what is being written, and take back the best weights so far, if there are any."""
        with self._holding_up():
            self._wait_and_commit()
        if state.best_model_checkpoint:
            checkpoints.verify_once(Path(state.best_model_checkpoint), self.rank.is_main)
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


class CheckpointSize(NamedTuple):
    """Bytes of a checkpoint on the disk: of the best weights alone, and of a full state, with the optimizer."""

    weights_bytes: int
    state_bytes: int


def checkpoint_size(run: RunConfig, model_weights: Iterable[torch.Tensor]) -> CheckpointSize:
    """Return the size of `run`'s checkpoints, which have what is trained of `model_weights`, wherever the parts are."""
    trained = [weight for weight in model_weights if weight.requires_grad]
    sizes = [global_numel(weight) * weight.element_size() for weight in trained]
    # DeepSpeed's bf16 has momentum, variance and a copy of the weights in fp32
    per_weight = 3 * 4 if run.parallelism.uses_deepspeed else OPTIMIZER_BYTES.get(run.optim)
    if per_weight is None:  # two states as wide as the weight, as Adam has
        return CheckpointSize(sum(sizes), 3 * sum(sizes))
    return CheckpointSize(sum(sizes), sum(sizes) + math.ceil(sum(map(global_numel, trained)) * per_weight))


class SaveSchedule(TrainerCallback):
    """Asks for a full state every `save_steps` steps, or before more than `max_lost_minutes` of training would be lost.

    `pause_at_step` and a SIGUSR1 also ask for one, after which the run ends. Ranks have clocks of their own, may get
    the signal at different times or not at all, and must save at the same step. They meet after 1, 2, 4, 8 ... steps
    since the last full state, but at most 20 s apart, after each validation and after the last step: they turn the
    minutes that are left into steps, at the slowest rank's pace, and hear whether one was asked.

    Attributes:
        is_asked: Whether a rank was asked to save, as far as all of them know.
        saves_at_end: Without save_steps: whether a full state is saved at the end of training.
        due_step: Without save_steps: the step after which the next one is to be saved, as far as that is known.
    """

    def __init__(self, max_lost_minutes: float, pause_at_step: int = 0) -> None:
        self.max_lost_s, self.saves_at_end = 60 * max_lost_minutes, False
        self.pause_at_step = pause_at_step
        self.is_asked, self.pace_s = False, 0.0
        self.saved(0)

    @override
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.saved(state.global_step)  # what this run resumes from is saved already
        if any(gather_object([is_asked_to_save()])):
            raise AskedToEndError(
                f"ended before step {state.global_step + 1} of training, as asked by SIGUSR1: nothing was to be saved."
            )

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.global_step >= self.next_meeting or control.should_training_stop:
            self.meet(state)
        self.is_asked = self.is_asked or state.global_step == self.pause_at_step
        control.should_save = control.should_save or self.is_due(state, control)

    def asked_by(self, state: TrainerState) -> str:
        """Return what asked the run to end after its last step."""
        return "--pause_at_step" if state.global_step == self.pause_at_step else "SIGUSR1"

    def is_due(self, state: TrainerState, control: TrainerControl) -> bool:
        """Return whether a full state is to be saved after the step that was taken last."""
        if self.is_asked:
            return True
        if state.save_steps:
            return control.should_training_stop or state.global_step % state.save_steps == 0
        return state.global_step >= self.due_step or (control.should_training_stop and self.saves_at_end)

    def meet(self, state: TrainerState) -> None:
        """Have the ranks agree when the next full state is due and when they meet again; called on every rank."""
        now_s, step = time.perf_counter(), state.global_step
        if step > self.met_step:
            self.pace_s = (now_s - self.met_s) / (step - self.met_step)
        of_ranks = gather_object([(now_s - self.saved_s, self.pace_s, is_asked_to_save())])
        lost_s, pace_s, is_asked = (max(of_each) for of_each in zip(*of_ranks, strict=True))
        self.is_asked = self.is_asked or is_asked
        self.due_step = step + max(0, math.floor((self.max_lost_s - lost_s) / pace_s))
        self.next_meeting = step + max(1, min(step - self.saved_step, math.floor(MEET_S / pace_s)))
        self.met_step, self.met_s = step, now_s

    def saved(self, step: int) -> None:
        """Count minutes from now on, as a full state is saved."""
        self.saved_step, self.met_step, self.next_meeting = step, step, step + 1
        self.saved_s = self.met_s = time.perf_counter()
        self.due_step = math.inf


def describe_saves(run: RunConfig, state: TrainerState, size: CheckpointSize, waits: bool) -> str:
    """Return how often a run saves, and what that takes on the disk; `waits`: whether training waits meanwhile."""
    full, weights = size_text(size.state_bytes), size_text(size.weights_bytes)
    validations = math.ceil(state.max_steps / state.eval_steps)
    if state.save_steps:
        count = math.ceil(state.max_steps / state.save_steps)
        states = f"{count} full states ({full} each), one after every {state.save_steps:g} steps"
    else:
        at_end = ", and one at the end" if size.state_bytes <= LITTLE_BYTES else ""
        states = f"a full state ({full}) every {run.max_lost_minutes:g} minutes{at_end}"
    on_disk = size_text(MOST_FULL_STATES * size.state_bytes + MOST_BEST_WEIGHTS * size.weights_bytes)
    return (
        f"saves: {states}; the best weights ({weights}) after at most {validations} validations"
        f"{'' if waits else '; training goes on meanwhile'}; {on_disk} on the disk at most"
    )
