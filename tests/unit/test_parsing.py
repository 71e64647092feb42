"""What a command says to a wrong option, and what its help looks like."""

import re
import sys
from collections.abc import Callable
from dataclasses import fields

import pytest

from assets import siblings
from bench import gpu_check, report, run_record
from common.base.parsing import HELP_COLUMNS, settings_parser
from common.base.run_config import RunConfig
from common.base.settings import GROUPS
from common.base.specs import PARALLELISMS
from common.checks import dry_run, planner_command, preflight

FOLDER = "2.1_lora_finetuning/run_0_cpu_x1"
SETTINGS = "3.1_text_classification/run_0_cpu_x2"


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a command, which ends with an exit code."""

    def end(code: int, main: Callable[[], object], *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        with pytest.raises(SystemExit, match=f"^{code}$"):
            main()

    return end


@pytest.mark.parametrize(
    ("main", "arguments", "meant"),
    [
        (dry_run.main, (FOLDER, "--sq-len", "9"), "--seq-len"),
        (dry_run.main, (FOLDER, "--learnin_rate", "9"), "--learning_rate"),
        (dry_run.main, (FOLDER, "--parallel", "ddpp"), "ddp"),
        (dry_run.main, (SETTINGS, "--quik"), "--quick"),
        (preflight.main, (FOLDER, "--anway"), "--anyway"),
        (preflight.main, (FOLDER, "--confg", "x.yaml"), "--config"),
        (planner_command.main, ("--modl", "x"), "--model"),
        (planner_command.main, ("--model", "x", "--tecnique", "full"), "--technique"),
        (gpu_check.main, ("--budget", "9"), "--budget_s"),
        (report.main, ("--reslts",), "--results"),
        (siblings.main, ("--chek",), "--check"),
    ],
)
def test_what_was_probably_meant_is_named_in_one_line(
    main: Callable[[], object],
    arguments: tuple[str, ...],
    meant: str,
    ends: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ends(2, main, *arguments)
    said = capsys.readouterr().err
    assert f"did you mean {meant}?" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(("option", "meant"), [("--lr", ""), ("--epoch", "--num_train_epochs"), ("somewhere", "")])
def test_nothing_is_meant_where_nothing_is_close(option: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_parser(RunConfig()).settings([option, "3"])
    said = capsys.readouterr().err
    assert ("did you mean" in said) == bool(meant)
    assert meant in said


def test_help_has_every_setting_once_in_its_group_with_its_value() -> None:
    said = settings_parser(RunConfig(learning_rate=0.0375)).format_help()
    assert max(map(len, said.splitlines())) <= HELP_COLUMNS
    places = [said.index(f"\n{group._argument_group_name}:\n") for group in GROUPS]
    assert places == sorted(places)
    for group, start, end in zip(GROUPS, places, [*places[1:], len(said)], strict=True):
        for each in fields(group):
            assert len(re.findall(rf"\n  --{each.name}\W", said[start:end])) == 1
    assert "(default: 0.0375)" in " ".join(said.split())
    assert f"--parallel {{{','.join(PARALLELISMS)}}}\n" in said
    assert "None" not in said


def test_every_command_has_help(ends: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    for module in (dry_run, preflight, planner_command, gpu_check, report, run_record, siblings):
        ends(0, module.main, "--help")
        assert "options:" in capsys.readouterr().out
