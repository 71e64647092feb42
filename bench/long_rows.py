"""Long, uneven rows for the training benchmark: the embedded questions and answers, joined to conversations."""

import math
import random
from collections.abc import Sequence

from common.data.rows import Tokens

LEAST, MOST = 20, 1000
"""Tokens of a row; no row is cut, so the shortest are as long as one question with its answer."""
MEDIAN, SPREAD = 80, 1.1
"""Of the lognormal lengths: tokens, and the standard deviation of their logarithms."""
SEED = 20263


def joined(turns: Sequence[Tokens]) -> Tokens:
    """Return one row of several: a conversation, as the embedded chat template is one message after the other."""
    return {name: [token for turn in turns for token in turn[name]] for name in turns[0]}


def long_rows(turns: Sequence[Tokens], count: int, seed: int = SEED) -> list[Tokens]:
    """Return `count` conversations of lognormal lengths, each of as many turns as its length has room for.

    All `turns` come up about equally often: they are shuffled, and again once all were used. The rows are the same each
    time.
    """
    rng, rows = random.Random(seed), []
    pile: list[Tokens] = []
    for _ in range(count):
        room = min(max(rng.lognormvariate(math.log(MEDIAN), SPREAD), LEAST), MOST)
        taken: list[Tokens] = []
        while True:
            if not pile:
                pile = rng.sample(turns, len(turns))
            room -= len(pile[-1]["input_ids"])
            if taken and room < 0:
                break
            taken.append(pile.pop())
        rows.append(joined(taken))
    return rows
