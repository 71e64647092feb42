r"""Summarization with a rank on each device: Transformers' `Seq2SeqTrainer`, started by torchrun.

From this folder:
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_summarization_torchrun.py
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_summarization_torchrun.py --num_train_epochs 1
    python my_workflow_summarization_torchrun.py --parallel single --devices 1 --partitions N  # the steps of N ranks

Nothing here says how many ranks there are: the Trainer finds out. The other two workflows of this folder do the same
with the loop written out; from the same rows all three train the same model.
"""

from my_utils_summarization import build, load_data, run_with

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.records.store import Record
from common.tasks.summarization import summarize
from common.training.steps import record, save, score_after, score_before, train
from common.training.strategy import WholeModel
from common.training.trainer import SummaryTrainer

RUN = run_with(loop="trainer")


def training_loop(trainer: SummaryTrainer) -> None:
    """Train; the Trainer averages gradients over the ranks, validates, and keeps the best checkpoint."""
    trainer.train()


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        strategy = WholeModel(log.run, log.rank)
        tokenizer, data = load_data(log)
        before = score_before(log, tokenizer, data, summarize)
        trainer = build(log, tokenizer, data, strategy, SummaryTrainer)
        trained = train(log, trainer, training_loop)
        tuned, differences = save(log, trainer, tokenizer)
        after = score_after(log, tuned, tokenizer, data, summarize)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
