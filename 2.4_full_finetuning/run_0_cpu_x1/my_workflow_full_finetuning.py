"""Full fine-tuning on one device: the model's own weights are trained.

From this folder:
    python my_workflow_full_finetuning.py
    python my_workflow_full_finetuning.py --precision bf16 --learning_rate 1e-5

The notebook runs the same steps cell by cell. Against 2.1: (1) no adapter, but layers that are switched on, (2) no
merge, as the best checkpoint is the model.
"""

from my_utils_full_finetuning import trained_layers
from transformers import PreTrainedModel

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.models.trained_weights import train_linear_layers
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.loop import TrainingLoop
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, load, record, save, sum_up

RUN = RunConfig(
    technique="full",
    parallel="single",
    run_folder="2.4_full_finetuning/run_0_cpu_x1",
)


def train(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Switch on the layers to train (1), and train them."""
    with log.phase("build trainer"):
        train_linear_layers(model, log.run.target_modules)
        print(trained_layers(model).to_string(index=False))
        loop = TrainingLoop(model, tokenizer, data, log)
    with log.phase("training"):
        for step in loop.steps():
            for batch, _ in step:
                loop.loss(batch, step.label_count).backward()
            loop.update()
    return loop


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run."""
    with run_started(run) as log:
        model, tokenizer, data = load(log)
        before = evaluate_before(log, tokenizer, data, model=model)
        loop = train(log, model, tokenizer, data)
        trained = sum_up(loop)
        tuned, differences = save(log, loop, tokenizer)  # (2)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
