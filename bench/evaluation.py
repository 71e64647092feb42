"""Answering the test questions in batches sorted by length, against one question at a time."""

import statistics
import sys
import tempfile
import time

from bench.entries import Entry, measured
from common.base.run_config import RunConfig
from common.data.splits import load_splits
from common.models.loading import load_base_model, load_tokenizer
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.tasks.answers import Evaluation, Judge, evaluate

BAR = 4.0
BATCHED_ROWS = 32


def entries(rounds: int, questions: int) -> list[Entry]:
    """The ratio of both times, median of the rounds.

    Raises:
        RuntimeError: the answers differ.
    """
    with tempfile.TemporaryDirectory() as folder, rank_started(_run(folder, 1, questions)) as rank:
        done = [_round(rank, folder, questions) for _ in range(rounds)]
    batched_s, single_s = (statistics.median(column) for column in zip(*done, strict=True))
    command, name = "python -m bench evaluation", f"evaluation of {questions} questions"
    ratio = statistics.median(single / batched for batched, single in done)
    return [
        measured(f"{name}, batches of {BATCHED_ROWS} sorted by length", batched_s, "s", command),
        measured(f"{name}, one at a time", single_s, "s", command),
        measured(f"{name}, times as fast in batches, same answers", ratio, "ratio", command, at_least=BAR),
    ]


def _run(folder: str, rows_at_once: int, questions: int) -> RunConfig:
    return RunConfig(
        per_device_eval_batch_size=rows_at_once,
        test_rows=questions,
        results_root=folder,
        run_name=f"batch{rows_at_once}",
    )


def _round(rank: Rank, folder: str, questions: int) -> tuple[float, float]:
    batched_s, batched = _evaluate(_run(folder, BATCHED_ROWS, questions), rank)
    single_s, single = _evaluate(_run(folder, 1, questions), rank)
    differing = sum(a["answer"] != b["answer"] for a, b in zip(batched.answers, single.answers, strict=True))
    if differing:
        raise RuntimeError(f"{differing} of {questions} answers differ between batches and one at a time.")
    print(f"in batches {batched_s:.1f} s, one at a time {single_s:.1f} s", file=sys.stderr, flush=True)
    return batched_s, single_s


def _evaluate(run: RunConfig, rank: Rank) -> tuple[float, Evaluation]:
    log, rows, tokenizer = RunRecorder(run, rank), load_splits(run).test, load_tokenizer(run)
    model = load_base_model(run, {"": "cpu"})
    start_s = time.perf_counter()
    done = evaluate(model, tokenizer, rows, [Judge("base", model, tokenizer)], log, "before")
    return time.perf_counter() - start_s, done
