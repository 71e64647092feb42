"""Base and tuned model answer beside each other, as the run trained them; runs that cannot are refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.loading import EMBEDDED_BASE, check_model, load_base_model, load_tokenizer
from common.models.trained_weights import add_lora
from common.records.store import RECORD_NAME, SCHEMA_VERSION, settings_anywhere
from common.serving import chat
from common.serving.tuned_runs import find_run, load_models
from common.tasks.answers import generate_answers
from common.tasks.samples import before_and_after, samples
from tests.families import make_tiny

QUESTION = "Who made the Winged Bowl of Kelmor?"
ROW = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "?"}]}


def write_record(folder: Path, run: RunConfig, status: str = "completed") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "config": settings_anywhere(run),
        "command": "python x",
    }
    (folder / RECORD_NAME).write_text(json.dumps(record))
    return folder


def changed(model: PeftModel) -> PeftModel:
    """An adapter that changes what the base says."""
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    return model


@pytest.fixture
def with_adapter(tmp_path: Path) -> Path:
    run = RunConfig(lora_dropout=0.0)
    changed(add_lora(load_base_model(run, {"": "cpu"}), run)).save_pretrained(tmp_path / "results" / "one" / "adapter")
    return write_record(tmp_path / "results" / "one", run)


def test_the_base_is_the_commit_that_was_trained(tmp_path: Path) -> None:
    folder = write_record(tmp_path, RunConfig(model="someone/theirs", model_revision="v1"))
    assert find_run(str(folder)).run.model_revision == "v1"
    record = json.loads((folder / RECORD_NAME).read_text())
    (folder / RECORD_NAME).write_text(json.dumps(record | {"model_commit": "a1"}))
    assert find_run(str(folder)).run.model_revision == "a1", "v1 may be another commit today"
    assert find_run(str(folder), base="assets/embedded_base").run.model_revision == ""


def answer_of(model: torch.nn.Module) -> str:
    return generate_answers(model, load_tokenizer(RunConfig()), [ROW], 20)[0]


def test_base_and_adapter_answer_beside_each_other(with_adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = load_models(find_run(str(with_adapter)))
    conversation = chat.Conversation(models, max_new_tokens=20, temperature=0.0)
    answers = conversation.ask(QUESTION)
    base = load_base_model(RunConfig(), {"": "cpu"})
    assert answers["base"] == answer_of(base)
    assert answers["tuned"] == answer_of(PeftModel.from_pretrained(base, with_adapter / "adapter"))
    assert answers["base"] != answers["tuned"]
    out = capsys.readouterr().out
    assert f" base > {answers['base']}" in out
    assert f"tuned > {answers['tuned']}" in out
    assert [turn["role"] for turn in conversation.turns["tuned"]] == ["user", "assistant"]
    conversation.reset()
    assert conversation.turns == {"base": [], "tuned": []}


def test_a_whole_model_is_asked_beside_its_base(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE)
    with torch.no_grad():
        model.lm_head.weight[load_tokenizer(RunConfig()).eos_token_id] += 9
    model.save_pretrained(tmp_path / "one" / "model")
    models = load_models(find_run(str(write_record(tmp_path / "one", RunConfig(technique="full")))))
    answers = chat.Conversation(models, 20, 0.0).ask(QUESTION)
    assert answers["tuned"] == answer_of(AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "model"))
    assert answers["base"] == answer_of(models.base)


def test_a_run_is_found_by_path_or_name_and_others_are_refused(
    with_adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_run("one").folder == with_adapter.resolve()
    with pytest.raises(BadInputError, match="There is no run two"):
        find_run("two")
    write_record(tmp_path / "results" / "failed", RunConfig(), status="failed")
    with pytest.raises(BadInputError, match="failed is failed: resume or repeat"):
        find_run("failed")
    pairs = RunConfig(task="preferences", lora_dropout=0.0)
    assert find_run(str(write_record(tmp_path / "results" / "pairs", pairs))).run.task == "preferences"
    classifier = RunConfig(technique="full", task="classification", model="roberta-large")
    write_record(tmp_path / "results" / "labels", classifier)
    with pytest.raises(BadInputError, match="for classification, and does not chat"):
        find_run("labels")


def test_an_adapter_of_another_base_is_refused(with_adapter: Path, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other")
    (with_adapter / "merged").mkdir()
    (with_adapter / "merged" / "config.json").write_text('{"hidden_size": 128, "num_hidden_layers": 4}')
    refusal = r"one does not fit .*other \(hidden size 64, .*embedded_base \(hidden size 128, 4 layers\).*--base"
    with pytest.raises(BadInputError, match=refusal):
        load_models(find_run(str(with_adapter), base=other))


def test_a_base_that_is_not_there_is_refused_by_the_option_that_names_it(with_adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"--base is \S+/nobase, which is no folder.*the run had \S+embedded_base"):
        load_models(find_run(str(with_adapter), base=str(tmp_path / "nobase")))
    moved = write_record(tmp_path / "moved", RunConfig(model=str(tmp_path / "nobase")))
    with pytest.raises(BadInputError, match=r"base of moved was \S+/nobase, which is not there: pass --base"):
        load_models(find_run(str(moved)))


def test_an_adapter_is_no_model_to_tune(with_adapter: Path) -> None:
    with pytest.raises(BadInputError, match=r"adapter is a PEFT adapter, .*: pass the folder merged"):
        check_model(str(with_adapter / "adapter"))


def test_one_question_by_argument_or_many_from_the_input(
    with_adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chat", str(with_adapter), QUESTION, "--max_new_tokens", "3"])
    chat.main()
    assert capsys.readouterr().out.count(" > ") == 2
    said = iter(["Who?", "/reset", "", "When?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    monkeypatch.setattr(sys, "argv", ["chat", str(with_adapter), "--max_new_tokens", "3"])
    chat.main()
    assert capsys.readouterr().out.count("tuned > ") == 2
    monkeypatch.setattr(sys, "argv", ["chat", str(with_adapter), "--max_new_tokens", "0"])
    with pytest.raises(SystemExit, match="2"):
        chat.main()


def test_samples_stand_beside_each_other(tmp_path: Path) -> None:
    questions = ("Who?", "When?", "Why?", "How?")
    before = dict(zip(questions, ("Nobody", "", "x", "y"), strict=True))
    for when, answers in (("before", before), ("after", dict.fromkeys(questions, "long " * 60))):
        lines = [f"{question},r,{answers[question]}" for question in questions]
        (tmp_path / f"predictions_{when}.csv").write_text("\n".join(["question,reference,answer", *lines]))
    lines = samples(tmp_path).splitlines()
    assert len(lines) == 3 * 4
    assert lines[:3] == ["question: Who?", "expected: r", "  before: Nobody"]
    assert lines[6] == "  before: (nothing)"
    assert all(len(line) <= 110 for line in lines)
    assert samples(tmp_path, "begins").startswith("  begins: Who?\nexpected: r\n")
    table = before_and_after(tmp_path, rows=2)
    assert table.columns.tolist() == ["question", "expected", "before", "after"]
    assert table["before"].tolist() == ["Nobody", ""]
    assert table["after"].tolist() == ["long " * 60] * 2  # whole


def test_labels_and_summaries_stand_beside_each_other_too(tmp_path: Path) -> None:
    for when, label in (("before", "hours"), ("after", "tickets")):
        (tmp_path / f"predictions_{when}.csv").write_text(f"row,text,label,found\n1,How much?,tickets,{label}\n")
    assert before_and_after(tmp_path).loc[0].tolist() == ["How much?", "tickets", "hours", "tickets"]
    for when, said in (("before", "Hi"), ("after", "They meet.")):
        (tmp_path / f"predictions_{when}.csv").write_text(f"row,text,summary,written\n1,Hi,We meet.,{said}\n")
    assert before_and_after(tmp_path).loc[0].tolist() == ["Hi", "We meet.", "Hi", "They meet."]
