"""Loggers of libraries, silenced where they say what is expected."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent(*logger_names: str) -> Iterator[None]:
    """Show no warnings of a library's loggers: what they would say is expected, or said better by us."""
    levels = {name: logging.getLogger(name).level for name in logger_names}
    for name in logger_names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
