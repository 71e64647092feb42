"""What a run is asked to do: all groups of settings in one frozen dataclass, checked when it is made."""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from common.base import settings as groups
from common.base.errors import BadInputError, begin_of, closest
from common.base.paths import REPOSITORY
from common.base.secrets import secret_in, secrets_here
from common.base.settings import LIMITS, OnlyFor, Range
from common.base.specs import TASKS, HasSpecs, Task, equal_groups

LAST = "last"  # the setting `resume_from_checkpoint` for a run's own newest whole checkpoint
# of Transformers' names, those whose states can be divided: PyTorch's own, which work element by element
SHARDED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
RUN_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
PREVIOUS, UNFINISHED, BAD = ".previous", ".unfinished", ".bad"
# the names of folders that were set aside: earlier runs, unfinished ones, and damaged checkpoints
SET_ASIDE = re.compile(rf".*({'|'.join(map(re.escape, (PREVIOUS, UNFINISHED, BAD)))})(-\d+)?", re.IGNORECASE)
LARGEST = 2**31 - 1  # what the libraries below count with
OF_FILES = ("model", "data", "forgetting_data", "device_map", "resume_from_checkpoint", "run_folder", "results_root")
_SCOPES = [(name, each) for name, limits in LIMITS.items() for each in limits if isinstance(each, OnlyFor)]
LONGEST_NAME = 255  # bytes of a file's name, on every usual file system


def not_meant_for(run: "RunConfig") -> dict[str, str]:
    """Return the settings that mean nothing for a run, each with the runs that it is for."""
    return {name: scope.runs for name, scope in _SCOPES if not scope.applies(run)}


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Refuse, by BadInputError, a setting that is none of its choices."""
    choices = list(choices)
    if value not in choices:
        meant = closest(value, choices)
        question = f" (did you mean {meant}?)" if meant else ""
        raise BadInputError(f"{name} is {value!r}: choose one of {', '.join(map(repr, choices))}{question}.")


def names_in(setting: str) -> tuple[str, ...]:
    """Return the names that stand in a setting with commas between."""
    return tuple(name.strip() for name in setting.split(","))


def is_expression(target_modules: str) -> bool:
    """Return whether targets are given by a regular expression, and not by names."""
    return re.fullmatch(r"[\w.,\s-]*", target_modules) is None


@dataclass(frozen=True)
class RunConfig(
    groups.TrackingSettings,
    groups.EvaluationSettings,
    groups.ParallelismSettings,
    groups.AdapterSettings,
    groups.TrainingSettings,
    groups.DataSettings,
    groups.ModelSettings,
    HasSpecs,
):
    """One fine-tuning run: every group's settings; what cannot be run raises BadInputError."""

    def __post_init__(self) -> None:
        self.check_each()
        self._check_secrets()
        if refusal := next((sentence for is_broken, sentence in _rules_for(self) if is_broken), ""):
            raise BadInputError(refusal)

    def check_each(self) -> None:
        """Check each setting by itself: its kind, its choices, its range, and that numbers can be counted with."""
        for name, default, kind, choices, ranges in _checks():
            value = getattr(self, name)
            if value == default and type(value) is type(default):
                continue  # most are, and thousands of records are read at once
            if choices is not None:
                check_choice(name, value, choices)
            elif wrong := _wrong_with(value, kind, default, name in OF_FILES):
                raise BadInputError(f"{name} {wrong}")
            for limit in ranges:
                if not limit.holds(value):
                    raise BadInputError(f"{name} is {value}{limit.refusal.format(name=name, default=default)}")

    def _check_secrets(self) -> None:
        """Refuse a token or a password, which records and notebooks would keep."""
        secrets = secrets_here()
        for name, value in self.to_dict().items():
            if isinstance(value, str) and (found := secret_in(value, secrets)):
                raise BadInputError(f"{name} has {found} in it, which records would keep: leave it in the environment.")

    @property
    def goal(self) -> Task:
        """The task's row in the table."""
        return TASKS[self.task]

    @property
    def tells_forgetting(self) -> bool:
        """Whether other texts are looked at before and after; a model of random weights has nothing to forget."""
        is_asked = "none" not in (self.forgetting_data, self.baseline)
        return is_asked and self.goal.chats and self.weights == "pretrained"

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names in `target_modules`."""
        return names_in(self.target_modules)

    @property
    def targets_head(self) -> bool:
        """Whether `target_modules` has a decoder's head, by its name or by a regular expression."""
        if not is_expression(self.target_modules):
            return "lm_head" in self.target_names
        with suppress(re.error):  # refused where layers are looked for
            return re.fullmatch(self.target_modules, "lm_head") is not None
        return False

    @property
    def world_size(self) -> int:
        """Ranks (processes) of the run."""
        return 1 if self.parallelism.in_one_process else self.devices

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.world_size // self.nodes

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
        return self.per_device_train_batch_size * -(-self.partition_count // self.data_parallel_ranks)

    @property
    def is_padding_free(self) -> bool:
        """Whether training rows are packed without padding; what auto means for a model, `suited_to_model` finds."""
        return self.padding_free == "yes"

    @property
    def groups_by_length(self) -> bool:
        """Whether training rows are sorted by length within windows of some steps."""
        return self.train_sampling_strategy == "group_by_length" or (
            self.train_sampling_strategy == "auto" and not self.is_padding_free
        )

    @property
    def effective_batch_size(self) -> int:
        """Rows per optimizer step over all data-parallel ranks."""
        learnt = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.partition_count
        return learnt // self.num_generations if self.goal.rewards else learnt

    @property
    def rows_drawn(self) -> int:
        """Rows that a rank draws at once: with rewards a step's prompts, whose answers it learns batch by batch."""
        rows = self.per_device_train_batch_size
        return rows * self.gradient_accumulation_steps // self.num_generations if self.goal.rewards else rows

    def total_steps(self, rows: int) -> int:
        """Return the optimizer steps of the whole run with so many training rows."""
        return self.max_steps if self.max_steps > 0 else self.num_train_epochs * -(-rows // self.effective_batch_size)

    @property
    def compute_dtype(self) -> str:
        """The number format that matrix products are computed in: `fp32`, `bf16` or `fp16`."""
        return self.precision.removesuffix("-mixed")

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after warm-up, scaled with the ranks: sqrt as in Krizhevsky 2014, linear as in Goyal 2017.

        ("One weird trick for parallelizing convolutional neural networks"; "Accurate, Large Minibatch SGD".)
        """
        factors = {"none": 1, "sqrt": math.sqrt(self.data_parallel_ranks), "linear": self.data_parallel_ranks}
        return self.learning_rate * factors[self.learning_rate_scaling]

    def results_folder(self, run_name: str) -> Path:
        """Return where this run writes."""
        root = Path(self.results_root).expanduser() if self.results_root else REPOSITORY / self.run_folder
        return root / "results" / run_name

    def to_dict(self) -> dict[str, object]:
        """Return every setting, for the record."""
        return asdict(self)

    @classmethod
    def of_record(cls, config: dict[str, Any]) -> "RunConfig":
        """Return the run that a record describes, without settings that meant nothing for it: older runs took them."""
        config = {name: value for name, value in config.items() if name not in GONE}
        unknown = config.keys() - DEFAULTS.keys()
        if unknown:
            raise BadInputError(f"The run had the settings {', '.join(sorted(unknown))}, unknown to this code.")
        idle = idle_settings(config)
        return cls(**{name: value for name, value in config.items() if name not in idle})

    def changed_to(self, **changes: Any) -> "RunConfig":
        """Return the same run with other settings; those that mean nothing for it any more fall to their defaults."""
        settings = {**self.to_dict(), **changes}
        idle = idle_settings(settings)
        settings |= {name: getattr(RunConfig, name) for name in idle if name not in changes}
        return RunConfig(**settings)


DEFAULTS = {each.name: each.default for each in fields(RunConfig)}
# settings that older records have: how steps were divided, which what was trained does not show
GONE = {"max_batch_tokens", "prefetch", "wrap"}


def _wrong_with(value: object, kind: type, default: object, is_of_a_file: bool) -> str:
    """Return why a setting of this kind cannot have this value; empty = it can."""
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        return f"is {value!r}, but must be of type {kind.__name__}."
    if kind is not str:
        if abs(value) <= LARGEST:  # which nan is not
            return ""
        return f"is {begin_of(value, 40)}, but must be finite and at most {LARGEST:,}: pass one such as {default}."
    if "\0" in value:
        return "has a zero byte in it: remove it."
    parts = [] if "://" in value or not is_of_a_file else value.split("/")
    if any(len(part.encode(errors="surrogateescape")) > LONGEST_NAME for part in parts):
        return f"is {begin_of(value, 40)}, but a file's name has at most {LONGEST_NAME} bytes: correct it."
    return ""


def idle_settings(settings: dict[str, Any]) -> dict[str, str]:
    """Return those of settings with known names that mean nothing for their run, each with the runs that it is for."""
    return not_meant_for(checked_alone(settings))


def checked_alone(settings: dict[str, Any]) -> RunConfig:
    """Return settings with known names as a run; each is checked, but not whether they contradict each other."""
    run = object.__new__(RunConfig)
    run.__dict__.update(settings)  # the others' defaults are the class's; `__init__` would set each by itself
    run.check_each()
    return run


@cache
def _checks() -> list[tuple[str, object, type, tuple[object, ...] | None, list[Range]]]:
    """Return what each setting is checked against: its name, default, kind, choices and ranges."""
    kinds, checks = get_type_hints(RunConfig), []
    for each in fields(RunConfig):
        kind = kinds[each.name]
        choices = get_args(kind) if get_origin(kind) is Literal else each.metadata.get("choices")
        ranges = [limit for limit in LIMITS[each.name] if isinstance(limit, Range)]
        checks.append((each.name, each.default, kind, choices, ranges))
    return checks


def _rules_for(run: RunConfig) -> Iterator[tuple[object, str]]:
    """Yield for each setting that means nothing for the run, or excludes another, whether it is set, and a refusal."""
    for name, runs in not_meant_for(run).items():
        value = getattr(run, name)
        yield value != DEFAULTS[name], f"{name} is {value}, which is for {runs}: leave --{name} out."
    sharing, goal, devices, parts = run.parallelism, run.goal, run.devices, run.micro_batches
    on_one_cpu = sharing.layers_in_turn and run.device == "cpu"
    rows, multiple = run.per_device_train_batch_size, run.pad_to_multiple_of or 1
    limits = ("max_length", "max_target_length") if goal.summarizes else ("max_length",)
    limit = next((name for name in limits if getattr(run, name) % multiple), limits[0])
    longest, uses_flash = getattr(run, limit), run.attention.startswith("flash")
    in_16_bits = run.precision == "bf16" or (run.precision == "fp16-mixed" and run.method.has_plain_adapters)
    is_fp32_or_bf16_mixed = run.precision in ("fp32", "bf16-mixed")
    yield from (
        # devices
        (sharing.is_single and devices != 1,
         f"devices is {devices}, but parallel is single: pass --devices 1, or --parallel ddp in 2.2, 2.3 or 2.6."),
        (on_one_cpu and devices != 1,
         f"devices is {devices}, but on CPU mp has one: pass --devices 1, and --stages {devices} to divide layers."),
        (run.stages not in (0, devices) and not on_one_cpu,
         f"stages is {run.stages}, but there is one for each of {devices} devices: leave --stages out."),
        (sharing.splits_layers and run.stage_count < 2,
         f"parallel is {run.parallel}, but there is one stage: pass --{'stages' if on_one_cpu else 'devices'} 2 or "
         "more."),
        (sharing.divides_tensors and devices < 2,
         f"parallel is {run.parallel}, but there is {devices} device, and nothing to divide: pass --devices 2 or more"),
        (devices % run.nodes,
         f"devices is {devices}, but cannot be spread evenly over {run.nodes} nodes: pass --devices "
         f"{-(-devices // run.nodes) * run.nodes}."),
        (run.unshardable(), run.unshardable()),
        (devices % run.sp_size,
         f"sp_size is {run.sp_size}, but {devices} devices form no equal groups of so many: pass --sp "
         f"{equal_groups(devices, run.sp_size)}."),
        (run.sp_size > 1 and run.padding_free == "no",
         f"sp_size is {run.sp_size}, but padding_free is no, and ranks share rows that are packed: leave it out."),
        (0 < run.partitions < run.data_parallel_ranks,
         f"partitions is {run.partitions}, but there are {run.data_parallel_ranks} ranks: pass one for each, or 0."),
        # micro-batches
        (sharing.pipelines and run.schedule == "1f1b" and parts < devices,
         f"micro_batches is {parts}, but 1F1B needs one for each of {devices} stages: pass more, or --schedule gpipe."),
        (rows % parts,
         f"per_device_train_batch_size is {rows}, which {parts} micro-batches do not divide: pass "
         f"--per_device_train_batch_size {rows - rows % parts or parts}, or --micro_batches with a divisor."),
        (sharing.pipelines and run.device_map == "auto",
         "device_map is auto, which is for mp: pass balanced, even, or a JSON file."),
        # number formats
        (run.method.quantizes and not sharing.takes_4_bits,
         f"technique is {run.technique}, but parallel is {run.parallel}: weights in 4 bits are sharded by fsdp, or "
         "whole on each rank with ddp (2.3)."),
        (run.precision == "bf16-mixed" and sharing.uses_deepspeed,
         f"precision is bf16-mixed, but parallel is {run.parallel}, and DeepSpeed's bf16 keeps an fp32 copy of the "
         "weights already: pass --precision bf16."),
        (run.precision == "fp16-mixed" and (sharing.pipelines or sharing.shards),
         f"precision is fp16-mixed, which {run.parallel} does not scale losses for: pass bf16-mixed or fp32."),
        (sharing.splits_matrices and not is_fp32_or_bf16_mixed,
         f"parallel is {run.parallel}, but precision is {run.precision}: pass --precision fp32 or bf16-mixed."),
        (run.loop != "trainer" and not is_fp32_or_bf16_mixed,
         f"loop is {run.loop}, but precision is {run.precision}: pass --precision fp32 or bf16-mixed."),
        (run.precision == "fp16-mixed" and run.method.has_plain_adapters and not run.freeze_vision_tower,
         "freeze_vision_tower is False, but precision is fp16-mixed, where LoRA keeps the model in fp16: pass fp32."),
        # what is trained, and how
        (run.technique not in goal.techniques or run.parallel not in goal.parallelisms,
         f"task is {run.task}, but technique is {run.technique} and parallel {run.parallel}: it is done with "
         f"{' or '.join(goal.techniques)}, and {', '.join(goal.parallelisms)}{goal.number and f' ({goal.number})'}."),
        (sharing.divides_tensors and run.optim not in SHARDED_OPTIMIZERS,
         f"optim is {run.optim}, which {sharing.sharded_by or 'tensor parallelism'} cannot divide: choose one of "
         f"{', '.join(SHARDED_OPTIMIZERS)}."),
        (run.offload == "cpu" and run.device == "cpu",
         "offload is cpu, but device is cpu, where shards are already: leave --offload out."),
        (run.gradient_checkpointing and sharing.splits_matrices,
         f"gradient_checkpointing is True, but parallel is {run.parallel}, which is not tested with it: pass "
         "--gradient_checkpointing false."),
        (run.torch_compile and not sharing.calls_whole_layers,
         f"torch_compile is True, but parallel is {run.parallel}, not tested with it: pass --torch_compile false."),
        (run.torch_compile and (run.tiled_mlp or run.sp_size > 1),
         f"torch_compile is True, but tiled_mlp is {run.tiled_mlp} and sp_size {run.sp_size}, not tested with it: pass "
         "--torch_compile false."),
        (run.torch_compile and run.loop != "trainer",
         f"torch_compile is True, but loop is {run.loop}: pass --torch_compile false."),
        (run.method.has_adapters and run.target_modules == "all",
         "target_modules is all, but adapters stand beside linear layers: pass all-linear."),
        (run.use_liger_kernel and run.method.has_adapters and run.targets_head,
         f"target_modules is {run.target_modules}, but Liger's loss reads the head without its adapter: leave it out."),
        # rows and attention
        (run.loss_type in (("dapo", "grpo") if goal.compares else ("sigmoid", "sft")),
         f"loss_type is {run.loss_type}, but task is {run.task}: pass one of this task, or auto."),
        (goal.compares and not run.beta, "beta is 0.0, with which DPO learns nothing: pass one above 0, such as 0.1."),
        (goal.rewards and rows * run.gradient_accumulation_steps % run.num_generations,
         f"num_generations is {run.num_generations}, but a rank learns from {rows} answers "
         f"{run.gradient_accumulation_steps} times a step, no whole number of prompts: pass --batch_size "
         f"{-(-rows // run.num_generations) * run.num_generations}."),
        (longest % multiple,
         f"pad_to_multiple_of is {multiple}, but {limit} {longest} is no multiple of it: pass --{limit} "
         f"{-(-longest // multiple) * multiple}."),
        (multiple > 1 and (run.is_padding_free or run.sp_size > 1),
         f"pad_to_multiple_of is {multiple}, but rows are packed (padding_free is {run.padding_free}, sp_size "
         f"{run.sp_size}): leave one of them out."),
        (run.is_padding_free and run.attention == "eager",
         f"padding_free is {run.padding_free}, but attention is eager, which does not separate rows: pass sdpa."),
        (run.sp_size > 1 and run.attention != "sdpa",
         f"sp_size is {run.sp_size}, but attention is {run.attention}, which does not exchange heads: pass "
         "--attention sdpa, whose kernel on a GPU is a flash kernel, too."),
        (uses_flash and run.device == "cpu",
         f"attention is {run.attention}, but device is cpu, where flash-attn has no kernel: pass sdpa."),
        (uses_flash and not in_16_bits and not (run.precision == "bf16-mixed" and sharing.uses_fsdp),
         f"attention is {run.attention}, but precision is {run.precision}, with fp32 weights: pass --precision bf16."),
        # names
        (run.run_name and not RUN_NAME_PATTERN.fullmatch(run.run_name),
         f"run_name {begin_of(run.run_name)!r} cannot name a folder: use 1 to 100 letters, digits, '.', '_', '-'."),
        (SET_ASIDE.fullmatch(run.run_name),
         f"run_name is {run.run_name}, and names that end so are kept for runs that were set aside: pass another."),
    )  # fmt: skip
