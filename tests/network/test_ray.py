"""The workflow of 2.2 on two workers of Ray Train: equal to one device, started again, or refused in one sentence.

Each test has a Ray cluster of its own on this machine, in processes that a user's shell would start.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.fixtures import Finished
from tests.network.test_nodes import LONGER, LONGER_STEPS, LORA, NO_DROPOUT, check_equal
from tests.network.workers import END_S, GLOBAL_BATCH, SAME
from tests.pace import patient

pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # a Ray cluster takes a minute of two cores to start

TWO = (*SAME, *NO_DROPOUT, "--batch_size", f"{GLOBAL_BATCH // 2}")
RUN_S = 600  # Ray starts a dozen processes, each of which imports PyTorch; then 2 more for each start of workers
SLOW_IMPORT = "rfc3987_syntax"  # of jsonschema's extra, which notebooks bring: Ray's dozen processes would import it


@pytest.fixture
def on_ray(run_workflow: Callable[..., Finished], tmp_path: Path) -> Iterator[Callable[..., Finished]]:
    """Run 2.2's workflow on a Ray cluster of its own, of which no process is left."""
    ray_folder = tempfile.mkdtemp(prefix="ray-")  # its sockets need a short path
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / f"{SLOW_IMPORT}.py").write_text("raise ImportError\n")

    def run(*settings: str, **environment: str) -> Finished:
        own = {"RAY_ADDRESS": "local", "RAY_TMPDIR": ray_folder, **environment}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(tmp_path / "without"), prepend=":")
            for name, value in own.items():
                patch.setenv(name, value)
            return run_workflow("ray", *TWO, *settings, is_forked=False, within_s=RUN_S)

    yield run
    deadline_s = time.monotonic() + patient(END_S)
    while left := [process.cmdline() for process in psutil.process_iter() if started_in(process, ray_folder)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)
    shutil.rmtree(ray_folder)


def started_in(process: psutil.Process, ray_folder: str) -> bool:
    try:
        return process.environ().get("RAY_TMPDIR") == ray_folder
    except psutil.Error:
        return False


def test_two_workers_of_which_one_is_killed_and_started_again_are_one_device(
    on_ray: Callable[..., Finished], one_device: Callable, tmp_path: Path
) -> None:
    fault = f"kill rank=1 step=5 point=batch once={tmp_path / 'once'}"
    done = on_ray(*LONGER, "--max_failures", "1", FAULT=fault)
    assert done.exit_code == 0, done.output
    assert "resumes after step 4, from checkpoint-4" in done.output
    one = one_device(LORA, *NO_DROPOUT, *LONGER)
    check_equal(done.results, done.record, one, range(5, LONGER_STEPS + 1))
    assert done.record["launcher"] == "ray"
    assert [share["rank"] for share in done.record["world"]] == [0, 1]
    command = "python -m common.ray_train my_workflow_lora_finetuning_with_ddp.py --train_rows 33 "
    assert done.record["command"].startswith(command)
    assert f"--max_steps {LONGER_STEPS}" in done.record["command"]
    for rank in (0, 1):
        assert f"[RANK{rank}:CPU] mini-batch:" in done.output


def test_what_a_worker_refuses_is_one_sentence(on_ray: Callable[..., Finished]) -> None:
    done = on_ray("--data", "no/such/folder")
    assert done.exit_code == 2
    said = [line for line in done.output.splitlines() if "The data no/such/folder do not exist" in line]
    assert [line.partition(":")[0] for line in said] == ["error"], done.output
    assert "/common/" not in done.output, "a traceback through our code"  # Ray's own helpers may have one
    assert not done.results.exists()
