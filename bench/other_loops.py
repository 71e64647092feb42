"""A step's memory in training loops of other people, whose peaks were published: what they hold and ours does not."""

from collections.abc import Container
from dataclasses import dataclass, replace

from common.planning.architectures import Architecture, Linear, Stack
from common.planning.job import Job
from common.planning.layer_activations import LayerActivations
from common.planning.memory_plan import DeviceSums, Moment, between
from common.planning.shares import Share
from common.planning.terms import Kind, Term, activations, numbers, times_each


@dataclass(frozen=True)
class OtherJob(Job):
    """A decoder's job in 16 bits in a loop that is not this repository's; inputs of adapters are cast to fp32.

    Attributes:
        logit_bytes: Bytes per logit at the highest moment of the loss, which has all logits at once, or those of
            `chunk_rows` tokens; 0 = they come in chunks as this repository's.
        is_under_autocast: As Transformers' Trainer with `bf16` or `fp16`; else adapters compute in their own format.
        has_16_bit_adapters: Adapters are in the base's 16 bits; PEFT makes them fp32.
        has_16_bit_embeddings: Embeddings, norms and head of a quantized base keep their dtype; PEFT's
            `prepare_model_for_kbit_training` makes them fp32.
        first_fsdp: `FullyShardedDataParallel`, with reentrant checkpointing, which keeps the inputs of layers, and
            their gradients, until the backward pass has ended (torch/distributed/fsdp/_runtime_utils.py:
            `_register_post_backward_reshard_only_hook`).
        chunk_rows: Tokens of a chunk of the loss; 0 = as `logit_bytes` says.
        has_reference_adapter: A second adapter, which is not trained, is on the device.
        holds_logits: The loop holds the model's output, and with it all logits, until the step has ended.
    """

    logit_bytes: int = 0
    is_under_autocast: bool = True
    has_16_bit_adapters: bool = False
    has_16_bit_embeddings: bool = False
    first_fsdp: bool = False
    chunk_rows: int = 0
    has_reference_adapter: bool = False
    holds_logits: bool = False

    def __post_init__(self) -> None:
        """Take any settings: ZeRO also runs on one GPU, and with ranks that share rows."""

    @property
    def has_all_logits(self) -> bool:
        """Whether the loss has all logits at once."""
        return self.logit_bytes > 0 and not self.chunk_rows

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained weight."""
        return self.weight_bytes if self.has_16_bit_adapters else super().trained_bytes

    @property
    def end_bytes(self) -> int:
        """Bytes of a weight of a quantized base's embeddings, norms and head."""
        return self.weight_bytes if self.has_16_bit_embeddings else 4

    @property
    def has_wide_layers(self) -> bool:
        """Whether layers compute in fp32 all but their matrix products.

        bitsandbytes' `Linear4bit.forward` casts each result to the format of its input, which without autocast is that
        of the embeddings and norms.
        """
        return self.method.quantizes and self.end_bytes == 4 and not self.is_under_autocast


class OtherLayer(LayerActivations):
    """The terms of a layer in another loop."""

    job: OtherJob

    def _adapters(self, stack: Stack) -> list[Term]:
        terms = super()._adapters(stack)
        times = 1 if self.job.is_under_autocast else self.job.trained_bytes // self.job.arithmetic_bytes
        return [*times_each(terms[:1], times, ""), *terms[1:]]

    def _has_wide_input(self, linear: Linear) -> bool:
        return self.job.trained_bytes > self.job.arithmetic_bytes

    def adapter_casts(self, stack: Stack) -> list[Term]:
        """Return what only a forward pass with adapters holds: any input's copy in fp32, and what dropout makes of it.

        Adapters in 16 bits, or without autocast, have none.
        """
        if not self.job.is_under_autocast or self.job.has_16_bit_adapters:
            return []
        widest = max(linear.inputs * self.job.adapts(linear) for linear in stack.linears)
        size = 4 * self.batch.tokens_in(stack) * widest
        return [*super().adapter_casts(stack), activations("cast of the widest adapter's input", "T 4", size)]


class OtherSums(DeviceSums):
    """The terms of one device in a step of another loop."""

    job: OtherJob

    def __init__(self, architecture: Architecture, job: OtherJob, share: Share) -> None:
        super().__init__(architecture, job, share)
        of_layer = replace(job, precision="fp32") if job.has_wide_layers else job
        self.layer = OtherLayer(architecture, of_layer, self.batch, self.hidden_bytes)
        self.saved_of_layer = self.layer.saved
        self.chunks_loss = not job.has_all_logits
        self.positions_at_once = min(self.positions, job.chunk_rows) or self.positions_at_once
        self.keeps_inputs = job.first_fsdp and job.method.has_adapters and job.gradient_checkpointing

    def weights(self) -> list[Term]:
        """Return frozen and trained weights, and the reference's."""
        count = self.trained * self.job.has_reference_adapter
        return [*super().weights(), numbers(Kind.WEIGHTS, "adapters of the reference", count, self.job.trained_bytes)]

    def layers_saved(self, one_left: bool = False) -> list[Term]:
        """Return what all layers keep; `one_left`: when of one micro-batch the first layer is back-propagated."""
        return super().layers_saved(one_left and not self.keeps_inputs)

    def _lasting(self) -> list[tuple[list[Term], Container[Moment]]]:
        gradients = times_each(self.layers_saved() * self.keeps_inputs, 1, "gradients: ")
        each = self.job.end_bytes if self.job.method.quantizes else self.job.arithmetic_bytes
        held = self._logits("logits that the loop still holds", f"P V {each}", each * self.job.holds_logits)
        return [
            *super()._lasting(),
            (gradients, [Moment.FIRST_LAYER_BACKWARD]),
            ([held], between(Moment.HEAD_BACKWARD, Moment.OPTIMIZER_STEP)),  # `logit_bytes` has them in the loss
        ]

    def _loss(self) -> list[Term]:
        each, in_chunks, (logits, *others) = self.job.logit_bytes, self.chunks_loss, super()._loss()
        formula = f"{'C' if in_chunks else 'P'} V {each}"
        own = self._logits("logits, log-probabilities, gradients", formula, each, of_chunk=in_chunks)
        return [own if each else logits, *others]

    def _casts_head(self) -> bool:
        has_wide_head = self.job.method.quantizes and self.job.end_bytes == 4 and self.job.shard_ranks == 1
        return self.job.is_under_autocast and (super()._casts_head() or has_wide_head)
