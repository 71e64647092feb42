"""How much memory a training step takes on each device, in closed form: every number unfolds into its terms.

    VRAM = weights + gradients + optimizer states + activations (+ logits, buffers, the GPU's own overhead)

A step has several moments at which the most may be alive: when the loss is computed, when the first layer is back-
propagated, when the optimizer steps. Each moment is a list of terms; the highest one is the peak. The activations'
terms say what PyTorch's autograd keeps, operation by operation, as the dry run shows it (tests compare both over a
grid).

Letters in the formulas: B rows, S tokens of a row, T = B x S, P positions that have logits, H hidden size, I the MLP's
size, Q and K sizes of queries and keys, V vocabulary, r LoRA rank; `a` bytes of the arithmetic's format, `x` bytes of
the format that hidden states travel in between layers, `w` bytes of a weight. With tensor parallel heads, I, Q and K
are those of one rank. In an encoder-decoder's decoder S are the tokens of a summary; E are those of the text, which its
cross attention reads, and TE = B x E.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pkgutil import resolve_name

from common.hardware.devices import GIB, Gpu
from common.planning.architectures import Architecture, Stack
from common.planning.job import (
    LEVEL_TABLE_BYTES,
    LOGITS_AT_ONCE,
    OPTIMIZER_BYTES,
    QUANTIZED_BYTES,
    QUANTIZED_NUMBER_BYTES,
    Job,
)
from common.planning.layer_activations import LayerActivations
from common.planning.shares import (
    Share,
    parameters_of,
    part_of_rank,
    sees,
    small_adapter_weights,
    tower_parameters,
    trained_of_layer,
    trained_parameters,
    trained_weight_bytes,
    trains_head,
)
from common.planning.terms import PARTS, Term, activations, numbers, size_of, times_each, where
from common.planning.tower_activations import TowerActivations

# what FSDP2 has gathered of layers (`FSDPParamGroup.wait_for_unshard` and `_backward_prefetch`): in a backward pass the
# layer at work and the one that is fetched ahead; in a forward pass also what the layer at work was copied from, which
# is all that is left of the last one when the loss comes (no layer is fetched ahead of the last one)
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
TOWER_FORWARD, LAST_LAYER_FORWARD = "forward of the vision tower", "forward of the last layer"
LOSS_FORWARD, LOSS = "forward of the loss", "loss"
OPTIMIZER_STEP = "optimizer step"


@dataclass(frozen=True)
class DeviceMemory:
    """What one device holds at its highest moment.

    Attributes:
        blocks: Bytes of the blocks that PyTorch's allocator comes to hold in the course of a step, without gaps between
            them; 0: no more than at the highest moment.
        spread: Bytes beyond the likely ones with which a GPU has enough.
    """

    moment: str
    terms: tuple[Term, ...] = field(repr=False)
    blocks: float = 0.0
    spread: float = 0.0

    @cached_property
    def parts_gib(self) -> dict[str, float]:
        """GiB by part."""
        return {part: sum((term.gib for term in self.terms if term.part == part), 0.0) for part in (*PARTS, "overhead")}

    @property
    def allocated_gib(self) -> float:
        """What PyTorch would call peak allocated."""
        return self.peak_gib - self.parts_gib["overhead"]

    @property
    def peak_gib(self) -> float:
        """With the overhead: what `nvidia-smi` is likely to show."""
        return sum(self.parts_gib.values())

    @property
    def safe_gib(self) -> float:
        """With the spread, too: what is enough even where PyTorch's allocator wastes more than is likely."""
        return self.peak_gib + self.spread / GIB

    def verdict_on(self, gpu: Gpu) -> str:
        """Return `yes` where the GPU is safe to hold it, `tight` where it is likely to, else `no`."""
        return "yes" if self.safe_gib <= gpu.memory_gib else "tight" if self.peak_gib <= gpu.memory_gib else "no"


def device_memory(architecture: Architecture, job: Job, share: Share) -> DeviceMemory:
    """Return the memory of one device at its highest moment, without the GPU's own overhead.

    Raises:
        BadInputError: Tensor parallelism cannot divide the model.
    """
    return device_sums(part_of_rank(architecture, job), job, share).highest()


def device_sums(architecture: Architecture, job: Job, share: Share) -> "DeviceSums":
    """Return the terms of one device, as the job's task has them; `architecture` is what a rank holds of the model."""
    return _resolved(job.batch.goal.memory)(architecture, job, share)


_resolved = cache(resolve_name)


def hidden_bytes(architecture: Architecture, job: Job) -> int:
    """Return `x`, bytes of a hidden state between layers.

    Autocast computes layer norms in fp32, and so the hidden states of layers that end with one; a quantized model that
    PEFT prepared has fp32 embeddings.
    """
    ends_with_norm = not architecture.family.is_llama_like
    has_wide_ends = job.method.quantizes and job.end_bytes == 4
    return 4 if ends_with_norm or has_wide_ends or job.precision == "fp32" or job.autocasts else 2


class DeviceSums:
    """The terms of one device, gathered by moment.

    Attributes:
        stacks: Those that have layers on this device, with how many.
        tower_saved: What a vision tower keeps until its backward pass, the last one.
        adds_to_gradients: A backward pass finds gradients: those of earlier micro-batches, or with DDP its buckets.
        keeps_inputs: The inputs of layers are kept, with their gradients, until the backward pass has ended. FSDP's
            first version hooks them where a layer's weights are frozen, and lets go of the hooks at the very end
            (torch/distributed/fsdp/_runtime_utils.py: `_register_post_backward_reshard_only_hook`).
        input_is_in_buffer: With pp the first layer's input, which checkpointing keeps, is where it was received.
        chunks_loss: The logits come in chunks (common/models/chunked_loss.py): so many `chunks`, of about equal size.
        positions_at_once: `C`: positions of a chunk.
        splits_loss: The loss has a forward and a backward moment of its own; a whole loss of a decoder is one moment.
        returned_bytes: Of a logit that the model returns.
    """

    def __init__(self, architecture: Architecture, job: Job, share: Share) -> None:
        self.architecture, self.job, self.share = architecture, job, share
        self.batch = replace(job.batch, rows=job.batch.rows // job.micro_batches)
        self.trained = trained_parameters(architecture, job, share)
        self.trains_head = share.has_head and trains_head(architecture, job)
        self.is_llama_like = architecture.family.is_llama_like
        self.hidden_bytes = hidden_bytes(architecture, job)
        self.layer = LayerActivations(architecture, job, self.batch, self.hidden_bytes)
        self.saved_of_layer = cache(self.layer.saved)
        self.parameters = parameters_of(architecture, share)
        self.trained_of_tower = tower_parameters(architecture, share) * job.trains_tower
        self.tower = TowerActivations(architecture.tower, job) if sees(architecture, job, share) else None
        self.stacks = [
            (stack, layers) for stack, layers in zip(architecture.stacks, share.layers, strict=True) if layers
        ]
        self.is_encoder_decoder = len(self.stacks) > 1  # on this device
        self.tower_saved = self.tower.saved() if self.tower else []
        self.weight_ranks = job.shard_ranks if job.parallelism.shards_weights else 1
        repeats = job.accumulation_steps > 1 or job.micro_batches > share.in_flight
        self.adds_to_gradients = repeats or job.has_buckets
        self.keeps_inputs = job.loop.first_fsdp and job.method.has_adapters and job.gradient_checkpointing
        self.input_is_in_buffer = job.gradient_checkpointing and job.parallelism.pipelines and not share.has_embeddings
        writes = architecture.stacks[-1].kind != "encoder" and not architecture.classes
        self.chunks_loss = writes and not job.loop.logit_bytes
        self.chunks = max(1, math.ceil(self.positions * architecture.vocab / LOGITS_AT_ONCE))
        self.positions_at_once = math.ceil(self.positions / self.chunks)
        self.splits_loss = not self.chunks_loss and not job.loop.logit_bytes
        self.returned_bytes = 4 if job.method.quantizes else job.arithmetic_bytes

    def _hidden_state(self, what: str, stack: Stack | None = None, formula: str = "T H x", times: int = 1) -> Term:
        """Return so many hidden states of all tokens, by default of those that the first stack reads."""
        tokens = self.batch.tokens_in(stack) if stack else self.batch.tokens
        return activations(what, formula, times * tokens * self.architecture.hidden * self.hidden_bytes)

    @cached_property
    def between_steps(self) -> list[Term]:
        """What is there all the time that training takes."""
        return self.weights() + self.optimizer_states() + self.buffers()

    def summed(self, tokens: int) -> list[Term]:
        """Return the hidden state of so many tokens that ranks of tensor parallelism sum after each block."""
        size = tokens * self.architecture.hidden * self.hidden_bytes
        buffer = Term("buffers", "hidden state to be summed over the ranks", "T H x", size)
        return where((self.job.parallelism.splits_matrices, buffer))

    def beside(self, moment: str) -> list[Term]:
        """Return what is there at a moment of `moments` beside its own terms."""
        at_once = FSDP_GATHERED_AT_LOSS if moment in (LOSS_FORWARD, LOSS) else FSDP_GATHERED_LAYERS
        is_later = moment not in (TOWER_FORWARD, LAST_LAYER_FORWARD, LOSS_FORWARD, LOSS, OPTIMIZER_STEP)
        return where(
            (True, self.between_steps + self.summed(self.job.batch.tokens)),
            (True, self.tower.inputs() if self.tower else []),
            (moment != OPTIMIZER_STEP, self.gathered(at_once)),  # then what was gathered is gone
            (is_later, self.scattered()),
        )

    def highest(self) -> DeviceMemory:
        """Return the moment with the most bytes, and its terms."""
        moments = self.moments()
        if self.share.in_flight > 1 and not self.gradients_before_backward():
            # the second backward pass: one micro-batch has gone, and left all gradients
            later = type(self)(self.architecture, self.job, replace(self.share, in_flight=self.share.in_flight - 1))
            moments |= {f"{name}, later": terms for name, terms in later.backward_moments().items()}
        alive = {name: [*self.beside(name), *terms] for name, terms in moments.items()}
        name = max(alive, key=lambda moment: size_of(alive[moment]))
        return DeviceMemory(name, tuple(term for term in alive[name] if term.count), self.blocks())

    def blocks(self) -> float:
        """Return the bytes of all blocks of PyTorch's allocator, without gaps.

        A freed block serves what is as large or smaller. So what a layer, the loss and the optimizer work on have
        blocks of their own: those of a layer are too small for the logits, and pieces of larger ones are soon in use.
        Where rows differ in length, blocks of shorter ones are too small for longer ones. Lengths that are drawn evenly
        leave about as much behind as the longest needs (1/2 + 1/4 + ... of it), of which gradients and the
        optimizer's lists then take their share.
        """
        layer = max(size_of(self.layer_backward(stack)) for stack, _ in self.stacks)
        loss = max(size_of(self.loss()), size_of(self.loss_forward()) if self.splits_loss else 0.0)
        left_behind = (layer + loss) * self.batch.padded
        updates = size_of(self.gradients()) + size_of(self.optimizer_step())
        waiting = [*self.beside("backward of a layer"), *self.layers_saved(), *self.ends_saved, *self.ends_waiting]
        return size_of(waiting) + layer + loss + max(updates, left_behind)

    def moments(self) -> dict[str, list[Term]]:
        """Return all moments: the end of the last forward pass in flight, the backward pass, and what follows it."""
        last = self.stacks[-1][0]
        return {
            **self.tower_forward_moments(),
            LAST_LAYER_FORWARD: [
                *self.gradients_before_backward(),
                *self.layers_saved(),
                *self.ends_waiting,
                *self.tower_saved,
                *(self.tower.result() if self.tower else []),
                *self.adapter_casts(last),
                *self.hidden_states(last),
                *self._cached_copies(),
            ],
            **({LOSS_FORWARD: [*self.before_backward(), *self.loss_forward()]} if self.splits_loss else {}),
            **self.backward_moments(),
            "sum of the tied gradients": [*self.gradients(), *self.tied_gradient_received()],
            OPTIMIZER_STEP: [*self.gradients(), *self.optimizer_step()],
        }

    def before_backward(self) -> list[Term]:
        """Return what waits when the backward pass begins."""
        return self.gradients_before_backward() + self.layers_saved() + self.ends_saved + self.ends_waiting

    def backward_moments(self) -> dict[str, list[Term]]:
        """Return the moments from the loss to the embeddings."""
        before_backward = self.before_backward()
        of_last_layer = self._head_gradients() + trained_of_layer(self.stacks[-1][0], self.job)
        return {
            LOSS: [*before_backward, *self.loss()],
            "backward of the head": [
                *before_backward,
                *(self.chunk_of_head_backward() if self.chunks_loss else self.head_backward()),
            ],
            "backward of the last layer": [
                *self._gradients_so_far(of_last_layer, "gradients of the head and a layer"),
                *self.layers_saved(),
                *self.embeddings_saved(self.stacks),
                *self.encoders_output(),
                *self.ends_waiting,
                *self.held_by_schedule(),
                *self.layer_backward(self.stacks[-1][0]),
            ],
            **self.encoder_backward_moments(),
            "backward of the first layer": [
                *self._gradients_of_layers(),
                *self.layers_saved(one_left=not self.keeps_inputs),
                *where((self.keeps_inputs, times_each(self.layers_saved(), 1, "gradients: "))),
                *self.embeddings_saved(self.stacks[:1]),
                *self.ends_waiting,
                *self.held_by_schedule(),
                *self.layer_backward(self.stacks[0][0]),
            ],
            **self.tower_backward_moments(),
            "backward of the embeddings": [
                *self.gradients(),
                *self._layers_kept(self.share.in_flight - 1, self.stacks),
                *self.ends_waiting,
                *self.embeddings_backward(),
            ],
        }

    def _gradients_of_layers(self) -> list[Term]:
        """Return all but those of the embeddings, which come last."""
        others = parameters_of(self.architecture, replace(self.share, has_embeddings=False))
        of_embeddings = self.parameters - tower_parameters(self.architecture, self.share) - others
        return self._gradients_so_far(
            self.trained - of_embeddings * self.job.trains_all, "gradients of head and layers"
        )

    # -- a vision tower, which reads before the layers do, and is back-propagated after them

    def tower_forward_moments(self) -> dict[str, list[Term]]:
        """Return the moment when the tower reads: the text's embeddings wait."""
        if not self.tower:
            return {}
        size = self.batch.tokens * self.architecture.hidden * self.job.weight_bytes
        embeddings = activations("embeddings of the text", "T H w", size)
        waiting = [*self.gradients_before_backward(), *self.tower_saved]
        return {TOWER_FORWARD: [*waiting, *self.tower.forward(), embeddings]}

    def tower_backward_moments(self) -> dict[str, list[Term]]:
        """Return those of a trained tower's last and first layer, while the embeddings' gradient waits."""
        if not (self.tower and self.trained_of_tower):
            return {}
        common = [
            *self._gradients_of_layers(),
            *self.ends_waiting,
            *where((self.job.trains_all, self._hidden_state("gradient of the embeddings' result"))),
            *self.tower.layer_backward(),
        ]
        return {
            "backward of the vision tower's last layer": [*common, *self.tower_saved],
            "backward of the vision tower's first layer": [
                *common,
                *self._tower_gradients(),
                *self.tower.saved(one_left=True),
            ],
        }

    def _tower_gradients(self) -> list[Term]:
        """Return those of a trained tower, where they have no buffer."""
        count = self.trained_of_tower * (not self.job.has_buckets)
        return where((count, numbers("gradients", "gradients of the vision tower", count, self.job.weight_bytes)))

    def encoder_backward_moments(self) -> dict[str, list[Term]]:
        """Return those of an encoder-decoder when the decoder is done, and all of the encoder is still to come."""
        if not self.is_encoder_decoder:
            return {}
        (encoder, _), (decoder, layers) = self.stacks
        done = self._head_gradients() + layers * trained_of_layer(decoder, self.job)
        what = "gradients of the head and the decoder"
        kept = [*self._layers_kept(1, self.stacks[:1]), *self.embeddings_saved(self.stacks[:1])]
        return {
            "backward of the decoder's embeddings": [
                *self._gradients_so_far(done, what),
                *kept,
                *self.embeddings_backward(),
                *self.hidden_states(encoder),
            ],
            "backward of the encoder's last layer": [
                *self._gradients_so_far(done + trained_of_layer(encoder, self.job), what),
                *kept,
                *self.layer_backward(encoder),
            ],
        }

    # -- what is there all the time

    def weights(self) -> list[Term]:
        """Return frozen and trained weights."""
        job = self.job
        if job.offload and job.parallelism.shards_weights:
            return [Term("weights", "weights", "in the host's memory", 0.0)]
        what = "adapters, and the head's trained copy" if self.architecture.classes else "adapters"
        of_tower, limit = self.trained_of_tower, ZERO_WHOLE_BELOW * self.architecture.hidden
        whole = small_adapter_weights(self.architecture, job, self.share, limit) * job.parallelism.collects_gradients
        return where(
            (True, self.base_weights()),
            (
                job.method.has_adapters,
                numbers("weights", what, self.trained, job.trained_bytes, self.weight_ranks),
            ),
            (
                job.method.has_adapters and of_tower,
                numbers("weights", "the vision tower's trained copy", of_tower, job.weight_bytes),
            ),
            (whole, numbers("weights", "small adapter matrices, whole on each rank", whole, job.trained_bytes)),
        )

    def base_weights(self) -> list[Term]:
        """Return the model's own weights; with full fine-tuning frozen ones are as wide as trained ones."""
        if self.job.method.quantizes:
            return self._quantized_weights()
        what = "frozen weights" if self.job.method.has_adapters else "weights"
        of_tower, each = tower_parameters(self.architecture, self.share), self.job.weight_bytes
        return where(
            (True, numbers("weights", what, self.parameters - of_tower, each, self.weight_ranks)),
            (of_tower, numbers("weights", "vision tower and connector", of_tower, each, self.weight_ranks)),
        )

    def _quantized_weights(self) -> list[Term]:
        job, kind, ranks = self.job, self.job.quantization, self.weight_ranks
        count = sum(layers * stack.matrix_weights for stack, layers in self.stacks)
        matrices = sum(layers * len(stack.linears) for stack, layers in self.stacks)
        per_weight, number, table = QUANTIZED_BYTES[kind], QUANTIZED_NUMBER_BYTES[kind], LEVEL_TABLE_BYTES[kind]
        what, scales = f"{kind} weights of the layers", per_weight - number
        ends = "embeddings, norms and head" + (", cast to fp32" if job.end_bytes == 4 else "")
        return where(
            # scales are no parameters of a module, so that FSDP leaves them whole on each rank
            (ranks > 1, numbers("weights", what, count, number, ranks)),
            (ranks > 1, Term("weights", "scales of their blocks", f"{count:,} x {scales:.3f} bytes", count * scales)),
            (ranks == 1, Term("weights", what, f"{count:,} x {per_weight:.3f} bytes", count * per_weight)),
            (True, Term("weights", "tables of levels", f"{matrices:,} matrices x {table:,} bytes", matrices * table)),
            (True, numbers("weights", ends, self.parameters - count, job.end_bytes, ranks)),
        )

    def optimizer_states(self) -> list[Term]:
        """Return Adam's two states; with DeepSpeed, in any precision, an fp32 copy of the weights, with states as wide.

        (deepspeed/runtime/zero/stage_1_and_2.py: `single_partition_of_fp32_groups`.)
        """
        job, states = self.job, OPTIMIZER_BYTES[self.job.optimizer]
        if job.offload:
            return [Term("optimizer", "optimizer states", "in the host's memory", 0.0)]
        keeps_copy = job.parallelism.uses_deepspeed
        state_bytes = 2 * (4 if keeps_copy else job.trained_bytes) if states is None else states
        small = small_adapter_weights(self.architecture, job, self.share, SMALL_MATRIX) * ("8bit" in job.optimizer)
        large, of_tower = self.trained - small, self.trained_of_tower
        tower_bytes = 2 * job.weight_bytes if states is None else states
        return where(
            (of_tower, numbers("optimizer", "momentum and variance of the vision tower", of_tower, tower_bytes)),
            (large, numbers("optimizer", "momentum and variance", large, state_bytes, job.shard_ranks)),
            (small, numbers("optimizer", "momentum and variance of small matrices", small, 8, job.shard_ranks)),
            (keeps_copy, numbers("optimizer", "fp32 copy of the weights", self.trained, 4, job.shard_ranks)),
        )

    def buffers(self) -> list[Term]:
        """Return what the parallelism keeps all the time, for gradients and for what is sent."""
        job, each = self.job, self.job.trained_bytes
        bucket = min(self.architecture.hidden**2, self.trained)
        neighbours = 2 - self.share.has_embeddings - self.share.has_head
        hidden, of_tower = job.batch.tokens * self.architecture.hidden * self.hidden_bytes, self.trained_of_tower
        return where(
            (job.has_buckets, numbers("gradients", "gradients, in DDP's buckets", self.trained, each)),
            (
                job.has_buckets,
                numbers("gradients", "the vision tower's, in DDP's buckets", of_tower, job.weight_bytes),
            ),
            (
                job.parallelism.collects_gradients and not job.offload,
                numbers("gradients", "gradients' parts, in one buffer", self.trained, each, job.shard_ranks),
            ),
            (
                job.parallelism.pipelines,
                Term(
                    "buffers",
                    "hidden states and gradients to receive",
                    f"{neighbours} T H x, all parts",
                    neighbours * hidden,
                ),
            ),
            (job.parallelism.uses_deepspeed, numbers("buffers", "DeepSpeed's reduce bucket", bucket, each)),
        )

    def gathered(self, layers: int) -> list[Term]:
        """Return the weights that a rank has gathered: with FSDP of so many layers, with ZeRO's stage 3 all it may."""
        job, a = self.job, self.job.arithmetic_bytes
        if not job.parallelism.shards_weights:
            return []
        ends = self.parameters - sum(layers * stack.layer_parameters for stack, layers in self.stacks)
        if job.parallelism.uses_deepspeed:
            layer = max(stack.layer_parameters for stack, _ in self.stacks)
            kept = max(FSDP_GATHERED_LAYERS * layer + ends, min(self.parameters, ZERO_REUSED_WEIGHTS))
            return [numbers("buffers", "gathered weights, kept as they are soon used again", kept, a)]
        size, formula = max(self._gathered_layer(stack) for stack, _ in self.stacks)
        return [
            Term("buffers", "gathered layers", f"{layers} x {formula}", layers * size),
            numbers("buffers", "gathered embeddings and head", ends, a),
        ]

    def scattered(self) -> list[Term]:
        """Return a layer's gradients before FSDP or ZeRO's stage 3 divides them among the ranks."""
        size = max(trained_of_layer(stack, self.job) for stack, _ in self.stacks)
        divides = self.job.parallelism.shards_weights and not self.job.method.has_adapters
        what = "a layer's gradients before they are scattered"
        return where((divides, numbers("buffers", what, size, self.job.arithmetic_bytes)))

    def _gathered_layer(self, stack: Stack) -> tuple[float, str]:
        """Return a layer's bytes as FSDP gathers it: 4-bit numbers as they are stored, else the arithmetic's format."""
        number, a = QUANTIZED_NUMBER_BYTES[self.job.quantization], self.job.arithmetic_bytes
        if not self.job.method.quantizes:
            return stack.layer_parameters * a, f"{stack.layer_parameters:,} x {a} bytes"
        quantized = stack.matrix_weights
        rest = stack.layer_parameters - quantized + trained_of_layer(stack, self.job)
        return quantized * number + rest * a, f"({quantized:,} x {number:g} + {rest:,} x {a}) bytes"

    # -- gradients, as the backward pass goes on

    def gradients(self) -> list[Term]:
        """Return all of them; those that have a buffer of their own are there all the time."""
        return [*self._gradients(self.trained, "gradients"), *self._tower_gradients()]

    def gradients_before_backward(self) -> list[Term]:
        """Return those that earlier micro-batches left; none where no backward pass comes before a forward pass."""
        return self.gradients() if self.adds_to_gradients else []

    def _gradients_so_far(self, count: int, what: str) -> list[Term]:
        has_all = self.adds_to_gradients or self.share.keeps_first_gradients
        return self.gradients() if has_all else self._gradients(count, what)

    def _head_gradients(self) -> int:
        matrix = self.architecture.vocab * self.architecture.hidden
        return matrix + self.architecture.final_parameters if self.trains_head else 0

    def _gradients(self, count: int, what: str) -> list[Term]:
        job = self.job
        waits_in_host = job.offload and job.parallelism.shards_weights
        has_buffer = job.has_buckets or self.job.parallelism.collects_gradients
        ranks = job.shard_ranks if "gradients" in job.parallelism.shards else 1
        return where((not (waits_in_host or has_buffer), numbers("gradients", what, count, job.trained_bytes, ranks)))

    # -- activations that wait for the backward pass

    def layers_saved(self, one_left: bool = False) -> list[Term]:
        """Return what all layers keep, for every micro-batch in flight; `one_left`: of one the first layer alone."""
        return where(
            (True, self._layers_kept(self.share.in_flight - one_left, self.stacks)),
            (
                one_left and not self.input_is_in_buffer,
                times_each(self._layer_kept(self.stacks[0][0]), 1, "1 x "),
            ),
        )

    def _layers_kept(self, micro_batches: int, stacks: list[tuple[Stack, int]]) -> list[Term]:
        terms = []
        for number, (stack, layers) in enumerate(stacks if micro_batches else []):
            times = (layers - (number == 0 and self.input_is_in_buffer)) * micro_batches
            name = f"{times} x " + ("" if len(self.architecture.stacks) == 1 else f"{stack.kind}: ")
            terms += times_each(self._layer_kept(stack), times, name)
        return terms

    def _layer_kept(self, stack: Stack) -> list[Term]:
        if self.job.gradient_checkpointing:
            return [self._hidden_state("layer input", stack)]
        return self.saved_of_layer(stack)

    @cached_property
    def ends_saved(self) -> list[Term]:
        """What embeddings, final norm and head keep."""
        is_sent = self.job.parallelism.pipelines and not self.share.has_head
        return where(
            (True, self._classifier_ends_saved() if self.architecture.classes else self._token_ends_saved()),
            (True, self.embeddings_saved(self.stacks)),
            (True, self.encoders_output()),
            (is_sent, self._hidden_state("hidden state that was sent")),
        )

    def encoders_output(self) -> list[Term]:
        """Return what all of the decoder's layers read beside their own input, of an encoder-decoder."""
        return where((self.is_encoder_decoder, self._hidden_state("encoder's output", formula="TE H x")))

    def embeddings_saved(self, stacks: list[tuple[Stack, int]]) -> list[Term]:
        """Return what the embeddings of some stacks, and a vision tower, keep until their backward pass, the last."""
        job, x = self.job, self.hidden_bytes
        is_kept = job.trains_all if self.architecture.classes else not self.is_llama_like
        own = x + 5 if not self.architecture.classes else 4 + (4 if job.cpu_operations else 1)
        tokens = sum(self.batch.tokens_in(stack) for stack, _ in stacks)
        formula = f"{'(TE + T)' if len(stacks) > 1 else 'T'} H {own}"
        term = activations("embeddings' norm and dropout", formula, tokens * self.architecture.hidden * own)
        return [*where((self.share.has_embeddings and is_kept, term)), *self.tower_saved]

    def _token_ends_saved(self) -> list[Term]:
        architecture, job, t, h = self.architecture, self.job, self.batch.tokens, self.architecture.hidden
        x, a, full, has_head = self.hidden_bytes, job.arithmetic_bytes, job.trains_all, self.share.has_head
        norm_each = 4 + (x if full else 0)
        one_kind = architecture.stacks[0].kind == architecture.stacks[-1].kind
        transforms = has_head and one_kind and not self.is_llama_like  # as BERT's head for masked tokens does
        return where(
            (has_head and self.is_llama_like, activations("final norm", f"T H {norm_each}", t * h * norm_each)),
            (transforms, activations("head before its matrix", "T H (5 + 3 a)", t * h * (5 + 3 * a))),
            (
                has_head and full and not self.chunks_loss,
                activations("input of the head", "P H a", self.positions * h * a),
            ),
        )

    def _classifier_ends_saved(self) -> list[Term]:
        """Return what a classifier's head keeps of one position per row."""
        job, size = self.job, self.batch.tokens * self.architecture.hidden
        pools, has_head = self.architecture.family.has_pooler, self.share.has_head
        count = 3 if pools else 5  # dropout also comes before the dense layer, where there is no pooler
        head = count * self.positions * self.architecture.hidden * job.arithmetic_bytes
        return where(
            (has_head, activations("head before its matrix", f"{count} P H a", head)),
            (
                has_head and pools and not self.layer.casts_inputs,
                activations("last hidden state, of which the pooler reads a part", "T H 4", size * 4),
            ),
        )

    @cached_property
    def ends_waiting(self) -> list[Term]:
        """What embeddings, final norm, head and loss keep for the micro-batches in flight but one."""
        times, has_head = self.share.in_flight - 1, self.share.has_head
        of_loss = [self._logits("log-probabilities in fp32", 4), *self._head_copy()]
        terms = where(
            (True, self.ends_saved),
            (has_head and not self.chunks_loss, of_loss),
            (True, self.held_by_schedule()),
        )
        return times_each(terms, times, f"{times} x, of waiting micro-batches: ") if times else []

    # -- logits and loss

    @property
    def positions(self) -> int:
        """`P`: positions with logits; encoders and encoder-decoders that predict tokens compute all."""
        last = self.architecture.stacks[-1]
        chooses = last.kind == "decoder" or self.architecture.classes
        return self.batch.sequences * self.batch.labelled if chooses else self.batch.tokens_in(last)

    def _logits(self, what: str, each: int, formula: str = "") -> Term:
        """Return so many bytes for each logit, of all positions at once."""
        size = each * self.positions * self.architecture.vocab
        return Term("logits", what, formula or f"P V {each}", size)

    def loss(self) -> list[Term]:
        """Return what the highest moment of the loss, or that of its backward pass, holds."""
        if self.chunks_loss:
            return self.chunk_of_loss()
        what = "log-probabilities, their and the logits' gradients, in fp32"
        logits = self._logits(what, 12, "3 P V 4")
        if not self.splits_loss:
            logits = self._logits("logits, log-probabilities and gradients", self.job.loop.logit_bytes)
        return where((self.share.has_head, [logits, *self.held_by_schedule(), *self._head_copy()]))

    def chunk_of_loss(self) -> list[Term]:
        """Return what the loss of the last chunk holds."""
        size = 12 * self.positions_at_once * self.architecture.vocab
        what = "a chunk's log-probabilities, their and the logits' gradients, in fp32"
        return where(
            (self.share.has_head, [Term("logits", what, "3 C V 4", size), *self._head_copy(), *self._of_chunks()])
        )

    def chunk_of_head_backward(self) -> list[Term]:
        """Return what the backward pass of the last chunk holds when it comes to the head's matrix."""
        vocab, a = self.architecture.vocab, self.job.arithmetic_bytes
        logits = Term("logits", "gradient of a chunk's logits", "C V a", a * self.positions_at_once * vocab)
        matrix = vocab * self.architecture.hidden
        cast = Term("gradients", "the same in the arithmetic's format", "V H a", matrix * a)
        each = self.job.trained_bytes
        before_its_bucket = numbers("gradients", "gradient of the head's matrix, beside its bucket", matrix, each)
        return where(
            (self.share.has_head, [logits, *self._head_copy(), *self._of_chunks()]),
            (self.trains_head, self._gradients(matrix, "gradient of the head's matrix")),
            (self.trains_head and self.job.has_buckets, before_its_bucket),
            (self.trains_head and self.job.autocasts, cast),
        )

    def _of_chunks(self) -> list[Term]:
        """Return what all chunks together hold: the head's inputs with their gradients, and a sum of its own."""
        inputs = 2 * self.positions * self.architecture.hidden * self.hidden_bytes
        matrix = 4 * self.architecture.vocab * self.architecture.hidden
        return where(
            (True, activations("inputs of the head, and their gradients", "2 P H x", inputs)),
            (
                self.trains_head and self.chunks > 1,
                Term("gradients", "head's gradient of the chunks before", "V H 4", matrix),
            ),
            (True, self._cached_copies()),  # their gradients come within the forward pass
        )

    def loss_without_gradients(self, rows: int, length: int, labelled: int) -> list[Term]:
        """Return the head's inputs, and a chunk's logits, of validation rows of `length` and `labelled` tokens."""
        if self.architecture.classes:
            return []
        a, vocab, positions = self.job.arithmetic_bytes, self.architecture.vocab, rows * labelled
        at_once = min(positions // self.job.micro_batches, max(1, LOGITS_AT_ONCE // vocab))
        return [
            # those in 16 bits are gone when the log-probabilities come
            Term("logits", "a chunk's logits and log-probabilities", "C V 8", 8 * at_once * vocab),
            activations("inputs of the head", "P H a", positions * self.architecture.hidden * a),
        ]

    def held_by_schedule(self) -> list[Term]:
        """Return what, with pp, the last stage has made and holds until its backward pass is done.

        (torch/distributed/pipelining/stage.py.)
        """
        if not (self.job.parallelism.pipelines and self.share.has_head):
            return []
        if self.chunks_loss:
            size = self.positions * self.architecture.hidden * self.hidden_bytes
            return [activations("input of the head that the schedule still holds", "P H x", size)]
        return [self._logits("logits that the schedule still holds", self.returned_bytes)]

    def loss_forward(self) -> list[Term]:
        """Return logits in the arithmetic's format and in fp32, and log-probabilities; autocast's cache at its largest.

        With pp the loss comes when autocast's cache has gone, and never takes more than in its backward pass.
        """
        each = 8 if self.job.arithmetic_bytes == 4 else self.job.arithmetic_bytes + 8
        logits = self._logits("logits and log-probabilities", each)
        if self.job.parallelism.pipelines:
            logits = self._logits("logits", self.returned_bytes)
        return [*where((self.share.has_head, [logits, *self._head_copy()])), *self._cached_copies()]

    def _cached_copies(self) -> list[Term]:
        """Return autocast's copies of trained matrices that checkpointing does not keep, but autocast until it ends."""
        terms: list[Term] = []
        for stack, layers in self.stacks if self.job.gradient_checkpointing else []:
            trained = [linear for linear in stack.linears if self.job.trains(linear)]  # copies of others are not kept
            terms += times_each(self.layer.weight_copies(trained), layers, f"{layers} x ")
        return [*terms, *(self.tower.cached_copies() if self.tower else [])]

    def _head_copy(self) -> list[Term]:
        job = self.job
        has_wide_head = job.method.quantizes and job.end_bytes == 4 and job.precision != "fp32"
        is_cast = job.autocasts or (has_wide_head and job.shard_ranks == 1)
        size = self.architecture.vocab * self.architecture.hidden * job.arithmetic_bytes
        return where((is_cast and job.loop.autocasts, Term("weights", "autocast's copy of the head", "V H a", size)))

    def head_backward(self) -> list[Term]:
        """Return the logits' gradient in the arithmetic's format, and the gradient of the head's matrix."""
        logits = self._logits("gradient of the logits", self.job.arithmetic_bytes, "P V a")
        matrix = self.architecture.vocab * self.architecture.hidden
        return where(
            (self.share.has_head, [logits, *self._head_copy(), *self.held_by_schedule()]),
            (self.trains_head, self._gradients(matrix, "gradient of the head's matrix")),
        )

    # -- the backward pass of a layer

    def layer_backward(self, stack: Stack) -> list[Term]:
        """Return what is alive only while one layer is back-propagated."""
        again, a, count = self.job.gradient_checkpointing, self.job.arithmetic_bytes, self.gradients_within_mlp
        size = count * self.batch.tokens_in(stack) * self.architecture.intermediate * a
        passing = [activations("gradients within the MLP", f"{count} T I a", size)]
        if again:  # the forward pass comes again
            passing = max(passing, self.adapter_casts(stack), key=size_of)
        saved = self.saved_of_layer(stack) if again else []
        moments = [[*times_each(saved, 1, "computed again: "), *passing, *self._score_gradients(stack, 4)]]
        if again and self.job.attention == "eager":  # the MLP is done
            before_mlp = [term for term in saved if term not in self.layer.mlp(stack)]
            moments.append([*times_each(before_mlp, 1, "computed again: "), *self._score_gradients(stack, 4 + a)])
        return [*max(moments, key=size_of), *self.hidden_states(stack)]

    @property
    def gradients_within_mlp(self) -> int:
        """How many there are at once, beside all that the MLP saved.

        What it saved goes as its gradients come; adapters compute theirs in fp32, beside 16 bits.
        """
        return 3 if self.is_llama_like and self.job.method.has_adapters and self.job.arithmetic_bytes == 2 else 1

    def _score_gradients(self, stack: Stack, each: int) -> list[Term]:
        """Return the gradients of the attention scores, of the eager attention.

        They are in fp32, and while softmax is back-propagated those of its result wait beside them: `each` bytes.
        """
        scores = max(asking * asked for asking, asked in self.batch.attentions_in(stack)) * self.architecture.heads
        size = each * self.batch.sequences * scores
        what = activations("gradients of the attention scores", f"B heads S S {each}", size)
        return where((self.job.attention == "eager", what))

    def hidden_states(self, stack: Stack) -> list[Term]:
        """Return what goes from layer to layer, or the gradients of it."""
        return [self._hidden_state("hidden states, or their gradients", stack, "2 T H x", 2)]

    def adapter_casts(self, stack: Stack) -> list[Term]:
        """Return what only a forward pass with adapters holds: the MLP's result, and an adapter's input in fp32.

        PEFT's cast makes an fp32 copy of any input, and dropout one more. Without that cast there is only what dropout
        makes of an input that is in fp32 anyway.
        """
        job, t, a = self.job, self.batch.tokens_in(stack), self.job.arithmetic_bytes
        adapted = [linear for linear in stack.linears if job.adapts(linear)]
        passes = bool(adapted) and job.loop.autocasts and not job.loop.short_adapters
        dropped = 4 if job.lora_dropout else 0
        if job.loop.casts_adapter_inputs:
            in_fp32, each = adapted, 4 + dropped
        else:
            in_fp32, each = [linear for linear in adapted if self.layer.has_wide_input(linear)], dropped
        widest, each = max((linear.inputs for linear in in_fp32), default=0), each if a < 4 else 0
        return where(
            (passes, activations("result within the MLP", "T I a", t * self.architecture.intermediate * a)),
            (passes, activations("casts of the widest adapter's input", f"T {widest:,} {each}", t * widest * each)),
        )

    def embeddings_backward(self) -> list[Term]:
        """Return the embeddings' gradient, where another one waits beside it: the head's, or an earlier one."""
        size = self.architecture.embedding_parameters * self.job.trained_bytes
        is_trained = self.job.trains_all and self.share.has_embeddings
        is_tied = self.architecture.tied and self.share.has_head
        return where(
            (
                is_trained and is_tied,
                activations("gradient of the tied embeddings, and its sum with the head's", "2 V H w", 2 * size),
            ),
            (
                is_trained and self.adds_to_gradients and not is_tied,
                activations("gradient of the embeddings, before it is added", "V H w", size),
            ),
        )

    def tied_gradient_received(self) -> list[Term]:
        """Return the gradient that, with pp, first and last stage send each other, as both hold tied embeddings."""
        has_copy = self.architecture.tied and self.share.has_embeddings != self.share.has_head
        if not (self.job.parallelism.pipelines and self.job.trains_all and has_copy):
            return []
        size = self.architecture.embedding_parameters * self.job.trained_bytes
        return [Term("buffers", "the other end's gradient of the tied embeddings", "V H w", size)]

    def optimizer_step(self) -> list[Term]:
        """Return one more state's worth for optimizers that are not fused, and so work on lists."""
        size = trained_weight_bytes(self.architecture, self.job, self.share) / self.job.shard_ranks
        is_list = self.job.optimizer == "adamw_torch" and not self.job.offload
        return where((is_list, Term("optimizer", "square roots of the variances, all at once", "one state", size)))
