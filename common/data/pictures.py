"""Pictures of rows, each a file's path or a `data:` URI: checked, loaded, and put into a row's tokens."""

import base64
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.base.errors import BadInputError, begin_of, reading
from common.data.files import is_url
from common.data.rows import IGNORED_LABEL, Row, Tokens, place_of

URI_HEAD = "data:image/*;base64,"
MOST_PIXELS = 89_478_485  # Pillow warns of a decompression bomb above so many
PLAIN_MODES = ("RGB", "L", "P", "1", "CMYK", "YCbCr")
TRANSPARENT_MODES = ("RGBA", "LA", "PA")  # on white they become RGB
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # all that is read: others could start Ghostscript
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # the tag of EXIF, and its values by which width and height are exchanged


def reference_to(picture: object, folder: Path | None, where: str) -> str:
    """Return a path in `folder`, bytes, a `datasets` dict or an open picture as a file path or a `data:` URI."""
    if isinstance(picture, dict) and {"bytes", "path"} & picture.keys():
        picture = picture.get("bytes") or picture.get("path")
    if isinstance(picture, Image.Image):
        stream = io.BytesIO()
        picture.save(stream, "PNG")
        picture = stream.getvalue()
    if isinstance(picture, bytes):
        return URI_HEAD + base64.b64encode(picture).decode()
    if not isinstance(picture, str) or not picture:
        raise BadInputError(f"{where} has {begin_of(picture)!r} for a picture: give it the path of a file.")
    if picture.startswith("data:image/"):
        return picture
    why = ""
    if folder is None or is_url(picture):
        why = "but only paths beside a data file here are read: download it, or pass a dataset that holds it"
    elif not os.path.isfile(folder / picture):  # nor is a text that is no path, such as base64 without its head
        why = f"which does not exist in {folder}, where its path begins: correct it"
    elif not (folder / picture).resolve().is_relative_to(folder.resolve()):
        why = f"which is not in {folder}, the data file's folder: copy it there"
    if why:
        raise BadInputError(f"{where} names the picture {begin_of(picture)}, {why}.")
    return str(folder / picture)


def check_picture(reference: str, where: str) -> tuple[str, bool]:
    """Return a digest of a picture's file, and whether it is transparent in places; refuse what cannot be learnt."""
    with _opened(reference, where) as picture:
        if picture.mode not in (*PLAIN_MODES, *TRANSPARENT_MODES):
            name = _name_of(reference)
            raise BadInputError(f"{where} has a picture, {name}, in mode {picture.mode}: convert it to RGB of 8 bits.")
        is_transparent = _is_transparent(picture)
        picture.draft("RGB", (64, 64))  # a JPEG is decoded at an eighth of its size: that finds what is missing
        picture.load()
    return sha256(_bytes_of(reference)).hexdigest(), is_transparent


def open_picture(reference: str, where: str = "a row") -> Image.Image:
    """Return a picture in RGB, upright, with white for what is transparent."""
    with _opened(reference, where) as picture:
        picture.load()
        picture = ImageOps.exif_transpose(picture)
        if _is_transparent(picture):
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        return picture.convert("RGB")


def _is_transparent(picture: Image.Image) -> bool:
    return picture.mode in TRANSPARENT_MODES or "transparency" in picture.info


def _name_of(reference: str) -> str:
    return "in the row itself" if reference.startswith("data:") else Path(reference).name


def _bytes_of(reference: str) -> bytes:
    if reference.startswith("data:"):
        return base64.b64decode(reference.partition(",")[2])
    return Path(reference).read_bytes()


@contextmanager
def _opened(reference: str, where: str) -> Iterator[Image.Image]:
    """Yield a picture; refuse what Pillow cannot read or decode of it, and more than `MOST_PIXELS`."""
    what, opened = f"{where} has a picture, {_name_of(reference)},", False
    source = io.BytesIO(_bytes_of(reference)) if reference.startswith("data:") else reference
    try:
        with Image.open(source, formats=FORMATS) as picture:
            opened = True
            if picture.width * picture.height > MOST_PIXELS:
                raise Image.DecompressionBombError
            yield picture
    except BadInputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadInputError(f"{what} of more than {MOST_PIXELS:,} pixels: scale it down.") from None
    except Exception as error:  # each of Pillow's formats has classes of its own
        said = "is damaged" if opened else "cannot be read"
        raise BadInputError(
            f"{what} that {said} ({begin_of(error)}): replace it by one of the format {', '.join(FORMATS)}, or leave "
            "the row out."
        ) from None


def pixels_of(references: Sequence[str], tokenizer: Tokenizer, noise: float = 0.0) -> dict[str, torch.Tensor]:
    """Return the vision tower's `pixel_values`, shape (rows, tiles, 3, height, width), and their mask, if any."""
    pictures = [[with_noise(open_picture(reference), noise)] for reference in references]
    inputs = tokenizer.processor.image_processor(images=pictures, return_tensors="pt")
    return {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask") if name in inputs}


def with_noise(picture: Image.Image, noise: float) -> Image.Image:
    """Return a picture with Gaussian noise, seeded by its pixels; `noise`: its deviation as a share of brightness."""
    if not noise:
        return picture
    numbers = np.random.default_rng(zlib.crc32(picture.tobytes()))
    values = np.asarray(picture, dtype=np.float32)
    noisy = values + 255 * noise * numbers.standard_normal(values.shape, dtype=np.float32)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def with_part(row: Row) -> list[dict[str, Any]]:
    """Return a row's messages as lists of parts, the picture before all texts."""
    messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in row["messages"]]
    asked = next(message for message in messages if message["role"] == "user")
    asked["content"].insert(0, {"type": "image"})
    return messages


def with_picture_tokens(ids: list[int], row: Row, tokenizer: Tokenizer) -> list[int]:
    """Return a pictured row's tokens with all of the picture's in the place of its one, which no text may have, too."""
    token, number = tokenizer.processor.image_token, tokenizer.processor.image_token_id
    if ids.count(number) != 1:
        raise BadInputError(f"{place_of(row)} has {token} in its texts, which stands for its picture: take it out.")
    place = ids.index(number)
    return [*ids[:place], *picture_ids(row, tokenizer), *ids[place + 1 :]]


def picture_ids(row: Row, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that stand for a row's picture; the processor is asked once for each number of tiles."""
    with _opened(row["picture"], place_of(row)) as picture:
        is_turned = picture.getexif().get(ORIENTATION) in TURNED
        size = picture.size[::-1] if is_turned else picture.size
    processor = tokenizer.processor
    count = getattr(processor.image_processor, "get_number_of_image_patches", None)  # Idefics2 has as many for all
    what, remedy = f"The processor of {processor.tokenizer.name_or_path}", "Correct it, or pass another --model."
    known = _IDS.setdefault(processor, {})
    with reading(what, remedy):
        tiles = tuple(count(size[1], size[0], {})[1:]) if count else ()
        if tiles not in known:
            inputs = processor(text=processor.image_token, images=Image.new("RGB", size), add_special_tokens=False)
            if processor.image_token_id not in inputs["input_ids"][0]:
                raise BadInputError(f"{what} writes no token {processor.image_token} for a picture. {remedy}")
            known[tiles] = list(inputs["input_ids"][0])
    return known[tiles]


_IDS: WeakKeyDictionary[Any, dict[tuple[int, ...], list[int]]] = WeakKeyDictionary()


def check_picture_kept(row: Row, tokens: Tokens, max_length: int, tokenizer: Tokenizer) -> None:
    """Refuse a row whose image tokens would be truncated at `max_length`."""
    ids = tokens["input_ids"]
    end = len(ids) - ids[::-1].index(tokenizer.processor.image_token_id)
    if end > max_length:
        raise BadInputError(
            f"{place_of(row)}: the image tokens end at position {end:,}, beyond max_length, {max_length:,}, and are "
            f"never truncated: pass --max_length {end + 64} or more."
        )


def without_picture_labels(tokens: Tokens, tokenizer: Tokenizer) -> Tokens:
    """Mask the labels of image tokens, whatever else is learnt: the model reads them, but never generates them."""
    image = tokenizer.processor.image_token_id
    pairs = zip(tokens["input_ids"], tokens["labels"], strict=True)
    return {**tokens, "labels": [IGNORED_LABEL if token == image else label for token, label in pairs]}
