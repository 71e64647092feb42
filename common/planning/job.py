"""What is to be planned: the batch of a step, the job that trains on it, and what a run asks of both."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from common.base.errors import NotPlannedError
from common.base.run_config import RunConfig, is_expression
from common.base.specs import TASKS, HasSpecs, Parallelism, Task, Technique, equal_groups
from common.planning.architectures import Architecture, Block, Linear, Stack, StackKind, read_architecture
from common.planning.model_configs import usual_tiles

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
OTHER_TOKENS = 96  # of a text of assets/general, at most
LOGITS_AT_ONCE = 2**25  # of a decoder's loss in chunks of tokens: a chunk's, at most (128 MiB in fp32)
ALL_LINEAR = ("all-linear",)  # every linear layer but the head
# bytes per quantized weight (Dettmers et al. 2023, "QLoRA", sections 2 and 3)
QUANTIZED_BYTES = {
    "nf4": 4 / 8 + 4 / 64,  # an fp32 scale per block of 64
    "nf4-double": 4 / 8 + 1 / 64 + 4 / (64 * 256),  # 8-bit scales, and an fp32 scale per 256 of them
}
# of these the numbers alone, without their blocks' scales
QUANTIZED_NUMBER_BYTES = {"nf4": 4 / 8, "nf4-double": 4 / 8}
# of each quantized matrix, in fp32: the levels of its numbers, and of its scales with their mean
LEVEL_TABLE_BYTES = {"nf4": 16 * 4, "nf4-double": 16 * 4 + 256 * 4 + 4}


@dataclass(frozen=True)
class BatchShape:
    """The largest batch of a step, on one rank."""

    rows: int
    length: int  # tokens of a row; of rows packed without padding the mean
    labelled: int  # positions at which some row has a token to be learnt: logits are computed for these
    padded: bool = False  # rows differ in length, so that attention needs a mask
    classes: int = 0  # labels of a classifier; 0 = tokens are to be predicted
    target_length: int = 0  # of an encoder-decoder: tokens of a row's summary; 0 = as of the row
    tiles: int = 0  # that a row's picture is cut into, with the whole one; their tokens are part of `length`
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
        """Of all rows, padding included; of an encoder-decoder those of the encoder."""
        return self.sequences * self.length

    @property
    def lengths(self) -> dict[str, int]:
        """The settings of a run that has such rows; with rewards a row is a prompt and its answer."""
        answer = self.labelled if self.goal.rewards else 0
        return {"max_length": self.length - answer, **({"max_new_tokens": answer} if answer else {})}

    def part_of(self, ranks: int) -> "BatchShape":
        """Return what each of so many ranks has of the rows, laid end to end; of labels the most that any may have."""
        if ranks == 1:
            return self
        tokens = -(-self.tokens // ranks)
        whole, rest = divmod(tokens, self.length)
        labelled = whole * self.labelled + min(rest, self.labelled)
        return replace(self, rows=1, length=tokens, labelled=labelled, padded=False)

    def padded_to(self, multiple: int) -> "BatchShape":
        """Return the batch with rows (and summaries) padded to a multiple of so many tokens; 0 = as it is."""
        if not multiple:
            return self
        length, target = (-(-tokens // multiple) * multiple for tokens in (self.length, self.target_length))
        labelled = target or self.labelled  # of messages the padding has no label
        return replace(
            self, length=length, labelled=labelled, padded=self.padded or length > self.length, target_length=target
        )

    def length_in(self, stack: Stack) -> int:
        """Return how many tokens of a row the stack's layers work on."""
        return self.target_length or self.length if stack.kind == StackKind.CROSS_DECODER else self.length

    def tokens_in(self, stack: Stack) -> int:
        """Return the tokens of all rows that the stack's layers work on."""
        return self.sequences * self.length_in(stack)

    def tokens_into(self, linear: Linear, stack: Stack) -> int:
        """Return the tokens of all rows that a projection of the stack reads."""
        return self.tokens if linear.reads_encoder else self.tokens_in(stack)

    def attentions_in(self, stack: Stack) -> list[tuple[int, int]]:
        """Return, for each attention of a layer, how many tokens of a row attend, and to how many."""
        length = self.length_in(stack)
        across = [(length, self.length)] if stack.kind == StackKind.CROSS_DECODER else []
        return [(length, length), *across]


@dataclass(frozen=True)
class EvaluationShape:
    """What validation, and the evaluations before and after training, work on at once on one rank."""

    rows: int  # of each rank that takes part: ranks that share a model that answers take theirs together
    length: int  # tokens of a validation row
    labelled: int  # of these, those with labels
    prompt_length: int  # tokens that an answer, a label or a summary is found for
    new_tokens: int = 0  # that are generated at most
    beams: int = 1
    judged: bool = False  # the base compares the answers with the references, which are as long as the labels
    has_independent_judge: bool = False  # so does a sentence encoder
    validation_rows: int = 0  # of all ranks; 0 = no fewer than a batch has
    test_rows: int = 0  # the same of the test
    other_tokens: int = 0  # of a text that tells what was forgotten, one at a time; 0 = none does
    compared_length: int = 0  # tokens of the longest row whose logits are compared after saving; 0 = `length`
    reference_length: int = 0  # tokens of the longest reference that judges read; 0 = `labelled`

    @property
    def validated(self) -> int:
        """Rows that are validated at once."""
        return min(self.rows, self.validation_rows or self.rows)

    @property
    def judged_length(self) -> int:
        """Tokens of the longest reference."""
        return self.reference_length or self.labelled

    def answered(self, shares: int, groups: int) -> int:
        """Return the rows that each of so many groups answers at once, of so many `shares_answered` ranks' rows."""
        rows = self.rows * shares
        return min(rows, -(-self.test_rows // groups) or rows)


@dataclass(frozen=True)
class Job(HasSpecs):
    """What is to be trained, and how; of the model only what its architecture does not say.

    Raises:
        NotPlannedError: Settings contradict each other.
    """

    technique: str
    parallel: str
    batch: BatchShape  # of one data-parallel rank (or group, which shares it) and step, before accumulation
    devices: int = 1
    dp_replicate_size: int = 1  # with fsdp: copies of the model, each sharded by an equal group of the devices
    sp_size: int = 1  # devices that share the tokens of each row
    precision: Precision = "bf16"
    quantization: Quantization = "nf4"
    optimizer: str = "adamw_torch_fused"
    attention: Literal["eager", "sdpa", "flash"] = "sdpa"
    kernels: Kernels = "plain"
    gradient_checkpointing: bool = False
    tiled_mlp: bool = False  # an MLP computes tiles of tokens one after the other
    activation_offloading: bool = False  # inputs of checkpointed layers wait in the host's memory
    lora_rank: int = 8
    target_modules: tuple[str, ...] = ()  # to adapt or train; empty = all but the head, with full every weight
    lora_dropout: float = 0.0
    micro_batches: int = 1
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    accumulation_steps: int = 1
    offload: bool = False  # optimizer states (of fsdp and zero3 weights and gradients, too) wait in the host's memory
    # as PyTorch computes on a CPU: dropout's masks are numbers, attention with dropout keeps its scores, and of pairs
    # of answers the head reads all positions, and works beside its tile
    cpu_operations: bool = False
    evaluation: EvaluationShape | None = None  # what the other phases work on; None: training alone is planned
    trains_tower: bool = False  # in full, with its connector
    sums_gradients_after: bool = False  # by a plain loop, after the backward pass, without DDP
    draws_weights: bool = False  # at random, module by module; else each rank reads its part of files
    compares_with_base: bool = False  # the loss reads the model before training; with pairs of answers it always does

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_BYTES:
            known = ", ".join(OPTIMIZER_BYTES)
            raise NotPlannedError(f"The optimizer {self.optimizer!r} is not known to the planner: pass one of {known}.")
        for is_broken, complaint in _contradictions(self):
            if is_broken:
                raise NotPlannedError(complaint)

    @property
    def reads_reference(self) -> bool:
        """Whether each step also reads its rows with the adapters off, as the reference."""
        return (self.batch.goal.compares or self.compares_with_base) and self.method.has_adapters

    @property
    def offloads_layer_inputs(self) -> bool:
        """Whether what checkpointing keeps waits in the host's memory."""
        return self.activation_offloading and self.gradient_checkpointing

    @property
    def keeps_copy(self) -> bool:
        """Whether a copy of the model before training stays beside the one that is trained in full."""
        return self.compares_with_base and not self.method.has_adapters

    @property
    def own_batch(self) -> BatchShape:
        """What one rank has of the batch: all of it, or where ranks share the tokens of each row its part."""
        return self.batch.part_of(self.sp_size)

    @property
    def may_share_rows(self) -> bool:
        """Whether groups of ranks can share the tokens of each row."""
        return self.parallelism.shares_rows and self.batch.goal.learns_answers and self.attention == "sdpa"

    @property
    def head_positions(self) -> int:
        """Positions of a sequence of a rank's batch that the head reads."""
        return self.head_positions_of(self.own_batch.length, self.own_batch.labelled)

    def head_positions_of(self, length: int, labelled: int) -> int:
        """Return the positions of a sequence that the head reads (of pairs on a CPU all: TRL's `compact`)."""
        return length - 1 if self.batch.goal.reads_log_probs and self.cpu_operations else labelled

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
        """Whether arithmetic is in a shorter format than fp32 weights; in LoRA's fp16 only adapters are updated."""
        freezes_16_bits = self.method.has_plain_adapters and self.precision == "fp16-mixed"
        return self.precision.endswith("-mixed") and not freezes_16_bits

    @property
    def autocasts(self) -> bool:
        """Whether autocast copies weights to the shorter format; sharded ones are gathered in it already."""
        return self.is_mixed and not self.parallelism.shards

    @property
    def weight_bytes(self) -> int:
        """`w`: bytes of a weight that is not quantized; DeepSpeed keeps the fp32 ones in its optimizer."""
        return 4 if self.precision == "fp32" or (self.is_mixed and not self.parallelism.uses_deepspeed) else 2

    @property
    def whole_model_bytes(self) -> int:
        """Bytes of a weight where the whole model answers beside training (`common.models.answering.answering_run`)."""
        return self.arithmetic_bytes if self.parallelism.divides_tensors else self.weight_bytes

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained weight; PEFT keeps adapters in fp32, but DeepSpeed makes all of a module bf16."""
        shortened = self.parallelism.uses_deepspeed and self.precision != "fp32"
        return self.weight_bytes if shortened or not self.method.has_adapters else 4

    @property
    def end_bytes(self) -> int:
        """Bytes of a weight of a quantized base's embeddings, norms and head, which are not quantized."""
        return self.weight_bytes

    def in_flight(self, stage: int) -> int:
        """Return the micro-batches of which a stage, counted from 0, holds activations at once; 1 without a pipeline.

        GPipe starts no backward pass before the last forward pass; 1F1B as soon as the last stage sends one back.
        """
        waiting = self.devices - stage if self.schedule == "1f1b" else self.micro_batches
        return min(self.micro_batches, waiting)

    def keeps_first_gradients(self, rank: int) -> bool:
        """Return whether a rank has a buffer for its part of the gradients as soon as the backward pass begins.

        ZeRO's stage 2 (deepspeed/runtime/zero/stage_1_and_2.py, `grads_in_partition`): the last ranks keep the part of
        the last layers, whose gradients come first; the first half have theirs when half of the activations are gone.
        """
        sharing = self.parallelism
        is_stage_2 = sharing.uses_deepspeed and "gradients" in sharing.shards and not sharing.shards_weights
        return is_stage_2 and not self.offload and 2 * (rank + 1) > self.devices

    def adapts(self, linear: Linear) -> bool:
        """Return whether this projection gets an adapter."""
        return self.method.has_adapters and self._is_target(linear)

    def trains(self, linear: Linear) -> bool:
        """Return whether this projection's own weights are trained."""
        return not self.method.has_adapters and self._is_target(linear)

    def tiles(self, linear: Linear) -> bool:
        """Return whether this projection computes tiles of tokens, each again in the backward pass."""
        return self.tiled_mlp and linear.block == Block.MLP

    def _is_target(self, linear: Linear) -> bool:
        if linear.block == Block.ROUTER:
            return not self.target_modules
        return self.target_modules in ((), ALL_LINEAR) or linear.name in self.target_modules

    @property
    def trains_all(self) -> bool:
        """Whether every weight is trained: embeddings, norms and head, too."""
        return not self.method.has_adapters and not self.target_modules

    def trained_of_layer(self, stack: Stack) -> int:
        """Return how many weights of a layer get gradients, adapters included."""
        if self.trains_all:
            return stack.layer_parameters
        return sum(
            linear.parameters * self.trains(linear) + linear.lora_parameters(self.lora_rank) * self.adapts(linear)
            for linear in stack.linears
        )

    def state_bytes(self, weight_bytes: int) -> float:
        """Return the bytes of the optimizer's states per trained weight of so many bytes."""
        states = OPTIMIZER_BYTES[self.optimizer]
        return 2 * weight_bytes if states is None else states

    def alone(self, batch: BatchShape, **changes: Any) -> "Job":
        """Return the job with such a batch on one device, which holds the whole model, and with other changes."""
        on_one = dict.fromkeys(("devices", "dp_replicate_size", "sp_size", "micro_batches"), 1)
        return replace(self, batch=batch, parallel="single", offload=False, **on_one, **changes)

    def suited_to(self, architecture: Architecture) -> "Job":
        """Return the job as this model trains: a mixture's adapters on attention if no layers are named; gpt-oss eager.

        No other attention that a run may choose has gpt-oss's attention sinks.
        """
        is_open = self.method.has_adapters and self.target_modules in ((), ALL_LINEAR) and architecture.experts
        targets = architecture.names_to_adapt if is_open else self.target_modules
        is_eager = architecture.family.is_gpt_oss_like and self.attention == "sdpa"
        return replace(self, target_modules=targets, attention="eager" if is_eager else self.attention)

    def check_targets(self, architecture: Architecture) -> None:
        """Refuse target modules that the model does not have, with the names that it has; as `check_experts` does."""
        check_experts(architecture, self.method, self.target_modules)
        name, why_not = architecture.name, why_not_in_4_bits(self.parallelism, self.gradient_checkpointing)
        if architecture.experts and self.method.quantizes and why_not:
            raise NotPlannedError(f"{name} is a mixture, whose experts in 4 bits {why_not}.")
        if architecture.experts and self.tiled_mlp:
            raise NotPlannedError(
                f"--tiled-mlp: each expert of {architecture.name} has a part of the tokens: leave it out."
            )
        linears = (linear for stack in architecture.stacks for linear in stack.linears)
        names = dict.fromkeys(linear.name for linear in linears if linear.block != Block.ROUTER)
        for target in () if self.target_modules == ALL_LINEAR else self.target_modules:
            if target not in names:
                raise NotPlannedError(
                    f"{architecture.name} has no linear layer {target!r}: pass --target-modules all-linear, or some of "
                    f"{','.join(names)}."
                )


def check_experts(architecture: Architecture, method: Technique, targets: tuple[str, ...]) -> None:
    """Refuse adapters on a mixture's experts: PEFT's `all-linear` may be on them, too.

    (peft/utils/transformers_weight_conversion.py: a layer's experts have one adapter of their own each, which is added
    to all of their weights in each pass.)
    """
    name, known = architecture.name, architecture.names_to_adapt
    if not architecture.experts or not method.has_adapters:
        return
    if not targets or not set(targets) <= set(known):
        raise NotPlannedError(
            f"target_modules is {','.join(targets) or 'all-linear'}, but adapters on the experts of {name} are not "
            f"planned: pass --target_modules {','.join(known)}, or some of these."
        )


def why_not_in_4_bits(sharing: Parallelism, checkpoints: bool) -> str:
    """Return why a run cannot hold a mixture's experts in 4 bits; empty where it can."""
    if not (sharing.is_single or sharing.replicates):
        return f"are not divided among devices (parallel is {sharing.name}): pass --parallel ddp, or --technique lora"
    kept = "are dequantized while their layer computes, and autograd would keep those of all layers"
    return "" if checkpoints else f"{kept}: turn gradient checkpointing on"


def _contradictions(job: Job) -> tuple[tuple[object, str], ...]:
    sharing, devices, sp, rows, parts = job.parallelism, job.devices, job.sp_size, job.batch.rows, job.micro_batches
    named, library = f"--parallel {job.parallel}", sharing.sharded_by or "tensor parallelism"
    even_rows = -(-rows // parts) * parts
    return (
        (sharing.is_single and devices != 1, f"{named} uses one GPU, not {devices}: pass --gpus 1, or --parallel ddp."),
        (not sharing.is_single and devices < 2, f"{named} needs at least two GPUs, not {devices}: pass --gpus 2."),
        (job.unshardable(), job.unshardable()),
        (
            sp > 1 and not job.may_share_rows,
            f"--sp {sp} is for ddp and fsdp, rows with one answer, and sdpa attention: leave it out.",
        ),
        (devices % sp, f"--sp {sp} does not divide {devices} GPUs evenly: pass --sp {equal_groups(devices, sp)}."),
        (not sharing.pipelines and parts != 1, f"--micro-batches {parts} is for --parallel pp: lower --batch-size."),
        (rows % parts, f"--batch-size {rows} has no {parts} equal micro-batches: pass --batch-size {even_rows}."),
        (
            job.method.quantizes and not sharing.takes_4_bits,
            f"--technique {job.technique} with {named}: {library} does not divide weights in 4 bits: pass "
            "--parallel fsdp or ddp, or --technique lora.",
        ),
        (
            (job.tiled_mlp or job.activation_offloading)
            and not (sharing.calls_whole_layers and job.batch.goal.learns_answers),
            f"--tiled-mlp and --activation-offloading are not planned with {named} and --task {job.batch.task}: "
            "pass --parallel ddp or fsdp, and --task chat.",
        ),
        (
            job.offload and (sharing.splits_layers or sharing.splits_matrices),
            f"--offload with {named} is not planned: pass fsdp or zero3.",
        ),
    )


# -- of a run


def evaluation_of_run(run: RunConfig, batch: BatchShape) -> EvaluationShape:
    """Return what a run's phases beside training work on, where its rows to validate and test are like `batch`'s."""
    return EvaluationShape(
        rows=run.rows_evaluated_at_once,
        length=batch.length,
        labelled=batch.target_length or batch.labelled,
        prompt_length=batch.length - run.max_new_tokens * run.goal.rewards,
        new_tokens=0 if run.goal.classifies else run.max_new_tokens,
        beams=run.num_beams if run.goal.summarizes else 1,
        judged=run.goal.is_judged,
        has_independent_judge=run.goal.is_judged and run.independent_judge != "none",
        validation_rows=max(0, run.validation_rows),
        test_rows=max(0, run.test_rows),
        other_tokens=tokens_of_other_texts(run) * run.tells_forgetting,
    )


def tokens_of_other_texts(run: RunConfig) -> int:
    """Return how many tokens a text that tells what was forgotten has at most; longer ones are cut or divided."""
    return run.max_length if run.forgetting_data else OTHER_TOKENS


def with_tiles(run: RunConfig, batch: BatchShape) -> BatchShape:
    """Return the batch with as many squares as a picture becomes, where a run sees; with random weights it is one."""
    if not run.goal.sees or batch.tiles:
        return batch
    return replace(batch, tiles=1 if run.weights == "random" else usual_tiles(run.model, run.model_revision))


def job_of_run(run: RunConfig, batch: BatchShape, evaluation: EvaluationShape | None = None) -> Job:
    """Return the job of a run; on one device, which holds all stages or rows, as if it were not divided.

    A batch is filled up until the micro-batches divide it (`PipelineParallel.fill`). `evaluation`: what the other
    phases work on; None: rows like those of the batch.

    Raises:
        NotPlannedError: layers are named by a regular expression, which the shapes of a model do not tell.
    """
    if is_expression(run.target_modules):
        raise NotPlannedError(f"target_modules is {run.target_modules!r}: layers are planned by their names alone.")
    batch = with_tiles(run, batch)
    filled_up = -(-batch.rows // run.micro_batches) * run.micro_batches
    targets = {"all": (), "all-linear": () if run.method.has_adapters else ALL_LINEAR}
    return Job(
        technique=run.technique,
        parallel="single" if run.devices == 1 else run.parallel,
        batch=replace(batch.padded_to(run.pad_to_multiple_of), rows=filled_up),
        devices=run.devices,
        dp_replicate_size=run.dp_replicate_size,
        sp_size=run.sp_size,
        precision=run.precision,
        quantization=run.quantization,
        optimizer=run.optim,
        attention="flash" if run.attention == "flash3" else run.attention,
        gradient_checkpointing=run.gradient_checkpointing,
        tiled_mlp=run.tiled_mlp,
        activation_offloading=run.activation_offloading,
        kernels="fused" if run.use_liger_kernel else "compiled" if run.torch_compile else "plain",
        lora_rank=run.lora_r,
        target_modules=targets.get(run.target_modules, run.target_names),
        # TRL's trainer switches dropout off: policy and reference are to differ by what was learnt alone
        lora_dropout=run.lora_dropout if run.method.has_adapters and not run.goal.reads_log_probs else 0.0,
        micro_batches=run.micro_batches,
        schedule=run.schedule,
        accumulation_steps=run.gradient_accumulation_steps,
        offload=run.offload == "cpu",
        cpu_operations=run.device == "cpu",
        evaluation=evaluation or evaluation_of_run(run, batch),
        trains_tower=run.goal.sees and not run.freeze_vision_tower,
        sums_gradients_after=run.loop == "machines" and run.gradient_exchange == "after",
        draws_weights=run.weights == "random",
        compares_with_base=run.goal.rewards and run.beta > 0,
    )


def architecture_of_run(run: RunConfig, batch: BatchShape) -> Architecture:
    """Return the run's model as `job_of_run` trains it; refuse those of unknown shape, and decoders for labels.

    And mixtures with adapters on their experts.
    """
    architecture = read_architecture(run.model, run.model_revision, batch.classes)
    check_experts(architecture, run.method, run.target_names)
    return architecture


def is_planned(run: RunConfig) -> bool:
    """Return whether the closed form knows the run's model with what it trains; raise where a config is wrong."""
    try:
        check_experts(read_architecture(run.model, run.model_revision), run.method, run.target_names)
    except NotPlannedError:
        return False
    return True
