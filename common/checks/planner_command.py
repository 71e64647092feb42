"""Plan a training: memory, time and cost of every technique and parallelism, before a GPU is rented.

    python -m common.planner --model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 4 --seq-len 1024
    python -m common.planner --model llama-3.1-8b --technique lora --parallel ddp --gpu a6000 --gpus 4 --explain
    python -m common.planner --model llama-3.1-70b --gpu h100 --gpus 512 --nodes 64 --json

Every figure is `projected`: memory from common/planning/memory_plan.py, time from common/planning/time_plan.py.
Exit code 0: it fits; 1: it does not; 2: the question is wrong.
"""

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError, NotPlannedError, begin_of
from common.base.parsing import SettingsParser
from common.base.run_config import LARGEST, RunConfig, names_in, not_meant_for
from common.base.settings import MOST_EVALUATED_AT_ONCE, setting
from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES, Task
from common.checks.run_command import last_lines, run_command
from common.hardware.devices import Gpu, cpu_device, find_gpu, gpu_of_device, gpus
from common.planning.architectures import Architecture, as_classifier, read_architecture, usual_tiles
from common.planning.gpu_overhead import CONTEXT_GIB, GAP_SHARE, SPREAD_SHARE
from common.planning.job import (
    OPTIMIZER_BYTES,
    WHY_NOT_QUANTIZED_FULL,
    BatchShape,
    EvaluationShape,
    Job,
    Precision,
    Quantization,
)
from common.planning.phase_times import ASSUMED_QUESTIONS, DISK_GB_PER_S
from common.planning.plans import (
    DEFAULT_ROWS_PER_EPOCH,
    SORTED_BY,
    Plan,
    as_json,
    explanation,
    make_plan,
    ranked_plans,
    recommendation,
    table,
    usual_precision,
)
from common.planning.published_rates import evidence
from common.planning.time_plan import (
    MEASURED,
    Cluster,
    calibration_from,
    fast_enough_from_gbit,
    parse_link,
)
from common.records.store import kept_records


def shared(name: str, default: object, doc: str = "", **for_argparse: object) -> object:
    """Return an option that is a run's setting: its names and its help, with the planner's own default."""
    of_run = {each.name: each.metadata for each in fields(RunConfig)}[name]
    return field(default=default, metadata={**of_run, "help": doc or of_run["help"], **for_argparse})


@dataclass(frozen=True)
class PlannerOptions:
    """The question to the planner; a run's settings have the names and the meaning that they have for a run."""

    model: str = setting("", "Name in assets/model_configs, Hub id, folder, or config.json.")
    model_revision: str = shared("model_revision", "")
    task: str | None = shared(
        "task", None, "Without it: by --classes, --target-len and --tiles; preferences takes pairs of answers."
    )
    technique: str | None = shared("technique", None, "Without it, all are ranked.")
    parallel: str | None = shared("parallel", None, "Without it, all that make sense are ranked.")
    gpu: str | None = setting(
        None, "Once for all GPUs, or once for each, in their order; without it, this machine's.", action="append"
    )
    gpus: int | None = setting(None, "Number of GPUs, over all nodes.", aliases=("--devices",))
    nodes: int = setting(1, "Machines.")
    gpu_memory_gib: float | None = setting(None, "Memory of a GPU that the catalogue lacks, in GiB.")
    gpu_tflops: float | None = setting(None, "Speed of such a GPU: dense TFLOPS in the precision of the run.")
    link: str | None = setting(None, "nvlink, pcie, or ethernet-GBITS: the slowest link between two GPUs.")
    per_device_train_batch_size: int = shared("per_device_train_batch_size", 1)
    max_length: int = setting(1024, "Tokens per row.", aliases=("--seq-len", "--seq_len"))
    max_target_length: int | None = setting(
        None,
        "With encoder-decoders: tokens per summary; without it, as many as per row.",
        aliases=("--target-len", "--target_len"),
    )
    tiles: int | None = setting(
        None,
        "With models that see: squares of pixels that a row's picture is cut into; without it, as many as the model's "
        "processor makes of a square picture.",
    )
    freeze_vision_tower: bool = shared("freeze_vision_tower", True)
    classes: int = setting(0, "Labels of a classifier; 0 = the model's own head.")
    lora_r: int = shared("lora_r", 8)
    target_modules: str | None = shared(
        "target_modules",
        None,
        "Linear layers that get adapters or, with full, are trained, such as q_proj,v_proj (of BERT query,value), or "
        "all-linear; without it: all-linear, with full every weight.",
    )
    lora_dropout: float = shared("lora_dropout", 0.0)
    precision: Precision | None = shared(
        "precision",
        None,
        "Without it: bf16 for adapters and bf16-mixed for full fine-tuning; fp16-mixed where the GPU lacks bf16.",
    )
    quantization: Quantization | None = setting(None, "Number format of qlora's frozen weights (nf4).")
    optim: str = shared("optim", "adamw_torch_fused", f"One of {', '.join(OPTIMIZER_BYTES)}.")
    attention: Literal["eager", "sdpa", "flash"] = shared(
        "attention", "sdpa", "Attention implementation; flash = the package flash-attn."
    )
    use_liger_kernel: bool = shared("use_liger_kernel", False, "Plan with Liger's fused kernels.")
    torch_compile: bool = shared("torch_compile", False, "Plan with layers compiled by torch.compile.")
    gradient_checkpointing: bool | None = shared(
        "gradient_checkpointing",
        None,
        "Without it and --no-gradient-checkpointing: where it does not fit otherwise.",
        nargs="?",
        const=True,
    )
    micro_batches: int | None = shared("micro_batches", None, "With --parallel pp; without it, as many as make sense.")
    dp_replicate_size: int | None = shared(
        "dp_replicate_size",
        None,
        "With --parallel fsdp: copies of the model, each sharded by equally many GPUs (hybrid sharding); without it, "
        "one copy is planned, and on several machines also one on each.",
    )
    offload: Literal["none", "cpu"] = shared("offload", "none", "Optimizer states wait in the host's memory.")
    rows_per_epoch: int = setting(DEFAULT_ROWS_PER_EPOCH, "Rows of an epoch.")
    usd_per_hour: float | None = setting(None, "Price of one GPU, instead of the catalogue's.")
    explain: bool = setting(False, "Unfold the first plan's memory into its terms.")
    json: bool = setting(False, "Print JSON.")

    def __post_init__(self) -> None:
        """Check what a number or a technique alone can tell.

        Raises:
            BadInputError: a number is too low, or an option means nothing for the technique.
        """
        for name in ("gpus", "nodes", "per_device_train_batch_size", "max_length", "max_target_length", "tiles",
                     "lora_r", "micro_batches", "dp_replicate_size", "rows_per_epoch", "gpu_memory_gib", "gpu_tflops",
                     "usd_per_hour"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value <= LARGEST:  # also of nan
                raise BadInputError(
                    f"{short_option(self, name)} is {begin_of(value, 40)}, but must be above 0 and at most {LARGEST:,}."
                )
        if self.classes < 0 or self.classes == 1:
            raise BadInputError(f"--classes is {self.classes}, but a classifier has at least 2: pass 2 or more, or 0.")
        if self.dp_replicate_size and self.parallel and not PARALLELISMS[self.parallel].uses_fsdp:
            raise BadInputError(f"--dp-replicate-size is for --parallel fsdp, not {self.parallel}: leave it out.")
        idle = not_meant_for(RunConfig(technique=self.technique)) if self.technique else {}
        for name in ("lora_r", "lora_dropout"):
            if name in idle and getattr(self, name) != getattr(type(self), name):
                raise BadInputError(f"{short_option(self, name)} is for {idle[name]}: leave it out.")


def short_option(options: PlannerOptions, name: str) -> str:
    """Return the shortest spelling of an option on the command line."""
    aliases = next(each for each in fields(options) if each.name == name).metadata["aliases"]
    return min((f"--{name}", *aliases), key=len).replace("_", "-")


def read_options(arguments: Sequence[str] | None = None) -> PlannerOptions:
    """Return the question that the command line asks.

    Raises:
        SystemExit: an option is unknown, or a value of the wrong kind.
        BadInputError: see `PlannerOptions`.
    """
    parser = SettingsParser((PlannerOptions,), prog="python -m common.planner", description=__doc__)
    options = PlannerOptions(**parser.settings(arguments))
    if not options.model:
        parser.error("the following arguments are required: --model")
    return options


def cluster_of(options: PlannerOptions) -> Cluster:
    """Return the GPUs that the command line names.

    Raises:
        BadInputError: a GPU is unknown, or their number does not fit their names.
    """
    by_hand = ["this GPU"] if options.gpu_memory_gib else []
    chosen = [_one_gpu(name, options) for name in options.gpu or by_hand] or _gpus_here()
    count = options.gpus or len(chosen)
    if len(chosen) not in (1, count):
        raise BadInputError(
            f"--gpus is {count}, but {len(chosen)} GPUs are named: name one for all, or each of them in order."
        )
    chosen = chosen * count if len(chosen) == 1 else chosen
    per_node = count // options.nodes
    if options.link == "nvlink" and chosen[0].nvlink_bridge and per_node > 2:
        raise BadInputError(f"An NVLink bridge joins two {chosen[0].name}, not {per_node}: pass --link pcie.")
    link = parse_link(options.link, chosen[0]) if options.link else None
    return Cluster(tuple(chosen), options.nodes, link, options.usd_per_hour)


def _one_gpu(name: str, options: PlannerOptions) -> Gpu:
    if options.gpu_memory_gib:
        if options.gpu_tflops is None:
            raise BadInputError(
                f"--gpu-memory-gib describes {name}, so pass its --gpu-tflops, too (dense, of its data sheet)."
            )
        rates = dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), options.gpu_tflops)
        return Gpu(name, options.gpu_memory_gib, 0, rates, 1000, 4, "by hand")
    if name.lower() == "cpu":
        return cpu_device()
    try:
        return find_gpu(name)
    except BadInputError as unknown:
        raise BadInputError(
            f"{unknown} Or describe it: --gpu {name!r} --gpu-memory-gib 24 --gpu-tflops 70 (dense, in your precision)."
        ) from None


def _gpus_here() -> list[Gpu]:
    names = gpus()[1]
    found = [gpu_of_device(name) for name in names]
    if not names or None in found:
        raise BadInputError(
            f"No --gpu is named, and of this machine's GPUs ({', '.join(names) or 'none'}) not all are known: pass "
            "--gpu a6000."
        )
    return found


def job_of(options: PlannerOptions) -> Job:
    """Return the job that the command line describes, as on one GPU; `ranked_plans` fills in technique and parallel."""
    method = TECHNIQUES.get(options.technique)
    if options.quantization and method and not method.has_adapters:
        raise BadInputError(WHY_NOT_QUANTIZED_FULL)
    if options.quantization and method and not method.quantizes:
        raise BadInputError("LoRA on quantized weights is QLoRA: pass --technique qlora.")
    return Job(
        technique="lora",
        parallel="single",
        batch=BatchShape(
            options.per_device_train_batch_size,
            options.max_length,
            labelled=1 if options.classes else options.max_target_length or options.max_length,
            classes=options.classes,
            target_length=options.max_target_length or 0,
            tiles=options.tiles or 0,
            task=task_of(options).name,
        ),
        precision=options.precision or "bf16",
        quantization=options.quantization or "nf4",
        optimizer=options.optim,
        attention=options.attention,
        kernels="fused" if options.use_liger_kernel else "compiled" if options.torch_compile else "plain",
        lora_rank=options.lora_r,
        target_modules=names_in(options.target_modules) if options.target_modules else (),
        lora_dropout=options.lora_dropout,
        offload=options.offload == "cpu",
        trains_tower=not options.freeze_vision_tower,
        cpu_operations=options.gpu == ["cpu"] and options.classes > 0,
    )


def task_of(options: PlannerOptions) -> Task:
    """Return the task that a question names, or else the one that has such rows.

    Raises:
        BadInputError: the options are of different tasks.
    """
    asked = bool(options.classes), bool(options.max_target_length and not options.classes), bool(options.tiles)
    found = [task for task in TASKS.values() if (task.classifies, task.summarizes, task.sees) == asked]
    named = [task for task in found if options.task in (None, task.name)]
    if not named:
        raise BadInputError(
            f"--task is {options.task}, but --classes is {options.classes}, --target-len {options.max_target_length} "
            f"and --tiles {options.tiles}: pass --classes with classification alone, --target-len with summarization, "
            "--tiles with visual_questions, and none of them with chat and preferences."
        )
    return named[0]


def evaluation_of(options: PlannerOptions, architecture: Architecture) -> EvaluationShape:
    """Return what the phases beside training work on: rows as long as those to train on, and a run's defaults."""
    summarizes = len(architecture.stacks) > 1
    target_length = options.max_target_length or options.max_length
    is_judged = task_of(options).is_judged and not summarizes
    return EvaluationShape(
        rows=MOST_EVALUATED_AT_ONCE,
        length=options.max_length,
        labelled=1 if options.classes else target_length,
        prompt_length=options.max_length,
        new_tokens=0 if options.classes else target_length if summarizes else RunConfig.max_new_tokens,
        beams=RunConfig.num_beams if summarizes else 1,
        judged=is_judged,
        has_independent_judge=is_judged,
    )


def _assumptions_of(plans: Sequence[Plan], options: PlannerOptions) -> list[str]:
    best = plans[0]
    job, link = best.job, best.cluster.slowest_link
    learnt = f"with one of {job.batch.classes} labels each" if job.batch.classes else "learnt as a whole"
    learnt = "with two answers each" if job.batch.goal.compares else learnt
    summaries = f" with summaries of {job.batch.target_length:,}" if job.batch.target_length else ""
    tower_tokens = best.architecture.tower.tokens if best.architecture.tower else 0
    pictures = f", of which a picture in {job.batch.tiles} squares takes {job.batch.tiles * tower_tokens:,}"
    speeds = zip(dict.fromkeys(best.cluster.gpus), best.speed_sources, strict=True)
    said = [
        f"rows of {job.batch.length:,} tokens{summaries}{pictures if job.batch.tiles else ''}, {learnt}; "
        f"{job.optimizer}, {job.attention} attention, "
        f"{job.kernels} kernels"
        + (f", LoRA rank {job.lora_rank}" if any(plan.job.method.has_adapters for plan in plans) else ""),
        *dict.fromkeys(f"speed of {source}" for plan in plans for source in plan.speed_sources),
        *(f"{gpu.name}: {evidence(gpu)}" for gpu, source in speeds if MEASURED not in source),
        f"overhead of a GPU: {CONTEXT_GIB} GiB context, {GAP_SHARE:.0%} of what comes and goes for gaps, blocks that "
        f"only some moments use; safe: {SPREAD_SHARE:.0%} of it more, which 19 in 20 published peaks did not need",
        "memory as PyTorch's own kernels take it, also where Liger's or compiled ones are faster; expandable segments; "
        "batches are copied from pinned memory while the GPU computes",
        f"an epoch is {options.rows_per_epoch:,} rows; loading reads each weight once per machine, at {DISK_GB_PER_S} "
        f"GB/s; the test has {ASSUMED_QUESTIONS} questions",
        f"validated, and answered before and after training: as many rows at once as need no more than training, at "
        f"most {MOST_EVALUATED_AT_ONCE} ({best.name}: {job.evaluation.rows} on each GPU)",
    ]
    if len(best.devices) > 1:
        yours = "; name yours with --link" if best.cluster.nodes > 1 and not options.link else ""
        said.append(f"between GPUs: {link.name}, of which {link.gb_per_s:.3g} GB/s are reached{yours}")
    if any(plan.job.parallelism.pipelines for plan in plans):
        said.append(
            "pp: 1F1B, so that a stage holds at most as many micro-batches as stages follow it, itself included; GPipe "
            "where there are fewer micro-batches than stages"
        )
    for name, plan in {plan.job.sharing: plan for plan in plans if plan.job.dp_replicate_size > 1}.items():
        copies, near = plan.job.dp_replicate_size, plan.cluster.link_among(plan.job.shard_ranks)
        said.append(
            f"{name}: hybrid sharding, {copies} copies of the model, each sharded by {plan.job.shard_ranks} GPUs and "
            f"gathered by {near.name}"
        )
    for gpu in dict.fromkeys(best.cluster.gpus):
        if options.usd_per_hour:
            said.append(f"{gpu.name}: {options.usd_per_hour} USD per hour, as given")
        elif gpu.usd_per_hour:
            said.append(f"{gpu.name}: {gpu.usd_per_hour} USD per hour, read {gpu.price_date} ({gpu.price_source})")
    return said


def techniques_asked(options: PlannerOptions) -> tuple[str, ...]:
    """Return the technique that is named, else all that suit task and parallelism; quantization needs qlora."""
    if options.technique:
        return (options.technique,)
    takes_4_bits = options.parallel is None or PARALLELISMS[options.parallel].takes_4_bits
    is_chat = not (options.classes or options.tiles or task_of(options).compares)
    if not (is_chat and takes_4_bits) and not options.quantization:
        return tuple(name for name, each in TECHNIQUES.items() if not each.quantizes)
    return tuple(TECHNIQUES)


def run_of(options: PlannerOptions, job: Job, cluster: Cluster, technique: str) -> RunConfig:
    """Return the run that a dry run is to take in the place of the closed form."""
    has_adapters, devices = TECHNIQUES[technique].has_adapters, len(cluster.gpus)
    lengths = {"max_length": job.batch.length}
    if job.batch.target_length:
        lengths["max_target_length"] = job.batch.target_length
    adapters = {"lora_r": job.lora_rank, "lora_dropout": job.lora_dropout} if has_adapters else {}
    return RunConfig(
        technique=technique,
        task=job.batch.task,
        parallel=options.parallel or ("ddp" if devices > 1 else "single"),
        devices=devices,
        model=options.model,
        model_revision=options.model_revision,
        weights="random",
        precision=options.precision or usual_precision(technique, cluster),
        optim=job.optimizer,
        attention=job.attention if job.attention != "flash" else "sdpa",
        gradient_checkpointing=bool(options.gradient_checkpointing),
        per_device_train_batch_size=job.batch.rows,
        target_modules=options.target_modules or ("all-linear" if has_adapters else "all"),
        **adapters,
        **lengths,
    )


def answer(options: PlannerOptions) -> int:
    """Print the answer; 0 if the recommended plan fits, else 1."""
    cluster, job = cluster_of(options), job_of(options)
    try:
        architecture = read_architecture(options.model, options.model_revision)
    except NotPlannedError as unknown:
        from common.checks.dry_run_planner import answer_by_dry_runs  # here: it imports torch

        faked = [name for name in job.batch.goal.techniques if not TECHNIQUES[name].quantizes]
        techniques = [options.technique] if options.technique else faked
        runs = [run_of(options, job, cluster, technique) for technique in techniques]
        gpu, checkpointing = cluster.gpus[0], options.gradient_checkpointing
        return answer_by_dry_runs(runs, job, gpu, checkpointing, str(unknown), options.json)
    if options.classes:
        architecture = as_classifier(architecture, options.classes)
    if architecture.tower:
        options = replace(options, tiles=options.tiles or usual_tiles(options.model, options.model_revision))
        job = job_of(options)
    job = replace(job, evaluation=evaluation_of(options, architecture))
    calibration = calibration_from(kept_records(), job.batch.task)
    plans = ranked_plans(
        architecture,
        job,
        cluster,
        techniques_asked(options),
        (options.parallel,) if options.parallel else None,
        options.gradient_checkpointing,
        calibration,
        options.precision,
        options.micro_batches,
        options.dp_replicate_size,
    )
    assumptions = _assumptions_of(plans, options)
    shared = next((plan for plan in plans if plan.job.parallelism.splits_rows), None)  # the best whose ranks share rows
    alone, figures_alone = one_machine_alone(shared, calibration) if shared else ("", {})

    def command_of(plan: Plan) -> str:
        return run_command(plan, options.model, options.model_revision)

    if options.json:
        run = None
        with suppress(BadInputError):
            run = command_of(plans[0]) if plans[0].may_fit else None
        said = as_json(options.model, plans, assumptions, options.rows_per_epoch)
        if alone:
            said["one_machine"] = figures_alone
        print(json.dumps(said | {"run": run}, indent=2))
        return 0 if plans[0].may_fit else 1
    machines = f" on {cluster.nodes} machines" if cluster.nodes > 1 else ""
    names = " + ".join(f"{cluster.gpus.count(gpu)} x {gpu.name}" for gpu in dict.fromkeys(cluster.gpus))
    size = f"{architecture.parameters / 1e9:.2f}B parameters"
    parts = [
        f"{options.model}: {size}, {names}{machines}; every figure is projected",
        f"{table(plans, options.rows_per_epoch)}\nsorted by {SORTED_BY}",
        recommendation(plans),
        explanation(plans[0]) if options.explain else "",
        alone,
        "\n".join(["assumed:", *(f"- {line}" for line in assumptions)]),
        "\n".join(last_lines(plans, options.rows_per_epoch, command_of)),
    ]
    print("\n\n".join(filter(None, parts)))
    return 0 if plans[0].may_fit else 1


def one_machine_alone(plan: Plan, calibration: dict[str, list[float]]) -> tuple[str, dict[str, object]]:
    """Return a sentence, and the same for JSON, on how one of a plan's several machines does alone.

    It works on its own rows with the same settings. Both are empty where the plan has one machine.
    """
    cluster, job = plan.cluster, plan.job
    if cluster.nodes == 1:
        return "", {}
    gpus = cluster.gpus[: cluster.gpus_per_machine]
    sharing = job.parallel if len(gpus) > 1 else "single"
    own = replace(job, parallel=sharing, devices=len(gpus), dp_replicate_size=1)
    alone = make_plan(plan.architecture, own, replace(cluster, gpus=gpus, nodes=1, link=None), calibration)
    most_s = plan.rows_per_step / (alone.rows_per_step / alone.time.total_s)
    gbit = fast_enough_from_gbit(plan.architecture, job, cluster, most_s, calibration)
    figures = {"fits": alone.may_fit, "tokens_per_s": alone.tokens_per_s, "more_pay_from_gbit_per_s": gbit}
    if not alone.may_fit:
        return f"{plan.name}: one machine alone cannot hold it", figures
    pays = "pay at no speed of Ethernet" if gbit is None else f"pay from {gbit:.3g} Gbit/s between them"
    said = (
        f"{plan.name}: {cluster.nodes} machines train {plan.tokens_per_s:,.0f} tokens per s over "
        f"{cluster.slowest_link.name}, one alone {alone.tokens_per_s:,.0f}: more machines {pays}"
    )
    return said, figures


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    sys.exit(answer(read_options()))
