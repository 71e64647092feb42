"""Where a run's layers go, before its model loads: the device map, searched or brought along, and the plan of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.loggers import silent
from common.base.run_config import RunConfig
from common.data.batches import longest_batch
from common.data.rows import Row, texts_of
from common.data.splits import tokens_of
from common.hardware.devices import GIB, Gpu, cpu_device, find_gpu, gpu_here
from common.models.loading import model_without_weights
from common.planning.architectures import Architecture
from common.planning.device_maps import (
    balanced_shares,
    check_device_map,
    device_map_of,
    even_shares,
    read_device_map,
    shares_of_map,
)
from common.planning.job import BatchShape, Job
from common.planning.plans import Plan, architecture_of_run, job_of_run, make_plan, plan_run
from common.planning.time_plan import Cluster, calibration_from
from common.records.store import PLAN_TOLERANCE, kept_records

StageMap = dict[str, int]
"""Which stage, and so which device, holds which module."""


@dataclass(frozen=True)
class Placement:
    """A run's layers on its devices.

    Attributes:
        stage_map: Which stage holds which module.
        plan: Of the run as it is.
        divided: With a device for each stage: on GPUs the same, on CPU as if there were so many.
    """

    stage_map: StageMap
    plan: Plan
    divided: Plan

    def for_record(self) -> dict[str, object]:
        """Return layers and planned peak of each stage, and which modules it holds."""
        return {
            "layers_per_stage": [sum(share.layers) for share in self.divided.shares],
            "planned_peak_gib_per_stage": [memory.peak_gib for memory in self.divided.devices],
            "stage_map": self.stage_map,
        }


def place_stages(run: RunConfig, batch: BatchShape, gpu: Gpu | None = None) -> Placement:
    """Return the device map of a run with mp or pp, as `run.device_map` asks, and the plan of its largest batch.

    Raises:
        BadInputError: there are more stages than layers, or a device map does not fit model or devices.
    """
    architecture, job, gpus = _divided(run, batch, gpu)
    stage_map = _stage_map(run, run.device_map, architecture, job, gpus)
    divided = _plan_of(run.device_map, architecture, job, gpus, stage_map)
    return Placement(stage_map, divided if run.devices > 1 else plan_run(run, batch, gpu), divided)


def _divided(run: RunConfig, batch: BatchShape, gpu: Gpu | None) -> tuple[Architecture, Job, tuple[Gpu, ...]]:
    if gpu is None:
        gpu = cpu_device() if run.device == "cpu" else find_gpu(run.gpu)
    job = replace(job_of_run(run, batch), parallel=run.parallel, devices=run.stage_count)
    return architecture_of_run(run, batch), job, (gpu,) * run.stage_count


def _stage_map(run: RunConfig, device_map: str, architecture: Architecture, job: Job, gpus: Sequence[Gpu]) -> StageMap:
    count = len(gpus)
    computed = {"balanced": balanced_shares, "even": even_shares}
    if device_map in computed:
        return device_map_of(architecture, computed[device_map](architecture, job, gpus), range(count))
    if device_map == "auto":
        chosen = _for_each_module(architecture, auto_map(run, gpus), count)
        for number, share in enumerate(shares_of_map(architecture, chosen, count)):
            if not any(share.layers):  # as where embeddings are large
                raise BadInputError(
                    f"device_map is auto, but Accelerate gives device {number} of {count} no layer of "
                    f"{architecture.name}: pass --device_map balanced, or take fewer devices."
                )
        return chosen
    model, brought, pipelines = model_without_weights(run), read_device_map(device_map), run.parallelism.pipelines
    tied = [] if pipelines else list(model.all_tied_weights_keys.items())
    check_device_map(brought, [name for name, _ in model.named_parameters(remove_duplicate=False)], tied, count)
    numbered = {name: int(str(device).removeprefix("cuda:")) for name, device in brought.items()}
    stage_map = _for_each_module(architecture, numbered, count)
    if pipelines:
        _check_contiguous(architecture, stage_map, count)
    return stage_map


def _for_each_module(architecture: Architecture, stage_map: StageMap, stages: int) -> StageMap:
    """Return the map with an entry for each layer: others stand for several, or for a part."""
    every = device_map_of(architecture, shares_of_map(architecture, stage_map, stages), range(stages))
    longest_first = sorted(stage_map, key=len, reverse=True)
    for name in every:
        fitting = (each for each in longest_first if f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}."))
        every[name] = next(map(stage_map.get, fitting), stage_map.get("", every[name]))
    return every


def _check_contiguous(architecture: Architecture, stage_map: StageMap, stages: int) -> None:
    shares = [
        replace(share, has_embeddings=stage == 0, has_head=stage == stages - 1)
        for stage, share in enumerate(shares_of_map(architecture, stage_map, stages))
    ]
    for name, stage in device_map_of(architecture, shares, range(stages)).items():
        if stage_map[name] != stage and not name.endswith("rotary_emb"):
            raise BadInputError(
                f"The device map has {name} on {stage_map[name]}, but a pipeline's stages follow each other, from "
                f"embeddings to head; with as many layers on each it would be on {stage}."
            )


def auto_map(run: RunConfig, gpus: Sequence[Gpu]) -> StageMap:
    """Return what Accelerate chooses for `device_map="auto"` on empty GPUs: it looks at the weights alone."""
    model = model_without_weights(run)
    rooms = {number: int(gpu.memory_gib * GIB) for number, gpu in enumerate(gpus)}
    about = {"no_split_module_classes": list(model._no_split_modules), "dtype": model.dtype}
    with silent("accelerate"):  # it warns of GPUs that this machine may lack
        chosen = infer_auto_device_map(model, get_balanced_memory(model, rooms, **about), **about)
    return {name: int(device) for name, device in chosen.items()}


def check_placement_and_memory(run: RunConfig, rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> None:
    """Place and plan the run's largest batch before its model loads.

    A model that the closed form does not know is not planned, and passes where no layers are to be placed.

    Raises:
        BadInputError: layers cannot be placed as asked, or the batch cannot fit.
    """
    gpu = gpu_here() if run.device == "cuda" else None
    # tokens grow with characters, and tokenizing a few rows is enough
    longest = sorted(rows, key=lambda row: -sum(map(len, texts_of(row))))
    few = replace(run, long_texts="cut")  # those too long were refused before
    batch = longest_batch(
        tokens_of(longest[: 4 * run.per_device_train_batch_size], tokenizer, few), run.per_device_train_batch_size
    )
    if run.parallelism.splits_layers:
        plan = place_stages(run, batch, gpu).plan
    else:
        try:
            plan = plan_run(run, batch, gpu)
        except BadInputError:
            return
    check_fits(plan)


def check_fits(plan: Plan) -> None:
    """Refuse a batch that cannot fit, even if the plan were too high by `PLAN_TOLERANCE`.

    Raises:
        BadInputError: with the device, what it would need and has, and the batch that would fit.
    """
    memory, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
    if memory.peak_gib <= gpu.memory_gib * (1 + PLAN_TOLERANCE):
        return
    fits = plan.max_batch_size
    remedy = f"pass --batch_size {fits}" if fits else "not even one row would fit: use more or larger devices"
    raise BadInputError(
        f"A batch of {plan.job.batch.rows} rows of {plan.job.batch.length} tokens cannot fit: device {plan.tightest} "
        f"would need {memory.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB: {remedy}."
    )


def placement_table(run: RunConfig, batch: BatchShape, gpu: Gpu | None = None) -> pd.DataFrame:
    """Return a table of Accelerate's map, an even split and the balanced one: layers, peaks, largest batch.

    Every number is projected. Accelerate's map is left out where it gives a device no layer.
    """
    architecture, job, gpus = _divided(run, batch, gpu)
    by_accelerate = ["auto"] if run.parallelism.layers_in_turn else []
    rows = []
    for device_map in dict.fromkeys([*by_accelerate, "even", "balanced", run.device_map]):
        try:
            stage_map = _stage_map(run, device_map, architecture, job, gpus)
        except BadInputError:
            if device_map == run.device_map:
                raise
            continue
        plan = _plan_of(device_map, architecture, job, gpus, stage_map)
        rows.append({
            "Device map": device_map,
            "Layers per device": " / ".join(str(sum(share.layers)) for share in plan.shares),
            "Embeddings, head": ", ".join(
                str(next(n for n, share in enumerate(plan.shares) if getattr(share, end)))
                for end in ("has_embeddings", "has_head")
            ),
            "Peak per device (GiB)": " / ".join(f"{memory.peak_gib:.2f}" for memory in plan.devices),
            "Highest (GiB)": f"{max(memory.peak_gib for memory in plan.devices):.2f}",
            "Largest batch": str(plan.max_batch_size),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _plan_of(device_map: str, architecture: Architecture, job: Job, gpus: Sequence[Gpu], stage_map: StageMap) -> Plan:
    """Return the plan with layers where `stage_map` has them; a balanced map is balanced anew for the largest batch."""
    shares = None if device_map == "balanced" else shares_of_map(architecture, stage_map, len(gpus))
    return make_plan(architecture, job, Cluster(tuple(gpus)), calibration_from(kept_records(), job.batch.task), shares)
