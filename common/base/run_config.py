"""What a run is asked to do: one frozen dataclass, a unit in every field, checked when it is made."""

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.secrets import secret_in, secrets_here
from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES, HasSpecs, Task

LAST = "last"
"""The setting `resume_from` for a run's own newest whole checkpoint."""

SHARDED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Of Transformers' names, those whose states can be divided: PyTorch's own, which work element by element."""

RUN_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _setting(default: object, doc: str, choices: Mapping[str, object] | None = None) -> object:
    """Return a field; `choices` are the names that it may have, looked up when they are needed."""
    return field(default=default, metadata={"help": doc, **({"choices": choices} if choices is not None else {})})


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Refuse a setting that is none of its choices.

    Raises:
        BadInputError: with all of them.
    """
    if value not in choices:
        raise BadInputError(f"{name} is {value!r}: choose one of {', '.join(map(repr, choices))}.")


@dataclass(frozen=True)
class RunConfig(HasSpecs):
    """One fine-tuning run. A run folder's literal holds only what differs from these defaults.

    Raises:
        BadInputError: a value is out of its range, or two values contradict each other.
    """

    technique: str = _setting(
        "lora",
        "What is trained: lora = low-rank adapters, base frozen; qlora = the same on a base in 4 bits; full = the "
        "model's own weights.",
        TECHNIQUES,
    )
    parallel: str = _setting(
        "single",
        "How devices share the work: not at all; by rows (ddp); by layers one after the other (mp: one process), or "
        "with micro-batches in flight (pp: one process per device); by columns and rows of each layer's matrices (tp); "
        "by rows of data, with what each rank holds divided, too (fsdp: PyTorch's FSDP2; zero1, zero2, zero3: "
        "DeepSpeed's stages).",
        PARALLELISMS,
    )
    task: str = _setting(
        "chat",
        "What is learnt: to answer (rows of messages), which of several labels a text has (classification), or to "
        "summarize a text (summarization).",
        TASKS,
    )
    loop: Literal["trainer", "accelerate", "machines"] = _setting(
        "trainer",
        "Who takes the steps: Transformers' Trainer; with summarization also a plain loop with Accelerate, or a plain "
        "loop on torch.distributed whose ranks may stand in several machines.",
    )
    run_folder: str = _setting("", "Run folder, relative to the repository's root.")

    device: Literal["cpu", "cuda"] = _setting("cpu", "Kind of device: cpu = one process with one thread.")
    gpu: str = _setting(
        "", "GPU that the run folder was made for, by its name in common/hardware/devices.py; empty on CPU."
    )
    devices: int = _setting(1, "Number of devices, and so of ranks but with single and mp.")
    stages: int = _setting(
        0, "With mp: parts that the layers are divided into; 0 = one per device. On CPU, one device holds them all."
    )
    device_map: str = _setting(
        "balanced",
        "With mp and pp: which device holds which layers. balanced = the highest training peak as low as possible; "
        "even = equal numbers of layers; auto (mp) = Accelerate's own; or a JSON file of module names and devices.",
    )
    schedule: Literal["1f1b", "gpipe"] = _setting("1f1b", "With pp: the order of the micro-batches' passes.")
    micro_batches: int = _setting(1, "With pp: equal parts of a batch, which the stages work on at the same time.")
    wrap: str = _setting(
        "layers",
        "With fsdp: classes of the modules that are gathered one at a time, with commas between; layers = the "
        "model's own layers.",
    )
    prefetch: int = _setting(1, "With fsdp: wrapped modules that are gathered ahead of the one at work.")
    offload: Literal["none", "cpu"] = _setting(
        "none",
        "With fsdp and zero: where shards wait while they are not used; cpu = in the host's memory (zero1 and zero2: "
        "the optimizer's states alone).",
    )
    resume_from: str = _setting(
        "",
        "Folder of a checkpoint (results/<run>/checkpoints/checkpoint-<step>) to resume from; last = this run's own "
        "newest one that is whole, in the same results folder, or the beginning where there is none.",
    )
    quantization: Literal["nf4", "nf4-double"] = _setting(
        "nf4", "With qlora: number format of the frozen weights; nf4-double = the blocks' scales are quantized, too."
    )
    model: str = _setting("assets/embedded_base", "Folder of a model, or the id of one on the Hugging Face Hub.")
    weights: Literal["pretrained", "random"] = _setting(
        "pretrained",
        "random = the model's shape from assets/model_configs, with random weights and the embedded tokenizer: "
        "memory and speed without a download.",
    )
    data: str = _setting(
        "assets/exhibits",
        "Rows of messages: a folder with train.jsonl, validation.jsonl and test.jsonl, one .jsonl file, "
        "an fsspec URL of either, or the id of a dataset on the Hugging Face Hub; with classification rows of texts "
        "and labels, with summarization of texts and summaries, also as .csv.",
    )
    text_column: str = _setting("text", "With classification and summarization: the column with the texts.")
    label_column: str = _setting("label", "With classification: the column with the labels.")
    summary_column: str = _setting("summary", "With summarization: the column with the summaries.")
    max_length: int = _setting(256, "Longest training row, in tokens; longer rows are cut.")
    max_summary_length: int = _setting(128, "With summarization: longest summary to learn from, in tokens.")
    long_texts: Literal["cut", "refuse"] = _setting(
        "cut",
        "With classification and summarization: what happens to texts of more than max_length tokens; they are counted "
        "in any case.",
    )
    empty_rows: Literal["refuse", "skip"] = _setting(
        "refuse",
        "With classification and summarization: what happens to rows with an empty text, label or summary; how many "
        "are left out is said.",
    )
    shared_rows: Literal["auto", "refuse", "skip"] = _setting(
        "auto",
        "What happens to training rows that are test rows, too (but for case and spacing): skip = they are left out; "
        "auto = rows of messages are refused, and texts, of which public datasets have some twice, are told.",
    )
    cut_off_share: float = _setting(
        0.0,
        "With messages: share of rows (0 to 1) that may be left out, as all of their answer lies beyond max_length.",
    )
    partitions: int = _setting(
        0,
        "With summarization: parts that the training rows are divided into, of about equal size, each rank drawing "
        "from its own; 0 = one per rank.",
    )
    gradient_exchange: Literal["after", "overlapped", "overlapped-bf16"] = _setting(
        "after",
        "With loop machines: when gradients are averaged: in buckets after each backward pass; while it goes on (DDP); "
        "or so, sent as bf16.",
    )
    bucket_mib: float = _setting(25.0, "With loop machines: gradients that are sent at once, in MiB.")
    link: str = _setting("", "With loop machines: what joins them, for the record, such as 100 Mbit/s.")
    start_timeout_s: float = _setting(
        300.0, "Seconds that ranks wait for each other at their start, before those that are missing are named."
    )
    step_timeout_s: float = _setting(
        600.0,
        "Seconds that a training step may take before the ranks that hang are named and all are ended; a batch of "
        "validation, a checkpoint and an exchange between ranks may take ten times as long.",
    )

    batch_size: int = _setting(16, "Training rows per rank and step, before accumulation.")
    accumulation_steps: int = _setting(1, "Micro-batches per optimizer step and rank.")
    epochs: int = _setting(6, "Passes over the training rows.")
    max_steps: int = _setting(-1, "Optimizer steps after which training ends early; -1 = all epochs.")
    learning_rate: float = _setting(1e-3, "Peak learning rate, after warm-up and before scaling.")
    learning_rate_scaling: Literal["none", "sqrt", "linear"] = _setting(
        "none", "Growth of the learning rate with the ranks that share a step: none, by their square root, or linear."
    )
    warmup_share: float = _setting(0.03, "Share of the steps in which the learning rate rises (0 to 1).")
    scheduler: str = _setting("cosine", "Learning-rate schedule, by its name in Transformers.")
    optimizer: str = _setting("adamw_torch_fused", "Optimizer, by its name in Transformers.")
    weight_decay: float = _setting(0.01, "Weight decay, per step and unit of learning rate.")
    max_grad_norm: float = _setting(0.3, "Gradient clipping: largest 2-norm over all trainable weights; 0 = off.")
    precision: Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"] = _setting(
        "fp32", "Number format of weights and arithmetic; mixed = fp32 weights, arithmetic under autocast."
    )
    attention: Literal["eager", "sdpa", "flash", "flash3"] = _setting(
        "sdpa",
        "Attention implementation; flash = the package flash-attn, flash3 = its third version for Hopper GPUs; both "
        "on GPUs only, with weights in 16 bits.",
    )
    gradient_checkpointing: Literal["none", "reentrant", "non-reentrant"] = _setting(
        "none", "Whether activations are computed again in the backward pass, and by which of PyTorch's two ways."
    )

    target_modules: str = _setting(
        "all-linear",
        "Linear layers that get adapters (lora) or are trained (full), by their names with commas between; "
        "all-linear = all but the head; all = every weight (full).",
    )
    lora_rank: int = _setting(8, "Rank of the adapters.")
    lora_alpha: int = _setting(64, "Scale of the adapters; with rsLoRA they are multiplied by alpha / sqrt(rank).")
    lora_dropout: float = _setting(0.1, "Dropout before the adapters (0 to 1).")

    report_share: float = _setting(0.05, "Log, validate and save each time this share of the steps is done (0 to 1).")
    early_stop: int = _setting(
        0, "Validations in a row without a better model after which training ends; 0 = it goes on."
    )
    evaluation_batch_size: int = _setting(32, "Rows per rank in validation and generation.")
    max_new_tokens: int = _setting(48, "Longest generated answer, in tokens.")
    beams: int = _setting(4, "With summarization: beams of the search for a summary; 1 = greedy.")
    independent_judge: Literal["minilm", "none"] = _setting(
        "minilm", "A second judge of the answers: the sentence encoder all-MiniLM-L6-v2 (extra `judge`), or none."
    )
    report_to: str = _setting(
        "tensorboard", "Experiment trackers by their names in Transformers, with commas between, or none."
    )
    figures: Literal["text", "json"] = _setting(
        "text",
        "How figures are printed while training: for readers, or as JSON, one object a line, which Valohai plots.",
    )
    test_rows: int = _setting(-1, "Test questions to answer, from the first; -1 = all.")
    train_rows: int = _setting(-1, "Training rows to use, from the first; -1 = all.")
    validation_rows: int = _setting(-1, "Validation rows to use, from the first; -1 = all.")
    seed: int = _setting(42, "Seed of the adapters' start, of dropout and of the rows' order.")
    run_name: str = _setting("", "Name of the results folder; empty = launcher, batch size and seed.")
    results_root: str = _setting("", "Folder that takes results/<run name>; empty = the run folder.")

    def __post_init__(self) -> None:
        """Check every field."""
        self._check_types()
        self._check_secrets()
        at_least = {"devices": 1, "max_length": 2, "batch_size": 1, "accumulation_steps": 1, "epochs": 1,
                    "micro_batches": 1, "prefetch": 0, "stages": 0, "lora_rank": 1, "lora_alpha": 1,
                    "evaluation_batch_size": 1, "max_new_tokens": 1, "beams": 1, "max_summary_length": 2,
                    "partitions": 0, "early_stop": 0, "weight_decay": 0,
                    "max_grad_norm": 0, "seed": 0}  # fmt: skip
        for name, low in at_least.items():
            value = getattr(self, name)
            if value < low:
                raise BadInputError(f"{name} is {value}, but must be at least {low}: pass --{name} {max(low, 1)}.")
        for name in ("report_share", "bucket_mib", "start_timeout_s", "step_timeout_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise BadInputError(
                    f"{name} is {value}, but must be above 0 and finite, such as {getattr(type(self), name)}."
                )
        for name in ("warmup_share", "lora_dropout", "report_share", "cut_off_share"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise BadInputError(f"{name} is {value}, but is a share: pass a number from 0 up to, not with, 1.")
        for name in ("max_steps", "test_rows", "train_rows", "validation_rows"):
            value = getattr(self, name)
            if value == 0 or value < -1:
                raise BadInputError(f"{name} is {value}: pass a number of at least 1, or -1 for all.")
        if not 0 < self.learning_rate < math.inf:
            raise BadInputError(f"learning_rate is {self.learning_rate}, but must be above 0 and finite, such as 1e-3.")
        self._check_parallel()
        self._check_sharding()
        self._check_task()
        if self.method.has_adapters and self.target_modules == "all":
            raise BadInputError("target_modules is all, but adapters stand beside linear layers: pass all-linear.")
        self._check_attention()
        if self.run_name and not RUN_NAME_PATTERN.fullmatch(self.run_name):
            raise BadInputError(
                f"run_name {self.run_name[:120]!r} cannot name a folder: use 1 to 100 letters, digits, '.', '_', '-'."
            )

    def _check_attention(self) -> None:
        """Refuse flash attention where it has no kernel."""
        if not self.attention.startswith("flash"):
            return
        if self.device == "cpu":
            raise BadInputError(
                f"attention is {self.attention}, but device is cpu, where flash-attn has no kernel: pass sdpa."
            )
        has_16_bits = self.precision == "bf16" or (self.precision == "fp16-mixed" and self.method.has_plain_adapters)
        gathers_16_bits = self.precision == "bf16-mixed" and self.parallelism.uses_fsdp
        if not has_16_bits and not gathers_16_bits:
            raise BadInputError(
                f"attention is {self.attention}, but precision is {self.precision}, whose weights are fp32, and the "
                "base answers without autocast: pass --precision bf16, or --attention sdpa."
            )

    def _check_parallel(self) -> None:
        """Refuse what contradicts the way to share the work."""
        if self.parallelism.is_single and self.devices != 1:
            raise BadInputError(
                f"devices is {self.devices}, but parallel is single: pass --devices 1, or --parallel ddp where the "
                "folder takes it (2.3, 2.6), or go to 2.2 (LoRA with DDP) or 2.6 (full, with sharding or DDP)."
            )
        reason = self.parallelism.why_not_reentrant
        if reason and self.gradient_checkpointing == "reentrant":
            raise BadInputError(
                f"gradient_checkpointing is reentrant, but {reason}: pass --gradient_checkpointing non-reentrant."
            )
        on_one_cpu = self.parallelism.layers_in_turn and self.device == "cpu"
        if on_one_cpu and self.devices != 1:
            raise BadInputError(
                f"devices is {self.devices}, but on CPU model parallel has one device: pass --devices 1, and --stages "
                f"{self.devices} to divide the layers as for so many."
            )
        if self.stages and self.stages != self.devices and not on_one_cpu:
            raise BadInputError(
                f"stages is {self.stages}, but there is one for each of {self.devices} devices: leave --stages out."
            )
        if self.parallelism.splits_layers and self.stage_count < 2:
            option = "--stages 2" if on_one_cpu else "--devices 2"
            raise BadInputError(f"parallel is {self.parallel}, but there is one stage: pass {option} or more.")
        if not self.parallelism.pipelines and self.micro_batches != 1:
            raise BadInputError(
                f"micro_batches is {self.micro_batches}, but parallel is {self.parallel}: they are for pp (2.7); else "
                "lower --batch_size and raise --accumulation_steps."
            )
        if self.parallelism.pipelines and self.schedule == "1f1b" and self.micro_batches < self.devices:
            raise BadInputError(
                f"micro_batches is {self.micro_batches}, but 1F1B needs one for each of {self.devices} stages: "
                f"pass --micro_batches {self.devices}, or --schedule gpipe."
            )
        if self.batch_size % self.micro_batches:
            lower = self.batch_size - self.batch_size % self.micro_batches
            raise BadInputError(
                f"batch_size is {self.batch_size}, which {self.micro_batches} micro-batches do not divide: pass "
                f"--batch_size {lower or self.micro_batches}, or --micro_batches with a divisor."
            )
        if self.parallelism.pipelines and self.precision == "fp16-mixed":
            raise BadInputError("precision is fp16-mixed, which pp does not scale losses for: pass bf16-mixed or fp32.")
        if self.parallelism.pipelines and self.device_map == "auto":
            raise BadInputError("device_map is auto, which is for mp: pass balanced, even, or a JSON file.")

    def _check_sharding(self) -> None:
        """Refuse what contradicts sharding, or is for it alone."""
        if not self.is_sharded:
            if self.offload != "none":
                raise BadInputError(
                    f"offload is {self.offload}, but parallel is {self.parallel}: it is for fsdp and zero (2.6)."
                )
            return
        if self.offload == "cpu" and self.device == "cpu":
            raise BadInputError("offload is cpu, but device is cpu, where shards are already: leave --offload out.")
        if self.devices < 2:
            raise BadInputError(
                f"parallel is {self.parallel}, but there is {self.devices} device, and nothing to divide: pass "
                "--devices 2 or more, or go to 2.4 (full fine-tuning on one device)."
            )
        if self.method.quantizes and not self.parallelism.uses_fsdp:
            raise BadInputError(
                f"technique is qlora, but parallel is {self.parallel}: weights in 4 bits are sharded by fsdp, or whole "
                "on each rank with ddp (2.3)."
            )
        if self.precision == "bf16-mixed" and not self.parallelism.uses_fsdp:
            raise BadInputError(
                f"precision is bf16-mixed, but parallel is {self.parallel}, and DeepSpeed's bf16 keeps an fp32 copy of "
                "the weights already: pass --precision bf16."
            )
        if self.precision == "fp16-mixed":
            raise BadInputError(
                f"precision is fp16-mixed, which {self.parallel} does not scale losses for here: pass bf16-mixed, bf16 "
                "or fp32."
            )
        if self.optimizer not in SHARDED_OPTIMIZERS:
            raise BadInputError(
                f"optimizer is {self.optimizer}, which {self.parallelism.sharded_by} cannot divide: choose one of "
                f"{', '.join(SHARDED_OPTIMIZERS)}."
            )
        if not self.parallelism.uses_fsdp and self.gradient_checkpointing == "reentrant":
            raise BadInputError(
                f"gradient_checkpointing is reentrant, which {self.parallel} is not tested with: pass "
                "--gradient_checkpointing non-reentrant."
            )

    def _check_task(self) -> None:
        """Refuse what the task is not done with, and settings that are for other tasks."""
        goal = self.goal
        if self.technique not in goal.techniques or self.parallel not in goal.parallelisms:
            where = f" ({goal.folder_for_one.partition('_')[0]})" if goal.folder_for_one else ""
            raise BadInputError(
                f"task is {self.task}, but technique is {self.technique} and parallel {self.parallel}: it is done with "
                f"{' or '.join(goal.techniques)}, and {', '.join(goal.parallelisms)}{where}."
            )
        if goal.chats:
            self._refuse(("long_texts", "empty_rows"), "classification (3.1) and summarization (3.2)")
        if not goal.summarizes:
            self._refuse(("loop", "partitions", "gradient_exchange", "link"), "summarization (3.2)")
        if self.parallelism.splits_matrices:
            self._check_tensor_parallel()
        if goal.summarizes:
            self._check_loops()

    def _refuse(self, names: Sequence[str], meant_for: str) -> None:
        """Refuse settings that are not at their defaults."""
        for name in names:
            value = getattr(self, name)
            if value != getattr(type(self), name):
                raise BadInputError(f"{name} is {value}, which is for {meant_for}: leave it out.")

    def _check_tensor_parallel(self) -> None:
        """Refuse what matrices are not divided with."""
        if self.devices < 2:
            raise BadInputError("parallel is tp, but devices is 1, and nothing to divide: pass --devices 2.")
        if self.optimizer not in SHARDED_OPTIMIZERS:
            raise BadInputError(
                f"optimizer is {self.optimizer}, which parts of a matrix are not tested with: choose one of "
                f"{', '.join(SHARDED_OPTIMIZERS)}."
            )
        if self.precision not in ("fp32", "bf16-mixed") or self.gradient_checkpointing != "none":
            raise BadInputError(
                f"parallel is tp, but precision is {self.precision} and gradient_checkpointing "
                f"{self.gradient_checkpointing}: pass --precision fp32 or bf16-mixed, and "
                "--gradient_checkpointing none."
            )

    def _check_loops(self) -> None:
        """Refuse what a plain loop does not do, and what is for the one across machines alone."""
        if self.loop != "trainer":
            if self.precision not in ("fp32", "bf16-mixed"):
                raise BadInputError(
                    f"precision is {self.precision}, which the plain loops do not scale losses for or keep weights in: "
                    "pass --precision fp32 or bf16-mixed."
                )
            if self.early_stop:
                raise BadInputError("early_stop is for the Trainer: leave it out, or take the torchrun workflow.")
        if self.loop != "machines" and self.gradient_exchange != "after":
            raise BadInputError(
                f"gradient_exchange is {self.gradient_exchange}, but loop is {self.loop}, where DDP always sends while "
                "the backward pass goes on: leave it out."
            )
        if self.loop != "machines" and self.link:
            raise BadInputError(
                f"link is {self.link}, but loop is {self.loop}: it is for the machines workflow (3.2); leave it out."
            )
        if self.partitions and self.partitions < self.data_parallel_ranks:
            raise BadInputError(
                f"partitions is {self.partitions}, but there are {self.data_parallel_ranks} ranks: pass at least one "
                "for each, or 0."
            )

    def _check_secrets(self) -> None:
        """Refuse a token or a password, which records and notebooks would keep."""
        secrets = secrets_here()
        for name, value in self.to_dict().items():
            found = secret_in(value, secrets) if isinstance(value, str) else None
            if found:
                raise BadInputError(
                    f"{name} has {found} in it, and settings are kept in records and notebooks: leave it in the "
                    "environment, where libraries find it."
                )

    def _check_types(self) -> None:
        hints = get_type_hints(RunConfig)
        for setting in fields(self):
            value, expected = getattr(self, setting.name), hints[setting.name]
            known = get_args(expected) if get_origin(expected) is Literal else setting.metadata.get("choices")
            if known is not None:
                check_choice(setting.name, value, known)
            elif isinstance(value, bool) or not isinstance(value, (int, float) if expected is float else expected):
                raise BadInputError(f"{setting.name} is {value!r}, but must be of type {expected.__name__}.")

    @property
    def goal(self) -> Task:
        """What is learnt."""
        return TASKS[self.task]

    @property
    def world_size(self) -> int:
        """Ranks (processes) of the run."""
        return 1 if self.parallelism.in_one_process else self.devices

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of what is trained."""
        return bool(self.parallelism.shards)

    @property
    def stage_count(self) -> int:
        """Parts that the layers are divided into."""
        return (self.stages or self.devices) if self.parallelism.splits_layers else 1

    @property
    def partition_count(self) -> int:
        """Parts of the training rows that ranks draw from."""
        return self.partitions or self.data_parallel_ranks

    @property
    def rows_per_rank(self) -> int:
        """Training rows of one rank at once: those of its partitions, where it has more than one."""
        return self.batch_size * -(-self.partition_count // self.data_parallel_ranks)

    @property
    def effective_batch_size(self) -> int:
        """Rows per optimizer step over all data-parallel ranks."""
        if self.partitions:  # as many rows of each part, however many ranks work on them
            return self.batch_size * self.accumulation_steps * self.partitions
        return self.batch_size * self.accumulation_steps * self.data_parallel_ranks

    @property
    def arithmetic(self) -> str:
        """The number format that matrix products are computed in: `fp32`, `bf16` or `fp16`."""
        return self.precision.removesuffix("-mixed")

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after warm-up, scaled with the ranks: sqrt as in Krizhevsky 2014, linear as in Goyal 2017.

        (Krizhevsky, "One weird trick for parallelizing convolutional neural networks"; Goyal et al., "Accurate, Large
        Minibatch SGD".)
        """
        factors = {"none": 1, "sqrt": math.sqrt(self.data_parallel_ranks), "linear": self.data_parallel_ranks}
        return self.learning_rate * factors[self.learning_rate_scaling]

    def results_folder(self, run_name: str) -> Path:
        """Where this run writes."""
        root = Path(self.results_root).expanduser() if self.results_root else REPOSITORY / self.run_folder
        return root / "results" / run_name

    def to_dict(self) -> dict[str, object]:
        """Every field, for the record."""
        return asdict(self)


def parse_overrides(defaults: RunConfig, arguments: Sequence[str] | None = None) -> RunConfig:
    """`defaults` with the `--field value` pairs of the command line put over it.

    Raises:
        SystemExit: with code 2 for an unknown field or a value of the wrong kind (argparse's own sentence).
        BadInputError: a value is out of range.
    """
    from transformers import HfArgumentParser  # here: `report` and notebooks' first cells need no Transformers

    parser = HfArgumentParser(RunConfig, description="Overrides of this run's settings.", allow_abbrev=False)
    parser.set_defaults(**defaults.to_dict())
    return RunConfig(**vars(parser.parse_args(sys.argv[1:] if arguments is None else arguments)))
