"""Formats of rows: each is recognised by its columns, and turned into `messages`, or is plain text."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL.Image import Image

from common.base.errors import BadInputError, begin_of
from common.base.paths import command_here
from common.base.run_config import RunConfig
from common.base.specs import TASKS
from common.data.rows import Row, listed, place_of
from common.data.tool_calls import from_text

Message = dict[str, object]  # `role` and `content`; an assistant's may have `tool_calls` instead of a content

ROLES = {  # by the names that speakers have in ShareGPT's files, those that chat templates know
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "bot": "assistant", "model": "assistant",
    "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
QUESTIONS = ("question", "query", "prompt", "instruction", "input", "problem")
ANSWERS = ("answer", "response", "completion", "output", "solution")
WEIGHTS = ("weight", "train", "training", "loss")  # OpenAI's key for what is not learnt, and other trainers'
MESSAGES_BEGIN = re.compile(r"""\s*\[\s*\{\s*['"](role|from|content|value)['"]""")
KEPT = ("facts", "tools")  # columns of conversations that are used besides `id` and those of a format


@dataclass(frozen=True)
class Format:
    """A format by its columns in lower case; `messages` returns a row's conversation, and is None for plain text."""

    name: str
    needs: tuple[str, ...]
    messages: Callable[[Row], object] | None

    def __str__(self) -> str:
        return self.name if self.needs == (self.name,) else f"{self.name} ({', '.join(self.needs)})"

    def convert(self, row: Row, where: str) -> Row:
        """Return a filled row's `messages` or its `text`, with its `id` and `KEPT`; refuse one of another format."""
        columns = {str(name).lower(): value for name, value in row.items()}
        if missing := [name for name in self.needs if name not in columns]:
            raise BadInputError(
                f"{where} has no {missing[0]!r} (its columns: {listed(row)}), but is read as {self}: correct it."
            )
        named = {"id": str(row["id"])} if "id" in row else {}
        if self.messages is None:
            text = columns["text"]
            if not isinstance(text, str):
                raise BadInputError(f"{where} has {begin_of(text)!r} as its `text`, which is no text: correct it.")
            if not text.strip():
                raise BadInputError(f"{where} has an empty `text`, of which nothing can be learnt: leave the row out.")
            return {**named, "text": text}
        try:
            messages = self.messages(columns)
        except TypeError:  # a list where a text is expected, or the other way round
            raise BadInputError(f"{where} cannot be read as {self}: {begin_of(columns)}; correct it.") from None
        kept = {name: row[name] for name in KEPT if name in row}
        return {**named, **kept, "messages": normalised(messages, where)}


def alpaca(row: Row) -> list[Message]:
    """Return Alpaca's instruction, with its input below, as the question; earlier turns stand in `history`."""
    question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    turns = [*(from_text(row.get("history")) or []), (question, row["output"])]
    return [*system_of(row), *(message for turn in turns for message in _turn(*turn))]


def _question_and_answer(question: str, answer: str, name: str = "questions and answers") -> Format:
    return Format(name, (question, answer), lambda row: [*system_of(row), *_turn(row[question], row[answer])])


def system_of(row: Row) -> list[Message]:
    """Return the column `system` as a message, where a row has one."""
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _turn(question: object, answer: object) -> list[Message]:
    """Return both as messages, whether they are contents or lists of messages already."""
    both = (("user", question), ("assistant", answer))
    turns = (said if are_messages(said) else [{"role": role, "content": said}] for role, said in both)
    return [message for turn in turns for message in turn]


def are_messages(value: object) -> bool:
    """Return whether a value is a list of messages."""
    turns = value if isinstance(value, list) else []
    are_turns = (isinstance(each, dict) and ("role" in each or {"from", "value"} <= each.keys()) for each in turns)
    return turns != [] and all(are_turns)


def columns_of(row: object, place: str, expected: str) -> Row:
    """Return a row that has columns; refuse another, with those that are `expected`, in words."""
    if not isinstance(row, dict):
        raise BadInputError(f"{place} is {begin_of(row, 40)!r}, but should have {expected}: correct it.")
    return row


def filled_columns(row: object, place: str, expected: str) -> tuple[Row, str]:
    """Return a row's columns that are not null, with lists of messages as such, and where it stands, with its id."""
    where = place_of({**columns_of(row, place, expected), "where": place})
    return {name: value for name, value in with_lists(row, where).items() if value is not None}, where


def with_lists(row: Row, where: str) -> Row:
    """Return a row with lists of messages where columns have them as texts: JSON, or as Python writes them."""
    read = dict(row)
    for name, value in row.items():
        if str(name).lower() == "text" or not isinstance(value, str) or not value.lstrip().startswith("["):
            continue
        found = from_text(value)
        if are_messages(found):
            read[name] = found
        elif found is value and MESSAGES_BEGIN.match(value):
            raise BadInputError(
                f"{where} has messages in {name!r} as a text that is no JSON: {begin_of(value)}; save them as .jsonl."
            )
    return read


FORMATS = (  # the first whose columns are there is taken
    Format("messages", ("messages",), lambda row: row["messages"]),
    Format("ShareGPT", ("conversations",), lambda row: [*system_of(row), *row["conversations"]]),
    Format("ShareGPT", ("conversation",), lambda row: [*system_of(row), *row["conversation"]]),
    Format("Alpaca", ("instruction", "output"), alpaca),
    _question_and_answer("prompt", "completion", "prompt and completion"),
    *(_question_and_answer(question, answer) for question in QUESTIONS for answer in ANSWERS),
    Format("plain text", ("text",), None),
)
ELSEWHERE = {  # columns of rows that are for other tasks, and where to go with them
    ("prompt", "completion", "label"): "answers that were found good or bad, for which there is no technique here yet; "
    "to learn them all, rename the column label",
    **{columns: f"{task.rows_are}: go to {task.folder_for_one}" for task in TASKS.values() for columns in task.told_by},
}

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
TEXT_PARTS = ("text", "input_text", "output_text")  # types of texts in OpenAI's interfaces and in templates


def recognise(columns: Sequence[str], run: RunConfig, source: str) -> Format:
    """Return the format of a file with these columns, if `prompt_column` and `completion_column` do not say it."""
    there, names_here = [str(name).lower() for name in columns], listed(columns)
    asked = {key: getattr(run, key) for key in ("prompt_column", "completion_column")}
    for key, name in asked.items():
        if name and name.lower() not in there:
            raise BadInputError(f"{source} has no column {name!r} (there are: {names_here}): pass another --{key}.")
    if any(asked.values()):
        if not all(asked.values()):
            said = " and ".join(f"{key} is {name!r}" for key, name in asked.items())
            raise BadInputError(f"{said}: pass both (columns: {names_here}).")
        return _question_and_answer(*(name.lower() for name in asked.values()))
    for names, task in ELSEWHERE.items():
        if set(names) <= set(there) and "messages" not in there:
            raise BadInputError(f"{source} has the columns {names_here}: these are {task}.")
    for each in FORMATS:
        if set(each.needs) <= set(there):
            return each
    if len(columns) == 1:
        raise BadInputError(
            f"{source} has the column {names_here} alone: there is no column of answers; add one, or call the column "
            "text to learn its texts whole."
        )
    raise BadInputError(
        f"{source} has the columns {names_here}, which are no format that is known here (messages, conversations, "
        "instruction and output, prompt and completion, question and answer, text): name two of them with "
        "--prompt_column and --completion_column."
    )


def refuse_pictures(row: Row, where: str) -> None:
    """Refuse a row with a picture in any of its columns: its texts would be learnt as if they were about nothing."""
    for name, value in row.items():
        column = str(name).lower()
        is_named = column == "file_name" and str(value).lower().endswith(PICTURE_SUFFIXES)  # datasets' imagefolder
        if is_named or _is_picture(value) or (column in ("image", "images") and value):
            raise BadInputError(
                f"{where} has pictures in the column {name!r}: go to 3.3, which learns from them "
                f"(`{command_here('data')} FILE --task visual_questions --model MODEL` looks at its rows), or leave "
                "that column out to learn from the texts alone."
            )


def _is_picture(value: object) -> bool:
    """Return whether this is a picture as `datasets` reads it, as it stands in its Parquet files, or a list of them."""
    if isinstance(value, list):
        return any(map(_is_picture, value))
    return isinstance(value, Image) or (isinstance(value, dict) and set(value) == {"bytes", "path"})


def normalised(messages: object, where: str) -> list[Message]:
    """Return messages with `role` and `content`, whatever they were called; refuse what are none."""
    if not isinstance(messages, list) or not messages:
        raise BadInputError(f"{where} has no list of messages, but {begin_of(messages)!r}: give it such a list.")
    return [_normalised(message, where) for message in messages]


def _normalised(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise BadInputError(f"{where} has {begin_of(message)!r} for a message: give it a `role` and `content`.")
    kept = {key: part for key, part in message.items() if part is not None and key not in ("from", "value", *WEIGHTS)}
    weights = {name: message[name] for name in WEIGHTS if message.get(name) is not None}
    if odd := next((name for name, weight in weights.items() if weight not in (0, 1)), None):
        raise BadInputError(f"{where} has a message of {odd} {begin_of(weights[odd])!r}: it is 0 or 1; correct it.")
    if 0 in weights.values():
        kept["weight"] = 0
    speaker, content = str(message.get("role", message.get("from"))), message.get("content", message.get("value"))
    if speaker not in ROLES:
        roles = ", ".join(sorted(set(ROLES.values())))
        raise BadInputError(f"{where} has a message of the role {speaker!r}: rename it to one of {roles}.")
    if content is None and kept.get("tool_calls"):
        content = ""
    is_number = isinstance(content, int) and not isinstance(content, bool)
    if is_number or (isinstance(content, float) and math.isfinite(content)):
        content = str(content)  # a number for an answer; what is missing in a table of pandas is nan, and is refused
    return {**kept, "role": ROLES[speaker], "content": _joined(content, where)}


def is_left_out(message: Message) -> bool:
    """Return whether a message is read, and never learnt, as its weight says."""
    return message.get("weight") == 0


def _joined(content: object, where: str) -> object:
    """Return a list of texts, as OpenAI's interface takes them, as one text with a line for each; else `content`."""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        return content
    if other := next((part["type"] for part in content if part["type"] not in TEXT_PARTS), None):
        raise BadInputError(f"{where} has a message with a part of the type {other!r}: take out all but texts.")
    texts = [part.get("text") for part in content]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else content
