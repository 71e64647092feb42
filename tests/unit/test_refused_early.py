"""What config.json, the tokenizer and the settings tell is refused, or done, before a model loads."""

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from common.base.errors import BadInputError, shortened
from common.base.parsing import parse_overrides
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks import measured_steps, planner_command, preflight
from common.checks.inputs import (
    check_optimizer,
    check_rows_readable,
    check_schedule,
    check_settings,
    check_trackers,
    check_training_rows,
    tokens_without_embedding,
)
from common.data import stored_rows
from common.data.batches import longest_first
from common.data.rows import Splits
from common.data.stored_rows import RowsOnDisk, stored
from common.data.texts import say_balance, with_classes
from common.models.families import check_targets, suited_to_model
from common.models.loading import EMBEDDED_BASE, checked_config, load_tokenizer, longest_readable
from common.models.placement import check_stages_train
from common.models.trained_weights import layers_called
from common.planning.architectures import read_architecture
from common.planning.model_configs import MODEL_CONFIGS, find_config, reach_of_positions
from common.tasks.answers import Judge
from common.training.loop import TrainingLoop
from common.training.part import part_class

CLASSIFIER = REPOSITORY / "3.1_text_classification" / "run_0_cpu_x2"
RUN = RunConfig(independent_judge="none", report_to="none")
PIPELINE = {"technique": "full", "parallel": "pp", "devices": 2, "micro_batches": 2}
REPLICAS = {"technique": "lora", "parallel": "ddp", "devices": 2}
GPT2 = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
PREQUANTIZED = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "awq", "bits": 4, "version": "gemm"},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"load_in_8bit": True},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "compressed-tensors", "config_groups": {}},
    {"quant_method": "mxfp4"},
]


@pytest.fixture
def embedded(tmp_path: Path) -> Callable[..., str]:
    """The embedded base in a folder of its own, with another config.json."""

    def made(**changes: object) -> str:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for file in EMBEDDED_BASE.iterdir():
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).symlink_to(file)
        config = json.loads((EMBEDDED_BASE / "config.json").read_text()) | changes
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return made


def refusal(do: Callable[..., object], *given: object) -> str:
    """The sentence that refuses, or nothing."""
    try:
        do(*given)
    except BadInputError as refused:
        return str(refused)
    return ""


# -- quantized bases


@pytest.mark.parametrize("stored", PREQUANTIZED, ids=str)
def test_a_base_that_is_stored_quantized_is_refused_by_all_in_the_same_words(
    stored: object, embedded: Callable[..., str]
) -> None:
    model = embedded(quantization_config=stored)
    said = refusal(read_architecture, model)
    assert "stored quantized" in said
    assert "--model" in said
    for technique in ("lora", "qlora", "full"):
        for weights in ("pretrained", "random"):
            assert refusal(checked_config, RUN.changed_to(technique=technique, model=model, weights=weights)) == said


def test_a_quantized_text_part_counts_and_an_empty_note_does_not(embedded: Callable[..., str]) -> None:
    assert refusal(read_architecture, embedded(text_config={"quantization_config": {"quant_method": "fp8"}}))
    for nothing in (None, {}):
        assert checked_config(replace(RUN, model=embedded(quantization_config=nothing)))


# -- positions


@pytest.mark.parametrize(
    ("rope", "reached"),
    [
        (None, 512),
        ({"rope_type": "default", "rope_theta": 1e4}, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 512),
        (
            {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}},
            1024,
        ),
    ],
)
def test_a_factor_stretches_rotary_positions(rope: dict | None, reached: int, embedded: Callable[..., str]) -> None:
    assert reach_of_positions("llama", 512, rope) == reached
    if rope and "type" in rope:
        model = embedded(rope_scaling={**rope, "rope_theta": 1e4}, rope_parameters=None)
        assert longest_readable(checked_config(replace(RUN, model=model))) == reached
        assert read_architecture(model).max_length == reached


@pytest.mark.parametrize("task", ["chat", "preferences"])
def test_rows_and_answers_have_no_more_tokens_than_a_model_that_chats_has_positions(task: str) -> None:
    run = RUN.changed_to(task=task, max_length=512, lora_dropout=0.0)
    checked_config(run)
    assert "max_length is 513" in refusal(checked_config, replace(run, max_length=513))
    assert "max_new_tokens is 600" in refusal(checked_config, replace(run, max_new_tokens=600))
    assert "--seq-len 512" in refusal(preflight.rows_of_length, run, 513)


def chat(question: str, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]
    return {"messages": messages, "where": "rows.jsonl, line 7", **more}


def test_a_prompt_and_its_answer_have_no_more_tokens_than_positions() -> None:
    tokenizer, rows = load_tokenizer(RUN), [chat("Where is it?"), chat("Where is it? " * 100)]
    check_rows_readable(replace(RUN, max_new_tokens=8), Splits([], [], rows), tokenizer)
    said = refusal(check_rows_readable, replace(RUN, max_new_tokens=300), Splits([], [], rows), tokenizer)
    assert "rows.jsonl, line 7" in said
    assert "--max_new_tokens" in said
    longer = [chat("Where is it? " * 300)]
    assert "shorten" in refusal(check_rows_readable, RUN, Splits([], [], longer), tokenizer)
    check_rows_readable(RUN, Splits(longer, longer, rows[:1]), tokenizer)  # those are cut
    pair = chat("Where?", rejected=[{"role": "assistant", "content": "Nowhere at all. " * 200}])
    said = refusal(
        check_rows_readable, RUN.changed_to(task="preferences", lora_dropout=0.0), Splits([], [], [pair]), tokenizer
    )
    assert "positions" in said


def test_a_judge_of_few_positions_reads_the_beginning_of_a_longer_text() -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **GPT2)).eval()
    assert Judge("base", model, tokenizer).embed(["Where is it? " * 60, "There."]).isfinite().all()


# -- tokens without embeddings


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ({"pad_token": "[PAD]"}, "'[PAD]'"),
        ({"unk_token": "[UNK]"}, ""),  # this tokenizer writes bytes, so that nothing is unknown
        ({"additional_special_tokens": ["<|think|>"]}, ""),
        ({}, ""),
    ],
)
def test_a_token_that_is_written_in_any_case_needs_an_embedding(added: dict, said: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    tokenizer.add_special_tokens(added)
    found = refusal(tokens_without_embedding, RUN, tokenizer)
    assert (said in found) if said else not found


def test_a_token_that_a_row_or_the_template_has_needs_an_embedding(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    tokenizer.add_tokens(["<|later|>"])
    check_rows_readable(RUN, Splits([chat("Where?")], [], []), tokenizer)
    assert "<|later|>" in capsys.readouterr().out
    said = refusal(check_rows_readable, RUN, Splits([], [chat("Where is <|later|>?")], []), tokenizer)
    assert "rows.jsonl, line 7" in said
    tokenizer.chat_template += "{{ '<|later|>' }}"
    assert "<|later|>" in refusal(tokens_without_embedding, RUN, tokenizer)


def test_a_vocabulary_that_is_larger_than_the_models_is_refused(embedded: Callable[..., str]) -> None:
    run = replace(RUN, model=embedded(vocab_size=700))
    assert "700" in refusal(tokens_without_embedding, run, load_tokenizer(RUN))


# -- target modules


@pytest.mark.parametrize("technique", ["lora", "full"])
@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("q_proj,v_prj", "v_prj"),
        ("v_prj", "v_proj"),
        ("q_proj,", "''"),
        (".*q_proj", ""),
        ("all-linear,q_proj", "all-linear"),
        ("q_proj,embed_tokens", "embed_tokens"),
        ("All-Linear", "All-Linear"),
        ("layers.9.self_attn.q_proj", "layers.9"),
        ("q_proj,lm_head", "lm_head"),
        ("q_proj, v_proj", ""),
        ("model.layers.0.self_attn.q_proj", ""),
        ("all-linear", ""),
    ],
)
def test_every_target_is_a_layer_that_can_be_trained(technique: str, names: str, said: str) -> None:
    found = refusal(check_targets, RUN.changed_to(technique=technique, target_modules=names))
    assert (said in found) if said else not found


def test_a_head_of_its_own_can_be_a_target(embedded: Callable[..., str]) -> None:
    run = replace(RUN, model=embedded(tie_word_embeddings=False), target_modules="q_proj,lm_head")
    check_targets(run)
    assert "tied" in refusal(check_targets, replace(run, model=str(EMBEDDED_BASE)))
    pipeline = run.changed_to(**PIPELINE).changed_to(technique="lora")
    assert "lm_head" in refusal(part_class(pipeline).check, pipeline)


def test_a_recipe_of_which_a_model_has_some_names_alone_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.models.families.recipe_targets", lambda run: "q_proj,query")
    assert suited_to_model(replace(RUN, target_modules="q_proj,query")).target_modules == "q_proj,v_proj"
    assert "query" in refusal(check_targets, replace(RUN, target_modules="q_proj,query"))


def test_every_stage_of_a_pipeline_has_something_to_train() -> None:
    layers = {f"model.layers.{layer}": layer // 2 for layer in range(4)}
    stage_map = {"model.embed_tokens": 0, **layers, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    full = RUN.changed_to(**PIPELINE)
    for names, refused in (("all", ""), ("q_proj", ""), ("layers.0.self_attn.q_proj", "stage 1")):
        assert refused in refusal(check_stages_train, replace(full, target_modules=names), stage_map)
        if names != "all":
            lora = full.changed_to(technique="lora", target_modules=names)
            assert refused in refusal(check_stages_train, lora, stage_map)


# -- schedules and optimizers


@pytest.mark.parametrize(
    ("settings", "name", "works"),
    [
        ({}, "cosine", True),
        ({}, "reduce_lr_on_plateau", False),
        ({}, "cosine_with_min_lr", False),
        ({}, "cosine_warmup_with_min_lr", False),
        ({}, "warmup_stable_decay", False),
        ({"learning_rate": 1e-8}, "polynomial", False),
        ({"warmup_steps": 100}, "polynomial", False),
        ({}, "greedy", False),
        (PIPELINE, "linear", True),
        (REPLICAS, "linear", True),
        ({"task": "summarization", "technique": "full", "loop": "accelerate"}, "linear", True),
        ({}, "cosin", False),
    ],
)
def test_a_schedule_is_followed_before_the_run_follows_it(settings: dict, name: str, works: bool) -> None:
    found = refusal(check_schedule, RUN.changed_to(**settings, lr_scheduler_type=name), 100)
    assert works == (not found)
    assert works or (name in found and "cosine" in found)


def test_a_schedule_is_followed_over_the_steps_of_the_rows() -> None:
    run = RUN.changed_to(lr_scheduler_type="polynomial", warmup_steps=6, num_train_epochs=6)
    rows = [{}] * 96
    check_training_rows(check_settings(run), rows)
    assert "polynomial" in refusal(check_training_rows, run.changed_to(max_steps=6), rows)
    assert "cosin" in refusal(check_settings, run.changed_to(lr_scheduler_type="cosin"))


def test_an_optimizer_is_built_before_the_run_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("adamw_torch_fused", "adafactor", "sgd"):
        check_optimizer(replace(RUN, optim=name))
    monkeypatch.setattr(
        "common.checks.inputs.OptimizerNames", [SimpleNamespace(value=name) for name in ("sgd", *ASKED)]
    )
    for name in ASKED:
        found = refusal(check_optimizer, replace(RUN, optim=name))
        assert name in found
        assert "sgd" in found


ASKED = ("galore_adamw", "apollo_adamw", "lomo", "schedule_free_adamw", "stable_adamw", "adamw_anyprecision", "lionn")


def test_an_optimizer_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: False)
    for name in ("paged_adamw_8bit", "lion_32bit", "ademamix"):
        assert "bitsandbytes" in refusal(check_optimizer, replace(RUN, optim=name))


def test_trackers_stand_alone_where_their_names_mean_none_or_all() -> None:
    check_trackers(replace(RUN, report_to="none"))
    check_trackers(replace(RUN, report_to="tensorboard, tensorboard"))
    for trackers in ("none,tensorboard", "tensorboard,all", "", "tensorbord"):
        assert refusal(check_trackers, replace(RUN, report_to=trackers))


# -- kinds of values


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_steps": 2.5},
        {"warmup_steps": 2.5},
        {"warmup_steps": math.inf},
        {"weight_decay": math.nan},
        {"weight_decay": math.inf},
        {"max_grad_norm": math.inf},
        {"learning_rate": 1e300},
        {"seed": 2**40},
        {"lora_alpha": 10**400},
        {"lora_r": 10**9},
        {"max_length": 10**20},
        {"step_timeout_s": 1e9},
        {"per_device_train_batch_size": 10**9},
        {"data": "a\0b"},
    ],
    ids=str,
)
def test_a_value_that_no_library_counts_with_is_refused(settings: dict[str, object]) -> None:
    name = list(settings)[-1]
    assert refusal(lambda: RunConfig(**settings)).startswith(name)


def test_a_name_in_a_yaml_file_is_checked_before_it_is_asked_what_it_means(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text in ("technique: loar", "technique: [lora]", "parallel: dpp", "task: chats", "eval_steps: 2.5"):
        file.write_text(text)
        assert text.partition(":")[0] in refusal(parse_overrides, RUN, ["--config", str(file)])


def test_the_planner_refuses_what_is_no_number() -> None:
    for option in ("--gpu-memory-gib", "--gpu-tflops", "--usd-per-hour"):
        assert "above 0" in refusal(planner_command.read_options, ["--model", "x", option, "nan"])
    with pytest.raises(SystemExit):
        planner_command.read_options(["--model", "x", "--quantization", "int8"])


# -- many labels and rows


def test_of_many_labels_records_and_sentences_have_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CLASSIFIER)
    scores, utils = map(importlib.import_module, ("my_utils_classification_scores", "my_utils_text_classification"))
    monkeypatch.setattr(scores, "macro_f1_interval", lambda *_: (0.0, 1.0))
    labels = tuple(f"label {number}" for number in range(50_000))
    meant = (*range(2_000), *[7] * 5)
    summary = scores.Classified(labels, meant, meant).summary()
    assert (summary["classes"], len(summary["labels"]), len(summary["confusion"])) == (50_000, 100, 100)
    assert summary["confusion"][summary["labels"].index("label 7")][summary["labels"].index("label 7")] == 6
    assert len(json.dumps(summary)) < 100_000
    rows = [{"text": "x", "label": label, "where": f"train.csv, row {number}"} for number, label in enumerate(labels)]
    assert len(utils.class_shares(rows)) == 100
    other = [{"text": "x", "label": "none of these", "where": "test.csv, row 1"}]
    splits = Splits(rows, rows[:1], other)
    assert len(say_balance(splits)) < 2_000
    assert len(refusal(with_classes, splits)) < 2_000


def test_a_sentence_that_refuses_has_a_length() -> None:
    assert shortened("as it is") == "as it is"
    long = shortened("begins " + "x" * 10**6 + " ends")
    assert len(long) < 5_000
    assert long.startswith("begins")
    assert long.endswith("ends")


def test_rows_on_disk_are_sorted_and_dealt_out_as_those_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [{"input_ids": [1] * (1 + number % 7), "labels": number} for number in range(20)]
    in_memory = list(longest_first(rows))
    monkeypatch.setattr(stored_rows, "IN_MEMORY", 10)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    on_disk = longest_first(stored(iter(rows)))
    assert isinstance(on_disk, RowsOnDisk)
    assert list(on_disk) == in_memory == sorted(rows, key=lambda row: -len(row["input_ids"]))
    loop = object.__new__(TrainingLoop)
    loop.validation_rows, loop.validated = on_disk, lambda share: share
    loop.args = SimpleNamespace(per_device_eval_batch_size=3, dataloader_num_workers=0)
    loop.batches = SimpleNamespace(world_size=2, rank=1)
    shares = list(loop.validation_batches())
    assert all(isinstance(share, list) for share in shares)
    assert shares[0] == in_memory[1:6:2]


# -- memory


@pytest.mark.parametrize(
    ("rows", "micro_batches", "said"),
    [(8, 8, "--batch_size 4 --micro_batches 4"), (2, 2, "--batch_size 1 --micro_batches 1 --schedule gpipe")],
)
def test_after_out_of_memory_a_pipeline_has_fewer_micro_batches(rows: int, micro_batches: int, said: str) -> None:
    run = RUN.changed_to(**{**PIPELINE, "micro_batches": micro_batches, "per_device_train_batch_size": rows})
    assert said in measured_steps.smaller_batch(run, rows, None)


def test_a_cached_model_is_its_own_and_no_shape_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_config("me/qwen2.5-7b") == MODEL_CONFIGS / "qwen2.5-7b.json"
    cached = tmp_path / "models--me--qwen2.5-7b" / "snapshots" / "a1" / "config.json"
    cached.parent.mkdir(parents=True)
    shape = json.loads((MODEL_CONFIGS / "qwen2.5-7b.json").read_text())
    cached.write_text(json.dumps({**shape, "num_hidden_layers": 4, "max_window_layers": 4}))
    found = read_architecture("me/qwen2.5-7b")
    assert (found.layers, found.name) == (4, "qwen2.5-7b")


def test_layers_are_found_by_their_last_names(embedded: Callable[..., str]) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, **GPT2))
    assert list(layers_called(model, "attn.c_proj, c_fc")) == [
        f"transformer.h.{layer}.{name}" for layer in range(2) for name in ("attn.c_proj", "mlp.c_fc")
    ]
