"""The tables of summarization (3.2): three versions of the loop, what a network takes, and what machines cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.tables.footnotes import footnote
from bench.tables.table import Table, column, published, waiting_for_task
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.hardware.devices import find_gpu
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape, job_of_run
from common.planning.plans import Plan, make_plan
from common.planning.published_rates import evidence
from common.planning.time_plan import Cluster, calibration_from, ethernet, fast_enough_from_gbit
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import NOT_RUN, Row, devices_of, step_s
from common.reporting.tasks import (
    EXACT,
    EXACT_BEFORE,
    EXACT_BOTH,
    LOOP,
    LOOPS,
    ROUGE_L,
    ROUGE_L_BEFORE,
    ROUGE_L_BOTH,
    loop_runs,
    loops,
    score,
)

# `RunConfig.gradient_exchange` in words
EXCHANGES = {
    "after": "after the backward pass",
    "overlapped": "overlapped with backward (DDP)",
    "overlapped-bf16": "overlapped with backward, as bf16",
}
ONE_MACHINE = Path("3.2_summarization/run_1_v100_16g_x4")  # the run whose settings are ours in the projections
SAMSUM_ROWS = 14_732  # training rows of SAMSum (Gliwa et al. 2019, "SAMSum Corpus"); an epoch goes through them once

# -- measured


def _waiting(records: list[Record]) -> list[Row]:
    """Return a row for each version of the loop that a run folder for GPUs is for: one machine, or several."""
    return [
        {**row, "config": {**row["config"], "loop": loop}}
        for row in waiting_for_task(records, "summarization")
        for loop in LOOPS
        if (row["config"]["loop"] == "machines") == (loop == "machines")
    ]


def _devices(row: Row) -> str:
    if row["status"] == NOT_RUN and row["config"]["loop"] == "machines":
        return f"{row['environment']['devices'][0]} x1 in {row['config']['devices']} machines"
    return devices_of(row)


def _over_links(records: list[Record]) -> list[Row]:
    """Return short runs over a network at the same global batch, each with the step of gradients sent at the end."""
    runs = loop_runs(records, over_links=True)
    after_s = {run["config"]["link"]: step_s(run) for run in runs if run["config"]["gradient_exchange"] == "after"}
    order = list(EXCHANGES)
    runs.sort(key=lambda run: (run["config"]["link"], order.index(run["config"]["gradient_exchange"])))
    return [{**run, "after_s": after_s.get(run["config"]["link"])} for run in runs]


# -- published and projected: one machine of four GPUs against four machines of one, in time and bill


@dataclass(frozen=True)
class Machine:
    """A machine with GPUs that a cloud rents by the hour, on demand, without tax."""

    name: str
    gpu: str  # by its name in the catalogue
    gpus: int
    network_gbit: float  # per second, at all times
    peak_gbit: float  # for 5 to 60 minutes, over one connection to a neighbour in a cluster placement group
    usd_per_hour: float
    network_source: str = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth.html"
    price_date: str = "2026-09-24"
    price_source: str = "AWS EC2, us-east-1, on demand: https://aws.amazon.com/ec2/pricing/on-demand/"


# AWS's price list was read through two public files that quote it: github.com/getnable/finopsmcp,
# src/finops/aws_prices.py (its version of 2026-09-24), and github.com/aws/karpenter-provider-aws,
# pkg/providers/pricing/zz_generated.pricing_aws.go (2026-01-19). Both have the same three prices.
# The baseline of the network comes from zz_generated.bandwidth.go of the same repository.
MACHINES = {
    each.name: each
    for each in (
        Machine("p3.8xlarge", "V100 16GB SXM", 4, 10, 10, 12.24),
        Machine("p3.2xlarge", "V100 16GB SXM", 1, 2.5, 10, 3.06),
        Machine("g4dn.xlarge", "T4 16GB", 1, 5, 10, 0.526),
    )
}


@dataclass(frozen=True)
class Fleet:
    """`count` machines, and how an epoch of BART-large-CNN on SAMSum is run on them, every row padded."""

    machine: Machine
    count: int
    run: RunConfig

    @property
    def clusters(self) -> list[Cluster]:
        """Return all GPUs with their rent and the network between machines; a second time with it at its peak.

        A network is at its peak for minutes only; one machine has none.
        """
        gpus = (find_gpu(self.machine.gpu),) * self.run.devices
        links = [ethernet(gbit) for gbit in (self.machine.network_gbit, self.machine.peak_gbit)]
        return [
            Cluster(gpus, nodes=self.count, link=link, usd_per_hour=self.machine.usd_per_hour / self.machine.gpus)
            for link in (links if self.count > 1 else [None])
        ]

    def plan(self, cluster: Cluster, records: list[Record]) -> Plan:
        """Return the planner's answer; `records` are the kept runs, which may say how fast a GPU is."""
        run, summary = self.run, self.run.max_target_length
        batch = BatchShape(
            run.per_device_train_batch_size, run.max_length, labelled=summary, target_length=summary, task=run.task
        )
        calibration = calibration_from(records, run.task)
        return make_plan(read_architecture("bart-large-cnn"), job_of_run(run, batch), cluster, calibration)


def _fleet(result: dict[str, Any], settings: str) -> Fleet:
    """Return a published run's machines with "published" settings, or "our" run's: as many rows per step on all."""
    machine, count = MACHINES[result["machine"]], result["machines"]
    run = replace(literal_of(ONE_MACHINE), devices=machine.gpus * count)
    if settings == "published":
        run = replace(
            run,
            per_device_train_batch_size=result["rows_per_gpu"],
            gradient_accumulation_steps=result["accumulation_steps"],
            max_length=result["text_tokens"],
            max_target_length=result["summary_tokens"],
        )
    return Fleet(machine, count, run)


def _costs(records: list[Record]) -> Iterator[Row]:
    """Yield an epoch as it was published, projected with the published settings, and projected with ours."""
    results = published(metric="bill_usd")
    for result in results:
        notes = ["estimated there"] * result["estimated"] + [result[key] for key in ("note",) if key in result]
        source = [result["figures"], *notes, f"rows and tokens: {result['settings_source']}"]
        yield {
            **result,
            "fleet": _fleet(result, "published"),
            "figures": "; ".join(source),
            "usd_per_hour": result["usd_per_hour"] * result["machines"],
        }
    for settings in ("published", "our"):
        fleets = [_fleet(result, settings) for result in results]  # the one machine of four GPUs comes first
        for fleet in fleets:
            for cluster in fleet.clusters:
                plan = fleet.plan(cluster, records)
                assert plan.fits
                yield {
                    "fleet": fleet,
                    "figures": f"projected, {settings} settings; price of {fleet.machine.price_date}",
                    "plan": plan,
                    "train_time_s": plan.epoch_s(SAMSUM_ROWS),
                    "usd_per_hour": fleet.machine.usd_per_hour * fleet.count,
                    "bill_usd": plan.epoch_usd(SAMSUM_ROWS),
                    "break_even": _break_even(plan, fleets[0], records) if fleet.count > 1 else "-",
                }


def _break_even(plan: Plan, one_machine: Fleet, records: list[Record]) -> str:
    """Return the network from which on the plan's machines bill no more than one machine for the very same steps."""
    calibration, (together, *_) = calibration_from(records, plan.job.batch.task), one_machine.clusters
    alone_s = make_plan(plan.architecture, plan.job, together, calibration).time.total_s
    most_s = alone_s * together.usd_per_second / plan.cluster.usd_per_second
    gbit = fast_enough_from_gbit(plan.architecture, plan.job, plan.cluster, most_s, calibration)
    return "no network is fast enough" if gbit is None else f"{gbit:.3g} Gbit/s"


def _gpus(machine: Machine) -> str:
    return f"{machine.gpus} x {machine.gpu}"


def _loop_or_machines(row: Row) -> str:
    if "machines" not in row:
        return LOOP.cell(row)
    return "one machine" if row["machines"] == 1 else f"{row['machines']} machines"


def _machines(records: list[Record]) -> Iterator[Row]:
    """Yield what the projections take of machines and GPUs."""
    for result in published(metric="bill_usd"):
        fleet = _fleet(result, "our")
        sources = fleet.plan(fleet.clusters[0], records).speed_sources
        yield {"machine": fleet.machine, "speed": "; ".join([*sources, evidence(find_gpu(fleet.machine.gpu))])}


MACHINES_OF_FLEET = Column(
    "Machines", lambda row: f"{row['fleet'].count} x {row['fleet'].machine.name} ({_gpus(row['fleet'].machine)})"
)
NETWORK = Column("Network", "plan.cluster.slowest_link.name")
BILL = Column("Bill (USD)", "bill_usd", "{:.2f}")

TABLES = {
    "summarization-loops": Table(
        lambda records: [*loops(records), *_waiting(records)],
        (
            LOOP,
            "figures",
            "model",
            Column("Devices", _devices),
            "seeds",
            score("ROUGE-1", "rouge1", "{:.3f}")[-1],
            score("ROUGE-2", "rouge2", "{:.3f}")[-1],
            ROUGE_L_BOTH,
            score("ROUGE-Lsum", "rougeLsum", "{:.3f}")[-1],
            EXACT_BOTH.titled("Exact match"),
            "loss",
            "time",
            "tokens_per_s",
            "planned",
            "command",
        ),
    ),
    # seconds per step over a network, by how gradients are exchanged
    "summarization-network": Table(
        _over_links,
        (
            Column("Link", "config.link"),
            Column("Gradients are sent", "config.gradient_exchange", EXCHANGES.get),
            "figures",
            Column("Machines", lambda row: f"{row['config']['devices']} network namespaces, {devices_of(row)}"),
            Column("Examples per step", "effective_batch_size"),
            "steps",
            Column("Step (s)", step_s, "{:.3f}"),
            Column("Speed-up", lambda row: row["after_s"] / step_s(row), "{:.2f}x"),
            Column("Training loss at the end", lambda row: row["training_losses"][-1][1], "{:.4f}"),
        ),
    ),
    "summarization-front": Table(
        loops,
        (
            "model",
            "machine",
            Column(
                "Before",
                lambda row: f"before: ROUGE-L {ROUGE_L_BEFORE.cell(row)}, exact match {EXACT_BEFORE.cell(row)}",
            ),
            LOOP,
            "device_count",
            ROUGE_L,
            EXACT,
            "loss as Loss",
            "time as Time",
            "tokens_per_s as Tokens/s",
        ),
        shared=("Model", "Machine", "Before"),
    ),
    "summarization-cost": Table(
        _costs,
        (
            MACHINES_OF_FLEET,
            "figures",
            Column("Examples per step", "fleet.run.effective_batch_size"),
            Column(
                "Text and summary (tokens)",
                lambda row: f"{row['fleet'].run.max_length:,} and {row['fleet'].run.max_target_length:,}",
            ),
            NETWORK,
            Column(
                "Peak per GPU (GiB)",
                lambda row: f"{row['plan'].devices[0].peak_gib:.1f} of {row['plan'].cluster.gpus[0].memory_gib:.1f}",
            ),
            "whole_time as Time",
            Column("USD per hour", "usd_per_hour", "{:.2f}"),
            BILL,
            Column("Bills no more than one machine from", "break_even"),
        ),
    ),
    # what the readme shows of it: the same steps on all machines
    "summarization-bill": Table(
        lambda records: [row for row in _costs(records) if row["figures"].startswith("projected, our")],
        (MACHINES_OF_FLEET, NETWORK, "whole_time as Time", BILL),
    ),
    "summarization-machines": Table(
        _machines,
        (
            Column("Machine", "machine.name"),
            Column("GPUs", lambda row: _gpus(row["machine"])),
            Column("Speed", "speed"),
            Column(
                "Network, always / at most (Gbit/s)",
                lambda row: f"{row['machine'].network_gbit:g} / {row['machine'].peak_gbit:g}",
            ),
            Column("Published", "machine.network_source"),
            Column("USD per hour", "machine.usd_per_hour", "{:g}"),
            Column("Price of", "machine.price_date"),
            Column("Price's source", "machine.price_source"),
        ),
    ),
    "found 3.2": Table(
        lambda records: [*published(metric="bill_usd"), *loops(records)],
        (
            Column("Loop", _loop_or_machines),
            Column(
                "Figures",
                lambda row: f"{column('short_figures').cell(row)}" + (" estimate" if row.get("estimated") else ""),
            ),
            "short_devices",
            ROUGE_L,
            "mean_time",
            Column("USD", "bill_usd", "{:.2f}", missing="-"),
        ),
        footnote=footnote,
    ),
}
