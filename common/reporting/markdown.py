"""Tables as Markdown that fits a page: what all rows of a part share is said once, above the part."""

from collections.abc import Sequence
from textwrap import fill

import pandas as pd

WIDEST = 120
"""Characters of a line."""


def as_markdown(table: pd.DataFrame, shared: Sequence[str] = ()) -> str:
    """Return a table; with `shared`, one for each combination of these columns' values, below a line that says them.

    Columns without any entry are left out of such a part.
    """
    if not shared:
        return table.to_markdown(index=False, disable_numparse=True) + "\n"
    columns = list(shared)
    return "\n".join(
        f"{_caption(values)}\n\n{as_markdown(_with_entries(part.drop(columns=columns)))}"
        for values, part in table.groupby(columns, sort=False)
    )


def as_list(table: pd.DataFrame, form: str) -> str:
    """Return a line of a list for each row; `form` has the columns' names in braces."""
    return "".join(f"{_wrapped(form.format_map(row), '  ')}\n" for row in table.to_dict("records"))


def _caption(values: Sequence[str]) -> str:
    first, *others = filter(None, values)
    return _wrapped("; ".join([f"**{first}**", *others]))


def _with_entries(table: pd.DataFrame) -> pd.DataFrame:
    return table.loc[:, [any(table[column] != "") for column in table]]


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, WIDEST, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
