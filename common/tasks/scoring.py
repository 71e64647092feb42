"""Rewards: functions that score answers, called as by TRL's trainers; several are added up with their weights."""

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name

import torch

from common.base.errors import BadInputError, begin_of, first_sentence
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig, names_in
from common.tasks.sampling import Answers

Reward = Callable[..., Sequence[float | None]]


def reward_functions(run: RunConfig) -> list[tuple[Reward, float]]:
    """Import the run's rewards, and return each with its weight.

    Raises:
        BadInputError: there is none of that name, or there are not as many weights.
    """
    names = [name for name in names_in(run.reward) if name]
    weights = run.reward_weights or ",".join(["1"] * len(names))
    try:
        numbers = [float(each) for each in names_in(weights)]
    except ValueError:
        numbers = []
    if not names or len(names) != len(numbers) or not all(map(math.isfinite, numbers)):
        raise BadInputError(
            f"reward is {run.reward!r} and reward_weights {run.reward_weights!r}: pass functions as module:function, "
            "such as my_rewards:score, with commas between, and a number for each, or no weights."
        )
    return [(_imported(name, run), weight) for name, weight in zip(names, numbers, strict=True)]


def _imported(name: str, run: RunConfig) -> Reward:
    """Return the function of this name, of a module in the run's own folder, or where the command was given."""
    places = [str(REPOSITORY / run.run_folder), str(Path.cwd())]
    sys.path[:0] = places
    try:
        function = resolve_name(name)
    except Exception as error:  # of the user's own code
        raise BadInputError(
            f"reward is {name}, which cannot be imported ({type(error).__name__}: {first_sentence(error)}): write it "
            "as module:function, of a module in the run folder, or where the command is given."
        ) from error
    finally:
        del sys.path[: len(places)]
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise BadInputError(f"reward is {name}, which is no function that returns numbers: write module:function.")
    return function


def _place_of(error: BaseException) -> str:
    """Return where the user's code failed; empty = it was not entered."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return "" if frame.filename == __file__ else f" in {Path(frame.filename).name}, line {frame.lineno}"


def rewards_of(answers: Answers, run: RunConfig) -> torch.Tensor:
    """Return the weighted sum of the run's rewards of each answer, shape (answers,), fp32.

    Raises:
        BadInputError: a reward raises or returns other than a number or None for each answer, or all return only None.
    """
    rows = [row["asked"] for row in answers.prompts]
    names = dict.fromkeys(name for row in rows for name in row["columns"])
    columns = {name: [row["columns"].get(name) for row in rows] for name in names}
    given = {
        **columns,
        "prompts": [row["messages"][:-1] for row in rows],
        "completions": [[{"role": "assistant", "content": text}] for text in answers.texts],
        "completion_ids": answers.ids,
    }
    total, some_apply = torch.zeros(len(rows)), False
    for (function, weight), name in zip(reward_functions(run), names_in(run.reward), strict=True):
        try:
            found = function(**given)
        except Exception as error:  # of the user's own code
            raise BadInputError(
                f"The reward {name} fails{_place_of(error)}: {type(error).__name__}: {first_sentence(error)}. It is "
                f"given {', '.join(given)}, and a completion is a list of messages: mend it, or pass another --reward."
            ) from error
        try:  # a text has no __float__
            scores = torch.tensor([0.0 if score is None else score.__float__() for score in found])
        except (TypeError, AttributeError):
            scores = torch.zeros(0)
        if len(scores) != len(rows) or not scores.isfinite().all():
            raise BadInputError(
                f"The reward {name} returns {begin_of(found, 60)} for {len(rows)} answers: return a finite number for "
                "each, or None for those that it does not apply to."
            )
        total += weight * scores
        some_apply |= any(score is not None for score in found)
    if not some_apply:
        raise BadInputError(f"reward is {run.reward}, which returns None for all {len(rows)} answers: score some.")
    return total
