"""The tables of published rates beside planned ones have every point."""

from bench.tables.publications import RATES_BY_SOURCE
from common.base.paths import REPOSITORY
from common.planning.published_rates import published_rates, source_name


def test_the_page_has_every_point() -> None:
    page = (REPOSITORY / "docs" / "published_rates.md").read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->" in page for name in RATES_BY_SOURCE)
    assert sum(len(table([])) for table in RATES_BY_SOURCE.values()) == len(published_rates())
    assert all(f"https://github.com/{source_name(rate.source)})" in page for rate in published_rates())
