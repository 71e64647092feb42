"""What a run says while it trains: first-step report of every rank, and progress lines of rank 0."""

import time
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from common.data import NO_ROW
from common.hardware import read_memory
from common.launch import Rank

VALIDATION_LOSS = "eval_answer_token_loss"
"""The validation loss by its name in the Trainer's logs: mean over the answer tokens of all validation rows."""


@dataclass
class WorkDone:
    """What this rank trained on."""

    rows: list[int] = field(default_factory=list)
    """Row numbers, in order, over all epochs."""
    tokens: int = 0
    """Non-padding tokens."""
    reporting_s: float = 0.0
    """Seconds of training that went into logging, validation and checkpoints."""
    first_batch: dict[str, torch.Tensor] = field(default_factory=dict)

    def count(self, row_numbers: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
        """Count one mini-batch; `row_numbers` has shape (rows,)."""
        if not self.first_batch:
            self.first_batch = {"row": row_numbers, **inputs}
        numbers = row_numbers.tolist()
        if numbers != [NO_ROW]:
            self.rows += numbers
            self.tokens += int(inputs["attention_mask"].sum())


class FirstStepReport(TrainerCallback):
    """After step 1: this rank's memory, and its mini-batch, so that a reader sees that ranks get different rows."""

    def __init__(self, rank: Rank, work: WorkDone, tokenizer: PreTrainedTokenizerBase) -> None:
        """`work` is what the trainer counts into."""
        self.rank, self.work, self.tokenizer = rank, work, tokenizer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Print the report once."""
        if state.global_step != 1:
            return
        memory = read_memory(self.rank.device)
        print(f"memory: now {memory.now_gib:.2f} GiB, peak {memory.peak_gib:.2f} GiB, total {memory.total_gib:.1f} GiB")
        batch = self.work.first_batch
        rows, padded_length = batch["input_ids"].shape
        text = self.tokenizer.decode(batch["input_ids"][0][batch["attention_mask"][0].bool()])
        print(f"mini-batch: {rows} rows of {padded_length} tokens; the first is row {int(batch['row'][0])}: {text!r}")


class ProgressReport(TrainerCallback):
    """Rank 0's line at each validation: step, losses, and the time that is left."""

    def __init__(self, rank: Rank) -> None:
        """Silent on other ranks than 0."""
        self.is_main = rank.is_main
        self.start_s = 0.0
        self.training_loss = float("nan")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Start the clock."""
        self.start_s = time.perf_counter()
        if self.is_main:
            print(f"{state.max_steps} steps, {args.num_train_epochs:g} epochs")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Have the last steps logged, too, where their number is no multiple of the interval."""
        control.should_log = control.should_log or state.global_step == state.max_steps

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        """Keep the training loss; print it with the validation loss, which the Trainer logs right after."""
        self.training_loss = logs.get("loss", self.training_loss)
        if not self.is_main or VALIDATION_LOSS not in logs:
            return
        elapsed_s = time.perf_counter() - self.start_s
        left_s = elapsed_s / state.global_step * (state.max_steps - state.global_step)
        print(
            f"step {state.global_step}/{state.max_steps}: loss {self.training_loss:.4f}, "
            f"validation loss {logs[VALIDATION_LOSS]:.4f}; {elapsed_s:.0f} s, about {left_s:.0f} s left"
        )
