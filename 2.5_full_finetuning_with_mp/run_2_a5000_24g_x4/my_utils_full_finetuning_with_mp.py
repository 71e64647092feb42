"""What only model parallel needs: device maps side by side, the custom one, layers that train, a spy, a picture."""

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import pandas as pd
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks, remove_hook_from_module
from transformers import PreTrainedModel

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.hardware.devices import Gpu
from common.models.merging import check_equal_logits, next_token_logits
from common.models.placement import Placement, place_stages
from common.models.trained_weights import train_linear_layers
from common.planning.device_maps import whole_model_on
from common.planning.job import BatchShape
from common.planning.plans import Plan
from common.runtime.recorder import RunRecorder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def placement_table(run: RunConfig, batch: BatchShape, gpu: Gpu | None = None) -> pd.DataFrame:
    """Return a table of device maps: layers, projected peaks, largest batch; of unknown architectures layers alone."""
    rows = []
    for device_map in dict.fromkeys(["auto", "even", "balanced", run.device_map]):
        try:
            placement = place_stages(replace(run, device_map=device_map), batch, gpu)
        except BadInputError:  # such as a balanced map of a model whose memory the closed form does not know
            if device_map == run.device_map:
                raise
            continue
        row = {"Device map": device_map, "Layers per device": " / ".join(map(str, placement.layers))}
        rows.append(row | (_peaks_of(placement.divided) if placement.divided else {}))
    return pd.DataFrame(rows)


def _peaks_of(plan: Plan) -> dict[str, str]:
    """Return the cells that say where the ends of the model are, what each device needs, and which batch fits."""
    holds_end = ([share.has_embeddings for share in plan.shares], [share.has_head for share in plan.shares])
    return {
        "Embeddings, head": ", ".join(str(holds.index(True)) for holds in holds_end),
        "Peak per device (GiB)": " / ".join(f"{memory.peak_gib:.2f}" for memory in plan.devices),
        "Highest (GiB)": f"{plan.training_peak_gib:.2f}",
        "Largest batch": str(plan.max_batch_size),
    }


def custom_device_map(log: RunRecorder, placement: Placement) -> dict[str, str | int]:
    """Return the computed map for any number of GPUs; on CPU one device holds every layer, and nothing is split."""
    return whole_model_on("cpu") if log.run.device == "cpu" else placement.stage_map


def set_trained_layers(model: PreTrainedModel, run: RunConfig) -> pd.DataFrame:
    """Freeze `model` but for what `run.target_modules` names, and list what was chosen.

    Raises:
        BadInputError: a name matches no linear layer.
    """
    chosen = train_linear_layers(model, run.target_modules)
    kinds = pd.Series([name.rpartition(".")[2] for name in chosen], name="trained layers")
    return kinds.value_counts(sort=False).rename("number").reset_index()


def spy_on_stages(model: PreTrainedModel, stage_map: dict[str, int]) -> list[int]:
    """Return the stages in the order of their work in one forward pass of `model`.

    A hidden state crosses a border wherever the next module with weights that is called belongs to another stage.
    """
    calls: list[int] = []
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, stage=stage: calls.append(stage))
        for name, stage in stage_map.items()
        if any(True for _ in model.get_submodule(name).parameters())
    ]
    try:
        batch = {"input_ids": torch.zeros((1, 2), dtype=torch.long), "attention_mask": torch.ones((1, 2))}
        next_token_logits(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return [stage for stage, _ in groupby(calls)]


def check_stages(log: RunRecorder, model: PreTrainedModel, placement: Placement) -> dict[str, object]:
    """Check that every stage of the map works, on its device, and that logits stay the same.

    On CPU Accelerate's hooks, which carry hidden states from device to device, are put where GPUs would have them, and
    taken off again.

    Raises:
        RuntimeError: a stage did not work, a hook is missing, weights are on another device, or
            logits differ.
    """
    stage_map = placement.stage_map
    if log.run.device == "cuda":
        check_devices(model, stage_map)
        order, difference = spy_on_stages(model, stage_map), None
    else:
        order, difference = _as_on_gpus(model, stage_map, log.run)
    stages = len(set(stage_map.values()))
    if set(order) != set(range(stages)):
        raise RuntimeError(f"Of {stages} stages only {sorted(set(order))} worked, in the order {order}.")
    return {"stages": stages, "order": order, "logit_difference_with_hooks": difference}


def check_devices(model: PreTrainedModel, stage_map: dict[str, int]) -> None:
    """Check that every weight is on its stage's GPU.

    Raises:
        RuntimeError: one is elsewhere.
    """
    for name, stage in stage_map.items():
        for weight_name, weight in model.get_submodule(name).named_parameters():
            if weight.device.index != stage:
                raise RuntimeError(f"{name}.{weight_name} is on {weight.device}, but the map has it on cuda:{stage}.")


def _as_on_gpus(model: PreTrainedModel, stage_map: dict[str, int], run: RunConfig) -> tuple[list[int], float]:
    """Return the stages in the order of their work, and the difference of logits, with Accelerate's hooks in place."""
    batch = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.ones((2, 6), dtype=torch.long)}
    expected = next_token_logits(model, batch)
    attach_align_device_hook_on_blocks(model, execution_device={"": "cpu", **dict.fromkeys(stage_map, "cpu")})
    unhooked = [name for name in stage_map if not hasattr(model.get_submodule(name), "_hf_hook")]
    if unhooked:
        raise RuntimeError(f"Accelerate put no hook on {', '.join(unhooked)}, where the device map has an entry.")
    order = spy_on_stages(model, stage_map)
    difference = check_equal_logits(expected, model, batch, "model with hooks", run.precision)
    remove_hook_from_module(model, recurse=True)
    return order, difference


def plot_placement(table: pd.DataFrame) -> "Figure":
    """Plot each device's peak by device map, from `placement_table`: the fullest device decides the batch size."""
    import matplotlib.pyplot as plt  # here: a run draws nothing

    peaks = table.set_index("Device map")["Peak per device (GiB)"].str.split(" / ", expand=True).astype(float)
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    peaks.T.plot.bar(ax=axes, rot=0, xlabel="device", ylabel="peak in training\n(GiB, projected)", legend=False)
    figure.legend(loc="outside upper center", ncols=len(peaks), title="device map")
    return figure
