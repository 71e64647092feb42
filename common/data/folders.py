"""Find the files of each split in a folder: one's own, a clone of a dataset of the Hub, shards, or `save_to_disk`'s."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

import fsspec
import yaml
from fsspec.utils import glob_translate

from common.base.errors import BadInputError, reading
from common.data.files import BINARY, COMPRESSED, NOT_FOUND, is_http, is_url, suffixes_of, text_of
from common.data.row_checks import say_once
from common.data.rows import SPLIT_WORDS, RowKind, shown, split_named

LEVELS = 3  # of folders in which files are looked for: `DATA/english/train/0000.parquet`
IGNORED = re.compile(r"(^|/)(\.|__|cache-.*\.arrow$|dataset_(infos?|dict)\.json$|config\.json$)")
"""Hidden files, and those of `datasets` that hold no rows of a split."""
SHARD = re.compile(r"(?P<split>\w+(\.\w+)*)-\d{5}-of-\d{5}\b.*")  # how `datasets` names parts of a split
FORBIDDEN = (401, 403)  # so many stores answer for what they do not have


def names_below(folder: str, suffixes: Sequence[str]) -> list[str]:
    """Return the files below a folder, by their paths from there; by HTTP only those called by a split are found."""
    with reading(f"The folder {folder}", "Correct --data, or pass the file of training rows itself."):
        if is_http(folder):
            names = _names_asked_for(folder, suffixes)
        else:
            names = _names_listed(folder) if is_url(folder) else _names_here(folder)
        return sorted(name for name in names if not IGNORED.search(name))


def _names_here(folder: str) -> Iterator[str]:
    os.listdir(folder)  # `walk` says nothing of a folder that it must not read
    for place, folders, files in os.walk(folder, followlinks=True):
        relative = Path(place).relative_to(folder)
        if len(relative.parts) == LEVELS:
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        yield from ((relative / name).as_posix() for name in files)


def _names_listed(folder: str) -> list[str]:
    system, root = fsspec.core.url_to_fs(folder)
    try:
        system.ls(root, detail=False)  # `find` says nothing of a host that does not answer
    except FileNotFoundError:
        return []
    return [name.removeprefix(f"{root.rstrip('/')}/") for name in system.find(root, maxdepth=LEVELS + 1)]


def _names_asked_for(folder: str, suffixes: Sequence[str]) -> Iterator[str]:
    system, _ = fsspec.core.url_to_fs(folder)
    for words in (("train",), ("validation", "val"), ("test",)):
        names = (f"{word}{suffix}" for word in words for suffix in _all_suffixes(suffixes))
        yield from islice((name for name in names if _is_there(system, f"{folder}/{name}")), 1)


def _is_there(system: fsspec.AbstractFileSystem, url: str) -> bool:
    """Return whether a file is behind a URL; a host that does not answer is no reason to think that it is not."""
    try:
        return system.exists(url, strict=True)
    except Exception as error:
        if getattr(error, "status", 0) in (*NOT_FOUND, *FORBIDDEN):
            return False
        raise


def files_of_splits(folder: str, kind: RowKind, config: str) -> dict[str, list[str]]:
    """Return the paths or URLs of each split's files; `config`: of a card, empty = its default, or the only one."""
    names = names_below(folder, kind.suffixes)
    found = _saved(folder, names) or _of_card(folder, names, config, kind.suffixes)
    if config and not found:
        raise BadInputError(f"dataset_config is {config!r}, but no card in the folder {folder} names it: drop it.")
    found = found or by_names(names, kind.suffixes)
    if not found:
        train, there = f"{folder}/train{kind.suffixes[0]}", f" (there are: {shown(names)})" if names else ""
        raise BadInputError(f"The data file {train} does not exist{there}: make it, {kind.holds}.")
    read = {name for files in found.values() for name in files}
    known = _all_suffixes(kind.suffixes)
    others = [name for name in names if name not in read and _whole_suffix(name) in known]
    say_once(f"{folder}: these files are not read: {shown(others)}" if others else "")
    for split, files in found.items():
        say_once(f"{folder}: {split} is in {len(files):,} files ({shown(files)})" if len(files) > 1 else "")
    return {split: [f"{folder}/{name}" for name in files] for split, files in found.items()}


def _saved(folder: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of what `save_to_disk` wrote; earlier ones may stand beside them."""
    found = {}
    for state in (PurePosixPath(name) for name in names if PurePosixPath(name).name == "state.json"):
        with reading(f"{folder}/{state}"):
            files = json.loads(text_of(f"{folder}/{state}")).get("_data_files", [])
            found[state.parent.name or "train"] = [(state.parent / file["filename"]).as_posix() for file in files]
    return {split: files for split, files in found.items() if files}


def _of_card(folder: str, names: Sequence[str], config: str, suffixes: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split as the card of a dataset of the Hub has them; none if it has not."""
    if "README.md" not in names:
        return {}
    card = f"{folder}/README.md"
    with reading(card, "Correct the lines between --- at its beginning, or remove them."):
        head = re.match(r"---\s*\n(.*?)\n---", text_of(card), re.DOTALL)
        told = yaml.safe_load(head[1]) if head else {}
        configs = {each["config_name"]: each for each in (told or {}).get("configs", [])}
        defaults = [name for name, each in configs.items() if each.get("default") or name == "default"]
    if not configs:
        return {}
    name = config or next(iter(defaults or configs) if defaults or len(configs) == 1 else iter([""]))
    if name not in configs:
        raise BadInputError(f"dataset_config is {config!r}, but {folder} has {', '.join(configs)}: pass one of them.")
    with reading(card, f"Correct its configuration {name}."):
        start = f"{configs[name].get('data_dir', '').strip('./')}/".lstrip("/")
        below = [each.removeprefix(start) for each in names if each.startswith(start)]
        patterns = configs[name].get("data_files") or {}
        if patterns:
            from datasets.data_files import sanitize_patterns  # here: it takes two seconds to import

            patterns = sanitize_patterns(patterns)
        found = {
            split: [each for each in below if any(re.match(glob_translate(pattern), each) for pattern in its)]
            for split, its in patterns.items()
        }
    if lacking := next((split for split, files in found.items() if not files), None):
        raise BadInputError(f"The card of {folder} has {patterns[lacking]} as {lacking}, but there is none: fetch it.")
    found = found or by_names(below, suffixes)
    return {split: [start + each for each in files] for split, files in found.items()}


def by_names(names: Sequence[str], suffixes: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split by their names, or by those of their folders, as `datasets` does.

    Files called by a split alone come first, then shards, then others with its name in them; all are of one kind. What
    names no split is for training if nothing else is.
    """
    order = {suffix: place for place, suffix in enumerate(_all_suffixes(suffixes))}
    splits: dict[str, list[str]] = {}
    for name in names:
        if _whole_suffix(name) in order:
            splits.setdefault(_split_of(name), []).append(name)
    unnamed = splits.pop("", [])
    if unnamed and "train" not in splits:
        splits["train"] = unnamed
    return {split: _of_one_kind(files, split, order) for split, files in splits.items()}


def _of_one_kind(files: list[str], split: str, order: dict[str, int]) -> list[str]:
    words, groups = SPLIT_WORDS.get(split, ()), {}
    for file in files:
        stem, suffix = PurePosixPath(file).name.partition(".")[0].lower(), _whole_suffix(file)
        is_shard = SHARD.fullmatch(PurePosixPath(file).name)
        surest = words.index(stem) if stem in words and "/" not in file else len(words) + (not is_shard)
        groups.setdefault((surest, suffix), []).append(file)
    return groups[min(groups, key=lambda group: (group[0], -len(groups[group]), order[group[1]]))]


def _split_of(name: str) -> str:
    """Return the split of a file, by its name, else by the nearest folder's; empty = none is named."""
    path = PurePosixPath(name)
    shard = SHARD.fullmatch(path.name)
    if shard and split_named(shard["split"]):
        split = shard["split"]
        return next((known for known, words in SPLIT_WORDS.items() if split.lower() in words), split)
    return next(filter(None, map(split_named, (path.name.partition(".")[0], *reversed(path.parent.parts)))), "")


def _all_suffixes(suffixes: Sequence[str]) -> list[str]:
    """Return the suffixes with and without compression, in the order in which they are preferred."""
    return [*suffixes, *(suffix + packed for packed in COMPRESSED for suffix in suffixes if suffix not in BINARY)]


def _whole_suffix(name: str) -> str:  # with that of a compression
    return "".join(suffixes_of(name))
