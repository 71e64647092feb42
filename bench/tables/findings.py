"""The narrow tables at the top of a technique's results, and what each of its run folders needs.

`found 2.2` has what others published beside what was measured here, one line for each strategy; `found 1.1` how far the
planner is off; `needs 2.2` has GPU, memory, disk, time and rent of each run folder as the planner has them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from bench.tables import outcomes, publications
from bench.tables.footnotes import footnote
from bench.tables.full import PROJECTED_LENGTH, recipes
from bench.tables.table import (
    FULL,
    FULL_DDP,
    FULL_FSDP,
    FULL_MP,
    FULL_PP,
    FULL_SP,
    FULL_ZERO3,
    LORA,
    LORA_DDP,
    PROJECTED,
    QLORA,
    QLORA_DDP,
    Table,
    column,
    published,
)
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import TASKS
from common.hardware.devices import GIB, MIB
from common.planning.plans import DEFAULT_ROWS_PER_EPOCH, plan_run
from common.records.store import Record
from common.reporting.columns import Column, mean_time_s
from common.reporting.rows import (
    NOT_RUN,
    STRONG,
    Kind,
    Row,
    baseline_of,
    completed,
    kind_of,
    with_seeds,
)

# -- what was found


def _base_weights_mib(row: Row) -> float:
    """Return what the base's weights take as they are stored; unquantized they are those of QLoRA's base before."""
    if "quantization" in row:
        return 1024 * row["quantization"]["weights_gib"]
    same_base = [
        run["quantization"]["unquantized_gib"]
        for run in row["records"]
        if "quantization" in run and run["config"]["model"] == row["config"]["model"]
    ]
    return 1024 * same_base[0]


def _held_mib(row: Row) -> float:
    """Return what a rank holds of weights, gradients and optimizer states; one device all that sharded runs divide."""
    same = [
        run
        for run in row["records"]
        if "held" in run and run["config"]["model"] == row["config"]["model"] and run["technique"] == row["technique"]
    ]
    ranks = row["held"]["per_rank"] if "held" in row else [same[0]["held"]["whole"]]
    return max(sum(held.values()) for held in ranks) / MIB


def _memory(title: str, value_of: Callable[[Row], float], form: str) -> Column:
    """Return a column of memory; published runs have their card's there."""
    return Column(title, lambda row: f"{row['vram_gb']} GB card" if "vram_gb" in row else form.format(value_of(row)))


SPEEDUP = Column("Speed-up", lambda row: mean_time_s(row["baseline"]) / mean_time_s(row), "{:.2f}x")
# The fullest device's peak: of tensors on a CPU, of what is allocated on a GPU
IN_TRAINING = _memory(
    "In training", lambda row: max(entry["peak_gib_by_phase"]["training"] for entry in row["memory"]), "{:.3f} GiB"
)
# By technique folder: what its first table compares, and the last column: what the technique is chosen for
COMPARED: dict[str, tuple[tuple[Kind, ...], Column]] = {
    "2.1": ((LORA,), IN_TRAINING),
    "2.2": ((LORA, LORA_DDP), SPEEDUP),
    "2.3": ((FULL, LORA, QLORA, QLORA_DDP), _memory("Weights", _base_weights_mib, "{:.1f} MiB")),
    "2.4": ((LORA, FULL), IN_TRAINING),
    "2.5": ((FULL, FULL_MP), IN_TRAINING),
    "2.6": (
        (FULL, FULL_DDP, FULL_FSDP, ("full", "zero2"), FULL_ZERO3),
        _memory("Held by each", _held_mib, "{:.1f} MiB"),
    ),
    "2.7": ((FULL, FULL_PP), SPEEDUP),
    "2.8": ((FULL, FULL_SP), IN_TRAINING),
}
# What others published of memory and of times
PUBLISHED_EVIDENCE = ("published-memory", "rates-by-source")
GRPO_SOURCE = "AgileRL, GRPO with LoRA"
# By what the benchmark compares the planner's closed form with: its name in short, and whose figures they are
CLOSED_FORM = {"measured CUDA peaks": ("peaks on one H200", "measured"), "dry run": ("the dry run", PROJECTED)}
WHAT = (
    "short_approach",
    "short_figures",
    "short_devices",
    "batch",
    replace(column("score as Score"), over_seeds=True),
    "mean_time as Time",
)


def _found(records: list[Record], number: str) -> list[Row]:
    """Return what others published, then of each strategy here the usual setting."""
    kinds, gain = COMPARED[number]
    first = _usual_run(recipes(records, kinds[0]), number)
    rows_per_step = first[STRONG] if first and gain != SPEEDUP else None
    usual = [_usual_run(recipes(records, kind), number, rows_per_step) for kind in kinds]
    usual = [row for row in usual if row]
    if usual and gain == SPEEDUP:  # beside the same batch on one device, over its seeds
        baseline = baseline_of(usual[-1], records, STRONG)
        runs = with_seeds(completed(records, kind_of(baseline))) if baseline else []
        usual[0] = next((row for row in runs if baseline in row["seeds"]), None)
    measured = [{**row, "baseline": usual[0], "records": records} for row in usual if row]
    return [*published(*kinds), *measured]


def _usual_run(runs: Iterable[Record], number: str, rows_per_step: int | None = None) -> Row | None:
    """Return the setting with the most seeds, of the technique's own folder where that has some; None: there is no run.

    Those with so many `rows_per_step` come first; of equals the run folder's own setting, whose runs need no name.
    """
    by_command = [run for run in runs if run["command"] != "the notebook"]
    own = [run for run in by_command if run["run_folder"].startswith(number)]
    settings = with_seeds(own or by_command)
    return max(
        settings,
        key=lambda row: (
            row[STRONG] == rows_per_step,
            len(row["seeds"]),
            row["run_name"].startswith(f"{row['launcher']}-batch"),
        ),
        default=None,
    )


def _found_of_plans(records: list[Record]) -> Iterator[Row]:
    """Yield how far plans are off by each kind of evidence, as the tables that show all of it have it."""
    titles = ("Planned", "Compared with", "Figures", "Points", "Error", "Spread")
    memory, rates = (publications.TABLES[name](records).set_index("Source") for name in PUBLISHED_EVIDENCE)
    held_out, grpo, rate = memory.loc["held out, without GRPO"], memory.loc[GRPO_SOURCE], rates.loc["all"]
    phases = outcomes.TABLES["memory-by-phase"](records).set_index("Phase").loc["all phases"]
    near = f"{rate['Near']} within a factor of {publications.WITHIN}"
    worst = f"at most {phases['Worst error'].lstrip('+-')}"
    peaks = (("held-out peaks", held_out), ("those of GRPO", grpo))
    lines = (
        *(
            ("memory of a GPU", what, "published", row["Points"], row["Mean error"], f"{row['Within 15 %']} within 15%")
            for what, row in peaks
        ),
        *_closed_form(outcomes.TABLES["bench-planner"](records).set_index("What")["Measured"]),
        ("tensors of a phase", "our kept runs", "measured", phases["Compared"], phases["Mean error"], worst),
        ("tokens per second", "fitted rates", "published", rate["Points"], f"{rate['Error']} (median)", near),
    )
    yield from (dict(zip(titles, line, strict=True)) for line in lines)


def _closed_form(measured: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of what the benchmark compares the closed form with, of its figures by their names."""
    for what, mean in measured.items():
        if found := re.match(r"closed form against (.*), (\d+) points: mean error", what):
            worst = measured[f"closed form against {found[1]}: worst error"]
            yield "tensors of a step", *CLOSED_FORM[found[1]], found[2], mean, f"at most {worst}"


# -- what run folders need


def _needs(records: list[Record], number: str) -> list[Row]:
    """Return what each run folder of a technique needs: projected for GPUs, measured on a CPU."""
    from common.checks.inputs import disk_need  # here, as it imports torch, which other tables do not need

    return [
        {
            "Run folder": f"[{folder.name}]({folder.name})",
            "Devices": f"{run.gpu or 'CPU, 1 thread'} x{run.devices}",
            "Disk, GiB": f"{disk_need(run).total_bytes / GIB:.{2 if run.device == 'cpu' else 0}f}",
            **(_needed_before(run, records) if run.device == "cpu" else _needed_by_plan(run)),
        }
        for folder, run in run_folders().items()
        if folder.parent.name.startswith(number)
    ]


def _needed_before(run: RunConfig, records: list[Record]) -> Row:
    """Return the memory of the process and the minutes of the usual kept run; other runs in the folder are trials."""
    chosen = ("model", "weights", "link")  # as a kept run has them if its folder does; older records lack some
    usual = _usual_run(
        (
            record
            for record in records
            if record["status"] == "completed" and record["run_folder"] == run.run_folder
            if all(record["config"].get(name, getattr(run, name)) == getattr(run, name) for name in chosen)
        ),
        "",
    )
    if usual is None:
        return dict.fromkeys(("Figures", "GiB per device", "Minutes", "USD"), NOT_RUN)
    return {
        "Figures": "measured",
        "GiB per device": f"{max(entry['peak_rss_gib'] for entry in usual['memory']):.1f}",
        "Minutes": f"{sum(usual['phases_s'].values()) / 60:.1f}",
        "USD": "-",
    }


def _needed_by_plan(run: RunConfig) -> Row:
    from common.checks.tried_rows import batch_of_length  # as above

    has_usual_rows = run.goal.learns_answers and run.sp_size == 1
    plan = plan_run(run, batch_of_length(run, PROJECTED_LENGTH if has_usual_rows else run.max_length))
    usd, memory = plan.epoch_usd(DEFAULT_ROWS_PER_EPOCH), plan.highest.phase.memory
    return {
        "Figures": "projected",
        "GiB per device": " to ".join(dict.fromkeys(f"{gib:.0f}" for gib in (memory.peak_gib, memory.safe_gib))),
        "Minutes": f"{plan.epoch_s(DEFAULT_ROWS_PER_EPOCH) / 60:.0f}",
        "USD": "-" if usd is None else f"{usd:.2f}",
    }


TABLES = {
    # what the GPUs of the published runs have, against those of one device
    "found 2.5 gpus": Table(
        lambda _: published(FULL, FULL_MP),
        (
            WHAT[0],
            "short_devices",
            "epochs",
            "cuda as CUDA cores",
            "vram as VRAM in all",
            "mean_time as Time",
            "memory_needed as VRAM per GPU",
        ),
    ),
    "found 1.1": Table(_found_of_plans),
    **{
        f"found {number}": Table(partial(_found, number=number), (*WHAT, gain), footnote=footnote)
        for number, (_, gain) in COMPARED.items()
    },
    **{
        f"needs {number}": Table(partial(_needs, number=number))
        for number in (*COMPARED, *filter(None, (task.number for task in TASKS.values())))
    },
}
