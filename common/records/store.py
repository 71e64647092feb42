"""Records of runs: their schema, how they are written, read and kept. Reading them imports no torch."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.secrets import without_secrets
from common.base.settings import command_with_new_names, with_new_names
from common.hardware import devices

SCHEMA_VERSION = 2
RECORD_NAME = "run_record.json"
PREVIOUS, UNFINISHED = ".previous", ".unfinished"
PLAN_TOLERANCE = 0.1  # share by which a device's peak may differ from its plan before the run warns
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "trl", "bitsandbytes", "evaluate", "deepspeed")

Record = dict[str, Any]


def settings_without_paths(run: RunConfig) -> dict[str, object]:
    """Return the run's settings without paths of this machine: of a model or data folder elsewhere, its name."""
    places = {name: getattr(run, name) for name in ("model", "data")}
    elsewhere = {name: Path(place).name for name, place in places.items() if place.startswith(("/", "~", "."))}
    return {**run.to_dict(), **elsewhere, "results_root": ""}


def default_run_name(run: RunConfig, launcher: str) -> str:
    """Return what a run without a name is called; a workflow with several parallelisms or loops names them."""
    if run.goal.classifies:
        parts = f"-micro{run.micro_batches}" if run.parallelism.pipelines else ""
        rows = f"-{run.train_rows}rows" if run.train_rows > 0 else ""  # of --quick: not to be taken for the whole
        return f"{launcher}-{run.technique}-{run.parallel}{parts}{rows}-seed{run.seed}"
    if run.goal.summarizes:
        return f"{launcher}-{run.loop}-x{run.devices}-seed{run.seed}"
    sharding = f"{run.sharing}-" if run.is_sharded else ""
    return f"{launcher}-{sharding}batch{run.per_device_train_batch_size}-seed{run.seed}"


def environment(run: RunConfig) -> dict[str, object]:
    """Return the versions of packages, the devices and the state of the code."""
    torch = sys.modules.get("torch")
    driver, gpu_names = devices.gpus()
    return {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda if torch else None,
        "driver": driver,
        "devices": [devices.cpu_name()] if run.device == "cpu" else gpu_names[: run.devices],
        "threads_per_rank": torch.get_num_threads() if torch else None,
        "commit": ask_git("rev-parse", "HEAD"),
        "dirty": bool(ask_git("status", "--porcelain")),
    }


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None = it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def ask_git(*arguments: str) -> str | None:
    """Return what git says of this repository; None = there is no git, or no history, as in an unpacked archive."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def write_json(data: dict[str, Any], path: Path) -> None:
    """Write `data` without secrets in place of what is at `path`; a reader finds either of them whole."""
    written = path.with_suffix(f".{os.getpid()}.new")  # ranks may end at once
    written.write_text(without_secrets(json.dumps(data, indent=2)) + "\n", encoding="utf-8")
    written.replace(path)


def load_record(path: Path) -> Record:
    """Read a record.

    Raises:
        BadInputError: The file is no record, or has a schema that this code does not know.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} is no record ({error}): run `make run` first, then `make record`.") from None
    found = record.get("schema_version") if isinstance(record, dict) else None
    if found != SCHEMA_VERSION:
        raise BadInputError(f"{path} has schema version {found}, but this code reads {SCHEMA_VERSION}: run it again.")
    return {
        **record,
        "config": with_new_names(record["config"]),
        "command": command_with_new_names(record["command"]),
    }


def kept_records() -> list[Record]:
    """Return every record that was kept, in the order of folders and names."""
    return [load_record(path) for path in sorted(REPOSITORY.glob("*/run_*/records/*.json"))]


def keep_record(results_folder: Path) -> Path:
    """Copy a run's record from `<run folder>/results/<name>` to `<run folder>/records/<name>.json`, to be committed.

    Raises:
        BadInputError: There is no record, or it is not in a run folder's results.
    """
    record = load_record(results_folder / RECORD_NAME)
    folder = results_folder.resolve()
    if folder.parent.name != "results":
        raise BadInputError(
            f"{results_folder} is no <run folder>/results/<name>: pass RUN=<run folder>/results/<name>."
        )
    kept = folder.parents[1] / "records" / f"{record['run_name']}.json"
    kept.parent.mkdir(exist_ok=True)
    if kept.exists():
        print(f"replaces the record of {load_record(kept)['started_at']}")
    kept.write_text((folder / RECORD_NAME).read_text(encoding="utf-8"), encoding="utf-8")
    return kept
