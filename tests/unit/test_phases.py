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
from common.planning.phases import PHASES, TRAINING, Phase, phases_of
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


def phase_of(architecture: Architecture, name: str, attention: str) -> Phase:
    job = Job("full", "single", BatchShape(4, 64, 63), precision="fp32", evaluation=SHAPE, attention=attention)
    found = phases_of(architecture, job, whole_model(architecture), find_gpu("a6000"))
    return next(phase for phase in found if phase.name == name)


def passing_bytes(phase: Phase) -> float:
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
    length = {"min_new_tokens": SHAPE.new_tokens, "max_new_tokens": SHAPE.new_tokens}
    mask = torch.ones_like(prompts)
    found = counted(model, lambda: model.generate(prompts, attention_mask=mask, do_sample=False, **length))
    assert passing_bytes(phase_of(architecture, "baseline evaluation", attention)) == pytest.approx(found, rel=0.1)


def test_validating_takes_what_is_planned(model: PreTrainedModel, architecture: Architecture, attention: str) -> None:
    rows = torch.ones(SHAPE.rows, SHAPE.length, dtype=torch.long)
    labels = rows.clone()
    labels[:, : SHAPE.length - SHAPE.labelled] = IGNORED_LABEL
    compute_loss_in_chunks(model)
    batch = keep_answer_logits({"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": labels})
    found = counted(model, lambda: model(**batch).token_losses)
    assert passing_bytes(phase_of(architecture, "validation", attention)) == pytest.approx(found, rel=0.1)


def small(**changes: object) -> Plan:
    run = RunConfig(model="qwen2.5-7b", device="cuda", gpu="RTX A5000 24GB", precision="bf16", **changes)
    return plan_run(run, BatchShape(1, 256, 255), find_gpu("a5000"))


def test_a_run_whose_training_fits_is_refused_for_another_phase_and_told_what_fits() -> None:
    plan = small(per_device_eval_batch_size=512)
    assert plan.trains
    assert not plan.fits
    with pytest.raises(BadInputError, match="training fits, but") as refusal:
        check_fits(plan)
    fitting = int(re.search(r"--per_device_eval_batch_size (\d+)", str(refusal.value))[1])
    assert small(per_device_eval_batch_size=fitting).fits
    assert not small(per_device_eval_batch_size=2 * fitting).fits
    check_fits(plan.with_fewer_evaluated())


def test_every_phase_is_there_in_order_and_training_alone_where_nothing_is_evaluated() -> None:
    plan = small()
    assert [phase.name for phase in plan.phases[0]] == list(PHASES)
    alone = replace(plan, job=replace(plan.job, evaluation=None))
    assert [phase.name for phase in alone.phases[0]] == [TRAINING]
    assert alone.highest.phase.memory == plan.fullest[0]


def test_models_that_wait_elsewhere_take_nothing() -> None:
    """The tuned model and its judge are in a device's memory one after the other."""
    weights = small().phases[0][-1].memory.parts_gib["weights"]
    assert weights == pytest.approx(7_615_616_512 * 2 / GIB, rel=0.01)


def test_a_model_on_several_devices_stays_there_while_the_base_judges() -> None:
    run = RunConfig(technique="full", parallel="mp", devices=2, stages=0, model="qwen2.5-7b", device="cuda",
                    gpu="RTX A6000 48GB", precision="bf16")  # fmt: skip
    phases = {phase.name: phase for phase in plan_run(run, BatchShape(1, 256, 255), find_gpu("a6000")).phases[0]}
    assert phases["final evaluation"].memory.parts_gib["weights"] == pytest.approx(
        2 * phases["baseline evaluation"].memory.parts_gib["weights"], rel=0.05
    )
