"""Records of runs: their schema, how they are written, read and kept. Reading them imports no torch."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common.base.errors import BadInputError, begin_of, reading
from common.base.inert import one_line
from common.base.paths import REPOSITORY, from_repository
from common.base.run_config import RunConfig
from common.base.secrets import without_secrets
from common.hardware import devices

SCHEMA_VERSION = 2
RECORD_NAME = "run_record.json"
MOST_BYTES = 32 * 2**20
AGAIN = "repeat the run, or move the file away."
# folders of kept records: of run folders, from which the planner learns, of docs/measure.py and of bench/variants.py
KEPT, STUDY, REAL, VARIANTS = "*/run_*/records", "docs/records", "docs/records/real", "docs/records/variants"
# settings that may be paths of this machine
PLACES = ("model", "data", "forgetting_data", "device_map", "resume_from_checkpoint")
PLAN_TOLERANCE = 0.1  # share by which a device's peak may differ from its plan before the run warns
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "trl", "bitsandbytes", "evaluate", "deepspeed")

Record = dict[str, Any]

# what `Task.named_by` chooses from; an empty part is left out
NAME_PARTS: dict[str, Callable[[RunConfig], str]] = {
    "sharing": lambda run: run.sharing if run.parallelism.shards or run.sp_size > 1 else "",
    "batch": lambda run: f"batch{run.per_device_train_batch_size}",
    "technique": lambda run: run.technique,
    "parallel": lambda run: run.parallel,
    "micro_batches": lambda run: f"micro{run.micro_batches}" if run.parallelism.pipelines else "",
    "rows": lambda run: f"{run.train_rows}rows" if run.train_rows > 0 else "",  # of --quick: not to be taken for all
    "loop": lambda run: run.loop,
    "devices": lambda run: f"x{run.devices}",
    "exchanged": lambda run: "exchanged" if run.exchange_answers else "",
    "loss": lambda run: run.loss_type if run.loss_type != "auto" else "",
    "turned": lambda run: "turned" if "-" in run.reward_weights else "",  # what the reward praises is punished
}


def settings_anywhere(run: RunConfig) -> dict[str, object]:
    """Return the run's settings so that they mean the same in every folder: absolute paths outside the repository."""
    places = {name: _found(getattr(run, name)) for name in PLACES}
    results_root = str(Path(run.results_root).expanduser().absolute()) if run.results_root else ""
    return {**run.to_dict(), **places, "results_root": results_root}


def _found(place: str) -> str:
    path = Path(os.path.abspath(Path(place).expanduser()))
    # else a Hub id, a URL, or looked for from the repository's root
    return str(from_repository(path)) if place and path.exists() else place


def without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without paths of this machine: of a model or data elsewhere their names."""
    elsewhere = {name: value for name in PLACES if str(value := settings.get(name, "")).startswith(("/", "~", "."))}
    return {**settings, **{name: Path(place).name for name, place in elsewhere.items()}, "results_root": ""}


def fit_to_be_kept(record: Record) -> Record:
    """Return a record without paths of this machine in its settings and its command."""
    config = without_paths(record["config"])
    if config == record["config"]:
        return record
    short = {value: config[name] for name, value in record["config"].items() if value != config[name]}
    words = [short.get(word, word) for word in words_of_command(record)]
    if "--results_root" in words:
        place = words.index("--results_root")
        del words[place : place + 2]
    return {**record, "config": config, "command": shlex.join(words)}


def words_of_command(record: Record) -> list[str]:
    """Return the command of a record, word by word, whose quotes must be closed."""
    with reading(f"The command of the record of {record['run_name']}", AGAIN.capitalize()):
        return shlex.split(record["command"])


def default_run_name(run: RunConfig, launcher: str) -> str:
    """Return what a run without a name is called; a workflow with several parallelisms or loops names them."""
    parts = (NAME_PARTS[part](run) for part in run.goal.named_by)
    return "-".join([launcher, *filter(None, parts), f"seed{run.seed}"])


def environment(run: RunConfig) -> dict[str, object]:
    """Return the versions of packages, the devices and the state of the code."""
    torch = sys.modules.get("torch")
    driver, gpu_names = devices.gpus()
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda if torch else None,
        "driver": driver,
        "allocator": allocator if run.device == "cuda" else None,
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
    written.write_text(json.dumps(without_secrets(data), indent=2) + "\n", encoding="utf-8")
    written.replace(path)


def load_record(path: Path, whole: bool = False) -> Record:
    """Read a record; refuse a file that is none by `common.records.schema`, with `whole` also an incomplete one."""
    from common.records.schema import wrong_in  # here: Pydantic takes a moment, which `--help` need not wait for

    if not os.path.isfile(path):  # a pipe or a device is none, and reading it would not end
        found = "it is a folder" if path.is_dir() else "there is no such file"
        raise BadInputError(f"{path} is no record ({found}): run `make run` first, then `make record`.")
    with reading(f"The record {path}", AGAIN.capitalize()):
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise BadInputError(f"{path} is no record (it has {size:,} bytes, more than {MOST_BYTES:,}): {AGAIN}")
        record = json.loads(path.read_text(encoding="utf-8"))
    found = record.get("schema_version") if isinstance(record, dict) else None
    if found != SCHEMA_VERSION:
        raise BadInputError(f"{path} has schema version {begin_of(repr(found), 60)}, and not {SCHEMA_VERSION}: {AGAIN}")
    if wrong := wrong_in(record, whole):
        raise BadInputError(f"{path} is no record of a run ({wrong}): {AGAIN}")
    return record


def records_in(files: Iterable[Path]) -> Iterator[tuple[Path, Record]]:
    """Yield the records among some files, each with its file; a bad one is named on stderr, once, and passed over."""
    for file in files:
        try:
            yield file, load_record(file, whole=True)
        except BadInputError as error:
            _say_left_out(str(error))


@cache
def _say_left_out(why: str) -> None:
    print(f"left out: {one_line(why)}", file=sys.stderr)


def kept_files(folders: str = KEPT) -> list[Path]:
    """Return the files of the records that were kept in `folders`, a pattern, in the order of folders and names."""
    return sorted(REPOSITORY.glob(f"{folders}/*.json"))


def kept_records(folders: str = KEPT) -> list[Record]:
    """Return every record that was kept in `folders`, a pattern, in order; read again only when a file has changed."""
    files = kept_files(folders)
    return list(_whole_records(tuple(files), tuple(file.lstat().st_mtime_ns for file in files)))


@cache
def _whole_records(files: tuple[Path, ...], changed_at_ns: tuple[int, ...]) -> list[Record]:
    return [record for _, record in records_in(files)]
