"""What a loop over steps needs beside forward, backward and update, where it is written out in a workflow.

Every rank has the whole model and rows of its own; how gradients come together is the workflow's.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from common.data.rows import IGNORED_LABEL, Tokens
from common.runtime.disks import broadcast_folder
from common.runtime.recorder import RunLog
from common.training.checkpoints import newest_whole, steps_at
from common.training.loop_training import Batch, StepLoop

WEIGHTS_FILE = "replica.pt"
"""Of a checkpoint: weights and optimizer as every rank has them."""


class PlainLoop(StepLoop):
    """Rows, optimizer, schedule, reports, validation and checkpoints of one rank; `steps()` hands out the work."""

    def __init__(self, *, log: RunLog, **kwargs: Any) -> None:
        """The optimizer is there at once, so that a workflow can wrap it."""
        super().__init__(rank=log.rank, **kwargs)
        self.writes = log.writes
        self.create_optimizer()

    def loss_of(self, model: torch.nn.Module, batch: Batch, labelled: int) -> torch.Tensor:
        """This batch's share of the step's loss: the sum of its tokens' losses over the step's `labelled` ones."""
        self.reach("batch")
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
        saved = torch.load(folder / WEIGHTS_FILE, map_location="cpu", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def newest_of_all(self, log: RunLog) -> Path | None:
        """As with one disk; of several the newest that any has, on every disk afterwards."""
        kept = newest_whole(Path(self.args.output_dir)) if self.writes else None
        of_ranks = gather_object([(steps_at(kept) if kept else 0, self.writes)])
        newest = max(steps for steps, _ in of_ranks)
        if not newest:
            return None
        folder = Path(self.args.output_dir) / f"checkpoint-{newest}"
        source = of_ranks.index((newest, True))
        lacks = self.writes and (kept is None or steps_at(kept) < newest)
        broadcast_folder(folder, source, lacks, self.rank)
        return folder

    def write_checkpoint(self, folder: Path) -> None:
        """Every disk gets every rank's random numbers, so that any of them can start all ranks again."""
        super().write_checkpoint(folder)
        states = gather_object([{path.name: path.read_bytes() for path in folder.glob("rng_state*")}])
        for name, content in {name: state for each in states for name, state in each.items()}.items():
            if self.writes:
                (folder / name).write_bytes(content)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.rank.device) for name, tensor in batch.items() if name != "row"}
