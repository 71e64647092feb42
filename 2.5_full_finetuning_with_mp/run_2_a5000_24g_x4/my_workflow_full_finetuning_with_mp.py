"""Full fine-tuning with model parallel: one process, and the model's layers divided among its devices.

From this folder:
    python my_workflow_full_finetuning_with_mp.py
    python my_workflow_full_finetuning_with_mp.py --device_map even
    python my_workflow_full_finetuning_with_mp.py --device_map my_map.json

The notebook runs the same steps cell by cell. Against 2.4: (1) layers are placed before the model loads, so that no
device is fuller than it must be, (2) the model loads by that map, (3) a spy proves that every stage works.
"""

from my_utils_full_finetuning_with_mp import check_stages, custom_device_map, placement_table, set_trained_layers
from transformers import PreTrainedModel

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.batches import longest_batch
from common.data.rows import Splits
from common.models.loading import load_base_model
from common.models.placement import Placement, place_stages
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.loop import TrainingLoop
from common.training.steps import Metrics, Tokenizer, evaluate_after, evaluate_before, load_data, record, save, sum_up

RUN = RunConfig(
    technique="full",
    parallel="mp",
    run_folder="2.5_full_finetuning_with_mp/run_2_a5000_24g_x4",
    device="cuda",
    gpu="RTX A5000 24GB",
    devices=4,
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    max_length=1024,  # tokens; longer rows are truncated
    per_device_train_batch_size=5,
    num_train_epochs=3,
    learning_rate=1e-5,
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,  # without it rows of 1,024 tokens, padded, do not fit for certain
    use_reentrant=True,  # as in the published runs
)


def place(log: RunRecorder, data: Splits) -> Placement:
    """Compute the device map (1), and print it beside Accelerate's own and an even split."""
    with log.phase("place layers"):
        batch = longest_batch(data.train, log.run.per_device_train_batch_size, log.run)
        print(placement_table(log.run, batch, log.gpu()).to_string(index=False))
        return place_stages(log.run, batch, log.gpu())


def load(log: RunRecorder, placement: Placement) -> tuple[PreTrainedModel, Metrics]:
    """Load the base model, each layer on its device (2), and return what the spy saw (3), too."""
    with log.phase("load model"):
        model = load_base_model(log.run, custom_device_map(log, placement))
        seen = check_stages(log, model, placement)
        if log.run.device == "cpu":
            print("on CPU there is one device: the map splits nothing here; its hooks and their order were checked")
        print(f"stages in the order of their work: {seen['order']}")
        return model, seen


def train(
    log: RunRecorder, placement: Placement, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits
) -> TrainingLoop:
    """Switch on the layers to train, and train them; hidden states go from device to device, and gradients back."""
    with log.phase("build trainer"):
        print(set_trained_layers(model, log.run).to_string(index=False))
        loop = TrainingLoop(model, tokenizer, data, log, plan=placement.plan)
    with log.phase("training"):
        for step in loop.steps():
            for batch, _ in step:
                loop.loss(batch, step.label_count).backward()
            loop.update()
    return loop


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run."""
    with run_started(run) as log:
        tokenizer, data = load_data(log)
        placement = place(log, data)
        model, seen = load(log, placement)
        before = evaluate_before(log, tokenizer, data, model=model)
        loop = train(log, placement, model, tokenizer, data)
        trained = sum_up(loop)
        tuned, differences = save(log, loop, tokenizer, custom_device_map(log, placement))
        after = evaluate_after(log, tuned, tokenizer, data, device_map=custom_device_map(log, placement))
        figures = {"placement": placement.for_record(), "stages_seen": seen, "largest_logit_differences": differences}
        return record(log, before, after, **trained, **figures)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
