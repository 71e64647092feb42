"""What only this folder needs: for each way to share the work its model, its trainer, what is measured, and saving."""

from collections.abc import Callable
from functools import partial

from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.data.batches import longest_batch
from common.data.rows import Splits
from common.data.splits import tokens_of
from common.models.loading import add_lora, load_base_model, train_own_weights
from common.planning.device_maps import whole_model_on
from common.runtime.recorder import RunLog
from common.training.ceiling import measure_machine_ceiling
from common.training.export import merge_and_reload, save_and_reload
from common.training.pipeline import Pipeline, StageModule, trained_stage
from common.training.pipeline_measure import measure_pipeline
from common.training.pipeline_training import PipelineTrainer, save_parts_and_reload
from common.training.placement import place_stages
from common.training.sharded_training import save_whole_and_reload
from common.training.tensor_parallel import split_by_plan, split_table
from common.training.tensor_training import TensorParallelTrainer
from common.training.trainer import CountingTrainer, make_trainer

Trained = tuple[PreTrainedModel | PeftModel, Callable[..., CountingTrainer], object]
"""The model, what makes its trainer, and the plan where layers were placed by one."""


def start_trainer(log: RunLog, tokenizer: PreTrainedTokenizerBase, data: Splits) -> CountingTrainer:
    """The trainer of this rank, for the run's way to share the work."""
    train, validation = (tokens_of(rows, tokenizer, log.run) for rows in (data.train, data.validation))
    validation.sort(key=lambda row: -len(row["input_ids"]))  # batches with little padding
    way = log.run.parallelism
    prepare = stage_to_train if way.pipelines else split_model_to_train if way.splits_matrices else whole_model_to_train
    model, trainer_class, plan = prepare(log, train)
    return make_trainer(model, tokenizer, train, validation, log, plan, trainer_class)


def whole_model_to_train(log: RunLog, train: list[dict]) -> Trained:
    """On one device, and with DDP on each: the encoder with its head, all of it trained or with adapters."""
    model = load_base_model(log.run, whole_model_on(log.rank.device))
    if log.run.method.has_plain_adapters:
        return add_lora(model, log.run), CountingTrainer, None
    train_own_weights(model, log.run)
    return model, CountingTrainer, None


def split_model_to_train(log: RunLog, train: list[dict]) -> Trained:
    """The same, with this rank's columns and rows of each layer's matrices."""
    model, _, _ = whole_model_to_train(log, train)
    split_by_plan(model, init_device_mesh(log.run.device, (log.rank.world_size,)))
    if log.rank.is_main:  # the others hold as much
        print(f"tensor parallel: each rank {say_split(model)}")
    return model, partial(TensorParallelTrainer, rank=log.rank), None


def say_split(model: PreTrainedModel | PeftModel) -> str:
    """What a rank holds of a divided model, and which weights are divided."""
    table = split_table(model)
    held, whole = (sum(row[column] for row in table) for column in ("held", "whole"))
    divided = [row["weights"].partition(".*.")[2] for row in table if row["split_dimension"] is not None]
    return f"holds {held:,} of {whole:,} weights; of each layer it has its part of {', '.join(divided)}"


def stage_to_train(log: RunLog, train: list[dict]) -> Trained:
    """This rank's layers, placed so that no device is fuller than it must be; the head is with the last ones."""
    run, rank = log.run, log.rank
    placement = place_stages(run, longest_batch(train, run.per_device_train_batch_size), log.gpu())
    module = StageModule(trained_stage(run, placement.stage_map, rank), run, rank)
    trainer_class = partial(PipelineTrainer, pipeline=Pipeline(module, run, rank))
    return module.model, trainer_class, placement.plan


def measure_sharing(log: RunLog, trainer: CountingTrainer) -> dict[str, object]:
    """For the record: the machine's ceiling with DDP; with PP and TP what stages and ranks did, held and sent.

    Speed-ups are measured on CPU only, where one device has room for what the comparison needs.
    """
    figures: dict[str, object] = {}
    on_cpu = log.run.device == "cpu"
    if log.run.parallelism.replicates and on_cpu:
        ceiling = measure_machine_ceiling(trainer, log.rank, replica=trainer.model_wrapped, steps=4)
        figures["machine_ceiling"] = ceiling
        if log.rank.is_main:
            print(
                f"ranks that need not agree: {ceiling['strong']:.2f}x as fast as one; "
                f"with DDP {ceiling['reached']:.2f} of that (steps alone)"
            )
    if isinstance(trainer, PipelineTrainer):
        figures |= trainer.stage_figures()
        if on_cpu:
            figures["pipeline"] = measure_pipeline(trainer, rounds=3, tell=print)
    if isinstance(trainer, TensorParallelTrainer):
        figures |= trainer.sharding_figures()
    return figures


def save_model(
    log: RunLog, trainer: CountingTrainer, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, dict[str, float]]:
    """One model that plain Transformers loads (with LoRA an adapter for PEFT, too), and how far its logits are off."""
    if isinstance(trainer, PipelineTrainer):
        save = save_parts_and_reload
    elif isinstance(trainer, TensorParallelTrainer):
        save = save_whole_and_reload
    else:
        whole = merge_and_reload if log.run.method.has_plain_adapters else save_and_reload
        save = partial(whole, device_map=whole_model_on(log.rank.device))
    tuned, differences = save(log, trainer, tokenizer)
    if log.run.method.has_plain_adapters and log.rank.is_main:  # PEFT saves neither the labels' names nor the tokenizer
        tuned.config.save_pretrained(log.folder / "adapter")
        tokenizer.save_pretrained(log.folder / "adapter")
    return tuned, differences
