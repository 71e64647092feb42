"""A model that answers, judges or is compared beside training: whole on each rank, or in stages where ranks share it.

A rank gets hidden states from the one before, and the last one's logits go to all, so that every rank chooses the same
next token: the code that answers is that of a whole model, and so are the logits, to the last bit.
"""

from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from common.base.errors import NotPlannedError
from common.base.run_config import RunConfig
from common.models.loading import load_base_model, weight_dtype
from common.models.stages import Sharing, load_stage
from common.planning.architectures import read_architecture
from common.planning.device_maps import answering_shares, device_map_of, whole_model_on
from common.planning.shares import stages_of
from common.runtime.rank import exchange_timeout
from common.runtime.world import Rank


def sharing_of(model: torch.nn.Module, rank: Rank) -> Sharing:
    """Return how the ranks share `model`, from `load_answering`; any other is whole on each rank."""
    return getattr(model, "sharing", Sharing(0, 1, rank.rank, rank.world_size))


def answering_run(run: RunConfig) -> RunConfig:
    """Return the run with weights as models answer with: the matrix products' format where ranks divide weights."""
    return replace(run, precision=run.compute_dtype) if run.parallelism.divides_tensors else run


def answering_stages(run: RunConfig) -> int:
    """Return how many ranks share a model that answers; 1 = each has it whole, also one whose layers are not known."""
    try:
        return stages_of(read_architecture(run.model, run.model_revision), run)
    except NotPlannedError:
        return 1


def load_answering(
    run: RunConfig,
    rank: Rank,
    source: str | Path | None = None,
    quantized: bool = True,
    device_map: dict[str, str | int] | None = None,
) -> PreTrainedModel:
    """Load the base, or the model in `source`, to answer: in stages where training divides weights; on every rank."""
    run, stages = answering_run(run), 1 if device_map else answering_stages(run)
    if stages == 1:
        return load_base_model(run, device_map or whole_model_on(rank.device), source, quantized)
    sharing = Sharing(rank.rank % stages, stages, rank.rank // stages, rank.world_size // stages)
    architecture = read_architecture(run.model, run.model_revision, int(run.goal.classifies))
    stage_map = device_map_of(architecture, answering_shares(architecture, stages), range(stages))
    model = load_stage(run, stage_map, sharing.stage, rank.device, source, quantized)
    group = _own_group(dist.group.WORLD, stages, exchange_timeout(run)) if stages < rank.world_size else None
    return _in_stages(model, sharing, weight_dtype(run), group)


@lru_cache(maxsize=1)  # models are loaded several times, and every rank makes all groups
def _own_group(world: dist.ProcessGroup, stages: int, timeout: timedelta) -> dist.ProcessGroup:
    ranks = torch.arange(world.size()).view(-1, stages).tolist()
    return dist.new_subgroups_by_enumeration(ranks, timeout=timeout)[0]


def _in_stages(
    model: PreTrainedModel, sharing: Sharing, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> PreTrainedModel:
    """Let a stage take its hidden states, of `dtype`, from the one before, hand its own on, and know the logits."""
    body, own_rank = model.base_model, dist.get_rank()
    compute, answer = body.forward, model.forward
    numbered = [module for module in body.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    layers = sorted({module.layer_idx for module in numbered})
    for module in numbered:  # from 0: `generate` asks the first layer's cache how many tokens were read
        module.layer_idx -= layers[0]

    @wraps(compute)
    def compute_stage(input_ids: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if sharing.stage > 0:
            width = model.config.get_text_config().hidden_size
            hidden = torch.empty(*input_ids.shape, width, dtype=dtype, device=model.device)
            dist.recv(hidden, own_rank - 1)
            input_ids, kwargs["inputs_embeds"] = None, hidden
        cache = kwargs.get("past_key_values")
        if cache is not None and len(cache.layers) > len(layers):  # new: `generate` makes it for the whole model
            cache.layers = [cache.layers[number] for number in layers]
        output = compute(input_ids, *args, **kwargs)
        if not sharing.is_last:
            dist.send(output.last_hidden_state.contiguous(), own_rank + 1)
        return output

    @wraps(answer)
    def answer_stage(*args: Any, **kwargs: Any) -> Any:
        output = answer(*args, **kwargs)
        if not sharing.is_last:  # what came through in the head's place is a hidden state
            hidden, config = output.logits, model.config
            shape = (len(hidden), config.num_labels)
            if model.can_generate():
                shape = (*hidden.shape[:-1], config.get_text_config().vocab_size)
            output.logits = hidden.new_empty(shape)
        output.logits = output.logits.contiguous()
        dist.broadcast(output.logits, own_rank + sharing.stages - 1 - sharing.stage, group=group)
        return output

    body.forward, model.forward, model.sharing = compute_stage, answer_stage, sharing
    return model
