"""What GPU training to do? Memory, time and cost of every way to share the work, before a GPU is rented.

    python -m common.planner --model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 4 --seq-len 1024
    python -m common.planner --model llama-3.1-8b --technique lora --parallel ddp --gpu a6000 --gpus 4 --explain
    python -m common.planner --model llama-3.1-70b --gpu h100 --gpus 512 --nodes 64 --json

Every figure is `projected`: memory from common/planning/memory_plan.py, time from
common/planning/time_plan.py. Exit code 0: it fits;
1: it does not; 2: the question is wrong.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from common.base.command_line import OneSentenceParser
from common.base.errors import BadInputError
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.hardware.devices import Gpu, cpu_device, find_gpu, gpu_of_device, gpus
from common.planning.architectures import UnknownArchitectureError, read_architecture
from common.planning.gpu_overhead import CONTEXT_GIB, GAP_SHARE
from common.planning.job import OPTIMIZER_BYTES, WHY_NOT_QUANTIZED_FULL, BatchShape, Job, Precision, Quantization
from common.planning.plans import (
    DEFAULT_ROWS_PER_EPOCH,
    Plan,
    as_json,
    explanation,
    make_plan,
    ranked_plans,
    recommendation,
    table,
    with_head_for,
)
from common.planning.time_plan import (
    Cluster,
    break_even_gbit,
    calibration_from,
    parse_link,
)
from common.records.store import kept_records


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = OneSentenceParser(
        prog="python -m common.planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    made.add_argument("--model", required=True, help="name in assets/model_configs, Hub id, folder, or config.json")
    made.add_argument("--technique", choices=TECHNIQUES, help="without it, all are ranked")
    made.add_argument("--parallel", choices=PARALLELISMS, help="without it, all that make sense are ranked")
    made.add_argument("--gpu", action="append", default=[], help="once for all GPUs, or once for each, in their order; "
                      "without it, this machine's")  # fmt: skip
    made.add_argument("--gpus", type=int, help="how many there are, over all nodes")
    made.add_argument("--nodes", type=int, default=1, help="machines")
    made.add_argument("--gpu-memory-gib", type=float, help="of a GPU that the catalogue lacks")
    made.add_argument("--gpu-tflops", type=float, help="of such a GPU: dense, in the precision of the run")
    made.add_argument("--link", help="nvlink, pcie, or ethernet-GBITS: the slowest link between two GPUs")
    made.add_argument("--batch-size", type=int, default=1, help="rows per data-parallel rank and step (1)")
    made.add_argument("--seq-len", type=int, default=1024, help="tokens per row (1024)")
    made.add_argument("--target-len", type=int, help="with encoder-decoders: tokens per summary; without it, as many "
                      "as per row")  # fmt: skip
    made.add_argument("--classes", type=int, default=0, help="labels of a classifier; 0 = the model's own head")
    made.add_argument("--lora-rank", type=int, default=8)
    made.add_argument("--target-modules", help="linear layers that get adapters or, with full, are trained: "
                      "q_proj,v_proj (of BERT and RoBERTa query,value) or all-linear; without it: all-linear, with "
                      "full every weight")  # fmt: skip
    made.add_argument("--lora-dropout", type=float, default=0.0)
    made.add_argument("--precision", choices=get_args(Precision), help="without it: bf16 for adapters and bf16-mixed "
                      "for full fine-tuning; fp16-mixed where the GPU lacks bf16")  # fmt: skip
    made.add_argument("--quantization", choices=get_args(Quantization), help="of qlora's weights (nf4)")
    made.add_argument("--optimizer", default="adamw_torch_fused", help=f"one of {', '.join(OPTIMIZER_BYTES)}")
    made.add_argument("--attention", choices=("eager", "sdpa", "flash"), default="sdpa")
    made.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction,
                      help="without it: where it does not fit otherwise")  # fmt: skip
    made.add_argument("--micro-batches", type=int, help="with --parallel pp; without it, as many as make sense")
    made.add_argument("--offload", action="store_true", help="optimizer states wait in the host's memory")
    made.add_argument("--rows-per-epoch", type=int, default=DEFAULT_ROWS_PER_EPOCH)
    made.add_argument("--usd-per-hour", type=float, help="of one GPU, instead of the catalogue's price")
    made.add_argument("--against-nodes", type=int, help="compare the bill with the same GPUs on so many machines")
    made.add_argument("--explain", action="store_true", help="unfold the first plan's memory into its terms")
    made.add_argument("--json", action="store_true")
    return made


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The GPUs that the command line means.

    Raises:
        BadInputError: a GPU is unknown, or their number does not fit their names.
    """
    for name in ("gpus", "nodes", "batch_size", "seq_len", "target_len", "lora_rank", "micro_batches", "rows_per_epoch",
                 "gpu_memory_gib", "gpu_tflops", "usd_per_hour", "against_nodes"):  # fmt: skip
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise BadInputError(f"--{name.replace('_', '-')} is {value:g}, but must be above 0.")
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


def _one_gpu(name: str, options: argparse.Namespace) -> Gpu:
    if options.gpu_memory_gib:
        tflops = options.gpu_tflops
        if tflops is None:
            raise BadInputError(
                f"--gpu-memory-gib describes {name}, so pass its --gpu-tflops, too (dense, of its data sheet)."
            )
        rates = dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), tflops)
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
        seen = ", ".join(names) or "none"
        raise BadInputError(
            f"No --gpu is named, and of this machine's GPUs ({seen}) not all are known: pass --gpu a6000."
        )
    return [gpu for gpu in found if gpu is not None]


def job_of(options: argparse.Namespace) -> Job:
    """The job that the command line means, as one GPU would do it; `ranked_plans` fills in technique and parallel."""
    method = TECHNIQUES.get(options.technique)
    if options.quantization and method and not method.has_adapters:
        raise BadInputError(WHY_NOT_QUANTIZED_FULL)
    if options.quantization and method and not method.quantizes:
        raise BadInputError("LoRA on quantized weights is QLoRA: pass --technique qlora.")
    if options.classes < 0 or options.classes == 1:
        raise BadInputError(f"--classes is {options.classes}, but a classifier has at least 2: pass 2 or more, or 0.")
    labelled = 1 if options.classes else options.target_len or options.seq_len
    shape = BatchShape(
        options.batch_size, options.seq_len, labelled, classes=options.classes, target_length=options.target_len or 0
    )
    return Job(
        technique="lora",
        parallel="single",
        batch=shape,
        precision=options.precision or "bf16",
        quantization=options.quantization or "nf4",
        optimizer=options.optimizer,
        attention=options.attention,
        lora_rank=options.lora_rank,
        target_modules=tuple(options.target_modules.split(",")) if options.target_modules else (),
        lora_dropout=options.lora_dropout,
        offload=options.offload,
        cpu_operations=options.gpu == ["cpu"] and options.classes > 0,
    )


def assumptions_of(plans: Sequence[Plan], options: argparse.Namespace) -> list[str]:
    """What the answer rests on."""
    best = plans[0]
    job, link = best.job, best.cluster.slowest_link
    learnt = f"with one of {job.batch.classes} labels each" if job.batch.classes else "learnt as a whole"
    summaries = f" with summaries of {job.batch.target_length:,}" if job.batch.target_length else ""
    said = [
        f"rows of {job.batch.length:,} tokens{summaries}, {learnt}; {job.optimizer}, {job.attention} attention"
        + (f", LoRA rank {job.lora_rank}" if any(plan.job.method.has_adapters for plan in plans) else ""),
        *dict.fromkeys(f"speed of {source}" for plan in plans for source in plan.speed_sources),
        f"overhead of a GPU: {CONTEXT_GIB} GiB context, {GAP_SHARE:.0%} of what comes and goes for gaps",
        f"an epoch is {options.rows_per_epoch:,} rows",
    ]
    if len(best.devices) > 1:
        yours = "; name yours with --link" if best.cluster.nodes > 1 and not options.link else ""
        said.append(f"between GPUs: {link.name}, of which {link.gb_per_s:.3g} GB/s are reached{yours}")
    if any(plan.job.parallelism.pipelines for plan in plans):
        said.append(
            "pp: 1F1B, so that a stage holds at most as many micro-batches as stages follow it, itself included"
        )
    for gpu in dict.fromkeys(best.cluster.gpus):
        if options.usd_per_hour:
            said.append(f"{gpu.name}: {options.usd_per_hour} USD per hour, as given")
        elif gpu.usd_per_hour:
            said.append(f"{gpu.name}: {gpu.usd_per_hour} USD per hour, read {gpu.price_date} ({gpu.price_source})")
    return said


def techniques_asked(options: argparse.Namespace) -> tuple[str, ...]:
    """The one that is named, else all that go with the task and the way to share work; quantization needs qlora."""
    if options.technique:
        return (options.technique,)
    takes_4_bits = options.parallel is None or PARALLELISMS[options.parallel].takes_4_bits
    if (options.classes or not takes_4_bits) and not options.quantization:
        return tuple(name for name, each in TECHNIQUES.items() if not each.quantizes)
    return tuple(TECHNIQUES)


def answer(options: argparse.Namespace) -> int:
    """Print the answer; 0 if the recommended plan fits, else 1."""
    cluster = cluster_of(options)
    job = job_of(options)
    techniques = techniques_asked(options)
    try:
        architecture = with_head_for(read_architecture(options.model), options.classes)
    except UnknownArchitectureError as unknown:
        if options.classes:
            raise
        from common.checks.dry_run import answer_planner  # here: it imports torch

        return answer_planner(options, job, cluster, str(unknown))
    calibration = calibration_from(kept_records(), job.batch.task)
    plans = ranked_plans(
        architecture,
        job,
        cluster,
        techniques,
        (options.parallel,) if options.parallel else None,
        options.gradient_checkpointing,
        calibration,
        options.precision,
        options.micro_batches,
    )
    assumptions = assumptions_of(plans, options)
    compared = comparison(plans[0], options.against_nodes, calibration) if options.against_nodes else ""
    if options.json:
        print(json.dumps(as_json(options.model, plans, assumptions, options.rows_per_epoch), indent=2))
        return 0 if plans[0].fits else 1
    machines = f" on {cluster.nodes} machines" if cluster.nodes > 1 else ""
    names = " + ".join(f"{cluster.gpus.count(gpu)} x {gpu.name}" for gpu in dict.fromkeys(cluster.gpus))
    size = f"{architecture.parameters / 1e9:.2f}B parameters"
    print(f"{options.model}: {size}, {names}{machines}; every figure is projected\n")
    print(table(plans, options.rows_per_epoch))
    print(f"\n{recommendation(plans)}")
    if options.explain:
        print(f"\n{explanation(plans[0])}")
    if compared:
        print(f"\n{compared}")
    print("\nassumed:\n" + "\n".join(f"- {line}" for line in assumptions))
    return 0 if plans[0].fits else 1


def comparison(plan: Plan, nodes: int, calibration: dict[str, list[float]]) -> str:
    """The same GPUs on several machines: time, bill, and the network from which on they bill no more.

    Raises:
        BadInputError: the plan's way of sharing is not a data-parallel one.
    """
    job = plan.job
    if not job.parallelism.splits_rows:
        raise BadInputError("--against-nodes compares data-parallel plans: pass --parallel ddp or fsdp.")
    spread = replace(plan.cluster, nodes=nodes, link=None)
    other = make_plan(plan.architecture, job, spread, calibration)
    gbit = break_even_gbit(plan.architecture, job, plan.cluster, spread, calibration)
    slower = other.time.total_s / plan.time.total_s
    network = "no network is fast enough" if gbit is None else f"{gbit:.3g} Gbit/s between them would do"
    return (
        f"on {nodes} machines over {other.cluster.slowest_link.name} a step takes {slower:.2f} times as long, and "
        f"at the same price per GPU bills as much more; to bill no more, {network}"
    )


def main() -> None:
    """`python -m common.planner`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    options = parser().parse_args()
    try:
        sys.exit(answer(options))
    except BadInputError as mistake:
        parser().exit(2, f"error: {mistake}\n")
