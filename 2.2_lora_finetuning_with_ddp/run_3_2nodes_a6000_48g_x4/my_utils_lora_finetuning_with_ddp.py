"""What only DDP needs: the speed-up that this machine allows, and a comparison with the library's own trainer."""

from common.base.run_config import RunConfig
from common.data.batches import make_collator
from common.data.splits import tokenized
from common.measuring.beside import trained_beside
from common.measuring.ceiling import measure_machine_ceiling
from common.models.trained_weights import add_lora
from common.runtime.rank import end_rank, start_rank
from common.runtime.recorder import Trial
from common.training.loop import TrainingLoop
from common.training.optimizers import training_arguments
from common.training.steps import load


def measure_ceiling(loop: TrainingLoop) -> dict[str, float] | None:
    """Measure the highest possible speed-up; on CPU only, as one GPU may not hold the global batch."""
    if loop.run.device == "cuda":
        return None
    with loop.log.phase("upper bound"):
        return measure_machine_ceiling(loop)


def train_by_trainer(log: Trial) -> None:
    """Train with Transformers' Trainer, which puts DDP around the model, and divides rows and loss by itself."""
    from transformers import PrinterCallback, Trainer, TrainingArguments  # here: PEFT, which `common` is to come before

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
