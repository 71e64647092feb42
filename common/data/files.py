"""Read files of rows, of any kind, compressed or not, on this machine or behind any URL that fsspec reads."""

import codecs
import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader, TextIOWrapper
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from charset_normalizer import from_bytes
from fsspec.compression import compr
from fsspec.utils import infer_compression

from common.base.errors import BadInputError, reading
from common.data.rows import Found, Row, RowKind
from common.data.stored_rows import BATCH_ROWS, stored
from common.data.tables import parse_csv, parse_json, parse_paragraphs
from common.data.tool_calls import as_written

ARROW = ".arrow"  # what `save_to_disk` of `datasets` writes
BINARY = (".parquet", ARROW)
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".ndjson", *BINARY)  # files of rows with columns
TEXT_FILE = ".txt"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
BEGINNINGS = {  # of files that are not what their names say
    b"version https://git-lfs": "a pointer of Git LFS instead of the file: run `git lfs pull` in its folder",
    b"PK\3\4": "a spreadsheet (save it as .csv) or an archive (unpack it)",
    b"\xd0\xcf\x11\xe0": "an old spreadsheet (.xls): save it as .csv",
    b"\x1f\x8b": "compressed: let its name end in .gz",
    b"PAR1": "Parquet: let its name end in .parquet",
}
BEGIN_BYTES = 64
BYTE_ORDER_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
NOT_FOUND = (404, 410)  # answers of HTTP: there is no such file
PIECE, LONGEST_LINE = 2**24, 2**30  # characters of a line: read at once, and at most
BOMB_CHARACTERS, BOMB_LINES, BOMB_RATIO = 2**26, 2**17, 1_000
"""What a compressed file may become: so many characters, or as many times its size; so many lines, or one a byte."""
SAMPLE_LINES, SAMPLE_BYTES, SHOWN_AROUND = 2_000, 2**18, 30  # around a byte that is not UTF-8, to guess the encoding
WESTERN = "cp1252"
OTHER_LATIN = re.compile(r"cp125[078]|iso8859_\d+|latin_1|hp_roman8|mac_(iceland|latin2|roman|turkish)")
"""Code pages that share most letters with Windows' Western one, and are much rarer where both are possible."""


def is_url(source: str) -> bool:
    """Return whether a source is read by fsspec; whatever else it has in it, the name of a file here has no `://`."""
    return "://" in source


def is_http(source: str) -> bool:
    """Return whether a source is a URL of a web server, which may have more behind its path."""
    return is_url(source) and "http" in source.partition("://")[0]


def suffixes_of(source: str) -> tuple[str, str]:
    """Return a file's or URL's suffix, and that of its compression: `.csv` and `.gz` of `https://a/rows.csv.gz?b=c`."""
    path = urlsplit(source).path if is_http(source) else source
    *_, inner, last = "", "", *PurePosixPath(path.lower()).suffixes
    if last in COMPRESSED and inner:
        return inner, last
    is_table = last == TEXT_FILE and inner in TABLES  # as Windows may call one
    return (inner if is_table else last), ""


def suffix_of(source: str) -> str:
    """Return the suffix of a file or URL without that of its compression; refuse an archive, or compressed Parquet."""
    suffix, compression = suffixes_of(source)
    if suffix in ARCHIVES or (compression and suffix in BINARY):
        raise BadInputError(f"The file {source} is an archive, which is not read: unpack it ({', '.join(TABLES)}).")
    return suffix


def checked(found: Found, source: str, kind: RowKind) -> Sequence[Row]:
    """Return the rows of a file, folder or dataset, of which there must be one; many are kept on disk."""
    rows = stored(kind.check(found, source), f"reading {source}")
    if not rows:
        raise BadInputError(f"The data file {source} is empty: fill it, {kind.holds}.")
    return rows


def splits_of_file(source: str) -> dict[str, Found]:
    """Return the rows of a file, read as they are asked for, and their places, by split: `train`, but for some JSON."""
    if any("\ud800" <= letter <= "\udfff" for letter in source):  # bytes that Python could not decode
        raise BadInputError(f"The name of the data file {source!a} is not UTF-8: rename it.")
    suffix = suffix_of(source)
    if suffix in BINARY:
        return {"train": _binary_rows(source, suffix)}
    lines = lines_of(source)
    if suffix == TEXT_FILE:
        return {"train": parse_paragraphs(lines, source)}
    if suffix in (".csv", ".tsv"):
        return {"train": parse_csv(lines, source, delimiter="\t" if suffix == ".tsv" else "")}
    return parse_json(lines, source)


def lines_of(source: str) -> Iterator[str]:
    """Yield the lines of a text file with their ends; it is UTF-8, or UTF-16 or UTF-32 with their marks."""
    packed_bytes = sys.maxsize if is_url(source) or not suffixes_of(source)[1] else os.path.getsize(source)
    with _refusing(source), _opened(source) as file:
        begin = file.peek(BEGIN_BYTES)[:BEGIN_BYTES]
        _check_begin(begin, source)
        encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if begin.startswith(mark)), "utf-8-sig")
        try:  # with the ends of lines: fields of a CSV file keep theirs
            yield from _whole_lines(TextIOWrapper(file, encoding, newline=""), source, packed_bytes)
        except UnicodeError:
            raise _not_utf8(source) from None


@contextmanager
def _refusing(source: str) -> Iterator[None]:
    with reading(f"The data file {source}", "Correct --data."):
        try:
            yield
        except FileNotFoundError as error:
            if error.__cause__ is not None and getattr(error.__cause__, "status", 0) not in NOT_FOUND:
                raise error.__cause__ from None  # fsspec's HTTP says the same of a host that does not answer
            raise BadInputError(f"The data file {source} does not exist: correct --data.") from None
        except ImportError as error:
            raise BadInputError(f"The data file {source} needs one more package ({error}): install it.") from None


@contextmanager
def _opened(source: str) -> Iterator[BufferedReader]:
    """Open a file, which is decompressed as it is read; a path is taken as it is, whatever is in it."""
    packed = suffixes_of(source)[1]
    compression = infer_compression(f"rows{packed}")
    if packed and compression is None:
        raise ImportError("zstandard")
    with fsspec.open(source, "rb") if is_url(source) else open(source, "rb") as file:
        yield BufferedReader(compr[compression](file, mode="r") if compression else file)


def text_of(source: str) -> str:
    """Return a small text file, on this machine or behind a URL."""
    with _opened(source) as file:
        return file.read(PIECE).decode(errors="replace")


def _check_begin(begin: bytes, source: str) -> None:
    for mark, said in BEGINNINGS.items():
        if begin.startswith(mark):
            raise BadInputError(f"The data file {source} is {said}.")


def _whole_lines(file: TextIOWrapper, source: str, packed_bytes: int) -> Iterator[str]:
    """Yield the lines of a file, if they come to an end; `packed_bytes`: of the file, if it is compressed."""
    read, number, parts = 0, 0, []
    most_characters, most_lines = max(BOMB_CHARACTERS, BOMB_RATIO * packed_bytes), max(BOMB_LINES, packed_bytes)
    while piece := file.readline(PIECE):
        parts.append(piece)
        read += len(piece)
        if len(parts) * PIECE > LONGEST_LINE:
            raise BadInputError(f"{source}, line {number + 1} has more than {LONGEST_LINE:,} characters: divide it.")
        if read > most_characters or number > most_lines:
            raise _is_bomb(source)
        if len(piece) < PIECE or piece.endswith("\n"):
            yield "".join(parts)
            number, parts = number + 1, []
    if parts:
        yield "".join(parts)


def _is_bomb(source: str) -> BadInputError:
    return BadInputError(
        f"The data file {source} grows to over {BOMB_RATIO:,} times its size, or has more rows than bytes: look at it."
    )


def _not_utf8(source: str) -> BadInputError:
    before, offset = deque[bytes](maxlen=SAMPLE_LINES), 0
    with _opened(source) as file:
        for number, line in enumerate(iter(lambda: file.readline(PIECE), b""), 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                begin, place = max(0, error.start - SAMPLE_BYTES), offset + error.start
                sample = b"".join(before)[-SAMPLE_BYTES:]
                likely = _likely(sample, line[begin:], error.start - begin, file.read(SAMPLE_BYTES))
                return BadInputError(f"{source} is not UTF-8 (line {number}, byte {place}){likely}.")
            before.append(line[-SAMPLE_BYTES:])
            offset += len(line)
    return BadInputError(f"{source} is not UTF-8: save it as UTF-8.")  # it has changed since


def _likely(preceding: bytes, line: bytes, place: int, following: bytes) -> str:
    """Return which encoding a line probably has, by the text around it, and how it reads around a byte."""
    matches = from_bytes(preceding + line[: place + SAMPLE_BYTES] + following)
    best = matches.best()
    if best is None:
        return ": save it as UTF-8"
    is_western = any(WESTERN in match.could_be_from_charset for match in matches)
    encoding = WESTERN if is_western and OTHER_LATIN.fullmatch(best.encoding) else best.encoding
    before, after = (part.decode(encoding, "ignore") for part in (line[:place], line[place:]))
    part, name = (before[-SHOWN_AROUND:] + after[:SHOWN_AROUND]).strip(), codecs.lookup(encoding).name.replace("_", "-")
    said = f"; it is probably {encoding}, in which the line reads {part!r}"
    return f"{said}: save it as UTF-8, as by `iconv -f {name} -t utf-8 old > new`"


def _binary_rows(source: str, suffix: str) -> Found:
    """Yield the rows of a file of Parquet or Arrow; one behind a URL is downloaded into the cache of `datasets`."""
    with _refusing(source):
        path = source
        if is_url(source):
            from datasets import DownloadManager  # here: it takes two seconds to import

            path = DownloadManager().download(source)
        with open(path, "rb") as file:
            _check_begin(file.read(BEGIN_BYTES).removeprefix(b"PAR1"), source)
        rows = _parquet_rows(path, source)
        if suffix == ARROW:
            from datasets import Dataset  # here, as above

            rows = with_names(Dataset.from_file(path))
        for number, row in enumerate(rows, 1):
            yield row, f"{source}, row {number}"


def _parquet_rows(path: str, source: str) -> Iterator[Row]:
    import pyarrow as pa  # here: few runs need them
    import pyarrow.parquet as pq

    file, size, read = pq.ParquetFile(path), os.path.getsize(path), 0
    if file.metadata.num_rows > size:
        raise _is_bomb(source)
    metadata = file.schema_arrow.metadata or {}
    for batch in file.iter_batches(BATCH_ROWS):
        read += batch.nbytes
        if read > max(BOMB_CHARACTERS, BOMB_RATIO * size):
            raise _is_bomb(source)
        table = pa.Table.from_batches([batch]).replace_schema_metadata(metadata)
        if b"huggingface" in metadata:  # `datasets` has written how to read its columns
            from datasets import Dataset  # here, as above

            yield from with_names(Dataset(table, fingerprint="rows"))
        else:
            yield from map(as_written, table.to_pylist())


def with_names(rows: Any) -> Iterator[Row]:
    """Yield the rows of a dataset, with names for numbers of classes, and pictures and the like as they are stored."""
    from datasets import Dataset, Features  # here, as above

    stored_so = Features({column: _undecoded(feature) for column, feature in rows.features.items()})
    classes = {column: feature for column, feature in rows.features.items() if hasattr(feature, "int2str")}
    for row in Dataset(rows.data.replace_schema_metadata(stored_so.arrow_schema.metadata), fingerprint="rows"):
        numbers = {column: row[column] for column in classes}
        names = {column: "" if n is None or n < 0 else classes[column].int2str(n) for column, n in numbers.items()}
        yield as_written({**row, **names})


def _undecoded(feature: Any) -> Any:
    """Return the type of a column with its pictures, sounds and the like as they are stored; JSON is read."""
    from datasets import Json, List  # here, as above

    if isinstance(feature, List):
        return List(_undecoded(feature.feature), length=feature.length)
    is_decoded = hasattr(feature, "decode") and not isinstance(feature, Json)
    return replace(feature, decode=False) if is_decoded else feature
