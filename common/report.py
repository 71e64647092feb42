"""Records to tables. No figure of a table is typed by hand.

    python -m common.report               the tables, from the committed records
    python -m common.report --check       exit 1 where a README disagrees with the records
    python -m common.report --write       write the tables into the READMEs, between their markers
    python -m common.report --results     what the last runs on this machine wrote, side by side

Every row is `measured` (from a committed record), `published` (with its source) or `not run`.
"""

import argparse
import io
import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd

from common.hardware import gpu_of_device
from common.run_config import REPOSITORY, BadInputError, RunConfig
from common.run_record import PREVIOUS, RECORD_NAME, Record, kept_records, load_record
from common.siblings import run_folders

PUBLISHED_FILE = REPOSITORY / "assets" / "published.json"
BENCH_FILE = REPOSITORY / "bench" / "bench.json"
NOT_RUN, NOT_PUBLISHED, NO_GPU = "not run", "not published", "no GPU"
PLANNED = "Training's peak, planned / measured (GiB)"
MARKED_TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
TECHNIQUE_NAMES = {("lora", "single"): "LoRA", ("lora", "ddp"): "LoRA with DDP"}
FREE_SETTINGS = {
    *("parallel", "devices", "batch_size", "accumulation_steps", "gradient_checkpointing"),
    *("run_folder", "run_name", "results_root"),
}
"""Settings that two runs need not share to be compared in time: how the work is divided, and what it is called."""

PLANNER_QUESTION = "--model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 4 --seq-len 1024"

LEGEND = """\
similarity score: a distance between answer and reference, lower is better; judged by the base model
by MiniLM: the same by a sentence encoder that had no part in the training
shuffled: the score of the right answers to other questions: a score near it says nothing of the content
facts said: share of the facts asked for that stand in the answers
speed-up: training time of 2.1's run over this run's
machine's ceiling: the highest speed-up to expect here: the same ranks without synchronising, against one
memory: on CPU the resident memory of the process, most of it Python and PyTorch
More in the readmes of 2.1 and 2.2."""

Row = dict[str, str]


def results_of_this_machine(root: Path = REPOSITORY) -> list[Record]:
    """The records of the last runs, whether kept or not."""
    found = root.glob(f"*/run_*/results/*/{RECORD_NAME}")
    records = [load_record(path) for path in found if not path.parent.name.endswith(PREVIOUS)]
    return sorted(
        records, key=lambda record: (record["run_folder"], record["config"]["batch_size"], record["run_name"])
    )


def published_results() -> list[dict[str, Any]]:
    """Results that others published, each with its source."""
    return json.loads(PUBLISHED_FILE.read_text(encoding="utf-8"))


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`: hours, minutes and seconds, rounded."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clock_seconds(text: str) -> int:
    """Seconds of `1:02:03` or `2:03`."""
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds


def percent(share: float | None) -> str:
    """`63%`; data without facts have no share."""
    return "no facts in the data" if share is None else f"{share:.0%}"


def devices_of(record: Record) -> str:
    """`AMD EPYC, 1 thread x2`: two CPU devices of one thread each."""
    world, environment = len(record["world"]), record["environment"]
    name = environment["devices"][0]
    return f"{name}, 1 thread x{world}" if record["config"]["device"] == "cpu" else f"{name} x{world}"


def peak_memory_gib(record: Record) -> str:
    """Peak memory of each device: allocated on a GPU, resident (RSS) on CPU."""
    peaks = [entry["peak_allocated_gib"] or entry["peak_rss_gib"] for entry in record["memory"]]
    return " / ".join(f"{peak:.2f}" for peak in peaks)


def planned_memory(record: Record) -> str:
    """`0.64 / 0.63 (+1%)`: training's peak as planned and as measured, in GiB, of the device that is furthest off."""
    pairs = [(entry["planned_gib"], entry.get("peak_training_gib")) for entry in record["memory"]]
    known = [(planned, measured) for planned, measured in pairs if planned is not None and measured is not None]
    if not known:
        return NOT_RUN
    planned, measured = max(known, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return f"{planned:.2f} / {measured:.2f} ({planned / measured - 1:+.0%})"


def ceiling_of(record: Record, scaling: str) -> str:
    """The run's own measurement of the highest speed-up to expect; `scaling` is `strong` or `weak`."""
    ceiling = record.get("machine_ceiling")
    return f"{ceiling[scaling]:.2f}x" if ceiling else NOT_RUN


def workload(record: Record) -> dict[str, object]:
    """What two runs must share to be compared in time: every setting but the free ones, and the kind of device."""
    config, environment = {**RunConfig().to_dict(), **record["config"]}, record["environment"]  # older: fewer settings
    return {
        **{name: value for name, value in config.items() if name not in FREE_SETTINGS},
        "recomputes_activations": config["gradient_checkpointing"] != "none",
        "device_name": environment["devices"][0],
        "threads_per_rank": environment["threads_per_rank"],
    }


def baseline_of(record: Record, records: Iterable[Record], same: str) -> Record | None:
    """The one-device run that `record`'s speed-up is stated against: same work, seed and `same` batch size.

    A run by command comes before a notebook's, as the others are runs by command, too.

    `same` is `effective_batch_size` (strong scaling) or `batch_size` (rows per device: weak scaling).
    """

    def rows(run: Record) -> int:
        return run["effective_batch_size"] if same == "effective_batch_size" else run["config"]["batch_size"]

    found = [
        candidate
        for candidate in completed(records, "single")
        if workload(candidate) == workload(record) and rows(candidate) == rows(record)
    ]
    return min(found, key=lambda candidate: candidate["launcher"] != "python", default=None)


def completed(records: Iterable[Record], *parallel: str) -> list[Record]:
    """The completed runs among `records`, of the given ways to share work."""
    return [record for record in records if record["status"] == "completed" and record["parallel"] in parallel]


def score(value: float | None) -> str:
    """A similarity score; None where nobody judged."""
    return NOT_RUN if value is None else f"{value:.3f}"


def learning_rate_scaling(record: Record) -> str:
    """`1x (0.001)`: the peak learning rate, and how much of it comes from scaling with the ranks."""
    peak = record["peak_learning_rate"]
    return f"{peak / record['config']['learning_rate']:.3g}x ({peak:.3g})"


def model_of(record: Record) -> str:
    """The model's name; random weights are told apart from the real ones."""
    config = record["config"]
    return Path(config["model"]).name + (", random weights" if config["weights"] == "random" else "")


def trained_on(record: Record) -> str:
    """The data, and how often they were gone through."""
    config, samples = record["config"], sum(share["samples"] for share in record["world"])
    return f"{Path(config['data']).name}, {samples:,} rows in up to {config['epochs']} epochs"


def hardware_factors(record: Record, baseline: Record | None) -> Row:
    """CUDA cores and memory of a run's GPUs, as multiples of its baseline's."""
    gpu, other = (gpu_of_device(run["environment"]["devices"][0]) if run else None for run in (record, baseline))
    if gpu is None:
        return {"CUDA scaling factor": NO_GPU, "VRAM scaling factor": NO_GPU}
    count, base_count = len(record["world"]), len(baseline["world"]) if baseline else 1
    base = other if baseline else gpu
    if base is None:
        return {"CUDA scaling factor": "another kind of device", "VRAM scaling factor": "another kind of device"}
    cores = count * gpu.cuda_cores / (base_count * base.cuda_cores)
    memory = count * gpu.memory_gib / (base_count * base.memory_gib)
    return {
        "CUDA scaling factor": f"{cores:.3g}x ({gpu.cuda_cores:,} x{count})",
        "VRAM scaling factor": f"{memory:.3g}x ({gpu.memory_gib:.0f} GiB x{count})",
    }


def _name(record: Record) -> str:
    return f"{TECHNIQUE_NAMES[record['technique'], record['parallel']]}, {record['launcher']}"


def _measured_quality(record: Record) -> Row:
    config, before, after = record["config"], record["quality"]["before"], record["quality"]["after"]
    return {
        "Approach": _name(record),
        "Figures": "measured",
        "Seed": str(record["config"]["seed"]),
        "Devices": devices_of(record),
        "Epochs": str(config["epochs"]),
        "Batch size": str(config["batch_size"] * config["accumulation_steps"]),
        "Effective batch size": f"{config['batch_size'] * config['accumulation_steps']} x{len(record['world'])}",
        "Learning rate scaling": learning_rate_scaling(record),
        "Similarity score before (lower is better)": score(before["similarity_score"]),
        "Similarity score (lower is better)": score(after["similarity_score"]),
        "By the tuned model": score(after["similarity_score_tuned"]),
        "By MiniLM before": score(before["similarity_score_minilm"]),
        "By MiniLM": score(after["similarity_score_minilm"]),
        "Answers shuffled": score(after["shuffled_score"]),
        "Shuffled, by MiniLM": score(after["shuffled_score_minilm"]),
        "Facts said before": percent(before["facts_said_share"]),
        "Facts said (higher is better)": percent(after["facts_said_share"]),
        "Validation loss": f"{record['best_validation_loss']:.4f}",
    }


def _published_quality(result: dict[str, Any]) -> Row:
    return {
        "Approach": TECHNIQUE_NAMES[result["technique"], result["parallel"]],
        "Figures": f"published: {result['source']}",
        "Seed": NOT_PUBLISHED,
        "Devices": f"{result['gpu']} x{result['devices']}",
        "Epochs": str(result["epochs"]),
        "Batch size": str(result["batch_size"]),
        "Effective batch size": f"{result['batch_size']} x{result['devices']}",
        "Learning rate scaling": f"1x ({result['learning_rate']:g})",
        "Similarity score before (lower is better)": NOT_PUBLISHED,
        "Similarity score (lower is better)": score(result["similarity_score"]),
        **dict.fromkeys(
            ("By the tuned model", "By MiniLM before", "By MiniLM", "Answers shuffled", "Shuffled, by MiniLM"),
            NOT_PUBLISHED,
        ),
        "Facts said before": NOT_PUBLISHED,
        "Facts said (higher is better)": NOT_PUBLISHED,
        "Validation loss": NOT_PUBLISHED,
    }


def _measured_speed(record: Record, baseline: Record | None, ceiling: str) -> Row:
    speedup = baseline["train_time_s"] / record["train_time_s"] if baseline else None
    return {
        "Approach": _name(record),
        "Figures": "measured",
        "Seed": str(record["config"]["seed"]),
        "Devices": devices_of(record),
        **hardware_factors(record, baseline),
        "Batch size": f"{record['config']['batch_size']} x{len(record['world'])}",
        "Steps": str(record["steps"]),
        "Training time": clock(record["train_time_s"]),
        "Of that, validation and checkpoints": clock(record["reporting_s"]),
        "Training speedup factor": f"{speedup:.2f}x" if speedup else NOT_RUN,
        "Machine's ceiling": "1x" if record["parallel"] == "single" else ceiling_of(record, ceiling),
        "Tokens per second": f"{record['tokens_per_s']:,.0f}",
        "Peak memory per device (GiB)": peak_memory_gib(record),
        PLANNED: planned_memory(record),
        "Command": f"`{record['command']}`" if record["command"] != "the notebook" else "the notebook",
    }


def _published_speed(result: dict[str, Any], baseline: dict[str, Any]) -> Row:
    speedup = clock_seconds(baseline["train_time"]) / clock_seconds(result["train_time"])
    return {
        "Approach": TECHNIQUE_NAMES[result["technique"], result["parallel"]],
        "Figures": f"published: {result['source']}",
        "Seed": NOT_PUBLISHED,
        "Devices": f"{result['gpu']} x{result['devices']}",
        "CUDA scaling factor": f"{result['devices'] / baseline['devices']:g}x "
        f"({result['cuda_cores']:,} x{result['devices']})",
        "VRAM scaling factor": f"{result['devices'] / baseline['devices']:g}x "
        f"({result['vram_gb']}G x{result['devices']})",
        "Batch size": f"{result['batch_size']} x{result['devices']}",
        "Steps": NOT_PUBLISHED,
        "Training time": clock(clock_seconds(result["train_time"])),
        "Of that, validation and checkpoints": NOT_PUBLISHED,
        "Training speedup factor": f"{speedup:.2f}x",
        "Machine's ceiling": NOT_PUBLISHED,
        "Tokens per second": NOT_PUBLISHED,
        "Peak memory per device (GiB)": NOT_PUBLISHED,
        PLANNED: NOT_PUBLISHED,
        "Command": NOT_PUBLISHED,
    }


def _not_run(folder: Path, run: RunConfig) -> Row:
    """What is known of a run folder without a record: its settings and its command."""
    return {
        "Approach": TECHNIQUE_NAMES[run.technique, run.parallel],
        "Figures": NOT_RUN,
        "Seed": str(run.seed),
        "Model": Path(run.model).name,
        "Devices": f"{run.gpu or 'CPU, 1 thread'} x{run.devices}",
        "Epochs": str(run.epochs),
        "Batch size": f"{run.batch_size} x{run.devices}",
        "Effective batch size": f"{run.batch_size * run.accumulation_steps} x{run.world_size}",
        "Learning rate scaling": f"{run.peak_learning_rate / run.learning_rate:.3g}x ({run.peak_learning_rate:.3g})",
        "Trained on": f"{run.epochs} epochs",
        "Command": f"`make run FOLDER={folder.relative_to(REPOSITORY)}`",
    }


def _table(records: list[Record], parallel: tuple[str, ...], measured: list[Row], published: list[Row]) -> pd.DataFrame:
    """Measured rows, a row for each run folder without any record, and published rows."""
    done = {record["run_folder"] for record in completed(records, *parallel)}
    waiting = [
        _not_run(folder, run)
        for folder, run in run_folders().items()
        if run.parallel in parallel and run.run_folder not in done
    ]
    columns = list((measured + published)[0])
    return pd.DataFrame(measured + waiting + published, columns=columns).fillna(NOT_RUN)


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
    for record in completed(records, "ddp"):
        baseline = baseline_of(record, records, "effective_batch_size")
        if baseline and record.get("machine_ceiling"):
            rows.append(_step_times(record, baseline))
    return pd.DataFrame(rows)


def front(records: list[Record]) -> pd.DataFrame:
    """Root README: what two devices bring, by command, on the first seed."""
    by_command = [r for r in records if r["launcher"] in ("python", "torchrun") and r["config"]["seed"] == 42]
    rows = []
    for same, words in (("effective_batch_size", "the same global batch"), ("batch_size", "the same rows per device")):
        scaling = "strong" if same == "effective_batch_size" else "weak"
        for row, record in zip(*_scaled(by_command, same, scaling), strict=True):
            after = record["quality"]["after"]
            rows.append({
                "What": f"{row['Approach']}, {words}" if record["parallel"] == "ddp" else row["Approach"],
                "Devices": row["Devices"],
                "Rows per device and step": str(record["config"]["batch_size"]),
                "Training time": row["Training time"],
                "Speed-up": row["Training speedup factor"],
                "Machine's ceiling": row["Machine's ceiling"],
                "Facts said (higher is better)": percent(after["facts_said_share"]),
            })  # fmt: skip
    return pd.DataFrame(rows).drop_duplicates()


def lora_quality(records: list[Record]) -> pd.DataFrame:
    """2.1: quality on one device."""
    published = [_published_quality(result) for result in published_results() if result["parallel"] == "single"]
    measured = [_measured_quality(record) for record in completed(records, "single")]
    return _table(records, ("single",), measured, published)


def lora_speed(records: list[Record]) -> pd.DataFrame:
    """2.1: time and memory on one device."""
    published = [_published_speed(result, result) for result in published_results() if result["parallel"] == "single"]
    measured = [_measured_speed(record, record, "strong") for record in completed(records, "single")]
    columns = ["Training speedup factor", "Machine's ceiling", "CUDA scaling factor", "VRAM scaling factor"]
    return _table(records, ("single",), measured, published).drop(columns=columns)


def ddp_quality(records: list[Record]) -> pd.DataFrame:
    """2.2: quality with DDP beside one device."""
    published = [_published_quality(result) for result in published_results()]
    measured = [_measured_quality(record) for record in completed(records, "single", "ddp")]
    return _table(records, ("single", "ddp"), measured, published)


def _scaling(records: list[Record], same: str, ceiling: str) -> list[Row]:
    return _scaled(records, same, ceiling)[0]


def _scaled(records: list[Record], same: str, ceiling: str) -> tuple[list[Row], list[Record]]:
    """Each DDP run after the one-device run that it is stated against: its row, and its record."""
    rows, of, shown = [], [], set()
    for record in completed(records, "ddp"):
        baseline = baseline_of(record, records, same)
        if baseline and id(baseline) not in shown:
            shown.add(id(baseline))
            rows.append(_measured_speed(baseline, baseline, ceiling))
            of.append(baseline)
        if baseline:
            rows.append(_measured_speed(record, baseline, ceiling))
            of.append(record)
    return rows, of


def ddp_strong(records: list[Record]) -> pd.DataFrame:
    """2.2: speed-up at the same effective batch size: the same steps, shared (strong scaling)."""
    hardware = ["CUDA scaling factor", "VRAM scaling factor"]
    return pd.DataFrame(_scaling(records, "effective_batch_size", "strong")).drop(columns=hardware, errors="ignore")


def ddp_weak(records: list[Record]) -> pd.DataFrame:
    """2.2: speed-up at the same rows per device: fewer, larger steps for the same rows (weak scaling)."""
    published = published_results()
    rows = [_published_speed(result, published[0]) for result in published]
    return _table(records, ("ddp",), _scaling(records, "batch_size", "weak"), rows)


def master(records: list[Record]) -> pd.DataFrame:
    """Root README: one line per kept run."""
    columns = ["Approach", "Figures", "Seed", "Devices", "Batch size", "Training time", "Peak memory per device (GiB)"]
    measured = []
    for record in completed(records, "single", "ddp"):
        speed, quality = _measured_speed(record, None, "strong"), _measured_quality(record)
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
            **{name: _published_speed(result, result)[name] for name in columns},
            "Model": NOT_PUBLISHED,
            "Trained on": f"{result['epochs']} epochs",
            "Learning rate scaling": _published_quality(result)["Learning rate scaling"],
            "Similarity score (lower is better)": score(result["similarity_score"]),
            "By MiniLM": NOT_PUBLISHED,
            "Facts said (higher is better)": NOT_PUBLISHED,
        }
        for result in published_results()
    ]
    return _table(records, ("single", "ddp"), measured, published)


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
            "approach": TECHNIQUE_NAMES[record["technique"], record["parallel"]],
            "devices": devices_of(record),
            "rows per device and step": config["batch_size"],
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
        for same, ceiling, words in (
            ("effective_batch_size", "strong", "at the same effective batch"),
            ("batch_size", "weak", "at the same rows per device"),
        ):
            baseline = baseline_of(record, records, same) if record["parallel"] == "ddp" else None
            if baseline:
                speedup = baseline["train_time_s"] / record["train_time_s"]
                entries[f"speed-up {words}"] = f"{speedup:.2f}x"
                entries[f"machine's ceiling {words}"] = ceiling_of(record, ceiling)
        columns[title] = entries
    return pd.DataFrame(columns).dropna(how="all").fillna("")


def planner_answer() -> str:
    """1.1: what the planner prints for the readme's own question."""
    from common import planner  # here: it reads records, as this module does

    said = io.StringIO()
    with redirect_stdout(said):
        planner.answer(planner.parser().parse_args(PLANNER_QUESTION.split()))
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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Tables of the records.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="exit 1 where a README disagrees with the records")
    mode.add_argument("--write", action="store_true", help="write the tables into the READMEs")
    mode.add_argument("--results", action="store_true", help="the last runs of this machine, side by side")
    parser.add_argument("--json", action="store_true", help="print tables as JSON")
    options = parser.parse_args()
    try:
        sys.exit(_run(options))
    except BadInputError as mistake:
        parser.exit(2, f"error: {mistake}\n")


def _run(options: argparse.Namespace) -> int:
    if options.results:
        table = side_by_side(results_of_this_machine())
        if table.empty:
            raise BadInputError("There is no result on this machine yet: `make demo` makes some.")
        text = table.to_markdown(tablefmt="simple", disable_numparse=True) + "\n\n" + LEGEND
        print(table.to_json(indent=2) if options.json else text)
        return 0
    records = kept_records()
    if not options.check and not options.write:
        tables = {name: TABLES[name](records) for name in TABLES}
        if options.json:
            print(json.dumps({name: table.to_dict("records") for name, table in tables.items()}, indent=2))
        else:
            print("\n".join(f"{name}\n\n{rendered(name, records)}" for name in tables))
        return 0
    stale = [
        path for path in readmes() if with_tables(path.read_text(encoding="utf-8"), records) != path.read_text("utf-8")
    ]
    for path in stale:
        if options.write:
            path.write_text(with_tables(path.read_text(encoding="utf-8"), records), encoding="utf-8")
        print(
            f"{'wrote' if options.write else 'out of date (`make tables` renders it)'}: {path.relative_to(REPOSITORY)}"
        )
    return int(options.check and bool(stale))


if __name__ == "__main__":
    main()
