"""Models that answer in stages compute what whole ones compute, to the last bit, and no rank holds all of one."""

from pathlib import Path

import pytest

from tests.unit.answering_worker import CASES
from tests.unit.ranks import found_by_ranks

FAST = (
    "Llama, tied",
    "Qwen3, untied",
    "Qwen2, in its later layers sliding",
    "Llama, 4 bits, random",
    "Llama, 4 bits, bf16, pp",
)


ROUNDING = 1e-5
IN_FOUR_STAGES = ("Roberta", "Llama, 4 bits, bf16, pp")


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """The cases of the tests that this session runs; of each, what each of four ranks found."""
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    names = dict.fromkeys(item.callspec.params["name"] for item in items)
    return found_by_ranks("answering_worker.py", 4, tmp_path_factory.mktemp("answering"), *names)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CASES]
)
def test_a_model_in_stages_answers_as_a_whole_one_and_no_rank_holds_it(compared: dict[str, list], name: str) -> None:
    """Llamas and Qwen3 by two groups of two ranks, each with rows of its own; an encoder in four stages."""
    for found in compared[name]:
        assert [found.get(what, 0) for what in ("logits", "hidden", "merged", "adapted")] == [0] * 4, found
        assert found["logits by row"] < (ROUNDING if "bf16" not in name else 0.1)  # rows have other neighbours
        assert found.get("same answers", True)
        assert (found["stages"], found["held"] < 0.75) == (4 if name in IN_FOUR_STAGES else 2, True)
