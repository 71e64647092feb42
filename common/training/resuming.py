"""What a checkpoint says of its run, and whether another can resume from it: the same run, which may be longer."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.base.errors import BadInputError
from common.base.run_config import LAST, RunConfig
from common.base.specs import PARALLELISMS
from common.data.rows import Splits
from common.records.store import default_run_name
from common.runtime.machines import digest_of_model, digest_of_rows
from common.training.checkpoints import HOLDS, WEIGHTS, found_in, has_full_state, read_manifest, steps_at

FORM = 2  # of a checkpoint's files, by which an older one's are told from it
KEPT = (
    "technique", "task", "weights", "precision", "quantization", "picture_noise", "train_on", "max_length",
    "max_target_length", "beta", "exchange_answers", "warmup_steps", "lr_scheduler_type", "optim", "weight_decay",
    "max_grad_norm", "target_modules", "freeze_vision_tower", "lora_r", "lora_alpha", "lora_dropout",
    "use_rslora", "trainable_token_indices", "loss_type", "reward", "reward_weights", "num_generations",
    "num_iterations", "temperature", "epsilon",
)  # fmt: skip
"""Settings that a resumed run shares; others show in rows, ranks and steps, or may change, such as when to save."""


def about_run(run: RunConfig, rows: int, data: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a checkpoint says of its run, which a resumed run must share, but for its steps and learning rate.

    `rows`: how many there are to train on; `data`: what `digests_of` returns of them, where they are known.
    """
    settings: dict[str, Any] = {name: getattr(run, name) for name in KEPT}
    settings["target_modules"] = ",".join(sorted(run.target_names))
    if run.goal.rewards:
        settings["max_new_tokens"] = run.max_new_tokens
    if run.goal.summarizes:
        settings["partitions"] = run.partition_count
    if run.parallelism.pipelines:
        settings["device_map"] = run.device_map
    return {
        "form": FORM,
        "technique": "lora" if run.method.has_adapters else "full",  # `lora` stands for any adapters
        "parallel": run.parallel,
        "ranks": run.world_size,
        "rows_per_step": run.effective_batch_size,
        "rows": rows,
        "seed": run.seed,
        "order": "group_by_length" if run.groups_by_length else "random",
        "settings": settings,
        "data": dict(data or {}),
        "model": f"random weights of {run.model}" if run.weights == "random" else digest_of_model(run),
        "steps": run.total_steps(rows),
        "peak_learning_rate": run.peak_learning_rate,
    }


def digests_of(splits: Splits) -> dict[str, str]:
    """Return how many rows a run learns from and chooses by, with digests of these in their order."""
    parts = {"training": splits.train, "validation": splits.validation}
    return {name: f"{len(rows):,} rows, digest {digest_of_rows(rows)}" for name, rows in parts.items()}


def check_checkpoint(run: RunConfig, launcher: str, data: Mapping[str, str]) -> None:
    """Refuse a checkpoint that cannot be resumed, by its list alone: its bytes are read when training begins.

    `data`: as for `about_run`. How many rows there are to train on is not known yet: some may be left out, or divided.
    """
    own_name = run.run_name or default_run_name(run, launcher)
    own = run.results_folder(own_name)
    if run.resume_from_checkpoint == LAST:
        # a damaged one is named, and kept aside, when training begins
        for newest in list(filter(has_full_state, found_in(own / "checkpoints")))[:1]:
            _check_listed(newest, run, data)
        return
    folder = Path(run.resume_from_checkpoint).expanduser()
    steps = run.total_steps(_check_listed(folder, run, data))
    if steps_at(folder) >= steps:
        raise BadInputError(
            f"resume_from_checkpoint is {folder}, a checkpoint after step {steps_at(folder)}, and this run has "
            f"{steps}: nothing is left to train; raise --num_train_epochs or --max_steps."
        )
    if folder.resolve().is_relative_to(own.resolve()):
        raise BadInputError(
            f"resume_from_checkpoint lies in the results of a run called {own_name}, as this one would be: pass "
            f"--resume_from_checkpoint {LAST} to resume that run, or another --run_name."
        )


def _check_listed(folder: Path, run: RunConfig, data: Mapping[str, str]) -> int:
    """Refuse what cannot be resumed, and return how many rows it was trained on."""
    about = read_manifest(folder)["about"]
    check_resumable(run, about_run(run, about["rows"], data), folder, about)
    return about["rows"]


def check_resumable(run: RunConfig, own: Mapping[str, Any], folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse a checkpoint, `about` another training, that this run, `own`, cannot resume from (both: `about_run`)."""
    for reason in _differences(run, own, about):
        raise BadInputError(f"resume_from_checkpoint is {folder}, a checkpoint {reason}.")


def _differences(run: RunConfig, own: Mapping[str, Any], was: Mapping[str, Any]) -> Iterator[str]:
    anew = "leave --resume_from_checkpoint out to begin anew"
    if was.get("form") != FORM:
        yield f"that an older version of this repository wrote, in files that this one does not read: {anew}"
    if was.get(HOLDS) == WEIGHTS:
        yield f"with the best weights alone: pass one with a full state, or --resume_from_checkpoint {LAST}"
    changed = "make them equal, or rows would be skipped or repeated"
    factors = (
        f"per_device_train_batch_size {run.per_device_train_batch_size} x gradient_accumulation_steps "
        f"{run.gradient_accumulation_steps} x {run.data_parallel_ranks} ranks"
    )
    reasons = {
        "parallel": f"of {was['parallel']}, but parallel is {run.parallel}: pass --parallel {was['parallel']}",
        "technique": f"of {was['technique']}, but technique is {run.technique}: pass --technique {was['technique']}",
        "ranks": f"of {was['ranks']} ranks, but there are {own['ranks']}, and the parts of {run.parallel} fit no other "
        f"number: pass --devices {was['ranks']}",
        "rows_per_step": f"of steps of {was['rows_per_step']} rows, but this run's have {own['rows_per_step']} "
        f"({factors}): {changed}",
        "rows": f"with {was['rows']} training rows, but this run has {own['rows']}: {changed}",
        "seed": f"with {was['seed']} as seed, but this run has {run.seed}: {changed}",
        "order": f"whose rows came in the order {was['order']}, but this run's order is {own['order']}: pass "
        f"--train_sampling_strategy {was['order']}",
        "model": f"of another model or tokenizer ({was['model']}) than this run's ({own['model']}): pass the --model "
        f"that it was trained on, or {anew}",
    }
    if all(each.is_single or each.replicates for each in (PARALLELISMS[was["parallel"]], run.parallelism)):
        del reasons["parallel"]  # every rank has all
    if run.parallelism.resumes_on_other_ranks:
        del reasons["ranks"]
    yield from (reason for name, reason in reasons.items() if was[name] != own[name])
    for name, value in was["settings"].items():
        if own["settings"].get(name, value) != value:
            yield f"with {name} {value}, but this run's is {own['settings'][name]}: pass --{name} {value}, or {anew}"
    for split, digest in was["data"].items():
        if own["data"].get(split, digest) != digest:
            yield (
                f"with other {split} rows ({digest}) than this run's ({own['data'][split]}): give it the same rows in "
                f"the same order, or {anew}"
            )


def say_changes(own: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Return a line on how the learning rate goes on otherwise than before the checkpoint; empty where it does not."""
    before, now = (f"over {each['steps']} steps with a peak of {each['peak_learning_rate']:g}" for each in (about, own))
    if before == now:
        return ""
    schedule = own["settings"]["lr_scheduler_type"]
    return f"note: the learning rate ({schedule}) goes on as {now}; before, it was {before}"
