"""The devices at hand: what they are, and how much memory is used, was used at most, and exists. Never starts CUDA."""

import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 2**30


@dataclass(frozen=True)
class MemoryReading:
    """Memory of one device in GiB: a GPU's as PyTorch allocates it, or on CPU the process's resident memory (RSS)."""

    now_gib: float
    peak_gib: float
    peak_reserved_gib: float | None
    total_gib: float


def read_memory(device: str) -> MemoryReading:
    """Memory of `device` (`cpu`, `cuda:0`). On CPU the total is the machine's, shared by all its ranks."""
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
        now_gib=torch.cuda.memory_allocated(device) / GIB,
        peak_gib=torch.cuda.max_memory_allocated(device) / GIB,
        peak_reserved_gib=torch.cuda.max_memory_reserved(device) / GIB,
        total_gib=torch.cuda.get_device_properties(device).total_memory / GIB,
    )


def cpu_name() -> str:
    """The processor's model name."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpus() -> tuple[str, list[str]]:
    """Driver version and names of the NVIDIA GPUs, through NVML: no CUDA context is made, so ranks can still fork.

    Both are empty on a machine without an NVIDIA driver.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return pynvml.nvmlSystemGetDriverVersion(), [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
