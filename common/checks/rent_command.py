"""The planner's answer to "what should I rent?": the frontier of dollars against hours, a choice, and its command."""

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.base.errors import BadInputError, NotPlannedError
from common.base.inert import matplotlib_text
from common.base.paths import find_here
from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.checks.planner_options import ANY, PlannerOptions, Tokens, evaluation_of, job_of, short_option, task_of
from common.checks.run_command import first_command, run_command
from common.hardware.devices import find_gpu, hours_text
from common.hardware.prices import PRICES, SPOT, Price, read_prices
from common.planning.architectures import Architecture, read_architecture
from common.planning.plan_texts import outlined
from common.planning.published_rates import evidence
from common.planning.renting import (
    COUNTS,
    DOWNLOAD_GB_PER_S,
    PARALLELS,
    STARTING_S,
    Rental,
    Training,
    chosen,
    frontier,
    rentals,
    worth_naming,
)
from common.planning.time_plan import calibration_from
from common.records.store import kept_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BYTES_PER_TOKEN = 4  # of English text (platform.openai.com/tokenizer), where the model's own tokenizer is not here
TEMPLATE_TOKENS = 8  # that a chat template writes around a message: ChatML's five, and some
HOURS_OF = {"m": 1 / 60, "h": 1.0, "d": 24.0}
MOST_DRAWN = 10_000  # rows whose batches are drawn, to see how much is padded
# options that describe one machine, or rows without words
NOT_TO_RENT = ("classes", "tiles", "max_target_length", "nodes", "link", "usd_per_hour", "gpu_memory_gib", "explain",
               "per_device_train_batch_size", "micro_batches", "dp_replicate_size", "sp_size", "offload")  # fmt: skip


class Rows(NamedTuple):
    """The rows of an epoch: how many, and their tokens."""

    count: int
    mean_length: int
    longest: int
    questions: int  # of the test; 0 = as many as a plan assumes
    said: str  # how they were measured
    length_of: Callable[[int, int, int], int]  # as `Training` has it


def rent_answer(options: PlannerOptions) -> int:
    """Print the answer; 0 if something keeps budget and deadline, else 1."""
    deadline_h = hours_until(options.deadline) if options.deadline else None
    prices, architecture = prices_of(options), _architecture_of(options)
    rows = _rows_of(options)
    training = _training_of(options, architecture, rows)
    counts = (options.gpus,) if options.gpus else COUNTS
    found = list(rentals(training, prices, counts, calibration_from(kept_records(), training.job.batch.task)))
    best = frontier(found)
    choice = chosen(best, options.budget, deadline_h)
    said, command = _recommendation(options, training, found, best, choice, deadline_h), _command(choice, options)
    best = worth_naming(best, choice)
    if options.picture and best:
        _draw(best, choice, options.picture)
    assumptions = _assumptions(options, rows, best)
    if options.json:
        answer = {
            "model": options.model,
            "figures": "projected",
            "rows": rows.count,
            "mean_length": rows.mean_length,
            "num_train_epochs": options.num_train_epochs,
            "frontier": [_as_json(each) for each in best],
            "recommended": _as_json(choice) if choice else None,
            "recommendation": said,
            "assumptions": assumptions,
            "run": command or None,
        }
        print(json.dumps(answer, indent=2))
        return 0 if choice else 1
    parts = [
        f"{options.model}: {architecture.parameters / 1e9:.2f}B parameters, {options.num_train_epochs:g} epochs of "
        f"{rows.count:,} rows of {rows.mean_length:,} tokens (at most {rows.longest:,}); every figure is projected",
        f"{_table(best)}\nof {len(found):,} machines and ways that fit, those that no other beats in dollars and time"
        if best
        else "",
        "\n".join(["assumed:", *(f"- {line}" for line in assumptions)]),
        said,
        f"Run, on that machine in a clone of this repository: {command}" if command else "",
    ]
    print("\n\n".join(filter(None, parts)))
    return 0 if choice else 1


# -- the question


def hours_until(deadline: str) -> float:
    """Return the hours that `6h`, `90m`, `2d` or a date and time leave; refuse others, and what is past."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", deadline.strip().lower()):
        hours = float(found[1]) * HOURS_OF[found[2]]
    else:
        try:
            end = datetime.fromisoformat(deadline)
        except ValueError:
            raise BadInputError(
                f"--deadline is {deadline!r}: pass 6h, 90m, 2d or a time as 2026-12-24T18:00."
            ) from None
        hours = (end.astimezone() - datetime.now(UTC)).total_seconds() / 3600
    if hours <= 0:
        raise BadInputError(f"--deadline is {deadline}, which has passed: pass a time to come, such as 6h.")
    return hours


def prices_of(options: PlannerOptions) -> list[Price]:
    """Return the prices of the GPUs that are asked for."""
    path = Path(options.prices).expanduser() if options.prices else PRICES
    names, all_prices = options.gpu or [ANY], read_prices(path)
    prices = [price for price in all_prices if not (options.on_demand and price.kind == SPOT)]
    if ANY in names:
        return prices
    wanted = {find_gpu(name).name for name in names}
    found = [price for price in prices if price.gpu in wanted]
    if not found:
        raise BadInputError(f"{path.name} has no price of {' or '.join(sorted(wanted))}: pass --gpu any, or --prices.")
    return found


def _architecture_of(options: PlannerOptions) -> Architecture:
    defaults = {each.name: each.default for each in fields(options)}
    idle = [short_option(options, name) for name in NOT_TO_RENT if getattr(options, name) != defaults[name]]
    if idle or isinstance(options.max_length, Tokens):
        said = f"leave out {', '.join(idle)}" if idle else "pass --seq-len a number"
        raise NotPlannedError(f"What to rent is planned for rows of text, on one machine of each kind: {said}.")
    if options.parallel not in (None, *PARALLELS):
        raise NotPlannedError(f"What to rent is planned with {', '.join(PARALLELS)}: leave out --parallel.")
    if options.gpus and options.gpus > COUNTS[-1]:
        raise NotPlannedError(
            f"What to rent is planned for one machine, which has at most {COUNTS[-1]} GPUs: name a --gpu, with "
            f"--gpus {options.gpus} and --nodes."
        )
    if options.gpus and options.parallel and PARALLELISMS[options.parallel].is_single != (options.gpus == 1):
        raise NotPlannedError(f"--parallel {options.parallel} is not for --gpus {options.gpus}: leave one of them out.")
    if options.gpus and options.rows_per_step % options.gpus:
        raise BadInputError(
            f"--rows-per-step is {options.rows_per_step}, which {options.gpus} GPUs cannot share evenly: pass "
            f"--rows-per-step {options.gpus * max(1, options.rows_per_step // options.gpus)}."
        )
    try:
        return read_architecture(options.model, options.model_revision)
    except NotPlannedError as unknown:
        raise NotPlannedError(f"{unknown} What to rent needs it: name a --gpu, which is planned by dry runs.") from None


def _rows_of(options: PlannerOptions) -> Rows:
    """Return how many training rows there are, and how long they are as the model's tokenizer, if here, has them."""
    if not options.data:
        length, said = int(options.max_length), "as the options say; --data FILE counts and measures yours"
        return Rows(options.rows_per_epoch, length, length, 0, said, lambda *_: length)
    if Path(options.data).suffix and "://" not in options.data and not find_here(options.data):
        raise BadInputError(f"--data is {options.data}, but there is no such file: pass the path of one.")
    print(f"reading {options.data} ...", file=sys.stderr, flush=True)
    from common.checks.preview import load_splits, load_tokenizer, preview  # here: it imports torch and Transformers
    from common.data.rows import texts_of

    run = RunConfig(task=task_of(options).name, data=options.data, model=options.model, max_length=options.max_length)
    with redirect_stdout(sys.stderr):  # what is said of the rows
        splits = load_splits(run)
        try:
            tokenizer = load_tokenizer(run)
        except BadInputError:  # only its shape is here
            texts = map(texts_of, splits.train)
            lengths = [sum(len(text.encode()) // BYTES_PER_TOKEN + TEMPLATE_TOKENS for text in row) for row in texts]
            how = f"estimated with {BYTES_PER_TOKEN} bytes a token, as the tokenizer of {options.model} is not here"
        else:
            lengths = preview(run, splits, tokenizer).lengths
            how = f"measured by the tokenizer of {options.model}"
    kept = [min(length, options.max_length) for length in lengths]
    if cut := sum(length > options.max_length for length in lengths):
        how += f"; {cut:,} are cut at {options.max_length:,} tokens: --seq-len {max(lengths)} keeps them whole"
    return Rows(len(kept), max(1, round(statistics.mean(kept))), max(kept), len(splits.test), how, _padded(kept))


def _padded(lengths: list[int]) -> Callable[[int, int, int], int]:
    """Return how long a row is, padded, on average: each batch is as long as its longest row, on whichever rank."""
    from common.data.batches import EpochBatches  # here: it imports torch

    some = lengths[:: -(-len(lengths) // MOST_DRAWN)]

    @cache
    def length_of(rows: int, ranks: int, accumulation_steps: int) -> int:
        batches = list(EpochBatches(some, rows, ranks, 0, 0, accumulation_steps).global_batches())
        return round(sum(len(batch) * max(some[row] for row in batch) for batch in batches) / len(some))

    return length_of


def _training_of(options: PlannerOptions, architecture: Architecture, rows: Rows) -> Training:
    options = replace(options, max_length=rows.longest, gpu=None)
    evaluation = replace(evaluation_of(options, architecture), test_rows=rows.questions)
    job = replace(job_of(options), evaluation=evaluation)
    return Training(
        architecture,
        replace(job, batch=replace(job.batch, padded=rows.mean_length < rows.longest)),
        rows.length_of,
        math.ceil(rows.count * options.num_train_epochs),
        options.rows_per_step,
        options.techniques,
        options.precision,
        options.gradient_checkpointing,
        options.parallel,
    )


# -- the answer


def _table(best: Sequence[Rental]) -> str:
    rows = [
        [
            each.machine,
            each.plan.name,
            f"{each.price.provider}{', spot' * each.is_spot}",
            f"{each.usd_per_hour:.2f}",
            hours_text(each.hours, each.most_hours),
            f"{each.usd:,.2f} to {each.most_usd:,.2f}",
        ]
        for each in best
    ]
    headers = ("machine", "way", "provider", "USD\nper hour", "time, likely\nto at most", "USD, likely\nto at most")
    return outlined(rows, headers, range(3))


def _recommendation(
    options: PlannerOptions,
    training: Training,
    found: Sequence[Rental],
    best: Sequence[Rental],
    choice: Rental | None,
    deadline_h: float | None,
) -> str:
    """Return what to rent, or what would have to change."""
    limits = (f"{options.budget:,.2f} USD" if options.budget else "", hours_text(deadline_h) if deadline_h else "")
    limit = " and ".join(filter(None, limits))
    keeping = partial(chosen, budget_usd=options.budget, deadline_h=deadline_h)
    if not best:
        return (
            f"Nothing fits of what is sold{f' with {options.gpus} GPUs' if options.gpus else ''}: not even one row of "
            f"{training.job.batch.length:,} tokens a GPU. Ask --gpu any without --gpus, shorten rows (--seq-len), "
            "allow another --technique (qlora takes least), take a smaller --model, or plan several machines: "
            "--gpu b300 --gpus 16 --nodes 2."
        )
    if choice is None:
        return (
            f"Nothing keeps {limit}. The cheapest: {best[0].said}. The fastest: {best[-1].said}. Take fewer epochs, "
            "shorter rows (--seq-len) or a smaller --model."
        )
    why = "fastest" if options.budget and deadline_h is None else "cheapest"
    memory, gpu = choice.plan.highest.phase.memory, choice.plan.highest.gpu
    said = (
        f"Recommended, the {why}{f' within {limit}' if limit else ''}: {choice.said}; {memory.peak_gib:.1f} (safe: "
        f"{memory.safe_gib:.1f}) of {gpu.memory_gib:.1f} GiB, and {choice.plan.host_gib:,.0f} GiB of the machine's own "
        "memory, which not every offer has."
    )
    if choice.is_spot:
        lost_min = choice.interruption_s(RunConfig.max_lost_minutes) / 60
        said += f" Each interruption of spot loses about {lost_min:.0f} minutes: half of the "
        said += f"{RunConfig.max_lost_minutes:g} between checkpoints, and beginning again."
        if instead := keeping(frontier(each for each in found if not each.is_spot)):
            said += f" On demand: {instead.said}."
    names = list(TECHNIQUES)
    for better in names[: names.index(choice.plan.job.technique)]:  # which dollars and time do not see
        if instead := keeping(frontier(each for each in found if each.plan.job.technique == better)):
            said += f" In better quality (docs/planner.md#quality): {instead.said}."
    return said


def _assumptions(options: PlannerOptions, rows: Rows, best: Sequence[Rental]) -> list[str]:
    return [
        f"rows {rows.said}; {options.rows_per_step} rows a step, on all GPUs together",
        f"the fastest of {', '.join(PARALLELS)} that is safe to fit, for each of {', '.join(options.techniques)}",
        f"time: {STARTING_S // 60} minutes to start and install, the model at {DOWNLOAD_GB_PER_S} GB/s, loading, "
        f"answers to {best[0].plan.phase_times.questions if best else 0:,} questions before and after, all epochs with "
        "their padding, and saving at the end; not counted are validation, checkpoints, storage and tax",
        *dict.fromkeys(f"{each.price.gpu}: {each.price.said}" for each in best),
        *dict.fromkeys(
            f"{each.price.gpu}: {evidence(find_gpu(each.price.gpu))}; at most {each.factor:.2g} times the likely time, "
            "as nine in ten"
            for each in best
        ),
    ]


def _command(choice: Rental | None, options: PlannerOptions) -> str:
    if choice is None:
        return ""
    # steps have as many rows on every machine, so that its folder need not scale the rate
    others: dict[str, Any] = {"num_train_epochs": options.num_train_epochs, "learning_rate_scaling": "none"}
    if options.data:  # which may have longer rows than those that were measured, or estimated
        others |= {"data": options.data, "max_length": options.max_length}
    command_of = partial(run_command, model=options.model, model_revision=options.model_revision, **others)
    return first_command([choice.plan], command_of)


def _as_json(rental: Rental) -> dict[str, Any]:
    plan, memory = rental.plan, rental.plan.highest.phase.memory
    return {
        **asdict(rental.price),
        "gpus": len(plan.cluster.gpus),
        "usd_per_hour": rental.usd_per_hour,
        **{name: getattr(plan.job, name) for name in ("technique", "parallel", "gradient_checkpointing")},
        "batch_size": plan.job.batch.rows,
        "gradient_accumulation_steps": plan.job.accumulation_steps,
        "peak_gib": memory.peak_gib,
        "safe_gib": memory.safe_gib,
        "capacity_gib": plan.highest.gpu.memory_gib,
        "host_gib": plan.host_gib,
        "preparing_time_s": rental.preparing_s,
        "loading_time_s": rental.plan.phase_times.loading_s,
        "evaluation_time_s": 2 * rental.plan.phase_times.answering_s,
        "training_time_s": rental.training_s,
        "saving_time_s": rental.saving_s,
        "likely_hours": rental.hours,
        "most_hours": rental.most_hours,
        "likely_usd": rental.usd,
        "most_usd": rental.most_usd,
        "at_most_factor": rental.factor,
        "interruption_s": rental.interruption_s(RunConfig.max_lost_minutes) if rental.is_spot else None,
    }


def plot_frontier(best: Sequence[Rental], choice: Rental | None) -> "Figure":
    """Draw dollars against hours of the frontier, with the recommended machine marked."""
    import matplotlib.pyplot as plt  # here: it takes a second
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    axes.step([each.most_hours for each in best], [each.most_usd for each in best], where="pre", color="0.8")
    for each in best:
        notes = ", spot" * each.is_spot + " (recommended)" * (each is choice)
        mark, size = ("*", 14) if each is choice else ("o", 6)
        label = matplotlib_text(f"{each.machine}, {each.plan.name}{notes}")
        axes.plot(each.most_hours, each.most_usd, mark, markersize=size, label=label)
    axes.set(xscale="log", xlabel="hours, at most", ylabel="USD, at most", ylim=(0, None))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _draw(best: Sequence[Rental], choice: Rental | None, file: str) -> None:
    try:
        plot_frontier(best, choice).savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise BadInputError(f"--picture {file} cannot be written ({error}): name a .png or .svg file here.") from None
