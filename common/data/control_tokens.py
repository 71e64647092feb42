"""Control tokens, such as `<|im_end|>`, in users' texts: encoded as text; what models say (`<think>`) stays a token."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.chat_template_utils import mark_control_tokens

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.row_checks import say_once
from common.data.rows import Row, place_of

AS_TEXT = {"split_special_tokens": True, "verbose": False}  # control tokens in a text are text


def control_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return what finds a control token of the tokenizer in a text, of several that begin there the longest."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    picture = getattr(getattr(tokenizer, "processor", None), "image_token", "")  # a row that has it is refused
    names = sorted({*special, *tokenizer.all_special_tokens} - {picture}, key=len, reverse=True)
    by_begin: dict[str, list[str]] = {}  # few branches where a token may begin: of thousands each would be tried
    for name in filter(str.strip, names):
        by_begin.setdefault(name[:2], []).append(re.escape(name[2:]))
    found = "|".join(f"{re.escape(begin)}(?:{'|'.join(ends)})" for begin, ends in by_begin.items())
    return re.compile(found or "(?!)")


def control_token_in(row: Row, pattern: re.Pattern[str]) -> str | None:
    """Return the first control token in a row's texts, calls and tools; None where there is none."""
    parts = [row.get(key) for key in ("messages", "rejected", "tools", "text", "summary")]
    found = next(filter(None, map(pattern.search, _texts_in(parts))), None)
    return found[0] if found else None


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_in([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from _texts_in(each)


def check_control_tokens(splits: Sequence[Sequence[Row]], tokenizer: Tokenizer, run: RunConfig) -> None:
    """Say how many rows have control tokens in their texts, or refuse them, as `control_tokens` of the run says."""
    pattern, count, total = control_tokens(tokenizer), 0, sum(map(len, splits))
    first_of: dict[str, Row] = {}
    for row in chain.from_iterable(splits):
        if token := control_token_in(row, pattern):
            count += 1
            first_of.setdefault(token, row)
    if not first_of:
        return
    token, first = next(iter(first_of.items()))
    found = f"{count:,} of {total:,} rows have control tokens in their texts (first: {token!r} in {place_of(first)})"
    if run.control_tokens == "refuse":
        raise BadInputError(f"{found}, which control_tokens refuses: take them out, or pass --control_tokens text.")
    for token, row in first_of.items():
        ids = tokenizer(token, add_special_tokens=False, **AS_TEXT)["input_ids"]
        # a model of pieces (Unigram) may have it as a piece
        if token != tokenizer.unk_token and tokenizer.convert_tokens_to_ids(token) in ids:
            raise BadInputError(
                f"{place_of(row)} has {token!r} in its texts, which this tokenizer cannot write as text: take it out."
            )
    is_chat = "text" in first and run.goal.converses
    more = "; those that a chat template has written belong into `messages`" if is_chat else ""
    say_once(f"WARNING: {found}: they are read as text (to refuse such rows, pass --control_tokens refuse){more}")


def marked(value: Any, pattern: re.Pattern[str]) -> Any:
    """Return messages or tools, keys included, with their control tokens marked, for `encode_marked_chat`."""
    if isinstance(value, dict):
        return {marked(key, pattern): marked(each, pattern) for key, each in value.items()}
    if isinstance(value, list):
        return [marked(each, pattern) for each in value]
    return mark_control_tokens(value, pattern)
