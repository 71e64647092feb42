"""The runs that a folder describes: its literal, its settings, and what a command line puts over them."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from common.base.parsing import OneSentenceParser, parse_overrides
from common.base.run_config import RunConfig, check_choice
from common.base.run_folders import literal_of, lora_of
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.records.store import default_run_name

QUICK_SHARE = 10  # `--quick` takes one in so many rows
MICRO_BATCHES = 8  # with PP, unless `--micro_batches` says another number


def setting_of(run: RunConfig, lora: dict[str, object], technique: str, parallel: str) -> RunConfig:
    """Return the folder's `run`, which is full fine-tuning, in another setting: every step has the same rows."""
    check_choice("technique", technique, TECHNIQUES)
    check_choice("parallel", parallel, PARALLELISMS)
    changes: dict[str, object] = {"technique": technique, "parallel": parallel}
    if TECHNIQUES[technique].has_adapters:
        changes |= lora
    parallelism = PARALLELISMS[parallel]
    rows = run.per_device_train_batch_size * run.data_parallel_ranks
    devices = 1 if parallelism.is_single else max(2, run.devices)
    # ranks without rows of their own each get the whole batch
    changes |= {"devices": devices, "per_device_train_batch_size": rows // devices if parallelism.replicates else rows}
    if parallelism.pipelines:  # balanced by memory, the stage of the embeddings would get few layers
        changes |= {"micro_batches": MICRO_BATCHES, "device_map": "even"}
    return replace(run, **changes)


def setting_of_folder(folder: Path, technique: str, parallel: str) -> RunConfig:
    """Return the same of a run folder, read from its literals."""
    return setting_of(literal_of(folder), lora_of(folder), technique, parallel)


def run_of_folder(folder: Path, arguments: Sequence[str], further_options: Sequence[str] = ()) -> RunConfig:
    """Return the run that a folder's workflow would take with these arguments, without importing it.

    `folder` is named from here or from the repository's root, `further_options` are those that the caller has read.
    """
    own = literal_of(folder)
    if not lora_of(folder):
        return parse_overrides(own, arguments, further_options)
    parser = first_options(own)
    options, overrides = parser.parse_known_args(arguments)
    defaults = setting_of_folder(folder, options.technique, options.parallel)
    asked = parse_overrides(defaults, overrides, [*parser.options, *further_options])
    return quick(asked) if options.quick else asked


def folder_parser(command: str, description: str) -> OneSentenceParser:
    """Return the parser of a command that takes a run folder and, after it, settings."""
    epilog = "Any setting of the folder's workflow can follow, such as --batch_size 4; its --help lists them."
    parser = OneSentenceParser(prog=f"python -m common.{command}", description=description, epilog=epilog)
    parser.add_argument("run_folder", type=Path, help="such as 2.1_lora_finetuning/run_0_cpu_x1")
    parser.add_argument("--seq-len", type=int, help="rows of exactly so many tokens, all learnt, in place of the run's")
    return parser


def import_workflow(script: Path) -> ModuleType:
    """Import one of a run folder's workflows, and return it; paths go on meaning from where the user stands."""
    sys.path.insert(0, str(script.resolve().parent))
    return importlib.import_module(script.stem)


def first_options(run: RunConfig) -> OneSentenceParser:
    """Return a parser of the options that decide about the defaults of all others."""
    parser = OneSentenceParser(add_help=False)
    parser.add_argument("--technique", default=run.technique, help="what is trained: full or lora; the recipe follows")
    parser.add_argument("--parallel", default=run.parallel, help=f"the parallelism: {', '.join(run.goal.parallelisms)}")
    parser.add_argument("--all", action="store_true", help="every setting, one after the other, and their table")
    parser.add_argument("--quick", action="store_true", help=f"one in {QUICK_SHARE} rows")
    return parser


def quick(run: RunConfig) -> RunConfig:
    """Return the run with a tenth of its rows, each split's first ones."""
    from common.data.splits import load_splits  # here: it imports Transformers, and the planner reads folders, too

    splits = load_splits(run)
    counts = {name: max(1, len(getattr(splits, name)) // QUICK_SHARE) for name in ("train", "validation", "test")}
    return replace(run, **{f"{name}_rows": count for name, count in counts.items()})


def name_of(run: RunConfig) -> str:
    """Return the name of the results folder that a setting writes when `common.launch` starts it."""
    return run.run_name or default_run_name(run, "torchrun" if run.world_size > 1 else "python")
