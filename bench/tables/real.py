"""The tables of docs/real_model.md, of the records of `python docs/measure.py --real`: what tuning brings and costs."""

from bench.tables.table import Table, column
from common.records.store import REAL, Record, kept_records
from common.reporting.columns import Column
from common.reporting.rows import Row, completed, grouped, kind_name, kind_of
from common.reporting.tasks import score

ORDER = ("Full fine-tuning", "LoRA", "LoRA with DDP", "QLoRA")


def real_runs() -> list[Record]:
    """Return the completed runs on the real model."""
    return completed(kept_records(REAL))


def settings(_: list[Record] | None = None) -> list[Row]:
    """Return a row for each technique, rank and rate, with its runs (one per seed)."""
    rows = grouped(real_runs(), lambda run: (kind_of(run), _rank(run), run["config"]["learning_rate"]))
    return sorted(rows, key=lambda row: (ORDER.index(kind_name(row)), _rank(row), row["config"]["learning_rate"]))


def loss_before(run: Record) -> float:
    """Return the validation loss before the first step."""
    return dict(map(tuple, run["validation_losses"]))[0]


def gain(run: Record) -> float:
    """Return the lowest validation loss as a share of that before training."""
    return run["best_validation_loss"] / loss_before(run)


def forgotten(run: Record) -> float:
    """Return by how much the loss on other texts has risen, in nats a token."""
    quality = run["quality"]
    return quality["after"]["general_loss"] - quality["before"]["general_loss"]


def _rank(run: Row) -> int:
    return run["config"]["lora_r"] if run["technique"] != "full" else 0


WHAT = (
    Column("Approach", kind_name),
    Column("Rank", lambda row: _rank(row) or None, "{}", none="-"),
    Column("Learning rate", "config.learning_rate", "{:g}"),
)
_, _, ROUGE_L = score("ROUGE-L", "rougeL", "{:.3f}")
TABLES = {
    "real-gain": Table(
        settings,
        (
            *WHAT,
            Column("Validation loss before", loss_before, "{:.3f}"),
            Column("Lowest after", "best_validation_loss", "{:.3f}", over_seeds=True),
            Column("Share", gain, "{:.2f}", over_seeds=True),
            ROUGE_L,
        ),
    ),
    "real-forgetting": Table(
        settings,
        (
            *WHAT,
            Column("Loss on other texts before", "quality.before.general_loss", "{:.3f}"),
            Column("After", "quality.after.general_loss", "{:.3f}", over_seeds=True),
            Column("Drift of answers", "quality.after.answer_drift", "{:.3f}", over_seeds=True),
        ),
    ),
    "real-cost": Table(settings, (*WHAT, column("time"), column("tokens_per_s"), column("peak"), column("planned"))),
}
