"""How much faster two gloo ranks step than one, as a share of what this machine allows."""

import statistics
import tempfile
from pathlib import Path

from bench.apart import measured_apart
from bench.entries import Entry, measured
from bench.recipe import TECHNIQUES, TrialOfEpochs, load_material, load_model
from common.base.run_config import RunConfig
from common.measuring.ceiling import measure_machine_ceiling
from common.models.families import suited_to_model
from common.runtime.rank import rank_started
from common.training.ddp import data_parallel
from common.training.loop import TrainingLoop

COMMAND = "python -m bench scaling"
BARS = {16: 0.85, 64: 0.93}  # by rows of the global batch: least share of the upper bound
STEPS = {16: 8, 64: 3}  # by rows of the global batch: optimizer steps of a round, about a second
LAUNCHES, ROUNDS = 3, 7  # of one launch all rounds may be slower than of the next
FIGURES = {"speedup": "steps per second", "strong": "the upper bound", "reached": "share of the bound"}


def entries(quick: bool) -> list[Entry]:
    """Return the speed-up, the upper bound, and the first as a share of the second: medians of the launches."""
    found = []
    for technique in TECHNIQUES:
        for rows, bar in BARS.items():
            asked = {"technique": technique, "global_batch_rows": rows, "rounds": 1 if quick else ROUNDS}
            launches = [measured_apart(measure, ranks=2, **asked) for _ in range(1 if quick else LAUNCHES)]
            name = f"scaling, {technique}, DDP of 2 ranks against 1, global batch {rows}"
            for figure, words in FIGURES.items():
                value = statistics.median(launch[figure] for launch in launches)
                judged = {"at_least": bar} if figure == "reached" else {}
                found.append(measured(f"{name}: {words}", value, "ratio", COMMAND, **judged))
    return found


def measure(technique: str, global_batch_rows: int, rounds: int) -> dict[str, float]:
    """Return the figures of two ranks with rows packed without padding, as in the run folders; called by both."""
    asked = RunConfig(
        technique=technique, parallel="ddp", devices=2, per_device_train_batch_size=global_batch_rows // 2
    )
    with rank_started(suited_to_model(asked)) as rank, tempfile.TemporaryDirectory() as results:
        log = TrialOfEpochs(suited_to_model(asked), rank, Path(results))
        material, replica = load_material(log.run), data_parallel(load_model(log.run), rank)
        loop = TrainingLoop(replica, material.tokenizer, material.splits, log)
        figures = measure_machine_ceiling(loop, replica=replica, steps=STEPS[global_batch_rows], rounds=rounds)
    return figures | {"speedup": figures["one_rank_global_batch_step_s"] / figures["synchronised_share_step_s"]}
