"""What a run of a run folder asks of the planner: its job, and its architecture."""

from dataclasses import replace

from common.base.run_config import RunConfig
from common.planning.architectures import Architecture, read_architecture
from common.planning.job import ALL_LINEAR, BatchShape, EvaluationShape, Job
from common.planning.model_configs import usual_tiles


def evaluation_of_run(run: RunConfig, batch: BatchShape) -> EvaluationShape:
    """Return what a run's phases beside training work on, where its rows to validate and test are like `batch`'s."""
    return EvaluationShape(
        rows=run.rows_evaluated_at_once,
        length=batch.length,
        labelled=batch.target_length or batch.labelled,
        prompt_length=batch.length,
        new_tokens=0 if run.goal.classifies else run.max_new_tokens,
        beams=run.num_beams if run.goal.summarizes else 1,
        judged=run.goal.is_judged,
        has_independent_judge=run.goal.is_judged and run.independent_judge != "none",
        validation_rows=max(0, run.validation_rows),
        test_rows=max(0, run.test_rows),
    )


def with_tiles(run: RunConfig, batch: BatchShape) -> BatchShape:
    """Return the batch with as many squares as a square picture becomes, where a run sees and the batch names none.

    Random weights come with a processor that makes one.
    """
    if not run.goal.sees or batch.tiles:
        return batch
    return replace(batch, tiles=1 if run.weights == "random" else usual_tiles(run.model, run.model_revision))


def job_of_run(run: RunConfig, batch: BatchShape, evaluation: EvaluationShape | None = None) -> Job:
    """Return the job of a run folder's run; on one device, which holds all stages or rows, as if it were not divided.

    A batch is filled up until the micro-batches divide it, as training does (`PipelineParallel.fill`). `evaluation`:
    what the other phases work on; None: rows like those of the batch.
    """
    batch = with_tiles(run, batch)
    filled_up = -(-batch.rows // run.micro_batches) * run.micro_batches
    targets = {"all": (), "all-linear": () if run.method.has_adapters else ALL_LINEAR}
    return Job(
        technique=run.technique,
        parallel="single" if run.devices == 1 else run.parallel,
        batch=replace(batch.padded_to(run.pad_to_multiple_of), rows=filled_up),
        devices=run.devices,
        dp_replicate_size=run.dp_replicate_size,
        precision=run.precision,
        quantization=run.quantization,
        optimizer=run.optim,
        attention="flash" if run.attention == "flash3" else run.attention,
        gradient_checkpointing=run.gradient_checkpointing,
        kernels="fused" if run.use_liger_kernel else "compiled" if run.torch_compile else "plain",
        lora_rank=run.lora_r,
        target_modules=targets.get(run.target_modules, run.target_names),
        # TRL's trainer switches dropout off: policy and reference are to differ by what was learnt alone
        lora_dropout=run.lora_dropout if run.method.has_adapters and not run.goal.compares else 0.0,
        micro_batches=run.micro_batches,
        schedule=run.schedule,
        accumulation_steps=run.gradient_accumulation_steps,
        offload=run.offload == "cpu",
        cpu_operations=run.device == "cpu",
        evaluation=evaluation or evaluation_of_run(run, batch),
        trains_tower=run.goal.sees and not run.freeze_vision_tower,
        sums_gradients_after=run.loop == "machines" and run.gradient_exchange == "after",
        draws_weights=run.weights == "random",
    )


def architecture_of_run(run: RunConfig, batch: BatchShape) -> Architecture:
    """Return the run's model as `job_of_run` trains it: for a batch with labels with a classifier's head.

    Raises:
        BadInputError: There is no shape of the model, or it is no encoder and cannot classify.
    """
    return read_architecture(run.model, run.model_revision, batch.classes)
