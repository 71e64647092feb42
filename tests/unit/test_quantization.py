"""Weights that are really in 4 bits, on CPU too: what is stored, what passes gradients, what comes back."""

import importlib
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn.parametrize import Bnb4bitParametrization
from transformers import AutoModelForCausalLM

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.data.batches import make_collator
from common.data.splits import load_splits, tokens_of
from common.models.loading import load_base_model, load_tokenizer, weight_dtype
from common.models.quantization import check_bitsandbytes, dequantized, is_quantized, quantization_config
from common.models.shards import free_model
from common.models.trained_weights import add_lora, parameter_counts
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape, job_of_run
from common.planning.memory_plan import device_memory
from common.planning.shares import whole_model
from common.training.optimizers import make_optimizer
from tests.families import make_tiny
from tests.unit.toys import tiny_shape

CPU = {"": "cpu"}
QLORA = RunConfig(technique="qlora", lora_dropout=0.0)
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 2048}
"""Of a model whose matrices have 64 rows and more."""


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "2.3_qlora_finetuning" / "run_0_cpu_x1")
    return importlib.import_module("my_utils_qlora_finetuning")


@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
def test_the_layers_are_stored_in_4_bits_and_the_rest_in_fp32(quantization: str) -> None:
    model = load_base_model(replace(QLORA, quantization=quantization), CPU)
    quantized = {name: module for name, module in model.named_modules() if is_quantized(module)}
    assert len(quantized) == 7 * model.config.num_hidden_layers
    assert all(name.startswith("model.layers.") for name in quantized)
    for module in quantized.values():
        state = module.weight.quant_state
        assert (state.quant_type, state.nested) == ("nf4", quantization == "nf4-double")
        assert (module.weight.dtype, module.compute_dtype) == (torch.uint8, torch.float32)
        assert module.weight.numel() == module.in_features * module.out_features / 2
    assert {weight.dtype for weight in model.parameters()} == {torch.uint8, torch.float32}
    assert sum(weight.dtype == torch.uint8 for weight in model.parameters()) == len(quantized)
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight  # still tied
    assert parameter_counts(model)[1] == load_base_model(QLORA, CPU, quantized=False).num_parameters()


@pytest.mark.parametrize(
    ("weights", "quantization"),
    [("pretrained", "nf4"), ("pretrained", "nf4-double"), ("random", "nf4"), ("random", "nf4-double")],
)
def test_the_planner_counts_the_bytes_that_are_stored(
    quantization: str, weights: str, tmp_path: Path, utils: ModuleType
) -> None:
    model = tiny_shape(tmp_path, **WIDE) if weights == "random" else QLORA.model
    run = replace(QLORA, quantization=quantization, weights=weights, model=model)
    base, architecture = load_base_model(run, CPU), read_architecture(model)
    stored = utils.stored_weights(base, weight_dtype(run))
    memory = device_memory(architecture, job_of_run(run, BatchShape(1, 8, 7)), whole_model(architecture))
    planned = {term.what: term.count for term in memory.terms if term.part == "weights"}
    adapted = add_lora(base, run)
    assert planned.pop("adapters") == sum(weight.nbytes for weight in adapted.parameters() if weight.requires_grad)
    assert sum(planned.values()) == pytest.approx(stored["quantized_bytes"] + stored["other_bytes"], rel=0.001)
    assert planned["embeddings, norms and head, cast to fp32"] == stored["other_bytes"]
    assert utils.stored_weights(adapted, torch.float32) == stored


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
    assert largest_change(found, expected) <= 1e-4
    if has_avx512bf16():  # the control: what is switched off does harm
        assert largest_change(gradients(QLORA, repack=True)[1], expected) > 0.1
    for reentrant in (True, False):
        recomputed = replace(QLORA, gradient_checkpointing=True, use_reentrant=reentrant)
        torch.testing.assert_close(gradients(recomputed, repack=False)[1], found, rtol=1e-4, atol=1e-6)


MIXTURES = pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])


def mixture(family: str, folder: Path, **changes: object) -> RunConfig:
    targets, attention = "q_proj,k_proj,v_proj,o_proj", "eager" if family == "gpt_oss" else "sdpa"
    about = {"gradient_checkpointing": True, "target_modules": targets, "attention": attention, **changes}
    model = AutoModelForCausalLM.from_pretrained(make_tiny(family, folder))
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 10 if weight.ndim == 3 else 1  # so that experts matter: they start small
    model.save_pretrained(folder)
    return replace(QLORA, model=str(folder), **about)


@MIXTURES
def test_a_mixtures_gradients_are_those_of_its_dequantized_weights(family: str, tmp_path: Path) -> None:
    run, saved = mixture(family, tmp_path / "tiny"), tmp_path / "dequantized"
    dequantized(load_base_model(run, CPU), torch.float32).save_pretrained(saved)
    load_tokenizer(run).save_pretrained(saved)
    loss, found = gradients(run, repack=False)
    expected_loss, expected = gradients(replace(run, technique="lora", model=str(saved)), repack=False)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert largest_change(found, expected) <= 1e-4
    original = gradients(replace(run, technique="lora"), repack=False)[1]  # the control: it is another model
    assert largest_change(original, expected) > 0.01


@MIXTURES
@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_a_mixtures_experts_are_stored_in_4_bits(
    family: str, quantization: str, weights: str, tmp_path: Path, utils: ModuleType
) -> None:
    run = mixture(family, tmp_path, quantization=quantization, weights=weights)
    base, whole = load_base_model(run, CPU), load_base_model(run, CPU, quantized=False)
    stored = utils.stored_weights(base, torch.float32)
    linear = sum(weight.numel() for name, weight in whole.named_parameters() if name.endswith("_proj.weight"))
    experts = sum(weight.numel() for weight in whole.parameters() if weight.ndim == 3)
    assert stored["quantized_weights"] == linear + experts > 4 * linear
    assert stored["bits_per_quantized_weight"] < 5  # with the tables of small matrices
    assert parameter_counts(base)[1] == parameter_counts(whole)[1]  # experts at work, as well
    architecture = read_architecture(run.model)
    memory = device_memory(architecture, job_of_run(run, BatchShape(1, 8, 7)), whole_model(architecture))
    planned = sum(term.count for term in memory.terms if term.part == "weights" and term.what != "adapters")
    assert planned == pytest.approx(stored["quantized_bytes"] + stored["other_bytes"], rel=0.001)
    packed = [weakref.ref(weight) for weight in base.parameters() if hasattr(weight, "quant_type")]
    free_model(base)
    assert not any(each() is not None for each in packed)
    assert all(weight.is_meta for weight in base.parameters())
    assert not any(getattr(module, "quant_state", None) for module in base.modules())  # nor the scales


def test_at_most_one_layers_experts_are_dequantized_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradient checkpointing; without, those of all layers wait for the backward pass."""
    made: list[weakref.ref] = []
    alive = []

    def watched(reading: Bnb4bitParametrization, packed: torch.Tensor) -> torch.Tensor:
        weight = dequantize(reading, packed)
        made.append(weakref.ref(weight.untyped_storage()))
        alive.append(sum(each() is not None for each in made))
        return weight

    dequantize = Bnb4bitParametrization.forward
    monkeypatch.setattr(Bnb4bitParametrization, "forward", watched)
    most = []
    for checkpointing in (True, False):
        made.clear(), alive.clear()
        gradients(mixture("mixtral", tmp_path, gradient_checkpointing=checkpointing), repack=False)
        most.append(max(alive))
    assert most == [2, 4]  # two matrices of each of two layers


def largest_change(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_dequantized_weights_are_near_the_original_ones_and_ordinary(
    weights: str, tmp_path: Path, utils: ModuleType
) -> None:
    random = {"model": tiny_shape(tmp_path, **WIDE), "weights": "random", "precision": "bf16"}
    run = replace(QLORA, **(random if weights == "random" else {}))
    original, quantized = load_base_model(run, CPU, quantized=False), load_base_model(run, CPU)
    plain = dequantized(quantized, weight_dtype(run))
    assert not any(is_quantized(module) for module in [*plain.modules(), *original.modules()])
    assert not hasattr(plain.config, "quantization_config")
    assert 0.05 < utils.relative_error(original, plain) < 0.15
    assert utils.relative_error(original, original) == 0
    assert {weight.dtype for weight in plain.parameters()} == {weight_dtype(run)}
    assert plain.model.rotary_emb.inv_freq.dtype == torch.float32  # not a weight


def test_what_is_stored_is_of_the_arithmetic_with_fsdp_and_bytes_else() -> None:
    run = replace(QLORA, device="cuda", precision="bf16", parallel="ddp", devices=2)
    assert quantization_config(run).bnb_4bit_quant_storage == torch.uint8
    sharded = quantization_config(replace(run, parallel="fsdp"))
    assert sharded.bnb_4bit_quant_storage == sharded.bnb_4bit_compute_dtype == torch.bfloat16


def test_weights_stored_as_bf16_hold_the_same_numbers(utils: ModuleType) -> None:
    """What FSDP divides, on one process: it needs two GPUs to be run."""
    run = replace(QLORA, device="cuda", precision="bf16", parallel="fsdp", devices=2)
    as_bf16, as_bytes = load_base_model(run, CPU), load_base_model(replace(run, parallel="ddp"), CPU)
    assert {module.weight.dtype for module in as_bf16.modules() if is_quantized(module)} == {torch.bfloat16}
    one, other = (utils.stored_weights(model, torch.bfloat16) for model in (as_bf16, as_bytes))
    assert one["quantized_bytes"] == other["quantized_bytes"]
    for left, right in zip(as_bf16.parameters(), as_bytes.parameters(), strict=True):
        assert torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))


@pytest.mark.parametrize("optimizer", ["paged_adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit"])
def test_bitsandbytes_optimizers_step_and_keep_8_bit_states_of_large_weights(optimizer: str) -> None:
    run = replace(QLORA, optim=optimizer, lora_r=64)
    tokenizer, adapted = load_tokenizer(run), add_lora(load_base_model(run, CPU), run)
    batch = make_collator(tokenizer)(tokens_of(load_splits(replace(run, train_rows=4)).train, tokenizer, run))
    made = make_optimizer(adapted, run)
    before = {name: weight.clone() for name, weight in adapted.named_parameters() if "lora_B" in name}
    adapted(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss.backward()
    made.step()
    assert not any(torch.equal(weight, before[name]) for name, weight in adapted.named_parameters() if name in before)
    states = {state["state1"].dtype for state in made.state.values()}  # of 64 x 128 weights; 4,096 suffice
    assert states == ({torch.float32} if optimizer == "paged_adamw_32bit" else {torch.uint8})


def test_without_bitsandbytes_what_needs_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_inputs(QLORA)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_bitsandbytes(RunConfig())
    said = r"quantization nf4, .* not installed: `pip install bitsandbytes`, or pass --technique lora"
    with pytest.raises(BadInputError, match=said):
        check_inputs(QLORA)


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
    settings = (
        "--train_rows 17 --test_rows 2 --num_train_epochs 1 --max_steps 1 --max_new_tokens 2 --independent_judge none "
        "--report_to none"
    )
    command = [sys.executable, "-c", WITHOUT, str(tmp_path), ",".join(map(str, scripts)), *settings.split()]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lora, lora_code, full, full_code, qlora, qlora_code, _ = re.split(r"^exit code (.*)$", done.stdout, flags=re.M)
    codes = (done.returncode, lora_code, full_code, qlora_code)
    assert codes == (0, "0", "0", "2"), done.stdout
    assert all("record: run_record.json" in said for said in (lora, full))
    assert "error: technique is qlora and quantization nf4, but bitsandbytes" in qlora
    assert [(tmp_path / script.name / "results").exists() for script in scripts] == [True, True, False]
