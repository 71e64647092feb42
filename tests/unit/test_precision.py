"""Matrix products are in the run's precision, whatever divides the work: told by what a projection returns."""

from collections.abc import Callable
from pkgutil import resolve_name

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS
from common.models.divided import mesh_of
from common.models.trained_weights import with_trained_weights
from common.planning.job import BatchShape, Job
from common.runtime.world import Rank
from common.training import fsdp
from common.training.ddp import data_parallel
from common.training.deepspeed_config import deepspeed_config
from common.training.fsdp import Shards, shard
from common.training.part import Part
from common.training.pipeline import Pipeline
from common.training.pipeline_parallel import Stage
from common.training.tensor_parallel import Columns
from common.training.zero import ZeroPart
from tests.recipes.folders import CLASSIFICATION, module_of

columns = module_of(CLASSIFICATION, "my_utils_tensor_parallel")

ALONE = Rank(0, 1, "cpu", "python")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = list(range(5, 17))


class FromOutside(Part):
    """One that a reader writes, and that says nothing of precision."""


PARTS: dict[str, tuple[type[Part], str, Callable[..., object]]] = {
    "one device": (Part, "single", lambda model, run: model),
    "DDP": (Part, "ddp", lambda model, run: data_parallel(model, Rank(0, 2, "cpu", "python"))),
    "FSDP": (Shards, "fsdp", lambda model, run: shard(model, run, mesh_of(ALONE, run))),
    "pipeline": (Stage, "pp", lambda model, run: Pipeline(model, run, ALONE)),
    "tensor parallel": (Columns, "tp", lambda model, run: columns.split_by_plan(model, columns.mesh_of_all(ALONE))),
    "one from outside": (FromOutside, "single", lambda model, run: model),
}
"""What a rank holds, by which parallelism, and what that makes of a model."""


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
    (held, technique, precision)
    for held, technique in (
        *((held, "full") for held in PARTS),
        ("one device", "lora"),
        ("DDP", "lora"),
        ("FSDP", "lora"),
        ("pipeline", "lora"),
    )
    for precision in ("bf16-mixed", "bf16", "fp32")
    if (held, precision) != ("tensor parallel", "bf16")  # which is refused
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("held", "technique", "precision"), CASES)
def test_a_step_computes_in_the_precision_of_the_run(
    held: str, technique: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters too, which are fp32 beside a base in bf16."""
    monkeypatch.setattr(fsdp, "check_fully_sharded", lambda *_: None)  # among one rank nothing is divided
    kind, parallel, divided = PARTS[held]
    run = run_of(parallel, technique, precision)
    model = toy(run)
    part = kind(divided(model, run), run, ALONE)
    batch = part.inputs_for_loss(batch_of(run))
    seen = products(model, lambda: part.back_propagate(batch, 48))
    assert seen == {torch.float32 if precision == "fp32" else torch.bfloat16}
    plan = Job(technique, parallel, BatchShape(4, 12, 12), devices=run.devices, precision=precision)
    assert plan.autocasts == (precision == "bf16-mixed" and kind is not Shards)


def test_every_part_is_among_these_but_deepspeeds_whose_settings_have_the_precision() -> None:
    named = {resolve_name(each.part) for each in PARALLELISMS.values()}
    assert named - {kind for kind, *_ in PARTS.values()} == {ZeroPart}
    assert not ZeroPart.autocasts
    assert [deepspeed_config(run_of("zero2", "full", each))["bf16"]["enabled"] for each in ("bf16", "fp32")] == [
        True,
        False,
    ]
