"""Where a run's layers go is planned before its model loads; what cannot be placed or cannot fit is refused."""

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.checks.inputs import check_inputs
from common.data.rows import Splits
from common.data.splits import load_splits
from common.data.templates import prompt_ids
from common.hardware.devices import find_gpu
from common.models import placement
from common.models.loading import load_base_model, load_tokenizer, model_without_weights
from common.models.placement import (
    auto_map,
    check_fits,
    check_placement_and_memory,
    evaluation_of_rows,
    place_stages,
)
from common.planning import device_maps
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape, evaluation_of_run
from common.planning.plans import Plan, plan_run
from common.training.loop import plan_training

MP_UTILS = REPOSITORY / "2.5_full_finetuning_with_mp" / "run_0_cpu_x1" / "my_utils_full_finetuning_with_mp.py"
placement_table = runpy.run_path(str(MP_UTILS))["placement_table"]
BATCH = BatchShape(16, 40, 20, padded=True)
MP = RunConfig(technique="full", parallel="mp", stages=2)
PP = RunConfig(technique="full", parallel="pp", devices=2, per_device_train_batch_size=16, micro_batches=8)
ON_A5000S = literal_of(Path("2.5_full_finetuning_with_mp/run_2_a5000_24g_x4"))
ON_A6000S = literal_of(Path("2.7_full_finetuning_with_pp/run_1_a6000_48g_x2"))
GOOD = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": 0,
    "model.layers.2": 0,
    "model.layers.3": 1,
    "model.norm": 1,
    "model.rotary_emb": 0,
    "lm_head": 1,
}
TIED_TOGETHER = {**GOOD, "model.embed_tokens": 1}


@pytest.fixture
def map_file(tmp_path: Path) -> Callable[[dict[str, object]], str]:
    def write(device_map: dict[str, object]) -> str:
        (tmp_path / "map.json").write_text(json.dumps(device_map))
        return str(tmp_path / "map.json")

    return write


# -- maps that are computed


@pytest.mark.parametrize("way", ["balanced", "even"])
@pytest.mark.parametrize("run", [MP, PP], ids=["mp", "pp"])
def test_the_embedded_base_is_divided_in_two(run: RunConfig, way: str) -> None:
    placement = place_stages(replace(run, device_map=way), BATCH)
    stages, said = placement.stage_map, placement.for_record()
    assert {name for name in stages if ".layers." in name} == {f"model.layers.{n}" for n in range(4)}
    assert set(stages.values()) == {0, 1}
    assert (sum(said["layers_per_stage"]), len(said["planned_peak_gib_per_stage"])) == (4, 2)
    assert min(said["layers_per_stage"]) >= 1
    assert said["stage_map"] == stages
    # tied weights: one tensor, or a copy at each end
    assert (stages["model.embed_tokens"] == stages["lm_head"]) is (run.parallel == "mp")


def test_on_cpu_model_parallel_is_planned_as_the_one_device_that_it_is() -> None:
    placement, both = place_stages(MP, BATCH), place_stages(PP, BATCH)
    planned, alone = plan_run(MP, BATCH), plan_run(RunConfig(technique="full"), BATCH)
    assert placement.plan == planned
    assert (planned.job.parallel, len(planned.devices), len(placement.divided.devices)) == ("single", 1, 2)
    assert planned.devices[0].peak_gib == alone.devices[0].peak_gib
    assert both.plan is both.divided
    assert [share.in_flight for share in both.plan.shares] == [2, 1]


def test_each_stage_s_plan_is_that_of_its_device() -> None:
    placement = place_stages(ON_A5000S, BatchShape(5, 256, 255), find_gpu("a5000"))
    assert placement.plan is placement.divided
    assert (len(placement.plan.devices), placement.plan.fits) == (4, True)
    assert sum(placement.for_record()["layers_per_stage"]) == read_architecture(ON_A5000S.model).layers


@pytest.mark.parametrize("run", [MP, ON_A5000S], ids=["embedded, cpu", "qwen, 4 GPUs"])
def test_accelerate_s_map_is_computed_without_a_gpu(run: RunConfig) -> None:
    chosen = set(auto_map(run, (find_gpu("a5000"),) * run.stage_count).values())
    assert chosen <= set(range(run.stage_count))
    assert len(chosen) > 1
    assert all(weight.is_meta for weight in model_without_weights(run).parameters())
    placement = place_stages(replace(run, device_map="auto"), BATCH)
    assert sum(placement.for_record()["layers_per_stage"]) == read_architecture(run.model).layers


@pytest.mark.parametrize("stages", [3, 4])
def test_where_accelerate_leaves_a_device_without_layers_it_is_said(stages: int) -> None:
    run = replace(MP, stages=stages)
    with pytest.raises(BadInputError, match=f"gives device 0 of {stages} no layer of .*--device_map balanced"):
        place_stages(replace(run, device_map="auto"), BATCH)
    assert list(placement_table(run, BATCH)["Device map"]) == ["even", "balanced"]
    with pytest.raises(BadInputError, match="no layer"):
        placement_table(replace(run, device_map="auto"), BATCH)


# -- maps that users bring


def test_a_brought_map_is_followed_and_a_row_of_the_table(map_file: Callable) -> None:
    named = {name: f"cuda:{device}" for name, device in TIED_TOGETHER.items()}
    for brought in (TIED_TOGETHER, named):
        path = map_file(brought)
        placement = place_stages(replace(MP, device_map=path), BATCH)
        assert placement.stage_map == TIED_TOGETHER
        assert placement.for_record()["layers_per_stage"] == [3, 1]
    assert place_stages(MP, BATCH).stage_map != TIED_TOGETHER  # not what would be computed
    table = placement_table(replace(MP, device_map=path), BATCH)
    assert list(table["Device map"]) == ["auto", "even", "balanced", path]
    assert list(table[["Layers per device", "Embeddings, head"]].iloc[-1]) == ["3 / 1", "1, 1"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm": None}, r"no device for model\.norm\.weight"),
        ({"model.layers.3": "cuda:7"}, r"model\.layers\.3 on 'cuda:7', but the devices of this run are 0, 1"),
        ({"model.layers.3.mlp": 0}, r"tears model\.layers\.3 apart"),
        ({"model.layers.4": 1}, r"'model\.layers\.4', of which the model has no weight"),
        ({"model.layers.3": 0}, "gives device 1 of 2 no layer"),
    ],
)
@pytest.mark.parametrize("run", [MP, PP], ids=["mp", "pp"])
def test_a_wrong_map_is_refused(map_file: Callable, run: RunConfig, change: dict[str, object], said: str) -> None:
    brought = {name: device for name, device in {**TIED_TOGETHER, **change}.items() if device is not None}
    with pytest.raises(BadInputError, match=said):
        place_stages(replace(run, device_map=map_file(brought)), BATCH)


def test_a_map_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"no device map no/such\.json"):
        place_stages(replace(MP, device_map="no/such.json"), BATCH)


def test_a_pipeline_takes_wholes_copies_tied_ends_and_needs_no_rotary_positions(map_file: Callable) -> None:
    """In one process tied ends stay together."""
    with pytest.raises(BadInputError, match="they are one tied weight"):
        place_stages(replace(MP, device_map=map_file(GOOD)), BATCH)
    short = {"": 0, "model.layers.3": 1, "model.norm": 1, "lm_head": 1}
    without = {name: stage for name, stage in GOOD.items() if name != "model.rotary_emb"}
    apart = {**GOOD, "model.rotary_emb": 1}
    for brought, expected in ((GOOD, GOOD), (short, GOOD), (without, GOOD), (apart, apart)):
        placement = place_stages(replace(PP, device_map=map_file(brought)), BATCH)
        assert placement.for_record()["layers_per_stage"] == [3, 1]
        assert placement.stage_map == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.layers.0": 1, "model.layers.3": 0}, r"model\.layers\.0 on 1"),
        ({"model.layers.1": 1}, r"model\.layers\.1 on 1"),
        ({"model.embed_tokens": 1}, r"model\.embed_tokens on 1"),
        ({"model.norm": 0}, r"model\.norm on 0"),
        ({"lm_head": 0}, r"lm_head on 0"),
    ],
)
def test_stages_of_a_pipeline_follow_each_other(map_file: Callable, change: dict[str, int], named: str) -> None:
    with pytest.raises(BadInputError, match=f"{named}, but a pipeline's stages follow each other"):
        place_stages(replace(PP, device_map=map_file({**GOOD, **change})), BATCH)


# -- the spy at the stages' borders (2.5)


def spied(run: RunConfig) -> dict[str, object]:
    """What 2.5 sees of its stages."""
    utils = runpy.run_path(str(MP_UTILS))
    model = load_base_model(run, {"": "cpu"})
    seen = utils["check_stages"](SimpleNamespace(run=run), model, place_stages(run, BATCH))
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    return seen


SHORT = {"": 0, "model.embed_tokens": 1, "model.norm": 1, "lm_head": 1, "model.layers.3": 1}


@pytest.mark.parametrize(
    ("device_map", "order"),
    [
        (TIED_TOGETHER, [1, 0, 1]),
        (SHORT, [1, 0, 1]),
        ({**SHORT, "model.layers.1": 1, "model.layers.3": 0}, [1, 0, 1, 0, 1]),
        ({"model": 0, "lm_head": 0, "model.layers.2": 1}, [0, 1, 0]),
    ],
    ids=["every module", "some stand for others", "to and fro", "a layer in the middle"],
)
def test_every_stage_is_seen_in_its_order(map_file: Callable, device_map: dict[str, object], order: list[int]) -> None:
    seen = spied(replace(MP, device_map=map_file(device_map)))
    assert seen == {"stages": 2, "order": order, "logit_difference_with_hooks": 0.0}


@pytest.mark.parametrize(
    ("way", "stages"), [("auto", 2), *((way, stages) for way in ("balanced", "even") for stages in (2, 3, 4))]
)
def test_every_stage_of_a_computed_map_is_seen(way: str, stages: int) -> None:
    run = replace(MP, device_map=way, stages=stages)
    seen = set(spied(run)["order"])
    assert seen == set(place_stages(run, BATCH).stage_map.values())
    assert len(seen) == stages


@pytest.mark.parametrize("settings", [{"parallel": "mp"}, {"parallel": "pp", "schedule": "gpipe"}], ids=["mp", "pp"])
def test_rows_at_once_are_chosen_where_layers_are_placed(settings: dict[str, str]) -> None:
    gpu, batch = find_gpu("a5000"), BatchShape(1, 1024, 1023)
    run = RunConfig(model="llama-3.1-8b", devices=2, device="cuda", gpu=gpu.name, precision="bf16", **settings)
    plan = place_stages(run, batch, gpu).plan
    assert 1 <= plan.job.evaluation.rows < 32
    assert plan.job.evaluation == plan_run(run, batch, gpu).job.evaluation
    assert place_stages(replace(run, per_device_eval_batch_size=32), batch, gpu).plan.job.evaluation.rows == 32
    longer = replace(plan.job.evaluation, length=2048, prompt_length=2048)
    chosen = place_stages(run, batch, gpu, longer).plan.job.evaluation
    assert (chosen.length, chosen.rows < plan.job.evaluation.rows) == (2048, True)


# -- what cannot fit


def placed(run: RunConfig, rows: int) -> Plan:
    return place_stages(
        replace(run, per_device_train_batch_size=rows), BatchShape(rows, 256, 255), find_gpu("a6000")
    ).plan


def test_a_batch_that_cannot_fit_is_refused_with_the_one_that_would() -> None:
    with pytest.raises(BadInputError, match=r"4096 rows of 256 tokens cannot fit: device \d would need") as refused:
        check_fits(placed(ON_A6000S, 4096))
    fits = int(str(refused.value).rpartition("--batch_size ")[2].rstrip("."))
    assert 0 < fits < 4096
    assert fits % ON_A6000S.micro_batches == 0
    check_fits(placed(ON_A6000S, fits))
    with pytest.raises(BadInputError, match="cannot fit"):
        check_fits(placed(ON_A6000S, 2 * fits))


def test_a_model_that_cannot_fit_at_all_is_refused() -> None:
    run = replace(ON_A5000S, model="llama-3.1-70b")
    with pytest.raises(BadInputError, match="not even one row would fit: use more or larger devices"):
        check_fits(place_stages(run, BatchShape(5, 256, 255), find_gpu("a5000")).plan)


def test_a_search_ends_after_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    fill, rounds = device_maps._Fullness.filled, []

    def counted(*arguments: Any) -> Any:
        rounds.append(arguments)
        assert len(rounds) < 50, "it goes on although nothing gets better"
        return fill(*arguments)

    monkeypatch.setattr(device_maps._Fullness, "filled", counted)
    placed(ON_A6000S, 8)
    assert rounds


def test_a_plan_may_be_a_little_too_high() -> None:
    """A batch is refused where it cannot fit, not where it might not."""
    plan = placed(ON_A6000S, 8)
    peak_gib = max(memory.peak_gib for memory in plan.devices)
    roomy, small = (
        replace(plan, cluster=replace(plan.cluster, gpus=(replace(gpu, memory_gib=peak_gib / over),) * 2))
        for gpu, over in ((plan.cluster.gpus[0], 1.09), (plan.cluster.gpus[0], 1.11))
    )
    check_fits(roomy)
    with pytest.raises(BadInputError, match="cannot fit"):
        check_fits(small)


@pytest.mark.parametrize("run", [RunConfig(), RunConfig(technique="full"), MP, PP], ids=["lora", "full", "mp", "pp"])
def test_what_fits_passes_and_what_does_not_is_refused_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, run: RunConfig
) -> None:
    splits, tokenizer = load_splits(run), load_tokenizer(run)
    check_placement_and_memory(run, splits, tokenizer)
    check_inputs(run)
    monkeypatch.setattr("common.planning.plans.cpu_device", lambda: replace(find_gpu("a5000"), memory_gib=0.001))
    with pytest.raises(BadInputError, match="cannot fit"):
        check_placement_and_memory(run, splits, tokenizer)


@pytest.mark.parametrize(
    ("run", "batch", "why"),
    [
        (
            RunConfig(task="visual_questions", technique="lora", model="smolvlm-instruct"),
            BatchShape(2, 153, 20, task="visual_questions"),
            "a picture of 17 squares takes 17 x 81 = 1,377 tokens",
        ),
        (RunConfig(model="roberta-large", task="classification"), BatchShape(2, 513, 1, classes=2), "513 is longer"),
    ],
    ids=["a picture that is not square", "longer than the config says"],
)
def test_a_run_that_the_planner_cannot_plan_trains_without_a_plan(
    run: RunConfig, batch: BatchShape, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = evaluation_of_run(run, batch)
    for name, value in (("tokens_of", []), ("longest_batch", batch), ("evaluation_of_rows", evaluation)):
        monkeypatch.setattr(placement, name, lambda *_, value=value: value)
    checked = check_placement_and_memory(run, Splits([], [], []), None)
    assert checked == replace(run, per_device_eval_batch_size=run.rows_evaluated_at_once)
    log = SimpleNamespace(run=run, gpu=lambda: find_gpu("a6000"), rank=SimpleNamespace(is_main=True))
    assert plan_training(log, batch, evaluation) is None
    said = capsys.readouterr().out
    assert said.startswith("no plan: ")
    assert why in said


def test_answers_are_planned_by_the_rows_of_the_test() -> None:
    run = RunConfig(technique="full")
    splits, tokenizer = load_splits(run), load_tokenizer(run)
    long = [{"input_ids": [1] * 500, "labels": [1] * 500}]
    shape = evaluation_of_rows(run, long, splits.test, tokenizer)
    prompts = [len(ids) for ids in prompt_ids(splits.test, tokenizer)]
    assert (shape.length, shape.prompt_length, shape.labelled) == (500, max(prompts), 499)
    assert 0 < shape.judged_length < max(prompts)
    untested = evaluation_of_rows(run, long)
    assert (untested.prompt_length, untested.judged_length) == (500, 499)


def test_ranks_that_share_rows_validate_them_packed() -> None:
    run = RunConfig(technique="full", parallel="ddp", devices=2, sp_size=2, padding_free="yes")
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in (90, 30)]
    shape = evaluation_of_rows(replace(run, per_device_eval_batch_size=2), rows)
    assert (shape.length, shape.prompt_length, shape.compared_length) == (60, 90, 90)


def test_fewer_rows_than_a_batch_are_filled_up_in_a_pipeline() -> None:
    """As training fills them up: 33 rows in 8 micro-batches are 40."""
    run = replace(PP, per_device_train_batch_size=64, micro_batches=8)
    splits = load_splits(run)
    assert place_stages(run, BatchShape(33, 64, 63)).plan.job.batch.rows == 40
    check_placement_and_memory(run, replace(splits, train=splits.train[:33]), load_tokenizer(run))


# -- ways side by side


@pytest.mark.parametrize(
    ("run", "batch", "gpu"),
    [
        (ON_A5000S, BatchShape(5, 256, 255), "a5000"),
        (ON_A6000S, BatchShape(8, 256, 255), "a6000"),
        (replace(ON_A5000S, model="llama-3.2-1b"), BatchShape(8, 512, 511), "a5000"),
    ],
    ids=["mp, 4 GPUs", "pp, 2 GPUs", "mp, tied"],
)
def test_the_balanced_map_is_never_fuller_than_others(run: RunConfig, batch: BatchShape, gpu: str) -> None:
    table = placement_table(run, batch, find_gpu(gpu)).set_index("Device map")
    assert list(table.index) == (["auto", "even", "balanced"] if run.parallel == "mp" else ["even", "balanced"])
    highest, largest = table["Highest (GiB)"].astype(float), table["Largest batch"].astype(int)
    assert highest["balanced"] <= highest.min() * 1.003  # the search ends 0.2 % above the best
    assert (highest > highest["balanced"]).any() or run.parallel == "pp"  # 14 and 14 layers are best there
    assert (largest <= largest["balanced"]).all()
    for _, row in table.iterrows():
        assert sum(map(int, row["Layers per device"].split(" / "))) == read_architecture(run.model).layers
        assert len(row["Peak per device (GiB)"].split(" / ")) == run.devices


@pytest.mark.parametrize("way", ["balanced", "even"])
def test_the_largest_batch_fits_and_the_next_does_not(way: str) -> None:
    run = replace(ON_A6000S, device_map=way)
    largest = placed(run, 8).max_batch_size
    assert largest % run.micro_batches == 0
    assert (placed(run, largest).fits, placed(run, largest + run.micro_batches).fits) == (True, False)
    table = placement_table(run, BatchShape(8, 256, 255), find_gpu("a6000")).set_index("Device map")
    assert table["Largest batch"][way] == str(largest)
