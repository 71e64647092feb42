"""The command `python -m common.data`; what it does is in `common.checks.preview`."""

from pkgutil import resolve_name

if __name__ == "__main__":
    resolve_name("common.checks.preview:main")()  # by its name: a command may use what its room must not import
