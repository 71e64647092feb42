"""What works on this machine's GPUs, in six minutes: the first thing to run on them, after `make install`.

    python -m common.gpu_check
    python -m common.gpu_check --only 2.6 --budget_s 600
    python -m common.gpu_check --share --budget_s 900

It looks at driver, cards, links and PyTorch's build; then each technique takes a few training steps, planned beside
measured, with random weights of a real shape that has room by the plan (nothing is downloaded); then `tests/gpu` run
in the time that is left. With `--share` two ranks share one GPU, too (`common.checks.shared_gpu`). Each part is a
process of its own, so that one that crashes does no harm to the next.
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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate.utils import recursively_apply
from tabulate import tabulate

from common.base.command_line import INTERRUPTED_EXIT_CODE, refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.base.run_folders import literal_of
from common.base.secrets import without_secrets
from common.base.specs import PARALLELISMS
from common.checks import shared_gpu
from common.checks.processes import END_S, FAILS, LEFT_OUT, WORKS, failed, last_error, not_installed, run_process
from common.checks.tried_rows import batch_of_length
from common.hardware.devices import CATALOGUE, Gpu, gpu_of_device
from common.models import minilm
from common.planning.plans import plan_run
from common.records.store import write_json

SLOWER = "slower than planned"  # besides the statuses that all checks have
Record = dict[str, Any]  # what is kept of a part: `part`, `status`, `why`, `seconds`, and what it measured

SCHEMA_VERSION = 1
# measured over planned time of a step, above which it is called slower. Nearly all published rates lie within this
# factor of what the planner says of them (docs/published_rates.md): up to it the plan may be what is wrong
SLOWER_FACTOR = 1.5
LEAST_S = 30.0  # with fewer seconds left no part is begun: starting Python, PyTorch and two ranks takes most of them
PART_S = 100.0  # a technique's part takes less than a minute where all is well; one that takes so long hangs
MOST_DEVICES = 8  # the smallest shape has 16 layers and a batch eight rows, which stages have to share
ROWS, GPU_TOKENS, CPU_TOKENS = 8, 512, 64  # of a rank's batch, and of each row
HEADERS = ("part", "status", "GiB\nplanned", "GiB\nmeasured", "s/step\nplanned", "s/step\nmeasured", "why")
MEASURED = {"planned_gib": ".2f", "peak_gib": ".2f", "planned_step_time_s": ".3g", "step_time_s": ".3g"}
COLUMN_WIDTHS = (18, 13, 7, 8, 7, 8, 27)  # with two spaces between them, the table is 100 columns wide
MACHINE, TESTS = "machine", "tests/gpu"
TEST_GIB, MOST_TESTS_AT_ONCE = 24.0, 4  # the largest of `tests/gpu` trains 1.2 billion weights, in 17 GiB
UNUSABLE = f"PyTorch cannot use the GPUs (see {MACHINE}); --device cpu tries the techniques without them"
TEST_PACKAGES = ("pytest", "tensorboard")  # without these most of `tests/gpu` cannot run
BUT_SHARED = "--ignore=tests/gpu/test_shared_gpu.py"  # of `tests/gpu`: `--share` has parts that do the same
TESTS_OF_4_BITS = "qlora or 4_bits"  # names of the tests that need bitsandbytes, as pytest's -k takes them
ABSOLUTE = re.compile(r"(?<![\w./:~])~?/(?:[^/\s'\":,;()]+/)*(?=[^/\s'\":,;()])")  # a path but for its last name


class NoRoomError(Exception):
    """No shape of a technique has room on the card."""


@dataclass(frozen=True)
class Trial:
    """A technique whose steps are tried, on a machine with GPUs or without.

    `settings` is what its run has unlike its folder. Of `shapes`, of assets/model_configs and largest first, the first
    one that fits is taken on a GPU. With `also_single` the same folder trains on one device, where there is one.
    `packages` must be importable besides what every technique needs.
    """

    name: str
    folder: str
    shapes: tuple[str, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    also_single: bool = False
    packages: tuple[str, ...] = ()


DECODERS = ("qwen2.5-7b", "llama-3.2-3b", "llama-3.2-1b")
# for full fine-tuning: a preflight saves the whole model and reads it again, and 15 GB of it would take a minute
SAVED_WHOLE = ("llama-3.2-3b", "llama-3.2-1b")
# for layers and shards: the random weights of all are made on the host, by one thread of each rank
MADE_ON_THE_HOST = ("llama-3.2-1b",)
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
SHARED = frozenset(pair.parallel for pair in shared_gpu.PAIRS.values())
SHARED_PARTS = {f"shared {name}": name for name in shared_gpu.PART_NAMES}
PART_NAMES = (MACHINE, *(trial.name for trial in TRIALS), TESTS)


@dataclass(frozen=True)
class Part:
    """Something to find out.

    `find_out` takes the seconds that it may last, `most_s` at most. `left_out` says why it is not begun; empty = it is.
    """

    name: str
    find_out: Callable[[float], Record]
    most_s: float = PART_S
    left_out: str = ""


# -- a part in a process of its own


def not_done(ended: subprocess.CompletedProcess, limit_s: float) -> Record:
    """Return the record of a part that failed, hung for `PART_S`, or had only `limit_s` left of the budget."""
    if ended.returncode is None and limit_s < PART_S:
        why = f"the budget was over after {limit_s:.0f} s of it: pass a larger --budget_s, or --only this part"
        return {"status": LEFT_OUT, "why": why}
    return failed(ended, limit_s)


# -- the machine


def look_at_machine(limit_s: float) -> Record:
    """Look at driver, cards, links and build, and whether PyTorch computes on every card that the driver lists."""
    ended = run_process(["-m", "common.checks.machine_facts"], limit_s)
    if ended.returncode != 0:
        return not_done(ended, limit_s)
    # libraries may warn before it and, as they are left, after it
    facts = json.loads(next(line for line in reversed(ended.stdout.splitlines()) if line.startswith("{")))
    wrong = what_is_wrong(facts)
    return {"status": FAILS if wrong else WORKS, "why": wrong or _summary_of(facts), "facts": facts}


def what_is_wrong(facts: Record) -> str:
    """Return why PyTorch cannot compute on the GPUs that there are; empty where it can, or there are none."""
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
    return "; ".join(f"cuda:{number}: {card['error']}" for number, card in enumerate(torch["cards"]) if card["error"])


def _summary_of(facts: Record) -> str:
    torch, missing = facts["torch"], [name for name, version in facts["packages"].items() if version is None]
    cards = Counter(f"{card['name']}, {card['memory_gib']:.1f} GiB" for card in torch["cards"])
    said = [
        *([f"{count} x {card}" for card, count in cards.items()] or [f"no GPU; {facts['cpu']}"]),
        f"driver {facts['driver']}" if facts["driver"] else "",
        f"PyTorch {torch['version']}" + (f" for CUDA {torch['cuda']}" if torch["cuda"] else ""),
        f"not installed: {', '.join(missing)}" if missing else "",
    ]
    return "; ".join(filter(None, said))


# -- a technique's steps


@dataclass(frozen=True)
class Devices:
    """What the techniques are tried on; a `count` of 0: there are GPUs, but PyTorch cannot use them.

    `card` is None on CPU, else the fullest card, with what is free on it as its memory; where the catalogue lacks it
    (`is_known` is False), another card with that memory stands in.
    """

    kind: str
    count: int
    card: Gpu | None = None
    has_bf16: bool = False
    is_known: bool = True


def devices_of(kind: str, machine: Record) -> Devices:
    """Return the devices of a kind, `cpu` or `cuda`: two processes, or the GPUs, of which a power of two is used."""
    if kind == "cpu":
        return Devices("cpu", 2)
    if machine["status"] != WORKS:
        return Devices("cuda", 0)
    cards = machine["facts"]["torch"]["cards"]
    known = gpu_of_device(cards[0]["name"])
    fullest = replace(known or CATALOGUE[0], memory_gib=min(card["free_gib"] for card in cards))
    count = min(MOST_DEVICES, 2 ** (len(cards).bit_length() - 1))
    return Devices("cuda", count, fullest, all(card["bf16"] for card in cards), known is not None)


def fitting_settings(trial: Trial, devices: Devices) -> dict[str, object]:
    """Return what a trial's run on these devices has unlike its folder.

    On GPUs it has the largest shape that the planner gives room to spare, on CPU its folder's model.

    Raises:
        NoRoomError: not even the smallest shape fits.
    """
    settings: dict[str, object] = {
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "report_to": "none",
        "independent_judge": "none",
        **trial.settings,
    }
    if devices.card is None:
        return settings
    own = literal_of(REPOSITORY / trial.folder)
    is_alone = trial.also_single and devices.count == 1
    parallel = "single" if is_alone else settings.get("parallel", own.parallel)
    with_bf16 = "bf16" if own.goal.chats else "bf16-mixed"
    settings |= {
        "device": "cuda",
        "devices": 1 if PARALLELISMS[parallel].is_single else devices.count,
        "stages": 0,
        "parallel": parallel,
        "precision": with_bf16 if devices.has_bf16 else "fp32",
    }
    for shape in trial.shapes:
        run = replace(own, **settings, model=shape)
        plan = plan_run(run, batch_of_length(run, GPU_TOKENS), devices.card)
        if plan.fits:
            return {**settings, "model": shape}
    raise NoRoomError(
        f"by the plan even {shape} needs {plan.fullest[0].peak_gib:.1f} GiB, and {devices.card.memory_gib:.1f} are free"
    )


def _parallel_of(trial: Trial) -> str:
    return str(trial.settings.get("parallel", literal_of(REPOSITORY / trial.folder).parallel))


def _needs_two(trial: Trial, devices: Devices) -> bool:
    return devices.count == 1 and not PARALLELISMS[_parallel_of(trial)].is_single and not trial.also_single


def _can_share(trial: Trial, devices: Devices) -> bool:
    """Return whether a technique that needs two GPUs can do with two ranks on one."""
    return _needs_two(trial, devices) and _parallel_of(trial) in SHARED


def _why_left_out(trial: Trial, devices: Devices) -> str:
    if devices.count == 0:
        return UNUSABLE
    own = literal_of(REPOSITORY / trial.folder)
    parallelism = PARALLELISMS[_parallel_of(trial)]
    if _needs_two(trial, devices):
        instead = ": --share has two ranks share it" if _can_share(trial, devices) else ""
        return f"needs two GPUs, and there is {devices.count}{instead}"
    own_model = [minilm.PACKAGE] if devices.kind == "cpu" and own.model == minilm.MINILM else []
    missing = not_installed((*trial.packages, *own_model))
    if parallelism.splits_layers and not devices.is_known and not missing:
        return "layers are placed by a plan, and the catalogue (common/hardware/catalogue.toml) lacks this card"
    return missing


def try_technique(trial: Trial, devices: Devices, limit_s: float) -> Record:
    """Run a preflight of the technique: what it measured beside what was planned."""
    try:
        settings = fitting_settings(trial, devices)
    except NoRoomError as too_large:
        return {"status": LEFT_OUT, "why": str(too_large)}
    tokens = CPU_TOKENS if devices.kind == "cpu" else GPU_TOKENS
    with tempfile.NamedTemporaryFile(prefix="gpu-check-", suffix=".json") as file:
        command = ["-m", "common.preflight", trial.folder, "--json", file.name, "--seq-len", str(tokens)]
        ended = run_process([*command, *(f"--{name}={value}" for name, value in settings.items())], limit_s)
        figures = Path(file.name).read_text(encoding="utf-8")
    if ended.returncode != 0 or not figures:
        return {**not_done(ended, limit_s), "settings": settings}
    return judged(json.loads(figures))


def judged(figures: Record) -> Record:
    """Return the record of a preflight that passed."""
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


def _why_no_tests(devices: Devices) -> str:
    if devices.kind == "cpu":
        return "they need a GPU"
    return not_installed(TEST_PACKAGES) if devices.count else UNUSABLE


def tests_at_once(devices: Devices) -> int:
    """Return how many of `tests/gpu` run side by side: they mostly wait for imports, and measure no speed."""
    if find_spec("xdist") is None:
        return 1
    if devices.card is None:
        return devices.count
    return max(1, min(MOST_TESTS_AT_ONCE, os.cpu_count() // 2, int(devices.card.memory_gib // TEST_GIB)))


def run_tests(devices: Devices, limit_s: float, tests: Sequence[str] = ("tests/gpu",)) -> Record:
    """Run the tests of GPUs (on CPU their rehearsal): how many passed, failed and were skipped, and which failed."""
    without_4_bits = find_spec("bitsandbytes") is None
    chosen = ["-k", f"not ({TESTS_OF_4_BITS})"] if without_4_bits else []
    workers = tests_at_once(devices)
    spread = ["-n", str(workers)] if workers > 1 else []
    rehearsed = ["--rehearse"] if devices.kind == "cpu" else []
    ended = run_process(["-m", "pytest", "-q", *tests, BUT_SHARED, *rehearsed, *spread, *chosen], limit_s)
    counts = counts_of(ended.stdout)
    said = [", ".join(f"{count} {name}" for name, count in counts.items()) or last_error(ended.stdout)]
    if without_4_bits:
        said.append("those of 4 bits left out: bitsandbytes is not installed")
    if ended.returncode is None:
        said.append(f"the budget was over after {limit_s:.0f} s: `python -m pytest tests/gpu` runs all")
    named = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    said += [name.rpartition("::")[2] for name in named]
    record = {"why": "; ".join(said), "counts": counts, "failed_tests": named}
    if named or ended.returncode not in (0, None):
        return {**failed(ended, limit_s), **record}
    return {**record, "status": WORKS if "passed" in counts and ended.returncode == 0 else LEFT_OUT}


def counts_of(output: str) -> dict[str, int]:
    """Read pytest's last line, such as `3 passed, 1 skipped in 12.34s`; empty where there is none."""
    last = re.findall(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", output, re.MULTILINE)
    return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", last[-1])} if last else {}


# -- all parts


def without_places(record: Record) -> Record:
    """Return a record with all its texts rid of secrets, of this machine's name, and of folders; files' names stay."""
    return recursively_apply(_without_places, record, test_type=lambda value: isinstance(value, str))


def _without_places(text: str) -> str:
    text = without_secrets(text)
    for place in (REPOSITORY, Path(tempfile.gettempdir()), Path.home()):
        if place.parent != place:
            text = text.replace(f"{place}/", "")
    text = ABSOLUTE.sub("", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "<host>", text)


def find_out(part: Part, deadline_s: float) -> Record:
    """Return a part's record; its own crash is one, too."""
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


def parts_for(devices: Devices, is_shared: bool = False) -> list[Part]:
    """Return each technique, then the tests, which get what time is left.

    Where one GPU `is_shared`, two ranks on it stand in for the techniques that need two and can run so.
    """
    trials = [trial for trial in TRIALS if not (is_shared and _can_share(trial, devices))]
    techniques = [
        Part(trial.name, partial(try_technique, trial, devices), left_out=_why_left_out(trial, devices))
        for trial in trials
    ]
    shared = [
        Part(part, partial(shared_gpu.find_out, name, devices.kind), left_out="" if devices.count else UNUSABLE)
        for part, name in SHARED_PARTS.items()
        if is_shared
    ]
    tests = Part(TESTS, partial(run_tests, devices), most_s=float("inf"), left_out=_why_no_tests(devices))
    return [*techniques, *shared, tests]


def is_asked_for(name: str, only: str | None) -> bool:
    """Return whether `--only` means the part of that name: by all of it, or by its first word, such as `2.6`."""
    return only is None or only in (name, name.split()[0])


def kind_to_use(asked: str | None, machine: Record) -> str:
    """Return the kind of device to try techniques on: what was asked for, else GPUs where there are any.

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
    """Find out all parts that are asked for; after each of them the file is written anew. Return their records.

    Raises:
        BadInputError: GPUs were asked for, and there are none.
    """
    deadline_s = time.monotonic() + options.budget_s
    machine = find_out(Part(MACHINE, look_at_machine), deadline_s)
    kind = kind_to_use(options.device, machine)
    records = [without_places(machine)]
    report: Record = {
        "schema_version": SCHEMA_VERSION,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "budget_s": options.budget_s,
        "device": kind,
        "is_complete": False,
        "parts": records,
    }
    write_json(report, options.out)
    print(records[0]["why"])
    if kind == "cpu":
        print("on CPU: the same steps with the embedded models, and two processes where there would be two GPUs")
    for part in parts_for(devices_of(kind, machine), options.share):
        if is_asked_for(part.name, options.only):
            records.append(without_places(find_out(part, deadline_s)))
            write_json(report, options.out)
    report["is_complete"] = True
    write_json(report, options.out)
    return records


# -- the answer


def table(records: Sequence[Record]) -> str:
    """Return the parts, with what was planned beside what was measured, 100 columns wide."""
    rows = [
        [
            record["part"],
            record["status"],
            *("" if record.get(name) is None else format(record[name], form) for name, form in MEASURED.items()),
            record["why"],
        ]
        for record in records
    ]
    rule = ["-" * width for width in COLUMN_WIDTHS]  # as a row: tabulate would make room beside its own headers
    return tabulate(
        [HEADERS, rule, *rows],
        tablefmt="plain",
        colalign=("left", "left", *["right"] * len(MEASURED), "left"),
        disable_numparse=True,
        maxcolwidths=list(COLUMN_WIDTHS),
    )


def _check_options(options: argparse.Namespace) -> None:
    names = (*PART_NAMES, *(SHARED_PARTS if options.share else ()))
    if not any(is_asked_for(name, options.only) for name in names):
        raise BadInputError(f"--only is {options.only!r}, but there is no such part: choose one of {'; '.join(names)}.")
    if not options.budget_s >= LEAST_S + END_S:
        raise BadInputError(
            f"--budget_s is {options.budget_s:g}, in which no part would end: pass {LEAST_S + END_S:g} or more."
        )
    if not os.access(options.out.absolute().parent, os.W_OK):
        raise BadInputError(f"--out is {options.out}, but nothing can be written there: pass another file.")


@refused_in_one_sentence()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the part at work is ended, too
    parser = OneSentenceParser(prog="python -m common.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where a GPU can be seen, else cpu")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="the file")
    parser.add_argument("--budget_s", type=float, default=360.0, help="seconds for all")
    parser.add_argument("--share", action="store_true", help="also two ranks on one GPU, beside one rank's losses")
    parser.add_argument(
        "--only", metavar="PART", help=f"one part, or by its first word several: {', '.join(PART_NAMES)}"
    )
    options = parser.parse_args(arguments)
    _check_options(options)
    try:
        records = check(options)
    except KeyboardInterrupt:
        print(f"error: interrupted; {options.out} has what was found until then.", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT_CODE)
    counts = Counter(record["status"] for record in records)
    said = ", ".join(f"{counts[status]} {status}" for status in (WORKS, SLOWER, FAILS, LEFT_OUT) if counts[status])
    print(f"\n{table(records)}\n\n{said}; {options.out} has the details: send it along with a report")
    sys.exit(int(counts[FAILS] > 0))
