"""What summarization costs: published figures as they are, projected ones as the planner has them."""

import pandas as pd
import pytest

from common.reporting.plots import plot_cost
from common.reporting.rows import clock_seconds, published_results
from common.reporting.summarization import (
    SAMSUM_ROWS,
    as_ours,
    as_published,
    cost_table,
)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return cost_table([])


def lines_of(table: pd.DataFrame, figures: str) -> pd.DataFrame:
    return table[table["Figures"].str.startswith(figures)].reset_index(drop=True)


def test_a_bill_is_time_by_price(table: pd.DataFrame) -> None:
    projected = lines_of(table, "projected")
    hours, bills = projected["Time"].map(clock_seconds) / 3600, projected["Bill (USD)"].astype(float)
    assert (hours * projected["USD per hour"].astype(float)).tolist() == pytest.approx(bills.tolist(), rel=0.01)


def test_the_published_times_follow_from_the_published_settings(table: pd.DataFrame) -> None:
    """Within a quarter for V100s with the network at its best; a row is sent for as a step on several machines."""
    projected = lines_of(table, "projected, published settings")
    assert projected["Rows per step"].tolist() == ["64", "4", "4", "4", "4"]
    for machine, network, published in (("1 x p3.8", "NVLink", "25:00"), ("4 x p3.2", "Ethernet 10 ", "2:30:00")):
        (time,) = projected[projected["Machines"].str.startswith(machine)
                            & projected["Network"].str.startswith(network)]["Time"]  # fmt: skip
        assert clock_seconds(time) == pytest.approx(clock_seconds(published), rel=0.25)


def test_with_our_settings_all_machines_take_the_same_steps(table: pd.DataFrame) -> None:
    ours = lines_of(table, "projected, our settings")
    assert set(zip(ours["Rows per step"], ours["Text and summary (tokens)"], strict=True)) == {("64", "1,024 and 128")}
    one, *several = ours.to_dict("records")
    assert one["Bills no more than one machine from"] == "-"
    for line in several:
        gbit = float(line["Bills no more than one machine from"].removesuffix(" Gbit/s"))
        enough = float(line["Network"].split()[1]) >= gbit
        assert (float(line["Bill (USD)"]) <= float(one["Bill (USD)"])) == enough


def test_a_plan_is_the_planners_own(table: pd.DataFrame) -> None:
    fleet = as_ours(published_results(metric="bill_usd")[1])
    assert fleet.settings("")["Rows per step"] == "64"
    links = [cluster.slowest_link for cluster in fleet.clusters]
    assert [link.name for link in links] == ["Ethernet 2.5 Gbit/s", "Ethernet 10 Gbit/s"]
    plan = fleet.plan(fleet.clusters[0], [])
    assert (plan.fits, plan.job.precision) == (True, "fp32")
    sent_s = plan.time.sent_gb / links[0].gb_per_s * fleet.run.gradient_accumulation_steps
    assert plan.epoch_s(SAMSUM_ROWS) > 0.9 * SAMSUM_ROWS / 64 * sent_s  # what the network takes is most of it
    assert as_published(published_results(metric="bill_usd")[0]).batch.target_length == 1024


def test_the_picture_has_a_bar_for_each_line(table: pd.DataFrame) -> None:
    hours, bill = plot_cost(table).axes
    assert len(hours.patches) == len(bill.patches) == len(table)
    widths = sorted(bar.get_width() for bar in bill.patches)
    assert widths == pytest.approx(sorted(table["Bill (USD)"].astype(float)))
    names = [label.get_text() for label in hours.get_yticklabels()]
    assert names[:: len(names) - 1] == ["1 x p3.8xlarge, published", "4 x g4dn.xlarge, Ethernet 10 Gbit/s"]
