"""Tables for a terminal: what does not fit its width stands in further tables below."""

import shutil
from collections.abc import Sequence
from textwrap import fill

from tabulate import tabulate

from common.base.inert import printable

CELL_COLUMNS = 42  # widest cell; longer ones are wrapped
BETWEEN = 2  # blanks between two columns of a `simple` table, and after each header


def screen_width(most: int = 120) -> int:
    """Return the columns of the terminal, at most so many; where output goes elsewhere, `most`."""
    return min(most, shutil.get_terminal_size((most, 24)).columns)


def fitted(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return a table of at most `width` columns (None: the screen's); what does not fit stands in tables below."""
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


def _table(cells: list[list[str]], columns: list[int], widths: list[int]) -> str:
    wrapped = [[fill(row[column], widths[column]) for column in columns] for row in cells]
    return tabulate(wrapped[1:], wrapped[0], tablefmt="simple", disable_numparse=True)
