"""Start Python programs as forks of a server that has imported the large libraries already.

Importing PyTorch, Transformers and PEFT takes seconds of every start, and the tests start hundreds of processes. A
program that is started here is a process of its own, with its own signals, exit code and children, but it begins where
its imports of those libraries would have ended; modules of this repository are imported anew. Ranks that it starts by
torchrun are forks in the same way. All forks share one seed of Python's hashes and one state of NumPy's random numbers,
which real processes do not: the tests that check a launcher start real processes (`tests/recipes/test_launchers.py`).
"""

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from inspect import signature
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from tests.pace import patient

if TYPE_CHECKING:
    from tests.network.virtual_hosts import VirtualHost

LIBRARIES = (
    "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.checkpoint",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard", "torch.optim", "accelerate.commands.launch", "transformers.trainer_seq2seq",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert", "transformers.models.roberta.modeling_roberta",
    "transformers.models.bart.modeling_bart", "transformers.integrations.integration_utils", "peft", "datasets",
    "evaluate", "pandas", "matplotlib.pyplot", "rouge_score.rouge_scorer", "sklearn.metrics", "scipy.optimize",
    "nbformat", "tabulate", "transformers.training_args_seq2seq", "peft.tuners.lora.bnb",
    "peft.utils.transformers_weight_conversion",
)  # fmt: skip
"""What workflows import, here or there; without `common`, whose modules look at the process that imports them."""

OURS = re.compile(r"common(\.|$)|my_")
"""Modules that each program imports anew."""
CUT_SHORT = "CUT_SHORT"
"""A variable of the environment: the program, and ranks that it starts, measure and flush less."""
TAKES_BACKWARD_PASSES = "TAKES_BACKWARD_PASSES"
"""A variable of the environment: the kernel does, before it starts programs."""
MOST_FILES = 4096
CLONE_NEWUTS, CLONE_NEWNET = 0x0400_0000, 0x4000_0000
EXECUTE_PARAMETERS = list(signature(subprocess.Popen._execute_child).parameters)[2:]
"""What Popen passes on after `self` and the command: pipes, folder, environment and the rest."""

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload([*LIBRARIES, "tests.forked"])


class Forked:
    """A program that runs, with what the tests use of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path, host: "VirtualHost | None" = None
    ) -> None:
        """Start `command`, this Python with a script or a module, here or on a virtual host.

        Its output goes to the end of `log`.
        """
        self.args = list(command)
        arguments = (self.args, str(cwd), dict(env), str(log), host)
        self._process = _server.Process(target=_begin, args=arguments, daemon=True)  # pytest's end waits for no others
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run_forked(command: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path, timeout: float) -> int:
    """Run `command` to its end; return its exit code.

    Whoever waits no longer kills it; its ranks die with it (`die_with_parent`).

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout` seconds of the reference machine (`tests/pace.py`).
    """
    program = Forked(command, cwd, env, log)
    try:
        return program.wait(patient(timeout))
    except subprocess.TimeoutExpired as late:
        raise subprocess.TimeoutExpired(list(command), timeout, output=log.read_text(errors="replace")) from late
    finally:
        program.kill()


class ForkingPopen(subprocess.Popen):
    """`subprocess.Popen` that forks this process where the command is this Python with a script or a module."""

    in_child: Callable[["ForkingPopen"], None] | None = None
    """Called in the fork first."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        command = [args] if isinstance(args, str) else [str(each) for each in args]
        wanted = SimpleNamespace(**dict(zip(EXECUTE_PARAMETERS, others, strict=True)))
        if wanted.shell or command[0] != sys.executable or "-c" in command[:3]:
            super()._execute_child(args, *others)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if self.in_child:
                self.in_child()
            _run_in_child(command, wanted)
        self._child_created = True
        ends = (wanted.p2cread, wanted.p2cwrite, wanted.c2pread, wanted.c2pwrite, wanted.errread, wanted.errwrite)
        self._close_pipe_fds(*ends)


def fork_programs_from_here() -> None:
    """Have `subprocess.run` start programs as forks of this process as it is now.

    A fork of a process that took a backward pass would hang in its own: PyTorch's threads are not there.
    """
    here = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
    here.submit(os.getpid).result()  # it forks only now

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess:
        return here.submit(_run_program, command, cwd=os.getcwd(), **options).result()

    subprocess.run = run


def _run_program(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess:
    return subprocess.run(command, **options)  # of the process that was forked, where nothing replaced it


def _run_in_child(command: list[str], wanted: SimpleNamespace) -> NoReturn:
    """Do in the fork what `Popen` was asked for, then run the command."""
    weakref.finalize._registry.clear()  # at this process's end they would delete temporary folders of its parent
    for source, target in ((wanted.p2cread, 0), (wanted.c2pwrite, 1), (wanted.errwrite, 2)):
        if source != -1:
            os.dup2(source, target)
    os.closerange(3, MOST_FILES)  # as `close_fds`: else a killed agent's ports stay open
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put another file in its place
    if wanted.start_new_session:
        os.setsid()
    if wanted.preexec_fn:
        wanted.preexec_fn()
    _run(command, wanted.cwd or os.getcwd(), os.environ if wanted.env is None else wanted.env)


def _begin(command: list[str], cwd: str, env: dict[str, str], log: str, host: "VirtualHost | None") -> NoReturn:
    """Become the program; called in a fork of the server."""
    os.close(forkserver._forkserver._forkserver_alive_fd)  # else the server outlives the tests for as long as this does
    forkserver._forkserver._forkserver_alive_fd = None
    multiprocessing.current_process()._config["daemon"] = False  # programs may start processes
    if host:
        _enter(host)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _run(command, cwd, env)


def _enter(host: "VirtualHost") -> None:
    """As `VirtualHost.start` has a command begin: in the host's network, under its name, in a session of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host.namespace}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"cannot enter {host.namespace}")
    socket.sethostname(f"host{host.number}")
    os.setsid()


def _run(command: list[str], cwd: str, env: Mapping[str, str]) -> NoReturn:
    """Run a Python command as this process, from its environment to its exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # what the server has imported is not looked through, nor copied, at each collection
    multiprocessing.set_start_method(None, force=True)  # the system's own again: the server's keeps semaphores' names
    os.chdir(cwd)
    for name in [name for name in sys.modules if OURS.match(name)]:
        del sys.modules[name]
    values = dict(env)
    os.environ.clear()
    os.environ.update(values)
    subprocess.Popen = ForkingPopen
    sys.modules["torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"].Popen = ForkingPopen
    # the name of an event, for which torchrun else looks through every module, eighteen times
    sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"].get_method_name = lambda: "step"
    # to see whether a model is DeepSpeed's, Accelerate imports all of DeepSpeed wherever that is installed (1 s)
    sys.modules["accelerate.utils.other"].is_deepspeed_available = lambda: "deepspeed" in sys.modules
    os.execv = lambda _, arguments: _run(list(arguments), os.getcwd(), os.environ)
    sys.stdout.reconfigure(line_buffering=True)
    if CUT_SHORT in values:
        importlib.import_module("tests.short_runs").cut_short()
    code = _exit_code_of(command[2:] if command[1] == "-u" else command[1:])
    threading._shutdown()  # what Python does at its end: other threads, functions that were registered, output
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code_of(arguments: list[str]) -> int:
    """Run a script, or with `-m` a module, as Python would; return the exit code that it asks for."""
    try:
        _run_as_main(arguments)
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run_as_main(arguments: list[str]) -> None:
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in paths if each]
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        sys.argv = arguments
        # not by runpy, which drops the module at its end: a process group that goes while a rank fails waits for ever
        module = sys.modules["__main__"] = ModuleType("__main__")
        module.__file__ = arguments[0]
        exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), vars(module))
