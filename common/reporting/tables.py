"""Every table by its name, those of LoRA (2.1) and of DDP (2.2), and how they come into the READMEs."""

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.checks import planner_command
from common.records.store import Record
from common.reporting import classification, findings, full, outcomes, own_data, peaks, qlora, rates, summarization
from common.reporting.memory import memory_by_phase
from common.reporting.rows import (
    FACTORS,
    FULL,
    FULL_MP,
    FULL_PP,
    LORA,
    LORA_DDP,
    LORA_PP,
    MEMORY,
    NOT_PUBLISHED,
    NOT_RUN,
    REPORTING,
    STEPS,
    STRONG,
    WEAK,
    WHAT,
    Row,
    as_table,
    baseline_of,
    beside_one_device,
    ceiling_of,
    clock,
    completed,
    data_parallel_ranks,
    devices_of,
    idle_shares,
    judged,
    kind_name,
    kind_of,
    measured_quality,
    measured_speed,
    model_of,
    peak_memory_gib,
    percent,
    planned_memory,
    published_quality,
    published_results,
    published_speed,
    quality_table,
    score,
    speed_table,
    speedup_table,
    step_s,
    table_of,
)

BENCH_FILE = REPOSITORY / "bench" / "bench.json"
MARKED_TABLE = re.compile(r"(<!-- table: (?P<name>[\w .-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
PLANNER_QUESTION = "--model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 4 --seq-len 1024"

LEGEND = """\
similarity score: a distance between answer and reference, lower is better; judged by the base model
by MiniLM: the same by a sentence encoder that had no part in the training
shuffled: the score of the right answers to other questions: a score near it says nothing of the content
facts said: share of the facts asked for that stand in the answers
speed-up: training time of the one-device run (2.1, 2.4) over this run's
machine's ceiling: the highest speed-up to expect here: the same ranks without synchronising, against one
memory: on CPU the resident memory of the process, most of it Python and PyTorch
weights that a step changes: the other updates are too small for the precision, and round away
More in the folders' readmes."""

SCALED = (*STEPS, REPORTING, "Training speedup factor", "Machine's ceiling", "Tokens per second", *MEMORY)
BEFORE = {
    "Similarity score (lower is better)": "Similarity score before (lower is better)",
    "By MiniLM": "By MiniLM before",
    "Facts said (higher is better)": "Facts said before",
}
"""Columns of what was scored after training, and those of the same before."""
MASTER = (*WHAT, "Batch size", "Training time", MEMORY[0], "Model", "Trained on", "Learning rate scaling", *BEFORE)


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
        records, _ddp_runs(records, WEAK), WEAK, (*WHAT, *FACTORS, *SCALED), (LORA_DDP,), (LORA, LORA_DDP)
    )


# -- the root README


def front(records: list[Record]) -> pd.DataFrame:
    """Return the root README's table: what two devices bring, by command, on the usual seed."""
    runs = [
        record
        for record in records
        if record["config"]["seed"] == RunConfig.seed and record["launcher"] in ("python", "torchrun")
    ]
    rows = []
    for same, words in ((STRONG, "the same global batch"), (WEAK, "the same rows per device")):
        for record, baseline in _ddp_runs(runs, same):
            row = measured_speed(record, baseline, same)
            rows.append({
                "What": row["Approach"] if record is baseline else f"{row['Approach']}, {words}",
                "Devices": row["Devices"],
                "Rows per device and step": str(record["config"]["per_device_train_batch_size"]),
                "Training time": row["Training time"],
                "Speed-up": row["Training speedup factor"],
                "Machine's ceiling": row["Machine's ceiling"],
                "Facts said (higher is better)": percent(record["quality"]["after"]["facts_said_share"]),
            })  # fmt: skip
    return pd.DataFrame(rows).drop_duplicates()


def master(records: list[Record]) -> pd.DataFrame:
    """Return the root README's table: one line per kept run."""
    published = [
        {
            **published_speed(result, result),
            "Model": NOT_PUBLISHED,
            "Trained on": f"{result['epochs']} epochs",
            "Learning rate scaling": published_quality(result)["Learning rate scaling"],
            **dict.fromkeys(BEFORE, NOT_PUBLISHED),
            "Similarity score (lower is better)": score(result["similarity_score"]),
        }
        for result in published_results()
    ]
    measured = [_master_row(record) for record in completed(records)]
    return table_of(records, tuple(product(TECHNIQUES, PARALLELISMS)), measured, published, MASTER)


def _master_row(record: Record) -> Row:
    quality, config = measured_quality(record), record["config"]
    rows = sum(rank["samples"] for rank in record["world"][: data_parallel_ranks(record)])
    return {
        **measured_speed(record),
        "Model": model_of(record),
        "Trained on": f"{Path(config['data']).name}, {rows:,} rows in up to {config['num_train_epochs']} epochs",
        "Learning rate scaling": quality["Learning rate scaling"],
        **{after: f"{quality[before]} -> {quality[after]}" for after, before in BEFORE.items()},
    }


# -- the benchmark


def bench(_: list[Record], about: str = "", with_bars_only: bool = False) -> pd.DataFrame:
    """Return what `make bench` measured last and wrote to bench.json: entries whose name begins with `about`."""
    entries = json.loads(BENCH_FILE.read_text(encoding="utf-8")) if BENCH_FILE.is_file() else []
    return pd.DataFrame(
        _bench_row(entry)
        for entry in entries
        if entry["name"].startswith(about) and not (with_bars_only and entry["bar"] is None)
    )


def _bench_row(entry: dict[str, Any]) -> Row:
    """Return a line with `1.553 ratio`, `6,357 tokens per s`; what was not run says so in its name."""
    value = entry["value"]
    if value is None:
        measured = NOT_RUN if NOT_RUN in entry["name"] else "not reached"
    else:
        measured = f"{value:,.0f} {entry['unit']}" if value >= 1000 else f"{value:.3f} {entry['unit']}"
    return {
        "What": entry["name"],
        "Measured": measured,
        "Bar": "" if entry["bar"] is None else f"{entry['bar_is']} {entry['bar']:g}",
        "Holds": NOT_RUN if measured == NOT_RUN else {True: "yes", False: "**no**", None: ""}[entry["holds"]],
        "Command": f"`{entry['command']}`",
    }


TABLES: dict[str, Callable[[list[Record]], pd.DataFrame]] = {
    "bench": partial(bench, with_bars_only=True),
    "bench-all": bench,
    "front": front,
    "planner": partial(bench, about="planner"),
    "published-memory": peaks.published_memory,
    "published-verdicts": peaks.published_verdicts,
    "published-excluded": peaks.excluded_memory,
    "memory-by-phase": memory_by_phase,
    "master": master,
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
    "classification-settings": classification.settings_table,
    "classification-details": classification.details_table,
    "classification-front": classification.front,
    "summarization-loops": summarization.loops_table,
    "summarization-network": summarization.network_table,
    "summarization-front": summarization.front,
    "summarization-cost": summarization.cost_table,
    "summarization-machines": summarization.machines_table,
    "own-data-rows": own_data.by_rows,
    "own-data-learning-rates": own_data.by_learning_rate,
    "equivalence": outcomes.equivalence,
    "families": outcomes.families,
    "families-of-tasks": outcomes.families_of_tasks,
    "faults": outcomes.faults,
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
    before, after = record["quality"]["before"], record["quality"]["after"]
    has_adapters = TECHNIQUES[record["technique"]].has_adapters
    return {
        "approach": kind_name(*kind_of(record)),
        "devices": devices_of(record),
        "rows per device and step": record["config"]["per_device_train_batch_size"],
        "effective batch size": record["effective_batch_size"],
        "steps": record["steps"],
        "learning rate": f"{record['config']['learning_rate']:g}",
        "rank of the adapters": str(record["config"]["lora_r"]) if has_adapters else None,
        "similarity score before": score(before["similarity_score"]),
        "similarity score after": score(after["similarity_score"]),
        "by MiniLM before": judged(before["similarity_score_minilm"]),
        "by MiniLM after": judged(after["similarity_score_minilm"]),
        "answers shuffled": score(after["shuffled_score"]),
        "shuffled, by MiniLM": judged(after["shuffled_score_minilm"]),
        "facts said before": percent(before["facts_said_share"]),
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


# -- READMEs


def planner_answer() -> str:
    """Return what the planner prints for the question of 1.1's readme."""
    said = io.StringIO()
    with redirect_stdout(said):
        planner_command.answer(planner_command.read_options(PLANNER_QUESTION.split()))
    return f"```text\n{said.getvalue().strip()}\n```\n"


def rendered(name: str, records: list[Record]) -> str:
    """Return a table as Markdown, or the planner's answer as it prints it."""
    if name == "planner-answer":
        return planner_answer()
    table = TABLES[name](records)
    return "not run\n" if table.empty else table.to_markdown(index=False, disable_numparse=True) + "\n"


def with_tables(text: str, records: list[Record]) -> str:
    """Return `text` with each marked table replaced by what the records say."""
    return MARKED_TABLE.sub(lambda found: found[1] + rendered(found["name"], records) + found[3], text)


def readmes() -> list[Path]:
    """Return the pages with tables: the root's README, the benchmark's, those of docs and the technique folders'."""
    others = [page for where in ("docs/*.md", "[0-9].[0-9]_*/*_readme.md") for page in sorted(REPOSITORY.glob(where))]
    return [REPOSITORY / "README.md", REPOSITORY / "bench" / "README.md", *others]
