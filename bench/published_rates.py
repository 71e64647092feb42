"""The training rates that others published (assets/published_rates.json), each as the planner would plan it.

The constants of `common.planning.step_speed` are fitted to them.
"""

import json
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import itemgetter
from statistics import mean
from typing import Any, Literal

from common.base.paths import REPOSITORY
from common.hardware.devices import CATALOGUE, Gpu
from common.planning.architectures import FAMILIES, Architecture
from common.planning.job import BatchShape, Job
from common.planning.published_rates import PublishedRate, published_step_s
from common.planning.shares import whole_model
from common.planning.step_speed import generation_of, peak_tflops, step_flops
from common.planning.time_plan import Cluster, Link
from common.reporting.rows import groups_of

PUBLISHED_RATES = REPOSITORY / "assets" / "published_rates.json"
LONGEST = 1_000_000  # positions: published rows may be as long as they like
# InfiniBand of a machine with eight GPUs, in one direction: eight lines of 200 or 400 Gbit/s, and NVLink's share of it
MACHINE_GB_PER_S = {"A100": 8 * 25 * 0.75, "Hopper": 8 * 50 * 0.75}


@dataclass(frozen=True)
class PlannedRate:
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
        """What ran where."""
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
        return self.job.batch.tokens / mean(
            published_step_s(self.architecture, job, self.cluster, shares) for job in self.jobs
        )

    @property
    def ratio(self) -> float:
        """Planned over published."""
        return self.planned / self.tokens_per_s

    def share_of_peak(self, counted: Literal["total", "useful"]) -> float:
        """Return the published operations per second over the GPU's dense peak; `counted` is one of `StepFlops`."""
        share = whole_model(self.architecture)
        flops = mean(getattr(step_flops(self.architecture, job, share), counted) for job in self.jobs)
        return self.tokens_per_s * (flops / self.job.batch.tokens) / (peak_tflops(self.gpu, self.job) * 1e12)

    @property
    def beside_planned(self) -> PublishedRate:
        """The same with the planner's figures, which are kept."""
        return PublishedRate(
            self.source,
            self.where,
            self.label,
            self.job.technique,
            self.gpu.name,
            generation_of(self.gpu).name,
            self.job.kernels,
            self.architecture.parameters,
            self.tokens_per_s,
            self.planned,
            self.share_of_peak("total"),
            self.share_of_peak("useful"),
        )


@cache
def _file() -> dict[str, Any]:
    return json.loads(PUBLISHED_RATES.read_text(encoding="utf-8"))


@cache
def planned_rates() -> tuple[PlannedRate, ...]:
    """Return all points of the file, in its order."""
    return tuple(_rate(dict(zip(_file()["columns"], point, strict=True))) for point in _file()["points"])


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


def _rate(point: dict[str, Any]) -> PlannedRate:
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
    return PlannedRate(
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
