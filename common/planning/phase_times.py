"""How long loading a model and answering the test's questions take, projected.

Answering is `generate`'s greedy search: a batch's prompts are read in one pass, then each new token reads all weights
and all keys and values so far. Where ranks hold a model in stages, these follow one another.
"""

from dataclasses import dataclass, replace

from common.hardware.devices import CPU_DEVICE, Gpu, hours_text
from common.planning.architectures import Architecture
from common.planning.job import QUANTIZED_BYTES, EvaluationShape, Job
from common.planning.shares import stages_of, whole_model
from common.planning.step_speed import BANDWIDTH_REACHED, KERNEL_SETS, LAUNCH_S, products_per_s, step_flops

DISK_GB_PER_S = 2.0  # assumed: each weight is read once (local NVMe drives reach 2 to 7)
FILE_BYTES = 2  # of a weight in the files that are read
# assumed: a stage's hidden states on their way to the next, and its wait for the last one's logits
HAND_OVER_S = 100e-6
COPY_TOUCHES = 3  # of a weight that is copied and multiplied: read, written, read again
ASSUMED_QUESTIONS = 100  # of the test, where a plan is of no run


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds beside training: of loading once, and of answering and judging the test's questions on all ranks."""

    loading_s: float
    questions: int
    answering_s: float

    @property
    def said(self) -> str:
        """What the baseline costs, and how to do without it, as a sentence."""
        loading, answering = (hours_text(seconds / 3600) for seconds in (self.loading_s, self.answering_s))
        answered = f"a baseline evaluation of {self.questions} questions about {answering}"
        return f"loading takes about {loading}, and {answered}; --baseline none leaves it out"


def generating_time(architecture: Architecture, job: Job, gpu: Gpu) -> float:
    """Return the seconds of generating the answers of a batch, a step's all together; 0 on a CPU, and without rewards.

    A CPU's speed is measured in whole steps.
    """
    shape, rows = job.evaluation, job.batch.rows * job.accumulation_steps
    if shape is None or gpu.name == CPU_DEVICE or not job.batch.goal.rewards:
        return 0.0
    at_once = min(rows, shape.rows)
    answer_s = shape.new_tokens * _token_s(architecture, job, shape, gpu, at_once, stages=1)
    step_s = -(-rows // at_once) * (_pass_s(architecture, job, gpu, at_once, shape.prompt_length) + answer_s)
    return step_s / job.accumulation_steps


def phase_times(architecture: Architecture, job: Job, gpu: Gpu) -> PhaseTimes | None:
    """Return how long loading and an evaluation take; None on a CPU, or without evaluation."""
    shape = job.evaluation
    if shape is None or gpu.name == CPU_DEVICE:
        return None
    stages = stages_of(architecture, job)
    groups = 1 if job.parallelism.in_one_process else job.devices // stages
    questions = shape.test_rows or ASSUMED_QUESTIONS
    of_group = -(-questions // groups)
    at_once = replace(shape, test_rows=questions).answered(job.shares_answered(stages), groups)
    batches = -(-of_group // at_once)
    batch_s = _pass_s(architecture, job, gpu, at_once, shape.prompt_length)
    if shape.judged:  # the base reads answers and references
        batch_s += 2 * _pass_s(architecture, job, gpu, at_once, max(shape.new_tokens, shape.judged_length))
    batch_s += shape.new_tokens * _token_s(architecture, job, shape, gpu, at_once, stages)
    loading_s = architecture.parameters * FILE_BYTES / (DISK_GB_PER_S * 1e9)  # each machine reads the files once
    return PhaseTimes(loading_s, questions, batches * batch_s)


def _pass_s(architecture: Architecture, job: Job, gpu: Gpu, rows: int, length: int) -> float:
    batch = replace(job.batch, rows=rows, length=length, labelled=1)
    answering = job.alone(batch, technique="full", target_modules=())
    return step_flops(architecture, answering, whole_model(architecture)).forward / products_per_s(gpu, job)


def _token_s(architecture: Architecture, job: Job, shape: EvaluationShape, gpu: Gpu, rows: int, stages: int) -> float:
    """Return the seconds of a batch's next token: all weights are read, and keys and values of half the new tokens."""
    quantized = architecture.matrix_weights * job.method.quantizes
    weights = quantized * QUANTIZED_BYTES[job.quantization]
    weights += (architecture.parameters - quantized) * job.whole_model_bytes
    # each row's experts are copied (`PhaseSums._answers`), and a mixture's others left alone, or all are dequantized
    copied = rows * architecture.chosen / architecture.experts if architecture.experts else 1
    others = 1 if job.method.quantizes else -1
    weights += architecture.expert_weights * (COPY_TOUCHES * copied + others) * job.whole_model_bytes
    tokens = rows * shape.beams * (shape.prompt_length + shape.new_tokens / 2)
    keys = 2 * architecture.layers * tokens * architecture.key_size * job.whole_model_bytes
    read_s = (weights + keys) / (gpu.memory_bandwidth_gb_per_s * 1e9 * BANDWIDTH_REACHED)
    launches_s = architecture.layers * KERNEL_SETS[job.kernels].kernels * LAUNCH_S
    return max(read_s, launches_s) + HAND_OVER_S * (stages if stages > 1 else 0)
