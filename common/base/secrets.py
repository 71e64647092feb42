"""Tokens and passwords of the environment, which no record, log or notebook may show."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
LEAST_LENGTH = 8  # shorter values, such as `TOKENIZERS_PARALLELISM=false`, are no secrets
HIDDEN = "***"
TELLING = ("filename", "filename2", "strerror", "msg", "reason", "name", "path")  # attributes that Python's errors show


def secrets_here() -> dict[str, str]:
    """Return the environment's values that are secret by their names, by name."""
    return {
        name: value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= LEAST_LENGTH
    }


def without_secrets(text: str) -> str:
    """Return `text` with each secret of the environment replaced by `***`."""
    for value in sorted(secrets_here().values(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def hide_secrets(error: BaseException | None) -> None:
    """Hide secrets in an error and in those that it came from, so that no traceback and no record shows one."""
    while error is not None:
        error.args = tuple(without_secrets(part) if isinstance(part, str) else part for part in error.args)
        for name in (*TELLING, *vars(error)):
            value = getattr(error, name, None)
            if isinstance(value, str):
                with suppress(AttributeError):
                    setattr(error, name, without_secrets(value))
        text = without_secrets(str(error))
        if text != str(error):  # its class composes its message from something else
            error.args = (text,)
            with suppress(TypeError):  # the class of a built-in error cannot be replaced, and shows its arguments
                error.__class__ = type(type(error).__name__, (type(error),), {"__str__": BaseException.__str__})
        error = error.__cause__ or error.__context__


def secret_in(value: str, secrets: Mapping[str, str]) -> str | None:
    """Return what is secret in a setting's value, without showing it: a variable's value, or a URL's password."""
    for name, secret in secrets.items():
        if secret in value:
            return f"the value of {name}"
    try:
        password = urlsplit(value).password
    except ValueError:
        return None
    return "a password" if password else None
