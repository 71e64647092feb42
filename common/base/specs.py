"""The table of techniques, parallelisms and tasks: everything else asks a row what it does, and compares no names."""

import math
from dataclasses import dataclass
from typing import Any, Literal

Held = Literal["weights", "gradients", "optimizer"]  # what a rank keeps between two passes
FSDP, DEEPSPEED = "FSDP", "DeepSpeed's ZeRO"  # the libraries that shard


@dataclass(frozen=True)
class Technique:
    """What is trained."""

    name: str
    short: str  # in columns of tables
    label: str  # in sentences
    folder_for_one: str  # the technique folder that trains so on one device
    has_adapters: bool = False  # low-rank adapters are trained beside a frozen base; else the model's own weights are
    quantizes: bool = False  # the base is stored in 4 bits

    @property
    def title(self) -> str:
        """The label at the beginning of a line."""
        return self.label[0].upper() + self.label[1:]

    @property
    def has_plain_adapters(self) -> bool:
        """Whether adapters stand on a base that is not quantized."""
        return self.has_adapters and not self.quantizes


@dataclass(frozen=True)
class Parallelism:
    """How devices share the work."""

    name: str
    label: str  # in tables
    why: str  # when it fits: a template with `devices`, `micro_batches`, and `idle`, the share of time without work
    splits_rows: bool = False  # each rank works on rows of its own (data parallel)
    splits_layers: bool = False  # each device holds some of the layers
    pipelines: bool = False  # micro-batches are in flight on several stages; else one device computes after the other
    splits_matrices: bool = False  # each rank holds columns or rows of a layer's matrices (tensor parallel)
    shards: frozenset[Held] = frozenset()  # what is divided among the data-parallel ranks
    sharded_by: str = ""  # the library that does
    in_one_process: bool = False  # one process works on all devices; else each device has a rank of its own
    takes_4_bits: bool = True  # a base in 4 bits can be trained with it
    suggested_for: tuple[str, ...] = ("full", "lora", "qlora")  # techniques that the planner ranks it for, unasked
    resumes_on_other_ranks: bool = False  # a checkpoint can be resumed on another number of ranks
    # what a rank holds of the model, as `module:class`. Where that is less than all, the default is planned alone
    part: str = "common.training.part:Part"

    @property
    def is_single(self) -> bool:
        """Whether one device does all the work."""
        return not (self.splits_rows or self.splits_layers or self.splits_matrices)

    @property
    def divides_tensors(self) -> bool:
        """Whether tensors are divided among ranks: sharded by FSDP or ZeRO, or by tensor parallelism."""
        return bool(self.shards) or self.splits_matrices

    @property
    def replicates(self) -> bool:
        """Whether each rank holds a whole copy, whose gradients are averaged (DDP)."""
        return self.splits_rows and not self.shards

    @property
    def shares_rows(self) -> bool:
        """Whether groups of ranks can share the tokens of each row (sequence parallel)."""
        return self.replicates or self.uses_fsdp

    @property
    def layers_in_turn(self) -> bool:
        """Whether layers are divided, and computed one device after the other (model parallel)."""
        return self.splits_layers and not self.pipelines

    @property
    def shards_weights(self) -> bool:
        """Whether ranks hold parts of the weights, and gather them layer by layer."""
        return "weights" in self.shards

    @property
    def is_zero_3(self) -> bool:
        """ZeRO's stage 3: modules gather their weights, gradients have a lasting `grad_partitions_flat_buffer`."""
        return self.uses_deepspeed and self.shards_weights

    @property
    def calls_whole_head(self) -> bool:
        """Whether a rank has the whole head while its model is called."""
        return not (self.splits_layers or self.splits_matrices or self.is_zero_3)

    @property
    def calls_whole_layers(self) -> bool:
        """Whether a rank has each whole layer while it is called, by PyTorch alone."""
        return self.is_single or self.shares_rows

    @property
    def uses_fsdp(self) -> bool:
        """Whether PyTorch's FSDP2 shards."""
        return self.sharded_by == FSDP

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed's ZeRO shards."""
        return self.sharded_by == DEEPSPEED

    @property
    def saves_in_background(self) -> bool:
        """Whether training goes on while a large checkpoint is written, from a copy in the host's memory."""
        return not (self.uses_deepspeed or self.pipelines)


@dataclass(frozen=True)
class Task:
    """What is learnt."""

    name: str
    objective: str  # its `Objective`, as `module:name`
    rows: str  # what returns its `RowKind`, how rows are read and turned into tokens, as `module:function`
    techniques: tuple[str, ...] = ("full", "lora")  # it is done with these
    parallelisms: tuple[str, ...] = ("single", "ddp")  # and with these
    auto_class: str = "AutoModelForCausalLM"  # of Transformers, which loads its models
    model_kind: Literal["decoder", "encoder", "encoder-decoder", "vision-language"] = "decoder"
    peft_type: str = "CAUSAL_LM"  # PEFT's name of the task
    heads: tuple[str, ...] = ()
    """Modules after the layers, by the last part of their names in any family, that are trained in full, also beside
    adapters. Where a base has none they start at random."""
    limited: tuple[str, ...] = ("max_length", "max_new_tokens")  # settings up to the positions of the model
    tokenizer: str = "embedded_base"  # the folder in assets whose tokenizer stands in where weights are random
    folder_for_one: str = ""  # the technique folder that does it on one device; empty = its technique's
    rows_are: str = ""  # what its rows are, for the message that refuses them in other tasks
    told_by: tuple[tuple[str, ...], ...] = ()  # a table that has all columns of one of these holds such rows
    loss_per: str = "answer token"  # what the loss is a mean over
    memory: str = "common.planning.memory_plan:DeviceSums"  # the closed form of a step's memory
    reporting: str = ""  # its `OwnTable`, as `module:name`; empty = its runs stand in the tables of chats
    named_by: tuple[str, ...] = ("sharing", "batch")  # of `NAME_PARTS`: what tells its runs' default names apart
    classifies: bool = False  # a row has one label; else tokens are predicted
    summarizes: bool = False  # a row has a text to read and another one to write, by an encoder-decoder
    sees: bool = False  # a row is a conversation about a picture, which a vision tower turns into tokens
    compares: bool = False  # a row is a prompt with a better and a worse answer, compared with what a reference finds
    rewards: bool = False  # a row is a prompt: the model answers it, and a reward tells how good the answers are

    @property
    def title(self) -> str:
        """Its folder as a title: `Text classification (3.1)`."""
        _, _, words = self.folder_for_one.partition("_")
        return f"{words.replace('_', ' ').capitalize()} ({self.number})"

    @property
    def number(self) -> str:
        """The number of its folder: `3.1`; empty = it has those of its techniques."""
        return self.folder_for_one.partition("_")[0]

    @property
    def converses(self) -> bool:
        """Whether a row is a conversation, which a decoder continues."""
        return not (self.classifies or self.summarizes)

    @property
    def chats(self) -> bool:
        """Whether a row is a conversation of texts alone."""
        return self.converses and not self.sees

    @property
    def learns_answers(self) -> bool:
        """Whether what is learnt of a row are its answers, token by token."""
        return self.chats and not self.reads_log_probs

    @property
    def reads_log_probs(self) -> bool:
        """Whether its loss is made of the log-probabilities of whole answers, which TRL's head finds."""
        return self.compares or self.rewards

    @property
    def is_judged(self) -> bool:
        """Whether other models judge how near the answers come to the expected ones."""
        return self.converses and not self.reads_log_probs

    @property
    def sequences_per_row(self) -> int:
        """What a model reads of a row in a step: with two answers the prompt with each."""
        return 2 if self.compares else 1


def _by_name(*entries: Any) -> dict[str, Any]:
    return {each.name: each for each in entries}


# in the order of their quality: best, good, OK
TECHNIQUES: dict[str, Technique] = _by_name(
    Technique("full", "full", "full fine-tuning", "2.4_full_finetuning"),
    Technique("lora", "LoRA", "LoRA", "2.1_lora_finetuning", has_adapters=True),
    Technique("qlora", "QLoRA", "QLoRA", "2.3_qlora_finetuning", has_adapters=True, quantizes=True),
)

_EVERYTHING: frozenset[Held] = frozenset({"weights", "gradients", "optimizer"})
_SHARDED = "weights, gradients and optimizer states are divided by {devices}, and gathered layer by layer"
_ZERO = {"splits_rows": True, "sharded_by": DEEPSPEED, "takes_4_bits": False, "part": "common.training.zero:ZeroPart"}
# from the one that needs least care to the one that needs most; ZeRO needs DeepSpeed besides PyTorch
PARALLELISMS: dict[str, Parallelism] = _by_name(
    Parallelism("single", "one device", "one device holds it all", in_one_process=True, resumes_on_other_ranks=True),
    Parallelism(
        "ddp", "DDP",
        "the model is replicated, and each of {devices} devices takes different examples; only gradients are sent",
        splits_rows=True, resumes_on_other_ranks=True,
    ),
    Parallelism(
        "fsdp", "FSDP", _SHARDED,
        splits_rows=True, shards=_EVERYTHING, sharded_by=FSDP, resumes_on_other_ranks=True,
        part="common.training.fsdp:Shards",
    ),
    Parallelism(  # the first two stages would divide next to nothing of an adapter
        "zero1", "ZeRO-1", "optimizer states are divided by {devices}",
        shards=frozenset({"optimizer"}), suggested_for=("full",), **_ZERO,
    ),
    Parallelism(
        "zero2", "ZeRO-2", "gradients and optimizer states are divided by {devices}",
        shards=frozenset({"gradients", "optimizer"}), suggested_for=("full",), **_ZERO,
    ),
    Parallelism("zero3", "ZeRO-3", _SHARDED, shards=_EVERYTHING, suggested_for=("full", "lora"), **_ZERO),
    Parallelism(
        "pp", "PP",
        "layers are divided among {devices} devices, and the batch into {micro_batches} micro-batches: {idle:.0%} idle",
        splits_layers=True, pipelines=True, part="common.training.pipeline_parallel:Stage",
    ),
    Parallelism(
        "tp", "TP",
        "each layer's matrices are divided among {devices} devices, which sum up its results: each works on every row",
        splits_matrices=True, takes_4_bits=False, part="common.training.tensor_parallel:Columns",
        suggested_for=(),  # but for classifiers
    ),
    Parallelism(
        "mp", "MP", "layers are divided among {devices} devices, which work one after the other: {idle:.0%} idle",
        splits_layers=True, in_one_process=True,
    ),
)  # fmt: skip

TASKS: dict[str, Task] = _by_name(
    Task(
        "chat",
        techniques=tuple(TECHNIQUES),
        parallelisms=tuple(name for name, each in PARALLELISMS.items() if not each.splits_matrices),
        objective="common.tasks.answers:ANSWERS",
        rows="common.data.messages:row_kind",
    ),
    Task(
        "classification",
        parallelisms=("single", "ddp", "pp", "tp"),
        auto_class="AutoModelForSequenceClassification",
        model_kind="encoder",
        peft_type="SEQ_CLS",
        heads=("pooler", "head", "pre_classifier", "classifier"),
        limited=("max_length",),
        objective="common.tasks.classification:CLASSES",
        rows="common.data.texts:labelled_rows",
        folder_for_one="3.1_text_classification",
        rows_are="texts with labels",
        told_by=(("text", "label"),),
        loss_per="label",
        reporting="common.reporting.tasks:CLASSIFICATION",
        named_by=("technique", "parallel", "micro_batches", "rows"),
        classifies=True,
    ),
    Task(
        "summarization",
        techniques=("full",),
        auto_class="AutoModelForSeq2SeqLM",
        model_kind="encoder-decoder",
        peft_type="SEQ_2_SEQ_LM",
        limited=("max_length", "max_target_length", "max_new_tokens"),
        tokenizer="embedded_summarizer",
        objective="common.tasks.summarization:SUMMARIES",
        rows="common.data.texts:summary_rows",
        folder_for_one="3.2_summarization",
        rows_are="texts with summaries",
        told_by=(("text", "summary"), ("dialogue", "summary")),
        loss_per="summary token",
        reporting="common.reporting.tasks:SUMMARIZATION",
        named_by=("loop", "devices"),
        summarizes=True,
    ),
    Task(
        "visual_questions",
        auto_class="AutoModelForImageTextToText",
        model_kind="vision-language",
        objective="common.tasks.visual_questions:ANSWERS",
        rows="common.data.pictured_rows:row_kind",
        tokenizer="embedded_vision_base",
        folder_for_one="3.3_visual_question_answering",
        reporting="common.reporting.tasks:PICTURES",
        named_by=("technique", "parallel", "rows"),
        sees=True,
    ),
    Task(
        "preferences",
        objective="common.tasks.preferences:PAIRS",
        rows="common.data.pairs:row_kind",
        memory="common.planning.pair_terms:PairSums",
        folder_for_one="3.4_preference_tuning",
        rows_are="pairs of answers (to learn the chosen ones alone, rename that column to completion, or to "
        "messages where it holds whole conversations)",
        told_by=(("chosen", "rejected"),),
        loss_per="pair",
        reporting="common.reporting.tasks:PREFERENCES",
        named_by=("technique", "parallel", "loss", "exchanged", "rows"),
        compares=True,
    ),
    Task(
        "rewards",
        objective="common.tasks.rewards:REWARDS",
        rows="common.data.prompts:row_kind",
        memory="common.planning.pair_terms:PairSums",
        folder_for_one="3.5_reinforcement_learning",
        reporting="common.reporting.tasks:REWARDS",
        named_by=("technique", "parallel", "loss", "turned", "rows"),
        rewards=True,
    ),
)


def equal_groups(devices: int, ranks: int) -> int:
    """Return what both have in common, or else the smallest size of equal groups of the devices; 1 = there is none."""
    common = math.gcd(devices, ranks)
    return common if common > 1 else next((size for size in range(2, devices + 1) if devices % size == 0), 1)


class HasSpecs:
    """What names a technique and a parallelism, and so can ask what they do: a run's settings, a job to be planned."""

    technique: str
    parallel: str
    devices: int
    dp_replicate_size: int
    sp_size: int

    @property
    def method(self) -> Technique:
        """What is trained."""
        return TECHNIQUES[self.technique]

    @property
    def parallelism(self) -> Parallelism:
        """How devices share the work."""
        return PARALLELISMS[self.parallel]

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks that work on rows of their own; with sequence parallel groups of ranks, which share their rows."""
        return self.devices // self.sp_size if self.parallelism.splits_rows else 1

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one sharded copy of the model."""
        return self.devices // self.dp_replicate_size if self.parallelism.shards else 1

    def shares_answered(self, stages: int) -> int:
        """Return how many ranks' rows a group of so many answers at once: ranks that share rows have one share."""
        return max(1, stages // self.sp_size)

    @property
    def sharing(self) -> str:
        """The parallelism's name, with the sizes of its groups: `fsdp`, `fsdp-2x4` (hybrid sharding), `ddp-sp2`."""
        hybrid = f"-{self.dp_replicate_size}x{self.shard_ranks}" if self.dp_replicate_size > 1 else ""
        sequence = f"-sp{self.sp_size}" if self.sp_size > 1 else ""
        return f"{self.parallel}{hybrid}{sequence}"

    def unshardable(self) -> str:
        """Return why the devices cannot hold so many copies of the model, each sharded; empty = they can."""
        copies, devices = self.dp_replicate_size, self.devices
        if copies == 1 or (devices % copies == 0 and devices // copies > 1):
            return ""
        return (
            f"dp_replicate_size is {copies}, but {devices} devices cannot form {copies} equal groups of two or more, "
            "each to shard a copy: pass a divisor of at most half the devices, or --parallel ddp for a copy on each."
        )
