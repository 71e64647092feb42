"""LoRA fine-tuning on one device.

From this folder:
    python my_workflow_lora_finetuning.py
    python my_workflow_lora_finetuning.py --batch_size 8 --learning_rate 1e-4

The notebook runs the same steps cell by cell.
"""

from transformers import PreTrainedModel

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.models.trained_weights import add_lora
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.loop import TrainingLoop
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, load, record, save, sum_up

RUN = RunConfig(
    technique="lora",
    parallel="single",
    run_folder="2.1_lora_finetuning/run_0_cpu_x1",
    gradient_checkpointing=True,
    use_reentrant=True,
)


def train(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Put adapters on the frozen base, and train them."""
    with log.phase("build trainer"):
        model = add_lora(model, log.run)
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
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
