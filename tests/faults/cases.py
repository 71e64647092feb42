"""The runs and notebooks that the fault tests start, and which of a test's cases run where."""

from collections.abc import Iterable
from pathlib import Path

import nbformat
import pytest

STEPS = 6
"""Of each run: two epochs of three steps."""
CHAT = ("--train_rows", "33", "--validation_rows", "8", "--test_rows", "1", "--num_train_epochs", "2",
        "--eval_steps", "0.1", "--save_steps", "0.1", "--independent_judge", "none", "--report_to", "none",
        "--max_new_tokens", "1")  # fmt: skip
SUMMARIES = ("--train_rows", "33", "--validation_rows", "4", "--test_rows", "2", "--num_train_epochs", "2",
             "--eval_steps", "0.1", "--save_steps", "0.1", "--report_to", "none", "--num_beams", "1",
             "--max_new_tokens", "2")  # fmt: skip
PAIRS = ("--train_rows", "33", "--validation_rows", "8", "--test_rows", "2", "--num_train_epochs", "2", "--eval_steps",
         "0.1", "--save_steps", "0.1", "--report_to", "none", "--max_new_tokens", "1")  # fmt: skip
ANSWERS = (*PAIRS[:-2], "--max_new_tokens", "4", "--max_steps", "-1", "--num_generations", "2", "--reward",
           "tests.recipes.varied_reward:varied")  # fmt: skip
WORKFLOWS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "single": ("2.1_lora_finetuning/run_0_cpu_x1/my_workflow_lora_finetuning.py", 1, (*CHAT, "--batch_size", "16")),
    "ddp": ("2.2_lora_finetuning_with_ddp/run_0_cpu_x2/my_workflow_lora_finetuning_with_ddp.py", 2,
            (*CHAT, "--batch_size", "8")),
    "fsdp": ("2.6_full_finetuning_with_fsdp/run_0_cpu_x2/my_workflow_full_finetuning_with_fsdp.py", 2,
             (*CHAT, "--batch_size", "8")),
    "pp": ("2.7_full_finetuning_with_pp/run_0_cpu_x2/my_workflow_full_finetuning_with_pp.py", 2,
           (*CHAT, "--batch_size", "16", "--micro_batches", "2")),
    "sp": ("2.8_full_finetuning_with_sp/run_0_cpu_x2/my_workflow_full_finetuning_with_sp.py", 2,
           (*CHAT, "--batch_size", "16")),
    "machines": ("3.2_summarization/run_0_cpu_x2/my_workflow_summarization_machines.py", 2,
                 (*SUMMARIES, "--batch_size", "8")),
    "preferences": ("3.4_preference_tuning/run_0_cpu_x1/my_workflow_preference_tuning.py", 2,
                    (*PAIRS, "--technique", "full", "--parallel", "ddp", "--batch_size", "8")),
    "rewards": ("3.5_reinforcement_learning/run_0_cpu_x2/my_workflow_reinforcement_learning.py", 2, (*ANSWERS,
                "--technique", "lora", "--lora_dropout", "0", "--batch_size", "16")),
}  # fmt: skip
"""By technique: its workflow, ranks, and settings of a run of `STEPS` steps that keeps each of them.

Of code there are five kinds: the Trainer's steps (single, ddp), a loop that is written out for shards, stages and
parts of rows (fsdp, pp, sp) and for replicas (machines), the Trainer with a reference (preferences), and a loop that
samples its rows (rewards).
"""


def cases(fast: Iterable = (), slow: Iterable = (), soak: Iterable = ()) -> list:
    """What a test is tried with: from `make test` on, from `make test-all` on, and in `make soak` alone.

    The last ones share all code that the test is about with one of the others; they renew rows of docs/faults.md.
    """
    groups = ((fast, ()), (slow, (pytest.mark.slow,)), (soak, (pytest.mark.slow, pytest.mark.soak)))
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
        for group, marks in groups
        for case in group
    ]


def write_notebook(path: Path, *cells: str) -> Path:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, path)
    return path
