"""MLPs that compute tiles of tokens one after the other, and each tile again in the backward pass (ALST's `TiledMLP`).

So intermediate results of one tile alone are held (Arctic Long Sequence Training, arxiv.org/abs/2506.13996).
DeepSpeed's adds to the weights' gradients tile by tile, which DDP and FSDP2 cannot count; here autograd sums first.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.compiled_layers import layers_of
from common.models.loading import model_without_weights
from common.models.shards import has_fused_experts


def check_tiles(run: RunConfig) -> None:
    """Refuse a model whose layers have no module `mlp`, or experts, each of which gets a part of the tokens already."""
    layers = layers_of(model_without_weights(run)) if run.tiled_mlp else []
    mlps = [getattr(layer, "mlp", None) for layer in layers]
    if run.tiled_mlp and (not mlps or None in mlps or any(has_fused_experts(m) for mlp in mlps for m in mlp.modules())):
        raise BadInputError(
            f"tiled_mlp is True, but not every layer of {run.model} has one MLP, called mlp: pass --tiled_mlp false."
        )


def tile_mlps(model: torch.nn.Module) -> None:
    """Let the MLP of each layer compute at most as many tokens at once as a hidden state has numbers, as ALST does."""
    for layer in layers_of(model):
        layer.mlp.forward = partial(_in_tiles, layer.mlp.forward)


def _in_tiles(forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """Return the MLP's result for hidden states of shape (rows, tokens, hidden size), of the same shape."""
    tokens = hidden.flatten(0, -2)
    compute = partial(checkpoint, forward, use_reentrant=False) if torch.is_grad_enabled() else forward
    tiles = tokens.chunk(math.ceil(len(tokens) / hidden.shape[-1]))
    return torch.cat([compute(tile) for tile in tiles]).view_as(hidden)
