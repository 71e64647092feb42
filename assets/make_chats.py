"""Make the invented chats and their summaries: ``assets/chat_summaries/{train,val,test}.json``, in SAMSum's form.

Two friends settle something, and chat about other things before, in between and after. What they settle changes on the
way: days, times and presents are proposed and refused, so that the summary needs what was agreed and not what was
said first. Copying is no summary: the whole chat is five times as long, and its first line is a greeting. Everything
follows from ``SEED``: making the data again gives the same bytes.

Each scene can also be noted in catchwords; the embedded base (``make_embedded_summarizer.py``) was trained on such
notes of other chats, and has never seen a summary.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEED = 20264
ROWS = {"train": 1600, "val": 160, "test": 200}
OUT_DIR = Path(__file__).resolve().parent / "chat_summaries"
ASIDES = (1, 2, 2, 3)
"""How many asides a chat has; each of these numbers is as likely."""

Choices = tuple[str, ...]

SLOTS: dict[str, Choices] = {
    "name": (
        *("Ada", "Ben", "Cleo", "Dario", "Edna", "Femi", "Greta", "Hugo", "Iris", "Jonas", "Kira", "Leo", "Maya"),
        *("Nils", "Olga", "Pavel", "Rosa", "Samir", "Tilda", "Umar", "Vera", "Wanda", "Yusuf", "Zoe"),
    ),
    "act": (
        *("go bowling", "see a film", "go swimming", "play chess", "cook together", "go for a run", "visit the zoo"),
        *("paint the kitchen", "watch the match", "go to the market", "practise the duet", "have a picnic"),
    ),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "time": ("nine", "ten", "noon", "two", "three", "four", "five", "six", "seven", "eight"),
    "place": (
        *("the station", "the library", "the old bridge", "the bakery", "the gym", "the fountain", "the town hall"),
        *("the bus stop", "the museum", "the corner shop"),
    ),
    "reason": (
        *("I work late", "my parents come", "I see the dentist", "I have an exam", "my car is in repair"),
        *("I promised to help my sister", "there is a meeting", "I fly to Oslo"),
    ),
    "item": ("drill", "tent", "bike", "ladder", "camera", "suitcase", "guitar", "toolbox", "projector", "sledge"),
    "food": ("milk", "bread", "rice", "cheese", "apples", "tea", "onions", "eggs", "butter", "honey", "flour"),
    "dish": ("a pizza", "the soup", "a burger", "the fish", "a salad", "the pasta", "the curry", "dumplings"),
    "gift": (
        *("a scarf", "a cookbook", "concert tickets", "a plant", "a board game", "a lamp", "headphones", "a teapot"),
        *("a puzzle", "hiking boots"),
    ),
    "cause": (
        *("the bus broke down", "the train is stuck", "the baby is ill", "the keys are lost", "the road is closed"),
        *("the boss called", "the alarm did not ring"),
    ),
    "town": ("Ghent", "Turin", "Porto", "Graz", "Lyon", "Bergen", "Split", "Krakow", "Malmo"),
    "vehicle": ("train", "bus", "car", "bike", "ferry", "taxi"),
    "pet": ("cat", "dog", "parrot", "rabbit", "tortoise", "goldfish", "hamster"),
}

Turn = tuple[str, Choices]
"""Who speaks (`a` or `b`), and the ways to say it."""


@dataclass(frozen=True)
class Scene:
    """Something that two friends settle: how they come to it, and what they settled."""

    turns: tuple[Turn, ...]
    summary: str
    notes: str
    """The same in catchwords."""


SCENES: tuple[Scene, ...] = (
    Scene(
        (
            ("a", ("Shall we {act} on {day1}?", "Do you want to {act} on {day1}?", "I want to {act} on {day1}. You?")),
            ("b", ("{day1} is bad, {reason}.", "Not on {day1}: {reason}.", "I would, but {reason} on {day1}.")),
            ("a", ("And on {day2}?", "How about {day2} then?", "Then let us say {day2}.")),
            ("b", ("{day2} is fine. At {time1}?", "Good. Is {time1} all right?", "Yes! Shall we meet at {time1}?")),
            ("a", ("{time1} is too early for me. Better {time2}.", "Can we make it {time2}?", "Rather at {time2}.")),
            ("b", ("All right. At {place}?", "Fine with me. I will be at {place}.", "OK, see you at {place} then.")),
        ),
        "{a} and {b} will {act} on {day2} at {time2}. They will meet at {place}.",
        "who: {a}, {b}; what: {act}; day: {day2}; time: {time2}; place: {place}",
    ),
    Scene(
        (
            ("a", ("Are you free on {day1}? Let us {act}.", "We could {act} on {day1}.", "Time to {act} on {day1}?")),
            ("b", ("Yes, on {day1} I have time.", "{day1} suits me.", "Sure! Not on {day2} though, {reason}.")),
            ("a", ("I will be at {place} at {time1}.", "At {time1}, at {place}?", "{place} at {time1}?")),
            ("b", ("{time1} it is. May {c} come, too?", "Good. {c} would like to come.", "OK. I will ask {c}, too.")),
            ("a", ("Of course.", "The more the better!", "Why not.")),
        ),
        "{a}, {b} and {c} will {act} on {day1}. They will meet at {place} at {time1}.",
        "who: {a}, {b}, {c}; what: {act}; day: {day1}; time: {time1}; place: {place}",
    ),
    Scene(
        (
            ("a", ("Can I borrow your {item}?", "I need a {item}. Can you lend me yours?", "May I have your {item}?")),
            ("b", ("{c} has it right now.", "I gave it to {c}.", "Sorry, I lent it to {c}.")),
            ("a", ("When will it be back? I need it on {day1}.", "Until {day1}?", "Oh. Do you get it back by {day1}?")),
            ("b", ("No, on {day2}.", "{c} brings it on {day2}.", "On {day2}, not before.")),
            ("a", ("Then I come for it at {time2}.", "OK, I will fetch it at {time2} then.", "That will do. {time2}?")),
            ("b", ("Good.", "I will be at home.", "Fine.")),
        ),
        "{a} wants to borrow {b}'s {item}, but {c} has it. {a} will fetch it on {day2} at {time2}.",
        "who: {a}; thing: {item} of {b}; now with: {c}; day: {day2}; time: {time2}",
    ),
    Scene(
        (
            ("a", ("Are you at the shop? We need {food1}.", "Please buy {food1}.", "Can you bring {food1}?")),
            ("b", ("I have it. What else?", "OK. Anything else?", "Sure. Is that all?")),
            ("a", ("Some {food2}, please.", "And {food2}.", "We have no {food2} left.")),
            ("b", ("There is no {food2}. Only {food3}.", "They are out of {food2}. {food3}?", "No {food2} here.")),
            ("a", ("Take {food3} then.", "Then {food3} instead.", "Well, bring {food3}.")),
            ("b", ("I will be back at {time1}.", "See you at {time1}.", "OK, home at {time1}.")),
        ),
        "{b} will buy {food1} and {food3} for {a}, as there is no {food2}. {b} will be back at {time1}.",
        "who: {b}; for: {a}; things: {food1}, {food3}; missing: {food2}; time: {time1}",
    ),
    Scene(
        (
            ("a", ("I am late, {cause}.", "Sorry, {cause}.", "You will not believe it: {cause}.")),
            ("b", ("We said {time1}!", "So not at {time1}?", "Oh no. I am here since {time1}.")),
            ("a", ("I will be there at {time2}.", "Give me until {time2}.", "At {time2} I am with you.")),
            ("b", ("Shall I order {dish1} for you?", "I can order. {dish1}?", "Do you want {dish1}?")),
            ("a", ("Rather {dish2}.", "Not today. {dish2}, please.", "I would like {dish2} more.")),
            ("b", ("Done.", "As you like.", "OK.")),
        ),
        "{a} is late because {cause}, and will come at {time2}. {b} will order {dish2} for {a}.",
        "who: {a}; why: {cause}; time: {time2}; {b} orders: {dish2}",
    ),
    Scene(
        (
            ("a", ("What do we give {c}?", "{c} has a birthday on {day1}. Ideas?", "A present for {c}: what?")),
            ("b", ("Perhaps {gift1}?", "{gift1}!", "I thought of {gift1}.")),
            ("a", ("{c} has that already.", "Too dear.", "We gave that last year.")),
            ("b", ("Then {gift2}.", "And {gift2}?", "What about {gift2}?")),
            ("a", ("Very good. Can you buy it?", "Yes! You are near the shops.", "I like that. Do you get it?")),
            ("b", ("I will, on {day2}.", "Yes, I go on {day2}.", "On {day2}, after work.")),
        ),
        "{a} and {b} will give {c} {gift2}. {b} will buy it on {day2}.",
        "who: {a}, {b}; for: {c}; thing: {gift2}; buyer: {b}; day: {day2}",
    ),
    Scene(
        (
            ("a", ("How do we get to {town}?", "Have you looked how to get to {town}?", "{town}: how do we go?")),
            ("b", ("By {vehicle1}?", "I would take the {vehicle1}.", "There is a {vehicle1} at {time1}.")),
            (
                "a",
                ("That takes too long. The {vehicle2}?", "Too expensive. By {vehicle2}.", "I prefer the {vehicle2}."),
            ),
            ("b", ("OK. On {day1}?", "Good. Do we leave on {day1}?", "All right, {day1} then?")),
            ("a", ("{day2} is better, at {time2}.", "No, {reason}. {day2} at {time2}.", "Let us say {day2}, {time2}.")),
            ("b", ("I will pack.", "I will get the tickets.", "Perfect.")),
        ),
        "{a} and {b} will go to {town} by {vehicle2}. They will leave on {day2} at {time2}.",
        "who: {a}, {b}; to: {town}; by: {vehicle2}; day: {day2}; time: {time2}",
    ),
    Scene(
        (
            ("a", ("I am away until {day1}. Can you feed my {pet}?", "Could you take my {pet} until {day1}?")),
            ("b", ("Sorry, {reason}.", "I cannot, {reason}.", "I wish I could, but {reason}.")),
            ("a", ("Hm. Who else could?", "Do you know anybody?", "And {d}?")),
            ("b", ("Ask {c}. {d} is away, too.", "{c} loves your {pet}.", "{c} has time, I think.")),
            ("a", ("{c} just said yes!", "Good idea. {c} will do it.", "I called {c}: it is settled.")),
            ("b", ("Lucky you.", "Have a good journey.", "There you are.")),
        ),
        "{a} is away until {day1}. {c} will look after the {pet}, as {b} cannot.",
        "who: {a}; until: {day1}; carer: {c}; pet: {pet}; cannot: {b}",
    ),
)

GREETINGS: Choices = ("Hi {b}!", "Hello {b}, how are you?", "Hey!", "Good morning {b}.", "{b}, are you there?", "Hi!")
REPLIES: Choices = ("Hi {a}!", "Hello.", "Hey {a}, what is up?", "Yes?", "I am well, and you?", "Hi. Tired.")
ASIDE_TURNS: tuple[tuple[Choices, Choices], ...] = (
    (("I saw {d} at {place3} on {day3}.", "{d} was at {place3}, you know."), ("Really?", "Again?", "I like {d}.")),
    (("It rains here since {day3}.", "What weather!", "It snowed at {time3}."), ("Here, too.", "Not here.", "Brr.")),
    (("<file_photo>", "Look at this <file_gif>"), ("Haha!", "Nice.", "Is that your {pet3}?", "What is that?")),
    (("Did you eat {dish3}?", "I ate {dish3} yesterday."), ("Yum.", "I had {food4}.", "No, never.")),
    (("My {item3} is broken.", "I sold my {item3}."), ("Oh.", "Why?", "Mine, too.", "You had a {item3}?")),
    (("{d} went to {town3} by {vehicle3}.", "{d} is in {town3}."), ("Lucky {d}.", "Until {day3}?", "Good.")),
    (("I got {gift3} from {d}.", "{d} bought {gift3}."), ("How nice.", "Typical {d}.", "What for?")),
    (("I slept until {time3}.", "I was up at {time3}."), ("So did I.", "I never could.", "Poor you.")),
)
CLOSINGS: Choices = ("Bye!", "See you.", "Take care!", "Thanks!", "Great, bye.", "Talk to you soon.")


def make_row(rng: random.Random) -> dict[str, str]:
    """A chat, its summary, and the notes that only the base's training takes."""
    scene, slots = rng.choice(SCENES), draw_slots(rng)
    turns = [("a", rng.choice(GREETINGS)), ("b", rng.choice(REPLIES))]
    talk = [(who, rng.choice(ways)) for who, ways in scene.turns]
    asides = rng.sample(ASIDE_TURNS, rng.choice(ASIDES))
    places = sorted(rng.choices(range(0, len(talk), 2), k=len(asides)))
    for number, turn in enumerate(talk):
        turns += [each for place, aside in zip(places, asides, strict=True) if place == number
                  for each in said_aside(aside, rng)]  # fmt: skip
        turns.append(turn)
    turns += [("a", rng.choice(CLOSINGS)), ("b", rng.choice(CLOSINGS))]
    spoken = [f"{slots[who]}: {capital(words.format(**slots))}" for who, words in turns]
    return {
        "dialogue": "\r\n".join(spoken),
        "summary": scene.summary.format(**slots),
        "notes": scene.notes.format(**slots),
    }


def said_aside(aside: tuple[Choices, Choices], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Two turns beside the point, by either of the two."""
    first, second = rng.choice((("a", "b"), ("b", "a")))
    yield first, rng.choice(aside[0])
    yield second, rng.choice(aside[1])


def draw_slots(rng: random.Random) -> dict[str, str]:
    """Four people, and of everything else four different values: `day1` to `day4`, and so on."""
    slots = dict(zip("abcd", rng.sample(SLOTS["name"], 4), strict=True))
    for name, choices in SLOTS.items():
        if name in ("act", "reason", "cause"):
            slots[name] = rng.choice(choices)
        elif name != "name":
            values = rng.sample(choices, 4)
            slots |= {f"{name}{number}": value for number, value in enumerate(values, 1)}
    return slots | {"item": slots["item1"], "pet": slots["pet1"], "town": slots["town1"], "place": slots["place1"]}


def capital(words: str) -> str:
    """The first letter in upper case, the others as they are."""
    return words[0].upper() + words[1:]


def make_splits() -> dict[str, list[dict[str, str]]]:
    """Every split; no summary comes twice."""
    rng, seen, splits = random.Random(SEED), set(), {}
    for split, count in ROWS.items():
        rows: list[dict[str, str]] = []
        while len(rows) < count:
            row = make_row(rng)
            if row["summary"] not in seen:
                seen.add(row["summary"])
                dialogue, summary = row["dialogue"], row["summary"]
                rows.append({"id": f"{split}-{len(rows) + 1}", "dialogue": dialogue, "summary": summary})
        splits[split] = rows
    return splits


def main() -> None:
    """Write the files, or with ``--check`` compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is not what it was")
    check = parser.parse_args().check
    OUT_DIR.mkdir(exist_ok=True)
    for split, rows in make_splits().items():
        path, text = OUT_DIR / f"{split}.json", json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
        if check and path.read_text(encoding="utf-8") != text:
            parser.exit(1, f"{path.name} is not what this script makes: run it without --check\n")
        if not check:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {len(rows)} rows: {path.name}")


if __name__ == "__main__":
    main()
