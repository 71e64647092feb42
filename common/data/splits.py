"""Read the rows of a run from wherever they are, as training, validation and test rows, and as tokens."""

import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name

from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.base.errors import BadInputError
from common.base.paths import find_here
from common.base.run_config import RunConfig
from common.data.batches import longest_first
from common.data.control_tokens import check_control_tokens
from common.data.files import TEXT_FILE, checked, is_url, splits_of_file, suffix_of, with_names
from common.data.folders import files_of_splits, names_below
from common.data.row_checks import check_ids, check_rows_apart, say_once
from common.data.rows import SPLIT_NAMES, SPLIT_WORDS, Found, Row, RowKind, Splits, Tokens, split_named
from common.data.stored_rows import take
from common.data.texts import label_names

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
HOLD_OUT_SHARE, HOLD_OUT_MOST, HOLD_OUT_SEED = 0.1, 1_000, 0


def row_kind(run: RunConfig) -> RowKind:
    """Return what the rows of the run's task are."""
    return resolve_name(run.goal.rows)(run)


def load_splits(run: RunConfig) -> Splits:
    """Read and check the run's rows, from wherever they are; for a missing split some training rows are held out.

    What was read last is returned again, unless a file has changed since: a run checks its rows before it loads them.
    """
    source, files = run.data.removeprefix("file://"), []
    place = None if is_url(source) else find_here(source)
    if place is not None:
        files = [place / name for name in names_below(str(place), ())] if place.is_dir() else [place]
    states = ((file, file.stat()) for file in files if file.is_file())
    seen = tuple((str(file), state.st_mtime_ns, state.st_size) for file, state in states)
    return read_splits(run, place, seen) if seen else read_splits.__wrapped__(run, place, seen)


@lru_cache(maxsize=1)
def read_splits(run: RunConfig, place: Path | None, files: tuple[tuple[str, int, int], ...]) -> Splits:
    """Read and check rows that are at `place`, if here; `files`, with times and bytes, tell whether they changed."""
    kind = row_kind(run)
    splits = check_rows_apart(_read_splits(run, place, kind), run)
    limits = {"train": run.train_rows, "validation": run.validation_rows, "test": run.test_rows}
    cut = {name: getattr(splits, name)[:limit] for name, limit in limits.items() if limit > 0}
    return kind.finish(replace(splits, **cut))


def _read_splits(run: RunConfig, place: Path | None, kind: RowKind) -> Splits:
    if place or is_url(run.data):
        source = str(place or run.data)
        found = _splits_of_source(source, kind, run)
    elif HUB_ID.fullmatch(run.data):
        source, found = f"The dataset {run.data}", _splits_on_hub(run)
    else:
        raise BadInputError(
            f"The data {run.data} do not exist here or in the repository: pass --data with a folder, a file "
            f"({', '.join(kind.suffixes)}), a URL, or the id of a dataset on the Hub."
        )
    names = _chosen_splits({name: place for name, (_, place) in found.items()}, source, run)
    rows = {split: checked(*found[name], kind) for split, name in names.items()}
    for each in rows.values():
        check_ids(each)
    return hold_out(rows, source, kind.belongs_to)


def all_rows(run: RunConfig, source: str) -> list[Row]:
    """Read every row of a file or folder here, whatever its splits, as rows of the run's task."""
    kind, place = row_kind(run), find_here(source)
    if place is None:
        raise BadInputError(f"The file or folder {source} does not exist here or in the repository: correct it.")
    found = _splits_of_source(str(place), kind, run)
    return [row for each in found.values() for row in checked(*each, kind)]


def _chosen_splits(there: dict[str, str], source: str, run: RunConfig) -> dict[str, str]:
    """Return what a source calls the splits of a run, and say which of `there`, with their places, are others."""
    chosen = {}
    for split, words in SPLIT_WORDS.items():
        setting = f"dataset_{split}_split"
        name = getattr(run, setting, split)
        is_asked_for = name != getattr(RunConfig, setting, split)
        found = name if name in there else next((word for word in words if word in there and not is_asked_for), None)
        if found:
            chosen[split] = found
        elif split == "train" or is_asked_for:
            listed = ", ".join(there)
            raise BadInputError(f"{source} has no split {name!r} (there are: {listed}): pass another --{setting}.")
    others = [name for name in there if name not in chosen.values()]
    say_once(f"{source} also has the splits {', '.join(others)}, which are not read" if others else "")
    called = ((split, name if name != split else Path(there[name]).name) for split, name in chosen.items())
    renamed = [f"{name} is {split}" for split, name in called if split_named(name) and split[:3] not in name.lower()]
    say_once(f"{source}: {', '.join(renamed)}" if renamed else "")
    return chosen


def _splits_of_source(source: str, kind: RowKind, run: RunConfig) -> dict[str, tuple[Found, str]]:
    if run.dataset_revision:
        raise BadInputError(f"dataset_revision is {run.dataset_revision!r}, but {source} is not on the Hub: drop it.")
    if os.path.isdir(source) or (is_url(source) and suffix_of(source) not in kind.suffixes):
        folder = source.rstrip("/")
        files = files_of_splits(folder, kind, run.dataset_config)
        places = {split: folder if is_url(folder) else os.path.commonpath(names) for split, names in files.items()}
        return {split: (_rows_of_files(names), places[split]) for split, names in files.items()}
    if run.dataset_config:
        raise BadInputError(f"dataset_config is {run.dataset_config!r}, but {source} is a file: leave it out.")
    if suffix_of(source) not in kind.suffixes or not (is_url(source) or os.path.isfile(source)):
        raise BadInputError(f"{source} is no kind of file that is read ({', '.join(kind.suffixes)}): save it as .csv.")
    return {split: (rows, source) for split, rows in splits_of_file(source).items()}


def _rows_of_files(files: Sequence[str]) -> Found:
    for file in files:
        splits = splits_of_file(file)
        if len(splits) > 1:
            raise BadInputError(f"{file} holds {', '.join(splits)}, but is one split of its folder: pass it itself.")
        yield from next(iter(splits.values()))


def _splits_on_hub(run: RunConfig) -> dict[str, tuple[Found, str]]:
    from datasets import load_dataset  # here: only runs on a Hub dataset need it, and it takes a second to import

    try:
        revision = run.dataset_revision or None
        found = load_dataset(run.data, run.dataset_config or None, revision=revision, trust_remote_code=False)
    except Exception as error:  # no such dataset, no network, no access: each has a class of its own in `datasets`
        reason = " ".join(str(error).partition("Example")[0].split())
        wrong = "--data or --dataset_revision" if run.dataset_revision else "--data"
        said = f"The data {run.data} are no folder or file here, nor a dataset on the Hub ({reason}): correct {wrong}."
        if isinstance(error, ValueError) and "onfig" in reason:  # none was chosen of several, or one that is not there
            said = f"The dataset {run.data} needs another --dataset_config: {reason}"
        elif "is a gated dataset" in reason:
            said = f"The dataset {run.data} is gated: ask for access on its page on the Hub, then run `hf auth login`."
        raise BadInputError(said) from None
    _check_commit(run, next(iter(found.values())).cache_files)
    source = f"dataset {run.data}"

    def rows_of(name: str) -> Found:
        for number, row in enumerate(with_names(found[name])):
            yield row, f"{source}, {name} row {number}"

    return {name: (rows_of(name), source) for name in found}


def _check_commit(run: RunConfig, cached: list[dict[str, str]]) -> None:
    """Refuse rows of another commit than the revision's: without a network `datasets` takes the newest in its cache."""
    revision = run.dataset_revision or "main"
    ref = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=run.data, repo_type="dataset") / "refs" / revision
    asked = ref.read_text().strip() if ref.is_file() else revision
    for loaded in {Path(file["filename"]).parent.name for file in cached}:
        if COMMIT.fullmatch(asked) and COMMIT.fullmatch(loaded) and loaded != asked:
            raise BadInputError(
                f"The cache has commit {loaded} of {run.data} as its newest, but {revision} is {asked}: read that with "
                "a network, or pass --dataset_revision."
            )


def hold_out(splits: dict[str, Sequence[Row]], source: str, belongs_to: Callable[[Row], str] | None = None) -> Splits:
    """Return `splits` with the same tenth of the training rows, each time, held out for each split that is missing.

    Rows for which `belongs_to` returns the same come into one. Labels are held out alike, and one row of each stays.
    """
    rows, others = splits["train"], dict(splits)
    missing = [name for name in SPLIT_NAMES if name not in splits]
    if missing:
        labels = [row["label"] for row in rows] if "label" in rows[0] else []
        kinds = len(set(labels))
        least = len(missing) + max(1, kinds)
        if len(rows) < least:
            there = ", ".join(f"{name} ({len(split)} rows)" for name, split in splits.items())
            divided = " (empty lines divide the texts of a .txt)" if source.endswith(TEXT_FILE) else ""
            staying = f", as one of each of the {kinds} labels stays there" if labels else ""
            raise BadInputError(f"{source} has {there}: give its train split at least {least} rows{divided}{staying}.")
        wanted = min(max(1, round(len(rows) * HOLD_OUT_SHARE)), HOLD_OUT_MOST)
        share = f"{'about ' if belongs_to or labels else ''}{wanted:,} of its {len(rows):,} training rows"
        each = "each" if missing[1:] else "it"
        say_once(f"{source} has no {' and no '.join(missing)} rows: {share} are held out for {each}")
        order = _groups_of(rows, belongs_to)
        if len(order) <= len(missing):
            say_once(f"{source} has too few different pictures ({len(order)}): what is held out has those of training")
            order = _groups_of(rows, None)
        random.Random(HOLD_OUT_SEED).shuffle(order)
        order, staying = _alike_by_label(order, labels) if labels else (order, [])
        for name in missing:
            taken = order.pop(0)
            while len(taken) < wanted and len(order) > len(missing):
                taken = taken + order.pop(0)
            others[name] = take(rows, taken)
        rows = take(rows, [number for group in [*order, *staying] for number in group])
    return Splits(rows, others["validation"], others["test"], held_out="test" in missing)


def _alike_by_label(order: list[list[int]], labels: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Return rows in an order whose first part, of any size, has the labels in their shares; and one of each, apart."""
    of_label: dict[str, list[list[int]]] = {}
    for row in order:
        of_label.setdefault(labels[row[0]], []).append(row)
    spread = [((place - 0.5) / len(rows), row) for rows in of_label.values() for place, row in enumerate(rows) if place]
    return [row for _, row in sorted(spread, key=lambda each: each[0])], [rows[0] for rows in of_label.values()]


def _groups_of(rows: Sequence[Row], belongs_to: Callable[[Row], str] | None) -> list[list[int]]:
    """Return the numbers of rows that must stay together, in the order of the first of each."""
    groups: dict[str | int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(belongs_to(row) if belongs_to else number, []).append(number)
    return list(groups.values())


def tokens_of(rows: Sequence[Row], tokenizer: Tokenizer, run: RunConfig) -> Sequence[Tokens]:
    """Return every row as tokens, by the run's task and settings; refuse rows with nothing to learn, or cut ones."""
    return row_kind(run).tokenize(rows, tokenizer, run)


def tokenized(splits: Splits, tokenizer: Tokenizer, run: RunConfig) -> Splits:
    """Return training and validation rows as tokens, unless they are; by loss alone the longest are validated first."""
    if "input_ids" in splits.train[0]:
        return splits
    train, validation = (tokens_of(rows, tokenizer, run) for rows in (splits.train, splits.validation))
    return replace(splits, train=train, validation=validation if run.goal.converses else longest_first(validation))


def check_tokens(splits: Splits, tokenizer: Tokenizer, run: RunConfig) -> None:
    """Refuse what a tokenizer alone tells of rows: control tokens in texts, and answers that `long_texts` refuses."""
    every = (splits.train, splits.validation, splits.test)
    check_control_tokens(every, tokenizer, run)
    if run.long_texts == "refuse":
        for rows in every:
            tokens_of(rows, tokenizer, run)


@lru_cache(maxsize=1)
def label_names_of(run: RunConfig) -> tuple[str, ...]:
    """Return the labels that a run's model chooses from."""
    return tuple(label_names(load_splits(run)))
