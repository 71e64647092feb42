"""What works on this machine's GPUs, in six minutes: the first thing to run on them, after `make install`.

    python -m common.gpu_check
    python -m common.gpu_check --only 2.6 --budget_s 600

It looks at driver, cards and PyTorch's build; `common.preflight` then takes a few steps of each run folder
`run_0_...`, planned beside measured, with random weights of a real shape that has room (nothing is downloaded); then
`tests/gpu` run in the time that is left. `gpu_check.json` has what was found, after each part: send it along with a
report. It names no path, no host and no secret. Without a GPU the same runs on the CPU, with the embedded models.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import recursively_apply
from tabulate import tabulate

from bench.processes import (
    END_S,
    FAILS,
    KEPT_LINES,
    LEFT_OUT,
    WORKS,
    last_error,
    not_installed,
    run_process,
    why_ended,
)
from common.base.command_line import INTERRUPTED_EXIT_CODE, refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders, workflow_does
from common.base.secrets import without_secrets
from common.base.specs import PARALLELISMS
from common.checks.tried_rows import batch_of_length
from common.hardware.devices import CATALOGUE, Gpu, gpu_of_device
from common.planning.plans import plan_run
from common.records.store import write_json

SLOWER = "slower than planned"
Record = dict[str, Any]  # what is kept of a part: `part`, `status`, `why`, `seconds`, and what it measured

SLOWER_FACTOR = 1.5  # measured over planned time; nearly all published rates are within it (docs/published_rates.md)
LEAST_S = 30.0  # with fewer seconds left no part is begun: starting Python, PyTorch and two ranks takes most of them
PART_S = 100.0  # a folder takes less than a minute where all is well; one that takes so long hangs
MOST_DEVICES = 8  # the smallest shape has 16 layers and a batch eight rows, which stages have to share
ROWS, GPU_TOKENS, CPU_TOKENS = 8, 512, 64  # of a rank's batch, and of each row
HEADERS = ("part", "status", "GiB\nplanned", "GiB\nmeasured", "s/step\nplanned", "s/step\nmeasured", "why")
MEASURED = {"planned_gib": ".2f", "peak_gib": ".2f", "planned_step_time_s": ".3g", "step_time_s": ".3g"}
COLUMN_WIDTHS = (18, 13, 7, 8, 7, 8, 27)  # with two spaces between them, the table is 100 columns wide
MACHINE, TESTS = "machine", "tests/gpu"
MORE = "pass a larger --budget_s, or --only this part"
TEST_PACKAGES = ("pytest", "tensorboard")  # without these most of `tests/gpu` cannot run
NOT_SHARED = "--ignore=tests/gpu/test_shared_gpu.py"  # of `tests/gpu`: it takes ten minutes
# of assets/model_configs, by the kind of a task's model, largest first
SHAPES = {
    "decoder": ("qwen2.5-7b", "llama-3.2-3b", "llama-3.2-1b"),
    "encoder": ("roberta-large",),
    "encoder-decoder": ("bart-large-cnn",),
    "vision-language": ("smolvlm-instruct",),
}
ABSOLUTE = re.compile(r"(?<![\w./:~])~?/(?:[^/\s'\":,;()]+/)*(?=[^/\s'\":,;()])")  # a path but for its last name


class NotDoneError(Exception):
    """A part that does not work, or was left out: `record` says why."""

    def __init__(self, why: str, status: str = LEFT_OUT, **about: Any) -> None:
        super().__init__(why)
        self.record: Record = {"status": status, "why": why, **about}


def output_of(command: Sequence[str], limit_s: float, **about: Any) -> str:
    """Return what a process says that ends well; `about` is kept in the record of one that does not.

    Raises:
        NotDoneError: it did not, or hung, or the budget was over.
    """
    ended = run_process(command, limit_s)
    code = ended.returncode
    if code == 0:
        return ended.stdout
    if code is None and limit_s < PART_S:
        raise NotDoneError(f"the budget was over after {limit_s:.0f} s of it: {MORE}", **about)
    output = ended.stdout.splitlines()[-KEPT_LINES:]
    raise NotDoneError(why_ended(code, ended.stdout, limit_s), FAILS, exit_code=code, output=output, **about)


def look_at_machine(limit_s: float) -> Record:
    """Look at driver, cards and build, and whether PyTorch computes on every card that the driver lists."""
    said = output_of(["-m", "bench.machine_facts"], limit_s).splitlines()
    # libraries may warn before it and, as they are left, after it
    facts = json.loads(next(line for line in reversed(said) if line.startswith("{")))
    wrong = what_is_wrong(facts)
    return {"status": FAILS if wrong else WORKS, "why": wrong or _summary_of(facts), "facts": facts}


def what_is_wrong(facts: Record) -> str:
    """Return why PyTorch cannot compute on the GPUs that there are; empty where it can, or there are none."""
    torch, count = facts["torch"], len(facts["listed_gpus"])
    if "error" in torch:
        return f"PyTorch cannot be imported: {torch['error']}"
    if count and torch["cuda"] is None:
        return f"PyTorch {torch['version']} is built without CUDA: take the build for your driver from pytorch.org"
    if count > len(torch["cards"]):
        return (
            f"the driver {facts['driver']} lists {count} GPU(s), but PyTorch {torch['version']} can use "
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


@dataclass(frozen=True)
class Devices:
    """What the run folders are tried on: GPUs, of which a power of two is used, or two processes."""

    count: int = 2
    card: Gpu | None = None  # the fullest, with what is free on it as its memory; None on CPU
    has_bf16: bool = False


def gpus_of(facts: Record) -> Devices:
    """Return the GPUs that PyTorch can use."""
    cards = facts["torch"]["cards"]
    known = gpu_of_device(cards[0]["name"]) or CATALOGUE[0]  # another stands in where the catalogue lacks it
    fullest = replace(known, memory_gib=min(card["free_gib"] for card in cards))
    count = min(MOST_DEVICES, 2 ** (len(cards).bit_length() - 1))
    return Devices(count, fullest, all(card["bf16"] for card in cards))


def parallel_on(own: RunConfig, devices: Devices) -> str:
    """Return how the devices share a run folder's work: one alone trains by itself where the workflow can."""
    return "single" if devices.count == 1 and workflow_does(own, own.technique, "single") else own.parallel


def batch_on(own: RunConfig, devices: Devices) -> tuple[int, int]:
    """Return the rows of a rank's batch and their tokens: with pictures, fewer and longer rows."""
    tokens, factor = GPU_TOKENS if devices.card else CPU_TOKENS, 4 if own.goal.sees else 1
    return ROWS // factor, tokens * factor


def fitting_settings(own: RunConfig, devices: Devices) -> dict[str, object]:
    """Return what a folder's run on these devices has unlike its `own`: on GPUs the largest shape that has room.

    Of whole models, which are saved and read again, and whose parts are made on the host, it is the smallest shape.

    Raises:
        NotDoneError: not even the smallest shape fits.
    """
    rows, tokens = batch_on(own, devices)
    settings: dict[str, object] = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), rows)
    settings |= {"report_to": "none", "independent_judge": "none"}
    if devices.card is None:
        return settings
    parallel = parallel_on(own, devices)
    with_bf16 = "bf16" if own.goal.chats else "bf16-mixed"
    settings |= {
        "device": "cuda",
        "devices": 1 if PARALLELISMS[parallel].is_single else devices.count,
        "stages": 0,
        "parallel": parallel,
        "precision": with_bf16 if devices.has_bf16 else "fp32",
    }
    shapes = SHAPES[own.goal.model_kind]
    for shape in shapes if own.method.has_adapters else shapes[-1:]:
        run = replace(own, **settings, model=shape)
        plan = plan_run(run, batch_of_length(run, tokens), devices.card)
        if plan.fits:
            return {**settings, "model": shape}
    raise NotDoneError(
        f"by the plan even {shape} needs {plan.fullest[0].peak_gib:.1f} GiB, and {devices.card.memory_gib:.1f} are free"
    )


def try_folder(own: RunConfig, devices: Devices, limit_s: float) -> Record:
    """Return what a preflight of a run folder measured beside what was planned, or why it refused."""
    if devices.count == 1 and not PARALLELISMS[parallel_on(own, devices)].is_single:
        raise NotDoneError("needs two GPUs, and there is one")
    if missing := not_installed(["bitsandbytes"] if own.method.quantizes else []):
        raise NotDoneError(missing)
    settings, length = fitting_settings(own, devices), str(batch_on(own, devices)[1])
    with tempfile.NamedTemporaryFile(prefix="gpu-check-", suffix=".json") as file:
        command = ["-m", "common.preflight", own.run_folder, "--json", file.name, "--seq-len", length]
        command += [f"--{name}={value}" for name, value in settings.items()]
        output = output_of(command, min(limit_s, PART_S), settings=settings).splitlines()[-KEPT_LINES:]
        figures = Path(file.name).read_text(encoding="utf-8")
    if not figures:
        why = "the preflight ended with exit code 0, but wrote no figures: `output` has what it said"
        raise NotDoneError(why, FAILS, exit_code=0, output=output, settings=settings)
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


def run_tests(kind: str, limit_s: float, tests: Sequence[str] = (TESTS, NOT_SHARED)) -> Record:
    """Run the tests of GPUs (on CPU their rehearsal): how many passed, failed and were skipped, and which failed."""
    if missing := not_installed(TEST_PACKAGES):
        return {"status": LEFT_OUT, "why": missing}
    ended = run_process(["-m", "pytest", "-q", *tests, *["--rehearse"] * (kind == "cpu")], limit_s)
    counts = counts_of(ended.stdout)
    named = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    said = [", ".join(f"{count} {name}" for name, count in counts.items()) or last_error(ended.stdout)]
    if ended.returncode is None:
        said.append(f"the budget was over after {limit_s:.0f} s: `python -m pytest tests/gpu` runs all")
    said += [name.rpartition("::")[2] for name in named]
    record = {"why": "; ".join(said), "counts": counts, "failed_tests": named}
    if named or ended.returncode not in (0, None):
        output = ended.stdout.splitlines()[-KEPT_LINES:]
        return {**record, "status": FAILS, "exit_code": ended.returncode, "output": output}
    return {**record, "status": WORKS if "passed" in counts and ended.returncode == 0 else LEFT_OUT}


def counts_of(output: str) -> dict[str, int]:
    """Read pytest's last line, such as `3 passed, 1 skipped in 12.34s`; empty where there is none."""
    last = re.findall(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", output, re.MULTILINE)
    return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", last[-1])} if last else {}


def without_places(record: Record) -> Record:
    """Return a record whose texts have no secrets, nor this machine's name, nor folders; files' names stay."""
    return recursively_apply(_without_places, record, test_type=lambda value: isinstance(value, str))


def _without_places(text: str) -> str:
    text = without_secrets(text)
    for place in (REPOSITORY, Path(tempfile.gettempdir()), Path.home()):
        if place.parent != place:
            text = text.replace(f"{place}/", "")
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "<host>", ABSOLUTE.sub("", text))


def find_out(name: str, call: Callable[[float], Record], deadline_s: float) -> Record:
    """Return the record of a part, for which `call` finds out in at most so many seconds; its crash is one, too."""
    start_s = time.monotonic()
    left_s = deadline_s - start_s - END_S
    print(f"{name} ...", flush=True)
    try:
        if left_s < LEAST_S:
            raise NotDoneError(f"{max(0.0, left_s):.0f} s of the budget are left, and {LEAST_S:.0f} are needed: {MORE}")
        found = call(left_s)
    except NotDoneError as failure:
        found = failure.record
    except Exception as error:  # the next part has nothing to do with it
        found = {"status": FAILS, "why": f"{type(error).__name__}: {error}"}
    print(f"{name}: {found['status']}, {time.monotonic() - start_s:.0f} s", flush=True)
    return without_places({"part": name, **found, "seconds": round(time.monotonic() - start_s, 1)})


def tried_folders() -> list[RunConfig]:
    """Return the runs of the folders that are tried, each technique's first ones."""
    return [own for folder, own in run_folders().items() if folder.name.startswith("run_0_")]


def parts_for(devices: Devices) -> dict[str, Callable[[float], Record]]:
    """Return by name each run folder's steps, then the tests of GPUs, which get what time is left."""
    parts: dict[str, Callable[[float], Record]] = {}
    for own in tried_folders():
        parallelism = PARALLELISMS[parallel_on(own, devices)]
        shared = "" if parallelism.is_single else f", {parallelism.label}" + ", SP" * (own.sp_size > 1)
        parts[f"{own.run_folder.partition('_')[0]} {own.method.short}{shared}"] = partial(try_folder, own, devices)
    return {**parts, TESTS: partial(run_tests, "cuda")} if devices.card else parts


def check(options: argparse.Namespace) -> list[Record]:
    """Find out all parts that are asked for; after each of them the file is written anew. Return their records."""
    deadline_s = time.monotonic() + options.budget_s
    machine = find_out(MACHINE, look_at_machine, deadline_s)
    facts = machine.get("facts")
    may_have_gpus = facts is None or bool(facts["listed_gpus"] or facts["torch"]["cards"])
    if options.device == "cuda" and not may_have_gpus:
        raise BadInputError(
            "--device is cuda, but no GPU can be seen: `nvidia-smi` should list it; leave --device out, or pass cpu."
        )
    kind = options.device or ("cuda" if may_have_gpus else "cpu")
    records = [machine]
    report: Record = {
        "schema_version": 1,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "budget_s": options.budget_s,
        "device": kind,
        "is_complete": False,
        "parts": records,
    }
    write_json(report, options.out)
    print(machine["why"])
    parts = {}
    if kind == "cpu":
        print("on CPU: the same steps with the embedded models, and two processes where there would be two GPUs")
        parts = parts_for(Devices())
    elif machine["status"] == WORKS:
        parts = parts_for(gpus_of(facts))
    elif machine["status"] == FAILS:
        print("the GPUs cannot be used; --device cpu tries the run folders without them")
    for name, call in parts.items():
        if options.only in (None, name.split()[0]):
            records.append(find_out(name, call, deadline_s))
            write_json(report, options.out)
    report["is_complete"] = True
    write_json(report, options.out)
    return records


def table(records: Sequence[Record]) -> str:
    """Return the parts, with what was planned beside what was measured, 100 columns wide."""
    rows = []
    for record in records:
        figures = ["" if record.get(name) is None else format(record[name], form) for name, form in MEASURED.items()]
        rows.append([record["part"], record["status"], *figures, record["why"]])
    rule = ["-" * width for width in COLUMN_WIDTHS]  # as a row: tabulate would make room beside its own headers
    look = {"tablefmt": "plain", "disable_numparse": True, "maxcolwidths": list(COLUMN_WIDTHS)}
    return tabulate([HEADERS, rule, *rows], colalign=["left", "left", *["right"] * len(MEASURED), "left"], **look)


@refused_in_one_sentence()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the part at work is ended, too
    parser = OneSentenceParser(prog="python -m common.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where a GPU can be seen, else cpu")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="the file")
    parser.add_argument("--budget_s", type=float, default=360.0, help="seconds for all")
    choices = (MACHINE, *dict.fromkeys(own.run_folder.partition("_")[0] for own in tried_folders()), TESTS)
    parser.add_argument("--only", choices=choices, help="one part, or the run folders of a technique")
    options = parser.parse_args(arguments)
    least_s = LEAST_S + END_S
    if not options.budget_s >= least_s:  # so that nan is refused, too
        raise BadInputError(f"--budget_s is {options.budget_s:g}, but must be at least {least_s:g} for a part to end.")
    if not os.access(options.out.absolute().parent, os.W_OK):
        raise BadInputError(f"--out is {options.out}, but nothing can be written there: pass another file.")
    try:
        records = check(options)
    except KeyboardInterrupt:
        print(f"error: interrupted; {options.out} has what was found until then.", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT_CODE)
    counts = Counter(record["status"] for record in records)
    said = ", ".join(f"{counts[status]} {status}" for status in (WORKS, SLOWER, FAILS, LEFT_OUT) if counts[status])
    print(f"\n{table(records)}\n\n{said}; {options.out} has the details: send it along with a report")
    sys.exit(int(counts[FAILS] > 0))
