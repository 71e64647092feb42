"""The question to the planner: its options, and the GPUs, the job and the evaluation that they describe."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from common.base.errors import BadInputError, begin_of
from common.base.parsing import SettingsParser
from common.base.run_config import LARGEST, RunConfig, names_in, not_meant_for
from common.base.settings import MOST_EVALUATED_AT_ONCE, setting
from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES, Task
from common.hardware.devices import Gpu, cpu_device, find_gpu, gpu_of_device, gpus
from common.planning.architectures import Architecture
from common.planning.job import OPTIMIZER_BYTES, OTHER_TOKENS, BatchShape, EvaluationShape, Job, Precision, Quantization
from common.planning.plans import DEFAULT_ROWS_PER_EPOCH, TOKENS_STEP
from common.planning.time_plan import Cluster, parse_link

DESCRIPTION = """Plan a training: memory, time and cost of every technique and parallelism, before a GPU is rented.

    python -m common.planner --model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 4 --seq-len 1024
    python -m common.planner --model llama-3.1-8b --technique lora --parallel ddp --gpu a6000 --gpus 4 --explain
    python -m common.planner --model qwen2.5-7b --gpu a100-80gb-sxm --gpus 4 --seq-len max
    python -m common.planner --model llama-3.1-70b --gpu h100 --gpus 512 --nodes 64 --json
    python -m common.planner --model qwen2.5-7b --gpu any --data rows.jsonl --budget 20 --deadline 6h

Every figure is `projected`: memory from common/planning/memory_plan.py, time from common/planning/time_plan.py.
Exit code 0: it fits; 1: it does not; 2: the question is wrong.
"""
ANY = "any"  # a name for every GPU that has a price
WHY_NOT_QUANTIZED_FULL = (
    "Full fine-tuning of quantized weights is impossible, and would save little: 14.5 instead of 16 bytes per weight, "
    "as gradient, momentum, variance and fp32 copy stay: pass --technique qlora, which trains adapters."
)


def shared(name: str, default: object, doc: str = "", **for_argparse: object) -> object:
    """Return an option that is a run's setting: its names and its help, with the planner's own default."""
    of_run = {each.name: each.metadata for each in fields(RunConfig)}[name]
    return field(default=default, metadata={**of_run, "help": doc or of_run["help"], **for_argparse})


class Tokens(int):
    """As many tokens as fit: what `max` stands for on the command line, at first a few; others are plain numbers."""

    def __new__(cls, written: str) -> int:
        """Return a number of tokens as it is written."""
        return super().__new__(cls, TOKENS_STEP) if written == "max" else int(written)


@dataclass(frozen=True)
class PlannerOptions:
    """The question to the planner; what is also a run's setting has its name and meaning."""

    model: str = setting("", "Name in assets/model_configs, Hub id, folder, or config.json.")
    model_revision: str = shared("model_revision", "")
    task: str | None = shared("task", None, "Without it: by --classes, --target-len and --tiles, or chat.")
    technique: str | None = shared("technique", None, "Without it, all are ranked.")
    parallel: str | None = shared("parallel", None, "Without it, all that make sense are ranked.")
    gpu: str | None = setting(
        None, "Once for all, or for each; any = what to rent; without it: this machine's GPUs.", action="append"
    )
    gpus: int | None = setting(None, "Number of GPUs, over all nodes.", aliases=("--devices",))
    nodes: int = setting(1, "Machines.")
    gpu_memory_gib: float | None = setting(None, "Memory of a GPU that the catalogue lacks, in GiB.")
    gpu_tflops: float | None = setting(None, "Speed of such a GPU: dense TFLOPS in the precision of the run.")
    link: str | None = setting(None, "nvlink, pcie, or ethernet-GBITS: the slowest link between two GPUs.")
    per_device_train_batch_size: int = shared("per_device_train_batch_size", 1)
    max_length: Tokens = setting(1024, "Tokens per row; max: as many as fit.", aliases=("--seq-len", "--seq_len"))
    max_target_length: int | None = setting(
        None, "Tokens per summary; without it: as a row.", aliases=("--target-len", "--target_len")
    )
    max_new_tokens: int = shared("max_new_tokens", RunConfig.max_new_tokens)
    tiles: int | None = setting(None, "Squares that a picture is cut into; without it: of a square picture.")
    freeze_vision_tower: bool = shared("freeze_vision_tower", True)
    classes: int = setting(0, "Labels of a classifier; 0 = the model's own head.")
    lora_r: int = shared("lora_r", 8)
    target_modules: str | None = shared("target_modules", None, "Layers, such as q_proj,v_proj; without it: all.")
    lora_dropout: float = shared("lora_dropout", 0.0)
    precision: Precision | None = shared("precision", None, "Without it: the usual one, as the GPUs have it.")
    quantization: Quantization | None = setting(None, "Number format of qlora's frozen weights; without it: nf4.")
    optim: str = shared("optim", "adamw_torch_fused", f"One of {', '.join(OPTIMIZER_BYTES)}.")
    attention: Literal["eager", "sdpa", "flash"] = shared("attention", "sdpa", "Kernel; flash = flash-attn.")
    use_liger_kernel: bool = shared("use_liger_kernel", False, "Plan with Liger's fused kernels.")
    torch_compile: bool = shared("torch_compile", False, "Plan with layers compiled by torch.compile.")
    gradient_checkpointing: bool | None = shared(
        "gradient_checkpointing", None, "Without it: where needed, with --no-gradient-checkpointing never.",
        nargs="?", const=True,
    )  # fmt: skip
    tiled_mlp: bool = shared("tiled_mlp", False)
    activation_offloading: bool = shared("activation_offloading", False)
    micro_batches: int | None = shared("micro_batches", None, "With --parallel pp; without it, as many as make sense.")
    dp_replicate_size: int | None = shared(
        "dp_replicate_size", None, "With fsdp: sharded copies; without it: one, on several machines also one on each."
    )
    sp_size: int | None = shared("sp_size", None, "Ranks that share each row; without it: 1, or a machine's if needed.")
    offload: Literal["none", "cpu"] = shared("offload", "none", "Optimizer states wait in the host's memory.")
    rows_per_epoch: int = setting(DEFAULT_ROWS_PER_EPOCH, "Rows of an epoch.")
    usd_per_hour: float | None = setting(None, "Price of one GPU, instead of its usual one.")
    on_demand: bool = setting(False, "What to rent: without spot.")
    budget: float | None = setting(None, "What to rent: US dollars that the whole run may cost.")
    deadline: str | None = setting(None, "What to rent: until when, as 6h, 90m, 2d or 2026-12-24T18:00.")
    prices: str | None = setting(None, "What to rent, or --serve: a file of prices, as common/hardware/prices.toml.")
    data: str = setting(
        "", "What to rent: the rows to train on, counted and measured, instead of the options for them."
    )
    num_train_epochs: float = shared("num_train_epochs", RunConfig.num_train_epochs)
    rows_per_step: int = setting(16, "What to rent: rows of an optimizer step, on all GPUs together.")
    picture: str | None = setting(None, "What to rent: a file for the picture of dollars against hours (.png, .svg).")
    serve: bool = setting(False, "Plan serving the tuned model instead of training it, and name the cheapest cards.")
    explain: bool = setting(False, "Unfold the first plan's memory into its terms.")
    json: bool = setting(False, "Print JSON.")

    def __post_init__(self) -> None:
        """Refuse what a number or a technique alone can tell."""
        for name in ("gpus", "nodes", "per_device_train_batch_size", "max_length", "max_target_length", "tiles",
                     "lora_r", "micro_batches", "max_new_tokens", "dp_replicate_size", "sp_size", "rows_per_epoch",
                     "gpu_memory_gib", "gpu_tflops", "usd_per_hour", "budget", "num_train_epochs",
                     "rows_per_step"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value <= LARGEST:  # also of nan
                raise BadInputError(
                    f"{short_option(self, name)} is {begin_of(value, 40)}, but must be above 0 and at most {LARGEST:,}."
                )
        for name in () if self.asks_what_to_rent or self.serve else ("num_train_epochs", "rows_per_step"):
            if getattr(self, name) != getattr(type(self), name):
                raise BadInputError(f"{short_option(self, name)} is for what to rent: leave it out, or pass --gpu any.")
        if self.classes < 0 or self.classes == 1:
            raise BadInputError(f"--classes is {self.classes}, but a classifier has at least 2: pass 2 or more, or 0.")
        if task_of(self).rewards and self.max_length <= self.max_new_tokens:
            raise BadInputError(
                f"--seq-len is {self.max_length}, but an answer may take --max-new-tokens {self.max_new_tokens} of it: "
                "pass a longer row, or shorter answers."
            )
        if self.dp_replicate_size and self.parallel and not PARALLELISMS[self.parallel].uses_fsdp:
            raise BadInputError(f"--dp-replicate-size is for --parallel fsdp, not {self.parallel}: leave it out.")
        idle = not_meant_for(RunConfig(technique=self.technique)) if self.technique else {}
        for name in ("lora_r", "lora_dropout"):
            if name in idle and getattr(self, name) != getattr(type(self), name):
                raise BadInputError(f"{short_option(self, name)} is for {idle[name]}: leave it out.")

    @property
    def asks_what_to_rent(self) -> bool:
        """Whether the machine is what is asked for."""
        asked = (self.budget, self.deadline, self.prices, self.data, self.picture, self.on_demand)
        return any(asked) or ANY in (self.gpu or [])

    @property
    def techniques(self) -> tuple[str, ...]:
        """The technique that is named, else all that suit task and parallelism; quantization needs qlora."""
        if self.technique:
            return (self.technique,)
        takes_4_bits = self.parallel is None or PARALLELISMS[self.parallel].takes_4_bits
        is_chat = not (self.classes or self.tiles or task_of(self).reads_log_probs)
        if not (is_chat and takes_4_bits) and not self.quantization:
            return tuple(name for name, each in TECHNIQUES.items() if not each.quantizes)
        return tuple(TECHNIQUES)


def short_option(options: PlannerOptions, name: str) -> str:
    """Return the shortest spelling of an option on the command line."""
    aliases = next(each for each in fields(options) if each.name == name).metadata["aliases"]
    return min((f"--{name}", *aliases), key=len).replace("_", "-")


def read_options(arguments: Sequence[str] | None = None) -> PlannerOptions:
    """Return the question that the command line asks; exit, or refuse, where it asks wrongly."""
    parser = SettingsParser((PlannerOptions,), prog="python -m common.planner", description=DESCRIPTION)
    options = PlannerOptions(**parser.settings(arguments))
    if not options.model:
        parser.error("the following arguments are required: --model")
    return options


def cluster_of(options: PlannerOptions) -> Cluster:
    """Return the GPUs that the command line names; refuse unknown ones, and a number that does not fit their names."""
    by_hand = ["this GPU"] if options.gpu_memory_gib else []
    chosen = [_one_gpu(name, options) for name in options.gpu or by_hand] or _gpus_here()
    count = options.gpus or len(chosen)
    if len(chosen) not in (1, count):
        named = f"--gpus is {count}, but {len(chosen)} GPUs are named"
        raise BadInputError(f"{named}: name one for all, or each of them in order.")
    chosen = chosen * count if len(chosen) == 1 else chosen
    per_node = count // options.nodes
    if options.link == "nvlink" and chosen[0].nvlink_bridge and per_node > 2:
        raise BadInputError(f"An NVLink bridge joins two {chosen[0].name}, not {per_node}: pass --link pcie.")
    link = parse_link(options.link, chosen[0]) if options.link else None
    return Cluster(tuple(chosen), options.nodes, link, options.usd_per_hour)


def _one_gpu(name: str, options: PlannerOptions) -> Gpu:
    if options.gpu_memory_gib:
        if options.gpu_tflops is None:
            raise BadInputError(f"--gpu-memory-gib describes {name}: pass its --gpu-tflops (dense), too.")
        rates = dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), options.gpu_tflops)
        return Gpu(name, options.gpu_memory_gib, 0, rates, 1000, 4, "by hand")
    if name.lower() == "cpu":
        return cpu_device()
    try:
        return find_gpu(name)
    except BadInputError as unknown:
        raise BadInputError(
            f"{unknown} Or describe it: --gpu {name!r} --gpu-memory-gib 24 --gpu-tflops 70 (dense, in your precision)."
        ) from None


def _gpus_here() -> list[Gpu]:
    names = gpus()[1]
    found = [gpu_of_device(name) for name in names]
    if not names or None in found:
        raise BadInputError(
            f"No --gpu is named, and of this machine's GPUs ({', '.join(names) or 'none'}) not all are known: pass "
            "--gpu a6000, or --gpu any to see what to rent."
        )
    return found


def job_of(options: PlannerOptions) -> Job:
    """Return the job that the command line describes, as on one GPU; `ranked_plans` fills in technique and parallel."""
    method = TECHNIQUES.get(options.technique)
    if options.quantization and method and not method.has_adapters:
        raise BadInputError(WHY_NOT_QUANTIZED_FULL)
    if options.quantization and method and not method.quantizes:
        raise BadInputError("LoRA on quantized weights is QLoRA: pass --technique qlora.")
    learnt = options.max_new_tokens if task_of(options).rewards else options.max_length
    return Job(
        technique="lora",
        parallel="single",
        batch=BatchShape(
            options.per_device_train_batch_size,
            options.max_length,
            labelled=1 if options.classes else options.max_target_length or learnt,
            classes=options.classes,
            target_length=options.max_target_length or 0,
            tiles=options.tiles or 0,
            task=task_of(options).name,
        ),
        precision=options.precision or "bf16",
        quantization=options.quantization or "nf4",
        optimizer=options.optim,
        attention=options.attention,
        kernels="fused" if options.use_liger_kernel else "compiled" if options.torch_compile else "plain",
        tiled_mlp=options.tiled_mlp,
        activation_offloading=options.activation_offloading,
        lora_rank=options.lora_r,
        target_modules=names_in(options.target_modules) if options.target_modules else (),
        lora_dropout=options.lora_dropout,
        offload=options.offload == "cpu",
        trains_tower=not options.freeze_vision_tower,
        cpu_operations=options.gpu == ["cpu"] and options.classes > 0,
    )


def task_of(options: PlannerOptions) -> Task:
    """Return the task that a question names, or else the one that has such rows; refuse options of different tasks."""
    asked = bool(options.classes), bool(options.max_target_length and not options.classes), bool(options.tiles)
    found = [task for task in TASKS.values() if (task.classifies, task.summarizes, task.sees) == asked]
    named = [task for task in found if options.task in (None, task.name)]
    if not named:
        raise BadInputError(
            f"--task is {options.task}, but --classes is {options.classes}, --target-len {options.max_target_length} "
            f"and --tiles {options.tiles}, which are for classification, summarization and visual_questions alone."
        )
    return named[0]


def evaluation_of(options: PlannerOptions, architecture: Architecture) -> EvaluationShape:
    """Return what the phases beside training work on: rows as long as those to train on, and a run's defaults."""
    summarizes = len(architecture.stacks) > 1
    target_length = options.max_target_length or options.max_length
    is_judged = task_of(options).is_judged and not summarizes
    return EvaluationShape(
        rows=MOST_EVALUATED_AT_ONCE,
        length=options.max_length,
        labelled=1 if options.classes else target_length,
        prompt_length=options.max_length - options.max_new_tokens * task_of(options).rewards,
        new_tokens=0 if options.classes else target_length if summarizes else options.max_new_tokens,
        beams=RunConfig.num_beams if summarizes else 1,
        judged=is_judged,
        has_independent_judge=is_judged,
        other_tokens=OTHER_TOKENS * (task_of(options).chats and not summarizes),
    )
