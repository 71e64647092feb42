"""Rows are found and divided, learnt on the answers only, and drawn once per epoch at any world size."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import qwen2_5_chat_template

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data import splits
from common.data.batches import (
    EpochBatches,
    PartitionedBatches,
    RepeatedBatch,
    TrainingRows,
    longest_batch,
    make_collator,
    partition,
)
from common.data.files import suffix_of
from common.data.row_checks import say_few_steps
from common.data.rows import IGNORED_LABEL, NO_ROW, Row
from common.data.splits import load_splits, tokens_of
from common.data.templates import encode, prompt_ids, training_template, with_chat_template
from common.planning.job import BatchShape
from tests.row_files import put_on_hub, refusal_of, rows_in, rows_of_file, sizes, write

ANSWER = {"role": "assistant", "content": "Me."}


def rows_of(count: int) -> list[Row]:
    return [
        {"id": f"row-{number}", "messages": [{"role": "user", "content": f"Where is {number}?"}, ANSWER]}
        for number in range(count)
    ]


# -- where rows are


def test_of_one_file_a_tenth_each_is_held_out_and_always_the_same_rows(run_config: RunConfig, tmp_path: Path) -> None:
    run = replace(run_config, data=write(tmp_path / "all.jsonl", rows_of(40)))
    first, again = load_splits(run), splits.read_splits.__wrapped__(run, tmp_path / "all.jsonl", ())
    assert (sizes(first), first.held_out) == ((32, 4, 4), True)
    assert first == again
    assert sorted(row["id"] for row in rows_in(first)) == sorted(row["id"] for row in rows_of(40))


def test_a_url_may_go_on_after_the_files_name() -> None:
    assert suffix_of("https://example.org/rows.jsonl?download=true#top") == ".jsonl"
    assert suffix_of("s3://museum/rows #1?.csv") == ".csv"


def test_rows_behind_a_url_are_read(run_config: RunConfig) -> None:
    for start, name in enumerate(("train", "val", "test")):
        write(f"memory://museum/{name}.jsonl", rows_of(9)[3 * start : 3 * start + 3 - (start == 1)])
    assert sizes(load_splits(replace(run_config, data="memory://museum"))) == (3, 2, 3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("memory://nowhere", "memory://nowhere/train.jsonl does not exist"),
        ("nosuch://museum", "cannot be read"),
        ("nobody/no-such-data", "nor a dataset on the Hub"),
        (
            "./no-such-folder",
            "The data ./no-such-folder do not exist here or in the repository: pass --data with a folder",
        ),
        ("no/such/folder", "The data no/such/folder do not exist"),
    ],
)
def test_data_that_are_nowhere_are_refused(run_config: RunConfig, data: str, said: str) -> None:
    assert said in refusal_of(replace(run_config, data=data))


ON_HUB = RunConfig(data="somebody/chats")


@pytest.mark.parametrize(
    ("found", "found_sizes", "held_out"),
    [
        ({"train": rows_of(20), "test": rows_of(25)[20:]}, (18, 2, 5), False),
        ({"train": rows_of(20)}, (16, 2, 2), True),
    ],
)
def test_a_hub_dataset_is_read_and_its_missing_splits_held_out(
    found: dict[str, list[Row]], found_sizes: tuple[int, ...], held_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(monkeypatch, **found)
    read = load_splits(ON_HUB)
    assert (sizes(read), read.held_out) == (found_sizes, held_out)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"test": rows_of(5)}, "no split 'train' (there are: test)"),
        (
            {"train": [{"words": "a", "said": "b"}]},
            "somebody/chats, train row 0 has the columns words, said, which are no format",
        ),
    ],
)
def test_a_hub_dataset_that_has_no_rows_to_learn_from_is_refused(
    found: dict[str, list[Row]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(monkeypatch, **found)
    assert said in refusal_of(ON_HUB)


def test_a_line_separator_within_a_text_does_not_end_the_row(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Who?"}, {**ANSWER, "content": "one\u2028two"}]}
    path = write(tmp_path / "train.jsonl", json.dumps(row, ensure_ascii=False) + "\r\n")
    assert rows_of_file(path, RunConfig()) == [{**row, "where": f"{path}, row 1"}]


@pytest.mark.parametrize("is_folder", [True, False])
def test_rows_are_read_once_and_again_once_their_file_has_changed(is_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    run = RunConfig(data=str(tmp_path if is_folder else path))
    write(path, rows_of(5))
    assert load_splits(run) is load_splits(run)
    write(path, rows_of(6))
    assert len(load_splits(run).train) == 4
    assert load_splits(replace(run, train_rows=2)).train == load_splits(run).train[:2]


TEXTS = {"technique": "full", "text_column": "dialogue"}


@pytest.mark.parametrize(
    ("run", "found_sizes", "different"),
    [
        (RunConfig(), (819, 82, 74), {}),
        (
            RunConfig(task="classification", data="assets/visitor_messages"),
            (1600, 400, 400),
            {"text": 2400, "label": 6},
        ),
        (
            RunConfig(task="summarization", data="assets/chat_summaries", **TEXTS),
            (1600, 160, 200),
            {"text": 1960, "summary": 1960},
        ),
    ],
    ids=["exhibits", "visitor messages", "chats"],
)
def test_the_shipped_data_have_the_promised_sizes_and_no_text_twice(
    run: RunConfig, found_sizes: tuple[int, ...], different: dict[str, int]
) -> None:
    found = load_splits(run)
    assert sizes(found) == found_sizes
    assert {column: len({row[column] for row in rows_in(found)}) for column in different} == different


# -- what is learnt

TURNS = ["Who?", "Ann.", "When?", "At noon."]
CONVERSATION = {
    "messages": [{"role": ("user", "assistant")[n % 2], "content": says} for n, says in enumerate(TURNS)],
}


def learnt(tokenizer: PreTrainedTokenizerBase, train_on: str = "assistant") -> str:
    """Return what is learnt of the conversation."""
    (tokens,) = encode([CONVERSATION], tokenizer, train_on)
    assert len(tokens["labels"]) == len(tokens["input_ids"]) == len(tokens["attention_mask"])
    return tokenizer.decode([label for label in tokens["labels"] if label != IGNORED_LABEL])


def without_marks(template: str) -> str:
    return re.sub(r"{%-? *(end)?generation *-?%}", "", template)


@pytest.mark.parametrize("marks", [True, False])
def test_what_is_learnt_of_a_row_with_several_turns(tokenizer: PreTrainedTokenizerBase, marks: bool) -> None:
    if not marks:
        tokenizer.chat_template = without_marks(tokenizer.chat_template)
        assert training_template(tokenizer, tokenizer.chat_template) is None
    end, prompt = tokenizer.eos_token, tokenizer.decode(prompt_ids([CONVERSATION], tokenizer)[0])
    assert {train_on: learnt(tokenizer, train_on) for train_on in ("assistant", "completion", "prompt", "all")} == {
        "assistant": f"Ann.{end}At noon.{end}",
        "completion": f"At noon.{end}",
        "prompt": prompt,
        "all": f"{prompt}At noon.{end}",
    }


def test_answers_that_a_template_rewrites_later_are_not_learnt(tokenizer: PreTrainedTokenizerBase) -> None:
    """As of templates that remove earlier thoughts: the tokens that generation would write are not in the row."""
    says = "message['content']"
    rewrites = f"({says} if loop.last else '(thought) ' ~ {says})"
    unmarked = without_marks(tokenizer.chat_template)
    tokenizer.chat_template = unmarked.replace(f"{{{{- {says} +", f"{{{{- {rewrites} +")
    assert "(thought) Ann." in tokenizer.apply_chat_template(CONVERSATION["messages"], tokenize=False)
    assert learnt(tokenizer) == f"At noon.{tokenizer.eos_token}"


def test_templates_that_trl_knows_are_learnt_by_its_marks(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = qwen2_5_chat_template
    assert learnt(tokenizer).replace("\n", "") == "Ann.<|im_end|>At noon.<|im_end|>"
    whole = tokenizer.apply_chat_template(CONVERSATION["messages"], return_dict=True)["input_ids"]
    assert encode([CONVERSATION], tokenizer, "assistant")[0]["input_ids"] == whole


def test_tools_are_written_into_a_row(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = qwen2_5_chat_template
    with_tools = {**CONVERSATION, "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}]}
    rows = [with_tools, CONVERSATION, with_tools]
    whole = [[row["input_ids"] for row in encode(rows, tokenizer, each)] for each in ("assistant", "completion")]
    for ids in (*whole, prompt_ids(rows, tokenizer)):
        assert ["weather" in text for text in tokenizer.batch_decode(ids)] == [True, False, True]


@pytest.mark.parametrize("start", ["<|user|>", ""])
def test_a_tokenizer_without_a_template_writes_plain_lines(tokenizer: PreTrainedTokenizerBase, start: str) -> None:
    tokenizer.chat_template, end = None, tokenizer.eos_token
    if start:
        tokenizer.bos_token = start
        begins = TemplateProcessing(f"{start} $A", special_tokens=[(start, tokenizer.bos_token_id)])
        tokenizer._tokenizer.post_processor = begins
    assert "no chat template" in with_chat_template(tokenizer, "gpt2")
    assert learnt(tokenizer) == f"Ann.{end}At noon.{end}"
    assert learnt(tokenizer, "all") == f"{start}Who?\nAnn.{end}When?\nAt noon.{end}"
    assert not with_chat_template(tokenizer, "gpt2")


def test_a_tokenizer_without_a_template_or_an_end_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = tokenizer.eos_token = None
    with pytest.raises(BadInputError, match="neither a chat template nor an end token"):
        with_chat_template(tokenizer, "gpt2")


def test_a_row_cut_before_its_answer_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(BadInputError, match="within its first 3 tokens"):
        tokens_of([CONVERSATION], tokenizer, RunConfig(max_length=3))


# -- batches

RUNS = {
    "chat": RunConfig(padding_free="no"),
    "summarization": RunConfig(task="summarization", technique="full", model="assets/embedded_summarizer"),
}


@pytest.mark.parametrize("multiple", [0, 8])
@pytest.mark.parametrize("task", RUNS)
def test_batches_are_as_long_as_is_planned_for_them(
    tokenizer: PreTrainedTokenizerBase, task: str, multiple: int
) -> None:
    """Texts and summaries are padded to the longest or to a multiple, and neither seen nor learnt there."""
    long, short = ({"input_ids": [5] * n, "attention_mask": [1] * n, "labels": [5] * n} for n in (9, 6))
    rows = [long, {**short, "labels": [5] * 3} if task == "summarization" else short]
    batch = make_collator(tokenizer, multiple=multiple)(rows)
    planned = longest_batch(rows, 2, RUNS[task]).padded_to(multiple)
    assert batch["input_ids"].shape == (planned.rows, planned.length) == (2, 16 if multiple else 9)
    assert batch["labels"].shape == (2, planned.target_length or planned.length)
    assert batch["attention_mask"].tolist() == [[1] * n + [0] * (planned.length - n) for n in (9, 6)]
    assert (batch["labels"] != IGNORED_LABEL).sum(1).tolist() == [len(row["labels"]) for row in rows]
    assert planned.padded


def test_no_row_computes_but_teaches_nothing() -> None:
    rows = TrainingRows([{"input_ids": [5, 6], "attention_mask": [1, 1], "labels": [IGNORED_LABEL, 6]}])
    assert rows[NO_ROW] == {"input_ids": [5, 6], "attention_mask": [1, 1], "labels": [IGNORED_LABEL] * 2, "row": NO_ROW}


worlds = st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.integers(0, 3), st.integers(0, 99))
"""Rows, batch size, ranks, epoch, seed."""
World = tuple[int, int, int, int, int]


def lengths_of(rows: int, seed: int) -> list[int]:
    return torch.randint(1, 50, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()


def in_epoch(epoch: int, batches: EpochBatches) -> EpochBatches:
    batches.set_epoch(epoch)
    return batches


def check_each_row_is_drawn_once(make: Callable[[int, int], EpochBatches], world: World) -> list[list[list[int]]]:
    """Return the batches of all ranks, whose steps are those of one device; `make` has the ranks, and which it is."""
    rows, _, world_size, epoch, _ = world
    ranks = [in_epoch(epoch, make(world_size, rank)) for rank in range(world_size)]
    drawn = [list(batches) for batches in ranks]
    assert {len(batches) for batches in drawn} == {len(ranks[0])}
    assert Counter(row for own in drawn for batch in own for row in batch if batch != [NO_ROW]) == Counter(range(rows))
    together = [sorted(row for batch in step for row in batch if row != NO_ROW) for step in zip(*drawn, strict=True)]
    assert together == [sorted(batch) for batch in in_epoch(epoch, make(1, 0))]
    return drawn


@given(worlds)
@settings(max_examples=200, deadline=None)
def test_every_row_is_drawn_once_per_epoch_whatever_the_world(world: World) -> None:
    rows, batch_size, world_size, _, seed = world

    def make(ranks: int, rank: int) -> EpochBatches:
        return EpochBatches(lengths_of(rows, seed), batch_size * world_size // ranks, ranks, rank, seed)

    drawn = check_each_row_is_drawn_once(make, world)
    assert all(1 <= len(batch) <= batch_size for batches in drawn for batch in batches)


def test_ranks_have_the_same_work() -> None:
    lengths = list(range(10, 26))
    ranks = [EpochBatches(lengths, 8, 2, rank, seed=0, sorted_steps=1) for rank in range(2)]
    assert len({sum(lengths[row] for batch in batches for row in batch) for batches in ranks}) == 1


@given(worlds, st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_of_what_is_measured_each_step_has_the_same_batch_on_every_rank(world: World, accumulation_steps: int) -> None:
    rows, batch_size, world_size, _, seed = world
    for rank in range(world_size):
        batches = RepeatedBatch(lengths_of(rows, seed), batch_size, world_size, rank, seed, accumulation_steps)
        assert list(batches) == [list(range(rows))] * len(batches) == [list(range(rows))] * accumulation_steps
        assert list(batches.steps()) == [list(range(rows))]


@given(worlds, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_a_steps_rows_are_the_same_however_they_are_divided(world: World, parts: int) -> None:
    rows, batch_size, world_size, epoch, seed = world
    lengths = lengths_of(rows, seed)
    divided = in_epoch(epoch, EpochBatches(lengths, batch_size, world_size, 0, seed, accumulation_steps=parts))
    whole = list(in_epoch(epoch, EpochBatches(lengths, batch_size * world_size * parts, 1, 0, seed)))
    micro_batches = list(divided.global_batches())
    assert list(divided.steps()) == whole
    assert len(micro_batches) == len(divided)
    assert list(chain(*micro_batches)) == list(chain(*whole))


@given(worlds, st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_partitions_give_each_row_once_and_the_same_steps_to_any_number_of_ranks(
    world: World, more_parts: int, accumulation_steps: int
) -> None:
    rows, batch_size, world_size, epoch, seed = world

    def make(ranks: int, rank: int) -> PartitionedBatches:
        lengths, parts = lengths_of(rows, seed), world_size * more_parts
        return PartitionedBatches(lengths, batch_size, ranks, rank, seed, accumulation_steps, parts=parts)

    drawn, first = check_each_row_is_drawn_once(make, world), in_epoch(epoch, make(world_size, 0))
    for rank, batches in enumerate(drawn):
        own = {row for part in first.parts[rank::world_size] for row in part}
        assert own == {row for batch in batches for row in batch if row != NO_ROW}
    *full, last = map(len, first.steps())
    assert set(full) <= {first.rows_per_step}
    assert last <= first.rows_per_step


def test_the_largest_batch_of_summaries_has_the_longest_text_and_the_longest_summary() -> None:
    lengths = ((9, 3), (40, 4), (30, 12), (7, 5))
    rows = [{"input_ids": [5] * text, "labels": [6] * summary} for text, summary in lengths]
    run, task = RUNS["summarization"], "summarization"
    assert longest_batch(rows, 2, run) == BatchShape(2, 40, 12, padded=True, target_length=12, task=task)
    assert longest_batch(rows[:1], 2, run) == BatchShape(1, 9, 3, target_length=3, task=task)


def test_partitions_are_shuffled_of_equal_sizes_and_follow_from_the_seed() -> None:
    parts = partition(14_732, 4, seed=42)
    assert [len(part) for part in parts] == [3_683] * 4
    assert sorted(chain(*parts)) == list(range(14_732))
    assert parts == partition(14_732, 4, seed=42) != partition(14_732, 4, seed=43)
    assert parts[0] != sorted(parts[0])
    assert [len(part) for part in partition(14, 4, seed=0)] == [4, 4, 3, 3]


def test_batches_hold_rows_of_like_lengths_in_random_order() -> None:
    lengths = [10 + number % 40 for number in range(800)]
    batches = list(EpochBatches(lengths, 16, 1, 0, seed=3))
    longest = [max(lengths[row] for row in batch) for batch in batches]
    assert sum(lengths) / sum(len(batch) * length for batch, length in zip(batches, longest, strict=True)) > 0.85
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_epochs_and_seeds_change_the_order() -> None:
    orders = [list(in_epoch(epoch, EpochBatches([1] * 50, 50, 1, 0, seed))) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert orders[0] not in orders[1:]


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [({}, ["34"]), ({"max_steps": 30}, []), ({"data": RunConfig.data}, []), ({"num_train_epochs": 34}, [])],
)
def test_few_steps_are_said_with_the_epochs_that_make_enough(settings: dict[str, object], epochs: list[str]) -> None:
    run = replace(RunConfig(data="mine.csv"), **settings)
    said = say_few_steps({"training_rows": 48}, run)
    assert re.findall(r"--num_train_epochs (\d+)", said) == epochs
    for enough in epochs:
        assert run.total_steps(48) < 100 <= replace(run, num_train_epochs=int(enough)).total_steps(48)
