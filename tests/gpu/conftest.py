"""The device of the tests of GPUs, and their rehearsal on a CPU.

`pytest tests/gpu --rehearse` runs on the CPU, with tiny shapes, what a CPU can run of them: where a GPU is there for
minutes, no test is to fail for a name that is misspelt. GPUs are hidden then. Triton's kernels run by its interpreter
where Triton is installed; else, and for `varlen_attn`, a reference stands in for the kernel.
"""

import gc
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from common.planning.model_configs import MODEL_CONFIGS

needs_4_bits = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""What a rehearsal puts into a real architecture's config."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the rehearsal."""
    parser.addoption("--rehearse", action="store_true", help="run the tests of GPUs on the CPU, with tiny shapes")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from a rehearsal; before Triton, which reads its variable at import, and CUDA are set up."""
    if config.getoption("rehearse", False):
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


@pytest.fixture(scope="session")
def rehearses(pytestconfig: pytest.Config) -> bool:
    """Whether a CPU stands in for the GPU."""
    return pytestconfig.getoption("rehearse", False)


@pytest.fixture(scope="session")
def device(rehearses: bool) -> str:
    """The kind of device that is tested; skips where there is none."""
    if not rehearses and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return "cpu" if rehearses else "cuda"


@pytest.fixture(scope="session")
def first_device(device: str) -> str:
    """Its name in records."""
    return "cpu" if device == "cpu" else "cuda:0"


@pytest.fixture(scope="session")
def gpu(rehearses: bool) -> None:
    """Skip where there is no GPU, and in a rehearsal, of what has nothing on a CPU to stand in for it."""
    if rehearses:
        pytest.skip("cannot be rehearsed: a CPU has no fp16, no number of GPUs, and no peak of CUDA's allocator")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def two_gpus() -> None:
    """Skip where there are fewer, as in a rehearsal: `tests/fake_gpus` is what stands in for several."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two NVIDIA GPUs, {torch.cuda.device_count()} found")


@pytest.fixture
def emptied_gpu() -> None:
    """Free what earlier tests of this process left in cycles: peaks are of all that is allocated."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.fixture
def shape(rehearses: bool, tmp_path: Path) -> Callable[[str], str]:
    """From a real model's name what `--model` takes: the name, or in a rehearsal its config with small sizes."""

    def of(name: str) -> str:
        if not rehearses:
            return name
        config = json.loads((MODEL_CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config | {key: size for key, size in SMALL.items() if key in config}))
        return str(path)

    return of


@pytest.fixture
def trained(run_workflow: Callable, device: str) -> Callable[..., Any]:
    """Run to a good end, on the GPU and by `python` unless it is said otherwise.

    Without the independent judge, a package of 90 MB: these tests ask what a GPU does, not how good answers are.
    """

    def run(*overrides: str, launcher: str = "python", **options: object) -> Any:
        done = run_workflow(launcher, "--independent_judge", "none", "--device", device, *overrides, **options)
        assert done.exit_code == 0, done.output
        return done

    return run


def folder_with(script: Path, folder: Path, first: str = "") -> Path:
    """Make a run folder of one workflow, which runs `script` after the lines of `first`; return it."""
    folder.mkdir()
    lines = ("import runpy, sys", first, f"sys.path.insert(0, {str(script.parent)!r})",
             f"runpy.run_path({str(script)!r}, run_name='__main__')")  # fmt: skip
    (folder / script.name).write_text("\n".join(lines))
    return folder


def losses_of(done: Any) -> list[float]:
    """The training losses of a run, in the order of its steps."""
    return [loss for _, loss in done.record["training_losses"]]
