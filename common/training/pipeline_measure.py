"""What a pipeline brings and where the rest goes: measured after training, on the rows of training."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import astuple
from statistics import median

import torch
from accelerate.utils import gather_object, wait_for_everyone

from common.hardware.devices import MIB
from common.training.loop_training import Batch
from common.training.memory_tracker import MemoryTracker
from common.training.pipeline_training import PipelineTrainer

NAIVE = ("gpipe", 1)
"""Naive model parallel: the whole batch as one micro-batch, so that one stage works at a time."""
TIMED_S = 1.5
"""Seconds of naive model parallel that are timed at once."""
TRIM_THRESHOLD, MOST_MAPPED = -1, -4
"""Of glibc's mallopt (M_TRIM_THRESHOLD and M_MMAP_MAX in malloc.h)."""


def ideal_speedup(stages: int, micro_batches: int) -> float:
    """Over naive model parallel, of equal stages: p m / (m + p - 1) (Huang et al. 2019, "GPipe", section 2.3)."""
    return stages * micro_batches / (micro_batches + stages - 1)


def ideal_idle_share(stages: int, micro_batches: int) -> float:
    """The bubble of GPipe and of 1F1B: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def measure_pipeline(
    trainer: PipelineTrainer, steps: int = 6, rounds: int = 5, tell: Callable[[str], object] | None = None
) -> dict[str, object] | None:
    """Step times of GPipe, 1F1B and naive model parallel on the same batches, idle shares, and what was allowed.

    Forward and backward passes only; every way in turn, `rounds` times, medians, on up to `steps` batches (of a large
    model fewer). What is allowed is the bubble's formula times the machine's ceiling: one stage's passes alone against
    those of all stages at once, nothing being sent. Weights stay as they are. `tell` gets a line after each round, on
    rank 0.

    Returns:
        Times in seconds per step; idle shares and peaks of activations by stage; the passes of one step of each way.
        None where there are fewer micro-batches than stages, which 1F1B cannot run.
    """
    pipeline, rank = trainer.pipeline, trainer.rank
    stages, count = rank.world_size, pipeline.micro_batches
    if count < stages:
        return None
    batches = full_batches(trainer, steps)
    batches = batches[: max(1, round(TIMED_S / naive_step_s(trainer, batches[0])))]
    ways = {"naive": NAIVE, "gpipe": ("gpipe", count), "1f1b": ("1f1b", count)}
    times: dict[str, list[float]] = {}
    idle_shares: dict[str, list[list[float]]] = {}
    keep_freed_memory()

    def timed(name: str, work: Callable[[Batch], object], participates: bool = True) -> None:
        wait_for_everyone()
        start_s = time.perf_counter()
        for batch in batches if participates else []:
            work(batch)
        if rank.device != "cpu":
            torch.accelerator.synchronize()
        trainer.optimizer.zero_grad()
        times.setdefault(name, []).append(max(gather_object([time.perf_counter() - start_s])) / len(batches))

    for number in range(rounds + 1):
        for name, way in ways.items():
            pipeline.clock.forget()
            timed(name, lambda batch, way=way: pipeline.train_step(batch, 1.0, *way))
            idle_shares.setdefault(name, []).append(trainer.idle_shares())
        for stage in range(stages):
            for parts in (1, count):
                is_mine = rank.rank == stage
                timed(f"stage {stage} alone, {parts}", lambda batch, n=parts: pipeline.bare_step(batch, n), is_mine)
        timed("all stages at once", lambda batch: pipeline.bare_step(batch, count))
        if tell and rank.is_main:
            seconds = ", ".join(f"{name} {times[name][-1]:.3f} s" for name in ways)
            tell(f"{f'round {number} of {rounds}' if number else 'warm-up'}: {seconds} a step")
    step_s = {name: median(seconds[1:]) for name, seconds in times.items()}  # the first round warms up
    idle = {name: [median(column) for column in zip(*shares[1:], strict=True)] for name, shares in idle_shares.items()}
    return {
        "stages": stages,
        "micro_batches": count,
        "schedule": pipeline.schedule_name,
        **speedups(step_s, stages, count),
        "step_s": step_s,
        "ideal_idle_share": ideal_idle_share(stages, count),
        "idle_share": idle,
        "passes": {name: passes_of(trainer, batches[0], *way) for name, way in ways.items()},
        "peak_activations_mib": {name: activations_mib(trainer, batches[0], *way) for name, way in ways.items()},
    }


def naive_step_s(trainer: PipelineTrainer, batch: Batch) -> float:
    """About how long a step of naive model parallel takes, in seconds; the same on every rank."""
    start_s = time.perf_counter()
    trainer.pipeline.train_step(batch, 1.0, *NAIVE)
    trainer.optimizer.zero_grad()
    return max(gather_object([time.perf_counter() - start_s]))


def keep_freed_memory() -> None:
    """Have glibc keep what PyTorch frees, as PyTorch's own allocator does on a GPU.

    Else it gives the largest blocks back to the kernel, and every step of naive model parallel, whose whole batch needs
    them, waits for new pages: the pipeline would be credited with what a setting of the allocator mends. From now on
    this holds for every way; it changes nothing where there is no glibc.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        change(MOST_MAPPED, 0)
        change(TRIM_THRESHOLD, -1)


def speedups(step_s: dict[str, float], stages: int, count: int) -> dict[str, float]:
    """What was reached, what was allowed, and the factors by which the ideal shrinks to it.

    The share of what is allowed is `naive_factor` over the product of the other three factors.
    """
    whole = [step_s[f"stage {stage} alone, 1"] for stage in range(stages)]
    parts = [step_s[f"stage {stage} alone, {count}"] for stage in range(stages)]
    ideal, shared_machine = ideal_speedup(stages, count), step_s["all stages at once"] / max(parts)
    allowed, speedup = ideal / shared_machine, step_s["naive"] / step_s["1f1b"]
    bubble = (count + stages - 1) / count
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
        "sending_and_waiting_factor": step_s["1f1b"] / (step_s["all stages at once"] * bubble),
    }


def full_batches(trainer: PipelineTrainer, count: int) -> list[Batch]:
    """Some batches of training, of as many rows as the run asks for; where there are not so many, of all."""
    size = trainer.args.per_device_train_batch_size
    steps = list(trainer.batches.steps())
    full = [rows for rows in steps if len(rows) >= size] or steps
    return [trainer.batches_of(rows)[0] for rows in full[:count]]


def passes_of(
    trainer: PipelineTrainer, batch: Batch, schedule: str, micro_batches: int
) -> list[list[tuple[str, int, float, float]]]:
    """When each stage worked on which micro-batch in one step, begun together; by stage, the same on every rank.

    A pass is its kind, its micro-batch, its start and its end, in seconds.
    """
    wait_for_everyone()
    trainer.pipeline.train_step(batch, 1.0, schedule, micro_batches)
    trainer.optimizer.zero_grad()
    return gather_object([[astuple(each) for each in trainer.pipeline.clock.last_passes()]])


def activations_mib(trainer: PipelineTrainer, batch: Batch, schedule: str, micro_batches: int) -> list[float]:
    """The most that activations and logits took at once in one step, in MiB (2^20 bytes), by stage."""
    tracker = MemoryTracker(vocab_size=trainer.pipeline.module.causal.config.vocab_size, rounded_to=1)
    hooks = []
    for weight in trainer.model.parameters():
        tracker.add(weight, "weights")
        if weight.requires_grad:
            hooks.append(weight.register_post_accumulate_grad_hook(lambda w: tracker.add(w.grad, "gradients")))
    with tracker:
        tracker.enter("step")
        trainer.pipeline.train_step(batch, 1.0, schedule, micro_batches)
    for hook in hooks:
        hook.remove()
    trainer.optimizer.zero_grad()
    parts = tracker.timeline["step"]
    return gather_object([(parts["activations"] + parts["logits"]) / MIB])
