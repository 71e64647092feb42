"""What the three workflows of this folder share: the run, its data and scores; and how machines sum up gradients."""

import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING

import pandas as pd
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import PreTrainedModel

from common.base.errors import BadInputError
from common.base.print_prefix import print_figures
from common.base.run_config import RunConfig
from common.data.batches import partition
from common.data.rows import Row, Splits
from common.data.splits import load_splits, tokens_of
from common.data.texts import say_long_texts
from common.models.loading import load_tokenizer
from common.reporting.rows import clock_seconds
from common.runtime.recorder import RunRecorder
from common.tasks.predictions import predict_rows, report_predictions
from common.tasks.summarization import rouge_scores
from common.training.steps import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUN = RunConfig(
    task="summarization",
    technique="full",
    parallel="ddp",
    run_folder="3.2_summarization/run_1_v100_16g_x4",
    device="cuda",
    gpu="V100 16GB SXM",
    devices=4,
    model="facebook/bart-large-cnn",
    data="knkarthick/samsum",
    text_column="dialogue",
    target_modules="all",
    max_length=1024,
    max_target_length=128,
    empty_rows="skip",
    max_new_tokens=128,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    num_train_epochs=1,
    learning_rate=5e-5,
    warmup_steps=0.1,
    max_grad_norm=1.0,
    eval_steps=0.25,
    per_device_eval_batch_size=8,
)
MACHINES = {}


def run_with(loop: str) -> RunConfig:
    """Return this folder's run, by one of its three loops."""
    return replace(RUN, loop=loop, **(MACHINES if loop == "machines" else {}))


def load_data(log: RunRecorder) -> tuple[Tokenizer, Splits]:
    """Load tokenizer and rows, and print how many texts are too long, and how the rows are divided."""
    with log.phase("load data"):
        tokenizer, data = load_tokenizer(log.run), load_splits(log.run)
        parts = partition(len(data.train), log.run.partition_count, log.run.seed)
        if log.rank.is_main:
            of_training = f"{len(data.train):,} training rows in {len(parts)} partitions"
            others = f"{len(data.validation):,} validation, {len(data.test):,} test rows"
            print(f"{of_training}, {others}; {say_long_texts(data.train, tokenizer, log.run)}")
        own = [len(part) for part in parts[log.rank.rank :: log.rank.world_size]]
        print(f"this rank trains on {sum(own):,} rows")
        return tokenizer, data


# -- how good summaries are


@dataclass(frozen=True)
class Summaries:
    """The summaries of a split, in the data's order, and their ROUGE; the same on every rank."""

    written: tuple[str, ...]
    rouge: dict[str, float]
    exact_share: float  # what was meant, to the letter: ROUGE hardly sees one wrong name

    def __str__(self) -> str:
        scores = ", ".join(f"{name.replace('rouge', 'ROUGE-')} {value:.3f}" for name, value in self.rouge.items())
        return f"{scores}; exact match {self.exact_share:.0%}"

    def summary(self) -> dict[str, object]:
        """Return the metrics for the record."""
        return {**self.rouge, "exact_share": self.exact_share, "rows": len(self.written)}

    def lines(self, rows: list[Row]) -> list[dict[str, object]]:
        """Return the lines of the predictions file, one for each text."""
        return [
            {"row": number, "text": row["text"], "summary": row["summary"], "written": written}
            for number, (row, written) in enumerate(zip(rows, self.written, strict=True), 1)
        ]


@torch.no_grad()
def summarize(model: PreTrainedModel, tokenizer: Tokenizer, rows: list[Row], log: RunRecorder, when: str) -> Summaries:
    """Return summaries of all rows by beam search; rank 0 scores them as one set, and writes predictions_`when`.csv."""
    run, rank = log.run, log.rank
    texts = [row["input_ids"] for row in tokens_of(rows, tokenizer, run)]

    def summaries_of(numbers: list[int]) -> list[str]:
        batch = tokenizer.pad({"input_ids": [texts[number] for number in numbers]}, return_tensors="pt")
        beams = {"num_beams": run.num_beams, "max_new_tokens": run.max_new_tokens, "do_sample": False}
        generated = model.generate(**batch.to(rank.device), **beams)
        return [text.strip() for text in tokenizer.batch_decode(generated, skip_special_tokens=True)]

    written = predict_rows(log, list(map(len, texts)), "summaries", when, summaries_of, model)
    references = [row["summary"] for row in rows]
    scores = gather_object([rouge_scores(written, references)] if rank.is_main else [])[0]
    exact = sum(text == reference.strip() for text, reference in zip(written, references, strict=True))
    summaries = Summaries(tuple(written), scores, exact / len(rows))
    report_predictions(log, when, summaries.lines(rows), summaries)
    if rank.is_main and run.log_format == "json":
        print_figures({f"{name}_{when}": value for name, value in summaries.rouge.items()})
    return summaries


# -- gradients of several machines brought together

Bucket = list[torch.nn.Parameter]


def buckets_of(weights: list[torch.nn.Parameter], bucket_bytes: float) -> list[Bucket]:
    """Return the trained weights in groups of about `bucket_bytes`, the last layer first, as in a backward pass."""
    buckets: list[Bucket] = []
    held = bucket_bytes
    for weight in reversed([weight for weight in weights if weight.requires_grad]):
        if held + weight.nbytes > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(weight)
        held += weight.nbytes
    return buckets


def sum_gradients(buckets: list[Bucket]) -> None:
    """Replace every gradient by its sum over all ranks: one message for each bucket, none for each weight."""
    for bucket in buckets:
        gradients = [weight.grad for weight in bucket if weight.grad is not None]  # an unused weight has none anywhere
        if gradients:
            flat = parameters_to_vector(gradients)
            dist.all_reduce(flat)
            vector_to_parameters(flat, gradients)


def check_same_weights(model: torch.nn.Module) -> None:
    """Refuse to begin where the ranks' models differ: equal gradients would not make them equal.

    Raises:
        BadInputError: with a digest of each rank's weights, and its host.
    """
    digest = sha256()
    for weight in model.parameters():
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    found = gather_object([(socket.gethostname(), digest.hexdigest()[:12])])
    if len({digest for _, digest in found}) > 1:
        listed = ", ".join(f"rank {rank} ({host}) {digest}" for rank, (host, digest) in enumerate(found))
        raise BadInputError(f"The ranks begin with different weights ({listed}): give all the same --model.")


def send_as_bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call PyTorch's hook, which DDP lets through by its own name with NCCL alone; gloo sums bf16, too."""
    return bf16_compress_hook(group, bucket)


class GradientExchange:
    """Sums the gradients of all ranks of a loop, as `RunConfig.gradient_exchange` says.

    Each rank's loss is its sum over the labelled tokens of *all* ranks, so that the sum of the ranks' gradients is the
    mean over these tokens: a rank with longer summaries weighs more, as it would on one device.
    """

    def __init__(self, model: torch.nn.Module, run: RunConfig) -> None:
        """`model` is this rank's; DDP, where it is asked for, stands around it.

        Raises:
            BadInputError: the ranks' models differ.
        """
        check_same_weights(model)
        self.ranks, self.overlaps = dist.get_world_size(), run.gradient_exchange != "after"
        self.model = model
        self.buckets = buckets_of(list(model.parameters()), run.bucket_cap_mb * 2**20)
        if self.overlaps:
            self.model = DistributedDataParallel(model, bucket_cap_mb=run.bucket_cap_mb, gradient_as_bucket_view=True)
        if run.gradient_exchange == "overlapped-bf16":
            self.model.register_comm_hook(None, send_as_bf16)

    def part(self, is_last: bool) -> AbstractContextManager[object]:
        """Return a context for the passes of a micro-batch: DDP sends in the last one of a step only."""
        return nullcontext() if is_last or not self.overlaps else self.model.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this rank's share of the loss."""
        factor = self.ranks if self.overlaps else 1  # DDP takes the mean over ranks, but each loss is part of a sum
        (loss * factor).backward()

    def complete(self) -> None:
        """Give every rank the sum of all gradients."""
        if not self.overlaps:
            sum_gradients(self.buckets)


def plot_cost(table: pd.DataFrame) -> "Figure":
    """Plot time and bill of each line of the table `summarization-cost`, in colours by where the figures come from."""
    import matplotlib.pyplot as plt  # here: a run draws nothing

    kinds = table["Figures"].str.split("[:;]").str[0]
    networks = table["Network"].where(~kinds.eq("published"), "published")
    names = table["Machines"].str.split(" (", regex=False).str[0] + ", " + networks
    values = {"hours": table["Time"].map(clock_seconds) / 3600, "bill (USD)": table["Bill (USD)"].astype(float)}
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(10, 1 + 0.32 * len(table)), layout="constrained")
    for axes, (label, numbers) in zip(panels, values.items(), strict=True):
        for kind in kinds.unique():
            bars = axes.barh(numbers.index[kinds == kind], numbers[kinds == kind], label=kind)
            axes.bar_label(bars, fmt=" %.2f", fontsize=8)
        axes.set(xlabel=label, xscale="log", xlim=(None, 2.5 * max(numbers)))
    panels[0].set(yticks=range(len(names)), yticklabels=names)
    panels[0].invert_yaxis()
    panels[1].legend()
    return figure
