"""Batches of tokens: collated, sampled so that each row is seen once per epoch, and dealt out to ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from common.data.rows import (
    IGNORED_LABEL,
    NO_ROW,
    Tokens,
    without_labels,
)
from common.planning.job import BatchShape

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
