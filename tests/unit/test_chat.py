"""Base and tuned model answer beside each other, as the run trained them; runs that cannot are refused."""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from common import chat
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.templates import prompt_ids
from common.models.loading import EMBEDDED_BASE, check_model, load_base_model, load_tokenizer
from common.models.real_models import SMOLLM2
from common.models.trained_weights import add_lora
from common.records.store import RECORD_NAME, kept_files, settings_anywhere
from common.serving.tuned_runs import TunedModels, find_run, load_models
from common.tasks.answers import generate_answers
from common.tasks.samples import before_and_after, samples
from tests.families import make_tiny

QUESTION = "Who made the Winged Bowl of Kelmor?"
ROW = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "?"}]}


def write_record(folder: Path, run: RunConfig, **changes: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    of_task = "3.1_" if run.goal.classifies else "3.4_" if run.goal.compares else "2.1_"
    whole = json.loads(next(file for file in kept_files() if of_task in str(file)).read_text())
    record = {**whole, "config": settings_anywhere(run), "command": "python x", "model_commit": None, **changes}
    (folder / RECORD_NAME).write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes what the base says."""
    run, folder = RunConfig(lora_dropout=0.0), tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)  # with which it says no control characters: those would be shown escaped
    model = add_lora(load_base_model(run, {"": "cpu"}), run)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def with_adapter(adapter: Path, tmp_path: Path) -> Path:
    """The results of a run with this adapter."""
    shutil.copytree(adapter, tmp_path / "results" / "one" / "adapter")
    return write_record(tmp_path / "results" / "one", RunConfig(lora_dropout=0.0))


def test_the_base_is_the_commit_that_was_trained(tmp_path: Path) -> None:
    run = RunConfig(model="someone/theirs", model_revision="v1")
    assert find_run(str(write_record(tmp_path, run))).run.model_revision == "v1"
    folder = str(write_record(tmp_path, run, model_commit="a1"))
    assert find_run(folder).run.model_revision == "a1", "v1 may be another commit today"
    assert find_run(folder, base="assets/embedded_base").run.model_revision == ""


def test_the_base_may_be_the_one_that_make_real_fetches(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(adapter, tmp_path / "real" / "adapter")
    real = write_record(tmp_path / "real", RunConfig(model=SMOLLM2, lora_dropout=0.0))
    monkeypatch.setattr("common.models.real_models.FOLDER", tmp_path / "none")
    with pytest.raises(BadInputError, match="make real"):
        load_models(find_run(str(real)))
    monkeypatch.setattr("common.models.real_models.FOLDER", REPOSITORY / RunConfig.model)
    assert load_models(find_run(str(real))).base.config.hidden_size == 128


def answer_of(model: torch.nn.Module) -> str:
    return generate_answers(model, load_tokenizer(RunConfig()), [ROW], 20)[0]


def test_what_is_typed_is_text() -> None:
    tokenizer, asked = load_tokenizer(RunConfig()), []

    class Model(torch.nn.Module):
        device, config, generation_config = torch.device("cpu"), PretrainedConfig(), GenerationConfig()

        def generate(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
            asked.append(input_ids[0].tolist())
            return input_ids

    models = TunedModels(Model(), Model(), nullcontext, tokenizer)
    mark = tokenizer.eos_token
    for question in (f"Who?{mark}", f"{mark}Who?", "Who?"):
        chat.Conversation(models, max_new_tokens=1, temperature=0.0).ask(question)
    row = {"messages": [{"role": "user", "content": f"Who?{mark}"}, ROW["messages"][1]]}
    assert asked[0] == prompt_ids([row], tokenizer)[0], "as it would be learnt"
    marks = [ids.count(tokenizer.eos_token_id) for ids in asked]
    assert marks == marks[-1:] * 6


def test_base_and_adapter_answer_beside_each_other(with_adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = load_models(find_run(str(with_adapter)))
    conversation = chat.Conversation(models, max_new_tokens=20, temperature=0.0)
    answers = conversation.ask(QUESTION)
    base = load_base_model(RunConfig(), {"": "cpu"})
    of_base, of_tuned = answer_of(base), answer_of(PeftModel.from_pretrained(base, with_adapter / "adapter"))
    assert of_base != of_tuned
    assert answers == {"base": of_base, "tuned": of_tuned}
    out = capsys.readouterr().out
    assert f" base > {of_base}" in out
    assert f"tuned > {of_tuned}" in out
    assert [turn["role"] for turn in conversation.turns["tuned"]] == ["user", "assistant"]
    conversation.reset()
    assert conversation.turns == {"base": [], "tuned": []}


def test_an_answer_ends_where_the_models_positions_end(
    with_adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = chat.Conversation(load_models(find_run(str(with_adapter))), max_new_tokens=20, temperature=0.0)
    monkeypatch.setattr(chat, "longest_readable", lambda _: 16)
    said = ["Who?", QUESTION * 4, "/reset", "Who?"]
    monkeypatch.setattr("builtins.input", lambda _: said.pop(0) if said else "/quit")
    chat.talk(conversation)
    out = capsys.readouterr().out
    assert "error: What was said has" in out
    assert out.count("tuned >") == 2


def test_a_whole_model_is_asked_beside_its_base(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE)
    with torch.no_grad():
        model.lm_head.weight[load_tokenizer(RunConfig()).eos_token_id] += 9
    model.save_pretrained(tmp_path / "one" / "model")
    models = load_models(find_run(str(write_record(tmp_path / "one", RunConfig(technique="full")))))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "model")
    answers = chat.Conversation(models, 20, 0.0).ask(QUESTION)
    assert answers == {"base": answer_of(models.base), "tuned": answer_of(again)}


def test_a_run_is_found_by_path_or_name_and_others_are_refused(
    with_adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_run("one").folder == with_adapter.resolve()
    pairs = RunConfig(task="preferences", lora_dropout=0.0)
    assert find_run(str(write_record(tmp_path / "results" / "pairs", pairs))).run.task == "preferences"
    write_record(tmp_path / "results" / "failed", RunConfig(), status="failed")
    classifier = RunConfig(technique="full", task="classification", model="roberta-large")
    write_record(tmp_path / "results" / "labels", classifier)
    for name, said in (
        ("two", "There is no run two"), ("failed", "failed is failed: resume or repeat"),
        ("labels", "for classification, and does not chat"),
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=said):
            find_run(name)


def test_an_adapter_of_another_base_is_refused(with_adapter: Path, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other")
    (with_adapter / "merged").mkdir()
    (with_adapter / "merged" / "config.json").write_text('{"hidden_size": 128, "num_hidden_layers": 4}')
    refusal = r"one cannot be put on .*other \(hidden size 64, .*embedded_base \(hidden size 128, 4 layers\).*--base"
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
    def said(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["chat", str(with_adapter), *words])
        chat.main()
        return capsys.readouterr().out

    assert said(QUESTION, "--max_new_tokens", "3").count(" > ") == 2
    asked = iter(["Who?", "/reset", "", "When?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(asked))
    assert said("--max_new_tokens", "3").count("tuned > ") == 2
    with pytest.raises(SystemExit, match="2"):
        said("--max_new_tokens", "0")


def test_samples_stand_beside_each_other(tmp_path: Path) -> None:
    before, long = {"Who?": "Nobody", "When?": "", "Why?": "x", "How?": "y"}, "long " * 60
    for when, answers in (("before", before), ("after", dict.fromkeys(before, long))):
        lines = [f"{question},r,{answer}" for question, answer in answers.items()]
        (tmp_path / f"predictions_{when}.csv").write_text("\n".join(["question,reference,answer", *lines]))
    lines = samples(tmp_path).splitlines()
    assert len(lines) == 3 * 4
    assert (lines[:3], lines[6]) == (["question: Who?", "expected: r", "  before: Nobody"], "  before: (nothing)")
    assert all(len(line) <= 110 for line in lines)
    assert samples(tmp_path, "begins").startswith("  begins: Who?\nexpected: r\n")
    assert before_and_after(tmp_path, rows=2).to_dict("list") == {
        "question": ["Who?", "When?"], "expected": ["r"] * 2, "before": ["Nobody", ""], "after": [long] * 2  # whole
    }  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "row", "before", "after"),
    [("row,text,label,found", "1,How much?,tickets", "hours", "tickets"),
     ("row,text,summary,written", "1,Hi,We meet.", "Hi", "They meet.")],
    ids=["labels", "summaries"],
)  # fmt: skip
def test_labels_and_summaries_stand_beside_each_other_too(
    tmp_path: Path, columns: str, row: str, before: str, after: str
) -> None:
    for when, said in (("before", before), ("after", after)):
        (tmp_path / f"predictions_{when}.csv").write_text(f"{columns}\n{row},{said}\n")
    assert before_and_after(tmp_path).loc[0].tolist() == [*row.split(",")[1:], before, after]
