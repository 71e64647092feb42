"""Signals to a run: to end, and SIGUSR1, by which a scheduler asks it to save a full state and to end."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# what tells a process to end: a scheduler or launcher, a terminal or connection that is closed, a limit of time
END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
_asked: list[int] = []  # the SIGUSR1 that came


def remember_if_asked() -> None:
    """Remember a SIGUSR1 from now on, instead of being ended by it; only a main thread can."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda number, _: _asked.append(number))
        signal.siginterrupt(signal.SIGUSR1, False)  # what libraries read and write meanwhile goes on


def is_asked_to_save() -> bool:
    """Return whether this process was asked to save and to end."""
    return bool(_asked)


def on_end_signal(do: Callable[..., object] | int | None) -> dict[signal.Signals, Any]:
    """Have `do` done at a signal to end; return by signal what was done before. Only a main thread can."""
    heard = [number for number in END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # by nohup
    return {number: signal.signal(number, do) for number in heard}


@contextmanager
def end_signals_deferred() -> Iterator[None]:
    """Hold back signals to end until the block is left, such as one that arrives while a failure is being recorded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told: list[int] = []
    before = on_end_signal(lambda number, _: told.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if told:
        signal.raise_signal(told[0])
