"""Which device holds which layers: searched, even, or as a device map says.

A *share* is what one device holds, in numbers. A *device map* says the same in names, as Transformers takes it:
`{"model.embed_tokens": 0, "model.layers.0": 0, ..., "lm_head": 1}`; the longest entry that begins a weight's name
decides, and the empty one stands for all.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Literal

from common.base.errors import BadInputError, closest
from common.base.paths import find_here
from common.hardware.devices import Gpu
from common.planning.architectures import Architecture, Family
from common.planning.gpu_overhead import memory_with_overhead
from common.planning.job import Job
from common.planning.searches import largest
from common.planning.shares import Share

Device = str | int  # as Transformers takes it: 1, `cuda:1`, or `cpu`
Ends = Literal["apart", "first", "last"]  # embeddings and head: on the first and the last device, or both on one
# modules that a device map may name though they have no weights
WEIGHTLESS_MODULES = {"rotary_emb", "dropout", "activation", "act_fn", "intermediate_act_fn", "transform_act_fn"}
LAYER_PATTERN = re.compile(r"((?:.*?\.)?(?:layers?|h)\.\d+)\.")  # begins a weight's name, and says its layer
NEARLY_THE_BEST = 0.002  # the search ends where no placement's fullest device is less full by this share


def whole_model_on(device: str) -> dict[str, str]:
    """Return the device map of one device, and of each rank with DDP: the empty prefix stands for every layer."""
    return {"": device}


# -- how many layers each device gets


def balanced_shares(architecture: Architecture, job: Job, gpus: Sequence[Gpu]) -> tuple[Share, ...]:
    """Give each device of a job with mp or pp contiguous layers, so that the fullest device is least full."""
    return _least_full(architecture, job, gpus, _Fullness.searched)


def even_shares(architecture: Architecture, job: Job, gpus: Sequence[Gpu]) -> tuple[Share, ...]:
    """Give each device of a job with mp or pp equally many layers; the first ones one more where they do not divide."""
    return _least_full(architecture, job, gpus, _Fullness.even)


@lru_cache(maxsize=100)
def answering_shares(architecture: Architecture, stages: int) -> tuple[Share, ...]:
    """Give each of the ranks that together answer questions contiguous layers, of about equal weights.

    Embeddings are on the first, the head is on the last; there are no more stages than layers.
    """
    ends = [0] * stages
    ends[0] += Share((0,), has_head=False).parameters(architecture)
    ends[-1] += Share((0,), has_embeddings=False).parameters(architecture)
    counts = [1] * stages
    for _ in range(architecture.layers - stages):
        held = [end + count * architecture.stacks[0].layer_parameters for end, count in zip(ends, counts, strict=True)]
        counts[held.index(min(held))] += 1
    return tuple(Share((count,), number == 0, number == stages - 1) for number, count in enumerate(counts))


def shares_that_fit(architecture: Architecture, job: Job, gpus: Sequence[Gpu]) -> tuple[Share, ...] | None:
    """Give each device of a job with mp or pp contiguous layers that fit; None where none fit."""
    found = (fullness.filled(level=1.0) for fullness in _fullness_by_ends(architecture, job, gpus))
    return next(filter(None, found), None)


def _least_full(
    architecture: Architecture, job: Job, gpus: Sequence[Gpu], place: Callable[["_Fullness"], tuple[Share, ...]]
) -> tuple[Share, ...]:
    placed = {place(fullness): fullness for fullness in _fullness_by_ends(architecture, job, gpus)}
    return min(placed, key=lambda shares: placed[shares].highest(shares))


def _fullness_by_ends(architecture: Architecture, job: Job, gpus: Sequence[Gpu]) -> list["_Fullness"]:
    """Return one for each place that embeddings and head can have; refuse more stages than layers.

    In one process tied ones are one tensor, which cannot be on two devices; with pp the last stage has a copy.
    """
    if len(gpus) > architecture.layers:
        raise BadInputError(
            f"{architecture.name} has {architecture.layers} layers, too few for {len(gpus)} stages: take at most "
            f"{architecture.layers} devices (--gpus of the planner, --devices or --stages of a run)."
        )
    ends: tuple[Ends, ...] = ("first", "last") if architecture.tied and job.parallelism.layers_in_turn else ("apart",)
    return [_Fullness(architecture, job, gpus, end) for end in ends]


@dataclass(frozen=True)
class _Fullness:
    """How full each stage would be with some layers."""

    architecture: Architecture
    job: Job
    gpus: Sequence[Gpu]
    ends: Ends

    def share(self, stage: int, start: int, end: int) -> Share:
        """Return the layers from `start` up to `end`, without it, counted over all stacks."""
        stacks, last_stage = self.architecture.stacks, len(self.gpus) - 1
        ends = accumulate(stack.layers for stack in stacks)
        layers = (
            max(0, min(end, last) - max(start, last - stack.layers)) for stack, last in zip(stacks, ends, strict=True)
        )
        has_embeddings = stage == (last_stage if self.ends == "last" else 0)
        has_head = stage == (0 if self.ends == "first" else last_stage)
        return Share(tuple(layers), has_embeddings, has_head, self.job.in_flight(stage))

    def of(self, share: Share, gpu: Gpu) -> float:
        return memory_with_overhead(self.architecture, self.job, share, gpu).safe_gib / gpu.memory_gib

    def highest(self, shares: Sequence[Share]) -> float:
        return max(self.of(share, gpu) for share, gpu in zip(shares, self.gpus, strict=True))

    def even(self) -> tuple[Share, ...]:
        layers, stages = self.architecture.layers, len(self.gpus)
        starts = [stage * (layers // stages) + min(stage, layers % stages) for stage in range(stages + 1)]
        return tuple(self.share(stage, *starts[stage : stage + 2]) for stage in range(stages))

    def searched(self) -> tuple[Share, ...]:
        """Return the placement that no other is clearly less full than.

        Each round first asks for one just below the best found (even shares are seldom far from it), and then halves.
        """
        best, low = self.even(), 0.0
        while better := self.filled((1 - NEARLY_THE_BEST) * self.highest(best)):
            best, middle = better, (low + self.highest(better)) / 2
            half = self.filled(middle)
            best, low = (half, low) if half else (best, middle)
        return best

    def filled(self, level: float) -> tuple[Share, ...] | None:
        """Give each device as many layers as fill it up to `level`; None where layers are left over."""
        layers, stages = self.architecture.layers, len(self.gpus)
        shares, start, guess = [], 0, layers // stages
        for stage, gpu in enumerate(self.gpus):
            later = stages - stage - 1  # each of them gets a layer at least; the last device takes what is left

            def takes(count: int, stage: int = stage, start: int = start, gpu: Gpu = gpu) -> bool:
                return self.of(self.share(stage, start, start + count), gpu) <= level

            left = layers - start
            guess = largest(takes, left - later, guess) if later else left if takes(left) else 0
            if not guess:
                return None
            shares.append(self.share(stage, start, start + guess))
            start += guess
        return tuple(shares)


# -- between shares and device maps


def device_map_of(architecture: Architecture, shares: Sequence[Share], devices: Sequence[Device]) -> dict[str, Device]:
    """Return the device map that says `shares`, one for each of `devices`; refuse models with two stacks or a tower."""
    family = _family_of(architecture)
    numbers = iter(range(architecture.layers))
    device_map: dict[str, Device] = {}
    for share, device in zip(shares, devices, strict=True):
        if share.has_embeddings:
            device_map |= dict.fromkeys(filter(None, (family.embeddings, family.positions)), device)
        for _ in range(share.layers[0]):
            device_map[f"{family.layers}.{next(numbers)}"] = device
        if share.has_head:
            norm = ("model.norm",) if family.is_llama_like else ()
            device_map |= dict.fromkeys(norm + (family.classifier if architecture.classes else family.heads), device)
    if family.is_llama_like:
        device_map["model.rotary_emb"] = devices[0]
    return device_map


def shares_of_map(architecture: Architecture, device_map: Mapping[str, Device], device_count: int) -> tuple[Share, ...]:
    """Return what `device_map` gives to each device; refuse unknown devices, and parts of the model without one."""
    family = _family_of(architecture)
    indices = _indices(device_map, device_count)

    def holder(module: str) -> int:
        # an entry may also stand for a part of the module
        parts = [name for name in indices if name.startswith(f"{module}.")]
        found = _device_of(parts[0] if parts else module, indices)
        if found is None:
            raise BadInputError(f"The device map has no device for {module}: add it.")
        return found

    layers = [holder(f"{family.layers}.{number}") for number in range(architecture.layers)]
    named = {entry.split(".")[0] for entry in indices}
    head = next((module for module in (*family.heads, *family.classifier) if module in named), None)
    with_head = (
        layers[-1] if head is None and not (family.is_llama_like or family.is_gpt2_like) else holder(head or "lm_head")
    )
    with_embeddings = holder(family.embeddings)
    return tuple(
        Share((layers.count(device),), device == with_embeddings, device == with_head) for device in range(device_count)
    )


def _family_of(architecture: Architecture) -> Family:
    if architecture.tower:
        raise BadInputError(f"{architecture.name} has a vision tower: such models are not divided among devices.")
    if len(architecture.stacks) > 1:
        raise BadInputError(
            f"{architecture.name} has an encoder and a decoder: only models with one of them are divided among devices."
        )
    return architecture.family


# -- device maps that users bring


def read_device_map(path: str | Path) -> dict[str, Device]:
    """Read a device map from a JSON file, one object of module names and devices; refuse anything else."""
    file = find_here(path, os.path.isfile)
    example = '{"model.layers.0": 0, "model.layers.1": 1}'
    if file is None:
        raise BadInputError(f"There is no device map {path}: pass balanced, even, or a JSON file such as {example}.")
    try:
        pairs = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=tuple)  # with repeated keys
    except (OSError, ValueError) as error:
        raise BadInputError(f"The device map {path} is not JSON ({error}): write it such as {example}.") from None
    if not isinstance(pairs, tuple) or not pairs:
        raise BadInputError(f"The device map {path} is no object with modules in it: write it such as {example}.")
    device_map = dict(pairs)
    names = Counter(name for name, _ in pairs)
    if len(names) < len(pairs):
        raise BadInputError(f"The device map {path} names {names.most_common(1)[0][0]} more than once: leave one.")
    for module, device in device_map.items():
        if isinstance(device, bool) or not isinstance(device, Device):
            raise BadInputError(
                f"The device map {path} has {device!r} for {module}: write a device's number, or its name."
            )
    return device_map


def check_device_map(
    device_map: Mapping[str, Device], weight_names: Sequence[str], tied: Sequence[tuple[str, str]], device_count: int
) -> None:
    """Refuse a device map that does not fit the model with these weights, or the devices.

    A weight has no device; an entry is of no weight; a device is unknown, or gets no layer; a layer, or `tied` weights
    (pairs of names of one and the same), are torn apart.
    """
    indices = _indices(device_map, device_count)
    names = list(dict.fromkeys([*weight_names, *(name for pair in tied for name in pair)]))
    _check_entries(device_map, names)
    device_of = {name: _device_of(name, indices) for name in names}
    missing = next((name for name, device in device_of.items() if device is None), None)
    if missing is not None:
        raise BadInputError(f'The device map has no device for {missing}: add "{_module(missing)}" with one.')
    _check_layers(device_of, device_count)
    for one, other in tied:
        if device_of[one] != device_of[other]:
            raise BadInputError(
                f"The device map has {_module(one)} on device {device_of[one]} and {_module(other)} on "
                f"{device_of[other]}, but they are one tied weight: give both the same device."
            )


def _check_entries(device_map: Mapping[str, Device], names: Sequence[str]) -> None:
    modules = {prefix for name in names for prefix in _prefixes(name)}
    for entry in device_map:
        if entry not in modules and WEIGHTLESS_MODULES.isdisjoint(entry.split(".")):
            near = closest(entry, sorted(modules))
            remedy = f"did you mean {near}?" if near else "leave it out."
            raise BadInputError(f"The device map has {entry!r}, of which the model has no weight: {remedy}")


def _check_layers(device_of: Mapping[str, int | None], device_count: int) -> None:
    layers: dict[str, tuple[str, int | None]] = {}
    for name, device in device_of.items():
        found = LAYER_PATTERN.match(name)
        if found is None:
            continue
        first, its_device = layers.setdefault(found[1], (name, device))
        if device != its_device:
            raise BadInputError(
                f"The device map tears {found[1]} apart, with {_module(first)} on device {its_device} and "
                f"{_module(name)} on {device}: give the whole layer one device."
            )
    filled = {device for _, device in layers.values()}
    empty = next((device for device in range(device_count) if device not in filled), None)
    if empty is not None:
        raise BadInputError(
            f"The device map gives device {empty} of {device_count} no layer, and has {len(layers)} of them on "
            f"{len(filled)}: move some there, or take fewer devices."
        )


def _indices(device_map: Mapping[str, Device], device_count: int) -> dict[str, int]:
    """Return each entry's device by its number, from 0; a map that names nothing but the CPU has one device."""
    if set(device_map.values()) == {"cpu"}:
        return dict.fromkeys(device_map, 0)
    indices = {}
    for module, device in device_map.items():
        found = re.fullmatch(r"(?:cuda:)?(\d+)", str(device))
        if found is None or int(found[1]) >= device_count:
            raise BadInputError(
                f"The device map has {module or 'the whole model'} on {device!r}, but the devices of this run are "
                f"{', '.join(map(str, range(device_count)))}: name one of these."
            )
        indices[module] = int(found[1])
    return indices


def _device_of(name: str, indices: Mapping[str, int]) -> int | None:
    """Return the device of the longest entry that begins `name`."""
    return next((indices[prefix] for prefix in _prefixes(name) if prefix in indices), None)


def _prefixes(name: str) -> Iterable[str]:
    """Return `a.b.c`, `a.b`, `a`, and the empty one."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(len(parts), -1, -1))


def _module(weight_name: str) -> str:
    return weight_name.rpartition(".")[0] or weight_name
