"""Memory by phase: the closed form against what real forward passes and generation allocate, and what is refused."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL
from common.hardware.devices import GIB, find_gpu
from common.planning.architectures import Architecture, read_architecture
from common.planning.job import BatchShape, EvaluationShape, Job
from common.planning.phases import PHASES, TRAINING, phases_of
from common.planning.plans import Plan, plan_run
from common.planning.shares import whole_model
from common.runtime.memory_tracker import MemoryTracker
from common.training.chunked_loss import compute_loss_in_chunks
from common.training.placement import check_fits
from common.training.strategy import keep_answer_logits

SHAPE = EvaluationShape(rows=16, length=96, labelled=48, prompt_length=64, new_tokens=8)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = LlamaConfig(hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=2000, tie_word_embeddings=False)  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def architecture(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    folder = tmp_path_factory.mktemp("toy")
    model.config.save_pretrained(folder)
    return read_architecture(str(folder))


@pytest.fixture(params=["sdpa", "eager"])
def attention(request: pytest.FixtureRequest, model: PreTrainedModel) -> Iterator[str]:
    model.set_attn_implementation(request.param)
    yield request.param
    model.set_attn_implementation("sdpa")


def planned_bytes(architecture: Architecture, name: str, attention: str) -> float:
    job = Job("full", "single", BatchShape(4, 64, 63), precision="fp32", evaluation=SHAPE, attention=attention)
    found = phases_of(architecture, job, whole_model(architecture), find_gpu("a6000"))
    (phase,) = (phase for phase in found if phase.name == name)
    return sum(term.count for term in phase.memory.terms if term.part not in ("weights", "optimizer", "overhead"))


def counted(model: PreTrainedModel, work: Callable[[], object]) -> float:
    """Return the most bytes that `work` has alive at once, beside the weights."""
    with torch.no_grad(), MemoryTracker(model.config.vocab_size) as tracker:
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.add(tensor, "weights")
        tracker.enter("work")
        work()
    return sum(count for part, count in tracker.timeline["work"].items() if part != "weights")


def test_generating_takes_what_is_planned(model: PreTrainedModel, architecture: Architecture, attention: str) -> None:
    prompts = torch.ones(SHAPE.rows, SHAPE.prompt_length, dtype=torch.long)
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": False,
               "min_new_tokens": SHAPE.new_tokens, "max_new_tokens": SHAPE.new_tokens}  # fmt: skip
    found = counted(model, lambda: model.generate(prompts, **options))
    assert planned_bytes(architecture, "baseline evaluation", attention) == pytest.approx(found, rel=0.1)


def test_validating_takes_what_is_planned(model: PreTrainedModel, architecture: Architecture, attention: str) -> None:
    rows = torch.ones(SHAPE.rows, SHAPE.length, dtype=torch.long)
    labels = rows.clone()
    labels[:, : SHAPE.length - SHAPE.labelled] = IGNORED_LABEL
    compute_loss_in_chunks(model)
    batch = keep_answer_logits({"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": labels})
    found = counted(model, lambda: model(**batch).token_losses)
    assert planned_bytes(architecture, "validation", attention) == pytest.approx(found, rel=0.1)


def planned(gpu: str, **changes: object) -> Plan:
    run = RunConfig(model="qwen2.5-7b", device="cuda", gpu=find_gpu(gpu).name, precision="bf16", **changes)
    return plan_run(run, BatchShape(1, 256, 255), find_gpu(gpu))


def test_a_run_whose_training_fits_is_refused_for_another_phase_and_told_what_fits() -> None:
    plan = planned("a5000", per_device_eval_batch_size=512)
    assert (plan.trains, plan.fits) == (True, False)
    with pytest.raises(BadInputError, match="training fits, but") as refusal:
        check_fits(plan)
    fitting = int(re.search(r"--per_device_eval_batch_size (\d+)", str(refusal.value))[1])
    fit = [planned("a5000", per_device_eval_batch_size=rows).fits for rows in (fitting, 2 * fitting)]
    assert fit == [True, False]
    check_fits(plan.with_fewer_evaluated())


def test_every_phase_is_there_in_order_and_training_alone_where_nothing_is_evaluated() -> None:
    """The tuned model and its judge are in a device's memory one after the other."""
    plan = planned("a5000")
    assert [phase.name for phase in plan.phases[0]] == list(PHASES)
    weights_gib = plan.phases[0][-1].memory.parts_gib["weights"]
    assert weights_gib == pytest.approx(7_615_616_512 * 2 / GIB, rel=0.01)
    alone = replace(plan, job=replace(plan.job, evaluation=None))
    assert [phase.name for phase in alone.phases[0]] == [TRAINING]
    assert alone.highest.phase.memory == plan.fullest[0]


def test_a_model_on_several_devices_stays_there_while_the_base_judges() -> None:
    plan = planned("a6000", technique="full", parallel="mp", devices=2, stages=0)
    weights_gib = {phase.name: phase.memory.parts_gib["weights"] for phase in plan.phases[0]}
    assert weights_gib["final evaluation"] == pytest.approx(2 * weights_gib["baseline evaluation"], rel=0.05)
