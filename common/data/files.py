"""Read a file of rows: JSONL, JSON, CSV or Parquet, on this machine or behind any URL that fsspec reads."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from charset_normalizer import from_bytes

from common.base.errors import BadInputError
from common.data.rows import Found, Row, RowKind

PARQUET = ".parquet"
TABLES = (".jsonl", ".json", ".csv", PARQUET)
"""Files that `parse_table` and `read_rows` read."""
COMPRESSED = (".gz", ".bz2", ".xz")
"""After the suffix of a text file: it is decompressed as it is read."""
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")


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


def read_rows(source: str, kind: RowKind) -> list[Row]:
    """Return the rows of one file, on this machine or behind any URL that fsspec reads (`s3://`, `https://`, ...).

    Raises:
        BadInputError: the file is missing or empty, or a row is malformed.
    """
    if suffix_of(source) == PARQUET:
        found = _read_parquet(source, kind.holds)
    else:
        found = kind.parse(read_text(source, kind.holds), source)
    rows = kind.check(found, source)
    if not rows:
        raise BadInputError(f"The data file {source} is empty: give it at least one {kind.advice}.")
    return rows


def read_text(source: str, holds: str) -> str:
    """Return the content of a file on this machine or behind a URL; `holds` says what should stand in it.

    Raises:
        BadInputError: it is missing, cannot be read, or is not UTF-8; says which encoding it probably has.
    """
    try:
        with fsspec.open(source, "rb", compression="infer") as file:
            content = file.read()
    except FileNotFoundError:
        raise BadInputError(f"The data file {source} does not exist: make it, {holds}.") from None
    except ImportError as error:
        raise BadInputError(f"The data file {source} needs one more package ({error}): install it.") from None
    except Exception as error:  # each of fsspec's file systems has classes of its own
        raise BadInputError(f"The data file {source} cannot be read ({error}): correct --data.") from None
    try:
        return content.decode("utf-8-sig")  # Excel's files begin with a byte order mark
    except UnicodeDecodeError as error:
        line, likely = content.count(b"\n", 0, error.start) + 1, from_bytes(content).best()
        known = f"; it is probably {likely.encoding}" if likely else ""
        raise BadInputError(
            f"{source} is not UTF-8 (line {line}, byte {error.start}){known}: save it as UTF-8."
        ) from None


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


def parse_table(content: str, source: str) -> Found:
    """Return what each row of a file holds, and where it stands: of CSV, JSONL, or a JSON list.

    Raises:
        BadInputError: it is none of them.
    """
    suffix, is_list = suffix_of(source), content.lstrip().startswith("[")
    if suffix == ".csv":
        return _parse_csv(content, source)
    if not is_list and suffix != ".json":
        return parse_lines(content, source)
    try:
        found = json.loads(content)
    except json.JSONDecodeError as error:
        if not is_list:  # one object on each line
            return parse_lines(content, source)
        raise BadInputError(
            f"{source} is no JSON ({error.msg}, line {error.lineno}): correct it, or pass one row per line as .jsonl."
        ) from None
    return [(item, f"{source}, row {number}") for number, item in enumerate(found if is_list else [found], 1)]


def _parse_csv(content: str, source: str) -> Iterator[tuple[object, str]]:
    rows, number = csv.DictReader(io.StringIO(content, newline=""), strict=True), 0
    try:
        twice = [name for name, times in Counter(rows.fieldnames or ()).items() if times > 1]
        if twice:
            raise BadInputError(f"{source} has the column {twice[0]!r} more than once: rename or remove one of them.")
        for number, row in enumerate(rows, 1):
            if None in row:  # a text with commas has no quotes
                raise BadInputError(
                    f"{source}, row {number} has more fields than columns ({', '.join(rows.fieldnames or ())}): put "
                    "texts with commas in quotes."
                )
            yield row, f"{source}, row {number}"
    except csv.Error as error:
        raise BadInputError(
            f"{source}, row {number + 1} is no CSV ({error}): correct its quotes, or pass the rows as .jsonl."
        ) from None


def parse_lines(content: str, source: str) -> Iterator[tuple[object, str]]:
    """Yield what each line of a JSONL file holds, and where it stands; empty lines are left out.

    Raises:
        BadInputError: a line is no JSON.
    """
    for number, line in enumerate(content.split("\n"), 1):  # splitlines would also split at U+2028 within a text
        where = f"{source}, line {number}"
        try:
            if line.strip():
                yield json.loads(line), where
        except json.JSONDecodeError as error:
            raise BadInputError(
                f"{where} is no JSON ({error.msg} at column {error.colno}): correct or remove it."
            ) from None


def with_names(rows: Any) -> Iterator[Row]:
    """Yield the rows of a dataset's split, with names where it keeps the numbers of classes; a missing one is empty."""
    classes = {column: feature for column, feature in rows.features.items() if hasattr(feature, "int2str")}
    for row in rows:
        names = {column: kind.int2str(row[column]) if row[column] >= 0 else "" for column, kind in classes.items()}
        yield {**row, **names}
