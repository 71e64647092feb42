"""What a device needs in training besides the step's tensors: context, workspace, gaps, buffers, a CPU's process."""

from common.hardware.devices import CPU_DEVICE, GIB, Gpu
from common.planning.architectures import Architecture
from common.planning.job import Job
from common.planning.memory_plan import DeviceMemory, device_memory
from common.planning.shares import Share, part_of_rank
from common.planning.terms import Term

CONTEXT_GIB = 0.3
"""CUDA context and loaded kernels: 0.14 GiB on a T4 (fitcheck-llm, data/measurements), 0.28 and 0.65 GiB with lazy and
eager loading (github.com/pytorch/pytorch/pull/86509)."""
WORKSPACE_GIB, HOPPER_WORKSPACE_GIB = 8_519_680 / GIB, 32 / 1024
"""cuBLAS workspace (PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp)."""
EAGER_SCORE_BYTES = 4
"""Per attention score, beyond what the dry run shows: a T4's peaks with eager attention (assets/published_peaks.json)
have up to that much more, 1.0 GiB for TinyLlama at 2 x 2048; why is not known."""
NCCL_GIB = 0.5
"""Buffers of one communicator: an assumption; 4 MiB a channel and peer (github.com/NVIDIA/nccl/issues/391)."""
CPU_PROCESS_GIB = 0.62
"""Resident memory of a run's process at the end of training, besides its tensors: Python, PyTorch's CPU build,
Transformers, PEFT, judge and rows; measured once, on one machine."""
GAP_SHARE = 0.05
"""Gaps between blocks, of what is allocated and freed in every step: reserved over allocated memory was 1.01 to 1.07 in
Llama-1B training logs (huggingface.co/nanotron/old_bench), 1.04 to 1.25 on a T4 (fitcheck-llm)."""


def overhead_terms(architecture: Architecture, job: Job, gpu: Gpu, memory: DeviceMemory) -> list[Term]:
    """What a GPU needs besides the step's tensors."""
    if gpu.name == CPU_DEVICE:
        return [Term("overhead", "process: Python, PyTorch, libraries, data", "measured", CPU_PROCESS_GIB * GIB)]
    workspace = HOPPER_WORKSPACE_GIB if gpu.name.startswith(("H100", "H200")) else WORKSPACE_GIB
    passing = sum(term.count for term in memory.terms if term.part in ("activations", "logits", "gradients"))
    terms = [
        Term("overhead", "CUDA context", f"{CONTEXT_GIB} GiB", CONTEXT_GIB * GIB),
        Term("overhead", "cuBLAS workspace", f"{workspace * 1024:.0f} MiB", workspace * GIB),
        Term("overhead", "gaps between blocks", f"{GAP_SHARE:.0%} of what comes and goes", GAP_SHARE * passing),
    ]
    if job.attention == "eager":
        length = max(job.batch.length, job.batch.target_length)
        scores = job.batch.rows // job.micro_batches * part_of_rank(architecture, job).heads * length**2
        size = EAGER_SCORE_BYTES * scores
        terms.append(Term("overhead", "eager attention on CUDA", f"B heads S S {EAGER_SCORE_BYTES}", size))
    if job.devices > 1 and not job.parallelism.layers_in_turn:
        terms.append(Term("overhead", "NCCL's buffers", f"{NCCL_GIB} GiB", NCCL_GIB * GIB))
    return terms


def memory_with_overhead(architecture: Architecture, job: Job, share: Share, gpu: Gpu) -> DeviceMemory:
    """The memory of one device, the GPU's own needs included."""
    memory = device_memory(architecture, job, share)
    return DeviceMemory(memory.moment, (*memory.terms, *overhead_terms(architecture, job, gpu, memory)))
