"""What works on this machine's GPUs, in six minutes: the first thing to run on them, after `make install`.

    python -m common.gpu_check
    python -m common.gpu_check --only 2.6 --budget_s 600

It looks at driver, cards, links and PyTorch's build; then each technique takes a few training steps, planned beside
measured, with random weights of a real shape that has room by the plan (nothing is downloaded); then `tests/gpu` run
in the time that is left. Each part is a process of its own, so that one that crashes does no harm to the next.
`gpu_check.json` has what was found, and is written anew after each part: send it along with a report. It names no path,
no host and no secret. Without a GPU the same runs on the CPU, with the embedded models.

Exit code 0: nothing fails; 1: something does; 2: the question is wrong.
"""

import argparse
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from tabulate import tabulate

from common.base.command_line import INTERRUPTED_EXIT_CODE
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.base.secrets import without_secrets
from common.base.specs import PARALLELISMS
from common.checks.timed_process import (
    ABSOLUTE,
    END_S,
    FAILS,
    LEFT_OUT,
    SLOWER,
    WORKS,
    Record,
    failed,
    last_error,
    run_process,
    too_long,
)
from common.hardware.devices import CATALOGUE, Gpu, gpu_of_device
from common.models.minilm import MINILM
from common.models.minilm import PACKAGE as MINILM_PACKAGE
from common.planning.job import BatchShape
from common.planning.plans import plan_run
from common.records.store import write_json

SCHEMA_VERSION = 1
SLOWER_FACTOR = 1.5
"""Measured over planned time of a step, above which it is called slower. The planner's speed is a published share of
the card's peak, and publications differ: 30 to 48 % of a V100's (`ACHIEVED_SHARES` in common/planning/time_plan.py).
Up to about this factor the plan may be what is wrong."""
LEAST_S = 30.0
"""With fewer seconds left no part is begun: starting Python, PyTorch and two ranks takes most of them."""
PART_S = 100.0
"""A technique's part takes less than a minute where all is well; one that takes so long hangs."""
MOST_DEVICES = 8
"""The smallest shape has 16 layers and a batch eight rows, which stages have to share."""
GPU_ROWS, GPU_TOKENS = 8, 512
CPU_ROWS, CPU_TOKENS = 8, 64
"""Rows of a rank's batch, and their length."""
GPU_TARGET_TOKENS = 64
"""Of a summary."""
HEADERS = ("part", "status", "GiB\nplanned", "GiB\nmeasured", "s/step\nplanned", "s/step\nmeasured", "why")
COLUMN_WIDTHS = (18, 13, 7, 8, 7, 8, 27)
"""With two spaces between them, the table is 100 columns wide."""
MACHINE, TESTS = "machine", "tests/gpu"
UNUSABLE = f"PyTorch cannot use the GPUs (see {MACHINE}); --device cpu tries the techniques without them"
TEST_PACKAGES = ("pytest", MINILM_PACKAGE, "tensorboard")
"""Without these most of `tests/gpu` cannot run: it starts whole workflows."""
TESTS_OF_4_BITS = "qlora or 4_bits"
"""Names of the tests that need bitsandbytes, as pytest's -k takes them."""
INSTALLED_BY = {"deepspeed": "make deepspeed", "pytest": "pip install pytest"}
"""Commands that install a package; others come with `make install`."""


class NoRoomError(Exception):
    """No shape of a technique has room on the card."""


@dataclass(frozen=True)
class Trial:
    """A technique whose steps are tried, on a machine with GPUs or without."""

    name: str
    folder: str
    shapes: tuple[str, ...]
    """Of assets/model_configs, largest first: the first one that fits is taken on a GPU."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """What it has unlike its folder."""
    also_single: bool = False
    """Whether the same folder trains on one device, where there is one."""
    packages: tuple[str, ...] = ()
    """What must be importable besides what every technique needs."""


DECODERS = ("qwen2.5-7b", "llama-3.2-3b", "llama-3.2-1b")
SAVED_WHOLE = ("llama-3.2-3b", "llama-3.2-1b")
"""For full fine-tuning: a preflight saves the whole model and reads it again, and 15 GB of it would take a minute."""
MADE_ON_THE_HOST = ("llama-3.2-1b",)
"""For layers and shards: the random weights of all are made on the host, by one thread of each rank."""
FSDP_FOLDER = "2.6_full_finetuning_with_fsdp/run_0_cpu_x2"
CLASSIFICATION = "3.1_text_classification/run_0_cpu_x2"
TRIALS = (
    Trial("2.1 LoRA", "2.1_lora_finetuning/run_0_cpu_x1", DECODERS),
    Trial("2.2 LoRA, DDP", "2.2_lora_finetuning_with_ddp/run_0_cpu_x2", DECODERS),
    Trial("2.3 QLoRA", "2.3_qlora_finetuning/run_0_cpu_x1", DECODERS, packages=("bitsandbytes",)),
    Trial("2.4 full", "2.4_full_finetuning/run_0_cpu_x1", SAVED_WHOLE),
    Trial("2.5 full, MP", "2.5_full_finetuning_with_mp/run_0_cpu_x1", MADE_ON_THE_HOST),
    Trial("2.6 full, FSDP", FSDP_FOLDER, MADE_ON_THE_HOST),
    Trial("2.6 full, ZeRO-2", FSDP_FOLDER, MADE_ON_THE_HOST, {"parallel": "zero2"}, packages=("deepspeed",)),
    Trial("2.6 full, ZeRO-3", FSDP_FOLDER, MADE_ON_THE_HOST, {"parallel": "zero3"}, packages=("deepspeed",)),
    Trial("2.7 full, PP", "2.7_full_finetuning_with_pp/run_0_cpu_x2", MADE_ON_THE_HOST),
    Trial("3.1 classifier", CLASSIFICATION, ("roberta-large",), also_single=True),
    Trial("3.1 classifier, TP", CLASSIFICATION, ("roberta-large",), {"parallel": "tp"}),
    Trial("3.2 summarizer", "3.2_summarization/run_0_cpu_x2", ("bart-large-cnn",), also_single=True),
)


@dataclass(frozen=True)
class Part:
    """Something to be found out."""

    name: str
    find_out: Callable[[float], Record]
    """Takes the seconds that it may last."""
    most_s: float = PART_S
    left_out: str = ""
    """Why it is not begun; empty = it is."""


# -- the machine


def look_at_machine(limit_s: float) -> Record:
    """Driver, cards, links and build, and whether PyTorch computes on every card that the driver lists."""
    ended = run_process(["-m", "common.checks.machine_facts"], limit_s)
    if ended.exit_code is None:
        return too_long(ended, limit_s, PART_S)
    if ended.exit_code != 0:
        return failed(ended)
    # libraries may warn before it and, as they are left, after it
    facts = json.loads(next(line for line in reversed(ended.output.splitlines()) if line.startswith("{")))
    wrong = what_is_wrong(facts)
    return {"status": FAILS if wrong else WORKS, "why": wrong or summary_of(facts), "facts": facts}


def what_is_wrong(facts: Record) -> str:
    """Why PyTorch cannot compute on the GPUs that there are; empty where it can, or there are none."""
    torch, listed = facts["torch"], facts["listed_gpus"]
    if "error" in torch:
        return f"PyTorch cannot be imported: {torch['error']}"
    if listed and torch["cuda"] is None:
        return (
            f"the driver lists {len(listed)} GPU(s), but PyTorch {torch['version']} is built without CUDA: take the "
            "build for your driver from pytorch.org"
        )
    if len(listed) > len(torch["cards"]):
        return (
            f"the driver {facts['driver']} lists {len(listed)} GPU(s), but PyTorch {torch['version']} can use "
            f"{len(torch['cards'])}: its CUDA {torch['cuda']} may be newer than the one that `nvidia-smi` says"
        )
    errors = [f"cuda:{number}: {card['error']}" for number, card in enumerate(torch["cards"]) if card["error"]]
    return "; ".join(errors)


def summary_of(facts: Record) -> str:
    """The machine in a line."""
    torch, missing = facts["torch"], missing_packages(facts)
    cards = Counter(f"{card['name']}, {card['memory_gib']:.1f} GiB" for card in torch["cards"])
    there = [f"{count} x {card}" for card, count in cards.items()] or [f"no GPU; {facts['cpu']}"]
    driver = [f"driver {facts['driver']}"] if facts["driver"] else []
    build = f"PyTorch {torch['version']}" + (f" for CUDA {torch['cuda']}" if torch["cuda"] else "")
    lacks = [f"not installed: {', '.join(missing)}"] if missing else []
    return "; ".join([*there, *driver, build, *lacks])


def missing_packages(facts: Record) -> list[str]:
    """Packages that are not installed."""
    return [name for name, version in facts["packages"].items() if version is None]


# -- a technique's steps


@dataclass(frozen=True)
class Devices:
    """What the techniques are tried on."""

    kind: str
    count: int
    """0 = there are GPUs, but PyTorch cannot use them."""
    card: Gpu | None = None
    """The fullest card, with what is free on it as its memory; None on CPU."""
    has_bf16: bool = False
    is_known: bool = True
    """Whether the catalogue has the card; else `card` is another one, of which only the memory holds."""


def devices_of(kind: str, machine: Record) -> Devices:
    """The devices of a kind, `cpu` or `cuda`: two processes, or the GPUs, of which a power of two is used."""
    if kind == "cpu":
        return Devices("cpu", 2)
    if machine["status"] != WORKS:
        return Devices("cuda", 0)
    cards = machine["facts"]["torch"]["cards"]
    known = gpu_of_device(cards[0]["name"])
    fullest = replace(known or CATALOGUE[0], memory_gib=min(card["free_gib"] for card in cards))
    count = min(MOST_DEVICES, 2 ** (len(cards).bit_length() - 1))
    return Devices("cuda", count, fullest, all(card["bf16"] for card in cards), known is not None)


def settings_for(technique: Trial, own: RunConfig, devices: Devices) -> dict[str, object]:
    """What a technique's run on these devices has unlike its folder, but for the model."""
    settings: dict[str, object] = {
        "per_device_train_batch_size": CPU_ROWS,
        "per_device_eval_batch_size": CPU_ROWS,
        "report_to": "none",
        "independent_judge": "none",
        **technique.settings,
    }
    if devices.kind == "cpu":
        return settings
    parallel = "single" if technique.also_single and devices.count == 1 else settings.get("parallel", own.parallel)
    pure = "bf16" if own.goal.chats else "bf16-mixed"
    return {
        **settings,
        "device": "cuda",
        "devices": 1 if PARALLELISMS[parallel].is_single else devices.count,
        "stages": 0,
        "parallel": parallel,
        "precision": pure if devices.has_bf16 else "fp32",
        "per_device_train_batch_size": GPU_ROWS,
        "per_device_eval_batch_size": GPU_ROWS,
    }


def batch_for(run: RunConfig) -> BatchShape:
    """Return the batch to choose a shape by; the preflight plans with the classes and summaries of its folder."""
    if run.goal.classifies:
        return BatchShape(GPU_ROWS, GPU_TOKENS, 1, classes=2)
    if run.goal.summarizes:
        return BatchShape(GPU_ROWS, GPU_TOKENS, GPU_TARGET_TOKENS, target_length=GPU_TARGET_TOKENS)
    return BatchShape(GPU_ROWS, GPU_TOKENS, GPU_TOKENS - 1)


def fitting_settings(technique: Trial, devices: Devices) -> dict[str, object]:
    """`settings_for`, on GPUs with the largest shape that the planner gives room to spare; on CPU its folder's model.

    Raises:
        NoRoomError: not even the smallest shape fits.
    """
    own = literal_of(REPOSITORY / technique.folder)
    settings = settings_for(technique, own, devices)
    if devices.card is None:
        return settings
    for shape in technique.shapes:
        run = replace(own, **settings, model=shape)
        plan = plan_run(run, batch_for(run), devices.card)
        if plan.fits and not plan.is_tight:
            return {**settings, "model": shape}
    raise NoRoomError(
        f"by the plan even {shape} needs {plan.devices[plan.tightest].peak_gib:.1f} GiB, and "
        f"{devices.card.memory_gib:.1f} are free"
    )


def why_left_out(technique: Trial, devices: Devices) -> str:
    """Why a technique cannot be tried here; empty = it can."""
    own = literal_of(REPOSITORY / technique.folder)
    parallel = technique.settings.get("parallel", own.parallel)
    if devices.count == 0:
        return UNUSABLE
    way = PARALLELISMS[parallel]
    if devices.count < 2 and not way.is_single and not technique.also_single:
        return f"needs two GPUs, and there is {devices.count}"
    own_model = [MINILM_PACKAGE] if devices.kind == "cpu" and own.model == MINILM else []
    if missing := [name for name in (*technique.packages, *own_model) if find_spec(name) is None]:
        return not_installed(missing)
    if way.splits_layers and not devices.is_known:
        return "layers are placed by a plan, and the catalogue (common/hardware/devices.py) lacks this card"
    return ""


def not_installed(packages: Iterable[str]) -> str:
    """The sentence about missing packages."""
    return "; ".join(f"{name} is not installed: `{INSTALLED_BY.get(name, 'make install')}`" for name in packages)


def try_technique(technique: Trial, devices: Devices, limit_s: float) -> Record:
    """A preflight of the technique: what it measured beside what was planned."""
    try:
        settings = fitting_settings(technique, devices)
    except NoRoomError as too_large:
        return {"status": LEFT_OUT, "why": str(too_large)}
    tokens = CPU_TOKENS if devices.kind == "cpu" else GPU_TOKENS
    with tempfile.NamedTemporaryFile(prefix="gpu-check-", suffix=".json") as file:
        asked = [technique.folder, "--json", file.name, "--seq-len", str(tokens)]
        overrides = [f"--{name}={value}" for name, value in settings.items()]
        ended = run_process(["-m", "common.preflight", *asked, *overrides], limit_s)
        figures = Path(file.name).read_text(encoding="utf-8")
    if ended.exit_code is None:
        return {**too_long(ended, limit_s, PART_S), "settings": settings}
    if ended.exit_code != 0 or not figures:
        return {**failed(ended), "settings": settings}
    return judged(json.loads(figures))


def judged(figures: Record) -> Record:
    """The record of a preflight that passed."""
    settings, planned_s, measured_s = figures["settings"], figures["planned_step_time_s"], figures["step_time_s"]
    what = f"{Path(settings['model']).name}, {settings['precision']}, {figures['rows']} x {figures['tokens']} tokens"
    planned_gib = [device["planned_gib"] for device in figures["devices"]]
    slower = planned_s is not None and measured_s > SLOWER_FACTOR * planned_s
    no_plan = f"; no plan: {figures['no_plan']}" if figures["no_plan"] else ""
    times = f"{measured_s / planned_s:.1f} times the planned time; " if slower else ""
    return {
        "status": SLOWER if slower else WORKS,
        "why": f"{times}{what}{no_plan}",
        "planned_gib": None if None in planned_gib else max(planned_gib),
        "peak_gib": max(device["peak_gib"] for device in figures["devices"]),
        "planned_step_time_s": planned_s,
        "step_time_s": measured_s,
        "figures": figures,
    }


# -- tests/gpu


def why_no_tests(devices: Devices) -> str:
    """Why `tests/gpu` are not run; empty = they are."""
    if devices.kind == "cpu":
        return "they need a GPU"
    if devices.count == 0:
        return UNUSABLE
    return not_installed(name for name in TEST_PACKAGES if find_spec(name) is None)


def run_tests(limit_s: float) -> Record:
    """Pytest on `tests/gpu`: how many passed, failed and were skipped, and which failed."""
    without_4_bits = find_spec("bitsandbytes") is None
    chosen = ["-k", f"not ({TESTS_OF_4_BITS})"] if without_4_bits else []
    ended = run_process(["-m", "pytest", "-q", "tests/gpu", *chosen], limit_s)
    counts = counts_of(ended.output)
    said = [", ".join(f"{count} {name}" for name, count in counts.items()) or last_error(ended.output)]
    if without_4_bits:
        said.append("those of 4 bits left out: bitsandbytes is not installed")
    if ended.exit_code is None:
        said.append(f"the budget was over after {limit_s:.0f} s: `python -m pytest tests/gpu` runs all")
    named = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.output, re.MULTILINE)
    said += [name.rpartition("::")[2] for name in named]
    record = {"why": "; ".join(said), "counts": counts, "failed_tests": named}
    if named or ended.exit_code not in (0, None):
        return {**failed(ended), **record}
    return {**record, "status": WORKS if "passed" in counts and ended.exit_code == 0 else LEFT_OUT}


def counts_of(output: str) -> dict[str, int]:
    """Of pytest's last line, such as `3 passed, 1 skipped in 12.34s`; empty where it did not come to it."""
    last = re.findall(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", output, re.MULTILINE)
    return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", last[-1])} if last else {}


# -- all parts


class Report:
    """What was found, in a file that is written anew after each part."""

    def __init__(self, path: Path, device: str, budget_s: float) -> None:
        """No part was looked at yet; `device` is `cpu` or `cuda`."""
        self.path = path
        self.data: Record = {
            "schema_version": SCHEMA_VERSION,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "budget_s": budget_s,
            "device": device,
            "is_complete": False,
            "parts": [],
        }

    @property
    def parts(self) -> list[Record]:
        """The parts' records so far."""
        return self.data["parts"]

    def add(self, record: Record) -> None:
        """Keep a part's record."""
        self.parts.append(without_places(record))
        self.write()

    def write(self) -> None:
        """Put the file in place of the one before."""
        write_json(self.data, self.path)

    def end(self) -> None:
        """Say that no part is to come."""
        self.data["is_complete"] = True
        self.write()


def without_places(value: Any) -> Any:
    """`value` with all its texts rid of secrets, of this machine's name, and of folders, of which files' names stay."""
    if isinstance(value, dict):
        return {name: without_places(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_places(part) for part in value]
    if not isinstance(value, str):
        return value
    text = without_secrets(value)
    for place in (REPOSITORY, Path(tempfile.gettempdir()), Path.home()):
        if place.parent != place:
            text = text.replace(f"{place}/", "")
    text = ABSOLUTE.sub("", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "<host>", text)


def find_out(part: Part, deadline_s: float) -> Record:
    """A part's record; its own crash is one, too."""
    start_s = time.monotonic()
    left_s = deadline_s - start_s - END_S
    if part.left_out:
        found: Record = {"status": LEFT_OUT, "why": part.left_out}
    elif left_s < LEAST_S:
        left = f"{max(0.0, left_s):.0f} s of the budget are left, and {LEAST_S:.0f} are needed"
        found = {"status": LEFT_OUT, "why": f"{left}: pass a larger --budget_s, or --only this part"}
    else:
        print(f"{part.name} ...", flush=True)
        try:
            found = part.find_out(min(part.most_s, left_s))
        except Exception as error:  # the next part has nothing to do with it
            found = {"status": FAILS, "why": f"{type(error).__name__}: {error}"}
        print(f"{part.name}: {found['status']}, {time.monotonic() - start_s:.0f} s", flush=True)
    return {"part": part.name, **found, "seconds": round(time.monotonic() - start_s, 1)}


def parts_for(devices: Devices) -> list[Part]:
    """Each technique, then the tests, which get what time is left."""
    techniques = [
        Part(each.name, partial(try_technique, each, devices), left_out=why_left_out(each, devices)) for each in TRIALS
    ]
    return [*techniques, Part(TESTS, run_tests, most_s=float("inf"), left_out=why_no_tests(devices))]


def is_asked_for(name: str, only: str | None) -> bool:
    """Whether `--only` means the part of that name: by all of it, or by its first word, such as `2.6`."""
    return only is None or only in (name, name.split()[0])


def kind_to_use(asked: str | None, machine: Record) -> str:
    """The kind of device to try techniques on: what was asked for, else GPUs where there are any.

    Raises:
        BadInputError: GPUs were asked for, and there are none.
    """
    facts = machine.get("facts")
    may_have_gpus = facts is None or bool(facts["listed_gpus"] or facts["torch"]["cards"])
    if asked == "cuda" and not may_have_gpus:
        raise BadInputError(
            "--device is cuda, but no GPU can be seen: `nvidia-smi` should list it; leave --device out, or pass cpu."
        )
    return asked or ("cuda" if may_have_gpus else "cpu")


def check(options: argparse.Namespace) -> list[Record]:
    """Find out all parts that are asked for; their records.

    Raises:
        BadInputError: GPUs were asked for, and there are none.
    """
    deadline_s = time.monotonic() + options.budget_s
    machine = find_out(Part(MACHINE, look_at_machine), deadline_s)
    kind = kind_to_use(options.device, machine)
    report = Report(options.out, kind, options.budget_s)
    report.add(machine)
    print(report.parts[0]["why"])
    if kind == "cpu":
        print("on CPU: the same steps with the embedded models, and two processes where there would be two GPUs")
    for part in parts_for(devices_of(kind, machine)):
        if is_asked_for(part.name, options.only):
            report.add(find_out(part, deadline_s))
    report.end()
    return report.parts


# -- the answer


def table(records: Sequence[Record]) -> str:
    """The parts, with what was planned beside what was measured, 100 columns wide."""
    rows = [
        [
            record["part"],
            record["status"],
            *(_figure(record.get(name), ".2f") for name in ("planned_gib", "peak_gib")),
            *(_figure(record.get(name), ".3g") for name in ("planned_step_time_s", "step_time_s")),
            record["why"],
        ]
        for record in records
    ]
    rule = ["-" * width for width in COLUMN_WIDTHS]  # as a row: tabulate would make room beside its own headers
    aligned = ("left", "left", "right", "right", "right", "right", "left")
    return tabulate(
        [HEADERS, rule, *rows],
        tablefmt="plain",
        colalign=aligned,
        disable_numparse=True,
        maxcolwidths=list(COLUMN_WIDTHS),
    )


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def last_line(records: Sequence[Record], path: Path) -> str:
    """How many parts came to what, and what to do with the file."""
    counts = Counter(record["status"] for record in records)
    said = ", ".join(f"{counts[status]} {status}" for status in (WORKS, SLOWER, FAILS, LEFT_OUT) if counts[status])
    return f"{said}; {path} has the details: send it along with a report"


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    names = ", ".join([MACHINE, *(each.name for each in TRIALS), TESTS])
    made = OneSentenceParser(
        prog="python -m common.gpu_check", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--device", choices=("cpu", "cuda"), help="cuda where a GPU can be seen, else cpu")
    made.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="the file (default: %(default)s)")
    made.add_argument("--budget_s", type=float, default=360.0, help="seconds for all (default: %(default)g)")
    made.add_argument("--only", metavar="PART", help=f"one part, or by its first word several: {names}")
    return made


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options, if they can be met.

    Raises:
        BadInputError: there is no such part, no time, or no folder to write into.
    """
    names = [MACHINE, *(each.name for each in TRIALS), TESTS]
    if not any(is_asked_for(name, options.only) for name in names):
        raise BadInputError(f"--only is {options.only!r}, but there is no such part: choose one of {', '.join(names)}.")
    if not options.budget_s >= LEAST_S + END_S:
        raise BadInputError(
            f"--budget_s is {options.budget_s:g}, in which no part would end: pass {LEAST_S + END_S:g} or more."
        )
    if not os.access(options.out.absolute().parent, os.W_OK):
        raise BadInputError(f"--out is {options.out}, but nothing can be written there: pass another file.")
    return options


def told_to_end(*_: object) -> NoReturn:
    """Leave as if interrupted, so that the part at work is ended, too."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m common.gpu_check`."""
    signal.signal(signal.SIGTERM, told_to_end)
    try:
        options = checked(parser().parse_args(arguments))
        records = check(options)
    except BadInputError as mistake:
        parser().exit(2, f"error: {mistake}\n")
    except KeyboardInterrupt:
        print(f"error: interrupted; {options.out} has what was found until then.", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT_CODE)
    print(f"\n{table(records)}\n\n{last_line(records, options.out)}")
    sys.exit(int(any(record["status"] == FAILS for record in records)))
