"""Transformers' Trainer with checkpoints that are there whole or not at all, and from which a run resumes exactly."""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from transformers import EarlyStoppingCallback, Trainer, TrainerState

from common.base.errors import BadInputError
from common.base.run_config import LAST
from common.models.loading import silent
from common.models.shards import byte_count, local_part
from common.runtime.recorder import RunLog
from common.training.checkpoints import (
    STATE_FILE,
    DamagedCheckpointError,
    Writes,
    atomic_checkpoint,
    check_resumable,
    found_in,
    newest_whole,
    rotate,
    steps_at,
    verify_once,
)
from common.training.fsdp import optimizer_bytes


class CheckpointedTrainer(Trainer):
    """The Trainer's own checkpoints, committed and verified by `common.training.checkpoints`."""

    divides = False
    """Whether ranks hold parts of what is trained, and write them."""

    def __init__(self, **kwargs: Any) -> None:
        """Starts at the beginning, until `find_start` finds another place."""
        super().__init__(**kwargs)
        self.first_step = 0
        """Optimizer steps that were taken before, by the run whose checkpoint this one resumes from."""
        self.goes_on_from: Path | None = None
        """The checkpoint that `train` resumes from."""
        self.about: dict[str, Any] = {}
        """What this run's checkpoints say of it."""
        self.writes = self.args.process_index == 0
        """Whether this rank is the one that writes what all ranks have; without a shared disk there are several."""
        self.saves_into = Path(self.args.output_dir)
        """Where Transformers writes a checkpoint's folder."""

    def train(self, **kwargs: Any) -> Any:
        """All optimizer steps; those after `goes_on_from`, where that is a checkpoint."""
        folder = self.goes_on_from
        if folder and self.args.process_index == 0:
            print(f"resumes after step {self.first_step}, from {folder.name}")
        return super().train(resume_from_checkpoint=str(folder) if folder else None, **kwargs)

    # -- writing

    def _save_checkpoint(self, model: torch.nn.Module, trial: None = None) -> None:
        """Keep this step, whole, then remove all but the best checkpoint, this one and the one before."""
        folder, best = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}", self.state.best_global_step
        if best and best > self.first_step:
            self.state.best_model_checkpoint = str(folder.with_name(f"checkpoint-{best}"))
        with atomic_checkpoint(folder, self.about, Writes(self.bytes_to_write(), self.writes)) as partial:
            self.write_checkpoint(partial)
        if self.writes:
            newest = {each.name for each in found_in(folder.parent)[:2]}  # should one be damaged there is another
            rotate(folder.parent, newest | ({f"checkpoint-{best}"} if best else set()))

    def write_checkpoint(self, folder: Path) -> None:
        """Write all that a resumed training needs; called on every rank."""
        best, self.saves_into = self.state.best_model_checkpoint, folder.parent
        super()._save_checkpoint(self.model, trial=None)
        self.state.best_model_checkpoint = best
        if self.args.should_save:
            self.state.save_to_json(str(folder / STATE_FILE))

    def _get_output_dir(self, trial: None) -> str:
        return str(self.saves_into)

    def bytes_to_write(self) -> int:
        """By this rank, of a checkpoint's weights and optimizer."""
        if not self.writes and not self.divides:
            return 0
        only_trained = isinstance(self.model, PeftModel)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad or not only_trained]
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # without Accelerate's wrapper
        return byte_count(map(local_part, weights)) + (optimizer_bytes(optimizer) if optimizer else 0)

    # -- going on

    def find_start(self, log: RunLog) -> None:
        """Look where the run begins, and that it can.

        Raises:
            BadInputError: the checkpoint is damaged, or of another run.
        """
        folder = self.checkpoint_to_go_on_from(log)
        if folder is None:
            return
        about = verify_once(folder, self.args.process_index == 0)
        check_resumable(log.run, self.about["rows"], folder, about)
        self._check_random_numbers(folder, about["ranks"])
        self.goes_on_from, self.first_step = folder, steps_at(folder)

    def checkpoint_to_go_on_from(self, log: RunLog) -> Path | None:
        """Its newest whole one, where the run resumes, or else the one that it names; None: the beginning."""
        newest = self.newest_of_all(log) if log.goes_on else None
        if newest is None and log.run.resume_from_checkpoint not in ("", LAST):
            return Path(log.run.resume_from_checkpoint).expanduser()
        if newest is None and log.goes_on and self.args.process_index == 0:
            print("there is no checkpoint to resume from: training starts at the beginning")
        return newest

    def newest_of_all(self, log: RunLog) -> Path | None:
        """The newest whole checkpoint of this results folder, the same on every rank."""
        newest = newest_whole(Path(self.args.output_dir)) if self.args.process_index == 0 else None
        return gather_object([newest])[0]

    def _check_random_numbers(self, folder: Path, ranks_then: int) -> None:
        """Refuse a checkpoint without a rank's random numbers: what follows would be another run's."""
        ranks, is_main = self.args.world_size, self.args.process_index == 0
        names = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state.pth"]
        missing = [name for name in names if not (folder / name).is_file()]
        if ranks_then == ranks and missing:
            raise BadInputError(f"{folder} lacks {', '.join(missing)}, and cannot be resumed exactly.")
        if ranks_then != ranks and is_main:
            print(f"{folder.name} is of {ranks_then} ranks: rows stay in order, but dropout will be another.")

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        begin = super()._init_training_state(max_steps, *args, **kwargs)
        if self.goes_on_from:
            self.state.compute_steps(self.args, max_steps)  # when to report is this run's own setting
            self.take_best_along(self.goes_on_from)
        return begin

    def take_best_along(self, folder: Path) -> None:
        """Find the best checkpoint so far: beside the one that is resumed, or where its run had it from.

        One that is gone or damaged is forgotten, with a word, at the start rather than when training has ended.
        """
        if not self.state.best_global_step:
            return
        best, is_main = folder.with_name(f"checkpoint-{self.state.best_global_step}"), self.args.process_index == 0
        if not best.is_dir():
            best = Path(TrainerState.load_from_json(str(folder / STATE_FILE)).best_model_checkpoint)
        try:
            if best != folder:
                verify_once(best, is_main)
            self.state.best_model_checkpoint = str(best)
        except DamagedCheckpointError:
            if is_main:
                print(f"the best checkpoint so far, {best}, is gone or damaged: the next steps' best takes its place")
            self.state.best_model_checkpoint = self.state.best_global_step = self.state.best_metric = None

    def _load_callback_state(self) -> None:
        """How long an early stop has waited; how long it is to wait is this run's own setting."""
        early_stops = [each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
        patiences = [each.early_stopping_patience for each in early_stops]
        super()._load_callback_state()  # puts new ones in their place
        early_stops = [each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
        for each, patience in zip(early_stops, patiences, strict=True):
            each.early_stopping_patience = patience

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Without a warning about embeddings that stand in the checkpoint once, as they are tied."""
        with silent("transformers.trainer"):
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        """Only if its bytes are those that were written; without the warning about tied embeddings."""
        verify_once(Path(self.state.best_model_checkpoint), self.args.process_index == 0)
        with silent("transformers.trainer"):
            super()._load_best_model()
