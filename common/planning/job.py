"""What is to be planned: the batch of a step, and the job that trains on it."""

from dataclasses import dataclass, replace
from typing import Literal

from common.base.errors import BadInputError, NotPlannedError
from common.base.specs import TASKS, HasSpecs, Task
from common.planning.architectures import Architecture, Linear, Stack

Precision = Literal["bf16", "bf16-mixed", "fp16-mixed", "fp32"]
Quantization = Literal["nf4", "nf4-double"]
Kernels = Literal["plain", "fused", "compiled"]

# bytes of the optimizer's states per trained weight (bitsandbytes/optim: blocksize 256)
OPTIMIZER_BYTES = {
    "adamw_torch": None,  # momentum and variance, each as wide as the weight
    "adamw_torch_fused": None,
    "adamw_bnb_8bit": 2 + 2 * 4 / 256,  # one byte each, and an fp32 scale per block of 256
    "adamw_8bit": 2 + 2 * 4 / 256,
    "paged_adamw_8bit": 2 + 2 * 4 / 256,
    "paged_adamw_32bit": 8,
    "sgd": 0,
}
LOGITS_AT_ONCE = 2**25
"""Where a decoder's loss is computed in chunks of tokens: logits of a chunk, at most (128 MiB in fp32)."""
# target modules: every linear layer but the head
ALL_LINEAR = ("all-linear",)
# bytes per quantized weight (Dettmers et al. 2023, "QLoRA", sections 2 and 3)
QUANTIZED_BYTES = {
    "nf4": 4 / 8 + 4 / 64,  # an fp32 scale per block of 64
    "nf4-double": 4 / 8 + 1 / 64 + 4 / (64 * 256),  # 8-bit scales, and an fp32 scale per 256 of them
}
# of these, the numbers themselves: the rest are their blocks' scales
QUANTIZED_NUMBER_BYTES = {"nf4": 4 / 8, "nf4-double": 4 / 8}
# of each quantized matrix, in fp32: the levels of its numbers, and of its scales with their mean
LEVEL_TABLE_BYTES = {"nf4": 16 * 4, "nf4-double": 16 * 4 + 256 * 4 + 4}
WHY_NOT_QUANTIZED_FULL = (
    "Full fine-tuning of quantized weights is impossible, and would save little: a weight takes 0.5 bytes in 4 bits "
    "instead of 2, but its gradient 2, Adam's momentum 4 and variance 4 and the fp32 copy 4 stay: 14.5 instead of 16 "
    "bytes. Train adapters on the quantized weights instead: pass --technique qlora."
)


@dataclass(frozen=True)
class BatchShape:
    """The largest batch of a step, on one rank.

    Attributes:
        length: Tokens of a row; of rows that lie end to end the mean.
        labelled: Positions at which some row has a token to be learnt: logits are computed for these.
        padded: Rows differ in length, so that attention needs a mask.
        classes: With classification: labels that a row may have; 0 = tokens are to be predicted.
        target_length: With encoder-decoders: tokens of a row's summary, on which the decoder works; 0 = as many as of
            the row.
        tiles: With pictures: squares that a row's picture is cut into, the whole one included, each of which the
            vision tower reads; their tokens are among those of `length`.
        task: What a run with such rows learns, by its name in `TASKS`.
    """

    rows: int
    length: int
    labelled: int
    padded: bool = False
    classes: int = 0
    target_length: int = 0
    tiles: int = 0
    task: str = "chat"

    @property
    def goal(self) -> Task:
        """The task's row in the table."""
        return TASKS[self.task]

    @property
    def sequences(self) -> int:
        """What the model reads at once: rows, of pairs of answers each twice."""
        return self.rows * self.goal.sequences_per_row

    @property
    def tokens(self) -> int:
        """Of all rows, padding included; of an encoder-decoder's those that the encoder reads."""
        return self.sequences * self.length

    def padded_to(self, multiple: int) -> "BatchShape":
        """Return the batch with rows (and summaries) padded to a multiple of so many tokens; 0 = as it is."""
        if not multiple:
            return self
        length, target = (-(-tokens // multiple) * multiple for tokens in (self.length, self.target_length))
        labelled = target or self.labelled  # of messages the padding has no label
        padded = self.padded or length > self.length
        return replace(self, length=length, labelled=labelled, padded=padded, target_length=target)

    def length_in(self, stack: Stack) -> int:
        """Return how many tokens of a row the stack's layers work on."""
        return self.target_length or self.length if stack.kind == "cross-decoder" else self.length

    def tokens_in(self, stack: Stack) -> int:
        """Return the tokens of all rows that the stack's layers work on."""
        return self.sequences * self.length_in(stack)

    def tokens_into(self, linear: Linear, stack: Stack) -> int:
        """Return the tokens of all rows that a projection of the stack reads."""
        return self.tokens if linear.reads_encoder else self.tokens_in(stack)

    def attentions_in(self, stack: Stack) -> list[tuple[int, int]]:
        """Return, for each attention of a layer, how many tokens of a row attend, and to how many."""
        length = self.length_in(stack)
        return [(length, length), (length, self.length)] if stack.kind == "cross-decoder" else [(length, length)]


@dataclass(frozen=True)
class EvaluationShape:
    """What validation, and the evaluations before and after training, work on at once on one rank.

    Attributes:
        rows: Of a batch, for each rank that takes part: ranks that share a model that answers take theirs together.
        validation_rows: Of all ranks; 0 = no fewer than a batch has.
        test_rows: The same of the test.
        length: Tokens of a validation row.
        compared_length: Tokens of the longest of the rows whose logits are compared after saving; 0 = `length`.
        labelled: Tokens of a validation row that have labels.
        prompt_length: Tokens that an answer follows, or that a label or a summary is found for.
        new_tokens: Tokens that are generated at most; 0 = none.
        beams: With summarization.
        judged: The base compares the answers with the references, which are as long as the labels.
        has_independent_judge: So does a sentence encoder.
    """

    rows: int
    length: int
    labelled: int
    prompt_length: int
    new_tokens: int = 0
    beams: int = 1
    judged: bool = False
    has_independent_judge: bool = False
    validation_rows: int = 0
    test_rows: int = 0
    compared_length: int = 0

    @property
    def validated(self) -> int:
        """Rows that are validated at once."""
        return min(self.rows, self.validation_rows or self.rows)

    def answered(self, stages: int, groups: int) -> int:
        """Return the rows that each of so many groups answers at once, whose ranks hold a model in so many stages."""
        rows = self.rows * stages
        return min(rows, -(-self.test_rows // groups) or rows)


@dataclass(frozen=True)
class Loop:
    """How a training loop computes; by default as this repository's does. Published peaks are of other loops, too.

    Attributes:
        logit_bytes: Bytes per logit at the highest moment of a loss that has a decoder's logits all at once (16 bits,
            fp32, shifted copies, log-probabilities, gradients, as the loop's libraries hold them); 0: they come in
            chunks of tokens.
        autocasts: Under autocast, as Transformers' Trainer computes with `bf16` or `fp16`; else adapters compute in
            their own format.
        short_adapters: Adapters are in the base's 16 bits; PEFT makes them fp32.
        casts_adapter_inputs: Each adapter's input is cast to the adapter's fp32, as PEFT does it, and by autocast back.
        short_ends: Embeddings, norms and head of a quantized base keep the dtype in which they are loaded; PEFT's
            `prepare_model_for_kbit_training` makes them fp32.
        first_fsdp: FSDP of the first version (`FullyShardedDataParallel`), with reentrant checkpointing.
    """

    logit_bytes: int = 0
    autocasts: bool = True
    short_adapters: bool = False
    casts_adapter_inputs: bool = False
    short_ends: bool = True
    first_fsdp: bool = False


@dataclass(frozen=True)
class Job(HasSpecs):
    """What is to be trained, and how; of the model only what its architecture does not say.

    Attributes:
        technique: By its name in `TECHNIQUES`.
        parallel: By its name in `PARALLELISMS`.
        batch: Of one data-parallel rank and step, before accumulation.
        dp_replicate_size: With fsdp: copies of the model, each sharded by an equal group of the devices.
        quantization: Of the frozen weights, with qlora.
        target_modules: Names of the linear layers that get adapters or, with full, are trained; empty = all but the
            head, or with full every weight of the model.
        kernels: What computes besides the matrix products: PyTorch's kernels, hand-written ones, or torch.compile's.
        micro_batches: With pp: parts that the batch is cut into.
        schedule: With pp: the order of the micro-batches' passes.
        loop: How the step computes.
        offload: Optimizer states (with fsdp and zero3 weights and gradients, too) wait in the host's memory.
        cpu_operations: Dropout as PyTorch does it on a CPU: masks are numbers, and attention with dropout keeps its
            scores. Of pairs of answers the head reads all positions, and works beside its tile.
        evaluation: What the phases beside training work on; None: training alone is planned.
        trains_tower: The vision tower of a model that sees is trained in full, with its connector; else it is frozen.
        sums_gradients_after: A plain loop sums them after the backward pass, without DDP.
        draws_weights: They start at random, and come module by module; else each rank reads its part of files.

    Raises:
        BadInputError: settings contradict each other.
    """

    technique: str
    parallel: str
    batch: BatchShape
    devices: int = 1
    dp_replicate_size: int = 1
    precision: Precision = "bf16"
    quantization: Quantization = "nf4"
    optimizer: str = "adamw_torch_fused"
    attention: Literal["eager", "sdpa", "flash"] = "sdpa"
    kernels: Kernels = "plain"
    gradient_checkpointing: bool = False
    lora_rank: int = 8
    target_modules: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    micro_batches: int = 1
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    accumulation_steps: int = 1
    loop: Loop = Loop()
    offload: bool = False
    cpu_operations: bool = False
    evaluation: EvaluationShape | None = None
    trains_tower: bool = False
    sums_gradients_after: bool = False
    draws_weights: bool = False

    def __post_init__(self) -> None:
        rows, parts, parallelism, parallel = self.batch.rows, self.micro_batches, self.parallelism, self.parallel
        if self.optimizer not in OPTIMIZER_BYTES:
            known = ", ".join(OPTIMIZER_BYTES)
            raise NotPlannedError(f"The optimizer {self.optimizer!r} is not known to the planner: pass one of {known}.")
        refusals = (
            (
                parallelism.is_single and self.devices != 1,
                f"--parallel single uses one GPU, not {self.devices}: pass --gpus 1, or --parallel ddp.",
            ),
            (
                not parallelism.is_single and self.devices < 2,
                f"--parallel {parallel} needs at least two GPUs, not {self.devices}: pass --gpus 2.",
            ),
            (
                self.dp_replicate_size > 1 and not parallelism.uses_fsdp,
                f"--dp-replicate-size is for --parallel fsdp, not {parallel}: leave it out.",
            ),
            (self.unshardable(), self.unshardable()),
            (
                not parallelism.pipelines and parts != 1,
                f"--micro-batches {parts} is for --parallel pp; else lower --batch-size, and accumulate.",
            ),
            (
                rows % parts,
                f"--batch-size {rows} cannot be cut into {parts} equal micro-batches: "
                f"pass --batch-size {-(-rows // parts) * parts}.",
            ),
            (
                self.method.quantizes and not parallelism.takes_4_bits,
                f"--technique {self.technique} with --parallel {parallel}: "
                f"{parallelism.sharded_by or 'tensor parallelism'} does not divide weights in 4 bits: "
                "pass --parallel fsdp or ddp, or --technique lora.",
            ),
            (
                self.offload and (parallelism.splits_layers or parallelism.splits_matrices),
                f"--offload with --parallel {parallel} is not planned: pass fsdp or zero3.",
            ),
        )
        for refused, complaint in refusals:
            if refused:
                raise BadInputError(complaint)

    @property
    def reads_reference(self) -> bool:
        """Whether each step also reads its rows with the adapters switched off, as the reference."""
        return self.batch.goal.compares and self.method.has_adapters

    @property
    def head_positions(self) -> int:
        """Positions of a sequence of the batch that the head reads."""
        return self.head_positions_of(self.batch.length, self.batch.labelled)

    def head_positions_of(self, length: int, labelled: int) -> int:
        """Return the positions of a sequence that the head reads: those with labels, and of pairs on a CPU all.

        (trl/trainer/utils.py: `compact`.)
        """
        reads_all = self.batch.goal.compares and self.cpu_operations
        return length - 1 if reads_all else labelled

    @property
    def has_buckets(self) -> bool:
        """Whether DDP keeps all gradients in its buckets."""
        return self.parallelism.replicates and not self.sums_gradients_after

    @property
    def arithmetic_bytes(self) -> int:
        """`a`: bytes of a number in matrix products."""
        return 4 if self.precision == "fp32" else 2

    @property
    def is_mixed(self) -> bool:
        """Arithmetic in a shorter format than fp32 weights; not LoRA in fp16, as only the adapters are updated."""
        freezes_16_bits = self.method.has_plain_adapters and self.precision == "fp16-mixed"
        return self.precision.endswith("-mixed") and not freezes_16_bits

    @property
    def autocasts(self) -> bool:
        """Autocast copies weights and inputs to the shorter format; sharded weights are gathered in it already."""
        return self.is_mixed and not self.parallelism.shards

    @property
    def weight_bytes(self) -> int:
        """`w`: bytes of a weight that is not quantized; DeepSpeed keeps the fp32 ones in its optimizer."""
        return 4 if self.precision == "fp32" or (self.is_mixed and not self.parallelism.uses_deepspeed) else 2

    @property
    def whole_model_bytes(self) -> int:
        """Bytes of a weight where the whole model answers beside training: without an optimizer it needs no fp32 ones.

        (`common.models.answering.answering_run`; where a device trains the whole model, it answers as it is.)
        """
        return self.arithmetic_bytes if self.parallelism.divides_tensors else self.weight_bytes

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained weight; PEFT keeps adapters in fp32, but DeepSpeed makes all of a module bf16."""
        shortened = self.loop.short_adapters or (self.parallelism.uses_deepspeed and self.precision != "fp32")
        return self.weight_bytes if shortened or not self.method.has_adapters else 4

    @property
    def end_bytes(self) -> int:
        """Bytes of a weight of a quantized base that is not quantized: of embeddings, norms and head."""
        return self.weight_bytes if self.loop.short_ends else 4

    def in_flight(self, stage: int) -> int:
        """Return the micro-batches of which a stage, counted from 0, holds activations at once; 1 without a pipeline.

        GPipe starts no backward pass before the last forward pass; 1F1B starts as soon as the last stage sends the
        first one back.
        """
        waiting = self.devices - stage if self.schedule == "1f1b" else self.micro_batches
        return min(self.micro_batches, waiting)

    def keeps_first_gradients(self, rank: int) -> bool:
        """Return whether a rank has a buffer for its part of the gradients as soon as the backward pass begins.

        The last ranks keep the part of the last layers, whose gradients come first. The first half of the ranks have
        theirs when half of the activations are gone, which outweighs it. (Of ZeRO's stage 2 alone:
        deepspeed/runtime/zero/stage_1_and_2.py, `grads_in_partition`.)
        """
        sharing = self.parallelism
        is_stage_2 = sharing.uses_deepspeed and "gradients" in sharing.shards and not sharing.shards_weights
        return is_stage_2 and not self.offload and 2 * (rank + 1) > self.devices

    def adapts(self, linear: Linear) -> bool:
        """Return whether this projection gets an adapter."""
        return self.method.has_adapters and self._is_target(linear)

    @property
    def trains_all(self) -> bool:
        """Every weight is trained: embeddings, norms and head, too."""
        return not self.method.has_adapters and not self.target_modules

    def trains(self, linear: Linear) -> bool:
        """Return whether this projection's own weights are trained."""
        return not self.method.has_adapters and self._is_target(linear)

    def _is_target(self, linear: Linear) -> bool:
        return self.target_modules in ((), ALL_LINEAR) or linear.name in self.target_modules

    def check_targets(self, architecture: Architecture) -> None:
        """Refuse names that the model does not have.

        Raises:
            NotPlannedError: with the names that it has.
        """
        names = dict.fromkeys(linear.name for stack in architecture.stacks for linear in stack.linears)
        for target in () if self.target_modules == ALL_LINEAR else self.target_modules:
            if target not in names:
                raise NotPlannedError(
                    f"{architecture.name} has no linear layer {target!r}: pass --target-modules all-linear, or some of "
                    f"{','.join(names)}."
                )
