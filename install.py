"""Install this repository and what a command needs into `.venv`: `python3 install.py [EXTRA ...]`.

uv installs in a fraction of pip's time, from the indexes that pip is set to. Where the index has no uv, pip installs.
Extras are those of pyproject.toml, such as `judge` and `test`; versions are those of constraints.txt.
"""

import ast
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

OLDEST = (3, 11)
FOLDER = Path(__file__).parent
PYTHON = FOLDER / ".venv" / "bin" / "python"
PIP_SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", " "),
}
"""Where packages come from: pip's setting, the variable that tells uv, and what separates several there."""


def main() -> None:
    """Make the environment, and install into it."""
    if sys.version_info < OLDEST:
        needed = f"{OLDEST[0]}.{OLDEST[1]}"
        found = sys.version.split()[0]
        sys.exit(f"error: Python {needed} or newer is needed, this is {found}: make PYTHON=python{needed}")
    if not PYTHON.exists():
        venv.create(PYTHON.parent.parent, symlinks=True, with_pip=True)
    extras = f"[{','.join(sys.argv[1:])}]" if sys.argv[1:] else ""
    wanted = ["--constraint", str(FOLDER / "constraints.txt"), "--editable", f"{FOLDER}{extras}"]
    print(f"Installing finetuning-experiments{extras} into .venv ...", flush=True)
    if run("-m", "pip", "install", "--quiet", *wanted[:2], "uv", may_fail=True):
        run("-m", "uv", "pip", "install", "--python", str(PYTHON), *wanted, env=os.environ | indexes())
    else:
        print("This package index has no uv: pip installs instead, which takes some minutes.", flush=True)
        run("-m", "pip", "install", "--quiet", *wanted)


def indexes() -> dict[str, str]:
    """Return pip's indexes as uv's variables; those that are set for uv already stay."""
    listed = subprocess.run([PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    # the first index that has the version of constraints.txt: an index of PyTorch's has some packages in old ones only.
    # pip's way, the best version of all indexes, would let any of them put a newer package in the place of another's
    found = {"UV_INDEX_STRATEGY": "unsafe-first-match"}
    for line in listed.splitlines():  # such as global.index-url='https://...'; `:env:` comes last, and counts
        name, _, value = line.partition("=")
        setting = name.rpartition(".")[2]
        if setting in PIP_SETTINGS:
            variable, separator = PIP_SETTINGS[setting]
            found[variable] = separator.join(ast.literal_eval(value).split())
    return {name: value for name, value in found.items() if name not in os.environ}


def run(*command: str, may_fail: bool = False, env: dict[str, str] | None = None) -> bool:
    """Run the environment's Python; return whether it succeeded.

    Raises:
        SystemExit: it failed, and must not.
    """
    succeeded = subprocess.run([PYTHON, *command], env=env, check=False).returncode == 0
    if not succeeded and not may_fail:
        sys.exit(f"error: `python {shlex.join(command)}` failed: its last lines say why.")
    return succeeded


if __name__ == "__main__":
    main()
