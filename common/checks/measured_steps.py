"""A rank's steps of each phase of a run, tried on its devices with random weights: their time and their memory."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from typing_extensions import override

from common.base.command_line import SPEAK_FIRST_S
from common.base.run_config import RunConfig
from common.checks.folder_training import device_map_of_rank, tried_by_folder
from common.checks.tried_rows import Rows, batch_of
from common.data.pictures import pixels_of
from common.hardware.devices import forget_peak, read_memory, time_text
from common.models.answering import answering_run, answering_stages, load_answering
from common.models.loading import load_tokenizer, longest_readable
from common.models.merging import reloaded_difference
from common.models.placement import Placement
from common.models.shards import free_model
from common.planning.job import evaluation_of_run
from common.planning.plans import Plan
from common.runtime.rank import rank_started
from common.runtime.recorder import Trial
from common.runtime.world import Rank
from common.tasks.answers import Judge, independent_judges
from common.training.export import save_and_free
from common.training.loop import TrainingLoop

STEPS = 3  # of the optimizer; the first one also warms up, so that the last two are timed


@dataclass(eq=False)
class StepClock(TrainerCallback):
    """Notes when each optimizer step ended, having waited for `devices`; `begin` is called before the first one."""

    devices: Sequence[str]
    begin: Callable[[], object] = lambda: None
    ends_s: list[float] = field(default_factory=list)

    @override
    def on_train_begin(self, *_: object, **__: object) -> None:
        self.begin()

    @override
    def on_step_end(self, *_: object, **__: object) -> None:
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
    """What a rank measured on one of its devices; memory in GiB, on CPU of the process (RSS), else as allocated."""

    rank: int
    device: str
    peak_gib: float  # of the training steps
    validation_peak_gib: float
    merging_peak_gib: float
    answers_peak_gib: float
    capacity_gib: float
    step_time_s: float
    validation_time_s: float
    answers_time_s: float
    logit_difference: float


@dataclass
class Taken:
    """What a phase took, once it has ended: seconds, and the peak of each of the rank's devices, in GiB."""

    time_s: float = 0.0
    peaks_gib: Sequence[float] = ()


@contextmanager
def phase(name: str, rank: Rank, remedy: str) -> Iterator[Taken]:
    """Say on rank 0 when a phase starts and how long it took; exit with code 1 and `remedy` where memory runs out."""
    start_s, taken = time.perf_counter(), Taken()
    for device in rank.devices:
        forget_peak(device)
    if rank.is_main:
        print(f"{name} ...")
    try:
        yield taken
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
    taken.time_s = time.perf_counter() - start_s
    taken.peaks_gib = [read_memory(device).peak_gib for device in rank.devices]
    if rank.is_main:
        print(f"{name}: {time_text(taken.time_s)}")


def smaller_batch(run: RunConfig, rows: int, plan: Plan | None) -> str:
    """Return what to do when `rows` at once run out of memory: what fits by the plan, or half where it was wrong."""
    said = f"the plan said {max(memory.peak_gib for memory in plan.devices):.1f} GiB, " if plan else ""
    fitting, parts, divided = rows // 2, run.micro_batches, ""
    if plan and not plan.may_fit and (plan.max_batch_size or parts == 1):  # fewer rows may fit in fewer micro-batches
        fitting = plan.max_batch_size
    if fitting == 0:
        return f"{said}and not even one row fits: set gradient_checkpointing, lower --max_length, or use larger devices"
    if fitting >= parts:
        fitting -= fitting % parts
    else:
        needs_gpipe = run.schedule == "1f1b" and fitting < run.stage_count
        divided = f" --micro_batches {fitting}" + " --schedule gpipe" * needs_gpipe
    accumulated = -(-rows * run.gradient_accumulation_steps // fitting)
    return f"{said}try --batch_size {fitting}{divided} --gradient_accumulation_steps {accumulated}"


def measure(run: RunConfig, rows: Rows, placement: Placement, rank: Rank, folder: Path) -> list[Measured]:
    """Build, train, validate, save, reload and answer on this rank's devices; `folder` takes what all ranks save."""
    elsewhere = "see in nvidia-smi what else is on the device, or use a smaller --model"
    smaller, training = smaller_batch(run, len(rows.train), placement.plan), Taken()
    with ExitStack() as begun:  # the folder's function builds and trains: the clock hears where the one ends

        def begin_steps() -> None:
            nonlocal training
            begun.close()
            training = begun.enter_context(phase(f"{STEPS} steps on the longest batch", rank, smaller))

        begun.enter_context(phase("build model", rank, elsewhere))
        clock = StepClock(rank.devices, begin_steps)
        tried = replace(run, max_steps=STEPS, report_to="none")
        loop = tried_by_folder(Trial(tried, rank, folder, [clock]), rows, placement)
    half = len(rows.validation) // 2 or 1
    fewer = f"validation and answers have batches of their own: pass --per_device_eval_batch_size {half}"
    with phase("validation of one batch", rank, fewer) as validation:
        loop.validate()  # ends with metrics on the host, so that the devices have finished
    with phase("save and reload", rank, elsewhere) as merging:
        difference = save_and_reload(loop, placement, folder)
    with phase("answers to one batch", rank, fewer) as answers:
        answer_one_batch(run, rows, placement, rank)
    return [
        Measured(
            rank.rank,
            device,
            *(taken.peaks_gib[number] for taken in (training, validation, merging, answers)),
            read_memory(device).total_gib / (rank.world_size if device == "cpu" else 1),
            clock.step_time_s,
            validation.time_s,
            answers.time_s,
            difference,
        )
        for number, device in enumerate(rank.devices)
    ]


def save_and_reload(loop: TrainingLoop, placement: Placement, folder: Path) -> float:
    """Save what is trained, free it, and load it again; return the largest absolute difference of logits.

    It is known on the first rank that knows the trained model's logits, or on all that share one; others return 0.
    """
    run, rank = loop.run, loop.rank
    batch, expected, compares = save_and_free(loop, folder)
    if not (compares or answering_stages(run) > 1):
        return 0.0
    load = partial(load_answering, run, rank, device_map=device_map_of_rank(placement, rank))
    return reloaded_difference(answering_run(run), folder, load, batch, expected, loop.log.memory) or 0.0


@torch.no_grad()
def answer_one_batch(run: RunConfig, rows: Rows, placement: Placement, rank: Rank) -> None:
    """Answer (summarize, label) as many of the longest rows as the run does at once, and judge, as before training."""
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
        texts = (answers, answers, [None] * len(answers))
        Judge("base", model, tokenizer).judge(texts, range(len(answers)))
        for judge in independent_judges(run, rank.device):
            judge.judge(texts, range(answered_at_once(run, rows, stages=1)))
    free_model(model)


def answered_at_once(run: RunConfig, rows: Rows, stages: int) -> int:
    """Return the rows of the run's largest batch of a model that `stages` ranks share: no more than the test has."""
    evaluation = evaluation_of_run(run, batch_of(run, rows))
    return evaluation.answered(run.shares_answered(stages), run.world_size // stages)


def measure_all(run: RunConfig, rows: Rows, placement: Placement) -> list[Measured]:
    """Return on every rank what `measure` found on the devices of all ranks, in their order."""
    with rank_started(run) as rank, tempfile.TemporaryDirectory(prefix="preflight-") as own_folder:
        folder = Path(gather_object([own_folder])[0])  # stages save parts of one model
        return gather_object(measure(run, rows, placement, rank, folder))
