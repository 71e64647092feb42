"""Tables as Markdown that fits a page, where what all rows share is said once above them."""

import re
from collections.abc import Sequence
from functools import partial
from textwrap import fill

import pandas as pd

from common.base.inert import one_line

WIDEST = 120  # characters of a line
NUMBER = "No."
NOTHING = ("", "not run", "not published", "no GPU")
OPENING_TAG = re.compile(r"<(?=[\w/!?])")
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


def with_footnotes(table: pd.DataFrame, notes: Sequence[str], name: str) -> str:
    """Return a table whose first column refers to footnotes below it, one for equal ones.

    Their labels are numbers, after the first letter of what a table of a technique's part is called: unique in a page.
    """
    *_, last = name.split()
    prefix = last[0] if last.isalpha() else ""
    labels = {note: f"[^{prefix}{number}]" for number, note in enumerate(dict.fromkeys(notes), 1)}
    first = table.columns[0]
    marked = table.assign(**{first: [f"{cell} {labels[note]}" for cell, note in zip(table[first], notes, strict=True)]})
    return "\n".join([as_markdown(marked), *(f"{label}: {note}" for note, label in labels.items()), ""])


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, WIDEST, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def markdown_cell(value: object) -> object:
    """Return a cell of a table in Markdown, on one line; within backticks a tag is code, and stays."""
    if not isinstance(value, str):
        return value
    parts = one_line(value).replace("|", r"\|").split("`")
    return "`".join(part if place % 2 else OPENING_TAG.sub("&lt;", part) for place, part in enumerate(parts))
