"""Start a run folder's workflow, whatever its number of ranks: the folder that is named first, else the current one.

python -m common.launch 2.1_lora_finetuning/run_0_cpu_x1 --batch_size 8
python -m common.launch --batch_size 8
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from common.base.asked_to_save import remember_if_asked
from common.base.command_line import refuse_half_a_rank, refused_in_one_sentence, silent_if_well
from common.base.parsing import parse_overrides
from common.base.run_config import RunConfig
from common.base.run_folders import workflows_of
from common.checks.folder_runs import import_workflow
from common.checks.inputs import check_inputs
from common.reporting.rows import own_table, results_of_this_machine
from common.runtime.launchers import ranks_command, stream_command


def run_or_launch(
    workflow: Callable[[RunConfig], object], run: RunConfig, script: str, overrides: Sequence[str]
) -> None:
    """Run `workflow` as this process's rank, or, if the run asks for several and this is none, start them by torchrun.

    Raises:
        BadInputError: the run refuses its input; no rank was started.
    """
    if run.world_size > 1 and "WORLD_SIZE" not in os.environ:
        with silent_if_well():
            check_inputs(run)
        _become(run, script, overrides)
    remember_if_asked()
    workflow(run)


def _become(run: RunConfig, script: str, overrides: Sequence[str]) -> NoReturn:
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
    if hasattr(workflow, "SETTINGS"):  # it starts its ranks itself
        os.execv(sys.executable, [sys.executable, first, *overrides])
    run = parse_overrides(workflow.RUN, overrides)
    refuse_half_a_rank()
    with silent_if_well():
        check_inputs(run)
    if len(scripts) == 1:
        _become(run, first, overrides)
    run_each(scripts, run, overrides)


def run_each(scripts: Sequence[Path], run: RunConfig, overrides: Sequence[str]) -> None:
    """Run a folder's workflows one after the other, then print the table of their results."""
    for number, script in enumerate(scripts, 1):
        print(f"\n== workflow {number} of {len(scripts)}: {script.name}", flush=True)
        named = ["--run_name", f"{run.run_name}-{script.stem.rpartition('_')[2]}"] if run.run_name else []
        stream_command(ranks_command(run, os.path.relpath(script), [*overrides, *named]))
    records = results_of_this_machine(run.results_folder("").resolve())
    print(f"\n{own_table(run.goal).text(records)}")


if __name__ == "__main__":
    main()
