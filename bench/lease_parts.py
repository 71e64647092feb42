"""What a lease measures, the most wanted first, on the card that is there; or, as a rehearsal, on a CPU."""

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import gpu, gpu_check, planner_points
from bench.entries import read_kept
from bench.gpu import GPU_SCALE, LEVER_TRIALS, REHEARSED_SCALE, TRIALS, TRIALS_PATH, Scale, Trial
from bench.gpu_check import NotDoneError
from bench.lease_schedule import Part
from bench.machine_facts import facts
from bench.planner_points import Point
from bench.processes import not_installed
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.checks import preflight
from common.hardware.devices import GIB, Gpu, cpu_device, find_gpu
from common.planning.architectures import read_architecture
from common.planning.gpu_overhead import CONTEXT_GIB

REHEARSED = "rehearsal on a CPU"
# what leases found besides steps and points: each part's last result, by card
LEASES_PATH = REPOSITORY / "bench" / "gpu_leases.json"

# -- the card


def card_here(asked: str | None = None) -> Gpu:
    """Return this machine's GPU, with the memory that a part may take: what is free but for the next part's context.

    Raises:
        BadInputError: there is none, the catalogue lacks it, or it is another than `asked`.
    """
    wanted = find_gpu(asked) if asked else None
    card = planner_points.gpu_here()
    if wanted not in (None, card):
        raise BadInputError(f"--card is {asked}, but the GPU here is {card.name}: leave --card out to measure on it.")
    return replace(card, memory_gib=min(card.memory_gib, free_gib()) - CONTEXT_GIB)


def free_gib() -> float:
    """Return what is free on the first GPU, by the driver: PyTorch's own context would take some of it."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free / GIB


def _device_of(card: str | None, memory_gib: float | None) -> Gpu:
    return replace(find_gpu(card), memory_gib=memory_gib) if card else cpu_device()


def scale_of(card: str | None) -> Scale:
    """Return what is trained on a card; on the CPU it is tiny."""
    return GPU_SCALE if card else REHEARSED_SCALE


# -- what parts call; each is given the card's name and memory (None: of the CPU), and returns what is kept


def look_at_machine(**card: Any) -> dict[str, Any]:
    """Return driver, card, build and packages."""
    return facts()


def take_steps(technique: str, name: str, card: str | None, memory_gib: float | None) -> dict[str, Any]:
    """Return a trial's record."""
    trial = next(each for each in (*TRIALS, *LEVER_TRIALS) if (each.technique, each.name) == (technique, name))
    return gpu.measure(trial, _device_of(card, memory_gib), scale_of(card))


def try_folder(folder: str, tokens: int, **card: Any) -> dict[str, Any]:
    """Return what a preflight of a run folder measured beside its plan, on rows of `tokens`; 0: on its own rows."""
    length = ["--seq-len", str(tokens)] if tokens else []
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        try:
            preflight.main([folder, "--json", file.name, *length, "--independent_judge", "none"])
        except SystemExit as left:
            if left.code:  # the log says why
                raise
        return gpu_check.judged(json.loads(Path(file.name).read_text(encoding="utf-8")))


def measure_point(point: dict[str, Any], card: str | None, memory_gib: float | None) -> dict[str, Any]:
    """Return a planner's point: planned memory beside the peak."""
    measure = partial(planner_points.measure_here, device="cuda" if card else "cpu")
    return planner_points.measured_point(Point(**point), _device_of(card, memory_gib), measure)


def run_tests(tests: list[str], card: str | None, **memory: Any) -> dict[str, Any]:
    """Return which of some tests, or files of them, pass; on the CPU, of their rehearsal."""
    kind, limit_s = ("cuda", TESTS_LIMIT_S) if card else ("cpu", REHEARSED_LIMIT_S)
    return gpu_check.run_tests(kind, limit_s, [f"tests/gpu/{test}" for test in tests])


# -- the parts

# run folders whose steps are tried on a GPU, and on the CPU, and the tokens of a row; 0: the folder's own rows
PREFLIGHTS = (
    ("2.3_qlora_finetuning/run_3_h200_141g_x1", "2.3_qlora_finetuning/run_0_cpu_x1", 512),
    ("3.4_preference_tuning/run_1_a6000_48g_x1", "3.4_preference_tuning/run_0_cpu_x1", 512),
    ("3.3_visual_question_answering/run_1_a6000_48g_x1", "3.3_visual_question_answering/run_0_cpu_x1", 0),
)
PAIRS_AT_ONCE, TESTS_LIMIT_S, REHEARSED_LIMIT_S = 3, 240.0, 600.0
# of `tests/gpu`, and the seconds that they should take
TEST_FILES = {("test_kernels.py", "test_strategies.py"): 45, ("test_saves.py",): 45, ("test_cuda.py",): 75}
RESTART = "test_shared_gpu.py::test_a_rank_that_is_killed_starts_again"
# what two ranks on one GPU are tried with, and the packages that it needs
PAIRS = {
    **dict.fromkeys(("2.2 DDP", "2.3 DDP", "2.6 DDP", "2.6 FSDP", "2.6 FSDP, bf16", "2.6 QLoRA"), ()),
    "2.6 ZeRO-3": ("deepspeed",),
    **dict.fromkeys(("2.7 PP", "3.1 TP", "3.2 DDP"), ()),
}
POINTS = 20  # of the planner, before other parts: with those that are kept more than its bar asks for
SLOWEST_WEIGHTS_PER_S = 2e9  # of the points' steps: making the weights, quantizing them, and two steps
REHEARSED_POINTS = (
    Point("lora", "assets/embedded_base", 2, 32, False),
    Point("full", "assets/embedded_base", 1, 32, True),
)
MACHINE = "machine"


def parts_for(card: Gpu | None) -> list[Part]:
    """Return the parts of a lease of this card, last those whose results are kept; None: of a rehearsal."""
    parts = wanted_parts(card)
    if card is None:
        return parts
    kept = read_kept(LEASES_PATH, {}).get(card.name, {})
    known = {name for name, line in kept.items() if line["status"] == "done"} - {MACHINE}  # it may be another machine
    known |= {_step_name(**each) for each in read_kept(TRIALS_PATH) if each["gpu"] == card.name}
    return sorted(parts, key=lambda part: part.name in known)


def wanted_parts(card: Gpu | None) -> list[Part]:
    """Return the parts of a lease of this card, the most wanted first; None: of a rehearsal."""
    levers, points = [trial_part(trial, card) for trial in LEVER_TRIALS], point_parts(card)
    *new_tests, old_tests = test_parts(card)
    return [
        _part(MACHINE, look_at_machine, card, 25, 60),
        *pair_parts(card),
        *levers[:2],
        *new_tests,
        *points[:POINTS],
        *levers[2:],
        *(_preflight_part(*each, card) for each in PREFLIGHTS),
        old_tests,
        *(trial_part(trial, card) for trial in TRIALS),
        *points[POINTS:],
    ]


def _part(name: str, call: Callable, card: Gpu | None, expected_s: float, limit_s: float, /, **more: Any) -> Part:
    """Return a part that calls a function of this module; `left_out` and `beside` are the part's, others are given."""
    own = {key: more.pop(key) for key in ("left_out", "beside") if key in more}
    more |= {"card": card and card.name, "memory_gib": card and card.memory_gib}
    return Part(name, f"{__name__}:{call.__name__}", more, expected_s, limit_s, **own)


def pair_parts(card: Gpu | None) -> list[Part]:
    """Return what two ranks on one GPU are tried with: each technique, and a rank that starts again."""
    if card is None:
        return [_tests_part("shared GPU", ["test_shared_gpu.py"], None, 120)]
    tests = {name: f"test_shared_gpu.py::test_two_ranks_share_a_gpu[{name}]" for name in PAIRS} | {"restart": RESTART}
    return [
        _tests_part(
            f"shared GPU: {name}", [test], card, 80,
            beside=PAIRS_AT_ONCE, left_out=not_installed(PAIRS.get(name, ())),
        )
        for name, test in tests.items()
    ]  # fmt: skip


def _tests_part(name: str, tests: Sequence[str], card: Gpu | None, expected_s: float, **about: Any) -> Part:
    limit_s = (TESTS_LIMIT_S if card else REHEARSED_LIMIT_S) + 10
    return _part(name, run_tests, card, expected_s, limit_s, tests=tests, **about)


def trial_part(trial: Trial, card: Gpu | None) -> Part:
    """Return the steps of a trial: micro-batches take their time, and to compile layers with adapters more."""
    compiles_adapters = trial.technique == "lora" and trial.settings.get("torch_compile")
    expected_s = 110 if compiles_adapters else 55 if trial.settings.get("gradient_accumulation_steps") else 40
    about = {"technique": trial.technique, "name": trial.name, "left_out": _why_not(trial, card)}
    return _part(_step_name(**about), take_steps, card, expected_s, 180, **about)


def _step_name(technique: str, name: str, **_: Any) -> str:
    return f"steps: {technique}, {name}"


def _why_not(trial: Trial, card: Gpu | None) -> str:
    """Return why a trial cannot be run; empty = it can."""
    if trial.settings.get("use_liger_kernel"):
        if card is None:
            return "Liger's kernels are for GPUs"
        if missing := not_installed(["liger_kernel"]):
            return missing
    try:
        trial.planned(card or cpu_device(), scale_of(card and card.name))
    except NotDoneError as too_large:
        return str(too_large)
    return ""


def point_parts(card: Gpu | None) -> list[Part]:
    """Return points of the planner that are not kept yet, of all kinds; three small ones are measured at once."""
    if card is None:
        return [_point_part(point, None) for point in REHEARSED_POINTS]
    known = [
        planner_points.point_of(each) for each in read_kept(planner_points.POINTS_PATH) if each["gpu"] == card.name
    ]
    missing = [point for point in planner_points.all_points() if point not in known]
    random.Random(0).shuffle(missing)  # so that any first few are of different kinds
    return [_point_part(point, card) for point in missing]


def _point_part(point: Point, card: Gpu | None) -> Part:
    planned_gib = point.planned(card or cpu_device()).peak_gib
    weights = read_architecture(point.model).parameters
    beside = max(1, min(PAIRS_AT_ONCE, int(card.memory_gib // (1.1 * planned_gib)))) if card else 1
    expected_s = 20 + weights / SLOWEST_WEIGHTS_PER_S
    return _part(f"point: {point.step.name}", measure_point, card, expected_s, 120, point=asdict(point), beside=beside)


def test_parts(card: Gpu | None) -> list[Part]:
    """Return the tests of GPUs: kernels, saves, and all others."""
    left_out = not_installed(gpu_check.TEST_PACKAGES)
    return [
        _tests_part(f"tests: {', '.join(files)}", files, card, expected_s, left_out=left_out)
        for files, expected_s in TEST_FILES.items()
    ]


def _preflight_part(on_gpu: str, on_cpu: str, tokens: int, card: Gpu | None) -> Part:
    folder = on_gpu if card else on_cpu
    about = {"folder": folder, "tokens": min(tokens, tokens if card else gpu_check.CPU_TOKENS)}
    return _part(f"preflight: {folder}", try_folder, card, 30, 100, **about)
