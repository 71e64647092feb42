"""The real training step on the real devices, so that a run fails in its first minute and not in its third hour.

    python -m common.preflight 2.1_lora_finetuning/run_0_cpu_x1
    python -m common.preflight 2.2_lora_finetuning_with_ddp/run_1_a6000_48g_x2 --seq-len 1024 --batch_size 4

Settings, model, data and plan are checked first. Then every rank builds the model, or its stage, with random weights
of its real shape (nothing is downloaded), and takes one step of each phase of a run: three optimizer steps on the
longest batch that can come up, a batch of validation, saving and reloading what was trained, and answers to a batch by
the whole model, judged as in the evaluations before and after. What was measured is called so; the rest is projected.
Nothing is written into the repository; `--json FILE` keeps the result as data.

Exit code 0: it passed; 1: it does not fit, or something failed; 2: the question is wrong.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate.utils import gather_object
from tabulate import tabulate
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from common.base.command_line import SPEAK_FIRST_S, refuse_half_a_rank, refused_in_one_sentence, silent_if_well
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.run_config import LARGEST, RunConfig
from common.checks.folder_runs import run_of_folder
from common.checks.folder_training import device_map_of_rank, tried_by_folder
from common.checks.inputs import check_room_to_save, check_settings, check_training_rows
from common.checks.optimizers import check_schedule
from common.checks.tried_rows import Rows, batch_of, rows_of_length, rows_of_run
from common.data.pictures import pixels_of
from common.data.splits import load_splits
from common.hardware.devices import CPU_DEVICE, Gpu, cpu_device, find_gpu, forget_peak, gpu_of_device, gpus, read_memory
from common.models.answering import answering_run, answering_stages, load_answering
from common.models.freeing import free_model
from common.models.loading import load_tokenizer, longest_readable
from common.models.merging import reloaded_difference
from common.models.placement import Placement, evaluation_of_rows, place_stages, with_rows_at_once
from common.planning.architectures import UnknownArchitectureError, read_architecture
from common.planning.job import OPTIMIZER_BYTES, BatchShape, EvaluationShape
from common.planning.plans import LARGEST_BATCH, Plan, plan_run, why
from common.planning.run_jobs import evaluation_of_run
from common.records.store import without_paths, write_json
from common.runtime.launchers import ranks_command
from common.runtime.rank import rank_started
from common.runtime.recorder import Trial
from common.runtime.world import Rank, detect_launcher, is_main_process
from common.tasks.answers import Judge, Texts, independent_judges
from common.training.export import save_and_free
from common.training.loop import TrainingLoop

STEPS = 3  # of the optimizer; the first one also warms up, so that the last two are timed


# -- what is planned


def device_of(run: RunConfig) -> Gpu | None:
    """Return a device to plan with: the GPU at hand, or the one that the folder was made for; None: both are unknown.

    The ranks of a CPU run share the machine's memory: each has an equal part.
    """
    if run.device == "cpu":
        cpu = cpu_device(read_memory("cpu").now_gib)
        return replace(cpu, memory_gib=cpu.memory_gib / run.world_size)
    return gpu_of_device(gpus()[1][0]) or (find_gpu(run.gpu) if run.gpu else None)


def place_and_plan(
    run: RunConfig, batch: BatchShape, evaluation: EvaluationShape | None = None
) -> tuple[Placement, str]:
    """Return which stage holds which layers (with mp and pp) with the plan, and why there is none, where it is None.

    Raises:
        BadInputError: layers cannot be placed, for which the planner must know model, optimizer and device.
    """
    device, no_plan = device_of(run), ""
    try:
        read_architecture(run.model, run.model_revision)
    except UnknownArchitectureError as unknown:
        no_plan = str(unknown)
    if run.optim not in OPTIMIZER_BYTES:
        no_plan = f"the planner does not know the optimizer {run.optim}"
    if device is None:
        no_plan = f"the catalogue lacks {gpus()[1][0]}; --gpu may name one of like memory and speed"
    if run.parallelism.splits_layers:
        if no_plan:
            raise BadInputError(f"Layers are placed by their planned memory, but {no_plan}.")
        return place_stages(run, batch, device, evaluation), ""
    return Placement({}, (), None if no_plan else plan_run(run, batch, device, evaluation)), no_plan


def total_steps(run: RunConfig, row_count: int | None) -> int | None:
    """Return the number of optimizer steps of the whole run; None: it depends on `row_count`, which is not known."""
    if run.max_steps > 0:
        return run.max_steps
    return None if row_count is None else run.total_steps(row_count)


# -- on the devices


@dataclass(eq=False)
class StepClock(TrainerCallback):
    """Notes when each optimizer step ended; `devices` (`cpu`, `cuda:0`) are waited for before the clock is read.

    `begin` is called once everything is built, before the first step.
    """

    devices: Sequence[str]
    begin: Callable[[], object] = lambda: None
    ends_s: list[float] = field(default_factory=list)

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Tell of it."""
        self.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Note the time."""
        for device in self.devices:
            if device != "cpu":
                torch.accelerator.synchronize(device)
        self.ends_s.append(time.perf_counter())

    @property
    def step_time_s(self) -> float:
        """Seconds of a step, the first one left out."""
        return median(end_s - start_s for start_s, end_s in zip(self.ends_s, self.ends_s[1:], strict=False))


@dataclass(frozen=True)
class Measured:
    """What a rank measured on one of its devices; memory in GiB, on CPU of the process (RSS), else as allocated.

    `peak_gib` is that of the training steps. `logit_difference` is the largest absolute one between what was trained
    and what was reloaded: on the first rank that knows the trained model's, or on all that share one; others have 0.
    """

    rank: int
    device: str
    peak_gib: float
    validation_peak_gib: float
    merging_peak_gib: float
    answers_peak_gib: float
    capacity_gib: float
    step_time_s: float
    validation_time_s: float
    answers_time_s: float
    logit_difference: float


@contextmanager
def phase(name: str, rank: Rank, remedy: str) -> Iterator[None]:
    """Say on rank 0 when a phase starts and how long it took; exit with code 1 and `remedy` where memory runs out.

    Peaks of memory are those of the phase; on CPU of the process.
    """
    start_s = time.perf_counter()
    for device in rank.devices:
        forget_peak(device)
    if rank.is_main:
        print(f"{name} ...")
    try:
        yield
    except torch.OutOfMemoryError:
        if not rank.is_main:
            time.sleep(SPEAK_FIRST_S)  # torchrun ends the others once one has gone: one sentence is enough
        memories = {device: read_memory(device) for device in rank.devices}
        device, memory = max(memories.items(), key=lambda pair: pair[1].peak_gib / pair[1].total_gib)
        print(
            f"error: {name}: out of memory on {device}, {memory.peak_gib:.1f} of {memory.total_gib:.1f} GiB "
            f"allocated; {remedy}.",
            file=sys.stderr,
        )
        sys.exit(1)
    if rank.is_main:
        print(f"{name}: {time.perf_counter() - start_s:.1f} s")


def planned_gib(plan: Plan | None, number: int) -> float | None:
    """Return the planned memory that `Measured` has measured: of the whole process on CPU, on a GPU without overhead.

    `number` counts devices, and so with one device each, ranks. None without a plan.
    """
    if plan is None:
        return None
    memory = plan.devices[number]
    return memory.peak_gib if plan.cluster.gpus[number].name == CPU_DEVICE else memory.allocated_gib


def smaller_batch(run: RunConfig, rows: int, plan: Plan | None) -> str:
    """Return what to do when `rows` at once run out of memory: what fits by the plan, or half where it was wrong."""
    said = f"the plan said {max(memory.peak_gib for memory in plan.devices):.1f} GiB, " if plan else ""
    is_foreseen = plan and not plan.may_fit
    by_plan = plan.max_batch_size if is_foreseen else 0
    is_known = is_foreseen and run.micro_batches == 1  # fewer rows may fit in fewer micro-batches
    fitting, parts = by_plan or (0 if is_known else rows // 2), run.micro_batches
    if fitting == 0:
        return f"{said}and not even one row fits: set gradient_checkpointing, lower --max_length, or use larger devices"
    if fitting >= parts:
        fitting, divided = fitting - fitting % parts, ""
    else:
        needs_gpipe = run.schedule == "1f1b" and fitting < run.stage_count
        divided = f" --micro_batches {fitting}" + " --schedule gpipe" * needs_gpipe
    accumulated = -(-rows * run.gradient_accumulation_steps // fitting)
    return f"{said}try --batch_size {fitting}{divided} --gradient_accumulation_steps {accumulated}"


def measure(run: RunConfig, rows: Rows, placement: Placement, rank: Rank, folder: Path) -> list[Measured]:
    """Build, train, validate, save and reload on this rank's devices; `folder` takes what is saved, of all ranks.

    Raises:
        SystemExit: memory ran out; the sentence has been said.
        RuntimeError: what was saved is not what was trained.
    """
    elsewhere = "see in nvidia-smi what else is on the device, or use a smaller --model"
    smaller = smaller_batch(run, len(rows.train), placement.plan)
    with ExitStack() as begun:  # the folder's function builds and trains: the clock hears where the one ends

        def begin_steps() -> None:
            begun.close()
            begun.enter_context(phase(f"{STEPS} steps on the longest batch", rank, smaller))

        begun.enter_context(phase("build model", rank, elsewhere))
        clock = StepClock(rank.devices, begin_steps)
        tried = replace(run, max_steps=STEPS, report_to="none")
        loop = tried_by_folder(Trial(tried, rank, folder, [clock]), rows, placement)
        training = [read_memory(device) for device in rank.devices]
    half = len(rows.validation) // 2 or 1
    fewer = f"validation and answers have batches of their own: pass --per_device_eval_batch_size {half}"
    with phase("validation of one batch", rank, fewer):
        start_s = time.perf_counter()
        loop.validate()  # ends with metrics on the host, so that the devices have finished
        validation_time_s = time.perf_counter() - start_s
        validation = [read_memory(device) for device in rank.devices]
    with phase("save and reload", rank, elsewhere):
        difference = save_and_reload(loop, placement, folder)
        merging = [read_memory(device) for device in rank.devices]
    with phase("answers to one batch", rank, fewer):
        start_s = time.perf_counter()
        answer_one_batch(run, rows, placement, rank)
        answers_time_s = time.perf_counter() - start_s
        answers = [read_memory(device) for device in rank.devices]
    return [
        Measured(
            rank.rank,
            device,
            trained.peak_gib,
            *(memory.peak_gib for memory in others),
            trained.total_gib / (rank.world_size if device == "cpu" else 1),
            clock.step_time_s,
            validation_time_s,
            answers_time_s,
            difference,
        )
        for device, trained, *others in zip(rank.devices, training, validation, merging, answers, strict=True)
    ]


def save_and_reload(loop: TrainingLoop, placement: Placement, folder: Path) -> float:
    """Save the adapter, or the model, and load it again to answer; return the largest absolute difference of logits.

    On the first rank that knows the trained model's, or on all that share one. The trained model is freed, so that a
    device holds one model at a time.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    run, rank = loop.run, loop.rank
    batch, expected, compares = save_and_free(loop, folder)
    if not (compares or answering_stages(run) > 1):
        return 0.0
    load = partial(load_answering, run, rank, device_map=device_map_of_rank(placement, rank))
    return reloaded_difference(answering_run(run), folder, load, batch, expected, loop.log.memory) or 0.0


@torch.no_grad()
def answer_one_batch(run: RunConfig, rows: Rows, placement: Placement, rank: Rank) -> None:
    """Answer (summarize, label) as many of the longest rows as the run does at once, with the base as it loads it.

    The base and the independent judge compare the answers, as they do before training.
    """
    model, tokenizer = load_answering(run, rank, device_map=device_map_of_rank(placement, rank)), load_tokenizer(run)
    answered = list(islice(cycle(rows.validation), answered_at_once(run, rows, answering_stages(run))))
    readable = longest_readable(model.config)
    room = max(1, readable - run.max_new_tokens) if readable and run.goal.chats else None
    prompts = {"input_ids": [row["input_ids"][:room] for row in answered]}
    batch = tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
    if run.goal.sees:
        batch.update(pixels_of([row["picture"] for row in answered], tokenizer))
    batch = batch.to(model.device)
    if run.goal.classifies:
        model(**batch)
    else:
        length = {"min_new_tokens": run.max_new_tokens, "max_new_tokens": run.max_new_tokens}
        beams = run.num_beams if run.goal.summarizes else 1
        generated = model.generate(**batch, do_sample=False, num_beams=beams, **length)
    if run.goal.is_judged:
        answers = tokenizer.batch_decode(generated[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        texts = Texts(answers, references=answers, shuffled=[None] * len(answers))
        Judge("base", model, tokenizer).judge(texts, range(len(answers)))
        for judge in independent_judges(run, rank.device):
            judge.judge(texts, range(answered_at_once(run, rows, stages=1)))
    free_model(model)


def answered_at_once(run: RunConfig, rows: Rows, stages: int) -> int:
    """Return the rows of the run's largest batch of a model that `stages` ranks share: no more than the test has."""
    return evaluation_of_run(run, batch_of(run, rows)).answered(stages, run.world_size // stages)


def measure_all(run: RunConfig, rows: Rows, placement: Placement) -> list[Measured]:
    """Return on every rank what `measure` found on the devices of all ranks, in their order."""
    with rank_started(run) as rank, tempfile.TemporaryDirectory(prefix="preflight-") as own_folder:
        folder = Path(gather_object([own_folder])[0])  # stages save parts of one model
        return gather_object(measure(run, rows, placement, rank, folder))


# -- the answer


def announcement(run: RunConfig, rows: Rows, plan: Plan | None, no_plan: str) -> str:
    """Return what is going to be tried, and what was planned for it, or why nothing was."""
    batch = batch_of(run, rows)
    summaries = f" with summaries of up to {batch.target_length}" if batch.target_length else ""
    shape = f"{batch.rows} rows of up to {batch.length} tokens{summaries} ({rows.source})"
    tried = f"tries {run.technique} of {run.model} with {run.parallel} on {run.devices} x {run.device}: {shape}"
    if plan is None:
        return f"{tried}\nno plan: {no_plan}"
    memory, gpu = plan.fullest
    layers, where = "", "per device"
    if plan.job.parallelism.splits_layers:
        layers = f"layers on each stage: {', '.join(str(sum(share.layers)) for share in plan.shares)}\n"
        where = "on the fullest device"
    return (
        f"{tried}\n{layers}planned for {gpu.name}: {memory.peak_gib:.2f} of {gpu.memory_gib:.1f} GiB {where}, "
        f"{planned_step_s(run, plan):.3g} s per step; {why(plan)}"
        + (f"\nbeside training, {plan.higher_phase}" if plan.higher_phase else "")
        + (f"\nof the run itself, {plan.phase_times.said}" if plan.phase_times else "")
    )


def planned_step_s(run: RunConfig, plan: Plan) -> float:
    """Return the planned seconds of an optimizer step, with all its micro-batches."""
    return plan.time.total_s * run.gradient_accumulation_steps


def memory_table(plan: Plan | None, measured: Sequence[Measured]) -> str:
    """Return the memory of the training step, planned and measured, one row per device of each rank."""
    rows = []
    for number, found in enumerate(measured):
        planned = planned_gib(plan, number)
        rows.append([
            found.rank,
            found.device,
            "no plan" if planned is None else f"{planned:.2f}",
            f"{found.peak_gib:.2f}",
            "-" if planned is None else f"{found.peak_gib / planned - 1:+.0%}",
            f"{found.capacity_gib:.1f}",
        ])  # fmt: skip
    return tabulate(
        rows,
        ["rank", "device", "planned\nGiB", "measured\nGiB", "difference", "capacity\nGiB"],
        tablefmt="rounded_outline",
        colalign=("right", "left", "right", "right", "right", "right"),
        disable_numparse=True,
    )


def largest_batch(plan: Plan, measured: Sequence[Measured]) -> tuple[int, float]:
    """Return the rows per rank that fit if memory grows as measured, and measured over planned memory."""
    factor = max(found.peak_gib / planned_gib(plan, number) for number, found in enumerate(measured))
    devices = tuple(
        replace(gpu, memory_gib=found.capacity_gib / factor)
        for gpu, found in zip(plan.cluster.gpus, measured, strict=True)
    )
    return replace(plan, cluster=replace(plan.cluster, gpus=devices)).max_batch_size, factor


def figures(
    run: RunConfig, rows: Rows, plan: Plan | None, no_plan: str, measured: Sequence[Measured]
) -> dict[str, Any]:
    """Return the result as data: memory in GiB, times in seconds; without a plan, what is planned is None."""
    batch = batch_of(run, rows)
    slowest_or_fullest = ("step_time_s", "validation_time_s", "validation_peak_gib", "merging_peak_gib",
                          "answers_time_s", "answers_peak_gib", "logit_difference")  # fmt: skip
    return {
        "settings": without_paths(run.to_dict()),
        "rows": batch.rows,
        "tokens": batch.length,
        "validation_rows": len(rows.validation),
        "answered_rows": answered_at_once(run, rows, answering_stages(run)),
        "devices": [
            {**asdict(found), "planned_gib": planned_gib(plan, number)} for number, found in enumerate(measured)
        ],
        "planned_step_time_s": planned_step_s(run, plan) if plan else None,
        **{name: max(getattr(found, name) for found in measured) for name in slowest_or_fullest},
        "largest_batch": largest_batch(plan, measured)[0] if plan else None,
        "no_plan": no_plan,
    }


def report(run: RunConfig, rows: Rows, plan: Plan | None, measured: Sequence[Measured]) -> str:
    """Return the result for a terminal."""
    found = figures(run, rows, plan, "", measured)
    what = "the process" if run.device == "cpu" else "what PyTorch allocates; context and gaps come on top"
    # stages work on the same rows, ranks else on their own
    unit = "rows" if run.parallelism.splits_layers or run.parallelism.splits_matrices else "rows per rank"
    stages = answering_stages(run)
    unit_of_answers = f"rows of {stages} ranks" if stages > 1 else unit
    lines = [
        f"memory of the training step ({what}):",
        memory_table(plan, measured),
        *time_lines(run, rows, plan, found["step_time_s"]),
    ]
    if plan:
        largest, factor = largest_batch(plan, measured)
        lines.append(
            f"largest batch: projected {largest:,}{' or more' if largest >= LARGEST_BATCH else ''} {unit}, by the plan "
            f"times measured over planned memory ({factor:.2f})"
        )
    return "\n".join([
        *lines,
        *(
            f"{name}: measured {found[f'{key}_time_s']:.2f} s and a peak of {found[f'{key}_peak_gib']:.2f} GiB for "
            f"{count}{_planned_peak(plan, planned_phase)}"
            for name, key, planned_phase, count in (
                ("validation", "validation", "validation", f"{found['validation_rows']} {unit}"),
                ("answers", "answers", "baseline evaluation", f"{found['answered_rows']} {unit_of_answers}"),
            )
        ),
        f"passed: trained, validated, saved, reloaded and answered; logits measured {found['logit_difference']:.1e} "
        "apart",
    ])  # fmt: skip


def _planned_peak(plan: Plan | None, name: str) -> str:
    """Return the planned peak of a phase on the fullest device, as it is measured, for the end of a line."""
    if plan is None:
        return ""
    phases = [
        (phase, gpu) for of_device, gpu in zip(plan.phases, plan.cluster.gpus, strict=True) for phase in of_device
    ]
    peaks = [
        phase.memory.peak_gib if gpu.name == CPU_DEVICE else phase.memory.allocated_gib
        for phase, gpu in phases
        if phase.name == name
    ]
    return f", planned {max(peaks):.2f} GiB"


def time_lines(run: RunConfig, rows: Rows, plan: Plan | None, step_time_s: float) -> list[str]:
    """Return a step's time beside the planned one, and what follows for the whole training and its cost."""
    planned = "no plan"
    if plan:
        planned_s = planned_step_s(run, plan)
        planned = f"planned {planned_s:.3g} s ({step_time_s / planned_s - 1:+.0%})"
    lines = [f"step time: measured {step_time_s:.3g} s, {planned}"]
    steps = total_steps(run, rows.count)
    if steps is None:
        return [*lines, "training time: not known without the number of rows; pass --train_rows or --max_steps"]
    training_s = steps * step_time_s
    lines.append(
        f"training time: projected {timedelta(seconds=round(training_s))} for {steps:,} steps, all on batches "
        "as long as this one; validation, checkpoints and answers come on top"
    )
    gpu = device_of(run)
    if gpu is None or gpu.usd_per_hour is None:
        return [*lines, "cost: no price"]
    usd = gpu.usd_per_hour * run.devices * training_s / 3600
    return [*lines, f"cost: projected {usd:,.2f} USD ({run.devices} x {gpu.usd_per_hour} per hour, {gpu.price_date})"]


# -- the command line


def preflight(options: argparse.Namespace, run: RunConfig, arguments: Sequence[str]) -> int:
    """Check, plan, try and report; return the exit code. `arguments` start this command again, on every rank.

    Raises:
        BadInputError: the run, its model or its data are not as they should be.
    """
    if options.json and not options.json.parent.is_dir():
        raise BadInputError(f"--json is {options.json}, but its folder does not exist: make it, or name another file.")
    is_rank = detect_launcher() == "torchrun"
    with silent_if_well() if is_rank else nullcontext():  # the process that started it has said the same
        run = check_settings(run)
        if options.seq_len is None:
            check_training_rows(run, load_splits(run).train)
            rows = rows_of_run(run)
        else:
            rows = rows_of_length(run, options.seq_len)
            check_schedule(run, total_steps(run, rows.count) or LARGEST)
    evaluation = evaluation_of_rows(run, rows.validation)
    placement, no_plan = place_and_plan(run, batch_of(run, rows), evaluation)
    plan = placement.plan
    run = with_rows_at_once(run, plan)
    rows = replace(rows, validation=rows.validation[: run.per_device_eval_batch_size])
    if not is_rank:
        print(announcement(run, rows, plan, no_plan), flush=True)
        if plan and not plan.may_fit and not options.anyway:
            print("not tried; --anyway tries it all the same")
            return 1
        check_room_to_save(run)
        if run.world_size > 1:  # in this process's place
            command = ranks_command(run, "-m", ["common.preflight", *arguments])
            os.execv(command[0], command)
    measured = measure_all(run, rows, placement)
    if is_main_process():
        print(report(run, rows, plan, measured))
        if options.json:
            write_json(figures(run, rows, plan, no_plan, measured), options.json)
    return 0


@refused_in_one_sentence()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = OneSentenceParser(
        prog="python -m common.preflight", description=__doc__,
        epilog="Any setting of the folder's workflow can follow, such as --batch_size 4; its --help lists them.",
    )  # fmt: skip
    parser.add_argument("run_folder", type=Path, help="such as 2.1_lora_finetuning/run_0_cpu_x1")
    parser.add_argument("--seq-len", type=int, help="rows of exactly so many tokens, in place of the run's data")
    parser.add_argument("--anyway", action="store_true", help="try what does not fit by the plan, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured into this file")
    arguments = sys.argv[1:] if arguments is None else arguments
    options, overrides = parser.parse_known_args(arguments)
    run = run_of_folder(options.run_folder, overrides, parser.options)
    refuse_half_a_rank()
    sys.exit(preflight(options, replace(run, weights="random"), arguments))
