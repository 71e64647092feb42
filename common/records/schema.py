"""What stands in a record: the type of each value that is read, and what a completed run has of them."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema as kinds

from common.base.errors import BadInputError, begin_of
from common.base.run_config import DEFAULTS, RUN_NAME_PATTERN, checked_alone
from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES

# Pydantic's own schemas: to make them of types would take the planner a third of a second
MOST = 10**18  # more than any count, number of bytes or seconds of a run


def _not(is_wrong: Callable[[Any], bool], why: str, kind: CoreSchema) -> CoreSchema:
    """Return values of this kind but those that are wrong, which are refused with these words."""

    def check(value: Any) -> Any:
        if is_wrong(value):
            raise ValueError(why)
        return value

    return kinds.no_info_after_validator_function(check, kind)


def _keys(fields: dict[str, CoreSchema]) -> CoreSchema:
    """Return a dictionary with these keys; one with a question mark at its end may be missing."""
    return kinds.typed_dict_schema(
        {key.rstrip("?"): kinds.typed_dict_field(kind, required=not key.endswith("?")) for key, kind in fields.items()}
    )


TEXT = kinds.str_schema(max_length=100_000)
_or_none, _by_name = kinds.nullable_schema, partial(kinds.dict_schema, TEXT)
COUNT, SOME = (kinds.int_schema(ge=least, le=MOST) for least in (0, 1))
AMOUNT = kinds.float_schema(ge=0, le=MOST, allow_inf_nan=False)
POSITIVE = kinds.float_schema(gt=0, le=MOST, allow_inf_nan=False)
FIGURE = kinds.float_schema(ge=-MOST, le=MOST, allow_inf_nan=False)
# A loss or a score, which is no number or infinite where a run diverged
SCORE = _not(lambda score: 1e100 < abs(score) < math.inf, "it is larger than any loss", kinds.float_schema())
POINT = kinds.list_schema(SCORE, min_length=2, max_length=2)
INTERVAL = kinds.list_schema(FIGURE, min_length=2, max_length=2)

# how good a model is; None where nobody judged, or the data name no facts
QUALITY = _keys({
    **dict.fromkeys(
        ("similarity_score?", "similarity_score_tuned?", "similarity_score_minilm?", "shuffled_score?",
         "shuffled_score_minilm?", "facts_said_share?", "commonest_facts_said_share?", "swapped_facts_said_share?",
         "preference_accuracy?", "chosen_reward?", "reward_margin?", "invented_dates_share?", "undated_share?",
         "words?", "general_loss?", "answer_drift?", "distinct_share?", "reward?", "ended_share?"),
        _or_none(SCORE),
    ),
    "facts_said_share_by_kind?": _by_name(_or_none(SCORE)),
    **dict.fromkeys(("accuracy?", "macro_f1?", "rouge1?", "rouge2?", "rougeL?", "rougeLsum?", "exact_share?"), SCORE),
    **dict.fromkeys(("accuracy_interval?", "macro_f1_interval?"), INTERVAL),
    **dict.fromkeys(("questions?", "rows?"), COUNT),
    "labels?": kinds.list_schema(TEXT),
    "confusion?": kinds.list_schema(kinds.list_schema(COUNT)),
})  # fmt: skip
# of a rank between two passes
HELD = _keys({"weights_bytes": SOME, "gradients_bytes": COUNT, "optimizer_bytes": COUNT})
# of a device: what was planned, and its peaks
MEMORY = _keys({
    **dict.fromkeys(("planned_gib", "peak_allocated_gib"), _or_none(AMOUNT)),
    **dict.fromkeys(("peak_rss_gib", "total_gib"), AMOUNT),
    **dict.fromkeys(("planned_gib_by_phase?", "peak_gib_by_phase?"), _by_name(AMOUNT)),
    "rank": COUNT,
    "device": TEXT,
    "peak_training_gib?": _or_none(POSITIVE),
})  # fmt: skip
SCHEDULES = ("naive", "gpipe", "1f1b")
BY_SCHEDULE = _keys(dict.fromkeys(SCHEDULES, kinds.list_schema(FIGURE)))

# A record. What may be missing came with later code, is of some runs only, or was not reached; more keys may stand
FIELDS = _keys({
    "status": kinds.literal_schema(["completed", "failed", "oom", "interrupted"]),
    "technique": _not(lambda name: name not in TECHNIQUES, "it is no technique known here", TEXT),
    "parallel": _not(lambda name: name not in PARALLELISMS, "it is no parallelism known here", TEXT),
    "run_folder": _not(
        lambda folder: folder.startswith(("/", "~")) or ".." in folder.split("/") or not folder.isprintable(),
        "it is no folder below the repository",
        TEXT,
    ),
    "run_name": _not(lambda name: not RUN_NAME_PATTERN.fullmatch(name), "it is no name of a run", TEXT),
    "launcher": TEXT,
    "command": TEXT,
    "started_at": TEXT,
    "config": _by_name(kinds.union_schema([TEXT, kinds.bool_schema(), kinds.int_schema(), kinds.float_schema()])),
    "environment": _keys({
        "packages": _by_name(_or_none(TEXT)),
        "devices": kinds.list_schema(TEXT),
        "threads_per_rank": _or_none(SOME),
        "commit": _or_none(TEXT),
    }),
    "phases_s": _by_name(AMOUNT),
    "model_commit?": _or_none(TEXT),
    "error?": TEXT,
    "cost?": _or_none(_keys({"usd": AMOUNT})),
    "planned?": _or_none(
        _keys({"batch": _keys({"rows": SOME, "labelled": COUNT}), "sent_bytes?": AMOUNT})
    ),
    "data?": _or_none(_keys({"training_rows": COUNT, "training_tokens": COUNT})),
    "quality?": _keys({"before?": _or_none(QUALITY), "after": QUALITY, "after_original_base?": _or_none(QUALITY)}),
    "world?": kinds.list_schema(_keys({"device": TEXT, "samples": COUNT, "tokens": COUNT}), min_length=1),
    "effective_batch_size?": SOME,
    "peak_learning_rate?": AMOUNT,
    "steps?": SOME,
    "train_time_s?": POSITIVE,
    "reporting_s?": AMOUNT,
    "tokens_per_s?": POSITIVE,
    "trained_parameters?": COUNT,
    "flops_per_token?": POSITIVE,
    "updated_share?": _or_none(FIGURE),
    "training_losses?": kinds.list_schema(POINT),
    "validation_losses?": kinds.list_schema(POINT, min_length=1),
    "validation_accuracies?": kinds.list_schema(POINT),
    "best_validation_loss?": SCORE,
    "best_accuracy?": SCORE,
    "merged_validation_losses?": _by_name(SCORE),
    "checkpoints?": _keys({"best": _or_none(TEXT), "went_on_from": _or_none(TEXT)}),
    "memory?": kinds.list_schema(MEMORY, min_length=1),
    "machine_ceiling?": _or_none(_keys({
        "strong": POSITIVE,
        "weak?": POSITIVE,
        "one_rank_global_batch_step_s": AMOUNT,
        "one_rank_share_step_s?": AMOUNT,
        "all_ranks_share_step_s": AMOUNT,
        "reached?": _or_none(AMOUNT),
    })),
    "held?": _keys({"per_rank": kinds.list_schema(HELD, min_length=1), "whole": HELD}),
    "sent?": _keys({"bytes": AMOUNT, "by_collective": _by_name(AMOUNT)}),
    "quantization?": _keys({
        "bits_per_quantized_weight": AMOUNT,
        "weights_gib": POSITIVE,
        "unquantized_gib": AMOUNT,
        "quantized_share": FIGURE,
    }),
    "stages?": _or_none(kinds.list_schema(_keys({"idle_share": FIGURE}))),
    "pipeline?": _or_none(_keys({
        **dict.fromkeys(("stages", "micro_batches"), SOME),
        "step_s": _keys(dict.fromkeys(SCHEDULES, POSITIVE)),
        **dict.fromkeys(("idle_share", "peak_activations_mib"), BY_SCHEDULE),
        **dict.fromkeys(
            ("ideal_speedup", "machine_ceiling", "allowed_speedup", "small_micro_batches_factor",
             "unequal_stages_factor", "sending_and_waiting_factor", "naive_factor", "speedup", "share_of_allowed"),
            FIGURE,
        ),
    })),
    "gallery?": kinds.list_schema(_by_name(_or_none(kinds.union_schema([kinds.str_schema(), kinds.bool_schema()])))),
})  # fmt: skip
RECORD = SchemaValidator(FIELDS)

# -- what a completed run has

FIGURES = ("quality", "world", "effective_batch_size", "peak_learning_rate", "steps", "train_time_s", "reporting_s",
           "tokens_per_s", "trained_parameters", "flops_per_token", "training_losses", "validation_losses",
           "best_validation_loss", "memory")  # fmt: skip
# without the later ones, which older records lack
SETTINGS = ("model", "weights", "data", "precision", "device", "devices", "seed", "learning_rate",
            "learning_rate_scaling", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
            "micro_batches", "schedule", "quantization", "optim", "target_modules", "loop", "link", "train_rows",
            "gradient_exchange", "gradient_checkpointing")  # fmt: skip
# by what is shown of a task's runs (`Task.reporting`): the scores that stand in their tables
SCORES = {
    "": ("similarity_score", "similarity_score_tuned", "similarity_score_minilm", "shuffled_score",
         "shuffled_score_minilm", "facts_said_share", "questions"),
    "common.reporting.tasks:CLASSIFICATION": ("accuracy", "accuracy_interval", "macro_f1", "macro_f1_interval"),
    "common.reporting.tasks:SUMMARIZATION": ("rouge1", "rouge2", "rougeL", "rougeLsum", "exact_share"),
    "common.reporting.tasks:PICTURES": ("facts_said_share", "commonest_facts_said_share", "swapped_facts_said_share",
                                  "facts_said_share_by_kind"),
    "common.reporting.tasks:PREFERENCES": ("preference_accuracy", "chosen_reward", "invented_dates_share",
                                     "facts_said_share", "words"),
    "common.reporting.tasks:REWARDS": ("reward", "invented_dates_share", "facts_said_share", "words", "distinct_share"),
}  # fmt: skip
# scores of an adapter that was merged into the base before it was quantized
ORIGINAL_BASE = ("similarity_score_minilm", "facts_said_share")


def wrong_in(record: object, whole: bool = False) -> str:
    """Return a record's first wrong key, its value and why, or, with `whole`, what it lacks; empty: all is well."""
    try:
        RECORD.validate_python(record, strict=True)
        checked_alone({name: value for name, value in record["config"].items() if name in DEFAULTS})
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        place = ".".join(map(str, first["loc"])) or "it"
        value = f"{begin_of(repr(first['input']), 60)} ({first['msg'].removeprefix('Value error, ')})"
        more = f"; values that are wrong besides: {len(others)}" if others else ""
        return f"{place} is {'missing' if first['type'] == 'missing' else value}{more}"
    except BadInputError as error:
        return str(error)
    missing = ", ".join(_missing_from(record) if whole else ())
    return missing and f"of a completed run it lacks {missing}"


def _missing_from(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys that a record of a completed run lacks."""
    if record["status"] != "completed":
        return
    task, quality = TASKS[record["config"].get("task", "chat")], record.get("quality") or {}
    needed = (*FIGURES, *["best_accuracy"] * task.classifies)
    yield from sorted(name for name in needed if record.get(name) is None)
    settings = (*SETTINGS, "exchange_answers") if task.compares else SETTINGS
    yield from (f"config.{name}" for name in settings if name not in record["config"])
    scores = SCORES.get(task.reporting, ())
    for when, names in (("before", scores), ("after", scores), ("after_original_base", ORIGINAL_BASE)):
        if (found := quality.get(when)) is not None:
            yield from (f"quality.{when}.{name}" for name in names if name not in found)
    if task.compares and not quality.get("before"):
        yield "quality.before"
    if quality.get("after_original_base") and "merged_into_original" not in record.get("merged_validation_losses", {}):
        yield "merged_validation_losses.merged_into_original"
