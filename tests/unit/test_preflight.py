"""A preflight tries the run's own step on the longest batch, says what it measured, and stops what cannot pass."""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import GPTNeoXConfig

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TASKS, Parallelism
from common.checks import measured_steps, preflight, tried_rows
from common.checks.dry_run import report
from common.checks.folder_runs import run_of_folder
from common.checks.folder_training import device_map_of_rank, folder_for, tried_by_folder, workflow_of
from common.checks.inputs import check_settings
from common.checks.measured_steps import Measured, measure_all
from common.checks.preflight import main
from common.checks.tried_rows import Rows
from common.data.batches import EpochBatches, longest_batch
from common.data.rows import tokens_in
from common.data.splits import load_splits, tokens_of
from common.hardware.devices import cpu_device
from common.hardware.prices import usual_price
from common.models.loading import load_base_model, load_tokenizer
from common.models.placement import Placement
from common.planning.job import BatchShape
from common.planning.plans import Plan, plan_run
from common.runtime.rank import rank_started
from common.runtime.recorder import Trial
from common.runtime.world import Rank
from tests.forked import run_forked

SINGLE, DDP = "2.1_lora_finetuning/run_0_cpu_x1", "2.2_lora_finetuning_with_ddp/run_0_cpu_x2"
FULL, MP = "2.4_full_finetuning/run_0_cpu_x1", "2.5_full_finetuning_with_mp/run_0_cpu_x1"
QLORA = "2.3_qlora_finetuning/run_0_cpu_x1"
FSDP = "2.6_full_finetuning_with_fsdp/run_0_cpu_x2"
PP = "2.7_full_finetuning_with_pp/run_0_cpu_x2"
CLASSIFICATION = "3.1_text_classification/run_0_cpu_x2"
SUMMARIZATION = "3.2_summarization/run_0_cpu_x2"
PREFERENCES = "3.4_preference_tuning/run_0_cpu_x1"
UNPLACED = Placement({}, ())
MEASURED = Measured(0, "cpu", 0.5, 0.6, 0.6, 0.6, 20.0, 0.25, 0.1, 0.1, 0.0)


@pytest.fixture
def run(run_config: RunConfig) -> RunConfig:
    return replace(run_config, weights="random")


@pytest.fixture
def plan(run: RunConfig) -> Plan:
    return plan_run(run, batch_of_tokens(run, 64))


@pytest.fixture
def unknown_model(tmp_path: Path) -> str:
    """The folder of a tiny model of a kind that the planner does not know."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = GPTNeoXConfig(**shape, vocab_size=1536, architectures=["GPTNeoXForCausalLM"])
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def own_environment() -> Iterator[None]:
    """What a run leaves in the environment goes."""
    with mock.patch.dict(os.environ):
        yield


def batch_of_tokens(run: RunConfig, tokens: int) -> BatchShape:
    return longest_batch(tried_rows.rows_of_length(run, tokens).train, run.per_device_train_batch_size, run)


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code


def sentence_of_refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said on stderr, the only thing that is said."""
    code, said = exit_code(*arguments), capsys.readouterr()
    assert (code, said.out, len(said.err.splitlines())) == (2, "", 1)
    return said.err


def lacking(output: str, *said: str) -> list[str]:
    return [each for each in said if each not in output]


def files_of(folder: Path) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in folder.rglob("*") if "__pycache__" not in path.parts}


def preflight_process(tmp_path: Path, *arguments: str) -> str:
    """The output of a preflight that passed, started in an empty folder; it leaves nothing anywhere."""
    folder, work, temporary = REPOSITORY / arguments[0], tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    before, log = files_of(folder), tmp_path / "preflight.log"
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "common.preflight", *arguments]
    exit_code = run_forked(command, work, environment, log, timeout=300)
    output = log.read_text(errors="replace")
    assert exit_code == 0, output
    assert (files_of(folder), [*work.iterdir()], [*temporary.glob("preflight-*")]) == (before, [], [])
    assert output.splitlines()[-1].startswith("passed: ")
    return output


# -- as a process


def test_one_device_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    output = preflight_process(tmp_path, SINGLE)
    phases = ("build model", "3 steps on the longest batch", "validation of one batch", "save and reload")
    assert lacking(output, *(f"[RANK0:CPU] {phase} ..." for phase in phases)) == []
    steps = "312 steps"  # 819 rows by 16, six times
    said = ("planned for CPU, 1 thread: ", "step time: measured ", "training time: projected ", steps,
            "cost: no price", "largest batch: projected 4,096 or more rows")  # fmt: skip
    assert lacking(output, *said) == []


def ranks_and_devices(output: str) -> list[list[str]]:
    """Of the table's rows."""
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in output.splitlines() if line.startswith("│")]
    return [row for row in rows if row[0].isdecimal()]


TWO_RANKS = [["0", "cpu"], ["1", "cpu"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "settings", "said"),
    [
        # 819 rows by 2 x 8 x 2, six times
        (DDP, "--gradient_accumulation_steps 2", {"156 steps": 1, "planned for": 1, "[RANK1": 0}),
        # 819 rows by 64, six times: both stages work on the same rows
        (PP, "", {"layers on each stage: 2, 2": 1, "GiB on the fullest device": 1, "78 steps": 1,
                  "4,096 or more rows, by the plan": 1}),
        (PP, "--technique lora --gradient_checkpointing --schedule gpipe --gradient_accumulation_steps 2 "
             "--batch_size 32",
         {"tries lora of assets/embedded_base with pp on 2 x cpu: 32 rows": 1, "78 steps": 1}),
        (FSDP, "", {"gathered one at a time: 4 x LlamaDecoderLayer": 1}),
        (SUMMARIZATION, "--batch_size 4 --per_device_eval_batch_size 4",
         {"tries full of assets/embedded_summarizer with ddp on 2 x cpu: 4 rows of up to 1": 1}),
    ],
    ids=["ddp", "pp", "adapters, pp", "fsdp", "summarizer"],
)  # fmt: skip
def test_two_ranks_pass_and_each_has_its_row(folder: str, settings: str, said: dict[str, int], tmp_path: Path) -> None:
    output = preflight_process(tmp_path, folder, *settings.split())
    assert ranks_and_devices(output) == TWO_RANKS
    assert {text: output.count(text) for text in said} == said


EXACT = "passed: trained, validated, saved, reloaded and answered; logits measured 0.0e+00 apart"


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    ("folder", "settings", "rows", "said"),
    [
        pytest.param(QLORA, "--quantization nf4", 2, ["tries qlora of assets/embedded_base", EXACT],
                     marks=pytest.mark.slow),
        (QLORA, "--quantization nf4-double", 2, ["tries qlora of assets/embedded_base", EXACT]),
        (FULL, "", 2, ["tries full of assets/embedded_base"]),
        (MP, "", 2, ["tries full of assets/embedded_base"]),  # on CPU one device holds all stages
        *(
            pytest.param(CLASSIFICATION, f"--technique {technique} --parallel single", 4,
             [f"tries {technique} of all-minilm-l6-v2 with single on 1 x cpu: 4 rows of up to 16 tokens"], marks=marks)
            for technique, marks in (("full", pytest.mark.slow), ("lora", ()))
        ),
        *(
            pytest.param(PREFERENCES, f"--technique {technique}", 2,
             [f"tries {technique} of assets/embedded_labeller with single on 1 x cpu: 2 rows of up to 16 tokens"],
             marks=marks)
            for technique, marks in (("full", ()), ("lora", pytest.mark.slow))
        ),
        (SUMMARIZATION, "--parallel single --devices 1 --max_target_length 24", 4,
         ["with single on 1 x cpu: 4 rows of up to 16 tokens with summaries of up to 24 (by --seq-len"]),
    ],
    ids=["nf4", "nf4-double", "full", "mp", "classifier", "classifier, lora", "pairs", "pairs, lora", "summarizer"],
)  # fmt: skip
def test_rows_of_a_length_pass_on_one_device(
    folder: str, settings: str, rows: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    batches = ("--batch_size", f"{rows}", "--per_device_eval_batch_size", f"{rows}")
    assert exit_code(folder, "--seq-len", "16", *batches, *settings.split()) == 0
    output = capsys.readouterr().out
    assert lacking(output, *said) == []
    assert ranks_and_devices(output) == [["0", "cpu"]]
    assert output.splitlines()[-1].startswith("passed: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("technique", "parallel"), [("lora", "ddp"), ("full", "tp"), ("lora", "tp"), ("full", "pp"), ("lora", "pp")]
)
def test_classifiers_pass_on_two_ranks(technique: str, parallel: str, tmp_path: Path, encoders: dict[str, str]) -> None:
    """MiniLM once, and a tiny encoder."""
    model = "all-minilm-l6-v2" if (technique, parallel) == ("full", "tp") else encoders["bert"]
    asked = ("--technique", technique, "--parallel", parallel, "--model", model)
    batches = ("--batch_size", "8", "--per_device_eval_batch_size", "8")
    output = preflight_process(tmp_path, CLASSIFICATION, *asked, *batches)
    assert f"tries {technique} of {model} with {parallel} on 2 x cpu: 8 rows" in output
    assert ranks_and_devices(output) == TWO_RANKS


def test_pairs_of_a_length_have_two_answers_as_long_as_the_shape_says() -> None:
    run = RunConfig(task="preferences", technique="full", per_device_train_batch_size=3)
    rows, shape = tried_rows.rows_of_length(run, 20), tried_rows.batch_of_length(run, 20)
    pair, batch = rows.train[0], tried_rows.batch_of(run, rows)
    assert [len(pair[part]) for part in ("input_ids", "rejected_ids", "labels")] == [20] * 3
    are_equal = [one == other for one, other in zip(pair["input_ids"], pair["rejected_ids"], strict=True)]
    assert are_equal == [True] + [False] * 19  # the first token is their prompt
    assert (len(rows.train), batch.length, batch.labelled) == (3, 20, 19)
    assert (batch.rows, batch.length, batch.labelled) == (shape.rows, shape.length, shape.labelled)


def test_the_longest_texts_are_tried_with_the_longest_summaries() -> None:
    rows = [
        {"input_ids": [5] * text, "attention_mask": [1] * text, "labels": [6] * summary}
        for text, summary in ((9, 3), (40, 4), (30, 12), (7, 5))
    ]
    tried = tried_rows.longest_rows(rows, 2, "summarization")
    assert [(len(row["input_ids"]), len(row["labels"])) for row in tried] == [(40, 12), (30, 5)]
    run = RunConfig(task="summarization", technique="full")
    assert longest_batch(tried, 2, run) == longest_batch(rows, 2, run)
    assert tried_rows.longest_rows(rows, 2, "chat") == [rows[1], rows[2]]


# -- refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such/folder"], "no/such/folder is no run folder"),
        ([SINGLE, "--batch_size", "0"], "per_device_train_batch_size is 0"),
        ([SINGLE, "--data", "no/such/data"], "no/such/data"),
        ([SINGLE, "--model", "nobody/no-such-model"], "There is no shape of nobody/no-such-model"),
        ([SINGLE, "--max_length", "4"], "no token to learn within its first 4 tokens"),
        ([SINGLE, "--seq-len", "1"], "--seq-len is 1, but must be at least 2"),
        ([SINGLE, "--seq-len", "513"], "--seq-len is 513, but assets/embedded_base reads 512"),
        ([SINGLE, "--target_modules", "no_proj"], "target_modules has 'no_proj', but no linear layer"),
        (
            [CLASSIFICATION, "--parallel", "single", "--seq-len", "600"],
            "--seq-len is 600, but all-minilm-l6-v2 reads 512",
        ),
        ([CLASSIFICATION, "--parallel", "tp", "--devices", "5"], "num_attention_heads is 12"),
        ([CLASSIFICATION, "--label_column", "kind", "--seq-len", "16"], "no column 'kind'"),
        ([DDP, "--seq-len", "32", "--json", "no/such/folder/x.json"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "measure_all", lambda *_: pytest.fail("was started"))
    refusal = sentence_of_refusal(capsys, *arguments)
    assert refusal.startswith("error: ")
    assert said in refusal


def test_a_row_cut_by_another_models_tokenizer_has_a_way_out(run: RunConfig) -> None:
    with pytest.raises(BadInputError, match=r"or, as these are tokens of the embedded tokenizer.*pass --seq-len 4\.$"):
        tried_rows.rows_of_run(replace(run, model="llama-3.2-1b", max_length=4))


def test_what_does_not_fit_is_not_tried_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = mock.Mock(return_value=[MEASURED])
    monkeypatch.setattr(preflight, "measure_all", tried)
    monkeypatch.setattr(preflight, "cpu_device", lambda *_: replace(cpu_device(), memory_gib=0.6))
    assert (exit_code(SINGLE, "--batch_size", "64"), tried.call_count) == (1, 0)
    assert lacking(capsys.readouterr().out, "does not fit", "would fit") == []
    assert (exit_code(SINGLE, "--batch_size", "64", "--anyway"), tried.call_count) == (0, 1)


@pytest.mark.parametrize("folder", [SINGLE, FULL, MP, PP])
def test_a_shape_too_large_for_any_machine_does_not_fit(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", "llama-3.1-70b", "--batch_size", "8", "--per_device_eval_batch_size", "8", "--seq-len", "8192")
    assert exit_code(folder, *asked) == 1
    assert "not even one row would fit" in capsys.readouterr().out


def test_layers_that_the_planner_cannot_place_are_refused(
    unknown_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = sentence_of_refusal(capsys, PP, "--model", unknown_model, "--seq-len", "16", "--learning_rate", "1e-3")
    assert said.startswith("error: Layers are placed by their planned memory, but")
    assert "gpt_neox" in said


def register(monkeypatch: pytest.MonkeyPatch, **way: object) -> None:
    """A task and a parallelism that nothing here names: their specs say what they need."""
    monkeypatch.setitem(TASKS, "new", replace(TASKS["chat"], name="new", parallelisms=("single", "mine")))
    monkeypatch.setitem(PARALLELISMS, "mine", Parallelism("mine", "mine", "it is new", **way))


OF_THEM = {"task": "new", "parallel": "mine", "devices": 2, "run_folder": "", "gradient_checkpointing": False}


def test_what_is_registered_later_passes(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, splits_rows=True)
    asked = check_settings(run.changed_to(**OF_THEM))
    rows = tried_rows.rows_of_run(asked)
    placement, no_plan = preflight.place_and_plan(asked, tried_rows.batch_of(asked, rows))
    assert "with mine on 2 x cpu: 16 rows" in preflight.announcement(asked, rows, placement.plan, no_plan)
    assert "16 rows of 39 tokens" in report(asked, *tried_rows.batch_of_run(asked))


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (
            {"splits_rows": True, "shards": frozenset({"weights"}), "sharded_by": "Megatron"},
            "mine, which can be planned, but not trained with",
        ),
        ({"splits_matrices": True}, "names no part"),
    ],
)
def test_what_is_registered_later_without_a_part_of_its_own_is_refused(
    way: dict[str, object], said: str, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, **way)
    with pytest.raises(BadInputError, match=said):
        check_settings(run.changed_to(**OF_THEM))


# -- what is tried


PAIRS = {"task": "preferences", "technique": "full", "model": "assets/embedded_labeller", "data": "assets/preferences"}


@pytest.mark.parametrize(("settings", "count"), [({}, 819), (PAIRS, 1600)], ids=["chat", "preferences"])
def test_the_rows_are_the_longest_of_the_data_in_the_models_own_tokens(settings: dict[str, str], count: int) -> None:
    run = RunConfig(weights="random", **settings)
    rows, every = tried_rows.rows_of_run(run), tokens_of(load_splits(run).train, load_tokenizer(run), run)
    lengths = sorted(map(tokens_in, every), reverse=True)
    assert [*map(tokens_in, rows.train)] == lengths[: run.per_device_train_batch_size]
    assert lengths[0] > lengths[-1]
    assert (len(rows.validation), rows.count) == (32, count)
    assert "embedded tokenizer" not in rows.source


def test_rows_of_a_length_have_no_padding_in_them(run: RunConfig) -> None:
    tokenizer, long = load_tokenizer(run), replace(run, model="llama-3.2-1b", weights="random")
    ids = tried_rows.rows_of_length(long, tokenizer.vocab_size).train[0]["input_ids"]
    assert (len(ids), set(ids) & set(tokenizer.all_special_ids)) == (tokenizer.vocab_size, set())


def test_rows_of_a_length_are_learnt_as_a_whole_and_need_no_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: RunConfig
) -> None:
    batch = batch_of_tokens(run, 100)
    assert (batch.rows, batch.length, batch.labelled, batch.padded) == (16, 100, 99, False)
    monkeypatch.setattr(preflight, "measure_all", lambda *_: [MEASURED])
    asked = (SINGLE, "--seq-len", "100", "--data", "no/such/data")
    assert exit_code(*asked) == 0
    assert "not known without the number of rows" in capsys.readouterr().out
    assert exit_code(*asked, "--train_rows", "160", "--num_train_epochs", "1") == 0
    assert "training time: projected 0:00:02 for 10 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "batch_size", "devices", "accumulated"), [(819, 16, 1, 1), (819, 8, 2, 3), (5, 8, 2, 4)]
)
def test_steps_are_those_that_the_run_takes(
    run: RunConfig, rows: int, batch_size: int, devices: int, accumulated: int
) -> None:
    asked = replace(run, parallel="ddp", gradient_checkpointing=False, devices=devices, num_train_epochs=3,
                    per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulated)  # fmt: skip
    epoch = EpochBatches([1] * rows, batch_size, devices, 0, 0, accumulated)
    assert preflight.total_steps(asked, rows) == 3 * len(list(epoch.steps()))
    assert preflight.total_steps(replace(asked, max_steps=7), None) == 7
    assert preflight.total_steps(asked, None) is None


def test_the_stages_of_a_pipeline_share_their_steps(run: RunConfig) -> None:
    asked = replace(run, parallel="pp", devices=2, per_device_train_batch_size=64, micro_batches=8, num_train_epochs=6)
    assert preflight.total_steps(asked, 819) == 6 * 13


def test_ranks_on_one_cpu_share_its_memory(run: RunConfig) -> None:
    four = preflight.device_of(replace(run, parallel="ddp", devices=4))
    assert four.memory_gib == pytest.approx(cpu_device().memory_gib / 4)


def test_the_gpu_at_hand_is_planned_for_before_the_folders(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = replace(run, device="cuda", gpu="RTX A6000 48GB")
    monkeypatch.setattr(preflight, "gpus", lambda: ("", ["NVIDIA H200"]))
    assert preflight.device_of(on_gpu).name == "H200 141GB SXM"
    monkeypatch.setattr(preflight, "gpus", lambda: ("", ["NVIDIA Unheard Of"]))
    assert preflight.device_of(on_gpu).name == "RTX A6000 48GB"
    assert preflight.device_of(replace(on_gpu, gpu="")) is None
    placement, no_plan = preflight.place_and_plan(replace(on_gpu, gpu=""), batch_of_tokens(run, 64))
    assert placement == UNPLACED
    assert "NVIDIA Unheard Of" in no_plan


def test_several_ranks_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    started = mock.Mock(side_effect=SystemExit(0))
    monkeypatch.setattr("os.execv", started)
    assert exit_code(DDP, "--batch_size", "4") == 0
    command = " ".join(started.call_args.args[1])
    assert "--nproc_per_node 2 " in command
    assert command.endswith(f"-m common.preflight {DDP} --batch_size 4")


def test_a_whole_model_loads_by_the_stages_where_a_rank_has_several_devices(run: RunConfig) -> None:
    stage_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": 1}
    divided = Rank(0, 1, "cuda:0", "python", ("cuda:1",))
    placement = Placement(stage_map, (1, 1))
    assert device_map_of_rank(placement, divided) == stage_map
    assert device_map_of_rank(placement, Rank(1, 2, "cuda:1", "torchrun")) is None


# -- on the device, in this process


@pytest.mark.usefixtures("own_environment")
def test_every_micro_batch_is_the_longest_one_and_a_wrong_reload_is_found(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(run, per_device_train_batch_size=4, per_device_eval_batch_size=4, gradient_accumulation_steps=2)
    rows = tried_rows.rows_of_run(asked)
    with rank_started(asked) as rank:
        loop = tried_by_folder(Trial(replace(asked, max_steps=measured_steps.STEPS), rank, tmp_path), rows)
        assert loop.state.global_step == measured_steps.STEPS
        assert loop.work.rows == [0, 1, 2, 3] * 2 * measured_steps.STEPS
        assert any(weight.any() for name, weight in loop.model.named_parameters() if "lora_B" in name)
        load = measured_steps.load_answering

        def load_another(run: RunConfig, rank: Rank, **about: object) -> torch.nn.Module:
            return load(replace(run, seed=1), rank, **about)

        monkeypatch.setattr(measured_steps, "load_answering", load_another)
        with pytest.raises(RuntimeError, match="what was saved is not what was trained"):
            measured_steps.save_and_reload(loop, UNPLACED, tmp_path)


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(("parallel", "own"), [("fsdp", "fsdp"), ("ddp", "ddp"), ("zero3", "zero")])
def test_what_is_measured_is_the_folders_own_loop(
    parallel: str, own: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 2.6, which has three; any other path would train."""
    asked = run_of_folder(Path(FSDP), ["--parallel", parallel])
    for loop in ("fsdp", "ddp", "zero"):
        monkeypatch.setattr(workflow_of(asked), f"train_with_{loop}", mock.Mock(side_effect=InterruptedError(loop)))
    with pytest.raises(InterruptedError, match=own):
        measured_steps.measure(
            asked, tried_rows.rows_of_length(asked, 16), UNPLACED, Rank(0, 2, "cpu", "torchrun"), tmp_path
        )


@pytest.mark.parametrize(("technique", "parallel", "folder"), [("lora", "ddp", DDP), ("full", "ddp", FSDP),
                                                               ("full", "single", FULL)])  # fmt: skip
def test_a_run_without_a_folder_is_trained_by_the_folder_of_its_kind(
    technique: str, parallel: str, folder: str
) -> None:
    devices = 1 if parallel == "single" else 2
    assert folder_for(RunConfig(technique=technique, parallel=parallel, devices=devices)) == REPOSITORY / folder


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(("test_rows", "by_base", "by_minilm"), [(-1, 8, 4), (6, 6, 3)])
def test_as_many_rows_are_answered_and_judged_as_in_the_largest_batch_of_the_run(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, test_rows: int, by_base: int, by_minilm: int
) -> None:
    """Two ranks that share the base answer together; each has MiniLM for itself."""
    asked = replace(
        run, parallel="fsdp", devices=2, per_device_eval_batch_size=4, test_rows=test_rows, max_new_tokens=1
    )
    rows, judged = tried_rows.rows_of_length(asked, 16), {}
    minilm = SimpleNamespace(judge=lambda texts, numbers: judged.update(minilm=len(numbers)))
    monkeypatch.setattr(measured_steps, "independent_judges", lambda *_: [minilm])
    monkeypatch.setattr(measured_steps, "load_answering", lambda *_, **about: load_base_model(run, {"": "cpu"}))
    monkeypatch.setattr(measured_steps.Judge, "judge", lambda judge, texts, numbers: judged.update(base=len(numbers)))
    measured_steps.answer_one_batch(asked, rows, UNPLACED, Rank(0, 2, "cpu", "torchrun"))
    assert judged == {"base": by_base, "minilm": by_minilm}


@pytest.mark.usefixtures("own_environment")
def test_a_whole_model_of_an_unknown_kind_is_measured_without_a_plan(run: RunConfig, unknown_model: str) -> None:
    small = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    asked = replace(run, technique="full", run_folder="", model=unknown_model, **small)
    rows = tried_rows.rows_of_length(asked, 16)
    placement, no_plan = preflight.place_and_plan(asked, tried_rows.batch_of(asked, rows))
    assert placement == UNPLACED
    assert "gpt_neox" in preflight.announcement(asked, rows, None, no_plan)
    said = preflight.report(asked, rows, None, measure_all(asked, rows, placement))
    assert lacking(said, "no plan", "passed: ") == []


@pytest.mark.parametrize(("number", "out"), [(0, "steps ...\n"), (1, "")])
def test_out_of_memory_is_one_sentence_and_exit_code_1(
    number: int, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured_steps, "SPEAK_FIRST_S", 0.0)
    rank = Rank(number, 2, "cpu", "torchrun")
    with pytest.raises(SystemExit, match=r"^1$"), measured_steps.phase("steps", rank, "try less"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    said = capsys.readouterr()
    assert said.out == out
    assert re.fullmatch(r"error: steps: out of memory on cpu, .*; try less\.\n", said.err)


def test_after_out_of_memory_a_smaller_batch_of_the_same_rows_is_named(run: RunConfig, plan: Plan) -> None:
    assert "try --batch_size 8 --gradient_accumulation_steps 2" in measured_steps.smaller_batch(run, 16, plan)
    small = replace(cpu_device(), memory_gib=plan.devices[0].peak_gib - 0.01)
    tight = replace(plan, cluster=replace(plan.cluster, gpus=(small,)))
    assert 0 < tight.max_batch_size < 16
    assert f"try --batch_size {tight.max_batch_size} " in measured_steps.smaller_batch(run, 16, tight)
    assert "not even one row fits" in measured_steps.smaller_batch(run, 1, plan)
    staged = replace(run, parallel="pp", devices=2, micro_batches=8, per_device_train_batch_size=24)
    assert "try --batch_size 8 --gradient_accumulation_steps 3" in measured_steps.smaller_batch(staged, 24, None)


# -- what is said


def test_the_first_step_is_not_timed() -> None:
    clock = measured_steps.StepClock(("cpu",))
    clock.ends_s = [100.0, 101.0, 104.0]
    assert clock.step_time_s == 2.0


def test_the_largest_batch_is_corrected_by_what_was_measured(plan: Plan) -> None:
    planned = plan.devices[0].peak_gib
    as_planned = replace(MEASURED, peak_gib=planned, capacity_gib=2 * planned)
    rows, factor = preflight.largest_batch(plan, [as_planned])
    fewer, larger = preflight.largest_batch(plan, [replace(as_planned, peak_gib=1.5 * planned)])
    assert (factor, larger) == (1.0, pytest.approx(1.5))
    assert 16 < fewer < rows


def test_what_was_measured_is_said_against_the_plan(run: RunConfig, plan: Plan) -> None:
    planned, measured_s = plan.devices[0].peak_gib, plan.time.total_s
    table = preflight.memory_table(plan, [replace(MEASURED, peak_gib=1.5 * planned)])
    assert lacking(table, f" {planned:.2f} ", f" {1.5 * planned:.2f} ", " +50% ", " 20.0 ") == []
    asked = replace(run, gradient_accumulation_steps=2)
    step, training, cost = preflight.time_lines(asked, Rows([], [], 160, ""), plan, measured_s)
    assert f"measured {measured_s:.3g} s, planned {2 * measured_s:.3g} s (-50%)" in step
    assert "30 steps" in training
    assert cost == "cost: no price"


def test_what_was_measured_is_kept_as_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [MEASURED, replace(MEASURED, rank=1, peak_gib=0.7, step_time_s=0.5, validation_peak_gib=0.4)]
    monkeypatch.setattr(preflight, "measure_all", lambda *_: ranks)
    monkeypatch.setattr(preflight, "detect_launcher", lambda: "torchrun")
    path, own_data = tmp_path / "figures.json", str(tmp_path / "mine.jsonl")
    assert exit_code(DDP, "--seq-len", "32", "--json", str(path), "--data", own_data) == 0
    figures = json.loads(path.read_text())
    expected = {
        "rows": 8,
        "tokens": 32,
        "step_time_s": 0.5,  # of the slowest
        "validation_peak_gib": 0.6,  # of the fullest
    }
    assert {name: figures[name] for name in expected} == expected
    assert [device["peak_gib"] for device in figures["devices"]] == [0.5, 0.7]
    assert figures["settings"]["data"] == "mine.jsonl"
    planned = [f" {device['planned_gib']:.2f} " for device in figures["devices"]]
    assert lacking(capsys.readouterr().out, *planned, f"planned {figures['planned_step_time_s']:.3g} s") == []


def test_each_device_of_a_divided_model_has_its_plan(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpus", lambda: ("", ["NVIDIA RTX A6000"] * 2))
    asked = replace(run, device="cuda", parallel="mp", devices=2, model="llama-3.1-8b", device_map="even")
    placement, _ = preflight.place_and_plan(asked, batch_of_tokens(asked, 64))
    stage_map, plan = placement.stage_map, placement.plan
    planned = [memory.allocated_gib for memory in plan.devices]
    measured = [
        replace(MEASURED, device=f"cuda:{number}", peak_gib=times * planned[number])
        for number, times in enumerate((1.5, 1.0))
    ]
    table = preflight.memory_table(plan, measured)
    assert (set(stage_map.values()), len(set(planned))) == ({0, 1}, 2)
    assert ranks_and_devices(table) == [["0", "cuda:0"], ["0", "cuda:1"]]
    assert lacking(table, *(f" {gib:.2f} " for gib in planned)) == []
    assert preflight.largest_batch(plan, measured)[1] == pytest.approx(1.5)


def test_rent_is_of_all_gpus(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpus", lambda: ("", ["NVIDIA RTX A6000"] * 2))
    asked = replace(run, device="cuda", parallel="ddp", devices=2, max_steps=100)
    price = usual_price(preflight.device_of(asked)).usd_per_hour
    *_, cost = preflight.time_lines(asked, Rows([], [], None, ""), None, 36.0)
    assert cost.startswith(f"cost: projected {2 * price:.2f} USD")


def test_memory_of_a_gpu_is_compared_without_its_overhead(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpus", lambda: ("", ["NVIDIA RTX A6000"]))
    asked = replace(run, device="cuda")
    plan = plan_run(asked, batch_of_tokens(asked, 64), preflight.device_of(asked))
    assert preflight.planned_gib(plan, 0) == plan.devices[0].allocated_gib < plan.devices[0].peak_gib
