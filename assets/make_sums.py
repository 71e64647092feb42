"""Make additions for a reward that can be computed: ``assets/sums/{train,validation,test}.jsonl``.

Each row has a ``prompt`` and its ``answer``, a number. No sum is in two splits.

    python assets/make_sums.py
"""

import json
import random
from itertools import product
from pathlib import Path

OUT_DIR = Path(__file__).resolve().parent / "sums"
LARGEST = 20
SIZES = {"validation": 24, "test": 60}


def rows() -> list[dict[str, str]]:
    """Return an addition for each pair of numbers, in random order."""
    pairs = list(product(range(1, LARGEST + 1), repeat=2))
    random.Random(0).shuffle(pairs)
    return [{"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)} for a, b in pairs]


def main() -> None:
    """Write the splits; training has the rest."""
    OUT_DIR.mkdir(exist_ok=True)
    left = rows()
    for split, size in (*SIZES.items(), ("train", len(left))):
        own, left = left[:size], left[size:]
        text = "".join(json.dumps(row) + "\n" for row in own)
        (OUT_DIR / f"{split}.jsonl").write_text(text, encoding="utf-8")
        print(split, len(own))


if __name__ == "__main__":
    main()
