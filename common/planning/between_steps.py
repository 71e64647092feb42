"""What one device holds all the time that training takes, and the weights that it gathers for a while."""

from functools import cached_property

from common.planning.architectures import Architecture, Block, Stack
from common.planning.job import LEVEL_TABLE_BYTES, QUANTIZED_BYTES, QUANTIZED_NUMBER_BYTES, Job
from common.planning.shares import Share, small_adapter_weights, trained_parameters
from common.planning.terms import Kind, Term, numbers

# layers that FSDP2 has gathered (`FSDPParamGroup.wait_for_unshard` and `_backward_prefetch`): in a backward pass the
# one at work and the one that is fetched ahead; in a forward pass also what the layer at work was copied from, which is
# all that is left of the last one when the loss comes
FSDP_GATHERED_LAYERS = 2
FSDP_GATHERED_IN_FORWARD = 3
FSDP_GATHERED_AT_LOSS = 1
# weights that stage 3 keeps gathered, as they are soon used again (`stage3_max_reuse_distance`, DeepSpeed's own)
ZERO_REUSED_WEIGHTS = 1_000_000_000
# elements per hidden size below which it keeps a weight whole (`stage3_param_persistence_threshold`, as
# `common.training.deepspeed_config` sets it)
ZERO_WHOLE_BELOW = 10
# elements below which 8-bit optimizers keep 32-bit states (bitsandbytes/optim/optimizer.py: `min_8bit_size`)
SMALL_MATRIX = 4096


def hidden_bytes(architecture: Architecture, job: Job) -> int:
    """Return `x`, bytes of a hidden state between layers.

    Autocast computes layer norms in fp32, and so the hidden states of layers that end with one; a quantized model that
    PEFT prepared has fp32 embeddings.
    """
    ends_with_norm = not (architecture.family.is_llama_like or architecture.family.is_gpt2_like)
    has_wide_embeddings = job.method.quantizes and job.end_bytes == 4
    return 4 if ends_with_norm or has_wide_embeddings or job.precision == "fp32" or job.autocasts else 2


def layer_input_bytes(architecture: Architecture, job: Job) -> int:
    """Return the bytes of the hidden states that a layer of a decoder reads."""
    return job.own_batch.tokens * architecture.hidden * hidden_bytes(architecture, job)


class BetweenSteps:
    """Weights, optimizer states and buffers of one device; `stacks` are those with layers on it, with how many."""

    def __init__(self, architecture: Architecture, job: Job, share: Share) -> None:
        self.architecture, self.job, self.share = architecture, job, share
        self.stacks = [(stack, layers) for stack, layers in share.stacks_of(architecture) if layers]
        self.hidden_bytes = hidden_bytes(architecture, job)
        self.parameters = share.parameters(architecture)
        self.of_tower = architecture.tower_parameters * share.has_embeddings
        self.trained = trained_parameters(architecture, job, share)
        self.trained_of_tower = self.of_tower * job.trains_tower
        self.weight_ranks = job.shard_ranks if job.parallelism.shards_weights else 1

    @cached_property
    def between_steps(self) -> list[Term]:
        """What is there all the time that training takes."""
        return self.weights() + self.optimizer_states() + self._buffers()

    def weights(self) -> list[Term]:
        """Return frozen and trained weights."""
        job, of_tower = self.job, self.trained_of_tower
        if job.offload and job.parallelism.shards_weights:
            return []  # they are in the host's memory
        if not job.method.has_adapters:
            return self.base_weights()
        limit = ZERO_WHOLE_BELOW * self.architecture.hidden * job.parallelism.is_zero_3
        whole = small_adapter_weights(self.architecture, job, self.share, limit)
        what = "adapters, and the head's trained copy" if self.architecture.classes else "adapters"
        return [
            *self.base_weights(),
            numbers(Kind.WEIGHTS, what, self.trained, job.trained_bytes, self.weight_ranks),
            numbers(Kind.WEIGHTS, "the vision tower's trained copy", of_tower, job.weight_bytes),
            numbers(Kind.WEIGHTS, "small adapter matrices, whole on each rank", whole, job.trained_bytes),
        ]

    def base_weights(self) -> list[Term]:
        """Return the model's own weights; with full fine-tuning frozen ones are as wide as trained ones."""
        if self.job.method.quantizes:
            return self._quantized_weights()
        what, each = "frozen weights" if self.job.method.has_adapters else "weights", self.job.weight_bytes
        return [
            numbers(Kind.WEIGHTS, what, self.parameters - self.of_tower, each, self.weight_ranks),
            numbers(Kind.WEIGHTS, "vision tower and connector", self.of_tower, each, self.weight_ranks),
            numbers(Kind.WEIGHTS, "copy of the model before training", self.parameters * self.job.keeps_copy, each),
        ]

    def _quantized_weights(self) -> list[Term]:
        job, kind, ranks = self.job, self.job.quantization, self.weight_ranks
        count = sum(layers * stack.matrix_weights for stack, layers in self.stacks)
        in_4_bits = ((layers, each) for stack, layers in self.stacks for each in stack.linears)
        matrices = sum(layers for layers, each in in_4_bits if each.block != Block.ROUTER)
        per_weight, number, table = QUANTIZED_BYTES[kind], QUANTIZED_NUMBER_BYTES[kind], LEVEL_TABLE_BYTES[kind]
        what, scales = f"{kind} weights of the layers", per_weight - number
        others = "embeddings, norms and head" + (", cast to fp32" if job.end_bytes == 4 else "")
        layers = [Term(Kind.WEIGHTS, what, f"{count:,} x {per_weight:.3f} bytes", count * per_weight)]
        if ranks > 1:  # scales are no parameters of a module, so that FSDP leaves them whole on each rank
            scaled = Term(Kind.WEIGHTS, "scales of their blocks", f"{count:,} x {scales:.3f} bytes", count * scales)
            layers = [numbers(Kind.WEIGHTS, what, count, number, ranks), scaled]
        return [
            *layers,
            Term(Kind.WEIGHTS, "tables of levels", f"{matrices:,} matrices x {table:,} bytes", matrices * table),
            numbers(Kind.WEIGHTS, others, self.parameters - count, job.end_bytes, ranks),
        ]

    def optimizer_states(self) -> list[Term]:
        """Return Adam's two states; with DeepSpeed, in any precision, an fp32 copy of the weights, with states as wide.

        (deepspeed/runtime/zero/stage_1_and_2.py: `single_partition_of_fp32_groups`.)
        """
        job = self.job
        if job.offload:
            return []  # they are in the host's memory
        keeps_copy = job.parallelism.uses_deepspeed
        each, tower_each = job.state_bytes(4 if keeps_copy else job.trained_bytes), job.state_bytes(job.weight_bytes)
        small = small_adapter_weights(self.architecture, job, self.share, SMALL_MATRIX) * ("8bit" in job.optimizer)
        return [
            numbers(Kind.OPTIMIZER, "momentum and variance of the vision tower", self.trained_of_tower, tower_each),
            numbers(Kind.OPTIMIZER, "momentum and variance", self.trained - small, each, job.shard_ranks),
            numbers(Kind.OPTIMIZER, "momentum and variance of small matrices", small, 8, job.shard_ranks),
            numbers(Kind.OPTIMIZER, "fp32 copy of the weights", self.trained * keeps_copy, 4, job.shard_ranks),
        ]

    def _buffers(self) -> list[Term]:
        job, each, sharing, trained = self.job, self.job.trained_bytes, self.job.parallelism, self.trained
        of_tower, has_parts = self.trained_of_tower * job.has_buckets, sharing.is_zero_3 and not job.offload
        neighbours = 2 - self.share.has_embeddings - self.share.has_head
        received = neighbours * self.hidden_size(job.batch.tokens) * sharing.pipelines
        reduced = min(self.architecture.hidden**2, trained) * sharing.uses_deepspeed
        return [
            numbers(Kind.GRADIENTS, "gradients, in DDP's buckets", trained * job.has_buckets, each),
            numbers(Kind.GRADIENTS, "the vision tower's, in DDP's buckets", of_tower, job.weight_bytes),
            numbers(Kind.GRADIENTS, "gradients' parts, in one buffer", trained * has_parts, each, job.shard_ranks),
            Term(Kind.BUFFERS, "hidden states and gradients to receive", f"{neighbours} T H x, all parts", received),
            numbers(Kind.BUFFERS, "DeepSpeed's reduce bucket", reduced, each),
        ]

    def hidden_size(self, tokens: int) -> int:
        """Return the bytes of so many tokens' hidden states between two layers."""
        return tokens * self.architecture.hidden * self.hidden_bytes

    def summed(self, tokens: int) -> list[Term]:
        """Return the hidden state of so many tokens that ranks of tensor parallelism sum after each block."""
        size = self.hidden_size(tokens) * self.job.parallelism.splits_matrices
        return [Term(Kind.BUFFERS, "hidden state to be summed over the ranks", "T H x", size)]

    def gathered(self, layers: int) -> list[Term]:
        """Return the weights that a rank has gathered: with FSDP of so many layers, with ZeRO's stage 3 all it may."""
        job, a = self.job, self.job.arithmetic_bytes
        if not job.parallelism.shards_weights:
            return []
        others = self.parameters - sum(layers * stack.layer_parameters for stack, layers in self.stacks)
        if job.parallelism.uses_deepspeed:
            layer = max(stack.layer_parameters for stack, _ in self.stacks)
            kept = max(FSDP_GATHERED_LAYERS * layer + others, min(self.parameters, ZERO_REUSED_WEIGHTS))
            return [numbers(Kind.BUFFERS, "gathered weights, kept as they are soon used again", kept, a)]
        size, formula = max(self._gathered_layer(stack) for stack, _ in self.stacks)
        return [
            Term(Kind.BUFFERS, "gathered layers", f"{layers} x {formula}", layers * size),
            numbers(Kind.BUFFERS, "gathered embeddings and head", others, a),
        ]

    def _gathered_layer(self, stack: Stack) -> tuple[float, str]:
        """Return a layer's bytes as FSDP gathers it: 4-bit numbers as they are stored, else the arithmetic's format."""
        number, a = QUANTIZED_NUMBER_BYTES[self.job.quantization], self.job.arithmetic_bytes
        if not self.job.method.quantizes:
            return stack.layer_parameters * a, f"{stack.layer_parameters:,} x {a} bytes"
        quantized = stack.matrix_weights
        rest = stack.layer_parameters - quantized + self.job.trained_of_layer(stack)
        return quantized * number + rest * a, f"({quantized:,} x {number:g} + {rest:,} x {a}) bytes"
