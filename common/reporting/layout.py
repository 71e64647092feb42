"""Tables as text: Markdown that fits a page, where what all rows share is said once above them, and on a screen."""

import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from textwrap import fill
from typing import Any

import pandas as pd
from tabulate import tabulate

from common.base.inert import markdown_cell, printable

WIDEST = 120
"""Characters of a line."""
NUMBER = "No."
NOTHING = ("", "not run", "not published", "no GPU")
CELL_COLUMNS = 42
"""Widest cell; longer ones are wrapped."""
BETWEEN = 2
"""Blanks between two columns of a `simple` table, and after each header."""
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def as_markdown(table: pd.DataFrame, shared: Sequence[str] = ()) -> str:
    """Return a table; with `shared`, one for each combination of these columns' values, below a line that says them.

    Columns without any entry are left out of such a part.
    """
    if not shared:
        return _fitted(table)
    parts = []
    for values, part in table.groupby(list(shared), sort=False):
        first, *others = filter(None, values)
        entries = part.drop(columns=list(shared))
        caption = _wrapped("; ".join([f"**{first}**", *others]))
        parts.append(f"{caption}\n\n{as_markdown(entries.loc[:, (entries != '').any()])}")
    return "\n".join(parts)


def _fitted(table: pd.DataFrame) -> str:
    """Return a table, made to fit where it is too wide.

    Links become references, and the same value of all rows is said once. Where that is not enough, rows are numbered,
    and columns that have no room left stand in further tables, from the third on folded; one whose entries are too wide
    becomes a list.
    """
    if _width(table) <= WIDEST:
        return _as_table(table)
    links: dict[str, str] = {}
    table = table.map(partial(_with_references, links=links))
    first, *others = table.columns
    same = [column for column in others if len(table) > 1 and table[column].nunique() == 1]
    if table[first].nunique() == 1 < len(table) and len(same) < len(others):  # something is left to tell rows by
        same.insert(0, first)
    caption = "; ".join(f"{column}: {table[column].iloc[0]}" for column in same)
    table = table.drop(columns=same)
    if _width(table) > WIDEST:
        table.insert(0, NUMBER, [str(number) for number in range(1, len(table) + 1)])
    parts = [_wrapped(f"In all rows: {caption}.") + "\n"] if same else []
    for number, columns in enumerate(_divided(table)):
        part = table[columns]
        if number:  # rows that say nothing stand in the first part
            part = part[~part.drop(columns=NUMBER).isin(NOTHING).all(axis=1)]
        parts.append(_as_table(part) if _width(part) <= WIDEST else _listed(part))
    shown = 2 + bool(same)  # what most readers look for stands in the first columns
    parts[shown:] = [_folded(parts[shown:])] if parts[shown:] else []
    return "\n".join([*parts, *(f"[{text}]: {url}\n" for text, url in links.items())])


def _folded(parts: Sequence[str]) -> str:
    """Return parts of a page that are shown when the reader asks for them."""
    return "\n".join(["<details>", "<summary>More columns of these rows</summary>\n", *parts, "</details>\n"])


def _as_table(table: pd.DataFrame) -> str:
    table = table.map(markdown_cell).rename(columns=markdown_cell)
    return table.to_markdown(index=False, disable_numparse=True) + "\n"


def _width(table: pd.DataFrame) -> int:
    return len(_as_table(table).partition("\n")[0])


def _with_references(entry: str, links: dict[str, str]) -> str:
    links.update(LINK.findall(str(entry)))
    return LINK.sub(r"[\1]", str(entry))


def _divided(table: pd.DataFrame) -> list[list[str]]:
    """Return the columns of each part: the first, and as many others as fit, at least one."""
    first, *others = table.columns
    parts: list[list[str]] = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and _width(table[[*parts[-1], column]]) > WIDEST:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _listed(table: pd.DataFrame) -> str:
    number, column = table.columns
    lines = (f"- {row[number]}: {row[column]}" for row in table.to_dict("records"))
    return f"{column}:\n\n" + "".join(_wrapped(line, "  ") + "\n" for line in lines)


def as_list(table: pd.DataFrame, form: str) -> str:
    """Return a line of a list for each row; `form` has the columns' names in braces."""
    return "".join(f"{_wrapped(form.format_map(row), '  ')}\n" for row in table.to_dict("records"))


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, WIDEST, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


# -- on a screen


def screen_width(most: int = 120) -> int:
    """Return the columns of the terminal, at most so many; where output goes elsewhere, `most`."""
    return min(most, shutil.get_terminal_size((most, 24)).columns)


def fitted(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return a table of at most `width` columns of text (the screen's, if none are given).

    What does not fit stands in further tables below, each with the first column.
    """
    width = width or screen_width()
    cells = [[printable(str(cell)) for cell in row] for row in (headers, *rows)]
    most = min(CELL_COLUMNS, width // 2 - BETWEEN)  # so that two columns always fit
    widths = [min(most, max(map(len, column))) for column in zip(*cells, strict=True)]
    taken_by = [max(own, min(own, len(header)) + BETWEEN) for own, header in zip(widths, cells[0], strict=True)]
    groups: list[list[int]] = []
    for column, own in enumerate(taken_by[1:], 1):
        taken = taken_by[0] + sum(BETWEEN + taken_by[each] for each in groups[-1]) if groups else width
        if taken + BETWEEN + own > width:
            groups.append([])
        groups[-1].append(column)
    return "\n\n".join(_table(cells, [0, *group], widths) for group in groups)


def on_screen(table: pd.DataFrame, width: int | None = None) -> str:
    """Return a table with its index as the first column, as `fitted` prints it."""
    return fitted(["", *table.columns], list(table.reset_index().itertuples(index=False)), width)


def _table(cells: list[list[str]], columns: list[int], widths: list[int]) -> str:
    wrapped = [[fill(row[column], widths[column]) for column in columns] for row in cells]
    return tabulate(wrapped[1:], wrapped[0], tablefmt="simple", disable_numparse=True)


def brief(table: Callable[[Any], pd.DataFrame], records: object, empty: str) -> str:
    """Return a table of some records for a terminal; `empty` where it has no row."""
    cells = table(records)
    return empty if cells.empty else fitted(list(cells.columns), cells.to_numpy().tolist())
