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

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from common.planning.architectures import Architecture, Stack
from common.planning.job import LEVEL_TABLE_BYTES, OPTIMIZER_BYTES, QUANTIZED_BYTES, QUANTIZED_NUMBER_BYTES, Job
from common.planning.layer_activations import LayerActivations
from common.planning.shares import Share, parameters_of, part_of_rank, trained_of_layer, trained_parameters, trains_head
from common.planning.terms import PARTS, Term, activations, times_each

FSDP_GATHERED_LAYERS = 2
"""The layer at work and the one that is fetched ahead (`FSDPModule`: implicit forward and backward prefetch)."""
ZERO_REUSED_WEIGHTS = 1_000_000_000
"""Weights that stage 3 keeps gathered, as they are soon used again (`stage3_max_reuse_distance`, DeepSpeed's own)."""


@dataclass(frozen=True)
class DeviceMemory:
    """What one device holds at its highest moment."""

    moment: str
    terms: tuple[Term, ...] = field(repr=False)

    @cached_property
    def parts_gib(self) -> dict[str, float]:
        """GiB by part."""
        parts = dict.fromkeys((*PARTS, "overhead"), 0.0)
        for term in self.terms:
            parts[term.part] += term.gib
        return parts

    @property
    def allocated_gib(self) -> float:
        """What PyTorch would call peak allocated."""
        return self.peak_gib - self.parts_gib["overhead"]

    @property
    def peak_gib(self) -> float:
        """With the overhead."""
        return sum(self.parts_gib.values())


def device_memory(architecture: Architecture, job: Job, share: Share) -> DeviceMemory:
    """The memory of one device: its highest moment, without the GPU's own overhead.

    Raises:
        BadInputError: tensor parallel cannot divide the model.
    """
    return _DeviceSums(part_of_rank(architecture, job), job, share).highest()


class _DeviceSums:
    """The terms of one device, gathered by moment."""

    def __init__(self, architecture: Architecture, job: Job, share: Share) -> None:
        self.architecture, self.job, self.share = architecture, job, share
        whole = job.batch
        self.batch = replace(whole, rows=whole.rows // job.micro_batches)
        self.trained = trained_parameters(architecture, job, share)
        self.trains_head = trains_head(architecture, job)
        # autocast computes layer norms in fp32, and so the hidden states of models that end their layers with one
        self.hidden_bytes = job.hidden_bytes if architecture.is_llama_like else 4
        self.layer = LayerActivations(architecture, job, self.batch, self.hidden_bytes)
        self.parameters = parameters_of(architecture, share)
        self.stacks = [
            (stack, layers) for stack, layers in zip(architecture.stacks, share.layers, strict=True) if layers
        ]

    def highest(self) -> DeviceMemory:
        """The moment with the most bytes, and its terms."""
        resting = self.weights() + self.optimizer_states() + self.buffers()
        moments = {**self.forward_moments(), **self.backward_moments(), **self.step_moments()}
        if self.share.in_flight > 1 and not self.gradients_before_backward():
            # the second backward pass: one micro-batch has gone, and left all gradients
            later = _DeviceSums(self.architecture, self.job, replace(self.share, in_flight=self.share.in_flight - 1))
            moments |= {f"{name}, later": terms for name, terms in later.backward_moments().items()}
        name = max(moments, key=lambda moment: sum(term.count for term in moments[moment]))
        terms = tuple(term for term in (*resting, *moments[name]) if term.count)
        return DeviceMemory(name, terms)

    def before_backward(self) -> list[Term]:
        """What waits when the backward pass begins."""
        return [
            *self.gradients_before_backward(), *self.layers_saved(), *self.ends_saved(), *self.ends_waiting(),
        ]  # fmt: skip

    def forward_moments(self) -> dict[str, list[Term]]:
        """The end of the forward pass of the last micro-batch in flight."""
        return {
            "forward of the last layer": [
                *self.gradients_before_backward(),
                *self.layers_saved(),
                *self.ends_waiting(),
                *self.adapter_casts(self.stacks[-1][0]),
                *self.hidden_states(self.stacks[-1][0]),
            ],
            "forward of the loss": [*self.before_backward(), *self.loss_forward()],
        }

    def backward_moments(self) -> dict[str, list[Term]]:
        """From the loss to the embeddings."""
        before_backward = self.before_backward()
        return {
            "loss": [*before_backward, *self.loss()],
            "backward of the head": [*before_backward, *self.head_backward()],
            "backward of the last layer": [
                *self.gradients_of_layer_end(last=True),
                *self.layers_saved(),
                *self.ends_waiting(),
                *self.logits_of_schedule(),
                *self.layer_backward(self.stacks[-1][0]),
            ],
            **self.encoder_backward_moments(),
            "backward of the first layer": [
                *self.gradients_of_layer_end(last=False),
                *self.layers_saved(one_left=True),
                *self.ends_waiting(),
                *self.logits_of_schedule(),
                *self.layer_backward(self.stacks[0][0]),
            ],
            "backward of the embeddings": [
                *self.gradients(),
                *self.layers_waiting(),
                *self.ends_waiting(),
                *self.embeddings_backward(),
            ],
        }

    def encoder_backward_moments(self) -> dict[str, list[Term]]:
        """Of an encoder-decoder: the decoder is done, and all of the encoder is still to come."""
        if not self._is_encoder_decoder:
            return {}
        (encoder, _), (decoder, layers) = self.stacks
        done = self._head_gradients() + layers * trained_of_layer(decoder, self.job)

        def moment(more_gradients: int, passing: list[Term]) -> list[Term]:
            gradients = self._gradients(done + more_gradients, "gradients of the head and the decoder")
            if self._adds_to_gradients:
                gradients = self.gradients()
            return [*gradients, *self._layers_kept(1, self.stacks[:1]), *passing]

        ends = [*self.embeddings_backward(), *self.hidden_states(encoder)]
        layer = moment(trained_of_layer(encoder, self.job), self.layer_backward(encoder))
        return {"backward of the decoder's embeddings": moment(0, ends), "backward of the encoder's last layer": layer}

    @property
    def _is_encoder_decoder(self) -> bool:
        """Whether this device has both stacks."""
        return len(self.stacks) > 1

    def step_moments(self) -> dict[str, list[Term]]:
        """After all passes."""
        return {
            "sum of the tied gradients": [*self.gradients(), *self.tied_gradient_received()],
            "optimizer step": [*self.gradients(), *self.optimizer_step()],
        }

    # -- what is there all the time

    def weights(self) -> list[Term]:
        """Frozen and trained weights, and autocast's copies of them."""
        job, n = self.job, self.job.shards if self.job.parallelism.shards_weights else 1
        shared = f" / {n} ranks" if n > 1 else ""
        if job.offload and job.parallelism.shards_weights:
            return [Term("weights", "weights", "in the host's memory", 0.0)]
        if not job.method.has_adapters:  # frozen ones are as wide
            w = job.weight_bytes
            terms = [Term("weights", "weights", f"{self.parameters:,} x {w} bytes{shared}", self.parameters * w / n)]
        else:
            terms = [*self._frozen_weights(n, shared)]
            each = job.trained_bytes
            what = "adapters, and the head's trained copy" if self.architecture.classes else "adapters"
            terms.append(Term("weights", what, f"{self.trained:,} x {each} bytes{shared}", self.trained * each / n))
        return terms

    def _frozen_weights(self, n: int, shared: str) -> Iterable[Term]:
        job = self.job
        if job.method.has_plain_adapters:
            yield Term("weights", "frozen weights", f"{self.parameters:,} x {job.weight_bytes} bytes{shared}",
                       self.parameters * job.weight_bytes / n)  # fmt: skip
            return
        quantized = sum(
            layers * sum(linear.inputs * linear.outputs for linear in stack.linears) for stack, layers in self.stacks
        )
        per_weight, number = QUANTIZED_BYTES[job.quantization], QUANTIZED_NUMBER_BYTES[job.quantization]
        what = f"{job.quantization} weights of the layers"
        if n > 1:  # scales are no parameters of a module, so that FSDP leaves them whole on each rank
            yield Term("weights", what, f"{quantized:,} x {number:g} bytes{shared}", quantized * number / n)
            scales = per_weight - number
            yield Term("weights", "scales of their blocks", f"{quantized:,} x {scales:.3f} bytes", quantized * scales)
        else:
            yield Term("weights", what, f"{quantized:,} x {per_weight:.3f} bytes", quantized * per_weight)
        matrices = sum(layers * len(stack.linears) for stack, layers in self.stacks)
        size = LEVEL_TABLE_BYTES[job.quantization]
        yield Term("weights", "tables of levels", f"{matrices:,} matrices x {size:,} bytes", matrices * size)
        rest = self.parameters - quantized
        yield Term("weights", "embeddings, norms and head, cast to fp32", f"{rest:,} x 4 bytes{shared}", rest * 4 / n)

    def optimizer_states(self) -> list[Term]:
        """Adam's two states; and with DeepSpeed, in any precision, an fp32 copy of the weights, with states as wide.

        (deepspeed/runtime/zero/stage_1_and_2.py: `single_partition_of_fp32_groups`.)
        """
        job, n = self.job, self.job.shards
        if job.offload:
            return [Term("optimizer", "optimizer states", "in the host's memory", 0.0)]
        shared = f" / {n} ranks" if n > 1 else ""
        states = OPTIMIZER_BYTES[job.optimizer]
        keeps_copy = job.parallelism.uses_deepspeed
        state_bytes = 2 * (4 if keeps_copy else job.trained_bytes) if states is None else states
        terms = [Term("optimizer", "momentum and variance", f"{self.trained:,} x {state_bytes:g} bytes{shared}",
                      self.trained * state_bytes / n)]  # fmt: skip
        if keeps_copy:
            terms.append(
                Term(
                    "optimizer", "fp32 copy of the weights", f"{self.trained:,} x 4 bytes{shared}", self.trained * 4 / n
                )
            )
        return terms

    def buffers(self) -> list[Term]:
        """What the way of sharing keeps for sending and gathering."""
        job = self.job
        gradient_bytes = self.trained * job.trained_bytes
        if job.parallelism.replicates:
            return [Term("gradients", "gradients, in DDP's buckets", f"{self.trained:,} x {job.trained_bytes} bytes",
                         gradient_bytes)]  # fmt: skip
        if job.parallelism.shards_weights:
            a = job.arithmetic_bytes
            layer = max(stack.layer_parameters for stack, _ in self.stacks)
            ends = self.parameters - sum(layers * stack.layer_parameters for stack, layers in self.stacks)
            terms = [
                self._gathered_quantized_layers() if job.method.quantizes else
                Term("buffers", "gathered layers", f"{FSDP_GATHERED_LAYERS} x {layer:,} x {a} bytes",
                     FSDP_GATHERED_LAYERS * layer * a),
                Term("buffers", "gathered embeddings and head", f"{ends:,} x {a} bytes", ends * a),
            ]  # fmt: skip
            if job.parallelism.uses_deepspeed and job.parallelism.shards_weights:
                kept = max(FSDP_GATHERED_LAYERS * layer + ends, min(self.parameters, ZERO_REUSED_WEIGHTS))
                terms = [Term("buffers", "gathered weights, kept as they are soon used again", f"{kept:,} x {a} bytes",
                              kept * a)]  # fmt: skip
            if not job.method.has_adapters:
                scattered = max(trained_of_layer(stack, job) for stack, _ in self.stacks)
                terms.append(Term("buffers", "a layer's gradients before they are scattered",
                                  f"{scattered:,} x {a} bytes", scattered * a))  # fmt: skip
            return terms
        if job.parallelism.pipelines:
            neighbours = 2 - self.share.has_embeddings - self.share.has_head
            size = neighbours * job.batch.tokens * self.architecture.hidden * self.hidden_bytes
            return [Term("buffers", "hidden states and gradients to receive", f"{neighbours} T H x, all parts",
                         size)]  # fmt: skip
        if job.parallelism.splits_matrices:
            size = self.batch.tokens * self.architecture.hidden * self.hidden_bytes
            return [Term("buffers", "hidden state to be summed over the ranks", "T H x", size)]
        if job.parallelism.shards and not job.parallelism.shards_weights:
            bucket, each = min(self.architecture.hidden**2, self.trained), job.trained_bytes
            return [Term("buffers", "DeepSpeed's reduce bucket", f"{bucket:,} x {each} bytes", bucket * each)]
        return []

    def _gathered_quantized_layers(self) -> Term:
        """FSDP gathers the 4-bit numbers as they are stored; a layer's other weights in the arithmetic's format."""
        number, a = QUANTIZED_NUMBER_BYTES[self.job.quantization], self.job.arithmetic_bytes
        layers = []
        for stack, _ in self.stacks:
            quantized = sum(linear.inputs * linear.outputs for linear in stack.linears)
            rest = stack.layer_parameters - quantized + trained_of_layer(stack, self.job)
            layers.append((quantized * number + rest * a, f"({quantized:,} x {number:g} + {rest:,} x {a}) bytes"))
        size, formula = max(layers)
        return Term("buffers", "gathered layers", f"{FSDP_GATHERED_LAYERS} x {formula}", FSDP_GATHERED_LAYERS * size)

    # -- gradients, as the backward pass goes on

    def gradients(self) -> list[Term]:
        """All of them; with DDP they are in its buckets, all the time."""
        return [] if self.job.parallelism.replicates else self._gradients(self.trained, "gradients")

    def gradients_before_backward(self) -> list[Term]:
        """Those that earlier micro-batches left; none where no backward pass comes before a forward pass."""
        return self.gradients() if self._adds_to_gradients else []

    @property
    def _adds_to_gradients(self) -> bool:
        """Whether a backward pass finds gradients: those of earlier micro-batches, or with DDP its buckets."""
        repeated = self.job.accumulation_steps > 1 or self.job.micro_batches > self.share.in_flight
        return repeated or self.job.parallelism.replicates

    def gradients_of_layer_end(self, last: bool) -> list[Term]:
        """When the last layer's backward pass is under way, and when the first one's is."""
        if self._adds_to_gradients:
            return self.gradients()
        head = self._head_gradients()
        if last:
            of_layer = trained_of_layer(self.stacks[-1][0], self.job)
            return self._gradients(head + of_layer, "gradients of the head and a layer")
        embeddings = self.architecture.other_embedding_parameters if self.share.has_embeddings else 0
        if self.share.has_embeddings and not (self.architecture.tied and self.share.has_head):
            embeddings += self.architecture.embedding_parameters
        missing = embeddings if self.job.trains_all else 0
        return self._gradients(self.trained - missing, "gradients of head and layers")

    def _head_gradients(self) -> int:
        if not self.trains_head or not self.share.has_head:
            return 0
        return self.architecture.vocab * self.architecture.hidden + self.architecture.final_parameters

    def _gradients(self, count: int, what: str) -> list[Term]:
        job = self.job
        if job.offload and job.parallelism.shards_weights:
            return []
        n = job.shards if job.parallelism.shards_gradients else 1
        shared = f" / {n} ranks" if n > 1 else ""
        bytes_each = job.trained_bytes
        return [Term("gradients", what, f"{count:,} x {bytes_each} bytes{shared}", count * bytes_each / n)]

    # -- activations that wait for the backward pass

    def layers_saved(self, one_left: bool = False) -> list[Term]:
        """What all layers keep, for every micro-batch in flight; `one_left`: of one of these the first layer alone."""
        terms = self._layers_kept(self.share.in_flight - one_left, self.stacks)
        if one_left and not self._input_is_in_buffer:
            terms += times_each(self._layer_kept(self.stacks[0][0]), 1, "1 x ")
        return terms

    def layers_waiting(self) -> list[Term]:
        """What all layers keep for the micro-batches in flight but one."""
        return self._layers_kept(self.share.in_flight - 1, self.stacks)

    def _layers_kept(self, micro_batches: int, stacks: list[tuple[Stack, int]]) -> list[Term]:
        terms = []
        for number, (stack, layers) in enumerate(stacks if micro_batches else []):
            times = (layers - (number == 0 and self._input_is_in_buffer)) * micro_batches
            name = f"{times} x " + ("" if len(self.architecture.stacks) == 1 else f"{stack.kind}: ")
            terms += times_each(self._layer_kept(stack), times, name)
        return terms

    @property
    def _input_is_in_buffer(self) -> bool:
        """With pp the first layer's input, which checkpointing keeps, is where it was received."""
        return self.job.gradient_checkpointing and self.job.parallelism.pipelines and not self.share.has_embeddings

    def _layer_kept(self, stack: Stack) -> list[Term]:
        return self.layer_inputs(stack) if self.job.gradient_checkpointing else self.layer.saved(stack)

    def layer_inputs(self, stack: Stack) -> list[Term]:
        """With gradient checkpointing a layer keeps only its input."""
        x, t, h = self.hidden_bytes, self.batch.tokens_in(stack), self.architecture.hidden
        return [activations("layer input", "T H x", t * h * x)]

    def ends_saved(self) -> list[Term]:
        """What embeddings, final norm and head keep."""
        architecture, job, t, h = self.architecture, self.job, self.batch.tokens, self.architecture.hidden
        x, a, full, terms = self.hidden_bytes, job.arithmetic_bytes, job.trains_all, []
        if architecture.classes:
            terms += self._classifier_ends_saved()
        elif self.share.has_head:
            if architecture.is_llama_like:
                each = 4 + (x if full else 0)
                terms.append(activations("final norm", f"T H {each}", t * h * each))
            elif architecture.stacks[0].kind == architecture.stacks[-1].kind:
                terms.append(activations("head before its matrix", "T H (5 + 3 a)", t * h * (5 + 3 * a)))
            if full:
                positions = self.positions
                terms.append(activations("input of the head", "P H a", positions * h * a))
        if self.share.has_embeddings and not architecture.is_llama_like and not architecture.classes:
            embedded = sum(self.batch.tokens_in(stack) for stack, _ in self.stacks)
            formula = "T H (x + 5)" if len(self.stacks) == 1 else "(TE + T) H (x + 5)"
            terms.append(activations("embeddings' norm and dropout", formula, embedded * h * (x + 5)))
        if self._is_encoder_decoder:
            terms.append(activations("encoder's output", "TE H x", t * h * x))
        if job.parallelism.pipelines and not self.share.has_head:
            terms.append(activations("hidden state that was sent", "T H x", t * h * x))
        return terms

    def _classifier_ends_saved(self) -> list[Term]:
        """What a classifier's head keeps of one position per row, and the embeddings' norm where it is trained."""
        architecture, job, t, h = self.architecture, self.job, self.batch.tokens, self.architecture.hidden
        terms = []
        if self.share.has_embeddings and job.trains_all:
            each = 4 + (4 if job.cpu_operations else 1)
            terms.append(activations("embeddings' norm and dropout", f"T H {each}", t * h * each))
        if self.share.has_head:
            is_pooled = architecture.model_type == "bert"  # RoBERTa drops out before its dense layer, too
            count, a = 3 if is_pooled else 5, job.arithmetic_bytes
            terms.append(activations("head before its matrix", f"{count} P H a", count * self.positions * h * a))
            if is_pooled and not self.layer.casts_inputs:
                terms.append(activations("last hidden state, of which the pooler reads a part", "T H 4", t * h * 4))
        return terms

    def ends_waiting(self) -> list[Term]:
        """What embeddings, final norm, head and loss keep for the micro-batches in flight but one."""
        times = self.share.in_flight - 1
        if not times:
            return []
        terms = self.ends_saved()
        if self.share.has_head:
            size = 4 * self.positions * self.architecture.vocab
            terms += [Term("logits", "log-probabilities in fp32", "P V 4", size), *self._head_copy()]
            terms += self.logits_of_schedule()
        return times_each(terms, times, f"{times} x, of waiting micro-batches: ")

    # -- logits and loss

    @property
    def positions(self) -> int:
        """`P`: positions with logits; encoders and encoder-decoders that predict tokens compute all."""
        last = self.architecture.stacks[-1]
        chooses = last.kind == "decoder" or self.architecture.classes
        return self.batch.rows * self.batch.labelled if chooses else self.batch.tokens_in(last)

    def loss(self) -> list[Term]:
        """In fp32: log-probabilities, their gradient, and the logits' gradient."""
        if not self.share.has_head:
            return []
        count = self.positions * self.architecture.vocab
        gradients = Term("logits", "log-probabilities, their and the logits' gradients, in fp32", "3 P V 4", 12 * count)
        held = self._logits("logits that the loop still holds") if self.job.plain_loop else self.logits_of_schedule()
        return [gradients, *held, *self._head_copy()]

    def logits_of_schedule(self) -> list[Term]:
        """With pp a stage's output is held until its backward pass is done (torch/distributed/pipelining/stage.py)."""
        held = self.job.parallelism.pipelines and self.share.has_head
        return self._logits("logits that the schedule still holds") if held else []

    def _logits(self, what: str) -> list[Term]:
        each = 4 if self.job.method.quantizes else self.job.arithmetic_bytes
        return [Term("logits", what, f"P V {each}", each * self.positions * self.architecture.vocab)]

    def loss_forward(self) -> list[Term]:
        """Logits in the arithmetic's format and in fp32, and log-probabilities; autocast's cache at its largest.

        With pp the loss comes when autocast's cache has gone, and never takes more than in its backward pass.
        """
        terms = []
        if self.share.has_head and self.job.parallelism.pipelines:
            terms += [*self._logits("logits"), *self._head_copy()]
        elif self.share.has_head:
            a, count = self.job.arithmetic_bytes, self.positions * self.architecture.vocab
            each = 8 if a == 4 else a + 8
            terms += [Term("logits", "logits and log-probabilities", f"P V {each}", each * count), *self._head_copy()]
        if self.job.gradient_checkpointing:  # which keeps copies of trained weights alone
            for stack, layers in self.stacks:
                trained = [linear for linear in stack.linears if self.job.trains(linear)]
                terms += times_each(self.layer.weight_copies(trained), layers, f"{layers} x ")
        return terms

    def _head_copy(self) -> list[Term]:
        architecture, job = self.architecture, self.job
        is_cast = job.autocasts or (job.method.quantizes and job.precision != "fp32" and job.shards == 1)
        if job.plain_loop or not is_cast:
            return []
        size = architecture.vocab * architecture.hidden * job.arithmetic_bytes
        return [Term("weights", "autocast's copy of the head", "V H a", size)]

    def head_backward(self) -> list[Term]:
        """The logits' gradient in the arithmetic's format, and the gradient of the head's matrix."""
        if not self.share.has_head:
            return []
        architecture, a = self.architecture, self.job.arithmetic_bytes
        count = self.positions * architecture.vocab
        terms = [Term("logits", "gradient of the logits", "P V a", a * count), *self._head_copy()]
        terms += self.logits_of_schedule()
        if self.trains_head:
            matrix = architecture.vocab * architecture.hidden
            terms += self._gradients(matrix, "gradient of the head's matrix")
        return terms

    # -- the backward pass of a layer

    def layer_backward(self, stack: Stack) -> list[Term]:
        """What is alive only while one layer is back-propagated."""
        architecture, job, t = self.architecture, self.job, self.batch.tokens_in(stack)
        count = 3 if architecture.is_llama_like else 1
        size = count * t * architecture.intermediate * job.arithmetic_bytes
        passing = [activations("gradients within the MLP", f"{count} T I a", size)]
        if job.gradient_checkpointing:  # the forward pass comes again
            passing = max(passing, self.adapter_casts(stack), key=lambda terms: sum(term.count for term in terms))
        terms = [*passing, *self.hidden_states(stack)]
        if job.attention == "eager":
            most = max(asking * asked for asking, asked in self.batch.attentions_in(stack))
            scores = self.batch.rows * architecture.heads * most
            terms.append(activations("gradients of the attention scores", "B heads S S 4", 4 * scores))
        if job.gradient_checkpointing:
            terms = [*times_each(self.layer.saved(stack), 1, "computed again: "), *terms]
        return terms

    def hidden_states(self, stack: Stack) -> list[Term]:
        """What goes from layer to layer, or the gradients of it."""
        size = 2 * self.batch.tokens_in(stack) * self.architecture.hidden * self.hidden_bytes
        return [activations("hidden states, or their gradients", "2 T H x", size)]

    def adapter_casts(self, stack: Stack) -> list[Term]:
        """What is alive only in the forward pass: an adapter's input in its own fp32, before and after dropout."""
        job, t, a = self.job, self.batch.tokens_in(stack), self.job.arithmetic_bytes
        widest = max((linear.inputs for linear in stack.linears if job.adapts(linear)), default=0)
        if not widest or job.plain_loop:
            return []
        each = 0 if a == 4 else 8 if job.lora_dropout else 4
        terms = [activations("result within the MLP", "T I a", t * self.architecture.intermediate * a)]
        return [*terms, activations("casts of the widest adapter's input", f"T {widest:,} {each}", t * widest * each)]

    def embeddings_backward(self) -> list[Term]:
        """The embeddings' gradient, where another one waits beside it: the head's, or an earlier micro-batch's."""
        if not self.job.trains_all or not self.share.has_embeddings:
            return []
        size = self.architecture.embedding_parameters * self.job.trained_bytes
        if self.architecture.tied and self.share.has_head:
            return [activations("gradient of the tied embeddings, and its sum with the head's", "2 V H w", 2 * size)]
        if self._adds_to_gradients:
            return [activations("gradient of the embeddings, before it is added", "V H w", size)]
        return []

    def tied_gradient_received(self) -> list[Term]:
        """With pp first and last stage each have a copy of tied embeddings, and send each other its gradient."""
        has_copy = self.share.has_embeddings != self.share.has_head
        if not self.job.parallelism.pipelines or not self.job.trains_all or not self.architecture.tied or not has_copy:
            return []
        size = self.architecture.embedding_parameters * self.job.trained_bytes
        return [Term("buffers", "the other end's gradient of the tied embeddings", "V H w", size)]

    def optimizer_step(self) -> list[Term]:
        """Optimizers that are not fused work on lists: one more state's worth."""
        if self.job.optimizer != "adamw_torch" or self.job.offload:
            return []
        size = self.trained * self.job.trained_bytes / self.job.shards
        return [Term("optimizer", "square roots of the variances, all at once", "one state", size)]
