"""Texts of others do nothing where they are shown, and are read back as they were."""

import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, strategies as st

from bench.page.page import json_in_html
from bench.tables.markdown import as_markdown, markdown_cell
from common.base.inert import csv_cell, csv_text, one_line, printable
from common.reporting.layout import fitted
from common.tasks.samples import before_and_after, predictions, samples

STEERS = ("\x1b[2J", "\x9b2J", "\x07", "\r", "\x08", "\x7f", "\u202e", "\u2066", "\u200f", "\u2028", "\ud800", "\x00")
FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1", "=cmd|' /C calc'!A0", "'=1", "''-1")
texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize("steer", STEERS)
def test_a_terminal_is_not_steered(steer: str) -> None:
    for shown in (printable(f"a{steer}b\nc"), fitted(["", f"x{steer}"], [[f"a{steer}", "b"]])):
        assert steer not in shown
        assert all(line.isprintable() for line in shown.splitlines())
        shown.encode()
    assert one_line(f"a\nb{steer}").isprintable()


def test_letters_of_any_language_are_shown_as_they_are() -> None:
    for text in ("naïve “10 000 €”", "שלום", "مرحبا", "नमस्ते", "👩‍👩‍👧", "日本語"):
        assert printable(text) == text


@given(st.lists(texts | st.sampled_from(FORMULAS), min_size=1, max_size=4))
def test_no_cell_is_a_formula_and_each_is_read_back(cells: list[str]) -> None:
    for cell in cells:
        written = csv_cell(cell)
        assert not str(written).startswith(
            ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
        )
        assert csv_text(written) == cell


def test_predictions_are_read_back_and_numbers_stay_numbers(tmp_path: Path) -> None:
    from common.tasks.predictions import report_predictions

    class Log:
        folder = tmp_path

        class rank:  # noqa: N801 - as a run's
            is_main = True

    rows = [
        {"question": f"q {text}", "answer": text, "reference": text, "score": -0.5} for text in (*FORMULAS, "x", "")
    ]
    report_predictions(Log, "after", rows, "well")
    read = predictions(tmp_path)["after"]
    assert read["answer"].tolist() == [row["answer"] for row in rows]
    assert before_and_after(tmp_path, 100)["expected"].tolist() == [row["reference"] for row in rows]
    assert pd.read_csv(tmp_path / "predictions_after.csv")["score"].tolist() == [-0.5] * len(rows)
    raw = pd.read_csv(tmp_path / "predictions_after.csv", dtype=str, keep_default_na=False)
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for cell in raw["answer"])


def test_samples_of_answers_do_not_steer_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "predictions_after.csv").write_text(
        'question,answer,reference\n"a\x1b[2J",b\u202ec,d\n', encoding="utf-8"
    )
    assert all(line.isprintable() for line in samples(tmp_path).splitlines())


def test_a_cell_of_markdown_ends_neither_its_cell_nor_its_row_and_holds_no_tag() -> None:
    text = "a|b\nc <script>alert(1)</script> `x < y <z>` 1 < 2 \x1b[2J"
    cell = markdown_cell(text)
    assert cell == r"a\|b c &lt;script>alert(1)&lt;/script> `x < y <z>` 1 < 2 \x1b[2J"
    lines = as_markdown(pd.DataFrame({"A": [text], "B": ["b"]})).splitlines()
    assert len(lines) == 3
    assert lines[-1].replace(r"\|", "").count("|") == 3


def test_json_in_html_has_no_tag_and_is_the_same() -> None:
    value = {"<!-- <script>": ["</script>", "\u2028", 1.5, None]}
    assert "<" not in json_in_html(value)
    assert json.loads(json_in_html(value)) == value
