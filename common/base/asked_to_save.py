"""SIGUSR1: a scheduler will soon take a run's machines away, and asks it to save a full state and to end."""

import signal
import threading

_asked: list[int] = []  # the signals that came


def remember_if_asked() -> None:
    """Remember a SIGUSR1 from now on, instead of being ended by it; only a main thread can."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda number, _: _asked.append(number))
        signal.siginterrupt(signal.SIGUSR1, False)  # what libraries read and write meanwhile goes on


def is_asked_to_save() -> bool:
    """Return whether this process was asked to save and to end."""
    return bool(_asked)
