"""What a pipeline brings and where the rest goes: measured after training, on the rows of training."""

import ctypes
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

from accelerate.utils import gather_object, wait_for_everyone

from common.hardware.devices import MIB
from common.measuring.ceiling import slowest_s
from common.planning.terms import Kind
from common.runtime.memory_tracker import MemoryTracker, watch_gradients
from common.training.answer_logits import Batch
from common.training.loop import TrainingLoop

Work = Callable[[Batch], object]  # the passes of a step
TIMED_S = 1.5  # seconds of naive model parallel that are timed at once
TRIM_THRESHOLD, MOST_MAPPED = -1, -4  # of glibc's mallopt: M_TRIM_THRESHOLD and M_MMAP_MAX in malloc.h


def ideal_speedup(stages: int, micro_batches: int) -> float:
    """Return the speed-up of equal stages over naive model parallel (Huang et al. 2019, "GPipe", section 2.3)."""
    return stages * micro_batches / (micro_batches + stages - 1)


def measure_pipeline(loop: TrainingLoop, steps: int = 6, rounds: int = 5) -> dict[str, object] | None:
    """Time steps of GPipe, 1F1B and naive model parallel on the same batch; idle shares, and what was possible.

    Forward and backward passes only; every schedule in turn, `rounds` times, medians, up to `steps` times on one batch
    (less often with a large model). Naive model parallel has the whole batch as one micro-batch: one stage works at a
    time. What is allowed is the bubble's formula times the upper bound: one stage's passes alone against those of
    all stages at once, nothing being sent. Weights stay as they are.

    Returns:
        Times in seconds per step; idle shares and peaks of activations by stage; the passes of one step of each.
        None where there are fewer micro-batches than stages, which 1F1B cannot run.
    """
    pipeline, rank = loop.part.pipeline, loop.rank
    stages, count = rank.world_size, pipeline.micro_batches
    if count < stages:
        return None
    schedules: dict[str, Work] = {
        name: partial(pipeline.train_step, loss_divisor=1.0, schedule=schedule, micro_batches=parts)
        for name, schedule, parts in (("naive", "gpipe", 1), ("gpipe", "gpipe", count), ("1f1b", "1f1b", count))
    }
    batches = steps * full_batches(loop, 1)
    naive_s = slowest_s(loop, batches[:1], schedules["naive"])
    batches = batches[: max(1, round(TIMED_S / naive_s))]
    times: defaultdict[str, list[float]] = defaultdict(list)
    idle_shares: defaultdict[str, list[list[float]]] = defaultdict(list)
    keep_freed_memory()
    for number in range(rounds + 1):
        for name, work in schedules.items():
            pipeline.clock.steps.clear()
            times[name].append(slowest_s(loop, batches, work))
            idle_shares[name].append([idle for _, idle in pipeline.busy_s_and_idle_shares()])
        for stage, parts in product(range(stages), (1, count)):
            own = batches if rank.rank == stage else []
            alone_s = slowest_s(loop, own, partial(pipeline.bare_step, micro_batches=parts))
            times[f"stage {stage} alone, {parts}"].append(alone_s)
        times["all stages at once"].append(slowest_s(loop, batches, partial(pipeline.bare_step, micro_batches=count)))
        if rank.is_main:
            seconds = ", ".join(f"{name} {times[name][-1] / len(batches):.3f} s" for name in schedules)
            print(f"{f'round {number} of {rounds}' if number else 'warm-up'}: {seconds} a step", flush=True)
    step_s = {name: median(each[1:]) / len(batches) for name, each in times.items()}  # the first round warms up
    idle = {name: [median(column) for column in zip(*shares[1:], strict=True)] for name, shares in idle_shares.items()}
    return {
        "stages": stages,
        "micro_batches": count,
        "schedule": pipeline.schedule_name,
        **speedups(step_s, stages, count),
        "step_s": step_s,
        "ideal_idle_share": 1 - ideal_speedup(stages, count) / stages,  # the bubble of GPipe and of 1F1B
        "idle_share": idle,
        "passes": {name: passes_of(loop, batches[0], work) for name, work in schedules.items()},
        "peak_activations_mib": {name: activations_mib(loop, batches[0], work) for name, work in schedules.items()},
    }


def keep_freed_memory() -> None:
    """Have glibc keep what PyTorch frees, as PyTorch's own allocator does on a GPU.

    Else it gives the largest blocks back to the kernel, and every step of naive model parallel, whose whole batch needs
    them, waits for new pages: the pipeline would be credited with that. It changes nothing where there is no glibc.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        change(MOST_MAPPED, 0)
        change(TRIM_THRESHOLD, -1)


def speedups(step_s: dict[str, float], stages: int, count: int) -> dict[str, float]:
    """Return the speed-up reached, the one allowed, and the factors by which the ideal shrinks to it."""
    whole = [step_s[f"stage {stage} alone, 1"] for stage in range(stages)]
    parts = [step_s[f"stage {stage} alone, {count}"] for stage in range(stages)]
    ideal, shared_machine = ideal_speedup(stages, count), step_s["all stages at once"] / max(parts)
    allowed, speedup = ideal / shared_machine, step_s["naive"] / step_s["1f1b"]
    return {
        "speedup": speedup,
        "speedup_gpipe": step_s["naive"] / step_s["gpipe"],
        "ideal_speedup": ideal,
        "machine_ceiling": stages / shared_machine,
        "allowed_speedup": allowed,
        "share_of_allowed": speedup / allowed,
        "naive_factor": step_s["naive"] / sum(whole),
        "small_micro_batches_factor": sum(parts) / sum(whole),
        "unequal_stages_factor": max(parts) * stages / sum(parts),
        "sending_and_waiting_factor": step_s["1f1b"] * ideal / (step_s["all stages at once"] * stages),
    }


def full_batches(loop: TrainingLoop, count: int) -> list[Batch]:
    """Return some batches of training, of as many rows as the run asks for; where there are fewer, of all."""
    steps = list(loop.batches.steps())
    full = [rows for rows in steps if len(rows) >= loop.run.per_device_train_batch_size] or steps
    first = (loop.own_batches(rows)[0] for rows in full[:count])
    return [loop.batch_of([loop.train_rows[row] for row in rows]) for rows in first]


def passes_of(loop: TrainingLoop, batch: Batch, work: Work) -> list[list[tuple[str, int, float, float]]]:
    """Return by stage the passes of one step: each one's kind, micro-batch, start and end in seconds."""
    wait_for_everyone()
    work(batch)
    loop.optimizer.zero_grad()
    return gather_object([loop.part.pipeline.clock.last_passes()])


def activations_mib(loop: TrainingLoop, batch: Batch, work: Work) -> list[float]:
    """Return the most that activations and logits took at once in a step, in MiB (2^20 bytes), by stage."""
    tracker = MemoryTracker(vocab_size=loop.part.pipeline.causal.config.vocab_size, rounded_to=1)
    for weight in loop.model.parameters():
        tracker.add(weight, "weights")
    work(batch)  # makes its schedule, whose buffers are no activations
    loop.optimizer.zero_grad()
    hooks = watch_gradients(loop.model, tracker)
    with tracker:
        tracker.enter("step")
        work(batch)
    for hook in hooks:
        hook.remove()
    loop.optimizer.zero_grad()
    parts = tracker.timeline["step"]
    return gather_object([(parts[Kind.ACTIVATIONS] + parts[Kind.LOGITS]) / MIB])
