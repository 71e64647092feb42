"""Rows of chat messages: read and checked, turned into tokens with labels on the answers only, collated, sampled.

Rows of labelled texts, which classification learns from, and of texts with summaries are read in common/columns.py, and
sampled here.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from common.memory_plan import BatchShape
from common.run_config import REPOSITORY, BadInputError, RunConfig

IGNORED_LABEL = -100
"""Tokens with this label add nothing to the loss (PyTorch's cross-entropy)."""

ROLES = ("system", "user", "assistant")
SPLIT_NAMES = ("train", "validation", "test")
SHORT_VALIDATION = "val"
"""What SAMSum's archive calls its validation rows."""
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
HOLD_OUT_SHARE, HOLD_OUT_SEED = 0.1, 0

Row = dict[str, Any]
"""One line of a data file: `id`, `messages`, and for questions with known facts `facts`; or `text` and `label`, or
`text` and `summary`."""

Tokens = dict[str, Any]
"""`input_ids`, `attention_mask` and `labels` of one row, without padding: lists of numbers; with classification
`labels` is one number, that of the row's class; with summarization they are the tokens of the summary."""


@dataclass(frozen=True)
class Splits:
    """The rows to train on, to choose by, and to report on."""

    train: list[Row]
    validation: list[Row]
    test: list[Row]
    held_out: bool = False
    """Whether the test rows were taken from the training rows."""

    def map(self, change: Callable[[list[Row]], list[Row]]) -> "Splits":
        """Each split changed in the same way."""
        return Splits(change(self.train), change(self.validation), change(self.test), self.held_out)


@dataclass(frozen=True)
class RowKind:
    """What the rows of a run are, and how they are read."""

    suffixes: tuple[str, ...]
    """Of the files that can be read."""
    read: Callable[[str], list[Row]]
    """The rows of one file."""
    check: Callable[[object, str], Row]
    """A row as it is, or refused; the second argument says where it stands."""


def row_kind(run: RunConfig) -> RowKind:
    """Messages, with classification labelled texts, with summarization texts and summaries."""
    if run.task == "classification":
        from common.labelled_data import labelled_texts  # here: it imports this module

        return labelled_texts(run)
    if run.task == "summarization":
        from common.summary_data import texts_and_summaries  # here: it imports this module

        return texts_and_summaries(run)
    return RowKind((".jsonl", ".json"), read_messages, check_row)


def load_splits(run: RunConfig) -> Splits:
    """Read and check the run's rows, from wherever they are.

    A folder (or the URL of one) holds train.jsonl, validation.jsonl and test.jsonl (with columns also .csv, or .json; a
    folder's validation may be called val, as SAMSum's). Of a single file, and of a Hub dataset that lacks these splits,
    a tenth of the training rows each is held out for validation and test.

    Raises:
        BadInputError: a source, file or row is missing or malformed; names file and line.
    """
    place, kind = _local_place(run.data), row_kind(run)
    if "://" in run.data:
        splits = _read_files(run.data, kind)
    elif place.exists():
        splits = _read_files(str(place), kind)
    elif HUB_ID.fullmatch(run.data):
        splits = _read_hub_dataset(run.data, kind)
    else:
        suffix = " or ".join(suffix for suffix in kind.suffixes if suffix != ".json")
        raise BadInputError(
            f"The data {run.data} do not exist: pass --data with a folder that holds the {suffix} files train, "
            f"validation and test, with one {suffix} file, a URL, or the id of a dataset on the Hub."
        )
    if run.empty_rows == "skip":
        from common.columns import without_empty  # here: it imports this module

        splits = splits.map(without_empty)
    from common.data_checks import check_rows_apart  # here: it imports this module

    splits = check_rows_apart(splits, run)
    splits = replace(
        splits,
        train=_first(splits.train, run.train_rows),
        validation=_first(splits.validation, run.validation_rows),
        test=_first(splits.test, run.test_rows),
    )
    if run.task == "classification":
        from common.labelled_data import with_classes  # here: it imports this module

        return with_classes(splits)
    return splits


def _local_place(source: str) -> Path:
    place = Path(source).expanduser()
    return place if place.exists() or place.is_absolute() else REPOSITORY / source


def _first(rows: list[Row], count: int) -> list[Row]:
    return rows if count < 0 else rows[:count]


def _read_files(source: str, kind: RowKind) -> Splits:
    """The three files of a folder, or one file divided; `source` is a path or a URL."""
    if urlsplit(source).path.endswith(kind.suffixes):  # a URL may go on with ?download=true
        return hold_out({"train": kind.read(source)}, source)
    folder = source.rstrip("/")
    there = (suffix for suffix in kind.suffixes if _is_there(f"{folder}/{SPLIT_NAMES[0]}{suffix}"))
    suffix = next(there, kind.suffixes[0])
    files = {name: f"{folder}/{name}{suffix}" for name in SPLIT_NAMES}
    short = f"{folder}/{SHORT_VALIDATION}{suffix}"
    if _is_there(short) and not _is_there(files["validation"]):
        files["validation"] = short
    return Splits(*(kind.read(file) for file in files.values()))


def _is_there(file: str) -> bool:
    """Whether a path or a URL leads to a file; of what cannot be asked, reading says what is wrong."""
    try:
        system, path = fsspec.core.url_to_fs(file)
        return system.exists(path)
    except Exception:  # each of fsspec's file systems has classes of its own
        return False


def _read_hub_dataset(name: str, kind: RowKind) -> Splits:
    from datasets import load_dataset  # here: only runs on a Hub dataset need it, and it takes a second to import

    try:
        found = load_dataset(name)
    except Exception as error:  # no such dataset, no network, no access: each has a class of its own in `datasets`
        reason = str(error).strip().splitlines()[0]
        raise BadInputError(
            f"The data {name} are no folder or file here, nor to be had from the Hub ({reason}): mend --data."
        ) from None
    splits = {
        split: [
            kind.check(row, f"dataset {name}, {split} row {number}") for number, row in enumerate(_with_names(rows))
        ]
        for split, rows in found.items()
    }
    return hold_out(splits, f"The dataset {name}")


def _with_names(rows: Any) -> Iterator[dict[str, Any]]:
    """The rows of a dataset's split, with names where it keeps the numbers of classes; a missing one (-1) is empty."""
    features = getattr(rows, "features", None) or {}
    classes = {column: feature for column, feature in features.items() if hasattr(feature, "int2str")}
    for row in rows:
        numbers = {column: row[column] for column in classes}
        yield {**row, **{c: classes[c].int2str(number) if number >= 0 else "" for c, number in numbers.items()}}


def hold_out(splits: dict[str, list[Row]], source: str) -> Splits:
    """`splits` with rows of `train` held out where validation or test is missing: a tenth each, always the same rows.

    Raises:
        BadInputError: there is no training split, or too few rows to hold one out.
    """
    rows = list(splits.get("train", []))
    missing = [name for name in SPLIT_NAMES if name != "train" and name not in splits]
    if len(rows) <= len(missing):
        there = ", ".join(f"{name} ({len(split)} rows)" for name, split in splits.items())
        raise BadInputError(f"{source} has {there}: give its train split at least {len(missing) + 1} rows.")
    if missing:
        from common.data_checks import check_ids  # here: it imports this module

        check_ids(source, rows)
        random.Random(HOLD_OUT_SEED).shuffle(rows)
    count = max(1, round(len(rows) * HOLD_OUT_SHARE))
    taken = {name: rows[number * count : (number + 1) * count] for number, name in enumerate(missing)}
    others = {**splits, **taken}
    return Splits(rows[len(missing) * count :], others["validation"], others["test"], held_out="test" in missing)


def read_messages(source: str | Path) -> list[Row]:
    """The rows of one JSONL file, on this machine or behind any URL that fsspec reads (`s3://`, `https://`, ...).

    Raises:
        BadInputError: the file is missing or empty, or a line is no row of messages that ends with an answer.
    """
    content = read_text(source, "one JSON object with `messages` per line")
    lines = content.split("\n")  # splitlines would also split at U+2028 within a text
    rows = [check_row(*parsed) for parsed in parse_lines(lines, source)]
    if not rows:
        raise BadInputError(f"The data file {source} is empty: give it at least one row of `messages`.")
    return rows


def read_text(source: str | Path, holds: str) -> str:
    """A file on this machine or behind any URL that fsspec reads; `holds` is what should stand in it.

    Raises:
        BadInputError: it is missing, cannot be read, or is not UTF-8.
    """
    try:
        with fsspec.open(str(source), "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise BadInputError(f"The data file {source} does not exist: make it, {holds}.") from None
    except ImportError as error:
        raise BadInputError(f"The data file {source} needs one more package ({error}): install it.") from None
    except Exception as error:  # each of fsspec's file systems has classes of its own
        raise BadInputError(f"The data file {source} cannot be read ({error}): mend --data.") from None
    try:
        return content.decode("utf-8-sig")  # Excel's files begin with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"{source} is not UTF-8 (line {line}, byte {error.start}): save it as UTF-8.") from None


def parse_lines(lines: list[str], source: str | Path) -> Iterator[tuple[object, str]]:
    """What each line of a JSONL file holds, and where it stands; empty lines are left out.

    Raises:
        BadInputError: a line is no JSON.
    """
    for number, line in enumerate(lines, 1):
        where = f"{source}, line {number}"
        if not line.strip():
            continue
        try:
            yield json.loads(line), where
        except json.JSONDecodeError as error:
            raise BadInputError(
                f"{where} is no JSON ({error.msg} at column {error.colno}): mend or remove it."
            ) from None


def check_row(row: object, where: str) -> Row:
    """`row` as it is, if it is a conversation that ends with an answer.

    Raises:
        BadInputError: it is not; names `where` it stands.
    """
    if isinstance(row, dict) and "id" in row:
        where = f"{where} (id {str(row['id'])[:40]!r})"
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise BadInputError(f"{where} has no list `messages`: give it at least a user's and an assistant's message.")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise BadInputError(
                f"{where} has a message without text `role` and `content`: {str(message)[:80]}; mend it."
            )
        if message["role"] not in ROLES:
            raise BadInputError(f"{where} has the role {message['role']!r}: use one of {', '.join(ROLES)}.")
        if not message["content"].strip():
            raise BadInputError(f"{where} has an empty {message['role']} message: fill or remove it.")
    roles = [message["role"] for message in messages]
    if any(first == second for first, second in pairwise(roles)):
        raise BadInputError(f"{where} has two messages of one role in a row ({', '.join(roles)}): join or mend them.")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise BadInputError(f"{where} ends with role {messages[-1]['role']!r}: end it with an assistant's answer.")
    if "system" in roles[1:] or roles[roles[0] == "system"] != "user":
        raise BadInputError(
            f"{where} has its roles in the wrong order ({', '.join(roles)}): a system message, if any, comes first, "
            "then user and assistant in turn."
        )
    facts = row.get("facts", [])
    if not isinstance(facts, list) or not all(isinstance(fact, str) and fact for fact in facts):
        raise BadInputError(f"{where} has `facts` that are no list of texts: {str(facts)[:80]}; mend or remove them.")
    return row


def question_of(row: Row) -> list[dict[str, str]]:
    """The messages before the last answer."""
    return row["messages"][:-1]


def answer_of(row: Row) -> str:
    """The last answer's text."""
    return row["messages"][-1]["content"]


def texts_of(row: Row) -> list[str]:
    """What a row has to read."""
    if "messages" in row:
        return [message["content"] for message in row["messages"]]
    return [row[key] for key in ("text", "summary") if key in row]


def tokenize_row(row: Row, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Tokens:
    """One row as tokens, with labels on the assistant's answers and their end token only.

    Where the chat template marks answers (`{% generation %}`), all answers of the row are learnt; where it does not,
    the last one is: the tokens after the prompt that generation would start from.
    """
    marked = re.search(r"{%-?\s*generation", tokenizer.chat_template or "") is not None
    encoded = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=marked)
    ids = encoded["input_ids"]
    if marked:
        is_answer = encoded["assistant_masks"]
    else:
        prompt = tokenizer.apply_chat_template(question_of(row), add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        is_answer = [int(position >= len(prompt)) for position in range(len(ids))]
    labels = [token if answer else IGNORED_LABEL for token, answer in zip(ids, is_answer, strict=True)]
    return {"input_ids": ids[:max_length], "attention_mask": [1] * len(ids[:max_length]), "labels": labels[:max_length]}


def tokens_of(rows: list[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> list[Tokens]:
    """Every row as tokens, as the run's task has it.

    Raises:
        BadInputError: a row has nothing to learn from within `max_length`, or must not be cut.
    """
    if run.task == "classification":
        from common.labelled_data import tokenize_texts  # here: it imports this module

        return tokenize_texts(rows, tokenizer, run)
    if run.task == "summarization":
        from common.summary_data import tokenize_summaries  # here: it imports this module

        return tokenize_summaries(rows, tokenizer, run)
    return tokenize_rows(rows, tokenizer, run.max_length, run.cut_off_share)


def tokenize_rows(
    rows: list[Row], tokenizer: PreTrainedTokenizerBase, max_length: int, cut_off_share: float = 0.0
) -> list[Tokens]:
    """Every row of messages as tokens; rows without a token to learn from within `max_length` are left out.

    Raises:
        BadInputError: these are more than `cut_off_share` of all.
    """
    from common.data_checks import shown  # here: it imports this module

    tokenized = [tokenize_row(row, tokenizer, max_length) for row in rows]
    names = [str(row.get("id", f"number {number} of its split")) for number, row in enumerate(rows, 1)]
    empty = [all(label == IGNORED_LABEL for label in tokens["labels"]) for tokens in tokenized]
    without = [name for name, is_empty in zip(names, empty, strict=True) if is_empty]
    if len(without) > cut_off_share * len(rows):
        more = f" ({len(without)} of {len(rows)} rows have none: {shown(without)})" if len(without) > 1 else ""
        raise BadInputError(
            f"Row {without[0]} has no answer token within its first {max_length} tokens{more}: shorten its question, "
            "raise --max_length, or pass a --cut_off_share of the rows that may be left out."
        )
    if without:
        print(f"{len(without):,} of {len(rows):,} rows have no answer within {max_length} tokens, and are left out")
    return [tokens for tokens, is_empty in zip(tokenized, empty, strict=True) if not is_empty]


Collate = Callable[[list[Tokens]], dict[str, torch.Tensor]]


def longest_batch(rows: list[Tokens], batch_size: int) -> BatchShape:
    """The shape of the largest batch that can come up: the longest rows, padded on the right to the longest of them."""
    longest = sorted(rows, key=lambda row: -len(row["input_ids"]))[:batch_size]
    lengths = [len(row["input_ids"]) for row in longest]
    padded = min(lengths) < max(lengths)
    if isinstance(rows[0]["labels"], int):
        classes = max(row["labels"] for row in rows) + 1
        return BatchShape(len(longest), max(lengths), labelled=1, padded=padded, classes=classes)
    if any(len(row["labels"]) != len(row["input_ids"]) for row in rows):  # summaries: the longest may be anywhere
        summary = max(len(row["labels"]) for row in rows)
        return BatchShape(len(longest), max(lengths), labelled=summary, padded=padded, target_length=summary)
    learnt = {place for row in longest for place, label in enumerate(row["labels"]) if place and label != IGNORED_LABEL}
    return BatchShape(len(longest), max(lengths), len(learnt), padded)


def make_collator(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None) -> Collate:
    """Pads a batch to its longest row, on the right; padding has no attention and no label.

    With an encoder-decoder as `model` the batch also has the decoder's inputs: the labels moved on by one.
    """
    return DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=IGNORED_LABEL)


def make_class_collator(tokenizer: PreTrainedTokenizerBase) -> Collate:
    """The same where a row has one label."""
    return DataCollatorWithPadding(tokenizer)


def labels_in(row: Tokens) -> int:
    """What is to be predicted in a row: tokens, or with classification the one label."""
    if isinstance(row["labels"], int):
        return int(row["labels"] != IGNORED_LABEL)
    return sum(label != IGNORED_LABEL for label in row["labels"][1:])


def without_labels(row: Tokens) -> Tokens:
    """The row, computed like any other, that adds nothing to a loss."""
    labels = row["labels"]
    ignored = IGNORED_LABEL if isinstance(labels, int) else [IGNORED_LABEL] * len(labels)
    return {**row, "labels": ignored, **({"row": NO_ROW} if "row" in row else {})}


NO_ROW = -1
"""The row number that stands for "no row left for this rank"."""


def batches_by_length(lengths: list[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """This rank's share of the row numbers to evaluate, longest first, so that batches hold little padding."""
    share = sorted(range(len(lengths)), key=lambda number: -lengths[number])[rank::world_size]
    return [share[start : start + batch_size] for start in range(0, len(share), batch_size)]


class TrainingRows(Dataset[Tokens]):
    """Tokenized rows that know their numbers, so that a run can prove which rank saw which row."""

    def __init__(self, rows: list[Tokens]) -> None:
        """`rows`: from `tokenize_rows`."""
        self.rows = rows

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Row `number`; for `NO_ROW` a row without labels: computed like any other, it adds nothing to the loss."""
        if number == NO_ROW:
            return {**without_labels(self.rows[0]), "row": NO_ROW}
        return {**self.rows[number], "row": number}


WINDOW_BATCHES = 4
"""Optimizer steps whose rows are sorted by length together: little padding, and yet other neighbours in each epoch."""


class EpochBatches(Sampler[list[int]]):
    """The row numbers of each of this rank's batches, so that every row is used once per epoch, at any world size.

    The order is drawn from seed and epoch. Within windows of it, rows are sorted by length and cut into the steps'
    batches, so that little is padded; the order of the steps is shuffled again, as going from long to short rows
    teaches less per epoch. A step's rows are the same however they are divided between ranks and micro-batches: they
    are dealt out to the ranks like cards, longest row first, so that ranks have about the same work. Every rank has
    the same number of batches; where the last ones have fewer rows than ranks, the others get `NO_ROW`. (PyTorch's and
    Accelerate's samplers repeat or drop rows there, and one device would then not see the rows that two see.)
    """

    def __init__(
        self, lengths: list[int], batch_size: int, world_size: int, rank: int, seed: int, accumulation_steps: int = 1
    ) -> None:
        """`lengths`: tokens of each row; `batch_size`: rows per rank and micro-batch."""
        self.lengths, self.batch_size, self.accumulation_steps = lengths, batch_size, accumulation_steps
        self.world_size, self.rank, self.seed = world_size, rank, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration uses."""
        self.epoch = epoch

    def steps(self) -> Iterator[list[int]]:
        """The rows of each of the epoch's optimizer steps, longest first; the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed * 10_007 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        size = self.batch_size * self.world_size * self.accumulation_steps
        in_full_steps = len(order) - len(order) % size
        for start in range(0, in_full_steps, WINDOW_BATCHES * size):
            window = self._longest_first(order[start : min(start + WINDOW_BATCHES * size, in_full_steps)])
            for number in torch.randperm(len(window) // size, generator=generator).tolist():
                yield window[number * size : (number + 1) * size]
        if in_full_steps < len(order):
            yield self._longest_first(order[in_full_steps:])

    def _longest_first(self, rows: list[int]) -> list[int]:
        return sorted(rows, key=lambda row: -self.lengths[row])  # stable: rows of one length stay in random order

    def micro_batches(self, step: list[int]) -> list[list[int]]:
        """The rows of an optimizer step that all ranks compute at once, one list for each accumulation step."""
        size = self.batch_size * self.world_size
        return [step[start : start + size] for start in range(0, len(step), size)]

    def own(self, rows: list[int]) -> list[int]:
        """This rank's share of what all compute at once."""
        return rows[self.rank :: self.world_size] or [NO_ROW]

    def global_batches(self) -> Iterator[list[int]]:
        """The rows that all ranks compute at once; the same on every rank."""
        for step in self.steps():
            yield from self.micro_batches(step)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's share of each global batch."""
        for batch in self.global_batches():
            yield self.own(batch)

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        return -(-len(self.lengths) // (self.batch_size * self.world_size))

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, of all ranks together."""
        return self.batch_size * self.world_size * self.accumulation_steps


def partition(row_count: int, parts: int, seed: int) -> list[list[int]]:
    """Row numbers in shuffled parts whose sizes differ by one at most; each row is in one part."""
    order = torch.randperm(row_count, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[part::parts] for part in range(parts)]


class PartitionedBatches(EpochBatches):
    """Batches of ranks that each draw from their own part of the rows, the same part in every epoch.

    So a machine may hold its own part alone. A step has `batch_size` rows of each part and micro-batch, however many
    ranks there are: fewer ranks than parts, say after a machine was lost, take several parts each, and their steps
    stay the same. Order and padding are those of `EpochBatches`, within each part.
    """

    def __init__(self, *args: Any, parts: int, **kwargs: Any) -> None:
        """`parts`: of the rows, at least one for each rank; the rest goes to `EpochBatches`."""
        super().__init__(*args, **kwargs)
        self.parts = partition(len(self.lengths), parts, self.seed)
        self.part_of = {row: number for number, part in enumerate(self.parts) for row in part}

    def steps(self) -> Iterator[list[int]]:
        """The rows of each of the epoch's optimizer steps, part after part; the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed * 10_007 + self.epoch)
        orders = [[part[n] for n in torch.randperm(len(part), generator=generator).tolist()] for part in self.parts]
        size = self.batch_size * self.accumulation_steps
        in_full_steps = min(map(len, orders)) // size * size
        for start in range(0, in_full_steps, WINDOW_BATCHES * size):
            end = min(start + WINDOW_BATCHES * size, in_full_steps)
            windows = [self._longest_first(order[start:end]) for order in orders]
            for number in torch.randperm((end - start) // size, generator=generator).tolist():
                yield [row for window in windows for row in window[number * size : (number + 1) * size]]
        if in_full_steps < max(map(len, orders)):
            yield [row for order in orders for row in self._longest_first(order[in_full_steps:])]

    def micro_batches(self, step: list[int]) -> list[list[int]]:
        """Of an optimizer step's rows `batch_size` of each part at once."""
        by_part: dict[int, list[int]] = {}
        for row in step:
            by_part.setdefault(self.part_of[row], []).append(row)
        starts = range(0, max(map(len, by_part.values())), self.batch_size)
        return [[row for rows in by_part.values() for row in rows[start : start + self.batch_size]] for start in starts]

    def own(self, rows: list[int]) -> list[int]:
        """Those of this rank's parts."""
        return [row for row in rows if self.part_of[row] % self.world_size == self.rank] or [NO_ROW]

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        size = self.batch_size * self.accumulation_steps
        full_steps, largest = min(map(len, self.parts)) // size, max(map(len, self.parts))
        return full_steps * self.accumulation_steps + -(-(largest - full_steps * size) // self.batch_size)

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, of all ranks together."""
        return self.batch_size * len(self.parts) * self.accumulation_steps


class EpochLoader(DataLoader):
    """A DataLoader that hands the epoch on to its batch sampler, as the Trainer tells it."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration uses."""
        self.batch_sampler.set_epoch(epoch)
