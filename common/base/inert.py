"""Texts of others (a user's rows, a model's answers, a record) that do nothing in the place where they are shown."""

import re

NOT_SHOWN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed, and with them all escape sequences
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that turn the direction of what follows
    r"\u2028\u2029\ud800-\udfff]"  # separators of lines, and half characters, which no file takes
)
# how a cell begins that a spreadsheet takes for a formula; with a quote before it, for a text
FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff0b\uff0d\uff1d\uff20]")
QUOTED_FORMULA = re.compile(rf"'(?={FORMULA.pattern})")


def printable(text: str) -> str:
    """Return a text as a terminal may show it: `\\x1b` for what would steer it."""
    return NOT_SHOWN.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return a text on one line, as a terminal may show it."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def matplotlib_text(text: str) -> str:
    """Return a text as Matplotlib shows it, which takes what stands between dollars for a formula."""
    return printable(text).replace("$", r"\$")


def csv_cell(value: object) -> object:
    r"""Return a cell of a CSV file that no spreadsheet runs: a text that begins as a formula gets a quote before it."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def csv_text(cell: object) -> object:
    """Return what `csv_cell` was given."""
    return QUOTED_FORMULA.sub("", cell, count=1) if isinstance(cell, str) and QUOTED_FORMULA.match(cell) else cell
