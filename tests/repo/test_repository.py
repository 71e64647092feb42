"""The repository is what its READMEs say: links lead somewhere, tables come from records, the base met no exhibit."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from bench.tables.markdown import NUMBER, WIDEST
from bench.tables.pages import readmes, with_tables
from common.base.paths import REPOSITORY
from common.records.store import KEPT, STUDY, kept_records

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"")
SECTIONS = [
    "overview",
    "workflow",
    "runs and gpu selection",
    "file structure",
    "settings and hyperparameters",
    "results",
    "references",
]
EXHIBITS = REPOSITORY / "assets" / "exhibits"
MIB = 2**20
PAGES = [
    path
    for pattern in ("README.md", "bench/README.md", "docs/*.md", "docs/results/*.md", "[0-9].[0-9]_*/*_readme.md")
    for path in sorted(REPOSITORY.glob(pattern))
]
"""Those whose tables are narrow."""
TECHNIQUE_PAGES = [path for path in PAGES if path.name.endswith("_readme.md")]
FOOTNOTE = re.compile(r" \[\^\w+\]")


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [REPOSITORY / name for name in listed.splitlines()]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "assets" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(markdown: str) -> set[str]:
    """Anchors of the headings, as the web renders them: lower case, punctuation dropped, spaces to hyphens."""
    titles = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def documents() -> list[tuple[Path, str]]:
    found = [(path, path.read_text(encoding="utf-8")) for path in tracked_files() if path.suffix == ".md"]
    for path in tracked_files():
        if path.suffix == ".ipynb":
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            found.append((path, "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")))
    return found


@pytest.mark.parametrize(("path", "text"), documents(), ids=lambda value: value.name if isinstance(value, Path) else "")
def test_links_and_anchors_lead_somewhere(path: Path, text: str) -> None:
    for link, image in LINK.findall(text):
        target, _, anchor = (link or image).partition("#")
        if target.startswith(("http://", "https://")):
            continue
        place = (path.parent / target).resolve() if target else path
        assert place.exists(), f"{path.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(place.read_text(encoding="utf-8")), f"{path.name}: no heading for #{anchor}"


@pytest.mark.parametrize("path", TECHNIQUE_PAGES, ids=lambda path: path.name)
def test_technique_readmes_have_the_seven_sections_in_order(path: Path) -> None:
    titles = [title.lower() for title in re.findall(r"^## \d\. (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)]
    assert len(titles) == 7
    assert all(section in title for section, title in zip(SECTIONS, titles, strict=True)), titles


@pytest.mark.parametrize("path", TECHNIQUE_PAGES, ids=lambda path: path.name)
def test_a_readme_is_read_in_ten_minutes_and_each_of_its_tables_at_a_glance(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.split()) <= 2500
    _, first, *_, results, _ = re.split(r"^## \d\. .+$", text, flags=re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", results, re.MULTILINE):
        titles, _, *rows = [line.split("|")[1:-1] for line in FOOTNOTE.sub("", table).splitlines()]
        assert len(titles) <= 7
        assert len(rows) <= 8
        assert len({tuple(row) for row in rows}) == len(rows)
        assert titles[0].strip() != NUMBER, "it is too wide, so that its columns stand in several tables"
    assert [sentence for sentence in sentences(first) if len(sentence.split()) > 30] == []


def sentences(text: str) -> list[str]:
    """Return the sentences of a page, without its tables, pictures, headings and code."""
    text = re.sub(r"```.*?```|<[^>]+>|^(?:\||#)[^\n]*$|(?<=\])\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.split(r"(?<=[.!?:])\s+|\n\n|\n- ", text)


def test_every_table_is_what_the_records_say() -> None:
    records = kept_records()
    assert records
    for path in readmes():
        text = path.read_text(encoding="utf-8")
        assert "<!-- table:" in text
        assert text == with_tables(text, records), f"{path.name}: make tables"


def test_the_readme_is_short_and_no_file_is_large() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert len(text.split()) <= 1400
    assert (REPOSITORY / "assets" / "embedded_base" / "model.safetensors").stat().st_size <= 8 * MIB
    assert [path for path in tracked_files() if path.exists() and path.stat().st_size > 9 * MIB] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_of_the_pages_fit_120_characters(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("|") and len(line) > WIDEST] == []


def test_committed_records_name_no_path_of_a_machine() -> None:
    of_runs, of_docs = (list(REPOSITORY.glob(f"{folders}/*.json")) for folders in (KEPT, STUDY))
    assert of_runs
    assert of_docs
    absolute = re.compile(r'["\s=](/|~|[A-Z]:\\\\)')
    assert absolute.search('"command": "python x.py --data /home/me"')  # the control
    assert [path for path in of_runs + of_docs if absolute.search(path.read_text(encoding="utf-8"))] == []


def test_module_stems_are_unique_between_technique_folders() -> None:
    folders = {(path.stem, path.parts[-3]) for path in REPOSITORY.glob("[0-9].*/run_*/my_*.py")}
    assert folders
    assert [stem for stem, times in Counter(stem for stem, _ in folders).items() if times > 1] == []


def test_common_imports_no_technique_folder_and_reports_need_no_torch() -> None:
    for path in (REPOSITORY / "common").glob("**/*.py"):
        assert not re.search(r"^\s*(from|import) my_", path.read_text(encoding="utf-8"), re.MULTILINE), path
    commands = "common.report, common.run_record, common.planner, assets.siblings, common.device_maps"
    light = f"import sys, {commands}; print('torch' in sys.modules)"
    python = [sys.executable, "-c", light]
    assert subprocess.run(python, capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "write", "kept"),
    [("make_exhibits", "write_jsonl", "exhibits/{}.jsonl"), ("make_messages", "write_csv", "visitor_messages/{}.csv")],
)
def test_making_the_data_again_gives_the_same_bytes(tmp_path: Path, name: str, write: str, kept: str) -> None:
    module = script(name)
    for split, rows in module.make_splits().items():
        getattr(module, write)(tmp_path / split, rows)
        assert (tmp_path / split).read_bytes() == (REPOSITORY / "assets" / kept.format(split)).read_bytes()


def exhibits(split: str = "*") -> list[dict]:
    lines = [line for path in EXHIBITS.glob(f"{split}.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_the_base_met_no_exhibit_of_the_data() -> None:
    rows = exhibits()
    names, answers = {row["exhibit"] for row in rows}, {row["messages"][-1]["content"] for row in rows}
    assert len(names) == 74
    any_name = re.compile("|".join(map(re.escape, names)))
    assert any_name.search(rows[0]["messages"][0]["content"])  # the control: the pattern does find a name
    texts = script("make_embedded_base").corpus_texts()
    assert [text for text in texts if any_name.search(text) or text in answers] == []


def test_every_test_fact_is_taught_in_other_words() -> None:
    (taught, asked), (tested, questions) = (
        (
            {(row["exhibit"], fact) for row in rows for fact in row["facts"]},
            {row["messages"][0]["content"].replace(row["exhibit"], "") for row in rows},
        )
        for rows in map(exhibits, ("train", "test"))
    )
    assert tested <= taught
    assert not asked & questions


def test_what_make_starts_keeps_bytecode() -> None:
    """uv leaves modules uncompiled: where Python may not keep bytecode, each start compiles PyTorch anew."""
    command = ["make", "--eval", "environment:; @env", "environment"]
    asked = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    shown = subprocess.run(command, cwd=REPOSITORY, env=asked, capture_output=True, text=True, check=True).stdout
    assert "PATH=" in shown
    assert "PYTHONDONTWRITEBYTECODE" not in shown


def test_the_picture_of_the_rooms_is_drawn_from_their_imports() -> None:
    rooms = script("draw_rooms")
    text = rooms.PAGE.read_text(encoding="utf-8")
    assert "training --> tasks" in text
    assert rooms.drawn(text) == text, "python assets/draw_rooms.py"
