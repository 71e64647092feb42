"""Searches that begin at a guess."""

import pytest

from common.planning.searches import largest


@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_the_largest_number_is_found_from_any_guess(most: int) -> None:
    for answer in range(most + 1):
        for guess in (-5, 0, 1, answer, answer + 1, most, 10 * most):
            assert largest(lambda number, answer=answer: number <= answer, most, guess) == answer


@pytest.mark.parametrize(("guess", "questions"), [(1000, 2), (1010, 8)])
def test_a_right_guess_takes_two_questions_and_a_near_one_few(guess: int, questions: int) -> None:
    """Halving all 4,096 takes 12."""
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= 1000

    assert largest(holds, 4096, guess) == 1000
    assert len(asked) <= questions
