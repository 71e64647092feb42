"""What Ray Train's launcher makes of its command line, and of failures; runs are in `tests/network/test_ray.py`."""

import importlib.util
import re
import sys
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError

from common.base.errors import BadInputError, RunStoppedError
from common.base.paths import REPOSITORY
from common.checks import ray_train
from common.checks.ray_train import cause_of, script_of

DDP = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2"


def failed(**errors: Exception) -> Exception:
    """As Ray raises it: with the error of each rank that ended by one."""
    failure = RuntimeError("Training failed due to worker errors")
    failure.worker_failures = {int(rank.removeprefix("rank")): error for rank, error in errors.items()}
    return failure


CLOSED, LOST = DistNetworkError("closed by peer"), RuntimeError("A worker health check failed.\nWorker info: Worker(")
LOST.health_check_failure = RuntimeError("The actor died unexpectedly before finishing this task.")


@pytest.mark.parametrize(
    ("errors", "kind", "said"),
    [
        ({"rank0": CLOSED, "rank1": BadInputError("batch_size is 0")}, BadInputError, "batch_size is 0$"),
        ({"rank0": CLOSED, "rank1": LOST}, RunStoppedError, "Rank 1 is lost: its process was killed"),
        ({"rank0": CLOSED, "rank2": KeyError("a bug")}, RunStoppedError, r"Rank 2 failed \(KeyError: 'a bug'\)\.$"),
    ],
    ids=["a refusal", "a lost worker", "an error"],
)
def test_what_went_wrong_counts_before_what_other_ranks_see_of_it(
    errors: dict[str, Exception], kind: type[Exception], said: str
) -> None:
    cause = cause_of(failed(**errors))
    assert type(cause) is kind
    assert re.match(said, str(cause))


def test_workers_that_do_not_start_are_told() -> None:
    failure = RuntimeError("Training failed due to controller error")
    failure.controller_failure = TimeoutError("The worker group startup timed out after 300 seconds. Causes include")
    assert str(cause_of(failure)) == (
        "Ray did not start the workers: The worker group startup timed out after 300 seconds."
    )


def test_a_folder_with_several_workflows_needs_the_name_of_one() -> None:
    folder = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2"
    with pytest.raises(BadInputError, match=r"several workflows: name one, .*accelerate.py or "):
        script_of(folder)
    script = folder / "my_workflow_summarization_torchrun.py"
    assert script_of(script) == script
    assert script_of(DDP).name == "my_workflow_lora_finetuning_with_ddp.py"


def test_without_ray_a_sentence_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ray_train", str(DDP)])
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else found(name))
    monkeypatch.setattr(ray_train, "train", lambda *_: pytest.fail("started"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit, match="2"):
        ray_train.main()
    assert capsys.readouterr().err.startswith("error: Ray is not installed: `pip install 'ray[train]'`")


def test_its_own_option_is_not_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.chdir(DDP)
    monkeypatch.setattr(sys, "argv", ["ray_train", "--max_failures", "3", "--batch_size", "4"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(ray_train, "train", lambda *told: calls.append(told))
    ray_train.main()
    ((run, script, arguments, max_failures),) = calls
    assert (run.per_device_train_batch_size, run.world_size, max_failures) == (4, 2, 3)
    assert (script, arguments) == (DDP / "my_workflow_lora_finetuning_with_ddp.py", ["--batch_size", "4"])
