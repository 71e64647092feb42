"""Batches of tokens: collated, sampled so that each row is seen once per epoch, and dealt out to ranks."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedModel,
    PreTrainedTokenizerBase as Tokenizer,
)

from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL, NO_ROW, Tokens, first_tokens, labels_in, tokens_in, without_labels
from common.data.stored_rows import take
from common.planning.job import BatchShape

Collate = Callable[[list[Tokens]], dict[str, torch.Tensor]]


def longest_batch(rows: Sequence[Tokens], batch_size: int, run: RunConfig, is_training: bool = True) -> BatchShape:
    """Return the shape of the largest batch that can come up; packed without padding with mean lengths, rounded up."""
    longest = heapq.nlargest(batch_size, rows, key=tokens_in)
    if is_training and run.is_padding_free:
        tokens, learnt = sum(map(tokens_in, longest)), sum(map(labels_in, longest))
        return BatchShape(len(longest), -(-tokens // len(longest)), -(-learnt // len(longest)))
    return replace(resolve_name(run.goal.rows)(run).shape(longest, rows), task=run.task)


def longest_first(rows: Sequence[Tokens]) -> Sequence[Tokens]:
    """Return rows by their tokens, the longest first, so that batches in this order have little padding."""
    lengths = list(map(tokens_in, rows))
    return take(rows, sorted(range(len(lengths)), key=lambda number: -lengths[number]))


def make_collator(tokenizer: Tokenizer, model: PreTrainedModel | None = None, multiple: int = 0) -> Collate:
    """Return a collator that pads batches on the right; an encoder-decoder `model` adds the decoder's inputs."""
    about = {"label_pad_token_id": IGNORED_LABEL, "pad_to_multiple_of": multiple or None}
    return DataCollatorForSeq2Seq(tokenizer, model=model, **about)


def within_budget(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the places of rows in groups of at most `max_tokens` tokens, by first fit; a longer row has its own."""
    groups: list[list[int]] = []
    room: list[int] = []
    for place, length in enumerate(lengths):
        number = next((number for number, left in enumerate(room) if left >= length), len(groups))
        if number == len(groups):
            groups.append([])
            room.append(max_tokens)
        groups[number].append(place)
        room[number] -= length
    return groups


def lay_end_to_end(rows: list[Tokens]) -> dict[str, Any]:
    """Collate rows into one, with positions and borders for attention, and no label on a row's first token."""
    numbers = {"row": torch.tensor([row["row"] for row in rows])} if "row" in rows[0] else {}
    return {**DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows), **numbers}


class TrainingRows(Dataset[Tokens]):
    """Tokenized rows that know their numbers, so that a run can prove which rank saw which row."""

    def __init__(self, rows: Sequence[Tokens]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {**(filler_like(self.rows[0]) if number == NO_ROW else self.rows[number]), "row": number}


def filler_like(row: Tokens) -> Tokens:
    """Return two tokens without labels, which add nothing to a loss; with a picture all: its tokens stay together."""
    return without_labels(row if "picture" in row else first_tokens(row, 2))


SORTED_STEPS = 4  # whose rows are sorted by length together: few, so that neighbours change by epoch


class EpochBatches(Sampler[list[int]]):
    """Draw the row numbers of this rank's batches so that every row is used once per epoch, at any world size.

    The order is drawn from seed and epoch. In windows of `sorted_steps` steps rows are sorted by length and cut into
    batches, so that little is padded; the steps are shuffled again: from long to short rows teaches less per epoch.

    A step's rows are the same for any number of ranks and micro-batches: dealt out longest first, there and back, so
    that ranks have about the same work. Where rows are fewer than ranks, the others get `NO_ROW` (PyTorch's and
    Accelerate's samplers repeat or drop rows there).
    """

    def __init__(
        self,
        lengths: list[int],
        batch_size: int,
        world_size: int,
        rank: int,
        seed: int,
        accumulation_steps: int = 1,
        sorted_steps: int = SORTED_STEPS,
    ) -> None:
        """Draw rows of these `lengths`, in tokens: `batch_size` per rank and micro-batch."""
        self.lengths, self.batch_size, self.accumulation_steps = lengths, batch_size, accumulation_steps
        self.world_size, self.rank, self.seed, self.sorted_steps = world_size, rank, seed, sorted_steps
        self.epoch = 0
        self._draw_from([list(range(len(lengths)))], batch_size * world_size)

    def _draw_from(self, parts: list[list[int]], rows_at_once: int) -> None:
        """Draw each step from all `parts` of the rows: `rows_at_once` of each for a micro-batch of all ranks."""
        self.parts, self.rows_at_once = parts, rows_at_once
        self.part_of = {row: number for number, part in enumerate(parts) for row in part}

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration uses."""
        self.epoch = epoch

    def steps(self) -> Iterator[list[int]]:
        """Yield the rows of each of the epoch's optimizer steps, part after part, each longest first."""
        generator = torch.Generator().manual_seed(self.seed * 10_007 + self.epoch)
        orders = [[part[n] for n in torch.randperm(len(part), generator=generator).tolist()] for part in self.parts]
        size = self.rows_at_once * self.accumulation_steps
        in_full_steps = min(map(len, orders)) // size * size
        for start in range(0, in_full_steps, self.sorted_steps * size):
            end = min(start + self.sorted_steps * size, in_full_steps)
            windows = [self._longest_first(order[start:end]) for order in orders]
            for number in torch.randperm((end - start) // size, generator=generator).tolist():
                yield [row for window in windows for row in window[number * size : (number + 1) * size]]
        if in_full_steps < max(map(len, orders)):
            yield [row for order in orders for row in self._longest_first(order[in_full_steps:])]

    def _longest_first(self, rows: list[int]) -> list[int]:
        return sorted(rows, key=lambda row: -self.lengths[row])  # stable: rows of one length stay in random order

    def micro_batches(self, step: list[int]) -> list[list[int]]:
        """Return the rows of an optimizer step that all ranks compute at once, one list for each accumulation step."""
        by_part = [[row for row in step if self.part_of[row] == number] for number in range(len(self.parts))]
        size = self.rows_at_once
        starts = range(0, max(map(len, by_part)), size)
        return [[row for rows in by_part for row in rows[start : start + size]] for start in starts]

    def own(self, rows: list[int]) -> list[int]:
        """Return this rank's share of the rows that all compute at once: dealt from first to last rank, and back."""
        there, back = self.rank, 2 * self.world_size - 1 - self.rank
        own = [row for place, row in enumerate(rows) if place % (2 * self.world_size) in (there, back)]
        return own or [NO_ROW]

    def global_batches(self) -> Iterator[list[int]]:
        """Yield the rows that all ranks compute at once; alike on every rank."""
        for step in self.steps():
            yield from self.micro_batches(step)

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.own, self.global_batches())

    def __len__(self) -> int:
        return math.ceil(max(map(len, self.parts)) / self.rows_at_once)  # only the last ones are not full

    @property
    def rows_per_step(self) -> int:
        """Return the rows of an optimizer step, of all ranks together."""
        return self.rows_at_once * len(self.parts) * self.accumulation_steps


def partition(row_count: int, parts: int, seed: int) -> list[list[int]]:
    """Return the row numbers in shuffled parts whose sizes differ by one at most; each row is in one part."""
    order = torch.randperm(row_count, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[part::parts] for part in range(parts)]


class PartitionedBatches(EpochBatches):
    """Draw the batches of ranks that each have their own part of the rows, so that a machine may hold that alone.

    A step has `batch_size` rows of each part: fewer ranks than parts, say after a machine was lost, take several each.
    """

    def __init__(self, *args: Any, parts: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._draw_from(partition(len(self.lengths), parts, self.seed), self.batch_size)

    def own(self, rows: list[int]) -> list[int]:
        """Return those of `rows` that are in this rank's parts."""
        return [row for row in rows if self.part_of[row] % self.world_size == self.rank] or [NO_ROW]


class RepeatedBatch(EpochBatches):
    """The same batch again and again: all rows at once, in order, on every rank; an epoch has one step."""

    def steps(self) -> Iterator[list[int]]:
        """Yield all rows."""
        yield list(range(len(self.lengths)))

    def micro_batches(self, step: list[int]) -> list[list[int]]:
        """Return the rows, once for each accumulation step."""
        return [step] * self.accumulation_steps

    def own(self, rows: list[int]) -> list[int]:
        """Return all rows."""
        return rows

    def __len__(self) -> int:
        return self.accumulation_steps
