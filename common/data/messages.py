"""Rows of chat messages, or of plain text: checked, and turned into tokens with labels on what is learnt."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase as Tokenizer

from common.base.errors import BadInputError, begin_of
from common.base.paths import is_embedded
from common.base.run_config import RunConfig
from common.data.control_tokens import AS_TEXT
from common.data.files import TABLES, TEXT_FILE
from common.data.formats import Format, filled_columns, is_left_out, recognise, refuse_pictures
from common.data.pictures import check_picture_kept
from common.data.row_checks import say_once
from common.data.rows import Found, Row, RowKind, Tokens, first_tokens, is_plain, labels_in, place_of, placed, places_of
from common.data.stored_rows import batches_of, stored
from common.data.templates import check_template, encode
from common.data.tool_calls import from_text, with_calls, with_tools

TURN = "user( call( tool)+)* "
# a `call` is an assistant's message that calls tools, which may also be the last answer
CONVERSATION = re.compile(f"(system )?({TURN}assistant )*{TURN}(assistant|call)")


def row_kind(run: RunConfig) -> RowKind:
    """Return what rows of conversations or plain text are, in any of the formats of common/data/formats.py."""
    return RowKind(
        suffixes=(*TABLES, TEXT_FILE),
        holds="one JSON object with `messages` per line, or rows of another format",
        check=partial(check_messages, run=run),
        tokenize=tokenize_messages,
    )


def check_messages(found: Found, source: str, run: RunConfig) -> Iterator[Row]:
    """Yield the rows of `source`, if each is a conversation that ends with an answer, or if all are plain texts."""
    known: Format | None = None
    count, first = 0, ""
    for row, place in found:
        filled, where = filled_columns(row, place, "columns, as `messages`")
        if not run.prompt_column:
            refuse_pictures(filled, where)
        known = known or recognise(list(filled), run, where)
        row = known.convert(filled, where)
        checked = row if is_plain([row]) else check_conversation(row, where, run.train_on)
        count, first = count + 1, first or _begin_said(checked)
        yield placed(checked, place)
    if known and not is_embedded(source):
        say_once(f"{source}: read as {known}, {count:,} rows; {first}")


def _begin_said(row: Row) -> str:
    if is_plain([row]):
        return f"every token is learnt; the first begins {begin_of(row['text'], 60)!r}"
    asked = [message["content"] for message in row["messages"] if message["role"] == "user"]
    begins = f"has {len(row['messages'])} messages, and first asks" if len(asked) > 1 else "asks"
    return f"the first {begins} {begin_of(asked[0], 60)!r}"


def check_conversation(row: Row, where: str, train_on: str) -> Row:
    """Return a row with calls, facts and tools as lists, if it ends with an answer, and leaves something to learn."""
    row = {**row, "messages": [with_calls(message, where) for message in row["messages"]]}
    for message in row["messages"]:
        if not isinstance(message["content"], str):
            raise BadInputError(f"{where} has a message without a text as `content`: {begin_of(message)}; correct it.")
        if not message["content"].strip() and not message.get("tool_calls"):
            raise BadInputError(f"{where} has an empty {message['role']} message: fill or remove it.")
    turns = turns_of(row)
    if CONVERSATION.fullmatch(" ".join([*turns, "assistant"])):
        raise BadInputError(f"{where} ends with a {turns[-1]} message: an assistant's answer must be last; add one.")
    if not CONVERSATION.fullmatch(" ".join(turns)):
        raise BadInputError(
            f"{where} has messages of the roles {', '.join(map(repr, turns))}: user and assistant take turns after a "
            "system message, if any, with `tool_calls` and tool messages between them; correct it."
        )
    _check_weights(row, where, train_on)
    return with_tools(_with_facts(row, where), where)


def _check_weights(row: Row, where: str, train_on: str) -> None:
    if not any(map(is_left_out, row["messages"])):
        return
    if train_on in ("prompt", "all"):
        raise BadInputError(f"{where} has a message of weight 0, but train_on is {train_on!r}: leave one of them out.")
    answers = [message for message in row["messages"] if message["role"] == "assistant"]
    if all(map(is_left_out, answers if train_on == "assistant" else answers[-1:])):
        raise BadInputError(f"{where} has nothing to learn, as its answers have the weight 0: remove the row.")


def _with_facts(row: Row, where: str) -> Row:
    """Return the row with its `facts` as a list of texts; in a table they are such a list in JSON, or one text."""
    facts = row.get("facts", [])
    if isinstance(facts, str):
        found = from_text(facts)
        facts = found if isinstance(found, list) else [facts] if facts.strip() else []
    if not isinstance(facts, list) or not all(isinstance(fact, str) and fact for fact in facts):
        raise BadInputError(f"{where} has `facts` that are no list of texts: {begin_of(facts)}; correct them.")
    return {**row, "facts": facts} if "facts" in row else row


def turns_of(row: Row) -> list[str]:
    """Return the roles of a row's messages; an assistant's that calls tools is a `call`."""
    return ["call" if message.get("tool_calls") else message["role"] for message in row["messages"]]


def tokenize_messages(rows: Sequence[Row], tokenizer: Tokenizer, run: RunConfig) -> Sequence[Tokens]:
    """Return rows as tokens, without those that have none to learn within `max_length`."""
    if is_plain(rows):
        return tokenize_plain(rows, tokenizer, run)
    return tokens_to_learn(rows, tokenizer, run, lambda batch: encode(batch, tokenizer, run.train_on))


def tokens_to_learn(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    run: RunConfig,
    encode_rows: Callable[[list[Row]], list[Tokens]],
    is_learnt: Callable[[Tokens], object] = labels_in,
    lacking: str = "token to learn",
) -> Sequence[Tokens]:
    """Return rows as tokens, cut to `max_length`, but for those `is_learnt` is false of: they have no `lacking`."""
    without: list[Row] = []
    cut: list[Row] = []
    checked: set[tuple[str, ...]] = set()

    def learnt_rows() -> Iterator[Tokens]:
        for batch in batches_of(rows, "tokenizing"):
            for row in batch:
                turns = tuple(turns_of(row))
                if turns not in checked:
                    check_template(row, turns, tokenizer)
                    checked.add(turns)
            for row, whole in zip(batch, encode_rows(batch), strict=True):
                tokens = first_tokens(whole, run.max_length)
                is_cut = labels_in(tokens) < labels_in(whole) or len(whole.get("rejected_ids", ())) > run.max_length
                if is_cut and run.long_texts == "refuse":
                    cut.append(row)
                if "picture" in row:
                    check_picture_kept(row, whole, run.max_length, tokenizer)
                if is_learnt(tokens):
                    yield tokens
                else:
                    without.append(row)

    tokenized = stored(learnt_rows())
    if cut:
        raise BadInputError(
            f"{len(cut):,} of {len(rows):,} rows have answers that go beyond max_length, {run.max_length}, tokens "
            f"({places_of(cut)}): raise --max_length, or pass --long_texts cut."
        )
    if len(without) > run.max_truncated_fraction * len(rows):
        more = f" ({len(without)} of {len(rows)} rows have none: {places_of(without)})" if len(without) > 1 else ""
        raise BadInputError(
            f"{place_of(without[0])} has no {lacking} within its first {run.max_length} tokens{more}: raise "
            "--max_length, or pass a --max_truncated_fraction of rows that may be left out."
        )
    if without:
        found = f"{len(without):,} of {len(rows):,} rows have no {lacking} within {run.max_length} tokens"
        print(f"{found}, and are left out")
    return tokenized


def tokenize_plain(rows: Sequence[Row], tokenizer: Tokenizer, run: RunConfig) -> Sequence[Tokens]:
    """Return every text with its end token, in pieces of at most `max_length` tokens, all of which are learnt."""
    if run.train_on not in ("assistant", "all"):
        raise BadInputError(f"train_on is {run.train_on!r}, but of plain text every token is learnt: leave it out.")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def pieces() -> Iterator[Tokens]:
        for batch in batches_of(rows, "tokenizing"):
            for text in tokenizer([row["text"] for row in batch], **AS_TEXT)["input_ids"]:
                ids = [*text, *end]
                for start in range(0, len(ids), run.max_length):
                    piece = ids[start : start + run.max_length]
                    if len(piece) > 1:  # a single token predicts nothing
                        yield {"input_ids": piece, "attention_mask": [1] * len(piece), "labels": list(piece)}

    return stored(pieces())
