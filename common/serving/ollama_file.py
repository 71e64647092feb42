"""Write a tuned model for Ollama: a GGUF file, and a Modelfile with the chat template in Go's language.

Older versions of Ollama render no Jinja, but the template of the Modelfile. What the tokenizer's template writes around
the messages of a conversation is read off what it makes of marks, and written down in the language of text/template. A
template that does more than that is refused, as the model would be asked otherwise than it was trained. How Ollama
renders `.Messages` and reads a Modelfile was taken from its source (template/template.go, parser/parser.go); the begin
token is llama.cpp's to write.
"""

import json
import re
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError, reading
from common.data.answer_ends import check_named_templates, in_time, saved_stops
from common.data.templates import begins_by_itself
from common.models.loading import read_tokenizer
from common.serving.gguf_file import write_gguf

Message = dict[str, str]
MODELFILE = "Modelfile"
ROLES = ("system", "user", "assistant")
CONTENTS = {
    "plain messages": "Who made it?",
    "messages with white space at their ends": " \n Who made it? \n ",
    "messages with thoughts": "<think>\nWho?\n</think>\n\nVance made it.",
}
"""What messages of the conversations say on which both templates must agree."""
INSTEAD = "use --to gguf, and `llama-server --jinja`, which renders the template itself"


@dataclass(frozen=True)
class Affixes:
    """What a chat template writes around the messages of a conversation.

    Attributes:
        before: Each message, by its role.
        after: Each message, by its role.
        opening: The first message, unless that is a system message.
        answer: The answer that is to come.
    """

    before: dict[str, str]
    after: dict[str, str]
    opening: str
    answer: str

    def rendered(self, messages: list[Message]) -> str:
        """Return a conversation as `go_template` writes it, up to the answer that is to come."""
        opening = "" if messages[0]["role"] == "system" else self.opening
        turns = [self.before[each["role"]] + each["content"] + self.after[each["role"]] for each in messages]
        return opening + "".join(turns) + self.answer

    def go_template(self) -> str:
        """Return the template for Ollama. Texts are Go strings, which `{{-` and `-}}` do not shorten."""
        lines = ["{{- range $i, $_ := .Messages -}}"]
        if self.opening:
            lines.append('{{- if and (eq $i 0) (ne .Role "system") -}}' + go_text(self.opening) + "{{- end -}}")
        for role in ROLES:
            condition = f'{{{{- {"if" if role == ROLES[0] else "else if"} eq .Role "{role}" -}}}}'
            lines.append(condition + go_text(self.before[role]) + "{{- .Content -}}" + go_text(self.after[role]))
        return "\n".join([*lines, "{{- end -}}", "{{- end -}}", go_text(self.answer)])


def go_text(text: str) -> str:
    """Return an action of a Go template that writes `text`, without characters that a Modelfile loses."""
    quoted = json.dumps(text, ensure_ascii=False)
    kept = "".join(each if each.isprintable() else rf"\U{ord(each):08x}" for each in quoted)
    return f"{{{{- {kept} -}}}}"


def modelfile_text(text: str) -> str:
    """Return a text as a Modelfile writes a value, which ends at the first triple quote before a line break.

    Raises:
        BadInputError: it has what a value cannot hold, or would end one.
    """
    if '"""' in text or not text.isprintable():
        raise BadInputError(
            f"Answers end with {text!r}, whose quotes, line breaks or other characters no Modelfile can hold: "
            f"{INSTEAD}."
        )
    return f'"""{text}"""'


def export_ollama(model: Path, folder: Path, weight_type: str) -> Path:
    """Write the model in the folder `model` into a new folder for `ollama create`; return that folder.

    Raises:
        BadInputError: the chat template does what no template of Ollama can, or see `write_gguf`.
    """
    tokenizer, name = read_tokenizer(model), f"model-{weight_type}.gguf"
    affixes = affixes_of(tokenizer)
    stops = saved_stops(model, tokenizer)
    stop_texts = filter(None, [*(tokenizer.decode([number]) for number in stops.token_ids), *stops.texts])
    lines = [
        f"FROM ./{name}",
        f'TEMPLATE """{affixes.go_template()}"""',  # of Go strings, in which quotes are escaped
        *(f"PARAMETER stop {modelfile_text(text)}" for text in stop_texts),
        "# as the answers of the run's scores: the likeliest token each time, whether it was said before or not",
        "PARAMETER temperature 0",
        "PARAMETER repeat_penalty 1",
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder.parent) as aside:
        made = write_gguf(model, Path(aside) / folder.name / name, weight_type).parent
        (made / MODELFILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return made.rename(folder)


def affixes_of(tokenizer: PreTrainedTokenizerBase) -> Affixes:
    """Return what a tokenizer's chat template writes around messages, after it was compared on several conversations.

    Raises:
        BadInputError: it also changes messages, writes some of them otherwise, or writes the day.
    """
    check_named_templates(tokenizer, tokenizer.name_or_path)
    if "strftime_now" in tokenizer.get_chat_template():
        raise BadInputError(f"The chat template writes the day it is used on, which is not done for Ollama: {INSTEAD}.")
    affixes = _read_off(tokenizer)
    for (what, content), has_system, turns in product(CONTENTS.items(), (False, True), (1, 3)):
        roles = [*(["system"] if has_system else []), *["user", "assistant"] * turns][: 2 * turns - 1 + has_system]
        messages = [{"role": role, "content": content} for role in roles]
        written, expected = affixes.rendered(messages), text_of(messages, tokenizer)
        if written != expected:
            raise BadInputError(
                f"The chat template does more than write texts around messages: of {what} ({', '.join(roles)}) it "
                f"makes {expected!r}, where a template for Ollama writes {written!r}. {INSTEAD.capitalize()}."
            )
    return affixes


def text_of(messages: list[Message], tokenizer: PreTrainedTokenizerBase, answer_follows: bool = True) -> str:
    """Return a conversation as a tokenizer's template writes it, less the begin token where llama.cpp adds that.

    Raises:
        BadInputError: the template does not take these turns, or leaves out the begin token.
    """
    roles = ", ".join(message["role"] for message in messages)
    what = f"A conversation of {roles}, as the chat template of {tokenizer.name_or_path} writes it,"
    with in_time(what), reading(what, f"{INSTEAD.capitalize()}."):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_follows)
    if not begins_by_itself(tokenizer):
        return text
    if not text.startswith(tokenizer.bos_token):
        raise BadInputError(
            f"The tokenizer begins texts with {tokenizer.bos_token}, but the chat template does not: Ollama would "
            f"write a token that the model was not trained with. {INSTEAD.capitalize()}."
        )
    return text.removeprefix(tokenizer.bos_token)


def _read_off(tokenizer: PreTrainedTokenizerBase) -> Affixes:
    """Divide what is written between messages; a wrong division is found when conversations are compared."""
    roles = ["system", "user", "assistant", "user"]
    marked = [{"role": role, "content": f"mark{number}"} for number, role in enumerate(roles)]
    whole = text_of(marked, tokenizer, answer_follows=False)
    between = re.split("|".join(message["content"] for message in marked), whole)
    after_answer = text_of(marked[:3], tokenizer, answer_follows=False).rpartition("mark2")[2]
    if len(between) != len(marked) + 1:
        raise BadInputError(f"The chat template leaves out a message, or writes one twice: {INSTEAD}.")
    after = {"user": between[4], "assistant": after_answer}
    before_user = between[3].removeprefix(after_answer)
    before = {"system": between[0], "user": before_user, "assistant": between[2].removeprefix(after["user"])}
    after["system"] = between[1].removesuffix(before_user)
    opening = text_of(marked[1:2], tokenizer, answer_follows=False).partition("mark1")[0].removesuffix(before_user)
    return Affixes(before, after, opening, text_of(marked, tokenizer).removeprefix(whole))
