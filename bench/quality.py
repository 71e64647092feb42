"""What the embedded default learns, over three seeds: no tuning, LoRA, full fine-tuning of the linear layers.

Learning rates and epochs were chosen on the validation split (LOG.md); these are the test split's figures.
"""

import statistics
import sys
import tempfile
from dataclasses import dataclass

from bench.entries import Entry, measured
from bench.recipe import Technique, load_material
from common.base.run_config import RunConfig
from common.checks.folder_training import trained_by_folder
from common.data.splits import load_splits
from common.models.loading import load_base_model
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.tasks.answers import Evaluation, Judge, evaluate, independent_judges

SEEDS = (42, 7, 8)
LEARNING_RATES: dict[Technique, float] = {"lora": RunConfig().learning_rate, "full": 1e-3}
LARGEST_SCORES: dict[Technique, float] = {"lora": 0.12, "full": 0.08}
LEAST_FACTS: dict[Technique, float] = {"lora": 0.85, "full": 0.95}
LEAST_SCORE_UNTUNED, LEAST_SCORE_SHUFFLED, LONGEST_TRAINING_S = 0.5, 0.3, 150.0
COMMAND = "python -m bench quality"


@dataclass(frozen=True)
class Tuned:
    """One training and what came of it."""

    train_time_s: float
    quality: Evaluation


def entries(techniques: list[Technique], seeds: tuple[int, ...], epochs: int, questions: int) -> list[Entry]:
    """The base before tuning and with shuffled answers, and each technique's mean and spread over the seeds."""
    with tempfile.TemporaryDirectory() as folder:
        untuned = _answer_untuned(_run("lora", seeds[0], epochs, questions, folder))
        figures = _untuned_entries(untuned)
        for technique in techniques:
            runs = [_run(technique, seed, epochs, questions, folder) for seed in seeds]
            figures += _tuned_entries(technique, [_tune(run) for run in runs])
    return figures


def _run(technique: Technique, seed: int, epochs: int, questions: int, folder: str) -> RunConfig:
    return RunConfig(
        technique=technique,
        learning_rate=LEARNING_RATES[technique],
        num_train_epochs=epochs,
        test_rows=questions,
        seed=seed,
        report_to="none",
        run_name=f"{technique}-seed{seed}",
        results_root=folder,
    )


def _judges(run: RunConfig, rank: Rank) -> list[Judge]:
    base = Judge("base", load_base_model(run, {"": rank.device}), load_material(run).tokenizer)
    return [base, *independent_judges(run, rank.device)]


def _answer_untuned(run: RunConfig) -> Evaluation:
    with rank_started(run) as rank:
        judges, log = _judges(run, rank), RunRecorder(run, rank)
        return evaluate(judges[0].model, judges[0].tokenizer, load_splits(run).test, judges, log, "before")


def _tune(run: RunConfig) -> Tuned:
    """Train by the run folders' recipe: validation and checkpoint every 5 % of the steps, the best comes back."""
    with rank_started(run) as rank:
        log, data = RunRecorder(run, rank), load_splits(run)
        loop = trained_by_folder(log, data)
        train_time_s = log.phases_s["training"]
        quality = evaluate(loop.model.eval(), loop.tokenizer, data.test, _judges(run, rank), log, "after")
    print(f"{run.technique}, seed {run.seed}: {quality}; {train_time_s:.0f} s", file=sys.stderr, flush=True)
    return Tuned(train_time_s, quality)


def _untuned_entries(untuned: Evaluation) -> list[Entry]:
    def entry(name: str, column: str, at_least: float | None = None) -> Entry:
        return measured(f"quality, {name}", untuned.mean(column), "distance", COMMAND, at_least)

    return [
        entry("no tuning: similarity score", "similarity_score", LEAST_SCORE_UNTUNED),
        entry("no tuning: similarity score by MiniLM", "similarity_score_minilm"),
        entry("right answers shuffled: similarity score", "shuffled_score", LEAST_SCORE_SHUFFLED),
        entry("right answers shuffled: similarity score by MiniLM", "shuffled_score_minilm"),
        measured("quality, no tuning: facts said", untuned.facts_said_share, "share", COMMAND),
    ]


def _tuned_entries(technique: Technique, runs: list[Tuned]) -> list[Entry]:
    def entry(name: str, values: list[float], unit: str, **bar: float) -> Entry:
        title = f"quality, {technique}, mean of {len(runs)} seeds: {name} ({min(values):.3f} to {max(values):.3f})"
        return measured(title, statistics.fmean(values), unit, command, **bar)

    command, largest, least = f"{COMMAND} --technique {technique}", LARGEST_SCORES[technique], LEAST_FACTS[technique]
    scores, minilm = ([run.quality.mean(f"similarity_score{by}") for run in runs] for by in ("", "_minilm"))
    longest_s = max(run.train_time_s for run in runs)
    return [
        entry("similarity score", scores, "distance", at_most=largest),
        entry("similarity score by MiniLM", minilm, "distance"),
        entry("facts said", [run.quality.facts_said_share for run in runs], "share", at_least=least),
        measured(f"quality, {technique}: longest training", longest_s, "s", command, at_most=LONGEST_TRAINING_S),
    ]
