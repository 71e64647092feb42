"""The run folders that tests start: of each technique the first one."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from common.base.paths import REPOSITORY

LORA = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1"
DDP = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2"
QLORA = REPOSITORY / "2.3_qlora_finetuning" / "run_0_cpu_x1"
FULL = REPOSITORY / "2.4_full_finetuning" / "run_0_cpu_x1"
MP = REPOSITORY / "2.5_full_finetuning_with_mp" / "run_0_cpu_x1"
SHARDED = REPOSITORY / "2.6_full_finetuning_with_fsdp" / "run_0_cpu_x2"
PP = REPOSITORY / "2.7_full_finetuning_with_pp" / "run_0_cpu_x2"
SP = REPOSITORY / "2.8_full_finetuning_with_sp" / "run_0_cpu_x2"
CLASSIFICATION = REPOSITORY / "3.1_text_classification" / "run_0_cpu_x2"
SUMMARIZATION = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2"
PICTURES = REPOSITORY / "3.3_visual_question_answering" / "run_0_cpu_x1"
PREFERENCES = REPOSITORY / "3.4_preference_tuning" / "run_0_cpu_x1"
REWARDED = REPOSITORY / "3.5_reinforcement_learning" / "run_0_cpu_x1"
BASE, VISION_BASE = (REPOSITORY / "assets" / name for name in ("embedded_base", "embedded_vision_base"))


def module_of(folder: Path, name: str) -> ModuleType:
    """A module of a run folder, which is no package."""
    with patch("sys.path", [str(folder), *sys.path]):
        return importlib.import_module(name)
