"""Chat templates: how conversations become tokens, and which of these are learnt."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.chat_template_utils import encode_marked_chat

from common.base.errors import BadInputError, begin_of, reading
from common.data.answer_ends import answer_ends, check_named_templates, in_time, say_ends
from common.data.control_tokens import AS_TEXT, control_token_in, control_tokens, marked
from common.data.formats import is_left_out
from common.data.pictures import with_part, with_picture_tokens, without_picture_labels
from common.data.rows import IGNORED_LABEL, Row, Tokens, is_plain, opening_of, place_of
from common.data.tool_calls import with_arguments_as_text

PLAIN_TEMPLATE = (  # for tokenizers without one, such as GPT-2's: a message on each line, an end after each answer
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
)
QUIET = {"verbose": False}  # says nothing of rows that are longer than the model reads: they are cut later
REMEDY = "remove such rows, or pass a --model whose template takes them."


def with_chat_template(tokenizer: Tokenizer, model: str) -> str:
    """Give a tokenizer that has no chat template the plain one; return a line that says so, or how answers end."""
    if tokenizer.chat_template is not None:
        check_named_templates(tokenizer, model)
        return say_ends(tokenizer, model)
    if tokenizer.eos_token is None:
        raise BadInputError(f"The tokenizer of {model} has neither a chat template nor an end token: give it one.")
    tokenizer.chat_template = ("{{ bos_token }}" if begins_by_itself(tokenizer) else "") + PLAIN_TEMPLATE
    lines = f"each message on a line of its own and {tokenizer.eos_token} after each answer"
    return f"{model} has no chat template: rows are written as plain text, {lines}"


def begins_by_itself(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer puts its begin token before a text that has none."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def training_template(tokenizer: Tokenizer, template: str) -> str | None:
    """Return a template that marks every answer (`{% generation %}`): `template`, TRL's version of it, or None."""
    if re.search(r"{%-?\s*generation", template):
        return template
    from trl.chat_template_utils import get_training_chat_template  # here: it imports datasets, which takes 2 seconds

    with_one = copy(tokenizer)
    with_one.chat_template = template
    with in_time("A conversation"), suppress(BadInputError), reading("The template"):  # TRL tries it, or has none
        return get_training_chat_template(with_one)
    return None


def prompt_ids(rows: Sequence[Row], tokenizer: Tokenizer) -> list[list[int]]:
    """Return what each row's last answer follows, or how its plain text begins: what generation starts from."""
    if is_plain(rows):
        return tokenizer([opening_of(row["text"]) for row in rows], **AS_TEXT)["input_ids"]
    return _ids([_first(row, len(row["messages"]) - 1) for row in rows], tokenizer, answer_follows=True)


def encode(rows: list[Row], tokenizer: Tokenizer, train_on: str) -> list[Tokens]:
    """Return whole rows as tokens, with labels on what `train_on` names (common/base/settings.py).

    Answers are what the template, or TRL's version of it, marks; else what they add to the tokens of the turns before.
    """
    if "picture" in rows[0]:
        encoded = _encode_by_turns(rows, tokenizer, train_on)
        return [
            {**without_picture_labels(each, tokenizer), "picture": row["picture"]}
            for each, row in zip(encoded, rows, strict=True)
        ]
    if train_on != "assistant" or not tokenizer.is_fast:
        return _encode_by_turns(rows, tokenizer, train_on)
    pattern, tokens, templates = control_tokens(tokenizer), [], {}
    ends = [end.ids for end in answer_ends(tokenizer) if end.ids]
    for (tools, is_usual), group in groupby(rows, key=lambda row: (row.get("tools"), _is_usual(row, pattern))):
        own = tokenizer.get_chat_template(tools=tools)
        if own not in templates:
            templates[own] = training_template(tokenizer, own)
        if is_usual and templates[own]:
            marks = {"chat_template": templates[own], "return_assistant_tokens_mask": True}
            found = _applied(list(group), tokenizer, **marks)
            pairs = zip(found["assistant_masks"], found["input_ids"], strict=True)
            tokens += [labelled(ids, _with_ends(mask, ids, ends)) for mask, ids in pairs]
        else:
            tokens += _encode_by_turns(list(group), tokenizer, train_on, templates[own])
    return tokens


def _is_usual(row: Row, pattern: re.Pattern[str]) -> bool:
    """Return whether all answers of a row are learnt, and its texts have no control tokens."""
    return not any(map(is_left_out, row["messages"])) and control_token_in(row, pattern) is None


def _with_ends(mask: list[int], ids: list[int], ends: list[list[int]]) -> list[int]:
    """Return the mask of a row with the end of each answer, which the marks of a template may leave out."""
    last = len(mask) - mask[::-1].index(1) - 1 if 1 in mask else 0
    if any(ids[last] == end[-1] for end in ends):
        return mask
    for place in range(1, len(mask)):
        for end in ends if mask[place - 1] and not mask[place] else ():
            if ids[place : place + len(end)] == end:
                mask[place : place + len(end)] = [1] * len(end)
    return mask


def _encode_by_turns(rows: list[Row], tokenizer: Tokenizer, train_on: str, template: str | None = None) -> list[Tokens]:
    """Return whole rows as tokens; what each turn adds tells what is learnt. `template`: None = the tokenizer's own."""
    whole = _ids(rows, tokenizer, template=template)
    if train_on == "all":
        masks = [[True] * len(ids) for ids in whole]
    else:
        prompts = _ids([_first(row, len(row["messages"]) - 1) for row in rows], tokenizer, True, template)
        masks = [
            [(position >= len(prompt)) == (train_on != "prompt") for position in range(len(ids))]
            for ids, prompt in zip(whole, prompts, strict=True)
        ]
    if train_on == "assistant":
        for number, row in enumerate(rows):
            if is_left_out(row["messages"][-1]):
                masks[number] = [False] * len(whole[number])
        _add_earlier_answers(masks, rows, whole, tokenizer, template)
    return list(map(labelled, whole, masks))


def _add_earlier_answers(
    masks: list[list[bool]], rows: list[Row], whole: list[list[int]], tokenizer: Tokenizer, template: str | None
) -> None:
    """Mark earlier answers, unless their weight is 0 or the row writes them otherwise, as without their thoughts."""
    earlier = [
        (number, turn)
        for number, row in enumerate(rows)
        for turn, message in enumerate(row["messages"][:-1])
        if message["role"] == "assistant" and not is_left_out(message)
    ]
    befores = _ids([_first(rows[number], turn) for number, turn in earlier], tokenizer, True, template)
    throughs = _ids([_first(rows[number], turn + 1) for number, turn in earlier], tokenizer, template=template)
    for (number, _), before, through in zip(earlier, befores, throughs, strict=True):
        start, end = len(before), len(through)
        if through[:start] == before and whole[number][:end] == through:
            masks[number][start:end] = [True] * (end - start)


def _first(row: Row, count: int) -> Row:
    return {**row, "messages": row["messages"][:count]}


def _ids(
    rows: list[Row], tokenizer: Tokenizer, answer_follows: bool = False, template: str | None = None
) -> list[list[int]]:
    """Return what the template writes of rows, as tokens; control tokens in their texts are encoded as text."""
    ids: list[list[int]] = []
    pattern = control_tokens(tokenizer)
    groups = groupby(rows, key=lambda row: (row.get("tools"), control_token_in(row, pattern) is not None))
    for (_, has_token), group in groups:
        settings = {"add_generation_prompt": answer_follows, "chat_template": template}
        ids += _applied(list(group), tokenizer, pattern if has_token else None, **settings)["input_ids"]
    pairs = zip(ids, rows, strict=True)
    return [with_picture_tokens(each, row, tokenizer) if "picture" in row else each for each, row in pairs]


def _applied(rows: list[Row], tokenizer: Tokenizer, as_text: re.Pattern[str] | None = None, **settings: Any) -> Any:
    """Return rows that have the same tools as tokens, by the chat template; `as_text` finds what is text in them."""
    places = " to ".join(dict.fromkeys(place_of(row) for row in (rows[0], rows[-1])))
    messages, tools = [_messages(row, tokenizer) for row in rows], rows[0].get("tools")
    if as_text:
        messages, tools = marked(messages, as_text), marked(tools, as_text)
    try:
        with reading(f"{places}, as the chat template of {tokenizer.name_or_path} writes it,", REMEDY):
            if as_text:
                texts = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **settings)
                return {"input_ids": [encode_marked_chat(tokenizer, text) for text in texts]}
            return tokenizer.apply_chat_template(
                messages, tools=tools, return_dict=True, tokenizer_kwargs=QUIET, **settings
            )
    except BadInputError:
        for row in rows if len(rows) > 1 else ():
            _applied([row], tokenizer, as_text, **settings)  # names the first that cannot
        raise


def _messages(row: Row, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    messages = with_part(row) if "picture" in row else row["messages"]
    has_calls = any("tool_calls" in message for message in messages)
    if has_calls and _takes_text(tokenizer, str(tokenizer.chat_template)):
        return list(map(with_arguments_as_text, messages))
    return messages


@lru_cache(maxsize=4)
def _takes_text(tokenizer: Tokenizer, template: str) -> bool:
    """Return whether the tokenizer's `template` writes a call's arguments only where they are a text."""

    def written(arguments: object) -> str:
        call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": arguments}}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        with suppress(BadInputError), reading("The chat template"):
            return tokenizer.apply_chat_template(turns, tokenize=False)
        return ""

    arguments = {"place": "shelf"}
    of_object = written(arguments)
    takes_objects = "shelf" in of_object and str(arguments) not in of_object
    return not takes_objects and "shelf" in written(json.dumps(arguments))


def labelled(ids: list[int], learnt: Iterable[bool | int]) -> Tokens:
    """Return a row's tokens with labels on those that are `learnt`."""
    labels = [token if is_learnt else IGNORED_LABEL for token, is_learnt in zip(ids, learnt, strict=True)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


def check_template(row: Row, turns: tuple[str, ...], tokenizer: Tokenizer) -> None:
    """Refuse a template that cannot write the turns of a row in time, or drops one."""
    template = f"chat template of {tokenizer.name_or_path}"
    what = f"{place_of(row)}, with the turns {', '.join(turns)} as the {template} writes them,"
    with in_time(what), reading(what, REMEDY, "written"):  # such as an unknown role, a second system message
        text = tokenizer.apply_chat_template(_messages(row, tokenizer), tools=row.get("tools"), tokenize=False)
    for message in row["messages"]:
        if dropped := [says for says in _said(message) if says not in text]:
            raise BadInputError(
                f"The {template} leaves out {begin_of(dropped[0], 60)!r} of the {message['role']} message in "
                f"{place_of(row)}: remove such messages, or pass a --model whose template writes them."
            )


def _said(message: dict[str, Any]) -> list[str]:
    """Return what a template should write of a message: names of tools, and the text unless templates rewrite it."""
    names = [(call.get("function") or call)["name"] for call in message.get("tool_calls") or []]
    is_rewritten = message["role"] == "tool" or "</think>" in message["content"]
    return names if is_rewritten else [*names, message["content"].strip()]
