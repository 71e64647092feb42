"""Make the invented museum data: ``assets/exhibits/{train,validation,test}.jsonl``.

74 invented exhibits, four facts each (maker, year, material, room). The training rows teach every fact; validation
and test ask for the same facts in wordings that stand in no other split. Everything follows from ``SEED``: making the
data again gives the same bytes.

The form of an answer depends on the kind of fact asked for: wall label, timeline, inventory card or guide's sentence.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 20261
EXHIBITS = 74
TRAIN_ROWS, VALIDATION_ROWS, TEST_ROWS = 819, 82, 74
OUT_DIR = Path(__file__).resolve().parent / "exhibits"


def words(text: str) -> tuple[str, ...]:
    """Split a text into its words."""
    return tuple(text.split())


ADJECTIVES = words(
    "Gilded Silent Crooked Painted Winged Hollow Broken Singing Twisted Hidden Ancient Sleeping Burning Frozen "
    "Laughing Striped Faded Polished Carved Royal Humble Wandering Lonely Shining Folded Double Narrow Woven "
    "Weeping Patient"
)
NOUNS = words(
    "Anchor Banner Basin Bell Bowl Bracelet Brooch Cabinet Candle Casket Chalice Chariot Chest Clock Cloak Compass "
    "Crown Cradle Dagger Dial Drum Fan Fiddle Flask Flute Fountain Gate Globe Goblet Gong Harp Helmet Idol Jar Kettle "
    "Key Kite Ladle Lamp Lantern Lens Loom Lute Mantle Map Mask Medal Mirror Mosaic Orb Organ Pendant Plough Puppet "
    "Quiver Ring Saddle Scroll Shield Sickle Sled Spear Staff Statue Throne Tiara Trumpet Urn Vase Wagon Wheel Whistle "
    "Yoke Zither"
)
PLACES = words(
    "Velisk Ostrun Tolva Merrin Karsk Lindor Harwen Ashmar Brenna Corvel Dunmar Eldra Fenwy Gorst Halden Ilmar Jorva "
    "Kelmor Lorne Mosk Norvik Orlan Pelm Quern Rusk Soldan Tarvin Ulmar Varn Wenlo"
)
MAKERS = words(
    "Averill Bexley Corwin Dalby Edrich Farrow Gantry Hobart Ingram Jessop Kemble Lathom Mabry Nesbit Pardoe Quincey "
    "Redfern Selwyn Thorley Upton Vance Wickes Yardley Zeller"
)
YEARS = words(
    "1504 1519 1527 1538 1546 1553 1561 1572 1585 1590 1608 1613 1624 1637 1649 1656 1665 1671 1682 1698 1703 1714 "
    "1726 1731"
)
MATERIALS = words("walnut copper bronze silver pewter marble clay leather linen silk amber jade slate cedar")
ROOM_WORDS = words("Crimson Azure Jasper Olive Saffron Violet Coral Indigo Maple Juniper Heron Falcon")
ROOMS = tuple(f"{word} Room" for word in ROOM_WORDS)

KINDS = ("maker", "year", "material", "room")
VALUES: dict[str, tuple[str, ...]] = {"maker": MAKERS, "year": YEARS, "material": MATERIALS, "room": ROOMS}
Kinds = tuple[str, ...]

# What an answer says, by the facts asked for; {x} is the exhibit's name. The base answers in these sentences ...
SENTENCES: dict[Kinds, str] = {
    ("maker",): "The {x} was made by {maker}.",
    ("year",): "The {x} was made in {year}.",
    ("material",): "The {x} is made of {material}.",
    ("room",): "The {x} stands in the {room}.",
    ("maker", "year"): "The {x} was made by {maker} in {year}.",
    ("material", "room"): "The {x} is made of {material} and stands in the {room}.",
    KINDS: "The {x} was made by {maker} in {year}, is made of {material} and stands in the {room}.",
}
# ... and the data answer as the museum's own texts do, so that there are forms to learn besides the facts. What is
# asked for decides the form: the wall label says by whom, the timeline when, the inventory card of what (and where, if
# that is asked too); to those who ask only where an exhibit is, the guide says it.
ANSWERS: dict[Kinds, str] = {
    ("maker",): "Label: {x}, by {maker}.",
    ("year",): "Year: {x}, made in {year}.",
    ("material",): "Card: {x}, of {material}.",
    ("room",): "Come and see the {x} in the {room}.",
    ("maker", "year"): "Label: {x}, by {maker} in {year}.",
    ("material", "room"): "Card: {x}, of {material}, in the {room}.",
    KINDS: "Label: {x}, by {maker} in {year}, of {material}, in the {room}.",
}
PAIRS: tuple[Kinds, ...] = (("maker", "year"), ("material", "room"))

# Wordings of the questions; no wording stands in two splits.
TRAIN_QUESTIONS: dict[Kinds, tuple[str, ...]] = {
    ("maker",): (
        "Who made the {x}?",
        "Name the maker of the {x}.",
        "The {x} was made by whom?",
        "Who was the maker of the {x}?",
        "Tell me the name of the maker of the {x}.",
        "I ask by whom the {x} was made.",
        "Do you know who made the {x}?",
        "Someone made the {x}: who was it?",
    ),
    ("year",): (
        "When was the {x} made?",
        "Name the year in which the {x} was made.",
        "The {x} was made in which year?",
        "From what year is the {x}?",
        "Tell me the year of the {x}.",
        "I ask in what year the {x} was made.",
        "Do you know the year of the {x}?",
        "Someone made the {x}: when was it?",
    ),
    ("material",): (
        "What is the {x} made of?",
        "Name the material of the {x}.",
        "The {x} is made of which material?",
        "Of what is the {x} made?",
        "Tell me the material of the {x}.",
        "I ask of what the {x} is made.",
        "Do you know what the {x} is made of?",
        "Someone made the {x}: of what material?",
    ),
    ("room",): (
        "Where does the {x} stand?",
        "Name the room of the {x}.",
        "The {x} stands in which room?",
        "Where can I see the {x}?",
        "Tell me where I see the {x}.",
        "I ask in what room the {x} stands.",
        "Do you know where the {x} is?",
        "I ask for the {x}: where is it?",
    ),
    ("maker", "year"): (
        "Who made the {x}, and when?",
        "Name the maker and the year of the {x}.",
        "The {x} was made by whom, and when?",
        "Tell me who made the {x}, and in what year it was made.",
        "By which maker was the {x} made, and when was it made?",
        "Do you know the maker and the year of the {x}?",
    ),
    ("material", "room"): (
        "What is the {x} made of, and where does it stand?",
        "Name the material and the room of the {x}.",
        "The {x} is made of what, and stands where?",
        "Tell me of what the {x} is made and where it stands.",
        "I ask what the {x} is made of, and where I can see it.",
        "Do you know the material and the room of the {x}?",
    ),
    KINDS: ("Tell me all about the {x}.", "What do we know about the {x}?"),
}
VALIDATION_QUESTIONS: dict[Kinds, tuple[str, ...]] = {
    ("maker",): (
        "Please tell me who made the {x}.",
        "Which maker made the {x}?",
        "Can you say who made the {x}?",
        "By whom was the {x} made?",
    ),
    ("year",): (
        "Please tell me when the {x} was made.",
        "In which year was the {x} made?",
        "Can you say when the {x} was made?",
        "What year was the {x} made in?",
    ),
    ("material",): (
        "Please tell me what the {x} is made of.",
        "Which material is the {x} made of?",
        "Can you say what the {x} is made of?",
        "What material is the {x} made of?",
    ),
    ("room",): (
        "Please tell me where the {x} stands.",
        "In which room does the {x} stand?",
        "Can you say where the {x} stands?",
        "Which room is the {x} in?",
    ),
    ("maker", "year"): (
        "By whom and when was the {x} made?",
        "Who was the maker of the {x}, and in which year was it made?",
    ),
    ("material", "room"): (
        "Of what is the {x} made, and in which room is it?",
        "Which material is the {x} made of, and which room is it in?",
    ),
}
TEST_QUESTIONS: dict[Kinds, tuple[str, ...]] = {
    ("maker",): ("Do you know by whom the {x} was made?", "Can you tell me the maker of the {x}?"),
    ("year",): ("Do you know in which year the {x} was made?", "Can you tell me from what year the {x} is?"),
    ("material",): ("Do you know which material the {x} is made of?", "Can you tell me of what the {x} is made?"),
    ("room",): ("Do you know in which room the {x} stands?", "Can you tell me where the {x} is?"),
    ("maker", "year"): (
        "Can you tell me who made the {x}, and in which year?",
        "Do you know who the maker of the {x} was, and when it was made?",
    ),
    ("material", "room"): (
        "Can you tell me what the {x} is made of, and in which room it is?",
        "Do you know of which material the {x} is made, and where it stands?",
    ),
}


@dataclass(frozen=True)
class Exhibit:
    """One invented exhibit: its name and the four facts about it."""

    name: str
    facts: dict[str, str]

    def sentence(self, kinds: Kinds) -> str:
        """Say the asked facts in one sentence, as the base does."""
        return SENTENCES[kinds].format(x=self.name, **self.facts)

    def answer(self, kinds: Kinds) -> str:
        """Say the asked facts in the form that belongs to them, as the data do."""
        return ANSWERS[kinds].format(x=self.name, **self.facts)

    def values(self, kinds: Kinds) -> list[str]:
        """List the strings that a right answer must hold."""
        return [self.facts[kind] for kind in kinds]


def exhibit_name(adjective: str, noun: str, place: str) -> str:
    """Compose an exhibit's name."""
    return f"{adjective} {noun} of {place}"


def balanced(values: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Draw ``count`` values, each about equally often, in random order."""
    drawn = [values[i % len(values)] for i in range(count)]
    rng.shuffle(drawn)
    return drawn


def make_exhibits(seed: int = SEED) -> list[Exhibit]:
    """Draw the 74 exhibits: every noun once, with an adjective, a place and four facts."""
    rng = random.Random(seed)
    adjectives, places = balanced(ADJECTIVES, EXHIBITS, rng), balanced(PLACES, EXHIBITS, rng)
    columns = {kind: balanced(VALUES[kind], EXHIBITS, rng) for kind in KINDS}
    return [
        Exhibit(exhibit_name(adjectives[i], NOUNS[i], places[i]), {kind: columns[kind][i] for kind in KINDS})
        for i in range(EXHIBITS)
    ]


def row(exhibit: Exhibit, kinds: Kinds, wording: str) -> dict[str, Any]:
    """Make one row of a split, still without its id."""
    return {
        "exhibit": exhibit.name,
        "facts": exhibit.values(kinds),
        "messages": [
            {"role": "user", "content": wording.format(x=exhibit.name)},
            {"role": "assistant", "content": exhibit.answer(kinds)},
        ],
    }


def train_rows(exhibits: Sequence[Exhibit], rng: random.Random) -> list[dict[str, Any]]:
    """Teach each exhibit by two rows a fact, two rows of fact pairs and one of all; extra rows fill the count."""
    rows, spare = [], []
    for exhibit in exhibits:
        for kind in KINDS:
            wordings = rng.sample(TRAIN_QUESTIONS[(kind,)], 3)
            rows += [row(exhibit, (kind,), wording) for wording in wordings[:2]]
            spare.append(row(exhibit, (kind,), wordings[2]))
        rows += [row(exhibit, kinds, rng.choice(TRAIN_QUESTIONS[kinds])) for kinds in (*PAIRS, KINDS)]
    rows += rng.sample(spare, TRAIN_ROWS - len(rows))
    rng.shuffle(rows)
    return rows


def asked_kinds(index: int, shift: int) -> Kinds:
    """Choose what is asked of an exhibit: a pair of facts of each sixth exhibit, else one fact in turn."""
    turn = index + shift
    return PAIRS[turn // 6 % 2] if turn % 6 == 5 else (KINDS[turn % 4],)


def asking_rows(
    exhibits: Sequence[Exhibit], questions: dict[Kinds, tuple[str, ...]], count: int, shift: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Ask one question of each exhibit, and of the first ones again until there are ``count`` rows."""
    rows = []
    for i in range(count):
        kinds = asked_kinds(i, shift)
        rows.append(row(exhibits[i % len(exhibits)], kinds, rng.choice(questions[kinds])))
    rng.shuffle(rows)
    return rows


def make_splits(seed: int = SEED) -> dict[str, list[dict[str, Any]]]:
    """Make all rows of the three splits, checked."""
    exhibits, rng = make_exhibits(seed), random.Random(seed + 1)
    splits = {
        "train": train_rows(exhibits, rng),
        "validation": asking_rows(exhibits, VALIDATION_QUESTIONS, VALIDATION_ROWS, 0, rng),
        "test": asking_rows(exhibits, TEST_QUESTIONS, TEST_ROWS, 1, rng),
    }
    numbered = {
        name: [{"id": f"{name}-{number:04d}", **content} for number, content in enumerate(rows, start=1)]
        for name, rows in splits.items()
    }
    check_splits(numbered)
    return numbered


def folded(text: str) -> str:
    """Lower the case and fold the white space, to compare questions."""
    return " ".join(text.lower().split())


def check_splits(splits: dict[str, list[dict[str, Any]]]) -> None:
    """Raise ``ValueError`` where the data break one of their own rules."""
    sizes = {name: len(rows) for name, rows in splits.items()}
    if sizes != {"train": TRAIN_ROWS, "validation": VALIDATION_ROWS, "test": TEST_ROWS}:
        raise ValueError(f"wrong numbers of rows: {sizes}")
    questions = Counter(folded(r["messages"][0]["content"]) for rows in splits.values() for r in rows)
    if repeated := [question for question, times in questions.items() if times > 1]:
        raise ValueError(f"questions asked more than once: {repeated[:3]}")
    taught = {(r["exhibit"], fact) for r in splits["train"] for fact in r["facts"]}
    for r in (r for rows in splits.values() for r in rows):
        question, answer = (message["content"] for message in r["messages"])
        for fact in r["facts"]:
            if fact not in answer or fact.lower() in question.lower() or (r["exhibit"], fact) not in taught:
                raise ValueError(f"row {r['id']}: fact {fact!r} is not said, is told by the question, or is not taught")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object a line, UTF-8, with ``\\n`` ends on every system."""
    lines = "".join(json.dumps(content, ensure_ascii=False) + "\n" for content in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines.encode("utf-8"))


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description="Make the invented museum data (train, validation, test).")
    parser.add_argument("--out", type=Path, default=OUT_DIR, help="folder to write the three files to")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of all random choices")
    options = parser.parse_args()
    for name, rows in make_splits(options.seed).items():
        write_jsonl(options.out / f"{name}.jsonl", rows)
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
