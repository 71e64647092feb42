"""Run workflows while each rank is watched: `python -m tests.recipes.held SCRIPT JOBS`, as `run_several` starts it.

In every phase the process's own resident memory is read again and again, and all tensors that Python knows are counted.
Of a storage that two tensors share each byte counts once; of a file that is mapped into memory, what a tensor sees of
it. The highest counts of each phase, and what the program did then, go to `held-rank<n>.json` in the run's results.
"""

import ctypes
import gc
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from common.base.run_config import RunConfig
from common.models.shards import local_part

FILE = "held-rank{}.json"
EVERY_S = 0.01
MOST_OF_TIME = 0.2
"""Of the main thread's time: what counting may take."""
M_MMAP_THRESHOLD, LARGE_BYTES = -3, 2**16
"""Of glibc's mallopt: what is as large goes back to the system when it is freed, so that resident memory tells."""
OURS = re.compile(r"/common/|/my_(workflow|utils)")
REUSE_SETTINGS, REUSED_WEIGHTS = ("stage3_max_reuse_distance", "stage3_max_live_parameters"), 1_000_000
"""Of DeepSpeed."""
Span = tuple[int, int]


def resident_bytes() -> int:
    """Return the process's own resident memory: without pages of files."""
    with open("/proc/self/status", "rb", buffering=0) as status:
        return int(status.read().split(b"RssAnon:")[1].split()[0]) * 1024


def live_objects() -> tuple[list[torch.Tensor], list[object]]:
    """Return the tensors with numbers of their own, and all parameters and optimizers, that Python knows.

    Libraries' objects are not looked through: `tests.forked` has frozen them.
    """
    tensors, trained = [], []
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, torch.Tensor):
            if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and each.device.type == "cpu":
                tensors.append(each)
            if each.requires_grad and not each._is_view() and each.is_leaf:  # a view written to would refuse to say
                trained.append(each)
        elif issubclass(kind, torch.optim.Optimizer) or kind.__name__ == "DeepSpeedZeroOptimizer_Stage3":
            trained.append(each)
    return tensors, trained


def spans_of(tensors: Iterable[torch.Tensor]) -> Iterator[Span]:
    """Yield the addresses of what tensors keep in memory: their whole storage, or what they are of a mapped file.

    A view of a mapped file has a base, which is all that is stored of a weight, and takes no memory.
    """
    mapped, tensors = mapped_files(), list(tensors)
    bases = {id(tensor._base) for tensor in tensors if tensor._is_view()}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        first, size = storage.data_ptr(), storage.nbytes()
        if not size or not tensor.numel():
            continue
        if not any(begin <= first < end for begin, end in mapped):
            yield first, first + size
        elif id(tensor) not in bases:
            yield tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def mapped_files() -> list[Span]:
    """Return where files of weights are mapped into this process's memory."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line for line in maps if ".safetensors" in line]
    return [(int(first, 16), int(last, 16)) for first, last in (line.split()[0].split("-") for line in lines)]


def together(spans: Iterable[Span]) -> int:
    """Return how many bytes lie in any of the spans."""
    total = end = 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def of_training(trained: list[object]) -> list[torch.Tensor]:
    """Return gradients and optimizer states, DeepSpeed's copy of the weights among them."""
    found = []
    for each in trained:  # an optimizer may be half made
        if isinstance(each, torch.Tensor):
            found.append(each.grad)
        else:
            found += [value for state in getattr(each, "state", {}).values() for value in state.values()]
            found += getattr(each, "fp32_partitioned_groups_flat", [])
            found.append(getattr(each, "grad_partitions_flat_buffer", None))
    parts = [local_part(each) for each in found if torch.is_tensor(each)]
    return [part for part in parts if part.device.type == "cpu"]


class Watched:
    """What this process holds, by phase.

    Tensors are counted by the main thread, whenever a timer's signal comes: another one would hold tuples that PyTorch
    is about to fill. A thread reads resident memory, also while the main one computes; where that was is not known, as
    another thread's frames are not to be looked at while it runs.
    """

    def __init__(self) -> None:
        self.phase, self.highest = "start", {}
        self.states: set[Span] = set()

    def start(self) -> None:
        """Count until the process ends."""
        threading.Thread(target=self._read, daemon=True).start()
        signal.signal(signal.SIGALRM, self._count_again)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, EVERY_S)

    def _read(self) -> None:
        while True:
            self.read_resident()
            time.sleep(EVERY_S)

    def read_resident(self) -> None:
        """Read the process's own memory now."""
        self._keep("resident", resident_bytes(), lambda: ("", ""))

    def _count_again(self, *_: object) -> None:
        start_s = time.perf_counter()
        self.count()
        signal.setitimer(signal.ITIMER_REAL, max(EVERY_S, (time.perf_counter() - start_s) / MOST_OF_TIME))

    def count(self) -> None:
        """Count the tensors that are there now."""
        tensors, trained = live_objects()
        states = {*spans_of(of_training(trained))}
        every = {*spans_of(tensors), *states}
        held, kept = together(every), together(states | (self.states & every))  # an optimizer forgets before it frees
        self.states = states
        about = partial(about_now, tensors)
        self._keep("tensors", held, about)
        self._keep("of_model", held - kept, about)
        self._keep("resident_of_model", resident_bytes() - kept, about)

    def _keep(self, name: str, size: int, about: Callable[[], tuple[str, str]]) -> None:
        so_far = self.highest.setdefault(self.phase, {})
        if size > so_far.get(name, {"bytes": -1})["bytes"]:
            where, held = about()
            so_far[name] = {"bytes": size, "where": where, "largest": held}


def about_now(tensors: list[torch.Tensor]) -> tuple[str, str]:
    """Return the lines of this project that the main thread is at, and what takes most of the memory."""
    own = [each for each in traceback.extract_stack() if OURS.search(each.filename)]
    return " > ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in own[-5:]), largest(tensors)


def largest(tensors: list[torch.Tensor]) -> str:
    """Return the shapes of which tensors take most together."""
    sizes = Counter()
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            sizes[f"{type(tensor).__name__}{list(tensor.shape)}"] += tensor.nbytes
    return ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.most_common(6))


def watch() -> None:
    """Count until the process ends; each run's counts are written when its record is."""
    from common.runtime import recorder

    import_module("torch._dynamo")  # which FSDP imports: its many objects would be looked through each time
    gc.freeze()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    watched, rank = Watched(), os.environ.get("RANK", "0")
    enter, complete = recorder.PeakMemory.enter, recorder.RunRecorder.complete

    def entered(memory: recorder.PeakMemory, phase: str) -> None:
        watched.count()  # also of a phase that was too short for the timer, or for the thread
        watched.read_resident()
        enter(memory, phase)
        watched.phase = phase

    def completed(log: recorder.RunRecorder, **figures: object) -> object:
        record = complete(log, **figures)
        (log.folder / FILE.format(rank)).write_text(json.dumps(watched.highest, indent=1))
        watched.phase, watched.highest = "start", {}
        return record

    recorder.PeakMemory.enter, recorder.RunRecorder.complete = entered, completed
    watched.start()


def forget_gathered_weights() -> None:
    """Have ZeRO-3 keep no more gathered layers than it works on: by default it keeps a billion weights, here all."""
    from common.planning import between_steps
    from common.training import deepspeed_config as engine  # whose function run folders import after this

    told = engine.deepspeed_config

    def told_less(run: RunConfig, hidden_size: int) -> dict[str, Any]:
        about = told(run, hidden_size)
        about["zero_optimization"] |= dict.fromkeys(REUSE_SETTINGS, REUSED_WEIGHTS)
        return about

    # an assignment would not say that what it replaces has moved
    mock.patch.object(engine, "deepspeed_config", told_less).start()
    mock.patch.object(between_steps, "ZERO_REUSED_WEIGHTS", REUSED_WEIGHTS).start()


def leave_out_comparisons(jobs: Path) -> None:
    """Have workflows measure no ceiling of this machine, nor other schedules: on a CPU alone they train more for it."""
    for job in json.loads(jobs.read_text()):
        workflow = import_module(next(Path(job["place"]).glob("my_workflow_*.py")).stem)
        measured = {} if "classification" in workflow.__name__ else None
        for name, found in (("measure_ceiling", None), ("measure", measured)):
            if hasattr(workflow, name):
                setattr(workflow, name, lambda *_, found=found: found)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    watch()
    forget_gathered_weights()
    leave_out_comparisons(Path(sys.argv[1]))
    runpy.run_path(sys.argv[0], run_name="__main__")
