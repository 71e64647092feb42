"""What a loop over steps needs beside forward, backward and update, where it is written out in a workflow.

Every rank has the whole model and rows of its own; how gradients come together is the workflow's.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from common.data import IGNORED_LABEL, Tokens
from common.disks import send_folder
from common.loop_training import STATE_FILE, Batch, StepLoop
from common.run_record import RunLog

WEIGHTS_FILE = "replica.pt"
"""Of a checkpoint: weights and optimizer as every rank has them."""


class PlainLoop(StepLoop):
    """Rows, optimizer, schedule, reports, validation and checkpoints of one rank; `steps()` hands out the work."""

    way = "ddp"

    def __init__(self, *, log: RunLog, **kwargs: Any) -> None:
        """The optimizer is there at once, so that a workflow can wrap it."""
        super().__init__(rank=log.rank, **kwargs)
        self.log_of_run, self.writes = log, log.writes
        self.create_optimizer()

    def start_from(self) -> str:
        """The checkpoint to go on from: of a run that was started again its newest, else the one that was asked for."""
        found = self._newest_checkpoint() if self.log_of_run.goes_on else ""
        return found or self.log_of_run.run.resume_from

    def loss_of(self, model: torch.nn.Module, batch: Batch, labelled: int) -> torch.Tensor:
        """This batch's share of the step's loss: the sum of its tokens' losses over the step's `labelled` ones."""
        inputs = self._to_device(batch)
        labels = inputs.pop("labels")
        with self._autocast():
            loss = self.objective.loss(model(**inputs), labels, labelled)
        self.loss_sum += loss.detach()
        return loss

    def labels_in(self, row: Tokens) -> int:
        """Every token of a summary is to be predicted."""
        return sum(label != IGNORED_LABEL for label in row["labels"])

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Each rank knows its own rows'."""
        total = value.detach().clone()
        if self.rank.world_size > 1:
            dist.all_reduce(total)
        return total

    @torch.no_grad()
    def sums_of(self, batch: Batch) -> torch.Tensor:
        """Of this rank's validation rows, with dropout off."""
        inputs = self._to_device(batch)
        labels = inputs.pop("labels")
        self.model.eval()
        with self._autocast():
            logits = self.model(**inputs).logits
        self.model.train()
        return self.objective.results(logits, labels).sum(0)

    def save_weights(self, folder: Path) -> None:
        """One rank of each disk writes what all have."""
        if self.writes:
            torch.save(
                {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / WEIGHTS_FILE
            )

    def load_weights(self, folder: Path) -> None:
        """On every rank."""
        saved = torch.load(folder / WEIGHTS_FILE, map_location=self.rank.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def _newest_checkpoint(self) -> str:
        """The newest whole checkpoint that any rank has, on every disk afterwards; empty where nobody has one."""
        kept = sorted(Path(self.args.output_dir).glob(f"checkpoint-*/{STATE_FILE}"), key=_steps_at, reverse=True)
        steps = gather_object([_steps_at(kept[0]) if kept else 0])
        newest = max(steps)
        if not newest:
            return ""
        folder = Path(self.args.output_dir) / f"checkpoint-{newest}"
        lacks = steps[self.rank.rank] < newest and self.writes
        send_folder(folder, steps.index(newest), lacks, self.rank)
        for older in kept if lacks else ():
            shutil.rmtree(older.parent)
        return str(folder)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.rank.device) for name, tensor in batch.items() if name != "row"}


def _steps_at(state_file: Path) -> int:
    """After how many steps a checkpoint was kept, by the name of its folder."""
    return int(state_file.parent.name.rpartition("-")[2])
