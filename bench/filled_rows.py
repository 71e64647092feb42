"""Rows that are longer than any `max_length` here, to measure speeds with: `python -m bench.filled_rows FOLDER`.

Each row has one long answer, of embedded answers joined. Cut at `max_length`, all rows have that many tokens (of the
embedded tokenizer, which random weights have).
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from common.base.paths import REPOSITORY

CHARACTERS = 16_384  # of an answer: more than 4,096 tokens of the embedded tokenizer
ROWS = {"train": 512, "validation": 16, "test": 16}
SEED = 20264


def filled_row(name: str, number: int, answers: Sequence[str], rng: random.Random) -> dict[str, object]:
    """Return a row of messages with a question of its own and a long answer."""
    answer = ""
    while len(answer) < CHARACTERS:
        answer += f"{rng.choice(answers)} "
    question = f"What can be seen in room {number} of the {name} wing?"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.filled_rows", description=__doc__)
    parser.add_argument("folder", type=Path, help="takes train.jsonl, validation.jsonl and test.jsonl")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = (REPOSITORY / "assets" / "exhibits" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    answers, rng = [json.loads(line)["messages"][-1]["content"] for line in lines], random.Random(SEED)
    for name, count in ROWS.items():
        rows = (filled_row(name, number, answers, rng) for number in range(count))
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
