"""How a command ends: mistakes in one sentence, faults of ours in a report, no secrets, each with its exit code."""

import io
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from common.base.errors import AskedToEndError, BadInputError, RunStoppedError, first_sentence, is_lost_peer, shortened
from common.base.inert import printable
from common.base.launched import check_told, is_of_torchrun
from common.base.parsing import parse_overrides
from common.base.paths import REPOSITORY
from common.base.run_config import LAST, RunConfig
from common.base.secrets import hide_secrets
from common.base.signals import on_end_signal, remember_if_asked

BAD_INPUT_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
CLOSED_PIPE_EXIT_CODE = 128 + signal.SIGPIPE
ASKED_TO_END_EXIT_CODE = 128 + signal.SIGUSR1
RESUMES = f"--resume_from_checkpoint {LAST} resumes from the newest checkpoint"
FAULT = "a fault of this project, or of code that was changed"
SPEAK_FIRST_S = 2.0  # other ranks leave after rank 0 has spoken: their launcher ends all once the first is gone


def run_from_command_line(workflow: Callable[[RunConfig], object], defaults: RunConfig) -> None:
    """Run `workflow` with the command line's overrides."""
    with ended_by_one_sentence():
        remember_if_asked()
        workflow(parse_overrides(defaults))


@contextmanager
def ended_by_one_sentence() -> Iterator[None]:
    """End a run as `refused_in_one_sentence` does, and say how to resume one that was stopped.

    Exit codes: 130 interrupted, 138 ended as its scheduler has asked (SIGUSR1), 1 another rank is gone.
    """
    refuse_half_a_rank()
    if not is_of_torchrun() and threading.current_thread() is threading.main_thread():
        say_when_told_to_end(f"error: this run was told to end ({{}}); {RESUMES}.")
    with refused_in_one_sentence():
        try:
            yield
        except BaseException as error:
            hide_secrets(error)
            rank = os.environ.get("RANK", "0")
            if isinstance(error, KeyboardInterrupt):
                if rank == "0":
                    print(f"error: interrupted; {RESUMES}.", file=sys.stderr)
                sys.exit(INTERRUPTED_EXIT_CODE)
            if isinstance(error, AskedToEndError):
                _say_once(error)
                sys.exit(ASKED_TO_END_EXIT_CODE)
            if isinstance(error, RuntimeError) and is_lost_peer(error):
                sys.exit(
                    f"error: rank {rank} ends, as another rank is gone ({first_sentence(error)}): that one's output "
                    "says why; where it says nothing, it was killed, possibly as memory ran out (dmesg). "
                    f"{how_to_resume()}"
                )
            raise


def refuse_half_a_rank() -> None:
    """End where the environment has a part of what a launcher tells a rank, whichever rank this process would be."""
    try:
        check_told(os.environ)
    except BadInputError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(BAD_INPUT_EXIT_CODE)


def say_when_told_to_end(said: str) -> None:
    """Leave this process with `said`, and so with a record, at a signal to end, whose name takes the place of `{}`."""
    on_end_signal(lambda number, _: sys.exit(said.format(signal.Signals(number).name)))


def how_to_resume() -> str:
    """Return what to start after a run of several ranks has ended, perhaps on several machines."""
    ranks_here, ranks = (os.environ.get(name, "1") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    where = "" if ranks_here == ranks else " on all machines"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    when = "If torchrun does not start the ranks again" if restarts else "To resume"
    return f"{when}, start the same command again{where} with --resume_from_checkpoint {LAST}."


@contextmanager
def silent_if_well() -> Iterator[None]:
    """Print what is said within only where an error leaves it."""
    held = io.StringIO()
    try:
        with redirect_stdout(held):
            yield
    except BaseException:
        print(held.getvalue(), end="", flush=True)
        raise


@contextmanager
def refused_in_one_sentence() -> Iterator[None]:
    """End what refuses its input with one sentence, once for each machine, and exit code 2; it decorates a `main`.

    Another error is a fault of ours, or of changed code: its trace is kept in a file (exit code 1).
    """
    try:
        yield
        sys.stdout.flush()  # what is still buffered is refused here, and not when Python ends
    except BaseException as error:
        hide_secrets(error)
        if isinstance(error, BrokenPipeError) and _reader_is_gone():  # such as `head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's own last flush fails again
            sys.exit(CLOSED_PIPE_EXIT_CODE)
        if isinstance(error, BadInputError):
            _say_once(error)
            sys.exit(BAD_INPUT_EXIT_CODE)
        if isinstance(error, RunStoppedError):
            sys.exit(f"error: {_sayable(error)}")
        if isinstance(error, Exception):
            sys.exit(report_fault(error))
        raise


def report_fault(error: Exception) -> str:
    """Write an error's trace into a file of the system's temporary folder; return what is said of it."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    of_libraries = {path for path, _ in frames if not path.is_relative_to(REPOSITORY) or "site-packages" in path.parts}
    path, line = next((each for each in reversed(frames) if each[0] not in of_libraries), frames[-1])
    place = f"{path.name if path in of_libraries else path.relative_to(REPOSITORY)}, line {line}"
    with tempfile.NamedTemporaryFile("w", prefix="fault-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write("".join(traceback.format_exception(error)))
    said = printable(shortened(f"{type(error).__name__}: {error}"))
    return f"error: {FAULT} ({place}): {said}\nIts trace is in {file.name}: send it with a report, or read it there."


def _say_once(error: Exception) -> None:
    """Say an error that every rank has, once for each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {_sayable(error)}", file=sys.stderr)
    else:
        on_end_signal(signal.SIG_DFL)  # the launcher may end this rank now, without a second sentence
        time.sleep(SPEAK_FIRST_S)


def _sayable(error: Exception) -> str:
    return printable(shortened(str(error)))


def _reader_is_gone() -> bool:
    """Return whether nobody reads what is printed any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
