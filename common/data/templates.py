"""Chat templates: how conversations become tokens, and which of these are learnt."""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.data.pictures import with_part, with_picture_tokens, without_picture_labels
from common.data.plain_texts import is_plain, opening_ids
from common.data.rows import IGNORED_LABEL, Row, Tokens, place_of

PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
)
"""For tokenizers without a chat template, such as GPT-2's: each message on a line of its own, and the end token after
each answer. The begin token comes first where the tokenizer writes one."""

QUIET = {"verbose": False}
"""Says nothing of rows that are longer than the model reads: they are cut later."""


def with_chat_template(tokenizer: PreTrainedTokenizerBase, model: str) -> str:
    """Give a tokenizer that has no chat template the plain one; return a line that says so, else an empty one.

    Raises:
        BadInputError: the tokenizer has no end token either, so that no answer could end.
    """
    if tokenizer.chat_template is not None:
        return ""
    if tokenizer.eos_token is None:
        raise BadInputError(
            f"The tokenizer of {model} has neither a chat template nor an end token, so that no answer could end: "
            "give it a chat_template or an eos_token, or pass another --model."
        )
    tokenizer.chat_template = ("{{ bos_token }}" if begins_by_itself(tokenizer) else "") + PLAIN_TEMPLATE
    return (
        f"{model} has no chat template: rows are written as plain text, each message on a line of its own and "
        f"{tokenizer.eos_token} after each answer"
    )


def begins_by_itself(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer puts its begin token before a text that has none."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a template that marks every answer (`{% generation %}`): the tokenizer's, TRL's version of it, or None."""
    if re.search(r"{%-?\s*generation", tokenizer.chat_template):
        return tokenizer.chat_template
    from trl.chat_template_utils import get_training_chat_template  # here: it imports datasets, which takes 2 seconds

    try:
        return get_training_chat_template(tokenizer)
    except (ValueError, TemplateError):  # TRL has no version of it
        return None


def prompt_ids(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return what each row's last answer follows, or how its plain text begins: what generation starts from."""
    if is_plain(rows):
        return opening_ids(rows, tokenizer)
    return _ids([_first(row, len(row["messages"]) - 1) for row in rows], tokenizer, answer_follows=True)


def encode(rows: list[Row], tokenizer: PreTrainedTokenizerBase, train_on: str) -> list[Tokens]:
    """Return whole rows as tokens, with labels on what `train_on` names (common/base/settings.py).

    The answers are those that the template marks. Where neither it nor TRL's version of it does, they are what a row's
    answers add to the tokens of the turns before them. A row with a picture has its tokens before all texts, and its
    `picture` to make numbers of.
    """
    tokens = _encode_texts(rows, tokenizer, train_on)
    if "picture" not in rows[0]:
        return tokens
    return [
        {**without_picture_labels(each, tokenizer), "picture": row["picture"]}
        for each, row in zip(tokens, rows, strict=True)
    ]


def _encode_texts(rows: list[Row], tokenizer: PreTrainedTokenizerBase, train_on: str) -> list[Tokens]:
    marked = training_template(tokenizer) if tokenizer.is_fast else None
    if train_on == "assistant" and marked and "picture" not in rows[0]:
        return _encode_marked(rows, tokenizer, marked)
    whole = _ids(rows, tokenizer)
    if train_on == "all":
        masks = [[True] * len(ids) for ids in whole]
    else:
        prompts = map(len, prompt_ids(rows, tokenizer))
        masks = [
            [(position >= prompt) == (train_on != "prompt") for position in range(len(ids))]
            for ids, prompt in zip(whole, prompts, strict=True)
        ]
    if train_on == "assistant":
        _add_earlier_answers(masks, rows, whole, tokenizer)
    return list(map(_labelled, whole, masks))


def _encode_marked(rows: list[Row], tokenizer: PreTrainedTokenizerBase, template: str) -> list[Tokens]:
    tokens: list[Tokens] = []
    for tools, group in groupby(rows, key=lambda row: row.get("tools")):
        encoded = tokenizer.apply_chat_template(
            [row["messages"] for row in group],
            tools=tools,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs=QUIET,
        )
        tokens += map(_labelled, encoded["input_ids"], encoded["assistant_masks"])
    return tokens


def _add_earlier_answers(
    masks: list[list[bool]], rows: list[Row], whole: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Mark the answers before each row's last one, unless the whole row writes them otherwise.

    So do templates that remove earlier thoughts: what generation would have written is not in such a row.
    """
    earlier = [
        (number, turn)
        for number, row in enumerate(rows)
        for turn, message in enumerate(row["messages"][:-1])
        if message["role"] == "assistant"
    ]
    befores = _ids([_first(rows[number], turn) for number, turn in earlier], tokenizer, answer_follows=True)
    throughs = _ids([_first(rows[number], turn + 1) for number, turn in earlier], tokenizer)
    for (number, _), before, through in zip(earlier, befores, throughs, strict=True):
        start, end = len(before), len(through)
        if through[:start] == before and whole[number][:end] == through:
            masks[number][start:end] = [True] * (end - start)


def _first(row: Row, count: int) -> Row:
    """Return a row's first messages, with its tools."""
    return {**row, "messages": row["messages"][:count]}


def _ids(rows: list[Row], tokenizer: PreTrainedTokenizerBase, answer_follows: bool = False) -> list[list[int]]:
    ids: list[list[int]] = []
    for tools, group in groupby(rows, key=lambda row: row.get("tools")):
        conversations = list(group)
        encoded = tokenizer.apply_chat_template(
            [_messages(row) for row in conversations],
            tools=tools,
            add_generation_prompt=answer_follows,
            return_dict=True,
            tokenizer_kwargs=QUIET,
        )
        ids += map(partial(_whole_ids, tokenizer=tokenizer), conversations, encoded["input_ids"])
    return ids


def _messages(row: Row) -> list[dict[str, Any]]:
    return with_part(row) if "picture" in row else row["messages"]


def _whole_ids(row: Row, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return with_picture_tokens(ids, row, tokenizer) if "picture" in row else ids


def _labelled(ids: list[int], learnt: Iterable[bool | int]) -> Tokens:
    labels = [token if is_learnt else IGNORED_LABEL for token, is_learnt in zip(ids, learnt, strict=True)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


def check_template(row: Row, turns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a template that cannot write the turns of a row, or drops one.

    Raises:
        BadInputError: with where the row stands and its turns, or the message that is dropped.
    """
    template = f"The chat template of {tokenizer.name_or_path}"
    try:
        text = tokenizer.apply_chat_template(_messages(row), tools=row.get("tools"), tokenize=False)
    except TemplateError as error:  # raised for what it cannot write: an unknown role, a second system message
        raise BadInputError(
            f"{template} refuses {place_of(row)}, with the turns {', '.join(turns)} ({error}): remove such rows, or "
            "pass a --model whose template takes them."
        ) from None
    for message in row["messages"]:
        dropped = [says for says in _said(message) if says not in text]
        if dropped:
            raise BadInputError(
                f"{template} leaves out {dropped[0][:60]!r} of the {message['role']} message in {place_of(row)}: "
                "remove such messages, or pass a --model whose template writes them."
            )


def _said(message: dict[str, Any]) -> list[str]:
    """Return what a template should write of a message: names of tools, and the text unless templates rewrite it."""
    names = [call.get("function", call)["name"] for call in message.get("tool_calls") or []]
    is_rewritten = message["role"] == "tool" or "</think>" in message["content"]
    return names if is_rewritten else [*names, message["content"].strip()]
