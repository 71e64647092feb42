"""What DeepSpeed is told of a run; imports neither torch nor DeepSpeed."""

from typing import Any

from common.base.run_config import RunConfig


def zero_stage(run: RunConfig) -> int:
    """Return the stage: 1, 2 or 3."""
    return int(run.parallel.removeprefix("zero"))


def deepspeed_config(run: RunConfig, hidden_size: int = 0) -> dict[str, Any]:
    """Return DeepSpeed's settings for a model of this `hidden_size`; for 0 what follows from it is `auto`.

    A file for Accelerate has `auto`, for which Transformers takes the same sizes (its integrations/deepspeed.py).
    """
    stage, on_host, largest = zero_stage(run), {"device": "cpu", "pin_memory": True}, hidden_size**2
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": run.device == "cuda",
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "use_multi_rank_bucket_allreduce": False,  # else all ranks get all gradients: half as much traffic again
        "reduce_bucket_size": largest or "auto",
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": int(0.9 * largest) or "auto",
            "stage3_param_persistence_threshold": 10 * hidden_size or "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if run.offload == "cpu":
        zero["offload_optimizer"] = on_host
        if stage == 3:
            zero["offload_param"] = on_host
    return {
        "train_micro_batch_size_per_gpu": run.per_device_train_batch_size,
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "gradient_clipping": run.max_grad_norm,
        "bf16": {"enabled": run.compute_dtype == "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # PyTorch's own, of which ZeRO divides the states
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
