"""What PyTorch's autograd keeps of one layer's forward pass, operation by operation."""

from collections.abc import Iterable
from dataclasses import dataclass

from common.planning.architectures import Architecture, Linear, Stack
from common.planning.job import BatchShape, Job
from common.planning.terms import Term, activations, times_each

_READS_ATTENTION = ("o_proj", "out_proj", "attention.output.dense")
_READS_MLP = ("down_proj", "output.dense", "fc2")
_READS_RESULT = (*_READS_ATTENTION, *_READS_MLP)
"""Projections whose input is attention's or the MLP's own result, and counted there."""
_NORM_OF = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "query", "key", "value"), "attention"),
    **dict.fromkeys(("gate_proj", "up_proj", "intermediate.dense", "fc1"), "mlp"),
}
"""Projections that read the same norm."""


@dataclass(frozen=True)
class LayerActivations:
    """The terms of a layer of each stack; letters as in `memory_plan`."""

    architecture: Architecture
    job: Job
    batch: BatchShape
    """Of one micro-batch."""
    hidden_bytes: int
    """`x`."""

    def saved(self, stack: Stack) -> list[Term]:
        """What autograd keeps of one layer's forward pass."""
        terms = [*self._norms(stack), *self._linear_inputs(stack), *self._attention(stack), *self._mlp(stack)]
        return [*terms, *self._dropouts(stack), *self._adapters(stack), *self.weight_copies(stack.linears)]

    def _norms(self, stack: Stack) -> list[Term]:
        architecture, t, x = self.architecture, self.batch.tokens_in(stack), self.hidden_bytes
        count = 3 if stack.kind == "cross-decoder" else 2
        if not architecture.is_llama_like:
            return [activations("inputs of the layer norms", f"{count} T H 4", count * t * architecture.hidden * 4)]
        terms = [activations("inputs of the norms in fp32", f"{count} T H 4", count * t * architecture.hidden * 4)]
        if self.job.trains_all:
            terms.append(
                activations("normalized, for the norms' weights", f"{count} T H x", count * t * architecture.hidden * x)
            )
        if architecture.model_type == "qwen3":
            wide = (architecture.heads + architecture.kv_heads) * architecture.head_dim
            each = 4 + (x if self.job.trains_all else 0)
            terms.append(activations("norms of queries and keys", "T (Q + K) (4 + x)", t * wide * each))
        return terms

    def _linear_inputs(self, stack: Stack) -> list[Term]:
        """Inputs that the projections keep for their weights' gradients, but attention's and the MLP's own results."""
        job, h, a = self.job, self.architecture.hidden, self.job.arithmetic_bytes
        trained = [linear for linear in stack.linears if linear.name not in _READS_RESULT and job.trains(linear)]
        if not trained:
            return []
        norms = {_NORM_OF[linear.name] for linear in trained}
        of_encoder = sum(linear.reads_encoder for linear in trained)
        if self.casts_inputs:  # of a shorter format than the hidden states each projection has a copy of its own
            copies = len(trained) - of_encoder
        else:  # the encoder's output is there for all layers
            copies, of_encoder = len(norms) + (stack.kind == "cross-decoder" and "attention" in norms), 0
        size = (copies * self.batch.tokens_in(stack) + of_encoder * self.batch.tokens) * h * a
        formula = f"{copies} T H a" + (f" + {of_encoder} TE H a" if of_encoder else "")
        return [activations("inputs of the projections", formula, size)]

    @property
    def casts_inputs(self) -> bool:
        """Autocast makes a copy of each projection's input."""
        job = self.job
        return job.autocasts or (job.precision != "fp32" and not self.architecture.is_llama_like)

    def _attention(self, stack: Stack) -> list[Term]:
        if self._keeps_scores:
            return self._attention_on_cpu(stack)
        terms: list[Term] = []
        for number, (asking, asked) in enumerate(self.batch.attentions_in(stack)):
            terms += times_each(self._one_attention(asking, asked), 1, "cross attention: " if number else "")
        return terms

    def _one_attention(self, asking: int, asked: int) -> list[Term]:
        """What an attention keeps in which `asking` tokens of a row ask about `asked` tokens."""
        architecture, job, rows = self.architecture, self.job, self.batch.rows
        a, t, other_t = job.arithmetic_bytes, rows * asking, rows * asked
        q, k = architecture.heads * architecture.head_dim, architecture.kv_heads * architecture.head_dim
        s, te = ("S", "T") if asking == asked else ("E", "TE")
        eager, masked = job.attention == "eager", self.batch.padded and job.attention != "flash"
        repeats = eager or (masked and job.attention == "sdpa")
        keys = 2 * q if repeats else 2 * k
        in_words = "2 Q" if repeats else "2 K"
        terms = [
            activations("queries, keys, values", f"(T Q + {te} {in_words}) a", (t * q + other_t * keys) * a),
            activations("result of attention", "T Q a", t * q * a),
        ]
        scores = rows * architecture.heads * asking * asked
        if eager:
            each = 4 + (a if a < 4 else 0)
            terms.append(activations("attention scores", f"B heads S {s} {each}", scores * each))
            if architecture.dropout:
                extra = (4 if job.cpu_operations else 1) + (4 if a == 4 else 0)
                terms.append(activations("dropout of the scores", f"B heads S {s} {extra}", scores * extra))
        else:
            terms.append(activations("attention's normalizers in fp32", "T heads 4", t * architecture.heads * 4))
            if masked:
                terms.append(activations("mask in the arithmetic's format", f"B S {s} a", rows * asking * asked * a))
        return terms

    @property
    def _keeps_scores(self) -> bool:
        """With dropout a CPU has no fused attention: PyTorch's is made of products, softmax and dropout, in fp32."""
        return self.job.cpu_operations and self.job.attention == "sdpa" and self.architecture.dropout > 0

    def _attention_on_cpu(self, stack: Stack) -> list[Term]:
        """What PyTorch's unfused attention keeps of each of its operations.

        (aten/src/ATen/native/transformers/attention.cpp: `_scaled_dot_product_attention_math`.)
        """
        architecture, job, t = self.architecture, self.job, self.batch.tokens
        q, a = architecture.heads * architecture.head_dim, job.arithmetic_bytes
        scores = self.batch.rows * architecture.heads * self.batch.length**2
        terms = [
            activations("queries, keys, values in fp32", "T 3 Q 4", t * 3 * q * 4),
            activations("softmax, its dropout's mask and result, in fp32", "B heads S S 12", scores * 12),
        ]
        if any(job.trains(linear) or job.adapts(linear) for linear in stack.linears if linear.name in _READS_ATTENTION):
            terms.append(activations("result of attention", "T Q a", t * q * a))
        return terms

    def _mlp(self, stack: Stack) -> list[Term]:
        architecture, job, t = self.architecture, self.job, self.batch.tokens_in(stack)
        keeps_result = any(job.trains(linear) for linear in stack.linears if linear.name in _READS_MLP)
        if architecture.is_llama_like:
            count, what = 3 + keeps_result, "gate, up, silu" + (" and their product" if keeps_result else "")
        else:
            count, what = 1 + keeps_result, "MLP before" + (" and after" if keeps_result else "") + " its activation"
        size = count * t * architecture.intermediate * job.arithmetic_bytes
        return [activations(what, f"{count} T I a", size)]

    def _dropouts(self, stack: Stack) -> list[Term]:
        if not self.architecture.dropout:
            return []
        count, each = 3 if stack.kind == "cross-decoder" else 2, ""
        size = count * self.batch.tokens_in(stack) * self.architecture.hidden
        if self.job.cpu_operations:
            size, each = size * self.job.arithmetic_bytes, " a"
        return [activations("dropout masks", f"{count} T H{each}", size)]

    def _adapters(self, stack: Stack) -> list[Term]:
        job, batch, a = self.job, self.batch, self.job.arithmetic_bytes
        adapted = [linear for linear in stack.linears if job.adapts(linear)]
        if not adapted:
            return []
        own_copies = job.lora_dropout > 0 or job.precision != "fp32" or job.method.quantizes
        # without cast and dropout all adapters of an input keep the input itself; attention's result is counted there
        shared = {
            _NORM_OF.get(linear.name, linear.name): linear for linear in adapted if linear.name not in _READS_ATTENTION
        }
        kept = adapted if own_copies else list(shared.values())

        def numbers(widths: Iterable[tuple[Linear, int]]) -> tuple[int, str]:
            """Of all tokens that the projections read, so wide: how many, and as a formula."""
            by_encoder = {True: 0, False: 0}
            for linear, width in widths:
                by_encoder[linear.reads_encoder] += width
            count = by_encoder[False] * batch.tokens_in(stack) + by_encoder[True] * batch.tokens
            return count, f"T {by_encoder[False]:,}" + (f" + TE {by_encoder[True]:,}" if by_encoder[True] else "")

        each = 4 if job.plain_loop else a  # without autocast adapters compute in their own fp32
        count, formula = numbers((linear, linear.inputs) for linear in kept)
        terms = [activations("inputs of the adapters", f"({formula}) {each}", count * each)]
        if job.lora_dropout:
            bytes_each = 4 if job.cpu_operations else 1
            count, formula = numbers((linear, linear.inputs * bytes_each) for linear in adapted)
            terms.append(activations("dropout masks of the adapters", formula, count))
        count, formula = numbers((linear, job.lora_rank) for linear in adapted)
        return [*terms, activations("between the adapters' matrices", f"({formula}) a", count * a)]

    def weight_copies(self, linears: Iterable[Linear]) -> list[Term]:
        """Return autocast's copies of the projections' weights."""
        count = sum(linear.inputs * linear.outputs for linear in linears)
        if not count or not self.job.autocasts or self.job.method.quantizes:
            return []
        a = self.job.arithmetic_bytes
        return [Term("weights", "autocast's copies of the weights", f"{count:,} x {a} bytes", count * a)]
