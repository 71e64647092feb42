"""What a device needs in training besides the step's tensors: context, workspace, gaps, buffers, a CPU's process."""

from dataclasses import replace
from functools import lru_cache

from common.hardware.devices import CPU_DEVICE, GIB, Gpu
from common.planning.architectures import Architecture
from common.planning.job import Job
from common.planning.memory_plan import device_memory
from common.planning.shares import Share
from common.planning.step_speed import generation_of
from common.planning.terms import DeviceMemory, Kind, Term, size_of

# CUDA context and loaded kernels: 0.14 GiB on a T4 (fitcheck-llm, data/measurements), 0.28 and 0.65 GiB with lazy and
# eager loading (github.com/pytorch/pytorch/pull/86509)
CONTEXT_GIB = 0.3
# PyTorch's allocator asks CUDA for multiples of so many bytes (c10/cuda/CUDACachingAllocator.cpp: `kRoundLarge`)
BLOCK_BYTES = 2 * 2**20
CONTEXT, RANKS, APART = "CUDA context", "NCCL's buffers", "blocks that other moments use"
PASSING_PARTS = (Kind.ACTIVATIONS, Kind.LOGITS, Kind.GRADIENTS)
# with several ranks: NCCL's buffers; fitted to 93 figures of `nvidia-smi` (`bench.published.CALIBRATION`)
RANKS_GIB = 2.0
# they grow with its channels (github.com/NVIDIA/nccl/issues/986): 24 on those A100s, and as many wherever NVLink joins
# more than two cards; over PCIe 2 (nccl-tests#307, of RTX 4090s), of the fifth generation 4 (RTX 5090s)
NVLINK_CHANNELS = 24
# resident memory of a run's process at the end of training, besides its tensors, as measured once on one machine
CPU_PROCESS_GIB = 0.62
# with images more: Pillow, the image processor, and the images as they are stored (records of 3.3: 0.73 to 0.76 in all)
CPU_PICTURES_GIB = 0.13
# with pairs of answers more: what glibc keeps of freed blocks beside the head's tiles, whose sizes differ from batch to
# batch (runs of 3.4 took 0.73 to 0.77; with MALLOC_MMAP_THRESHOLD_=262144, which gives them back, 0.62)
CPU_PAIRS_GIB = 0.12
# where the process was measured before its model loaded, what it comes to hold besides tensors (0.05 without a judge,
# 0.08 to 0.09 with one, with pairs of answers 0.13)
CPU_LATER_GIB = 0.1
# gaps between blocks, of what is allocated and freed in every step; fitted to 156 figures of `nvidia-smi` (the same)
GAP_SHARE = 0.06
# beyond the likely memory, of temporary memory in every step: 19 in 20 of the same figures need no more, 53 of
# losses in chunks or fused
SPREAD_SHARE = 0.12


def ranks_gib_of(gpu: Gpu) -> float:
    """Return what NCCL needs on such a GPU, in GiB; a bridge, which few have, counts as PCIe: maybe too little."""
    if gpu.nvlink_gb_per_s and not gpu.nvlink_bridge:
        return RANKS_GIB
    return RANKS_GIB * (4 if gpu.pcie_generation >= 5 else 2) / NVLINK_CHANNELS


def overhead_terms(job: Job, gpu: Gpu, memory: DeviceMemory) -> list[Term]:
    """Return what a GPU needs besides the step's tensors."""
    workspace_gib = generation_of(gpu).workspace_gib
    gaps = GAP_SHARE * _passing_bytes(memory)
    has_ranks = job.devices > 1 and not job.parallelism.layers_in_turn
    ranks_gib = ranks_gib_of(gpu)
    rows_of_terms = (
        (True, CONTEXT, f"{CONTEXT_GIB} GiB", CONTEXT_GIB * GIB),
        (True, "cuBLAS workspace", f"{workspace_gib * 1024:.0f} MiB", workspace_gib * GIB),
        (True, "gaps between blocks", f"{GAP_SHARE:.0%} of temporary memory", gaps),
        (has_ranks, RANKS, f"{ranks_gib:.1f} GiB", ranks_gib * GIB),
    )
    terms = [Term(Kind.OVERHEAD, *term) for holds, *term in rows_of_terms if holds]
    # where there is no room the allocator gives free blocks back
    room = gpu.memory_gib * GIB - size_of((*memory.terms, *terms))
    apart = max(0.0, min(_blocks_apart(memory), room // BLOCK_BYTES * BLOCK_BYTES))
    freed = Term(Kind.OVERHEAD, APART, "free at the highest moment, as far as there is room", apart)
    return [*terms, freed] if apart else terms


def _process_terms(job: Job, process_gib: float) -> list[Term]:
    what = "process: Python, PyTorch, libraries, data"
    if process_gib:
        return [Term(Kind.OVERHEAD, what, "measured", (process_gib + CPU_LATER_GIB) * GIB)]
    sizes_gib = {
        what: CPU_PROCESS_GIB,
        "process: what opens pictures, and these": CPU_PICTURES_GIB * bool(job.batch.tiles),
        "process: freed blocks that it keeps": CPU_PAIRS_GIB * job.batch.goal.compares,
    }
    return [Term(Kind.OVERHEAD, what, "measured elsewhere", gib * GIB) for what, gib in sizes_gib.items() if gib]


def _blocks_apart(memory: DeviceMemory) -> float:
    """Return the bytes of blocks beyond what is allocated at the highest moment."""
    return max(0.0, memory.blocks - size_of(memory.terms))


def _passing_bytes(memory: DeviceMemory) -> float:
    """Return what is allocated and freed in every step, blocks of other moments included."""
    return _blocks_apart(memory) + size_of(term for term in memory.terms if term.part in PASSING_PARTS)


def with_overhead(job: Job, gpu: Gpu, memory: DeviceMemory, spread_share: float = SPREAD_SHARE) -> DeviceMemory:
    """Return the memory with the device's own needs, the likely ones and their spread."""
    if gpu.name == CPU_DEVICE:
        return replace(memory, terms=(*memory.terms, *_process_terms(job, gpu.process_gib)))
    overhead = overhead_terms(job, gpu, memory)
    given_back = _blocks_apart(memory) - size_of(term for term in overhead if term.what == APART)
    spread = given_back + spread_share * _passing_bytes(memory)
    return replace(memory, terms=(*memory.terms, *overhead), spread=spread)


def memory_with_overhead(architecture: Architecture, job: Job, share: Share, gpu: Gpu) -> DeviceMemory:
    """Return the memory of one device in training, the GPU's own needs included."""
    return with_overhead(job, gpu, memory_of_step(architecture, replace(job, evaluation=None), share))


# searches ask often for the same, and what to rent of all GPUs
memory_of_step = lru_cache(maxsize=10_000)(device_memory)
