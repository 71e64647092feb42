"""Start ranks: by torchrun, by Accelerate's launchers, or as a process whose output is streamed."""

import importlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.base.secrets import without_secrets
from common.runtime.rank import name_deepspeeds_device
from common.runtime.watch import die_with_parent

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of what SIGKILL ended: Python's, and a shell's."""
END_S = 2.0
"""How long a process may take to end by itself when it is told to."""


def ranks_command(run: RunConfig, script: str, overrides: Sequence[str]) -> list[str]:
    """What starts a workflow's ranks, one or several: this Python, or its torchrun."""
    if run.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it too, but warns about it
    if run.world_size == 1:
        return [sys.executable, script, *overrides]
    return torchrun_command(script, run.world_size, *overrides)


def launch_in_notebook(workflow_module: str, overrides: dict[str, object], world_size: int) -> None:
    """Run a workflow on `world_size` ranks by Accelerate's `notebook_launcher`, on a port that is free now.

    `workflow_module` is imported by the ranks, not by the notebook: `notebook_launcher` forks, and refuses to where
    CUDA, an Accelerator or bitsandbytes (which PEFT imports) came to life before.

    Raises:
        BadInputError: a rank refused its input; nothing was written.
    """
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = (workflow_module, overrides)
    name_deepspeeds_device()  # the ranks are copies of this process
    try:
        notebook_launcher(_import_and_run, args=arguments, num_processes=world_size, use_port=str(free_port()))
    except ChildFailedError as failure:
        message = str(failure.get_first_failure()[1].message)
        if BadInputError.__name__ not in message:
            raise
        raise BadInputError(message.partition(f"{BadInputError.__name__}: ")[2].strip()) from None


def _import_and_run(workflow_module: str, overrides: dict[str, object]) -> None:
    module = importlib.import_module(workflow_module)
    settings = hasattr(module, "SETTINGS")
    run = module.defaults_for(overrides["technique"], overrides["parallel"]) if settings else module.RUN
    module.workflow(run.changed_to(**overrides))


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def stream_command(command: Sequence[str], cwd: str | Path | None = None) -> None:
    """Run a command and print its output line by line as it comes (a notebook's `!` would hide a failure).

    Raises:
        RuntimeError: the command ended with another exit code than 0.
    """
    print("$ " + shlex.join(command).replace(sys.executable, "python"))
    with subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(without_secrets(line), end="")
        except BaseException:  # an interrupted cell leaves nobody behind
            end_process(process)
            raise
    if process.returncode in KILLED:
        raise RuntimeError(
            "The command above was killed, possibly as memory ran out: look at the system's log (dmesg)."
        )
    if process.returncode != 0:
        raise RuntimeError(f"The command above ended with exit code {process.returncode}; its last lines say why.")


def end_process(process: subprocess.Popen) -> None:
    """End a launcher and, by the kernel, its ranks: politely, then soon by force."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def accelerate_command(script: str, config_file: str, *overrides: str) -> list[str]:
    """`accelerate launch` of this Python, on a port that is free now."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_file]
    return [*launch, "--main_process_port", str(free_port()), script, *overrides]


def torchrun_command(script: str, world_size: int, *overrides: str) -> list[str]:
    """`torchrun` of this Python, on a port that it finds itself."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(world_size),
        script,
        *overrides,
    ]
