"""What ends an answer, by the chat template: a base's tokenizer often names another end token than that writes."""

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import GENERATION_CONFIG_NAME

from common.base.errors import BadInputError, begin_of, reading

if TYPE_CHECKING:
    from transformers import GenerationConfig  # it takes seconds to import

RENDERING_S = 5  # of computing, for one conversation: thousands of times what it needs
QUESTION, ANSWER = "Who made it?", "Vance"
DEFAULT, WITH_TOOLS = "default", "tool_use"  # Transformers' names of templates for rows without tools, and with some


class _TooSlow(BaseException):
    """Raised in a chat template; what catches a template's own errors lets it pass."""


@contextmanager
def in_time(what: str) -> Iterator[None]:
    """Refuse a chat template that computes for more than `RENDERING_S` seconds; only a main thread is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDERING_S)
    try:
        yield
    except _TooSlow:
        raise BadInputError(f"{what} was not written within {RENDERING_S} seconds: correct its loops.") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


def check_named_templates(tokenizer: Tokenizer, model: str) -> None:
    """Refuse chat templates of which none is for rows without tools, or that are no texts."""
    templates = tokenizer.chat_template
    if isinstance(templates, dict) and DEFAULT not in templates:
        raise BadInputError(
            f"The tokenizer of {model} has chat templates called {', '.join(map(str, templates)) or 'nothing'}, but "
            f"none called {DEFAULT}, for rows without tools: call one so in its tokenizer_config.json."
        )
    for each in templates_in_use(tokenizer):
        if not isinstance(each, str):
            raise BadInputError(
                f"The tokenizer of {model} has {begin_of(each, 60)!r} for a chat template, which should be a text: "
                "correct its tokenizer_config.json, or pass another --model."
            )


def templates_in_use(tokenizer: Tokenizer) -> list[str]:
    """Return the templates that conversations are written with: one, or one without and one with tools."""
    templates = tokenizer.chat_template
    named = templates if isinstance(templates, dict) else {DEFAULT: templates}
    return [named[name] for name in (DEFAULT, WITH_TOOLS) if name in named]


@dataclass(frozen=True)
class AnswerEnd:
    """What a chat template writes after an answer: tokens up to the first added one, or else a text, if anything."""

    ids: list[int]
    text: str

    @property
    def token_id(self) -> int | None:
        """Return the token that ends an answer, if one does."""
        return self.ids[-1] if self.ids else None


def answer_ends(tokenizer: Tokenizer) -> list[AnswerEnd]:
    """Return what each template in use writes after an answer, unless it does not write a plain conversation."""
    has_parts, added, ends = hasattr(tokenizer, "processor"), tokenizer.added_tokens_decoder, []
    turns = [
        {"role": role, "content": [{"type": "text", "text": text}] if has_parts else text}
        for role, text in (("user", QUESTION), ("assistant", ANSWER))
    ]
    what = f"A conversation by the chat template of {tokenizer.name_or_path}"
    for template in templates_in_use(tokenizer):
        written = ""
        with in_time(what), suppress(BadInputError), reading(what):  # such as one that wants a system message
            written = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
        _, found, after = written.rpartition(ANSWER)
        ids = tokenizer(after, add_special_tokens=False)["input_ids"] if found else []
        named = (place for place, number in enumerate(ids, 1) if number in added and added[number].content.strip())
        count = next(named, None)
        if found:
            ends.append(AnswerEnd([], after.strip()) if count is None else AnswerEnd(ids[:count], ""))
    return ends


def say_ends(tokenizer: Tokenizer, model: str) -> str:
    """Return one line where answers end otherwise than by the tokenizer's end token; else an empty one."""
    ends = answer_ends(tokenizer)
    if not all(end.token_id is not None or end.text for end in ends):
        return (
            f"WARNING: the chat template of {model} writes nothing after an answer: a model cannot learn where to end; "
            "let the template write an end, such as {{ eos_token }}"
        )
    end = next((end for end in ends if end.token_id is None or end.token_id != tokenizer.eos_token_id), None)
    if end is None:
        return ""
    if end.text:
        return (
            f"{model}: answers end with the text {end.text!r}, by its chat template, which is no token: generation "
            "stops where it is written, and programs other than these need it as a stop text"
        )
    own = f"its tokenizer's end token is {tokenizer.eos_token}" if tokenizer.eos_token else "its tokenizer names none"
    name = tokenizer.convert_ids_to_tokens(end.token_id)
    return f"{model}: answers end with {name}, by its chat template ({own}): generation stops there, too"


@dataclass(frozen=True)
class Stops:
    """What generation stops at: tokens, the tokenizer's own end token first, and texts that are no token."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]

    def settings(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return what `generate` is told."""
        told = {"eos_token_id": list(self.token_ids) or None, "pad_token_id": tokenizer.pad_token_id}
        return {**told, "tokenizer": tokenizer, **({"stop_strings": list(self.texts)} if self.texts else {})}

    def cut(self, answer: str) -> str:
        """Return an answer without the text that ended it."""
        for text in self.texts:
            answer = answer.partition(text)[0]
        return answer


def stops_of(tokenizer: Tokenizer, known: int | Sequence[int] | None = None) -> Stops:
    """Return where generation stops: by tokenizer, chat template, and the `known` ids of a generation config."""
    ends = answer_ends(tokenizer)
    of_config = [known] if isinstance(known, int) else known or []
    ids = dict.fromkeys([tokenizer.eos_token_id, *(end.token_id for end in ends), *of_config])
    texts = dict.fromkeys(end.text for end in ends if end.text)
    return Stops(tuple(number for number in ids if number is not None), tuple(texts))


def saved_stops(folder: Path, tokenizer: Tokenizer) -> Stops:
    """Return where the model that was saved in a folder stops."""
    return stops_of(tokenizer, _saved_settings(folder).get("eos_token_id"))


def save_stops(folder: Path, tokenizer: Tokenizer, base: "GenerationConfig | None" = None) -> None:
    """Write the tokens that generation stops at into a folder's generation config, or a copy of the `base`'s."""
    settings = _saved_settings(folder) or (json.loads(base.to_json_string()) if base else {})
    ids = list(stops_of(tokenizer, settings.get("eos_token_id")).token_ids)
    settings["eos_token_id"] = ids[0] if len(ids) == 1 else ids or None  # with texts `generate` wants a tokenizer
    written = json.dumps(settings, indent=2, sort_keys=True) + "\n"  # as Transformers writes it
    (folder / GENERATION_CONFIG_NAME).write_text(written, encoding="utf-8")


def _saved_settings(folder: Path) -> dict[str, Any]:
    file = folder / GENERATION_CONFIG_NAME
    if not file.is_file():
        return {}
    with reading(f"{file.name} of {folder.name}", "Correct or remove it."):
        return dict(json.loads(file.read_text(encoding="utf-8")))
