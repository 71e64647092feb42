"""The tables of published rates beside planned ones have every point."""

from common.base.paths import REPOSITORY
from common.planning.published_rates import published_rates, source_name
from common.reporting.rates import tables_by_source


def test_the_page_has_every_point() -> None:
    page = (REPOSITORY / "docs" / "published_rates.md").read_text(encoding="utf-8")
    tables = tables_by_source()
    assert all(f"<!-- table: {name} -->" in page for name in tables)
    assert sum(len(table([])) for table in tables.values()) == len(published_rates())
    assert all(f"https://github.com/{source_name(rate.source)})" in page for rate in published_rates())
