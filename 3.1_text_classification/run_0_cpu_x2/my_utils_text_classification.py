"""What only this folder needs: the loop of each parallelism, finding labels, what is measured, saved and drawn."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from my_utils_classification_scores import Classified
from my_utils_tensor_parallel import check_split, load_columns, mesh_of_all, split_by_plan
from transformers import PreTrainedModel

from common.base.inert import matplotlib_text
from common.base.specs import PARALLELISMS
from common.data.batches import longest_batch
from common.data.rows import Row, Splits
from common.data.splits import tokenized, tokens_of
from common.data.texts import MOST_LABELS
from common.measuring.ceiling import measure_machine_ceiling
from common.measuring.pipeline_measure import measure_pipeline
from common.models.placement import place_stages
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.tasks.predictions import predict_rows, report_predictions
from common.training import export
from common.training.ddp import data_parallel, exchanging, load_replica
from common.training.loop import TrainingLoop
from common.training.pipeline import Pipeline, trained_stage
from common.training.steps import Metrics, Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def train_replicas(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train on one device, or with DDP, as in 2.2: ranks have a whole model and rows of their own."""
    with log.phase("build trainer"):
        replica = data_parallel(load_replica(log.run, log.rank), log.rank)
        loop = TrainingLoop(replica, tokenizer, data, log)
    with log.phase("training"):
        for step in loop.steps():
            for batch, is_last in step:
                with exchanging(replica, is_last):
                    (loop.loss(batch, step.label_count) * log.rank.world_size).backward()
            loop.update()
    return loop


def train_columns(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train with tensor parallel: ranks have the same rows, and sum hidden states and gradients in both passes."""
    with log.phase("build trainer"):
        mesh = mesh_of_all(log.rank)
        model = split_by_plan(load_columns(log.run, log.rank, mesh), mesh)
        check_split(model, log.rank.world_size)
        loop = TrainingLoop(model, tokenizer, data, log)
    with log.phase("training"):
        for step in loop.steps():
            for batch, _ in step:
                loop.loss(batch, step.label_count).backward()
            loop.update()
    return loop


def train_stages(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train with pipeline parallel, as in 2.7; layers are placed so that no device is fuller than it must be."""
    with log.phase("build trainer"):
        data = tokenized(data, tokenizer, log.run)
        batch = longest_batch(data.train, log.run.per_device_train_batch_size, log.run)
        placement = place_stages(log.run, batch, log.gpu())
        stage = trained_stage(log.run, placement.stage_map, log.rank)
        pipeline = Pipeline(stage, log.run, log.rank)
        loop = TrainingLoop(pipeline, tokenizer, data, log, plan=placement.plan)
    with log.phase("training"):
        for step in loop.steps():
            for batch, _ in step:
                loop.add_loss(pipeline.train_step(batch, step.label_count))
            loop.update()
    return loop


@torch.no_grad()
def classify(model: PreTrainedModel, tokenizer: Tokenizer, rows: list[Row], log: RunRecorder, when: str) -> Classified:
    """Return the labels that a model predicts for all rows, on every rank; rank 0 writes predictions_`when`.csv."""
    texts = [row["input_ids"] for row in tokens_of(rows, tokenizer, log.run)]

    def labels_of(numbers: list[int]) -> list[int]:
        batch = tokenizer.pad({"input_ids": [texts[number] for number in numbers]}, return_tensors="pt")
        return model(**batch.to(log.rank.device)).logits.argmax(-1).tolist()

    found = predict_rows(log, list(map(len, texts)), "labels", when, labels_of, model)
    names = tuple(model.config.id2label[number] for number in range(model.config.num_labels))
    classified = Classified(names, tuple(found), tuple(row["class"] for row in rows))
    report_predictions(log, when, classified.lines(rows), classified)
    return classified


def class_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Return the share of the rows that have each label, the largest first, of at most `MOST_LABELS`."""
    counts = Counter(row["label"] for row in rows)
    return {label: count / len(rows) for label, count in counts.most_common(MOST_LABELS)}


def measure(loop: TrainingLoop) -> Metrics:
    """Measure what parallelism can bring on this machine: its ceiling with DDP, each schedule's steps with PP.

    On CPU only, where one device has room for what the comparison needs.
    """
    parallelism = loop.run.parallelism
    if loop.run.device != "cpu" or not (parallelism.pipelines or parallelism.replicates):
        return {}
    with loop.log.phase("measure the sharing"):
        if parallelism.pipelines:
            return {"pipeline": measure_pipeline(loop, rounds=3)}
        ceiling = measure_machine_ceiling(loop, replica=loop.part.module, steps=4)
        if loop.rank.is_main:
            print(
                f"ranks that need not agree: {ceiling['strong']:.2f}x as fast as one; "
                f"with DDP {ceiling['reached']:.2f} of that (steps alone)"
            )
        return {"machine_ceiling": ceiling}


def save(log: RunRecorder, loop: TrainingLoop, tokenizer: Tokenizer) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save one model (with LoRA the adapter, too), and load it as any user would: equal logits, or the run fails."""
    tuned, differences = export.save(log, loop, tokenizer)
    if log.run.method.has_plain_adapters and log.rank.is_main:
        tuned.config.save_pretrained(log.folder / "adapter")  # PEFT does not save the labels' names
    return tuned, differences


def plot_accuracy(records: list[Record]) -> "Figure":
    """Plot validation accuracy over the epochs, a panel for each technique, a line for each parallelism."""
    import matplotlib.pyplot as plt  # here: a run draws nothing

    techniques = list(dict.fromkeys(record["technique"] for record in records))
    figure, panels = plt.subplots(
        1, len(techniques), figsize=(2 + 4 * len(techniques), 3.5), sharey=True, squeeze=False, layout="constrained"
    )
    axes_of = dict(zip(techniques, panels[0], strict=True))
    for record in records:
        name, parts = record["parallel"], record["config"]["micro_batches"]
        if PARALLELISMS[name].pipelines:
            name += f", {parts} micro-batch{'es' * (parts > 1)}"
        steps, shares = zip(*record["validation_accuracies"], strict=True)
        epochs = [step * record["config"]["num_train_epochs"] / record["steps"] for step in steps]
        axes_of[record["technique"]].plot(epochs, shares, marker=".", label=name)
    for technique, axes in axes_of.items():
        axes.set(title=technique, xlabel="epochs", ylabel="validation accuracy")
        axes.legend()
    return figure


def plot_confusion(record: Record) -> "Figure":
    """Plot how many test rows of each class the tuned model takes for which class."""
    import matplotlib.pyplot as plt  # here: a run draws nothing
    from sklearn.metrics import ConfusionMatrixDisplay  # here: it takes a second

    after = record["quality"]["after"]
    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    labels = [matplotlib_text(label) for label in after["labels"]]
    confusion = ConfusionMatrixDisplay(pd.DataFrame(after["confusion"]).to_numpy(), display_labels=labels)
    confusion.plot(ax=axes, cmap="Blues", xticks_rotation=40, colorbar=False)
    axes.set(xlabel="found", ylabel="meant", title=f"{record['run_name']}: {after['rows']} test rows")
    return figure
