"""How slow this machine is now, so that tests that wait, or that bound seconds, fail on no slow or busy one."""

import os
import time
from functools import cache

VARIABLE = "TESTS_SLOWNESS"
"""Set by the first process that asks, for all that it starts."""
REFERENCE_S = 0.06
"""What two processes with `_forked_work` take at once on a quiet machine on which the limits of the tests hold."""
AT_ONCE = 2
"""Workers of `make test`, or ranks."""


def patient(seconds: float) -> float:
    """Return a limit that was set on the reference machine, in seconds of this one; never a shorter one."""
    return seconds * slowness()


@cache
def slowness() -> float:
    """Return how many times as long as on the reference machine this one takes, at least 1."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{slowness_now():.2f}"
    return float(os.environ[VARIABLE])


def slowness_now() -> float:
    """Return `slowness` at this moment: for a figure that a changing machine is measured beside."""
    return max(1.0, _measured_s() / REFERENCE_S)


def _measured_s() -> float:
    """Wall-clock seconds until as many processes as the tests have are done, the least of five times in a second.

    What stays busy makes all of them longer; what has just ended does not.
    """
    return min(_once_after_a_pause_s() for _ in range(5))


def _once_after_a_pause_s() -> float:
    time.sleep(0.15)
    return _once_s()


def _once_s() -> float:
    start_s = time.perf_counter()
    children = [_forked_work() for _ in range(AT_ONCE)]
    for child in children:
        os.waitpid(child, 0)
    return time.perf_counter() - start_s


def _forked_work() -> int:
    child = os.fork()
    if not child:
        sum(n * n for n in range(2_000_000))
        os._exit(0)
    return child
