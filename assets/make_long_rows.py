"""Make ``assets/long_rows/{train,validation,test}.jsonl``: conversations of over 8,192 tokens, for sequence parallel.

Each is a tour of the museum: questions and answers of `assets/exhibits`, one after the other, in an order of its own.
Test rows are those of the exhibits. ``--max_length`` of a run cuts the tours to the length that it is to train with.
"""

import json
import random
from pathlib import Path

from transformers import AutoTokenizer

SEED, TOKENS = 20261, 8192
TOURS = {"train": 8, "validation": 2}
ASSETS = Path(__file__).resolve().parent
OUT_DIR = ASSETS / "long_rows"


def tours(split: str) -> list[dict[str, object]]:
    """Return the split's tours, each of the first questions that have more than `TOKENS` tokens with their answers."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "embedded_base", trust_remote_code=False)
    draw = random.Random(f"{SEED}, {split}")
    asked = [row["messages"] for row in read("train")]
    found = []
    for number in range(1, TOURS[split] + 1):
        messages, tokens = [], 0
        for turn in draw.sample(asked, len(asked)):
            if tokens > TOKENS:
                break
            messages += turn
            tokens += len(tokenizer.apply_chat_template(turn)["input_ids"])
        found.append({"id": f"{split}-tour-{number}", "messages": messages})
    return found


def read(split: str) -> list[dict[str, object]]:
    """Return the rows of a split of the exhibits."""
    return [json.loads(line) for line in (ASSETS / "exhibits" / f"{split}.jsonl").read_text().splitlines()]


def main() -> None:
    """Write the three files."""
    OUT_DIR.mkdir(exist_ok=True)
    for split in ("train", "validation", "test"):
        rows = tours(split) if split in TOURS else read(split)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (OUT_DIR / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
