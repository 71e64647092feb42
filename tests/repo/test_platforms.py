"""What starts runs on Valohai, by SLURM and by SkyPilot passes their checks, and starts runs that there are."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from valohai_yaml.objs import Config, Step
from valohai_yaml.parsing import parse

from common.base.parsing import parse_overrides
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of, run_folders
from common.runtime.torchrun import nodes_command
from tests.valohai_task import distributed_task

YAML = REPOSITORY / "valohai.yaml"
STEPS = ("train-torchrun", "train-accelerator", "train-task")
FSSPEC = re.search(r"^fsspec==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)[1]
"""s3fs has the version of the fsspec that it is for."""
FIELDS = {field.name for field in fields(RunConfig)}
MEETING = (
    "--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint 10.0.0.10:29400 --local_addr 10.0.0.11 "
    "--rdzv_conf is_host=0,join_timeout=900"
)
"""The options of torchrun on the second of two machines."""
STARTED = re.compile(r"cd (?P<folder>\S+) && .* (?P<script>my_workflow_\w+\.py) ")
FAKE = """#!/bin/sh
case "$1" in -m | */valohai_step.py) exec {python} "$@" ;; esac
echo "in $PWD"
for each in {name} "$@"; do echo "$each"; done
"""
"""A command that only says what it was given; Python's modules and Valohai's helper are run."""


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def said_by(command: list[str], **options: object) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


@pytest.fixture(scope="module")
def config() -> Config:
    return parse(YAML.read_text(encoding="utf-8"))


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What would start ranks is first on PATH, and starts none."""
    for name in ("torchrun", "accelerate", "python", "srun"):
        write_program(tmp_path / name, FAKE.format(name=name, python=sys.executable))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    """By Valohai's own command, with no network to ask."""
    nowhere = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    command = [str(Path(sys.executable).with_name("vh")), "lint", str(path)]
    return subprocess.run(command, env={**os.environ, **nowhere}, capture_output=True, text=True, check=False)


def run_of(step: Step, parameters: dict[str, object], inputs: Path) -> tuple[list[str], RunConfig]:
    """The launcher's words of a step's main command, and the run that its workflow would take from the others."""
    command = step.build_command(parameters)[2]
    environment = {**os.environ, "VH_INPUTS_DIR": str(inputs), "VH_OUTPUTS_DIR": "/outputs of the step"}
    place, *words = said_by(["sh", "-c", command], cwd=REPOSITORY, env=environment).splitlines()
    script = next(number for number, word in enumerate(words) if word.endswith(".py"))
    folder = Path(place.removeprefix("in "))
    assert (folder / words[script]).is_file()
    return words[: script + 1], parse_overrides(literal_of(folder), words[script + 1 :])


# -- valohai.yaml


def test_valohais_own_check_passes_and_can_fail(tmp_path: Path) -> None:
    assert lint(YAML).returncode == 0
    spoilt = tmp_path / "valohai.yaml"
    spoilt.write_text(YAML.read_text(encoding="utf-8").replace("execution-count: 4", "execution-count: four"))
    checked = lint(spoilt)
    assert checked.returncode == 1  # the number of errors
    assert "'four' is not of type 'integer'" in checked.stdout


def test_the_three_ways_are_steps_with_data_outputs_an_alias_and_the_run_folders_values(config: Config) -> None:
    assert tuple(config.steps) == STEPS
    for step in config.steps.values():
        assert step.inputs["data"].optional
        assert step.outputs
        assert step.environment_variables["MODEL_ALIAS"].default
        install, install_s3fs, start, name_model = step.command
        assert install == "python -m pip install --constraint constraints.txt --editable '.[valohai]'"
        assert install_s3fs == f"python -m pip install s3fs=={FSSPEC}"
        assert name_model == 'python valohai_step.py name-model --alias "$MODEL_ALIAS"'
        literal = literal_of(REPOSITORY / STARTED.search(start)["folder"])
        for parameter in step.parameters.values():
            assert parameter.name in FIELDS
            assert parameter.pass_as == "--{name} {value}"
            assert parameter.default == getattr(literal, parameter.name), parameter.name
    (task,) = config.tasks.values()
    assert (task.step, task.type.value, task.execution_count) == ("train-task", "distributed", 4)
    assert "devices" not in config.steps["train-task"].parameters


@pytest.mark.parametrize(
    ("name", "launcher", "way"),
    [
        ("train-torchrun", nodes_command(1, 2), "torchrun"),
        (
            "train-accelerator",
            ["accelerate", "launch", "--config_file", "my_accelerate_config.yaml", "--num_processes", "2"],
            "accelerate",
        ),
        ("train-task", ["torchrun", *MEETING.split()], "machines"),
    ],
)
def test_a_steps_command_starts_the_run_that_its_parameters_say(
    config: Config,
    commands: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    launcher: list[str],
    way: str,
) -> None:
    step, inputs = config.steps[name], tmp_path / "inputs"
    asked = {"num_train_epochs": 3, "learning_rate": 1e-6, "data": "s3://bucket/chats"}
    asked |= {} if name == "train-task" else {"devices": 2}
    distributed_task(tmp_path, own="1", ids=("0", "1"))
    monkeypatch.setenv("VH_CONFIG_DIR", str(tmp_path))
    words, run = run_of(step, asked, inputs)
    assert words == [*launcher, f"my_workflow_summarization_{way}.py"]
    assert run.devices == 2
    assert {field: getattr(run, field) for field in asked} == asked
    assert (run.log_format, run.results_root) == ("json", "/outputs of the step")
    (inputs / "data").mkdir(parents=True)
    (inputs / "data" / "train.json").write_text("[]")
    assert run_of(step, asked, inputs)[1].data == str(inputs / "data")


# -- SLURM and SkyPilot, for a torchrun on each of several machines

ON_NODES = [folder for folder, run in run_folders().items() if run.nodes > 1]
RESUMES = ["--resume_from_checkpoint", "last"]
"""From the newest checkpoint of the job's own results, or from the beginning where there is none."""
OTHERS = "\n".join(f"other{number}" for number in range(9999))
"""So many that a command which reads the first line alone breaks the pipe."""
of_nodes = pytest.mark.parametrize("folder", ON_NODES, ids=lambda folder: folder.name)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that stands as a run folder does to an environment, in which torchrun only says what it was given."""
    own, programs = tmp_path / "technique" / "run", tmp_path / ".venv" / "bin"
    own.mkdir(parents=True)
    write_program(programs / "activate", "")
    write_program(programs / "torchrun", FAKE.format(name="torchrun", python=sys.executable))
    return own


def started(words: list[str]) -> tuple[dict[str, str], str, list[str]]:
    """Torchrun's options, the script, and what is passed to it."""
    script = next(number for number, word in enumerate(words) if word.endswith(".py"))
    options = words[words.index("torchrun") + 1 : script]
    return dict(zip(options[::2], options[1::2], strict=True)), words[script], words[script + 1 :]


def check_started(folder: Path, words: list[str], nodes: int) -> list[str]:
    """The folder's ranks on so many machines, which meet at the first one; return what the run is told besides."""
    options, script, overrides = started(words)
    run = literal_of(folder)
    assert (options["--nnodes"], options["--nproc_per_node"]) == (str(nodes), str(run.ranks_per_node))
    assert (options["--rdzv_backend"], options["--rdzv_endpoint"]) == ("c10d", "first:29400")
    assert options["--rdzv_id"] == "job7"
    assert (folder / script).is_file()
    parse_overrides(run, overrides)
    return overrides


@pytest.fixture
def in_a_slurm_job(commands: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SLURM's variables, and its scontrol, which names the machines; return the folder of all such commands."""
    names_them = '[ "$1 $2 $3" = "show hostnames first,others" ] && echo first && exec seq 2 9999'
    write_program(commands / "scontrol", f'#!/bin/sh\n{names_them}\necho "scontrol $*"')
    for name, value in (("JOB_NODELIST", "first,others"), ("JOB_NUM_NODES", "2"), ("JOB_ID", "job7")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    return commands


@of_nodes
def test_a_slurm_job_starts_a_torchrun_on_each_machine_and_resumes_when_it_is_queued_again(
    folder: Path, place: Path, in_a_slurm_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = folder / "train.slurm"
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script.read_text(encoding="utf-8"), re.MULTILINE))
    run = literal_of(folder)
    assert (int(asked["nodes"]), int(asked["gpus-per-node"])) == (run.nodes, run.ranks_per_node)
    assert asked["ntasks-per-node"] == "1"
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")  # by sbatch --nodes 3
    command = ["bash", str(script), "--num_train_epochs", "1"]
    words = said_by(command, cwd=place).split()
    assert "srun" in words
    assert "scontrol" not in words, "a job that has ended by itself is not queued again"
    assert "SIGUSR1" in started(words)[0]["--signals_to_handle"].split(",")
    size = ["--devices", f"{3 * run.ranks_per_node}", "--nodes", "3"]
    overrides = [*size, "--run_name", "job-job7", *RESUMES, "--num_train_epochs", "1"]
    assert check_started(folder, words, nodes=3) == overrides


SRUN = """#!/bin/bash
trap 'echo "srun got USR1"; sleep 0.3; echo "srun ended"; exit {code}' USR1
sleep 0.3
echo "ranks may save for $TORCH_ELASTIC_SHUTDOWN_TIMEOUT s"
for each in {moments}; do sleep 0.1; done
exit {code}
"""
"""Ends with this code after some moments of a tenth of a second, or soon after it is told."""


def test_the_scripts_of_slurm_differ_in_the_ranks_that_they_start_alone() -> None:
    bodies = {re.split(r"srun [^&]*&\n", (folder / "train.slurm").read_text("utf-8"))[1] for folder in ON_NODES}
    signals = {re.search(r"--signal=(\S+)", (folder / "train.slurm").read_text("utf-8"))[1] for folder in ON_NODES}
    assert (len(ON_NODES), len(bodies), len(signals)) == (3, 1, 1)


@pytest.mark.parametrize(("code", "ends"), [(1, ["scontrol requeue job7"]), (0, [])])
def test_a_slurm_job_that_gets_the_signal_passes_it_on_once_and_is_queued_again_unless_it_was_complete(
    place: Path, in_a_slurm_job: Path, code: int, ends: list[str]
) -> None:
    script = ON_NODES[0] / "train.slurm"
    asked = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    write_program(in_a_slurm_job / "srun", SRUN.format(code=code, moments="- " * 100))
    with subprocess.Popen(["bash", str(script)], cwd=place, stdout=subprocess.PIPE, text=True) as job:
        allowed = re.fullmatch(r"ranks may save for (\d+) s\n", job.stdout.readline())
        job.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        job.send_signal(signal.SIGUSR1)
        said = job.stdout.read().splitlines()
    assert int(allowed[1]) < int(asked[1])
    assert said == ["srun got USR1", "srun ended", *ends]
    assert job.returncode == 0


def test_a_slurm_job_that_fails_by_itself_has_sruns_exit_code(place: Path, in_a_slurm_job: Path) -> None:
    write_program(in_a_slurm_job / "srun", SRUN.format(code=3, moments="- "))
    command = ["bash", str(ON_NODES[0] / "train.slurm")]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "scontrol" not in done.stdout


@of_nodes
def test_a_skypilot_job_starts_a_torchrun_on_each_machine_and_resumes_from_the_bucket(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, run = yaml.safe_load((folder / "sky.yaml").read_text(encoding="utf-8")), literal_of(folder)
    assert task["num_nodes"] == run.nodes
    assert task["resources"]["accelerators"].endswith(f":{run.ranks_per_node}")
    assert task["setup"].split() == ["make", "install"]
    (bucket,) = task["file_mounts"]
    for name, value in (("NODE_IPS", "first\n" + OTHERS), ("NUM_NODES", str(run.nodes)), ("TASK_ID", "job7")):
        monkeypatch.setenv(f"SKYPILOT_{name}", value)
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", str(run.ranks_per_node))
    block = task["run"].replace(run.run_folder, str(place))
    words = said_by(["bash", "-c", block]).split()
    assert check_started(folder, words, run.nodes) == ["--results_root", bucket, "--run_name", "job7", *RESUMES]
