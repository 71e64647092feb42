"""What long rows need: MLPs in tiles of tokens, and layers' inputs in the host's memory."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.dry_run import dry_run
from common.models.tiled_mlp import check_tiles, tile_mlps
from common.planning.architectures import read_architecture
from common.planning.host_memory import host_moments
from common.planning.job import BatchShape, Job, job_of_run
from common.planning.memory_plan import device_memory
from common.planning.shares import whole_model
from common.planning.step_speed import step_flops

HIDDEN, TOKENS = 16, 41  # three tiles of unequal sizes in each of two rows
LONG = BatchShape(1, 2048, 2047)


def toy(adapts: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=50)).double()
    if not adapts:
        return model
    config = LoraConfig(target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def loss_and_gradients(model: torch.nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(1)
    rows = torch.randint(50, (2, TOKENS))
    loss = model.train()(input_ids=rows, labels=rows).loss
    loss.backward()
    return loss.detach(), [weight.grad for weight in model.parameters() if weight.requires_grad]


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_tiles_change_neither_loss_nor_gradients(adapts: bool, checkpointing: dict[str, bool] | None) -> None:
    whole, tiled = toy(adapts), toy(adapts)
    sizes: list[int] = []
    for layer in (module for module in tiled.modules() if hasattr(module, "mlp")):
        layer.mlp.gate_proj.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    tile_mlps(tiled)
    if checkpointing:
        tiled.gradient_checkpointing_enable(checkpointing)
        tiled.enable_input_require_grads()  # the reentrant kind asks for it
    expected, got = loss_and_gradients(whole), loss_and_gradients(tiled)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    assert sizes
    assert max(sizes) <= HIDDEN


def test_without_gradients_tiles_give_the_same() -> None:
    whole, tiled = toy(adapts=False), toy(adapts=False)
    tile_mlps(tiled)
    rows = torch.randint(50, (2, TOKENS))
    with torch.no_grad():
        torch.testing.assert_close(tiled(rows).logits, whole(rows).logits)


def run_of(**settings: object) -> RunConfig:
    return RunConfig(
        **{"technique": "full", "target_modules": "all", "model": "llama-27m", "weights": "random"} | settings
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"precision": "bf16-mixed"},
        {"technique": "lora", "target_modules": "all-linear", "precision": "bf16"},
    ],
)
def test_the_closed_form_says_what_tiles_take(settings: dict[str, object]) -> None:
    """At most 3 % off, where tiles take less."""
    run = run_of(tiled_mlp=True, max_length=LONG.length, **settings)
    architecture, job = read_architecture(run.model), replace(job_of_run(run, LONG), cpu_operations=False)
    planned, whole = (
        device_memory(architecture, each, whole_model(architecture)).allocated_gib
        for each in (job, replace(job, tiled_mlp=False))
    )
    assert planned == pytest.approx(dry_run(run, LONG).peak_gib, rel=0.03)
    assert planned < 0.95 * whole


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_tile_is_computed_once_more(checkpointing: bool) -> None:
    run = run_of(tiled_mlp=True, max_length=LONG.length, gradient_checkpointing=checkpointing)
    architecture, job = read_architecture(run.model), job_of_run(run, LONG)
    tiled, whole = (
        step_flops(architecture, each, whole_model(architecture)) for each in (job, replace(job, tiled_mlp=False))
    )
    of_mlps = 2 * LONG.tokens * 8 * 3 * 512 * 1536
    assert tiled.recomputed - whole.recomputed == of_mlps
    assert tiled.useful == whole.useful


@pytest.mark.parametrize("model", ["facebook/opt-125m", "mixtral"])
def test_layers_without_one_mlp_are_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM, OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    with torch.device("meta"):
        if model == "mixtral":
            built = MixtralForCausalLM(MixtralConfig(**sizes, intermediate_size=8, num_key_value_heads=2))
        else:
            built = OPTForCausalLM(OPTConfig(**sizes, ffn_dim=8, word_embed_proj_dim=16))
    monkeypatch.setattr("common.models.tiled_mlp.model_without_weights", lambda run: built)
    check_tiles(run_of())
    with pytest.raises(BadInputError, match="tiled_mlp"):
        check_tiles(run_of(tiled_mlp=True))


def test_a_known_model_is_tiled() -> None:
    check_tiles(run_of(tiled_mlp=True))


def test_offloaded_inputs_of_layers_wait_on_the_host() -> None:
    """Five of TRL's tensors are on the way to it; PyTorch pins blocks of powers of two."""
    architecture, batch = read_architecture("llama-3.1-8b"), BatchShape(1, 24_576, 24_575)
    job = Job("full", "ddp", batch, devices=4, gradient_checkpointing=True)
    offloads = replace(job, activation_offloading=True)
    on_gpu = [device_memory(architecture, each, whole_model(architecture)).allocated_gib for each in (job, offloads)]
    on_host = [sum(term.gib for term in host_moments(architecture, each, 2)["training"]) for each in (job, offloads)]
    each_gib = 24_576 * 4096 * 2 / 2**30
    assert on_gpu[0] - on_gpu[1] == pytest.approx((32 - 5) * each_gib, rel=0.05)
    assert on_host[1] - on_host[0] == pytest.approx(2 * 32 * 0.25)


def test_activation_offloading_is_for_checkpointed_layers_on_gpus() -> None:
    for settings in ({}, {"gradient_checkpointing": True}):
        with pytest.raises(BadInputError, match="activation_offloading"):
            run_of(activation_offloading=True, **settings)
    gpu = {"device": "cuda", "gpu": "A100 80GB SXM"}
    run_of(activation_offloading=True, gradient_checkpointing=True, **gpu)
    with pytest.raises(BadInputError, match="activation_offloading"):
        run_of(activation_offloading=True, gradient_checkpointing=True, parallel="zero3", devices=2, **gpu)
