"""Tables that fit a page."""

import pandas as pd

from bench.tables.markdown import WIDEST, as_markdown, with_footnotes


def wide(rows: int = 3) -> pd.DataFrame:
    names = [f"a column with a long name, number {number}" for number in range(6)]
    return pd.DataFrame({"Run": [f"run {row}" for row in range(rows)], "Seed": "42"} |
                        {name: [f"{name[-1]}{row}" for row in range(rows)] for name in names})  # fmt: skip


def test_a_narrow_table_stays_as_it_is() -> None:
    assert as_markdown(pd.DataFrame({"Run": ["a", "b"], "Seed": ["1", "1"]})).count("| 1") == 2
    assert "<details>" not in as_markdown(wide().iloc[:, :4])


def test_a_wide_table_is_divided_and_from_the_third_part_on_folded_and_nothing_of_it_is_lost() -> None:
    text = as_markdown(wide())
    assert max(map(len, text.splitlines())) <= WIDEST
    assert text.startswith("In all rows: Seed: 42.")
    cells = [f"| {column}{row} " for row in range(3) for column in range(6)]
    assert [cell for cell in (*cells, *(f"| {row + 1}     | run {row}" for row in range(3))) if cell not in text] == []
    shown, _, folded = text.partition("<details>")
    assert [part.count("| No.") for part in (shown, folded)] == [2, 1]
    assert folded.rstrip().endswith("</details>")


def test_links_are_references_that_stand_below() -> None:
    url = "https://example.org/" + 150 * "x"
    text = as_markdown(wide().assign(Run=f"[a source]({url}), section 6"))
    assert "[a source], section 6" in text
    assert text.endswith(f"[a source]: {url}\n")


def test_rows_that_say_nothing_stand_in_the_first_part_alone() -> None:
    table = wide()
    table.iloc[2, 2:] = "not run"
    parts = [part for part in as_markdown(table).split("\n\n") if part.startswith("| No.")]
    assert ["| 3 " in part for part in parts] == [True] + [False] * (len(parts) - 1)


def test_a_column_that_is_too_wide_is_a_list() -> None:
    text = as_markdown(wide(2).assign(Command=["python " + 130 * "x", "make"]))
    assert "Command:\n\n- 1: python\n  x" in text
    assert "- 2: make\n" in text


def test_rows_from_the_same_place_share_a_footnote() -> None:
    table = pd.DataFrame({"Run": ["a", "b", "c"], "Seed": ["1", "2", "3"]})
    lines = with_footnotes(table, ["here", "there", "here"], "found 2.2").splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| a [^1]", "| b [^2]", "| c [^1]"]
    assert lines[-2:] == ["[^1]: here", "[^2]: there"]
    assert "| a [^l1] " in with_footnotes(table, ["here", "there", "here"], "found 3.1 lora")
