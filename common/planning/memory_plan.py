"""How much memory a training step takes on each device, in closed form: every number unfolds into its terms.

    VRAM = weights + gradients + optimizer states + activations (+ logits, buffers, the GPU's own overhead)

A step has several moments at which the most may be alive: when the loss is computed, when the first layer is back-
propagated, when the optimizer steps. `DeviceSums._lasting` and `_at_work` say what is alive in which; the peak is the
highest. The activations' terms say what PyTorch's autograd keeps, operation by operation, as the dry run shows it
(tests compare both over a grid). Terms of no bytes, whose factor is a condition that does not hold, are left out.

Letters in the formulas: B rows, S tokens of a row, T = B x S, P positions that have logits, C those of a chunk, H
hidden size, I the MLP's size, Q and K sizes of queries and keys, V vocabulary, r LoRA rank; `a` bytes of the
arithmetic's format, `x` of the format that hidden states travel in between layers, `w` of a weight. Of a mixture E
experts, k of them chosen for a token, I the size of these together, `z` bytes of a number within them. With tensor
parallel heads, I, Q and K are those of one rank. In an encoder-decoder's decoder S are the tokens of a summary; E are
those of the text, which its cross attention reads, and TE = B x E. With sequence parallel T and P are those of one
rank; in attention it has all tokens of a part of the heads instead, which takes as much.
"""

import math
from collections.abc import Container
from dataclasses import replace
from enum import StrEnum
from functools import cache, cached_property
from pkgutil import resolve_name

from common.planning.architectures import Architecture, Stack, StackKind
from common.planning.between_steps import FSDP_GATHERED_AT_LOSS, FSDP_GATHERED_LAYERS, BetweenSteps
from common.planning.job import LOGITS_AT_ONCE, Job
from common.planning.layer_activations import LayerActivations
from common.planning.shares import Share, part_of_rank, sees, trained_weight_bytes, trains_head
from common.planning.terms import DeviceMemory, Kind, Term, activations, numbers, size_of, times_each
from common.planning.tower_activations import TowerActivations

# TRL's `OffloadActivations` keeps so many tensors on the GPU while their copies are on the way to the host
INPUTS_ON_THE_WAY = 5
# weights of a rank that ZeRO's stage 3 updates at once (`sub_group_size`, DeepSpeed's own)
ZERO_UPDATED_WEIGHTS = 1_000_000_000


class Moment(StrEnum):
    """When the most may be alive in a step, from the last forward pass in flight on, in their order."""

    TOWER_FORWARD = "forward of the vision tower"
    LAST_LAYER_FORWARD = "forward of the last layer"
    HEAD_FORWARD = "forward of the head"
    REFERENCE_LAYER = "forward of a layer of the reference"
    REFERENCE_HEAD = "forward of the reference's head"
    LOSS_FORWARD = "forward of the loss"
    LOSS = "loss"
    HEAD_BACKWARD = "backward of the head"
    LAST_LAYER_BACKWARD = "backward of the last layer"
    DECODER_EMBEDDINGS_BACKWARD = "backward of the decoder's embeddings"
    ENCODER_BACKWARD = "backward of the encoder's last layer"
    FIRST_LAYER_BACKWARD = "backward of the first layer"
    TOWER_LAST_BACKWARD = "backward of the vision tower's last layer"
    TOWER_FIRST_BACKWARD = "backward of the vision tower's first layer"
    EMBEDDINGS_BACKWARD = "backward of the embeddings"
    SUM_OF_TIED = "sum of the tied gradients"
    OPTIMIZER_STEP = "optimizer step"


def between(first: Moment, last: Moment) -> list[Moment]:
    """Return the moments from the first to the last, both of which are among them."""
    moments = list(Moment)
    return moments[moments.index(first) : moments.index(last) + 1]


FORWARD_OF_LOSS = (Moment.LOSS_FORWARD, Moment.LOSS)
BACKWARD = between(Moment.LOSS, Moment.EMBEDDINGS_BACKWARD)


def device_memory(architecture: Architecture, job: Job, share: Share) -> DeviceMemory:
    """Return the memory of one device at its highest moment, without the GPU's own overhead."""
    return device_sums(part_of_rank(architecture, job), job, share).highest()


def device_sums(architecture: Architecture, job: Job, share: Share) -> "DeviceSums":
    """Return the terms of one device, as the job's task has them; `architecture` is what a rank holds of the model."""
    return resolve_name(job.batch.goal.memory)(architecture, job, share)


class DeviceSums(BetweenSteps):
    """The terms of one device in a step."""

    def __init__(self, architecture: Architecture, job: Job, share: Share) -> None:
        super().__init__(architecture, job, share)
        self.batch = replace(job.own_batch, rows=job.own_batch.rows // job.micro_batches)  # one micro-batch
        self.matrix = architecture.vocab * architecture.hidden  # weights of the head's
        self.trains_head = share.has_head and trains_head(architecture, job)
        self.head_gradients = (self.matrix + architecture.final_parameters) * self.trains_head
        of_tower = self.trained_of_tower * (not job.has_buckets)
        self.tower_gradients = numbers(Kind.GRADIENTS, "gradients of the vision tower", of_tower, job.weight_bytes)
        self.is_llama_like = architecture.family.is_llama_like
        self.is_encoder_decoder = len(self.stacks) > 1  # on this device
        encoders_output = self._hidden_state("encoder's output", formula="TE H x")
        self.encoders_output = [encoders_output] if self.is_encoder_decoder else []
        self.layer = LayerActivations(architecture, job, self.batch, self.hidden_bytes)
        self.saved_of_layer = cache(self.layer.saved)
        self.tower = TowerActivations(architecture.tower, job) if sees(architecture, job, share) else None
        self.tower_saved = self.tower.saved() if self.tower else []
        # a backward pass may find gradients: those of earlier micro-batches, or with DDP its buckets
        repeats = job.accumulation_steps > 1 or job.micro_batches > share.in_flight
        self.adds_to_gradients = repeats or job.has_buckets
        self.sends = job.parallelism.pipelines and not share.has_head
        # with pp the first layer's input, which checkpointing keeps, is where it was received
        self.input_is_in_buffer = job.gradient_checkpointing and job.parallelism.pipelines and not share.has_embeddings
        # the logits come in chunks of about equal size (common/models/chunked_loss.py)
        self.chunks_loss = architecture.stacks[-1].kind != StackKind.ENCODER and not architecture.classes
        self.chunks = max(1, math.ceil(self.positions * architecture.vocab / LOGITS_AT_ONCE))
        self.positions_at_once = math.ceil(self.positions / self.chunks)
        # the loss has a forward and a backward moment of its own; a whole loss of a decoder is one moment
        self.splits_loss = not self.chunks_loss

    # -- what is alive when

    def highest(self) -> DeviceMemory:
        """Return the moment with the most bytes, and its terms."""
        alive: dict[str, list[Term]] = {**self._alive()}
        if self.share.in_flight > 1 and not self.adds_to_gradients:
            # the second backward pass: one micro-batch has gone, and left all gradients
            fewer = replace(self.share, in_flight=self.share.in_flight - 1)
            later = type(self)(self.architecture, self.job, fewer)._alive()
            alive |= {f"{moment}, later": later[moment] for moment in BACKWARD if moment in later}
        moment = max(alive, key=lambda each: size_of(alive[each]))
        return DeviceMemory(moment, tuple(term for term in alive[moment] if term.count), self._blocks())

    def _alive(self) -> dict[Moment, list[Term]]:
        lasting = self._lasting()
        return {
            moment: [*(term for terms, moments in lasting if moment in moments for term in terms), *at_work]
            for moment, at_work in self._at_work().items()
        }

    def _lasting(self) -> list[tuple[list[Term], Container[Moment]]]:
        """Return what waits, and in which moments; those that the step lacks do not matter."""
        when, of_last_layer = Moment, self.head_gradients + self.job.trained_of_layer(self.stacks[-1][0])
        of_layers = between(when.LAST_LAYER_FORWARD, when.LAST_LAYER_BACKWARD)
        more_gathered = [each for each in when if each not in (*FORWARD_OF_LOSS, when.OPTIMIZER_STEP)]
        rows = [
            (self._all_the_time(), when),
            (self.gathered(FSDP_GATHERED_LAYERS), more_gathered),
            (self.gathered(FSDP_GATHERED_AT_LOSS), FORWARD_OF_LOSS),
            (self._scattered(), between(when.HEAD_BACKWARD, when.SUM_OF_TIED)),
            # gradients
            (self._all_gradients() if self.adds_to_gradients else [], between(when.TOWER_FORWARD, when.HEAD_BACKWARD)),
            (self._gradients_so_far(of_last_layer, "gradients of the head and a layer"), [when.LAST_LAYER_BACKWARD]),
            (self._gradients_of_layers(), between(when.FIRST_LAYER_BACKWARD, when.TOWER_FIRST_BACKWARD)),
            (self._all_gradients(), between(when.EMBEDDINGS_BACKWARD, when.OPTIMIZER_STEP)),
            # what waits for the backward pass
            (self.layers_saved(), of_layers),
            (self.layers_saved(one_left=True), [when.FIRST_LAYER_BACKWARD]),
            (self._layers_kept(self.share.in_flight - 1, self.stacks), [when.EMBEDDINGS_BACKWARD]),
            (self.saved_outside_layers, between(when.HEAD_FORWARD, when.HEAD_BACKWARD)),
            (self._embeddings_saved(self.stacks) + self.encoders_output, [when.LAST_LAYER_BACKWARD]),
            (self._embeddings_saved(self.stacks[:1]), [when.FIRST_LAYER_BACKWARD]),
            (self._waiting_outside_layers, of_layers),
            (self._waiting_outside_layers, between(when.FIRST_LAYER_BACKWARD, when.EMBEDDINGS_BACKWARD)),
            (self.tower_saved, [when.TOWER_FORWARD, when.LAST_LAYER_FORWARD]),
            (self._held_by_schedule(), [when.LAST_LAYER_BACKWARD, when.FIRST_LAYER_BACKWARD]),
        ]
        if self.is_encoder_decoder:  # the decoder is done, and all of the encoder is still to come
            (encoder, _), (decoder, layers) = self.stacks
            done = self.head_gradients + layers * self.job.trained_of_layer(decoder)
            what, of_encoder = "gradients of the head and the decoder", self.stacks[:1]
            rows += [
                (self._gradients_so_far(done, what), [when.DECODER_EMBEDDINGS_BACKWARD]),
                (self._gradients_so_far(done + self.job.trained_of_layer(encoder), what), [when.ENCODER_BACKWARD]),
                (
                    self._layers_kept(1, of_encoder) + self._embeddings_saved(of_encoder),
                    between(when.DECODER_EMBEDDINGS_BACKWARD, when.ENCODER_BACKWARD),
                ),
            ]
        return rows

    def _at_work(self) -> dict[Moment, list[Term]]:
        """Return the moments that the step has, each with what is alive in it alone."""
        last, first, tower, when = self.stacks[-1][0], self.stacks[0][0], self.tower, Moment
        last_forward = [*self.layer.adapter_casts(last), self.layer.passing(last), *self._cached_copies()]
        moments = {
            when.LAST_LAYER_FORWARD: [*(tower.result() if tower else []), *last_forward],
            when.LOSS: self._loss(),
            when.HEAD_BACKWARD: self._head_backward(),
            when.LAST_LAYER_BACKWARD: self.layer.backward(last),
            when.FIRST_LAYER_BACKWARD: self.layer.backward(first),
            when.EMBEDDINGS_BACKWARD: self._embeddings_backward(),
            when.SUM_OF_TIED: self._tied_gradient_received(),
            when.OPTIMIZER_STEP: self._optimizer_step(),
        }
        if self.splits_loss:
            moments[when.LOSS_FORWARD] = self._loss_forward()
        if self.is_encoder_decoder:
            moments[when.DECODER_EMBEDDINGS_BACKWARD] = [*self._embeddings_backward(), self.layer.passing(first)]
            moments[when.ENCODER_BACKWARD] = self.layer.backward(first)
        if tower:
            size = self.batch.tokens * self.architecture.hidden * self.job.weight_bytes
            moments[when.TOWER_FORWARD] = [*tower.forward(), activations("embeddings of the text", "T H w", size)]
        if tower and self.trained_of_tower:
            gradient = [self._hidden_state("gradient of the embeddings' result")] if self.job.trains_all else []
            of_layer, first_left = [*gradient, *tower.layer_backward()], tower.saved(one_left=True)
            moments[when.TOWER_LAST_BACKWARD] = [*of_layer, *self.tower_saved]
            moments[when.TOWER_FIRST_BACKWARD] = [*of_layer, self.tower_gradients, *first_left]
        return moments

    def _all_the_time(self) -> list[Term]:
        images = self.tower.inputs() if self.tower else []
        return [*self.between_steps, *self.summed(self.job.batch.tokens), *images]

    def _blocks(self) -> float:
        """Return the bytes of all blocks of PyTorch's allocator, without gaps.

        A freed block serves what is as large or smaller: what a layer, the loss and the optimizer work on have blocks
        of their own, but for a loss that finds those of the ends free. Where rows differ in length, blocks of shorter
        ones are too small for longer ones. Lengths that are drawn evenly leave about as much behind as the longest
        needs (1/2 + 1/4 + ... of it), which then serves the smaller one of layer and loss, or gradients and the
        optimizer's lists.
        """
        layer = max(size_of(self.layer.backward(stack)) for stack, _ in self.stacks)
        loss = max(size_of(self._loss()), size_of(self._loss_forward()) if self.splits_loss else 0.0)
        left_behind = abs(layer - loss) * self.batch.padded
        updates = size_of(self._all_gradients()) + size_of(self._optimizer_step())
        others = [*self._all_the_time(), *self.gathered(FSDP_GATHERED_LAYERS), *self._scattered()]
        others += [*self.layers_saved(), *self.saved_outside_layers, *self._waiting_outside_layers]
        if loss <= self._free_blocks_of_ends():
            return size_of(others) + layer + max(updates, loss + left_behind)
        return size_of(others) + layer + loss + max(updates, left_behind)

    def _free_blocks_of_ends(self) -> float:
        """Return the bytes of the ends' gradients and optimizer's lists, if these hold a tensor of the loss.

        They are free until the backward pass, where gradients are not added to those of earlier micro-batches.
        """
        positions = self.positions_at_once if self.chunks_loss else self.positions
        matrix = self.matrix * self.job.trained_bytes * self.trains_head * (self.job.shard_ranks == 1)
        if 4 * positions * self.architecture.vocab > matrix:
            return 0.0
        kinds = ([] if self.adds_to_gradients else self._all_gradients(), self._optimizer_step())
        return matrix * (2 - self.architecture.tied) * sum(size_of(each) > 0 for each in kinds)

    # -- gradients, as the backward pass goes on

    def _all_gradients(self) -> list[Term]:
        return [*self._gradients(self.trained, "gradients"), self.tower_gradients]

    def _gradients_so_far(self, count: int, what: str) -> list[Term]:
        has_all = self.adds_to_gradients or self.share.keeps_first_gradients
        return self._all_gradients() if has_all else self._gradients(count, what)

    def _gradients_of_layers(self) -> list[Term]:
        """Return all but those of the embeddings, which come last."""
        others = replace(self.share, has_embeddings=False).parameters(self.architecture)
        of_embeddings = (self.parameters - self.of_tower - others) * self.job.trains_all
        return self._gradients_so_far(self.trained - of_embeddings, "gradients of head and layers")

    def _gradients(self, count: int, what: str) -> list[Term]:
        """Return the gradients of so many weights; none where they have a buffer, or wait in the host's memory."""
        job, sharing = self.job, self.job.parallelism
        elsewhere = job.has_buckets or sharing.is_zero_3 or (job.offload and sharing.shards_weights)
        ranks = job.shard_ranks if "gradients" in sharing.shards else 1
        return [numbers(Kind.GRADIENTS, what, count * (not elsewhere), job.trained_bytes, ranks)]

    def _scattered(self) -> list[Term]:
        count = max(self.job.trained_of_layer(stack) for stack, _ in self.stacks)
        count *= self.job.parallelism.shards_weights and not self.job.method.has_adapters
        what = "a layer's gradients before they are scattered"
        return [numbers(Kind.BUFFERS, what, count, self.job.arithmetic_bytes)]

    # -- activations that wait for the backward pass

    def layers_saved(self, one_left: bool = False) -> list[Term]:
        """Return what all layers keep, for every micro-batch in flight; `one_left`: of one the first layer alone."""
        first = self._layer_kept(self.stacks[0][0]) if one_left and not self.input_is_in_buffer else []
        return [*self._layers_kept(self.share.in_flight - one_left, self.stacks), *times_each(first, 1, "1 x ")]

    def _layers_kept(self, micro_batches: int, stacks: list[tuple[Stack, int]]) -> list[Term]:
        terms = []
        for number, (stack, layers) in enumerate(stacks if micro_batches else []):
            times = (layers - (number == 0 and self.input_is_in_buffer)) * micro_batches
            times = min(times, INPUTS_ON_THE_WAY) if self.job.offloads_layer_inputs else times
            name = f"{times} x " + ("" if len(self.architecture.stacks) == 1 else f"{stack.kind}: ")
            terms += times_each(self._layer_kept(stack), times, name)
        return terms

    def _layer_kept(self, stack: Stack) -> list[Term]:
        if self.job.gradient_checkpointing:
            return [self._hidden_state("layer input", stack)]
        return self.saved_of_layer(stack)

    def _hidden_state(self, what: str, stack: Stack | None = None, formula: str = "T H x") -> Term:
        return activations(what, formula, self.hidden_size(self.batch.tokens_in(stack or self.architecture.stacks[0])))

    @cached_property
    def saved_outside_layers(self) -> list[Term]:
        """What embeddings, final norm and head keep."""
        sent = [self._hidden_state("hidden state that was sent")] if self.sends else []
        return [*self._saved_by_head(), *self._embeddings_saved(self.stacks), *self.encoders_output, *sent]

    def _embeddings_saved(self, stacks: list[tuple[Stack, int]]) -> list[Term]:
        """Return what the embeddings of some stacks, and a vision tower, keep until their backward pass, the last."""
        is_kept = self.job.trains_all if self.architecture.classes else not self.is_llama_like
        own = 4 + (4 if self.job.cpu_operations else 1) if self.architecture.classes else self.hidden_bytes + 5
        if self.architecture.family.is_gpt2_like:  # dropout's mask, and what checkpointing asks gradients of
            asks_gradients = self.job.method.has_adapters and self.job.gradient_checkpointing
            mask = (self.hidden_bytes if self.job.cpu_operations else 1) * (self.architecture.dropout > 0)
            is_kept, own = self.job.trains_all or asks_gradients, mask + self.hidden_bytes * asks_gradients
        tokens = sum(self.batch.tokens_in(stack) for stack, _ in stacks) * (self.share.has_embeddings and is_kept)
        formula = f"{'(TE + T)' if len(stacks) > 1 else 'T'} H {own}"
        size = tokens * self.architecture.hidden * own
        return [activations("embeddings' norm and dropout", formula, size), *self.tower_saved]

    def _saved_by_head(self) -> list[Term]:
        """Return what final norm and head keep; of a classifier of one position per row."""
        size, a, trains = self.batch.tokens * self.architecture.hidden, self.job.arithmetic_bytes, self.job.trains_all
        inputs = self.positions * self.architecture.hidden * a
        if not self.share.has_head:
            return []
        if self.architecture.classes:
            pools = self.architecture.family.has_pooler
            count = 3 if pools else 5  # dropout also comes before the dense layer, where there is no pooler
            of_last = size * 4 * (pools and not self.layer.casts_inputs)
            return [
                activations("head before its matrix", f"{count} P H a", count * inputs),
                activations("last hidden state, of which the pooler reads a part", "T H 4", of_last),
            ]
        starts_with_norm = self.is_llama_like or self.architecture.family.is_gpt2_like
        norm_each = 4 + (self.layer.normalized_bytes if trains and self.is_llama_like else 0)
        # BERT's head for masked tokens does more before its matrix
        transforms = len(self.architecture.stacks) == 1 and not starts_with_norm
        return [
            activations("final norm", f"T H {norm_each}", size * norm_each * starts_with_norm),
            activations("head before its matrix", "T H (5 + 3 a)", size * (5 + 3 * a) * transforms),
            activations("input of the head", "P H a", inputs * (trains and not self.chunks_loss)),
        ]

    @cached_property
    def _waiting_outside_layers(self) -> list[Term]:
        """What embeddings, final norm, head and loss keep for the micro-batches in flight but one."""
        times = self.share.in_flight - 1
        if not times:
            return []
        terms = self.saved_outside_layers
        if self.share.has_head and not self.chunks_loss:
            terms = [*terms, self._logits("log-probabilities in fp32", "P V 4", 4), *self._head_copy()]
        return times_each([*terms, *self._held_by_schedule()], times, f"{times} x, of waiting micro-batches: ")

    # -- logits and loss

    @property
    def positions(self) -> int:
        """`P`: positions with logits; encoders and encoder-decoders that predict tokens compute all."""
        last = self.architecture.stacks[-1]
        chooses = last.kind == StackKind.DECODER or self.architecture.classes
        return self.batch.sequences * self.batch.labelled if chooses else self.batch.tokens_in(last)

    def _logits(self, what: str, formula: str, each: int, of_chunk: bool = False) -> Term:
        positions = self.positions_at_once if of_chunk else self.positions
        return Term(Kind.LOGITS, what, formula, each * positions * self.architecture.vocab)

    def _loss_forward(self) -> list[Term]:
        """Return logits in the arithmetic's format and in fp32, and log-probabilities; autocast's cache at its largest.

        With pp the loss comes when autocast's cache has gone, and never takes more than in its backward pass.
        """
        each = 8 if self.job.arithmetic_bytes == 4 else self.job.arithmetic_bytes + 8
        logits = self._logits("logits and log-probabilities", f"P V {each}", each)
        if self.job.parallelism.pipelines:
            logits = self._returned_logits("logits")
        return [*([logits, *self._head_copy()] if self.share.has_head else []), *self._cached_copies()]

    def _loss(self) -> list[Term]:
        if not self.share.has_head:
            return []
        if self.chunks_loss:
            what = "a chunk's log-probabilities, their and the logits' gradients, in fp32"
            return [self._logits(what, "3 C V 4", 12, of_chunk=True), *self._head_copy(), *self._of_chunks()]
        logits = self._logits("log-probabilities, their and the logits' gradients, in fp32", "3 P V 4", 12)
        return [logits, *self._held_by_schedule(), *self._head_copy()]

    def _head_backward(self) -> list[Term]:
        """Return what the head's backward pass holds (in chunks that of the last one) when it comes to its matrix."""
        if not self.share.has_head:
            return []
        job, a, trained = self.job, self.job.arithmetic_bytes, self.matrix * self.trains_head
        gradient = self._gradients(trained, "gradient of the head's matrix")
        if not self.chunks_loss:
            logits = self._logits("gradient of the logits", "P V a", a)
            return [logits, *self._head_copy(), *self._held_by_schedule(), *gradient]
        beside_bucket, what = trained * job.has_buckets, "gradient of the head's matrix, beside its bucket"
        return [
            self._logits("gradient of a chunk's logits", "C V a", a, of_chunk=True),
            *self._head_copy(),
            *self._of_chunks(),
            *gradient,
            numbers(Kind.GRADIENTS, what, beside_bucket, job.trained_bytes),
            Term(Kind.GRADIENTS, "the same in the arithmetic's format", "V H a", trained * a * job.autocasts),
        ]

    def _of_chunks(self) -> list[Term]:
        size = 4 * self.matrix * (self.trains_head and self.chunks > 1)
        each = 2 * self.hidden_bytes
        if self.architecture.family.is_gpt2_like:  # its last norm's result is in fp32, and autocast's copies wait
            each = 2 * 4 + self.job.arithmetic_bytes * self.layer.casts_inputs
        inputs = each * self.positions * self.architecture.hidden
        return [
            activations("inputs of the head, and their gradients", f"P H {each}", inputs),
            Term(Kind.GRADIENTS, "head's gradient of the chunks before", "V H 4", size),
            *self._cached_copies(),  # their gradients come within the forward pass
        ]

    def loss_without_gradients(self, rows: int, length: int, labelled: int) -> list[Term]:
        """Return the head's inputs, and a chunk's logits, of validation rows of `length` and `labelled` tokens."""
        if self.architecture.classes:
            return []
        a, vocab, positions = self.job.arithmetic_bytes, self.architecture.vocab, rows * labelled
        at_once = min(positions // self.job.micro_batches, max(1, LOGITS_AT_ONCE // vocab))
        return [
            # those in 16 bits are gone when the log-probabilities come
            Term(Kind.LOGITS, "a chunk's logits and log-probabilities", "C V 8", 8 * at_once * vocab),
            activations("inputs of the head", "P H a", positions * self.architecture.hidden * a),
        ]

    def _held_by_schedule(self) -> list[Term]:
        """Return what, with pp, the last stage has made and holds until its backward pass is done.

        (torch/distributed/pipelining/stage.py.)
        """
        if not (self.job.parallelism.pipelines and self.share.has_head):
            return []
        if self.chunks_loss:
            what = "input of the head that the schedule still holds"
            return [activations(what, "P H x", self.hidden_size(self.positions))]
        return [self._returned_logits("logits that the schedule still holds")]

    def _returned_logits(self, what: str) -> Term:
        each = 4 if self.job.method.quantizes else self.job.arithmetic_bytes
        return self._logits(what, f"P V {each}", each)

    def _cached_copies(self) -> list[Term]:
        """Return autocast's copies of trained matrices that checkpointing does not keep, but autocast until it ends."""
        job, terms = self.job, []
        for stack, layers in self.stacks:
            again = [each for each in stack.linears if job.gradient_checkpointing or job.tiles(each)]
            trained = [linear for linear in again if job.trains(linear)]  # copies of others are not kept
            terms += times_each(self.layer.weight_copies(trained), layers, f"{layers} x ")
        return [*terms, *(self.tower.cached_copies() if self.tower else [])]

    def _head_copy(self) -> list[Term]:
        size = self.matrix * self.job.arithmetic_bytes * self._casts_head()
        return [Term(Kind.WEIGHTS, "autocast's copy of the head", "V H a", size)]

    def _casts_head(self) -> bool:
        return self.job.autocasts

    # -- after the layers

    def _embeddings_backward(self) -> list[Term]:
        if not (self.job.trains_all and self.share.has_embeddings):
            return []
        size = self.architecture.embedding_parameters * self.job.trained_bytes
        if self.architecture.tied and self.share.has_head:
            what = "gradient of the tied embeddings, and its sum with the head's"
            return [activations(what, "2 V H w", 2 * size)]
        what = "gradient of the embeddings, before it is added"
        return [activations(what, "V H w", size * self.adds_to_gradients)]

    def _tied_gradient_received(self) -> list[Term]:
        is_one_end = self.architecture.tied and self.share.has_embeddings != self.share.has_head
        sends = self.job.parallelism.pipelines and self.job.trains_all and is_one_end
        size = self.architecture.embedding_parameters * self.job.trained_bytes * sends
        return [Term(Kind.BUFFERS, "the other end's gradient of the tied embeddings", "V H w", size)]

    def _optimizer_step(self) -> list[Term]:
        if self.job.parallelism.uses_deepspeed and "gradients" in self.job.parallelism.shards:
            return self._deepspeed_step()
        size = trained_weight_bytes(self.architecture, self.job, self.share) / self.job.shard_ranks
        size *= self.job.optimizer == "adamw_torch" and not self.job.offload
        return [Term(Kind.OPTIMIZER, "square roots of the variances, all at once", "one state", size)]

    def _deepspeed_step(self) -> list[Term]:
        """Return what stages 2 and 3 make of a rank's gradients: one flat tensor, then one in fp32, which is updated.

        PyTorch's AdamW also takes square roots. (deepspeed/runtime/zero/stage_1_and_2.py: `step`; stage3.py:
        `_prepare_fp32_grad_for_sub_group`.)
        """
        job, each, is_zero_3 = self.job, self.job.trained_bytes, self.job.parallelism.is_zero_3
        count = self.trained / job.shard_ranks * (not job.offload)
        count = min(count, ZERO_UPDATED_WEIGHTS) if is_zero_3 else count
        made = each + 4 * (each < 4)
        updated = 4 + 4 * (job.optimizer == "adamw_torch") - each * (not is_zero_3)  # stage 2 has let go of the parts
        return [numbers(Kind.BUFFERS, "a rank's gradients, flat and in fp32", count, max(made, updated))]
