"""Layers compiled in place compute what they did, under the names that they had."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.models.compiled_layers import as_written, compile_layers, layers_of
from common.models.loading import load_base_model
from common.models.trained_weights import with_trained_weights
from common.runtime.world import Rank
from common.training.ddp import data_parallel
from common.training.part import Part

OF_2_MIB = {
    "vocab_size": 8, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which torch.compile needs on a CPU")


def trained_model(run: RunConfig) -> torch.nn.Module:
    return with_trained_weights(load_base_model(run, {"": "cpu"}), run)


def loss_and_gradients(model: torch.nn.Module, tokens: int) -> list[torch.Tensor]:
    ids = torch.arange(3 * tokens).view(3, tokens) % 97
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_a_compiled_layer_serves_all_and_batches_of_any_length(run_config: RunConfig, checkpointing: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def stand_in(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = trained_model(replace(run_config, lora_dropout=0.0)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    names, expected = list(model.state_dict()), {tokens: loss_and_gradients(model, tokens) for tokens in (7, 12, 19)}
    compile_layers(model, backend=stand_in)
    for tokens in expected:
        torch.testing.assert_close(loss_and_gradients(model, tokens), expected[tokens])
    assert len(graphs) == (1 if checkpointing else 2)  # the first layer's input need not have a gradient
    assert list(model.state_dict()) == names


@pytest.mark.usefixtures("one_rank")
def test_a_layer_stays_one_graph_within_ddp() -> None:
    """Of more than the MiB of weights after which Dynamo would split it, as DDP begins to send there."""
    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    model, ids = LlamaForCausalLM(LlamaConfig(**OF_2_MIB)), torch.arange(8).view(1, 8)
    compile_layers(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    data_parallel(model, Rank(0, 2, "cuda", "python"))(input_ids=ids, use_cache=False)
    assert len(graphs) == 1


@pytest.mark.parametrize("asked", [True, False])
def test_a_part_compiles_every_layer_where_it_is_asked_to(run_config: RunConfig, asked: bool) -> None:
    """Those that FSDP gathers one at a time are all layers of the model."""
    run = replace(run_config, torch_compile=asked)
    model = trained_model(run)
    names = list(model.state_dict())
    Part(model, run, Rank(0, 1, "cpu", "python"))
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    assert compiled == (layers_of(model) if asked else [])
    assert list(model.state_dict()) == names
    as_written(model)
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_without_a_compiler_a_cpu_run_is_refused(run_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check_inputs(run_config)
    with pytest.raises(BadInputError, match="no C\\+\\+ compiler \\(no-such-compiler\\)"):
        check_inputs(replace(run_config, torch_compile=True))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"technique": "full", "parallel": "pp", "devices": 2, "micro_batches": 2}, "parallel is pp"),
        ({"technique": "full", "parallel": "mp", "stages": 2}, "parallel is mp"),
        ({"technique": "full", "parallel": "zero3", "devices": 2}, "parallel is zero3"),
        ({"technique": "full", "parallel": "tp", "devices": 2, "task": "classification"}, "parallel is tp"),
        ({"technique": "full", "task": "summarization", "loop": "machines"}, "loop is machines"),
    ],
)
def test_what_compiled_layers_exclude_is_refused(settings: dict[str, object], said: str) -> None:
    RunConfig(**settings)
    with pytest.raises(BadInputError, match=said):
        RunConfig(**settings, torch_compile=True)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("checkpointing", "reentrant"),
    [("false", "false"), ("true", "false"), ("true", "true")],
    ids=["kept", "checkpointed", "reentrant"],
)
def test_compiled_layers_train_as_written_ones(run_workflow: Callable, checkpointing: str, reentrant: str) -> None:
    """By PyTorch's own compiler; checkpoints and what is saved have the same names, as it is loaded again."""
    own = ("--lora_dropout", "0", "--max_steps", "2", "--eval_steps", "1")
    own = (*own, "--gradient_checkpointing", checkpointing, "--use_reentrant", reentrant)
    runs = [run_workflow("python", *own, "--torch_compile", value, name=value) for value in ("false", "true")]
    assert [done.exit_code for done in runs] == [0, 0], "".join(done.output for done in runs)
    for kind in ("training_losses", "validation_losses"):
        written, compiled = ([loss for _, loss in done.record[kind]] for done in runs)
        assert compiled == pytest.approx(written, rel=1e-5)
    assert runs[1].record["config"]["torch_compile"]
