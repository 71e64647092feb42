"""The benchmark: `python -m bench` measures all and writes `bench.json`; `python -m bench PART` prints one part."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench.entries import BENCH_PATH, Entry, save, update
from common.base.errors import BadInputError
from common.base.run_config import RunConfig

TECHNIQUES = ("lora", "full")
DATA_SETS = ("short", "long")
TOOL_NAMES = (
    "ours",
    "ours-grouped",
    "sft-default",
    "sft-best",
    "sft-grouped",
    "sft-packed",
    "trainer",
    "trainer-grouped",
    "llama-factory",
    "bare",
)
QUICK_QUESTIONS, QUICK_ROUNDS, QUICK_STEPS = 3, 1, 2
QUESTIONS, ROUNDS, SCALING_TURNS, SCALING_LAUNCHES = 74, 3, 7, 3


def training(options: argparse.Namespace) -> list[Entry]:
    """Seconds to the same validation loss, by tool."""
    from bench import training

    scale = training.QUICK_SCALE if options.quick else training.FULL_SCALE
    tools = options.tool or ([*training.QUICK_TOOLS] if options.quick else [*TOOL_NAMES])
    return [
        entry
        for data in options.data
        for technique in options.technique
        for entry in training.entries(data, technique, tools, scale)
    ]


def vocabulary(options: argparse.Namespace) -> list[Entry]:
    """Memory and speed of a model with a real vocabulary, by tool."""
    from bench import vocabulary

    return [entry for technique in options.technique for entry in vocabulary.entries(technique, options.quick)]


def scaling(options: argparse.Namespace) -> list[Entry]:
    """DDP's speed-up as a share of the machine's ceiling."""
    from bench import scaling

    turns, launches = (QUICK_ROUNDS, 1) if options.quick else (SCALING_TURNS, SCALING_LAUNCHES)
    return [
        entry
        for technique in options.technique
        for rows in options.rows
        for entry in scaling.entries(technique, rows, turns, launches)
    ]


def evaluation(options: argparse.Namespace) -> list[Entry]:
    """Generation in batches against one question at a time."""
    from bench import evaluation

    if options.quick:
        return evaluation.entries(QUICK_ROUNDS, QUICK_QUESTIONS)
    return evaluation.entries(ROUNDS, QUESTIONS)


def quality(options: argparse.Namespace) -> list[Entry]:
    """What the embedded default learns, over three seeds."""
    from bench import quality

    if options.quick:
        return quality.entries(options.technique, quality.SEEDS[:1], 1, QUICK_QUESTIONS)
    return quality.entries(options.technique, quality.SEEDS, RunConfig().num_train_epochs, QUESTIONS)


def planner(options: argparse.Namespace) -> list[Entry]:
    """The planner's memory against a dry run, published peaks and GPUs."""
    from bench import planner

    return planner.entries(options.quick)


def pipeline(options: argparse.Namespace) -> list[Entry]:
    """1F1B's speed-up over naive model parallel as a share of what formula and machine allow."""
    from bench import pipeline

    return pipeline.entries(options.quick)


def gpu(options: argparse.Namespace) -> list[Entry]:
    """What kept steps on a GPU reach of its peak."""
    from bench import gpu

    return gpu.entries(gpu.kept_trials())


PARTS = {
    "quality": quality,
    "training": training,
    "vocabulary": vocabulary,
    "scaling": scaling,
    "pipeline": pipeline,
    "evaluation": evaluation,
    "planner": planner,
    "gpu": gpu,
}
"""A part more is a function more: from the options to its entries."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, help="one part only; without it, all, into bench.json")
    parser.add_argument("--technique", nargs="+", choices=TECHNIQUES, default=TECHNIQUES)
    parser.add_argument("--data", nargs="+", choices=DATA_SETS, default=DATA_SETS, help="training: rows to learn")
    parser.add_argument("--tool", nargs="+", choices=TOOL_NAMES, help="training: tools by name; default all")
    parser.add_argument("--rows", nargs="+", type=int, choices=(16, 64), default=(16, 64), help="scaling: global batch")
    parser.add_argument(
        "--quick", action="store_true", help="a little of each, to see that it works: figures mean nothing"
    )
    parser.add_argument("--folder", type=Path, default=BENCH_PATH.parent, help="where bench.json goes")
    parser.add_argument("--update", action="store_true", help="a part: put its figures into bench.json, too")
    options = parser.parse_args()
    try:
        answer(options)
    except BadInputError as mistake:
        parser.exit(2, f"error: {mistake}\n")


def answer(options: argparse.Namespace) -> None:
    """Print one part's entries, and save them if asked to; or save those of all parts, and print them."""
    if options.part:
        entries = PARTS[options.part](options)
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        if options.update:
            is_whole = (options.tool, *options.data, *options.technique) == (None, *DATA_SETS, *TECHNIQUES)
            update(options.part, entries, options.folder, is_whole)
        return
    entries = []
    for name, part in PARTS.items():
        print(f"== {name}", file=sys.stderr, flush=True)
        entries += part(options)
    save(entries, options.folder)
    for entry in entries:
        print(line(entry))


def line(entry: Entry) -> str:
    """An entry for a reader."""
    value = "-" if entry.value is None else f"{entry.value:,.2f} {entry.unit}"
    verdict = {
        None: "",
        True: f"  holds ({entry.bar_is} {entry.bar})",
        False: f"  DOES NOT HOLD ({entry.bar_is} {entry.bar})",
    }
    return f"{entry.name}: {value}{verdict[entry.holds]}"


if __name__ == "__main__":
    main()
