"""Every table by its name, those of the README, LoRA (2.1) and DDP (2.2), and how they come into the pages."""

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.checks import planner_command
from common.records.store import Record
from common.reporting import (
    benchmark,
    findings,
    full,
    outcomes,
    own_data,
    peaks,
    qlora,
    rates,
    results,
)
from common.reporting.markdown import WIDEST, as_list, as_markdown
from common.reporting.memory import memory_by_phase
from common.reporting.rows import (
    FACTORS,
    FULL,
    FULL_DDP,
    FULL_FSDP,
    FULL_MP,
    FULL_PP,
    FULL_ZERO3,
    LORA,
    LORA_DDP,
    LORA_PP,
    MEMORY,
    NOT_RUN,
    REPORTING,
    STEPS,
    STRONG,
    WEAK,
    WHAT,
    WHERE,
    Row,
    all_own_tables,
    as_table,
    baseline_of,
    before_training,
    beside_one_device,
    ceiling_of,
    clock,
    completed,
    devices_of,
    idle_shares,
    judged,
    kind_name,
    kind_of,
    measured_speed,
    peak_memory_gib,
    percent,
    planned_memory,
    quality_table,
    score,
    short_devices_of,
    speed_table,
    speedup_table,
    step_s,
)
from common.reporting.screen import on_screen

MARKED_TABLE = re.compile(r"(<!-- table: (?P<name>[\w .-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
PLANNER_QUESTION = "--model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 4 --seq-len 1024"
TWO_CARDS_QUESTION = "--model qwen2.5-7b --gpu 4090 --gpus 2 --batch-size 1 --seq-len 1024"
DEMO_RUNS = (
    ("2.1_lora_finetuning/run_0_cpu_x1", "python-batch16-seed42"),
    ("2.2_lora_finetuning_with_ddp/run_0_cpu_x2", "torchrun-batch8-seed42"),
)
"""Of the runs of `make demo` those that the README shows."""
DEMO_LINES = (
    "facts said before",
    "facts said after",
    "training time",
    "peak memory per device (GiB)",
    "speed-up at the same effective batch",
    "machine's ceiling at the same effective batch",
)

LEGEND = """\
similarity score: a distance between answer and reference, lower is better; judged by the base model
by MiniLM: the same by a sentence encoder that had no part in the training
shuffled: the score of the right answers to other questions: a score near it says nothing of the content
facts said: share of the facts asked for that stand in the answers
speed-up: training time of the one-device run (2.1, 2.4) over this run's
machine's ceiling: the highest speed-up to expect here: the same ranks without synchronising, against one
memory: on CPU the resident memory of the process, most of it Python and PyTorch
weights that a step changes: the other updates are too small for the precision, and round away
More words: docs/glossary.md; details: the folders' readmes."""

SCALED = (*STEPS, "Training speedup factor", "Machine's ceiling", *WHERE, REPORTING, *MEMORY)
OWN_TABLES = all_own_tables()
SHARED: dict[str, tuple[str, ...]] = {
    **results.SHARED,
    **{name: columns for module in OWN_TABLES for name, columns in module.SHARED.items()},
    **dict.fromkeys(rates.tables_by_source(), ("Page",)),
    "faults": ("Fault", "Tests"),
    "bench": ("Part",),
    "bench-all": ("Part", "Command"),
}
"""By a table's name the columns whose values stand above its parts."""
LISTS = {"faults-others": "- **{Fault}** ({With}): {Outcome}. {Tests}", "bench-worst": "- {What}: {Point}"}
"""By a table's name the form of its rows, where these are lines of a list."""


# -- DDP


def _ddp_runs(records: list[Record], same: str) -> list[tuple[Record, Record]]:
    return [pair for pair in beside_one_device(completed(records, LORA_DDP), records, same) if pair[1]]


@as_table
def ddp_step(records: list[Record]) -> Iterator[Row]:
    """Return the table of 2.2.

    Where a step's time goes when its rows are shared; the middle three are bare steps, timed in the run.
    """
    for record, baseline in _ddp_runs(records, STRONG):
        if baseline is not record and record.get("machine_ceiling"):
            ceiling = record["machine_ceiling"]
            seconds = {
                "One rank, the whole batch, in training": step_s(baseline),
                "One rank, the whole batch, bare": ceiling["one_rank_global_batch_step_s"],
                "One rank, its share alone, bare": ceiling["one_rank_share_step_s"],
                "All ranks at once, not synchronising, bare": ceiling["all_ranks_share_step_s"],
                "All ranks, in training with DDP": step_s(record),
            }
            yield {
                "Seed": str(record["config"]["seed"]),
                "Started by": record["launcher"],
                "Steps": str(record["steps"]),
                **{name: f"{value * 1e3:.0f} ms" for name, value in seconds.items()},
            }


def ddp_strong(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.2: speed-up at the same effective batch size: the same steps, shared (strong scaling)."""
    return speedup_table(records, _ddp_runs(records, STRONG), STRONG, (*WHAT, *SCALED))


def ddp_weak(records: list[Record]) -> pd.DataFrame:
    """Return the table of 2.2.

    Speed-up at the same rows per device: fewer, larger steps for the same rows (weak scaling).
    """
    return speedup_table(
        records, _ddp_runs(records, WEAK), WEAK, (*WHAT, *SCALED, *FACTORS), (LORA_DDP,), (LORA, LORA_DDP)
    )


# -- the README


def front(records: list[Record]) -> pd.DataFrame:
    """Return the README's table: what two devices bring and cost, started by command, on the usual seed."""
    runs = [
        record
        for record in records
        if record["config"]["seed"] == RunConfig.seed and record["launcher"] in ("python", "torchrun")
    ]
    pairs = [(*pair, same) for same in (STRONG, WEAK) for pair in _ddp_runs(runs, same)]
    full_runs = completed(runs, FULL_DDP, FULL_FSDP, FULL_ZERO3)
    pairs += [(*pair, STRONG) for pair in beside_one_device(full_runs, runs, STRONG) if pair[1]]
    return pd.DataFrame(_front_row(*each) for each in pairs).drop_duplicates()


def _front_row(record: Record, baseline: Record, same: str) -> Row:
    row = measured_speed(record, baseline, same)
    is_weak = same == WEAK and record is not baseline
    return {
        "What": kind_name(*kind_of(record)) + (", same rows each" if is_weak else ""),
        "Devices": short_devices_of(record),
        "Rows per step": row["Batch size"],
        "Time": row["Training time"],
        "Speed-up": row["Training speedup factor"],
        "Ceiling": row["Machine's ceiling"],
        "Facts said": percent(record["quality"]["after"]["facts_said_share"]),
    }


@as_table
def two_cards(_: list[Record]) -> Iterator[Row]:
    """Return the README's table: what two cards of 24 GB hold, as the planner says; what fits, and the next."""
    ranked = json.loads(_planner_says(f"{TWO_CARDS_QUESTION} --json"))["ranked"]
    for plan in ranked:
        likely = max(peak for device in plan["per_device"] for peak in device["phases_gib"].values())
        capacity = plan["per_device"][0]["capacity_gib"]
        is_safe = all(device["fits"] for device in plan["per_device"])
        shown = max(device["phases_gib"][plan["highest_phase"]] for device in plan["per_device"])
        yield {
            "Way": f"{TECHNIQUES[plan['technique']].short}, {PARALLELISMS[plan['parallel']].label}"
            + (", checkpointed" if plan["gradient_checkpointing"] else ""),
            "Fits": "yes" if is_safe else "tight" if likely <= capacity else "no",
            "GiB per GPU": f"{shown:.1f} of {capacity:.1f}",
            "Largest batch": str(plan["max_batch_size"]),
            "Tokens/s": f"{plan['tokens_per_s']:,.0f}",
            "USD per epoch": f"{plan['cost_usd_per_epoch']:.2f}",
        }
        if likely > capacity:
            return


def demo(records: list[Record]) -> str:
    """Return what `make demo` prints at its end, of the kept records of its runs; shortened."""
    runs = {(record["run_folder"], record["run_name"]): record for record in records}
    shown = side_by_side([runs[name] for name in DEMO_RUNS if name in runs])
    return _as_block(on_screen(shown.reindex(DEMO_LINES).dropna(how="all"), WIDEST))


TABLES: dict[str, Callable[[list[Record]], pd.DataFrame]] = {
    "bench": benchmark.bars,
    "bench-all": benchmark.every_entry,
    "bench-worst": benchmark.worst_points,
    "bench-mfu": rates.mfu_table,
    "front": front,
    "two-cards": two_cards,
    "planner-errors": benchmark.planner_errors,
    "planner-others": benchmark.planner_others,
    "published-memory": peaks.published_memory,
    "published-verdicts": peaks.published_verdicts,
    "published-excluded": peaks.excluded_memory,
    "memory-by-phase": memory_by_phase,
    "master": results.master,
    "results-published": results.published,
    "results-not-run": results.waiting,
    "lora-quality": partial(quality_table, shown=(LORA,)),
    "lora-speed": partial(speed_table, shown=(LORA,)),
    "ddp-quality": partial(quality_table, shown=(LORA, LORA_DDP)),
    "ddp-strong": ddp_strong,
    "ddp-weak": ddp_weak,
    "ddp-step": ddp_step,
    "full-quality": partial(full.full_quality, shown=(FULL,), beside=(LORA,)),
    "full-speed": full.full_speed,
    "full-precision": full.full_precision,
    "full-memory": full.full_memory,
    "mp-quality": partial(full.full_quality, shown=(FULL_MP,), beside=(FULL,)),
    "mp-speed": full.mp_speed,
    "mp-maps": full.mp_maps,
    "mp-price": full.mp_price,
    "pp-quality": partial(full.full_quality, shown=(FULL_PP, LORA_PP), beside=(FULL,)),
    "pp-speed": full.pp_speed,
    "pp-schedules": full.pp_schedules,
    "pp-losses": full.pp_losses,
    "pp-published": full.pp_published,
    "sharding-quality": full.sharding_quality,
    "sharding-speed": full.sharding_speed,
    "sharding-held": full.sharding_held,
    "sharding-traffic": full.sharding_traffic,
    "sharding-memory": full.sharding_memory,
    "qlora-quality": qlora.qlora_quality,
    "qlora-speed": qlora.qlora_speed,
    "qlora-memory": qlora.qlora_memory,
    "best-good-ok": qlora.best_good_ok,
    **{name: table for module in OWN_TABLES for name, table in module.TABLES.items()},
    "own-data-rows": own_data.by_rows,
    "own-data-learning-rates": own_data.by_learning_rate,
    "equivalence": outcomes.equivalence,
    "families": outcomes.families,
    "families-of-tasks": outcomes.families_of_tasks,
    "faults": outcomes.faults,
    "faults-others": outcomes.other_faults,
    "llama-cpp": outcomes.llama_cpp,
    "rates-by-source": rates.sources_table,
    "rates-well-known": rates.well_known_table,
    **rates.tables_by_source(),
    "rates-not-used": rates.excluded_table,
    **findings.TABLES,
}


# -- runs side by side


WHERE_THEY_DIFFER = ("learning rate", "rank of the adapters")
"""Rows that are left out where all runs have the same."""


def side_by_side(records: list[Record]) -> pd.DataFrame:
    """Return runs as columns, their settings and results as rows: what `make demo` prints."""
    columns = {
        f"{record['run_folder'].split('_')[0]} {record['run_name']}": _column(record, records) for record in records
    }
    table = pd.DataFrame(columns)
    same = [name for name in WHERE_THEY_DIFFER if name in table.index and table.loc[name].dropna().nunique() < 2]
    return table.drop(index=same).dropna(how="all").fillna("")


def _column(record: Record, records: list[Record]) -> dict[str, object]:
    if record["status"] != "completed":
        return {"status": f"{record['status']}: {record.get('error', '')[:60]}"}
    after = record["quality"]["after"]
    has_adapters = TECHNIQUES[record["technique"]].has_adapters
    return {
        "approach": kind_name(*kind_of(record)),
        "devices": devices_of(record),
        "rows per device and step": record["config"]["per_device_train_batch_size"],
        "effective batch size": record["effective_batch_size"],
        "steps": record["steps"],
        "learning rate": f"{record['config']['learning_rate']:g}",
        "rank of the adapters": str(record["config"].get("lora_r", RunConfig.lora_r)) if has_adapters else None,
        "similarity score before": before_training(record, "similarity_score", score),
        "similarity score after": score(after["similarity_score"]),
        "by MiniLM before": before_training(record, "similarity_score_minilm", judged),
        "by MiniLM after": judged(after["similarity_score_minilm"]),
        "answers shuffled": score(after["shuffled_score"]),
        "shuffled, by MiniLM": judged(after["shuffled_score_minilm"]),
        "facts said before": before_training(record, "facts_said_share", percent),
        "facts said after": percent(after["facts_said_share"]),
        "lowest validation loss": f"{record['best_validation_loss']:.4f}",
        "training time": clock(record["train_time_s"]),
        "of that, validation and checkpoints": clock(record["reporting_s"]),
        "tokens per second": f"{record['tokens_per_s']:,.0f}",
        "peak memory per device (GiB)": peak_memory_gib(record),
        "training's peak, planned / measured": planned_memory(record),
        **_of_technique(record),
        **_speedups(record, records),
    }


def _of_technique(record: Record) -> dict[str, str | None]:
    """Return what only some techniques and parallelisms have; None of what this one has not."""
    is_full = not TECHNIQUES[record["technique"]].has_adapters
    share, stored = record.get("updated_share"), record.get("quantization")
    original = record["quality"].get("after_original_base")
    said = percent(original["facts_said_share"]) if original else NOT_RUN
    return {
        "weights that a step changes": percent(share) if is_full and share is not None else None,
        "weights of the base, in 4 bits / not (GiB)": f"{stored['weights_gib']:.3g} / {stored['unquantized_gib']:.3g}"
        if stored
        else None,
        "facts said, merged into the original base": said if stored else None,
        "idle share per stage": idle_shares(record) if record.get("stages") else None,
    }


def _speedups(record: Record, records: list[Record]) -> Row:
    entries = {}
    for same, words in ((STRONG, "at the same effective batch"), (WEAK, "at the same rows per device")):
        baseline = baseline_of(record, records, same)
        if baseline and not PARALLELISMS[record["parallel"]].in_one_process:
            entries[f"speed-up {words}"] = f"{baseline['train_time_s'] / record['train_time_s']:.2f}x"
            entries[f"machine's ceiling {words}"] = ceiling_of(record, same)
    return entries


# -- pages


def _planner_says(question: str) -> str:
    said = io.StringIO()
    with redirect_stdout(said):
        planner_command.answer(planner_command.read_options(question.split()))
    return said.getvalue()


def _as_block(text: str) -> str:
    lines = text.strip("\n")
    return f"```text\n{lines}\n```\n"


def planner_answer(_: list[Record]) -> str:
    """Return what the planner prints for the question of 1.1's readme."""
    return _as_block(_planner_says(PLANNER_QUESTION))


BLOCKS: dict[str, Callable[[list[Record]], str]] = {"planner-answer": planner_answer, "demo": demo}
"""What is no table, but printed."""


def rendered(name: str, records: list[Record]) -> str:
    """Return a table as Markdown, or what a command prints."""
    if name in BLOCKS:
        return BLOCKS[name](records)
    table = TABLES[name](records)
    if table.empty:
        return f"{NOT_RUN}\n"
    return as_list(table, LISTS[name]) if name in LISTS else as_markdown(table, SHARED.get(name, ()))


def with_tables(text: str, records: list[Record]) -> str:
    """Return `text` with each marked table replaced by what the records say."""
    return MARKED_TABLE.sub(lambda found: found[1] + rendered(found["name"], records) + found[3], text)


def readmes() -> list[Path]:
    """Return the pages with tables: the README, the benchmark's, those of docs, and the technique folders'."""
    places = ("README.md", "bench/README.md", "docs/*.md", "[0-9].[0-9]_*/*_readme.md")
    pages = [page for place in places for page in sorted(REPOSITORY.glob(place))]
    return [page for page in pages if MARKED_TABLE.search(page.read_text(encoding="utf-8"))]
