"""Liger's kernels are refused where they cannot run, and else put into the model that is trained.

No kernel runs here: a stand-in for the package tells what it is asked for.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedModel

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.models import loading
from common.runtime.world import Rank
from common.training.part import Part

ON_GPU = {"device": "cuda", "use_liger_kernel": True}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The stand-in for the package, which knows llama alone; what its loss was called with."""
    called = []

    def loss(self: PreTrainedModel, logits_to_keep: torch.Tensor, **inputs: Any) -> SimpleNamespace:
        called.append(inputs)
        return SimpleNamespace(loss=torch.zeros(()))

    def put_into(model: PreTrainedModel) -> None:
        model.forward = MethodType(loss, model)

    rooms = {name: ModuleType(name) for name in ("liger_kernel", "liger_kernel.transformers")}
    rooms["liger_kernel.transformers"]._apply_liger_kernel_to_instance = put_into
    rooms["liger_kernel.transformers.monkey_patch"] = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": put_into})
    for name, room in rooms.items():
        monkeypatch.setitem(sys.modules, name, room)
    for place in ("common.models.loading", "transformers.integrations.liger"):
        monkeypatch.setattr(f"{place}.is_liger_kernel_available", lambda: True)
    return called


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"use_liger_kernel": True}, "is for GPUs"),
        ({**ON_GPU, "parallel": "pp", "devices": 2}, "which is for single, ddp"),
        ({**ON_GPU, "parallel": "zero3", "devices": 2, "technique": "full"}, "which is for single, ddp"),
        ({**ON_GPU, "task": "summarization", "technique": "full"}, "is for rows of messages"),
        ({**ON_GPU, "target_modules": "q_proj,lm_head"}, "without its adapter"),
    ],
)
def test_runs_that_it_cannot_serve_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence):
        RunConfig(**settings)


def test_a_missing_package_and_an_unknown_kind_are_refused_before_anything_is_loaded(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("common.runtime.rank.gpus", lambda: ("", ["NVIDIA RTX A6000"]))
    run = replace(run_config, **ON_GPU)
    with pytest.raises(BadInputError, match="pip install liger-kernel"):
        check_inputs(run)
    request.getfixturevalue("calls")
    loading.check_liger(run)
    monkeypatch.setattr(loading, "any_shape_config", lambda *_: GPTNeoXConfig())
    with pytest.raises(BadInputError, match="of the kind gpt_neox, and Liger has kernels for llama"):
        loading.check_liger(run)


def test_training_takes_its_loss_and_validation_ours(calls: list[dict[str, Any]]) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=2))
    part = Part(model, RunConfig(**ON_GPU), Rank(0, 1, "cpu", "python"))
    ids = torch.arange(2, 14).view(2, 6)
    batch = part.inputs_for_loss({"input_ids": ids, "labels": ids})
    part.loss(batch, 10)
    (asked,) = calls
    assert asked["num_items_in_batch"] == 10
    assert torch.equal(asked["shift_labels"], ids[:, 1:])
    sums = part.sums(batch)
    assert (len(calls), sums[1].item()) == (1, 10)
    assert sums[0] > 0
