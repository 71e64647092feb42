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
    machines_table,
)
from common.reporting.tables import TABLES


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return cost_table([])


def lines_of(table: pd.DataFrame, figures: str) -> pd.DataFrame:
    return table[table["Figures"].str.startswith(figures)].reset_index(drop=True)


def test_every_figure_says_where_it_comes_from(table: pd.DataFrame) -> None:
    assert TABLES["summarization-cost"] is cost_table
    kinds = table["Figures"].str.split("[:;]").str[0]
    assert kinds.unique().tolist() == ["published", "projected, published settings", "projected, our settings"]
    assert table["Figures"].str.contains("question 5|price of 2026-").all()
    assert not table.isna().any(axis=None)


def test_published_figures_stay_as_they_were(table: pd.DataFrame) -> None:
    found = lines_of(table, "published")
    assert found["Time"].tolist() == ["25:00", "2:30:00", "4:00:00"]
    assert found["USD per hour"].tolist() == ["13.00", "12.00", "2.00"]
    assert found["Bill (USD)"].tolist() == ["5.50", "30.00", "8.00"]
    assert "estimated" not in found["Figures"][0]
    assert "about 3 h elsewhere in the same text" in found["Figures"][1]
    assert "published as g4.xlarge" in found["Figures"][2]


def test_a_bill_is_time_by_price(table: pd.DataFrame) -> None:
    projected = lines_of(table, "projected")
    hours = projected["Time"].map(clock_seconds) / 3600
    bills = hours * projected["USD per hour"].astype(float)
    assert bills.tolist() == pytest.approx(projected["Bill (USD)"].astype(float).tolist(), rel=0.01)


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
    assert set(ours["Rows per step"]) == {"64"}
    assert set(ours["Text and summary (tokens)"]) == {"1,024 and 128"}
    one, *several = ours.to_dict("records")
    assert one["Bills no more than one machine from"] == "-"
    for line in several:
        gbit = float(line["Bills no more than one machine from"].removesuffix(" Gbit/s"))
        enough = float(line["Network"].split()[1]) >= gbit
        assert (float(line["Bill (USD)"]) <= float(one["Bill (USD)"])) == enough


def test_a_plan_is_the_planners_own(table: pd.DataFrame) -> None:
    fleet = as_ours(published_results(metric="bill_usd")[1])
    assert fleet.settings("")["Rows per step"] == "64"
    always, at_best = fleet.clusters
    assert (always.slowest_link.name, at_best.slowest_link.name) == ("Ethernet 2.5 Gbit/s", "Ethernet 10 Gbit/s")
    plan = fleet.plan(always, [])
    assert plan.fits
    assert plan.job.precision == "fp32"
    steps = SAMSUM_ROWS / 64
    sent_s = plan.time.sent_gb / always.slowest_link.gb_per_s * fleet.run.gradient_accumulation_steps
    assert plan.epoch_s(SAMSUM_ROWS) > steps * 0.9 * sent_s  # what the network takes is most of it
    assert as_published(published_results(metric="bill_usd")[0]).batch.target_length == 1024


def test_the_catalogue_s_figures_stand_beside_their_sources() -> None:
    table = machines_table([])
    assert table["Machine"].tolist() == ["p3.8xlarge", "p3.2xlarge", "g4dn.xlarge"]
    published, assumed = "of 15.7 TFLOP/s.* published rates are of it", "its share of the peak is assumed"
    assert table["Speed"].str.contains(f"{published}|{assumed}").all()
    assert table["Published"].str.startswith("https://").all()


def test_the_picture_has_a_bar_for_each_line(table: pd.DataFrame) -> None:
    hours, bill = plot_cost(table).axes
    assert len(hours.patches) == len(bill.patches) == len(table)
    widths = sorted(bar.get_width() for bar in bill.patches)
    assert widths == pytest.approx(sorted(table["Bill (USD)"].astype(float)))
    names = [label.get_text() for label in hours.get_yticklabels()]
    assert names[0] == "1 x p3.8xlarge, published"
    assert names[-1] == "4 x g4dn.xlarge, Ethernet 10 Gbit/s"
