"""What a pipeline of two gloo ranks brings over naive model parallel; `bench.pipeline` starts it.

    torchrun --nproc_per_node 2 -m bench.pipeline_trial llama-27m 64 2 4

The arguments are the shape, rows of a step, steps of a round, and rounds. Rank 0 prints the result as its last line, as
JSON, and each round on standard error.
"""

import faulthandler
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from accelerate.utils import wait_for_everyone

from bench.recipe import TrialOfEpochs, load_material
from common.base.run_config import RunConfig
from common.data.batches import longest_batch
from common.models.placement import place_stages
from common.runtime.rank import end_rank, start_rank
from common.training.loop import TrainingLoop
from common.training.pipeline import Pipeline, trained_stage
from common.training.pipeline_measure import measure_pipeline

RANKS, MICRO_BATCHES = 2, 8
STUCK_AFTER_S = 900
"""A rank that waits for another for so long says where, and ends."""


def measure(model: str, rows: int, steps: int, rounds: int) -> dict[str, object]:
    """The figures of `measure_pipeline`: full fine-tuning of the linear layers of `model`, its weights random."""
    run = RunConfig(
        technique="full",
        parallel="pp",
        devices=RANKS,
        micro_batches=MICRO_BATCHES,
        per_device_train_batch_size=rows,
        model=model,
        weights="random",
        report_to="none",
    )
    rank = start_rank(run)
    with tempfile.TemporaryDirectory() as folder:
        loop = _loop(TrialOfEpochs(run, rank, Path(folder)))
        with redirect_stdout(sys.stderr):
            figures = measure_pipeline(loop, steps, rounds)
    if rank.is_main:
        print(json.dumps(figures), flush=True)
    wait_for_everyone()
    end_rank()
    return figures


def _loop(log: TrialOfEpochs) -> TrainingLoop:
    """The loop of 2.7, whose steps are timed, and not taken."""
    run, material = log.run, load_material(log.run)
    placement = place_stages(run, longest_batch(material.train, run.per_device_train_batch_size, run))
    stage = trained_stage(run, placement.stage_map, log.rank)
    pipeline = Pipeline(stage, run, log.rank)
    return TrainingLoop(pipeline, material.tokenizer, material.splits, log)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
    measure(sys.argv[1], *map(int, sys.argv[2:]))
