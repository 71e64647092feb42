"""What stands in a record: the type of each value that is read, and what a completed run has of them."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from common.base.errors import BadInputError, begin_of
from common.base.run_config import DEFAULTS, RUN_NAME_PATTERN, idle_settings
from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES

MOST = 10**18  # more than any count, number of bytes or seconds of a run


def _refused(is_wrong: Callable[[Any], bool], why: str) -> AfterValidator:
    """Return the check that refuses values with these words."""

    def check(value: Any) -> Any:
        if is_wrong(value):
            raise ValueError(why)
        return value

    return AfterValidator(check)


def _keys(types: dict[str, Any]) -> Any:
    """Return the type of a dictionary with these keys; one with a question mark at its end may be missing."""
    return TypedDict(
        "Keys", {key.rstrip("?"): NotRequired[kind] if key.endswith("?") else kind for key, kind in types.items()}
    )


Text = Annotated[str, Field(max_length=100_000)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Some = Annotated[int, Field(ge=1, le=MOST)]
Amount = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=MOST, allow_inf_nan=False)]
Figure = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]
# A loss or a score, which is no number or infinite where a run diverged
Score = Annotated[float, _refused(lambda score: 1e100 < abs(score) < math.inf, "it is larger than any loss")]
Point = Annotated[list[Score], Field(min_length=2, max_length=2)]
Interval = Annotated[list[Figure], Field(min_length=2, max_length=2)]
NotEmpty = Field(min_length=1)

# how good a model is; None where nobody judged, or the data name no facts
Scores = _keys({
    **dict.fromkeys(
        ("similarity_score?", "similarity_score_tuned?", "similarity_score_minilm?", "shuffled_score?",
         "shuffled_score_minilm?", "facts_said_share?", "commonest_facts_said_share?", "swapped_facts_said_share?",
         "preference_accuracy?", "chosen_reward?", "reward_margin?", "invented_dates_share?", "undated_share?",
         "words?", "general_loss?", "answer_drift?", "distinct_share?", "reward?", "ended_share?"),
        Score | None,
    ),
    "facts_said_share_by_kind?": dict[Text, Score | None],
    **dict.fromkeys(("accuracy?", "macro_f1?", "rouge1?", "rouge2?", "rougeL?", "rougeLsum?", "exact_share?"), Score),
    **dict.fromkeys(("accuracy_interval?", "macro_f1_interval?"), Interval),
    **dict.fromkeys(("questions?", "rows?"), Count),
    "labels?": list[Text],
    "confusion?": list[list[Count]],
})  # fmt: skip
# of a rank between two passes
Held = _keys({"weights_bytes": Some, "gradients_bytes": Count, "optimizer_bytes": Count})
# of a device: what was planned, and its peaks
Memory = _keys(
    {
        **dict.fromkeys(("planned_gib", "peak_allocated_gib"), Amount | None),
        **dict.fromkeys(("peak_rss_gib", "total_gib"), Amount),
        **dict.fromkeys(("planned_gib_by_phase?", "peak_gib_by_phase?"), dict[Text, Amount]),
        "rank": Count,
        "device": Text,
        "peak_training_gib?": Positive | None,
    }
)
SCHEDULES = ("naive", "gpipe", "1f1b")

# A record. What may be missing came with later code, is of some runs only, or was not reached; more keys may stand
Fields = _keys({
    "status": Literal["completed", "failed", "oom", "interrupted"],
    "technique": Annotated[Text, _refused(lambda name: name not in TECHNIQUES, "it is no technique known here")],
    "parallel": Annotated[Text, _refused(lambda name: name not in PARALLELISMS, "it is no parallelism known here")],
    "run_folder": Annotated[
        Text,
        _refused(
            lambda folder: folder.startswith(("/", "~")) or ".." in folder.split("/") or not folder.isprintable(),
            "it is no folder below the repository",
        ),
    ],
    "run_name": Annotated[Text, _refused(lambda name: not RUN_NAME_PATTERN.fullmatch(name), "it is no name of a run")],
    "launcher": Text,
    "command": Text,
    "started_at": Text,
    "config": dict[Text, Text | bool | int | float],
    "environment": _keys({
        "packages": dict[Text, Text | None],
        "devices": list[Text],
        "threads_per_rank": Some | None,
        "commit": Text | None,
    }),
    "phases_s": dict[Text, Amount],
    "model_commit?": Text | None,
    "error?": Text,
    "cost?": _keys({"usd": Amount}) | None,
    "planned?": _keys({"batch": _keys({"rows": Some, "labelled": Count}), "sent_bytes?": Amount}) | None,
    "data?": _keys({"training_rows": Count, "training_tokens": Count}) | None,
    "quality?": _keys({"before?": Scores | None, "after": Scores, "after_original_base?": Scores | None}),
    "world?": Annotated[list[_keys({"device": Text, "samples": Count, "tokens": Count})], NotEmpty],
    "effective_batch_size?": Some,
    "peak_learning_rate?": Amount,
    "steps?": Some,
    "train_time_s?": Positive,
    "reporting_s?": Amount,
    "tokens_per_s?": Positive,
    "trained_parameters?": Count,
    "flops_per_token?": Positive,
    "updated_share?": Figure | None,
    "training_losses?": list[Point],
    "validation_losses?": Annotated[list[Point], NotEmpty],
    "validation_accuracies?": list[Point],
    "best_validation_loss?": Score,
    "best_accuracy?": Score,
    "merged_validation_losses?": dict[Text, Score],
    "checkpoints?": _keys({"best": Text | None, "went_on_from": Text | None}),
    "memory?": Annotated[list[Memory], NotEmpty],
    "machine_ceiling?": _keys({
        "strong": Positive,
        "weak?": Positive,
        "one_rank_global_batch_step_s": Amount,
        "one_rank_share_step_s?": Amount,
        "all_ranks_share_step_s": Amount,
        "reached?": Amount | None,
    }) | None,
    "held?": _keys({"per_rank": Annotated[list[Held], NotEmpty], "whole": Held}),
    "sent?": _keys({"bytes": Amount, "by_collective": dict[Text, Amount]}),
    "quantization?": _keys({
        "bits_per_quantized_weight": Amount,
        "weights_gib": Positive,
        "unquantized_gib": Amount,
        "quantized_share": Figure,
    }),
    "stages?": list[_keys({"idle_share": Figure})] | None,
    "pipeline?": _keys({
        **dict.fromkeys(("stages", "micro_batches"), Some),
        "step_s": _keys(dict.fromkeys(SCHEDULES, Positive)),
        **dict.fromkeys(("idle_share", "peak_activations_mib"), _keys(dict.fromkeys(SCHEDULES, list[Figure]))),
        **dict.fromkeys(
            ("ideal_speedup", "machine_ceiling", "allowed_speedup", "small_micro_batches_factor",
             "unequal_stages_factor", "sending_and_waiting_factor", "naive_factor", "speedup", "share_of_allowed"),
            Figure,
        ),
    }) | None,
    "gallery?": list[dict[Text, str | bool | None]],
})  # fmt: skip
RECORD = TypeAdapter(Fields)

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
        idle_settings({name: value for name, value in record["config"].items() if name in DEFAULTS})
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
