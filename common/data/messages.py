"""Rows of chat messages: checked, and turned into tokens with labels on the answers only."""

import re
from itertools import compress

from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.row_checks import shown
from common.data.rows import IGNORED_LABEL, Found, Row, RowKind, Tokens, parse_lines


def row_kind(run: RunConfig) -> RowKind:
    """Return what rows of messages are; they have no settings."""
    return RowKind(
        suffixes=(".jsonl", ".json"),
        holds="one JSON object with `messages` per line",
        advice="row of `messages`",
        parse=parse_lines,
        check=check_messages,
        tokenize=tokenize_messages,
    )


def check_messages(found: Found, source: str) -> list[Row]:
    """Return the rows of `source` as they are, if each is a conversation that ends with an answer.

    Raises:
        BadInputError: one is not; names where it stands.
    """
    return [_check_row(row, where) for row, where in found]


def _check_row(row: object, where: str) -> Row:
    if isinstance(row, dict) and "id" in row:
        where = f"{where} (id {str(row['id'])[:40]!r})"
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise BadInputError(f"{where} has no list `messages`: give it at least a user's and an assistant's message.")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise BadInputError(
                f"{where} has a message without text `role` and `content`: {str(message)[:80]}; correct it."
            )
        if not message["content"].strip():
            raise BadInputError(f"{where} has an empty {message['role']} message: fill or remove it.")
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
        raise BadInputError(
            f"{where} has messages of the roles {', '.join(map(repr, roles))}: a system message, if any, comes first, "
            "then user and assistant in turn, and an assistant's answer is the last; correct it."
        )
    facts = row.get("facts", [])
    if not isinstance(facts, list) or not all(isinstance(fact, str) and fact for fact in facts):
        raise BadInputError(
            f"{where} has `facts` that are no list of texts: {str(facts)[:80]}; correct or remove them."
        )
    return row


def question_of(row: Row) -> list[dict[str, str]]:
    """Return the messages before the last answer."""
    return row["messages"][:-1]


def answer_of(row: Row) -> str:
    """Return the last answer's text."""
    return row["messages"][-1]["content"]


def tokenize_row(row: Row, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Tokens:
    """Return one row as tokens, with labels on the assistant's answers and their end token only.

    Where the chat template marks answers (`{% generation %}`), all answers of the row are learnt; where it does not,
    the last one is: the tokens after the prompt that generation would start from.
    """
    marked = re.search(r"{%-?\s*generation", tokenizer.chat_template or "") is not None
    encoded = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=marked)
    ids = encoded["input_ids"]
    if marked:
        is_answer = encoded["assistant_masks"]
    else:
        prompt = tokenizer.apply_chat_template(question_of(row), add_generation_prompt=True, return_dict=True)
        is_answer = [position >= len(prompt["input_ids"]) for position in range(len(ids))]
    labels = [token if answer else IGNORED_LABEL for token, answer in zip(ids, is_answer, strict=True)]
    return {"input_ids": ids[:max_length], "attention_mask": [1] * len(ids[:max_length]), "labels": labels[:max_length]}


def tokenize_messages(rows: list[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> list[Tokens]:
    """Return every row as tokens; rows without a token to learn from within `max_length` are left out.

    Raises:
        BadInputError: these are more than `max_truncated_fraction` of all.
    """
    tokenized = [tokenize_row(row, tokenizer, run.max_length) for row in rows]
    learnt = [any(label != IGNORED_LABEL for label in tokens["labels"]) for tokens in tokenized]
    names = [str(row.get("id", f"number {number} of its split")) for number, row in enumerate(rows, 1)]
    without = [name for name, is_learnt in zip(names, learnt, strict=True) if not is_learnt]
    if len(without) > run.max_truncated_fraction * len(rows):
        more = f" ({len(without)} of {len(rows)} rows have none: {shown(without)})" if len(without) > 1 else ""
        raise BadInputError(
            f"Row {without[0]} has no answer token within its first {run.max_length} tokens{more}: shorten its "
            "question, raise --max_length, or pass a --max_truncated_fraction of the rows that may be left out."
        )
    if without:
        print(f"{len(without):,} of {len(rows):,} rows have no answer within {run.max_length} tokens, and are left out")
    return list(compress(tokenized, learnt))
