"""Read a file of rows: JSONL, JSON, CSV, TSV or Parquet, on this machine or behind any URL that fsspec reads."""

import codecs
import csv
import json
import re
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from lzma import LZMAError
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from charset_normalizer import CharsetMatches, from_bytes

from common.base.errors import BadInputError
from common.data.row_checks import say_once
from common.data.rows import Found, Row, RowKind
from common.data.stored_rows import stored

PARQUET = ".parquet"
TAB_SEPARATED = ".tsv"
TABLES = (".jsonl", ".json", ".csv", TAB_SEPARATED, PARQUET)
"""Files that `parse_table` and `read_rows` read."""
COMPRESSED = (".gz", ".bz2", ".xz")
"""After the suffix of a text file: it is decompressed as it is read."""
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
LARGEST_FIELD = 2**31 - 1
"""Characters of a field of a CSV file: the most that Python's reader can be told on every system."""
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
"""Of CSV files; spreadsheets write semicolons where the comma divides a number."""
SAMPLE_LINES = 10_000
"""Lines before and after one that is not UTF-8, by which its encoding is guessed."""
WESTERN = "cp1252"
OTHER_LATIN = re.compile(r"cp125[078]|iso8859_\d+|latin_1|hp_roman8|mac_(iceland|latin2|roman|turkish)")
"""Code pages that share most letters with Windows' Western one, and are much rarer where both are possible."""
SHOWN_AROUND = 30


def suffix_of(source: str) -> str:
    """Return the suffix of a file or URL, without that of its compression: `.csv` of `https://host/rows.csv.gz?a=b`.

    Raises:
        BadInputError: it is an archive, or a Parquet file that was compressed once more.
    """
    suffixes = PurePosixPath(urlsplit(source).path.lower()).suffixes[-2:]
    suffix = suffixes[-1] if suffixes else ""
    is_compressed = suffix in COMPRESSED
    inner = suffixes[0] if is_compressed and len(suffixes) > 1 else suffix
    if inner in ARCHIVES or (is_compressed and inner == PARQUET):
        raise BadInputError(
            f"The data file {source} is an archive, which is not read: unpack it, and pass --data with the file or "
            f"folder that was in it ({', '.join(TABLES)}; a text file may end in {', '.join(COMPRESSED)})."
        )
    return inner


def read_rows(source: str, kind: RowKind) -> Sequence[Row]:
    """Return the rows of one file, on this machine or behind any URL that fsspec reads (`s3://`, `https://`, ...).

    The file is read line by line, so that it may be larger than memory (a list in JSON is read at once).

    Raises:
        BadInputError: the file is missing or empty, or a row is malformed.
    """
    if suffix_of(source) == PARQUET:
        rows = stored(kind.check(_read_parquet(source, kind.holds), source), f"reading {source}")
    else:
        with lines_of(source, kind.holds) as lines:
            rows = stored(kind.check(kind.parse(lines, source), source), f"reading {source}")
    if not rows:
        raise BadInputError(f"The data file {source} is empty: give it at least one {kind.advice}.")
    return rows


@contextmanager
def lines_of(source: str, holds: str) -> Iterator[Iterator[str]]:
    """Open a text file on this machine or behind a URL, and yield its lines; `holds` says what should stand in it.

    Raises:
        BadInputError: it is missing, cannot be read, or is not UTF-8; says which encoding it probably has.
    """
    try:
        # utf-8-sig: Excel's files begin with a byte order mark; newline: fields of a CSV file keep theirs
        file = fsspec.open(source, "rt", encoding="utf-8-sig", newline="", compression="infer").open()
    except FileNotFoundError:
        raise BadInputError(f"The data file {source} does not exist: make it, {holds}.") from None
    except ImportError as error:
        raise BadInputError(f"The data file {source} needs one more package ({error}): install it.") from None
    except Exception as error:  # each of fsspec's file systems has classes of its own
        raise _unreadable(source, error) from None
    with file:
        yield _guarded(file, source)


def _guarded(file: Iterable[str], source: str) -> Iterator[str]:
    """Yield the lines of a file; what fails where they are used does not pass through here, and keeps its own name."""
    try:
        yield from file
    except UnicodeDecodeError:
        raise _not_utf8(source) from None
    except (OSError, EOFError, zlib.error, LZMAError) as error:
        raise _unreadable(source, error) from None


def _unreadable(source: str, error: Exception) -> BadInputError:
    return BadInputError(f"The data file {source} cannot be read ({error}): correct --data.")


def _not_utf8(source: str) -> BadInputError:
    """Return the refusal of a file, with its first line that is not UTF-8."""
    before, offset = deque[bytes](maxlen=SAMPLE_LINES), 0
    with fsspec.open(source, "rb", compression="infer") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                likely = _likely(from_bytes(b"".join([*before, line, *islice(file, SAMPLE_LINES)])))
                return BadInputError(
                    f"{source} is not UTF-8 (line {number}, byte {offset + error.start})"
                    f"{_read_as(likely, line, error.start)}: save it as UTF-8{_by_iconv(likely)}."
                )
            before.append(line)
            offset += len(line)
    return BadInputError(f"{source} is not UTF-8: save it as UTF-8.")  # it has changed since


def _likely(matches: CharsetMatches) -> str:
    """Return the encoding that a text probably has; empty where none is possible."""
    best = matches.best()
    if best is None:
        return ""
    is_western = any(WESTERN in match.could_be_from_charset for match in matches)
    return WESTERN if is_western and OTHER_LATIN.fullmatch(best.encoding) else best.encoding


def _read_as(encoding: str, line: bytes, place: int) -> str:
    """Return how the part of a line around a byte reads in an encoding, so that a wrong guess is seen."""
    if not encoding:
        return ""
    before = line[:place].decode(encoding, "ignore")
    begin = max(0, len(before) - SHOWN_AROUND)
    part = line.decode(encoding, "ignore")[begin : len(before) + SHOWN_AROUND]
    return f"; it is probably {encoding}, in which the line reads {part.strip()!r}"


def _by_iconv(encoding: str) -> str:
    if not encoding:
        return ""
    name = codecs.lookup(encoding).name.replace("_", "-")
    return f", as by `iconv -f {name} -t utf-8 old > new`"


def _read_parquet(source: str, holds: str) -> Found:
    from datasets import load_dataset  # here: only runs on such a file need it, and it takes two seconds to import

    try:
        rows = load_dataset("parquet", data_files=source, split="train")
    except FileNotFoundError:
        raise BadInputError(f"The data file {source} does not exist: make it, {holds}.") from None
    except Exception as error:  # what is wrong with the file is in the class, or in the class of its cause
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise BadInputError(f"The data file {source} cannot be read as Parquet ({reason}): correct it.") from None
    return ((row, f"{source}, row {number}") for number, row in enumerate(with_names(rows), 1))


def parse_table(lines: Iterator[str], source: str) -> Found:
    """Return what each row of a file holds, and where it stands: of CSV, TSV, JSONL, or a JSON list.

    Raises:
        BadInputError: it is none of them.
    """
    if suffix_of(source) in (".csv", TAB_SEPARATED):
        return _parse_csv(lines, source)
    head = _head(lines)
    is_list = head[-1].lstrip().startswith("[") if head else False
    if not is_list and suffix_of(source) != ".json":
        return parse_lines(chain(head, lines), source)
    content = "".join(chain(head, lines))
    try:
        found = json.loads(content)
    except json.JSONDecodeError as error:
        if not is_list:  # one object on each line
            return parse_lines(content.split("\n"), source)
        raise BadInputError(
            f"{source} is no JSON ({error.msg}, line {error.lineno}): correct it, or pass one row per line as .jsonl."
        ) from None
    return [(item, f"{source}, row {number}") for number, item in enumerate(found if is_list else [found], 1)]


def _head(lines: Iterator[str]) -> list[str]:
    """Return the first lines, up to one that is not empty."""
    head = []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    return head


def _parse_csv(lines: Iterator[str], source: str) -> Iterator[tuple[object, str]]:
    csv.field_size_limit(LARGEST_FIELD)  # Python's own limit is 128 KiB, which a text may well have
    head, number = _head(lines), 0
    try:
        delimiter = "\t" if suffix_of(source) == TAB_SEPARATED else _delimiter_of("".join(head[-1:]), source)
        rows = csv.DictReader(chain(head, lines), strict=True, delimiter=delimiter)
        twice = [name for name, times in Counter(rows.fieldnames or ()).items() if times > 1]
        if twice:
            raise BadInputError(f"{source} has the column {twice[0]!r} more than once: rename or remove one of them.")
        for number, row in enumerate(rows, 1):
            if None in row:  # a text with a delimiter in it has no quotes
                raise BadInputError(
                    f"{source}, row {number} has more fields than columns ({', '.join(rows.fieldnames or ())}): put "
                    f"texts with {DELIMITERS[delimiter]} in quotes."
                )
            yield row, f"{source}, row {number}"
    except csv.Error as error:
        raise BadInputError(
            f"{source}, row {number + 1} is no CSV ({error}): correct its quotes, or pass the rows as .jsonl."
        ) from None


def _delimiter_of(header: str, source: str) -> str:
    """Return what divides the first line of a CSV file into most columns; the comma, where it does, is not said."""
    found = max(DELIMITERS, key=lambda delimiter: len(next(csv.reader([header], delimiter=delimiter), ())))
    if found != ",":
        say_once(f"{source}: read with {DELIMITERS[found]} between the columns")
    return found


def parse_lines(lines: Iterable[str], source: str) -> Iterator[tuple[object, str]]:
    """Yield what each line of a JSONL file holds, and where it stands; empty lines are left out.

    Raises:
        BadInputError: a line is no JSON.
    """
    for number, line in enumerate(lines, 1):
        where, content = f"{source}, line {number}", line.rstrip()  # a fault at its end is then in this line
        try:
            if content:
                yield json.loads(content), where
        except json.JSONDecodeError as error:
            raise BadInputError(
                f"{where} is no JSON ({error.msg} at column {error.colno}; the line ends with {content[-30:]!r}): "
                "correct or remove it."
            ) from None


def with_names(rows: Any) -> Iterator[Row]:
    """Yield the rows of a dataset's split, with names where it keeps the numbers of classes; a missing one is empty.

    Pictures come as they are stored, and are not decoded.
    """
    for column, feature in rows.features.items():
        if (stored_so := _undecoded(feature)) != feature:
            rows = rows.cast_column(column, stored_so)
    classes = {column: feature for column, feature in rows.features.items() if hasattr(feature, "int2str")}
    for row in rows:
        names = {column: kind.int2str(row[column]) if row[column] >= 0 else "" for column, kind in classes.items()}
        yield {**row, **names}


def _undecoded(feature: Any) -> Any:
    """Return a column's type with its pictures as they are stored."""
    from datasets import Image, List  # here, as above

    if isinstance(feature, List):
        return List(_undecoded(feature.feature), length=feature.length)
    return Image(decode=False) if isinstance(feature, Image) else feature
