"""The catalogue of GPUs: its figures agree with each other and with the seeds, and names find their rows."""

import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.hardware import devices
from common.hardware.devices import (
    CATALOGUE,
    find_gpu,
    gpu_of_device,
    gpus,
    visible_gpus,
)
from common.planning.step_speed import GENERATIONS
from common.records.store import environment


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("RTX A6000 48GB", "RTX A6000 48GB"),
        ("rtx a6000", "RTX A6000 48GB"),
        ("A6000", "RTX A6000 48GB"),
        ("RTXA6000", "RTX A6000 48GB"),
        ("NVIDIA RTX A6000 (48G)", "RTX A6000 48GB"),
        ("6000 Ada", "RTX 6000 Ada 48GB"),
        ("4090", "RTX 4090 24GB"),
        ("GeForce RTX-3090 24 GB", "RTX 3090 24GB"),
        ("l4", "L4 24GB"),
        ("L40S", "L40S 48GB"),
        ("a10g", "A10G 24GB"),
        ("Tesla T4", "T4 16GB"),
        ("H100", "H100 80GB SXM"),
        ("H100 SXM5 80GiB", "H100 80GB SXM"),
        ("A100-80GB", "A100 80GB SXM"),
        ("A100 PCIe 80GB", "A100 80GB PCIe"),
        ("H100 PCIe", "H100 80GB PCIe"),
        ("h100 nvl", "H100 NVL 94GB"),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell Workstation 96GB"),
        ("RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server 96GB"),
        ("3060 12gb", "RTX 3060 12GB"),
        ("RTX 4070 Ti SUPER", "RTX 4070 Ti Super 16GB"),
        ("5090", "RTX 5090 32GB"),
        ("b300", "B300 288GB SXM"),
        ("gb10", "GB10 128GB"),
        ("AMD Instinct MI300X", "MI300X 192GB"),
        ("7900 xtx", "RX 7900 XTX 24GB"),
        ("SXM A100 40gb", "A100 40GB SXM"),
        ("v100 32g", "V100 32GB SXM"),
        *((gpu.name, gpu.name) for gpu in CATALOGUE),
        *(  # as the run folders are named
            (folder, name)
            for folder, name in {
                "a4000_16g": "RTX A4000 16GB",
                "a5000_24g": "RTX A5000 24GB",
                "a6000_48g": "RTX A6000 48GB",
                "a100_80g": "A100 80GB SXM",
                "h200_141g": "H200 141GB SXM",
                "v100_16g": "V100 16GB SXM",
            }.items()
        ),
    ],
)
def test_names_as_users_write_them(asked: str, name: str) -> None:
    assert find_gpu(asked).name == name


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("A60000", "'A60000' is not in the catalogue. Did you mean RTX A6000 48GB?"),
        ("RTX A6000 24GB", "'RTX A6000 24GB' is not in the catalogue. Did you mean RTX A6000 48GB?"),
        ("RTX 6000", "is not in the catalogue"),  # three cards bear this name
        ("H100 40GB", "is not in the catalogue. Did you mean H100 80GB SXM or H100 80GB PCIe?"),
        ("A100 24GB", "Did you mean A100 40GB SXM or A100 80GB SXM or A100 80GB PCIe or A100 40GB PCIe?"),
        ("RTX 3095 Ti", "is not in the catalogue. Did you mean RTX 3090 Ti 24GB?"),
        ("3060", "'3060' may be RTX 3060 8GB or RTX 3060 12GB: name its memory."),
        ("", "The GPU '' is not in the catalogue. common/hardware/catalogue.toml has "),
        ("zzz", "The GPU 'zzz' is not in the catalogue. common/hardware/catalogue.toml has "),
        ("48GB", "is not in the catalogue"),
        ("NVIDIA", "is not in the catalogue"),
        ("A100", "'A100' may be A100 40GB SXM or A100 80GB SXM or A100 80GB PCIe or A100 40GB PCIe: name its memory."),
        ("V100", "'V100' may be V100 16GB SXM or V100 32GB SXM or "),
    ],
)
def test_unknown_and_ambiguous_names_are_refused(asked: str, said: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(said)):
        find_gpu(asked)


NO_ROW = (
    "NVIDIA A100 80GB PCIe MIG 1g.10gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce GTX 1080 Ti",
    "NVIDIA GeForce RTX 3060",  # which has 8 or 12 GB
    "AMD Radeon Graphics",
    "",
)


# of cards with different memory
SHARED_NAMES = {
    name for name, count in Counter(name for gpu in CATALOGUE for name in gpu.reported_as).items() if count > 1
}


@pytest.mark.parametrize(
    ("nvml_name", "name"),
    [
        ("NVIDIA RTX A4000", "RTX A4000 16GB"),
        ("NVIDIA RTX A6000", "RTX A6000 48GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
        ("NVIDIA L4", "L4 24GB"),
        ("NVIDIA L40S", "L40S 48GB"),
        ("NVIDIA A10G", "A10G 24GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB SXM"),
        ("NVIDIA H200", "H200 141GB SXM"),
        ("Tesla V100-SXM2-16GB", "V100 16GB SXM"),
        ("Tesla V100-SXM2-32GB", "V100 32GB SXM"),
        ("Tesla T4", "T4 16GB"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090 24GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090 24GB"),
        *((other, None) for other in NO_ROW),
        *((reported, gpu.name) for gpu in CATALOGUE for reported in gpu.reported_as if reported not in SHARED_NAMES),
    ],
)
def test_devices_by_their_nvml_names(nvml_name: str, name: str | None) -> None:
    gpu = gpu_of_device(nvml_name)
    assert (gpu and gpu.name) == name


def test_cuda_cores_are_those_of_the_published_tables() -> None:
    published = {"RTX A6000": 10_752, "RTX A5000": 8_192, "A100 80GB": 6_912}
    assert {name: find_gpu(name).cuda_cores for name in published} == published


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("H100", "bf16", 989.4),  # 1,979 is with sparsity
        ("H200", "bf16", 989.4),
        ("A100 80GB", "bf16", 312.0),
        ("RTX A6000", "bf16", 154.8),
        ("RTX 3090", "bf16", 71.0),  # 142 adds up in fp16
        ("RTX 4090", "bf16", 165.2),
        ("L4", "bf16", 121.0),
        ("V100 16GB", "fp16", 125.0),
        ("V100 16GB", "bf16", None),
        ("T4", "bf16", None),
        ("T4", "tf32", None),
    ],
)
def test_rates_are_dense(name: str, precision: str, tflops: float | None) -> None:
    assert find_gpu(name).tflops_dense[precision] == tflops


def test_rates_fit_together() -> None:
    for gpu in CATALOGUE:
        rates, is_amd = gpu.tflops_dense, gpu.generation in ("CDNA", "RDNA")
        assert list(rates) == ["fp32", "tf32", "bf16", "fp16"], gpu.name
        clock_ghz = rates["fp32"] * 1e3 / (2 * gpu.cuda_cores)  # one multiply-add per core and cycle; of some AMD two
        assert any(1.4 < clock_ghz / each < 3.2 for each in (1, 2)) if is_amd else 1.19 < clock_ghz < 2.63, gpu.name
        assert rates["fp16"] <= (31.2 if gpu.generation == "Blackwell" else 16.2) * rates["fp32"], gpu.name
        if is_amd:  # without tf32 but for two generations; the MI100 has bf16 at half rate, RDNA 2 none
            assert rates["bf16"] in (None, rates["fp16"], pytest.approx(rates["fp16"] / 2, rel=0.012)), gpu.name
            continue
        # the tolerance catches one sparse figure of the two
        halves = [None] * 2 if rates["bf16"] is None else [rates["fp16"], pytest.approx(rates["fp16"] / 2, rel=0.012)]
        assert [rates["bf16"], rates["tf32"]] == halves, gpu.name


def test_memory_is_a_little_below_the_name() -> None:
    for gpu in CATALOGUE:
        named = int(re.search(r"(\d+)GB", gpu.name)[1])
        # an MI300A gives its GPU three quarters of what it shares with its CPU
        assert (0.74 if gpu.name.startswith("MI300A") else 0.9) * named < gpu.memory_gib < named, gpu.name


def test_the_cards_that_people_train_on_are_there_with_their_sources() -> None:
    assert len(CATALOGUE) >= 60
    known = {each.name for each in GENERATIONS}
    for gpu in CATALOGUE:
        assert gpu.source.startswith("https://"), gpu.name
        assert gpu.nvlink_gb_per_s is not None or not gpu.nvlink_bridge, gpu.name
        assert gpu.generation in known, gpu.name


def test_names_are_unique_and_bandwidth_grows_with_the_generation() -> None:
    assert len({gpu.name for gpu in CATALOGUE}) == len(CATALOGUE)
    generations = ["T4", "V100 32GB", "A100 40GB", "A100 80GB", "H100", "H200"]
    bandwidths = [find_gpu(name).memory_bandwidth_gb_per_s for name in generations]
    assert all(older < newer for older, newer in pairwise(bandwidths))


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys, common.hardware.devices as h; h.find_gpu('a6000'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


SLICES = {"GPU-x1": {"MIG-1": "a MIG 3g", "MIG-2": "a MIG 1g"}, "GPU-y1": {}}


@pytest.mark.parametrize(
    ("visible", "slices", "names"),
    [
        (None, None, ["a", "b", "c"]),
        ("1,2", None, ["b", "c"]),
        ("2", None, ["c"]),
        ("", None, []),
        ("7", None, []),
        ("0,-1,2", None, ["a"]),
        ("0,nonsense,2", None, ["a"]),
        ("GPU-y", None, ["b"]),
        ("1,GPU-x", None, ["b", "a"]),
        # a MIG slice is the only GPU of its process
        (None, SLICES, ["a MIG 3g"]),
        ("MIG-2", SLICES, ["a MIG 1g"]),
        ("MIG-1,MIG-2", SLICES, ["a MIG 3g"]),
        ("1", SLICES, ["b"]),
        ("0", SLICES, ["a MIG 3g"]),
        ("MIG-7", SLICES, []),
    ],
)
def test_only_gpus_that_cuda_may_see_are_counted(visible: str | None, slices: dict | None, names: list[str]) -> None:
    assert visible_gpus({"GPU-x1": "a", "GPU-y1": "b", "GPU-z1": "c"}, visible, slices) == names


def nvml(starts: bool) -> SimpleNamespace:
    """A machine whose only GPU is divided into slices, as NVML tells of it; or one without NVML."""

    def start() -> None:
        if not starts:
            raise RuntimeError("no library")

    def part(handle: str, number: int) -> str:
        if number == 1:
            raise RuntimeError("no slice there")
        return f"MIG-{number}"

    return SimpleNamespace(
        __spec__="as if installed",
        NVML_DEVICE_MIG_DISABLE=0, NVMLError=RuntimeError, nvmlInit=start, nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1", nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: f"GPU-{number}", nvmlDeviceGetUUID=lambda handle: handle,
        nvmlDeviceGetName=lambda handle: f"name of {handle}", nvmlDeviceGetMigMode=lambda handle: (1, 1),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 3, nvmlDeviceGetMigDeviceHandleByIndex=part,
    )  # fmt: skip


def test_the_slices_of_a_divided_gpu_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(starts=True))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus() == ("580.1", ["name of MIG-0"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2")
    assert gpus() == ("580.1", ["name of MIG-2"])


@pytest.mark.parametrize("pynvml", [nvml(starts=False), None], ids=["no driver for it", "no package"])
def test_without_nvml_cuda_is_asked_in_another_process(
    pynvml: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it sees none; on a machine with a driver, whatever it prints is what is there."""
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setattr(devices, "CUDA_DRIVER", "libc.so.6")  # some library that loads
    printed = subprocess.CompletedProcess([], 0, "one\ntwo\n")
    monkeypatch.setattr(devices.subprocess, "run", lambda command, **_: printed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "for this test")  # answers are kept by it
    assert gpus() == ("", ["one", "two"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "for this test, without a driver")
    monkeypatch.setattr(devices, "CUDA_DRIVER", "no such library")
    assert gpus() == ("", [])


def test_cuda_is_set_up_before_any_library_starts_it() -> None:
    asked = "import common, os; print(os.environ['CUDA_DEVICE_ORDER'], os.environ.get('PYTORCH_ALLOC_CONF'))"
    for own, expected in (({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None")):
        env = {"PATH": "", "PYTHONPATH": str(REPOSITORY), **own}
        done = subprocess.run([sys.executable, "-c", asked], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["PCI_BUS_ID", expected]


def test_a_gpus_record_says_how_its_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment(RunConfig())["allocator"] is None
    assert environment(RunConfig(device="cuda"))["allocator"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    assert environment(RunConfig(device="cuda"))["allocator"] == "backend:native"
