"""Tokens and passwords, of the environment and in URLs, which no record, card, log or notebook may show."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote

WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")  # of a name: DB_PASS, db-pass, dbPass have the same
SECRET_WORDS = {
    *("AUTH", "AUTHORIZATION", "BEARER", "COOKIE", "COOKIES", "CRED", "CREDS", "DSN", "HMAC", "JWT", "KEY", "KEYS"),
    *("OTP", "PASS", "PASSCODE", "PAT", "PW", "PWD", "SAS", "SIG", "SIGNATURE", "WEBHOOK"),
}
SECRET_PART = re.compile(
    r"TOKEN(?!I[SZ])|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CONNECTION_?STRING"
    r"|(DATABASE|DB|MONGO|MONGODB|REDIS|POSTGRES|POSTGRESQL|MYSQL|AMQP|BROKER|SMTP|LDAP)_UR[IL]$",
    re.IGNORECASE,
)
# last words of names that say something about a secret, or where it is
ABOUT_SECRETS = {"DIR", "FILE", "FOLDER", "HOST", "LENGTH", "METHOD", "NAME", "PATH", "PORT", "SOCK", "TYPE", "USER"}
NO_SECRETS = ("GPG_KEY", "PWD", "OLDPWD")  # a fingerprint, in Python's image for Docker, and the shell's folders
LEAST_LENGTH = 8  # shorter values stand in other words, too
LEAST_TOKEN = 20  # characters of a token that stands as a user's name
LEAST_LINE = 16  # characters of a line of a key that is printed line by line
HIDDEN = "***"
TELLING = ("filename", "filename2", "strerror", "msg", "reason", "name", "path", "code")  # what Python's errors show
USER_IN_URL = re.compile(r"\b([A-Za-z][\w+.-]*)://([^\s/?#'\"<>]*|[^\s/?#:'\"<>]+:[^\s/'\"<>]*)@")
SETTING_IN_URL = re.compile(r"(?<=[?&;#])([\w.~%-]{1,60})=([^\s&;#'\"<>]+)")
NAMING_A_PLACE = ("abfs", "abfss", "wasb", "wasbs")  # schemes whose URLs have a container before the @
NAMING_A_USER = ("ftp", "hdfs", "sftp", "smb", "ssh", "webhdfs")  # who can do nothing with a name alone


@cache
def is_secret_name(name: str) -> bool:
    """Return whether what is called so, in the environment or in a URL, is usually secret."""
    words = [word.upper() for word in WORDS.findall(name)]
    if not words or words[-1] in ABOUT_SECRETS or "PUBLIC" in words:
        return False
    return bool(SECRET_WORDS.intersection(words) or SECRET_PART.search(name))


def secrets_here() -> dict[str, str]:
    """Return the environment's values that are secret, by name: by the name itself, or as a URL that logs in."""
    found = {}
    for name, set_to in os.environ.items():
        value = set_to.strip()  # as those who log in with it do
        if name in NO_SECRETS or (value.startswith("/") and os.path.exists(value)):  # the place of a secret
            continue
        if is_secret_name(name) or _logins_in(value):
            found[name] = value
    return {name: value for name, value in found.items() if len(value) >= LEAST_LENGTH}


def without_secrets(data: Any) -> Any:
    """Return a text, or data for JSON, with `***` for each secret of the environment and of URLs."""
    forms = {form for value in secrets_here().values() for form in _forms_of(value)}
    return _without(data, sorted(forms, key=len, reverse=True))


def _without(data: Any, forms: Sequence[str]) -> Any:
    if isinstance(data, Mapping):
        return {_without(name, forms): _without(value, forms) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without(each, forms) for each in data]
    if not isinstance(data, str):
        return data
    for form in forms:
        data = data.replace(form, HIDDEN)
    return SETTING_IN_URL.sub(_hidden_setting, USER_IN_URL.sub(_hidden_user, data))


def _hidden_user(found: re.Match[str]) -> str:
    return f"{found[1]}://{HIDDEN}@" if _logs_in(found) else found[0]


def _hidden_setting(found: re.Match[str]) -> str:
    return f"{found[1]}={HIDDEN}" if is_secret_name(unquote(found[1])) else found[0]


@cache
def _forms_of(secret: str) -> frozenset[str]:
    """Return a secret as it is, as JSON, Python, a shell or a URL writes it, and what is secret of it alone."""
    in_json = (json.dumps(secret, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
    in_url = (quote(secret, ""), quote_plus(secret), unquote(secret))
    pairs = (part.partition("=") for part in secret.split(";"))  # of a connection string
    parts = [
        *(line.strip() for line in secret.splitlines()[1:] if len(line.strip()) >= LEAST_LINE),
        *(value for name, _, value in pairs if is_secret_name(name.strip()) and len(value) >= LEAST_LENGTH),
        *(form for login in _logins_in(secret) for form in (login, unquote(login)) if len(login) >= LEAST_LENGTH),
    ]
    return frozenset((secret, *in_json, repr(secret)[1:-1], secret.replace("'", "'\"'\"'"), *in_url, *parts))


def _logins_in(text: str) -> list[str]:
    """Return what the URLs of a text log in with: passwords, and names that are long, or alone, and so tokens."""
    users = [found[2].partition(":") for found in USER_IN_URL.finditer(text) if _logs_in(found)]
    passwords = [password for _, _, password in users if password]
    return passwords + [user for user, _, password in users if not password or len(user) >= LEAST_TOKEN]


def _logs_in(found: re.Match[str]) -> bool:
    """Return whether what stands before the @ of a URL is a password or a token, and not hidden already."""
    scheme, (user, _, password) = found[1].lower(), found[2].partition(":")
    secret = {password} if scheme in NAMING_A_USER else {user, password}
    return scheme not in NAMING_A_PLACE and bool(secret - {"", HIDDEN})


def hide_secrets(error: BaseException | None) -> None:
    """Hide secrets in an error and in those that it came from, so that no traceback and no record shows one."""
    seen: set[int] = set()  # errors that were raised from each other are a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
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
        if hasattr(error, "__notes__"):
            error.__notes__ = without_secrets(error.__notes__)
        for each in getattr(error, "exceptions", ()):  # of a group
            hide_secrets(each)
        error = error.__cause__ or error.__context__


def secret_in(value: str, secrets: Mapping[str, str]) -> str | None:
    """Return what is secret in a setting's value, without showing it: a variable's value, or who logs in by a URL.

    What a signed URL has behind its `?` may be passed, as it is of use nowhere else: it is hidden where it is written.
    """
    for name, secret in secrets.items():
        if any(form in value for form in _forms_of(secret)):
            return f"the value of {name}"
    return "a password or a token before the @ of a URL" if _logins_in(value) else None
