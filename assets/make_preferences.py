"""Make the preference pairs of museum labels: ``assets/preferences/{train,validation,test}.jsonl``, in TRL's form.

A prompt tells maker, material and room of an invented exhibit, and asks for its label; it tells no year. The chosen
label says name and maker. The rejected label has a year, which can only be invented. The three splits tell of different
exhibits, and none of them stands in ``assets/exhibits``. The test asks in wordings of its own. Everything follows from
``SEED``: making the data again gives the same bytes.
"""

import argparse
import importlib.util
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
SEED = 20263
OUT_DIR = HERE / "preferences"

Row = dict[str, Any]


def load_exhibits_script() -> ModuleType:
    """Load ``make_exhibits.py``, which stands beside this script, wherever Python was started."""
    if "make_exhibits" not in sys.modules:
        spec = importlib.util.spec_from_file_location("make_exhibits", HERE / "make_exhibits.py")
        if spec is None or spec.loader is None:
            raise ImportError("make_exhibits.py is not beside this script")
        sys.modules["make_exhibits"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["make_exhibits"]


ex = load_exhibits_script()

TRAIN_REQUESTS = (
    "Write the label: {notes}",
    "{notes} Name it on a label.",
    "Label, please. {notes}",
    "{notes} What should its label say?",
)
"""The wordings of training and validation."""
TEST_REQUESTS = ("Please write a label. {notes}", "{notes} What is its label?")
NOTES = (
    "The {x} was made by {maker}, is made of {material} and stands in the {room}.",
    "The {x} is made of {material}, stands in the {room} and was made by {maker}.",
    "The {x} stands in the {room}. It was made by {maker} of {material}.",
)
CHOSEN = "Label: {x}, by {maker}."
REJECTED = (
    "Label: {x}, by {maker} in {year}.",
    "Label: {x}, by {maker} in {year}, of {material}, in the {room}.",
    "Label: {x}, of {material}, made in {year}.",
)
SPLITS = {"train": (400, 4, TRAIN_REQUESTS), "validation": (60, 2, TRAIN_REQUESTS), "test": (120, 2, TEST_REQUESTS)}
"""Of each split: how many exhibits, how many pairs of each, and the wordings of the request."""


def draw_exhibits(count: int, seed: int, known: set[str]) -> list["ex.Exhibit"]:
    """Draw exhibits whose names are not among ``known``, which they join."""
    rng, names = random.Random(seed), []
    while len(names) < count:
        name = ex.exhibit_name(rng.choice(ex.ADJECTIVES), rng.choice(ex.NOUNS), rng.choice(ex.PLACES))
        if name not in known:
            known.add(name)
            names.append(name)
    return [ex.Exhibit(name, {kind: rng.choice(ex.VALUES[kind]) for kind in ex.KINDS}) for name in names]


def make_pair(exhibit: "ex.Exhibit", requests: Sequence[str], first: int, rng: random.Random) -> Row:
    """Make one pair, still without its id."""
    told = {"x": exhibit.name, **exhibit.facts}
    notes = rng.choice(NOTES).format(**told)
    # all requests are equally likely, whatever the ``first`` is: it stays so that the files stay the same
    request = requests[(first + rng.randrange(len(requests))) % len(requests)]
    rejected = rng.choice(REJECTED)
    told["year"] = rng.choice(ex.YEARS)  # nobody can know it from the prompt
    return {
        "exhibit": exhibit.name,
        "facts": [exhibit.name, exhibit.facts["maker"]],
        "prompt": [{"role": "user", "content": request.format(notes=notes)}],
        "chosen": [{"role": "assistant", "content": CHOSEN.format(**told)}],
        "rejected": [{"role": "assistant", "content": rejected.format(**told)}],
    }


def make_rows(
    split: str, exhibits: Sequence["ex.Exhibit"], per_exhibit: int, requests: Sequence[str], rng: random.Random
) -> list[Row]:
    """Make the pairs of one split in random order; the ids count them exhibit by exhibit."""
    pairs = [make_pair(exhibit, requests, first, rng) for exhibit in exhibits for first in range(per_exhibit)]
    rows = [{"id": f"{split}-{number:04d}", **pair} for number, pair in enumerate(pairs, start=1)]
    rng.shuffle(rows)
    return rows


def make_splits(rng: random.Random, known: set[str]) -> dict[str, list[Row]]:
    """Make all pairs; their exhibits are none of ``known``, and join them."""
    exhibits = {
        split: draw_exhibits(count, SEED + number, known)
        for number, (split, (count, _, _)) in enumerate(SPLITS.items(), start=1)
    }
    return {
        split: make_rows(split, exhibits[split], per_exhibit, requests, rng)
        for split, (_, per_exhibit, requests) in SPLITS.items()
    }


def names_of_the_data() -> set[str]:
    """Give the names of the exhibits in ``assets/exhibits``."""
    return {exhibit.name for exhibit in ex.make_exhibits()}


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description="Make the preference pairs (train, validation, test).")
    parser.add_argument("--out", type=Path, default=OUT_DIR, help="folder to write the three files to")
    options = parser.parse_args()
    for split, rows in make_splits(random.Random(SEED), names_of_the_data()).items():
        ex.write_jsonl(options.out / f"{split}.jsonl", rows)
        print(f"{split}: {len(rows)} pairs")


if __name__ == "__main__":
    main()
