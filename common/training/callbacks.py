"""What a run says while it trains: a report of each rank's first step, and progress lines of rank 0."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from common.base.errors import begin_of
from common.base.print_prefix import print_figures
from common.data.rows import IGNORED_LABEL, NO_ROW
from common.hardware.devices import read_memory
from common.models.shards import local_part
from common.runtime.world import Rank
from common.tasks.objectives import ACCURACY, REWARD, VALIDATION_LOSS

LONGEST_TEXT = 1000  # of a mini-batch's first row, as it is printed


@dataclass
class WorkDone:
    """What this rank trained on: row numbers, in order, over all epochs, and tokens without padding.

    `reporting_s`: seconds of training that went into logging, validation and checkpoints; `generating_s`: into answers
    that are learnt from.
    """

    rows: list[int] = field(default_factory=list)
    tokens: int = 0
    reporting_s: float = 0.0
    generating_s: float = 0.0
    first_batch: dict[str, Any] = field(default_factory=dict)

    def count(self, row_numbers: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Count one mini-batch; `row_numbers` has shape (rows,)."""
        if not self.first_batch:
            self.first_batch = {"row": row_numbers, **inputs}
        is_row = row_numbers != NO_ROW
        self.rows += row_numbers[is_row].tolist()
        if "cu_seq_lens_q" in inputs:  # packed: real rows alone, or one filler row
            self.tokens += int(inputs["cu_seq_lens_q"][len(row_numbers)]) if is_row.all() else 0  # of all ranks' parts
        else:
            mask = inputs["attention_mask"]  # a row may have several sequences: all rows' first ones, then second ones
            self.tokens += int(mask[is_row.repeat(len(mask) // len(is_row))].sum())
        if "decoder_input_ids" in inputs:  # summaries are read and written beside the texts
            self.tokens += int((inputs["labels"][is_row] != IGNORED_LABEL).sum())


class FirstStepReport(TrainerCallback):
    """Tells, after step 1, the memory of this rank's devices, and its mini-batch if no other rank `tells` the same."""

    def __init__(self, rank: Rank, work: WorkDone, tokenizer: PreTrainedTokenizerBase, tells: bool = True) -> None:
        self.rank, self.work, self.tokenizer, self.tells = rank, work, tokenizer, tells

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.global_step != 1:
            return
        for device in self.rank.devices:
            memory, where = read_memory(device), f" on {device}" if self.rank.further_devices else ""
            peak = f"peak {memory.peak_gib:.2f} GiB, total {memory.total_gib:.1f} GiB"
            print(f"memory{where}: now {memory.now_gib:.2f} GiB, {peak}")
        if not self.tells:
            return
        batch = self.work.first_batch
        if "cu_seq_lens_q" in batch:
            own, all_tokens = batch["input_ids"].numel(), int(batch["cu_seq_lens_q"][-1])
            laid_out = f"packed without padding, {own} " + (f"of {all_tokens} " if own < all_tokens else "") + "tokens"
            first = batch["input_ids"][0, : batch["cu_seq_lens_q"][1]]
        else:
            laid_out = f"of {batch['input_ids'].shape[1]} tokens, with padding"
            first = batch["input_ids"][0][batch["attention_mask"][0].bool()]
        text = begin_of(self.tokenizer.decode(first), LONGEST_TEXT)
        print(f"mini-batch: {len(batch['row'])} rows {laid_out}; the first is row {int(batch['row'][0])}: {text!r}")


SAMPLED_PER_WEIGHT = 65_536  # elements of each weight tensor that `UpdateReport` looks at, evenly spread


class UpdateReport(TrainerCallback):
    """The share of the trained weights that an optimizer step really changes; the others' updates rounded away.

    bfloat16 has 8 bits of precision: an update below about 1/512 of its weight leaves it as it was. Looks at the steps
    that are logged, and at a sample of each weight, so that a large model needs no second copy.
    """

    def __init__(self) -> None:
        # step, elements that it changed (on their device: to read them is to wait for it), and those looked at
        self.changed_by_step: list[tuple[int, torch.Tensor, int]] = []
        self.before: list[torch.Tensor] = []

    @override
    def on_pre_optimizer_step(self, args: object, state: TrainerState, *_: object, **at: Any) -> None:
        # warm-up begins at a rate of 0, with which nothing is updated
        if (state.global_step + 1) % state.logging_steps == 0 and at["optimizer"].param_groups[0]["lr"] > 0:
            self.before = [sample.clone() for sample in _samples(at["model"])]

    @override
    def on_optimizer_step(self, args: object, state: TrainerState, *_: object, **at: Any) -> None:
        if self.before:
            pairs, device = zip(self.before, _samples(at["model"]), strict=True), self.before[0].device
            changed = torch.stack([(after != before).sum().to(device, non_blocking=True) for before, after in pairs])
            looked_at = sum(before.numel() for before in self.before)
            self.changed_by_step.append((state.global_step + 1, changed.sum(), looked_at))
            self.before = []

    def figures(self) -> dict[str, object]:
        """Return the shares for the record."""
        share_by_step = [(step, int(changed) / looked_at) for step, changed, looked_at in self.changed_by_step]
        mean = sum(share for _, share in share_by_step) / len(share_by_step) if share_by_step else None
        return {"updated_share": mean, "updated_share_by_step": share_by_step}


def _samples(model: torch.nn.Module) -> list[torch.Tensor]:
    trained = [local_part(weight).detach() for weight in model.parameters() if weight.requires_grad]
    return [weight.flatten()[:: -(-weight.numel() // SAMPLED_PER_WEIGHT) or 1] for weight in trained]


class ProgressReport(TrainerCallback):
    """Rank 0's line at each validation: step, losses, and the time that is left."""

    def __init__(self, rank: Rank, log_format: str = "text") -> None:
        """Stay silent on other ranks than 0; `log_format`: `text`, or `json` for one object a line."""
        self.is_main, self.log_format = rank.is_main, log_format
        self.start_s, self.first_step = 0.0, 0
        self.training_loss = float("nan")

    @override
    def on_train_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        self.start_s, self.first_step = time.perf_counter(), state.global_step
        if self.is_main:
            print(f"{state.max_steps} steps, {state.num_train_epochs} epochs")

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        # the last steps, too, where their number is no multiple of the interval
        control.should_log = control.should_log or state.global_step == state.max_steps

    @override
    def on_log(self, args: object, state: TrainerState, *_: object, logs: dict[str, float], **__: object) -> None:
        # the training loss comes first, and the validation loss, with which it is printed, right after
        self.training_loss = logs.get("loss", self.training_loss)
        if not self.is_main or VALIDATION_LOSS not in logs:
            return
        elapsed_s, step = time.perf_counter() - self.start_s, state.global_step
        if self.log_format == "json":
            figures = {"step": step, **({"loss": self.training_loss} if step else {}), "elapsed_s": round(elapsed_s, 1)}
            print_figures(figures | {name: logs[name] for name in (VALIDATION_LOSS, ACCURACY, REWARD) if name in logs})
            return
        others = {"accuracy": ACCURACY, "reward": REWARD}
        more = [f", {word} {logs[name]:.3f}" for word, name in others.items() if name in logs]
        validated = f"validation loss {logs[VALIDATION_LOSS]:.4f}{''.join(more)}"
        if not step:
            print(f"before training: {validated}")
            self.start_s = time.perf_counter()
            return
        done = max(1, step - self.first_step)  # of this start; others may have been before
        left_s = round(elapsed_s / done * (state.max_steps - step))
        left = f", about {left_s} s left" if left_s else ""
        print(f"step {step}/{state.max_steps}: loss {self.training_loss:.4f}, {validated}; {elapsed_s:.0f} s{left}")
