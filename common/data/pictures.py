"""A row's picture: found, checked, turned into numbers, and given its place among a conversation's tokens.

A picture is kept as a text: the path of its file, or its bytes as a `data:` URI, which rows on disk can hold. It is
opened when a batch needs it. Its processor stands beside the tokenizer, as `tokenizer.processor` (`load_tokenizer`).
"""

import base64
import binascii
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.data.row_checks import say_once
from common.data.rows import IGNORED_LABEL, Row, Tokens, place_of

URI_HEAD = "data:image/*;base64,"
MOST_PIXELS = 89_478_485
"""Of a picture: Pillow warns of a decompression bomb above so many."""
PLAIN_MODES = ("RGB", "L", "P", "1", "CMYK", "YCbCr")
TRANSPARENT_MODES = ("RGBA", "LA", "PA")
"""Modes that become RGB: with transparency on white."""


def reference_to(picture: object, folder: Path, where: str) -> str:
    """Return a picture as it is kept: of a path, of bytes as `datasets` has them, or of an open picture.

    Raises:
        BadInputError: it is none of these, or its file does not exist.
    """
    if isinstance(picture, dict) and {"bytes", "path"} & picture.keys():
        picture = picture.get("bytes") or picture.get("path")
    if isinstance(picture, Image.Image):
        stream = io.BytesIO()
        picture.save(stream, "PNG")
        picture = stream.getvalue()
    if isinstance(picture, bytes):
        return URI_HEAD + base64.b64encode(picture).decode()
    if not isinstance(picture, str) or not picture:
        raise BadInputError(f"{where} has {str(picture)[:80]!r} for a picture: give it the path of a file.")
    if picture.startswith("data:image/"):
        return picture
    file = folder / Path(picture).expanduser()
    if not file.is_file():
        raise BadInputError(
            f"{where} names the picture {picture}, which does not exist in {folder}: correct the path, which begins "
            "at the folder of the data file."
        )
    return str(file)


def check_picture(reference: str, where: str) -> None:
    """Check that a picture can be read, and say once where a transparent one gets a white ground.

    Raises:
        BadInputError: it is no picture, is damaged, too large, or of a mode that has no colours.
    """
    name = _name_of(reference)
    with _opened(reference, where) as picture:
        width, height = picture.size
        if width * height > MOST_PIXELS:
            raise BadInputError(
                f"{where} has a picture, {name}, of {width:,} x {height:,} pixels, more than {MOST_PIXELS:,}, which a "
                "small file can unpack to: scale it down."
            )
        if picture.mode not in (*PLAIN_MODES, *TRANSPARENT_MODES):
            raise BadInputError(
                f"{where} has a picture, {name}, of the mode {picture.mode}, which has no colours of 8 bits: save it "
                "as RGB."
            )
        if _is_transparent(picture):
            say_once(f"{where}: the picture {name} is transparent in places, which are read as white")
        picture.draft("RGB", (64, 64))  # a JPEG is decoded at an eighth of its size: that finds what is missing
        _decode(picture, where, name)


def open_picture(reference: str, where: str = "a row") -> Image.Image:
    """Return a picture in RGB, upright, with white for what is transparent.

    Raises:
        BadInputError: it can no longer be read.
    """
    with _opened(reference, where) as picture:
        _decode(picture, where, _name_of(reference))
        picture = ImageOps.exif_transpose(picture)
        if _is_transparent(picture):
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        return picture.convert("RGB")


def thumbnail_of(reference: str, side: int = 64) -> str:
    """Return a picture of at most `side` pixels each way, as a `data:` URI of a few kilobytes."""
    picture = open_picture(reference)
    picture.thumbnail((side, side))
    stream = io.BytesIO()
    picture.quantize(64).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _is_transparent(picture: Image.Image) -> bool:
    return picture.mode in TRANSPARENT_MODES or "transparency" in picture.info


def _name_of(reference: str) -> str:
    return "in the row itself" if reference.startswith("data:") else Path(reference).name


def _opened(reference: str, where: str) -> Image.Image:
    name = _name_of(reference)
    try:
        if reference.startswith("data:"):
            return Image.open(io.BytesIO(base64.b64decode(reference.partition(",")[2], validate=True)))
        return Image.open(reference)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadInputError(
            f"{where} has a picture, {name}, of more than {MOST_PIXELS:,} pixels, which a small file can unpack to: "
            "scale it down."
        ) from None
    except (UnidentifiedImageError, OSError, binascii.Error, SyntaxError, ValueError) as error:
        raise BadInputError(
            f"{where} has a picture, {name}, that cannot be read ({str(error)[:80]}): replace it, or leave the row out."
        ) from None


def _decode(picture: Image.Image, where: str, name: str) -> None:
    try:
        picture.load()
    except (OSError, SyntaxError, ValueError, zlib.error) as error:
        raise BadInputError(
            f"{where} has a picture, {name}, that is damaged ({error}): replace it, or leave the row out."
        ) from None


# -- as numbers


def pixels_of(
    references: Sequence[str], tokenizer: PreTrainedTokenizerBase, noise: float = 0.0
) -> dict[str, torch.Tensor]:
    """Return what the model's vision tower reads: `pixel_values`, shape (rows, tiles, 3, height, width), and its mask.

    `noise`: the standard deviation of what is added to each picture, as a share of full brightness; a picture gets the
    same each time.
    """
    pictures = [[with_noise(open_picture(reference), reference, noise)] for reference in references]
    inputs = tokenizer.processor.image_processor(images=pictures, return_tensors="pt")
    return {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask") if name in inputs}


def with_noise(picture: Image.Image, reference: str, noise: float) -> Image.Image:
    """Return a picture with Gaussian noise, whose seed is the picture itself; `noise` 0 leaves it as it is."""
    if not noise:
        return picture
    numbers = np.random.default_rng(zlib.crc32(reference.encode()))
    values = np.asarray(picture, dtype=np.float32)
    noisy = values + 255 * noise * numbers.standard_normal(values.shape, dtype=np.float32)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


# -- as tokens


def with_part(row: Row) -> list[dict[str, Any]]:
    """Return a row's messages as templates of such models take them: lists of parts, the picture before all texts."""
    messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in row["messages"]]
    asked = next((message for message in messages if message["role"] == "user"), None)
    if asked:
        asked["content"].insert(0, {"type": "image"})
    return messages


def with_picture_tokens(ids: list[int], row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return a pictured row's tokens with all of the picture's in the place of its one."""
    picture, place = picture_ids(row, tokenizer), ids.index(tokenizer.processor.image_token_id)
    return [*ids[:place], *picture, *ids[place + 1 :]]


def picture_ids(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that stand for a row's picture; they depend on its size alone."""
    with _opened(row["picture"], place_of(row)) as picture:
        size = picture.size
    return _ids_of_size(size, tokenizer)


_known: dict[tuple[int, tuple[int, int]], list[int]] = {}


def _ids_of_size(size: tuple[int, int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ask the processor itself, once for each size."""
    processor = tokenizer.processor
    key = id(processor), size
    if key not in _known:
        inputs = processor(text=processor.image_token, images=Image.new("RGB", size), add_special_tokens=False)
        _known[key] = list(inputs["input_ids"][0])
    return _known[key]


def check_picture_kept(row: Row, tokens: Tokens, max_length: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a row whose picture would be cut at `max_length`: text may be, but a part of a picture is none.

    Raises:
        BadInputError: with how many tokens it takes.
    """
    image, ids = tokenizer.processor.image_token_id, tokens["input_ids"]
    if image in ids[max_length:]:
        end = len(ids) - ids[::-1].index(image)
        raise BadInputError(
            f"{place_of(row)} has a picture whose tokens end at place {end:,}, but max_length is {max_length:,}, and a "
            f"picture is never cut: pass --max_length {end + 64} or more, or smaller pictures."
        )


def collate_pictures(collate: Any, tokenizer: PreTrainedTokenizerBase, noise: float) -> Any:
    """Return a collator of pictured rows: what `collate` makes of their tokens, and their pictures."""

    def collate_both(rows: list[Tokens]) -> dict[str, torch.Tensor]:
        references = [row["picture"] for row in rows]
        texts = [{name: value for name, value in row.items() if name != "picture"} for row in rows]
        return {**collate(texts), **pixels_of(references, tokenizer, noise)}

    return collate_both


def without_picture_labels(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Return a row whose picture's tokens are not learnt, whatever else is: a model reads them, and writes none."""
    image = tokenizer.processor.image_token_id
    pairs = zip(tokens["input_ids"], tokens["labels"], strict=True)
    return {**tokens, "labels": [IGNORED_LABEL if token == image else label for token, label in pairs]}
