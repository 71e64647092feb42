"""Every printed line bears its rank's prefix, and nothing else about `print` changes."""

import io
import sys
from pathlib import Path

import pytest

from common.base.print_prefix import printing_with_prefix, rank_prefix


@pytest.mark.parametrize(
    ("place", "prefix"),
    [
        ((1, "cuda:1"), "[RANK1:GPU1]"),
        ((5, "cuda:1"), "[RANK5:GPU1]"),
        ((0, "cpu"), "[RANK0:CPU]"),
        ((0, "cuda"), "[RANK0:GPU0]"),
        ((9, "cuda:1", "machine2"), "[machine2:RANK9:GPU1]"),
    ],
)
def test_prefix_names_rank_and_device(place: tuple[int | str, ...], prefix: str) -> None:
    assert rank_prefix(*place) == prefix


@pytest.mark.parametrize(
    ("calls", "printed"),
    [
        ([(("a\nb",), {}), ((), {}), (("c",), {})], "[P] a\n[P] b\n[P] \n[P] c\n"),
        ([((1, None, [2]), {"sep": "-", "end": "!\n"})], "[P] 1-None-[2]!\n"),
        ([(("a",), {"end": ""}), (("b",), {}), (("c",), {})], "[P] ab\n[P] c\n"),
        ([(("",), {"end": ""}), (("x",), {})], "[P] x\n"),
    ],
    ids=["every line", "sep, end and any object", "a line in pieces", "an empty print"],
)
def test_every_line_gets_one_prefix(
    capsys: pytest.CaptureFixture[str], calls: list[tuple[tuple[object, ...], dict[str, object]]], printed: str
) -> None:
    with printing_with_prefix("[P]"):
        for objects, options in calls:
            print(*objects, **options)
    assert capsys.readouterr().out == printed


def test_files_are_written_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = io.StringIO()
    with printing_with_prefix("[P]"), (tmp_path / "f.txt").open("w") as file:
        print("a,b", file=file, flush=True)
        assert (tmp_path / "f.txt").read_text() == "a,b\n"
        print("c", "d", sep="", file=text)
        print("warned", file=sys.stderr)
    assert text.getvalue() == "cd\n"
    assert capsys.readouterr().err == "[P] warned\n"


def test_a_wrong_argument_is_still_a_type_error_after_which_print_is_itself_again() -> None:
    original = print
    with pytest.raises(TypeError), printing_with_prefix("[P]"):
        print("a", sep=3)
    assert print is original


def test_a_quiet_rank_prints_warnings_and_errors_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with printing_with_prefix("[P]", is_quiet=True), (tmp_path / "f.txt").open("w") as file:
        print("step 1 of 3")
        print("kept", file=file)
        print("WARNING: it peaked", "record: there", sep="\n")
        print("disk is full", file=sys.stderr)
    assert capsys.readouterr() == ("[P] WARNING: it peaked\n", "[P] disk is full\n")
    assert (tmp_path / "f.txt").read_text() == "kept\n"
