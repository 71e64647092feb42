"""What a training proves and measures: rows seen, steps taken, losses, speed, and on a CPU the memory of a step."""

import heapq
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch
from accelerate.utils import gather_object

from common.base.errors import NotPlannedError
from common.base.run_config import RunConfig
from common.data.batches import longest_batch
from common.data.rows import Tokens, tokens_in
from common.hardware.devices import CPU_DEVICE, Gpu
from common.models.shards import tensors_of
from common.planning.job import architecture_of_run, job_of_run
from common.planning.phases import ROLLOUTS, TRAINING
from common.planning.shares import whole_model
from common.planning.step_speed import COUNTED, step_flops
from common.runtime.memory_tracker import watch_gradients
from common.tasks.objectives import ACCURACY, VALIDATION_LOSS
from common.training.loop import TrainingLoop
from common.training.usage import state_tensors

COUNTED_ROWS = 10_000  # of more rows, so many are counted: a second on one core


def check_training(loop: TrainingLoop) -> list[dict[str, object]]:
    """Return each rank's machine, device, samples and tokens, the same list on every rank.

    Raises:
        RuntimeError: a rank trained on no row, or rows were skipped or repeated.
    """
    work, rank = loop.work, loop.rank
    place = {"rank": rank.rank, "host": f"machine{os.environ.get('GROUP_RANK', '0')}", "device": rank.device}
    shares = gather_object([{**place, "samples": len(work.rows), "tokens": work.tokens, "rows": work.rows}])
    steps = loop.state.global_step - loop.saver.first_step
    for share in shares:
        if share["samples"] == 0 and steps > 1:  # of a last step's few rows a rank may have none
            raise RuntimeError(f"Rank {share['rank']} of {len(shares)} trained on no row.")
    rows_by_rank = loop.part.own_rows([share.pop("rows") for share in shares])
    check_rows_seen(rows_by_rank, len(loop.train_rows), row_uses(loop), resumes=loop.saver.first_step > 0)
    return shares


def check_rows_seen(rows_by_rank: list[list[int]], row_count: int, row_uses: int, resumes: bool = False) -> None:
    """Check that every row was used once per epoch, by one rank only; in an epoch that ended early, at most once.

    `row_uses` is how many rows the steps had room for: fewer where training ended early, or `resumes` within an epoch.
    """
    times_used = Counter(row for rows in rows_by_rank for row in rows)
    if times_used.total() != row_uses:
        raise RuntimeError(f"{times_used.total()} rows were used, but the steps had room for {row_uses}.")
    rows = sorted(range(row_count), key=times_used.__getitem__)
    least, most = times_used[rows[0]], times_used[rows[-1]]
    if most - least > 1 + resumes:  # a run that resumes has part of a first epoch and part of a last one
        raise RuntimeError(f"Row {rows[0]} was used {least} times, but row {rows[-1]} {most} times.")


def row_uses(loop: TrainingLoop) -> int:
    """Return how many rows the finished steps of this run had room for."""
    row_count = len(loop.train_rows)

    def until(step: int) -> int:
        epochs, rest_steps = divmod(step, loop.steps_per_epoch)
        return epochs * row_count + min(rest_steps * loop.batches.rows_per_step, row_count)

    return until(loop.state.global_step) - until(loop.saver.first_step)


def training_figures(loop: TrainingLoop, world: list[dict[str, object]]) -> dict[str, object]:
    """Return what the record says of training; called on every rank, `world` comes from `check_training`.

    `reporting_s`, the part of `train_time_s` that went into logging, validation and checkpoints, is left out of tokens
    per second and MFU, and so is what went into answers to learn from.
    """
    log, run, state = loop.log, loop.run, loop.state
    log.memory.training_ended()
    train_time_s, reporting_s = log.phases_s["training"], loop.work.reporting_s
    tokens = sum(loop.part.own_rows([share["tokens"] for share in world]))
    history, resumed = state.log_history, loop.saver.resumes_from
    losses, validation_losses, accuracies = (
        [[entry["step"], entry[name]] for entry in history if name in entry]
        for name in ("loss", VALIDATION_LOSS, ACCURACY)
    )
    best_accuracy = max((value for step, value in accuracies if step), default=None)  # step 0 is before training
    of_classes = {"validation_accuracies": accuracies, "best_accuracy": best_accuracy}
    return {
        "world": world,
        "effective_batch_size": run.effective_batch_size,
        "peak_learning_rate": run.peak_learning_rate,
        "steps": state.global_step,
        "skipped_steps": loop.skipped_steps,
        "train_time_s": train_time_s,
        "reporting_s": reporting_s,
        "saves": loop.saver.for_record(),
        **speed_figures(loop, tokens / (train_time_s - reporting_s - loop.work.generating_s), log.gpu()),
        **loop.updates.figures(),
        "training_losses": losses,
        "validation_losses": validation_losses,
        "best_validation_loss": min(loss for step, loss in validation_losses if step),
        **(of_classes if accuracies else {}),
        "checkpoints": {
            "best": Path(state.best_model_checkpoint or "").name,
            "went_on_from": resumed.name if resumed else None,
        },
        **loop.part.for_record(),
    }


def speed_figures(loop: TrainingLoop, tokens_per_s: float, gpu: Gpu | None) -> dict[str, object]:
    """Return tokens per second, trained weights, FLOPs per token and MFU; called on every rank.

    `tokens_per_s` is that of all devices, which are `gpu`s. The MFU is a device's useful FLOP/s over its dense peak in
    the number format of its products (Chowdhery et al. 2022, "PaLM", appendix B); None where no peak is known.
    """
    run = loop.run
    trained, multiplied = loop.part.parameter_counts()
    flops = training_flops(run, loop.train_rows, trained, multiplied)
    flops_per_s = tokens_per_s * flops["flops_per_token"] / run.devices
    peak_tflops = gpu.tflops_dense[run.compute_dtype] if gpu and gpu.name != CPU_DEVICE else None
    return {
        "tokens_per_s": tokens_per_s,
        "trained_parameters": trained,
        **flops,
        "mfu": flops_per_s / (peak_tflops * 1e12) if peak_tflops else None,
    }


def training_flops(run: RunConfig, rows: Sequence[Tokens], trained: int, multiplied: int) -> dict[str, object]:
    """Return the floating-point operations per token of a training step on `rows`, and how they are counted.

    As the planner counts them (`StepFlops.useful`), for each row by its own length, without padding. Of a model or an
    optimizer that the planner does not know, by the weights alone: forward 2N of those that are `multiplied`, the
    activations' gradients 2N, the weights' gradients 2N of those that are `trained` (Kaplan et al. 2020, section 2.1);
    with an encoder-decoder a token goes through one of the two, about half of them.
    """
    counted = [rows[place] for place in range(0, len(rows), -(-len(rows) // COUNTED_ROWS))]
    classes = longest_batch(counted, 1, run).classes  # a row alone knows its own label only
    shapes = Counter(replace(longest_batch([row], 1, run), classes=classes) for row in counted)
    try:
        first = next(iter(shapes))
        architecture, job = architecture_of_run(run, first), job_of_run(run, first)
    except NotPlannedError:
        halved = 2 if run.goal.summarizes else 1
        formula = "6 per trained weight, 4 per frozen one" + ", halved: encoder or decoder" * run.goal.summarizes
        flops = (4 * multiplied + 2 * min(trained, multiplied)) // halved  # a trained lookup multiplies nothing
        return {"flops_per_token": flops, "flops_formula": f"{formula}; attention's scores are not counted"}
    share, flops, tokens = whole_model(architecture), 0.0, 0
    for shape, count in shapes.items():
        # of whole rows, whoever shares them
        alone = replace(job, batch=replace(shape, tiles=job.batch.tiles), micro_batches=1, sp_size=1)
        flops += count * step_flops(architecture, alone, share).useful
        tokens += count * (shape.tokens + shape.target_length)
    return {"flops_per_token": round(flops / tokens), "flops_formula": COUNTED}


def resting(loop: TrainingLoop) -> dict[str, list[torch.Tensor]]:
    """Return what training keeps between steps on this rank, by part."""
    return {
        "weights": list(tensors_of(loop.model)),
        "optimizer": state_tensors(loop.optimizer),
        "buffers": loop.part.kept_buffers(),
    }


def count_steps(loop: TrainingLoop) -> None:
    """Count what saving, a step, and a batch of validation hold, with the longest rows; called on every rank.

    On a CPU no allocator knows a peak: tensors are counted in a step of each of training's phases, after training and
    untimed. Loading is not counted: what libraries hold while they load, and quantize, is another thing on a GPU.
    """
    memory, part = loop.log.memory, loop.part
    if loop.rank.device != "cpu":
        return
    rows = _longest(loop.train_rows.rows, loop.run.rows_per_rank)
    if loop.run.goal.rewards:  # a prompt has several answers
        rows = list(islice(cycle(rows), loop.run.rows_per_rank))
    batch = loop.batch_of([{**row, "row": 0} for row in rows])
    label_count = max(1, sum(map(loop.objective.labels_in, loop.train_rows.rows[:1])))
    with torch.random.fork_rng():
        part.back_propagate(batch, label_count)  # buffers of this shape are there from now on
        with memory.counting("saving", resting(loop)):
            pass
        with memory.counting(TRAINING, resting(loop)) as tracker:
            part.forget_gradients()
            handles = watch_gradients(loop.model, tracker)
            part.back_propagate(batch, label_count)
    for handle in handles:
        handle.remove()
    with memory.counting("validation", resting(loop)):
        part.forget_gradients()
        part.sums(loop.validated(_longest(loop.validation_rows, loop.args.per_device_eval_batch_size)))
    if loop.run.goal.rewards:  # which a validation answers as the prompts of a step are
        memory.by_phase[ROLLOUTS] = memory.by_phase["validation"]


def _longest(rows: list[Tokens], count: int) -> list[Tokens]:
    return heapq.nlargest(count, rows, key=tokens_in)
