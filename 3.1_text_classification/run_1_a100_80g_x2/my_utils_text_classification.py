"""What only this folder needs: a trainer for each parallelism, what is measured, and what is saved."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.data.batches import longest_batch
from common.data.rows import Splits
from common.data.splits import tokens_of
from common.runtime.recorder import RunRecorder
from common.training.ceiling import measure_machine_ceiling
from common.training.export import save_and_reload
from common.training.loop import LoopTrainer
from common.training.pipeline_measure import measure_pipeline
from common.training.placement import place_stages
from common.training.strategy import strategy_class
from common.training.trainer import AuditedTrainer, make_trainer


def start_trainer(log: RunRecorder, tokenizer: PreTrainedTokenizerBase, data: Splits) -> AuditedTrainer:
    """Return the trainer of this rank: the Trainer itself, or the loop with the strategy of the run's parallelism.

    With pp, layers are placed so that no device is fuller than it must be; the head is with the last ones.
    """
    run, rank = log.run, log.rank
    train, validation = (tokens_of(rows, tokenizer, run) for rows in (data.train, data.validation))
    validation.sort(key=lambda row: -len(row["input_ids"]))  # batches with little padding
    stage_map, plan = None, None
    if run.parallelism.pipelines:
        placement = place_stages(run, longest_batch(train, run.per_device_train_batch_size), log.gpu())
        stage_map, plan = placement.stage_map, placement.plan
    strategy = strategy_class(run)(run, rank)
    model = strategy.load_model(stage_map)
    trainer_class = LoopTrainer if strategy.takes_steps else AuditedTrainer
    return make_trainer(model, tokenizer, train, validation, log, plan, strategy, trainer_class)


def measure_parallelism(log: RunRecorder, trainer: AuditedTrainer) -> dict[str, object]:
    """Return for the record the machine's ceiling with DDP; with PP and TP what stages and ranks did, held and sent.

    Speed-ups are measured on CPU only, where one device has room for what the comparison needs.
    """
    on_cpu = log.run.device == "cpu"
    measured = trainer.strategy.for_record()
    if log.run.parallelism.replicates and on_cpu:
        ceiling = measure_machine_ceiling(trainer, log.rank, replica=trainer.model_wrapped, steps=4)
        measured["machine_ceiling"] = ceiling
        if log.rank.is_main:
            print(
                f"ranks that need not agree: {ceiling['strong']:.2f}x as fast as one; "
                f"with DDP {ceiling['reached']:.2f} of that (steps alone)"
            )
    if log.run.parallelism.pipelines and on_cpu:
        measured["pipeline"] = measure_pipeline(trainer, rounds=3, tell=print)
    return measured


def save_model(
    log: RunRecorder, trainer: AuditedTrainer, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Return one model that plain Transformers loads (with LoRA an adapter for PEFT, too), and how far it is off."""
    tuned, differences = save_and_reload(log, trainer, tokenizer)
    if log.run.method.has_plain_adapters and log.rank.is_main:  # PEFT saves neither the labels' names nor the tokenizer
        tuned.config.save_pretrained(log.folder / "adapter")
        tokenizer.save_pretrained(log.folder / "adapter")
    return tuned, differences
