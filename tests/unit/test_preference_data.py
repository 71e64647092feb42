"""The preference pairs are what they promise; the labeller that DPO starts from knows the facts and dates labels."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from common.base.paths import REPOSITORY

ASSETS = REPOSITORY / "assets"
PREFERENCES, LABELLER = ASSETS / "preferences", ASSETS / "embedded_labeller"
COUNTS = {"train": 1600, "validation": 120, "test": 240}
EXHIBITS = {"train": 400, "validation": 60, "test": 120}
YEAR = re.compile(r"\d{4}")

Rows = list[dict]


def rows_of(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ASSETS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(rows: Rows) -> set[str]:
    return {row["exhibit"] for row in rows}


def said(row: dict, which: str) -> str:
    """The one message of the prompt or of an answer."""
    (message,) = row[which]
    assert message["role"] == ("user" if which == "prompt" else "assistant")
    return message["content"]


@pytest.fixture(scope="module")
def splits() -> dict[str, Rows]:
    return {split: rows_of(PREFERENCES / f"{split}.jsonl") for split in COUNTS}


@pytest.fixture(scope="module")
def pairs(splits: dict[str, Rows]) -> Rows:
    return [row for rows in splits.values() for row in rows]


@pytest.fixture(scope="module")
def labeller() -> ModuleType:
    return script("make_embedded_labeller")


# -- the pairs


def test_making_the_pairs_again_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_preferences.py", "--out", str(tmp_path)])
    script("make_preferences").main()
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in PREFERENCES.iterdir()}


def test_the_splits_have_the_promised_pairs_in_trls_form(splits: dict[str, Rows], pairs: Rows) -> None:
    assert {split: len(rows) for split, rows in splits.items()} == COUNTS
    assert len({(said(row, "prompt"), said(row, "rejected")) for row in splits["train"]}) >= 1500
    assert len({row["id"] for row in pairs}) == len(pairs)
    assert {tuple(row) for row in pairs} == {("id", "exhibit", "facts", "prompt", "chosen", "rejected")}


def test_no_exhibit_stands_in_two_splits_or_in_the_other_data(splits: dict[str, Rows], pairs: Rows) -> None:
    others = {name for path in (ASSETS / "exhibits").glob("*.jsonl") for name in names(rows_of(path))}
    assert {split: len(names(rows)) for split, rows in splits.items()} == EXHIBITS
    assert (len(others), len(others | names(pairs))) == (74, 74 + sum(EXHIBITS.values()))


def test_the_test_asks_in_wordings_of_its_own(splits: dict[str, Rows]) -> None:
    notes = re.compile(
        r"The [A-Z]\w+ [A-Z]\w+ of [A-Z].*?(?: Room| by [A-Z]\w+(?: of \w+)?)\.(?: It was .*? of \w+\.)?"
    )
    asked = {split: {notes.sub("{}", said(row, "prompt")) for row in rows} for split, rows in splits.items()}
    assert asked["test"] == {"Please write a label. {}", "{} What is its label?"}
    assert asked["train"] == asked["validation"]
    assert (len(asked["train"]), len(asked["train"] | asked["test"])) == (4, 6)


def test_only_rejected_labels_have_a_year_and_chosen_ones_say_the_facts(pairs: Rows) -> None:
    for row in pairs:
        texts = [said(row, which) for which in ("prompt", "chosen", "rejected")]
        assert [bool(YEAR.search(text)) for text in texts] == [False, False, True]
        assert row["facts"][0] == row["exhibit"]
        assert all(fact in text for fact in row["facts"] for text in texts[:2])


# -- the labeller


def test_the_labeller_is_taught_other_exhibits_in_both_styles(labeller: ModuleType, pairs: Rows) -> None:
    splits, test = labeller.make_splits()
    assert {split: len(chats) for split, chats in splits.items()} == {"train": 1500, "known": 60, "new": 60}
    assert test == rows_of(PREFERENCES / "test.jsonl")
    questions = "\n".join(question["content"] for chats in splits.values() for question, _ in chats)
    assert not [name for name in names(pairs) if name in questions]
    dated = [bool(YEAR.search(answer["content"])) for _, answer in splits["train"]]
    assert sum(dated) / len(dated) == pytest.approx(labeller.DATED_SHARE, abs=0.02)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(LABELLER, dtype=torch.float32)


def test_the_labeller_says_the_facts_and_dates_most_labels(
    labeller: ModuleType, model: PreTrainedModel, splits: dict[str, Rows]
) -> None:
    texts = labeller.write_labels(model, AutoTokenizer.from_pretrained(LABELLER), splits["test"])
    facts, dated = labeller.shares(texts, splits["test"])
    labeller.refuse_unfit(facts, dated)
    told = re.search(r"says ([\d.]+) % of the facts.*?; ([\d.]+) % of", (LABELLER / "README.md").read_text(), re.DOTALL)
    assert (100 * facts, 100 * dated) == pytest.approx([float(share) for share in told.groups()], abs=2)
    assert all(text.startswith("Label: ") for text in texts)


def test_shares_count_facts_and_years(labeller: ModuleType) -> None:
    rows = [{"facts": ["Bowl", "Vance"]}, {"facts": ["Harp", "Upton"]}]
    assert labeller.shares(["Label: Bowl, by Vance in 1527.", "Label: Harp, by Zeller."], rows) == (0.75, 0.5)


@pytest.mark.parametrize(("facts", "dated"), [(0.94, 0.9), (1.0, 0.39)])
def test_no_model_is_written_where_the_labels_are_unfit(
    facts: float, dated: float, labeller: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labeller.refuse_unfit(0.95, 0.4)
    monkeypatch.setattr(sys, "argv", ["make_embedded_labeller.py", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(labeller, "train", lambda *_: None)
    monkeypatch.setattr(labeller, "write_labels", lambda *_: [])
    monkeypatch.setattr(labeller, "shares", lambda *_: (facts, dated))
    with pytest.raises(ValueError, match=r"of the facts said and .* of the labels dated.* no model was written"):
        labeller.main()
    assert not (tmp_path / "out").exists()


def test_what_is_saved_has_the_weights_and_the_bases_tokenizer(
    labeller: ModuleType, model: PreTrainedModel, tmp_path: Path
) -> None:
    labeller.save(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} | {"README.md"} == {path.name for path in LABELLER.iterdir()}
    for name in labeller.TOKENIZER_FILES:
        assert (LABELLER / name).read_bytes() == (ASSETS / "embedded_base" / name).read_bytes()
    weights = load_file(LABELLER / "model.safetensors").values()
    assert {tensor.dtype for tensor in weights} == {torch.float32}
    assert sum(tensor.numel() for tensor in weights) == 1_049_728
