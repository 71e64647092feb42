"""How long a row may be in training, by card, technique, and how many GPUs share each row; all is projected."""

from dataclasses import replace
from functools import partial

from bench.tables.table import Table
from common.base.specs import TECHNIQUES
from common.hardware.devices import find_gpu
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape, Job
from common.planning.plans import LONGEST_ROW, TOKENS_STEP
from common.planning.ranking import ranked_plans, with_longest_rows
from common.planning.time_plan import Cluster
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import Row

MODELS, GPUS = ("llama-3.1-8b", "qwen2.5-7b"), ("RTX A6000 48GB", "A100 80GB SXM", "H200 141GB SXM")
SHARING, MOST_GPUS = (2, 4, 8), 8


def tokens_by_sharing(model: str, gpu: str, technique: str, gpus: int) -> dict[int, int]:
    """Return the longest row that is safe to fit, 0 for none, by how many of the GPUs share each; several have FSDP."""
    architecture = replace(read_architecture(model), max_length=LONGEST_ROW)
    job = Job(technique, "single", BatchShape(1, TOKENS_STEP, TOKENS_STEP))
    cluster, parallels = Cluster((find_gpu(gpu),) * gpus), ("fsdp",) if gpus > 1 else ("single",)
    plans = ranked_plans(architecture, job, cluster, {}, [technique], parallels, True)
    longest = with_longest_rows([plan for plan in plans if not plan.job.offload], True, {})
    return {plan.job.sp_size: plan.job.batch.length * plan.fits for plan in longest}


def _rows(model: str, _: list[Record]) -> list[Row]:
    rows = []
    for gpu in GPUS:
        for technique in ("full", "lora"):
            found = {gpus: tokens_by_sharing(model, gpu, technique, gpus) for gpus in (1, *SHARING)}
            shared = {gpus: tokens.get(gpus, 0) for gpus, tokens in found.items()}
            own = {"gpu": gpu, "technique": TECHNIQUES[technique].short, "own": found[MOST_GPUS][1]}
            rows.append(own | {f"by {gpus}": tokens for gpus, tokens in shared.items()})
    return rows


def _tokens(title: str, name: str) -> Column:
    return Column(title, lambda row: f"{row[name]:,}" if row[name] else "-")


TABLES = {
    f"longest-rows {model}": Table(
        partial(_rows, model),
        (
            Column("GPU", "gpu"),
            Column("Technique", "technique"),
            _tokens("1 GPU", "by 1"),
            _tokens(f"FSDP on {MOST_GPUS}", "own"),
            *(_tokens(f"{gpus} share", f"by {gpus}") for gpus in SHARING),
        ),
    )
    for model in MODELS
}
