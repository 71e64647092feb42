"""A workflow with several settings: one of them with its ranks, or all of them one after the other, by command.

Such a workflow has `RUN`, `SETTINGS` (the options of each, for all) and `defaults_for(technique, parallel)`, which
gives a setting's run before further overrides.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from common.base.command_line import ended_by_one_sentence, silent_if_well
from common.base.parsing import settings_parser
from common.checks.folder_runs import first_options, name_of, run_of_folder
from common.checks.inputs import check_inputs
from common.launch import run_or_launch
from common.reporting.rows import clock, own_table, results_of_this_machine
from common.runtime.launchers import ranks_command, stream_command


def run_settings_from_command_line(workflow: ModuleType) -> None:
    """Run the setting that the command line names, or with `--all` every one."""
    options, overrides = first_options(workflow.RUN).parse_known_args()
    if {"-h", "--help"} & set(overrides):
        print(help_text(workflow, options.technique, options.parallel))
        sys.exit(0)
    with ended_by_one_sentence():
        if options.all:
            sys.exit(run_all(workflow, options.quick, overrides))
        run = run_of_folder(Path(workflow.__file__).parent, sys.argv[1:])
        run_or_launch(workflow.workflow, run, os.path.relpath(workflow.__file__), sys.argv[1:])


def help_text(workflow: ModuleType, technique: str, parallel: str) -> str:
    """Return what the workflow does, its own options, and every setting, with the values of the setting they choose."""
    parser = settings_parser(
        workflow.defaults_for(technique, parallel), parents=[first_options(workflow.RUN)], conflict_handler="resolve",
        description=f"{workflow.__doc__}\nDefaults are those of --technique {technique} --parallel {parallel}.",
    )  # fmt: skip
    return parser.format_help()


def run_all(workflow: ModuleType, is_quick: bool, overrides: Sequence[str]) -> int:
    """Run every setting in processes of its own, print the table of all, and return the exit code.

    All are checked before the first one starts; one that fails then does not keep the others from running.

    Raises:
        BadInputError: a setting refuses its input; none was started.
    """
    script, failed, start_s = os.path.relpath(workflow.__file__), [], time.perf_counter()
    settings = [[*setting, *(["--quick"] if is_quick else []), *overrides] for setting in workflow.SETTINGS]
    runs = [run_of_folder(Path(workflow.__file__).parent, setting) for setting in settings]
    with silent_if_well():
        for run in runs:
            check_inputs(run)
    names = [name_of(run) for run in runs]
    for number, (setting, run, name) in enumerate(zip(settings, runs, names, strict=True), 1):
        print(
            f"\n== setting {number} of {len(runs)}: {name} ({clock(time.perf_counter() - start_s)} so far)", flush=True
        )
        try:
            stream_command(ranks_command(run, script, setting))
        except RuntimeError as failure:
            print(f"{name}: {failure}")
            failed.append(name)
    done = {(run.run_folder, name) for run, name in zip(runs, names, strict=True)}
    found = results_of_this_machine(*([runs[0].results_folder("")] if runs[0].results_root else []))
    records = [each for each in found if (each["run_folder"], each["run_name"]) in done]
    text = own_table(workflow.RUN.goal).text(records)
    print(f"\n== all settings: {clock(time.perf_counter() - start_s)}\n\n{text}")
    if failed:
        print(f"error: {len(failed)} of {len(names)} settings failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))
