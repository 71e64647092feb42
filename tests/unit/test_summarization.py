"""ROUGE is that of the whole set, as rouge-score has it; losses of uneven shares add up to the whole batch's."""

import csv
import importlib
import json
from pathlib import Path
from statistics import mean
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer
from transformers.modeling_outputs import Seq2SeqLMOutput

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL, Row
from common.data.splits import load_splits
from common.models.loading import EMBEDDED_SUMMARIZER
from common.runtime.recorder import PeakMemory
from common.runtime.world import Rank
from common.tasks import predictions
from common.tasks.objectives import answer_results, step_loss
from common.tasks.summarization import ROUGE, rouge_scores

BAR = 0.35
"""What copying must not reach."""


@pytest.fixture(scope="module")
def chats() -> list[Row]:
    run = RunConfig(task="summarization", technique="full", text_column="dialogue", data="assets/chat_summaries")
    return load_splits(run).test


def bad_summaries(rows: list[Row]) -> tuple[list[str], list[str]]:
    """Summaries that are wrong in different ways and degrees, and the right ones."""
    right, written = [row["summary"] for row in rows], []
    for number, summary in enumerate(right):
        words = summary.split()
        cut = words[number % 7 :] if number % 2 else words[: len(words) - number % 5]
        turned = ". ".join(reversed(summary.rstrip(".").split(". "))) + "."
        written.append({0: turned, 1: " ".join(reversed(words))}.get(number % 9, " ".join(cut)))
    written[3] = ""
    return written, right


def scores_by_hand(written: list[str], right: list[str]) -> dict[str, float]:
    """By Google's scorer, row by row; sentences on lines of their own, as its Lsum wants them."""
    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    rows = [scorer.score(b.replace(". ", ".\n"), a.replace(". ", ".\n")) for a, b in zip(written, right, strict=True)]
    return {name: mean(row[name].fmeasure for row in rows) for name in ROUGE}


# -- ROUGE


def test_rouge_is_rouge_scores_own_on_the_whole_set(chats: list[Row]) -> None:
    written, right = bad_summaries(chats)
    found = rouge_scores(written, right)
    assert found == pytest.approx(scores_by_hand(written, right), abs=1e-12)
    assert all(0.5 < value < 1 for value in found.values())
    assert len({round(value, 4) for value in found.values()}) == 4  # each is a measure of its own


@pytest.mark.parametrize(
    ("written", "right", "expected"),
    [
        ("They meet at noon. Ann is late.", "Ann is late. They meet at noon.",
         {"rouge1": 1, "rougeL": 4 / 7, "rougeLsum": 1}),
        ("ann MEETS bob", "Ann meeting Bob.", {"rougeL": 1}),
        ("", "Ann meets Bob.", dict.fromkeys(ROUGE, 0)),
    ],
    ids=["Lsum goes sentence by sentence, and L does not", "stemmed, without case and points", "nothing"],
)  # fmt: skip
def test_what_rouge_compares(written: str, right: str, expected: dict[str, float]) -> None:
    found = rouge_scores([written], [right])
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_copying_is_no_summary(chats: list[Row]) -> None:
    right = [row["summary"] for row in chats]
    assert rouge_scores(right, right)["rougeL"] == 1
    for copied in ([row["text"] for row in chats], [row["text"].splitlines()[0] for row in chats]):
        assert rouge_scores(copied, right)["rougeL"] < BAR


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "3.2_summarization" / "run_0_cpu_x2")
    return importlib.import_module("my_utils_summarization")


def test_summaries_are_said_and_written_row_by_row(utils: ModuleType) -> None:
    rows = [{"text": 'Ann: "Yes",\r\nBob: No.', "summary": "Ann agrees."}, {"text": "b", "summary": "c"}]
    summaries = utils.Summaries(("Ann, agreed.", "d"), {"rouge1": 0.5, "rougeLsum": 0.25}, 0.5)
    assert str(summaries) == "ROUGE-1 0.500, ROUGE-Lsum 0.250; exact match 50%"
    assert summaries.summary() == {"rouge1": 0.5, "rougeLsum": 0.25, "exact_share": 0.5, "rows": 2}
    assert summaries.lines(rows) == [
        {"row": 1, **rows[0], "written": "Ann, agreed."},
        {"row": 2, **rows[1], "written": "d"},
    ]


@pytest.mark.parametrize("figures", ["text", "json"])
def test_summaries_come_back_in_the_datas_order_and_their_figures_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], figures: str, utils: ModuleType
) -> None:
    """By a model that repeats what it reads; batches are made by length."""
    for module in (utils, predictions):
        monkeypatch.setattr(module, "gather_object", lambda own: own)
    rows = [{"text": "Ann: " + "yes, " * count + "Bob.", "summary": "Yes."} for count in (1, 9, 4, 2, 7)]
    run = RunConfig(task="summarization", technique="full", per_device_eval_batch_size=2, log_format=figures)
    rank, parrot = Rank(0, 1, "cpu", "python"), torch.nn.Module()
    log = SimpleNamespace(run=run, rank=rank, folder=tmp_path, memory=PeakMemory(rank))
    parrot.generate = lambda input_ids, attention_mask, **settings: input_ids
    summaries = utils.summarize(parrot, AutoTokenizer.from_pretrained(EMBEDDED_SUMMARIZER), rows, log, "after")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    expected = {f"{name}_after": value for name, value in summaries.rouge.items()}
    assert [json.loads(line) for line in lines] == ([expected] if figures == "json" else [])
    with (tmp_path / "predictions_after.csv").open(encoding="utf-8", newline="") as file:
        written = [(row["row"], row["written"]) for row in csv.DictReader(file)]
    assert written == [(str(number), row["text"]) for number, row in enumerate(rows, 1)]
    assert list(summaries.written) == [row["text"] for row in rows]


# -- the loss


def random_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of four rows with 7, 1, 4 and no tokens to predict."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(4, 7, 11, generator=generator), torch.randint(11, (4, 7), generator=generator)
    counts = torch.tensor([7, 1, 4, 0])
    return logits, labels.masked_fill(torch.arange(7) >= counts[:, None], IGNORED_LABEL)


def loss_of(logits: torch.Tensor, labels: torch.Tensor, labelled: int | None = None) -> float:
    return step_loss(Seq2SeqLMOutput(logits=logits), labels, labelled).item()


def test_losses_of_uneven_shares_add_up_to_the_whole_batchs_mean() -> None:
    logits, labels = random_batch()
    whole = cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert loss_of(logits, labels) == pytest.approx(whole)
    for cut in (1, 2, 3):
        shares = [(logits[:cut], labels[:cut]), (logits[cut:], labels[cut:])]
        assert sum(loss_of(*share, labelled=12) for share in shares) == pytest.approx(whole)
    assert loss_of(logits[3:], labels[3:], labelled=12) == 0  # a row without a label adds nothing, and no nan
    results = answer_results(logits, labels)  # of validation
    assert results[:, 1].tolist() == [7, 1, 4, 0]
    assert results[:, 0].sum().item() / 12 == pytest.approx(whole)
