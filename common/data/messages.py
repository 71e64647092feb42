"""Rows of chat messages: checked, and turned into tokens with labels on the answers only."""

import re
from functools import partial
from itertools import compress

from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.files import TABLES, parse_table
from common.data.formats import Format, recognise, refuse_pictures
from common.data.row_checks import say_once, shown
from common.data.rows import IGNORED_LABEL, Found, Row, RowKind, Tokens
from common.data.templates import check_template, encode

CONVERSATION = re.compile("(system )?user( call( tool)+)* assistant( user( call( tool)+)* assistant)*")
"""The order of turns; a `call` is an assistant's message that calls tools."""


def row_kind(run: RunConfig) -> RowKind:
    """Return what rows of conversations are, in any of the formats of common/data/formats.py."""
    return RowKind(
        suffixes=TABLES,
        holds="one JSON object with `messages` per line, or rows of another format",
        advice="row of `messages`",
        parse=parse_table,
        check=partial(check_messages, run=run),
        tokenize=tokenize_messages,
    )


def check_messages(found: Found, source: str, run: RunConfig) -> list[Row]:
    """Return the rows of `source` with `messages`, if each is a conversation that ends with an answer.

    Raises:
        BadInputError: the rows have no format that is known, or one is no conversation; names where it stands.
    """
    known: Format | None = None
    rows = []
    for row, where in found:
        if not isinstance(row, dict):
            raise BadInputError(f"{where} is {str(row)[:40]!r}, but should have columns, as `messages`: correct it.")
        if "id" in row:
            where = f"{where} (id {str(row['id'])[:40]!r})"
        filled = {name: value for name, value in row.items() if value is not None}
        if not run.prompt_column:
            refuse_pictures(filled, where)
        known = known or recognise(list(filled), run, where)
        rows.append(_check_row(known.convert(filled, where), where))
    if known and known.name != "messages":
        question = question_of(rows[0])[-1]["content"]
        say_once(f"{source}: read as {known}, {len(rows):,} rows; the first asks {question[:60]!r}")
    return rows


def _check_row(row: Row, where: str) -> Row:
    messages = row["messages"]
    for message in messages:
        if not isinstance(message["content"], str):
            raise BadInputError(f"{where} has a message without a text as `content`: {str(message)[:80]}; correct it.")
        if not message["content"].strip() and not message.get("tool_calls"):
            raise BadInputError(f"{where} has an empty {message['role']} message: fill or remove it.")
        for call in message.get("tool_calls") or []:
            if not isinstance(call, dict) or not isinstance(call.get("function", call).get("name"), str):
                raise BadInputError(
                    f"{where} has a call of a tool without a name: {str(call)[:80]}; give it "
                    "{'type': 'function', 'function': {'name': ..., 'arguments': {...}}}."
                )
    if not CONVERSATION.fullmatch(" ".join(turns_of(row))):
        raise BadInputError(
            f"{where} has messages of the roles {', '.join(repr(message['role']) for message in messages)}: a system "
            "message, if any, comes first, then user and assistant in turn, with `tool_calls` and tool messages "
            "between them, and an assistant's answer is the last; correct it."
        )
    facts = row.get("facts", [])
    if not isinstance(facts, list) or not all(isinstance(fact, str) and fact for fact in facts):
        raise BadInputError(
            f"{where} has `facts` that are no list of texts: {str(facts)[:80]}; correct or remove them."
        )
    return row


def turns_of(row: Row) -> list[str]:
    """Return the roles of a row's messages; an assistant's that calls tools is a `call`."""
    return ["call" if message.get("tool_calls") else message["role"] for message in row["messages"]]


def question_of(row: Row) -> list[dict[str, str]]:
    """Return the messages before the last answer."""
    return row["messages"][:-1]


def answer_of(row: Row) -> str:
    """Return the last answer's text."""
    return row["messages"][-1]["content"]


def first_tokens(row: Tokens, count: int) -> Tokens:
    """Return a row's first tokens, with their labels."""
    return {name: values[:count] for name, values in row.items()}


def tokenize_messages(rows: list[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> list[Tokens]:
    """Return every row as tokens; rows without a token to learn from within `max_length` are left out.

    Raises:
        BadInputError: these are more than `max_truncated_fraction` of all, or the chat template refuses a row or
            leaves out what a message says.
    """
    names = [str(row.get("id", f"number {number} of its split")) for number, row in enumerate(rows, 1)]
    check_template(rows, names, [tuple(turns_of(row)) for row in rows], tokenizer)
    tokenized = [first_tokens(row, run.max_length) for row in encode(rows, tokenizer, run.train_on)]
    learnt = [any(label != IGNORED_LABEL for label in tokens["labels"]) for tokens in tokenized]
    without = [name for name, is_learnt in zip(names, learnt, strict=True) if not is_learnt]
    if len(without) > run.max_truncated_fraction * len(rows):
        more = f" ({len(without)} of {len(rows)} rows have none: {shown(without)})" if len(without) > 1 else ""
        raise BadInputError(
            f"Row {without[0]} has no token to learn within its first {run.max_length} tokens{more}: shorten its "
            "question, raise --max_length, or pass a --max_truncated_fraction of the rows that may be left out."
        )
    if without:
        left_out = f"{len(without):,} of {len(rows):,} rows"
        print(f"{left_out} have nothing to learn within {run.max_length} tokens, and are left out")
    return list(compress(tokenized, learnt))
