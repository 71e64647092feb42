"""Tables and pictures of plans, for the planning notebooks. Every figure comes from the planner or the dry run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from common.base.run_config import RunConfig
from common.base.specs import TECHNIQUES
from common.checks.planner_options import PlannerOptions, cluster_of, evaluation_of, job_of, read_options
from common.hardware.devices import GIB, cpu_device, find_gpu
from common.planning.architectures import Architecture, read_architecture
from common.planning.job import BatchShape, Job, Precision, architecture_of_run, job_of_run
from common.planning.memory_plan import device_memory
from common.planning.plan_texts import why
from common.planning.plans import LONGEST_ROW, TOKENS_STEP, Plan, make_plan, plan_run
from common.planning.ranking import ranked_plans, usual_precision, with_longest_rows
from common.planning.renting import Rental, Training, hours_text
from common.planning.shares import trained_parameters, whole_model
from common.planning.terms import PARTS
from common.planning.time_plan import Cluster, calibration_from, ethernet, parse_link
from common.records.store import kept_records

if TYPE_CHECKING:
    from common.checks.dry_run import DryRun

WORDS = {name: technique.short for name, technique in TECHNIQUES.items()}
SECONDS = ("computing", "waiting for the network", "waiting for other stages", "optimizer")
TRAINED_WEIGHT = ("weight", "gradient", "momentum", "variance", "fp32 copy")
COLORS = dict(
    zip(
        (*PARTS, "overhead", *TRAINED_WEIGHT, *SECONDS),
        ("C0", "C1", "C2", "C4", "C9", "C5", "C7", "C0", "C1", "C2", "C8", "C6", "C0", "C3", "C1", "C2"),
        strict=True,
    )
)
MUCH_USED = (
    *("RTX 3060 12GB", "RTX 3090", "RTX 4060 Ti 16GB", "RTX 4090", "RTX 5090", "RTX A4000", "RTX A6000", "T4"),
    *("V100 32GB", "L4", "L40S", "A10G", "A100 40GB", "A100 80GB", "RTX PRO 6000", "H100", "H200", "B200"),
)
# of a legend: beside the picture
BESIDE: dict[str, Any] = {"bbox_to_anchor": (1.0, 1.0), "loc": "upper left", "frameon": False}


@dataclass(frozen=True)
class Question:
    """A model, GPUs and a batch, as the planner's command line would take them.

    Attributes:
        precision: None = the usual one of each technique.
    """

    architecture: Architecture
    job: Job
    cluster: Cluster
    precision: Precision | None = None

    def plan(self, technique: str, parallel: str = "single", **changes: Any) -> Plan:
        """Return the plan with one technique and parallelism; `changes` are fields of the job."""
        job = replace(
            self.job,
            technique=technique,
            parallel=parallel,
            devices=len(self.cluster.gpus),
            **{"precision": self.precision or usual_precision(technique, self.cluster), **changes},
        )
        return make_plan(self.architecture, job, self.cluster, calibration_from(kept_records())).with_rows_chosen()

    def ranked(self) -> list[Plan]:
        """Return the plans of all techniques and parallelisms that make sense, best first."""
        calibration = calibration_from(kept_records())
        return ranked_plans(self.architecture, self.job, self.cluster, calibration, precision=self.precision)

    def over(self, link: str) -> "Question":
        """Return the same question with another link between the GPUs."""
        return replace(self, cluster=replace(self.cluster, link=parse_link(link, self.cluster.gpus[0])))


def ask(model: str, gpu: str, gpus: int, batch_size: int, seq_len: int, nodes: int = 1, **options: object) -> Question:
    """Return the question, read and checked as `python -m common.planner` does; `options` are the command's others."""
    given = {"model": model, "gpu": gpu, "gpus": gpus, "batch_size": batch_size, "seq_len": seq_len, "nodes": nodes}
    asked = read_options([f"--{name.replace('_', '-')}={value}" for name, value in (given | options).items()])
    architecture = read_architecture(asked.model, asked.model_revision)
    job = replace(job_of(asked), evaluation=evaluation_of(asked, architecture))
    return Question(architecture, job, cluster_of(asked), asked.precision)


# -- memory


def memory_by_phase(plan: Plan) -> pd.DataFrame:
    """Return the fullest device's memory in each phase of a run: the models that are in it, and likely and safe GiB."""
    phases = plan.phases[plan.highest.device]
    rows = [(each.name, each.alive, each.memory.moment, each.memory.peak_gib, each.memory.safe_gib) for each in phases]
    columns = ["phase", "models in memory", "highest moment", "likely GiB", "safe GiB"]
    return pd.DataFrame(rows, columns=columns).set_index("phase")


def terms_by_phase(plan: Plan) -> pd.DataFrame:
    """Return what each phase of a run holds on the fullest device at its highest moment: formula and GiB, by phase."""
    terms = [
        (each.name, term.what, term.formula, term.gib)
        for each in plan.phases[plan.highest.device]
        for term in each.memory.terms
        if term.part != "overhead"
    ]
    return pd.DataFrame(terms, columns=["phase", "what", "formula", "GiB"]).set_index(["phase", "what"])


def bytes_per_weight(architecture: Architecture) -> pd.DataFrame:
    """Return the bytes that each weight of the model takes, by part, activations left out: the planner's figures."""
    ways: dict[str, dict[str, Any]] = {
        "full, fp32, Adam": {"technique": "full", "precision": "fp32"},
        "full, bf16, Adam": {"technique": "full"},
        "full, bf16, Adam in 8 bits": {"technique": "full", "optimizer": "adamw_bnb_8bit"},
        "full, bf16, plain SGD": {"technique": "full", "optimizer": "sgd"},
        "LoRA, rank 8": {"technique": "lora"},
        "QLoRA, rank 8": {"technique": "qlora"},
    }
    rows = {}
    for name, settings in ways.items():
        job = Job(parallel="single", batch=BatchShape(1, 8, 8), **settings)
        terms = device_memory(architecture, job, whole_model(architecture)).terms
        held = [term for term in terms if not term.what.startswith("autocast")]  # copies that come and go
        rows[name] = {
            "weights": sum(term.count for term in held if term.part == "weights"),
            "gradients": trained_parameters(architecture, job) * job.trained_bytes,
            "optimizer": sum(term.count for term in held if term.part == "optimizer"),
        }
    return pd.DataFrame(rows).T / architecture.parameters


def notes_bytes() -> pd.DataFrame:
    """Return the bytes per trained weight, for 16-bit weights with an fp32 copy, and if 4-bit ones could be trained."""
    rest = (2, 4, 4, 4)
    return pd.DataFrame({"16-bit weights": (2, *rest), "4-bit weights": (0.5, *rest)}, index=TRAINED_WEIGHT).T


def parts_by_way(question: Question, parallel: str = "single") -> pd.DataFrame:
    """Return the peak GiB of the fullest device by part, for each technique, with and without checkpointing."""
    rows = {}
    for technique, checkpointing in product(TECHNIQUES, (False, True)):
        plan = question.plan(technique, parallel, gradient_checkpointing=checkpointing)
        rows[WORDS[technique] + (", checkpointed" if checkpointing else "")] = plan.fullest[0].parts_gib
    return pd.DataFrame(rows).T


def memory_by_length(question: Question, parallel: str, lengths: Iterable[int]) -> pd.DataFrame:
    """Return the peak GiB by length of the rows: one column per technique, with and without checkpointing."""
    rows = {}
    for length in lengths:
        job = replace(question.job, batch=BatchShape(question.job.batch.rows, length, length))
        rows[length] = parts_by_way(replace(question, job=job), parallel).sum(axis="columns")
    return pd.DataFrame(rows).T.rename_axis("tokens per row")


def largest_batches(model: str, seq_len: int) -> pd.DataFrame:
    """Return the rows that fit on one GPU of each kind that is much used, checkpointed; 0 = not even one."""
    rows = {}
    for gpu in map(find_gpu, MUCH_USED):
        question = ask(model, gpu.name, 1, 1, seq_len)
        rows[gpu.name] = {
            WORDS[technique]: question.plan(technique, gradient_checkpointing=True).max_batch_size
            for technique in TECHNIQUES
        } | {"precision": usual_precision("full", question.cluster), "GiB": gpu.memory_gib}
    return pd.DataFrame(rows).T.sort_values("GiB")


# -- ways to share the work


def longest_by_gpus(model: str, gpu: str, technique: str, counts: Iterable[int]) -> pd.DataFrame:
    """Return the longest row that is safe to fit in training, by the number of GPUs; one column per way, NaN for none.

    One row per rank, or per group of ranks that share its tokens; gradient checkpointing is on.
    """
    rows: dict[int, dict[str, int]] = {}
    for count in counts:
        question = ask(model, gpu, count, 1, TOKENS_STEP)
        job, architecture = (
            replace(question.job, evaluation=None),
            replace(question.architecture, max_length=LONGEST_ROW),
        )
        plans = ranked_plans(architecture, job, question.cluster, {}, [technique], checkpointing=True)
        in_gpus = [plan for plan in plans if not plan.job.offload]
        rows[count] = {
            plan.job.parallel + (", rows shared" if plan.job.sp_size > 1 else ""): plan.job.batch.length
            for plan in with_longest_rows(in_gpus, True, {})
            if plan.fits
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("GPUs")


def table_of(plans: Sequence[Plan], rows_per_epoch: int) -> pd.DataFrame:
    """Return the plans in their order, one row each."""
    return pd.DataFrame([
        {
            "strategy": plan.name,
            "fits": plan.verdict,
            "peak GiB": round(plan.fullest[0].peak_gib, 1),
            "largest batch": plan.max_batch_size,
            "tokens per s": round(plan.tokens_per_s),
            "sent GB per step": round(plan.time.sent_gb, 2),
            "hours per epoch": round(plan.epoch_s(rows_per_epoch) / 3600, 2),
            "USD per epoch": None if plan.cluster.usd_per_second is None else round(plan.epoch_usd(rows_per_epoch), 2),
        }
        for plan in plans
    ])  # fmt: skip


def reasons(plans: Sequence[Plan]) -> pd.DataFrame:
    """Return why each plan stands where it stands."""
    return pd.DataFrame({"strategy": [plan.name for plan in plans], "why": [why(plan) for plan in plans]})


def seconds_per_row(plans: Mapping[str, Plan]) -> pd.DataFrame:
    """Return the seconds of a step by kind, divided by its rows, so that ways of sharing compare."""
    times = {name: (plan.time, plan.rows_per_step) for name, plan in plans.items()}
    return pd.DataFrame(
        {
            name: [each / rows for each in (time.compute_s, time.exposed_s, time.bubble_s, time.optimizer_s)]
            for name, (time, rows) in times.items()
        },
        SECONDS,
    ).T


def bills(one_machine: Question, spread: Question, technique: str, parallel: str,
          gbits: Iterable[float], **changes: Any) -> pd.Series:  # fmt: skip
    """Return a step's bill on many machines, in bills of one machine, by the network between them in Gbit/s."""

    def usd(question: Question) -> float:
        plan = question.plan(technique, parallel, **changes)
        return plan.time.total_s * (plan.cluster.usd_per_second or 1.0)

    alone = usd(one_machine)
    clusters = {gbit: replace(spread.cluster, link=ethernet(gbit)) for gbit in gbits}
    return pd.Series({gbit: usd(replace(spread, cluster=cluster)) / alone for gbit, cluster in clusters.items()})


# -- what to rent


def training_to_rent(
    model: str, rows: int, mean_length: int, longest: int, epochs: float, rows_per_step: int, techniques: Sequence[str]
) -> Training:
    """Return the question what to rent for so many examples, as the command line asks it."""
    options = PlannerOptions(model=model, max_length=longest)
    architecture = read_architecture(model)
    job = replace(job_of(options), evaluation=evaluation_of(options, architecture))
    job = replace(job, batch=replace(job.batch, padded=mean_length < longest))
    return Training(architecture, job, lambda *_: mean_length, round(rows * epochs), rows_per_step, tuple(techniques))


def rental_table(found: Sequence[Rental]) -> pd.DataFrame:
    """Return a row for each machine."""
    return pd.DataFrame({
        "machine": each.machine,
        "way": each.plan.name,
        "provider": f"{each.price.provider}{', spot' * each.is_spot}",
        "USD per hour": round(each.usd_per_hour, 2),
        "time": hours_text(each.hours, each.most_hours),
        "USD": f"{each.usd:.2f} to {each.most_usd:.2f}",
    } for each in found)  # fmt: skip


# -- dry run and records


def phase_parts(result: "DryRun") -> pd.DataFrame:
    """Return GiB by part at the highest moment of each phase of the step."""
    return pd.DataFrame({phase: parts for phase, (_, parts) in result.phases().items()}).T[list(PARTS)] / GIB


def closed_form_parts(run: RunConfig, batch: BatchShape) -> pd.Series:
    """Return GiB by part of what PyTorch would call allocated: the planner's peak without the GPU's own overhead."""
    return pd.Series(plan_run(run, batch).devices[0].parts_gib)[list(PARTS)]


def planned_and_measured(record: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return, for a kept record, the first device's memory in GiB and all tokens per second, planned and measured.

    Where the record has no plan of its own it is planned now. On a GPU PyTorch counts allocated memory, so the plan is
    without overhead; on CPU both are of the whole process. Its speed is planned from the `others`, lest it be predicted
    from itself.
    """
    from common.checks.tried_rows import batch_of_run  # here: it imports torch

    run = RunConfig.of_record(record["config"])
    # rows of random weights are made for the run, and are not here
    batch = BatchShape(**record["planned"]["batch"]) if run.weights == "random" else batch_of_run(run)[0]
    gpu = cpu_device() if run.device == "cpu" else find_gpu(run.gpu)
    architecture, job, cluster = architecture_of_run(run, batch), job_of_run(run, batch), Cluster((gpu,) * run.devices)
    plan = make_plan(architecture, job, cluster, calibration_from(others, batch.task))
    memory, on_gpu = record["memory"][0], run.device == "cuda"
    now = plan.devices[0].allocated_gib if on_gpu else plan.devices[0].peak_gib
    whole_run_gib = memory["peak_allocated_gib" if on_gpu else "peak_rss_gib"]
    return {
        "run": f"{record['run_folder'].partition('_')[0]}, {record['run_name']}",
        "devices": run.devices,
        "planned": "now" if memory["planned_gib"] is None else "by the run",
        "planned GiB": now if memory["planned_gib"] is None else memory["planned_gib"],
        "measured GiB": memory.get("peak_training_gib") or whole_run_gib,
        "planned tokens per s": round(plan.tokens_per_s),
        "measured tokens per s": round(record["tokens_per_s"]),
    }


# -- pictures


def plot_parts(parts: pd.DataFrame, label: str, capacity: float | None = None, digits: int = 1) -> Figure:
    """Draw stacked bars, one per row of `parts`, with their sums; a line where the GPU's memory ends."""
    figure, axes = plt.subplots(figsize=(8.5, 1.3 + 0.38 * len(parts)), layout="constrained")
    parts = parts.loc[::-1, (parts.abs() > 1e-9).any()]
    parts.plot.barh(stacked=True, ax=axes, width=0.75, color=COLORS)
    totals = parts.sum(axis="columns")
    on_white = {"facecolor": "white", "edgecolor": "none", "pad": 0}  # the GPU's line may go through a sum
    axes.bar_label(axes.containers[-1], [f"{total:.{digits}f}" for total in totals], padding=3, bbox=on_white)
    axes.set(xlabel=label, ylabel="", xlim=(0, 1.18 * max(totals.max(), capacity or 0)))
    if capacity is not None:
        axes.axvline(capacity, color="black", linestyle="--", label=f"the GPU: {capacity:.1f} GiB")
    axes.legend(**BESIDE)
    return figure


def plot_lengths(by_length: pd.DataFrame, capacity: float, title: str) -> Figure:
    """Draw memory over the rows' length; dashed where activations are computed twice."""
    figure, axes = plt.subplots(figsize=(8.5, 4), layout="constrained")
    colors = [f"C{number}" for number in range(len(WORDS)) for _ in ("plain", "checkpointed")]
    by_length.plot(ax=axes, style=[".-", ".--"] * len(WORDS), color=colors)
    axes.axhline(capacity, color="black", linestyle=":", label=f"the GPU: {capacity:.1f} GiB")
    axes.set(xlabel="tokens per row", ylabel="GiB per device", title=title, ylim=(0, 3 * capacity))
    axes.legend(**BESIDE)
    return figure


def plot_longest_rows(by_gpus: pd.DataFrame, title: str) -> Figure:
    """Draw the longest row over the number of GPUs, a line for each way, on logarithmic scales."""
    figure, axes = plt.subplots(figsize=(8.5, 4), layout="constrained")
    styles = ["o-" if way.endswith("shared") else ".--" for way in by_gpus.columns]
    by_gpus.plot(ax=axes, style=styles, loglog=True)
    axes.set(xlabel="GPUs", ylabel="tokens of the longest row that fits", title=title)
    axes.set_xticks(list(by_gpus.index), [str(count) for count in by_gpus.index])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    axes.legend(**BESIDE)
    return figure


def plot_largest_batches(batches: pd.DataFrame, title: str) -> Figure:
    """Draw the largest batch by GPU, on a logarithmic scale; no bar where not even one row fits."""
    figure, axes = plt.subplots(figsize=(8.5, 1.5 + 0.36 * len(batches)), layout="constrained")
    names = [f"{gpu} ({precision})" for gpu, precision in batches["precision"].items()]
    batches[list(WORDS.values())].astype(float).set_axis(names).plot.barh(ax=axes, width=0.8, logx=True)
    for bars in axes.containers:
        axes.bar_label(bars, fmt="%g", padding=2, fontsize=7)
    most = batches[list(WORDS.values())].max(axis=None)
    axes.set(xlabel="rows that fit (0: none)", ylabel="", title=title, xlim=(0.8, 1.6 * most))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()
    return figure


def plot_bills(curves: Mapping[str, pd.Series], break_evens: Mapping[str, float | None], title: str) -> Figure:
    """Draw bills over the network's speed, with a mark where many machines bill no more than one."""
    figure, axes = plt.subplots(figsize=(8.5, 3.6), layout="constrained")
    for name, curve in curves.items():
        (line,) = axes.plot(curve.index, curve, label=name)
        if (gbit := break_evens[name]) is not None:
            axes.plot(gbit, 1.0, "o", color=line.get_color(), label=f"  even at {gbit:.3g} Gbit/s")
    axes.axhline(1.0, color="black", linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="network between the machines, Gbit/s",
             ylabel="bill of a step,\nin bills of one machine", title=title)  # fmt: skip
    axes.legend(**BESIDE)
    return figure


def plot_scaling(tokens_per_gpu: pd.DataFrame, title: str) -> Figure:
    """Draw tokens per second and GPU over the number of GPUs; columns are (way, network), the first one dashed."""
    figure, axes = plt.subplots(figsize=(8.5, 3.6), layout="constrained")
    ways = list(dict.fromkeys(way for way, _ in tokens_per_gpu.columns))
    for way, network in tokens_per_gpu.columns:
        style = ".--" if network == tokens_per_gpu.columns[0][1] else ".-"
        curve = tokens_per_gpu[(way, network)]
        axes.plot(curve.index, curve, style, color=f"C{ways.index(way)}", label=f"{way}, {network}")
    axes.set(xscale="log", xlabel="GPUs", ylabel="tokens per second and GPU", title=title, ylim=(0, None))
    axes.set_xticks(list(tokens_per_gpu.index), [str(count) for count in tokens_per_gpu.index])
    axes.minorticks_off()
    axes.legend(**BESIDE)
    return figure
