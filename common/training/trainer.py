"""A Transformers Trainer from a RunConfig, and what it proves about a run.

Its checkpoints are there whole or not at all, and a run resumes from them exactly.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import psutil
import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache
from peft import PeftModel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import EvalLoopOutput
from typing_extensions import override

from common.base.errors import AskedToEndError, BadInputError, RunStoppedError
from common.base.loggers import silent
from common.base.run_config import LAST, RunConfig, names_in
from common.data.batches import (
    SORTED_STEPS,
    EpochBatches,
    EpochLoader,
    PartitionedBatches,
    TrainingRows,
    lay_end_to_end,
    longest_batch,
    within_budget,
)
from common.data.row_checks import say_few_steps, say_once, say_summary, summary_of
from common.data.rows import Tokens, tokens_in
from common.models.quantization import drop_quantized
from common.models.shards import byte_count, host_copy, local_part
from common.planning.job import BatchShape, EvaluationShape
from common.planning.plans import Plan, plan_run, why
from common.runtime.disks import broadcast_folder
from common.runtime.faults import fault_at
from common.runtime.recorder import PeakMemory, RunRecorder
from common.runtime.watch import reached
from common.runtime.world import BACKENDS, Rank
from common.tasks.objectives import objective_of
from common.training.callbacks import FirstStepReport, ProgressReport, SkippedSteps, UpdateReport, WorkDone
from common.training.checkpoints import (
    BEST,
    FULL_STATE,
    HOLDS,
    STATE_FILE,
    WEIGHTS,
    DamagedCheckpointError,
    UnfinishedCheckpoint,
    about_run,
    check_resumable,
    newest_whole,
    read_manifest,
    rotate,
    say_changes,
    steps_at,
    to_keep,
    verify_once,
)
from common.training.ddp import ddp_settings
from common.training.digests import begin_hashing, begin_writing
from common.training.known_padding import padding_known
from common.training.optimizers import optimizer_settings
from common.training.placement import evaluation_of_rows
from common.training.saves import (
    LITTLE_BYTES,
    CheckpointSize,
    CopiedCheckpoint,
    SaveSchedule,
    SavesDone,
    bytes_per_second,
    checkpoint_size,
    describe_saves,
)
from common.training.strategy import Batch, Strategy, strategy_class
from common.training.usage import optimizer_bytes


class CheckpointedTrainer(Trainer):
    """The Trainer's own checkpoints, committed and verified by `common.training.checkpoints`.

    Attributes:
        divides: Whether ranks hold parts of what is trained, and write them.
        copies: How many ranks hold each part, of which one writes it (hybrid sharding).
        is_written_out: Whether a loop of our own takes the steps, and not the Trainer.
        first_step: Optimizer steps that were taken before, by the run whose checkpoint this one resumes from.
        resume_checkpoint: The checkpoint that `train` resumes from.
        about: What this run's checkpoints say of it.
        writes: Whether this rank writes what all ranks have; without a shared disk there are several that do.
        saves_into: Where Transformers writes a checkpoint's folder.
        schedule: When a full state is due.
        saves: What this run has saved.
        unfinished: The checkpoint that is still being written.
        waiting: The checkpoint that is written after `unfinished`: the newest best weights, copied to the host.
        saves_in_background: Whether training goes on while a checkpoint is written, from a copy on the host.
    """

    divides, copies, is_written_out = False, 1, False

    def __init__(self, **kwargs: Any) -> None:
        """Start at the beginning, until `find_start` finds a checkpoint."""
        super().__init__(**kwargs)
        self.first_step = 0
        self.resume_checkpoint: Path | None = None
        self.about: dict[str, Any] = {}
        self.writes = self.args.should_save
        self.saves_into = Path(self.args.output_dir)
        self.schedule, self.saves = SaveSchedule(math.inf), SavesDone()
        self.unfinished: UnfinishedCheckpoint | None = None
        self.waiting: CopiedCheckpoint | None = None
        self.saves_in_background = False
        # while Transformers writes a checkpoint: the copy that it is written from, {} where another rank writes
        self._copied: dict[str, Any] | None = None
        self._writes_later: list[Callable[[], object]] = []

    def train(self, **kwargs: Any) -> Any:
        """Take all optimizer steps; those after `resume_checkpoint`, where that is a checkpoint."""
        folder = self.resume_checkpoint
        if folder and self.args.process_index == 0:
            print(f"resumes after step {self.first_step}, from {folder.name}")
        trained = super().train(resume_from_checkpoint=str(folder) if folder else None, **kwargs)
        with self.saves.holding_up():
            self.finish_save()
        return trained

    # -- writing

    def _determine_best_metric(self, metrics: dict[str, float], trial: None) -> bool:
        """Return whether to save after a validation: the model is the best so far, or a full state is due."""
        is_best = super()._determine_best_metric(metrics, trial)
        self.schedule.meet(self.state)
        return is_best or self.schedule.is_due(self.state, self.control)

    def _save_checkpoint(self, model: torch.nn.Module, trial: None = None) -> None:
        """Write a full state, if one is due, or else the weights alone; then remove what is needed no more.

        Where training goes on meanwhile, it waits for a copy on the host alone: best weights that cannot be written
        yet, as others still are, wait there, until newer ones take their place.

        Raises:
            AskedToEndError: The run was asked to save and to end; all is written.
        """
        with self.saves.holding_up():
            checkpoint = self._checkpoint_of_this_step()
            if checkpoint.parts is None:
                self.finish_save()
            self.waiting = checkpoint
            self.go_on_saving()
            if checkpoint.parts is None:
                self.finish_save()
            if checkpoint.is_full:
                self.schedule.saved(self.state.global_step)
            if self.schedule.is_asked:
                self._end_as_asked()

    def _end_as_asked(self) -> NoReturn:
        self.finish_save()
        raise AskedToEndError(
            f"saved after step {self.state.global_step}, as asked by SIGUSR1; --resume_from_checkpoint {LAST} resumes "
            "there."
        )

    def _checkpoint_of_this_step(self) -> CopiedCheckpoint:
        step, best = self.state.global_step, self.state.best_global_step or 0
        if best == step:
            self.waiting = None  # the best until now
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        is_full = self.schedule.is_due(self.state, self.control)
        if is_full:
            self.finish_save()  # before another copy takes memory: a full state does not wait
        if best > self.first_step:
            self.state.best_model_checkpoint = str(folder.with_name(f"checkpoint-{best}"))
        about = {**self.about, HOLDS: FULL_STATE if is_full else WEIGHTS, BEST: best}
        parts, state = None, self.state
        if self.saves_in_background and self._has_room_to_copy(is_full):
            parts, state = self.copied_parts(is_full), deepcopy(self.state)
        return CopiedCheckpoint(folder, about, is_full, self.bytes_to_write(is_full), parts, state)

    def _has_room_to_copy(self, is_full: bool) -> bool:
        """Return whether the hosts of all ranks can hold a copy of what they write; called on every rank."""
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.divides else 1
        needed = ranks_here * self.bytes_to_write(is_full)
        return all(gather_object([needed < psutil.virtual_memory().available]))

    def look_at_save(self) -> None:
        """Go on saving where the ranks meet anyway, or nearly so; called after each step."""
        if self.unfinished and (self.control.should_evaluate or self.schedule.have_met_after(self.state.global_step)):
            with self.saves.holding_up():
                self.go_on_saving()

    def go_on_saving(self) -> None:
        """Commit what is written, and begin to write what waits for that; called on every rank."""
        if self.unfinished and self.unfinished.is_written():
            self._commit()
        if self.waiting and not self.unfinished:
            self._begin_to_write()

    def finish_save(self) -> None:
        """Wait until all is written, and commit it; called on every rank."""
        while self.unfinished or self.waiting:
            if self.unfinished:
                self._commit()
            else:
                self._begin_to_write()

    def _begin_to_write(self) -> None:
        checkpoint, self.waiting = self.waiting, None
        folder, about, byte_count = checkpoint.folder, checkpoint.about, checkpoint.byte_count
        self.unfinished = UnfinishedCheckpoint(folder, about, byte_count, self.writes)
        with self.unfinished.being_written() as partial_folder:
            self.unfinished.background = self.write_checkpoint(partial_folder, checkpoint)

    def _commit(self) -> None:
        unfinished, self.unfinished = self.unfinished, None
        unfinished.commit()
        if self.writes:
            self.saves.count(read_manifest(unfinished.folder))
            rotate(unfinished.folder.parent, to_keep(unfinished.folder.parent, unfinished.about[BEST]))

    def copied_parts(self, is_full: bool) -> dict[str, Any]:
        """Return a copy of what this rank writes, in the host's memory; called on every rank."""
        if not self.args.should_save:
            return {}
        weights = self.model.state_dict()
        if isinstance(self.model, PeftModel):  # writes nothing else
            trained = {name for name, weight in self.model.named_parameters() if weight.requires_grad}
            weights = {name: weight for name, weight in weights.items() if name in trained}
        return host_copy({"model": weights} | ({"optimizer": self.optimizer.state_dict()} if is_full else {}))

    def write_checkpoint(self, folder: Path, checkpoint: CopiedCheckpoint) -> Future[Any] | None:
        """Write all that a resumed training needs, or the weights alone; called on every rank.

        Returns:
            What is still being written, from the checkpoint's copy.
        """
        best, self.saves_into = checkpoint.state.best_model_checkpoint, folder.parent
        self.args.save_only_model = not checkpoint.is_full
        self._copied, self._writes_later, now = checkpoint.parts, [], self.state
        self.state = checkpoint.state
        super()._save_checkpoint(self.model, trial=None)
        self.state.best_model_checkpoint = best
        if self.args.should_save:
            self.state.save_to_json(str(folder / STATE_FILE))
        self.state, self._copied = now, None
        self.exchange_random_numbers(folder)
        if checkpoint.parts is None:
            return None
        writes, self._writes_later = self._writes_later, []  # which hold the copy
        return begin_writing(lambda: [write() for write in writes], _large_files(folder) if writes else [])

    def exchange_random_numbers(self, folder: Path) -> None:
        """Give every disk every rank's random numbers, so that any of them can start all ranks again."""
        if not self.args.save_on_each_node:
            return
        own = folder / f"rng_state_{self.args.process_index}.pth"
        states = gather_object([(own.name, own.read_bytes())] if own.is_file() else [])
        for name, content in states if self.writes else []:
            if not (folder / name).exists():
                (folder / name).write_bytes(content)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights, or the adapter, as plain libraries load them; of a copied checkpoint later."""
        if self._copied:
            self._writes_later.append(partial(self._save, output_dir, self._copied["model"]))
        elif self._copied is None:
            super().save_model(output_dir, _internal_call)
            if output_dir and self.args.should_save:
                begin_hashing(Path(output_dir).glob("*.safetensors"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        if self._copied:
            self._writes_later.append(partial(torch.save, self._copied["optimizer"], folder / OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
        elif self._copied is None:
            super()._save_optimizer_and_scheduler(output_dir)
            if self.args.should_save:
                begin_hashing([folder / OPTIMIZER_NAME])

    def _get_output_dir(self, trial: None) -> str:
        return str(self.saves_into)

    def bytes_to_write(self, is_full: bool) -> int:
        """Return the bytes that this rank writes of the weights, and of the optimizer; of copies one is written."""
        if not self.writes and not self.divides:
            return 0
        only_trained = isinstance(self.model, PeftModel)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad or not only_trained]
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # without Accelerate's wrapper
        held = byte_count(map(local_part, weights)) + (optimizer_bytes(optimizer) if optimizer and is_full else 0)
        return held // self.copies

    # -- resuming

    def find_start(self, log: RunRecorder) -> None:
        """Find the step where the run begins, and check that it can.

        Raises:
            BadInputError: the checkpoint is damaged, or of another run.
        """
        folder = self.find_resume_checkpoint(log)
        if folder is None:
            return
        about = verify_once(folder, self.args.process_index == 0)
        rows, data = self.about["rows"], self.about["data"]
        check_resumable(log.run, rows, folder, about, data, by_trainer=not self.is_written_out)
        for line in say_changes(log.run, rows, folder, about) if self.args.process_index == 0 else ():
            print(line)
        self._check_random_numbers(folder, about["ranks"])
        self.resume_checkpoint, self.first_step = folder, steps_at(folder)

    def find_resume_checkpoint(self, log: RunRecorder) -> Path | None:
        """Return the newest whole checkpoint, where the run resumes, or the one that it names; None: the beginning."""
        newest = self.newest_of_all(log) if log.resumes else None
        if newest is None and log.run.resume_from_checkpoint not in ("", LAST):
            return Path(log.run.resume_from_checkpoint).expanduser()
        if newest is None and log.resumes and self.args.process_index == 0:
            print("there is no checkpoint to resume from: training starts at the beginning")
        return newest

    def newest_of_all(self, log: RunRecorder) -> Path | None:
        """Return the newest whole checkpoint that any disk has, on every disk afterwards."""
        kept = newest_whole(Path(self.args.output_dir)) if self.writes else None
        of_ranks = gather_object([(steps_at(kept) if kept else 0, self.writes)])
        newest = max(steps for steps, _ in of_ranks)
        if not newest:
            return None
        folder = Path(self.args.output_dir) / f"checkpoint-{newest}"
        lacks = self.writes and (kept is None or steps_at(kept) < newest)
        broadcast_folder(folder, of_ranks.index((newest, True)), lacks)
        return folder

    def bring_best(self, folder: Path) -> Path:
        """Return where the best checkpoint so far is, beside `folder`, on every disk if it is on any."""
        best = folder.with_name(f"checkpoint-{self.state.best_global_step}")
        has_it = self.writes and best.is_dir()
        of_ranks = gather_object([has_it])
        if any(of_ranks):
            broadcast_folder(best, of_ranks.index(True), self.writes and not has_it)
        return best

    def _check_random_numbers(self, folder: Path, ranks_then: int) -> None:
        """Refuse a checkpoint without a rank's random numbers: what follows would be another run's."""
        ranks, is_main = self.args.world_size, self.args.process_index == 0
        names = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state.pth"]
        missing = sorted(set(gather_object([name for name in names if not (folder / name).is_file()])))
        if ranks_then == ranks and missing:
            raise BadInputError(f"{folder} lacks {', '.join(missing)}, and cannot be resumed exactly.")
        if ranks_then != ranks and is_main:
            print(f"{folder.name} is of {ranks_then} ranks: rows stay in order, but dropout will be another.")

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        begin = super()._init_training_state(max_steps, *args, **kwargs)
        if self.resume_checkpoint:
            self.state.compute_steps(self.args, max_steps)  # when to report is this run's own setting
            self.take_best_along(self.resume_checkpoint)
        return begin

    def take_best_along(self, folder: Path) -> None:
        """Find the best checkpoint so far: beside the one that is resumed, or where that one says.

        One that is gone or damaged is forgotten, with a word, at the start rather than when training has ended.
        """
        if not self.state.best_global_step:
            return
        best, is_main = self.bring_best(folder), self.args.process_index == 0
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
        # how long an early stop has waited is loaded; how long it is to wait is this run's own setting
        early_stops = [each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
        patiences = [each.early_stopping_patience for each in early_stops]
        super()._load_callback_state()  # puts new ones in their place
        early_stops = [each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
        for each, patience in zip(early_stops, patiences, strict=True):
            each.early_stopping_patience = patience

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both; but the learning rate is this run's own, as in the loop that is written out."""
        own = list(getattr(self.lr_scheduler, "base_lrs", []))
        super()._load_optimizer_and_scheduler(checkpoint)
        schedule = self.lr_scheduler
        if checkpoint and isinstance(schedule, LambdaLR):  # of others a changed rate was refused
            now = [rate * factor(schedule.last_epoch) for rate, factor in zip(own, schedule.lr_lambdas, strict=True)]
            schedule.base_lrs, schedule._last_lr = own, now
            for group, rate, rate_now in zip(schedule.optimizer.param_groups, own, now, strict=True):
                group["initial_lr"], group["lr"] = rate, rate_now

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with silent("transformers.trainer"):  # it warns of embeddings that stand there once, as they are tied
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with self.saves.holding_up():
            self.finish_save()
        verify_once(Path(self.state.best_model_checkpoint), self.args.process_index == 0)
        with silent("transformers.trainer"):
            super()._load_best_model()


def _large_files(folder: Path) -> Iterator[Path]:
    """Yield what Transformers writes of weights and optimizer."""
    yield from folder.glob("*.safetensors")
    yield from folder.glob(OPTIMIZER_NAME)


class AuditedTrainer(CheckpointedTrainer):
    """A Trainer whose ranks see every row once per epoch, and count what they see.

    Losses are means over the answer tokens (or pairs) of the whole global batch (the Trainer counts them over ranks and
    micro-batches), so that one device and several compute the same step.

    Attributes:
        arguments_class: The class of its arguments; `own_arguments` returns those that only this trainer has.
        memory: The peaks of validation and saving apart from the steps'.
        buckets: DDP's, as far as `kept_buffers` has seen them.
    """

    arguments_class: type[TrainingArguments] = TrainingArguments

    def __init__(self, *, strategy: Strategy, batches: EpochBatches, **kwargs: Any) -> None:
        """Draw this rank's rows by `batches`; the rest goes to the Trainer."""
        super().__init__(compute_loss_func=strategy.objective.loss, **kwargs)
        if self.accelerator.ddp_handler:  # the Trainer has no argument for all of them
            vars(self.accelerator.ddp_handler).update(ddp_settings(strategy.rank.device))
        self.strategy, self.batches, self.work = strategy, batches, WorkDone()
        self.schedule = SaveSchedule(strategy.run.max_lost_minutes)
        strategy.attach(self.model)
        if strategy.takes_chunks:
            self.compute_loss_func = None  # the model's own is in chunks
        self.divides, self.copies = strategy.divides_checkpoints, strategy.run.dp_replicate_size
        self.memory = PeakMemory(strategy.rank)
        self.buckets: list[torch.Tensor] = []
        self.updates, self.skips = UpdateReport(), SkippedSteps(self.accelerator)
        self.add_callback(self.updates)
        self.add_callback(self.skips)

    @classmethod
    def own_arguments(cls, run: RunConfig) -> dict[str, object]:
        """Return the settings that this trainer alone has."""
        return {}

    def get_train_dataloader(self) -> EpochLoader:
        """Return batches drawn by `batches`: this rank's share, so that Accelerate must not divide them again."""
        return EpochLoader(
            self.train_dataset,
            batch_sampler=self.batches,
            collate_fn=self.at_once,
            num_workers=self.args.dataloader_num_workers,
        )

    def at_once(self, rows: list[Tokens]) -> list[Batch]:
        """Return a micro-batch's rows as the batches that are computed at once: several where a budget divides them."""
        groups = within_budget([len(row["input_ids"]) for row in rows], self.batches.max_tokens)
        return [self.batch_of([rows[place] for place in group]) for group in groups]

    @override
    def training_step(self, model: torch.nn.Module, inputs: list[Batch], *args: Any, **kwargs: Any) -> torch.Tensor:
        losses = []
        for number, batch in enumerate(inputs, 1):
            self.reach("batch")
            self.work.count(batch.pop("row"), batch)  # before the batch moves: a GPU would be waited for
            # gradients of ranks are summed with the last batch's
            syncs = nullcontext() if number == len(inputs) else self.accelerator.no_sync(model)
            with padding_known(batch), syncs:
                losses.append(super().training_step(model, self.strategy.to_device(batch), *args, **kwargs))
        return torch.stack(losses).sum()

    def back_propagate(self, rows: list[Tokens]) -> None:
        """Compute the gradients of some rows, and take no step: it is none of the run's."""
        work, self.work = self.work, WorkDone()
        labels = sum(map(self.strategy.labels_in, rows)) * self.args.world_size
        self.training_step(self.model_wrapped, self.at_once(rows), num_items_in_batch=labels)
        self.work = work

    def kept_buffers(self) -> list[torch.Tensor]:
        """Return what is kept between steps beside weights and optimizer states; called after `back_propagate`."""
        return self.buckets_of(self.model_wrapped)

    def buckets_of(self, model: torch.nn.Module | None) -> list[torch.Tensor]:
        """Return DDP's buckets, where that stands around the trained model: gradients are views of them."""
        if isinstance(model, DistributedDataParallel):
            self.buckets = self.strategy.gradients() or self.buckets
        return self.buckets

    def forget_gradients(self) -> None:
        """Undo `back_propagate`."""
        self.optimizer.zero_grad()

    def validate(self, rows: list[Tokens]) -> None:
        """Compute the results of some validation rows, without reporting them."""
        self.model.eval()
        self.prediction_step(self.model, self.collated(rows))

    @override
    def _get_num_items_in_batch(self, batch_samples: list[list[Batch]], device: torch.device) -> int:
        """Return the labels of an optimizer step on all ranks; each knows which rows they have, so that none waits."""
        rows = self.batches.rows_of_step(self.state.global_step)
        return sum(self.strategy.labels_in(self.train_dataset[row]) for row in rows)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        with self.reporting():
            self.look_at_save()
            super()._maybe_log_save_evaluate(*args, **kwargs)

    @override
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.memory.phase("validation"):
            return super().evaluate(*args, **kwargs)

    @override
    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.memory.phase("saving"):
            super()._save_checkpoint(*args, **kwargs)

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], *_: Any, **__: Any
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Return what each row of a validation batch counts for (`Objective.results`), and as labels the same; no loss.

        (Without labels the Trainer would compute no metrics.)
        """
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            results = self.strategy.results(model, inputs)
        reached("validation", self.state.global_step)
        return None, results, results

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Time what follows a step, and may take longer than one."""
        start_s = time.perf_counter()
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self.reach("validation")
        yield
        self.reach("load")
        self.work.reporting_s += time.perf_counter() - start_s

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor | float:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.check_gradients(norm)
        self.reach("update")
        return norm

    def reach(self, point: str) -> None:
        """Report that this rank has reached a point of its step."""
        step = self.state.global_step + 1
        fault_at(point, step, self.model)
        reached(point, step)

    def check_gradients(self, norm: torch.Tensor | float) -> None:
        """Refuse gradients that are not finite; with fp16 they may be, and the loss is scaled down.

        Raises:
            RunStoppedError: with the step, and where to resume from.
        """
        if not self.args.fp16 and not math.isfinite(norm):
            raise RunStoppedError(
                f"The gradients of step {self.state.global_step + 1} are not finite (norm {float(norm)}), and would "
                "spoil every weight: the step was not taken, and nothing was saved after step "
                f"{self.state.global_step}. Lower --learning_rate or look at the step's rows; --resume_from_checkpoint "
                f"{LAST} resumes from the newest checkpoint."
            )

    def batch_of(self, rows: list[Tokens]) -> Batch:
        """Return training rows as one batch, end to end or padded."""
        if self.strategy.run.is_padding_free:
            return self.strategy.inputs_for_loss(lay_end_to_end(rows))
        return self.collated(rows)

    def collated(self, rows: list[Tokens]) -> Batch:
        """Return rows as one batch, padded, and filled up as the strategy needs it."""
        return self.data_collator(self.strategy.fill(rows))

    def free(self) -> None:
        """Free the memory of model, gradients and optimizer, also where a notebook still has names for them."""
        self.strategy.free()
        self.optimizer.state.clear()
        self.model_wrapped, self.buckets = self.model, []  # DDP's wrapper has buckets as large as all gradients
        self.accelerator.free_memory()
        free_model(self.model)

    @override
    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # the Trainer would look at every weight at every step; `training_flops` has the formula


class SummaryTrainer(AuditedTrainer, Seq2SeqTrainer):
    """An AuditedTrainer for encoder-decoders, on Transformers' own."""

    arguments_class = Seq2SeqTrainingArguments

    @override
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        # every validation row counts once: Seq2SeqTrainer keeps those that a last batch was filled up with
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)


def free_model(model: torch.nn.Module) -> None:
    """Free a model's memory, whoever else still has its weights: an optimizer's groups have, and DDP's wrapper."""
    remove_hook_from_module(model, recurse=True)  # Accelerate's, of a model on several devices: they forbid the move
    drop_quantized(model)
    held = [*model.parameters(), *model.buffers()]
    for weight in held:
        if isinstance(weight, DTensor):  # FSDP keeps a view of its shard
            storage = weight.to_local().untyped_storage()
            if storage.resizable():
                storage.resize_(0)
    model.to("meta")  # puts other tensors in their place
    for tensor in held:
        tensor.data, tensor.grad = tensor.new_empty(0), None
    clear_device_cache()


def training_arguments(run: RunConfig, output_folder: Path) -> TrainingArguments:
    """Return the Trainer's settings, from the run's."""
    trainer_class = resolve_name(run.goal.trainer)
    arguments = trainer_class.arguments_class(
        output_dir=str(output_folder),
        per_device_train_batch_size=run.per_device_train_batch_size,
        per_device_eval_batch_size=run.rows_evaluated_at_once,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        num_train_epochs=run.num_train_epochs,
        max_steps=run.max_steps,
        max_grad_norm=run.max_grad_norm,
        gradient_checkpointing=run.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": run.use_reentrant} if run.gradient_checkpointing else None,
        bf16=run.precision.startswith("bf16"),
        fp16=run.precision == "fp16-mixed",
        use_cpu=run.device == "cpu",
        ddp_backend=BACKENDS[run.device] if run.world_size > 1 else None,
        ddp_find_unused_parameters=False,
        eval_strategy="steps",
        eval_steps=run.eval_steps,
        logging_strategy="steps",
        logging_steps=run.eval_steps,
        save_strategy="best",  # and where `SaveSchedule` asks for it
        save_steps=run.save_steps,
        save_total_limit=None,  # `rotate` removes, and only after the next checkpoint is there
        restore_callback_states_from_checkpoint=True,  # how long an early stop has waited
        load_best_model_at_end=True,
        metric_for_best_model=objective_of(run).best_metric,
        greater_is_better=objective_of(run).higher_is_better,
        logging_nan_inf_filter=False,  # a NaN loss is to be seen, not averaged away
        remove_unused_columns=False,
        dataloader_num_workers=run.dataloader_num_workers,
        report_to=list(names_in(run.report_to)),
        disable_tqdm=True,
        seed=run.seed,
        **optimizer_settings(run),
        **trainer_class.own_arguments(run),
    )
    # the Trainer takes every GPU that it sees into `DataParallel`, or multiplies the loss by their number; reading
    # `n_gpu` makes it look for them, so that the number is not written over later
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Tokens],
    validation: Sequence[Tokens],
    log: RunRecorder,
    plan: Plan | None = None,
    strategy: Strategy | None = None,
    trainer_class: Callable[..., AuditedTrainer] | None = None,
) -> AuditedTrainer:
    """Return the trainer of this rank, with its reports; nothing runs yet.

    `plan`: where layers were placed by one; else the run is planned now. `trainer_class`: in place of its task's.
    """
    run, rank = log.run, log.rank
    log.data = summary_of(train, validation, run)
    if rank.is_main:
        print(say_summary(log.data, run))
        say_once(say_few_steps(log.data, run))
    evaluation = evaluation_of_rows(run, validation)
    if plan:
        plan = replace(plan, job=replace(plan.job, evaluation=evaluation))
    log.training_starts(plan or plan_training(log, longest_batch(train, run.rows_per_rank, run), evaluation))
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(log.folder / "tensorboard")  # Transformers takes it from here only
    arguments = training_arguments(run, log.folder / "checkpoints")
    arguments.run_name = log.run_name
    arguments.save_on_each_node = len(log.results.hosts) > 1
    callbacks: list[TrainerCallback] = [ProgressReport(rank, run.log_format)]
    if run.early_stopping_patience:
        callbacks.append(EarlyStoppingCallback(run.early_stopping_patience))
    trainer = trainer_of_rows(
        run, rank, model, tokenizer, train, validation, arguments, callbacks, strategy, trainer_class
    )
    if trainer.strategy.needs_one_disk:
        log.results.check_shared("These checkpoints have a part of every rank")
    trainer.add_callback(FirstStepReport(rank, trainer.work, tokenizer))
    trainer.memory = log.memory
    trainer.add_callback(trainer.schedule)  # after the strategy's, which count what ranks send
    check_precision(trainer, run)
    log.step = lambda: trainer.state.global_step
    trainer.about = about_run(run, len(train), log.row_digests)
    plan_saves(trainer, run.total_steps(len(train)), log)
    trainer.find_start(log)
    return trainer


def plan_training(log: RunRecorder, batch: BatchShape, evaluation: EvaluationShape) -> Plan | None:
    """Return the plan of a run whose largest batch on a rank is `batch`; rank 0 prints it.

    `evaluation`: what the phases beside training work on.

    A model, optimizer or GPU that the closed form does not know is named, and leaves the run without a plan.
    """
    batch = batch.padded_to(log.run.pad_to_multiple_of)
    try:
        plan = plan_run(log.run, batch, log.gpu(), evaluation)
        memory, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
        said = (
            f"planned: {memory.peak_gib:.2f} of {gpu.memory_gib:.1f} GiB per device ({batch.rows} rows of "
            f"{batch.length} tokens at most); {why(plan)}"
        )
    except BadInputError as unknown:
        plan, said = None, f"no plan: {unknown}"
    if log.rank.is_main:
        print(said)
    return plan


def plan_saves(trainer: AuditedTrainer, steps: int, log: RunRecorder) -> None:
    """Find how large checkpoints become, and say on rank 0 how many of them `steps` steps have, and what they take.

    Called on every rank.
    """
    size = checkpoint_size(log.run, trainer.model.parameters())
    if log.run.parallelism.pipelines:  # a rank has its own stage
        stages = gather_object([size])
        size = CheckpointSize(sum(each.weights_bytes for each in stages), sum(each.state_bytes for each in stages))
    trainer.schedule.saves_at_end = size.state_bytes <= LITTLE_BYTES
    trainer.saves_in_background = trainer.strategy.saves_in_background and size.state_bytes > LITTLE_BYTES
    if log.rank.is_main:
        speed = bytes_per_second(log.folder, size.state_bytes)
        print(describe_saves(log.run, steps, size, speed, waits=not trainer.saves_in_background))


def check_precision(trainer: AuditedTrainer, run: RunConfig) -> None:
    """Refuse to compute in another precision than the run's: `accelerate launch` brings one from its file.

    Raises:
        BadInputError: with both precisions.
    """
    asked = {"fp32": "no", "fp16-mixed": "fp16"}.get(run.precision, "bf16")
    found = trainer.accelerator.mixed_precision
    if found != asked:
        raise BadInputError(
            f"The run's precision is {run.precision}, but Accelerate was told mixed_precision {found}: "
            "write 'no' into the file that `accelerate launch` reads."
        )


def trainer_of_rows(
    run: RunConfig,
    rank: Rank,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Tokens],
    validation: Sequence[Tokens],
    arguments: TrainingArguments,
    callbacks: list[TrainerCallback],
    strategy: Strategy | None = None,
    trainer_class: Callable[..., AuditedTrainer] | None = None,
) -> AuditedTrainer:
    """Return the trainer of this rank: rows drawn once per epoch, losses over what is to be predicted only."""
    objective = objective_of(run)
    strategy = strategy or strategy_class(run)(run, rank)
    collate = objective.collator(tokenizer, model, run)
    own_rows = rank if run.data_parallel_ranks > 1 else replace(rank, rank=0, world_size=1)
    drawn = partial(PartitionedBatches, parts=run.partition_count) if run.goal.summarizes else EpochBatches
    trainer = (trainer_class or resolve_name(run.goal.trainer))(
        model=model,
        args=arguments,
        train_dataset=TrainingRows(train),
        eval_dataset=validation,
        data_collator=lambda rows: strategy.inputs_for_loss(collate(rows)),
        compute_metrics=lambda prediction: objective.metrics(prediction.predictions.sum(0)),
        strategy=strategy,
        batches=drawn(
            list(map(tokens_in, train)),
            arguments.per_device_train_batch_size,
            own_rows.world_size,
            own_rows.rank,
            arguments.seed,
            arguments.gradient_accumulation_steps,
            SORTED_STEPS if run.groups_by_length else 1,
            run.max_batch_tokens,
        ),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)  # ProgressReport says it with the rank's prefix
    return trainer
