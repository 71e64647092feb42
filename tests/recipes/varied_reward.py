"""A reward that two answers hardly ever share, for models that have learnt nothing."""

from collections.abc import Sequence


def varied(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Return the mean token of each answer."""
    return [sum(ids) / len(ids) / 100 for ids in completion_ids]
