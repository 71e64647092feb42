"""The training rates that others published (assets/published_rates.json), each as the planner would plan it.

They are what the constants of `common.planning.step_speed` are fitted to, and what its figures are compared with.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import mean
from typing import Any

from common.base.paths import REPOSITORY
from common.hardware.devices import CATALOGUE, Gpu
from common.planning.architectures import FAMILIES, Architecture
from common.planning.job import BatchShape, Job
from common.planning.shares import Share, whole_model
from common.planning.step_speed import generation_of, peak_tflops, step_flops
from common.planning.time_plan import Cluster, Link, Speed, step_time

PUBLISHED_RATES = REPOSITORY / "assets" / "published_rates.json"
LONGEST = 1_000_000  # positions: published rows may be as long as they like
# InfiniBand of a machine with eight GPUs, in one direction: eight lines of 200 or 400 Gbit/s, and NVLink's share of it
MACHINE_GB_PER_S = {"A100": 8 * 25 * 0.75, "Hopper": 8 * 50 * 0.75}
SIMILAR_SIZE = 4  # times as many parameters, or as few


@dataclass(frozen=True)
class PublishedRate:
    """One published rate, and the job that it was measured with.

    Attributes:
        source: Key of `sources` in the file.
        where: Repository and page: `owner/name:path`.
        stated: The source's words.
        jobs: One; with selective checkpointing two, with and without, whose mean is planned.
        tokens_per_s: Of one GPU.
    """

    source: str
    where: str
    stated: str
    architecture: Architecture
    jobs: tuple[Job, ...]
    cluster: Cluster
    tokens_per_s: float

    @property
    def job(self) -> Job:
        """The first of `jobs`."""
        return self.jobs[0]

    @property
    def gpu(self) -> Gpu:
        """All GPUs are alike."""
        return self.cluster.gpus[0]

    @property
    def label(self) -> str:
        """What ran where: `mistral-7b, LoRA, 2 x A100 80GB SXM (fsdp), 4 x 4,096, fused`."""
        job, count = self.job, len(self.cluster.gpus)
        checkpointed = ("", ", checkpointed", ", half checkpointed")[
            sum(each.gradient_checkpointing for each in self.jobs) + (len(self.jobs) > 1)
        ]
        sharing = f" ({job.parallel})" if count > 1 else ""
        return (
            f"{self.architecture.name}, {job.method.short}, {count} x {self.gpu.name}{sharing}, "
            f"{job.batch.rows} x {job.batch.length:,}{checkpointed}, {job.kernels}"
        )

    @cached_property
    def planned(self) -> float:
        """What the planner says: tokens per second of one GPU."""
        shares = [whole_model(self.architecture)] * self.job.devices
        return self.job.batch.tokens / mean(_step_s(self.architecture, job, self.cluster, shares) for job in self.jobs)

    @property
    def ratio(self) -> float:
        """Planned over published."""
        return self.planned / self.tokens_per_s

    @property
    def share_of_peak(self) -> float:
        """Published operations per second, the repeated ones of checkpointing included, over the GPU's dense peak."""
        share = whole_model(self.architecture)
        flops = mean(step_flops(self.architecture, job, share).total for job in self.jobs) / self.job.batch.tokens
        return self.tokens_per_s * flops / (peak_tflops(self.gpu, self.job) * 1e12)


def _step_s(architecture: Architecture, job: Job, cluster: Cluster, shares: Sequence[Share]) -> float:
    speeds = [Speed(None, "the model of a step's speed")] * len(cluster.gpus)
    return step_time(architecture, job, cluster, shares, speeds).total_s


@cache
def _file() -> dict[str, Any]:
    return json.loads(PUBLISHED_RATES.read_text(encoding="utf-8"))


@cache
def published_rates() -> tuple[PublishedRate, ...]:
    """Return all points of the file, in its order."""
    return tuple(_rate(dict(zip(_file()["columns"], point, strict=True))) for point in _file()["points"])


def excluded_rates() -> list[dict[str, Any]]:
    """Return what was found and not used: source, what it is of, tokens per second of one GPU, and the reason."""
    columns, reasons = _file()["excluded_columns"], _file()["reasons"]
    rows = [dict(zip(columns, row, strict=True)) for row in _file()["excluded"]]
    return [row | {"reason": reasons[row["reason"]]} for row in rows]


def source_name(key: str) -> str:
    """Return the repository of a source."""
    return _file()["sources"][key]["where"]


def _rate(point: dict[str, Any]) -> PublishedRate:
    source, gpu = _file()["sources"][point["source"]], _gpu(point["gpu"])
    path = source["pages"][point["page"]].partition(": ")[0]
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
    return PublishedRate(
        source=point["source"],
        where=f"{source['where']}:{path}",
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


@cache
def best_published(technique: str, generation: str, parameters: int) -> PublishedRate | None:
    """Return the published run that reaches the largest share of its GPU's peak; None where there is none.

    Of runs with the technique, on a GPU of the generation, of models with a quarter to four times the parameters.
    """
    alike = [
        rate
        for rate in published_rates()
        if rate.job.technique == technique
        and generation_of(rate.gpu).name == generation
        and parameters / SIMILAR_SIZE <= rate.architecture.parameters <= parameters * SIMILAR_SIZE
    ]
    return max(alike, key=lambda rate: rate.share_of_peak, default=None)


def best_tokens_per_s(
    architecture: Architecture, job: Job, cluster: Cluster, shares: Sequence[Share], tokens_per_s: float
) -> float | None:
    """Return the tokens per second of all GPUs with the efficiency of the best published run; None where none is known.

    The best run (`best_published`) has a kernel set, and is faster than the model says by some factor: the job is
    planned with that kernel set, and that factor faster. `tokens_per_s` is the job's own figure, and the least.
    """
    best = best_published(job.technique, generation_of(cluster.gpus[0]).name, architecture.parameters)
    if best is None or job.precision == "fp32":
        return None
    own_s, best_s = (
        _step_s(architecture, replace(job, kernels=kernels), cluster, shares)
        for kernels in (job.kernels, best.job.kernels)
    )
    gain = own_s / best_s / best.ratio
    return tokens_per_s * max(1.0, gain)


def evidence(gpu: Gpu) -> str:
    """Return which published rates the speed of a GPU rests on, in words."""
    generation = generation_of(gpu)
    own = sum(rate.gpu.name == gpu.name for rate in published_rates())
    alike = dict.fromkeys(rate.gpu.name for rate in published_rates() if generation_of(rate.gpu) == generation)
    if own:
        return f"{own} published rates are of it"
    taken = f"as of {', '.join(alike)}, which are alike" if alike else generation.assumed
    return f"no published rate is of it: its share of the peak is assumed, {taken}"
