"""QLoRA fine-tuning: adapters on a base in 4 bits, on one device or with DDP on several.

From this folder:
    python my_workflow_qlora_finetuning.py
    python my_workflow_qlora_finetuning.py --quantization nf4-double --optimizer paged_adamw_8bit
    python -m common.launch --parallel ddp --devices 2 --batch_size 8

The notebook runs the same steps cell by cell.
"""

from collections.abc import Iterator

from my_utils_qlora_finetuning import ON_ORIGINAL, Merged, merge_both_ways, stored_weights
from transformers import PreTrainedModel

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.data.splits import load_splits
from common.models.loading import load_base_model, load_tokenizer, waiting_on_host, weight_dtype
from common.models.merging import has_room_for_plain
from common.models.quantization import quantization_config
from common.models.shards import free_model
from common.models.trained_weights import add_lora
from common.planning.device_maps import whole_model_on
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.tasks.answers import Evaluation, Judge, evaluate, independent_judges
from common.tasks.forgetting import look_after, look_before
from common.training.ddp import data_parallel, exchanging
from common.training.loop import TrainingLoop
from common.training.steps import Metrics, Tokenizer, sum_up

RUN = RunConfig(
    technique="qlora",
    parallel="single",
    run_folder="2.3_qlora_finetuning/run_3_h200_141g_x1",
    device="cuda",
    gpu="H200 141GB",
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    max_length=1024,  # tokens; longer rows are truncated
    per_device_train_batch_size=14,
    num_train_epochs=3,
    learning_rate=1e-5,
    per_device_eval_batch_size=8,
    lora_dropout=0.0,  # with dropout, or checkpointing, more computing; without both, rows of 1,024 tokens fit
)


def load(log: RunRecorder) -> tuple[PreTrainedModel, Tokenizer, Splits]:
    """Load the base, each matrix of which is quantized to 4 bits as it is read, its tokenizer, and the rows."""
    with log.phase("load model and data"):
        device, in_4_bits = whole_model_on(log.rank.device), quantization_config(log.run)
        base = load_base_model(log.run, device, quantization=in_4_bits)
        return base, load_tokenizer(log.run), load_splits(log.run)


def look_at_weights(log: RunRecorder, model: PreTrainedModel) -> Metrics:
    """Count what the quantized weights take, and print it beside what LoRA's base would take."""
    stored = stored_weights(model, weight_dtype(log.run))
    if log.rank.is_main:
        print(
            "{quantized_share:.0%} of the weights in {bits_per_quantized_weight:.2f} bits each (in {stored_dtype}), "
            "the others in fp32: {weights_gib:.3g} GiB, where LoRA's base takes {unquantized_gib:.3g}".format(**stored)
        )
    return stored


def original_judge(log: RunRecorder, tokenizer: Tokenizer) -> Iterator[Judge]:
    """Yield the original base as a judge, with which scores compare with LoRA's, and free it afterwards."""
    original = load_base_model(log.run, whole_model_on(log.rank.device), quantized=False)
    yield Judge("base", original, tokenizer)
    free_model(original)


def judges_before(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, has_room: bool) -> Iterator[Judge]:
    """Yield the judges of the quantized base: the original one, or without room itself; and an independent one."""
    if has_room:
        yield from original_judge(log, tokenizer)
    else:
        yield Judge("base", model, tokenizer)
    yield from independent_judges(log.run, log.rank.device)


def evaluate_before(
    log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits, has_room: bool
) -> Evaluation | None:
    """Evaluate the quantized base's answers to the test questions before any training; None with `--baseline none`.

    Where the original base does not fit, the quantized one judges itself, so that no second model is loaded.
    """
    if log.run.baseline == "none":
        return None
    if not has_room and log.rank.is_main:
        print("no room for unquantized models on this device: the quantized base judges, the original's merge does not")
    with log.phase("baseline evaluation"):
        look_before(log, model, tokenizer)
        return evaluate(model, tokenizer, data.test, judges_before(log, model, tokenizer, has_room), log, "before")


def train(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Put adapters on the base in 4 bits, and train them, on one device or with DDP on several as in 2.2."""
    with log.phase("build trainer"):
        replica = data_parallel(add_lora(model, log.run), log.rank)
        loop = TrainingLoop(replica, tokenizer, data, log)
    with log.phase("training"):
        for step in loop.steps():
            for batch, is_last in step:
                with exchanging(replica, is_last):
                    (loop.loss(batch, step.label_count) * log.rank.world_size).backward()
            loop.update()
    return loop


def merge(log: RunRecorder, loop: TrainingLoop, tokenizer: Tokenizer, has_room: bool) -> Merged:
    """Save the adapter, and merge it into the de-quantized and into the original base."""
    with log.phase("merge and reload"):
        return merge_both_ways(log, loop, tokenizer, has_room)


def judges_after(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, merged: Merged) -> Iterator[Judge]:
    """Yield the judges of a tuned model: itself, the original base (or the quantized one), and an independent one."""
    yield Judge("tuned", model, tokenizer)
    if merged.has_room:
        with waiting_on_host(model):
            yield from original_judge(log, tokenizer)
    else:
        yield Judge("base", model, tokenizer, merged.without_adapter)
    yield from independent_judges(log.run, log.rank.device)


def evaluate_after(
    log: RunRecorder, merged: Merged, tokenizer: Tokenizer, data: Splits
) -> dict[str, Evaluation | None]:
    """Evaluate what was trained (`after`), and the merge into the original base (`after_original_base`)."""
    with log.phase("final evaluation"):
        look_after(log, merged.tuned)
        judges = judges_after(log, merged.tuned, tokenizer, merged)
        found = {
            "after": evaluate(merged.tuned, tokenizer, data.test, judges, log, "after"),
            "after_original_base": None,
        }
        if merged.has_room:
            with waiting_on_host(merged.tuned):
                model = load_base_model(log.run, whole_model_on(log.rank.device), source=log.folder / ON_ORIGINAL)
                judges, when = judges_after(log, model, tokenizer, merged), "after_original_base"
                found[when] = evaluate(model, tokenizer, data.test, judges, log, when)
                free_model(model)
        return found


def record(
    log: RunRecorder,
    stored: Metrics,
    merged: Merged,
    before: Evaluation | None,
    after: dict[str, Evaluation | None],
    trained: Metrics,
) -> Record:
    """Write the record of the run: what was asked, and all that was measured."""
    evaluations = {**({"before": before} if before else {}), **after}
    return log.complete(
        quality={name: found and found.summary() for name, found in evaluations.items()},
        judged_by="original base" if merged.has_room else "quantized base",
        quantization={**stored, "relative_error": merged.relative_error},
        largest_logit_differences=merged.differences,
        merged_validation_losses=merged.validation_losses,
        **trained,
    )


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run."""
    with run_started(run) as log:
        model, tokenizer, data = load(log)
        stored = look_at_weights(log, model)
        has_room = has_room_for_plain(log.run, log.rank, model)
        before = evaluate_before(log, model, tokenizer, data, has_room)
        loop = train(log, model, tokenizer, data)
        trained = sum_up(loop)
        merged = merge(log, loop, tokenizer, has_room)
        after = evaluate_after(log, merged, tokenizer, data)
        return record(log, stored, merged, before, after, trained)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
