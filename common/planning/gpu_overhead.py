"""What a device needs in training besides the step's tensors: context, workspace, gaps, buffers, a CPU's process."""

from functools import lru_cache

from common.hardware.devices import CPU_DEVICE, GIB, Gpu
from common.planning.architectures import Architecture
from common.planning.job import Job
from common.planning.memory_plan import DeviceMemory, device_memory
from common.planning.shares import Share, part_of_rank
from common.planning.terms import Term, where

# CUDA context and loaded kernels: 0.14 GiB on a T4 (fitcheck-llm, data/measurements), 0.28 and 0.65 GiB with lazy and
# eager loading (github.com/pytorch/pytorch/pull/86509)
CONTEXT_GIB = 0.3
# cuBLAS workspace (PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp)
WORKSPACE_GIB, HOPPER_WORKSPACE_GIB = 8_519_680 / GIB, 32 / 1024
# per attention score, beyond what the dry run shows: a T4's peaks with eager attention (assets/published_peaks.json)
# have up to that much more, 1.0 GiB for TinyLlama at 2 x 2048; why is not known
EAGER_SCORE_BYTES = 4
# buffers of one communicator: an assumption; 4 MiB a channel and peer (github.com/NVIDIA/nccl/issues/391)
NCCL_GIB = 0.5
# resident memory of a run's process at the end of training, besides its tensors: Python, PyTorch's CPU build,
# Transformers, PEFT, judge and rows; measured once, on one machine
CPU_PROCESS_GIB = 0.62
# gaps between blocks, of what is allocated and freed in every step: reserved over allocated memory was 1.01 to 1.07 in
# Llama-1B training logs (huggingface.co/nanotron/old_bench), 1.04 to 1.25 on a T4 (fitcheck-llm)
GAP_SHARE = 0.05


def overhead_terms(architecture: Architecture, job: Job, gpu: Gpu, memory: DeviceMemory) -> list[Term]:
    """Return what a GPU needs besides the step's tensors."""
    if gpu.name == CPU_DEVICE:
        return [Term("overhead", "process: Python, PyTorch, libraries, data", "measured", CPU_PROCESS_GIB * GIB)]
    workspace = HOPPER_WORKSPACE_GIB if gpu.name.startswith(("H100", "H200")) else WORKSPACE_GIB
    passing = sum(term.count for term in memory.terms if term.part in ("activations", "logits", "gradients"))
    length, rows = max(job.batch.length, job.batch.target_length), job.batch.rows // job.micro_batches
    scores = EAGER_SCORE_BYTES * rows * part_of_rank(architecture, job).heads * length**2
    is_eager, has_ranks = job.attention == "eager", job.devices > 1 and not job.parallelism.layers_in_turn
    return where(
        (True, Term("overhead", "CUDA context", f"{CONTEXT_GIB} GiB", CONTEXT_GIB * GIB)),
        (True, Term("overhead", "cuBLAS workspace", f"{workspace * 1024:.0f} MiB", workspace * GIB)),
        (True, Term("overhead", "gaps between blocks", f"{GAP_SHARE:.0%} of what comes and goes", GAP_SHARE * passing)),
        (is_eager, Term("overhead", "eager attention on CUDA", f"B heads S S {EAGER_SCORE_BYTES}", scores)),
        (has_ranks, Term("overhead", "NCCL's buffers", f"{NCCL_GIB} GiB", NCCL_GIB * GIB)),
    )


@lru_cache(maxsize=10_000)
def memory_with_overhead(architecture: Architecture, job: Job, share: Share, gpu: Gpu) -> DeviceMemory:
    """Return the memory of one device, the GPU's own needs included; searches ask often for the same."""
    memory = device_memory(architecture, job, share)
    return DeviceMemory(memory.moment, (*memory.terms, *overhead_terms(architecture, job, gpu, memory)))
