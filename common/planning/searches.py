"""Searches for the number at which an answer changes."""

from collections.abc import Callable


def largest(holds: Callable[[int], bool], most: int, guess: int) -> int:
    """Return the largest number up to `most` for which `holds`, which is true up to it; 0 where it holds for none.

    It is asked at the guess first, then at twice the distance each time (galloping), and last between the two that
    enclose the answer: a good guess takes two or three questions.
    """
    low, high, distance = 0, most + 1, 1  # it holds for `low`, not for `high`
    at = min(max(guess, 1), most)
    while low < at < high:
        if holds(at):
            low, at = at, at + distance
        else:
            high, at = at, at - distance
        distance *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
