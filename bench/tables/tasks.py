"""The tables of text classification (3.1), pictures (3.3), preference tuning (3.4) and reinforcement learning (3.5)."""

from functools import partial
from itertools import product
from statistics import fmean

from bench.tables.footnotes import footnote
from bench.tables.table import NOT_PUBLISHED, Table, published, waiting_for_task
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.records.store import Record
from common.reporting.columns import NO_BASELINE, Column
from common.reporting.rows import NOT_RUN, Row, clock, in_parts, setting_name, settings_of_task
from common.reporting.tasks import ACCURACY, ALLOWED, DATES, FACTS, REWARD, SAMPLES_DIFFER, SHARE, WORDS, with_interval

classified = partial(settings_of_task, task="classification")
answered = partial(settings_of_task, task="visual_questions")
preferred = partial(settings_of_task, task="preferences")


def rewarded(records: list[Record]) -> list[Row]:
    """Return a row for each setting with rewards; another loss, and the control, come last."""
    return sorted(settings_of_task(records, "rewards"), key=_is_other)


def _is_other(row: Row) -> bool:
    """Return whether a run has another loss than its task's own, or is a control."""
    config = row["config"]
    turned = config.get("exchange_answers") or "-" in config.get("reward_weights", "")
    return bool(turned) or config.get("loss_type", "auto") != "auto"


def _compared(records: list[Record]) -> list[Row]:
    """Return what was learnt on one device from chosen answers, from pairs, and from a reward, without variants."""
    rows = [row for row in (*preferred(records), *rewarded(records)) if len(row["world"]) == 1]
    plain = [row for row in rows if not _is_other(row) or row["config"].get("loss_type") == "sft"]
    return sorted(plain, key=lambda row: row["config"].get("loss_type") != "sft")


# -- text classification


def _peaks(row: Row) -> str:
    """Return each device's peak in training; evaluation afterwards needs more."""
    if row["status"] == NOT_PUBLISHED:
        return " / ".join(map(str, row["memory_gb"])) + " GB"
    peaks = [entry.get("peak_training_gib") for entry in row["memory"]]
    return " / ".join(NOT_RUN if peak is None else f"{peak:.2f}" for peak in peaks)


def _not_classified(records: list[Record]) -> list[Row]:
    """Return a row for each setting of a run folder for GPUs that nobody has run."""
    return [
        {
            **row,
            "technique": technique,
            "parallel": parallel,
            "config": row["config"] | ({"devices": 1} if PARALLELISMS[parallel].is_single else {}),
        }
        for row in waiting_for_task(records, "classification")
        for technique, parallel in product(row["goal"].techniques, row["goal"].parallelisms)
    ]


def _shared_by(row: Row) -> str:
    """Return `DDP`, or `naive PP` of a single micro-batch: how devices share a step, without the technique."""
    return "naive " * ("naive" in in_parts(row)) + PARALLELISMS[row["parallel"]].label


def _shorter(row: Row) -> str:
    return setting_name(row).replace(" fine-tuning", "")


def _found_classified(records: list[Record], technique: str) -> list[Row]:
    """Return what others published, then what was measured here, with one technique: two tables are easier to read."""
    rows = [*published(metric="accuracy"), *classified(records)]
    return [row for row in rows if row["technique"] == technique]


PEAKS = Column("Training's peak memory per device (GiB)", _peaks)

# -- questions about pictures


def _by_kind(records: list[Record]) -> list[Row]:
    """Return fact recall by kind of question, before and after, a mean over seeds."""

    def mean(row: Row, when: str, kind: str) -> str:
        found = [run["quality"].get(when) or {} for run in row["seeds"]]
        shares = [each.get("facts_said_share_by_kind", {}).get(kind) for each in found]
        return NO_BASELINE if None in shares else f"{100 * fmean(shares):.0f}"

    return [
        {"Setting": setting_name(row)}
        | {
            kind or "no kind": f"{mean(row, 'before', kind)} / {mean(row, 'after', kind)}"
            for kind in row["quality"]["after"]["facts_said_share_by_kind"]
        }
        for row in answered(records)
    ]


SHARES = ("right_before", "commonest", "right_after", "swapped")

# -- preference tuning


def _reference_time(row: Row) -> str:
    """Return how long the reference took before training; with adapters its pass is part of each step."""
    seconds = [run["phases_s"]["reference"] for run in row["seeds"] if "reference" in run["phases_s"]]
    return clock(fmean(seconds)) if seconds else "in each step"


def generating_and_learning(row: Row) -> str:
    """Return how long a rank answered, and how long it learnt from the answers."""
    run = row["seeds"][0]
    answering_s = run["rollouts"]["generating_s"]
    return f"{clock(answering_s)} + {clock(run['train_time_s'] - run['reporting_s'] - answering_s)}"


def _learnt_from(row: Row) -> str:
    if row["config"]["task"] == "rewards":
        return "a reward (GRPO)"
    return "chosen answers (SFT)" if row["config"].get("loss_type") == "sft" else "pairs (DPO)"


FACTS_SAID = FACTS.titled("Fact recall")
TRAINED = Column("Trained", lambda row: TECHNIQUES[row["technique"]].short)
DRIFT = Column("KL divergence", "quality.after.answer_drift", "{:.3f}", over_seeds=True)

TABLES = {
    "classification-settings": Table(
        lambda records: [*classified(records), *_not_classified(records), *published(metric="accuracy")],
        ("setting", "figures", "model_id", "devices", "epochs", "seeds", "best_accuracy", PEAKS, "time",
         "speedup_of_task", "idle"),
    ),
    "classification-details": Table(
        classified,
        ("setting", ACCURACY.titled("Test accuracy (95 % interval)"),
         Column("Test macro-F1 (95 % interval)", partial(with_interval, score="macro_f1")), "planned",
         ALLOWED.titled("Allowed by machine and bubble"), SHARE.titled("Share of allowed, steps alone"), "command"),
    ),
    "classification-front": Table(
        classified,
        ("technique", "model_id", Column("Epochs", "config.num_train_epochs", "{} epochs"), "machine",
         Column("Setting", lambda row: PARALLELISMS[row["parallel"]].label + in_parts(row)), "device_count", "seeds",
         "best_accuracy", PEAKS.titled("Peak GiB"), "time as Time", "speedup_of_task"),
        shared=("Technique", "Model", "Epochs", "Machine"),
    ),
    **{
        f"found 3.1 {technique}": Table(
            partial(_found_classified, technique=technique),
            (Column(title, _shared_by), "short_figures", "short_devices", "best_accuracy as Accuracy",
             PEAKS.titled("Peak GiB"), "time as Time", "speedup_of_task"),
            footnote=footnote,
        )
        for technique, title in (("full", "Full fine-tuning"), ("lora", "LoRA"))
    },
    "found 3.3": Table(
        answered,
        (Column("Setting", _shorter), "short_devices", *SHARES, "mean_time as Time"),
        footnote=footnote,
    ),
    "found 3.4": Table(
        preferred,
        (Column("Setting", _shorter), "short_devices", "preferred as Accuracy", DATES, FACTS_SAID, "mean_time as Time"),
        footnote=footnote,
    ),
    "pictures-settings": Table(
        lambda records: [*answered(records), *waiting_for_task(records, "visual_questions")],
        ("setting", "figures", "model_id", "devices", "seeds", *SHARES, "mean_time", "speedup_of_task", "planned",
         "command"),
    ),
    "pictures-kinds": Table(_by_kind),
    "pictures-front": Table(
        answered,
        ("model_id", "machine", "setting", "seeds", *SHARES, "mean_time as Time"),
        shared=("Model", "Machine"),
    ),
    "preferences-settings": Table(
        lambda records: [*preferred(records), *waiting_for_task(records, "preferences")],
        ("setting", "figures", "model_id", "devices", "seeds", "preferred", "reward", DATES, FACTS_SAID, WORDS,
         Column("Reference", _reference_time), "mean_time", "speedup_of_task", "planned", "command"),
    ),
    "found 3.5": Table(
        rewarded,
        (Column("Setting", _shorter), "short_devices", DATES, FACTS_SAID, "mean_time as Time"),
        footnote=footnote,
    ),
    "rewards-settings": Table(
        lambda records: [*rewarded(records), *waiting_for_task(records, "rewards")],
        ("setting", "figures", "model_id", "devices", "seeds", REWARD, DATES, FACTS_SAID, WORDS, SAMPLES_DIFFER,
         Column("Generating + learning", generating_and_learning), "mean_time", "speedup_of_task", "planned",
         "command"),
    ),
    "rewards-front": Table(
        rewarded,
        ("model_id", "machine", "setting", "seeds", REWARD, DATES, FACTS_SAID, SAMPLES_DIFFER, "mean_time as Time"),
        shared=("Model", "Machine"),
    ),
    "answers-compared": Table(
        _compared,
        (Column("Learnt from", _learnt_from), TRAINED, DATES, DRIFT, "mean_time as Time"),
        footnote=footnote,
    ),
    "answers-compared-all": Table(
        _compared,
        (Column("Learnt from", _learnt_from), TRAINED, "seeds", DATES, FACTS_SAID, WORDS, SAMPLES_DIFFER, DRIFT,
         Column("General loss", "quality.after.general_loss", "{:.3f}", over_seeds=True), "mean_time as Time"),
    ),
    "preferences-front": Table(
        preferred,
        ("model_id", "machine", "setting", "seeds", "preferred", DATES, FACTS_SAID, "mean_time as Time"),
        shared=("Model", "Machine"),
    ),
}  # fmt: skip
