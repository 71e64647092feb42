"""The tables of docs/real_model.md, of the records of docs/measure.py and bench/variants.py."""

from bench.page.runs import rise_on_general_texts
from bench.tables.table import Table, column
from bench.tables.tasks import generating_and_learning
from common.base.run_config import RunConfig
from common.records.store import REAL, VARIANTS, Record, kept_records
from common.reporting.columns import Column
from common.reporting.rows import Row, completed, grouped, kind_name, kind_of, settings_of_task
from common.reporting.tasks import REWARD, ROUGE_L

ORDER = ("Full fine-tuning", "LoRA", "LoRA with DDP", "QLoRA")


def real_runs() -> list[Record]:
    """Return the completed runs on the real model that learn from docstrings."""
    return [run for run in completed(kept_records(REAL)) if run["config"]["task"] == "chat"]


def rewarded_runs(_: list[Record]) -> list[Row]:
    """Return those that learn from a reward."""
    return settings_of_task(kept_records(REAL), "rewards")


def _sampled_right(row: Row) -> str:
    """Return the share of right ones among the answers that were learnt from, in the first and last steps logged."""
    (_, first), *_, (_, last) = row["rollouts"]["reward"]
    return f"{first:.0%} to {last:.0%}"


def settings(_: list[Record] | None = None) -> list[Row]:
    """Return a row for each technique, rank and rate, with its runs (one per seed)."""
    rows = grouped(real_runs(), lambda run: (kind_of(run), rank_of(run), run["config"]["learning_rate"]))
    return sorted(rows, key=lambda row: (ORDER.index(kind_name(row)), rank_of(row), row["config"]["learning_rate"]))


def variants(_: list[Record]) -> list[Row]:
    """Return the runs of PEFT's variants of LoRA, and of full fine-tuning that of the same seed that gains most."""
    seed = RunConfig.seed
    full = min((run for run in real_runs() if (run["technique"], run["config"]["seed"]) == ("full", seed)), key=gain)
    rows = sorted(completed(kept_records(VARIANTS)), key=lambda run: (_variant(run), run["config"]["learning_rate"]))
    return [*rows, full]


def loss_before(run: Record) -> float:
    """Return the validation loss before the first step."""
    return dict(map(tuple, run["validation_losses"]))[0]


def gain(run: Record) -> float:
    """Return the lowest validation loss as a share of that before training."""
    return run["best_validation_loss"] / loss_before(run)


def tensors_gib(run: Record) -> tuple[float, float]:
    """Return what all tensors take at training's highest moment, as planned and as measured, of the fullest rank."""
    pairs = [[entry[f"{kind}_gib_by_phase"]["training"] for kind in ("planned", "peak")] for entry in run["memory"]]
    return max(pairs, key=lambda pair: pair[1])


def peak_rss_gib(run: Record) -> float:
    """Return the peak of the whole run's resident memory, of the fullest rank."""
    return max(entry["peak_rss_gib"] for entry in run["memory"])


def rank_of(run: Row) -> int:
    """Return the rank of a run's adapters; 0 = it has none."""
    return run["config"]["lora_r"] if run["technique"] != "full" else 0


def _variant(run: Row) -> str:
    """Return the name that bench/variants.py gives a variant; full fine-tuning is none of them."""
    return run.get("variant") or run["technique"]


WHAT = (
    Column("Approach", kind_name),
    Column("lora_r", lambda row: rank_of(row) or None, "{}", none="-"),
    Column("Learning rate", "config.learning_rate", "{:g}"),
)
FORGOTTEN = (
    Column("Change of the loss on general texts", rise_on_general_texts, "{:+.3f}", over_seeds=True),
    Column("KL divergence", "quality.after.answer_drift", "{:.3f}", over_seeds=True),
)
TABLES = {
    "real-gain": Table(
        settings,
        (
            *WHAT,
            Column("Validation loss", "best_validation_loss", "{:.3f}", over_seeds=True),
            Column("Ratio to before", gain, "{:.0%}", over_seeds=True),
            ROUGE_L,
        ),
    ),
    "real-forgetting": Table(
        settings,
        (*WHAT, *FORGOTTEN),
    ),
    "real-rewards": Table(
        rewarded_runs,
        (
            REWARD.titled("Right greedy answers"),
            Column("Right samples", _sampled_right),
            FORGOTTEN[0].titled("General texts"),
            FORGOTTEN[1],
            Column("Answering + learning", generating_and_learning),
        ),
    ),
    "real-variants": Table(
        variants,
        (
            Column("Variant", _variant),
            WHAT[2],
            Column("Trainable", "trained_parameters", "{:,}"),
            Column("Loss relative to before", gain, "{:.0%}"),
            Column("General texts", rise_on_general_texts, "{:+.2f}"),
            Column("KL divergence", "quality.after.answer_drift", "{:.2f}"),
            column("time"),
            Column("Peak RSS (GiB)", peak_rss_gib, "{:.2f}"),
        ),
    ),
    "real-cost": Table(
        settings,
        (
            *WHAT,
            column("mean_time"),
            Column("Tokens/s", "tokens_per_s", "{:,.0f}", over_seeds=True),
            Column("Tensors, planned / measured (GiB)", tensors_gib, "{0[0]:.2f} / {0[1]:.2f}"),
            Column("Peak RSS (GiB)", peak_rss_gib, "{:.2f}", over_seeds=True),
        ),
    ),
}
