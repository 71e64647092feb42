"""Rows of chat messages: read and checked, turned into tokens with labels on the answers only, collated, sampled."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase

from common.run_config import REPOSITORY, BadInputError, RunConfig

IGNORED_LABEL = -100
"""Tokens with this label add nothing to the loss (PyTorch's cross-entropy)."""

ROLES = ("system", "user", "assistant")

Row = dict[str, Any]
"""One line of a data file: `id`, `messages`, and for questions with known facts `facts`."""

Tokens = dict[str, list[int]]
"""`input_ids`, `attention_mask` and `labels` of one row, without padding."""


@dataclass(frozen=True)
class Splits:
    """The rows of the three data files."""

    train: list[Row]
    validation: list[Row]
    test: list[Row]


def load_splits(run: RunConfig) -> Splits:
    """Read and check the run's data files.

    Raises:
        BadInputError: a folder, file or row is missing or malformed; names file and line.
    """
    folder = Path(run.data).expanduser()
    if not folder.exists() and not folder.is_absolute():
        folder = REPOSITORY / run.data
    if not folder.is_dir():
        raise BadInputError(
            f"The data folder {run.data} does not exist: pass --data with a folder that holds train.jsonl, "
            "validation.jsonl and test.jsonl."
        )
    train, validation, test = (read_messages(folder / f"{name}.jsonl") for name in ("train", "validation", "test"))
    return Splits(_first(train, run.train_rows), validation, _first(test, run.test_rows))


def _first(rows: list[Row], count: int) -> list[Row]:
    return rows if count < 0 else rows[:count]


def read_messages(path: Path) -> list[Row]:
    """The rows of one JSONL file.

    Raises:
        BadInputError: the file is missing or empty, or a line is no row of messages that ends with an answer.
    """
    if not path.is_file():
        raise BadInputError(f"The data file {path} does not exist: make it, one JSON object with `messages` per line.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also split at U+2028 within a text
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8.") from None
    rows = [_parse_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise BadInputError(f"The data file {path} is empty: give it at least one row of `messages`.")
    return rows


def _parse_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInputError(f"{where} is no JSON ({error.msg} at column {error.colno}): mend or remove it.") from None
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


def tokenize_rows(rows: list[Row], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Tokens]:
    """Every row as tokens.

    Raises:
        BadInputError: a row has no token to learn from within `max_length`.
    """
    tokenized = [tokenize_row(row, tokenizer, max_length) for row in rows]
    for row, tokens in zip(rows, tokenized, strict=True):
        if all(label == IGNORED_LABEL for label in tokens["labels"]):
            raise BadInputError(
                f"Row {row.get('id', '?')} has no answer token within its first {max_length} tokens: shorten its "
                "question or raise --max_length."
            )
    return tokenized


Collate = Callable[[list[Tokens]], dict[str, torch.Tensor]]


def make_collator(tokenizer: PreTrainedTokenizerBase) -> Collate:
    """Pads a batch to its longest row, on the right; padding has no attention and no label."""
    return DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED_LABEL)


NO_ROW = -1
"""The row number that stands for "no row left for this rank"."""


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
            tokens = self.rows[0]
            return {**tokens, "labels": [IGNORED_LABEL] * len(tokens["labels"]), "row": NO_ROW}
        return {**self.rows[number], "row": number}


WINDOW_BATCHES = 4
"""Global batches whose rows are sorted by length together: little padding, and yet other neighbours in each epoch."""


class EpochBatches(Sampler[list[int]]):
    """The row numbers of each of this rank's batches, so that every row is used once per epoch, at any world size.

    The order is drawn from seed and epoch. Within windows of it, rows are sorted by length and cut into global batches
    of `batch_size * world_size` rows, so that little is padded; the batches' order is shuffled again, as going from
    long to short rows teaches less per epoch. A global batch is dealt out to the ranks like cards, longest row first,
    so that ranks have about the same work. Every rank has the same number of batches; where the last global batch has
    fewer rows than ranks, the others get `NO_ROW`. (PyTorch's and Accelerate's samplers repeat or drop rows there, and
    one device would then not see the rows that two see.)
    """

    def __init__(self, lengths: list[int], batch_size: int, world_size: int, rank: int, seed: int) -> None:
        """`lengths`: tokens of each row; `batch_size`: rows per rank."""
        self.lengths, self.batch_size, self.world_size, self.rank, self.seed = (
            lengths,
            batch_size,
            world_size,
            rank,
            seed,
        )
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration uses."""
        self.epoch = epoch

    def global_batches(self) -> Iterator[list[int]]:
        """The epoch's global batches, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed * 10_007 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        size = self.batch_size * self.world_size
        in_full_batches = len(order) - len(order) % size
        for start in range(0, in_full_batches, WINDOW_BATCHES * size):
            window = order[start : min(start + WINDOW_BATCHES * size, in_full_batches)]
            window.sort(key=lambda row: -self.lengths[row])  # stable: rows of one length stay in random order
            for number in torch.randperm(len(window) // size, generator=generator).tolist():
                yield window[number * size : (number + 1) * size]
        if in_full_batches < len(order):
            yield order[in_full_batches:]

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's share of each global batch."""
        for batch in self.global_batches():
            yield sorted(batch, key=lambda row: -self.lengths[row])[self.rank :: self.world_size] or [NO_ROW]

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        return -(-len(self.lengths) // (self.batch_size * self.world_size))


class EpochLoader(DataLoader):
    """A DataLoader that hands the epoch on to its batch sampler, as the Trainer tells it."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration uses."""
        self.batch_sampler.set_epoch(epoch)
