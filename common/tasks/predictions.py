"""Predictions for all rows of a split: made by all ranks in batches sorted by length, and written by rank 0."""

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pandas as pd
import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from common.base.inert import csv_cell
from common.models.answering import sharing_of
from common.models.shards import tensors_of
from common.runtime.recorder import RunRecorder


def _title_of(when: str) -> str:
    """Return `before tuning` or `after tuning`; words behind an underscore of `when` say which of several models."""
    moment, _, model_words = when.partition("_")
    return f"{moment} tuning" + (f", {model_words.replace('_', ' ')}" if model_words else "")


def predict_rows(
    log: RunRecorder,
    lengths: list[int],
    what: str,
    when: str,
    predict: Callable[[list[int]], Iterable[Any]],
    *models: torch.nn.Module,
) -> list[Any]:
    """Return the prediction for every row, in the data's order and the same on every rank; no row is predicted twice.

    Every rank takes its share of the rows, longest first by `lengths` in tokens, so that batches hold little padding.
    `predict` gets the numbers of a batch's rows. Ranks that share the first of the `models` (`load_answering`) take
    their rows together. In the first batch memory is counted, `models` with it. `what` names the predictions.
    """
    rank, sharing = log.rank, sharing_of(models[0], log.rank)
    size = log.run.rows_evaluated_at_once * log.run.shares_answered(sharing.stages)
    share = sorted(range(len(lengths)), key=lambda number: -lengths[number])[sharing.group :: sharing.groups]
    batches = [share[start : start + size] for start in range(0, len(share), size)]
    title = f"{rank.prefix} {what} {_title_of(when)}, batches"
    predicted: dict[int, Any] = {}
    memory, weights = log.memory, [tensor for model in models for tensor in tensors_of(model)]
    is_silent = not rank.is_main or log.run.log_level == "warning"
    for numbers in tqdm(batches, desc=title, disable=is_silent, file=sys.stdout, delay=2, mininterval=2):
        with nullcontext() if predicted else memory.counting(memory.current, {"weights": weights}):
            predicted.update(zip(numbers, predict(numbers), strict=True))
    of_all = dict(gather_object(list(predicted.items()) if sharing.is_last else []))
    return [of_all[number] for number in range(len(lengths))]


def report_predictions(log: RunRecorder, when: str, rows: list[dict[str, object]], quality: object) -> None:
    """Write `rows` as predictions_`when`.csv, for `samples.predictions`, and print `quality`; on rank 0 only."""
    if log.rank.is_main:
        table = pd.DataFrame(rows, dtype=object).map(csv_cell)
        table.to_csv(log.folder / f"predictions_{when}.csv", index=False, lineterminator="\r\n")
        print(f"{_title_of(when)}: {quality}")
