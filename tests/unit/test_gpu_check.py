"""A GPU check says of each part whether it works, keeps that whatever comes after, and keeps nothing private."""

import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from bench import gpu_check, machine_facts, processes
from bench.gpu_check import FAILS, LEFT_OUT, SLOWER, WORKS, main
from common.base.paths import REPOSITORY
from common.base.run_folders import literal_of
from common.checks.folder_runs import run_of_folder
from tests.forked import run_forked
from tests.pace import patient

H100 = {
    "name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.2, "free_gib": 78.5, "compute_capability": "9.0", "bf16": True,
    "is_mig_slice": False, "error": None,
}  # fmt: skip
BUILD = {"version": "2.13.0", "cuda": "13.0", "built_for": ["sm_90"], "nccl": "2.28", "peer_access": []}
WRITES_FIGURES = """
import json, sys
from pathlib import Path
path, model = Path(sys.argv[3]), next((each[8:] for each in sys.argv if each.startswith("--model=")), "its own")
path.write_text(json.dumps({
    "settings": {"model": model, "precision": "bf16"}, "rows": 8, "tokens": 512, "no_plan": "",
    "devices": [{"planned_gib": 20.0, "peak_gib": 21.0}, {"planned_gib": 22.0, "peak_gib": 19.0}],
    "planned_step_time_s": 0.25, "step_time_s": 0.3,
}))
"""
"""A program with a preflight's arguments, for which all is well."""


def facts_of(*cards: dict[str, Any], listed: int | None = None, **build: object) -> dict[str, Any]:
    return {
        "listed_gpus": [H100["name"]] * (len(cards) if listed is None else listed),
        "driver": "580.1",
        "cpu": "Some CPU",
        "packages": {"torch": "2.13.0", "trl": None},
        "torch": {**BUILD, "cards": list(cards), **build},
    }


Asked = list[list[str]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    """Make this machine one with these facts, whose preflights are other programs; what was asked for is returned."""

    def make(facts: dict[str, Any], preflights: dict[str, str] | None = None) -> Asked:
        asked, run_process = [], gpu_check.run_process

        def run_other(command: list[str], limit_s: float) -> CompletedProcess:
            asked.append(list(command))
            if command[1] == "bench.machine_facts":
                return CompletedProcess(command, 0, f"a warning\n{json.dumps(facts)}\nanother")
            if command[1] == "pytest":
                return CompletedProcess(command, 0, "3 passed in 1.00s")
            program = (preflights or {}).get(command[2].partition("_")[0], WRITES_FIGURES)
            return run_process(["-c", program, *command[2:]], limit_s)

        monkeypatch.setattr(gpu_check, "run_process", run_other)
        return asked

    return make


def outcome(path: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and by their names the parts that the file has."""
    with pytest.raises(SystemExit) as left:
        main(["--out", str(path), *arguments])
    return left.value.code, parts_in(path)


def parts_in(path: Path) -> dict[str, dict[str, Any]]:
    return {part["part"]: part for part in json.loads(path.read_text())["parts"]}


def check_told(parts: dict[str, dict[str, Any]], expected: dict[str, tuple[str, str]]) -> None:
    """By a part's name, its status and what its reason has in it."""
    for name, (status, why) in expected.items():
        assert parts[name]["status"] == status, parts[name]
        assert why in parts[name]["why"]


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """The file; what the check does on SIGTERM ends with the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path / "gpu_check.json"
    signal.signal(signal.SIGTERM, before)


# -- the real thing


@pytest.mark.slow
def test_on_cpu_a_technique_is_measured_beside_its_plan(tmp_path: Path, out: Path) -> None:
    command = [sys.executable, "-m", "common.gpu_check", "--device", "cpu", "--only", "2.1", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "SOME_TOKEN": "a-secret-of-mine"}
    log = tmp_path / "log"
    assert run_forked(command, tmp_path, environment, log, timeout=100) == 0, log.read_text()
    written, said = out.read_text(), log.read_text()
    data = json.loads(written)
    machine, lora = data["parts"]
    assert (data["device"], data["is_complete"], machine["facts"]["ram_gib"] > 0) == ("cpu", True, True)
    assert lora["status"] in (WORKS, SLOWER)
    assert lora["figures"]["settings"]["model"] == "assets/embedded_base"
    assert all(0.1 < lora[name] < 5 for name in ("planned_gib", "peak_gib"))
    assert all(lora[name] > 0 for name in ("planned_step_time_s", "step_time_s"))
    private = (str(REPOSITORY), str(tmp_path), f"{Path.home()}/", "a-secret-of-mine", f'"{socket.gethostname()}"')
    assert [each for each in private if each in written] == []
    row = next(line for line in said.splitlines() if line.startswith("2.1 LoRA  "))
    assert f"{lora['peak_gib']:.2f}" in row
    assert "on CPU" in said
    assert [path.name for path in tmp_path.glob("gpu_check*")] == ["gpu_check.json"]


def test_facts_name_what_is_there() -> None:
    facts = machine_facts.facts()
    assert facts["packages"]["torch"] == facts["torch"]["version"]
    assert facts["ram_gib"] == pytest.approx(psutil.virtual_memory().total / 2**30)
    assert len(facts["torch"]["cards"]) <= len(facts["listed_gpus"])
    json.dumps(facts)


def test_each_card_is_asked_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    ones, cards = torch.ones, [("NVIDIA A100-SXM4-40GB", 8, 0), ("Tesla T4", 7, 5)]

    def ones_on_first(*size: int, device: str) -> torch.Tensor:
        if device == "cuda:1":
            raise RuntimeError("CUDA error: no kernel image is available\nFor debugging ...")
        return ones(*size)

    def properties(number: int) -> SimpleNamespace:
        name, major, minor = cards[number]
        return SimpleNamespace(name=name, major=major, minor=minor, total_memory=40 * 2**30)

    monkeypatch.setattr(torch, "ones", ones_on_first)
    known = {
        "is_available": True, "device_count": 2, "get_arch_list": ["sm_80"], "mem_get_info": (30 * 2**30, 40 * 2**30),
    }  # fmt: skip
    for name, answer in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one == 0)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    found = machine_facts.torch_facts()
    names = ("name", "bf16", "compute_capability", "free_gib", "error")
    assert [tuple(card[name] for name in names) for card in found["cards"]] == [
        ("NVIDIA A100-SXM4-40GB", True, "8.0", 30.0, None),
        ("Tesla T4", False, "7.5", None, "CUDA error: no kernel image is available"),
    ]
    assert (found["peer_access"], found["nccl"]) == ([[0, 1]], "2.28.3")


# -- each part by itself


def test_a_part_that_crashes_is_told_and_the_next_still_runs(out: Path, machine: Callable) -> None:
    """Whether it is the part's own process, or what this check makes of its answer."""
    programs = {
        "2.1": "print('step 1'); raise ValueError('the seventh row')",
        "2.3": "import os; os.abort()",
        "2.4": "import sys; open(sys.argv[3], 'w').write('no JSON')",
    }
    machine(facts_of(H100), programs)
    code, parts = outcome(out)
    failures = {
        "2.1 LoRA": (FAILS, "ValueError: the seventh row"),
        "2.3 QLoRA": (FAILS, "signal 6"),
        "2.4 full": (FAILS, ""),
    }
    check_told(parts, {**failures, "3.1 full": (WORKS, ""), "tests/gpu": (WORKS, "")})
    assert (code, parts["2.1 LoRA"]["why"]) == (1, "ValueError: the seventh row")
    assert "step 1" in parts["2.1 LoRA"]["output"]


def test_a_run_that_is_cut_off_leaves_what_it_found(
    out: Path, machine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(facts_of(H100))
    works = mock.Mock(return_value={"status": WORKS, "why": "all is well"})

    def cut_off(limit_s: float) -> dict[str, Any]:
        assert [*parts_in(out)] == ["machine", "first"]
        raise KeyboardInterrupt

    parts = {"first": works, "second": cut_off, "third": works}
    monkeypatch.setattr(gpu_check, "parts_for", lambda *_: parts)
    code, kept = outcome(out)
    assert (code, [*kept], json.loads(out.read_text())["is_complete"]) == (130, ["machine", "first"], False)


def test_a_part_that_hangs_is_ended_with_all_that_it_started() -> None:
    program = "import subprocess; p = subprocess.Popen(['sleep', '99']); print(p.pid, flush=True); p.wait()"
    start_s = time.monotonic()
    ended = gpu_check.run_process(["-c", program], patient(0.7))
    assert time.monotonic() - start_s < patient(5)
    assert ended.returncode is None
    child = int(ended.stdout.split()[0])
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - start_s < patient(10)
        time.sleep(0.05)


def test_overrunning_its_own_time_is_a_failure_and_the_budgets_end_is_not(
    out: Path, machine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("PART_S", 0.6), ("LEAST_S", 0.4), ("END_S", 0.1)):
        monkeypatch.setattr(gpu_check, name, patient(seconds))
    asked = machine(facts_of(H100), dict.fromkeys(("2.1", "2.4", "3.1"), "import time; time.sleep(99)"))
    parts = gpu_check.parts_for(gpu_check.Devices())
    chosen = {name: parts[name] for name in ("2.1 LoRA", "2.4 full", "3.1 full, DDP")}
    monkeypatch.setattr(gpu_check, "parts_for", lambda *_: chosen)
    start_s = time.monotonic()
    code, found = outcome(out, "--budget_s", str(patient(1.25)))
    assert time.monotonic() - start_s < patient(3)
    assert code == 1
    check_told(found, {
        "2.1 LoRA": (FAILS, "took longer than"),
        "2.4 full": (LEFT_OUT, "budget"),
        "3.1 full, DDP": (LEFT_OUT, ""),
    })  # fmt: skip
    assert not any("3.1" in word for command in asked for word in command)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("building\nerror: it does not fit.\nW1123 torchrun's report", "it does not fit."),
        ("[rank0]: Traceback:\n[rank0]: torch.OutOfMemoryError: CUDA out of memory.\nx", None),
        ("ValueError: one\na.b.ChildFailedError: \n=====\nRoot Cause", "ValueError: one"),
        ("not tried; --anyway tries it all the same\n\n", "not tried; --anyway tries it all the same"),
        ("", "it ended without a word"),
    ],
)
def test_a_failure_is_told_by_the_line_that_says_why(output: str, why: str | None) -> None:
    assert processes.last_error(output) == (why or "torch.OutOfMemoryError: CUDA out of memory.")


def test_what_leaves_the_machine_names_no_place_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "abcdefgh12345")
    kept_as_it_is = {
        "output": ["see https://pytorch.org/get-started/locally/"],
        "figures": {"step_time_s": 0.5, "rate": "8 rows / 2 s, s/step"},
    }
    why = f"abcdefgh12345 at {socket.gethostname()}:29500, in {REPOSITORY}/common/data/splits.py"
    kept = gpu_check.without_places({"why": why, **kept_as_it_is})
    assert kept == {"why": "*** at <host>:29500, in common/data/splits.py", **kept_as_it_is}
    elsewhere = gpu_check.without_places({"why": 'File "/opt/some one/x.py", line 3, in ~/models/mine'})["why"]
    assert [word in elsewhere for word in ("opt", "models", "x.py")] == [False, False, True]


# -- what is tried, and what is not


def preflights(asked: Asked) -> list[list[str]]:
    return [command for command in asked if command[1] == "common.preflight"]


def folder_of(preflight: list[str]) -> str:
    return preflight[2].partition("_")[0]


def test_one_gpu_tries_what_one_can_and_says_what_needs_two(out: Path, machine: Callable) -> None:
    asked = machine(facts_of(H100))
    code, parts = outcome(out)
    needs_two = {"2.2 LoRA, DDP", "2.5 full, MP", "2.6 full, FSDP", "2.7 full, PP", "2.8 full, DDP, SP"}
    assert {name for name, part in parts.items() if "needs two GPUs" in part["why"]} == needs_two
    tried = {folder_of(command): command for command in preflights(asked)}
    assert (code, {*tried}) == (0, {"2.1", "2.3", "2.4", "3.1", "3.2", "3.3", "3.4", "3.5"})
    assert len(preflights(asked)) == len(tried)  # 3.4's two folders are one on one device
    assert all({"--device=cuda", "--devices=1", "--parallel=single"} <= {*command} for command in tried.values())
    assert ("--model=qwen2.5-7b" in tried["2.1"], "--precision=bf16-mixed" in tried["3.1"]) == (True, True)


def test_two_gpus_are_used_by_what_shares_work(out: Path, machine: Callable) -> None:
    asked = machine(facts_of(H100, H100, H100))
    outcome(out)
    shared = {folder_of(command) for command in preflights(asked) if "--devices=2" in command}
    assert shared == {
        "2.2",
        "2.5",
        "2.6",
        "2.7",
        "2.8",
        "3.1",
        "3.2",
        "3.4",
        "3.5",
    }  # three GPUs: heads and rows are divided by two


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_preflight_takes_the_run_that_was_planned(count: int, has_bf16: bool) -> None:
    devices = gpu_check.gpus_of(facts_of(*[{**H100, "bf16": has_bf16}] * count))
    for own in gpu_check.tried_folders():
        if count == 1 and gpu_check.parallel_on(own, devices) != "single":
            continue
        settings = gpu_check.fitting_settings(own, devices)
        overrides = [f"--{name}={value}" for name, value in settings.items()]
        run = run_of_folder(Path(own.run_folder), overrides)
        assert run.changed_to(learning_rate=own.learning_rate) == replace(own, **settings)  # by the model: no weight
        assert run.devices == (1 if run.parallel == "single" else count)


def model_for(free_gib: float, card: str = H100["name"], folder: str = "2.1_lora_finetuning/run_0_cpu_x1") -> str:
    devices = gpu_check.gpus_of(facts_of({**H100, "name": card, "free_gib": free_gib}))
    return gpu_check.fitting_settings(literal_of(REPOSITORY / folder), devices)["model"]


def test_the_shape_is_the_largest_that_has_room_in_what_is_free() -> None:
    assert [model_for(free_gib) for free_gib in (78.0, 12.0)] == ["qwen2.5-7b", "llama-3.2-3b"]
    assert model_for(78.0, "NVIDIA Unheard Of") == "qwen2.5-7b"
    assert model_for(78.0, folder="2.4_full_finetuning/run_0_cpu_x1") == "llama-3.2-1b"
    with pytest.raises(gpu_check.NotDoneError, match=r"even llama-3.2-1b needs \d+\.\d GiB, and 2.0 are free"):
        model_for(2.0)


def test_no_room_is_no_failure(out: Path, machine: Callable) -> None:
    machine(facts_of({**H100, "free_gib": 1.0}))
    code, parts = outcome(out, "--only", "2.4")
    check_told(parts, {"2.4 full": (LEFT_OUT, "1.0 are free")})
    assert code == 0


def test_what_a_part_lacks_leaves_it_out_but_a_refusal_is_a_failure(out: Path, machine: Callable) -> None:
    """What these settings ask for, a preflight is to take."""
    machine(facts_of(H100), {"3.1": "import sys; print('error: no such shape'); sys.exit(2)"})
    absent = ("pytest", "bitsandbytes")
    with mock.patch.object(processes, "find_spec", lambda name: None if name in absent else object()):
        code, parts = outcome(out)
    check_told(parts, {
        "machine": (WORKS, "not installed: trl"),
        "2.3 QLoRA": (LEFT_OUT, "bitsandbytes is not installed"),
        "2.1 LoRA": (WORKS, ""),
        "3.1 full": (FAILS, "no such shape"),
        "tests/gpu": (LEFT_OUT, "pip install pytest"),
    })  # fmt: skip
    assert code == 1


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (facts_of(listed=1, cuda=None), "built without CUDA"),
        (facts_of(H100, listed=2), "can use 1"),
        (facts_of({**H100, "error": "no kernel image is available"}), "cuda:0: no kernel image is available"),
        (facts_of(listed=1, error="libcudart.so.13: cannot open shared object file"), "libcudart.so.13"),
    ],
)
def test_gpus_that_pytorch_cannot_use_are_the_one_failure(
    facts: dict[str, Any], said: str, out: Path, machine: Callable
) -> None:
    asked = machine(facts)
    code, parts = outcome(out)
    check_told(parts, {"machine": (FAILS, said)})
    assert (code, len(asked), [*parts]) == (1, 1, ["machine"])


def test_without_a_gpu_the_cpu_is_taken_and_said(
    out: Path, machine: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = machine(facts_of())
    code, parts = outcome(out, "--only", "2.1")
    check_told(parts, {"2.1 LoRA": (WORKS, ""), "machine": (WORKS, "no GPU")})
    assert "on CPU" in capsys.readouterr().out
    assert (code, any("cuda" in word for word in asked[-1])) == (0, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cuda"], "no GPU can be seen"),
        (["--only", "9.9"], "'9.9'"),
        (["--out", "no/such/folder/x.json"], "--out is no/such/folder/x.json"),
        (["--device", "tpu"], "'tpu'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, out: Path, machine: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(facts_of())
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--out", str(out), *arguments])
    spoken = capsys.readouterr().err
    assert said in spoken
    assert (len(spoken.splitlines()), out.exists()) == (1, False)


# -- tests/gpu


@pytest.mark.parametrize(
    ("exit_code", "output", "status", "why"),
    [
        (0, "..s\n2 passed, 1 skipped in 61.20s (0:01:01)", WORKS, "2 passed, 1 skipped"),
        (0, "3 skipped in 0.10s", LEFT_OUT, "3 skipped"),
        (
            1,
            "FAILED tests/gpu/test_cuda.py::test_x - assert 0\n1 failed, 2 passed in 3.00s",
            FAILS,
            "1 failed, 2 passed; test_x",
        ),
        (None, "!!! KeyboardInterrupt !!!\n2 passed in 3.00s", LEFT_OUT, "2 passed; the budget was over"),
        (None, "FAILED t.py::test_x - assert 0\n1 failed in 3.00s", FAILS, "1 failed"),
        (
            3,
            "INTERNALERROR> def pytest_configure\nINTERNALERROR> ModuleNotFoundError: No module named 'x'",
            FAILS,
            "No module named",
        ),
    ],
)
def test_the_tests_outcome_is_what_pytest_says(
    exit_code: int | None, output: str, status: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "run_process", lambda command, limit_s: CompletedProcess(command, exit_code, output))
    record = gpu_check.run_tests("cpu", 60.0)
    check_told({"tests/gpu": record}, {"tests/gpu": (status, why)})
    assert ("exit_code" in record) == (status == FAILS)
    assert record.get("exit_code") in (None, exit_code)


@pytest.mark.parametrize(
    ("program", "exit_code", "why"),
    [("print('nothing')", 0, "wrote no figures"), ("import sys; sys.exit('error: too large')", 1, "too large")],
)
def test_a_preflight_that_fails_leaves_its_settings(
    program: str, exit_code: int, why: str, out: Path, machine: Callable
) -> None:
    machine(facts_of(), {"2.1": program})
    code, parts = outcome(out, "--only", "2.1")
    found = parts["2.1 LoRA"]
    assert (code, found["status"], found["exit_code"]) == (1, FAILS, exit_code)
    assert why in found["why"]
    assert found["settings"]["report_to"] == "none"


def test_pytest_that_is_ended_says_what_passed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    test = tmp_path / "test_x.py"
    test.write_text("import time\ndef test_a(): pass\ndef test_b():\n    print('b', flush=True)\n    time.sleep(99)\n")
    ended = gpu_check.run_process(["-m", "pytest", "-q", str(test)], patient(2.5))
    assert ended.returncode is None
    assert gpu_check.counts_of(ended.stdout) == {"passed": 1}


# -- the answer


FIGURES = {
    "settings": {"model": "m", "precision": "bf16"}, "rows": 8, "tokens": 512, "no_plan": "",
    "devices": [{"planned_gib": 2.0, "peak_gib": 3.0}], "planned_step_time_s": 0.25, "step_time_s": 0.38,
}  # fmt: skip


@pytest.mark.parametrize(
    ("figures", "status", "planned_gib", "why"),
    [
        ({"step_time_s": 0.37}, WORKS, 2.0, ""),
        ({"step_time_s": 0.38}, SLOWER, 2.0, ""),
        (
            {
                "planned_step_time_s": None,
                "no_plan": "an unheard-of card",
                "devices": [{"planned_gib": None, "peak_gib": 3.0}] * 2,
            },
            WORKS,
            None,
            "an unheard-of card",
        ),
    ],
    ids=["as planned", "slower", "no plan"],
)
def test_slower_is_more_than_half_as_long_again(
    figures: dict[str, object], status: str, planned_gib: float | None, why: str
) -> None:
    record = gpu_check.judged({**FIGURES, **figures})
    assert (record["status"], record["planned_gib"]) == (status, planned_gib)
    assert why in record["why"]


TAKES_LONG = WRITES_FIGURES.replace('"step_time_s": 0.3', '"step_time_s": 0.9')


def test_the_table_has_every_part_and_fits_a_terminal(
    out: Path, machine: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = f"raise ValueError({'a-long-word' * 30!r})"
    machine(facts_of(H100), {"2.4": TAKES_LONG, "3.1": broken})
    code, parts = outcome(out)
    said = capsys.readouterr().out
    *lines, _, counted = said[said.index("\n\n") :].splitlines()
    assert max(map(len, lines)) <= 100
    assert [name for name in parts if any(line.startswith(f"{name} ") for line in lines)] == [*parts]
    row = next(line for line in lines if line.startswith("2.4 full"))
    cells = ("slower than", " 22.00 ", " 21.00 ", " 0.25 ", " 0.9 ", "3.6 times")
    assert [cell for cell in cells if cell not in row] == []
    counts = Counter(part["status"] for part in parts.values() if part["status"] != LEFT_OUT)
    assert (code, counts) == (1, {WORKS: 8, SLOWER: 1, FAILS: 1})
    assert "8 works, 1 slower than planned, 1 does not work" in counted


def test_slower_than_planned_is_no_failure(out: Path, machine: Callable) -> None:
    machine(facts_of(H100), {"2.1": TAKES_LONG})
    code, parts = outcome(out, "--only", "2.1")
    assert (code, parts["2.1 LoRA"]["status"]) == (0, SLOWER)
