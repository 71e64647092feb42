"""Stages of toy models compute what the whole model computes, and the arithmetic around them is right."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from common.base.run_config import RunConfig
from common.data.batches import EpochBatches
from common.data.rows import IGNORED_LABEL, NO_ROW, labels_in
from common.measuring.pipeline_measure import full_batches, ideal_speedup, measure_pipeline, speedups
from common.models.stages import PassThrough, cut
from common.runtime.world import Rank
from common.training.loop import TrainingLoop
from common.training.pipeline import PassClock, Pipeline, trained_stage
from common.training.pipeline_parallel import Stage
from tests.unit.pipeline_worker import cases, save_toy, stage_map_of
from tests.unit.ranks import found_by_ranks

THREE_STAGES = ("Llama, tied, 1f1b", "Qwen3, untied, 1f1b", "Roberta, gpipe", "Llama, tied, adapters")
FIRST = {
    2: ("Llama, untied, gpipe", "Roberta, 1f1b", "Llama, tied, recomputed", "Llama, tied, random",
        "Llama, tied, adapters on q_proj", "Qwen3, tied, 1f1b"),
    3: ("Llama, tied, 1f1b", "Roberta, gpipe"),
}  # fmt: skip
"""By the number of stages, what `make test` sees: each model kind, schedule and way to train once."""

ROUNDING, GRADIENT_ROUNDING = 1e-6, 1e-5


# -- stages against the whole model, in worlds of two and three ranks


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list]]:
    """The cases of the tests that this session runs; of each, what each stage found."""
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    asked = [item.callspec.params for item in items if "compared" in item.fixturenames]
    names = {stages: dict.fromkeys(each["name"] for each in asked if each["stages"] == stages) for stages in (2, 3)}
    return {
        stages: found_by_ranks(
            "pipeline_worker.py", stages, tmp_path_factory.mktemp(f"stages{stages}"), str(stages), *some
        )
        for stages, some in names.items()
        if some
    }


def every_case() -> list:
    return [
        pytest.param(stages, name, marks=[] if name in FIRST[stages] else [pytest.mark.slow])
        for stages, names in ((2, cases()), (3, THREE_STAGES))
        for name in names
    ]


@pytest.mark.parametrize(("stages", "name"), every_case())
def test_stages_compute_what_the_whole_model_computes(
    compared: dict[int, dict[str, list]], stages: int, name: str
) -> None:
    by_stage = compared[stages][name]
    assert len(by_stage) == stages
    for found in by_stage:
        assert max(found[what] for what in ("training loss", "validation loss", "logits")) <= ROUNDING, found
        allowed = GRADIENT_ROUNDING * max(1.0, found["largest gradient"])
        assert max(found["gradients"], found.get("a second step", 0)) <= allowed, found
        assert (found["largest gradient"] > 0.1, found["without a gradient"], found["passes alone"] > 0) == (
            True,
            0,
            True,
        )
    is_tied = "untied" not in name and "Roberta" not in name and "adapters" not in name
    controls = [found.get("without the other end's gradient", 0) for found in (by_stage[0], by_stage[-1])]
    assert all(difference > 0.1 for difference in controls) if is_tied else controls == [0, 0]


@pytest.mark.parametrize(("stages", "name"), every_case())
def test_stages_are_saved_as_one_model_and_hold_a_part_each(
    compared: dict[int, dict[str, list]], stages: int, name: str
) -> None:
    for found in compared[stages][name]:
        differences = {what: found[what] for what in ("saved", "counts", "missing names")}
        assert differences == dict.fromkeys(differences, 0)
        assert found["weights on this stage"] < 0.7


# -- without processes


def tiny_llama(tied: bool) -> torch.nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=16, tie_word_embeddings=tied))


STAGE_MAP = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": 1,
    "model.layers.2": 1,
    "model.norm": 1,
    "lm_head": 1,
    "model.rotary_emb": 0,
}


@pytest.mark.parametrize("tied", [True, False])
def test_cutting_keeps_names_and_values_of_what_stays(tied: bool) -> None:
    whole, last = tiny_llama(tied), tiny_llama(tied)
    weights = {name: weight.detach().clone() for name, weight in whole.named_parameters(remove_duplicate=False)}
    last.load_state_dict(weights)
    cut(whole, STAGE_MAP, 0)
    cut(last, STAGE_MAP, 1)
    firsts, lasts = (dict(model.named_parameters(remove_duplicate=False)) for model in (whole, last))
    assert {name.split(".")[1] + name.split(".")[2] for name in firsts} == {"embed_tokensweight", "layers0"}
    assert (whole.config.tie_word_embeddings, whole.whole_config.tie_word_embeddings) == (False, tied)
    assert (whole.ends_are_tied, "model.embed_tokens.weight" in lasts) == (tied, tied)
    assert {**firsts, **lasts}.keys() >= weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in [*firsts.items(), *lasts.items()])
    assert len(last.model.layers) == 3
    stand_ins = [isinstance(module, PassThrough) for module in (whole.lm_head, last.lm_head, last.model.rotary_emb)]
    assert stand_ins == [True, False, False], "every stage computes positions"


def test_a_stage_takes_the_format_that_the_one_before_sends_also_with_adapters_on_4_bits(tmp_path: Path) -> None:
    """The first floating weights of such a stage are its adapters', in fp32."""
    pytest.importorskip("bitsandbytes")
    save_toy(tmp_path, "Llama", tied=False)
    run = RunConfig(
        technique="qlora",
        precision="bf16",
        parallel="pp",
        devices=2,
        model=str(tmp_path),
        per_device_train_batch_size=4,
        micro_batches=2,
    )
    first, last = (Rank(number, 2, "cpu", "torchrun") for number in range(2))
    stage_map = stage_map_of(tmp_path, 2)
    sends, takes = (Pipeline(trained_stage(run, stage_map, rank), run, rank) for rank in (first, last))
    sent = sends(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long))
    assert sent.dtype == takes.hidden_dtype == torch.bfloat16
    assert sends.receive_buffers() == []  # no step was taken, as in a run that resumed from its last one


def test_what_stands_for_a_module_hands_on_what_it_gets() -> None:
    hidden, module = torch.ones(2, 3), PassThrough()
    handed_on = (
        module(hidden, attention_mask=None, position_ids=None),
        module(inputs_embeds=hidden),
        module(None, inputs_embeds=hidden),
    )
    assert all(each is hidden for each in handed_on)
    assert (module(), list(module.parameters())) == (None, [])


@pytest.mark.parametrize(
    ("stages", "micro_batches", "speedup", "idle_share"),
    [(2, 1, 1, 1 / 2), (2, 8, 16 / 9, 1 / 9), (4, 4, 16 / 7, 3 / 7), (1, 8, 1, 0), (4, 1000, 4000 / 1003, 3 / 1003)],
)
def test_the_ideal_pipeline(stages: int, micro_batches: int, speedup: float, idle_share: float) -> None:
    assert ideal_speedup(stages, micro_batches) == pytest.approx(speedup)
    assert speedup == pytest.approx(stages * (1 - idle_share))


LOST = ("naive_factor", "small_micro_batches_factor", "unequal_stages_factor", "sending_and_waiting_factor")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            {"speedup": 1.6, "speedup_gpipe": 1.6, "ideal_speedup": 1.6, "allowed_speedup": 1.6, "machine_ceiling": 2},
        ),
        (
            {"all stages at once": 1.25},
            {"machine_ceiling": 1.6, "allowed_speedup": 1.28, "sending_and_waiting_factor": 0.8},
        ),
        ({"stage 0 alone, 4": 1.2, "stage 1 alone, 4": 1.2}, {"small_micro_batches_factor": 1.2}),
        ({"stage 0 alone, 4": 1.2, "stage 1 alone, 4": 0.8}, {"unequal_stages_factor": 1.2}),
        ({"1f1b": 1.5}, {"sending_and_waiting_factor": 1.2, "speedup": 4 / 3}),
        ({"naive": 2.4}, {"naive_factor": 1.2}),
    ],
    ids=["none", "shared machine", "small micro-batches", "unequal stages", "waiting", "slow naive"],
)
def test_each_loss_has_its_factor(changes: dict[str, float], expected: dict[str, float]) -> None:
    """Two equal stages take 1 s for a batch in 4 micro-batches as in one, but for what is told."""
    alone = {f"stage {stage} alone, {parts}": 1.0 for stage in (0, 1) for parts in (1, 4)}
    times = {"naive": 2.0, "gpipe": 1.25, "1f1b": 1.25, "all stages at once": 1.0, **alone, **changes}
    found = speedups(times, 2, 4)
    wanted = {**dict.fromkeys(LOST, 1.0), **expected}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    naive, small, unequal, waiting = (found[name] for name in LOST)
    assert found["share_of_allowed"] == pytest.approx(naive / (small * unequal * waiting))


def test_one_rank_with_all_rows_has_every_step_as_a_batch() -> None:
    batches = EpochBatches([*range(1, 66)], batch_size=8, world_size=1, rank=0, seed=42, accumulation_steps=2)
    steps = list(batches.steps())
    assert [len(step) for step in steps] == [16, 16, 16, 16, 1]
    rows = [row for step in steps for row in step]
    assert (rows, sorted(rows)) == ([row for batch in batches for row in batch], list(range(65)))


def row_of(number: int, length: int) -> dict[str, object]:
    labels = [IGNORED_LABEL] * 2 + [7] * (length - 2)
    return {"input_ids": [5] * length, "attention_mask": [1] * length, "labels": labels, "row": number}


def stub(rows: list[dict[str, object]], batch_size: int, micro_batches: int) -> SimpleNamespace:
    """What the loop's batches are made of, without a world."""

    def padded(given: list[dict[str, object]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["labels"]) for row in given)
        filled = [row["labels"] + [IGNORED_LABEL] * (longest - len(row["labels"])) for row in given]
        return {"labels": torch.tensor(filled), "row": torch.tensor([row.get("row", NO_ROW) for row in given])}

    loop = SimpleNamespace(
        run=SimpleNamespace(micro_batches=micro_batches, per_device_train_batch_size=batch_size),
        part=SimpleNamespace(
            pipeline=SimpleNamespace(micro_batches=micro_batches), inputs_for_loss=lambda batch: batch
        ),
        rank=SimpleNamespace(world_size=2),
        train_rows=rows,
        collate=padded,
        batches=EpochBatches([len(row["labels"]) for row in rows], batch_size, 1, 0, seed=1),
    )
    loop.part.fill = lambda given: Stage.fill(loop, given)
    loop.collated = loop.batch_of = lambda given: TrainingLoop.collated(loop, given)
    loop.own_batches = lambda numbers: TrainingLoop.own_batches(loop, numbers)
    return loop


@pytest.mark.parametrize(("rows", "expected"), [(1, 4), (3, 4), (4, 4), (5, 8)])
@pytest.mark.parametrize("numbered", [True, False], ids=["training", "validation"])
def test_a_batch_is_filled_up_with_rows_without_labels(rows: int, expected: int, numbered: bool) -> None:
    given = [row_of(number, 4 + number) for number in range(rows)]
    told = given if numbered else [{name: row[name] for name in row if name != "row"} for row in given]
    batch = stub(given, batch_size=8, micro_batches=4).collated(told)
    labelled = (batch["labels"][:, 1:] != IGNORED_LABEL).sum(1).tolist()
    assert labelled == [*(2 + number for number in range(rows)), *[0] * (expected - rows)]
    assert sum(labelled) == sum(map(labels_in, given))
    numbers = [row.get("row", NO_ROW) for row in told]
    assert batch["row"].tolist() == numbers + [NO_ROW] * (expected - rows)
    assert given[-1]["labels"][-1] == 7  # the row that was copied kept its labels


def test_a_step_s_rows_become_one_batch_for_each_accumulation() -> None:
    loop = stub([row_of(number, 5) for number in range(20)], batch_size=4, micro_batches=2)
    batches = loop.own_batches([3, 1, 2, 0, 9, 8, 7])
    batches = [loop.batch_of([loop.train_rows[row] for row in rows]) for rows in batches]
    assert [batch["row"].tolist() for batch in batches] == [[3, 1, 2, 0], [9, 8, 7, NO_ROW]]


@pytest.mark.parametrize(("rows", "sizes"), [(20, [8, 8]), (5, [8]), (8, [8])])
def test_fewer_rows_than_a_batch_are_measured_all_the_same(rows: int, sizes: list[int]) -> None:
    loop = stub([row_of(number, 5) for number in range(rows)], batch_size=8, micro_batches=4)
    batches = full_batches(loop, 6)
    assert [len(batch["labels"]) for batch in batches] == sizes
    assert sum(int((batch["row"] != NO_ROW).sum()) for batch in batches) == min(rows, 16)
    assert len(full_batches(loop, 1)) == 1


def test_fewer_micro_batches_than_stages_are_not_measured() -> None:
    assert measure_pipeline(stub([], batch_size=8, micro_batches=1)) is None


def test_the_clock_adds_up_passes_of_training_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 3.0, 4.0, 10.0, 20.0, 25.0])
    monkeypatch.setattr("common.training.pipeline.time.perf_counter", lambda: next(now))
    clock = PassClock("cpu")
    clock.step(lambda: [clock.timed(name, lambda: None) for name in ("forward", "backward")])
    clock.timed("forward", lambda: None)  # of validation
    assert clock.busy_and_total_s() == (3.0, 10.0)
    assert clock.last_passes() == [("forward", 0, 1.0, 3.0), ("backward", 0, 3.0, 4.0)]


def test_the_clock_of_a_long_training_keeps_its_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.training.pipeline.TIMED_STEPS", 3)
    now = iter(range(1000))
    monkeypatch.setattr("common.training.pipeline.time.perf_counter", lambda: next(now))
    clock = PassClock("cpu")
    for _ in range(10):
        clock.step(clock.timed, "forward", lambda: None)
        assert len(clock.steps) <= 3
    assert clock.busy_and_total_s() == (3, 9)  # a pass takes one tick, and a step one more before and after it
    assert len(clock.last_passes()) == 1
