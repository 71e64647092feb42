"""The real training step on fake tensors: how much memory it takes, part by part, without a GPU and without weights.

    python -m common.dry_run 2.1_lora_finetuning/run_1_a6000_48g_x1
    python -m common.dry_run 2.1_lora_finetuning/run_1_a6000_48g_x1 --batch_size 4 --model llama-3.1-70b

A fake tensor has a shape, a dtype and a storage of the right size, but no bytes: every operation of the step runs,
and computes nothing. A mode counts the storages that are alive. Two small depths are run; as every further layer, or
group of unlike layers, adds the same, they are extrapolated to all. Of a divided model each share is run alone.

Of a run on a GPU it does as a GPU does where that has other operations: dropout's masks, layer norms and softmax under
autocast, unfused optimizers, TRL's head. It cannot see the CUDA context, gaps between allocated blocks, and what is
being sent between devices.
"""

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, replace

from transformers import GradientCheckpointingLayer, PretrainedConfig

from common.base.command_line import refused_in_one_sentence
from common.base.errors import NotPlannedError
from common.base.paths import command_here
from common.base.run_config import RunConfig
from common.checks.fake_steps import WHOLE, fake_step
from common.checks.folder_runs import folder_parser, run_of_folder
from common.checks.inputs import check_optimizer
from common.checks.tried_rows import batch_of_length, batch_of_run
from common.hardware.devices import GIB, MIB
from common.models.families import suited_to_model
from common.models.loading import any_shape_config, model_without_weights
from common.models.placement import place_stages
from common.models.trained_weights import language_part
from common.planning.job import BatchShape
from common.planning.plan_texts import outlined
from common.planning.plans import Plan, plan_run
from common.planning.shares import Share
from common.planning.terms import PARTS
from common.runtime.memory_tracker import Bytes, Timeline

REAL_STEP = "or take the real step with `{}`"  # of the folder in which a user stands when it is said
# what configs of encoder-decoders call the layers of their stacks: BART's and its kin, T5's and its kin
STACK_DEPTHS = (("encoder_layers", "decoder_layers"), ("num_layers", "num_decoder_layers"))


@dataclass(frozen=True)
class DryRun:
    """The memory of a step on one device, in bytes, extrapolated to all layers."""

    timeline: Timeline

    @property
    def peak_segment(self) -> str:
        """The segment in which most is alive."""
        return self._highest()[0]

    @property
    def peak(self) -> Bytes:
        """The parts alive at the peak."""
        return self._highest()[1]

    @property
    def peak_gib(self) -> float:
        """The peak of allocated memory, in GiB."""
        return sum(self.peak.values()) / GIB

    def phases(self) -> dict[str, tuple[str, Bytes]]:
        """Return the highest segment of each phase and its parts: loaded, forward, backward, optimizer step."""
        return {phase: self._highest(phase) for phase in ("load", "forward", "backward", "optimizer")}

    def _highest(self, phase: str = "") -> tuple[str, Bytes]:
        segments = [(segment, parts) for segment, parts in self.timeline.items() if segment.startswith(phase)]
        return max(segments, key=lambda segment: sum(segment[1].values()))


def dry_run(run: RunConfig, batch: BatchShape, as_on_gpu: bool = True) -> DryRun:
    """Return the training step of the fullest device, of those of `dry_runs`."""
    return max(dry_runs(run, batch, as_on_gpu), key=lambda device: device.peak_gib)


def dry_runs(run: RunConfig, batch: BatchShape, as_on_gpu: bool = True) -> list[DryRun]:
    """Return a training step of `run` on a batch of the given shape, on fake tensors, extrapolated to all layers.

    Of a run whose layers are divided there is one for each device; else one stands for all. With `as_on_gpu` operations
    are those that a GPU chooses, else those of a CPU.
    """
    check_can_be_faked(run)
    batch = batch.padded_to(run.pad_to_multiple_of).part_of(run.sp_size)
    if not divides_layers(run):
        return [dry_run_of_device(run, batch, as_on_gpu=as_on_gpu)]
    shares = place_stages(run, batch).plan.shares
    last_with = {share: number for number, share in enumerate(shares)}
    known = {share: dry_run_of_device(run, batch, share, number, as_on_gpu) for share, number in last_with.items()}
    return [known[share] for share in shares]


def check_can_be_faked(run: RunConfig) -> None:
    """Raise NotPlannedError for weights in 4 bits, and for what is divided among ranks."""
    if run.method.quantizes:
        why = f"technique is {run.technique}, quantization {run.quantization}, but fake tensors cannot be quantized"
        option = f"--technique {run.technique}"
    elif run.parallelism.divides_tensors:
        why = f"parallel is {run.parallel}, but fake tensors are not divided among ranks"
        option = f"--parallel {run.parallel}"
    else:
        return
    instead = REAL_STEP.format(command_here("preflight"))
    raise NotPlannedError(f"{why}: ask `{command_here('planner')} {option}`, {instead}.")


def divides_layers(run: RunConfig) -> bool:
    """Return whether devices hold different layers; on CPU one device holds all of a run with mp."""
    return run.parallelism.pipelines or (run.parallelism.layers_in_turn and run.device != "cpu")


def dry_run_of_device(
    run: RunConfig, batch: BatchShape, share: Share = WHOLE, number: int = 0, as_on_gpu: bool = True
) -> DryRun:
    """Return the training step of device `number`, which holds `share` of the model."""
    config = any_shape_config(run.model, run.model_revision)
    if run.precision == "fp16-mixed":  # bf16 takes the same bytes, and needs no gradient scaler on a CPU
        run = replace(run, precision="bf16" if run.method.has_plain_adapters else "bf16-mixed")
    if batch.classes:
        config.num_labels = batch.classes
    layers = sum(share.layers) or _depth(config.get_text_config())
    depths = small_depths((kinds_of_layers(run) or [[]] * layers)[:layers])
    timelines = [fake_step(run, with_depth(config, depth), batch, as_on_gpu, share, number) for depth in depths]
    return DryRun(extrapolated(*timelines, *depths, layers) if len(timelines) > 1 else timelines[0])


def kinds_of_layers(run: RunConfig) -> list[list[tuple[int, ...]]]:
    """Return the shapes of each layer's weights, of its layer in each stack where there are several."""
    model, shapes = model_without_weights(run), defaultdict(list)
    part = language_part(model)
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and name.startswith(part):
            shapes[name.rpartition(".")[2]] += [tuple(weight.shape) for weight in module.parameters()]
    return list(shapes.values())


def small_depths(kinds: list[list[tuple[int, ...]]]) -> tuple[int, ...]:
    """Return the two smallest depths from which all layers can be extrapolated, or one: all layers.

    Layers from the smaller depth on repeat in groups of the difference. It is more than one group: of unlike layers
    those in the middle may hold the most.
    """
    for more in range(3, len(kinds)):
        for few in range(more - 1, more // 2, -1):
            if (len(kinds) - few) % (more - few) == 0 and kinds[few : few - more] == kinds[more:]:
                return few, more
    return (len(kinds),)


def extrapolated(few: Timeline, more: Timeline, few_layers: int, more_layers: int, layers: int) -> Timeline:
    """Extrapolate from two depths to `layers` layers: each group of them adds the same to every part of a segment."""
    times = (layers - few_layers) / (more_layers - few_layers)
    return {
        segment: {part: few[segment][part] + times * (more[segment][part] - few[segment][part]) for part in PARTS}
        for segment in few
    }


def _depth(config: PretrainedConfig) -> int:
    depths = {getattr(config, name) for name in _depth_names(config)}
    if len(depths) != 1:
        raise NotPlannedError(
            f"The stacks of this {config.model_type} have {sorted(depths)} layers, but a dry run needs equal ones: ask "
            f"`{command_here('planner')}`, {REAL_STEP.format(command_here('preflight'))}."
        )
    return depths.pop()


def _depth_names(config: PretrainedConfig) -> tuple[str, ...]:
    if not config.is_encoder_decoder:
        return ("num_hidden_layers",)
    for names in STACK_DEPTHS:
        if all(hasattr(config, name) for name in names):
            return names
    raise NotPlannedError(
        f"The config of this {config.model_type} does not say how many layers its stacks have, as "
        f"{' or '.join(map(' and '.join, STACK_DEPTHS))}: take the real step with `{command_here('preflight')}`."
    )


def with_depth(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return the same architecture with `layers` layers (in each stack), and its vision tower as it is."""
    small = deepcopy(config)
    text = small.get_text_config()
    if shared := getattr(text, "num_kv_shared_layers", 0):  # the last ones read keys of those before
        text.num_kv_shared_layers = max(0, shared - text.num_hidden_layers + layers)
    for name in _depth_names(text):
        setattr(text, name, layers)
    if vars(text).get("layer_types"):  # of some models a property, which follows the depth
        text.layer_types = text.layer_types[:layers]
    return small


def report(run: RunConfig, batch: BatchShape, where_from: str) -> str:
    """Return the dry run's phases and parts, for a terminal; of a divided model for each device."""
    batch = batch.padded_to(run.pad_to_multiple_of)
    logits = f"logits of {batch.classes} classes" if batch.classes else f"logits at {batch.labelled} positions"
    summaries = f" with summaries of {batch.target_length}" if batch.target_length else ""
    pictures = f" with pictures in {batch.tiles} squares" if batch.tiles else ""
    shape = f"{batch.rows} rows of {batch.length} tokens{summaries}{pictures}, {logits} ({where_from})"
    micro_batches = f" ({run.schedule}, {run.micro_batches} micro-batches)" if run.parallelism.pipelines else ""
    checkpointed = "checkpointed, " if run.gradient_checkpointing else ""
    lines = [f"{run.technique} of {run.model}, {run.precision}, {checkpointed}{run.parallel}{micro_batches}: {shape}"]
    devices = dry_runs(run, batch, as_on_gpu=run.device != "cpu")
    try:
        plan = place_stages(run, batch).plan if divides_layers(run) else plan_run(run, batch)
        verdicts = [verdict(plan, number) for number in range(len(devices))]
        beside = [f"beside training, {plan.higher_phase}"] if plan.higher_phase else []
        beside += [f"projected: {plan.phase_times.said}"] if plan.phase_times else []
    except NotPlannedError as unknown:
        verdicts, beside = [f"no verdict: {unknown}"] * len(devices), []
    for number, device in enumerate(devices):
        if divides_layers(run):
            share = plan.shares[number]
            ends = ", embeddings" * share.has_embeddings + ", head" * share.has_head
            lines.append(f"device {number}: {sum(share.layers)} layers{ends}")
        lines += [*_report_of_device(device, run.device != "cpu"), verdicts[number]]
    return "\n".join([*lines, *beside])


def _report_of_device(device: DryRun, is_gpu: bool) -> list[str]:
    on_top = "a GPU's own context and gaps between blocks" if is_gpu else "the process's own memory and what it keeps"
    unit, size = ("GiB", GIB) if device.peak_gib >= 1 else ("MiB", MIB)
    rows = [
        [phase, segment.partition(": ")[2], *(f"{n / size:.3f}" for n in (*map(parts.get, PARTS), sum(parts.values())))]
        for phase, (segment, parts) in device.phases().items()
    ]
    peak = f"peak of allocated memory: {_sized(device.peak_gib)} per device, in {device.peak_segment}"
    return [outlined(rows, ["phase", "highest in", *PARTS, unit], range(2)), f"{peak}; {on_top} come on top"]


def _sized(gib: float) -> str:
    return f"{gib:.3f} GiB" if gib >= 1 else f"{2**10 * gib:.3f} MiB"


def verdict(plan: Plan, number: int) -> str:
    """Return what the closed form says of a training step on device `number`, and whether its GPU holds it."""
    memory, gpu = plan.devices[number], plan.cluster.gpus[number]
    fits = {"yes": "fits", "tight": "tight", "no": "does not fit"}[memory.verdict_on(gpu)]
    return (
        f"closed form: {_sized(memory.allocated_gib)}, with overhead {memory.peak_gib:.2f} GiB, safe "
        f"{memory.safe_gib:.2f} of {gpu.memory_gib:.1f} GiB on {gpu.name}: {fits}"
    )


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    parser = folder_parser("dry_run", __doc__)
    options, overrides = parser.parse_known_args()
    run = run_of_folder(options.run_folder, overrides, parser.options)
    check_can_be_faked(run)
    run = suited_to_model(run)
    check_optimizer(run)
    if options.seq_len is None:
        print(report(run, *batch_of_run(run)))
    else:
        print(report(run, batch_of_length(run, options.seq_len), "by --seq-len"))
