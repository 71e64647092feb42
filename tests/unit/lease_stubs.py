"""Parts of a lease that measure nothing, and import nothing that takes time."""

import atexit
import os
import time
from typing import Any

IMPORTED_AT = time.time()


def work(seconds: float = 0.0, **about: Any) -> dict[str, Any]:
    """Take so long; return when it was imported, begun and ended."""
    began_at = time.time()
    time.sleep(seconds)
    return {"imported_at": IMPORTED_AT, "began_at": began_at, "ended_at": time.time(), **about}


def work_and_crash() -> dict[str, Any]:
    """End without a word once the result is there."""
    atexit.register(os.abort)
    return {}


def crash() -> None:
    """End without a word."""
    os.abort()


def fail() -> None:
    """Say why."""
    raise ValueError("the seventh row")
