"""Where the time of a step on a GPU goes: sums by kernel, by kind, and of the adapters' thin products."""

import re
from collections import Counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bench.gpu_trial import GPU_SCALE, Scale, Trial, take_steps, trial_started
from bench.levers import pulled
from common.hardware.devices import Gpu

MOST_KERNELS = 40
"""Of the longest that are kept by name."""
PROFILED_STEP = 3
KINDS = {
    "compiled": r"^triton",  # its names tell all that is fused
    "attention": r"flash|fmha|cudnn.*sdpa|attention|mha",
    "products": r"gemm|nvjet|xmma|cutlass|cublas|mm\b|::linear",
    "optimizer": r"adam|optimizer|multi_tensor",
    "copies": r"memcpy|memset|copy",
}
"""Of kernels, by what is in their names; the first that fits."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


class ProfiledStep(TrainerCallback):
    """Profiles one optimizer step; `profiler` has what was found, or is None until then."""

    def __init__(self, device: str) -> None:
        self.device, self.profiler = device, None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begin with the step that counts."""
        if state.global_step + 1 == PROFILED_STEP:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device != "cpu" else [])]
            self.profiler = profile(activities=activities, record_shapes=True)
            self.profiler.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Wait for the device, end, and let the training end, too."""
        if state.global_step == PROFILED_STEP:
            if self.device != "cpu":
                torch.accelerator.synchronize()
            self.profiler.stop()
            control.should_training_stop = True


def profiled(trial: Trial, gpu: Gpu, scale: Scale = GPU_SCALE) -> dict[str, Any]:
    """Return the seconds of one step by kernel and by kind, and the share of products with a side of the LoRA rank."""
    plan = trial.planned(gpu, scale)
    run = trial.run(scale).changed_to(per_device_train_batch_size=plan.job.batch.rows)
    with pulled(trial.levers), trial_started(run) as log:
        device = log.rank.device
        step = ProfiledStep(device)
        take_steps(log, step)
    return {"technique": trial.technique, "name": trial.name, **sums_of(step.profiler, device, run.lora_r)}


def sums_of(profiler: profile, device: str, lora_rank: int) -> dict[str, Any]:
    """Return a profile's sums in seconds: of the device's kernels, or of a CPU's operators."""
    averages = profiler.key_averages(group_by_input_shape=True)
    on_cpu = device == "cpu"
    wanted = DeviceType.CPU if on_cpu else DeviceType.CUDA
    kernels: Counter[str] = Counter()
    for each in averages:
        if each.device_type == wanted and not each.is_user_annotation:
            kernels[each.key] += (each.self_cpu_time_total if on_cpu else each.self_device_time_total) / 1e6
    by_kind: Counter[str] = Counter()
    for name, seconds in kernels.items():
        by_kind[kind_of(name)] += seconds
    thin_s = sum(
        (each.self_cpu_time_total if on_cpu else each.self_device_time_total) / 1e6
        for each in averages
        if each.key in PRODUCTS and any(lora_rank in shape for shape in each.input_shapes if isinstance(shape, list))
    )
    total_s = kernels.total()
    return {
        "total_s": total_s,
        "by_kind_s": dict(by_kind.most_common()),
        "adapters_products_share": thin_s / total_s if total_s else None,
        "kernels_s": dict(kernels.most_common(MOST_KERNELS)),
    }


def kind_of(kernel: str) -> str:
    """Return what a kernel does, by its name."""
    return next((kind for kind, words in KINDS.items() if re.search(words, kernel, re.IGNORECASE)), "others")
