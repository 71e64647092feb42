"""Find the rows in the text of a file: CSV as spreadsheets write it, JSON in the forms that people have, plain text."""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, islice, zip_longest
from typing import Any

from common.base.errors import BadInputError, first_sentence
from common.data.formats import ELSEWHERE, FORMATS, are_messages
from common.data.row_checks import say_once
from common.data.rows import Found, split_named

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}  # of CSV files
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[\r\n]*', re.IGNORECASE)  # what Excel writes before the names of columns
MOST_LEVELS = 100  # lists and objects within each other; at about 1,000 what walks through a row fails
WRAPPERS = 2  # objects around the rows of a JSON file, at most
COLUMNS = (*(each.needs for each in FORMATS), *ELSEWHERE)  # by which an object is a row and no wrapper of rows
DECODER, SPACES = json.JSONDecoder(), re.compile(r"\s*")
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON escapes each half of an emoji


def parse_csv(lines: Iterator[str], source: str, delimiter: str = "") -> Found:
    """Yield the rows of a CSV file, and where each stands; `delimiter`: empty = that of a line `sep=`, or what fits."""
    csv.field_size_limit(2**31 - 1)  # the most on every system: Python's own limit is 128 KiB, which a text may have
    head, number = first_lines(lines), 0
    if head and (named := SEPARATOR_LINE.fullmatch(head[-1])):
        delimiter, head = named[1], first_lines(lines)
    sample = [*head[-1:], *islice(lines, 20)]
    try:
        delimiter = delimiter or _delimiter_of(sample, source)
        padded = _is_padded(sample, delimiter)
        rows = csv.reader(chain(sample, lines), strict=True, delimiter=delimiter, skipinitialspace=padded)
        names = [name.strip() for name in next(rows, [])]
        if twice := [name for name, times in Counter(filter(None, names)).items() if times > 1]:
            raise BadInputError(f"{source} has the column {twice[0]!r} more than once: rename or remove one of them.")
        for number, cells in enumerate(filter(None, rows), 1):
            if not any(map(str.strip, cells)):
                continue
            row = dict(zip_longest(names, cells[: len(names)]))
            row.pop("", None)
            nameless = [cell for name, cell in zip_longest(names[1:], cells[1:], fillvalue="") if not name]
            if any(map(str.strip, nameless)):  # a text with a delimiter in it has no quotes
                raise BadInputError(
                    f"{source}, row {number} has more fields than columns ({', '.join(row)}): put texts with "
                    f"{DELIMITERS.get(delimiter, repr(delimiter))} in quotes."
                )
            yield row, f"{source}, row {number}"
    except csv.Error as error:
        raise BadInputError(
            f"{source}, row {number + 1} is no CSV ({error}): correct its quotes, with nothing between a closing one "
            "and the separator, or pass the rows as .jsonl."
        ) from None


def _delimiter_of(sample: list[str], source: str) -> str:
    """Return what divides most of the first lines of a CSV file alike; the comma, where it does, is not said."""

    def fit(delimiter: str) -> tuple[bool, int, int]:
        counts = [len(cells) for cells in csv.reader(sample, delimiter=delimiter) if cells] or [0]
        return counts[0] > 1, counts.count(counts[0]), counts[0]

    found = max(DELIMITERS, key=fit)
    if found != "," and sample and found in sample[0]:
        say_once(f"{source}: read with {DELIMITERS[found]} between the columns")
    return found


def _is_padded(sample: list[str], delimiter: str) -> bool:
    """Return whether spaces after delimiters belong to no cell: names begin with them, or quotes follow them."""
    names, *rows = [*csv.reader(sample, delimiter=delimiter), []]
    quoted = (cell.startswith(" ") and cell.lstrip().startswith('"') for cells in rows for cell in cells)
    return any(name.startswith(" ") for name in names[1:]) or any(quoted)


def parse_json(lines: Iterator[str], source: str) -> dict[str, Found]:
    """Return the rows of JSON or JSONL by split, and where each stands; without splits all are `train`."""
    head = first_lines(lines)
    first = head[-1].strip() if head else ""
    is_list = first.startswith("[")
    goes_on = is_list or _goes_on(first)
    more = [] if goes_on else first_lines(lines)
    if more and more[-1].strip():
        return {"train": parse_lines(chain(head, more, lines), source)}
    content = "".join(chain(head, more, lines))
    try:
        found = _decoded(content, source, _values_in)
    except json.JSONDecodeError as error:
        if not is_list:
            return {"train": parse_lines(content.split("\n"), source)}
        raise BadInputError(
            f"{source} is no JSON ({error.msg}, line {error.lineno}): correct it, or pass one row per line as .jsonl."
        ) from None
    if len(found) != 1:  # none, or as jq writes rows: one after another, in several lines each
        return {"train": _numbered(found, content, f"{source}, row")}
    splits = {"train": found[0]} if is_list else _splits_in(found[0], WRAPPERS) or {"train": found}
    return {
        split: _numbered(rows, content, f"{source}, row" if len(splits) == 1 else f"{source}, {split} row")
        for split, rows in splits.items()
    }


def _numbered(rows: list[Any], content: str, where: str) -> Found:
    is_odd = _is_odd(content)
    for number, row in enumerate(rows, 1):
        if is_odd:
            _check_odd(row, f"{where} {number}")
        yield row, f"{where} {number}"


def parse_lines(lines: Iterable[str], source: str) -> Found:
    """Yield what each line of a JSONL file holds, and where it stands; empty lines are left out."""
    for number, line in enumerate(lines, 1):
        where, content = f"{source}, line {number}", line.rstrip()  # a fault at its end is then in this line
        if not content:
            continue
        try:
            row = _decoded(content, where)
        except json.JSONDecodeError as error:
            raise BadInputError(
                f"{where} is no JSON ({error.msg} at column {error.colno}; the line ends with {content[-30:]!r}): "
                "correct or remove it."
            ) from None
        if _is_odd(content):
            _check_odd(row, where)
        yield row, where


def _values_in(text: str) -> list[Any]:
    """Return the values of JSON that stand one after another in a text."""
    values, place = [], SPACES.match(text).end()
    while place < len(text):
        value, place = DECODER.raw_decode(text, place)
        values.append(value)
        place = SPACES.match(text, place).end()
    return values


def _decoded(text: str, where: str, decode: Callable[[str], Any] = json.loads) -> Any:
    """Return what a text of JSON says, or raise JSONDecodeError; refuse what is JSON, but Python does not read."""
    try:
        return decode(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise BadInputError(f"{where} cannot be read ({first_sentence(error)}): correct or remove it.") from None


def _is_odd(text: str) -> bool:
    """Return whether JSON may hold what `_check_odd` refuses, which takes longer to find."""
    return text.count("[") + text.count("{") > MOST_LEVELS or bool(HALF_CHARACTER.search(text))


def _check_odd(row: Any, where: str) -> None:
    if _levels_of(row) > MOST_LEVELS:
        raise BadInputError(f"{where} has more than {MOST_LEVELS} lists and objects within each other: correct it.")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise BadInputError(f"{where} has half of a character, {half}, which is no text: correct it.") from None


def _levels_of(value: Any, most: int = MOST_LEVELS) -> int:
    """Return how many lists and objects are within each other, of more than `most` one more."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if parts is None or most < 0:
        return 0
    return 1 + max((_levels_of(part, most - 1) for part in parts), default=0)


def _goes_on(line: str) -> bool:
    """Return whether the JSON that a line begins ends in a later one."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(line)
    except (ValueError, RecursionError):  # told with its place once it is read
        pass
    return False


def _splits_in(value: Any, wrappers: int) -> dict[str, list[Any]]:
    """Return the rows that a value of JSON holds, by split; none if it is a row itself."""
    rows = _rows_in(value)
    if rows or not wrappers or not isinstance(value, dict) or _is_row(value):
        return {"train": rows} if rows else {}
    found = {name: inner for name, part in value.items() if (inner := _splits_in(part, wrappers - 1))}
    if len(found) == 1:
        return next(iter(found.values()))
    return {name: next(iter(inner.values())) for name, inner in found.items()}


def _rows_in(value: Any) -> list[Any]:
    """Return the rows of a list of them, or of a table as pandas' `to_json` writes it; none if it is neither."""
    if isinstance(value, list):
        return value if all(isinstance(row, dict) for row in value) and not are_messages(value) else []
    if not isinstance(value, dict) or any(map(split_named, value)):
        return []
    columns, cells, parts = value.get("columns"), value.get("data"), list(value.values())
    if isinstance(value.get("schema"), dict):  # orient="table"
        return _rows_in(cells)
    if isinstance(columns, list) and isinstance(cells, list):  # orient="split"
        is_table = all(isinstance(row, list) and len(row) == len(columns) for row in cells)
        return [dict(zip(map(str, columns), row, strict=True)) for row in cells] if is_table else []
    if all(isinstance(part, dict) for part in parts):
        if all(key.isdigit() for part in parts for key in part):  # orient="columns"
            return [{name: cells.get(key) for name, cells in value.items()} for key in next(iter(parts), {})]
        is_table = all(key.isdigit() for key in value) or all(_is_row(part, 2) for part in parts)
        return parts if len(parts) > 1 and is_table else []  # orient="index"
    if all(isinstance(part, list) and len(part) == len(parts[0]) for part in parts):  # one list for each column
        is_table = not any(isinstance(cell, dict) for part in parts for cell in part)
        return [dict(zip(value, cells, strict=True)) for cells in zip(*parts, strict=True)] if is_table else []
    return []


def _is_row(value: dict[str, Any], least: int = 1) -> bool:
    """Return whether an object has messages, or single values in at least so many columns of a row that is known."""
    names = {name.lower() for name, each in value.items() if not isinstance(each, list | dict)}
    is_known = any(names.issuperset(columns) for columns in COLUMNS if len(columns) >= least)
    return is_known or any(map(are_messages, value.values()))


def parse_paragraphs(lines: Iterator[str], source: str) -> Found:
    """Yield the paragraphs of a text file, which are separated by empty lines, and where each begins."""
    for is_filled, group in groupby(enumerate(lines, 1), key=lambda numbered: bool(numbered[1].strip())):
        if is_filled:
            numbered = list(group)
            lines_of_text = (line.rstrip("\r\n") for _, line in numbered)  # Windows ends lines with both
            yield {"text": "\n".join(lines_of_text).strip()}, f"{source}, line {numbered[0][0]}"


def first_lines(lines: Iterator[str]) -> list[str]:
    """Return the first lines, up to one that is not empty."""
    head = []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    return head
