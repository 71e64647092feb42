"""Weights that are really in 4 bits, on CPU too: what is stored, what passes gradients, what comes back."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.data.batches import make_collator
from common.data.splits import load_splits, tokens_of
from common.models.loading import load_base_model, load_tokenizer, weight_dtype
from common.models.quantization import (
    check_bitsandbytes,
    dequantized,
    is_quantized,
    quantization_config,
    relative_error,
    stored_weights,
)
from common.models.trained_weights import add_lora, parameter_counts
from common.planning.architectures import MODEL_CONFIGS, read_architecture
from common.planning.job import BatchShape
from common.planning.memory_plan import device_memory
from common.planning.plans import job_of_run
from common.planning.shares import whole_model
from common.runtime.launchers import torchrun_command
from common.training.trainer import training_arguments
from tests.forked import run_forked

CPU = {"": "cpu"}
QLORA = RunConfig(technique="qlora", lora_dropout=0.0)
FOLDER = REPOSITORY / "2.3_qlora_finetuning" / "run_0_cpu_x1"


def tiny_shape(folder: Path) -> Path:
    """A real architecture whose head is a matrix of its own, with matrices of 64 and more."""
    config = json.loads((MODEL_CONFIGS / "qwen2.5-7b.json").read_text())
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    layers = {"num_key_value_heads": 2, "layer_types": None, "max_window_layers": 3, "vocab_size": 2048}
    path = folder / "tiny.json"
    path.write_text(json.dumps({**config, **sizes, **{k: v for k, v in layers.items() if k in config}}))
    return path


@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
def test_the_layers_are_stored_in_4_bits_and_the_rest_in_fp32(quantization: str) -> None:
    model = load_base_model(replace(QLORA, quantization=quantization), CPU)
    quantized = {name: module for name, module in model.named_modules() if is_quantized(module)}
    assert len(quantized) == 7 * model.config.num_hidden_layers
    assert all(name.startswith("model.layers.") for name in quantized)
    for module in quantized.values():
        assert module.weight.dtype == torch.uint8
        assert module.weight.numel() == module.in_features * module.out_features / 2
        assert module.weight.quant_state.quant_type == "nf4"
        assert module.weight.quant_state.nested == (quantization == "nf4-double")
        assert module.compute_dtype == torch.float32
    others = [weight for weight in model.parameters() if weight.dtype != torch.uint8]
    assert {weight.dtype for weight in others} == {torch.float32}
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight  # still tied
    assert parameter_counts(model)[1] == load_base_model(QLORA, CPU, quantized=False).num_parameters()


@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_the_planner_counts_the_bytes_that_are_stored(quantization: str, weights: str, tmp_path: Path) -> None:
    model = str(tiny_shape(tmp_path)) if weights == "random" else QLORA.model
    run = replace(QLORA, quantization=quantization, weights=weights, model=model)
    stored = stored_weights(load_base_model(run, CPU), weight_dtype(run))
    architecture = read_architecture(model)
    memory = device_memory(architecture, job_of_run(run, BatchShape(1, 8, 7)), whole_model(architecture))
    planned = {term.what: term.count for term in memory.terms if term.part == "weights"}
    adapters = planned.pop("adapters")
    assert sum(planned.values()) == pytest.approx(stored.quantized_bytes + stored.other_bytes, rel=0.001)
    assert planned["embeddings, norms and head, cast to fp32"] == stored.other_bytes
    adapted = add_lora(load_base_model(run, CPU), run)
    assert adapters == sum(weight.nbytes for weight in adapted.parameters() if weight.requires_grad)
    assert stored_weights(adapted, torch.float32) == stored_weights(load_base_model(run, CPU), torch.float32)


def gradients(run: RunConfig, repack: bool) -> tuple[float, list[torch.Tensor]]:
    """Loss and adapters' gradients of a training step after an evaluation, as in a run."""
    model = load_base_model(run, CPU)
    for module in model.modules():
        if repack and is_quantized(module):
            module.support_avx512bf16_for_cpu = True
    ids = torch.arange(10, 40).view(2, 15)
    with torch.no_grad():
        model(ids)
    torch.manual_seed(0)
    adapted = add_lora(model, run).train()
    if run.gradient_checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": run.use_reentrant})
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    loss = adapted(ids, labels=ids).loss
    loss.backward()
    return loss.item(), [weight.grad for weight in adapted.parameters() if weight.requires_grad]


def test_gradients_are_those_of_the_dequantized_weights_also_after_an_evaluation(tmp_path: Path) -> None:
    """Bitsandbytes' own repacking for CPUs with AVX512-BF16 cuts them off; without such a CPU it does nothing."""
    dequantized(load_base_model(QLORA, CPU), torch.float32).save_pretrained(tmp_path)
    load_tokenizer(QLORA).save_pretrained(tmp_path)
    loss, found = gradients(QLORA, repack=False)
    expected_loss, expected = gradients(replace(QLORA, technique="lora", model=str(tmp_path)), repack=False)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()
    from bitsandbytes.functional import has_avx512bf16

    if has_avx512bf16():  # the control: what is switched off does harm
        _, repacked = gradients(QLORA, repack=True)
        assert max((one - other).norm() / other.norm() for one, other in zip(repacked, expected, strict=True)) > 0.1


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_the_gradients(reentrant: bool) -> None:
    _, expected = gradients(QLORA, repack=False)
    _, found = gradients(replace(QLORA, gradient_checkpointing=True, use_reentrant=reentrant), repack=False)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_dequantized_weights_are_near_the_original_ones_and_ordinary() -> None:
    original = load_base_model(QLORA, CPU, quantized=False)
    plain = dequantized(load_base_model(QLORA, CPU), torch.float32)
    assert not any(is_quantized(module) for module in plain.modules())
    assert not hasattr(plain.config, "quantization_config")
    assert 0.05 < relative_error(original, plain) < 0.15
    assert relative_error(original, original) == 0


def test_random_weights_are_the_same_each_time_quantized_or_not(tmp_path: Path) -> None:
    run = replace(QLORA, model=str(tiny_shape(tmp_path)), weights="random", precision="bf16")
    state = torch.random.get_rng_state()
    first = load_base_model(run, CPU)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(1)
    again = load_base_model(run, CPU)
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    original = load_base_model(run, CPU, quantized=False)
    assert not any(is_quantized(module) for module in original.modules())
    plain = dequantized(again, torch.bfloat16)
    assert 0.05 < relative_error(original, plain) < 0.15
    assert {weight.dtype for weight in plain.parameters()} == {torch.bfloat16}
    assert plain.model.rotary_emb.inv_freq.dtype == torch.float32  # not a weight
    assert torch.isfinite(first(torch.arange(10, 20).unsqueeze(0)).logits).all()


def test_what_is_stored_is_of_the_arithmetic_with_fsdp_and_bytes_else() -> None:
    run = replace(QLORA, device="cuda", precision="bf16", parallel="ddp", devices=2)
    assert quantization_config(run).bnb_4bit_quant_storage == torch.uint8
    sharded = quantization_config(replace(run, parallel="fsdp"))
    assert sharded.bnb_4bit_quant_storage == sharded.bnb_4bit_compute_dtype == torch.bfloat16


def test_weights_stored_as_bf16_hold_the_same_numbers() -> None:
    """What FSDP divides, on one process: it needs two GPUs to be run."""
    run = replace(QLORA, device="cuda", precision="bf16", parallel="fsdp", devices=2)
    as_bf16, as_bytes = load_base_model(run, CPU), load_base_model(replace(run, parallel="ddp"), CPU)
    stored = {module.weight.dtype for module in as_bf16.modules() if is_quantized(module)}
    assert stored == {torch.bfloat16}
    one, other = (stored_weights(model, torch.bfloat16) for model in (as_bf16, as_bytes))
    assert one.quantized_bytes == other.quantized_bytes
    for left, right in zip(as_bf16.parameters(), as_bytes.parameters(), strict=True):
        assert torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))


def test_fsdp_divides_4_bit_numbers_and_leaves_loss_and_gradients(tmp_path: Path) -> None:
    """On two CPU ranks: nothing but the memory of a GPU is missing here."""
    command = torchrun_command(str(Path(__file__).with_name("quantized_fsdp_worker.py")), 2)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "worker.log"
    exit_code = run_forked(command, REPOSITORY, environment, log, timeout=300)
    said = log.read_text(errors="replace")
    assert exit_code == 0, said
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-6)
    assert found["adapters"] == [56, 56]
    assert found["largest_difference"] < 1e-6
    assert found["stored_dtype"] == "torch.float32"  # the compute dtype on CPU
    assert found["elements"] == [2048, 1024]  # 16,384 weights of 4 bits in numbers of 32
    assert found["scales_on_this_rank"] == 16384 / 64  # whole, as the planner counts them


@pytest.mark.parametrize("optimizer", ["paged_adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit"])
def test_bitsandbytes_optimizers_step_and_keep_8_bit_states_of_large_weights(optimizer: str, tmp_path: Path) -> None:
    from transformers import Trainer

    run = replace(QLORA, optim=optimizer, lora_r=64)  # 64 x 128 weights: from 4,096 on states are in 8 bits
    tokenizer = load_tokenizer(run)
    rows = tokens_of(load_splits(replace(run, train_rows=4)).train, tokenizer, run)
    arguments = training_arguments(replace(run, max_steps=1, report_to="none"), tmp_path)
    arguments.eval_strategy = arguments.save_strategy = "no"
    arguments.load_best_model_at_end = False
    adapted = add_lora(load_base_model(run, CPU), run)
    before = {name: weight.clone() for name, weight in adapted.named_parameters() if "lora_B" in name}
    trainer = Trainer(adapted, arguments, train_dataset=rows, data_collator=make_collator(tokenizer))
    trainer.create_optimizer()
    batch = make_collator(tokenizer)(rows)
    adapted(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss.backward()
    trainer.optimizer.step()
    assert all(not torch.equal(weight, before[name]) for name, weight in adapted.named_parameters() if name in before)
    states = {state["state1"].dtype for state in trainer.optimizer.state.values()}
    assert states == ({torch.float32} if optimizer == "paged_adamw_32bit" else {torch.uint8})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"quantization nf4, .* not installed: `pip install bitsandbytes`, or pass --technique lora"),
        ({"technique": "lora", "optim": "paged_adamw_8bit"}, r"optim is paged_adamw_8bit.*`pip install bits"),
        ({"technique": "full", "optim": "adamw_bnb_8bit"}, r"optim is adamw_bnb_8bit.*`pip install bits"),
    ],
)
def test_without_bitsandbytes_what_needs_it_is_refused(
    settings: dict, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = QLORA.changed_to(**settings)
    check_inputs(run)
    monkeypatch.setattr("common.models.quantization.find_spec", lambda name: None)
    check_bitsandbytes(RunConfig())
    with pytest.raises(BadInputError, match=said):
        check_inputs(run)


WITHOUT = """
import importlib.abc, importlib.metadata, importlib.util, os, runpy, sys
REFUSED = ("bitsandbytes", "datasets")
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
find, version = importlib.util.find_spec, importlib.metadata.version
packages = importlib.metadata.packages_distributions
def find_spec(name, package=None):
    return None if name.split(".")[0] in REFUSED else find(name, package)
def version_of(name):
    if name in REFUSED:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.util.find_spec, importlib.metadata.version = find_spec, version_of
importlib.metadata.packages_distributions = lambda: {n: d for n, d in packages().items() if n not in REFUSED}
root, scripts, arguments = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
for script in scripts:
    place = os.path.dirname(script)
    os.chdir(place)
    sys.path.insert(0, place)
    sys.argv = [script, *arguments, "--results_root", os.path.join(root, os.path.basename(script))]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        print("exit code", left.code, flush=True)
    else:
        print("exit code 0", flush=True)
"""
"""Runs scripts, in one process, as on a machine where two packages are not installed."""


def test_runs_import_only_what_they_need(tmp_path: Path) -> None:
    """Adapters and every weight are trained; what needs a package that is missing is refused."""
    folders = ("2.1_lora_finetuning", "2.4_full_finetuning", "2.3_qlora_finetuning")
    scripts = [next((REPOSITORY / folder / "run_0_cpu_x1").glob("my_workflow_*.py")) for folder in folders]
    small = (
        "--train_rows",
        "17",
        "--test_rows",
        "2",
        "--num_train_epochs",
        "1",
        "--max_steps",
        "1",
        "--max_new_tokens",
        "2",
    )
    settings = (*small, "--independent_judge", "none", "--report_to", "none")
    command = [sys.executable, "-c", WITHOUT, str(tmp_path), ",".join(map(str, scripts)), *settings]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lora, full, qlora, _ = re.split(r"^exit code .*$", done.stdout, flags=re.MULTILINE)
    assert re.findall(r"^exit code (.*)$", done.stdout, re.MULTILINE) == ["0", "0", "2"], done.stdout
    assert "record: run_record.json" in lora
    assert "record: run_record.json" in full
    assert "error: technique is qlora and quantization nf4, but bitsandbytes" in qlora
    assert [(tmp_path / script.name / "results").exists() for script in scripts] == [True, True, False]
