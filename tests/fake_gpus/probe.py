"""Ask the fake machine what it does, and print the answers as JSON: it is started in a process of its own."""

import json

import torch

from tests.fake_gpus.machine import KIND, compiled_guard, memory, start

MIB = 2**20


def error_of(work: object) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error).split("\n")[0]
    return ""


def answers() -> dict[str, object]:
    zero, one = torch.ones(2, 3, device=f"{KIND}:0"), torch.ones(3, 2, device=f"{KIND}:1")
    linear = torch.nn.Linear(3, 2).to(f"{KIND}:1")
    moved = torch.nn.Linear(3, 3).to(f"{KIND}:0")
    loss = linear(moved(zero).to(f"{KIND}:1")).square().sum()
    loss.backward()
    before = memory.now[2]
    held = torch.zeros(MIB, dtype=torch.uint8, device=f"{KIND}:2")
    view, at_most = held[: MIB // 2], torch.accelerator.max_memory_allocated(f"{KIND}:2")
    while_held = memory.now[2] - before
    del held
    with_view = memory.now[2] - before
    del view
    return {
        "devices": torch.accelerator.device_count(),
        "two devices": error_of(lambda: zero @ one),
        "device and CPU": error_of(lambda: zero @ torch.ones(3, 2)),
        "weight on the wrong device": error_of(lambda: linear(zero)),
        "gradients on": [str(layer.weight.grad.device) for layer in (moved, linear)],
        "moved back": (zero.cpu() @ one.cpu()).tolist(),
        "bytes": [while_held, with_view, memory.now[2] - before],
        "peak": at_most - before,
    }


if __name__ == "__main__":
    start(compiled_guard())
    print(json.dumps(answers()))
