"""Where there are fewer GPUs than a folder was made for, what would run on them is named."""

import pytest

from common.base.paths import REPOSITORY
from common.checks.folder_runs import run_of_folder
from common.runtime.rank import on_fewer


@pytest.mark.parametrize(
    ("folder", "gpus", "command"),
    [
        ("2.2_lora_finetuning_with_ddp/run_2_a6000_48g_x4", 2, "torchrun --nproc_per_node 2"),
        ("2.2_lora_finetuning_with_ddp/run_2_a6000_48g_x4", 1, "`python my_workflow_<technique>.py --devices 1`"),
        ("2.2_lora_finetuning_with_ddp/run_2_a6000_48g_x4", 3, "--devices 3`"),
        ("2.2_lora_finetuning_with_ddp/run_3_2nodes_a6000_48g_x4", 2, "--devices 2 --nodes 1`"),
        ("2.6_full_finetuning_with_fsdp/run_2_a6000_48g_x4", 2, "torchrun --nproc_per_node 2"),
        ("2.6_full_finetuning_with_fsdp/run_1_a100_80g_x2", 1, "a run folder of 2.4_full"),
        ("2.5_full_finetuning_with_mp/run_2_a5000_24g_x4", 2, "`python my_workflow"),
        ("2.5_full_finetuning_with_mp/run_2_a5000_24g_x4", 1, "a run folder of 2.4_full"),
        ("2.7_full_finetuning_with_pp/run_1_a6000_48g_x2", 1, "a run folder of 2.4_full"),
        ("3.1_text_classification/run_1_a100_80g_x2", 1, "my_workflow"),
    ],
)
def test_what_would_run_on_the_gpus_at_hand_is_named(folder: str, gpus: int, command: str) -> None:
    assert command in on_fewer(run_of_folder(REPOSITORY / folder, []), gpus)
