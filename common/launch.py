"""Start a run folder's workflow, whatever its number of ranks: the folder that is named first, else the current one.

python -m common.launch 2.1_lora_finetuning/run_0_cpu_x1 --batch_size 8
python -m common.launch --batch_size 8

A workflow with several settings has `RUN`, `SETTINGS` (the options of each) and `defaults_for(technique, parallel)`,
and starts its ranks itself: those of one setting, or of all, one after the other.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from common.base.command_line import ended_by_one_sentence, refuse_half_a_rank, refused_in_one_sentence, silent_if_well
from common.base.parsing import parse_overrides, settings_parser
from common.base.run_config import RunConfig
from common.base.run_folders import workflows_of
from common.base.signals import remember_if_asked
from common.checks.folder_runs import first_options, import_workflow, name_of, run_of_folder
from common.checks.inputs import check_inputs
from common.reporting.rows import clock, own_table, results_of_this_machine
from common.runtime.launchers import ranks_command, stream_command


def start(run: RunConfig, script: str, overrides: Sequence[str]) -> NoReturn:
    """Check the run's input, then have its ranks' launcher, or Python, take the place of this process."""
    with silent_if_well():
        check_inputs(run)
    command = ranks_command(run, script, overrides)
    sys.stdout.flush()
    os.execv(command[0], command)


@refused_in_one_sentence()
def main() -> None:
    """Check this run folder's run, then replace this process by it; run several workflows one after the other."""
    overrides, folder = sys.argv[1:], Path.cwd()
    if overrides and not overrides[0].startswith("-"):
        folder = Path(overrides.pop(0))
    scripts = workflows_of(folder)
    workflow, first = import_workflow(scripts[0]), os.path.relpath(scripts[0])
    if hasattr(workflow, "SETTINGS"):
        os.execv(sys.executable, [sys.executable, first, *overrides])
    run = parse_overrides(workflow.RUN, overrides)
    refuse_half_a_rank()
    if len(scripts) == 1:
        start(run, first, overrides)
    with silent_if_well():
        check_inputs(run)
    run_each(scripts, run, overrides)


def run_each(scripts: Sequence[Path], run: RunConfig, overrides: Sequence[str]) -> None:
    """Run a folder's workflows one after the other, then print the table of their results."""
    for number, script in enumerate(scripts, 1):
        print(f"\n== workflow {number} of {len(scripts)}: {script.name}", flush=True)
        named = ["--run_name", f"{run.run_name}-{script.stem.rpartition('_')[2]}"] if run.run_name else []
        stream_command(ranks_command(run, os.path.relpath(script), [*overrides, *named]))
    records = results_of_this_machine(run.results_folder("").resolve())
    print(f"\n{own_table(run.goal).text(records)}")


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
    """Check all settings, run each in processes of its own, also after one fails, and print the table of all."""
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
    table = own_table(workflow.RUN.goal).text(
        [each for each in found if (each["run_folder"], each["run_name"]) in done]
    )
    print(f"\n== all settings: {clock(time.perf_counter() - start_s)}\n\n{table}")
    if failed:
        print(f"error: {len(failed)} of {len(runs)} settings failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    main()
