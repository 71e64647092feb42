"""Make the invented messages of a museum's visitors: ``assets/visitor_messages/{train,validation,test}.csv``.

A message belongs to the class of what its writer wants; it also mentions one or two other classes' matters that are
settled or beside the point, so that keywords alone do not decide. Validation and test hold wordings that training does
not. One label in twenty is wrong, in every split: no model can know those, and the best accuracy is 0.95. Everything
follows from ``SEED``: making the data again gives the same bytes.
"""

import argparse
import csv
import io
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

SEED = 20263
ROWS = {"train": 1600, "validation": 400, "test": 400}
WRONG_LABELS = 0.05
OUT_DIR = Path(__file__).resolve().parent / "visitor_messages"

SHARES = {
    "tickets": 0.22,
    "opening hours": 0.20,
    "complaints": 0.17,
    "accessibility": 0.15,
    "lost property": 0.14,
    "school groups": 0.12,
}
LABELS = tuple(SHARES)
TWO_ASIDES, GREETED, CLOSED, OWN_WORDS = 0.05, 0.15, 0.1, 0.5
"""Shares of the messages with a second aside, a greeting, a closing; and of the sentences in words of their class."""
HELD_OUT_USE = 0.15
"""How often validation and test draw from what training does not hold, where a choice has something held out."""

Choices = tuple[str, ...]

# What stands in braces in the sentences below. Of every list here, the last items are kept for validation and test.
SLOTS: dict[str, Choices] = {
    "ticket": (
        *("family ticket", "student ticket", "evening ticket", "annual pass", "combined ticket", "concert ticket"),
        *("child's ticket", "reduced ticket", "gift voucher", "day ticket", "weekend pass", "online ticket"),
    ),
    "day": (
        *("Monday", "Tuesday", "Thursday", "Friday", "Saturday", "Sunday", "Easter Monday", "New Year's Day"),
        *("the first of May", "the bank holiday", "Wednesday", "Boxing Day"),
    ),
    "time": ("nine", "ten", "noon", "four", "five", "half past five", "six", "eight", "half past nine", "seven"),
    "room": (
        *("Crimson Room", "Azure Room", "Jasper Room", "Olive Room", "Coral Room", "Indigo Room", "great hall"),
        *("map room", "coin cabinet", "Heron Room", "Falcon Room"),
    ),
    "place": ("cloakroom", "café", "shop", "garden", "library", "main hall", "cinema", "courtyard", "reading room"),
    "item": (
        *("umbrella", "scarf", "black wallet", "camera", "pair of glasses", "rucksack", "bunch of keys", "left glove"),
        *("grey hat", "phone", "silver ring", "notebook", "blue jacket", "toy rabbit"),
    ),
    "aid": (
        *("wheelchair", "walking frame", "mobility scooter", "rollator", "pair of crutches", "walking stick"),
        *("pushchair", "white cane", "folding stool"),
    ),
    "who": (
        *("my mother", "my husband", "my aunt", "a friend", "my neighbour", "my daughter", "my father", "my partner"),
        *("our guest", "my brother", "my grandfather"),
    ),
    "class": (
        *("class of 24", "third form", "sixth form", "group of 28 pupils", "art class", "history class"),
        *("primary school class", "exchange class", "kindergarten group", "class of ten-year-olds"),
    ),
    "staff": ("guard", "guide", "cashier", "waiter", "man at the door", "woman at the till", "attendant", "porter"),
    "when": ("yesterday", "last week", "on Sunday", "this morning", "in March", "a few days ago", "two weeks ago"),
}


@dataclass(frozen=True)
class Topic:
    """How a class is spoken of: in words that fit any frame, in requests of its own, and beside the point."""

    matters: Choices
    questions: Choices
    wishes: Choices
    asides: Choices


TOPICS: dict[str, Topic] = {
    "tickets": Topic(
        matters=(
            "the price of a {ticket}",
            "a refund for the {ticket}",
            "the booking of a {ticket} for {day}",
            "paying for the {ticket} by card",
            "the date printed on my {ticket}",
            "what a {ticket} costs for {who}",
            "changing the name on a {ticket}",
        ),
        questions=(
            "how much a {ticket} is",
            "whether a {ticket} can be bought at the door",
            "whether my {ticket} can be moved to {day}",
            "whether the {ticket} includes the {room}",
            "how to pay for a {ticket}",
            "where to buy a {ticket} for {who}",
            "whether a {ticket} may be given to {who}",
        ),
        wishes=(
            "Please send me a {ticket} for {day}; I will pay by card.",
            "What does a {ticket} cost for two adults and a child?",
            "I booked a {ticket} {when} and no e-mail came: please send it again.",
            "Can I still swap my {ticket} for another date?",
            "I would like my money back for the {ticket}, as we cannot come.",
            "How do I reserve a {ticket} for {who}?",
            "Is there a discount on the {ticket} for pensioners?",
        ),
        asides=(
            "I already have the {ticket}.",
            "{who} paid for the {ticket} {when}.",
            "The {ticket} came by post {when}, many thanks.",
            "We got our money back for the {ticket}, so that is done.",
            "The {ticket} is in my bag and needs no change.",
            "Buying the {ticket} was easy enough.",
            "I won a {ticket} in a raffle {when}.",
        ),
    ),
    "opening hours": Topic(
        matters=(
            "the opening hours on {day}",
            "the last admission on {day}",
            "the closing time of the {place}",
            "the late evening on {day}",
            "the hours of the {place} in winter",
            "coming before {time} on {day}",
            "the days on which the {room} is shut",
        ),
        questions=(
            "whether you are open on {day}",
            "when the {place} closes",
            "until what hour the {room} is open",
            "from what time one can come in on {day}",
            "whether you shut at {time} on {day}",
            "how late the {place} stays open",
            "on which days the {room} is closed",
        ),
        wishes=(
            "Do you open on {day}?",
            "At what time do the doors open on {day}?",
            "How late may we arrive on {day} and still see the {room}?",
            "Is the {place} open after {time}?",
            "We could be there at {time} on {day}: is anybody in then?",
            "Please send me your winter timetable.",
            "Until when is the {room} shut for works?",
        ),
        asides=(
            "I know that you close at {time}.",
            "That the {place} opens at {time} I saw on the sign.",
            "We found the doors open on {day}, as your website says.",
            "The {room} being shut on {day} does not matter to us.",
            "We will be there when you open at {time}.",
            "{who} wrote down the hours for {day}.",
            "Your hours suit us well.",
        ),
    ),
    "complaints": Topic(
        matters=(
            "the rude {staff} in the {room}",
            "the dirty tables in the {place}",
            "the noise in the {room}",
            "the long wait at the {place}",
            "how the {staff} spoke to {who}",
            "the cold and the draught in the {room}",
            "the broken audio guide",
        ),
        questions=(
            "why the {staff} shouted at {who}",
            "why nobody cleans the {place}",
            "why we had to queue for an hour at the {place}",
            "why the {staff} in the {room} was so unfriendly",
            "why the {room} was so loud and so hot",
            "why the {staff} sent {who} away",
            "why half of the labels in the {room} were missing",
        ),
        wishes=(
            "The {staff} was rude to {who}, and I expect an apology.",
            "I was shocked at the dirt in the {place}.",
            "It is a disgrace that {who} had to stand in line for an hour.",
            "The {staff} in the {room} laughed at us: this must not happen again.",
            "What an awful visit: the {room} was loud, hot and crowded.",
            "The food in the {place} was cold, and nobody cared.",
            "Never have I been treated as badly as by your {staff} {when}.",
        ),
        asides=(
            "The {staff} was short with us {when}, but has said sorry.",
            "The queue at the {place} was long, which we did not mind.",
            "{who} found the {room} noisy; I liked it.",
            "The dirt in the {place} was gone when we came again.",
            "I have no complaint about the {staff}.",
            "The {staff} was unfriendly {when}, but that is forgiven and forgotten.",
            "Unlike elsewhere, nobody was rude to {who}.",
        ),
    ),
    "accessibility": Topic(
        matters=(
            "the lift to the {room}",
            "the ramp at the {place}",
            "the way to the {room} with a {aid}",
            "borrowing a {aid} at the entrance",
            "the steps between the {place} and the {room}",
            "a seat for {who}, who cannot stand for long",
            "parking for the disabled near the {place}",
        ),
        questions=(
            "whether the lift goes up to the {room}",
            "whether one gets into the {place} with a {aid}",
            "whether there are steps in the {room}",
            "how {who} can reach the {room} with a {aid}",
            "whether a {aid} can be borrowed",
            "whether the doors of the {place} are wide enough for a {aid}",
            "whether there is large print for {who}",
        ),
        wishes=(
            "{who} uses a {aid}: how do we get to the {room}?",
            "Is there a way round the stairs at the {place}?",
            "Can we bring a {aid} into the {room}?",
            "{who} walks badly and will need a {aid} from you, please.",
            "Does the lift stop at the {room}?",
            "Are there tours in sign language for {who}?",
            "{who} cannot climb stairs; which rooms remain?",
        ),
        asides=(
            "{who} came with a {aid} and got on very well.",
            "The lift to the {room} works again, I hear.",
            "We found the ramp at the {place} at once.",
            "{who} needs no {aid} any more.",
            "The stairs to the {room} are no trouble to us.",
            "We bring our own {aid}, and know the way.",
            "A {aid} was lent to {who} {when}, for which many thanks.",
        ),
    ),
    "lost property": Topic(
        matters=(
            "the {item} that I left in the {place}",
            "the {item} that {who} lost {when}",
            "my missing {item}",
            "a {item} forgotten in the {room}",
            "the {item} left behind on a bench",
            "a {item} mislaid near the {place}",
            "the search for my {item}",
        ),
        questions=(
            "whether my {item} has been handed in",
            "whether anybody found a {item} in the {place}",
            "what became of the {item} that {who} left behind",
            "whether the cleaners came across my {item}",
            "where things left in the {room} are kept",
            "whether a {item} was found {when}",
            "where {who} can fetch the {item} forgotten {when}",
        ),
        wishes=(
            "I must have dropped my {item} in the {place}.",
            "Has a {item} been found in the {room}?",
            "Since our visit {when} {who} cannot find the {item}: please look for it.",
            "If my {item} turns up, please send it to me.",
            "The {item} of {who} is still on a chair in the {place}, I fear.",
            "Please keep the {item} that you found until I come for it.",
            "Did I leave my {item} with you {when}?",
        ),
        asides=(
            "The {item} that I missed was at home after all.",
            "{who} lost a {item} {when}, though not with you.",
            "My {item} was handed back to me {when}.",
            "We picked up the forgotten {item} {when}.",
            "I had left my {item} in the {place}, but it was found at once.",
            "{who} gave the {item} that we found to the {staff}.",
            "I do not mind about the {item} that I lost.",
        ),
    ),
    "school groups": Topic(
        matters=(
            "a guided tour for our {class}",
            "the workshop for schools",
            "the visit of our {class} on {day}",
            "worksheets for the {class}",
            "the number of teachers who come with our {class}",
            "the lunch room for the {class}",
            "the teachers' pack about the {room}",
        ),
        questions=(
            "whether our {class} can have a guide",
            "how many pupils you take in one tour",
            "what the workshop offers to a {class}",
            "where our {class} can eat its sandwiches",
            "whether the {class} may draw in the {room}",
            "how many teachers must come with the {class}",
            "whether there are worksheets about the {room}",
        ),
        wishes=(
            "I teach, and would like to bring my {class} on {day}.",
            "Do you have a tour that suits a {class}?",
            "Which workshop do you advise for our {class}?",
            "We are a school and look for a guide to the {room} for our {class}.",
            "Please put our {class} down for the workshop on {day}.",
            "What can our {class} do in the {room}, and for how long?",
            "Do you have teaching material for a {class}?",
        ),
        asides=(
            "{who} came to you with a {class} {when}.",
            "I teach a {class}, but come alone.",
            "A {class} was in the {room} at the same time.",
            "Our {class} has its place in the workshop.",
            "The tour for our {class} is arranged.",
            "The guide of the {class} let us listen {when}.",
            "The worksheets for the {class} have come.",
        ),
    ),
}

# Frames that turn any class's words into what is wanted ({m}: a matter, {q}: a question) ...
WANTED: Choices = (
    "I am writing about {m}.",
    "My question is about {m}.",
    "Could you help me with {m}?",
    "Please tell me {q}.",
    "I should like to know {q}.",
    "Nobody could tell me {q}.",
    "What can you tell me about {m}?",
    "It is {m} that I want to hear from you about.",
    "Can somebody say {q}?",
    "I still have no answer about {m}.",
    "What I need to know is {q}.",
    "There is one thing left to clear up: {m}.",
    "We wonder {q}.",
    "Your website does not say {q}.",
    "Please see to {m}.",
    "Who can inform me about {m}?",
    "I have asked twice, and in vain, {q}.",
    "Who knows {q}?",
)
# ... and into something settled, or another's affair.
SETTLED: Choices = (
    "I have read about {m} already.",
    "You answered me {when} about {m}.",
    "This is not about {m}.",
    "I know by now {q}.",
    "{who} has found out {q}.",
    "The {staff} could tell me {q}.",
    "{who} asked about {m}, and that is settled.",
    "I need to hear nothing more about {m}.",
    "Somebody told us {when} {q}.",
    "As for {m}, all is clear.",
    "I do not need to know {q}.",
    "Thank you for the answer about {m}.",
    "{who} will write to you separately about {m}.",
    "Your website does say {q}.",
    "Never mind {m}.",
    "What you wrote about {m} was helpful.",
    "We no longer wonder {q}.",
    "It is known to us {q}.",
)
GREETINGS: Choices = (
    "Good morning.",
    "Dear museum,",
    "Hello,",
    "Dear Sir or Madam,",
    "Good evening from {who} and me.",
    "We were with you {when} and enjoyed it.",
    "We want to visit you on {day}.",
    "I am a friend of the museum.",
    "Dear team,",
    "We come from far away.",
)
CLOSINGS: Choices = (
    "Many thanks.",
    "Kind regards.",
    "Thank you for your trouble.",
    "I look forward to your reply.",
    "With best wishes, also from {who}.",
    "We look forward to the {room}.",
    "Yours sincerely.",
    "Please write to me, as I am hard to reach by telephone.",
    "Thanks in advance.",
    "Until soon.",
)


class Writer:
    """Writes the messages of one split, from what all splits may say and what this one alone does."""

    def __init__(self, split: str, rng: random.Random) -> None:
        """`split`: train, validation or test."""
        self.split, self.rng = split, rng

    def pick(self, choices: Choices) -> str:
        """Draw one item; the last ones of `choices`, one in seven each, are for validation and for test alone."""
        held_out = max(1, len(choices) // 7)
        common = choices[: -2 * held_out]
        own = {"train": (), "validation": choices[-2 * held_out : -held_out], "test": choices[-held_out:]}[self.split]
        return self.rng.choice(own if own and self.rng.random() < HELD_OUT_USE else common)

    def fill(self, sentence: str) -> str:
        """Fill the slots, each with a draw of its own, and begin with a capital."""
        filled = re.sub(r"{(\w+)}", lambda slot: self.pick(SLOTS[slot[1]]), sentence)
        return filled[0].upper() + filled[1:]

    def sentence(self, frames: Choices, own: Choices, topic: Topic) -> str:
        """Say something about a topic, in its own words or in a frame that serves all topics."""
        if self.rng.random() < OWN_WORDS:
            return self.fill(self.pick(own))
        frame = self.pick(frames)
        return self.fill(frame.replace("{m}", self.pick(topic.matters)).replace("{q}", self.pick(topic.questions)))

    def message(self, label: str) -> str:
        """Write one message: what is wanted and one or two asides about other classes, in any order."""
        others = self.rng.sample([other for other in LABELS if other != label], 1 + (self.rng.random() < TWO_ASIDES))
        wanted = self.sentence(WANTED, TOPICS[label].wishes, TOPICS[label])
        sentences = [wanted, *(self.sentence(SETTLED, TOPICS[other].asides, TOPICS[other]) for other in others)]
        self.rng.shuffle(sentences)
        if self.rng.random() < GREETED:
            sentences.insert(0, self.fill(self.pick(GREETINGS)))
        if self.rng.random() < CLOSED:
            sentences.append(self.fill(self.pick(CLOSINGS)))
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", " ".join(sentences))


Rows = list[tuple[str, str]]


def make_split(split: str, taken: set[str], rng: random.Random) -> Rows:
    """Write one split's messages, none of them in `taken`; then make one label in twenty wrong."""
    writer, rows = Writer(split, rng), []
    for label, share in SHARES.items():
        for _ in range(round(share * ROWS[split])):
            while (text := writer.message(label)) in taken:
                pass
            taken.add(text)
            rows.append((text, label))
    rng.shuffle(rows)
    for number in rng.sample(range(len(rows)), round(WRONG_LABELS * len(rows))):
        text, label = rows[number]
        rows[number] = (text, rng.choice([other for other in LABELS if other != label]))
    return rows


def make_splits(seed: int = SEED) -> dict[str, Rows]:
    """Make all rows of the three splits, checked."""
    rng, taken = random.Random(seed), set()
    splits = {split: make_split(split, taken, rng) for split in ROWS}
    check_splits(splits)
    return splits


def check_splits(splits: dict[str, Rows]) -> None:
    """Raise ``ValueError`` where the data break one of their own rules."""
    if (sizes := {split: len(rows) for split, rows in splits.items()}) != ROWS:
        raise ValueError(f"wrong numbers of rows: {sizes}")
    texts = Counter(" ".join(text.lower().split()) for rows in splits.values() for text, _ in rows)
    if repeated := [text for text, times in texts.items() if times > 1]:
        raise ValueError(f"messages written more than once: {repeated[:3]}")
    if unfilled := [text for text in texts if "{" in text or "}" in text]:
        raise ValueError(f"slots left open: {unfilled[:3]}")


def write_csv(path: Path, rows: Rows) -> None:
    """Write the columns text and label, UTF-8, with ``\\n`` ends on every system."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([("text", "label"), *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(table.getvalue().encode("utf-8"))


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description="Make the invented messages of visitors (train, validation, test).")
    parser.add_argument("--out", type=Path, default=OUT_DIR, help="folder to write the three files to")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of all random choices")
    options = parser.parse_args()
    for split, rows in make_splits(options.seed).items():
        write_csv(options.out / f"{split}.csv", rows)
        print(f"{split}: {len(rows)} rows")


if __name__ == "__main__":
    main()
