"""Tokens and passwords of the environment, which no record, log or notebook may show."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
LEAST_LENGTH = 8
"""Shorter values, such as `TOKENIZERS_PARALLELISM=false`, are none."""
HIDDEN = "***"
TELLING = ("filename", "filename2", "strerror", "msg", "reason", "name", "path")
"""Of Python's own errors, what they tell beside their arguments."""


def secrets_here() -> dict[str, str]:
    """Values of the environment that are secret by their names, by name."""
    return {
        name: value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= LEAST_LENGTH
    }


def without_secrets(text: str) -> str:
    """The text with each of them hidden."""
    for value in sorted(secrets_here().values(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def hide_secrets(error: BaseException | None) -> None:
    """Take them out of an error, and of those that it came from, wherever it is shown."""
    while error is not None:
        error.args = tuple(without_secrets(part) if isinstance(part, str) else part for part in error.args)
        for name in (*TELLING, *vars(error)):
            value = getattr(error, name, None)
            if isinstance(value, str):
                with suppress(AttributeError):
                    setattr(error, name, without_secrets(value))
        if without_secrets(str(error)) != str(error):  # of a class that finds more to tell
            error.args = (without_secrets(str(error)),)
            with suppress(TypeError):  # Python's own classes, which tell what was hidden above, stay what they are
                error.__class__ = type(type(error).__name__, (type(error),), {"__str__": lambda self: self.args[0]})
        error = error.__cause__ or error.__context__


def secret_in(value: str, secrets: Mapping[str, str]) -> str | None:
    """What is secret in a setting's value: the name of a variable, or a URL's password; never the secret itself."""
    for name, secret in secrets.items():
        if secret in value:
            return f"the value of {name}"
    try:
        password = urlsplit(value).password
    except ValueError:
        return None
    return "a password" if password else None
