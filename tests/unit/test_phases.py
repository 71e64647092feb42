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
from common.models.chunked_loss import compute_loss_in_chunks
from common.models.placement import check_fits
from common.planning.architectures import Architecture, read_architecture
from common.planning.device_maps import answering_shares
from common.planning.job import BatchShape, EvaluationShape, Job
from common.planning.phases import JUDGE_HIDDEN, PHASES, TRAINING, PhaseSums
from common.planning.plans import Plan, plan_run
from common.planning.shares import Share, whole_model
from common.runtime.memory_tracker import MemoryTracker
from common.training.answer_logits import keep_answer_logits

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
    found = PhaseSums(architecture, job, whole_model(architecture), find_gpu("a6000")).phases()
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
    check_fits(planned("a5000"))


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


# -- in stages, where training divides the weights


def beside_training(plan: Plan) -> dict[str, float]:
    return {phase.name: phase.memory.peak_gib for phases in plan.phases for phase in phases if phase.name != TRAINING}


@pytest.mark.parametrize("parallel", ["fsdp", "zero3", "pp"])
def test_two_cards_need_for_every_phase_what_training_needs_and_never_a_whole_model(parallel: str) -> None:
    schedule = {"schedule": "gpipe"} if parallel == "pp" else {}
    plan = planned("rtx 3090", parallel=parallel, devices=2, technique="lora", **schedule)
    training = max(memory.peak_gib for memory in plan.devices)
    whole_gib = 7_615_616_512 * 2 / GIB
    assert max(beside_training(plan).values()) <= training
    for phases in plan.phases:
        of_stage = [phase.memory.parts_gib["weights"] for phase in phases if "evaluation" in phase.name]
        assert all(0.4 * whole_gib < gib < 0.6 * whole_gib for gib in of_stage)


def test_each_stage_has_its_own_layers_keys_and_values_for_the_rows_of_all(architecture: Architecture) -> None:
    """The toy's three layers are on three ranks: each holds one, and the rows that three would answer alone."""
    job = Job("full", "fsdp", BatchShape(4, 64, 63), devices=3, precision="fp32", evaluation=SHAPE)
    parts = answering_shares(architecture, 3)

    def cached(job: Job, stage: Share | None) -> float:
        found = PhaseSums(architecture, job, whole_model(architecture), find_gpu("a6000"), stage=stage).phases()
        (phase,) = (phase for phase in found if phase.name == "baseline evaluation")
        return sum(term.count for term in phase.memory.terms if term.what.startswith("keys and values"))

    alone = replace(job, parallel="ddp")
    assert [cached(job, part) for part in parts] == [cached(alone, None)] * 3
    few = replace(job, evaluation=replace(SHAPE, test_rows=24))  # half of 3 x 16
    assert cached(few, parts[0]) == cached(job, parts[0]) / 2


def test_the_independent_judge_is_whole_on_each_rank_for_the_rows_of_one(architecture: Architecture) -> None:
    judged = replace(SHAPE, judged=True, has_independent_judge=True)
    job = Job("full", "fsdp", BatchShape(4, 64, 63), devices=3, precision="fp32", evaluation=judged)
    first = answering_shares(architecture, 3)[0]

    def judging(job: Job) -> float:
        found = PhaseSums(architecture, job, whole_model(architecture), find_gpu("a6000"), stage=first).phases()
        (memory,) = (phase.memory for phase in found if phase.name == "baseline evaluation")
        assert memory.moment == "the independent judge"
        return sum(term.count for term in memory.terms if term.part == "activations")

    all_at_once = SHAPE.rows * SHAPE.labelled * 12 * JUDGE_HIDDEN * 4
    assert judging(job) == all_at_once
    assert judging(replace(job, evaluation=replace(judged, test_rows=24))) == all_at_once / 2  # a third of 24 each


def test_rows_at_once_are_as_many_as_leave_training_the_highest_phase_unless_the_user_says() -> None:
    chosen = planned("a100-40g", parallel="fsdp", devices=4, technique="lora").job.evaluation.rows
    more, asked = (planned("a100-40g", parallel="fsdp", devices=4, technique="lora", per_device_eval_batch_size=rows)
                   for rows in (chosen + 1, 32))  # fmt: skip
    assert 1 <= chosen < 32
    assert max(beside_training(more).values()) > max(memory.peak_gib for memory in more.devices)
    assert asked.job.evaluation.rows == 32


def test_up_to_a_quarter_of_a_device_rows_are_answered_at_once_whatever_training_takes() -> None:
    roomy = planned("a100-80g", parallel="fsdp", devices=4, technique="lora")
    training_gib = max(memory.peak_gib for memory in roomy.devices)
    assert training_gib < max(beside_training(roomy).values()) < 0.25 * 80
    assert roomy.job.evaluation.rows == 32


def test_a_phase_whose_models_alone_need_more_than_training_may_fill_the_device() -> None:
    """QLoRA's judge, in 16 bits, stands beside the quantized base: one row at once would save nothing."""
    roomy = planned("a6000", technique="qlora")
    assert roomy.job.evaluation.rows > 8
    assert roomy.fits
    assert max(beside_training(roomy).values()) > roomy.devices[0].peak_gib


@pytest.mark.parametrize(
    ("settings", "moment"),
    [({}, "the last weight"), ({"weights": "random"}, "the last module, whole"),
     ({"parallel": "zero3"}, "the last module, whole"), ({"parallel": "ddp", "weights": "random"}, "the last weight")],
)  # fmt: skip
def test_what_comes_module_by_module_is_whole_for_one_module(settings: dict[str, str], moment: str) -> None:
    plan = planned("a6000", **{"parallel": "fsdp", "devices": 2, "technique": "lora"} | settings)
    loading = plan.phases[0][0]
    assert loading.memory.moment == moment
    trained = sum(term.gib for term in loading.memory.terms if term.part == "weights")
    head_gib = 152_064 * 3_584 * 2 / GIB * (moment != "the last weight")
    parts = 1 if plan.job.parallel == "ddp" else 2
    assert trained == pytest.approx(7_615_616_512 * 2 / GIB / parts + head_gib, rel=0.01)
