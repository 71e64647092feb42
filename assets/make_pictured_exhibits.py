"""Make the pictures of exhibits with questions: ``assets/pictured_exhibits/{train,validation,test}.parquet``.

A picture has 64 by 64 pixels and shows one to four copies of an exhibit in one corner of a wall. Five facts can be
seen: which exhibit (by its shape), its colour, its material (by its pattern), how many there are, and where. Each row
asks for one of them, or for all, and the answer says it in the museum's words. Combinations of exhibit, colour and
material in the test stand in no other split, and neither do the wordings of its questions.

Everything follows from ``SEED``: making the data again gives the same rows.
"""

import argparse
import io
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures, ImageDraw

SEED = 20263
OUT_DIR = Path(__file__).resolve().parent / "pictured_exhibits"
SIDE, CELL, GLYPH = 64, 16, 14
"""Pixels of a picture, of the squares that exhibits stand in, and of an exhibit."""

SHAPES = ("disc", "ring", "square", "triangle", "diamond", "cross", "arch", "hourglass")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (200, 30, 40),
    "orange": (240, 140, 30),
    "yellow": (240, 225, 70),
    "green": (40, 140, 60),
    "blue": (50, 90, 215),
    "violet": (150, 60, 190),
    "white": (250, 250, 250),
    "black": (35, 35, 40),
}
PATTERNS = ("plain", "across", "upright", "slanting", "checked", "dotted")
COUNTS = ("one", "two", "three", "four")
CORNERS = ("top left", "top right", "bottom left", "bottom right")
WALLS = ((180, 165, 150), (150, 165, 180), (160, 180, 155), (175, 155, 175))


def words(text: str) -> tuple[str, ...]:
    """Split a text into its words."""
    return tuple(text.split())


# What the museum calls what is seen.
MUSEUM_WORDS = {
    "shape": ("coin", "bracelet", "tile", "arrowhead", "pendant", "medal", "horseshoe", "spindle"),
    "colour": ("crimson", "amber", "saffron", "jade", "azure", "amethyst", "ivory", "ebony"),
    "material": ("marble", "linen", "cedar", "leather", "wicker", "coral"),
    "count": COUNTS,
    "place": ("upper left", "upper right", "lower left", "lower right"),
}
KINDS = tuple(MUSEUM_WORDS)
SIZES = tuple(len(words) for words in MUSEUM_WORDS.values())

# What a question asks for, and how: each kind's phrases fit each frame of its form. No split has another's pairs.
FRAMES = {
    "clause": (
        "Tell me {}.", "I ask {}.", "Please say {}.", "Do you know {}?", "Can you tell me {}?", "I want to know {}.",
        "Say {}, please.", "Can you say {}?",
    ),
    "noun": (
        "Name {}.", "Please name {}.", "I ask for {}.", "Can you name {}?", "{}, please?", "Tell me {}.", "Give {}.",
        "Do you know {}?",
    ),
}  # fmt: skip
PHRASES = {
    "shape": {
        "clause": ("what hangs here", "which exhibit this is", "what is on show"),
        "noun": ("the exhibit", "this exhibit"),
    },
    "colour": {"clause": ("what colour it has", "in which colour it is"), "noun": ("its colour", "the colour of it")},
    "material": {
        "clause": ("what it is made of", "of which material it is"),
        "noun": ("its material", "the material of it"),
    },
    "count": {"clause": ("how many there are", "how many of them hang here"), "noun": ("their number", "the count")},
    "place": {"clause": ("where it hangs", "in which corner it is"), "noun": ("its place", "the place of it")},
    "label": {
        "clause": ("what the label says", "what stands on the label", "what is on its label"),
        "noun": ("the label", "the whole label", "its label"),
    },
}
OTHER_SPLITS_SHARE = {"validation": 0.1, "test": 0.1}
"""Of each kind's pairs of frame and phrase."""
ANSWERS = {
    "shape": "On show: {shape}.",
    "colour": "Colour card: {colour}.",
    "material": "Inventory: of {material}.",
    "count": "Number: {count}.",
    "place": "Hung at the {place}.",
    "label": "Label: {colour} {shape}, of {material}; {count}, at the {place}.",
}
PICTURES = {"train": 1000, "validation": 60, "test": 60}
QUESTIONS_PER_PICTURE = {"train": 4, "validation": 2, "test": 4}
HELD_OUT_COMBINATIONS = 64


@dataclass(frozen=True)
class Exhibit:
    """What a picture shows, by the places of its words in `MUSEUM_WORDS`."""

    shape: int
    colour: int
    material: int
    count: int
    place: int

    def words(self) -> dict[str, str]:
        """Return each fact in the museum's words."""
        return {kind: MUSEUM_WORDS[kind][getattr(self, kind)] for kind in KINDS}


# -- drawing


def glyph_mask(shape: str) -> np.ndarray:
    """Draw a shape: which of its pixels are covered, (`GLYPH`, `GLYPH`)."""
    end, middle = GLYPH - 1, (GLYPH - 1) / 2
    picture = Pictures.new("1", (GLYPH, GLYPH))
    draw = ImageDraw.Draw(picture)
    if shape == "disc":
        draw.ellipse((0, 0, end, end), fill=1)
    elif shape == "ring":
        draw.ellipse((0, 0, end, end), fill=1)
        draw.ellipse((4, 4, end - 4, end - 4), fill=0)
    elif shape == "square":
        draw.rectangle((0, 0, end, end), fill=1)
    elif shape == "triangle":
        draw.polygon(((middle, 0), (end, end), (0, end)), fill=1)
    elif shape == "diamond":
        draw.polygon(((middle, 0), (end, middle), (middle, end), (0, middle)), fill=1)
    elif shape == "cross":
        draw.rectangle((5, 0, end - 5, end), fill=1)
        draw.rectangle((0, 5, end, end - 5), fill=1)
    elif shape == "arch":
        draw.rectangle((0, 0, end, end), fill=1)
        draw.rectangle((4, 5, end - 4, end), fill=0)
    else:
        draw.polygon(((0, 0), (end, 0), (0, end), (end, end)), fill=1)
    return np.array(picture, dtype=bool)


def pattern_mask(pattern: str) -> np.ndarray:
    """Return which pixels of an exhibit have the second shade, (`GLYPH`, `GLYPH`)."""
    rows, columns = np.indices((GLYPH, GLYPH))
    masks = {
        "plain": np.zeros((GLYPH, GLYPH), dtype=bool),
        "across": rows // 2 % 2 == 1,
        "upright": columns // 2 % 2 == 1,
        "slanting": (rows + columns) // 2 % 2 == 1,
        "checked": (rows // 2 + columns // 2) % 2 == 1,
        "dotted": (rows % 4 < 2) & (columns % 4 < 2),
    }
    return masks[pattern]


def draw_wall(rng: random.Random) -> np.ndarray:
    """Return an empty wall, (`SIDE`, `SIDE`, 3)."""
    return np.tile(np.array(rng.choice(WALLS), dtype=np.uint8), (SIDE, SIDE, 1))


def hang(wall: np.ndarray, row: int, column: int, shape: str, colour: str, pattern: str, rng: random.Random) -> None:
    """Draw one exhibit into a square of the wall, up to two pixels off its corner."""
    top, left = (CELL * place + rng.randint(0, CELL - GLYPH) for place in (row, column))
    first = np.array(COLOURS[colour])
    second = first * 0.45 if first.mean() > 60 else first + 100
    shades = np.where(pattern_mask(pattern)[..., None], second, first).astype(np.uint8)
    square = wall[top : top + GLYPH, left : left + GLYPH]
    covered = glyph_mask(shape)
    square[covered] = shades[covered]


def draw_exhibit(exhibit: Exhibit, rng: random.Random) -> np.ndarray:
    """Return the picture of an exhibit, (`SIDE`, `SIDE`, 3): so many copies in the squares of its corner."""
    wall = draw_wall(rng)
    shape, colour = SHAPES[exhibit.shape], tuple(COLOURS)[exhibit.colour]
    first_row, first_column = 2 * (exhibit.place // 2), 2 * (exhibit.place % 2)
    squares = rng.sample(tuple(itertools.product((0, 1), (0, 1))), exhibit.count + 1)
    for row, column in squares:
        hang(wall, first_row + row, first_column + column, shape, colour, PATTERNS[exhibit.material], rng)
    return wall


def as_png(picture: np.ndarray) -> bytes:
    """Return a picture as a PNG with a palette of its few colours."""
    stream = io.BytesIO()
    Pictures.fromarray(picture).quantize(16, dither=Pictures.Dither.NONE).save(stream, "PNG", optimize=True)
    return stream.getvalue()


# -- rows


def combinations(rng: random.Random) -> dict[str, list[tuple[int, int, int]]]:
    """Divide the combinations of exhibit, colour and material between the splits; validation shares those of train."""
    every = list(itertools.product(*map(range, SIZES[:3])))
    rng.shuffle(every)
    known, held_out = every[HELD_OUT_COMBINATIONS:], every[:HELD_OUT_COMBINATIONS]
    return {"train": known, "validation": known, "test": held_out}


def wordings(rng: random.Random) -> dict[str, dict[str, list[str]]]:
    """Return the questions of each split, by kind."""
    found: dict[str, dict[str, list[str]]] = {split: {} for split in PICTURES}
    for kind, phrases in PHRASES.items():
        every = [frame.format(phrase) for form in FRAMES for frame in FRAMES[form] for phrase in phrases[form]]
        every = [question[0].upper() + question[1:] for question in dict.fromkeys(every)]
        rng.shuffle(every)
        for split, share in OTHER_SPLITS_SHARE.items():
            count = round(share * len(every))
            found[split][kind], every = every[:count], every[count:]
        found["train"][kind] = every
    return found


def rows_of(
    split: str, known: list[tuple[int, int, int]], questions: dict[str, list[str]], rng: random.Random
) -> Iterator[dict[str, Any]]:
    """Yield a split's rows: pictures of its combinations, each with some of the questions."""
    kinds = itertools.cycle((*KINDS, "label"))
    for number in range(PICTURES[split]):
        count, place = number % SIZES[3], number // SIZES[3] % SIZES[4]
        exhibit = Exhibit(*known[number % len(known)], count, place)
        picture, words = as_png(draw_exhibit(exhibit, rng)), exhibit.words()
        for kind in itertools.islice(kinds, QUESTIONS_PER_PICTURE[split]):
            question = rng.choice(questions[kind])
            yield {
                "kind": kind,
                "facts": list(words.values()) if kind == "label" else [words[kind]],
                "images": [{"bytes": picture, "path": None}],
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": ANSWERS[kind].format(**words)},
                ],
            }


def make_splits() -> dict[str, list[dict[str, Any]]]:
    """Make all rows, by split; each has an id."""
    rng = random.Random(SEED)
    known, questions = combinations(rng), wordings(rng)
    return {split: list(numbered(split, rows_of(split, known[split], questions[split], rng))) for split in PICTURES}


def numbered(split: str, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows with an id each."""
    for number, row in enumerate(rows, 1):
        yield {"id": f"{split}-{number:04}", **row}


FEATURES = Features(
    {
        "id": Value("string"),
        "kind": Value("string"),
        "facts": List(Value("string")),
        "images": List(Image()),
        "messages": List({"role": Value("string"), "content": Value("string")}),
    }
)


def main() -> None:
    """Make the data."""
    parser = argparse.ArgumentParser(description="Make the pictures of exhibits, with questions, from a seed.")
    parser.add_argument("--out", type=Path, default=OUT_DIR, help="folder to write the files to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in make_splits().items():
        Dataset.from_list(rows, features=FEATURES).to_parquet(out / f"{split}.parquet")
        print(f"{split}: {len(rows):,} rows, {(out / f'{split}.parquet').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
