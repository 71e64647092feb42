"""What PyTorch's autograd keeps of one layer's forward pass, operation by operation, and its backward pass works on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from common.planning.architectures import Architecture, Block, Linear, Stack, StackKind, exchanged_keys
from common.planning.job import BatchShape, Job
from common.planning.terms import Kind, Term, activations, numbers, size_of, times_each

# bytes per attention score by which softmax's backward kernel writes less where it reads fp16
# (aten/src/ATen/native/cuda/SoftMax.cu: `softmax_backward_cuda_out`)
SOFTMAX_FP16_BYTES = -2
# of each expert that a token chooses: four numbers of places, and five in fp32 of what its result counts
ROUTE_BYTES = 4 * 8 + 3 * 4


@dataclass(frozen=True)
class LayerActivations:
    """The terms of a layer of each stack, for the batch of one micro-batch; letters as in `memory_plan`."""

    architecture: Architecture
    job: Job
    batch: BatchShape
    hidden_bytes: int

    def saved(self, stack: Stack) -> list[Term]:
        """Return what autograd keeps of one layer's forward pass; of an MLP in tiles its input alone."""
        terms = [*self._norms(stack), *self._attention(stack), *self._dropouts(stack)]
        if not self.job.tiled_mlp:
            return [*terms, *self._mlp(stack), *self._of_linears(stack)]
        size = self.batch.tokens_in(stack) * self.architecture.hidden * self.hidden_bytes
        mlp_input = activations("input of the MLP", "T H x", size)
        return [*terms, *self._of_linears(_only(Block.ATTENTION, stack)), mlp_input]

    def _of_linears(self, stack: Stack) -> list[Term]:
        return [*self._linear_inputs(stack), *self._adapters(stack), *self.weight_copies(stack.linears)]

    def _norms(self, stack: Stack) -> list[Term]:
        architecture, family, t = self.architecture, self.architecture.family, self.batch.tokens_in(stack)
        full, count = self.job.trains_all, 3 if stack.kind == StackKind.CROSS_DECODER else family.norms
        size, normalized = count * t * architecture.hidden, self.normalized_bytes
        if not family.is_llama_like:
            return [activations("inputs of the layer norms", f"{count} T H 4", size * 4)]
        of_heads = t * (architecture.query_size + architecture.key_size) * family.normalizes_queries
        return [
            activations("inputs of the norms in fp32", f"{count} T H 4", size * 4),
            activations("normalized, for the norms' weights", f"{count} T H {normalized}", size * normalized * full),
            activations(
                "norms of queries and keys", f"T (Q + K) (4 + {normalized})", of_heads * (4 + normalized * full)
            ),
        ]

    @property
    def normalized_bytes(self) -> int:
        """Return the bytes of a number that a norm's weights multiply."""
        return 4 if self.architecture.family.has_wide_norms else self.hidden_bytes

    def _linear_inputs(self, stack: Stack) -> list[Term]:
        """Return the inputs that projections keep for their weights' gradients, without attention's and the MLP's."""
        reading = (linear for linear in stack.linears if not linear.ends_block and linear.experts == 1)
        trained = [linear for linear in reading if self._keeps_input(linear)]
        of_encoder = sum(linear.reads_encoder for linear in trained)
        if self.casts_inputs:  # of a shorter format than the hidden states each projection has a copy of its own
            copies = len(trained) - of_encoder
        else:  # projections of a block read the same norm, and the encoder's output is there for all layers
            blocks = {linear.block for linear in trained}
            attends_encoder = stack.kind == StackKind.CROSS_DECODER and Block.ATTENTION in blocks
            copies, of_encoder = len(blocks) + attends_encoder, 0
        tokens = copies * self.batch.tokens_in(stack) + of_encoder * self.batch.tokens
        formula = f"{copies} T H a" + (f" + {of_encoder} TE H a" if of_encoder else "")
        size = tokens * self.architecture.hidden * self.job.arithmetic_bytes
        return [activations("inputs of the projections", formula, size)]

    def _keeps_input(self, linear: Linear) -> bool:
        """Whether a projection keeps its input; DeepSpeed's own keeps a frozen one's, too.

        (deepspeed/runtime/zero/linear.py: `LinearFunctionForZeroStage3`.)
        """
        return self.job.trains(linear) or self.job.parallelism.is_zero_3

    @property
    def casts_inputs(self) -> bool:
        """Autocast makes a copy of each projection's input."""
        job = self.job
        return job.autocasts or (job.precision != "fp32" and not self.architecture.family.is_llama_like)

    def _attention(self, stack: Stack) -> list[Term]:
        if self.job.cpu_operations and self.job.attention == "sdpa" and self.architecture.dropout > 0:
            return self._attention_on_cpu(stack)
        own, *cross = (self._one_attention(*lengths) for lengths in self.batch.attentions_in(stack))
        across = (term for terms in cross for term in times_each(terms, 1, "cross attention: "))
        return [*own, *across, *self._result_by_token(stack)]

    def _result_by_token(self, stack: Stack) -> list[Term]:
        """Return attention's result as the next projection keeps it, where that is a tensor of its own.

        It is where ranks exchange heads, where it is laid out head by head, as Phi-3's queries are, and with eager
        attention, which needs no result of its own.
        """
        last, has_dropout = _last_of(Block.ATTENTION, stack), self.job.lora_dropout > 0
        kept = sum(self._keeps_input(linear) or (self.job.adapts(linear) and not has_dropout) for linear in last)
        size = self.batch.tokens_in(stack) * self.architecture.query_size * self.job.arithmetic_bytes
        is_eager, is_fused = self.job.attention == "eager", self.architecture.family.fuses_linears
        what, lies_apart = "result of attention, token by token", self.job.sp_size > 1 or is_fused or is_eager
        return [activations(what, "T Q a", size * kept * lies_apart)]

    def _one_attention(self, asking: int, asked: int) -> list[Term]:
        """Return what an attention keeps in which `asking` tokens of a row attend to `asked` tokens."""
        architecture, job, rows, a = self.architecture, self.job, self.batch.sequences, self.job.arithmetic_bytes
        heads, q, k = architecture.heads, architecture.query_size, exchanged_keys(architecture, job.sp_size)
        s, te = ("S", "T") if asking == asked else ("E", "TE")
        is_cut = 0 < architecture.window <= asked  # by a mask, as padded rows are
        eager, masked = job.attention == "eager", (self.batch.padded or is_cut) and job.attention == "sdpa"
        repeats = eager or (masked and architecture.kv_heads > 1)  # keys and values for each head; a single one is read
        keys, in_words = (2 * q, "2 Q") if repeats else (2 * k, "2 K")
        # of a fused projection the values are a part, with which all of it is kept
        beside_values = (q + k) * (architecture.family.fuses_linears and not (eager or (repeats and q > k)))
        pairs, t, scores = rows * asking * asked, rows * asking, f"B heads S {s}"
        each = self.softmax_bytes + (a if a < self.softmax_bytes else 0)
        dropped = ((4 if job.cpu_operations else 1) + (4 if a == 4 else 0)) * bool(architecture.dropout)
        of_scores = [
            activations("attention scores", f"{scores} {each}", pairs * heads * each),
            activations("dropout of the scores", f"{scores} {dropped}", pairs * heads * dropped),
        ]
        return [
            activations("queries, keys, values", f"(T Q + {te} {in_words}) a", (t * q + rows * asked * keys) * a),
            activations("queries and keys without positions, beside the values", "T (Q + K) a", t * beside_values * a),
            *(
                of_scores
                if eager
                else [
                    activations("result of attention", "T Q a", t * q * a),
                    activations("attention's normalizers in fp32", "T heads 4", t * heads * 4),
                ]
            ),
            activations("mask in the arithmetic's format", f"B S {s} a", pairs * a * masked),
        ]

    @property
    def softmax_bytes(self) -> int:
        """`p`: bytes of a number of the scores' softmax, fp32 or, of gpt-oss without autocast, the arithmetic's."""
        own_format = self.architecture.family.is_gpt_oss_like and not self.job.autocasts
        return self.job.arithmetic_bytes if own_format else 4

    def _attention_on_cpu(self, stack: Stack) -> list[Term]:
        """Return what PyTorch keeps where it has no fused attention: with dropout, on a CPU, in fp32.

        (aten/src/ATen/native/transformers/attention.cpp: `_scaled_dot_product_attention_math`.)
        """
        t, q = self.batch.tokens, self.architecture.query_size
        scores = self.batch.sequences * self.architecture.heads * self.batch.length**2
        last = _last_of(Block.ATTENTION, stack)
        keeps_result = any(self.job.trains(linear) or self.job.adapts(linear) for linear in last)
        return [
            activations("queries, keys, values in fp32", "T 3 Q 4", t * 3 * q * 4),
            activations("softmax, its dropout's mask and result, in fp32", "B heads S S 12", scores * 12),
            activations("result of attention", "T Q a", t * q * self.job.arithmetic_bytes * keeps_result),
        ]

    def _mlp(self, stack: Stack) -> list[Term]:
        keeps_result = any(map(self._keeps_input, _last_of(Block.MLP, stack)))
        if self.architecture.experts:
            return self._experts(self.batch.tokens_in(stack), keeps_result)
        if self.architecture.family.is_llama_like:
            count, what = 3 + keeps_result, "gate, up, silu" + (" and their product" if keeps_result else "")
        elif (
            self.architecture.family.is_gpt2_like
        ):  # `NewGELUActivation`: a power's operand, tanh, and one more; a half
            count, what = 3 * self.power_bytes / self.job.arithmetic_bytes + 1 + keeps_result, "MLP's GELU in steps"
        else:
            count, what = 1 + keeps_result, "MLP before" + (" and after" if keeps_result else "") + " its activation"
        numbers_of_mlp = count * self.batch.tokens_in(stack) * self.architecture.intermediate
        return [activations(what, f"{count:g} T I a", numbers_of_mlp * self.job.arithmetic_bytes)]

    @property
    def power_bytes(self) -> int:
        """Return the bytes of a power, which autocast computes in fp32, but on a CPU."""
        return self.job.arithmetic_bytes if self.job.cpu_operations else 4

    def _experts(self, tokens: int, keeps_inputs: bool) -> list[Term]:
        """Return what a mixture keeps (transformers/integrations/moe.py: `grouped_mm_experts_forward`).

        The router's probabilities in fp32, and of each chosen expert where its token comes from and goes to; the
        experts' results, before they are weighed; and where weights are trained each token's copy for each expert.
        """
        architecture = self.architecture
        # a clamp keeps gate and up themselves, then both clamped, the sigmoid, and gate's product
        wide = (6 if architecture.family.is_gpt_oss_like else 3) + keeps_inputs
        results = architecture.chosen * architecture.hidden * (1 + keeps_inputs)
        inner = tokens * (wide * architecture.intermediate + results) * self.expert_bytes
        routes = tokens * (4 * architecture.experts + ROUTE_BYTES * architecture.chosen)
        return [
            activations("experts' gate, up, activation, results", f"T ({wide} I + {1 + keeps_inputs} k H) z", inner),
            activations("router", f"T (4 E + {ROUTE_BYTES} k)", routes),
        ]

    @property
    def expert_bytes(self) -> int:
        """`z`: bytes of a number within the experts, which autocast leaves in the format of their weights."""
        return 4 if self.job.autocasts else self.job.arithmetic_bytes

    def _experts_at_work(self, stack: Stack, keeps_inputs: bool, again: bool) -> list[Term]:
        """Return what is beside that while experts are back-propagated: results weighed, or gradients of the MLP's.

        Where biases are added, and the forward pass comes `again`, each token's are there when gate and up meet.
        """
        architecture, tokens, z = self.architecture, self.batch.tokens_in(stack), self.expert_bytes
        results = tokens * architecture.chosen * architecture.hidden
        if again and architecture.family.is_gpt_oss_like:
            size = ((4 - keeps_inputs) * tokens * architecture.intermediate + results) * z
            return [activations("experts' biases, and what they add to", f"T ({4 - keeps_inputs} I + k H) z", size)]
        each = 4 if architecture.family.routes_in_fp32 else z
        wide = (3 - keeps_inputs) * tokens * architecture.intermediate * z - results * z
        if wide > 3 * results * each:
            return [activations("gradients within the experts", f"T ({3 - keeps_inputs} I - k H) z", wide)]
        return [activations("experts' results while they are weighed", f"3 T k H {each}", 3 * results * each)]

    def dequantized_experts(self, stack: Stack) -> Term:
        """Return what a layer's experts are while it computes, where they are stored in 4 bits."""
        count = sum(linear.weights for linear in stack.linears if linear.experts > 1) * self.job.method.quantizes
        return numbers(Kind.BUFFERS, "a layer's experts, dequantized", count, self.expert_bytes)

    def _dropouts(self, stack: Stack) -> list[Term]:
        count = 3 if stack.kind == StackKind.CROSS_DECODER else 2
        bytes_each, letter = (self.job.arithmetic_bytes, " a") if self.job.cpu_operations else (1, "")
        size = count * self.batch.tokens_in(stack) * self.architecture.hidden * bytes_each
        return [activations("dropout masks", f"{count} T H{letter}", size * bool(self.architecture.dropout))]

    def _adapters(self, stack: Stack) -> list[Term]:
        job, a = self.job, self.job.arithmetic_bytes
        adapted = [linear for linear in stack.linears if job.adapts(linear)]
        if not adapted:
            return []
        copied = [linear for linear in adapted if job.lora_dropout > 0 or self._has_wide_input(linear)]
        # without cast and dropout all adapters of an input keep the input itself; attention's result is counted there
        shared = {
            (linear.block, linear.ends_block): linear
            for linear in adapted
            if linear not in (*copied, *_last_of(Block.ATTENTION, stack))
        }
        kept = [*copied, *(linear for linear in shared.values() if not self._keeps_input(linear))]

        def of_tokens(widths: list[tuple[Linear, int]]) -> tuple[int, str]:
            """Return how many numbers of these widths all tokens have, and the formula."""
            own = sum(width for linear, width in widths if not linear.reads_encoder)
            of_encoder = sum(width for linear, width in widths if linear.reads_encoder)
            count = own * self.batch.tokens_in(stack) + of_encoder * self.batch.tokens
            return count, f"T {own:,}" + (f" + TE {of_encoder:,}" if of_encoder else "")

        inputs, inputs_formula = of_tokens([(linear, linear.inputs) for linear in kept])
        masks, masks_formula = of_tokens([(linear, linear.inputs * self._mask_bytes(linear)) for linear in adapted])
        between, between_formula = of_tokens([(linear, job.lora_rank) for linear in adapted])
        return [
            activations("inputs of the adapters", f"({inputs_formula}) {a}", inputs * a),
            activations("dropout masks of the adapters", masks_formula, masks * bool(job.lora_dropout)),
            activations("between the adapters' matrices", f"({between_formula}) a", between * a),
        ]

    def _has_wide_input(self, linear: Linear) -> bool:
        """Whether autocast casts a projection's input: the last one of a block reads a product, which needs no cast."""
        reads_power = self.architecture.family.is_gpt2_like and linear.block == Block.MLP and self.power_bytes == 4
        return self.casts_inputs and (reads_power or not linear.ends_block)

    def _mask_bytes(self, linear: Linear) -> int:
        """Return the bytes of a number of an adapter's dropout mask; on a CPU it has the format of the input."""
        of_input = 4 if self._has_wide_input(linear) else self.job.arithmetic_bytes
        return of_input if self.job.cpu_operations else 1

    def weight_copies(self, linears: Iterable[Linear]) -> list[Term]:
        """Return autocast's copies of the projections' weights."""
        count = sum(linear.cast_weights for linear in linears) * (self.job.autocasts and not self.job.method.quantizes)
        return [numbers(Kind.WEIGHTS, "autocast's copies of the weights", count, self.job.arithmetic_bytes)]

    # -- the backward pass

    def backward(self, stack: Stack) -> list[Term]:
        """Return what is alive only while one layer is back-propagated."""
        again = self.job.gradient_checkpointing
        working = self._tile_backward(stack) if self.job.tiled_mlp else self._mlp_backward(stack, again)
        ways = [[*times_each(self.saved(stack), again, "computed again: "), *working]]
        if self.job.attention == "eager":  # the MLP is done
            left = [*self._norms(stack), *self._attention(stack), *self._dropouts(stack)]
            left += self._of_linears(_only(Block.ATTENTION, stack))
            gone = size_of(self._mlp(stack)) * (not again and not self.job.tiled_mlp)
            ways.append([*times_each(left, again, "computed again: "), self._score_gradients(stack, gone)])
            # a decoder's masks, of whole rows and of windows: checkpointing keeps what layers are called with
            masks = (1 + (self.architecture.window > 0)) * (again and stack.kind == StackKind.DECODER)
            size = masks * self.batch.tokens * self.batch.length * self.hidden_bytes
            ways = [[*way, activations("masks", f"{masks} B S S x", size)] for way in ways]
        return [*max(ways, key=size_of), self.passing(stack), self.dequantized_experts(stack)]

    def _mlp_backward(self, stack: Stack, again: bool) -> list[Term]:
        if self.architecture.experts:
            return self._experts_at_work(stack, any(map(self._keeps_input, _last_of(Block.MLP, stack))), again)
        if self.architecture.family.is_gpt2_like:
            return [self._gpt2_mlp_backward(stack, again)]
        count = self._gradients_within_mlp
        size = count * self.batch.tokens_in(stack) * self.architecture.intermediate * self.job.arithmetic_bytes
        working = [activations("gradients within the MLP", f"{count} T I a", size)]
        # the forward pass comes again
        return max(working, self.adapter_casts(stack), key=size_of) if again else working

    def _gpt2_mlp_backward(self, stack: Stack, again: bool) -> Term:
        """Return the gradients of the activation's result and of both its factors, less what has gone by then.

        These are the last projection's input, the mask behind it, and one of two hidden states; and the first norm
        keeps the layer's input itself where that is in fp32, as checkpointing does.
        """
        job, of_last = self.job, _last_of(Block.MLP, stack)[0]
        kept = job.arithmetic_bytes * (self._keeps_input(of_last) or job.adapts(of_last))
        each = 3 * self.power_bytes - kept
        gone = self.hidden_bytes + (self.architecture.dropout > 0) + 4 * (again and self.hidden_bytes == 4)
        size = self.batch.tokens_in(stack) * (each * self.architecture.intermediate - gone * self.architecture.hidden)
        return activations("gradients within the MLP", f"T ({each} I - {gone} H)", size)

    def _tile_backward(self, stack: Stack) -> list[Term]:
        """Return what a tile of the MLP computes again and works on, and the gradient of the MLP's input."""
        tokens = self.batch.tokens_in(stack)
        tile = math.ceil(tokens / math.ceil(tokens / self.architecture.hidden))
        of_tile = replace(self, batch=replace(self.batch, rows=1, length=tile))
        linears = of_tile._of_linears(_only(Block.MLP, stack))
        terms = [*of_tile._mlp(stack), *linears, *of_tile._mlp_backward(stack, True)]
        size = tokens * self.architecture.hidden * self.hidden_bytes
        return [*times_each(terms, 1, "of a tile: "), activations("gradient of the MLP's input", "T H x", size)]

    @property
    def _gradients_within_mlp(self) -> int:
        """How many there are at once, beside all that the MLP saved, which goes as its gradients come.

        Adapters compute theirs in fp32, beside 16 bits. In a step on pairs, without dropout, those of an input that
        base and adapter read are added up when it is gone; where hidden states are in fp32, they are fewer by then.
        """
        if not self.job.method.has_adapters:
            return 1
        if self.job.batch.goal.reads_log_probs:
            return 2 if self.hidden_bytes == 2 else 1
        return 3 if self.architecture.family.is_llama_like and self.job.arithmetic_bytes == 2 else 1

    def _score_gradients(self, stack: Stack, gone: float) -> Term:
        """Return the gradients of the attention scores, of the eager attention, less what the MLP kept and is `gone`.

        While softmax is back-propagated those of its result wait beside them, and what CUDA's kernel takes and a CPU's
        does not, the product of result and gradient.
        """
        each = self.softmax_bytes + self.job.arithmetic_bytes
        if not self.job.cpu_operations:
            each += self.softmax_bytes + SOFTMAX_FP16_BYTES * self.job.precision.startswith("fp16")
        pairs = max(asking * asked for asking, asked in self.batch.attentions_in(stack)) * self.batch.sequences
        size = max(0.0, each * pairs * self.architecture.heads - gone)
        return activations("gradients of the attention scores", f"B heads S S {each}", size)

    def passing(self, stack: Stack) -> Term:
        """Return what goes from layer to layer, or the gradients of it."""
        size = 2 * self.batch.tokens_in(stack) * self.architecture.hidden * self.hidden_bytes
        return activations("hidden states, or their gradients", "2 T H x", size)

    def adapter_casts(self, stack: Stack) -> list[Term]:
        """Return what only a forward pass with adapters holds: the MLP's result, and dropout's of an fp32 input."""
        job, t, a = self.job, self.batch.tokens_in(stack), self.job.arithmetic_bytes
        adapted = [linear for linear in stack.linears if job.adapts(linear)]
        if not adapted:
            return []
        widest = max((linear.inputs for linear in adapted if self._has_wide_input(linear)), default=0)
        each = 4 if job.lora_dropout and a < 4 else 0
        return [
            activations("result within the MLP", "T I a", t * self.architecture.intermediate * a),
            activations("casts of the widest adapter's input", f"T {widest:,} {each}", t * widest * each),
        ]


def _last_of(block: Block, stack: Stack) -> list[Linear]:
    """Return the projections of a layer that read what such a block has made; a decoder with an encoder has two."""
    return [linear for linear in stack.linears if linear.ends_block and linear.block == block]


def _only(block: Block, stack: Stack) -> Stack:
    return replace(stack, linears=tuple(linear for linear in stack.linears if linear.block == block))


def widest_without_gradients(architecture: Architecture, job: Job, tokens: int, hidden_bytes: int) -> Term:
    """Return what a layer without adapters holds where it is widest, of so many tokens, when autograd keeps nothing.

    Its input, the sum with the attention's result, and the norm of that; then what the MLP makes of it.
    """
    of_mlp, formula = widest_of_mlp(architecture, job.arithmetic_bytes)
    size = tokens * (4 * architecture.hidden * hidden_bytes + of_mlp * job.arithmetic_bytes)
    return activations("hidden states of a layer, and its MLP", f"T (4 H x + {formula} a)", size)


def widest_of_mlp(architecture: Architecture, a: int) -> tuple[float, str]:
    """Return the most numbers of `a` bytes that an MLP works on per token when autograd keeps nothing, and the formula.

    Experts copy each token for each of them, and weigh their results while they put them in order.
    """
    results, wide = architecture.chosen * architecture.hidden, architecture.intermediate
    if not architecture.experts:
        of_mlp = 3 + architecture.family.fuses_linears if architecture.family.is_llama_like else 2
        of_mlp += architecture.family.is_gpt2_like * 8 / a  # two powers in fp32
        return of_mlp * wide, f"{of_mlp:g} I"
    weighed = 2 + 2 * (4 / a if architecture.family.routes_in_fp32 else 1)
    inner = 9 if architecture.family.is_gpt_oss_like else 4
    return max((inner * wide + results, f"({inner} I + k H)"), (weighed * results, f"{weighed:g} k H"))
