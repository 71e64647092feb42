"""Rows are checked with file and line, learnt on the answers only, and drawn once per epoch at any world size."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import qwen2_5_chat_template

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data import splits
from common.data.batches import EpochBatches, PartitionedBatches, TrainingRows, longest_batch, make_collator, partition
from common.data.files import read_rows
from common.data.row_checks import say_few_steps
from common.data.rows import IGNORED_LABEL, NO_ROW, Row, Tokens
from common.data.splits import load_splits, row_kind, tokens_of
from common.data.templates import encode, prompt_ids, training_template, with_chat_template
from common.models.loading import load_tokenizer
from common.planning.job import BatchShape

GOOD = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]}


def read_messages(path: Path) -> list[Row]:
    return read_rows(str(path), row_kind(RunConfig()))


def row_with(*messages: dict[str, object]) -> str:
    return json.dumps({"messages": list(messages)})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 is '[1]', but should have columns"),
        ('{"messages": []}', "line 2 has no list of messages, but '[]'"),
        (row_with({"role": "user"}), "line 2 has a message without a text as `content`"),
        (
            row_with({"role": "user", "content": "a"}, {"role": "assistant", "content": " "}),
            "line 2 has an empty assistant",
        ),
        (row_with({"role": "user", "content": "a"}), "line 2 ends with a user message"),
        (row_with({"role": "tool", "content": "a"}, GOOD["messages"][1]), "line 2 has messages of the roles 'tool', "),
        (row_with(GOOD["messages"][1], GOOD["messages"][1]), "line 2 has messages of the roles 'assistant'"),
        (
            row_with(GOOD["messages"][1], *GOOD["messages"]),
            "line 2 has messages of the roles 'assistant', 'user', 'assistant': ",
        ),
        (
            row_with(GOOD["messages"][0], {"role": "system", "content": "a"}, GOOD["messages"][1]),
            "line 2 has messages of the roles 'user', 'system', 'assistant': ",
        ),
        (json.dumps({**GOOD, "facts": 5}), "line 2 has `facts` that are no list of texts"),
    ],
)
def test_a_malformed_row_is_refused_with_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(BadInputError, match=r"train\.jsonl") as refused:
        read_messages(path)
    assert said in str(refused.value)


def rows_of(count: int) -> list[dict]:
    answer = GOOD["messages"][-1]
    return [
        {"id": f"row-{number}", "messages": [{"role": "user", "content": f"Where is {number}?"}, answer]}
        for number in range(count)
    ]


def ids(rows: list[dict]) -> set[str]:
    return {row["id"] for row in rows}


def test_of_one_file_a_tenth_each_is_held_out_and_always_the_same_rows(run_config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(40)))
    first, again = (load_splits(replace(run_config, data=str(path))) for _ in range(2))
    assert [len(split) for split in (first.train, first.validation, first.test)] == [32, 4, 4]
    assert first == again
    assert first.held_out
    assert ids(first.train) | ids(first.validation) | ids(first.test) == ids(rows_of(40))


def test_an_id_that_stands_twice_in_one_file_is_refused_by_its_lines_there(
    run_config: RunConfig, tmp_path: Path
) -> None:
    path, rows = tmp_path / "all.jsonl", rows_of(40)
    rows[29]["id"] = rows[3]["id"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadInputError, match=r"stands twice \(.*all\.jsonl, line 4, 30\)"):
        load_splits(replace(run_config, data=str(path)))


def test_a_url_may_go_on_after_the_files_name(run_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("common.data.splits.read_rows", lambda source, kind: asked.append(source) or rows_of(9))
    run = replace(run_config, data="https://example.org/rows.jsonl?download=true", validation_rows=1, test_rows=1)
    splits = load_splits(run)
    assert asked == [run.data]
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (7, 1, 1)


def test_rows_behind_a_url_are_read(run_config: RunConfig) -> None:
    folder = fsspec.filesystem("memory")
    for start, name in ((0, "train"), (3, "validation"), (6, "test")):
        folder.pipe(
            f"/museum/{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows_of(9)[start : start + 3]).encode()
        )
    assert len(load_splits(replace(run_config, data="memory://museum")).test) == 3
    with pytest.raises(BadInputError, match=r"memory://nowhere/train\.jsonl does not exist"):
        load_splits(replace(run_config, data="memory://nowhere"))
    with pytest.raises(BadInputError, match="cannot be read"):
        load_splits(replace(run_config, data="nosuch://museum"))


def test_a_hub_dataset_is_read_and_its_missing_splits_held_out(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(run_config, data="somebody/chats")
    found = DatasetDict({"train": Dataset.from_list(rows_of(20)), "test": Dataset.from_list(rows_of(25)[20:])})
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: found)
    splits = load_splits(run)
    assert [len(split) for split in (splits.train, splits.validation, splits.test)] == [18, 2, 5]
    assert not splits.held_out, "its test rows are its own"
    alone = DatasetDict({"train": Dataset.from_list(rows_of(20))})
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: alone)
    assert load_splits(run).held_out
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: DatasetDict({"test": found["test"]}))
    with pytest.raises(BadInputError, match=r"no split 'train' \(there are: test\)"):
        load_splits(run)
    wrong = Dataset.from_list([{"words": "a", "said": "b"}])
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: DatasetDict({"train": wrong}))
    with pytest.raises(
        BadInputError, match="somebody/chats, train row 0 has the columns words, said, which are no format"
    ):
        load_splits(run)


def test_data_that_are_nowhere_are_refused(run_config: RunConfig) -> None:
    with pytest.raises(BadInputError, match="nor a dataset on the Hub"):
        load_splits(replace(run_config, data="nobody/no-such-data"))
    with pytest.raises(BadInputError, match="do not exist"):
        load_splits(replace(run_config, data="./no-such-folder"))


def test_a_line_separator_within_a_text_does_not_end_the_row(tmp_path: Path) -> None:
    answer = "one\u2028two"
    row = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": answer}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_messages(tmp_path / "train.jsonl") == [{**row, "where": f"{tmp_path / 'train.jsonl'}, line 1"}]


def test_missing_empty_and_undecodable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="does not exist"):
        read_messages(tmp_path / "train.jsonl")
    (tmp_path / "train.jsonl").write_text("\n \n")
    with pytest.raises(BadInputError, match="is empty"):
        read_messages(tmp_path / "train.jsonl")
    (tmp_path / "train.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(BadInputError, match="not UTF-8"):
        read_messages(tmp_path / "train.jsonl")


@pytest.mark.parametrize("is_folder", [True, False])
def test_rows_are_read_once_and_again_once_their_file_has_changed(
    is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=splits.read_rows)
    monkeypatch.setattr(splits, "read_rows", read)
    path = tmp_path / "train.csv"
    path.write_text("question,answer\n" + "".join(f"{number}?,{number}.\n" for number in range(5)))
    run = RunConfig(data=str(tmp_path if is_folder else path))
    assert load_splits(run) is load_splits(run)
    assert read.call_count == 1
    path.write_text(path.read_text() + "5?,5.\n")
    assert len(load_splits(run).train) == 4
    assert load_splits(replace(run, train_rows=2)).train == load_splits(run).train[:2]


def test_a_missing_data_folder_is_refused(run_config: RunConfig) -> None:
    with pytest.raises(BadInputError, match="The data no/such/folder do not exist"):
        load_splits(replace(run_config, data="no/such/folder"))


def test_the_shipped_data_have_the_promised_sizes(run_config: RunConfig) -> None:
    splits = load_splits(run_config)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (819, 82, 74)


def test_labels_stand_on_the_answer_and_its_end_only(run_config: RunConfig) -> None:
    tokenizer = load_tokenizer(run_config)
    row = load_splits(run_config).train[0]
    (tokens,) = encode([row], tokenizer, "assistant")
    assert learnt(tokens, tokenizer) == row["messages"][-1]["content"] + tokenizer.eos_token
    assert len(tokens["labels"]) == len(tokens["input_ids"]) == len(tokens["attention_mask"])


TURNS = ["Who?", "Ann.", "When?", "At noon."]
CONVERSATION = {
    "messages": [{"role": ("user", "assistant")[n % 2], "content": says} for n, says in enumerate(TURNS)],
}


def learnt(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.decode([label for label in tokens["labels"] if label != IGNORED_LABEL])


def without_marks(template: str) -> str:
    return re.sub(r"{%-? *(end)?generation *-?%}", "", template)


@pytest.mark.parametrize("marks", [True, False])
def test_what_is_learnt_of_a_row_with_several_turns(run_config: RunConfig, marks: bool) -> None:
    tokenizer = load_tokenizer(run_config)
    if not marks:
        tokenizer.chat_template = without_marks(tokenizer.chat_template)
        assert training_template(tokenizer) is None
    end, found = tokenizer.eos_token, {}
    for train_on in ("assistant", "completion", "prompt", "all"):
        (tokens,) = encode([CONVERSATION], tokenizer, train_on)
        found[train_on] = learnt(tokens, tokenizer)
    assert found["assistant"] == f"Ann.{end}At noon.{end}"
    assert found["completion"] == f"At noon.{end}"
    assert found["prompt"] == tokenizer.decode(prompt_ids([CONVERSATION], tokenizer)[0])
    assert found["all"] == found["prompt"] + found["completion"]


def test_answers_that_a_template_rewrites_later_are_not_learnt(run_config: RunConfig) -> None:
    """As of templates that remove earlier thoughts: the tokens that generation would write are not in the row."""
    tokenizer = load_tokenizer(run_config)
    says = "message['content']"
    rewrites = f"({says} if loop.last else '(thought) ' ~ {says})"
    unmarked = without_marks(tokenizer.chat_template)
    tokenizer.chat_template = unmarked.replace(f"{{{{- {says} +", f"{{{{- {rewrites} +")
    assert "(thought) Ann." in tokenizer.apply_chat_template(CONVERSATION["messages"], tokenize=False)
    (tokens,) = encode([CONVERSATION], tokenizer, "assistant")
    assert learnt(tokens, tokenizer) == f"At noon.{tokenizer.eos_token}"


def test_templates_that_trl_knows_are_learnt_by_its_marks(run_config: RunConfig) -> None:
    tokenizer = load_tokenizer(run_config)
    tokenizer.chat_template = qwen2_5_chat_template
    (tokens,) = encode([CONVERSATION], tokenizer, "assistant")
    assert learnt(tokens, tokenizer).replace("\n", "") == "Ann.<|im_end|>At noon.<|im_end|>"
    whole = tokenizer.apply_chat_template(CONVERSATION["messages"], return_dict=True)["input_ids"]
    assert tokens["input_ids"] == whole


def test_tools_are_written_into_a_row(run_config: RunConfig) -> None:
    tokenizer = load_tokenizer(run_config)
    tokenizer.chat_template = qwen2_5_chat_template
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    rows = [{**CONVERSATION, "tools": tools}, CONVERSATION, {**CONVERSATION, "tools": tools}]
    for train_on in ("assistant", "completion"):
        texts = [tokenizer.decode(tokens["input_ids"]) for tokens in encode(rows, tokenizer, train_on)]
        assert ["weather" in text for text in texts] == [True, False, True]
    assert ["weather" in tokenizer.decode(ids) for ids in prompt_ids(rows, tokenizer)] == [True, False, True]


@pytest.mark.parametrize("begins", [True, False])
def test_a_tokenizer_without_a_template_writes_plain_lines(run_config: RunConfig, begins: bool) -> None:
    tokenizer = load_tokenizer(run_config)
    tokenizer.chat_template = None
    if begins:
        tokenizer.bos_token = "<|user|>"
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            "<|user|> $A", special_tokens=[("<|user|>", tokenizer.bos_token_id)]
        )
    assert "no chat template" in with_chat_template(tokenizer, "gpt2")
    (tokens,) = encode([CONVERSATION], tokenizer, "assistant")
    end = tokenizer.eos_token
    assert learnt(tokens, tokenizer) == f"Ann.{end}At noon.{end}"
    start = "<|user|>" * begins
    assert tokenizer.decode(tokens["input_ids"]) == f"{start}Who?\nAnn.{end}When?\nAt noon.{end}"
    assert not with_chat_template(tokenizer, "gpt2")
    tokenizer.chat_template = tokenizer.eos_token = None
    with pytest.raises(BadInputError, match="neither a chat template nor an end token"):
        with_chat_template(tokenizer, "gpt2")


def test_a_row_cut_before_its_answer_is_refused(run_config: RunConfig) -> None:
    with pytest.raises(BadInputError, match="within its first 3 tokens"):
        tokens_of(load_splits(run_config).train[:1], load_tokenizer(run_config), replace(run_config, max_length=3))


def test_padding_is_neither_seen_nor_learnt(run_config: RunConfig) -> None:
    tokenizer = load_tokenizer(run_config)
    rows = tokens_of(load_splits(run_config).train[:8], tokenizer, run_config)
    batch = make_collator(tokenizer)(rows)
    lengths = [len(row["input_ids"]) for row in rows]
    assert batch["input_ids"].shape == (8, max(lengths))
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED_LABEL).all()


RUNS = {
    "chat": RunConfig(padding_free="no"),
    "summarization": RunConfig(task="summarization", technique="full", model="assets/embedded_summarizer"),
}


@pytest.mark.parametrize("task", ["chat", "summarization"])
def test_batches_are_as_long_as_is_planned_for_them(run_config: RunConfig, task: str) -> None:
    """With a multiple, texts and summaries are padded to it, and neither seen nor learnt there."""
    tokenizer, row = load_tokenizer(run_config), {"input_ids": [5] * 9, "attention_mask": [1] * 9, "labels": [5] * 9}
    rows = [row, {**row, "labels": [5] * 3}] if task == "summarization" else [row] * 2
    batch = make_collator(tokenizer, multiple=8)(rows)
    planned = longest_batch(rows, 2, RUNS[task]).padded_to(8)
    assert batch["input_ids"].shape == (planned.rows, planned.length) == (2, 16)
    assert batch["labels"].shape == (2, planned.target_length or planned.length)
    assert batch["attention_mask"].sum(1).tolist() == [9, 9]
    assert (batch["labels"] != IGNORED_LABEL).sum(1).tolist() == [len(row["labels"]) for row in rows]
    assert planned.padded
    assert planned.padded_to(0) == planned


def test_no_row_computes_but_teaches_nothing() -> None:
    rows = TrainingRows([{"input_ids": [5, 6], "attention_mask": [1, 1], "labels": [IGNORED_LABEL, 6]}])
    assert rows[NO_ROW] == {"input_ids": [5, 6], "attention_mask": [1, 1], "labels": [IGNORED_LABEL] * 2, "row": NO_ROW}


worlds = st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.integers(0, 3), st.integers(0, 99))


@given(worlds)
@settings(max_examples=200, deadline=None)
def test_every_row_is_drawn_once_per_epoch_whatever_the_world(world: tuple[int, int, int, int, int]) -> None:
    rows, batch_size, world_size, epoch, seed = world
    lengths = torch.randint(1, 50, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
    ranks = [EpochBatches(lengths, batch_size, world_size, rank, seed) for rank in range(world_size)]
    for batches in ranks:
        batches.set_epoch(epoch)
    drawn = [list(batches) for batches in ranks]
    assert len({len(batches) for batches in drawn}) == 1
    assert len(drawn[0]) == len(ranks[0])
    assert all(1 <= len(batch) <= batch_size for batches in drawn for batch in batches)
    real = Counter(row for batches in drawn for batch in batches for row in batch if batch != [NO_ROW])
    assert real == Counter(range(rows))
    one_device = EpochBatches(lengths, batch_size * world_size, 1, 0, seed)
    one_device.set_epoch(epoch)
    for step, batch in enumerate(one_device):
        together = [row for batches in drawn for row in batches[step] if row != NO_ROW]
        assert sorted(together) == sorted(batch)


def test_ranks_have_the_same_work() -> None:
    lengths = list(range(10, 26))
    ranks = [EpochBatches(lengths, 8, 2, rank, seed=0, sorted_steps=1) for rank in range(2)]
    tokens = [sum(lengths[row] for batch in batches for row in batch) for batches in ranks]
    assert tokens[0] == tokens[1]


@given(worlds)
@settings(max_examples=50, deadline=None)
def test_each_rank_knows_the_rows_of_all_in_a_step(world: tuple[int, int, int, int, int]) -> None:
    rows, batch_size, world_size, epoch, seed = world
    ranks = [EpochBatches([9] * rows, batch_size, world_size, rank, seed) for rank in range(world_size)]
    for batches in ranks:
        batches.set_epoch(0)
        batches.rows_of_step(0)
        batches.set_epoch(epoch)
    steps_before = epoch * len(ranks[0])
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        together = sorted(row for batch in of_ranks for row in batch if row != NO_ROW)
        assert all(sorted(batches.rows_of_step(steps_before + step)) == together for batches in ranks)


@given(worlds, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_a_steps_rows_are_the_same_however_they_are_divided(world: tuple[int, int, int, int, int], parts: int) -> None:
    rows, batch_size, world_size, epoch, seed = world
    lengths = torch.randint(1, 50, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
    divided = EpochBatches(lengths, batch_size, world_size, 0, seed, accumulation_steps=parts)
    whole = EpochBatches(lengths, batch_size * world_size * parts, 1, 0, seed)
    for batches in (divided, whole):
        batches.set_epoch(epoch)
    assert list(divided.steps()) == list(whole)
    micro_batches = list(divided.global_batches())
    assert len(micro_batches) == len(divided)
    assert [row for batch in micro_batches for row in batch] == [row for batch in whole for row in batch]


@given(worlds, st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_partitions_give_each_row_once_and_the_same_steps_to_any_number_of_ranks(
    world: tuple[int, int, int, int, int], more_parts: int, accumulation_steps: int
) -> None:
    rows, batch_size, world_size, epoch, seed = world
    parts = world_size * more_parts
    lengths = torch.randint(1, 50, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()

    def batches_of(ranks: int, rank: int) -> PartitionedBatches:
        made = PartitionedBatches(lengths, batch_size, ranks, rank, seed, accumulation_steps, parts=parts)
        made.set_epoch(epoch)
        return made

    ranks = [batches_of(world_size, rank) for rank in range(world_size)]
    drawn = [list(batches) for batches in ranks]
    assert {len(batches) for batches in drawn} == {len(ranks[0])}
    real = Counter(row for batches in drawn for batch in batches for row in batch if batch != [NO_ROW])
    assert real == Counter(range(rows))
    for number, one_device in enumerate(batches_of(1, 0)):
        together = [row for batches in drawn for row in batches[number] if row != NO_ROW]
        assert sorted(together) == sorted(one_device)
    for rank, batches in enumerate(drawn):
        own = {row for part in ranks[0].parts[rank::world_size] for row in part}
        assert own == {row for batch in batches for row in batch if row != NO_ROW}
    steps = list(ranks[0].steps())
    assert all(len(step) <= ranks[0].rows_per_step for step in steps)
    assert all(len(step) == ranks[0].rows_per_step for step in steps[:-1])


def test_the_largest_batch_of_summaries_has_the_longest_text_and_the_longest_summary() -> None:
    lengths = ((9, 3), (40, 4), (30, 12), (7, 5))
    rows = [{"input_ids": [5] * text, "labels": [6] * summary} for text, summary in lengths]
    run, task = RUNS["summarization"], "summarization"
    assert longest_batch(rows, 2, run) == BatchShape(2, 40, 12, padded=True, target_length=12, task=task)
    assert longest_batch(rows[:1], 2, run) == BatchShape(1, 9, 3, target_length=3, task=task)


def test_partitions_are_shuffled_of_equal_sizes_and_follow_from_the_seed() -> None:
    parts = partition(14_732, 4, seed=42)
    assert [len(part) for part in parts] == [3_683] * 4
    assert sorted(row for part in parts for row in part) == list(range(14_732))
    assert parts == partition(14_732, 4, seed=42) != partition(14_732, 4, seed=43)
    assert parts[0] != sorted(parts[0])
    assert [len(part) for part in partition(14, 4, seed=0)] == [4, 4, 3, 3]


def test_batches_hold_rows_of_like_lengths_in_random_order() -> None:
    lengths = [10 + number % 40 for number in range(800)]
    batches = list(EpochBatches(lengths, 16, 1, 0, seed=3))
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
    assert sum(lengths) / padded > 0.85
    longest = [max(lengths[row] for row in batch) for batch in batches]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_epochs_and_seeds_change_the_order() -> None:
    first, other_seed = EpochBatches([1] * 50, 50, 1, 0, seed=1), EpochBatches([1] * 50, 50, 1, 0, seed=2)
    order = list(first)
    first.set_epoch(1)
    assert list(first) != order
    assert list(other_seed) != order


@pytest.mark.parametrize(
    ("rows", "settings", "epochs"),
    [
        (48, {}, 34),
        (48, {"max_steps": 30}, None),
        (48, {"data": RunConfig.data}, None),
        (48, {"num_train_epochs": 34}, None),
    ],
)
def test_few_steps_are_said_with_the_epochs_that_make_enough(
    rows: int, settings: dict[str, object], epochs: int | None
) -> None:
    run = replace(RunConfig(data="mine.csv"), **settings)
    said = say_few_steps({"training_rows": rows}, run)
    assert re.findall(r"--num_train_epochs (\d+)", said) == ([str(epochs)] if epochs else [])
    if epochs:
        assert run.total_steps(rows) < 100 <= replace(run, num_train_epochs=epochs).total_steps(rows)


@pytest.mark.parametrize(
    ("facts", "read"), [("copper", ["copper"]), ('["copper", "red"]', ["copper", "red"]), ("", [])]
)
def test_facts_of_a_table_are_one_text_or_a_list_in_json(facts: str, read: list[str], tmp_path: Path) -> None:
    rows = [{**GOOD, "facts": facts, "id": str(number)} for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_splits(RunConfig(data=str(tmp_path / "rows.jsonl"))).train[0]["facts"] == read
