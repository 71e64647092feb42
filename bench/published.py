"""Memory and rates that others published, beside what the planner says of the same runs.

    python -m bench.published

writes assets/published_planned.json, which reports and the planner read: anew whenever the planner's figures change.

assets/published_memory.json and assets/published_rates.json have the runs (assets/README.md says where they are from).
Memory is in GiB, in one or several kinds: allocated by PyTorch, reserved by its allocator, or shown by `nvidia-smi`.
The constants of `common.planning.step_speed` are fitted to the rates.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean, mean
from typing import Any, Literal

from bench.other_loops import OtherJob, OtherSums
from common.base.paths import REPOSITORY
from common.hardware.devices import CATALOGUE, Gpu, find_gpu
from common.planning.architectures import FAMILIES, Architecture, StackKind
from common.planning.gpu_overhead import CONTEXT, RANKS, SPREAD_SHARE, with_overhead
from common.planning.job import BatchShape, Job
from common.planning.model_configs import LARGEST_SIZE
from common.planning.plans import LONGEST_ROW, TOKENS_STEP
from common.planning.published_rates import PLANNED_PATH, published_step_s
from common.planning.searches import largest
from common.planning.shares import whole_model
from common.planning.step_speed import generation_of, peak_tflops, step_flops
from common.planning.terms import DeviceMemory
from common.planning.time_plan import Cluster, Link
from common.reporting.rows import groups_of

MEMORY_PATH = REPOSITORY / "assets" / "published_memory.json"
RATES_PATH = REPOSITORY / "assets" / "published_rates.json"
LONGEST = 1_000_000  # positions: published rows may be as long as they like
# InfiniBand of a machine with eight GPUs, in one direction: eight lines of 200 or 400 Gbit/s, and NVLink's share of it
MACHINE_GB_PER_S = {"A100": 8 * 25 * 0.75, "Hopper": 8 * 50 * 0.75}
CALIBRATION = "ibm"  # the source that the constants of `gpu_overhead` are fitted to
# as `gpu_overhead.SPREAD_SHARE`, of 103 figures of losses whose logits are there all at once, in blocks that hardly
# anything else fills
WHOLE_LOGITS_SPREAD_SHARE = 0.35

Kind = Literal["allocated", "reserved", "nvidia_smi"]
KINDS: tuple[Kind, ...] = ("allocated", "reserved", "nvidia_smi")
LIKELY: tuple[Kind, ...] = ("reserved", "nvidia_smi")  # what users see


def content() -> dict[str, list[Any]]:
    """Return the file's content: rows of tables."""
    return {
        "memory": errors_by_source(),
        "verdicts": [
            {"runs": "all sources", **verdicts_on(points_on_answers())},
            {"runs": "held out", **verdicts_on(held_out_points())},
        ],
        "longest_rows": published_longest_rows(),
        "longest_rows_not_planned": [
            {"reason": each["reason"], "points": each["points"]}
            for each in _file(MEMORY_PATH)["longest_rows"]["excluded"]
        ],
        "memory_not_planned": [{"reason": each["reason"], "points": each["points"]} for each in excluded()],
        "rates_not_used": rates_not_used(),
        "rates": [beside_planned(run) for run in published_runs()],
    }


def main() -> None:
    """Write the file, with one row a line."""
    parts = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in content().items()]
    PLANNED_PATH.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


@cache
def _file(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


# -- memory


@dataclass(frozen=True)
class Point:
    """A run whose memory was published.

    Attributes:
        source: By its name in `sources()`.
        at: Where in the source, or as it is stated there.
        figures: GiB by kind; none where the run ran out of memory.
    """

    source: str
    at: str
    architecture: Architecture
    job: OtherJob
    gpu: Gpu
    figures: dict[Kind, float]

    @property
    def ran_out(self) -> bool:
        """Whether the run ran out of its GPU's memory."""
        return not self.figures

    @cached_property
    def planned(self) -> DeviceMemory:
        """The plan of one device."""
        memory = OtherSums(self.architecture, self.job, whole_model(self.architecture)).highest()
        spread_share = WHOLE_LOGITS_SPREAD_SHARE if self.job.has_all_logits else SPREAD_SHARE
        return with_overhead(self.job, self.gpu, memory, spread_share)

    def planned_gib(self, kind: Kind) -> float:
        """Return what a kind of figure is likely to be, in GiB."""
        if kind == "allocated":
            return self.planned.allocated_gib
        outside = (CONTEXT, RANKS) if kind == "reserved" else ()  # `nvidia-smi` shows it beside what is reserved
        return self.planned.peak_gib - sum(term.gib for term in self.planned.terms if term.what in outside)

    def error(self, kind: Kind) -> float:
        """Return planned over published memory, less one: above zero too much was planned."""
        return self.planned_gib(kind) / self.figures[kind] - 1

    def is_safe(self, kind: Kind) -> bool:
        """Return whether the published figure, of what was reserved or shown, is at most the safe one."""
        return self.figures[kind] <= self.planned_gib(kind) + self.planned.safe_gib - self.planned.peak_gib

    @property
    def fits(self) -> bool:
        """Whether the plan says that the run fits: by its safe figure."""
        return self.planned.safe_gib <= self.gpu.memory_gib


def sources() -> dict[str, dict[str, Any]]:
    """Return who published points, by name: title, place, and whether no constant of the plan is fitted to it."""
    return _file(MEMORY_PATH)["sources"]


@cache
def points() -> tuple[Point, ...]:
    """Return all points that can be planned, those of runs that ran out of memory included."""
    architectures = {model: architecture_of(model, shape) for model, shape in _file(MEMORY_PATH)["models"].items()}
    return tuple(_point(row, architectures[row["model"]]) for row in _file(MEMORY_PATH)["points"])


def excluded() -> list[dict[str, Any]]:
    """Return the published points that are not planned: reason, number of points, and two examples of each."""
    return _file(MEMORY_PATH)["excluded"]


def architecture_of(model: str, shape: dict[str, Any]) -> Architecture:
    """Return a model's architecture, from its shape as published with the points."""
    # how long its rows may be was not published, and takes no memory
    config = {**shape, "max_position_embeddings": LARGEST_SIZE}
    return FAMILIES[shape["model_type"]].read(model.rpartition("/")[2], config)


def _point(row: dict[str, Any], architecture: Architecture) -> Point:
    figures: dict[Kind, float] = {kind: row[f"{kind}_gib"] for kind in KINDS if f"{kind}_gib" in row}
    job = OtherJob(
        technique=row["technique"],
        parallel=row["parallel"],
        batch=BatchShape(
            row["rows"], row["length"], row["length"], padded=row.get("padded", False), task=row.get("task", "chat")
        ),
        devices=row["devices"],
        precision=row["precision"],
        quantization=row.get("quantization", "nf4"),
        optimizer=row.get("optimizer", "adamw_torch"),
        attention=row["attention"],
        gradient_checkpointing=row["gradient_checkpointing"],
        lora_rank=row.get("lora_rank", 8),
        target_modules=tuple(row.get("target_modules", ())),
        lora_dropout=row.get("lora_dropout", 0.0),
        offload=row.get("offload", False),
        sp_size=row.get("sp_size", 1),
        **row["loop"],
    )
    return Point(row["source"], row["at"], architecture, job, find_gpu(row["gpu"]), figures)


# -- the longest rows that others trained on


def published_longest_rows() -> list[dict[str, Any]]:
    """Return the longest rows that others ran, each with the longest that is planned to fit: likely, and safely.

    `error`: the likely one over the published one, less one: above zero rows are planned too long.
    """
    rows = []
    for row in _file(MEMORY_PATH)["longest_rows"]["points"]:
        point = _point(row, architecture_of(row["model"], _file(MEMORY_PATH)["models"][row["model"]]))
        likely, safe = (
            TOKENS_STEP * largest(partial(_holds, point, measure), LONGEST_ROW // TOKENS_STEP, 100)
            for measure in ("peak_gib", "safe_gib")
        )
        sharing = f", {point.job.sp_size} share a row" if point.job.sp_size > 1 else ""
        loss = "all logits at once" if point.job.has_all_logits else "fused loss"
        error = likely / row["length"] - 1
        rows.append(
            {
                "run": f"{row['devices']} x {point.gpu.name}{sharing}, {loss}",
                "tokens": row["length"],
                "likely": likely,
                "safe": safe,
                "error": error,
                "recipe": row["at"],
            }
        )
    return rows


def _holds(point: Point, measure: str, steps: int) -> bool:
    """Return whether the run's GPU holds a row of so many steps of tokens, by the likely or the safe figure."""
    tokens = steps * TOKENS_STEP
    job = replace(point.job, batch=replace(point.job.batch, length=tokens, labelled=tokens))
    return getattr(replace(point, job=job).planned, measure) <= point.gpu.memory_gib


# -- how far plans are from what was published


def errors_of(chosen: Iterable[Point], kinds: Sequence[Kind] = KINDS) -> dict[str, float]:
    """Return the errors of the figures of some kinds, of which there is one at least.

    `figures`: how many; as shares `mean`: of their sizes; `bias`: of them with their signs, above zero plans are too
    high; `within_15`: how many are at most 15 %; `worst`.
    """
    found = [point.error(kind) for point in chosen for kind in kinds if kind in point.figures]
    sizes = [abs(error) for error in found]
    return {
        "figures": len(found),
        "mean": fmean(sizes),
        "bias": fmean(found),
        "within_15": sum(size <= 0.15 for size in sizes) / len(sizes),
        "worst": max(sizes),
    }


def errors_by_source() -> list[dict[str, Any]]:
    """Return the errors of each source and kind of figure, then of all likely figures that are held out."""
    rows = [
        {
            "source": source["title"],
            "figure": kind.replace("nvidia_smi", "`nvidia-smi`"),
            "use": "held out" if source["held_out"] else "calibration" if name == CALIBRATION else "nothing fitted",
            **errors_of(points_of(name), (kind,)),
        }
        for name, source in sources().items()
        for kind in KINDS
        if any(kind in point.figures for point in points_of(name))
    ]
    together = (
        ("held out, without GRPO", "bars: 4 %, 97 %", held_out_points()),
        ("held out, with GRPO", "bars: 8 %, 90 %", all_held_out_points()),
    )
    return [
        *rows,
        *(
            {"source": name, "figure": "reserved", "use": bars, **errors_of(chosen, LIKELY)}
            for name, bars, chosen in together
        ),
    ]


def points_of(source: str) -> list[Point]:
    """Return a source's points."""
    return [point for point in points() if point.source == source]


def points_on_answers() -> list[Point]:
    """Return the points of training on given answers; with GRPO (`rewards`) a server's memory is on the same GPU."""
    return [point for point in points() if not point.job.batch.goal.rewards]


def all_held_out_points() -> list[Point]:
    """Return the points of sources that no constant is fitted to."""
    return [point for point in points() if sources()[point.source]["held_out"]]


def held_out_points() -> list[Point]:
    """Return those of them that trained on given answers."""
    return [point for point in points_on_answers() if sources()[point.source]["held_out"]]


def verdicts_on(chosen: Iterable[Point]) -> dict[str, int]:
    """Count what plans say of runs that `fitted` (yes, tight, no), and of those that `ran_out` of memory (said to fit).

    "no": they are likely not to fit; "tight": they are likely to, but not safe.
    """
    chosen = list(chosen)
    verdicts = [point.planned.verdict_on(point.gpu) for point in chosen if not point.ran_out]
    ran_out = [point for point in chosen if point.ran_out]
    return {
        "fitted": len(verdicts),
        **{verdict: verdicts.count(verdict) for verdict in ("yes", "tight", "no")},
        "ran_out": len(ran_out),
        "said_to_fit": sum(point.fits for point in ran_out),
    }


# -- rates


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
def published_runs() -> tuple[PublishedRun, ...]:
    """Return all points of the file, in its order."""
    return tuple(
        _run(dict(zip(_file(RATES_PATH)["columns"], point, strict=True))) for point in _file(RATES_PATH)["points"]
    )


def rates_not_used() -> list[dict[str, Any]]:
    """Return why rates were not used, of how many points of which repositories; the reason with most first."""
    file = _file(RATES_PATH)
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
    source, gpu = _file(RATES_PATH)["sources"][point["source"]], _gpu(point["gpu"])
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
    facts = dict(_file(RATES_PATH)["further_gpus"][name])
    like = known[facts.pop("like")]
    if tensor := facts.pop("bf16_tflops", None):
        facts["tflops_dense"] = {**like.tflops_dense, "bf16": tensor, "fp16": tensor}
    return replace(like, name=name, **facts)


@cache
def _architecture(name: str) -> Architecture:
    """Return the architecture of a shape of the file."""
    kind, hidden, layers, heads, kv_heads, intermediate, vocab, *head_dim = _file(RATES_PATH)["shapes"][name]
    config = {
        "model_type": "bert" if kind == "gpt" else kind,
        "hidden_size": hidden,
        "head_dim": head_dim[0] if head_dim else hidden // heads,
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
    return replace(architecture, kv_heads=kv_heads, stacks=(replace(stack, kind=StackKind.DECODER, linears=linears),))


if __name__ == "__main__":
    main()
