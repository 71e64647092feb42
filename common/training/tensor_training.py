"""Training with tensor parallel: every rank has the same rows, and its columns and rows of each layer's matrices."""

from typing import Any

import torch

from common.models.shards import gathered
from common.training.fsdp import ShardMemory
from common.training.loop_training import Batch
from common.training.sharded_training import ShardedTrainer
from common.training.tensor_parallel import check_split, check_whole_weights_agree, clip_gradients, separate_groups


class TensorParallelTrainer(ShardedTrainer):
    """The trainer of one rank; its `model` comes from `common.training.tensor_parallel.split_by_plan`."""

    def start_step_maker(self) -> None:
        """Every matrix of the plan must be divided, and nothing else."""
        check_split(self.model, self.rank.world_size)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Divided weights get parameter groups of their own."""
        optimizer = super().create_optimizer(model)
        separate_groups(optimizer)
        return optimizer

    def forward(self, **inputs: Any) -> Any:
        """The model's output, under autocast where the run asks for it."""
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.model(**inputs)

    def loss_of(self, batch: Batch, labelled: int) -> torch.Tensor:
        """The sum of the rows' losses over the step's `labelled` ones; the same on every rank."""
        inputs = self._to_device(batch)
        outputs = self.forward(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return self.objective.loss(outputs, inputs["labels"], labelled)

    def add_gradients(self, batch: Batch, labelled: int, is_last: bool) -> torch.Tensor:
        """Forward and backward; hidden states and their gradients are summed over the ranks on the way."""
        loss = self.loss_of(batch, labelled)
        loss.backward()
        return loss.detach()

    def complete_gradients(self) -> None:
        """Clip by the norm of the whole model's gradients."""
        super().complete_gradients()
        if self.args.max_grad_norm:
            clip_gradients(self.model.parameters(), self.args.max_grad_norm)

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Every rank knows it all."""
        return value

    def of_own_rows(self, of_ranks: list[Any]) -> list[Any]:
        """All ranks work on the same rows, so that one speaks for all.

        Raises:
            RuntimeError: ranks worked on different rows, or their copies of a whole weight went apart.
        """
        if any(other != of_ranks[0] for other in of_ranks):
            raise RuntimeError("The ranks of tensor parallel did not all work on the same rows.")
        check_whole_weights_agree(self.model)
        return of_ranks[:1]

    def check_held(self, held: ShardMemory) -> None:
        """Of what the plan divides, each rank has its part: `check_split` has seen that."""

    def gather(self, weight: torch.Tensor) -> torch.Tensor:
        """From all ranks' columns or rows."""
        return gathered(weight)
