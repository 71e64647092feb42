"""Rows of conversations about a picture: in any format of conversations, with a column that holds or names it."""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data import messages
from common.data.files import TABLES
from common.data.formats import ROLES, are_messages, with_lists
from common.data.messages import check_messages
from common.data.pictures import check_picture, reference_to
from common.data.row_checks import say_once
from common.data.rows import Found, Row, RowKind, is_plain, listed

PICTURE_COLUMNS = ("images", "image", "picture", "file_name")  # the first that is filled counts
PLACEHOLDER = re.compile(r"\n?<image>\n?")  # what LLaVA's rows have in a user's text for the picture


def row_kind(run: RunConfig) -> RowKind:
    """Return what rows of conversations about pictures are."""
    return replace(
        messages.row_kind(run),
        suffixes=TABLES,
        holds="rows with `messages`, or a question and an answer, and the column `image`",
        check=partial(check_pictured, run=run),
        belongs_to=lambda row: row["picture_digest"],
    )


def check_pictured(found: Found, source: str, run: RunConfig) -> Iterator[Row]:
    """Yield the rows of `source`, if each is a conversation about one picture; paths begin at its folder."""
    place = Path(source)
    folder = place if place.is_dir() else place.parent if place.exists() else None
    seen: deque[Row] = deque()
    transparent: list[str] = []

    def texts() -> Iterator[tuple[object, str]]:
        for row, where in found:
            if isinstance(row, dict):
                pictures, row = _divided(with_lists(row, where))
                seen.append(_seen(pictures, row, folder, where, transparent))
            yield row, where

    for row in check_messages(texts(), source, run):
        if is_plain([row]):
            raise BadInputError(f"{row['where']} has a picture and a `text`, but no question: add a column for it.")
        yield {**row, **seen.popleft()}
    if transparent:
        found = f"{len(transparent):,} pictures are transparent in places (the first: {transparent[0]})"
        say_once(f"{source}: {found}, which are read as white")


def _seen(pictures: list[object], row: Row, folder: Path | None, where: str, transparent: list[str]) -> Row:
    """Return what a row has besides its conversation: its picture, a digest of that, and what is asked for."""
    if not pictures:
        raise BadInputError(
            f"{where} has no picture (its columns: {listed(row)}): add a column `image`, or go to 2.1 for texts alone."
        )
    if len(pictures) > 1:
        raise BadInputError(f"{where} has {len(pictures)} pictures, but a row takes one: leave the others out.")
    picture = reference_to(pictures[0], folder, where)
    digest, is_transparent = check_picture(picture, where)
    if is_transparent:
        transparent.append(where)
    kind = {"kind": str(row["kind"])} if row.get("kind") else {}
    return {"picture": picture, "picture_digest": digest, **kind}


def _divided(row: Row) -> tuple[list[object], Row]:
    """Return a row's pictures, and its other columns, with messages of texts alone."""
    by_name = {str(name).lower(): value for name, value in row.items()}
    others = {name: value for name, value in row.items() if str(name).lower() not in PICTURE_COLUMNS}
    in_messages = [picture for value in others.values() for picture in _pictures_in(value)]
    first = next((by_name[name] for name in PICTURE_COLUMNS if by_name.get(name)), in_messages)
    pictures = first if isinstance(first, list) else [first]
    return pictures, {name: _without_pictures(value) for name, value in others.items()}


def _pictures_in(value: Any) -> Iterator[object]:
    """Yield the pictures that stand in the parts of messages themselves, as Transformers takes them."""
    contents = [message.get("content") for message in value] if are_messages(value) else []
    for part in (part for content in contents if isinstance(content, list) for part in content):
        found = [part[key] for key in ("image", "path", "url", "image_url") if _is_picture_part(part) and part.get(key)]
        yield from found[:1]


def _without_pictures(value: Any) -> Any:
    """Return a text, or messages, without what stands for one picture: parts, or a question's `<image>`."""
    if isinstance(value, str):
        return _text_alone(value, is_asked=True)
    if not are_messages(value):
        return value
    asked = [ROLES.get(str(message.get("role", message.get("from")))) == "user" for message in value]
    return [
        {key: _text_alone(part, is_asked) for key, part in message.items()}
        for message, is_asked in zip(value, asked, strict=True)
    ]


def _text_alone(content: Any, is_asked: bool) -> Any:
    if isinstance(content, list):
        return [part for part in content if not _is_picture_part(part)]
    return PLACEHOLDER.sub("", content, count=1) if is_asked and isinstance(content, str) else content


def _is_picture_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")
