"""What ranks send each other, each kind once with values that are checked and a few times by the clock.

    python -m torch.distributed.run --nproc_per_node 2 -m common.checks.collectives cpu FILE

`FILE` gets the milliseconds of each kind, as JSON.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
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
Exchange = tuple[Callable[[torch.Tensor], object], torch.Tensor, torch.Tensor]


def exchanges(device: str) -> dict[str, Exchange]:
    """Return of each kind what sends, the tensor that it receives into (as it is before), and what must come.

    Rank r sends numbers that are r + 1; parts of several ranks come in their order.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = torch.full((NUMBERS,), rank + 1.0, device=device)
    nothing, part = torch.zeros_like(own), NUMBERS // ranks
    total = ranks * (ranks + 1) / 2
    of_each = torch.arange(1.0, ranks + 1, device=device).repeat_interleave(part)
    before, after = (rank - 1) % ranks, (rank + 1) % ranks

    def send_and_receive(received: torch.Tensor) -> None:
        both = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return {
        "all_reduce": (dist.all_reduce, own, torch.full_like(own, total)),
        "all_reduce of bf16": (dist.all_reduce, own.bfloat16(), torch.full_like(own, total).bfloat16()),
        "all_gather": (partial(dist.all_gather_into_tensor, input_tensor=own[:part].clone()), nothing, of_each),
        "reduce_scatter": (
            partial(dist.reduce_scatter_tensor, input=own * of_each),
            nothing[:part],
            torch.full_like(own[:part], total * (rank + 1)),
        ),
        "broadcast": (partial(dist.broadcast, src=ranks - 1), own, torch.full_like(own, ranks)),
        "all_to_all": (partial(dist.all_to_all_single, input=own), nothing, of_each),
        "send and receive": (send_and_receive, nothing, torch.full_like(own, before + 1)),
    }


def milliseconds(send: Callable[[torch.Tensor], object], given: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the median of `TIMES` exchanges with their checks, after a first one, which makes the connections.

    Raises:
        AssertionError: What came is not what was sent.
    """
    taken_ms = []
    for _ in range(1 + TIMES):
        received, start_s = given.clone(), time.perf_counter()
        send(received)
        torch.testing.assert_close(received, expected, rtol=0, atol=0)  # waits for the device
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
            taken_ms[name] = milliseconds(*exchange)
        except AssertionError as wrong:
            raise RuntimeError(f"{name}: {str(wrong).splitlines()[0]}") from wrong
    if dist.get_rank() == 0:
        write_json(taken_ms, Path(path))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
