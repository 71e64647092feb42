"""Rows of chat messages: read, checked, and turned into tokens with labels on the answers only."""

import re
from itertools import pairwise
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.row_checks import shown
from common.data.rows import IGNORED_LABEL, Row, RowKind, Tokens, parse_lines, read_text

ROLES = ("system", "user", "assistant")


def row_kind(run: RunConfig) -> RowKind:
    """Rows of messages."""
    return RowKind((".jsonl", ".json"), read_messages, check_row, _tokenize)


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


def _tokenize(rows: list[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> list[Tokens]:
    return tokenize_rows(rows, tokenizer, run.max_length, run.max_truncated_fraction)


def tokenize_rows(
    rows: list[Row], tokenizer: PreTrainedTokenizerBase, max_length: int, max_truncated_fraction: float = 0.0
) -> list[Tokens]:
    """Every row of messages as tokens; rows without a token to learn from within `max_length` are left out.

    Raises:
        BadInputError: these are more than `max_truncated_fraction` of all.
    """
    tokenized = [tokenize_row(row, tokenizer, max_length) for row in rows]
    names = [str(row.get("id", f"number {number} of its split")) for number, row in enumerate(rows, 1)]
    empty = [all(label == IGNORED_LABEL for label in tokens["labels"]) for tokens in tokenized]
    without = [name for name, is_empty in zip(names, empty, strict=True) if is_empty]
    if len(without) > max_truncated_fraction * len(rows):
        more = f" ({len(without)} of {len(rows)} rows have none: {shown(without)})" if len(without) > 1 else ""
        raise BadInputError(
            f"Row {without[0]} has no answer token within its first {max_length} tokens{more}: shorten its question, "
            "raise --max_length, or pass a --max_truncated_fraction of the rows that may be left out."
        )
    if without:
        print(f"{len(without):,} of {len(rows):,} rows have no answer within {max_length} tokens, and are left out")
    return [tokens for tokens, is_empty in zip(tokenized, empty, strict=True) if not is_empty]
