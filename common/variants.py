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
from common.base.signals import remember_if_asked
from common.checks.folder_runs import first_options, name_of, run_of_folder
from common.checks.inputs import check_inputs
from common.launch import start
from common.reporting.rows import clock, own_tables, results_of_this_machine
from common.runtime.launchers import ranks_command, stream_command


def run_settings_from_command_line(workflow: ModuleType) -> None:
    """Run the setting that the command line names, or with `--all` every one."""
    own_options = first_options(workflow.RUN)
    options, overrides = own_options.parse_known_args()
    if {"-h", "--help"} & set(overrides):  # of what the workflow does, with the values of the setting that is named
        chosen = f"--technique {options.technique} --parallel {options.parallel}"
        parser = settings_parser(
            workflow.defaults_for(options.technique, options.parallel), parents=[own_options],
            conflict_handler="resolve", description=f"{workflow.__doc__}\nDefaults are those of {chosen}.",
        )  # fmt: skip
        parser.print_help()
        sys.exit(0)
    with ended_by_one_sentence():
        if options.all:
            sys.exit(run_all(workflow, options.quick, overrides))
        run = run_of_folder(Path(workflow.__file__).parent, sys.argv[1:])
        if run.world_size > 1 and "WORLD_SIZE" not in os.environ:  # this process is none of its ranks
            start(run, os.path.relpath(workflow.__file__), sys.argv[1:])
        remember_if_asked()
        workflow.workflow(run)


def run_all(workflow: ModuleType, is_quick: bool, overrides: Sequence[str]) -> int:
    """Run every setting in processes of its own, print the table of all, and return the exit code.

    All are checked before the first one starts; one that fails then does not keep the others from running.
    """
    start_s, failed = time.perf_counter(), []
    settings = [[*setting, *["--quick"] * is_quick, *overrides] for setting in workflow.SETTINGS]
    runs = [run_of_folder(Path(workflow.__file__).parent, setting) for setting in settings]
    with silent_if_well():
        for run in runs:
            check_inputs(run)
    for number, (run, setting) in enumerate(zip(runs, settings, strict=True), 1):
        so_far, name = clock(time.perf_counter() - start_s), name_of(run)
        print(f"\n== setting {number} of {len(runs)}: {name} ({so_far} so far)", flush=True)
        try:
            stream_command(ranks_command(run, os.path.relpath(workflow.__file__), setting))
        except RuntimeError as failure:
            print(f"{name}: {failure}")
            failed.append(name)
    done = {(run.run_folder, name_of(run)) for run in runs}
    found = results_of_this_machine(*([runs[0].results_folder("")] if runs[0].results_root else []))
    table = own_tables(workflow.RUN.goal).results_text(
        [each for each in found if (each["run_folder"], each["run_name"]) in done]
    )
    print(f"\n== all settings: {clock(time.perf_counter() - start_s)}\n\n{table}")
    if failed:
        print(f"error: {len(failed)} of {len(runs)} settings failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))
