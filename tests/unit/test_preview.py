"""What `python -m common.data` shows: rows and tokens counted as they are, and a row with what is learnt of it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from common.base.run_config import RunConfig
from common.checks.preview import LEARNT, PLAIN, READ, Preview, coloured, main, preview
from common.data.rows import IGNORED_LABEL
from common.data.splits import load_splits
from common.models.loading import load_tokenizer

QUESTIONS = [
    ("Who?", "Ann did."),
    ("who? ", "ann did."),
    ("When was it made, and by whom?", "At noon."),
    ("Where?", "Here."),
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    for name, pairs in (("train", QUESTIONS), ("validation", [("a?", "b")]), ("test", [("c?", "d")])):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def preview_of(run: RunConfig) -> Preview:
    return preview(run, load_splits(run), load_tokenizer(run))


def test_rows_and_tokens_are_counted_before_they_are_cut(rows: Path) -> None:
    seen = preview_of(RunConfig(data=str(rows), max_length=12))
    assert seen.lengths == sorted(len(row["input_ids"]) for row in seen.tokens)
    longest = max(seen.tokens, key=lambda row: len(row["input_ids"]))
    learnt = sum(label != IGNORED_LABEL for label in longest["labels"][:12])
    assert (seen.repeated, seen.learnt[seen.tokens.index(longest)]) == (1, learnt)
    too_long = len([length for length in seen.lengths if length > 12])
    assert too_long > 0
    assert "4 train, 1 validation, 1 test; 1 training rows repeat" in str(seen)
    assert f"{too_long} rows have more than max_length, 12" in str(seen)


def test_all_tokens_of_plain_text_are_counted_as_learnt_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("\n\n".join(f"Bowl {number} is of copper, and large." for number in range(5)))
    seen = str(preview_of(RunConfig(data=str(tmp_path / "rows.txt"), max_length=4)))
    said = ("with end tokens; all are learnt", "divided into pieces of 4 tokens", "nothing to learn")
    assert [each in seen for each in said] == [True, True, False]


def test_a_row_is_shown_with_what_is_learnt(rows: Path) -> None:
    run = RunConfig(data=str(rows))
    tokenizer, found = load_tokenizer(run), preview_of(run)
    row = found.tokens[0]
    assert coloured(row, tokenizer, in_colour=False) == "<|user|>Who?<|end|><|assistant|>[[Ann did.<|end|>]]"
    painted = f"{READ}<|user|>Who?<|end|><|assistant|>{PLAIN}{LEARNT}Ann did.<|end|>{PLAIN}"
    assert coloured(row, tokenizer) == found.row(1, tokenizer) == painted
    cut = replace(found, run=replace(run, max_length=len(row["input_ids"]) - 1))
    assert cut.row(1, tokenizer, in_colour=False) == "<|user|>Who?<|end|><|assistant|>[[Ann did.]]", "as it is trained"
    row = preview_of(replace(run, train_on="prompt")).tokens[0]
    assert coloured(row, tokenizer, in_colour=False) == "[[<|user|>Who?<|end|><|assistant|>]]Ann did.<|end|>"


def test_the_command_shows_the_row_that_is_asked_for(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["data", str(rows), "--row", "4", "--train_on", "completion"])
    main()
    assert "[[Here.<|end|>]]" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["data", str(rows), "--row", "5"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--row is 5, but there are 4 training rows" in capsys.readouterr().err


def test_texts_with_a_class_are_counted_without_tokens_to_learn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ["--task", "classification", "--technique", "full", "--model", "all-minilm-l6-v2"]
    monkeypatch.setattr(sys, "argv", ["data", "assets/visitor_messages", *task])
    main()
    out = capsys.readouterr().out
    assert "1,600 train, 400 validation, 400 test" in out
    assert "learn" not in out


def test_a_pair_is_shown_with_both_answers_and_is_as_long_as_its_longer_one() -> None:
    run = RunConfig(task="preferences", model="assets/embedded_labeller", data="assets/preferences", validation_rows=1)
    tokenizer, splits = load_tokenizer(run), load_splits(run)
    row = splits.train[1]
    seen = preview(run, replace(splits, train=splits.train[:3]), tokenizer)
    said, rejected = seen.row(2, tokenizer, in_colour=False).split("\n")
    assert said.endswith(f"[[{row['messages'][-1]['content']}<|end|>]]")
    assert rejected.endswith(f": {row['rejected'][0]['content']}<|end|>")
    assert seen.lengths == sorted(max(len(each["input_ids"]), len(each["rejected_ids"])) for each in seen.tokens)
    assert seen.lengths[-1] > max(len(each["input_ids"]) for each in seen.tokens)
    assert f"{sum(seen.lengths):,} in training rows" in str(seen)
