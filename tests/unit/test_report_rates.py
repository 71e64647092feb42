"""The tables of published rates beside planned ones: every point, and narrow enough for a readme."""

import pytest

from common.base.paths import REPOSITORY
from common.planning.published_rates import excluded_rates, published_rates, source_name
from common.reporting.rates import tables_by_source
from common.reporting.tables import TABLES, rendered

WIDEST = 120


@pytest.mark.parametrize("name", ["rates-by-source", "rates-well-known"])
def test_the_readme_s_tables_are_narrow(name: str) -> None:
    lines = rendered(name, []).splitlines()
    assert len(lines) > 10
    assert max(map(len, lines)) <= WIDEST


def test_the_page_has_every_point_and_the_readme_counts_them() -> None:
    page = (REPOSITORY / "docs" / "published_rates.md").read_text(encoding="utf-8")
    tables = tables_by_source()
    assert all(f"<!-- table: {name} -->" in page for name in tables)
    assert sum(len(table([])) for table in tables.values()) == len(published_rates())
    assert all(f"https://github.com/{source_name(rate.source)})" in page for rate in published_rates())
    _, _, *sources, total = rendered("rates-by-source", []).splitlines()
    counts = [int(line.split("|")[3]) for line in (*sources, total)]
    assert sum(counts[:-1]) == counts[-1] == len(published_rates())
    assert sum(map(int, TABLES["rates-not-used"]([])["Points"])) == len(excluded_rates())
