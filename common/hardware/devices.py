"""The devices at hand and their memory, and a catalogue of GPUs and machines to plan with.

Only `read_memory` of a GPU starts CUDA.
"""

import ctypes
import difflib
import importlib.util
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from common.base.errors import BadInputError


def device_name(kind: str, local_rank: int) -> str:
    """The device that a rank works on, as torch spells it: `cpu`, or `cuda:1` for local rank 1."""
    return "cpu" if kind == "cpu" else f"{kind}:{local_rank}"


GIB, MIB = 2**30, 2**20
CUDA_DRIVER = "libcuda.so.1"
"""The driver's library, which any machine with an NVIDIA driver has, and a container that was given its GPUs."""


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
        now_gib=torch.accelerator.memory_allocated(device) / GIB,
        peak_gib=torch.accelerator.max_memory_allocated(device) / GIB,
        peak_reserved_gib=torch.accelerator.max_memory_reserved(device) / GIB,
        total_gib=torch.accelerator.get_memory_info(device)[1] / GIB,
    )


def forget_peak(device: str) -> None:
    """Have a GPU's peak start again from what is allocated now."""
    import torch  # here: as above

    torch.accelerator.reset_peak_memory_stats(device)


def cpu_name() -> str:
    """The processor's model name."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def visible_gpus(
    names_by_uuid: Mapping[str, str], visible: str | None, slices_by_uuid: Mapping[str, Mapping[str, str]] | None = None
) -> list[str]:
    """The names of the GPUs that `CUDA_VISIBLE_DEVICES` leaves, as CUDA reads it.

    An entry is a number in the order of the bus, the start of a UUID, or a MIG slice's UUID; what follows an entry that
    is none of these is not seen. `slices_by_uuid` has the MIG slices of each GPU that is divided: a process sees one
    slice, the first of those that it may, and nothing beside it. (CUDA C++ Programming Guide, "CUDA Environment
    Variables"; NVIDIA MIG User Guide, "Device Enumeration".)
    """
    slices_by_uuid = slices_by_uuid or {}
    seen = {uuid: next(iter(slices_by_uuid.get(uuid, {}).values()), name) for uuid, name in names_by_uuid.items()}
    of_slices = {uuid: name for slices in slices_by_uuid.values() for uuid, name in slices.items()}
    if visible is None:
        return _one_slice(list(seen.values()), of_slices.values())
    chosen = []
    for entry in map(str.strip, visible.split(",")):
        if entry.isdecimal():
            found = list(seen.values())[int(entry) : int(entry) + 1]
        else:
            found = [name for uuid, name in {**seen, **of_slices}.items() if entry and uuid.startswith(entry)]
        if not found:
            break
        chosen += found
    return _one_slice(chosen, of_slices.values())


def _one_slice(names: list[str], slices: Collection[str]) -> list[str]:
    """The first slice alone, where there is one among them."""
    return next(([name] for name in names if name in slices), names)


def gpus() -> tuple[str, list[str]]:
    """Driver version and names of the visible NVIDIA GPUs, by NVML: no CUDA context is made, so ranks can still fork.

    In a container without NVML, or without its package nvidia-ml-py, CUDA is asked in a process of its own; the
    driver's version is empty then. Both are empty on a machine without an NVIDIA driver.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if importlib.util.find_spec("pynvml") is None:
        return "", list(_gpus_by_cuda(visible))
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", list(_gpus_by_cuda(visible))
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = {pynvml.nvmlDeviceGetUUID(handle): pynvml.nvmlDeviceGetName(handle) for handle in handles}
        slices = {uuid: _slices(handle) for uuid, handle in zip(names, handles, strict=True)}
        return pynvml.nvmlSystemGetDriverVersion(), visible_gpus(names, visible, slices)
    finally:
        pynvml.nvmlShutdown()


def _slices(handle: Any) -> dict[str, str]:
    """The MIG slices of a GPU by their UUIDs, by NVML; none of one that is not divided."""
    import pynvml

    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_DISABLE:
            return {}
    except pynvml.NVMLError:  # of a kind that cannot be divided
        return {}
    found = {}
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except pynvml.NVMLError:  # a place that no slice takes
            continue
        found[pynvml.nvmlDeviceGetUUID(part)] = pynvml.nvmlDeviceGetName(part)
    return found


@cache
def _gpus_by_cuda(visible: str | None) -> tuple[str, ...]:
    """The names of the GPUs that CUDA sees with this `CUDA_VISIBLE_DEVICES`, where there is a driver."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return ()
    asked = "import torch; print(*map(torch.cuda.get_device_name, range(torch.cuda.device_count())), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    return tuple(filter(None, done.stdout.splitlines()))


@dataclass(frozen=True)
class Gpu:
    """One GPU of the catalogue, in its vendor's figures; memory as PyTorch finds it.

    Attributes:
        name: As users write it, with the vendor's memory in GB.
        memory_gib: What PyTorch reports (`total_memory`), the lowest seen in logs of recent drivers. Drivers differ by
            up to 0.2 GiB. The RTX cards are with ECC off: with it an A6000 has 44.4 GiB.
        cuda_cores: FP32 lanes.
        tflops_dense: Peak TFLOP/s by precision (fp32, tf32, bf16, fp16), without sparsity; None = no such mode. fp32 is
            of the CUDA cores, the others of the tensor cores, which add up in fp32.
        memory_bandwidth_gb_per_s: In 10^9 bytes.
        pcie_generation: Of its 16 lanes to the host.
        nvlink_gb_per_s: Both directions together, as vendors print it; None = no NVLink.
        nvlink_bridge: NVLink joins two cards only, and only where a bridge is plugged in; clouds mostly have none.
        source: The vendor's data sheet.
        usd_per_hour: Rent of one, on demand, without tax; None = no public price found.
        price_date: When that price was read, year and month at least.
        price_source: Who asks it, and where it is published.
    """

    name: str
    memory_gib: float
    cuda_cores: int
    tflops_dense: Mapping[str, float | None] = field(hash=False)
    memory_bandwidth_gb_per_s: float
    pcie_generation: int
    source: str
    nvlink_gb_per_s: float | None = None
    nvlink_bridge: bool = False
    usd_per_hour: float | None = None
    price_date: str | None = None
    price_source: str | None = None

    @property
    def link(self) -> str:
        """The fastest way to another GPU of its machine, in words."""
        pcie = f"PCIe {self.pcie_generation}"
        if self.nvlink_gb_per_s is None:
            return pcie
        nvlink = f"NVLink {self.nvlink_gb_per_s:g} GB/s"
        return f"{nvlink} (bridge of two), else {pcie}" if self.nvlink_bridge else nvlink


def _tflops(fp32: float, tf32: float | None, bf16: float | None, fp16: float | None) -> dict[str, float | None]:
    return {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}


_NVIDIA = "https://www.nvidia.com/en-us"
_NVIDIA_FILES = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_A100_SHEET = f"{_NVIDIA_FILES}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_V100_SHEET = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_RUNPOD = "RunPod, Secure Cloud: https://www.runpod.io/pricing"
_LAMBDA = "Lambda: https://lambda.ai/pricing"
_EC2 = "AWS EC2 {}, us-east-1: https://instances.vantage.sh/aws/ec2/{}"

# How the figures were checked. The data sheets and price lists were read through public files that quote them:
# - rates, bandwidth, links: GPU_REFERENCE of github.com/FlyingWHR/waterline (dense figures, each with its data sheet);
#   `_CUDA_FLOPS` in Lightning's src/lightning/fabric/utilities/throughput.py; the device table of the Marin project.
#   Where they disagree, the vendor's own arithmetic decides: fp32 = 2 x cores x boost clock (a test checks it).
# - Workstation cards: NVIDIA prints one sparse tensor figure. Dense bf16 is half of it for Ampere (154.8 of 309.7;
#   NVIDIA prints the same halves for the A40), a quarter for the RTX 6000 Ada (its 1457.0 is sparse fp8); tf32 half of
#   bf16. GeForce adds up in fp32 at half rate: 71 and 165.2, not 142 and 330.3.
# - memory: PyTorch's `total_memory` in public training logs (Ultralytics, Unsloth and out-of-memory messages).
# - prices: transcriptions that name page and day (api-evangelist/lambda-labs, tgarg01/silybench-data,
#   datareceipts/data-receipts, and others). Prices of 2026 rise and fall by a third within months.
CATALOGUE = (
    Gpu(
        name="RTX A4000 16GB",
        memory_gib=15.59,
        cuda_cores=6_144,
        tflops_dense=_tflops(19.2, 38.3, 76.7, 76.7),  # data sheet: 19.2, and 153.4 sparse
        memory_bandwidth_gb_per_s=448,
        pcie_generation=4,
        source=f"{_NVIDIA}/products/workstations/rtx-a4000/",
        usd_per_hour=0.25,
        price_date="2026-08-09",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="RTX A5000 24GB",
        memory_gib=23.67,
        cuda_cores=8_192,
        tflops_dense=_tflops(27.8, 55.5, 111.1, 111.1),  # data sheet: 27.8, and 222.2 sparse
        memory_bandwidth_gb_per_s=768,
        pcie_generation=4,
        nvlink_gb_per_s=112.5,
        nvlink_bridge=True,
        source="https://nvdam.widen.net/s/wrqrqt75vh/nvidia-rtx-a5000-datasheet",
        usd_per_hour=0.27,
        price_date="2026-09-26",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="RTX A6000 48GB",
        memory_gib=47.43,
        cuda_cores=10_752,
        tflops_dense=_tflops(38.7, 77.4, 154.8, 154.8),
        memory_bandwidth_gb_per_s=768,
        pcie_generation=4,
        nvlink_gb_per_s=112.5,
        nvlink_bridge=True,
        source=f"{_NVIDIA_FILES}/design-visualization/quadro-product-literature/"
        "proviz-print-nvidia-rtx-a6000-datasheet-us-nvidia-1454980-r9-web%20(1).pdf",
        usd_per_hour=0.53,
        price_date="2026-08-09",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="RTX 6000 Ada 48GB",
        memory_gib=47.36,
        cuda_cores=18_176,
        tflops_dense=_tflops(91.1, 182.1, 364.2, 364.2),  # data sheet: 91.1, and 1457.0 in sparse fp8
        memory_bandwidth_gb_per_s=960,
        pcie_generation=4,
        source=f"{_NVIDIA_FILES}/design-visualization/rtx-6000/proviz-rtx-6000-ada-datasheet.pdf",
        usd_per_hour=0.84,
        price_date="2026-09-25",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="L4 24GB",
        memory_gib=22.03,
        cuda_cores=7_424,
        tflops_dense=_tflops(30.3, 60.0, 121.0, 121.0),
        memory_bandwidth_gb_per_s=300,
        pcie_generation=4,
        source=f"{_NVIDIA}/data-center/l4/",
        usd_per_hour=0.49,
        price_date="2026-09-26",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="L40S 48GB",
        memory_gib=44.39,
        cuda_cores=18_176,
        tflops_dense=_tflops(91.6, 183.0, 362.05, 362.05),
        memory_bandwidth_gb_per_s=864,
        pcie_generation=4,
        source=f"{_NVIDIA}/data-center/l40s/",
        usd_per_hour=1.09,
        price_date="2026-09-26",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="A10G 24GB",  # not the A10, whose tensor cores do 125
        memory_gib=22.06,
        cuda_cores=10_240,  # 80 SMs of 128; tables that say 9,216 give the A10's
        tflops_dense=_tflops(35.0, 35.0, 70.0, 70.0),
        memory_bandwidth_gb_per_s=600,
        pcie_generation=4,
        source="https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
        usd_per_hour=1.006,
        price_date="2026-03",
        price_source=_EC2.format("g5.xlarge", "g5.xlarge"),
    ),
    Gpu(
        name="A100 40GB SXM",
        memory_gib=39.49,
        cuda_cores=6_912,
        tflops_dense=_tflops(19.5, 156.0, 312.0, 312.0),
        memory_bandwidth_gb_per_s=1_555,
        pcie_generation=4,
        nvlink_gb_per_s=600,
        source=_A100_SHEET,
        usd_per_hour=1.99,
        price_date="2026-09-25",
        price_source=_LAMBDA,
    ),
    Gpu(
        name="A100 80GB SXM",
        memory_gib=79.14,
        cuda_cores=6_912,
        tflops_dense=_tflops(19.5, 156.0, 312.0, 312.0),
        memory_bandwidth_gb_per_s=2_039,
        pcie_generation=4,
        nvlink_gb_per_s=600,
        source=_A100_SHEET,
        usd_per_hour=1.79,
        price_date="2026-11-09",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="A100 80GB PCIe",
        memory_gib=79.25,
        cuda_cores=6_912,
        tflops_dense=_tflops(19.5, 156.0, 312.0, 312.0),
        memory_bandwidth_gb_per_s=1_935,
        pcie_generation=4,
        nvlink_gb_per_s=600,
        nvlink_bridge=True,
        source=_A100_SHEET,
        usd_per_hour=1.79,
        price_date="2026-11-09",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="H100 80GB SXM",
        memory_gib=79.18,
        cuda_cores=16_896,
        tflops_dense=_tflops(66.9, 494.7, 989.4, 989.4),  # the sheet's 989 and 1,979 are sparse
        memory_bandwidth_gb_per_s=3_350,
        pcie_generation=5,
        nvlink_gb_per_s=900,
        source=f"{_NVIDIA}/data-center/h100/",
        usd_per_hour=3.99,
        price_date="2026-11-09",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="H200 141GB SXM",
        memory_gib=139.80,
        cuda_cores=16_896,
        tflops_dense=_tflops(66.9, 494.7, 989.4, 989.4),  # the H100's chip
        memory_bandwidth_gb_per_s=4_800,
        pcie_generation=5,
        nvlink_gb_per_s=900,
        source=f"{_NVIDIA}/data-center/h200/",
        usd_per_hour=4.59,
        price_date="2026-09-25",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="V100 16GB SXM",
        memory_gib=15.78,  # from logs of 2022 and before
        cuda_cores=5_120,
        tflops_dense=_tflops(15.7, None, None, 125.0),
        memory_bandwidth_gb_per_s=900,
        pcie_generation=3,
        nvlink_gb_per_s=300,
        source=_V100_SHEET,
        usd_per_hour=0.79,
        price_date="2026-09-25",
        price_source=f"{_LAMBDA} (eight at least)",
    ),
    Gpu(
        name="V100 32GB SXM",
        memory_gib=31.73,
        cuda_cores=5_120,
        tflops_dense=_tflops(15.7, None, None, 125.0),
        memory_bandwidth_gb_per_s=900,
        pcie_generation=3,
        nvlink_gb_per_s=300,
        source=_V100_SHEET,
        usd_per_hour=3.90,  # 31.212 for eight
        price_date="2026-04",
        price_source=_EC2.format("p3dn.24xlarge (eight at least)", "p3dn.24xlarge"),
    ),
    Gpu(
        name="T4 16GB",
        memory_gib=14.56,
        cuda_cores=2_560,
        tflops_dense=_tflops(8.1, None, None, 65.0),
        memory_bandwidth_gb_per_s=320,
        pcie_generation=3,
        source=f"{_NVIDIA_FILES}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
        usd_per_hour=0.526,
        price_date="2026-04",
        price_source=_EC2.format("g4dn.xlarge", "g4dn.xlarge"),
    ),
    Gpu(
        name="RTX 3090 24GB",
        memory_gib=23.56,
        cuda_cores=10_496,
        tflops_dense=_tflops(35.6, 35.6, 71.0, 71.0),
        memory_bandwidth_gb_per_s=936,
        pcie_generation=4,
        nvlink_gb_per_s=112.5,
        nvlink_bridge=True,
        source="https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf",
        usd_per_hour=0.50,
        price_date="2026-09-26",
        price_source=_RUNPOD,
    ),
    Gpu(
        name="RTX 4090 24GB",
        memory_gib=23.51,
        cuda_cores=16_384,
        tflops_dense=_tflops(82.6, 82.6, 165.2, 165.2),
        memory_bandwidth_gb_per_s=1_008,
        pcie_generation=4,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        usd_per_hour=0.74,
        price_date="2026-09-26",
        price_source=_RUNPOD,
    ),
)


@dataclass(frozen=True)
class Machine:
    """A machine with GPUs that a cloud rents by the hour.

    Attributes:
        name: What its cloud calls it.
        gpu: Its GPUs, by their name in the catalogue.
        gpus: How many it has.
        network_gbit: Of its network, in Gbit/s, what it has at all times.
        peak_gbit: What it has for minutes, over one connection to a neighbour.
        network_source: Where these two are published.
        usd_per_hour: Rent of the whole machine, on demand, without tax.
        price_date: When that price held.
        price_source: Who asks it, and where it is published.
    """

    name: str
    gpu: str
    gpus: int
    network_gbit: float
    peak_gbit: float
    network_source: str
    usd_per_hour: float
    price_date: str
    price_source: str


# AWS's price list was read through two public files that quote it: github.com/getnable/finopsmcp,
# src/finops/aws_prices.py (its version of 2026-09-24), and github.com/aws/karpenter-provider-aws,
# pkg/providers/pricing/zz_generated.pricing_aws.go (2026-01-19). Both have the same three prices.
_EC2_PRICES = "AWS EC2, us-east-1, on demand: https://aws.amazon.com/ec2/pricing/on-demand/"
# The baseline comes from zz_generated.bandwidth.go of the same repository. Small machines exceed it for 5 to 60
# minutes; one connection has 5 Gbit/s, or 10 in a cluster placement group.
_EC2_NETWORK = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth.html"
MACHINES = (
    Machine("p3.8xlarge", "V100 16GB SXM", 4, 10, 10, _EC2_NETWORK, 12.24, "2026-09-24", _EC2_PRICES),
    Machine("p3.2xlarge", "V100 16GB SXM", 1, 2.5, 10, _EC2_NETWORK, 3.06, "2026-09-24", _EC2_PRICES),
    Machine("g4dn.xlarge", "T4 16GB", 1, 5, 10, _EC2_NETWORK, 0.526, "2026-09-24", _EC2_PRICES),
)


def find_machine(name: str) -> Machine:
    """The machine of that name.

    Raises:
        BadInputError: the catalogue has none.
    """
    for machine in MACHINES:
        if machine.name == name:
            return machine
    known = ", ".join(machine.name for machine in MACHINES)
    raise BadInputError(f"The machine {name!r} is not in the catalogue: choose one of {known}.")


CPU_DEVICE = "CPU, 1 thread"


def cpu_device() -> Gpu:
    """A CPU device, one process with one thread, in a GPU's words, to plan with."""
    return Gpu(
        name=CPU_DEVICE,
        memory_gib=psutil.virtual_memory().total / GIB,
        cuda_cores=0,
        tflops_dense=_tflops(0.1, None, None, None),
        memory_bandwidth_gb_per_s=10,
        pcie_generation=4,
        source="a core's fp32 matrix product reached 100 to 130 GFLOP/s (LOG.md)",
    )


_ADDED_OR_LEFT_OUT = {"nvidia", "geforce", "tesla", "rtx", "generation", "gpu", "hbm3"}


def find_gpu(name: str) -> Gpu:
    """The GPU that a user means by `name`, such as `a6000`, `A100-80GB` or `NVIDIA RTX A6000 48GB`.

    Case, order, spaces, dashes and the maker's words do not matter. Memory may be left out where only one row fits, and
    SXM always: of rows with equal memory the first is meant.

    Raises:
        BadInputError: no row fits, or rows of different memory do.
    """
    fitting = _fitting(name)
    if len({gpu.name.split("GB")[0] for gpu in fitting}) == 1:
        return fitting[0]
    if fitting:
        raise BadInputError(f"The GPU {name!r} may be {' or '.join(gpu.name for gpu in fitting)}: name its memory.")
    known = ", ".join(gpu.name for gpu in CATALOGUE)
    close = _close(name)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise BadInputError(f"The GPU {name!r} is not in the catalogue.{hint} It has: {known}.")


def gpu_of_device(nvml_name: str) -> Gpu | None:
    """The row of a device by its NVML name, such as `NVIDIA A100-SXM4-80GB`; None if the catalogue lacks it."""
    fitting = _fitting(nvml_name)
    return fitting[0] if len(fitting) == 1 else None


def gpu_here() -> Gpu | None:
    """The first GPU of this machine, where the catalogue has it."""
    names = gpus()[1]
    return gpu_of_device(names[0]) if names else None


def _fitting(name: str) -> list[Gpu]:
    """Rows that have every word of `name`, and of which `name` has every word but memory and form."""
    asked = _words(name)
    return [gpu for gpu in CATALOGUE if _model_words(gpu) <= asked <= _words(gpu.name)]


def _close(name: str) -> list[str]:
    """Rows of the same model with other memory or form; else the one that is spelt most alike, if any."""
    asked = _words(name)
    if same_model := [gpu.name for gpu in CATALOGUE if _model_words(gpu) <= asked]:
        return same_model
    names = {spelt: gpu.name for gpu in CATALOGUE for spelt in (gpu.name.lower(), " ".join(sorted(_model_words(gpu))))}
    return [names[match] for match in difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)]


def _words(name: str) -> set[str]:
    """`NVIDIA A100-SXM4-80GB` -> {a100, sxm, 80gb}."""
    text = re.sub(r"[\W_]+", " ", name.lower()).replace("rtx", " ")
    text = re.sub(r"(?<![a-z\d])(\d+) ?g(i?b)?\b", r"\1gb", text)
    return set(re.sub(r"\bsxm[245]\b", "sxm", text).split()) - _ADDED_OR_LEFT_OUT


def _model_words(gpu: Gpu) -> set[str]:
    return {word for word in _words(gpu.name) if word not in ("sxm", "pcie") and not re.fullmatch(r"\d+gb", word)}
