r"""Summarization with a rank on each device: Transformers' `Seq2SeqTrainer`, started by torchrun.

From this folder, on each machine (ADDRESS is the first one's):
    torchrun --nnodes 4 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint ADDRESS:29400 \
        my_workflow_summarization_torchrun.py
    torchrun --nnodes 4 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint ADDRESS:29400 \
        my_workflow_summarization_torchrun.py --num_train_epochs 1
    python my_workflow_summarization_torchrun.py --parallel single --devices 1 --partitions N  # the steps of N ranks

Nothing here says how many ranks there are: the Trainer finds out. The other two workflows of this folder do the same
with the loop written out; from the same rows all three train the same model.
"""

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from my_utils_summarization import load_data, run_with, summarize
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PrinterCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from common.base.command_line import run_from_command_line
from common.base.run_config import LAST, RunConfig
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.runtime.watch import reached
from common.training.callbacks import FirstStepReport, ProgressReport
from common.training.checkpoints import steps_at
from common.training.ddp import load_replica
from common.training.loop import TrainingLoop
from common.training.optimizers import training_arguments
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, record, save, sum_up

RUN = run_with(loop="trainer")


class EpochLoader(DataLoader):
    """A DataLoader that hands the epoch on to its batch sampler, as the Trainer tells it."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration uses."""
        self.batch_sampler.set_epoch(epoch)


class OwnRowsTrainer(Seq2SeqTrainer):
    """A Seq2SeqTrainer with the rows of a loop: ranks see each of them once an epoch, and validate by all of them."""

    def __init__(self, loop: TrainingLoop) -> None:
        """Train the loop's model on its rows."""
        self.loop, run, rank = loop, loop.run, loop.rank
        arguments = training_arguments(
            run,
            loop.log.folder / "checkpoints",
            keeps=loop.log.keeps,
            kind=Seq2SeqTrainingArguments,
            run_name=loop.log.run_name,
            save_total_limit=2,
            ddp_find_unused_parameters=False,
            logging_nan_inf_filter=False,  # a NaN loss is to be seen, not averaged away
        )
        arguments._n_gpu = min(1, arguments.n_gpu)  # on a machine with several it would take `DataParallel`
        super().__init__(
            model=loop.model,
            args=arguments,
            train_dataset=loop.train_rows,
            eval_dataset=loop.validation_rows,
            compute_loss_func=None if loop.part.takes_chunks else loop.objective.loss,
            callbacks=[
                ProgressReport(rank, run.log_format),
                FirstStepReport(rank, loop.work, loop.tokenizer),
                loop.updates,
                *([EarlyStoppingCallback(run.early_stopping_patience)] if run.early_stopping_patience else []),
                *loop.log.callbacks,
            ],
        )
        self.remove_callback(PrinterCallback)  # `ProgressReport` says the same
        self.model._keys_to_ignore_on_save = list(self.model.all_tied_weights_keys)  # checkpoints have them once

    def get_train_dataloader(self) -> DataLoader:
        """Return this rank's batches, which Accelerate must not divide again."""
        return EpochLoader(
            self.train_dataset,
            batch_sampler=self.loop.batches,
            collate_fn=self.loop.batch_of,
            num_workers=self.args.dataloader_num_workers,
        )

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Back-propagate a batch, and count its rows; the watch over hanging ranks hears of it."""
        reached("batch", self.state.global_step + 1)
        self.loop.work.count(inputs.pop("row"), inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Validate, and return the metrics of all ranks' rows."""
        start_s = perf_counter()
        metrics = self.loop.validate()
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.loop.work.reporting_s += perf_counter() - start_s
        return metrics


def train(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train; the Trainer averages gradients over the ranks, validates, and keeps the best checkpoint."""
    with log.phase("build trainer"):
        loop = TrainingLoop(load_replica(log.run, log.rank), tokenizer, data, log)
        trainer = OwnRowsTrainer(loop)
    with log.phase("training"):
        folder = Path(trainer.args.output_dir)
        asked = log.run.resume_from_checkpoint
        last = get_last_checkpoint(str(folder)) if asked in ("", LAST) and folder.is_dir() else asked or None
        trainer.args.eval_on_start = loop.log.keeps and last is None
        trainer.train(resume_from_checkpoint=last)
        take_over(loop, trainer, last)
    return loop


def take_over(loop: TrainingLoop, trainer: OwnRowsTrainer, last: str | None) -> None:
    """Let the loop tell of what the Trainer has done since the checkpoint `last`."""
    loop.state, loop.schedule, loop.part.module = trainer.state, trainer.lr_scheduler, trainer.model_wrapped
    loop.optimizer = loop.part.optimizer = trainer.optimizer.optimizer  # without Accelerate's wrapper
    if loop.saver:  # a trial saves nothing
        loop.saver.first_step = steps_at(Path(last)) if last else 0


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data, summarize)
        loop = train(log, tokenizer, data)
        trained = sum_up(loop)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data, summarize)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
