"""The training rates that others published (assets/published_rates.json), each as the planner would plan it.

The constants of `common.planning.step_speed` are fitted to them.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from statistics import mean
from typing import Any

from common.base.paths import REPOSITORY
from common.hardware.devices import CATALOGUE, Gpu
from common.planning.architectures import FAMILIES, Architecture
from common.planning.job import BatchShape, Job
from common.planning.published_rates import published_step_s
from common.planning.shares import whole_model
from common.planning.step_speed import generation_of, peak_tflops, step_flops
from common.planning.time_plan import Cluster, Link
from common.reporting.rows import groups_of

PUBLISHED_RATES = REPOSITORY / "assets" / "published_rates.json"
LONGEST = 1_000_000  # positions: published rows may be as long as they like
# InfiniBand of a machine with eight GPUs, in one direction: eight lines of 200 or 400 Gbit/s, and NVLink's share of it
MACHINE_GB_PER_S = {"A100": 8 * 25 * 0.75, "Hopper": 8 * 50 * 0.75}


@dataclass(frozen=True)
class PublishedRun:
    """A published rate, and the job that it was measured with.

    Attributes:
        source: Key of `sources` in the file.
        where: `owner/name:path` on GitHub.
        stated: The source's words.
        jobs: One; with selective checkpointing two, with and without, whose mean is planned.
        cluster: All GPUs are alike.
        tokens_per_s: Of one GPU.
    """

    source: str
    where: str
    stated: str
    architecture: Architecture
    jobs: tuple[Job, ...]
    cluster: Cluster
    tokens_per_s: float


def beside_planned(run: PublishedRun) -> dict[str, Any]:
    """Return the run's rate with what the planner says of it."""
    job, gpu, count, whole = run.jobs[0], run.cluster.gpus[0], len(run.cluster.gpus), whole_model(run.architecture)
    checkpointed = "half checkpointed" if len(run.jobs) > 1 else "checkpointed" if job.gradient_checkpointing else ""
    sharing = f" ({job.parallel})" if count > 1 else ""
    what = (run.architecture.name, job.method.short, f"{count} x {gpu.name}{sharing}")
    how = (f"{job.batch.rows} x {job.batch.length:,}", checkpointed, job.kernels)
    flops = [step_flops(run.architecture, each, whole) for each in run.jobs]
    total, useful = (
        mean(getattr(each, counted) for each in flops) / job.batch.tokens for counted in ("total", "useful")
    )
    peak = peak_tflops(gpu, job) * 1e12
    step_s = mean(published_step_s(run.architecture, each, run.cluster, [whole] * job.devices) for each in run.jobs)
    planned = job.batch.tokens / step_s
    return {
        "source": run.source,
        "repository": run.where.partition(":")[0],
        "page": run.where.rpartition("/")[2],
        "label": ", ".join(filter(None, (*what, *how))),
        "technique": job.technique,
        "gpu": gpu.name,
        "generation": generation_of(gpu).name,
        "kernels": job.kernels,
        "parameters": run.architecture.parameters,
        "tokens_per_s": run.tokens_per_s,
        "planned": planned,
        "ratio": planned / run.tokens_per_s,
        "share_of_peak": run.tokens_per_s * total / peak,
        "mfu": run.tokens_per_s * useful / peak,
    }


@cache
def _file() -> dict[str, Any]:
    return json.loads(PUBLISHED_RATES.read_text(encoding="utf-8"))


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Return all points of the file, in its order."""
    return tuple(_run(dict(zip(_file()["columns"], point, strict=True))) for point in _file()["points"])


def rates_not_used() -> list[dict[str, Any]]:
    """Return why rates were not used, of how many points of which repositories; the reason with most first."""
    file = _file()
    excluded = [dict(zip(file["excluded_columns"], row, strict=True)) for row in file["excluded"]]
    by_reason = groups_of(excluded, itemgetter("reason"))
    return [
        {
            "reason": file["reasons"][reason],
            "points": len(rates),
            "sources": list(dict.fromkeys(file["sources"][rate["source"]]["where"] for rate in rates)),
        }
        for reason, rates in sorted(by_reason.items(), key=lambda named: -len(named[1]))
    ]


def _run(point: dict[str, Any]) -> PublishedRun:
    source, gpu = _file()["sources"][point["source"]], _gpu(point["gpu"])
    length, nodes = round(point["length"]), point["nodes"]
    network = MACHINE_GB_PER_S.get(generation_of(gpu).name)
    link = Link("InfiniBand", network) if nodes > 1 and network else None
    job = Job(
        technique=point["technique"],
        parallel=point["parallel"],
        batch=BatchShape(point["rows"], length, 1 if point["labelled"] == "one" else length),
        devices=point["gpus"],
        precision=point["precision"],
        optimizer=point["optimizer"],
        attention=point["attention"],
        kernels=point["kernels"],
        gradient_checkpointing=point["checkpointed"] == 1,
        lora_rank=point["lora_rank"] or Job.lora_rank,
        target_modules=() if point["targets"] in ("", "all-linear") else tuple(point["targets"].split(",")),
        accumulation_steps=point["accumulation"],
    )
    also = (replace(job, gradient_checkpointing=True),) if 0 < point["checkpointed"] < 1 else ()
    return PublishedRun(
        source=point["source"],
        where=f"{source['where']}:{source['pages'][point['page']].partition(': ')[0]}",
        stated=point["stated"],
        architecture=_architecture(point["shape"]),
        jobs=(job, *also),
        cluster=Cluster((gpu,) * point["gpus"], nodes, link),
        tokens_per_s=point["tokens_per_s"],
    )


@cache
def _gpu(name: str) -> Gpu:
    """Return a GPU of the catalogue, or one of the file, which is like one of the catalogue but for some numbers."""
    known = {gpu.name: gpu for gpu in CATALOGUE}
    if name in known:
        return known[name]
    facts = dict(_file()["further_gpus"][name])
    like = known[facts.pop("like")]
    if tensor := facts.pop("bf16_tflops", None):
        facts["tflops_dense"] = {**like.tflops_dense, "bf16": tensor, "fp16": tensor}
    return replace(like, name=name, **facts)


@cache
def _architecture(name: str) -> Architecture:
    """Return the architecture of a shape of the file."""
    kind, hidden, layers, heads, kv_heads, intermediate, vocab = _file()["shapes"][name]
    config = {
        "model_type": "llama" if kind == "llama" else "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": LONGEST,
        "type_vocab_size": 2,
        "hidden_dropout_prob": 0.1 if kind == "bert" else 0.0,
    }
    architecture = FAMILIES[config["model_type"]].read(name, config)
    if kind != "gpt":
        return architecture
    # a decoder of BERT's operations: layer norms, and an MLP without a gate
    (stack,) = architecture.stacks
    width = kv_heads * hidden // heads
    linears = tuple(
        replace(linear, outputs=width) if linear.name in ("key", "value") else linear for linear in stack.linears
    )
    return replace(architecture, kv_heads=kv_heads, stacks=(replace(stack, kind="decoder", linears=linears),))
