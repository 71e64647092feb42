"""Every printed line bears its rank's prefix, and nothing else about `print` changes."""

import io
import sys
from pathlib import Path

import pytest

from common.base.print_prefix import printing_with_prefix, rank_prefix


@pytest.mark.parametrize(
    ("rank", "device", "prefix"),
    [
        (1, "cuda:1", "[RANK1:GPU1]"),
        (5, "cuda:1", "[RANK5:GPU1]"),
        (0, "cpu", "[RANK0:CPU]"),
        (0, "cuda", "[RANK0:GPU0]"),
    ],
)
def test_prefix_names_rank_and_device(rank: int, device: str, prefix: str) -> None:
    assert rank_prefix(rank, device) == prefix


def test_of_several_machines_the_name_stands_in_front() -> None:
    assert rank_prefix(9, "cuda:1", "machine2") == "[machine2:RANK9:GPU1]"


def printed(capsys: pytest.CaptureFixture[str], *calls: tuple[tuple[object, ...], dict[str, object]]) -> str:
    with printing_with_prefix("[P]"):
        for objects, options in calls:
            print(*objects, **options)
    return capsys.readouterr().out


def test_every_line_gets_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, (("a\nb",), {}), ((), {}), (("c",), {})) == "[P] a\n[P] b\n[P] \n[P] c\n"


def test_sep_end_and_any_object_pass_through(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, ((1, None, [2]), {"sep": "-", "end": "!\n"})) == "[P] 1-None-[2]!\n"


def test_a_line_printed_in_pieces_gets_one_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, (("a",), {"end": ""}), (("b",), {}), (("c",), {})) == "[P] ab\n[P] c\n"


def test_an_empty_print_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, (("",), {"end": ""}), (("x",), {})) == "[P] x\n"


def test_files_are_written_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = io.StringIO()
    with printing_with_prefix("[P]"), (tmp_path / "f.txt").open("w") as file:
        print("a,b", file=file, flush=True)
        assert (tmp_path / "f.txt").read_text() == "a,b\n"
        print("c", "d", sep="", file=text)
        print("warned", file=sys.stderr)
    assert text.getvalue() == "cd\n"
    assert capsys.readouterr().err == "[P] warned\n"


def test_print_is_itself_again_afterwards_even_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    original = print
    with pytest.raises(KeyError), printing_with_prefix("[P]"):
        raise KeyError("x")
    assert print is original


def test_a_wrong_argument_is_still_a_type_error() -> None:
    with printing_with_prefix("[P]"), pytest.raises(TypeError):
        print("a", sep=3)
