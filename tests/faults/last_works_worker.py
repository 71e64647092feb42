"""A rank that ends while gloo's threads are still at its last works, whose tensors Python has. Run by torchrun."""

import sys
import time

import torch
import torch.distributed as dist

from common.base.run_config import RunConfig
from common.runtime.rank import end_rank, start_rank

WORKS, APART_S = 12, 0.004
"""Each drops its tensor as it is done: one of them when Python has begun to end."""


def main() -> None:
    rank = start_rank(RunConfig(parallel="ddp", devices=2))
    sys.modules["kept"] = dist.group.WORLD  # as libraries do: then the group's threads live on
    for _ in range(WORKS):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if not rank.is_main:
            work.wait()
            time.sleep(APART_S)
    end_rank()


if __name__ == "__main__":
    main()
