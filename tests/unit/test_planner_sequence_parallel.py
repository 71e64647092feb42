"""Plans in which ranks share the tokens of each row, and how long a row may be."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.published import published_longest_rows
from bench.tables.lengths import tokens_by_sharing
from common.base.errors import BadInputError, NotPlannedError
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.checks.planner_command import answer, main
from common.checks.planner_options import read_options
from common.checks.run_command import run_command
from common.hardware.devices import find_gpu
from common.planning.architectures import Architecture, exchanged_keys, read_architecture, sp_sizes
from common.planning.device_maps import answering_shares
from common.planning.job import BatchShape, EvaluationShape, Job, job_of_run
from common.planning.memory_plan import device_sums
from common.planning.phases import PhaseSums
from common.planning.plans import TOKENS_STEP, Plan, make_plan
from common.planning.ranking import ranked_plans, with_longest_rows
from common.planning.shares import whole_model
from common.planning.step_speed import step_flops
from common.planning.terms import Kind, Term, size_of
from common.planning.time_plan import Cluster, exchanged_bytes
from tests.families import make_tiny

LLAMA, SMOL = read_architecture("llama-3.1-8b"), read_architecture("smollm2-135m")
A100 = find_gpu("A100 80GB SXM")
ROW = BatchShape(1, 16_384, 16_384)
OWN = Job("full", "ddp", ROW, devices=4)
SHARED = replace(OWN, sp_size=4)
SENT_BACK = "result of attention, token by token"


def kept(job: Job) -> dict[str, Term]:
    """What a rank keeps of a layer."""
    sums = device_sums(LLAMA, job, whole_model(LLAMA))
    return {term.what: term for term in sums.layer.saved(LLAMA.stacks[0])}


def ranked(length: int, gpus: int = 4, **asked: Any) -> list[Plan]:
    job = replace(OWN, parallel="single", devices=1, batch=BatchShape(1, length, length))
    return ranked_plans(replace(LLAMA, max_length=10**7), job, Cluster((A100,) * gpus), {}, **asked)


def test_a_rank_has_its_part_of_the_tokens_laid_end_to_end() -> None:
    assert BatchShape(3, 10, 4, padded=True).part_of(4) == BatchShape(1, 8, 4)  # 30 tokens are filled up
    assert BatchShape(4, 10, 4).part_of(2) == BatchShape(1, 20, 8)
    assert BatchShape(1, 10, 4).part_of(5).labelled == 2  # as the last rank's
    assert BatchShape(1, 10, 4).part_of(1) == BatchShape(1, 10, 4)


@pytest.mark.parametrize("technique", ["full", "lora"])
def test_activations_are_those_of_a_part_of_the_tokens_and_the_result_that_is_sent_back(technique: str) -> None:
    shared = replace(SHARED, technique=technique)
    terms, alone = kept(shared), kept(replace(shared, sp_size=1, batch=ROW.part_of(4)))
    assert alone.pop(SENT_BACK).count == 0
    assert terms.pop(SENT_BACK).count == 4_096 * LLAMA.query_size * 2
    assert terms == alone


def test_adapters_with_dropout_keep_no_result_that_is_sent_back() -> None:
    assert kept(replace(SHARED, technique="lora", lora_dropout=0.1))[SENT_BACK].count == 0


def test_grouped_heads_fewer_than_the_ranks_are_repeated() -> None:
    """Llama has 8 key-value heads: 16 ranks keep 16."""
    of_8, of_16 = (
        kept(replace(SHARED, devices=n, sp_size=n, batch=BatchShape(1, n * 512, 1)))["queries, keys, values"].count
        for n in (8, 16)
    )
    assert exchanged_keys(LLAMA, 8) == LLAMA.key_size
    assert of_16 - of_8 == 512 * 2 * LLAMA.key_size * 2


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_weights_and_states_are_as_without(parallel: str) -> None:
    own, shared = (device_sums(LLAMA, replace(job, parallel=parallel), whole_model(LLAMA)) for job in (OWN, SHARED))
    assert shared.between_steps == own.between_steps


def test_validation_is_divided_and_answers_are_not() -> None:
    shape = EvaluationShape(1, 16_384, 16_384, prompt_length=16_384, new_tokens=8)
    phases = {
        job.sp_size: {
            phase.name: size_of(phase.memory.terms)
            for phase in PhaseSums(LLAMA, replace(job, evaluation=shape), whole_model(LLAMA), A100).phases()
        }
        for job in (OWN, SHARED)
    }
    assert phases[4]["validation"] < phases[1]["validation"]
    assert phases[4]["baseline evaluation"] == phases[1]["baseline evaluation"]


def test_ranks_that_share_rows_answer_one_together_where_they_share_the_model() -> None:
    """Else four ranks in stages would answer four rows of such a length at once."""
    shape = EvaluationShape(1, 16_384, 16_384, prompt_length=16_384, new_tokens=8)
    phases = {}
    for sp_size in (1, 2, 4):
        job = replace(OWN, parallel="fsdp", sp_size=sp_size, evaluation=shape)
        stage = answering_shares(LLAMA, 4)[1]
        of_stage = {p.name: p for p in PhaseSums(LLAMA, job, whole_model(LLAMA), A100, False, False, stage).phases()}
        terms = of_stage["baseline evaluation"].memory.terms
        phases[sp_size] = size_of([term for term in terms if term.part in (Kind.ACTIVATIONS, Kind.BUFFERS)])
    assert phases[2] == pytest.approx(phases[1] / 2, rel=0.01)
    assert phases[4] == pytest.approx(phases[1] / 4, rel=0.01)


def test_a_quarter_of_the_work_and_the_bytes_of_each_exchange() -> None:
    own, shared = (step_flops(LLAMA, job, whole_model(LLAMA)) for job in (OWN, SHARED))
    assert shared.total == pytest.approx(own.total / 4)
    assert shared.attention == pytest.approx(own.attention / 4)
    # queries, keys, values and results of 4,096 tokens in 16 bits, there in the forward and back in the backward pass
    numbers = 2 * LLAMA.query_size + 2 * LLAMA.key_size
    assert exchanged_bytes(LLAMA, SHARED) == 3 / 4 * 2 * LLAMA.layers * 4_096 * numbers * 2
    assert exchanged_bytes(LLAMA, replace(SHARED, gradient_checkpointing=True)) == 1.5 * exchanged_bytes(LLAMA, SHARED)
    assert exchanged_bytes(LLAMA, OWN) == 0


def test_an_exchange_is_waited_for_and_as_many_tokens_come_through() -> None:
    own, shared = (make_plan(LLAMA, job, Cluster((A100,) * 4), {}) for job in (OWN, SHARED))
    exchanged_gb = exchanged_bytes(LLAMA, SHARED) / 1e9
    assert shared.time.sent_gb == pytest.approx(own.time.sent_gb + exchanged_gb)
    assert shared.time.exposed_s >= exchanged_gb / shared.cluster.slowest_link.gb_per_s
    assert shared.rows_per_step == 1
    assert 0.5 < shared.tokens_per_s / own.tokens_per_s < 1


def test_rows_are_shared_where_not_even_one_fits_and_it_helps() -> None:
    assert {plan.job.sp_size for plan in ranked(1024)} == {1}
    long = {plan.job.sharing: plan for plan in ranked(200_000, techniques=["lora"])}
    assert long["fsdp-sp4"].trains
    assert not long["fsdp"].trains
    assert not any(name.startswith("zero3-") for name in long)
    assert "ddp-sp4" not in {
        plan.job.sharing for plan in ranked(200_000, techniques=["full"])
    }  # its states are too large


def test_rows_are_shared_by_as_many_as_are_asked_for() -> None:
    assert {plan.job.sharing for plan in ranked(1024, sp_size=2)} == {"ddp-sp2", "fsdp-sp2"}
    assert {plan.job.sp_size for plan in ranked(200_000, sp_size=1, techniques=["lora"])} == {1}


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        (LLAMA, {"devices": 6}, "--sp 2"),
        (LLAMA, {"parallel": "zero3"}, "ddp and fsdp"),
        (LLAMA, {"attention": "eager"}, "attention"),
        (LLAMA, {"batch": replace(ROW, task="preferences")}, "one answer"),
        (SMOL, {}, "--sp 3, 9"),
    ],
)
def test_contradictions_are_refused_with_what_would_work(
    architecture: Architecture, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadInputError, match=named):
        make_plan(architecture, replace(SHARED, **changes), Cluster((A100,) * changes.get("devices", 4)), {})


def test_heads_are_shared_evenly_or_repeated() -> None:
    assert sp_sizes(9, 3) == [1, 3, 9]
    assert sp_sizes(28, 4) == [1, 2, 4, 28]  # 7 and 14 would part groups of queries
    assert sp_sizes(32, 8) == [1, 2, 4, 8, 16, 32]


def test_a_run_is_planned_as_it_shares_rows() -> None:
    run = RunConfig(technique="full", parallel="ddp", devices=4, sp_size=2, device="cuda", model="llama-3.1-8b")
    assert job_of_run(run, ROW).own_batch.length == 8_192


def test_the_longest_row_fits_and_the_next_does_not() -> None:
    readable = replace(LLAMA, max_length=10**7)
    plan = make_plan(readable, replace(SHARED, parallel="fsdp", gradient_checkpointing=True), Cluster((A100,) * 4), {})
    fits = [
        make_plan(readable, plan.job_with_row(steps), plan.cluster, {}).fits
        for steps in (plan.longest_row, plan.longest_row + 1)
    ]
    assert fits == [True, False]
    assert plan.longest_row * TOKENS_STEP > 3 * 50_000


def test_the_longest_rows_are_those_that_are_shared() -> None:
    found = with_longest_rows(ranked(1024, techniques=["lora"], parallels=("fsdp",)), None, {})
    assert [plan.job.sp_size for plan in found] == [4, 1]
    assert all(plan.job.gradient_checkpointing and plan.fits for plan in found)
    by_sharing = tokens_by_sharing("llama-3.1-8b", "A100 80GB SXM", "lora", 4)
    assert 3 < by_sharing[4] / by_sharing[1] < 5


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """What the command line prints."""

    def ask(command: str) -> str:
        monkeypatch.setattr(sys, "argv", ["planner", *command.split()])
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr().out

    return ask


def test_the_command_says_how_long_a_row_may_be(asked: Callable[[str], str]) -> None:
    question = "--model qwen2.5-7b --gpu a100-80gb-sxm --gpus 4 --seq-len max --technique lora"
    said, answer = asked(question), json.loads(asked(f"{question} --json"))
    lengths = [plan["max_length"] for plan in answer["ranked"]]
    assert lengths == sorted(lengths, reverse=True)
    assert answer["ranked"][0]["sp_size"] == 4
    assert answer["ranked"][0]["tokens_per_s"] > 0
    assert f"{lengths[0]:,}" in said
    assert "131,072" in said  # beyond which the model has not learnt to read
    assert lengths[0] > 131_072
    assert "has positions for 131,072" in said.splitlines()[-1]


@pytest.mark.parametrize(("sp_size", "sharing"), [(1, {1}), (2, {2}), (None, {1, 4})])
def test_the_longest_rows_are_shared_by_as_many_as_are_asked_for_once(
    asked: Callable[[str], str], sp_size: int | None, sharing: set[int]
) -> None:
    question = "--model llama-3.1-8b --gpu a100-80gb-sxm --gpus 4 --seq-len max --technique full --json"
    ranked = json.loads(asked(question + (f" --sp {sp_size}" if sp_size else "")))["ranked"]
    ways = [(plan["parallel"], plan["sp_size"], plan["offload"]) for plan in ranked]
    assert len(set(ways)) == len(ways)
    assert {size for parallel, size, _ in ways if parallel == "fsdp"} == sharing


@pytest.mark.parametrize(
    ("model", "classes", "said"),
    [("falcon", (), "not known to the planner"), ("roberta-large", ("--classes", "2"), "reads 512")],
)
def test_the_longest_rows_of_a_model_that_cannot_be_planned_are_refused(
    model: str, classes: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    name = make_tiny(model, tmp_path / model) if model == "falcon" else model
    options = read_options(["--model", str(name), "--gpu", "a6000", "--seq-len", "max", *classes])
    with pytest.raises(NotPlannedError, match=said):
        answer(options)


def test_ways_that_call_whole_layers_are_ranked_with_tiles() -> None:
    tiled = replace(OWN, parallel="single", devices=1, batch=BatchShape(1, 1024, 1024), tiled_mlp=True)
    plans = ranked_plans(LLAMA, tiled, Cluster((A100,) * 4), {})
    assert {plan.job.parallel for plan in plans} == {"ddp", "fsdp"}


def test_no_command_of_a_folder_that_does_not_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {folder: run for folder, run in run_folders().items() if run.sp_size == 1}
    monkeypatch.setattr("common.checks.run_command.run_folders", lambda: others)
    plan = make_plan(LLAMA, replace(SHARED, precision="bf16-mixed"), Cluster((A100,) * 4), {})
    with pytest.raises(BadInputError, match="ddp-sp4"):
        run_command(plan, "llama-3.1-8b")


def test_published_long_rows_are_planned_within_an_eighth_and_safely() -> None:
    rows = published_longest_rows()
    assert len(rows) == 5
    assert sum(abs(row["error"]) for row in rows) / len(rows) < 0.06
    assert max(abs(row["error"]) for row in rows) < 0.125
    assert all(row["safe"] <= row["tokens"] for row in rows)
