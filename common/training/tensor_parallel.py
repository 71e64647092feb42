"""What a rank holds with tensor parallel: columns or rows of each layer's matrices; all ranks have the same rows.

Which matrices are divided, and how they are loaded, says the run folder (3.1).
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig
from typing_extensions import override

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.loading import any_shape_config
from common.models.shards import local_part
from common.runtime.world import Rank
from common.training.answer_logits import Batch, Model
from common.training.part import Part, clip_divided

FAMILIES = ("bert", "roberta", "xlm-roberta")
AGREEMENT = 1e-7  # by which a whole weight may differ between ranks


class Columns(Part):
    """Columns or rows of each layer's matrices; all ranks have the same rows of a batch."""

    def __init__(self, module: Model, run: RunConfig, rank: Rank) -> None:
        if not any(split_dimension(weight) is not None for weight in module.parameters()):
            raise RuntimeError("No weight is divided among the ranks: call the run folder's `split_by_plan` first.")
        super().__init__(module, run, rank)

    @classmethod
    @override
    def check(cls, run: RunConfig) -> None:
        check_divisible(any_shape_config(run.model, run.model_revision), run.devices)

    @override
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        return clip_gradients(self.model.parameters(), max_norm, self.rank.device)

    @override
    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        return value  # every rank knows it all

    @override
    def logits(self, batch: Batch) -> torch.Tensor:
        with self.autocast():
            return super().logits(batch)

    @override
    def own_rows(self, of_ranks: list[Any]) -> list[Any]:
        own = super().own_rows(of_ranks)
        check_whole_weights_agree(self.model)
        return own


def check_divisible(config: PretrainedConfig, ranks: int) -> None:
    """Refuse a model that the ranks cannot share evenly, or that there is no plan for."""
    if config.model_type not in FAMILIES:
        raise BadInputError(
            f"model is of type {config.model_type}, which has no plan of tensor parallel: choose one of type "
            f"{' or '.join(FAMILIES)}, or pass --parallel ddp."
        )
    heads, inner = config.num_attention_heads, config.intermediate_size
    if heads % ranks or inner % ranks:
        fitting = [f"--devices {count}" for count in range(2, heads + 1) if heads % count == inner % count == 0]
        raise BadInputError(
            f"The model's num_attention_heads is {heads} and its intermediate_size {inner}, which {ranks} ranks cannot "
            f"share evenly: pass {' or '.join([*fitting, '--parallel ddp'])}."
        )


def split_dimension(weight: torch.Tensor) -> int | None:
    """Return the dimension along which a weight (or a gradient) is divided, None if it is whole."""
    if not isinstance(weight, DTensor) or not weight.placements[0].is_shard():
        return None
    return weight.placements[0].dim


def check_whole_weights_agree(model: torch.nn.Module) -> None:
    """Refuse ranks whose copies of a whole weight went apart, as other dropout masks would make them; on every rank."""
    for name, weight in model.named_parameters():
        if split_dimension(weight) is None:
            own = local_part(weight.detach())
            ends = torch.stack([own, -own])
            dist.all_reduce(ends, op=dist.ReduceOp.MAX)  # the largest and, with its sign turned, the smallest value
            difference = (ends[0] + ends[1]).max().item()
            if not difference <= AGREEMENT:  # also where it is no number
                raise RuntimeError(
                    f"{name} is whole on every rank, but its copies differ by up to {difference:.1e}: were all ranks "
                    "seeded alike, and do they see the same rows?"
                )


def clip_gradients(weights: Iterable[torch.Tensor], max_norm: float, device: str) -> torch.Tensor:
    """Clip the whole model's gradients, of which what every rank has whole counts once; return their norm."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    divided = [gradient.to_local() for gradient in gradients if split_dimension(gradient) is not None]
    whole = [local_part(gradient) for gradient in gradients if split_dimension(gradient) is None]
    return clip_divided(divided + whole, divided, whole, max_norm, device)
