"""Summarization on the devices of one machine: Transformers' `Seq2SeqTrainer`, started by torchrun.

From this folder:
    torchrun --standalone --nproc_per_node 4 my_workflow_summarization_torchrun.py
    torchrun --standalone --nproc_per_node 4 my_workflow_summarization_torchrun.py --num_train_epochs 1
    python my_workflow_summarization_torchrun.py --parallel single --devices 1 --partitions N  # the steps of N ranks

Nothing here says how many ranks there are: the Trainer finds out. The other two workflows of this folder do the same
with the loop written out; from the same rows all three come to the same model.
"""

from my_utils_summarization import (
    Metrics,
    build,
    evaluate_after,
    evaluate_before,
    figures_of,
    load_data,
    record,
    run_with,
    save,
)

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.records.store import Record
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.training.strategy import WholeModel
from common.training.trainer import SummaryTrainer

RUN = run_with(loop="trainer")


def train(log: RunRecorder, trainer: SummaryTrainer) -> Metrics:
    """Train; the Trainer averages gradients over the ranks, validates, and keeps the best checkpoint."""
    with log.phase("training"):
        trainer.train()
    return figures_of(log, trainer)


def workflow(run: RunConfig) -> Record:
    """The whole run, on this rank."""
    with rank_started(run) as rank:
        check_inputs(run)
        log = RunRecorder(run, rank)
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data)
        trainer = build(log, tokenizer, data, WholeModel(run, rank), SummaryTrainer)
        trained = train(log, trainer)
        tuned, differences = save(log, trainer, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
