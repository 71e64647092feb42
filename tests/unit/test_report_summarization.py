"""3.2's tables: projected times near the published ones, seeds in one line, the terminal's table, and the picture."""

import copy
import importlib
from datetime import date

import pandas as pd
import pytest

from bench.tables.summarization import MACHINES, TABLES, Machine
from common.base.paths import REPOSITORY
from common.hardware.devices import find_gpu
from common.records.store import Record, kept_records
from common.reporting.rows import clock_seconds, task_of
from common.reporting.tasks import SUMMARIZATION


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return TABLES["summarization-cost"]([])


def lines_of(table: pd.DataFrame, figures: str) -> pd.DataFrame:
    return table[table["Figures"].str.startswith(figures)].reset_index(drop=True)


def test_published_figures_are_those_of_the_source(table: pd.DataFrame) -> None:
    found = lines_of(table, "published")[["Time", "USD per hour", "Bill (USD)"]]
    assert found.values.tolist() == [
        ["25:00", "13.00", "5.50"],
        ["2:30:00", "12.00", "30.00"],
        ["4:00:00", "2.00", "8.00"],
    ]


def test_the_published_times_follow_from_the_published_settings(table: pd.DataFrame) -> None:
    """Within a quarter for V100s with the network at its best; a row is sent for as a step on several machines."""
    projected = lines_of(table, "projected, published settings")
    assert projected["Examples per step"].tolist() == ["64", "4", "4", "4", "4"]
    for machine, network, published in (("1 x p3.8", "NVLink", "25:00"), ("4 x p3.2", "Ethernet 10 ", "2:30:00")):
        (time,) = projected[projected["Machines"].str.startswith(machine)
                            & projected["Network"].str.startswith(network)]["Time"]  # fmt: skip
        assert clock_seconds(time) == pytest.approx(clock_seconds(published), rel=0.25)


def test_the_picture_has_a_bar_for_each_line(table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "3.2_summarization" / "run_0_cpu_x2")
    hours, bill = importlib.import_module("my_utils_summarization").plot_cost(table).axes
    assert len(hours.patches) == len(bill.patches) == len(table)
    widths = sorted(bar.get_width() for bar in bill.patches)
    assert widths == pytest.approx(sorted(table["Bill (USD)"].astype(float)))
    names = [label.get_text() for label in hours.get_yticklabels()]
    assert names[:: len(names) - 1] == ["1 x p3.8xlarge, published", "4 x g4dn.xlarge, Ethernet 10 Gbit/s"]


@pytest.fixture
def records() -> list[Record]:
    return copy.deepcopy([record for record in kept_records() if task_of(record) == "summarization"])


def test_the_terminals_table_and_the_one_of_all_results_have_every_loop(records: list[Record]) -> None:
    settings = TABLES["summarization-loops"](records).query("Figures == 'measured'")["Loop"]
    assert len(TABLES["summarization-front"](records)) == len(settings)
    lines = SUMMARIZATION.text(records).splitlines()
    for loop, count in settings.value_counts().items():
        found = sum(line.startswith(f"{loop} ") for line in lines)
        assert found
        assert found % count == 0  # as many in each part of the table


def test_seeds_stand_in_one_line_with_their_range(records: list[Record]) -> None:
    run = next(record for record in records if record["config"]["loop"] == "accelerate")
    other = copy.deepcopy(run)
    other["config"]["seed"] = 43
    for each, score in ((run, 0.9), (other, 0.8)):
        each["quality"]["after"]["rougeL"] = score
    (line,) = TABLES["summarization-loops"]([run, other]).query("Figures == 'measured'").to_dict("records")
    assert line["Seeds"] == "2"
    assert line["ROUGE-L before -> after"].endswith(" -> 0.850 (0.800 to 0.900)")


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_machine_has_gpus_of_the_catalogue_and_its_sources(machine: Machine) -> None:
    assert find_gpu(machine.gpu).name == machine.gpu
    assert 0 < machine.network_gbit <= machine.peak_gbit
    assert machine.network_source.startswith("https://")
    assert "https://" in machine.price_source
    assert date(2026, 1, 1) <= date.fromisoformat(machine.price_date)
    assert 0.1 < machine.usd_per_hour / machine.gpus < 10
