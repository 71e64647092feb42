"""The devices at hand and their memory, and a catalogue of GPUs to plan with (`catalogue.toml`).

Only `read_memory` of a GPU starts CUDA.
"""

import ctypes
import difflib
import os
import platform
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from common.base.errors import BadInputError, NotPlannedError

GIB, MIB = 2**30, 2**20
AMD_DRIVER = Path("/dev/kfd")  # with it PyTorch's ROCm build calls AMD's GPUs `cuda`
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
CUDA_DRIVER = "libcuda.so.1"  # on any machine with an NVIDIA driver, and in a container that was given its GPUs


def size_text(byte_count: float) -> str:
    """Return bytes for a reader, such as `14.2 GiB` or `4.0 MiB`."""
    gib = byte_count / GIB
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{byte_count / MIB:.1f} MiB"


def time_text(seconds: float) -> str:
    """Return a duration for a reader, such as `53.6 s` or `12 ms`."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{max(1, round(seconds * 1e3))} ms"


def hours_text(*hours: float) -> str:
    """Return hours for a reader, such as `2.8 h`, `20 to 25 min` or `71 s`."""
    unit, times, digits = ("h", 1, 1) if hours[-1] >= 2 else ("min", 60, 0) if hours[-1] >= 1 / 40 else ("s", 3600, 0)
    return f"{' to '.join(f'{each * times:.{digits}f}' for each in hours)} {unit}"


def device_name(kind: str, local_rank: int) -> str:
    """Return the device that a rank works on, as torch spells it: `cpu`, or `cuda:1` for local rank 1."""
    return "cpu" if kind == "cpu" else f"{kind}:{local_rank}"


@dataclass(frozen=True)
class MemoryReading:
    """Memory of one device in GiB: a GPU's as PyTorch allocates it, or on CPU the process's resident memory (RSS)."""

    now_gib: float
    peak_gib: float
    peak_reserved_gib: float | None
    total_gib: float


def read_memory(device: str) -> MemoryReading:
    """Return the memory of `device` (`cpu`, `cuda:0`). A CPU's total is the machine's, shared by all its ranks."""
    if device == "cpu":
        ru_maxrss_unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
        return MemoryReading(
            now_gib=psutil.Process().memory_info().rss / GIB,
            peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * ru_maxrss_unit / GIB,
            peak_reserved_gib=None,
            total_gib=psutil.virtual_memory().total / GIB,
        )
    import torch  # here: reading the CPU's memory needs no torch

    return MemoryReading(
        now_gib=torch.accelerator.memory_allocated(device) / GIB,
        peak_gib=torch.accelerator.max_memory_allocated(device) / GIB,
        peak_reserved_gib=torch.accelerator.max_memory_reserved(device) / GIB,
        total_gib=torch.accelerator.get_memory_info(device)[1] / GIB,
    )


def forget_peak(device: str) -> None:
    """Reset a GPU's peak to what is allocated now; that of a CPU's process cannot be."""
    if device != "cpu":
        import torch  # here: as above

        torch.accelerator.reset_peak_memory_stats(device)


def cpu_name() -> str:
    """Return the processor's model name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def visible_gpus(
    names_by_uuid: Mapping[str, str], visible: str | None, slices_by_uuid: Mapping[str, Mapping[str, str]] | None = None
) -> list[str]:
    """Return the names of the GPUs that `CUDA_VISIBLE_DEVICES` leaves, as CUDA reads it.

    An entry is a number in the order of the bus, the start of a UUID, or a MIG slice's UUID; from one that is none of
    these on, nothing is seen. Of the MIG slices of a GPU that is divided (`slices_by_uuid`) a process sees one,
    the first of those that it may, and nothing beside it. (CUDA C++ Programming Guide, "CUDA Environment Variables";
    NVIDIA MIG User Guide, "Device Enumeration".)
    """
    slices_by_uuid = slices_by_uuid or {}
    seen = {uuid: next(iter(slices_by_uuid.get(uuid, {}).values()), name) for uuid, name in names_by_uuid.items()}
    of_slices = {uuid: name for slices in slices_by_uuid.values() for uuid, name in slices.items()}
    entries = map(str, range(len(seen))) if visible is None else map(str.strip, visible.split(","))
    chosen = []
    for entry in entries:
        if entry.isdecimal():
            found = list(seen.values())[int(entry) : int(entry) + 1]
        else:
            found = [name for uuid, name in {**seen, **of_slices}.items() if entry and uuid.startswith(entry)]
        if not found:
            break
        chosen += found
    return next(([name] for name in chosen if name in of_slices.values()), chosen)


def gpus() -> tuple[str, list[str]]:
    """Return the driver's version and the names of the visible NVIDIA GPUs; both empty on a machine without a driver.

    NVML is asked, which makes no CUDA context, so that ranks can still fork. In a container without NVML, or without
    its package nvidia-ml-py, CUDA is asked in a process of its own; the driver's version is empty then.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, or no library: `NVMLError` has no name where the import failed
        return "", list(_gpus_by_cuda(visible))
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = {pynvml.nvmlDeviceGetUUID(handle): pynvml.nvmlDeviceGetName(handle) for handle in handles}
        slices = {uuid: _slices(handle) for uuid, handle in zip(names, handles, strict=True)}
        return pynvml.nvmlSystemGetDriverVersion(), visible_gpus(names, visible, slices)
    finally:
        pynvml.nvmlShutdown()


def _slices(handle: Any) -> dict[str, str]:
    """Return the names of a GPU's MIG slices by their UUIDs; empty for a GPU that is not divided."""
    import pynvml

    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_DISABLE:
            return {}
    except pynvml.NVMLError:  # of a kind that cannot be divided
        return {}
    found = {}
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError):  # a place that no slice takes
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            found[pynvml.nvmlDeviceGetUUID(part)] = pynvml.nvmlDeviceGetName(part)
    return found


@cache
def _gpus_by_cuda(visible: str | None) -> tuple[str, ...]:
    """Return the names of the GPUs that CUDA sees with this `CUDA_VISIBLE_DEVICES`; none without a driver."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        if not AMD_DRIVER.exists():
            return ()
    asked = "import torch; print(*map(torch.cuda.get_device_name, range(torch.cuda.device_count())), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    return tuple(filter(None, done.stdout.splitlines()))


@dataclass(frozen=True)
class Gpu:
    """One GPU of the catalogue, with its vendor's numbers."""

    name: str  # as users write it, with the vendor's memory in GB
    # what PyTorch reports (`total_memory`), the lowest seen in logs of recent drivers, which differ by up to 0.2 GiB;
    # the RTX cards are with ECC off: with it an A6000 has 44.4 GiB
    memory_gib: float
    cuda_cores: int  # FP32 lanes
    # peak by precision, without sparsity; None = no such mode; fp32 is of the CUDA cores, others of the tensor cores
    tflops_dense: Mapping[str, float | None] = field(hash=False)
    memory_bandwidth_gb_per_s: float
    pcie_generation: int  # of its 16 lanes to the host
    source: str  # the vendor's data sheet, or who quotes it
    nvlink_gb_per_s: float | None = None  # or AMD's Infinity Fabric: both directions together, as vendors print it
    nvlink_bridge: bool = False  # NVLink joins two cards only, where a bridge is plugged in; clouds mostly have none
    generation: str = ""  # of those that reach a like share of their peak (common/planning/step_speed.py)
    reported_as: tuple[str, ...] = ()  # what the driver calls it, where that differs from `name`
    memory_is_estimated: bool = False  # no log of it was found
    process_gib: float = 0.0  # of a CPU: what a run's process holds before its model loads; 0 = it is not known


_ROWS = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))["gpus"]
CATALOGUE = tuple(
    Gpu(**row | {
        "tflops_dense": dict.fromkeys(PRECISIONS) | row["tflops_dense"],
        "reported_as": tuple(row.get("reported_as", ())),
    })
    for row in _ROWS
)  # fmt: skip
CPU_DEVICE = "CPU, 1 thread"


def cpu_device(process_gib: float = 0.0) -> Gpu:
    """Return a CPU to plan with, one process with one thread, described like a GPU."""
    return Gpu(
        name=CPU_DEVICE,
        memory_gib=psutil.virtual_memory().total / GIB,
        process_gib=process_gib,
        cuda_cores=0,
        tflops_dense=dict.fromkeys(PRECISIONS) | {"fp32": 0.1},
        memory_bandwidth_gb_per_s=10,
        pcie_generation=4,
        source="a core's fp32 matrix product reached 100 to 130 GFLOP/s (LOG.md)",
    )


_ADDED_OR_LEFT_OUT = {
    *("nvidia", "geforce", "tesla", "rtx", "generation", "gpu", "hbm3", "blackwell", "edition"),
    *("amd", "instinct", "radeon", "rx"),
}
_FORMS = {"sxm", "pcie", "server", "workstation", "max", "q"}  # of one model: the first in the catalogue is meant


def find_gpu(name: str) -> Gpu:
    """Return the GPU that a user means by `name`, such as `a6000`, `A100-80GB` or `NVIDIA RTX A6000 48GB`.

    Case, order, spaces, dashes and the maker's words do not matter; refused are names that no row fits, or rows of
    different memory. A form such as SXM may be left out: of rows with equal memory the first is meant.
    """
    fitting = _fitting(name)
    if len({_words(gpu.name) - _FORMS for gpu in fitting}) == 1:
        return fitting[0]
    if fitting:
        raise BadInputError(f"The GPU {name!r} may be {' or '.join(gpu.name for gpu in fitting)}: name its memory.")
    close = " or ".join(_close(name))
    hint = f"Did you mean {close}?" if close else f"common/hardware/catalogue.toml has {len(CATALOGUE)}."
    raise NotPlannedError(f"The GPU {name!r} is not in the catalogue. {hint}")


def gpu_of_device(nvml_name: str) -> Gpu | None:
    """Return the row of a device by its NVML name, such as `NVIDIA A100-SXM4-80GB`; None if there is none."""
    reported = [gpu for gpu in CATALOGUE if nvml_name in gpu.reported_as]
    fitting = reported or _fitting(nvml_name)
    return fitting[0] if len(fitting) == 1 else None


def gpu_here() -> Gpu | None:
    """Return the first GPU of this machine; None if there is none, or the catalogue lacks it."""
    names = gpus()[1]
    return gpu_of_device(names[0]) if names else None


def _fitting(name: str) -> list[Gpu]:
    """Return the rows that have every word of `name`, and of which `name` has every word but memory and form."""
    asked = _words(name)
    return [gpu for gpu in CATALOGUE if _model_words(gpu) <= asked <= _words(gpu.name)]


def _close(name: str) -> list[str]:
    """Return rows of the same model with other memory or form; else the one that is spelt most alike, if any."""
    asked = _words(name)
    if same_model := [gpu.name for gpu in CATALOGUE if _model_words(gpu) <= asked]:
        return same_model
    names = {spelt: gpu.name for gpu in CATALOGUE for spelt in (gpu.name.lower(), " ".join(sorted(_model_words(gpu))))}
    return [names[match] for match in difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)]


@cache
def _words(name: str) -> frozenset[str]:
    """Return the words of a GPU's name: `NVIDIA A100-SXM4-80GB` gives {a100, sxm, 80gb}."""
    text = re.sub(r"[\W_]+", " ", name.lower()).replace("rtx", " ")
    text = re.sub(r"(?<![a-z\d])(\d+) ?g(i?b)?\b", r"\1gb", text)
    return frozenset(re.sub(r"\bsxm[245]\b", "sxm", text).split()) - _ADDED_OR_LEFT_OUT


@cache
def _model_words(gpu: Gpu) -> frozenset[str]:
    return frozenset(word for word in _words(gpu.name) if word not in _FORMS and not re.fullmatch(r"\d+gb", word))
