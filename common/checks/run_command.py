"""The command of this repository that starts a plan: `make run` with the run folder that differs least from it."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY, from_repository
from common.base.run_config import RunConfig
from common.base.run_folders import lora_of, run_folders, workflow_does, workflows_of
from common.base.specs import HasSpecs
from common.checks.folder_runs import setting_of_folder
from common.hardware.devices import CATALOGUE, CPU_DEVICE
from common.planning.architectures import read_architecture
from common.planning.job import ALL_LINEAR
from common.planning.model_configs import MODEL_CONFIGS, find_config, is_hub_id, read_config
from common.planning.plans import Plan
from common.runtime.torchrun import nodes_command

# settings of a run that a dry run tries
TRIED = ("technique", "parallel", "devices", "nodes", "sp_size", "gpu", "precision", "optim", "attention",
         "gradient_checkpointing", "per_device_train_batch_size", "target_modules")  # fmt: skip


def last_lines(plans: Sequence[Plan], rows_per_epoch: int, command_of: Callable[[Plan], str]) -> tuple[str, str]:
    """Return the answer's last two lines: what to do, and the command that does it."""
    best = plans[0]
    if not best.may_fit:
        return "Recommended: none of these, as nothing fits.", "Run: nothing yet."
    memory, gpu, usd = best.highest.phase.memory, best.highest.gpu, best.epoch_usd(rows_per_epoch)
    price = "" if usd is None else f" and {usd:,.2f} USD"
    host = f"{best.host_gib:,.0f} GiB of each machine's own memory, " if best.host_gib >= 1 else ""
    return (
        f"Recommended: {best.name}, {best.job.precision}: {memory.peak_gib:.1f} (safe: {memory.safe_gib:.1f}) of "
        f"{gpu.memory_gib:.1f} GiB, {host}{best.tokens_per_s:,.0f} tokens per s, "
        f"{best.epoch_s(rows_per_epoch) / 3600:,.2g} h{price} per epoch of {rows_per_epoch:,} rows.",
        f"Run: {first_command(plans, command_of)}",
    )


def first_command(plans: Sequence[Plan], command_of: Callable[[Plan], str]) -> str:
    """Return the first plan's command, or why it has none, and the next plan's that has one."""
    try:
        return command_of(plans[0])
    except BadInputError as refused:
        said = f"no run folder takes this plan: {refused}"
    for plan in plans[1:]:
        with suppress(BadInputError):
            if not plan.may_fit:
                return said
            host = f" ({plan.host_gib:,.0f} GiB of the machine's own memory)" if plan.job.offload else ""
            return f"{said} For {plan.name}{host}: {command_of(plan)}"
    return said


def run_command(plan: Plan, model: str, model_revision: str = "", **others: object) -> str:
    """Return `make run FOLDER=... ARGS="..."` for a plan of `model`; for several machines their torchrun command.

    `others` are more settings of the run, such as its data.
    """
    if not (task := _task_of(plan)):
        name = plan.architecture.name
        raise BadInputError(f"none has runs for {name}'s own head; with --classes it is a classifier.")
    readable = read_architecture(model, model_revision).max_length
    if plan.job.batch.length > readable:
        raise BadInputError(
            f"{model} has positions for {readable:,} tokens: give it more (rope_parameters in its config.json), or "
            f"pass --seq-len {readable}."
        )
    device = "cpu" if plan.cluster.gpus[0].name == CPU_DEVICE else "cuda"
    named = {"model": model, "model_revision": model_revision}
    return _command(plan.job, task, device, _settings(plan) | named | others, plan.cluster.nodes)


def command_of_run(run: RunConfig, device: str) -> str:
    """Return the same for a run that a dry run stood in for, on `device` (cpu, cuda)."""
    adapters = ("lora_r", "lora_dropout") if run.method.has_adapters else ()
    lengths = ("max_length", "max_target_length") if run.goal.summarizes else ("max_length",)
    answers = ("max_new_tokens",) if run.goal.rewards else ()
    names = (*TRIED, *adapters, *lengths, *answers, "model", "model_revision")
    wanted = {name: getattr(run, name) for name in names}
    return _command(run, run.task, device, wanted, run.nodes)


def _command(way: HasSpecs, task: str, device: str, wanted: dict[str, Any], nodes: int) -> str:
    """Return the command with the run folder that takes the settings with the fewest options."""
    taken, refusal = [], f"none does {way.technique} with {way.sharing}."
    for folder, literal in run_folders().items():
        is_alike = (literal.device, literal.task, literal.loop) == (device, task, "trainer")
        is_alike &= (literal.sp_size > 1) == (way.sp_size > 1)  # rows are shared in a folder of their own
        if not is_alike or not workflow_does(literal, way.technique, way.parallel):
            continue
        try:
            options = _options(folder, literal, way, wanted)
        except BadInputError as refused:
            refusal = str(refused)
        else:
            taken.append((len(options), str(folder.relative_to(REPOSITORY)), options))
    if not taken:
        raise BadInputError(refusal)
    _, folder, options = min(taken)
    if nodes == 1:
        root = "" if Path.cwd() == REPOSITORY else f" -C {shlex.quote(str(REPOSITORY))}"
        return f"make{root} run FOLDER={folder} ARGS={_as_argument(options)}"
    script = workflows_of(REPOSITORY / folder)[0].name
    started = shlex.join(nodes_command(nodes, way.devices // nodes))
    return f"on each machine: cd {folder} && {started} {script} {' '.join(options)}"


def _as_argument(options: Sequence[str]) -> str:
    """Return quoted options as one word of a shell that make gives, with its own `$` undone, to another shell."""
    words = " ".join(options).replace("$", "$$")
    return shlex.quote(words) if set(words) & set('"$`\\!') else f'"{words}"'


def _task_of(plan: Plan) -> str:
    """Return what a run with the plan's model learns; empty = nothing: no run has an encoder's own head."""
    kinds = {stack.kind for stack in plan.architecture.stacks}
    if kinds == {"decoder"}:
        return plan.job.batch.task
    if len(kinds) > 1:
        return "summarization"
    return "classification" if plan.job.batch.classes else ""


def _options(folder: Path, literal: RunConfig, way: HasSpecs, wanted: dict[str, Any]) -> list[str]:
    """Return what to pass to the folder's command, for the settings that a run like its own is to have."""
    own = setting_of_folder(folder, way.technique, way.parallel) if lora_of(folder) else literal
    wanted = wanted.copy()
    wanted |= _fitting(way, own, wanted["max_length"])
    wanted |= _model_settings(own, wanted.pop("model"), wanted.pop("model_revision"))
    if not own.per_device_eval_batch_size:  # the run chooses as the planner does
        wanted.pop("per_device_eval_batch_size", None)
    own.changed_to(**{name: value for name, value in wanted.items() if value != getattr(own, name)})
    # technique and parallelism decide about a folder's own settings: they are named where its literal has others
    base = {name: getattr(own, name) for name in wanted}
    base |= {"technique": literal.technique, "parallel": literal.parallel}
    # the batch is named in any case: it is what one comes back to change
    changed = {
        name: value for name, value in wanted.items() if value != base[name] or name == "per_device_train_batch_size"
    }
    spelt = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in changed.items()}
    return [word for name, value in spelt.items() for word in (f"--{name}", shlex.quote(value))]


def _settings(plan: Plan) -> dict[str, object]:
    """Return the settings of a run that is to do as planned."""
    job, gpu = plan.job, plan.cluster.gpus[0]
    named = () if job.target_modules == ALL_LINEAR else job.target_modules
    keeps_fp32_copy = job.parallelism.uses_deepspeed and job.precision == "bf16-mixed"
    wanted: dict[str, object] = {
        "technique": job.technique,
        "parallel": job.parallel,
        "devices": job.devices,
        "nodes": plan.cluster.nodes,
        **({"gpu": gpu.name} if gpu in CATALOGUE else {}),
        # DeepSpeed keeps an fp32 copy of weights in 16 bits in any case, and a run calls it bf16
        "precision": "bf16" if keeps_fp32_copy else job.precision,
        "optim": job.optimizer,
        "attention": job.attention,
        "use_liger_kernel": job.kernels == "fused",
        "torch_compile": job.kernels == "compiled",
        "gradient_checkpointing": job.gradient_checkpointing,
        "tiled_mlp": job.tiled_mlp,
        "activation_offloading": job.offloads_layer_inputs,
        "per_device_train_batch_size": job.batch.rows,
        "gradient_accumulation_steps": job.accumulation_steps,
        **job.batch.lengths,
        **({"freeze_vision_tower": not job.trains_tower} if plan.architecture.tower else {}),
        "target_modules": ",".join(named) or ("all" if job.trains_all else "all-linear"),
        "offload": "cpu" if job.offload else "none",
        "dp_replicate_size": job.dp_replicate_size,
        "sp_size": job.sp_size,
        "micro_batches": job.micro_batches,
    }
    if job.evaluation:
        wanted["per_device_eval_batch_size"] = job.evaluation.rows
    if job.method.has_adapters:
        wanted |= {"lora_r": job.lora_rank, "lora_dropout": job.lora_dropout}
    if job.parallelism.pipelines:
        wanted["schedule"] = job.schedule
    if job.method.quantizes:
        wanted["quantization"] = job.quantization
    if len(plan.architecture.stacks) > 1:
        wanted["max_target_length"] = job.batch.target_length or job.batch.length
    return wanted


def _fitting(way: HasSpecs, own: RunConfig, length: int) -> dict[str, object]:
    """Return what has to change besides in a folder's own run, so that its settings do not exclude each other."""
    changes: dict[str, object] = {}
    if way.data_parallel_ranks == 1:
        changes["learning_rate_scaling"] = "none"
    if own.pad_to_multiple_of and length % own.pad_to_multiple_of:
        changes["pad_to_multiple_of"] = 0
    return changes


def _model_settings(own: RunConfig, model: str, model_revision: str) -> dict[str, object]:
    """Return the settings that name the model: the folder's own where it has the same shape."""
    shape = find_config(model, model_revision)
    with suppress(BadInputError):
        if not model_revision and find_config(own.model) == shape:
            return {"model": own.model}
    if is_hub_id(model):
        return {"model": model, "model_revision": model_revision}
    if shape.parent != MODEL_CONFIGS:
        folder = shape.parent.absolute()  # make stands elsewhere, perhaps
        return {"model": str(from_repository(folder))}
    weights = read_config(shape, model).get("_weights")
    return {"model": weights} if weights else {"model": shape.stem, "weights": "random"}
