"""Start ranks: by torchrun, by Accelerate's launchers, or as a process whose output is streamed."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from unittest import mock

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.base.secrets import without_secrets
from common.runtime.torchrun import meeting_file, nodes_command
from common.runtime.watch import die_with_parent

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit codes of what SIGKILL ended: Python's, and a shell's
KEEPS_NO_PORT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set for torchrun, that it opens no port for its ranks, which meet in a file (`common.runtime.elastic`)."""
END_S = 2.0  # how long a process may take to end by itself when it is told to


def ranks_command(run: RunConfig, script: str, overrides: Sequence[str]) -> list[str]:
    """Return the command that starts a workflow's ranks, one or several: this Python, or its torchrun."""
    if run.nodes > 1:
        each = shlex.join([*nodes_command(run.nodes, run.ranks_per_node), script, *overrides])
        raise BadInputError(
            f"This run is for {run.nodes} machines, and a launcher on one starts none on the others: on each of them "
            f"run `{each}` (ADDRESS: the first one's)."
        )
    if run.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", str(run.threads))  # torchrun would set it too, but warns about it
    if run.world_size == 1:
        return [sys.executable, script, *overrides]
    os.environ[KEEPS_NO_PORT] = "1"
    return torchrun_command(script, run.world_size, *overrides)


def launch_in_notebook(workflow_module: str, overrides: dict[str, object], world_size: int, instead: str = "") -> None:
    """Run a workflow on `world_size` ranks by Accelerate's `notebook_launcher`; they meet in a file.

    `instead` names another function, `module.function`, to run with the workflow's settings. `workflow_module` is
    imported by the ranks, not by the notebook: `notebook_launcher` forks, and refuses to where CUDA, an Accelerator or
    bitsandbytes (which PEFT imports) came to life before.
    """
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from common.runtime.rank import name_deepspeeds_device

    name_deepspeeds_device()  # the ranks are copies of this process
    os.environ[KEEPS_NO_PORT] = "1"
    try:
        with mock.patch("accelerate.launchers.print", create=True):  # which says "CUDAs" on a CPU, too
            notebook_launcher(
                _import_and_run,
                args=(workflow_module, overrides, instead),
                num_processes=world_size,
                rdzv_backend="c10d",
                rdzv_conf={"store_type": "file"},
            )
    except ChildFailedError as failure:
        message = failure.get_first_failure()[1].message
        said = message["message"] if isinstance(message, dict) else message  # a dictionary has the traceback, too
        _, is_mistake, sentence = said.partition(f"{BadInputError.__name__}: ")
        if not is_mistake:
            raise
        raise BadInputError(sentence) from None


def _import_and_run(workflow_module: str, overrides: dict[str, object], instead: str) -> None:
    module = importlib.import_module(workflow_module)
    settings = hasattr(module, "SETTINGS")
    run = module.defaults_for(overrides["technique"], overrides["parallel"]) if settings else module.RUN
    work = resolve_name(instead) if instead else module.workflow
    work(run.changed_to(**overrides))


def stream_command(command: Sequence[str], cwd: str | Path | None = None) -> None:
    """Run a command, and print its output line by line; a RuntimeError if it fails, which a notebook's `!` hides."""
    said = without_secrets(shlex.join(command)).replace(sys.executable, "python")
    print("$ " + re.sub(r" --rdzv_endpoint /\S+", "", said))  # torchrun makes a file to meet in by itself
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=cwd, preexec_fn=die_with_parent, **streams) as process:
        try:
            for line in process.stdout:
                print(without_secrets(line), end="")
        except BaseException:  # an interrupted cell leaves nobody behind
            process.terminate()  # and with it its ranks (`die_with_parent`)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode != 0:
        end = f"ended with exit code {process.returncode}; its last lines say why"
        if process.returncode in KILLED:
            end = "was killed, possibly as memory ran out: look at the system's log (dmesg)"
        raise RuntimeError(f"The command above {end}.")


def accelerate_command(script: str, config_file: str, *overrides: str) -> list[str]:
    """Return the command for `accelerate launch` of this Python, on a port that it finds itself.

    Its torchrun unpickles nothing that comes to that port (PyTorch's `static_tcp_rendezvous.py`).
    """
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_file, "--main_process_port", "0",
        script, *overrides,
    ]  # fmt: skip


def torchrun_command(script: str, world_size: int, *overrides: str) -> list[str]:
    """Return the command for `torchrun` of this Python, whose ranks are on this machine."""
    return [
        sys.executable, "-m", "torch.distributed.run", *nodes_command(1, world_size)[1:],
        "--rdzv_endpoint", meeting_file(),  # one that torchrun makes itself it would comment on
        script, *overrides,
    ]  # fmt: skip
