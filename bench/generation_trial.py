"""Seconds and memory of answers on a GPU: rows of random prompts, answered at once, beside the planned peak."""

import time
from typing import Any

import torch

from bench.gpu_trial import TRIALS, Scale
from common.checks.tried_rows import batch_of_length
from common.hardware.devices import Gpu, forget_peak, read_memory
from common.models.loading import load_base_model
from common.planning.device_maps import whole_model_on
from common.planning.job import EvaluationShape
from common.planning.plans import plan_run
from common.runtime.rank import rank_started

PROMPT_TOKENS, NEW_TOKENS = 512, 256
LORA = next(trial for trial in TRIALS if trial.technique == "lora")


@torch.no_grad()
def measure(rows: int, gpu: Gpu, scale: Scale) -> dict[str, Any]:
    """Return how long the base of a LoRA run takes to answer `rows` prompts at once, and its peak beside the plan's."""
    run = LORA.run(scale)
    prompt, new = (min(tokens, scale.length // 2) for tokens in (PROMPT_TOKENS, NEW_TOKENS))
    shape = EvaluationShape(rows, prompt, prompt - 1, prompt, new)
    phases = plan_run(run, batch_of_length(run, scale.length), gpu, shape).phases[0]
    planned = next(phase for phase in phases if phase.name == "baseline evaluation")
    with rank_started(run) as rank:
        model = load_base_model(run, whole_model_on(rank.device)).eval()
        ids = torch.randint(10, model.config.vocab_size, (rows, prompt), device=rank.device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
        model.generate(**given, max_new_tokens=2, min_new_tokens=2)  # what is done once
        forget_peak(rank.device)
        start_s = time.perf_counter()
        model.generate(**given, max_new_tokens=new, min_new_tokens=new)  # returns when the last token is on the host
        seconds = time.perf_counter() - start_s
        memory = read_memory(rank.device)
    return {
        "model": scale.model,
        "rows": rows,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "answers_time_s": seconds,
        "tokens_per_s": rows * new / seconds,
        "peak_gib": memory.peak_gib,
        "planned_gib": planned.memory.allocated_gib,
    }
