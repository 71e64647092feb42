"""Rows of conversations about a picture: in any format of conversations, with a column that holds or names it."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data import messages
from common.data.files import TABLES
from common.data.messages import check_messages
from common.data.pictures import check_picture, reference_to
from common.data.rows import Found, Row, RowKind

PICTURE_COLUMNS = ("image", "images", "picture", "file_name")
"""Columns that hold a row's picture, or name its file: those of `datasets` (`imagefolder`) and TRL first."""


def row_kind(run: RunConfig) -> RowKind:
    """Return what rows of conversations about pictures are."""
    return replace(
        messages.row_kind(run),
        suffixes=TABLES,
        holds="rows with `messages`, or a question and an answer, and the column `image`",
        advice="row of `messages` with an `image`",
        check=partial(check_pictured, run=run),
        in_folders=True,
    )


def check_pictured(found: Found, source: str, run: RunConfig) -> Iterator[Row]:
    """Yield the rows of `source`, if each is a conversation about one picture that can be read.

    Paths of pictures begin at the folder of `source`. The column `kind`, where there is one, says what is asked for.

    Raises:
        BadInputError: a row has no picture or several, or one that cannot be read, or is no conversation.
    """
    folder = Path(source).parent if Path(source).exists() else REPOSITORY
    seen: deque[Row] = deque()

    def texts() -> Iterator[tuple[object, str]]:
        for row, where in found:
            if not isinstance(row, dict):
                yield row, where
                continue
            columns, text = _divided(row)
            picture = reference_to(_only_picture(columns, text, where), folder, where)
            check_picture(picture, where)
            kind = {"kind": str(row["kind"])} if row.get("kind") else {}
            seen.append({"picture": picture, **kind})
            yield text, where

    for row in check_messages(texts(), source, run):
        yield {**row, **seen.popleft()}


def _divided(row: Row) -> tuple[Row, Row]:
    """Return the columns of a row's pictures, and its others with messages of texts alone."""
    pictures = {name: value for name, value in row.items() if str(name).lower() in PICTURE_COLUMNS and value}
    others = {name: value for name, value in row.items() if str(name).lower() not in PICTURE_COLUMNS}
    return pictures, {name: _without_parts(value) for name, value in others.items()}


def _without_parts(value: Any) -> Any:
    """Return messages without the parts that stand for a picture; anything else as it is."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return value
    return [
        {**message, "content": [part for part in message["content"] if not _is_picture_part(part)]}
        if isinstance(message.get("content"), list)
        else message
        for message in value
    ]


def _is_picture_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _only_picture(columns: Row, text: Row, where: str) -> object:
    """Return the one picture of a row's columns.

    Raises:
        BadInputError: there is none, or there are several.
    """
    pictures = [each for value in columns.values() for each in (value if isinstance(value, list) else [value])]
    if not pictures:
        raise BadInputError(
            f"{where} has no picture (its columns: {', '.join(map(str, text)) or 'none'}): give it a column `image` "
            "with the path of a file, or go to 2.1, which learns from texts alone."
        )
    if len(pictures) > 1:
        raise BadInputError(f"{where} has {len(pictures)} pictures, but a row takes one: leave the others out.")
    return pictures[0]
