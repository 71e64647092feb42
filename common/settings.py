"""A workflow with several settings: one of them with its ranks, or all of them one after the other, by command.

Such a workflow has `RUN`, `SETTINGS` (the options of each, for all) and `defaults_for(technique, parallel)`, which
gives a setting's run before further overrides.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

from common.data import Splits, load_splits
from common.launch import (
    check_inputs,
    ended_by_one_sentence,
    literal_file_of,
    ranks_command,
    run_or_launch,
    stream_command,
)
from common.report import results_of_this_machine
from common.report_classification import results_text
from common.report_rows import clock
from common.run_config import CLASSIFIED_WITH, REPOSITORY, RunConfig, parse_overrides
from common.run_record import default_run_name
from common.siblings import read_literal, read_lora

QUICK_SHARE = 10
"""`--quick` takes the first of so many rows each."""
MICRO_BATCHES = 8
"""With PP, unless `--micro_batches` says another number."""


def setting_of(run: RunConfig, lora: dict[str, object], technique: str, parallel: str) -> RunConfig:
    """The folder's `run`, which is full fine-tuning with DDP, in another setting: every step has the same rows."""
    changes: dict[str, object] = {"technique": technique, "parallel": parallel}
    if technique == "lora":
        changes |= lora
    if parallel != "ddp":  # ranks have no rows of their own: one of them gets the whole batch
        changes["batch_size"] = run.batch_size * run.devices
    if parallel == "single":
        changes["devices"] = 1
    if parallel == "pp":  # as many layers on each stage: balanced by memory, the embeddings' stage would get few to do
        changes |= {"micro_batches": MICRO_BATCHES, "device_map": "even"}
    return replace(run, **changes)


def setting_of_folder(folder: Path, technique: str, parallel: str) -> RunConfig:
    """The same of a run folder, read from its literals: nothing of a workflow is imported."""
    workflow = literal_file_of(folder)
    return setting_of(read_literal(workflow), read_lora(workflow), technique, parallel)


def run_of_folder(folder: Path, arguments: Sequence[str]) -> RunConfig:
    """The run that a folder's workflow would take with these arguments, for those who look ahead: nothing is imported.

    `folder` is named from here or from the repository's root.

    Raises:
        BadInputError: it is no run folder, or a value is out of range.
    """
    folder = folder if folder.is_dir() else REPOSITORY / folder
    workflow = literal_file_of(folder)
    if not read_lora(workflow):
        return parse_overrides(read_literal(workflow), arguments)
    return _run_of_options(read_literal(workflow), partial(setting_of_folder, folder), arguments)


def run_settings_from_command_line(workflow: ModuleType) -> None:
    """Run what the command line says."""
    options, overrides = _first_options(workflow.RUN).parse_known_args()
    if {"-h", "--help"} & set(overrides):
        print(help_text(workflow, options.technique, options.parallel))
        sys.exit(0)
    with ended_by_one_sentence():
        if options.all:
            sys.exit(run_all(workflow, options.quick, overrides))
        run = run_of_arguments(workflow, sys.argv[1:])
        run_or_launch(workflow.workflow, run, Path(workflow.__file__).name, sys.argv[1:])


def help_text(workflow: ModuleType, technique: str, parallel: str) -> str:
    """What the workflow does, its own options, and what the setting that the others chose has unlike the defaults."""
    parser, usual = _first_options(workflow.RUN), RunConfig()
    parser.description, parser.formatter_class = workflow.__doc__, argparse.RawDescriptionHelpFormatter
    run = workflow.defaults_for(technique, parallel)
    own = [
        f"  --{name} {value}"
        for name, value in run.to_dict().items()
        if value != getattr(usual, name) and name not in ("technique", "parallel", "task", "run_folder")
    ]
    parser.epilog = "\n".join([
        f"Fields of this setting ({technique}, {parallel}) that are not at their defaults; each takes another value,",
        "as does every other field of common/run_config.py:",
        *own,
    ])  # fmt: skip
    return parser.format_help()


def run_of_arguments(workflow: ModuleType, arguments: Sequence[str]) -> RunConfig:
    """The run that the arguments of a workflow with settings describe.

    Raises:
        BadInputError: a value is out of range.
    """
    return _run_of_options(workflow.RUN, workflow.defaults_for, arguments)


def _run_of_options(
    run: RunConfig, defaults_for: Callable[[str, str], RunConfig], arguments: Sequence[str]
) -> RunConfig:
    options, overrides = _first_options(run).parse_known_args(arguments)
    asked = parse_overrides(defaults_for(options.technique, options.parallel), overrides)
    return quick(asked) if options.quick else asked


def _first_options(run: RunConfig) -> argparse.ArgumentParser:
    """What decides about the other options' defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--technique", default=run.technique, help="what is trained: full or lora; the recipe follows")
    parser.add_argument("--parallel", default=run.parallel, help=f"how work is shared: {', '.join(CLASSIFIED_WITH)}")
    parser.add_argument("--all", action="store_true", help="every setting, one after the other, and their table")
    parser.add_argument("--quick", action="store_true", help=f"one in {QUICK_SHARE} rows")
    return parser


def quick(run: RunConfig) -> RunConfig:
    """The run with a tenth of its rows, each split's first ones."""
    splits: Splits = load_splits(run)
    counts = {name: max(1, len(getattr(splits, name)) // QUICK_SHARE) for name in ("train", "validation", "test")}
    return replace(run, **{f"{name}_rows": count for name, count in counts.items()})


def run_all(workflow: ModuleType, is_quick: bool, overrides: Sequence[str]) -> int:
    """Every setting in processes of its own, then the table of all; the exit code.

    All are checked before the first one starts; one that fails then does not keep the others from running.

    Raises:
        BadInputError: a setting refuses its input; none was started.
    """
    script, failed, start_s = Path(workflow.__file__), [], time.perf_counter()
    settings = [[*setting, *(["--quick"] if is_quick else []), *overrides] for setting in workflow.SETTINGS]
    runs = [run_of_arguments(workflow, setting) for setting in settings]
    for run in runs:
        check_inputs(run)
    names = [name_of(run) for run in runs]
    for number, (setting, run, name) in enumerate(zip(settings, runs, names, strict=True), 1):
        so_far = f"{clock(time.perf_counter() - start_s)} so far"
        print(f"\n== setting {number} of {len(runs)}: {name} ({so_far})", flush=True)
        try:
            stream_command(ranks_command(run, script.name, setting), cwd=script.parent)
        except RuntimeError as failure:
            print(f"{name}: {failure}")
            failed.append(name)
    done = {(run.run_folder, name) for run, name in zip(runs, names, strict=True)}
    records = [each for each in results_of_this_machine() if (each["run_folder"], each["run_name"]) in done]
    print(f"\n== all settings: {clock(time.perf_counter() - start_s)}\n\n{results_text(records)}")
    if failed:
        print(f"error: {len(failed)} of {len(names)} settings failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def name_of(run: RunConfig) -> str:
    """The name of the results folder that a setting writes when it is started by this module."""
    return run.run_name or default_run_name(run, "torchrun" if run.world_size > 1 else "python")
