"""Questions about pictures: LoRA or full fine-tuning of the language part, on one device or with DDP.

From this folder:
    python my_workflow_visual_question_answering.py
    python my_workflow_visual_question_answering.py --technique lora
    python my_workflow_visual_question_answering.py --technique lora --parallel ddp
    python my_workflow_visual_question_answering.py --all

`python` starts as many ranks as the setting has. A setting is this folder's run with (1) LoRA's own recipe and (2) the
rows of a step given to the devices. Against 2.1: (3) adapters, or weights that are trained, in the language layers
alone, (4) answers about the right picture, and about another one.
"""

import sys
from functools import partial

from my_utils_visual_question_answering import draw_gallery, evaluate_looking, gallery_rows, say_trained
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.checks.folder_runs import setting_of
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.launch import run_settings_from_command_line
from common.models.trained_weights import with_trained_weights
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.ddp import data_parallel, exchanging
from common.training.loop import TrainingLoop
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, load, record, save, sum_up

RUN = RunConfig(
    task="visual_questions",
    technique="full",
    parallel="ddp",
    run_folder="3.3_visual_question_answering/run_2_a6000_48g_x2",
    device="cuda",
    gpu="RTX A6000 48GB",
    devices=2,
    model="HuggingFaceTB/SmolVLM-Instruct",
    data="assets/pictured_exhibits",
    max_length=2048,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=8,
    num_train_epochs=1,
    learning_rate=1e-5,
    max_grad_norm=1.0,
    precision="bf16-mixed",
    eval_steps=0.1,
    per_device_eval_batch_size=8,
    max_new_tokens=32,
    dataloader_num_workers=4,  # pictures are scaled and cut into tiles on the host
)
LORA = {"learning_rate": 1e-4, "lora_dropout": 0.0}  # (1)
# what `--all` runs
SETTINGS = [
    ["--technique", each, "--parallel", parallel] for each in ("full", "lora") for parallel in ("single", "ddp")
]

defaults_for = partial(setting_of, RUN, LORA)  # (2)


def train(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Switch on what is trained of the language layers (3), and train it, with DDP as in 2.2."""
    with log.phase("build trainer"):
        replica = data_parallel(with_trained_weights(model, log.run), log.rank)
        loop = TrainingLoop(replica, tokenizer, data, log)
    say_trained(loop)
    with log.phase("training"):
        for step in loop.steps():
            for batch, is_last in step:
                with exchanging(replica, is_last):
                    (loop.loss(batch, step.label_count) * log.rank.world_size).backward()
            loop.update()
    return loop


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        model, tokenizer, data = load(log)
        before = evaluate_before(log, tokenizer, data, evaluate_looking, model)
        loop = train(log, model, tokenizer, data)
        trained = sum_up(loop)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data, score=evaluate_looking)  # (4)
        seen = gallery_rows(log, data)
        written = record(log, before, after, **trained, largest_logit_differences=differences, gallery=seen)
        if log.rank.is_main:
            draw_gallery(seen, log.folder)
        return written


if __name__ == "__main__":
    run_settings_from_command_line(sys.modules[__name__])
