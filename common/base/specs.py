"""The table of techniques, parallelisms and tasks: what each is called, shards, splits, trains, reads and refuses.

Everything else asks a spec what it does, instead of comparing names. A new entry is registered by putting it into its
dictionary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Held = Literal["weights", "gradients", "optimizer"]
"""What a rank keeps between two passes."""
FSDP, DEEPSPEED = "FSDP", "DeepSpeed's ZeRO"
"""The libraries that shard."""


@dataclass(frozen=True)
class Technique:
    """What is trained.

    Attributes:
        short: In columns of tables.
        label: In sentences.
        folder_for_one: The technique folder that trains so on one device.
        has_adapters: Low-rank adapters are trained, and the base is frozen; else the model's own weights are trained.
        quantizes: The base is stored in 4 bits.
        merged_models: Whole models that a run saves at its end: with a quantized base one merged into each base.
    """

    name: str
    short: str
    label: str
    folder_for_one: str
    has_adapters: bool = False
    quantizes: bool = False
    merged_models: int = 1

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
    """How devices share the work.

    Attributes:
        label: In tables.
        why: When it fits: a template with `devices`, `micro_batches` and the share of time that a device is `idle`.
        splits_rows: Each rank works on rows of its own (data parallel).
        splits_layers: Each device holds some of the layers.
        pipelines: Micro-batches are in flight on several stages at once; else layers are computed one device after the
            other.
        splits_matrices: Each rank holds columns or rows of a layer's matrices (tensor parallel).
        shards: What is divided among the data-parallel ranks.
        sharded_by: The library that does.
        in_one_process: One process works on all devices; else each device has a rank of its own.
        takes_4_bits: A base in 4 bits can be trained with it.
        suggested_for: Techniques for which the planner ranks it unasked, where there are several devices.
        resumes_on_other_ranks: A checkpoint can be resumed on another number of ranks.
        part: What a rank holds of the model, as `module:name` of a class of `common.training.part`. Where that is less
            than all of it, and none is named, it is planned alone.
        why_not_reentrant: Why PyTorch's reentrant gradient checkpointing does not work with it; empty = it does.
    """

    name: str
    label: str
    why: str
    splits_rows: bool = False
    splits_layers: bool = False
    pipelines: bool = False
    splits_matrices: bool = False
    shards: frozenset[Held] = frozenset()
    sharded_by: str = ""
    in_one_process: bool = False
    takes_4_bits: bool = True
    suggested_for: tuple[str, ...] = ("full", "lora", "qlora")
    resumes_on_other_ranks: bool = False
    part: str = "common.training.part:Part"
    why_not_reentrant: str = ""

    @property
    def is_single(self) -> bool:
        """Whether one device does all the work."""
        return not (self.splits_rows or self.splits_layers or self.splits_matrices)

    @property
    def holds_parts(self) -> bool:
        """Whether a rank holds a part of the model, or of what is trained."""
        return bool(self.shards) or self.splits_matrices or self.pipelines

    @property
    def replicates(self) -> bool:
        """Whether each rank holds a whole copy, whose gradients are averaged (DDP)."""
        return self.splits_rows and not self.shards

    @property
    def layers_in_turn(self) -> bool:
        """Whether layers are divided, and computed one device after the other (model parallel)."""
        return self.splits_layers and not self.pipelines

    @property
    def shards_weights(self) -> bool:
        """Whether ranks hold parts of the weights, and gather them layer by layer."""
        return "weights" in self.shards

    @property
    def shards_gradients(self) -> bool:
        """Whether ranks keep parts of the gradients."""
        return "gradients" in self.shards

    @property
    def collects_gradients(self) -> bool:
        """Whether gradients have a buffer that is never freed, as in ZeRO's stage 3.

        (deepspeed/runtime/zero/stage3.py: `grad_partitions_flat_buffer`.)
        """
        return self.uses_deepspeed and self.shards_weights

    @property
    def calls_whole_head(self) -> bool:
        """Whether a rank's model has all layers on one device, and its head whole while it is called.

        (DeepSpeed's stage 3 gathers a module's weights only around a call of that module.)
        """
        gathers_by_module = self.uses_deepspeed and self.shards_weights
        return not (self.splits_layers or self.splits_matrices or gathers_by_module)

    @property
    def answers_as_computed(self) -> bool:
        """Whether models answer beside training in the format of the matrix products, not in that of the weights."""
        return bool(self.shards) or self.splits_matrices

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
    """What is learnt.

    Attributes:
        parallelisms: What it is done with.
        auto_class: Of Transformers, the class that loads its models.
        peft_type: PEFT's name of the task.
        objective: Its `Objective`, as `module:name`.
        rows: What returns its `RowKind`, how rows are read and turned into tokens, as `module:function`.
        heads: Modules that follow the layers, by the last part of their names in any family, and are trained in full,
            also beside adapters. A base need not have them: they start at random.
        limited: Settings, in tokens, that must not exceed the positions of the model.
        tokenizer: The folder in assets whose tokenizer stands in where weights are random.
        folder_for_one: The technique folder that does it on one device; empty = its technique's.
        rows_are: What its rows are, for the message that refuses them in other tasks.
        told_by: Sets of columns: a table that has all columns of one set holds such rows.
        loss_per: What the loss is a mean over.
        memory: A subclass of `common.planning.memory_plan.DeviceSums`: the closed form of a step's memory.
        reporting: What is shown of its runs, an `OwnTable` of `common.reporting.tasks`, as `module:name`; empty = they
            stand in the tables that all chats share.
        named_by: Parts of a run's default name, of `NAME_PARTS` in `common.records.store`: what tells its runs apart.
        classifies: A row has one label; else tokens are predicted.
        summarizes: A row has a text to read and another one to write, by an encoder-decoder.
        sees: A row is a conversation about a picture, which a vision tower turns into tokens of the decoder.
        compares: A row is a prompt with a better and a worse answer, which are compared with what a reference model
            finds of both.
    """

    name: str
    techniques: tuple[str, ...]
    parallelisms: tuple[str, ...]
    auto_class: str
    model_kind: Literal["decoder", "encoder", "encoder-decoder", "vision-language"]
    peft_type: str
    objective: str
    rows: str
    heads: tuple[str, ...] = ()
    limited: tuple[str, ...] = ("max_length", "max_new_tokens")
    tokenizer: str = "embedded_base"
    folder_for_one: str = ""
    rows_are: str = ""
    told_by: tuple[tuple[str, ...], ...] = ()
    loss_per: str = "answer token"
    memory: str = "common.planning.memory_plan:DeviceSums"
    reporting: str = ""
    named_by: tuple[str, ...] = ("sharing", "batch")
    classifies: bool = False
    summarizes: bool = False
    sees: bool = False
    compares: bool = False

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
    def has_own_table(self) -> bool:
        """Whether its runs stand in a table of its own, and not in those that all chats share."""
        return bool(self.reporting)

    @property
    def place(self) -> str:
        """Its folder in a sentence: `3.1 (text classification)`."""
        _, _, words = self.folder_for_one.partition("_")
        return f"{self.number} ({words.replace('_', ' ')})"

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
        return self.chats and not self.compares

    @property
    def is_judged(self) -> bool:
        """Whether other models judge how near the answers come to the expected ones."""
        return self.converses and not self.compares

    @property
    def sequences_per_row(self) -> int:
        """What a model reads of a row in a step: with two answers the prompt with each."""
        return 2 if self.compares else 1


TECHNIQUES = {
    each.name: each
    for each in (
        Technique("full", "full", "full fine-tuning", "2.4_full_finetuning"),
        Technique("lora", "LoRA", "LoRA", "2.1_lora_finetuning", has_adapters=True),
        Technique(
            "qlora",
            "QLoRA",
            "QLoRA",
            "2.3_qlora_finetuning",
            has_adapters=True,
            quantizes=True,
            merged_models=2,
        ),
    )
}
"""In the order of their quality: best, good, OK."""

_EVERYTHING: frozenset[Held] = frozenset({"weights", "gradients", "optimizer"})
_SHARDED = "weights, gradients and optimizer states are divided by {devices}, and gathered layer by layer"
PARALLELISMS = {
    each.name: each
    for each in (
        Parallelism("single", "one device", "one GPU holds it all", in_one_process=True, resumes_on_other_ranks=True),
        Parallelism(
            "ddp",
            "DDP",
            "each GPU holds it all, so that {devices} work on rows of their own; only gradients are sent",
            splits_rows=True,
            resumes_on_other_ranks=True,
            why_not_reentrant="DDP is tested with the other implementation only, which PyTorch recommends",
        ),
        Parallelism(
            "fsdp",
            "FSDP",
            _SHARDED,
            splits_rows=True,
            shards=_EVERYTHING,
            sharded_by=FSDP,
            resumes_on_other_ranks=True,
            why_not_reentrant="FSDP's hooks would gather for it in the wrong order",
            part="common.training.fsdp:Shards",
        ),
        Parallelism(
            "zero1",
            "ZeRO-1",
            "optimizer states are divided by {devices}",
            splits_rows=True,
            shards=frozenset({"optimizer"}),
            sharded_by=DEEPSPEED,
            takes_4_bits=False,
            why_not_reentrant="it is not tested with ZeRO",
            suggested_for=("full",),  # it would divide next to nothing of an adapter
            part="common.training.zero:ZeroPart",
        ),
        Parallelism(
            "zero2",
            "ZeRO-2",
            "gradients and optimizer states are divided by {devices}",
            splits_rows=True,
            shards=frozenset({"gradients", "optimizer"}),
            sharded_by=DEEPSPEED,
            takes_4_bits=False,
            why_not_reentrant="it is not tested with ZeRO",
            suggested_for=("full",),  # as stage 1
            part="common.training.zero:ZeroPart",
        ),
        Parallelism(
            "zero3",
            "ZeRO-3",
            _SHARDED,
            splits_rows=True,
            shards=_EVERYTHING,
            sharded_by=DEEPSPEED,
            takes_4_bits=False,
            why_not_reentrant="it is not tested with ZeRO",
            suggested_for=("full", "lora"),
            part="common.training.zero:ZeroPart",
        ),
        Parallelism(
            "pp",
            "PP",
            "layers are divided among {devices} GPUs, and the batch into {micro_batches} micro-batches: "
            "{idle:.0%} idle",
            splits_layers=True,
            pipelines=True,
            why_not_reentrant="the first stage's input needs no gradient, and would cut its layers off",
            part="common.training.pipeline_parallel:Stage",
        ),
        Parallelism(
            "tp",
            "TP",
            "each layer's matrices are divided among {devices} GPUs, which sum up its results: each works on every row",
            splits_matrices=True,
            takes_4_bits=False,
            suggested_for=(),  # but for classifiers
            part="common.training.tensor_parallel:Columns",
        ),
        Parallelism(
            "mp",
            "MP",
            "layers are divided among {devices} GPUs, which work one after the other: {idle:.0%} idle",
            splits_layers=True,
            in_one_process=True,
        ),
    )
}
"""From the one that needs least care to the one that needs most; ZeRO needs DeepSpeed besides PyTorch."""

TASKS = {
    each.name: each
    for each in (
        Task(
            "chat",
            techniques=tuple(TECHNIQUES),
            parallelisms=tuple(name for name, each in PARALLELISMS.items() if not each.splits_matrices),
            auto_class="AutoModelForCausalLM",
            model_kind="decoder",
            peft_type="CAUSAL_LM",
            objective="common.tasks.answers:ANSWERS",
            rows="common.data.messages:row_kind",
        ),
        Task(
            "classification",
            techniques=("full", "lora"),
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
            parallelisms=("single", "ddp"),
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
            techniques=("full", "lora"),
            parallelisms=("single", "ddp"),
            auto_class="AutoModelForImageTextToText",
            model_kind="vision-language",
            peft_type="CAUSAL_LM",
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
            techniques=("full", "lora"),
            parallelisms=("single", "ddp"),
            auto_class="AutoModelForCausalLM",
            model_kind="decoder",
            peft_type="CAUSAL_LM",
            objective="common.tasks.preferences:PAIRS",
            rows="common.data.pairs:row_kind",
            memory="common.planning.pair_terms:PairSums",
            folder_for_one="3.4_preference_tuning",
            rows_are="pairs of answers (to learn the chosen ones alone, rename that column to completion, or to "
            "messages where it holds whole conversations)",
            told_by=(("chosen", "rejected"),),
            loss_per="pair",
            reporting="common.reporting.tasks:PREFERENCES",
            named_by=("technique", "parallel", "exchanged", "rows"),
            compares=True,
        ),
    )
}


def is_registered(record: Mapping[str, Any]) -> bool:
    """Return whether what a run did is registered here; another program may have registered more."""
    config = record["config"]
    return (
        {record["technique"], config.get("technique", record["technique"])} <= TECHNIQUES.keys()
        and {record["parallel"], config.get("parallel", record["parallel"])} <= PARALLELISMS.keys()
        and config.get("task", "chat") in TASKS  # older records know one task only
    )


class HasSpecs:
    """What names a technique and a parallelism, and so can ask what they do: a run's settings, a job to be planned."""

    technique: str
    parallel: str
    devices: int
    dp_replicate_size: int

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
        """Ranks that work on rows of their own."""
        return self.devices if self.parallelism.splits_rows else 1

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one sharded copy of the model."""
        return self.devices // self.dp_replicate_size if self.parallelism.shards else 1

    def answering_stages(self, layers: int) -> int:
        """Return how many ranks share a model of so many layers that answers beside training; 1 = each has it whole.

        Those that share its weights in training do, or, where there are too few layers, as many of them as divide the
        ranks: each holds some of the layers then.
        """
        if self.parallelism.in_one_process:
            return 1
        together = self.devices
        if not (self.parallelism.pipelines or self.parallelism.splits_matrices):
            together = self.shard_ranks if self.parallelism.shards_weights else 1
        return max(count for count in range(1, together + 1) if together % count == 0 and count <= layers)

    @property
    def sharing(self) -> str:
        """The parallelism's name, with hybrid sharding the copies and the ranks of each: `fsdp`, `fsdp-2x4`."""
        hybrid = f"-{self.dp_replicate_size}x{self.shard_ranks}" if self.dp_replicate_size > 1 else ""
        return f"{self.parallel}{hybrid}"

    def unshardable(self) -> str:
        """Return why the devices cannot hold so many copies of the model, each sharded; empty = they can."""
        copies, devices = self.dp_replicate_size, self.devices
        if copies == 1 or (devices % copies == 0 and devices // copies > 1):
            return ""
        return (
            f"dp_replicate_size is {copies}, but {devices} devices cannot form {copies} equal groups of two or more, "
            "each to shard a copy: pass a divisor of at most half the devices, or --parallel ddp for a copy on each."
        )
