"""Every table by its name, those of LoRA (2.1) and of DDP (2.2), and how they come into the READMEs."""

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.checks import planner_command
from common.records.store import Record
from common.reporting import classification, equivalence, faults, full, loops, qlora, sharding, summarization
from common.reporting.rows import (
    KIND_NAMES,
    LORA,
    LORA_DDP,
    NOT_PUBLISHED,
    NOT_RUN,
    Row,
    baseline_of,
    ceiling_of,
    clock,
    completed,
    devices_of,
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
    score,
    table_of,
    trained_on,
)

BENCH_FILE = REPOSITORY / "bench" / "bench.json"
MARKED_TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
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


def _step_times(record: Record, baseline: Record) -> Row:
    """From one rank's step to DDP's, in ms; the middle three are bare steps, timed in the run itself."""
    ceiling, steps = record["machine_ceiling"], record["steps"]

    def trainer_step_s(run: Record) -> float:
        return (run["train_time_s"] - run["reporting_s"]) / run["steps"]

    seconds = {
        "One rank, the whole batch, in training": trainer_step_s(baseline),
        "One rank, the whole batch, bare": ceiling["one_rank_global_batch_step_s"],
        "One rank, its share alone, bare": ceiling["one_rank_share_step_s"],
        "All ranks at once, not synchronising, bare": ceiling["all_ranks_share_step_s"],
        "All ranks, in training with DDP": trainer_step_s(record),
    }
    about = {"Seed": str(record["config"]["seed"]), "Started by": record["launcher"], "Steps": str(steps)}
    return {**about, **{name: f"{value * 1e3:.0f} ms" for name, value in seconds.items()}}


def ddp_step(records: list[Record]) -> pd.DataFrame:
    """2.2: where a step's time goes when its rows are shared."""
    rows = []
    for record in completed(records, LORA_DDP):
        baseline = baseline_of(record, records, "effective_batch_size")
        if baseline and record.get("machine_ceiling"):
            rows.append(_step_times(record, baseline))
    return pd.DataFrame(rows)


def front(records: list[Record]) -> pd.DataFrame:
    """Root README: what two devices bring, by command, on the first seed."""
    by_command = [r for r in records if r["launcher"] in ("python", "torchrun") and r["config"]["seed"] == 42]
    rows = []
    for same, words in (
        ("effective_batch_size", "the same global batch"),
        ("per_device_train_batch_size", "the same rows per device"),
    ):
        scaling = "strong" if same == "effective_batch_size" else "weak"
        for row, record in zip(*_scaled(by_command, same, scaling), strict=True):
            after = record["quality"]["after"]
            replicates = PARALLELISMS[record["parallel"]].replicates
            rows.append({
                "What": f"{row['Approach']}, {words}" if replicates else row["Approach"],
                "Devices": row["Devices"],
                "Rows per device and step": str(record["config"]["per_device_train_batch_size"]),
                "Training time": row["Training time"],
                "Speed-up": row["Training speedup factor"],
                "Machine's ceiling": row["Machine's ceiling"],
                "Facts said (higher is better)": percent(after["facts_said_share"]),
            })  # fmt: skip
    return pd.DataFrame(rows).drop_duplicates()


def lora_quality(records: list[Record]) -> pd.DataFrame:
    """2.1: quality on one device."""
    published = [published_quality(result) for result in published_results(LORA)]
    measured = [measured_quality(record) for record in completed(records, LORA)]
    return table_of(records, (LORA,), measured, published)


def lora_speed(records: list[Record]) -> pd.DataFrame:
    """2.1: time and memory on one device."""
    published = [published_speed(result, result) for result in published_results(LORA)]
    measured = [measured_speed(record, record, "strong") for record in completed(records, LORA)]
    columns = ["Training speedup factor", "Machine's ceiling", "CUDA scaling factor", "VRAM scaling factor"]
    return table_of(records, (LORA,), measured, published).drop(columns=columns)


def ddp_quality(records: list[Record]) -> pd.DataFrame:
    """2.2: quality with DDP beside one device."""
    published = [published_quality(result) for result in published_results(LORA, LORA_DDP)]
    measured = [measured_quality(record) for record in completed(records, LORA, LORA_DDP)]
    return table_of(records, (LORA, LORA_DDP), measured, published)


def _scaling(records: list[Record], same: str, ceiling: str) -> list[Row]:
    return _scaled(records, same, ceiling)[0]


def _scaled(records: list[Record], same: str, ceiling: str) -> tuple[list[Row], list[Record]]:
    """Each DDP run after the one-device run that it is stated against: its row, and its record."""
    rows, of, shown = [], [], set()
    for record in completed(records, LORA_DDP):
        baseline = baseline_of(record, records, same)
        if baseline and id(baseline) not in shown:
            shown.add(id(baseline))
            rows.append(measured_speed(baseline, baseline, ceiling))
            of.append(baseline)
        if baseline:
            rows.append(measured_speed(record, baseline, ceiling))
            of.append(record)
    return rows, of


def ddp_strong(records: list[Record]) -> pd.DataFrame:
    """2.2: speed-up at the same effective batch size: the same steps, shared (strong scaling)."""
    hardware = ["CUDA scaling factor", "VRAM scaling factor"]
    return pd.DataFrame(_scaling(records, "effective_batch_size", "strong")).drop(columns=hardware, errors="ignore")


def ddp_weak(records: list[Record]) -> pd.DataFrame:
    """2.2: speed-up at the same rows per device: fewer, larger steps for the same rows (weak scaling)."""
    published = published_results(LORA, LORA_DDP)
    rows = [published_speed(result, published[0]) for result in published]
    return table_of(records, (LORA_DDP,), _scaling(records, "per_device_train_batch_size", "weak"), rows)


def master(records: list[Record]) -> pd.DataFrame:
    """Root README: one line per kept run."""
    columns = ["Approach", "Figures", "Seed", "Devices", "Batch size", "Training time", "Peak memory per device (GiB)"]
    measured = []
    for record in completed(records, *KIND_NAMES):
        speed, quality = measured_speed(record, None, "strong"), measured_quality(record)
        measured.append({
            **{name: speed[name] for name in columns},
            "Model": model_of(record),
            "Trained on": trained_on(record),
            "Learning rate scaling": quality["Learning rate scaling"],
            **{
                after: f"{quality[before]} -> {quality[after]}"
                for before, after in (
                    ("Similarity score before (lower is better)", "Similarity score (lower is better)"),
                    ("By MiniLM before", "By MiniLM"),
                    ("Facts said before", "Facts said (higher is better)"),
                )
            },
        })  # fmt: skip
    published = [
        {
            **{name: published_speed(result, result)[name] for name in columns},
            "Model": NOT_PUBLISHED,
            "Trained on": f"{result['epochs']} epochs",
            "Learning rate scaling": published_quality(result)["Learning rate scaling"],
            "Similarity score (lower is better)": score(result["similarity_score"]),
            "By MiniLM": NOT_PUBLISHED,
            "Facts said (higher is better)": NOT_PUBLISHED,
        }
        for result in published_results()
    ]
    return table_of(records, tuple(KIND_NAMES), measured, published)


def bench_all(records: list[Record]) -> pd.DataFrame:
    """What `make bench` measured last; it stands in bench.json, not in the `records`."""
    return _bench_table(with_bars_only=False)


def bench(records: list[Record]) -> pd.DataFrame:
    """The figures of `bench_all` that have a bar."""
    return _bench_table(with_bars_only=True)


def planner(records: list[Record]) -> pd.DataFrame:
    """1.1: how far the planner is off, as `make bench` measured it."""
    table = _bench_table(with_bars_only=False)
    return table[table["What"].str.startswith("planner")] if not table.empty else table


def measured_value(entry: dict[str, Any]) -> str:
    """`1.553 ratio`, `6,357 tokens per s`; what never got there says so in its name."""
    value = entry["value"]
    if value is None:
        return NOT_RUN if NOT_RUN in entry["name"] else "not reached"
    return f"{value:,.0f} {entry['unit']}" if value >= 1000 else f"{value:.3f} {entry['unit']}"


def _holds(entry: dict[str, Any]) -> str:
    if entry["value"] is None and NOT_RUN in entry["name"]:
        return NOT_RUN
    return {True: "yes", False: "**no**", None: ""}[entry["holds"]]


def _bench_table(with_bars_only: bool) -> pd.DataFrame:
    entries = json.loads(BENCH_FILE.read_text(encoding="utf-8")) if BENCH_FILE.is_file() else []
    return pd.DataFrame([
        {
            "What": entry["name"],
            "Measured": measured_value(entry),
            "Bar": "" if entry["bar"] is None else f"{entry['bar_is']} {entry['bar']:g}",
            "Holds": _holds(entry),
            "Command": f"`{entry['command']}`",
        }
        for entry in entries
        if not with_bars_only or entry["bar"] is not None
    ])  # fmt: skip


TABLES: dict[str, Callable[[list[Record]], pd.DataFrame]] = {
    "bench": bench,
    "bench-all": bench_all,
    "front": front,
    "planner": planner,
    "master": master,
    "lora-quality": lora_quality,
    "lora-speed": lora_speed,
    "ddp-quality": ddp_quality,
    "ddp-strong": ddp_strong,
    "ddp-weak": ddp_weak,
    "ddp-step": ddp_step,
    **full.TABLES,
    **sharding.TABLES,
    **qlora.TABLES,
    **classification.TABLES,
    **loops.TABLES,
    **summarization.TABLES,
    **equivalence.TABLES,
    **faults.TABLES,
}


def side_by_side(records: list[Record]) -> pd.DataFrame:
    """Runs as columns, what they were asked and what came of it as rows: what `make demo` prints."""
    columns = {}
    for record in records:
        config, title = record["config"], f"{record['run_folder'].split('_')[0]} {record['run_name']}"
        if record["status"] != "completed":
            columns[title] = {"status": f"{record['status']}: {record.get('error', '')[:60]}"}
            continue
        before, after = record["quality"]["before"], record["quality"]["after"]
        entries = {
            "approach": KIND_NAMES[kind_of(record)],
            "devices": devices_of(record),
            "rows per device and step": config["per_device_train_batch_size"],
            "effective batch size": record["effective_batch_size"],
            "steps": record["steps"],
            "similarity score before": score(before["similarity_score"]),
            "similarity score after": score(after["similarity_score"]),
            "by MiniLM before": score(before["similarity_score_minilm"]),
            "by MiniLM after": score(after["similarity_score_minilm"]),
            "answers shuffled": score(after["shuffled_score"]),
            "shuffled, by MiniLM": score(after["shuffled_score_minilm"]),
            "facts said before": percent(before["facts_said_share"]),
            "facts said after": percent(after["facts_said_share"]),
            "lowest validation loss": f"{record['best_validation_loss']:.4f}",
            "training time": clock(record["train_time_s"]),
            "of that, validation and checkpoints": clock(record["reporting_s"]),
            "tokens per second": f"{record['tokens_per_s']:,.0f}",
            "peak memory per device (GiB)": peak_memory_gib(record),
            "training's peak, planned / measured": planned_memory(record),
        }
        if record.get("updated_share") is not None and not TECHNIQUES[record["technique"]].has_adapters:
            entries["weights that a step changes"] = percent(record["updated_share"])
        if record.get("quantization"):
            stored, original = record["quantization"], record["quality"]["after_original_base"]
            entries["weights of the base, in 4 bits / not (GiB)"] = (
                f"{stored['weights_gib']:.3g} / {stored['unquantized_gib']:.3g}"
            )
            said = percent(original["facts_said_share"]) if original else NOT_RUN
            entries["facts said, merged into the original base"] = said
        if record.get("stages"):
            idle = " / ".join(f"{stage['idle_share']:.0%}" for stage in record["stages"])
            entries["idle share per stage"] = idle
        for same, ceiling, words in (
            ("effective_batch_size", "strong", "at the same effective batch"),
            ("per_device_train_batch_size", "weak", "at the same rows per device"),
        ):
            baseline = (
                baseline_of(record, records, same) if not PARALLELISMS[record["parallel"]].in_one_process else None
            )
            if baseline:
                speedup = baseline["train_time_s"] / record["train_time_s"]
                entries[f"speed-up {words}"] = f"{speedup:.2f}x"
                entries[f"machine's ceiling {words}"] = ceiling_of(record, ceiling)
        columns[title] = entries
    return pd.DataFrame(columns).dropna(how="all").fillna("")


def planner_answer() -> str:
    """1.1: what the planner prints for the readme's own question."""
    said = io.StringIO()
    with redirect_stdout(said):
        planner_command.answer(planner_command.read_options(PLANNER_QUESTION.split()))
    return f"```text\n{said.getvalue().strip()}\n```\n"


def rendered(name: str, records: list[Record]) -> str:
    """A table as Markdown, or the planner's answer as it prints it."""
    if name == "planner-answer":
        return planner_answer()
    table = TABLES[name](records)
    return "not run\n" if table.empty else table.to_markdown(index=False, disable_numparse=True) + "\n"


def with_tables(text: str, records: list[Record]) -> str:
    """`text` with each marked table replaced by what the records say."""
    return MARKED_TABLE.sub(lambda found: found[1] + rendered(found["name"], records) + found[3], text)


def readmes(root: Path = REPOSITORY) -> list[Path]:
    """The READMEs with tables: the root's, the benchmark's and the technique folders'."""
    return [root / "README.md", root / "bench" / "README.md", *sorted(root.glob("[0-9].[0-9]_*/*_readme.md"))]
