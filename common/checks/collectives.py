"""What ranks send each other, each kind once with values that are checked and a few times by the clock.

    python -m torch.distributed.run --nproc_per_node 2 -m common.checks.collectives cpu FILE

`FILE` gets the milliseconds of each kind, as JSON.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from common.records.store import write_json
from common.runtime.rank import end_with_launcher
from common.runtime.world import BACKENDS

NUMBERS = 2**18  # fp32 of a rank: 1 MiB
TIMES = 5
TIMEOUT = timedelta(seconds=60)  # of an exchange: a rank that is not there is told by it


def exchanges(device: str) -> dict[str, Callable[[], None]]:
    """Return each kind of exchange; rank r sends numbers that are r + 1, and checks what it receives.

    Each raises AssertionError where what came is not what was sent.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = torch.full((NUMBERS,), rank + 1.0, device=device)
    sum_of_all = ranks * (ranks + 1) / 2
    parts = torch.arange(1.0, ranks + 1, device=device).repeat_interleave(NUMBERS // ranks)  # one of each rank

    def all_reduce(dtype: torch.dtype) -> None:
        received = own.to(dtype, copy=True)
        dist.all_reduce(received)
        _check(received, sum_of_all)

    def all_gather() -> None:
        received = torch.empty(NUMBERS, device=device)
        dist.all_gather_into_tensor(received, own[: NUMBERS // ranks].contiguous())
        _check(received, parts)

    def reduce_scatter() -> None:
        received = torch.empty(NUMBERS // ranks, device=device)
        dist.reduce_scatter_tensor(received, own * parts)
        _check(received, sum_of_all * (rank + 1))

    def broadcast() -> None:
        received = own.clone()
        dist.broadcast(received, src=ranks - 1)
        _check(received, ranks)

    def all_to_all() -> None:
        received = torch.empty(NUMBERS, device=device)
        dist.all_to_all_single(received, own)
        _check(received, parts)

    def send_and_receive() -> None:
        received = torch.empty(NUMBERS, device=device)
        towards, source = (rank + 1) % ranks, (rank - 1) % ranks
        both = [dist.P2POp(dist.isend, own, towards), dist.P2POp(dist.irecv, received, source)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        _check(received, source + 1)

    return {
        "all_reduce": lambda: all_reduce(torch.float32),
        "all_reduce of bf16": lambda: all_reduce(torch.bfloat16),
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "broadcast": broadcast,
        "all_to_all": all_to_all,
        "send and receive": send_and_receive,
    }


def _check(received: torch.Tensor, expected: torch.Tensor | float) -> None:
    wrong = int((received != expected).sum())  # waits for the device
    if wrong:
        raise AssertionError(f"of {received.numel():,} numbers {wrong:,} are not those that were sent")


def milliseconds(exchange: Callable[[], None]) -> float:
    """Return the median of `TIMES` exchanges with their checks, after a first one, which makes the connections."""
    taken_ms = []
    for _ in range(1 + TIMES):
        start_s = time.perf_counter()
        exchange()
        taken_ms.append(1000 * (time.perf_counter() - start_s))
    return median(taken_ms[1:])


def main(device: str, path: str) -> None:
    """Exchange all, on this rank; the first one writes the file.

    Raises:
        RuntimeError: Another value came than was sent; with the kind.
    """
    end_with_launcher()
    dist.init_process_group(BACKENDS[device], timeout=TIMEOUT)
    taken_ms = {}
    for name, exchange in exchanges(device).items():
        try:
            taken_ms[name] = milliseconds(exchange)
        except AssertionError as wrong:
            raise RuntimeError(f"{name}: {wrong}") from wrong
    if dist.get_rank() == 0:
        write_json(taken_ms, Path(path))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
