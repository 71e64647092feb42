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
from typing import Literal

from common.architectures import Architecture, Linear, Stack, slice_of_rank
from common.hardware import GIB
from common.run_config import BadInputError

Technique = Literal["lora", "qlora", "full"]
Parallel = Literal["single", "ddp", "mp", "pp", "tp", "fsdp", "zero1", "zero2", "zero3"]
Precision = Literal["bf16", "bf16-mixed", "fp16-mixed", "fp32"]
Quantization = Literal["nf4", "nf4-double", "int8"]
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""Of allocated memory; `overhead` comes on top."""

OPTIMIZER_BYTES = {
    "adamw_torch": None,  # momentum and variance, each as wide as the weight
    "adamw_torch_fused": None,
    "adamw_bnb_8bit": 2 + 2 * 4 / 256,  # one byte each, and an fp32 scale per block of 256
    "adamw_8bit": 2 + 2 * 4 / 256,
    "paged_adamw_8bit": 2 + 2 * 4 / 256,
    "paged_adamw_32bit": 8,
    "sgd": 0,
}
"""Bytes of the optimizer's states per trained weight (bitsandbytes/optim: blocksize 256)."""
ALL_LINEAR = ("all-linear",)
"""Target modules: every linear layer but the head."""
QUANTIZED_BYTES = {
    "nf4": 4 / 8 + 4 / 64,  # an fp32 scale per block of 64
    "nf4-double": 4 / 8 + 1 / 64 + 4 / (64 * 256),  # 8-bit scales, and an fp32 scale per 256 of them
    "int8": 1,
}
"""Bytes per quantized weight (Dettmers et al. 2023, "QLoRA", sections 2 and 3)."""
QUANTIZED_NUMBER_BYTES = {"nf4": 4 / 8, "nf4-double": 4 / 8, "int8": 1}
"""Of these, the numbers themselves: the rest are their blocks' scales."""
LEVEL_TABLE_BYTES = {"nf4": 16 * 4, "nf4-double": 16 * 4 + 256 * 4 + 4, "int8": 0}
"""Of each quantized matrix, in fp32: the levels of its numbers, and of its scales with their mean."""
WHY_NOT_QUANTIZED_FULL = (
    "Full fine-tuning of quantized weights is impossible, and would save little: a weight takes 0.5 bytes in 4 bits "
    "instead of 2, but its gradient 2, Adam's momentum 4 and variance 4 and the fp32 copy 4 stay: 14.5 instead of 16 "
    "bytes. Train adapters on the quantized weights instead: pass --technique qlora."
)
FSDP_GATHERED_LAYERS = 2
"""The layer at work and the one that is fetched ahead (`FSDPModule`: implicit forward and backward prefetch)."""
ZERO = ("zero1", "zero2", "zero3")
ZERO_REUSED_WEIGHTS = 1_000_000_000
"""Weights that stage 3 keeps gathered, as they are soon used again (`stage3_max_reuse_distance`, DeepSpeed's own)."""


@dataclass(frozen=True)
class BatchShape:
    """The largest batch of a step, on one rank."""

    rows: int
    length: int
    """Tokens of a row."""
    labelled: int
    """Positions at which some row has a token to be learnt: logits are computed for these."""
    padded: bool = False
    """Rows differ in length, so that attention needs a mask."""
    classes: int = 0
    """With classification: labels that a row may have; 0 = tokens are to be predicted."""
    target_length: int = 0
    """With encoder-decoders: tokens of a row's summary, on which the decoder works; 0 = as many as of the row."""

    @property
    def tokens(self) -> int:
        """Of all rows, padding included; of an encoder-decoder's those that the encoder reads."""
        return self.rows * self.length

    @property
    def task(self) -> str:
        """What a run with such rows learns, as `RunConfig` calls it."""
        if self.classes:
            return "classification"
        return "summarization" if self.target_length else "chat"

    def length_in(self, stack: Stack) -> int:
        """Tokens of a row that the stack's layers work on."""
        return self.target_length or self.length if stack.kind == "cross-decoder" else self.length

    def tokens_in(self, stack: Stack) -> int:
        """Of all rows, those that the stack's layers work on."""
        return self.rows * self.length_in(stack)

    def tokens_into(self, linear: Linear, stack: Stack) -> int:
        """Of all rows, those that a projection of the stack reads."""
        return self.tokens if linear.reads_encoder else self.tokens_in(stack)

    def attentions_in(self, stack: Stack) -> list[tuple[int, int]]:
        """Of each attention of a layer how many tokens of a row ask, and how many they ask about."""
        length = self.length_in(stack)
        return [(length, length), (length, self.length)] if stack.kind == "cross-decoder" else [(length, length)]


@dataclass(frozen=True)
class Job:
    """What is to be trained, and how; of the model only what its architecture does not say.

    Raises:
        BadInputError: settings contradict each other.
    """

    technique: Technique
    parallel: Parallel
    batch: BatchShape
    """Of one data-parallel rank and step, before accumulation."""
    devices: int = 1
    precision: Precision = "bf16"
    quantization: Quantization = "nf4"
    """Of the frozen weights, with qlora."""
    optimizer: str = "adamw_torch_fused"
    attention: Literal["eager", "sdpa", "flash"] = "sdpa"
    gradient_checkpointing: bool = False
    lora_rank: int = 8
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get adapters or, with full, are trained; empty = all but the head, or with full
    every weight of the model."""
    lora_dropout: float = 0.0
    micro_batches: int = 1
    """With pp: parts that the batch is cut into."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """With pp: the order of the micro-batches' passes."""
    accumulation_steps: int = 1
    plain_loop: bool = False
    """Not the Trainer's step: no autocast, and the model's output is held while it is back-propagated."""
    offload: bool = False
    """Optimizer states (with fsdp and zero3 weights and gradients, too) wait in the host's memory."""
    cpu_operations: bool = False
    """Dropout as PyTorch does it on a CPU: masks are numbers, and attention with dropout keeps its scores."""

    def __post_init__(self) -> None:
        """Check what contradicts."""
        if self.optimizer not in OPTIMIZER_BYTES:
            known = ", ".join(OPTIMIZER_BYTES)
            raise BadInputError(f"The optimizer {self.optimizer!r} is not known to the planner: pass one of {known}.")
        if self.parallel == "single" and self.devices != 1:
            raise BadInputError(
                f"--parallel single uses one GPU, not {self.devices}: pass --gpus 1, or --parallel ddp."
            )
        if self.parallel != "single" and self.devices < 2:
            raise BadInputError(
                f"--parallel {self.parallel} needs at least two GPUs, not {self.devices}: pass --gpus 2."
            )
        if self.parallel != "pp" and self.micro_batches != 1:
            raise BadInputError(
                f"--micro-batches {self.micro_batches} is for --parallel pp; else lower --batch-size, and accumulate."
            )
        if self.batch.rows % self.micro_batches:
            raise BadInputError(
                f"--batch-size {self.batch.rows} cannot be cut into {self.micro_batches} equal micro-batches: "
                f"pass --batch-size {-(-self.batch.rows // self.micro_batches) * self.micro_batches}."
            )
        if self.technique == "qlora" and self.parallel.startswith("zero"):
            raise BadInputError(
                f"--technique qlora with --parallel {self.parallel}: DeepSpeed's ZeRO does not divide weights in 4 "
                "bits: pass --parallel fsdp or ddp."
            )
        if self.technique == "qlora" and self.parallel == "tp":
            raise BadInputError(
                "--technique qlora with --parallel tp: matrices in 4 bits are not divided: pass --technique lora."
            )
        if self.offload and self.parallel in ("mp", "pp", "tp"):
            raise BadInputError(f"--offload with --parallel {self.parallel} is not planned: pass fsdp or zero3.")

    @property
    def arithmetic_bytes(self) -> int:
        """`a`: bytes of a number in matrix products."""
        return 4 if self.precision == "fp32" else 2

    @property
    def is_mixed(self) -> bool:
        """Arithmetic in a shorter format than the trained weights'."""
        return self.precision.endswith("-mixed")

    @property
    def autocasts(self) -> bool:
        """Autocast copies weights and inputs to the shorter format; sharded weights are gathered in it already."""
        return self.is_mixed and not self.freezes_16_bits and self.parallel not in ("fsdp", *ZERO)

    @property
    def freezes_16_bits(self) -> bool:
        """LoRA in fp16: frozen weights need no fp32, as only the adapters are updated."""
        return self.technique == "lora" and self.precision == "fp16-mixed"

    @property
    def weight_bytes(self) -> int:
        """`w`: bytes of a weight that is not quantized; DeepSpeed keeps the fp32 ones in its optimizer."""
        if self.precision == "fp32":
            return 4
        return 4 if self.is_mixed and not self.freezes_16_bits and not self.parallel.startswith("zero") else 2

    @property
    def hidden_bytes(self) -> int:
        """`x` of Llama-like models: bytes of a hidden state between layers; quantized ones have fp32 embeddings."""
        if self.technique == "qlora":
            return 4
        return 4 if self.precision == "fp32" or self.autocasts else 2

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained weight; PEFT keeps adapters in fp32, but DeepSpeed makes all of a module bf16."""
        as_the_base = self.technique == "full" or (self.parallel in ZERO and self.precision != "fp32")
        return self.weight_bytes if as_the_base else 4

    @property
    def shards(self) -> int:
        """Ranks that share what the way of sharding divides."""
        return self.devices if self.parallel in ("fsdp", *ZERO) else 1

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks that work on rows of their own."""
        return 1 if self.parallel in ("single", "mp", "pp", "tp") else self.devices

    def in_flight(self, stage: int) -> int:
        """Micro-batches of which a stage, counted from 0, holds activations at once.

        GPipe starts no backward pass before the last forward pass; 1F1B starts as soon as the last stage sends the
        first one back.
        """
        if self.parallel != "pp":
            return 1
        waiting = self.devices - stage if self.schedule == "1f1b" else self.micro_batches
        return min(self.micro_batches, waiting)

    def adapts(self, linear: Linear) -> bool:
        """Whether this projection gets an adapter."""
        return self.technique != "full" and self._is_target(linear)

    @property
    def trains_all(self) -> bool:
        """Every weight is trained: embeddings, norms and head, too."""
        return self.technique == "full" and not self.target_modules

    def trains(self, linear: Linear) -> bool:
        """Whether this projection's own weights are trained."""
        return self.technique == "full" and self._is_target(linear)

    def _is_target(self, linear: Linear) -> bool:
        return self.target_modules in ((), ALL_LINEAR) or linear.name in self.target_modules

    def check_targets(self, architecture: Architecture) -> None:
        """Refuse names that the model does not have.

        Raises:
            BadInputError: with the names that it has.
        """
        names = list(dict.fromkeys(linear.name for stack in architecture.stacks for linear in stack.linears))
        for target in () if self.target_modules == ALL_LINEAR else self.target_modules:
            if target not in names:
                raise BadInputError(
                    f"{architecture.name} has no linear layer {target!r}: pass --target-modules all-linear, or some of "
                    f"{','.join(names)}."
                )


@dataclass(frozen=True)
class Term:
    """One summand of a device's memory."""

    part: str
    """One of `PARTS`, or `overhead`."""
    what: str
    formula: str
    count: float
    """Bytes."""

    @property
    def gib(self) -> float:
        """In GiB."""
        return self.count / GIB


@dataclass(frozen=True)
class Share:
    """The part of the model that one device holds."""

    layers: tuple[int, ...]
    """Layers of each stack."""
    has_embeddings: bool = True
    has_head: bool = True
    in_flight: int = 1
    """Micro-batches whose activations wait for their backward pass at once."""


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


def whole_model(architecture: Architecture) -> Share:
    """The share of a device that holds every layer."""
    return Share(tuple(stack.layers for stack in architecture.stacks))


def device_memory(architecture: Architecture, job: Job, share: Share) -> DeviceMemory:
    """The memory of one device: its highest moment, without the GPU's own overhead.

    Raises:
        BadInputError: tensor parallel cannot divide the model.
    """
    return _DeviceSums(part_of_rank(architecture, job), job, share).highest()


def part_of_rank(architecture: Architecture, job: Job) -> Architecture:
    """What each rank has of every layer: all of it but with tensor parallel.

    Raises:
        BadInputError: tensor parallel cannot divide the model.
    """
    return slice_of_rank(architecture, job.devices) if job.parallel == "tp" else architecture


def trains_head(architecture: Architecture, job: Job) -> bool:
    """Whether what follows the layers is trained: a classifier's head is new, and so trained in any case."""
    return job.trains_all or architecture.classes > 0


def trained_parameters(architecture: Architecture, job: Job, share: Share | None = None) -> int:
    """Weights that get gradients, of the whole model or of one device's share."""
    share = share or whole_model(architecture)
    if job.trains_all:
        return _parameters(architecture, share)
    count = sum(
        layers * _trained_of_layer(stack, job) for stack, layers in zip(architecture.stacks, share.layers, strict=True)
    )
    if share.has_head and trains_head(architecture, job):
        count += architecture.head_parameters + architecture.final_parameters
    return count


def quantized_weights(architecture: Architecture) -> int:
    """Weights of the whole model that qlora keeps in 4 bits: the layers' matrices."""
    return sum(
        stack.layers * sum(linear.inputs * linear.outputs for linear in stack.linears) for stack in architecture.stacks
    )


def _trained_of_layer(stack: Stack, job: Job) -> int:
    if job.trains_all:
        return stack.layer_parameters
    own = sum(linear.parameters for linear in stack.linears if job.trains(linear))
    return own + sum(linear.lora_parameters(job.lora_rank) for linear in stack.linears if job.adapts(linear))


def _parameters(architecture: Architecture, share: Share) -> int:
    count = sum(
        layers * stack.layer_parameters for stack, layers in zip(architecture.stacks, share.layers, strict=True)
    )
    if share.has_embeddings:
        count += architecture.embedding_parameters + architecture.other_embedding_parameters
    if share.has_head:
        count += architecture.head_parameters + architecture.final_parameters
        if architecture.tied and not share.has_embeddings:
            count += architecture.embedding_parameters  # a tied head away from its embeddings is a copy
    return count


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
        self.parameters = _parameters(architecture, share)
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
        done = self._head_gradients() + layers * _trained_of_layer(decoder, self.job)

        def moment(more_gradients: int, passing: list[Term]) -> list[Term]:
            gradients = self._gradients(done + more_gradients, "gradients of the head and the decoder")
            if self._adds_to_gradients:
                gradients = self.gradients()
            return [*gradients, *self._layers_kept(1, self.stacks[:1]), *passing]

        ends = [*self.embeddings_backward(), *self.hidden_states(encoder)]
        layer = moment(_trained_of_layer(encoder, self.job), self.layer_backward(encoder))
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
        job, n = self.job, self.job.shards if self.job.parallel in ("fsdp", "zero3") else 1
        shared = f" / {n} ranks" if n > 1 else ""
        if job.offload and job.parallel in ("fsdp", "zero3"):
            return [Term("weights", "weights", "in the host's memory", 0.0)]
        if job.technique == "full":  # frozen ones are as wide
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
        if job.technique == "lora":
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
        keeps_copy = job.parallel in ZERO
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
        if job.parallel == "ddp":
            return [Term("gradients", "gradients, in DDP's buckets", f"{self.trained:,} x {job.trained_bytes} bytes",
                         gradient_bytes)]  # fmt: skip
        if job.parallel in ("fsdp", "zero3"):
            a = job.arithmetic_bytes
            layer = max(stack.layer_parameters for stack, _ in self.stacks)
            ends = self.parameters - sum(layers * stack.layer_parameters for stack, layers in self.stacks)
            terms = [
                self._gathered_quantized_layers() if job.technique == "qlora" else
                Term("buffers", "gathered layers", f"{FSDP_GATHERED_LAYERS} x {layer:,} x {a} bytes",
                     FSDP_GATHERED_LAYERS * layer * a),
                Term("buffers", "gathered embeddings and head", f"{ends:,} x {a} bytes", ends * a),
            ]  # fmt: skip
            if job.parallel == "zero3":
                kept = max(FSDP_GATHERED_LAYERS * layer + ends, min(self.parameters, ZERO_REUSED_WEIGHTS))
                terms = [Term("buffers", "gathered weights, kept as they are soon used again", f"{kept:,} x {a} bytes",
                              kept * a)]  # fmt: skip
            if job.technique == "full":
                scattered = max(_trained_of_layer(stack, job) for stack, _ in self.stacks)
                terms.append(Term("buffers", "a layer's gradients before they are scattered",
                                  f"{scattered:,} x {a} bytes", scattered * a))  # fmt: skip
            return terms
        if job.parallel == "pp":
            neighbours = 2 - self.share.has_embeddings - self.share.has_head
            size = neighbours * job.batch.tokens * self.architecture.hidden * self.hidden_bytes
            return [Term("buffers", "hidden states and gradients to receive", f"{neighbours} T H x, all parts",
                         size)]  # fmt: skip
        if job.parallel == "tp":
            size = self.batch.tokens * self.architecture.hidden * self.hidden_bytes
            return [Term("buffers", "hidden state to be summed over the ranks", "T H x", size)]
        if job.parallel in ("zero1", "zero2"):
            bucket, each = min(self.architecture.hidden**2, self.trained), job.trained_bytes
            return [Term("buffers", "DeepSpeed's reduce bucket", f"{bucket:,} x {each} bytes", bucket * each)]
        return []

    def _gathered_quantized_layers(self) -> Term:
        """FSDP gathers the 4-bit numbers as they are stored; a layer's other weights in the arithmetic's format."""
        number, a = QUANTIZED_NUMBER_BYTES[self.job.quantization], self.job.arithmetic_bytes
        layers = []
        for stack, _ in self.stacks:
            quantized = sum(linear.inputs * linear.outputs for linear in stack.linears)
            rest = stack.layer_parameters - quantized + _trained_of_layer(stack, self.job)
            layers.append((quantized * number + rest * a, f"({quantized:,} x {number:g} + {rest:,} x {a}) bytes"))
        size, formula = max(layers)
        return Term("buffers", "gathered layers", f"{FSDP_GATHERED_LAYERS} x {formula}", FSDP_GATHERED_LAYERS * size)

    # -- gradients, as the backward pass goes on

    def gradients(self) -> list[Term]:
        """All of them; with DDP they are in its buckets, all the time."""
        return [] if self.job.parallel == "ddp" else self._gradients(self.trained, "gradients")

    def gradients_before_backward(self) -> list[Term]:
        """Those that earlier micro-batches left; none where no backward pass comes before a forward pass."""
        return self.gradients() if self._adds_to_gradients else []

    @property
    def _adds_to_gradients(self) -> bool:
        """Whether a backward pass finds gradients: those of earlier micro-batches, or with DDP its buckets."""
        repeated = self.job.accumulation_steps > 1 or self.job.micro_batches > self.share.in_flight
        return repeated or self.job.parallel == "ddp"

    def gradients_of_layer_end(self, last: bool) -> list[Term]:
        """When the last layer's backward pass is under way, and when the first one's is."""
        if self._adds_to_gradients:
            return self.gradients()
        head = self._head_gradients()
        if last:
            of_layer = _trained_of_layer(self.stacks[-1][0], self.job)
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
        if job.offload and job.parallel in ("fsdp", "zero3"):
            return []
        n = job.shards if job.parallel in ("fsdp", "zero2", "zero3") else 1
        shared = f" / {n} ranks" if n > 1 else ""
        bytes_each = job.trained_bytes
        return [Term("gradients", what, f"{count:,} x {bytes_each} bytes{shared}", count * bytes_each / n)]

    # -- activations that wait for the backward pass

    def layers_saved(self, one_left: bool = False) -> list[Term]:
        """What all layers keep, for every micro-batch in flight; `one_left`: of one of these the first layer alone."""
        terms = self._layers_kept(self.share.in_flight - one_left, self.stacks)
        if one_left and not self._input_is_in_buffer:
            terms += _times(self._layer_kept(self.stacks[0][0]), 1, "1 x ")
        return terms

    def layers_waiting(self) -> list[Term]:
        """What all layers keep for the micro-batches in flight but one."""
        return self._layers_kept(self.share.in_flight - 1, self.stacks)

    def _layers_kept(self, micro_batches: int, stacks: list[tuple[Stack, int]]) -> list[Term]:
        terms = []
        for number, (stack, layers) in enumerate(stacks if micro_batches else []):
            times = (layers - (number == 0 and self._input_is_in_buffer)) * micro_batches
            name = f"{times} x " + ("" if len(self.architecture.stacks) == 1 else f"{stack.kind}: ")
            terms += _times(self._layer_kept(stack), times, name)
        return terms

    @property
    def _input_is_in_buffer(self) -> bool:
        """With pp the first layer's input, which checkpointing keeps, is where it was received."""
        return self.job.gradient_checkpointing and self.job.parallel == "pp" and not self.share.has_embeddings

    def _layer_kept(self, stack: Stack) -> list[Term]:
        return self.layer_inputs(stack) if self.job.gradient_checkpointing else self.layer_saved(stack)

    def layer_inputs(self, stack: Stack) -> list[Term]:
        """With gradient checkpointing a layer keeps only its input."""
        x, t, h = self.hidden_bytes, self.batch.tokens_in(stack), self.architecture.hidden
        return [_activations("layer input", "T H x", t * h * x)]

    def layer_saved(self, stack: Stack) -> list[Term]:
        """What autograd keeps of one layer's forward pass."""
        terms = [*self._norms(stack), *self._linear_inputs(stack), *self._attention(stack), *self._mlp(stack)]
        return [*terms, *self._dropouts(stack), *self._adapters(stack), *self._weight_copies(stack.linears)]

    def _norms(self, stack: Stack) -> list[Term]:
        architecture, t, x = self.architecture, self.batch.tokens_in(stack), self.hidden_bytes
        count = 3 if stack.kind == "cross-decoder" else 2
        if not architecture.is_llama_like:
            return [_activations("inputs of the layer norms", f"{count} T H 4", count * t * architecture.hidden * 4)]
        terms = [_activations("inputs of the norms in fp32", f"{count} T H 4", count * t * architecture.hidden * 4)]
        if self.job.trains_all:
            terms.append(
                _activations(
                    "normalized, for the norms' weights", f"{count} T H x", count * t * architecture.hidden * x
                )
            )
        if architecture.model_type == "qwen3":
            wide = (architecture.heads + architecture.kv_heads) * architecture.head_dim
            each = 4 + (x if self.job.trains_all else 0)
            terms.append(_activations("norms of queries and keys", "T (Q + K) (4 + x)", t * wide * each))
        return terms

    def _linear_inputs(self, stack: Stack) -> list[Term]:
        """Inputs that the projections keep for their weights' gradients, but attention's and the MLP's own results."""
        job, h, a = self.job, self.architecture.hidden, self.job.arithmetic_bytes
        trained = [linear for linear in stack.linears if linear.name not in _READS_RESULT and job.trains(linear)]
        if not trained:
            return []
        norms = {_NORM_OF[linear.name] for linear in trained}
        of_encoder = sum(linear.reads_encoder for linear in trained)
        if self._casts_inputs:  # of a shorter format than the hidden states each projection has a copy of its own
            copies = len(trained) - of_encoder
        else:  # the encoder's output is there for all layers
            copies, of_encoder = len(norms) + (stack.kind == "cross-decoder" and "attention" in norms), 0
        size = (copies * self.batch.tokens_in(stack) + of_encoder * self.batch.tokens) * h * a
        formula = f"{copies} T H a" + (f" + {of_encoder} TE H a" if of_encoder else "")
        return [_activations("inputs of the projections", formula, size)]

    @property
    def _casts_inputs(self) -> bool:
        """Autocast makes a copy of each projection's input."""
        job = self.job
        return job.autocasts or (job.precision != "fp32" and not self.architecture.is_llama_like)

    def _attention(self, stack: Stack) -> list[Term]:
        if self._keeps_scores:
            return self._attention_on_cpu(stack)
        terms: list[Term] = []
        for number, (asking, asked) in enumerate(self.batch.attentions_in(stack)):
            terms += _times(self._one_attention(asking, asked), 1, "cross attention: " if number else "")
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
            _activations("queries, keys, values", f"(T Q + {te} {in_words}) a", (t * q + other_t * keys) * a),
            _activations("result of attention", "T Q a", t * q * a),
        ]
        scores = rows * architecture.heads * asking * asked
        if eager:
            each = 4 + (a if a < 4 else 0)
            terms.append(_activations("attention scores", f"B heads S {s} {each}", scores * each))
            if architecture.dropout:
                extra = (4 if job.cpu_operations else 1) + (4 if a == 4 else 0)
                terms.append(_activations("dropout of the scores", f"B heads S {s} {extra}", scores * extra))
        else:
            terms.append(_activations("attention's normalizers in fp32", "T heads 4", t * architecture.heads * 4))
            if masked:
                terms.append(_activations("mask in the arithmetic's format", f"B S {s} a", rows * asking * asked * a))
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
            _activations("queries, keys, values in fp32", "T 3 Q 4", t * 3 * q * 4),
            _activations("softmax, its dropout's mask and result, in fp32", "B heads S S 12", scores * 12),
        ]
        if any(job.trains(linear) or job.adapts(linear) for linear in stack.linears if linear.name in _READS_ATTENTION):
            terms.append(_activations("result of attention", "T Q a", t * q * a))
        return terms

    def _mlp(self, stack: Stack) -> list[Term]:
        architecture, job, t = self.architecture, self.job, self.batch.tokens_in(stack)
        keeps_result = any(job.trains(linear) for linear in stack.linears if linear.name in _READS_MLP)
        if architecture.is_llama_like:
            count, what = 3 + keeps_result, "gate, up, silu" + (" and their product" if keeps_result else "")
        else:
            count, what = 1 + keeps_result, "MLP before" + (" and after" if keeps_result else "") + " its activation"
        size = count * t * architecture.intermediate * job.arithmetic_bytes
        return [_activations(what, f"{count} T I a", size)]

    def _dropouts(self, stack: Stack) -> list[Term]:
        if not self.architecture.dropout:
            return []
        count, each = 3 if stack.kind == "cross-decoder" else 2, ""
        size = count * self.batch.tokens_in(stack) * self.architecture.hidden
        if self.job.cpu_operations:
            size, each = size * self.job.arithmetic_bytes, " a"
        return [_activations("dropout masks", f"{count} T H{each}", size)]

    def _adapters(self, stack: Stack) -> list[Term]:
        job, batch, a = self.job, self.batch, self.job.arithmetic_bytes
        adapted = [linear for linear in stack.linears if job.adapts(linear)]
        if not adapted:
            return []
        own_copies = job.lora_dropout > 0 or job.precision != "fp32" or job.technique == "qlora"
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
        terms = [_activations("inputs of the adapters", f"({formula}) {each}", count * each)]
        if job.lora_dropout:
            bytes_each = 4 if job.cpu_operations else 1
            count, formula = numbers((linear, linear.inputs * bytes_each) for linear in adapted)
            terms.append(_activations("dropout masks of the adapters", formula, count))
        count, formula = numbers((linear, job.lora_rank) for linear in adapted)
        return [*terms, _activations("between the adapters' matrices", f"({formula}) a", count * a)]

    def _weight_copies(self, linears: Iterable[Linear]) -> list[Term]:
        count = sum(linear.inputs * linear.outputs for linear in linears)
        if not count or not self.job.autocasts or self.job.technique == "qlora":
            return []
        a = self.job.arithmetic_bytes
        return [Term("weights", "autocast's copies of the weights", f"{count:,} x {a} bytes", count * a)]

    def ends_saved(self) -> list[Term]:
        """What embeddings, final norm and head keep."""
        architecture, job, t, h = self.architecture, self.job, self.batch.tokens, self.architecture.hidden
        x, a, full, terms = self.hidden_bytes, job.arithmetic_bytes, job.trains_all, []
        if architecture.classes:
            terms += self._classifier_ends_saved()
        elif self.share.has_head:
            if architecture.is_llama_like:
                each = 4 + (x if full else 0)
                terms.append(_activations("final norm", f"T H {each}", t * h * each))
            elif architecture.stacks[0].kind == architecture.stacks[-1].kind:
                terms.append(_activations("head before its matrix", "T H (5 + 3 a)", t * h * (5 + 3 * a)))
            if full:
                positions = self.positions
                terms.append(_activations("input of the head", "P H a", positions * h * a))
        if self.share.has_embeddings and not architecture.is_llama_like and not architecture.classes:
            embedded = sum(self.batch.tokens_in(stack) for stack, _ in self.stacks)
            formula = "T H (x + 5)" if len(self.stacks) == 1 else "(TE + T) H (x + 5)"
            terms.append(_activations("embeddings' norm and dropout", formula, embedded * h * (x + 5)))
        if self._is_encoder_decoder:
            terms.append(_activations("encoder's output", "TE H x", t * h * x))
        if job.parallel == "pp" and not self.share.has_head:
            terms.append(_activations("hidden state that was sent", "T H x", t * h * x))
        return terms

    def _classifier_ends_saved(self) -> list[Term]:
        """What a classifier's head keeps of one position per row, and the embeddings' norm where it is trained."""
        architecture, job, t, h = self.architecture, self.job, self.batch.tokens, self.architecture.hidden
        terms = []
        if self.share.has_embeddings and job.trains_all:
            each = 4 + (4 if job.cpu_operations else 1)
            terms.append(_activations("embeddings' norm and dropout", f"T H {each}", t * h * each))
        if self.share.has_head:
            is_pooled = architecture.model_type == "bert"  # RoBERTa drops out before its dense layer, too
            count, a = 3 if is_pooled else 5, job.arithmetic_bytes
            terms.append(_activations("head before its matrix", f"{count} P H a", count * self.positions * h * a))
            if is_pooled and not self._casts_inputs:
                terms.append(_activations("last hidden state, of which the pooler reads a part", "T H 4", t * h * 4))
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
        return _times(terms, times, f"{times} x, of waiting micro-batches: ")

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
        held = self.job.parallel == "pp" and self.share.has_head
        return self._logits("logits that the schedule still holds") if held else []

    def _logits(self, what: str) -> list[Term]:
        each = 4 if self.job.technique == "qlora" else self.job.arithmetic_bytes
        return [Term("logits", what, f"P V {each}", each * self.positions * self.architecture.vocab)]

    def loss_forward(self) -> list[Term]:
        """Logits in the arithmetic's format and in fp32, and log-probabilities; autocast's cache at its largest.

        With pp the loss comes when autocast's cache has gone, and never takes more than in its backward pass.
        """
        terms = []
        if self.share.has_head and self.job.parallel == "pp":
            terms += [*self._logits("logits"), *self._head_copy()]
        elif self.share.has_head:
            a, count = self.job.arithmetic_bytes, self.positions * self.architecture.vocab
            each = 8 if a == 4 else a + 8
            terms += [Term("logits", "logits and log-probabilities", f"P V {each}", each * count), *self._head_copy()]
        if self.job.gradient_checkpointing:  # which keeps copies of trained weights alone
            for stack, layers in self.stacks:
                trained = [linear for linear in stack.linears if self.job.trains(linear)]
                terms += _times(self._weight_copies(trained), layers, f"{layers} x ")
        return terms

    def _head_copy(self) -> list[Term]:
        architecture, job = self.architecture, self.job
        is_cast = job.autocasts or (job.technique == "qlora" and job.precision != "fp32" and job.shards == 1)
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
        passing = [_activations("gradients within the MLP", f"{count} T I a", size)]
        if job.gradient_checkpointing:  # the forward pass comes again
            passing = max(passing, self.adapter_casts(stack), key=lambda terms: sum(term.count for term in terms))
        terms = [*passing, *self.hidden_states(stack)]
        if job.attention == "eager":
            most = max(asking * asked for asking, asked in self.batch.attentions_in(stack))
            scores = self.batch.rows * architecture.heads * most
            terms.append(_activations("gradients of the attention scores", "B heads S S 4", 4 * scores))
        if job.gradient_checkpointing:
            terms = [*_times(self.layer_saved(stack), 1, "computed again: "), *terms]
        return terms

    def hidden_states(self, stack: Stack) -> list[Term]:
        """What goes from layer to layer, or the gradients of it."""
        size = 2 * self.batch.tokens_in(stack) * self.architecture.hidden * self.hidden_bytes
        return [_activations("hidden states, or their gradients", "2 T H x", size)]

    def adapter_casts(self, stack: Stack) -> list[Term]:
        """What is alive only in the forward pass: an adapter's input in its own fp32, before and after dropout."""
        job, t, a = self.job, self.batch.tokens_in(stack), self.job.arithmetic_bytes
        widest = max((linear.inputs for linear in stack.linears if job.adapts(linear)), default=0)
        if not widest or job.plain_loop:
            return []
        each = 0 if a == 4 else 8 if job.lora_dropout else 4
        terms = [_activations("result within the MLP", "T I a", t * self.architecture.intermediate * a)]
        return [*terms, _activations("casts of the widest adapter's input", f"T {widest:,} {each}", t * widest * each)]

    def embeddings_backward(self) -> list[Term]:
        """The embeddings' gradient, where another one waits beside it: the head's, or an earlier micro-batch's."""
        if not self.job.trains_all or not self.share.has_embeddings:
            return []
        size = self.architecture.embedding_parameters * self.job.trained_bytes
        if self.architecture.tied and self.share.has_head:
            return [_activations("gradient of the tied embeddings, and its sum with the head's", "2 V H w", 2 * size)]
        if self._adds_to_gradients:
            return [_activations("gradient of the embeddings, before it is added", "V H w", size)]
        return []

    def tied_gradient_received(self) -> list[Term]:
        """With pp first and last stage each have a copy of tied embeddings, and send each other its gradient."""
        has_copy = self.share.has_embeddings != self.share.has_head
        if self.job.parallel != "pp" or not self.job.trains_all or not self.architecture.tied or not has_copy:
            return []
        size = self.architecture.embedding_parameters * self.job.trained_bytes
        return [Term("buffers", "the other end's gradient of the tied embeddings", "V H w", size)]

    def optimizer_step(self) -> list[Term]:
        """Optimizers that are not fused work on lists: one more state's worth."""
        if self.job.optimizer != "adamw_torch" or self.job.offload:
            return []
        size = self.trained * self.job.trained_bytes / self.job.shards
        return [Term("optimizer", "square roots of the variances, all at once", "one state", size)]


_READS_ATTENTION = ("o_proj", "out_proj", "attention.output.dense")
_READS_MLP = ("down_proj", "output.dense", "fc2")
_READS_RESULT = (*_READS_ATTENTION, *_READS_MLP)
"""Projections whose input is attention's or the MLP's own result, and counted there."""
_NORM_OF = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "query", "key", "value"), "attention"),
    **dict.fromkeys(("gate_proj", "up_proj", "intermediate.dense", "fc1"), "mlp"),
}
"""Projections that read the same norm."""


def _activations(what: str, formula: str, count: float) -> Term:
    return Term("activations", what, formula, count)


def _times(terms: list[Term], times: int, prefix: str) -> list[Term]:
    return [replace(term, what=prefix + term.what, count=term.count * times) for term in terms]
