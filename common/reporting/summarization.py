"""The tables of summarization (3.2): one machine of four GPUs against four machines of one, in time and bill."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.hardware.devices import Machine, find_gpu, find_machine
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape
from common.planning.plans import Plan, job_of_run, make_plan
from common.planning.time_plan import Cluster, break_even_gbit, calibration_from, ethernet
from common.records.store import Record
from common.reporting.rows import NOT_PUBLISHED, PUBLISHED_FILE, Row, clock, clock_seconds

ONE_MACHINE = Path("3.2_summarization/run_1_v100_16g_x4")
"""The run whose settings are ours in the projections."""
MODEL_SHAPE = "bart-large-cnn"
SAMSUM_ROWS = 14_732
"""Training rows of SAMSum (Gliwa et al. 2019, "SAMSum Corpus"); an epoch goes through them once."""


@dataclass(frozen=True)
class Way:
    """Machines, and how an epoch of BART-large-CNN on SAMSum is run on them."""

    machine: Machine
    count: int
    """Of such machines."""
    run: RunConfig
    """All settings but the devices."""
    batch: BatchShape
    """What one GPU works on at once; every row is padded to this."""

    @property
    def cluster(self) -> Cluster:
        """All GPUs with their rent, and what joins them at all times."""
        return Cluster(
            (find_gpu(self.machine.gpu),) * self.machine.gpus * self.count,
            nodes=self.count,
            link=ethernet(self.machine.network_gbit) if self.count > 1 else None,
            usd_per_hour=self.machine.usd_per_hour / self.machine.gpus,
        )

    @property
    def clusters(self) -> list[Cluster]:
        """The same, and where there are several machines also with what joins them at best, for minutes."""
        if self.count == 1:
            return [self.cluster]
        return [self.cluster, replace(self.cluster, link=ethernet(self.machine.peak_gbit))]

    @property
    def rows_per_step(self) -> int:
        """Of all GPUs together, in one optimizer step."""
        return self.batch.rows * self.run.gradient_accumulation_steps * self.machine.gpus * self.count

    def plan(self, cluster: Cluster, records: list[Record]) -> Plan:
        """The planner's answer; `records` are the kept runs, which may say how fast a GPU is."""
        job = job_of_run(replace(self.run, devices=len(cluster.gpus)), self.batch)
        return make_plan(read_architecture(MODEL_SHAPE), job, cluster, calibration_from(records, self.batch.task))

    def settings(self, figures: str) -> Row:
        """What a table says of it in any case; `figures` is where its figures come from."""
        machine = self.machine
        return {
            "Machines": f"{self.count} x {machine.name} ({machine.gpus} x {machine.gpu})",
            "Figures": figures,
            "Rows per step": str(self.rows_per_step),
            "Text and summary (tokens)": f"{self.batch.length:,} and {self.batch.target_length:,}",
        }


def published_costs() -> list[dict[str, Any]]:
    """What the demo that 3.2 grew from says of time, price and bill; the one machine of four comes first."""
    found = json.loads(PUBLISHED_FILE.read_text(encoding="utf-8"))
    return [result for result in found if "bill_usd" in result]


def way_as_published(result: dict[str, Any]) -> Way:
    """A published run with the settings of its own scripts."""
    rows, summary = result["rows_per_gpu"], result["summary_tokens"]
    run = replace(
        literal_of(ONE_MACHINE),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=result["accumulation_steps"],
    )
    batch = BatchShape(rows, result["text_tokens"], labelled=summary, target_length=summary)
    return Way(find_machine(result["machine"]), result["machines"], run, batch)


def way_as_ours(result: dict[str, Any]) -> Way:
    """The same machines with the settings of our run: as many rows per step on all."""
    run = literal_of(ONE_MACHINE)
    batch = BatchShape(
        run.per_device_train_batch_size, run.max_length, run.max_target_length, target_length=run.max_target_length
    )
    return Way(find_machine(result["machine"]), result["machines"], run, batch)


def cost_table(records: list[Record]) -> pd.DataFrame:
    """3.2: time, price and bill of an epoch: published, projected with the published settings, projected with ours."""
    results = published_costs()
    rows = [_published(result) for result in results]
    for settings, way_of in (("published", way_as_published), ("our", way_as_ours)):
        one_machine, *_ = ways = [way_of(result) for result in results]
        rows += [
            _projected(way, cluster, f"projected, {settings} settings", one_machine, records)
            for way in ways
            for cluster in way.clusters
        ]
    return pd.DataFrame(rows)


def _published(result: dict[str, Any]) -> Row:
    notes = ["estimated there"] * result["estimated"] + [result[key] for key in ("note",) if key in result]
    notes.append(f"rows and tokens: {result['settings_source']}")
    return {
        **way_as_published(result).settings("; ".join([f"published: {result['source']}", *notes])),
        "Network": NOT_PUBLISHED,
        "Peak per GPU (GiB)": NOT_PUBLISHED,
        "Time": clock(clock_seconds(result["time"])),
        "USD per hour": f"{result['usd_per_hour'] * result['machines']:.2f}",
        "Bill (USD)": f"{result['bill_usd']:.2f}",
        "Bills no more than one machine from": NOT_PUBLISHED,
    }


def _projected(way: Way, cluster: Cluster, figures: str, one_machine: Way, records: list[Record]) -> Row:
    plan = way.plan(cluster, records)
    bill = plan.epoch_usd(SAMSUM_ROWS)
    assert plan.fits
    assert bill is not None
    return {
        **way.settings(f"{figures}; price of {way.machine.price_date}"),
        "Network": cluster.slowest_link.name,
        "Peak per GPU (GiB)": f"{plan.devices[0].peak_gib:.1f} of {cluster.gpus[0].memory_gib:.1f}",
        "Time": clock(plan.epoch_s(SAMSUM_ROWS)),
        "USD per hour": f"{way.machine.usd_per_hour * way.count:.2f}",
        "Bill (USD)": f"{bill:.2f}",
        "Bills no more than one machine from": _break_even(plan, one_machine, records) if way.count > 1 else "-",
    }


def _break_even(plan: Plan, one_machine: Way, records: list[Record]) -> str:
    """The network from which on the plan's machines bill no more than one machine for the very same steps."""
    calibration = calibration_from(records, plan.job.batch.task)
    gbit = break_even_gbit(plan.architecture, plan.job, one_machine.cluster, plan.cluster, calibration)
    return "no network is fast enough" if gbit is None else f"{gbit:.3g} Gbit/s"


def machines_table(records: list[Record]) -> pd.DataFrame:
    """3.2: what the projections of `cost_table` take from the catalogue, and where that was published."""
    rows = []
    for result in published_costs():
        way = way_as_ours(result)
        machine = way.machine
        rows.append({
            "Machine": machine.name,
            "GPUs": f"{machine.gpus} x {machine.gpu}",
            "Speed": "; ".join(way.plan(way.cluster, records).speed_sources),
            "Network, always / for minutes (Gbit/s)": f"{machine.network_gbit:g} / {machine.peak_gbit:g}",
            "Published": machine.network_source,
            "USD per hour": f"{machine.usd_per_hour:g}",
            "Price of": machine.price_date,
            "Price's source": machine.price_source,
        })  # fmt: skip
    return pd.DataFrame(rows)


TABLES = {"summarization-cost": cost_table, "summarization-machines": machines_table}
