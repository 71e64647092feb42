"""Where there are fewer GPUs than a folder was made for, what would run on them is offered with its plan."""

import pytest

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.folder_runs import run_of_folder
from common.planning.plans import offer, on_fewer

A6000, A4000, L4 = "NVIDIA RTX A6000", "NVIDIA RTX A4000", "NVIDIA L4"


def run_of(folder: str) -> RunConfig:
    return run_of_folder(REPOSITORY / folder, [])


@pytest.mark.parametrize(
    ("folder", "names", "command", "planned"),
    [
        ("2.2_lora_finetuning_with_ddp/run_2_a6000_48g_x4", [A6000] * 2, "torchrun --nproc_per_node 2", "of 47.4 GiB"),
        ("2.2_lora_finetuning_with_ddp/run_2_a6000_48g_x4", [A6000], "`python my_workflow", "of 47.4 GiB"),
        (
            "2.2_lora_finetuning_with_ddp/run_2_a6000_48g_x4",
            [L4],
            "`python my_workflow",
            "--batch_size 10 --gradient_a",
        ),
        ("2.2_lora_finetuning_with_ddp/run_2_a6000_48g_x4", [A4000], "`python my_workflow", "not even one row fits"),
        ("2.2_lora_finetuning_with_ddp/run_2_a6000_48g_x4", ["NVIDIA XYZ"], "`python my_workflow", "--devices 1`, or"),
        ("2.6_full_finetuning_with_fsdp/run_1_a100_80g_x2", [A6000], "a run folder of 2.4_full", "of 47.4 GiB"),
        ("2.5_full_finetuning_with_mp/run_2_a5000_24g_x4", [A6000] * 2, "`python my_workflow", "of 47.4 GiB"),
        ("2.7_full_finetuning_with_pp/run_1_a6000_48g_x2", [A6000], "a run folder of 2.4_full", "of 47.4 GiB"),
        ("3.1_text_classification/run_1_a100_80g_x2", [A6000], "my_workflow", "of 47.4 GiB"),
    ],
)
def test_what_would_run_on_the_gpus_at_hand_is_offered(
    folder: str, names: list[str], command: str, planned: str
) -> None:
    said = offer(run_of(folder), names)
    assert command in said
    assert planned in said


@pytest.mark.parametrize(("gpus", "parallel"), [(2, "fsdp"), (1, "single")])
def test_the_run_that_is_offered_has_the_devices_that_there_are(gpus: int, parallel: str) -> None:
    fewer, _ = on_fewer(run_of("2.6_full_finetuning_with_fsdp/run_2_a6000_48g_x4"), gpus)
    assert (fewer.devices, fewer.parallel, fewer.technique) == (gpus, parallel, "full")
