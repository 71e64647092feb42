"""Read the rows of a run from wherever they are, as training, validation and test rows, and as tokens."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name

import fsspec
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.files import COMPRESSED, read_rows, suffix_of, with_names
from common.data.plain_texts import TEXT_FILE
from common.data.row_checks import check_ids, check_rows_apart, say_once
from common.data.rows import SPLIT_NAMES, Row, RowKind, Splits, Tokens
from common.data.stored_rows import stored, take
from common.data.texts import label_names, without_empty

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
METADATA_SUFFIXES = ("jsonl", "csv", "parquet")
HOLD_OUT_SHARE, HOLD_OUT_MOST, HOLD_OUT_SEED = 0.1, 1_000, 0


def row_kind(run: RunConfig) -> RowKind:
    """Return what the rows of the run's task are."""
    return resolve_name(run.goal.rows)(run)


def load_splits(run: RunConfig) -> Splits:
    """Read and check the run's rows, from wherever they are.

    A folder (or the URL of one) holds the files train, validation (or val) and test. Of a single file, and of a folder
    or a Hub dataset that lacks validation or test, a tenth of the training rows is held out for each that is missing.

    What was read last is returned again, unless a file has changed since: a run checks its rows before it loads them.

    Raises:
        BadInputError: a source, file or row is missing or malformed; names file and line.
    """
    files = _files_here(run.data)
    return read_splits(run, files) if files else read_splits.__wrapped__(run, files)


def _files_here(source: str) -> tuple[tuple[str, int, int], ...]:
    """Return the files of a source on this machine, each with the time of its last change in ns, and its bytes."""
    place = _place_here(source)
    of_folders = sorted(place.glob("*/metadata.*")) if place and place.is_dir() else []
    files = sorted([*place.iterdir(), *of_folders]) if place and place.is_dir() else [place] if place else []
    states = ((file, file.stat()) for file in files if file.is_file())
    return tuple((str(file), state.st_mtime_ns, state.st_size) for file, state in states)


def _place_here(source: str) -> Path | None:
    """Return the file or folder of a source that is no URL, and not on the Hub."""
    places = () if "://" in source else (Path(source).expanduser(), REPOSITORY / source)
    return next((place for place in places if place.exists()), None)


@lru_cache(maxsize=1)
def read_splits(run: RunConfig, files: tuple[tuple[str, int, int], ...]) -> Splits:
    """Read and check the run's rows; `files` tells whether those that were read last are still the same.

    Raises:
        BadInputError: as `load_splits`.
    """
    kind = row_kind(run)
    splits = _read_splits(run, kind)
    if run.empty_rows == "skip":
        splits = splits.map(without_empty)
    splits = check_rows_apart(splits, run)
    limits = {"train": run.train_rows, "validation": run.validation_rows, "test": run.test_rows}
    cut = {name: getattr(splits, name)[:limit] for name, limit in limits.items() if limit > 0}
    return kind.finish(replace(splits, **cut))


def _read_splits(run: RunConfig, kind: RowKind) -> Splits:
    source = run.data
    local = source if "://" in source else _place_here(source)
    if local:
        _refuse_hub_settings(run)
        return _read_files(str(local), kind)
    if HUB_ID.fullmatch(source):
        return _read_hub_dataset(run, kind)
    raise BadInputError(
        f"The data {source} do not exist: pass --data with a folder that holds the files train, validation and test "
        f"({', '.join(kind.suffixes)}), with one such file, a URL, or the id of a dataset on the Hub."
    )


def _refuse_hub_settings(run: RunConfig) -> None:
    for name in ("dataset_config", "dataset_revision", "dataset_train_split", "dataset_test_split"):
        if getattr(run, name) != getattr(RunConfig, name):
            raise BadInputError(
                f"{name} is {getattr(run, name)!r}, but it is for datasets of the Hub, and {run.data} is a file or "
                f"folder: leave --{name} out."
            )


def _read_files(source: str, kind: RowKind) -> Splits:
    """Read the three files of a folder, or divide one file; `source` is a path or a URL."""
    if suffix_of(source) in kind.suffixes:
        return hold_out({"train": read_rows(source, kind)}, source, kind.belongs_to)
    if Path(source).is_file():
        raise BadInputError(
            f"{source} is no kind of file that is read ({', '.join(kind.suffixes)}): save it as one of these, a "
            "spreadsheet as .csv."
        )
    folder = source.rstrip("/")
    files = {name: _file_of(folder, name, kind) for name in SPLIT_NAMES}
    if not files["train"]:
        _refuse_pictures_folder(folder)
    train = files["train"] or f"{folder}/train{kind.suffixes[0]}"  # which is refused, as it does not exist
    there = {name: file for name, file in files.items() if file}
    splits = {name: read_rows(file, kind) for name, file in {"train": train, **there}.items()}
    return hold_out(splits, folder, kind.belongs_to)


def _refuse_pictures_folder(folder: str) -> None:
    """Refuse a folder of pictures as `datasets` reads it, with a file of what is said about each (`imagefolder`)."""
    files = (f"{place}/metadata.{suffix}" for place in (folder, f"{folder}/train") for suffix in METADATA_SUFFIXES)
    found = next(filter(_is_there, files), None)
    if found:
        raise BadInputError(
            f"{found} makes {folder} a folder of pictures: go to 3.3, which learns from them, or to learn from texts "
            "about them alone, write these into train.jsonl there, without the column file_name."
        )


def _file_of(folder: str, split: str, kind: RowKind) -> str | None:
    """Return the file of a split, compressed or not; SAMSum's archive calls validation `val`."""
    stems = ("validation", "val") if split == "validation" else (split,)
    suffixes = [suffix + packed for packed in ("", *COMPRESSED) for suffix in kind.suffixes]
    files = [f"{folder}/{stem}{suffix}" for stem in stems for suffix in suffixes]
    if kind.in_folders:
        places = [folder] if split == "train" else []
        places = [f"{folder}/{stem}" for stem in stems] + places
        files += [f"{place}/metadata{suffix}" for place in places for suffix in suffixes]
    return next(filter(_is_there, files), None)


def _is_there(file: str) -> bool:
    """Return whether a path or a URL leads to a file; what cannot be asked is refused when it is read."""
    try:
        system, path = fsspec.core.url_to_fs(file)
        return system.exists(path)
    except Exception:  # each of fsspec's file systems has classes of its own
        return False


def _read_hub_dataset(run: RunConfig, kind: RowKind) -> Splits:
    from datasets import load_dataset  # here: only runs on a Hub dataset need it, and it takes a second to import

    try:
        found = load_dataset(run.data, run.dataset_config or None, revision=run.dataset_revision or None)
    except Exception as error:  # no such dataset, no network, no access: each has a class of its own in `datasets`
        reason = " ".join(str(error).partition("Example")[0].split())
        if isinstance(error, ValueError) and "onfig" in reason:  # none was chosen of several, or one that is not there
            raise BadInputError(f"The dataset {run.data} needs another --dataset_config: {reason}") from None
        if "is a gated dataset" in reason:
            raise BadInputError(
                f"The dataset {run.data} is gated: ask for access on its page on the Hub, then run `hf auth login`."
            ) from None
        raise BadInputError(
            f"The data {run.data} are no folder or file here, nor a dataset on the Hub ({reason}): correct --data or "
            "--dataset_revision."
        ) from None
    _check_commit(run, next(iter(found.values())).cache_files)
    names = {"train": run.dataset_train_split, "validation": "validation", "test": run.dataset_test_split}
    for key, default in (("train", ""), ("test", "test")):
        if names[key] not in found and names[key] != default:
            there = ", ".join(found)
            raise BadInputError(
                f"The dataset {run.data} has no split {names[key]!r} (there are: {there}): pass --dataset_{key}_split."
            )
    source = f"dataset {run.data}"
    splits = {
        split: stored(
            kind.check(
                ((row, f"{source}, {name} row {number}") for number, row in enumerate(with_names(found[name]))), source
            ),
            f"reading {source}",
        )
        for split, name in names.items()
        if name in found
    }
    return hold_out(splits, f"The {source}", kind.belongs_to)


def _check_commit(run: RunConfig, cached: list[dict[str, str]]) -> None:
    """Refuse rows of another commit than the revision's, which `datasets` may return.

    Without a network it takes the newest copy in its cache, whatever revision is asked for. `cached`: the files of a
    split, in a folder named by its commit.
    """
    revision = run.dataset_revision or "main"
    ref = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=run.data, repo_type="dataset") / "refs" / revision
    asked = ref.read_text().strip() if ref.is_file() else revision
    for loaded in {Path(file["filename"]).parent.name for file in cached}:
        if COMMIT.fullmatch(asked) and COMMIT.fullmatch(loaded) and loaded != asked:
            raise BadInputError(
                f"The cache has the rows of commit {loaded} of {run.data} as its newest, but {revision} is {asked}, "
                "and the Hub is not asked: read that revision again with a network, or pass --dataset_revision with "
                "the one that was read last."
            )


def hold_out(splits: dict[str, Sequence[Row]], source: str, belongs_to: Callable[[Row], str] | None = None) -> Splits:
    """Return `splits` with training rows held out for each of validation and test that is missing.

    They are a tenth of them, at most `HOLD_OUT_MOST`, and the same rows each time. Rows for which `belongs_to` returns
    the same come into one split.

    Raises:
        BadInputError: there is no training split, or too few rows to hold one out.
    """
    rows = splits.get("train", [])
    missing = [name for name in SPLIT_NAMES if name != "train" and name not in splits]
    if len(rows) <= len(missing):
        there = ", ".join(f"{name} ({len(split)} rows)" for name, split in splits.items())
        divided = " (empty lines divide the texts of a .txt)" if suffix_of(source) == TEXT_FILE else ""
        raise BadInputError(f"{source} has {there}: give its train split at least {len(missing) + 1} rows{divided}.")
    others, count = dict(splits), min(max(1, round(len(rows) * HOLD_OUT_SHARE)), HOLD_OUT_MOST)
    if missing:
        share = f"{'about ' if belongs_to else ''}{count:,} of its {len(rows):,} training rows"
        say_once(f"{source} has no {' and no '.join(missing)} rows: {share} are held out for each")
        check_ids(rows)
        order = _groups_of(rows, belongs_to)
        if len(order) <= len(missing):
            say_once(f"{source} has too few different pictures ({len(order)}): what is held out has those of training")
            order = _groups_of(rows, None)
        random.Random(HOLD_OUT_SEED).shuffle(order)
        for name in missing:
            taken = order.pop(0)
            while len(taken) < count and len(order) > len(missing):
                taken = taken + order.pop(0)
            others[name] = take(rows, taken)
        rows = take(rows, [number for group in order for number in group])
    return Splits(rows, others["validation"], others["test"], held_out="test" in missing)


def _groups_of(rows: Sequence[Row], belongs_to: Callable[[Row], str] | None) -> list[list[int]]:
    """Return the numbers of rows that must stay together, in the order of the first of each."""
    if belongs_to is None:
        return [[number] for number in range(len(rows))]
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(belongs_to(row), []).append(number)
    return list(groups.values())


def tokens_of(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> Sequence[Tokens]:
    """Return every row as tokens, by the run's task and settings.

    Raises:
        BadInputError: a row has nothing to learn from within `max_length`, or must not be cut.
    """
    return row_kind(run).tokenize(rows, tokenizer, run)


@lru_cache(maxsize=1)
def label_names_of(run: RunConfig) -> tuple[str, ...]:
    """Return the labels that a run's model chooses from."""
    return tuple(label_names(load_splits(run)))
