"""The tables of summarization (3.2): three versions of the loop, what a network takes, and what machines cost."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from common.base.run_config import RunConfig
from common.base.run_folders import literal_of, run_folders
from common.hardware.devices import Machine, find_gpu, find_machine
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape
from common.planning.plans import Plan, job_of_run, make_plan
from common.planning.published_rates import evidence
from common.planning.time_plan import Cluster, break_even_gbit, calibration_from, ethernet
from common.records.store import Record
from common.reporting.rows import (
    NOT_PUBLISHED,
    NOT_RUN,
    PLANNED,
    Metric,
    Row,
    as_table,
    before_training,
    by_setting,
    clock,
    clock_seconds,
    completed,
    device_of,
    devices_of,
    model_of,
    over_seeds,
    percent,
    planned_memory,
    published_results,
    short_devices_of,
    step_s,
    training_time,
)
from common.reporting.screen import fitted

LOOPS = {
    "trainer": "Seq2SeqTrainer, by torchrun",
    "accelerate": "plain loop, Accelerate",
    "machines": "plain loop, torch.distributed",
}
EXCHANGES = {
    "after": "after the backward pass, in buckets",
    "overlapped": "while it goes on, in buckets (DDP)",
    "overlapped-bf16": "while it goes on, in buckets, as bf16",
}
"""`RunConfig.gradient_exchange` in words."""
BRIEF = ["Loop", "Devices", "ROUGE-L before -> after", "To the letter", "Validation loss", "Training time",
         "Tokens per second"]  # fmt: skip
"""Of the columns those that fit a terminal."""
METRICS = (
    Metric("rougeL", "ROUGE-L", "higher", "{:.3f}"),
    Metric("rouge1", "ROUGE-1", "higher", "{:.3f}"),
    Metric("rouge2", "ROUGE-2", "higher", "{:.3f}"),
    Metric("exact_share", "to the letter", "higher", "{:.0%}"),
)
SHARED = {"summarization-front": ("Model", "Machine", "Before")}
ONE_MACHINE = Path("3.2_summarization/run_1_v100_16g_x4")
"""The run whose settings are ours in the projections."""
SAMSUM_ROWS = 14_732
"""Training rows of SAMSum (Gliwa et al. 2019, "SAMSum Corpus"); an epoch goes through them once."""


# -- measured


def summarized(records: Iterable[Record], over_links: bool = False) -> list[Record]:
    """Return the completed summarization runs, in the order of folders, devices and loops.

    `over_links` picks the short runs whose ranks a limited network joined, else the runs without such a network.
    """
    return sorted(
        (run for run in completed(records, reporting=__name__) if bool(run["config"]["link"]) == over_links),
        key=lambda r: (r["run_folder"], r["config"]["devices"], list(LOOPS).index(r["config"]["loop"]), r["run_name"]),
    )


def loops_table(records: list[Record]) -> pd.DataFrame:
    """Return the table of 3.2: each version of the loop, measured; and the GPU folders that were not run."""
    runs = summarized(records)
    return pd.DataFrame([*map(_loop, by_setting(runs)), *_not_run(runs)]).fillna(NOT_RUN)


def front(records: list[Record]) -> pd.DataFrame:
    """Return the table of docs/results.md: the measured loops, in brief."""
    return pd.DataFrame(_in_brief(runs) for runs in by_setting(summarized(records)))


def _in_brief(runs: list[Record]) -> Row:
    first, row = runs[0], _loop(runs)
    return {
        "Model": row["Model"],
        "Machine": device_of(first),
        "Before": f"before: ROUGE-L {before_training(first, 'rougeL', '{:.3f}'.format)}, to the letter "
        f"{before_training(first, 'exact_share', percent)}",
        "Loop": row["Loop"],
        "Devices": str(first["config"]["devices"]),
        "ROUGE-L": row["ROUGE-L before -> after"].partition(" -> ")[2],
        "To the letter": row["To the letter"].partition(" -> ")[2],
        "Loss": row["Validation loss"],
        "Time": row["Training time"],
        "Tokens/s": row["Tokens per second"],
    }


def _loop(runs: list[Record]) -> Row:
    first = runs[0]
    after = first["quality"]["after"]
    scores = {
        f"{name.replace('rouge', 'ROUGE-')} before -> after": f"{before_training(first, name, '{:.3f}'.format)} -> "
        + over_seeds([run["quality"]["after"][name] for run in runs], "{:.3f}")
        for name in after
        if name.startswith("rouge")
    }
    return {
        "Loop": LOOPS[first["config"]["loop"]],
        "Figures": "measured",
        "Model": model_of(first),
        "Devices": devices_of(first),
        "Seeds": str(len(runs)),
        **scores,
        "To the letter": f"{before_training(first, 'exact_share', percent)} -> {after['exact_share']:.0%}",
        "Validation loss": f"{first['best_validation_loss']:.4f}",
        "Training time": training_time(first),
        "Tokens per second": f"{first['tokens_per_s']:,.0f}",
        PLANNED: planned_memory(first),
        "Command": f"`{first['command']}`",
    }


def _not_run(runs: list[Record]) -> list[Row]:
    done = {run["run_folder"] for run in runs}
    return [
        {
            "Loop": loop,
            "Figures": NOT_RUN,
            "Model": run.model.rpartition("/")[2],
            "Devices": f"{run.gpu} x1 in {run.devices} machines" if name == "machines" else f"{run.gpu} x{run.devices}",
        }
        for run in run_folders().values()
        if run.goal.reporting == __name__ and run.run_folder not in done
        for name, loop in LOOPS.items()
        if (run.loop == "machines") == (name == "machines")
    ]


def found(records: list[Record]) -> pd.DataFrame:
    """Return the narrow table of 3.2: published machines with their bills, then each version of the loop."""
    published = [
        {
            "Way": "one machine" if each["machines"] == 1 else f"{each['machines']} machines",
            "Figures": "published estimate" if each["estimated"] else "published",
            "Devices": f"{each['machine']} x{each['machines']}",
            "ROUGE-L": NOT_PUBLISHED,
            "Training time": clock(clock_seconds(each["time"])),
            "USD": f"{each['bill_usd']:.2f}",
        }
        for each in published_results(metric="bill_usd")
    ]
    loops = by_setting(summarized(records))
    return pd.DataFrame([*published, *map(_found_loop, loops)])


def _found_loop(runs: list[Record]) -> Row:
    return {
        "Way": LOOPS[runs[0]["config"]["loop"]],
        "Figures": "measured",
        "Devices": short_devices_of(runs[0]),
        "ROUGE-L": over_seeds([run["quality"]["after"]["rougeL"] for run in runs], "{:.3f}"),
        "Training time": clock(fmean(run["train_time_s"] for run in runs)),
        "USD": "-",
    }


def network_table(records: list[Record]) -> pd.DataFrame:
    """Return the table of 3.2.

    Seconds per step over a network, by how gradients are exchanged, at the same global batch.
    """
    runs = summarized(records, over_links=True)
    after = {run["config"]["link"]: step_s(run) for run in runs if run["config"]["gradient_exchange"] == "after"}
    return pd.DataFrame(
        {
            "Link": run["config"]["link"],
            "Gradients are sent": EXCHANGES[run["config"]["gradient_exchange"]],
            "Figures": "measured",
            "Machines": f"{run['config']['devices']} network namespaces, {devices_of(run)}",
            "Rows per step": str(run["effective_batch_size"]),
            "Steps": str(run["steps"]),
            "Step (s)": f"{step_s(run):.3f}",
            "Faster than after the backward pass": _faster(run, after.get(run["config"]["link"])),
            "Training loss at the end": next((f"{loss:.4f}" for _, loss in reversed(run["training_losses"])), NOT_RUN),
        }
        for run in sorted(
            runs, key=lambda r: (r["config"]["link"], list(EXCHANGES).index(r["config"]["gradient_exchange"]))
        )
    )


def _faster(run: Record, after_s: float | None) -> str:
    return f"{after_s / step_s(run):.2f}x" if after_s else NOT_RUN


def results_text(records: list[Record]) -> str:
    """Return the table of the last runs on this machine, for a terminal: a line for each."""
    table = loops_table(records)
    table = table[table["Figures"] == "measured"].reindex(columns=BRIEF)
    return fitted(list(table.columns), table.to_numpy().tolist())


# -- published and projected: one machine of four GPUs against four machines of one, in time and bill


@dataclass(frozen=True)
class Fleet:
    """`count` machines, and how an epoch of BART-large-CNN on SAMSum is run on them.

    `run` has all settings but the devices; `batch` is one GPU's micro-batch, to whose lengths every row is padded.
    """

    machine: Machine
    count: int
    run: RunConfig
    batch: BatchShape

    @property
    def clusters(self) -> list[Cluster]:
        """Return all GPUs with their rent and the network between machines; a second time with it at its peak.

        A network is at its peak for minutes only; one machine has none.
        """
        gpus = (find_gpu(self.machine.gpu),) * self.machine.gpus * self.count
        links = [ethernet(gbit) for gbit in (self.machine.network_gbit, self.machine.peak_gbit)]
        usd_per_hour = self.machine.usd_per_hour / self.machine.gpus
        return [
            Cluster(gpus, nodes=self.count, link=link, usd_per_hour=usd_per_hour)
            for link in (links if self.count > 1 else [None])
        ]

    def plan(self, cluster: Cluster, records: list[Record]) -> Plan:
        """Return the planner's answer; `records` are the kept runs, which may say how fast a GPU is."""
        job = job_of_run(replace(self.run, devices=len(cluster.gpus)), self.batch)
        return make_plan(read_architecture("bart-large-cnn"), job, cluster, calibration_from(records, self.batch.task))

    def settings(self, figures: str) -> Row:
        """Return what a table says of it in any case; `figures` says where the rest comes from."""
        gpus = self.machine.gpus
        return {
            "Machines": f"{self.count} x {self.machine.name} ({gpus} x {self.machine.gpu})",
            "Figures": figures,
            "Rows per step": str(self.batch.rows * self.run.gradient_accumulation_steps * gpus * self.count),
            "Text and summary (tokens)": f"{self.batch.length:,} and {self.batch.target_length:,}",
        }


def as_published(result: dict[str, Any]) -> Fleet:
    """Return a published run with the settings of its own scripts."""
    rows, summary = result["rows_per_gpu"], result["summary_tokens"]
    run = replace(
        literal_of(ONE_MACHINE),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=result["accumulation_steps"],
    )
    batch = BatchShape(rows, result["text_tokens"], labelled=summary, target_length=summary, task=run.task)
    return Fleet(find_machine(result["machine"]), result["machines"], run, batch)


def as_ours(result: dict[str, Any]) -> Fleet:
    """Return the same machines with the settings of our run: as many rows per step on all."""
    run = literal_of(ONE_MACHINE)
    batch = BatchShape(
        run.per_device_train_batch_size,
        run.max_length,
        run.max_target_length,
        target_length=run.max_target_length,
        task=run.task,
    )
    return Fleet(find_machine(result["machine"]), result["machines"], run, batch)


@as_table
def cost_table(records: list[Record]) -> Iterator[Row]:
    """Return the table of 3.2.

    Time, price and bill of an epoch: published, projected with the published settings, projected with ours.
    """
    results = published_results(metric="bill_usd")
    yield from map(_published, results)
    for settings, fleet_of in (("published", as_published), ("our", as_ours)):
        fleets = [fleet_of(result) for result in results]  # the one machine of four GPUs comes first
        pairs = [(fleet, cluster) for fleet in fleets for cluster in fleet.clusters]
        yield from (_projected(*pair, f"projected, {settings} settings", fleets[0], records) for pair in pairs)


def _published(result: dict[str, Any]) -> Row:
    notes = ["estimated there"] * result["estimated"] + [result[key] for key in ("note",) if key in result]
    source = [f"published: {result['source']}", *notes, f"rows and tokens: {result['settings_source']}"]
    return {
        **as_published(result).settings("; ".join(source)),
        "Network": NOT_PUBLISHED,
        "Peak per GPU (GiB)": NOT_PUBLISHED,
        "Time": clock(clock_seconds(result["time"])),
        "USD per hour": f"{result['usd_per_hour'] * result['machines']:.2f}",
        "Bill (USD)": f"{result['bill_usd']:.2f}",
        "Bills no more than one machine from": NOT_PUBLISHED,
    }


def _projected(fleet: Fleet, cluster: Cluster, figures: str, one_machine: Fleet, records: list[Record]) -> Row:
    plan = fleet.plan(cluster, records)
    assert plan.fits
    return {
        **fleet.settings(f"{figures}; price of {fleet.machine.price_date}"),
        "Network": cluster.slowest_link.name,
        "Peak per GPU (GiB)": f"{plan.devices[0].peak_gib:.1f} of {cluster.gpus[0].memory_gib:.1f}",
        "Time": clock(plan.epoch_s(SAMSUM_ROWS)),
        "USD per hour": f"{fleet.machine.usd_per_hour * fleet.count:.2f}",
        "Bill (USD)": f"{plan.epoch_usd(SAMSUM_ROWS):.2f}",
        "Bills no more than one machine from": _break_even(plan, one_machine, records) if fleet.count > 1 else "-",
    }


def _break_even(plan: Plan, one_machine: Fleet, records: list[Record]) -> str:
    """Return the network from which on the plan's machines bill no more than one machine for the very same steps."""
    calibration = calibration_from(records, plan.job.batch.task)
    gbit = break_even_gbit(plan.architecture, plan.job, one_machine.clusters[0], plan.cluster, calibration)
    return "no network is fast enough" if gbit is None else f"{gbit:.3g} Gbit/s"


def machines_table(records: list[Record]) -> pd.DataFrame:
    """Return the table of 3.2.

    What the projections of `cost_table` take from the catalogue, and where that was published.
    """
    return pd.DataFrame(
        {
            "Machine": fleet.machine.name,
            "GPUs": f"{fleet.machine.gpus} x {fleet.machine.gpu}",
            "Speed": "; ".join(
                [
                    *fleet.plan(fleet.clusters[0], records).speed_sources,
                    evidence(find_gpu(fleet.machine.gpu)),
                ]
            ),
            "Network, always / at most (Gbit/s)": f"{fleet.machine.network_gbit:g} / {fleet.machine.peak_gbit:g}",
            "Published": fleet.machine.network_source,
            "USD per hour": f"{fleet.machine.usd_per_hour:g}",
            "Price of": fleet.machine.price_date,
            "Price's source": fleet.machine.price_source,
        }
        for fleet in map(as_ours, published_results(metric="bill_usd"))
    )


TABLES: dict[str, Callable[[list[Record]], pd.DataFrame]] = {
    "summarization-loops": loops_table,
    "summarization-network": network_table,
    "summarization-front": front,
    "summarization-cost": cost_table,
    "summarization-machines": machines_table,
    "found 3.2": found,
}
"""By the names of their markers."""
