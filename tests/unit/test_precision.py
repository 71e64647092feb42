"""Matrix products are in the run's precision, whatever divides the work: told by what a projection returns."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
from common.training.replicas import Replicas
from common.training.strategy import Strategy, WholeModel
from common.training.trainer import trainer_of_rows, training_arguments
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS
from common.models.divided import mesh_of
from common.models.loading import load_tokenizer
from common.models.trained_weights import with_trained_weights
from common.planning.job import BatchShape, Job
from common.runtime.world import Rank
from common.training.ddp import Ddp
from common.training.deepspeed_config import deepspeed_config
from common.training.fsdp import Fsdp, shard
from common.training.pipeline_parallel import PipelineParallel
from common.training.tensor_parallel import TensorParallel
from common.training.zero import Zero

ALONE = Rank(0, 1, "cpu", "python")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = list(range(5, 17))


class FromOutside(Strategy):
    """One that a reader writes, and that says nothing of precision."""


LOOPS: dict[str, tuple[type[Strategy], str]] = {
    "DDP": (Ddp, "ddp"),
    "FSDP": (Fsdp, "fsdp"),
    "replicas": (Replicas, "ddp"),
    "pipeline": (PipelineParallel, "pp"),
    "tensor parallel": (TensorParallel, "tp"),
    "one from outside": (FromOutside, "single"),
}
"""Strategies whose steps a loop of ours takes, and their parallelism."""


def run_of(parallel: str, technique: str, precision: str) -> RunConfig:
    return RunConfig(
        task="classification" if parallel == "tp" else "chat",
        technique=technique,
        parallel=parallel,
        devices=1 if parallel == "single" else 2,
        micro_batches=2 if parallel == "pp" else 1,
        precision=precision,
        target_modules="all" if technique == "full" else "q_proj",
        report_to="none",
    )


def toy(run: RunConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    if run.goal.classifies:
        model = BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=3, **SIZES))
    else:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES))
    return with_trained_weights(model.to(torch.bfloat16 if run.precision == "bf16" else torch.float32), run)


def batch_of(run: RunConfig) -> dict[str, torch.Tensor]:
    ids = torch.tensor([IDS] * 4)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor([0, 1, 2, 0]) if run.goal.classifies else ids,
    }


def products(model: torch.nn.Module, step: Callable[[], object]) -> set[torch.dtype]:
    """The dtypes of what the layers' projections, adapters included, return in a step."""
    seen: set[torch.dtype] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layer" in name:
            module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    step()
    return seen


CASES = [
    (loop, technique, precision)
    for loop, technique in (
        *((loop, "full") for loop in LOOPS),
        ("DDP", "lora"),
        ("FSDP", "lora"),
        ("pipeline", "lora"),
    )
    for precision in ("bf16-mixed", "bf16", "fp32")
    if (loop, precision) != ("tensor parallel", "bf16")  # which is refused
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("loop", "technique", "precision"), CASES)
def test_a_loop_of_ours_computes_in_the_precision_of_the_run(loop: str, technique: str, precision: str) -> None:
    """Adapters too, which are fp32 beside a base in bf16."""
    kind, parallel = LOOPS[loop]
    run = run_of(parallel, technique, precision)
    strategy = kind(SimpleNamespace(run=run, rank=ALONE, writes=True)) if kind is Replicas else kind(run, ALONE)
    model = toy(run)
    if kind is Fsdp:
        shard(model, run, mesh_of(ALONE, run))
    strategy.attach(model)
    if kind is Ddp:
        strategy.prepare(torch.optim.SGD(model.parameters()), None)
    batch = strategy.inputs_for_loss(batch_of(run))
    seen = products(model, lambda: strategy.backward(batch, 48, is_last=True))
    assert seen == {torch.float32 if precision == "fp32" else torch.bfloat16}
    plan = Job(technique, parallel, BatchShape(4, 12, 12), devices=run.devices, precision=precision)
    assert plan.autocasts == (precision == "bf16-mixed" and kind is not Fsdp)


@pytest.mark.parametrize("technique", ["full", "lora"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "fp32"])
def test_the_trainer_computes_in_the_precision_of_the_run(tmp_path: Path, technique: str, precision: str) -> None:
    """With one device, and with DDP and MP, which it wraps around the same steps."""
    run = run_of("single", technique, precision)
    model, row = toy(run), {"input_ids": IDS, "labels": IDS}
    rows = [{**row, "attention_mask": [1] * len(IDS), "row": number} for number in range(4)]
    strategy = WholeModel(run, ALONE)
    trainer = trainer_of_rows(
        run, ALONE, model, load_tokenizer(run), rows, rows, training_arguments(run, tmp_path), [], strategy
    )
    trainer.model_wrapped = trainer.accelerator.prepare_model(model)  # as its training begins
    seen = products(model, lambda: trainer.back_propagate(rows))
    assert seen == {torch.float32 if precision == "fp32" else torch.bfloat16}


def test_every_strategy_is_among_these_but_deepspeeds_whose_settings_have_the_precision() -> None:
    named = {resolve_name(each.strategy) for each in PARALLELISMS.values() if each.strategy}
    assert named - {kind for kind, _ in LOOPS.values()} == {Zero}
    assert not Zero.autocasts
    assert [deepspeed_config(run_of("zero2", "full", each))["bf16"]["enabled"] for each in ("bf16", "fp32")] == [
        True,
        False,
    ]
