"""Make questions about the functions of Python's standard library: ``assets/docstrings/{train,validation,test}.jsonl``.

The answer is the first paragraph of a function's own docstring: real text, of many authors, in a form of its own. What
is in one module is in one split. The rows are those of the Python that runs this (the kept ones are of 3.11), whose
docstrings are under the licence of Python (PSF-2.0).
"""

import importlib
import inspect
import json
import random
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

SEED = 20265
OUT_DIR = Path(__file__).resolve().parent / "docstrings"
HELD_OUT = {
    "validation": ("calendar", "csv", "fractions", "heapq", "imaplib", "shutil", "statistics", "zipfile"),
    "test": ("colorsys", "difflib", "ftplib", "glob", "operator", "pathlib", "random", "textwrap", "threading"),
}
LEFT_OUT = ("antigravity", "idlelib", "lib2to3", "pydoc_data", "test", "this", "tkinter", "turtle", "turtledemo")
"""They do something when they are imported, are about themselves, or are not everywhere."""
QUESTIONS = (
    "What does {call} do?",
    "What is {call} for?",
    "Explain {call} of Python's standard library.",
    "What happens when I call {call}?",
)
SHORTEST, LONGEST = 20, 240
"""Characters of an answer."""


def first_paragraph(function: object) -> str:
    """Return the first paragraph of a docstring as one line, or an empty text where it is no sentence."""
    text = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    is_sentence = text[:1].isupper() and text.endswith(".") and text.isascii() and ">>>" not in text
    return text if is_sentence and SHORTEST <= len(text) <= LONGEST else ""


def functions_of(module_name: str) -> Iterator[tuple[str, object]]:
    """Yield name and function of what a module defines itself: its functions, and its classes' methods."""
    module = importlib.import_module(module_name)
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or getattr(value, "__module__", None) != module_name:
            continue
        if inspect.isfunction(value):
            yield f"{module_name}.{name}", value
        elif inspect.isclass(value):
            methods = ((each, vars(value)[each]) for each in sorted(vars(value)) if not each.startswith("_"))
            yield from (
                (f"{module_name}.{name}.{each}", method) for each, method in methods if inspect.isfunction(method)
            )


def rows() -> dict[str, list[dict[str, object]]]:
    """Return the rows of each split; an answer is there once."""
    choose, seen, found = random.Random(SEED), set(), {"train": [], "validation": [], "test": []}
    for module in sorted(sys.stdlib_module_names):
        if module.startswith("_") or module in LEFT_OUT or not find_spec(module):
            continue
        split = next((name for name, modules in HELD_OUT.items() if module in modules), "train")
        for name, function in functions_of(module):
            answer = first_paragraph(function)
            if not answer or answer in seen:
                continue
            seen.add(answer)
            arguments = [each for each in inspect.signature(function).parameters if each != "self"]
            question = choose.choice(QUESTIONS).format(call=f"{name}({', '.join(arguments)})")
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            found[split].append({"id": name, "messages": chat})
    choose.shuffle(found["train"])
    return found


def main() -> None:
    """Write the three files."""
    OUT_DIR.mkdir(exist_ok=True)
    with warnings.catch_warnings(action="ignore"):  # modules that will be removed
        for split, of_split in rows().items():
            lines = [json.dumps(row) + "\n" for row in of_split]
            (OUT_DIR / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
            print(f"{split}: {len(lines)} rows")


if __name__ == "__main__":
    main()
