"""What 3.3's pages do not show: the terminal's table, and the gallery of the results page."""

from bench.page.runs import values_of
from common.records.store import kept_records
from common.reporting.rows import task_of
from common.reporting.tasks import PICTURES


def test_the_terminal_s_table_has_a_line_for_each_setting() -> None:
    lines = PICTURES.text(kept_records()).splitlines()
    assert any(line.startswith("Full fine-tuning with DDP ") for line in lines)
    assert PICTURES.text([]) == "no run about pictures is completed yet"


def test_the_page_has_the_gallery_of_runs_about_pictures() -> None:
    records = kept_records()
    of_pictures = next(record for record in records if task_of(record) == "visual_questions")
    shown = values_of(of_pictures)
    assert of_pictures["gallery"]
    assert (shown["gallery"], shown["quality"]) == (
        of_pictures["gallery"], of_pictures["quality"]["after"]["facts_said_share"]
    )  # fmt: skip
    assert {len(values_of(record)["gallery"]) for record in records if task_of(record) == "chat"} == {0}
