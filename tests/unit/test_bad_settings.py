"""A grid of settings, each of every kind: what is not refused before a model loads can be built, and takes a step."""

import math
import traceback
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from transformers import GenerationConfig, SchedulerType, TrainerState, set_seed
from transformers.training_args import OptimizerNames

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.inputs import check_schedule, check_settings
from common.models.loading import load_base_model, load_tokenizer
from common.models.trained_weights import with_trained_weights
from common.runtime.rank import exchange_timeout
from common.training.optimizers import make_optimizer, make_schedule, training_arguments

BASES = {
    "lora": {},
    "qlora": {"technique": "qlora"},
    "full": {"technique": "full", "precision": "bf16"},
    "pp": {"technique": "full", "parallel": "pp", "devices": 2, "micro_batches": 2},
    "fsdp": {"technique": "full", "parallel": "fsdp", "devices": 2},
    "classification": {"task": "classification", "model": "all-minilm-l6-v2", "data": "assets/visitor_messages",
                       "target_modules": "query,value"},
    "summarization": {"task": "summarization", "technique": "full", "model": "assets/embedded_summarizer",
                      "data": "assets/chat_summaries", "text_column": "dialogue", "target_modules": "all",
                      "max_length": 256, "loop": "machines", "parallel": "ddp", "devices": 2},
    "preferences": {"task": "preferences", "data": "assets/preferences", "max_length": 128, "lora_dropout": 0.0},
}  # fmt: skip
"""Runs of each kind; a setting is changed at a time."""
MUCH_LIKE_LORA = ("qlora", "full", "fsdp")
"""Whose settings the same code checks: `make soak` alone tries them, too."""
WHOLE = (-(10**30), -2, -1, 0, 1, 2, 3, 7, 2**16 + 1, 2**31, 10**30)
SHARES = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e-9, 0.5, 1.0, 2.5, 1e4, 1e9, 1e300)
WORDS = (
    "",
    " ",
    "none",
    "no-such",
    "a,b",
    "q_proj,v_prj",
    "q_proj, v_proj",
    "lm_head",
    "all",
    "x" * 300,
    "a\0b",
    "ü/../é",
)
OF_NO_KIND = (None, [], {}, ("lora",), b"x", 1j)
VALUES = {
    int: (*WHOLE, 1.5, True, "8"),
    float: (*SHARES, *WHOLE, True, "0.1"),
    bool: (True, False, 1, "yes"),
    str: WORDS,
}
NAMES = {
    "optim": [each.value for each in OptimizerNames],
    "lr_scheduler_type": [each.value for each in SchedulerType],
    "target_modules": ["all-linear", "all-linear,q_proj", ".*proj", "q_proj,embed_tokens", "self_attn.q_proj", "query"],
    "report_to": ["none,tensorboard", "tensorboard", "all", "wandb"],
    "model": ["assets/embedded_base", "assets/exhibits", "assets/embedded_summarizer", "gpt2", "nobody/nothing"],
}
OF_ROWS = {"data", "dataset_config", "dataset_revision", "dataset_train_split", "dataset_test_split", "prompt_column",
           "completion_column", "text_column", "label_column", "summary_column", "resume_from_checkpoint",
           "device_map", "train_rows", "validation_rows", "test_rows"}  # fmt: skip
"""What is read from them is checked when rows and checkpoints are, and layers are placed."""
TOGETHER = (
    {"lr_scheduler_type": "polynomial", "learning_rate": 1e-9},
    {"lr_scheduler_type": "polynomial", "warmup_steps": 10, "max_steps": 10},
    {"lr_scheduler_type": "greedy", "learning_rate": 1e-5},
    {"optim": "rmsprop", "weight_decay": 1e9},
    {"optim": "adafactor", "learning_rate": 1e9},
    {"max_length": 512, "max_new_tokens": 512},
    {"max_length": 512, "max_new_tokens": 513},
    {"target_modules": "q_proj,lm_head", "use_liger_kernel": True},
    {"eval_steps": 2.5, "save_steps": 1.5},
    {"seed": 2**31 - 1, "num_train_epochs": 2**31 - 1},
)


def grid() -> Iterator[dict[str, object]]:
    """Each setting with each value of its kind, some of another kind, and some together."""
    hints = get_type_hints(RunConfig)
    for each in fields(RunConfig):
        kind = hints[each.name] if hints[each.name] in VALUES else str
        for value in (*VALUES[kind], *NAMES.get(each.name, ()), *OF_NO_KIND):
            yield {each.name: value}
    yield from TOGETHER


def made(base: RunConfig, settings: dict[str, object]) -> RunConfig | None:
    """The run with these settings, or None where it is refused."""
    try:
        return base.changed_to(**settings)
    except BadInputError:
        return None


def build(run: RunConfig, folder: Path) -> None:
    """Build what a run builds after its baseline evaluation, and take a step of optimizer and schedule."""
    set_seed(run.seed)
    torch.Generator().manual_seed(run.seed * 10_007 + 1)
    assert exchange_timeout(run) < timedelta.max
    model = with_trained_weights(load_base_model(run, {"": "cpu"}), run)
    optimizer, steps = make_optimizer(model, run), run.max_steps if run.max_steps > 0 else 10
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.ones_like(weight)
    optimizer.step()
    TrainerState().compute_steps(training_arguments(run, folder), steps)
    schedule = make_schedule(optimizer, run, steps)
    for _ in range(min(steps, 12)):
        schedule.step()
    GenerationConfig(max_new_tokens=run.max_new_tokens, num_beams=run.num_beams).validate()
    load_tokenizer(run)("a", truncation=True, max_length=run.max_length)


@pytest.mark.parametrize("base", ["lora", "pp"])
def test_no_setting_of_any_kind_ends_in_a_traceback(base: str) -> None:
    run, settings = RunConfig(**BASES[base]), list(grid())[list(BASES).index(base) :: 16]
    accepted = [given for given in settings if made(run, given)]
    assert 0 < len(accepted) < len(settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "base", [pytest.param(base, marks=pytest.mark.soak) if base in MUCH_LIKE_LORA else base for base in BASES]
)
def test_what_passes_the_check_can_be_built(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.models.loading.HUB_TIMEOUT_S", 1)
    run = RunConfig(independent_judge="none", report_to="none", results_root=str(tmp_path)).changed_to(**BASES[base])
    through, built = [], 0
    for settings in grid():
        if settings.keys() & OF_ROWS:
            continue
        try:
            asked = made(run, settings)
            if asked is None:
                continue
            try:
                checked = check_settings(asked)
                check_schedule(checked, checked.max_steps if checked.max_steps > 0 else 10)
            except BadInputError:
                continue
            build(checked, tmp_path)
            built += 1
        except Exception:
            through.append((settings, traceback.format_exc(limit=-3)))
    assert not through, f"{len(through)} of the grid got through:\n" + "\n".join(
        f"{each}: {why}" for each, why in through
    )
    assert built > 20
