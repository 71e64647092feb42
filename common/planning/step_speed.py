"""How long a GPU computes in a step: a model with few constants, fitted to published rates.

    computing = max(matrix products / (a share of the peak) + bytes of all else / (a share of the bandwidth), launches)

- Matrix products are counted as they happen (`step_flops`). The share of the peak depends on the GPU's generation;
  attention's scores reach less.
- All else waits for memory: norms, activations, rotary positions, residuals, adapters, the loss over the vocabulary,
  4-bit weights that are unpacked, and the products' own matrices: bytes that are counted, not fitted.
- Launches are what Python takes to start a layer's kernels: short rows and small batches wait for them.

`python -m assets.fit_rates` fits the constants that say so to assets/published_rates.json.
"""

from dataclasses import astuple, dataclass, replace

from common.base.errors import NotPlannedError
from common.hardware.devices import GIB, Gpu
from common.planning.architectures import Architecture, Stack, StackKind, Tower, exchanged_keys
from common.planning.job import Job, Kernels
from common.planning.shares import Share, sees, trains_head, whole_model
from common.planning.tower_activations import job_of_tower

# share of the data sheet's memory bandwidth that kernels reach which only move numbers: an assumption, not fitted
BANDWIDTH_REACHED = 0.8
# attention's scores, of what other products reach: fitted, mainly to llm-foundry's rows of up to 65,536 tokens
ATTENTION_REACHED = 0.36
# what unpacking a 4-bit weight takes, in bytes at that bandwidth: fitted to QLoRA in nf4 and GPTQ (it moves only 2.5)
UNPACKING_BYTES = 19.0
# what it takes to start a kernel: fitted, mainly to Qwen's rows of 256 and 512 tokens on an A100
LAUNCH_S = 36e-6
BACKWARD_PASSES = 2  # the backward pass takes as long as two forward passes


@dataclass(frozen=True)
class Generation:
    """GPUs that reach about the same share of their peak."""

    name: str  # as cards of the catalogue have it
    reached: float  # share of the dense peak that large matrix products reach in training
    # the same without tensor cores; the V100's is assumed for all: BERT-large alone would give 0.94, and BART-large
    # took half as long again as planned with that (published.json)
    reached_fp32: float = 0.82
    assumed: str = ""  # why the shares are no fitted ones; empty = they are
    workspace_gib: float = 8_519_680 / GIB  # of cuBLAS (PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp)


# cards whose sheet counts tensor cores at half rate (GeForce, L40) reach all of it; power holds the others back
AS_HALF_RATE, AS_FULL_RATE = "as of other cards at half rate", "as of other cards that their power holds back"
GENERATIONS = (
    Generation("Hopper", 0.61, workspace_gib=32 / 1024),
    Generation("A100", 0.82),
    Generation("half-rate Ampere and Ada", 1.0),
    Generation("full-rate Ampere and Ada", 0.70),
    Generation("Volta", 0.90),
    Generation("Turing", 0.70, 0.70, assumed=AS_FULL_RATE),
    Generation("half-rate Turing", 1.0, assumed=AS_HALF_RATE),
    Generation("Blackwell", 0.48, workspace_gib=32 / 1024),
    # fitted to a step of GB10 of which products are less than half
    Generation("full-rate Blackwell", 0.87, assumed="as a model of 354M parameters reached on GB10"),
    Generation("half-rate Blackwell", 1.0),
    # MPT-7B on MI250 reached 166 of 362 TFLOP/s (databricks.com/blog/training-llms-scale-amd-mi250-gpus); fitted alone,
    # the one rate of the MI300X (torchao's, of one row a GPU) would give 0.32
    Generation("CDNA", 0.45, 0.45, assumed="as MPT-7B reached on MI250"),
    Generation("RDNA", 0.45, 0.45, assumed="as of AMD's MI250"),
)
# of a GPU that is described by hand, and of a CPU without records
UNKNOWN = Generation("unknown", 0.48, 0.61, assumed="the least that any generation of NVIDIA reaches")


def generation_of(gpu: Gpu) -> Generation:
    """Return the generation of a GPU by its row of the catalogue; `UNKNOWN` where it has none."""
    return next((each for each in GENERATIONS if each.name == gpu.generation), UNKNOWN)


@dataclass(frozen=True)
class KernelSet:
    """What kernels besides the matrix products read and write, in numbers of the arithmetic's format per token."""

    norm: float  # an RMS norm, per number of the hidden state
    rotary: float  # rotary positions, per number of the queries and keys
    gate: float  # a gated MLP's activation, per number of its width
    adapter_inputs: tuple[float, float]  # per number of the projection's input, in the forward and the backward pass
    adapter_outputs: tuple[float, float]  # the same of its output
    loss: float  # per logit, both passes together
    kernels: int  # started per layer and forward pass


# Counted from Transformers' Llama and PEFT's `Linear`. PyTorch's kernels do one operation each: a norm turns numbers to
# fp32, squares, averages, scales, turns them back, and multiplies by its weights: 18 numbers for each, fused 2.
KERNEL_SETS: dict[Kernels, KernelSet] = {
    "plain": KernelSet(norm=18, rotary=10, gate=5, adapter_inputs=(1, 5), adapter_outputs=(6, 4), loss=22, kernels=40),
    "fused": KernelSet(norm=2, rotary=2, gate=3, adapter_inputs=(1, 3), adapter_outputs=(3, 2), loss=5, kernels=20),
    "compiled": KernelSet(norm=2, rotary=2, gate=3, adapter_inputs=(1, 3), adapter_outputs=(3, 2), loss=10, kernels=15),
}
RESIDUAL, LAYER_NORM, UNGATED, DROPOUT = 3, 2, 2, 2.5
STEPWISE_GELU_BYTES = 18 * 4  # of Transformers' `NewGELUActivation`: nine kernels, about all in fp32
EXCHANGED = 4  # per number that ranks exchange in attention: laid side by side, and back into the tokens' order
EAGER_SCORE = 15  # of attention without a fused kernel, per score
# how `StepFlops.useful` counts
COUNTED = (
    "per token 6 per trained weight, 4 per frozen one (2 in a frozen vision tower), for attention 12 layers * channels "
    "* length, half of it where causal; no lookup, the head where there are labels"
)


# -- operations


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one step, of one device's share of the layers."""

    forward: float
    activation_gradients: float
    weight_gradients: float
    recomputed: float  # of forward passes that come again: of checkpointed layers, of a head, or with the reference
    attention: float  # of the others together, those of attention's scores
    experts: float = 0.0  # the same of a mixture's experts

    @property
    def total(self) -> float:
        """All of them."""
        return self.useful + self.recomputed

    @property
    def useful(self) -> float:
        """Those of each operation once, which every MFU here counts."""
        return self.forward + self.activation_gradients + self.weight_gradients

    def __add__(self, other: "StepFlops") -> "StepFlops":
        return StepFlops(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def step_flops(architecture: Architecture, job: Job, share: Share) -> StepFlops:
    """Count the operations of a step: a product of (m, k) and (k, n) takes 2 m k n (Kaplan et al. 2020, section 2.1).

    Causal attention reads half of the earlier tokens on average.
    """
    of_layers = _flops_of_layers(architecture, job, share)
    return of_layers + _flops_of_tower(architecture.tower, job) if sees(architecture, job, share) else of_layers


def _flops_of_tower(tower: Tower, job: Job) -> StepFlops:
    own_job = job_of_tower(tower, job)
    encoder = _flops_of_layers(tower.encoder, own_job, whole_model(tower.encoder))
    connector = 2.0 * own_job.batch.rows * tower.tokens * tower.connector.weights
    if not job.trains_tower:
        attention = encoder.attention / (_forward_passes(job) + BACKWARD_PASSES)
        return StepFlops(encoder.forward + connector, 0.0, 0.0, 0.0, attention)
    return encoder + StepFlops(connector, connector, connector, 0.0, 0.0)


def _flops_of_layers(architecture: Architecture, job: Job, share: Share) -> StepFlops:
    batch, queries = job.own_batch, architecture.query_size
    layers, attention, adapters, trained, tiled, experts = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    passes = _forward_passes(job)
    for stack, count in share.stacks_of(architecture):
        for linear in stack.linears:
            twice_tokens = count * 2 * batch.tokens_into(linear, stack)
            layers += twice_tokens * linear.weights_at_work
            trained += twice_tokens * linear.weights_at_work * job.trains(linear)
            adapters += twice_tokens * linear.lora_parameters(job.lora_rank) * job.adapts(linear)
            tiled += twice_tokens * linear.weights_at_work * job.tiles(linear)
            if linear.experts > 1:
                experts += twice_tokens * linear.weights_at_work * (passes + 1 + job.trains(linear))
        for number, (asking, asked) in enumerate(job.batch.attentions_in(stack)):
            is_causal = stack.kind != StackKind.ENCODER and number == 0  # cross attention reads the whole text
            scores = job.batch.sequences * asking * asked / job.sp_size  # of whole rows, for a part of the heads
            attention += count * 4 * scores * queries * (0.5 if is_causal else 1.0)
    head = 2 * batch.sequences * job.head_positions * architecture.vocab * architecture.hidden * share.has_head
    forward = layers + attention + adapters + head
    trained += adapters + (head if trains_head(architecture, job) else 0.0)
    recomputed = tiled + (forward - head if job.gradient_checkpointing else 0.0)
    if job.schedule == "gpipe" and job.micro_batches > 1:  # losses that wait come again in the backward pass
        recomputed += head
    if batch.goal.reads_log_probs:  # the backward pass of TRL's head computes each tile of the logits again
        recomputed += head
    recomputed += (forward - adapters) * job.reads_reference
    return StepFlops(
        forward,
        layers + 2 * attention + adapters + head,
        trained,
        recomputed,
        attention * (passes + BACKWARD_PASSES),
        experts,
    )


def _forward_passes(job: Job) -> int:
    return 1 + job.gradient_checkpointing + job.reads_reference


# -- bytes


def step_bytes(architecture: Architecture, job: Job, share: Share) -> float:
    """Count the bytes of a step's kernels, without attention's scores: what each operation reads and writes, once."""
    count = _bytes_of_layers(architecture, job, share)
    if not sees(architecture, job, share):
        return count
    encoder, own_job = architecture.tower.encoder, job_of_tower(architecture.tower, job)
    if job.trains_tower:
        return count + _bytes_of_layers(encoder, own_job, whole_model(encoder))
    all_passes = _bytes_of_layers(encoder, replace(own_job, gradient_checkpointing=False), whole_model(encoder))
    return count + all_passes / (1 + BACKWARD_PASSES)


def _bytes_of_layers(architecture: Architecture, job: Job, share: Share) -> float:
    """Count those of matrices that are multiplied and their results, of adapters, of 4-bit weights, and of the loss."""
    a, kernels, forward_passes, count = job.arithmetic_bytes, KERNEL_SETS[job.kernels], _forward_passes(job), 0.0
    # numbers that an adapter reads and writes in a step, per input and per output of its projection
    (forward_in, backward_in), (forward_out, backward_out) = kernels.adapter_inputs, kernels.adapter_outputs
    per_input, per_output = forward_passes * forward_in + backward_in, forward_passes * forward_out + backward_out
    makes_copies = job.autocasts and not job.method.quantizes  # of fp32 weights in 16 bits, in each forward pass
    for stack, layers in share.stacks_of(architecture):
        count += layers * (forward_passes + BACKWARD_PASSES) * a * _between_products(architecture, job, stack)
        for linear in stack.linears:
            tokens, size = job.own_batch.tokens_into(linear, stack), linear.weights
            passes = forward_passes + job.tiles(linear) + 1 + job.trains(linear)
            count += layers * passes * a * (tokens * linear.chosen * (linear.inputs + linear.outputs) + size)
            count += layers * forward_passes * (4 + a) * linear.cast_weights * makes_copies
            count += layers * (forward_passes + 1) * UNPACKING_BYTES * size * job.method.quantizes
            of_adapter = per_input * linear.inputs + per_output * linear.outputs
            count += layers * a * tokens * of_adapter * job.adapts(linear)
    logits = job.own_batch.sequences * job.head_positions * architecture.vocab * share.has_head
    return count + 2 * kernels.loss * logits


def _between_products(architecture: Architecture, job: Job, stack: Stack) -> float:
    """Return the numbers that a layer's other operations read and write in a forward pass, for all tokens."""
    kernels, batch = KERNEL_SETS[job.kernels], job.own_batch
    queries, keys = architecture.query_size, architecture.key_size
    blocks = 3 if stack.kind == StackKind.CROSS_DECODER else 2
    if architecture.family.is_llama_like:
        hidden = kernels.norm * architecture.family.norms / blocks + RESIDUAL
        per_token = kernels.rotary * (queries + keys) + kernels.gate * architecture.intermediate
    else:
        hidden = LAYER_NORM + RESIDUAL + (DROPOUT if architecture.dropout else 0)
        in_steps = architecture.family.is_gpt2_like and job.kernels == "plain"
        per_token = (STEPWISE_GELU_BYTES / job.arithmetic_bytes if in_steps else UNGATED) * architecture.intermediate
    count = batch.tokens_in(stack) * (blocks * hidden * architecture.hidden + per_token)
    for asking, asked in batch.attentions_in(stack):
        scores = batch.sequences * architecture.heads * asking * asked
        count += 2 * batch.sequences * (asking * queries + asked * keys) + EAGER_SCORE * scores * (
            job.attention == "eager"
        )
    exchanged = 2 * (queries + exchanged_keys(architecture, job.sp_size)) * (job.sp_size > 1)
    return count + batch.tokens_in(stack) * EXCHANGED * exchanged


# -- seconds


@dataclass(frozen=True)
class Computing:
    """Seconds that a device computes in a step."""

    products_s: float  # matrix products
    others_s: float  # all other kernels
    launches_s: float  # of starting them all, meanwhile

    @property
    def total_s(self) -> float:
        """Kernels are started while earlier ones run: what takes longer decides."""
        return max(self.products_s + self.others_s, self.launches_s)


def computing_time(architecture: Architecture, job: Job, share: Share, gpu: Gpu) -> Computing:
    """Compute how long a device computes in one step; `architecture` is the part that each rank holds.

    Adapters take no longer than the weights' gradients that they save: of 47 steps that were published with LoRA and
    with full fine-tuning, LoRA is slower in 10, all of models below 4B at rows of 4,096 tokens and more.
    """
    own = _computing_time(architecture, job, share, gpu)
    if not job.method.has_adapters:
        return own
    lora, full = replace(job, technique="lora"), replace(job, technique="full", target_modules=())
    lora_s, full_s = (_computing_time(architecture, each, share, gpu).total_s for each in (lora, full))
    return replace(own, others_s=own.others_s - max(0.0, lora_s - full_s))


def _computing_time(architecture: Architecture, job: Job, share: Share, gpu: Gpu) -> Computing:
    flops, per_s = step_flops(architecture, job, share), products_per_s(gpu, job)
    weighed = flops.total - flops.attention + flops.attention / ATTENTION_REACHED
    if job.autocasts and architecture.experts:  # the grouped product of experts stays in fp32
        slower = per_s / products_per_s(gpu, replace(job, precision="fp32"))
        weighed += (slower - 1) * flops.experts
    bytes_per_s = gpu.memory_bandwidth_gb_per_s * 1e9 * BANDWIDTH_REACHED
    passes = _forward_passes(job) + BACKWARD_PASSES
    layer_passes = sum(share.layers) * passes * job.micro_batches
    if sees(architecture, job, share):
        layer_passes += architecture.tower.encoder.layers * (passes if job.trains_tower else 1)
    others_s = step_bytes(architecture, job, share) / bytes_per_s
    return Computing(weighed / per_s, others_s, layer_passes * KERNEL_SETS[job.kernels].kernels * LAUNCH_S)


def products_per_s(gpu: Gpu, job: Job) -> float:
    """Return the operations per second that large matrix products reach."""
    generation = generation_of(gpu)
    reached = generation.reached_fp32 if job.precision == "fp32" else generation.reached
    return peak_tflops(gpu, job) * 1e12 * reached


def peak_tflops(gpu: Gpu, job: Job) -> float:
    """Return the GPU's dense peak in the job's arithmetic, in TFLOP/s; refuse a precision that it does not have."""
    peak = gpu.tflops_dense[job.precision.removesuffix("-mixed")]
    if peak is None:
        raise NotPlannedError(f"The {gpu.name} does not compute in {job.precision}: pass fp16-mixed or fp32.")
    return peak
