"""Bytes of tensors, real or fake, by part and moment of a step, as PyTorch computes it."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from common.planning.terms import PARTS, Kind

ALLOCATION_BYTES = 512  # CUDA's allocator hands out multiples (kMinBlockSize in c10/cuda/CUDACachingAllocator)
# what follows the last layer of a device without a head: the hidden state is sent, and its gradient received
HANDING_ON = "handing on"

Bytes = dict[str, float]  # of each of `PARTS`
Timeline = dict[str, Bytes]  # what is alive at the highest moment of each segment of the step


class Watch(Protocol):
    """What is told which part of the step runs."""

    def enter(self, segment: str, new_part: Kind = Kind.ACTIVATIONS) -> None:
        """Begin `segment`; what it makes counts as `new_part`."""


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of live storages by part, each storage once, and remembers each segment's highest moment."""

    def __init__(self, vocab_size: int, rounded_to: int = ALLOCATION_BYTES) -> None:
        """Tell logits by their last dimension, `vocab_size`; sizes are rounded up to `rounded_to` bytes."""
        super().__init__()
        self.vocab_size, self.rounded_to = vocab_size, rounded_to
        self.part_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.live: Counter[Kind] = Counter()
        self.segment, self.new_part = "load", Kind.ACTIVATIONS
        self.timeline: Timeline = {}

    def enter(self, segment: str, new_part: Kind = Kind.ACTIVATIONS) -> None:
        """Count the peak as that of `segment` from now on, and what is made as `new_part`."""
        self.segment, self.new_part = segment, new_part
        self._remember()

    def add(self, tensor: torch.Tensor, part: Kind) -> None:
        """Count a tensor's storage as `part`; one that was counted as another part moves."""
        storage = _storage_of(tensor)
        if storage in self.part_of:
            entry = self.part_of[storage]
            self.live[entry[0]] -= entry[1]
        else:
            entry = [part, self._rounded(storage.nbytes())]
            self.part_of[storage] = entry
            weakref.finalize(storage, self._free, entry)
        entry[0] = part
        self.live[part] += entry[1]

    def add_all(self, parts: Mapping[Kind, Iterable[torch.Tensor]]) -> None:
        """Count the tensors of each part."""
        for part, tensors in parts.items():
            for tensor in tensors:
                self.add(tensor, part)

    def __enter__(self) -> "MemoryTracker":
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:  # no operation: FSDP frees so what it gathered
            resize(storage, size)
            if storage in self.part_of:
                entry, size = self.part_of[storage], self._rounded(storage.nbytes())
                self.live[entry[0]] += size - entry[1]
                entry[1] = size
                self._remember()

        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._resizing.stop()

    def _rounded(self, size: int) -> int:
        return -(-size // self.rounded_to) * self.rounded_to

    def _free(self, entry: list) -> None:
        self.live[entry[0]] -= entry[1]

    def _remember(self) -> None:
        highest = self.timeline.get(self.segment)
        if highest is None or sum(self.live.values()) > sum(highest.values()):
            self.timeline[self.segment] = {part: self.live[part] for part in PARTS}

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and _storage_of(tensor) not in self.part_of:
                self.add(tensor, self._part_of_new(func, args, tensor))
        self._remember()
        return made

    def _part_of_new(self, func: Callable, args: tuple, tensor: torch.Tensor) -> Kind:
        if func is torch.ops.aten._to_copy.default and self._part(args[0]) == Kind.WEIGHTS:
            return Kind.WEIGHTS  # autocast's copy in the precision of the arithmetic
        if self.new_part == Kind.ACTIVATIONS and tensor.dim() and tensor.shape[-1] == self.vocab_size:
            return Kind.LOGITS
        return self.new_part

    def _part(self, tensor: torch.Tensor) -> Kind | None:
        entry = self.part_of.get(_storage_of(tensor))
        return entry[0] if entry else None


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return where a tensor's numbers are; a DTensor's own storage is none, and as large as the whole."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


@contextmanager
def like_cuda() -> Iterator[None]:
    """Have a CPU choose the operations that a GPU would.

    Dropout keeps a mask of bytes; attention's kernels a seed for theirs; autocast has layer norms, softmax and
    powers in fp32; softmax's backward kernel makes a temporary.
    """
    layer_norm, attention = functional.layer_norm, functional.scaled_dot_product_attention

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    of_functional = mock.patch.multiple(
        functional,
        dropout=dropout,
        scaled_dot_product_attention=lambda *args, **kwargs: attention(*args, **{**kwargs, "dropout_p": 0.0}),
        layer_norm=_in_fp32_under_autocast(layer_norm),
        softmax=_softmax,
    )
    with of_functional, mock.patch.object(torch, "pow", _in_fp32_under_autocast(torch.pow)):
        yield


def _softmax(input: torch.Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> torch.Tensor:
    if dtype is None and torch.is_autocast_enabled("cpu"):
        dtype = torch.float32  # autocast leaves one that is asked for (ATen/autocast_mode.h: `fp32_set_opt_dtype`)
    return _SoftmaxOfCuda.apply(input if dtype is None else input.to(dtype), dim)


class _SoftmaxOfCuda(torch.autograd.Function):
    """Softmax whose backward pass makes `grad * output`, too, as CUDA's (ATen/native/cuda/SoftMax.cu)."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dim: int) -> torch.Tensor:
        result, ctx.dim = torch.softmax(input, dim), dim
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (result,) = ctx.saved_tensors
        temporary = gradient * result  # there beside what follows
        of_input = torch._softmax_backward_data(gradient, result, ctx.dim, result.dtype)
        del temporary
        return of_input, None


def _in_fp32_under_autocast(function: Callable) -> Callable:
    def cast(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and torch.is_autocast_enabled("cpu") else value

    def in_fp32(*args: Any, **kwargs: Any) -> torch.Tensor:
        return function(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return in_fp32


def mark(layer: torch.nn.Module, tracker: Watch, place: str = "", after: str = "") -> None:
    """Have the tracker enter a segment where a layer begins, forward and backward, and where its output is there.

    Its `__call__` is wrapped, not its `forward`: gradient checkpointing happens inside it. `place` names what begins
    with it, `after` what follows.
    """

    class Marked(type(layer)):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if place:
                tracker.enter(f"forward: {place}")
            output = super().__call__(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            if place and hidden.requires_grad:
                hidden.register_hook(lambda gradient: tracker.enter(f"backward: {place}"))
            if after:
                tracker.enter(f"forward: {after}")
            return output

    layer.__class__ = Marked


def watch_gradients(model: torch.nn.Module, tracker: MemoryTracker) -> list[RemovableHandle]:
    """Have the tracker count each weight's gradient as such once it is there, until the handles are removed."""
    return [
        weight.register_post_accumulate_grad_hook(lambda weight: tracker.add(weight.grad, Kind.GRADIENTS))
        for weight in model.parameters()
        if weight.requires_grad
    ]
