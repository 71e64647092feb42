"""Summarization on the devices of one machine: Transformers' `Seq2SeqTrainer`, started by torchrun.

From this folder:
    torchrun --standalone --nproc_per_node 4 my_workflow_summarization_torchrun.py
    torchrun --standalone --nproc_per_node 4 my_workflow_summarization_torchrun.py --num_train_epochs 1
    python my_workflow_summarization_torchrun.py --parallel single --devices 1 --partitions N  # the steps of N ranks

Nothing here says how many ranks there are: the Trainer finds out. The other two workflows of this folder do the same
with the loop written out; from the same rows all three train the same model.
"""

from my_utils_summarization import run_with, take_steps

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.records.store import Record
from common.training.strategy import WholeModel
from common.training.trainer import SummaryTrainer

RUN = run_with(loop="trainer")


def train(trainer: SummaryTrainer) -> None:
    """Train; the Trainer averages gradients over the ranks, validates, and keeps the best checkpoint."""
    trainer.train()


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        return take_steps(log, WholeModel(run, log.rank), SummaryTrainer, train)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
