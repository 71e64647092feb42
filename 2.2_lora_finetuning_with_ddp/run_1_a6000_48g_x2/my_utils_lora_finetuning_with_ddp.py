"""What only DDP needs: the speed-up that this machine allows, and a comparison with the library's own trainer."""

from collections.abc import Iterable

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from transformers import PrinterCallback, Trainer, TrainingArguments

from common.base.run_config import RunConfig
from common.data.batches import make_collator
from common.data.splits import tokenized
from common.measuring.beside import trained_beside
from common.measuring.ceiling import measure_machine_ceiling
from common.models.trained_weights import add_lora
from common.reporting.columns import speedup
from common.reporting.rows import STRONG, Row, data_parallel_ranks
from common.runtime.rank import end_rank, start_rank
from common.runtime.recorder import Trial
from common.training.loop import TrainingLoop
from common.training.optimizers import training_arguments
from common.training.steps import load


def measure_ceiling(loop: TrainingLoop) -> dict[str, float] | None:
    """Measure the highest possible speed-up; on CPU only, as one GPU may not hold the global batch."""
    if loop.run.device == "cuda":
        return None
    with loop.log.phase("machine ceiling"):
        return measure_machine_ceiling(loop)


def plot_speed_ups(rows: Iterable[Row]) -> Figure:
    """Plot runs' speed-ups over one device, with the ideal and the upper bound that each measured on its machine.

    `rows` are those of `beside_one_device`; what has no run on one device, or no upper bound, is left out.
    """
    shared = {STRONG: "same global batch"}
    names = {
        f"{row['run_name']}\n({shared.get(row['same'], 'same batch per rank')})": row
        for row in rows
        if row["baseline"] and row["ceiling"] and data_parallel_ranks(row) > 1
    }
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.5 * len(names)), layout="constrained")
    bars = axes.barh(list(names), [speedup(row) for row in names.values()], color="tab:blue", label="measured")
    axes.bar_label(bars, fmt="%.2f", label_type="center", color="white")
    marks = {
        "upper bound without gradient synchronization": ("tab:red", [row["ceiling"] for row in names.values()]),
        "ideal: the number of ranks": ("black", [data_parallel_ranks(row) for row in names.values()]),
    }
    for label, (colour, values) in marks.items():
        axes.scatter(values, list(names), s=400, marker="|", color=colour, label=label)
    axes.set(xlabel="speed-up of training over one device", xlim=(0, None))
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3, fontsize=9, markerscale=0.5)
    return figure


def train_by_trainer(log: Trial) -> None:
    """Train with Transformers' Trainer, which puts DDP around the model, and divides rows and loss by itself."""
    model, tokenizer, data = load(log)
    of_ddp = {"ddp_find_unused_parameters": False}  # with adapters the Trainer would look for such in every step
    arguments = training_arguments(log.run, log.folder, keeps=False, kind=TrainingArguments, **of_ddp)
    rows = tokenized(data, tokenizer, log.run).train
    trainer = Trainer(add_lora(model, log.run), arguments, make_collator(tokenizer), rows, callbacks=log.callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def compare_with_trainer(run: RunConfig) -> None:
    """Print losses, time and memory of this folder's loop, and of the Trainer's; called on every rank."""
    from my_workflow_lora_finetuning_with_ddp import train  # here: it imports this module

    rank = start_rank(run)
    table = trained_beside(run, rank, {"this loop": lambda log: train(log, *load(log)), "Trainer": train_by_trainer})
    if rank.is_main:
        print(table.to_string())
    end_rank()
