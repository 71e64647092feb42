"""A parallelism and a task that `common` knows nothing of: registered, planned and trained.

torchrun --nproc_per_node 2 toy_house.py FOLDER [--field value ...]: a run of both, with its record below FOLDER.

The parallelism, "averaging", is data parallel written by hand: gradients are summed after the backward pass. The task,
"counting", has text files with a number a line, and learns to answer with the next number.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from common.base.parsing import parse_overrides
from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TASKS, Parallelism, Task
from common.checks.run_start import run_started
from common.data.messages import tokenize_messages
from common.data.rows import IGNORED_LABEL, Found, Row, RowKind
from common.data.splits import load_splits
from common.models.loading import load_base_model, load_tokenizer
from common.planning.device_maps import whole_model_on
from common.records.store import Record
from common.tasks.answers import Judge, answer_results, evaluate, make_collator
from common.tasks.objectives import Objective, mean_loss
from common.training.ddp import load_replica
from common.training.export import save
from common.training.loop import TrainingLoop
from common.training.part import Part
from common.training.steps import record, sum_up


class Averaging(Part):
    """Every rank holds the whole model and has rows of its own; gradients are summed one by one."""

    @override
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Sum them over the ranks first: each rank's loss is part of one mean."""
        for weight in self.model.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
        return super().clip_gradients(max_norm)


class Heard(TrainerCallback):
    """A user's own callback, which stops the training one step before its end."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.steps.append(state.global_step)
        control.should_training_stop = state.global_step == state.max_steps - 1


def number_rows(run: RunConfig) -> RowKind:
    return RowKind((".txt",), "one number per line", _as_messages, tokenize_messages)


def _as_messages(found: Found, source: str) -> list[Row]:
    numbers = [int(number) for piece, _ in found for number in piece["text"].split()]
    words = [[("user", f"What follows {number}?"), ("assistant", str(number + 1))] for number in numbers]
    return [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in words]


def token_results(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each row's loss, its tokens to be predicted, and those found, shape (rows, 3)."""
    found = (logits.argmax(-1) == targets) & (targets != IGNORED_LABEL)
    return torch.cat([answer_results(logits, targets), found.sum(1, keepdim=True)], dim=1)


def token_metrics(sums: torch.Tensor) -> dict[str, float]:
    """Return the mean loss, and the fraction of tokens that were found."""
    return {**mean_loss(sums[:2]), "eval_found": float(sums[2] / sums[1])}


FOUND = Objective(lambda tokenizer, *_: make_collator(tokenizer), token_results, token_metrics, "eval_found", True)
AVERAGING = Parallelism(
    "averaging", "averaging by hand", "each of {devices} GPUs holds it all", splits_rows=True,
    part=f"{Path(__file__).stem}:Averaging",
)  # fmt: skip
COUNTING = Task(
    "counting",
    techniques=("full",),
    parallelisms=("single", AVERAGING.name),
    auto_class="AutoModelForCausalLM",
    model_kind="decoder",
    peft_type="CAUSAL_LM",
    objective=f"{Path(__file__).stem}:FOUND",
    rows=f"{Path(__file__).stem}:number_rows",
)


def register() -> None:
    PARALLELISMS[AVERAGING.name], TASKS[COUNTING.name] = AVERAGING, COUNTING


def workflow(run: RunConfig) -> Record:
    """Train and evaluate, as the workflows of the run folders do."""
    with run_started(run) as log:
        tokenizer, data = load_tokenizer(run), load_splits(run)
        base = load_base_model(run, whole_model_on(log.rank.device))
        before = evaluate(base, tokenizer, data.test, [Judge("base", base, tokenizer)], log, "before")
        loop, heard = TrainingLoop(load_replica(run, log.rank), tokenizer, data, log), Heard()
        loop.handler.add_callback(heard)
        with log.phase("training"):
            for step in loop.steps():
                for batch, _ in step:
                    loop.loss(batch, step.label_count).backward()
                loop.update()
        trained = sum_up(loop)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate(tuned, tokenizer, data.test, [Judge("base", tuned, tokenizer)], log, "after")
        return record(log, before, after, **trained, heard=heard.steps, largest_logit_differences=differences)


if __name__ == "__main__":
    register()
    settings = {"task": COUNTING.name, "technique": "full", "parallel": "single", "results_root": sys.argv[1]}
    workflow(parse_overrides(RunConfig(**settings), sys.argv[2:]))
