"""Toy classifiers divided over two ranks compute, learn and save what whole ones do; what is not divided is refused."""

from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import BertConfig, DistilBertConfig, PretrainedConfig

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.runtime.world import Rank
from common.training.tensor_parallel import Columns, check_divisible, clip_gradients
from tests.unit import tensor_parallel_worker as worker
from tests.unit.ranks import found_by_ranks

RANKS = 2
FIRST = ("Bert, full", "Roberta, adapters", "Bert, adapters on all")
CASES = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.slow]) for name in worker.cases()]
)
"""For `make test` each kind of model, and each place of adapters, once."""


# -- divided models against whole ones, in a world of two ranks


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """The cases of the tests that this session runs, and the refusals; of each, what each rank found."""
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    names = dict.fromkeys(item.callspec.params["name"] for item in items if "name" in item.callspec.params)
    return found_by_ranks("tensor_parallel_worker.py", RANKS, tmp_path_factory.mktemp("tensor_parallel"), *names)


@CASES
def test_divided_models_compute_what_whole_ones_do(compared: dict[str, list], name: str) -> None:
    assert len(compared[name]) == RANKS
    for found in compared[name]:
        assert max(found["logits"], found["gradients"]) <= 1e-6
        assert found["without a gradient"] == 0


@CASES
def test_divided_models_learn_what_whole_ones_do(compared: dict[str, list], name: str) -> None:
    for found in compared[name]:
        assert max(found["losses"], found["norms"], found["weights"]) <= 1e-5
        assert found["smallest norm"] > worker.LARGEST_NORM  # every step was clipped
        assert found["way"] > 1e-2


@CASES
def test_divided_models_are_saved_whole_and_load_as_plain_ones(compared: dict[str, list], name: str) -> None:
    for found in compared[name]:
        assert found["saved"] <= 1e-6
        assert (found["held of what is divided"], found["held of the rest"]) == (1 / RANKS, 1)


@CASES
def test_hidden_states_and_their_gradients_are_summed_twice_a_layer(compared: dict[str, list], name: str) -> None:
    """With adapters the first layer's attention needs none of its input, and what adapters make is summed, too."""
    _, targets = worker.cases()[name]
    tokens = worker.ROWS * worker.LENGTH * 4
    hidden, adapter = tokens * worker.HIDDEN, tokens * worker.ADAPTER_RANK
    forward = backward = 2 * worker.LAYERS * hidden
    if targets is not None:
        backward += worker.LAYERS * (4 if targets == "all-linear" else 2) * adapter - hidden
        forward += worker.LAYERS * (2 if targets == "all-linear" else 0) * adapter
    for found in compared[name]:
        assert (found["forward bytes"], found["backward bytes"]) == (forward, backward)


def test_ranks_seeded_alike_agree_and_others_are_refused(compared: dict[str, list]) -> None:
    for found in compared["refusals"]:
        differs = {name: "copies differ by up to" in found[name] for name in found if name.startswith("seeded")}
        assert differs == {name: name.startswith("seeded otherwise") for name in differs}
        assert len(differs) == 3 * len(worker.DROPPED_OUT)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("three heads", "num_attention_heads is 3 and its intermediate_size 48, which 2 ranks cannot share evenly: "
         "pass --devices 3 or --parallel ddp."),
        ("three ranks", "bert.encoder.layer.0.attention.self.query.weight is divided along dimension 0, and this rank "
         "has 1,152 of its 2,304 elements, but over 3 ranks it was to be divided along dimension 0."),
        ("a part of the plan", "bert.encoder.layer.0.intermediate.dense.weight is whole, and this rank has 2,304 of "
         "its 2,304 elements, but over 2 ranks it was to be divided along dimension 0."),
        ("pooler divided", "bert.pooler.dense.weight is divided along dimension 0, and this rank has 1,152 of its "
         "2,304 elements, but over 2 ranks it was to be whole."),
        ("no number", "classifier.bias is whole on every rank, but its copies differ by up to nan"),
    ],
)  # fmt: skip
def test_every_rank_refuses_what_is_not_as_planned(compared: dict[str, list], what: str, words: str) -> None:
    assert all(words in found[what] for found in compared["refusals"])
    assert all(found["three heads: divided"] == "" for found in compared["refusals"])


# -- without processes


def test_the_plan_divides_six_matrices_a_layer_and_half_of_an_adapter() -> None:
    full = worker.columns.planned_dimensions(worker.base_toy("Bert"))
    divided = [name for name, dimension in full.items() if dimension is not None]
    assert len(divided) == worker.LAYERS * (len(worker.columns.PLAN) + 4)  # and the biases of four
    outputs = ("encoder.layer.1.output.dense.weight", "encoder.layer.1.output.dense.bias", "pooler.dense.weight")
    assert [full[f"bert.{name}"] for name in outputs] == [1, None, None]
    adapted, layer = (
        worker.columns.planned_dimensions(worker.toy("Roberta", "all-linear")),
        "base_model.model.roberta.encoder.layer.0",
    )
    parts = ("self.query.base_layer.bias", "self.query.lora_A.default.weight", "self.query.lora_B.default.weight")
    assert [adapted[f"{layer}.attention.{part}"] for part in parts] == [0, None, 0]
    assert [adapted[f"{layer}.output.dense.lora_{half}.default.weight"] for half in "AB"] == [1, None]


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        (BertConfig(num_attention_heads=12, intermediate_size=1536), 5,
         "is 12 and its intermediate_size 1536, which 5 ranks .* pass --devices 2 or .* 12 or --parallel ddp"),
        (BertConfig(num_attention_heads=4, intermediate_size=50), 4,
         "50, which 4 ranks .* pass --devices 2 or --parallel"),
        (BertConfig(num_attention_heads=1, intermediate_size=48), 2, "evenly: pass --parallel ddp"),
        (DistilBertConfig(), 2, r"of type distilbert, .* one of type bert .*or pass --para"),
    ],
    ids=["12 heads", "50 wide", "1 head", "no plan"],
)  # fmt: skip
def test_what_ranks_cannot_share_is_refused(config: PretrainedConfig, ranks: int, said: str) -> None:
    check_divisible(worker.base_toy("Bert").config, 4)
    with pytest.raises(BadInputError, match=said):
        check_divisible(config, ranks)


def test_a_whole_model_is_no_divided_one() -> None:
    whole = worker.base_toy("Bert")
    with pytest.raises(RuntimeError, match=r"query\.weight is whole, and this rank has 2,304 of its 2,304 elements"):
        worker.columns.check_split(whole, 2)
    with pytest.raises(RuntimeError, match="No weight is divided"):
        Columns(whole, RunConfig(task="classification", parallel="tp", devices=2), Rank(0, 2, "cpu", "torchrun"))


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_a_whole_model_are_as_pytorch_has_them() -> None:
    first, second = worker.base_toy("Bert"), worker.base_toy("Bert")
    for model in (first, second):
        worker.loss_of(model, worker.batches("Bert", 1)[0]).backward()
    norms = clip_gradients(second.parameters(), 0.1, "cpu"), clip_grad_norm_(first.parameters(), 0.1)
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(*([weight.grad for weight in model.parameters()] for model in (second, first)))
