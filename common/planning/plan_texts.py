"""A plan in words: why it is where it is, the table for a terminal, and the terms of its memory and time."""

import math
from collections.abc import Container, Sequence

from tabulate import tabulate

from common.hardware.devices import Gpu, hours_text, time_text
from common.planning.architectures import StackKind, exchanged_keys
from common.planning.between_steps import hidden_bytes
from common.planning.phases import TRAINING, Phase
from common.planning.plans import Plan
from common.planning.shares import part_of_rank, sees, whole_model
from common.planning.terms import DeviceMemory, Kind
from common.planning.tower_activations import TowerActivations


def why(plan: Plan) -> str:
    """Return the reason for a plan, or against it."""
    job, n = plan.job, len(plan.devices)
    if not plan.trains:
        memory, gpu = plan.fullest
        help_ = f"--batch-size {plan.max_batch_size} would fit" if plan.max_batch_size else _what_would_help(plan)
        return (
            f"does not fit: {memory.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB on device {plan.tightest}, most of it "
            f"{memory.largest_parts}; {help_}"
        )
    if not plan.may_fit:
        return f"does not fit: {phase_that_is_too_large(plan)}"
    # a pipeline idles while it fills and empties; where layers are computed in turn, there is one micro-batch
    dividing = job.shard_ranks if job.parallelism.shards else n
    idle = (n - 1) / (job.micro_batches + n - 1)
    waits = plan.time.exposed_s / plan.time.total_s
    remedy = "" if job.parallelism.splits_matrices else ", which more rows per step hide"
    device, gpu, phase = plan.highest
    why_still_holds = job.sp_size == 1 or job.parallelism.shards
    template = job.parallelism.why if why_still_holds else "the model is replicated"
    reasons = [
        template.format(devices=dividing, micro_batches=job.micro_batches, idle=idle),
        f"{job.sp_size} devices share the tokens of each row, and in attention its heads" if job.sp_size > 1 else "",
        f"hybrid: {job.dp_replicate_size} such copies average their gradients" if job.dp_replicate_size > 1 else "",
        f"waits {waits:.0%} of the time for {plan.cluster.slowest_link.name}{remedy}" if waits > 0.1 else "",
        "gradient checkpointing, so that activations are computed twice" if job.gradient_checkpointing else "",
        "MLPs in tiles, each computed once more" if job.tiled_mlp else "",
        ""
        if plan.fits
        else f"tight, as {phase.name} is safe with {phase.memory.safe_gib:.1f} GiB, and device {device} has "
        f"{gpu.memory_gib:.1f}: let `python -m common.preflight` have the last word",
        f"{-plan.shortfall_gib:.1f} GiB to spare, up to {plan.max_batch_size} rows" if plan.fits else "",
    ]
    return "; ".join(filter(None, reasons))


def phase_that_is_too_large(plan: Plan) -> str:
    """Return the phase beside training that a device cannot hold, by how much, and what would fit."""
    device, gpu, phase = plan.highest_likely
    fewer = plan.safe_evaluation_rows()
    help_ = (
        f"--per_device_eval_batch_size {fewer} would fit"
        if fewer
        else f"a device with {math.ceil(phase.memory.peak_gib)} GiB would hold it, or a smaller --model"
    )
    return (
        f"training fits, but {phase.name} takes {phase.memory.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB on device "
        f"{device} ({phase.alive}), most of it {phase.memory.largest_parts}; {help_}"
    )


def _what_would_help(plan: Plan) -> str:
    job, parts = plan.job, plan.fullest[0].parts_gib
    passing = parts[Kind.ACTIVATIONS] + parts[Kind.LOGITS] > 0.5 * sum(parts.values())
    states = parts[Kind.OPTIMIZER] + parts[Kind.GRADIENTS] > parts[Kind.WEIGHTS]
    keeps_most = not job.gradient_checkpointing and parts[Kind.ACTIVATIONS] > parts[Kind.WEIGHTS]
    remedies = [
        "gradient checkpointing" if keeps_most else "",
        "shorter rows (--seq-len)" if passing else "",
        "adapters instead of all weights (--technique lora)" if not job.method.has_adapters and not passing else "",
        "a smaller --lora-rank" if job.method.has_adapters and states else "",
        "4-bit weights (--technique qlora)" if job.method.has_plain_adapters and not passing and not states else "",
        "sharding (--parallel fsdp)" if job.parallelism.replicates and not passing else "",
        "more or larger devices",
    ]
    return "not even one row would fit: try " + ", or ".join(filter(None, remedies))


def recommendation(plans: Sequence[Plan]) -> str:
    """Return what to do, in a sentence or two."""
    best = plans[0]
    sentence = f"{best.name}: {why(best)}."
    if not best.may_fit:
        return f"Nothing fits. Nearest is {sentence}"
    if not best.job.method.has_adapters and best.job.precision == "bf16" and not best.job.parallelism.uses_deepspeed:
        sentence += " In pure bf16 small updates round away: compare with --precision bf16-mixed."
    fastest = max((plan for plan in plans if plan.may_fit), key=lambda plan: plan.tokens_per_s)
    times = fastest.tokens_per_s / best.tokens_per_s
    if times > 1.1:
        sentence += f" Faster, at some cost in quality: {fastest.name}, {times:.1f} times as many tokens per second."
    return sentence[0].upper() + sentence[1:]


def table(plans: Sequence[Plan], rows_per_epoch: int, longest: bool = False) -> str:
    """Format the plans as a table for a terminal; `longest`: with their rows' length, and what takes most memory.

    Memory is that of a run's highest phase; where that is not training, a column has training's, too.
    """
    rows, differ = [], any(plan.higher_phase for plan in plans)
    for plan in plans:
        (_, gpu, phase), usd = plan.highest, plan.epoch_usd(rows_per_epoch)
        rows.append([
            plan.name.replace(plan.job.method.label, plan.job.method.short, 1),
            plan.verdict,
            f"{phase.memory.peak_gib:.1f} to {phase.memory.safe_gib:.1f} / {gpu.memory_gib:.1f}",
            *[f"{plan.training_peak_gib:.1f}"] * differ,
            plan.max_batch_size or "-",
            _seconds(plan.time.total_s),
            f"{plan.tokens_per_s:,.0f}",
            "-" if plan.tokens_per_s_best is None else f"{plan.tokens_per_s_best:,.0f}",
            *([f"{plan.job.batch.length:,}", phase.memory.largest_parts] if longest else
              [_seconds(plan.epoch_s(rows_per_epoch)), "-" if usd is None else f"{usd:,.2f}"]),
        ])  # fmt: skip
    headers = ("strategy", "fits", "likely to safe\n/ GPU, GiB", *["training\nlikely"] * differ, "largest\nbatch",
               "step", "tokens\nper s", "best\nper s",
               *(["tokens\nof a row", "GiB, most of it"] if longest else ["epoch", "epoch\nUSD"]))  # fmt: skip
    used: dict[str, dict[str, None]] = {}  # each technique has one precision
    for plan in plans:
        used.setdefault(plan.job.precision, {})[plan.job.method.short] = None
    precisions = "; ".join(f"{', '.join(techniques)} in {precision}" for precision, techniques in used.items())
    return f"{outlined(rows, headers, range(2))}\nprecision: {precisions}"


def outlined(rows: Sequence[Sequence[object]], headers: Sequence[str], texts: Container[int]) -> str:
    """Return a table for a terminal; the columns whose numbers are in `texts` are aligned on the left."""
    aligned = ["left" if column in texts else "right" for column in range(len(headers))]
    return tabulate(rows, headers, tablefmt="rounded_outline", colalign=aligned, disable_numparse=True)


def _seconds(seconds: float) -> str:
    return time_text(seconds) if seconds < 120 else hours_text(seconds / 3600)


def explanation(plan: Plan) -> str:
    """Unfold the fullest device's phases, the terms of training and of a higher phase, and a step's time."""
    device, gpu, highest = plan.highest
    training = next(phase for phase in plan.phases[device] if phase.name == TRAINING)
    higher = [] if highest is training else [f"{highest.name}, which takes most:", *_unfolded(highest, gpu, plan)]
    of_phases = [
        [phase.name, phase.alive, phase.memory.moment, *(f"{gib:.1f}" for gib in
         (phase.memory.allocated_gib, phase.memory.peak_gib, phase.memory.safe_gib))]
        for phase in plan.phases[device]
    ]  # fmt: skip
    headers = ("phase", "models in memory", "highest moment", "allocated\nGiB", "likely\nGiB", "safe\nGiB")
    on_host = [
        [phase, term.what, term.formula, f"{term.gib:.1f}"]
        for phase, terms in plan.host_moments.items()
        for term in terms
    ]
    on_host.append(["at most", "", "beside what programs take", f"{plan.host_gib:.1f}"])
    return "\n".join([
        f"{plan.name}: device {device} of {len(plan.devices)}, {gpu.name}",
        outlined(of_phases, headers, range(3)),
        "",
        "training: VRAM = weights + gradients + optimizer states + activations + logits + buffers + overhead",
        *_unfolded(training, gpu, plan),
        "",
        *higher,
        "each machine's own memory:",
        outlined(on_host, ("phase", "what", "formula", "GiB"), range(3)),
        "",
        "a step's time:",
        *(f"  {term}" for term in plan.time.terms),
        *([f"beside training: {plan.phase_times.said}"] if plan.phase_times else []),
    ])  # fmt: skip


def _unfolded(phase: Phase, gpu: Gpu, plan: Plan) -> list[str]:
    """Return a phase's terms, and what their letters stand for."""
    letters = _letters(plan) if phase.name == TRAINING else _letters_of_evaluation(plan)
    return [f"its highest moment: {phase.memory.moment}", _term_table(phase.memory, gpu), letters]


def _term_table(memory: DeviceMemory, gpu: Gpu) -> str:
    rows = []
    for part, gib in memory.parts_gib.items():
        terms = [term for term in memory.terms if term.part == part]
        rows += [[part if term is terms[0] else "", term.what, term.formula, f"{term.gib:.3f}"] for term in terms]
        if len(terms) > 1:
            rows.append(["", "", f"{part} together", f"{gib:.3f}"])
    rows.append(["likely", "", f"of {gpu.memory_gib:.2f} GiB", f"{memory.peak_gib:.3f}"])
    rows.append(["safe", "", "with its spread among published peaks", f"{memory.safe_gib:.3f}"])
    return outlined(rows, ("part", "what", "formula", "GiB"), range(3))


def _letters(plan: Plan) -> str:
    """Return what the letters of the formulas stand for in this plan."""
    architecture, job, batch = part_of_rank(plan.architecture, plan.job), plan.job, plan.job.own_batch
    rows, target = batch.sequences // job.micro_batches, batch.target_length or batch.length
    lengths = f"S = {batch.length} tokens, T = B S = {rows * batch.length:,}"
    if len(architecture.stacks) > 1:
        lengths = (
            f"encoder S = E = {batch.length} tokens, T = TE = B S = {rows * batch.length:,}, "
            f"decoder S = {target} tokens, T = B S = {rows * target:,}"
        )
    pictures = ""
    if sees(architecture, job, whole_model(architecture)):
        tower, encoder = TowerActivations(architecture.tower, job), architecture.tower.encoder
        pictures = (
            f"pixels = {tower.pixels:,}, N = {tower.patches:,} patches, tokens = {tower.tokens:,} of pictures, "
            f"Hv = {encoder.hidden:,}, Iv = {encoder.intermediate:,}, "
        )
    experts = f"E = {architecture.experts} experts, k = {architecture.chosen}, " * (architecture.experts > 0)
    return (
        f"B = {rows} rows, {lengths}, P = {rows * batch.labelled:,}, {pictures}{experts}"
        f"H = {architecture.hidden:,}, I = {architecture.intermediate:,}, Q = {architecture.query_size:,}, "
        f"K = {exchanged_keys(architecture, job.sp_size):,}, V = {architecture.vocab:,}, a = {job.arithmetic_bytes}, "
        f"x = {hidden_bytes(architecture, job)}, w = {job.weight_bytes} bytes"
    )


def _letters_of_evaluation(plan: Plan) -> str:
    """Return the same of the phases beside training."""
    architecture, shape = plan.architecture, plan.job.evaluation
    layers = sum(stack.layers for stack in architecture.stacks if stack.kind != StackKind.ENCODER)
    return (
        f"B = {shape.rows} rows, S = {shape.prompt_length} tokens to read (validated {shape.length}), "
        f"N = {shape.new_tokens} new ones, T = B S, L = {layers} layers, H = {architecture.hidden:,}, "
        f"I = {architecture.intermediate:,}, Q = {architecture.query_size:,}, "
        f"K = {architecture.key_size:,}, V = {architecture.vocab:,}, "
        f"a = {plan.job.whole_model_bytes} bytes"
    )
