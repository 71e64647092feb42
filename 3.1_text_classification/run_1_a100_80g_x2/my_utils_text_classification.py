"""What only this folder needs: a trainer for each parallelism, what is measured, and what is saved."""

from transformers import PreTrainedModel

from common.data.batches import longest_batch, longest_first
from common.data.rows import Splits
from common.data.splits import tokens_of
from common.runtime.recorder import RunRecorder
from common.training.ceiling import measure_machine_ceiling
from common.training.export import save_and_reload
from common.training.loop import LoopTrainer
from common.training.pipeline_measure import measure_pipeline
from common.models.placement import place_stages
from common.training.steps import Metrics, Tokenizer
from common.training.strategy import strategy_class
from common.training.trainer import AuditedTrainer, make_trainer


def build_trainer(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> AuditedTrainer:
    """Build the trainer of this rank: the Trainer itself, or the loop with the strategy of the run's parallelism.

    The model is whole, or this rank's part of it. With pp, layers are placed so that no device is fuller than it must
    be; the head is with the last ones.
    """
    run = log.run
    with log.phase("build trainer"):
        rows, validation = (tokens_of(split, tokenizer, run) for split in (data.train, data.validation))
        validation = longest_first(validation)
        stage_map, plan = None, None
        if run.parallelism.pipelines:
            placement = place_stages(run, longest_batch(rows, run.per_device_train_batch_size, run), log.gpu())
            stage_map, plan = placement.stage_map, placement.plan
        strategy = strategy_class(run)(run, log.rank)
        model = strategy.load_model(stage_map)
        trainer_class = LoopTrainer if strategy.takes_steps else AuditedTrainer
        return make_trainer(model, tokenizer, rows, validation, log, plan, strategy, trainer_class)


def measure(log: RunRecorder, trainer: AuditedTrainer) -> Metrics:
    """Measure what parallelism can bring on this machine: its ceiling with DDP, each schedule's steps with PP.

    On CPU only, where one device has room for what the comparison needs.
    """
    parallelism = log.run.parallelism
    if log.run.device != "cpu" or not (parallelism.pipelines or parallelism.replicates):
        return {}
    with log.phase("measure the sharing"):
        if parallelism.pipelines:
            return {"pipeline": measure_pipeline(trainer, rounds=3)}
        ceiling = measure_machine_ceiling(trainer, log.rank, replica=trainer.model_wrapped, steps=4)
        if log.rank.is_main:
            print(
                f"ranks that need not agree: {ceiling['strong']:.2f}x as fast as one; "
                f"with DDP {ceiling['reached']:.2f} of that (steps alone)"
            )
        return {"machine_ceiling": ceiling}


def save(log: RunRecorder, trainer: AuditedTrainer, tokenizer: Tokenizer) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save one model (with LoRA the adapter, too), and load it as any user would: equal logits, or the run fails."""
    with log.phase("save and reload"):
        tuned, differences = save_and_reload(log, trainer, tokenizer)
        if log.run.method.has_plain_adapters and log.rank.is_main:  # PEFT saves neither labels' names nor tokenizer
            tuned.config.save_pretrained(log.folder / "adapter")
            tokenizer.save_pretrained(log.folder / "adapter")
        return tuned, differences
