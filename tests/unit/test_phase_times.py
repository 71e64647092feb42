"""Seconds of loading and of an evaluation: what they grow with, and what a run is told before it starts."""

from dataclasses import replace

import pytest

from common.hardware.devices import cpu_device, find_gpu
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape, EvaluationShape, Job
from common.planning.phase_times import DISK_GB_PER_S, PhaseTimes, phase_times

LLAMA = read_architecture("llama-3.1-70b")
SHAPE = EvaluationShape(rows=2, length=512, labelled=48, prompt_length=16, new_tokens=48, test_rows=64)
JOB = Job("lora", "fsdp", BatchShape(1, 512, 511), devices=8, evaluation=SHAPE)
H100 = find_gpu("h100")


def times_of(job: Job) -> PhaseTimes:
    return phase_times(LLAMA, job, H100)


def test_loading_reads_each_weight_once_and_a_new_token_all_weights() -> None:
    times = times_of(JOB)
    assert times.loading_s == pytest.approx(70.55e9 * 2 / (DISK_GB_PER_S * 1e9), rel=0.01)
    tokens = 64 // (2 * 8) * 48  # one group of eight ranks, 16 rows at once
    a_read_s = 70.55e9 * 2 / (3350e9 * 0.8)
    assert tokens * a_read_s < times.answering_s < 4 * tokens * a_read_s


@pytest.mark.parametrize(
    ("changes", "times_as_long"),
    [
        ({"test_rows": 128}, 2),
        ({"rows": 64}, 1 / 4),  # all at once
        ({"new_tokens": 0, "prompt_length": 1}, 0),
    ],
)
def test_an_evaluation_takes_as_long_as_its_batches(changes: dict[str, int], times_as_long: float) -> None:
    other = times_of(replace(JOB, evaluation=replace(SHAPE, **changes)))
    assert other.answering_s / times_of(JOB).answering_s == pytest.approx(times_as_long, abs=0.15)


def test_groups_of_ranks_share_the_questions() -> None:
    halves = times_of(replace(JOB, dp_replicate_size=2))
    assert halves.answering_s == pytest.approx(times_of(JOB).answering_s, rel=0.05)  # half of them, half at once


def test_what_it_takes_is_said_with_how_to_do_without() -> None:
    said = PhaseTimes(71.2, 100, 600.0).said
    assert "loading takes about 71 s" in said
    assert "100 questions about 10 min; --baseline none leaves it out" in said
    assert phase_times(LLAMA, JOB, cpu_device()) is None
