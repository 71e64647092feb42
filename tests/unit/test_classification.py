"""A classifier's loss and metrics are those of all rows at any division; intervals and matrices are the textbook's."""

import csv
import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import SequenceClassifierOutput

from common.base.paths import REPOSITORY
from common.data.rows import IGNORED_LABEL
from common.runtime.world import Rank
from common.tasks.classification import class_metrics, class_results
from common.tasks.objectives import ACCURACY, VALIDATION_LOSS, step_loss
from common.tasks.predictions import report_predictions

LABELS = ("events", "prices", "tickets")
MEANT, FOUND = (0, 0, 0, 1, 1, 2), (0, 0, 1, 1, 2, 2)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Those of 3.1, with few samples of the bootstrap, which takes seconds."""
    monkeypatch.syspath_prepend(REPOSITORY / "3.1_text_classification" / "run_0_cpu_x2")
    found = importlib.import_module("my_utils_classification_scores")
    monkeypatch.setattr(found, "BOOTSTRAP_SAMPLES", 150)
    return found


def logits_and_labels(rows: int, seed: int, ignored: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ones of three classes; the last labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (rows,), generator=generator)
    labels[rows - ignored :] = IGNORED_LABEL
    return torch.randn(rows, 3, generator=generator), labels


def test_a_row_without_a_label_counts_nowhere() -> None:
    logits, labels = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 0, 9]]), torch.tensor([0, 2, IGNORED_LABEL])
    results = class_results(logits, labels)
    assert results[2].tolist() == [0, 0, 0]
    loss = cross_entropy(logits[:2], labels[:2]).item()
    assert class_metrics(results.sum(0)) == pytest.approx({ACCURACY: 0.5, VALIDATION_LOSS: loss})


@given(st.integers(1, 40), st.integers(0, 5), st.lists(st.integers(0, 40), max_size=5), st.integers(0, 999))
@settings(max_examples=100, deadline=None)
def test_any_division_of_the_rows_gives_the_same_metrics(rows: int, ignored: int, cuts: list[int], seed: int) -> None:
    logits, labels = logits_and_labels(rows + ignored, seed, ignored)
    order = torch.randperm(rows + ignored, generator=torch.Generator().manual_seed(seed))
    shares = torch.tensor_split(order, sorted(cuts))
    found = class_metrics(sum(class_results(logits[share], labels[share]).sum(0) for share in shares))
    accuracy = (logits.argmax(-1) == labels)[:rows].float().mean().item()
    loss = cross_entropy(logits[:rows], labels[:rows]).item()
    assert found == pytest.approx({ACCURACY: accuracy, VALIDATION_LOSS: loss}, rel=1e-5)


def test_losses_of_uneven_shares_add_up_to_the_mean_of_the_whole() -> None:
    logits, labels = logits_and_labels(9, seed=1, ignored=1)
    whole = pytest.approx(cross_entropy(logits, labels).item())  # over the eight labels
    *shares, no_row = (
        step_loss(SequenceClassifierOutput(logits=logits[part]), labels[part], num_items_in_batch=8)
        for part in (slice(0, 5), slice(5, 6), slice(6, 9), slice(8, 9))
    )
    assert (sum(shares), no_row) == (whole, 0)
    assert step_loss(SequenceClassifierOutput(logits=logits), labels) == whole


def test_the_interval_of_accuracy_is_wilsons(scores: ModuleType) -> None:
    """8 of 10, z = 1.96: (0.8 + z^2/20 -+ z sqrt(0.016 + z^2/400)) / (1 + z^2/10); 10 of 10: from 10 / (10 + z^2)."""
    assert scores.accuracy_interval((1,) * 8 + (0, 2), (1,) * 10) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    assert scores.accuracy_interval((1,) * 10, (1,) * 10) == (pytest.approx(0.72247, abs=1e-5), 1)


def test_macro_f1_is_the_mean_of_the_classes(scores: ModuleType) -> None:
    """F1 of the classes: 2 * 2 / (2 + 3), 2 * 1 / (2 + 2), 2 * 1 / (2 + 1)."""
    assert scores.macro_f1(FOUND, MEANT) == pytest.approx((4 / 5 + 1 / 2 + 2 / 3) / 3)
    assert scores.macro_f1((0, 0), (0, 1)) == pytest.approx((2 / 3 + 0) / 2)  # a class that is never found


def test_the_interval_of_macro_f1_brackets_it_and_narrows_with_rows(scores: ModuleType) -> None:
    (low, high), (later_low, later_high), again = (
        scores.macro_f1_interval(FOUND * times, MEANT * times) for times in (10, 50, 10)
    )
    assert low < later_low < scores.macro_f1(FOUND, MEANT) < later_high < high
    assert later_high - later_low < (high - low) / 1.5
    assert (again, scores.macro_f1_interval((1,), (1,))) == ((low, high), (0.0, 1.0)), "of one row it is not known"


def test_what_was_found_is_summed_up_and_written_line_by_line(
    scores: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the matrix, the classes meant are lines and those found columns, also those that no row has."""
    classified = scores.Classified(LABELS, FOUND, MEANT)
    summary = classified.summary()
    assert [summary[name] for name in ("accuracy", "rows", "labels")] == [pytest.approx(4 / 6), 6, list(LABELS)]
    assert summary["confusion"] == [[2, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert scores.Classified(LABELS, (0,), (0,)).summary()["confusion"] == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert str(classified).startswith("accuracy 0.6667 (0.300 to 0.903), macro-F1 0.656")
    lines = classified.lines([{"text": f'"{n}",\n', "label": LABELS[label]} for n, label in enumerate(MEANT)])
    assert lines[2] == {"row": 3, "text": '"2",\n', "label": "events", "found": "prices"}
    log = SimpleNamespace(rank=Rank(0, 1, "cpu", "python"), folder=tmp_path)
    report_predictions(log, "after_original_base", lines, classified)
    assert capsys.readouterr().out.startswith("after tuning, original base: accuracy 0.6667")
    with (tmp_path / "predictions_after_original_base.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [{**line, "row": str(line["row"])} for line in lines]


def test_numbers_are_written_to_their_last_digit_and_what_is_missing_stays_empty(tmp_path: Path) -> None:
    log = SimpleNamespace(rank=Rank(0, 1, "cpu", "python"), folder=tmp_path)
    report_predictions(log, "before", [{"row": 1, "score": 0.1 + 0.2, "tuned": None}, {"row": 2, "score": 1e-09}], "")
    written = (tmp_path / "predictions_before.csv").read_bytes()
    assert written == b"row,score,tuned\r\n1,0.30000000000000004,\r\n2,1e-09,\r\n"
