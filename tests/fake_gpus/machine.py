"""A machine of several GPUs that is none: PyTorch's PrivateUse1 backend as devices `fgpu:0`, `fgpu:1`, ... on the CPU.

A tensor of such a device wraps one on the CPU, and each operation is computed there. Everything above PyTorch is real:
Accelerate's hooks move tensors, autograd has a thread for each device, and an operation on tensors of two devices, or
of a device and the CPU, raises an error in PyTorch's words. Bytes are counted by device. What it cannot reach is listed
in `tests/gpu/readme.md`.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _DummyPrivateUse1Hook

KIND = "fgpu"
MEMORY_BYTES = 4 * 2**30
"""Of each device."""
GUARD = Path(__file__).with_name("guard.cpp")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
"""Operations between devices."""
PINS = (torch.ops.aten._pin_memory.default, torch.ops.aten.is_pinned.default)
"""The host's memory is as near to a fake GPU as it can be."""
TAKE_CPU_TENSORS = ("aten.index.", "aten.index_put", "aten._index_put", "aten._unsafe_index", "aten._foreach_copy_")
"""How the names of operations begin that take tensors of the CPU beside a device's, as on CUDA."""
WAIT = ("aten._local_scalar_dense.", "aten.nonzero.", "aten.masked_select.", "aten.equal.", "aten._unique2.")
"""How the names of operations begin that end only when the device has computed what they ask for."""


# -- what is allocated


class Memory:
    """Bytes on each device: now, and at most since `forget_peak`."""

    def __init__(self) -> None:
        """Nothing is allocated."""
        self.now: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self.known: set[int] = set()
        """Storages that are counted, by their address."""

    def add(self, storage: torch.UntypedStorage, device: int) -> None:
        """Count a storage, until it is freed."""
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.now[device] += storage.nbytes()
        self.peak[device] = max(self.peak[device], self.now[device])
        weakref.finalize(storage, self._freed, storage._cdata, device, storage.nbytes())

    def _freed(self, address: int, device: int, size: int) -> None:
        self.known.discard(address)
        self.now[device] -= size

    def forget_peak(self, device: int) -> None:
        """A device's peak starts again from what is allocated now."""
        self.peak[device] = self.now[device]


memory = Memory()


# -- what the host waits for


class Waits:
    """Operations for which the host of a real GPU would wait, in their order; copies from the host are seldom many.

    A copy from pinned memory is no wait if it says so (`non_blocking`); here all of the host's memory counts as pinned.
    """

    def __init__(self) -> None:
        """Nothing was waited for."""
        self.operations: list[str] = []
        self.counts = True

    def see(self, operation: Any, given: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        """Note an operation on the tensors `given`, if it is a wait."""
        name = str(operation)
        on_device = [isinstance(tensor, FakeGpuTensor) for tensor in given]
        if operation in COPIES:
            to_device = torch.device(kwargs.get("device") or given[0].device).type == KIND
            crosses = to_device != on_device[-1]
            is_wait = crosses and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        elif name.startswith(("aten.index.", "aten.index_put")):  # positions are on the CPU, or a mask is to be counted
            is_wait = any(on_device) and any(
                each is not None and (each.dtype == torch.bool or not isinstance(each, FakeGpuTensor))
                for each in args[1]
            )
        else:
            is_wait = any(on_device) and name.startswith(WAIT)
        if is_wait:
            self.add(name)

    def add(self, name: str) -> None:
        """Note a wait."""
        if self.counts:
            self.operations.append(name)


waits = Waits()


# -- tensors and operations


class FakeGpuTensor(torch.Tensor):
    """A tensor on a fake GPU; `raw` has its values, on the CPU."""

    raw: torch.Tensor

    def __new__(cls, raw: torch.Tensor, device: torch.device, requires_grad: bool = False) -> "FakeGpuTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), dtype=raw.dtype, device=device, requires_grad=requires_grad,
            storage_offset=raw.storage_offset(),
        )  # fmt: skip
        made.raw = raw
        memory.add(raw.untyped_storage(), device.index)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(operation, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        """Take other values, and let go of the memory of those before."""
        torch.Tensor.data.__set__(self, other)
        self.raw = _raw(other, [])

    # what reads a tensor's memory reads that of the CPU

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        waits.add("tolist")
        return self.raw.tolist()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        about = (self.raw.detach(), self.dtype, str(self.device), self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, about


def compute(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one of PyTorch's operations on the CPU, and put its results on the device of its inputs, or that is asked.

    Raises:
        RuntimeError: the inputs are on different devices; PyTorch's words.
    """
    if operation in PINS:
        return args[0] if operation is PINS[0] else True
    given: list[torch.Tensor] = []
    raw_args = [_raw(value, given) for value in args]
    raw_kwargs = {name: _raw(value, given) for name, value in kwargs.items()}
    waits.see(operation, given, args, kwargs)
    fakes = [tensor for tensor in given if isinstance(tensor, FakeGpuTensor)]
    devices = {fake.device for fake in fakes}
    if operation not in COPIES:
        _check_one_device(operation, given, devices)
    wanted = kwargs.get("device")
    if wanted is not None and torch.device(wanted).type == KIND:
        raw_kwargs["device"] = torch.device("cpu")
    made = operation(*raw_args, **raw_kwargs)
    device = torch.device(wanted) if wanted is not None else next(iter(devices), torch.device("cpu"))
    if operation is torch.ops.aten.copy_.default:
        return args[0]
    if device.type != KIND:
        return made
    device = torch.device(KIND, torch.accelerator.current_device_index()) if device.index is None else device
    return _wrapped(made, device, changed={id(fake.raw): fake for fake in fakes})


def _check_one_device(operation: Any, given: list[torch.Tensor], devices: set[torch.device]) -> None:
    on_cpu = [leaf for leaf in given if not isinstance(leaf, FakeGpuTensor) and leaf.dim() > 0]
    mixes = on_cpu and not str(operation).startswith(TAKE_CPU_TENSORS)
    if len(devices) > 1 or (devices and mixes):
        found = sorted({*map(str, devices), *(["cpu"] if on_cpu else [])})
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(found)}! "
            f"({operation})"
        )


def _raw(value: Any, found: list[torch.Tensor]) -> Any:
    """Return an argument with the CPU's tensors in place of a device's; add each tensor in it to `found`.

    Written out, as `tree_map` takes more time than most of the operations.
    """
    if isinstance(value, torch.Tensor):
        found.append(value)
        return value.raw if isinstance(value, FakeGpuTensor) else value
    return [_raw(each, found) for each in value] if isinstance(value, list | tuple) else value


def _wrapped(made: Any, device: torch.device, changed: dict[int, FakeGpuTensor]) -> Any:
    """Return an operation's results on `device`; a tensor that the operation `changed` stays the one that it was."""
    if isinstance(made, torch.Tensor):
        return changed[id(made)] if id(made) in changed else FakeGpuTensor(made, device)
    return type(made)(_wrapped(each, device, changed) for each in made) if isinstance(made, list | tuple) else made


class OnFakeGpus(TorchDispatchMode):
    """Sees operations that have no tensor of a device yet, such as `torch.zeros(3, device="fgpu:1")`."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(operation, args, kwargs or {})


# -- the machine


class DeviceModule(_DummyBackendModule):
    """`torch.fgpu`: what libraries ask of `torch.cuda`."""

    def device_count(self) -> int:
        return int(os.environ.get("FAKE_GPUS", "4"))  # as guard.cpp has it

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(_index(device))

    def synchronize(self, device: Any = None) -> None:
        """Nothing runs on the side."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return MEMORY_BYTES - memory.now[_index(device)], MEMORY_BYTES

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Of the CPU, which draws for them."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """The CPU's is put back by whoever puts back a device's."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def _index(device: Any) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    return device if isinstance(device, int) else torch.device(device).index or 0


def compiler() -> str | None:
    """The C++ compiler of this machine, if there is one."""
    return shutil.which("c++")


def compiled_guard() -> Path:
    """The library of `guard.cpp` for this PyTorch, compiled once on this machine; takes some seconds."""
    about = hashlib.sha256(GUARD.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"fake-gpus-{os.getuid()}-{about}.so"
    if not library.exists():
        root, made = Path(torch.__file__).parent, library.with_suffix(f".{os.getpid()}")
        include = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
        options = ["-shared", "-fPIC", "-std=c++20", "-O1", *include, "-o", str(made), f"-L{root / 'lib'}", "-lc10"]
        subprocess.run([compiler(), str(GUARD), *options], check=True)
        made.rename(library)
    return library


def start(guard: Path) -> None:
    """Make this process one on a machine with fake GPUs (`FAKE_GPUS` of them, or four), to its end."""
    ctypes.CDLL(str(guard))
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, DeviceModule())
    torch._C._acc.register_python_privateuseone_hook(_DummyPrivateUse1Hook())
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(1.0, device=...)` is made on the CPU, then moved
    for name, answer in MEMORY_ANSWERS.items():
        setattr(torch.accelerator, name, answer)
    OnFakeGpus().__enter__()


MEMORY_ANSWERS = {
    "memory_allocated": lambda device=None: memory.now[_index(device)],
    "max_memory_allocated": lambda device=None: memory.peak[_index(device)],
    "max_memory_reserved": lambda device=None: memory.peak[_index(device)],
    "reset_peak_memory_stats": lambda device=None: memory.forget_peak(_index(device)),
    "get_memory_info": lambda device=None: (MEMORY_BYTES - memory.now[_index(device)], MEMORY_BYTES),
    "empty_cache": lambda: None,
    "synchronize": lambda device=None: None,
}
"""What PyTorch asks of an allocator, which this backend has none of."""
