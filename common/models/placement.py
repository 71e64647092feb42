"""Where a run's layers go, before its model loads: the device map, searched or brought along, and the plan of it."""

import heapq
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

import psutil
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.errors import BadInputError, NotPlannedError
from common.base.loggers import silent
from common.base.run_config import RunConfig
from common.data.batches import longest_batch
from common.data.rows import Row, Splits, Tokens, answer_of, texts_of, tokens_in
from common.data.splits import tokens_of
from common.data.templates import prompt_ids
from common.hardware.devices import GIB, Gpu, gpu_here
from common.models.loading import model_without_weights
from common.models.stages import StageMap, stage_of
from common.models.trained_weights import layers_called
from common.planning.architectures import Architecture
from common.planning.device_maps import (
    balanced_shares,
    check_device_map,
    device_map_of,
    even_shares,
    read_device_map,
    shares_of_map,
)
from common.planning.host_memory import offloaded
from common.planning.job import (
    BatchShape,
    EvaluationShape,
    Job,
    architecture_of_run,
    evaluation_of_run,
    is_planned,
    job_of_run,
)
from common.planning.plan_texts import phase_that_is_too_large
from common.planning.plans import Plan, gpu_of_run, make_plan, plan_run, with_rows_for
from common.planning.time_plan import Cluster, calibration_from
from common.records.store import PLAN_TOLERANCE, kept_records


@dataclass(frozen=True)
class Placement:
    """A run's layers on its devices; the plans are None for a model that the closed form does not know."""

    stage_map: StageMap
    layers: tuple[int, ...]  # of each stage
    plan: Plan | None = None
    divided: Plan | None = None  # with a device for each stage: on GPUs the same, on CPU as if there were so many

    def for_record(self) -> dict[str, object]:
        """Return layers and planned peak of each stage, and which modules it holds."""
        peaks = [memory.peak_gib for memory in self.divided.devices] if self.divided else None
        about = {"layers_per_stage": list(self.layers), "planned_peak_gib_per_stage": peaks}
        return {**about, "stage_map": self.stage_map}


def place_stages(
    run: RunConfig, batch: BatchShape, gpu: Gpu | None = None, evaluation: EvaluationShape | None = None
) -> Placement:
    """Return the device map of a run with mp or pp, as `run.device_map` asks, and the plan of its largest batch.

    The plan chooses how many rows are evaluated at once. A model that the closed form does not know has none.

    Raises:
        BadInputError: there are more stages than layers, or a device map does not fit model or devices.
        NotPlannedError: the closed form does not know the model, and pp or a balanced map needs it.
    """
    gpu, may_count_modules = gpu or gpu_of_run(run), run.parallelism.layers_in_turn and run.device_map != "balanced"
    gpus = (gpu,) * run.stage_count
    if may_count_modules and not is_planned(run):
        stage_map = _map_by_modules(run, gpus)
        layers = Counter(stage_of(name, stage_map) for name in _layer_names(model_without_weights(run)))
        return Placement(stage_map, tuple(layers[stage] for stage in range(run.stage_count)))
    architecture = architecture_of_run(run, batch)
    job = replace(job_of_run(run, batch, evaluation), parallel=run.parallel, devices=run.stage_count)
    stage_map = _stage_map(run, architecture, job, gpus)
    # a balanced map is balanced anew for the largest batch
    shares = None if run.device_map == "balanced" else shares_of_map(architecture, stage_map, len(gpus))
    calibration = calibration_from(kept_records(), job.batch.task)
    divided = with_rows_for(run, make_plan(architecture, job, Cluster(gpus), calibration, shares))
    plan = divided if run.devices > 1 else plan_run(run, batch, gpu, evaluation)
    return Placement(stage_map, tuple(sum(share.layers) for share in divided.shares), plan, divided)


def _stage_map(run: RunConfig, architecture: Architecture, job: Job, gpus: Sequence[Gpu]) -> StageMap:
    count, computed = len(gpus), {"balanced": balanced_shares, "even": even_shares}
    if run.device_map in computed:
        return device_map_of(architecture, computed[run.device_map](architecture, job, gpus), range(count))
    stage_map = _for_each_module(architecture, _map_by_modules(run, gpus), count)
    if run.device_map == "auto":
        for number, share in enumerate(shares_of_map(architecture, stage_map, count)):
            if not any(share.layers):  # as where embeddings are large
                raise BadInputError(
                    f"device_map is auto, but Accelerate gives device {number} of {count} no layer of "
                    f"{architecture.name}: pass --device_map balanced, or take fewer devices."
                )
    elif run.parallelism.pipelines:
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
                f"The device map has {name} on {stage_map[name]}, but a pipeline's stages follow each other: put "
                f"it on {stage}."
            )


def _map_by_modules(run: RunConfig, gpus: Sequence[Gpu]) -> StageMap:
    """Return the even map, Accelerate's, or that in the file `run.device_map`, for any model: no closed form needed."""
    if run.device_map == "auto":
        return auto_map(run, gpus)
    model = model_without_weights(run)
    if run.device_map == "even":
        return _even_map(model, len(gpus))
    brought = read_device_map(run.device_map)
    tied = [] if run.parallelism.pipelines else list(model.all_tied_weights_keys.items())
    check_device_map(brought, [name for name, _ in model.named_parameters(remove_duplicate=False)], tied, len(gpus))
    return {name: int(str(device).removeprefix("cuda:")) for name, device in brought.items()}


def auto_map(run: RunConfig, gpus: Sequence[Gpu]) -> StageMap:
    """Return what Accelerate chooses for `device_map="auto"` on empty GPUs: it looks at the weights alone."""
    model = model_without_weights(run)
    rooms = {number: int(gpu.memory_gib * GIB) for number, gpu in enumerate(gpus)}
    about = {"no_split_module_classes": list(model._no_split_modules), "dtype": model.dtype}
    with silent("accelerate"):  # it warns of GPUs that this machine may lack
        chosen = infer_auto_device_map(model, get_balanced_memory(model, rooms, **about), **about)
    return {name: int(device) for name, device in chosen.items()}


def _even_map(model: PreTrainedModel, stages: int) -> StageMap:
    """Return a map with equally many layers on each stage, or one more on the first; a tied head is with embeddings."""
    layers = _layer_names(model)
    if len(layers) < stages:
        raise BadInputError(
            f"This {model.config.model_type} has {len(layers)} layers, too few for {stages} stages: take at most "
            f"{len(layers)} devices (--devices or --stages)."
        )
    stage_map = {name: number * stages // len(layers) for number, name in enumerate(layers)}
    head, is_tied = model.get_output_embeddings(), bool(model.all_tied_weights_keys)
    inside, beside = tuple(f"{name}." for name in layers), []
    for name, module in model.named_modules():
        if name in stage_map or name.startswith(inside):
            continue
        if isinstance(module, torch.nn.Embedding) or module is head:
            stage_map[name] = stages - 1 if module is head and not is_tied else 0
        elif any(True for _ in module.parameters(recurse=False)):
            beside.append(name)
        elif any(True for _ in module.buffers(recurse=False)):  # rotary frequencies, which every layer reads
            stage_map[name] = 0
    # one is the last norm; of several some work on what embeddings give (Gemma 4), and their names do not say which
    return stage_map | dict.fromkeys(beside, stages - 1 if len(beside) == 1 else 0)


def _layer_names(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ in (model._no_split_modules or ())]


def check_placement_and_memory(run: RunConfig, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> RunConfig:
    """Place and plan a run before its model loads; return it with as many rows evaluated at once as planned."""
    gpu = gpu_here() if run.device == "cuda" else None

    def longest(rows: Sequence[Row], count: int) -> Sequence[Tokens]:
        # a few rows, among them the longest: tokens grow with characters
        few = rows  # with a share that may be left out all, of which the longest are no sample
        if not run.max_truncated_fraction:
            few = heapq.nlargest(4 * count, rows, key=lambda row: sum(map(len, texts_of(row))))
        return tokens_of(few, tokenizer, replace(run, long_texts="cut"))  # those too long were refused before

    batch = longest_batch(longest(splits.train, run.per_device_train_batch_size), run.per_device_train_batch_size, run)
    validation = longest(splits.validation, run.rows_evaluated_at_once)
    evaluation = evaluation_of_rows(run, validation, splits.test, tokenizer)
    if run.parallelism.splits_layers:
        placement = place_stages(run, batch, gpu, evaluation)
        plan = placement.plan
        if run.parallelism.pipelines:
            check_stages_train(run, placement.stage_map)
    else:
        plan = None
        with suppress(NotPlannedError):
            plan = plan_run(run, batch, gpu, evaluation)
    if plan:
        check_fits(plan)
        check_host(plan, psutil.virtual_memory().available)
    return with_rows_at_once(run, plan)


def check_stages_train(run: RunConfig, stage_map: StageMap) -> None:
    """Refuse a pipeline of which a stage has no layer to train: each has an optimizer of its own."""
    if run.target_modules in ("all", "all-linear"):
        return
    layers = layers_called(model_without_weights(run), run.target_modules)
    for stage in range(run.stage_count):
        own = [f".{name}" for name in layers if stage_of(name, stage_map) == stage]
        lacking = [target for target in run.target_names if not any(name.endswith(f".{target}") for name in own)]
        if lacking and not (run.method.has_adapters and own):
            raise BadInputError(
                f"target_modules is {run.target_modules}, but stage {stage} has no layer called {', '.join(lacking)}: "
                "pass names of layers that every stage has, such as q_proj."
            )


def with_rows_at_once(run: RunConfig, plan: Plan | None) -> RunConfig:
    """Return the run with as many rows validated and answered at once as planned, or else as it asks for itself."""
    return replace(run, per_device_eval_batch_size=plan.job.evaluation.rows if plan else run.rows_evaluated_at_once)


def evaluation_of_rows(
    run: RunConfig,
    validation: Sequence[Tokens],
    tested: Sequence[Row] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> EvaluationShape:
    """Return what the phases beside training work on, by the longest validation rows.

    The longest prompt and reference of a conversation are those of the `tested` rows, which need the `tokenizer`.
    Without these rows, and for other tasks, they are as long as in validation.
    """
    longest = longest_batch(validation, run.rows_evaluated_at_once, run, is_training=False)
    evaluation = evaluation_of_run(run, longest.padded_to(run.pad_to_multiple_of))
    first = islice(validation, evaluation.validated)  # the others may be on disk
    evaluation = replace(evaluation, compared_length=max(map(tokens_in, first)))
    if run.sp_size > 1:  # then rows are packed in validation, too
        packed = longest_batch(validation, run.rows_evaluated_at_once, run)
        evaluation = replace(evaluation, length=packed.length, labelled=packed.labelled)
    if not (tested and run.goal.is_judged):
        return evaluation
    prompts, references = prompt_ids(tested, tokenizer), tokenizer([answer_of(row) for row in tested])["input_ids"]
    return replace(evaluation, prompt_length=max(map(len, prompts)), reference_length=max(map(len, references)))


def check_fits(plan: Plan) -> None:
    """Refuse a run of which a phase cannot fit, even if the plan were too high by `PLAN_TOLERANCE`."""
    memory, gpu = plan.fullest
    if memory.peak_gib <= gpu.memory_gib * (1 + PLAN_TOLERANCE):
        if plan.highest_likely.likely_share > 1 + PLAN_TOLERANCE:
            raise BadInputError(f"This run cannot fit: {phase_that_is_too_large(plan)}.")
        return
    fits, parts = plan.max_batch_size, plan.job.micro_batches
    fewest = f"{parts} rows, one for each of {parts} micro-batches," if parts > 1 else "one row"
    fewer = ", fewer micro-batches of fewer rows" if parts > 1 else ""
    remedy = f"pass --batch_size {fits}" if fits else f"not even {fewest} would fit: use more or larger devices{fewer}"
    raise BadInputError(
        f"A batch of {plan.job.batch.rows} rows of {plan.job.batch.length} tokens cannot fit: device {plan.tightest} "
        f"would need {memory.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB: {remedy}."
    )


def check_host(plan: Plan, available_bytes: int) -> None:
    """Refuse a run whose weights and states are offloaded to a machine without room for them."""
    needed_gib = sum(term.gib for term in offloaded(plan.architecture, plan.job, plan.cluster.nodes))
    if needed_gib * GIB > available_bytes:
        raise BadInputError(
            f"--offload cpu would keep {needed_gib:.1f} GiB in the machine's own memory, of which "
            f"{available_bytes / GIB:.1f} GiB are free: pass --offload none and more GPUs, or a smaller --model."
        )
