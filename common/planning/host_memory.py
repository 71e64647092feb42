"""What a machine's own memory holds for its GPUs: what is offloaded, and copies of checkpoints being written."""

from common.hardware.devices import GIB
from common.planning.architectures import Architecture
from common.planning.job import OPTIMIZER_BYTES, Job
from common.planning.shares import parameters_of, trained_of_tower, trained_parameters, whole_model
from common.planning.terms import Term, where

LITTLE_BYTES = GIB
"""A full state of at most so many bytes is saved at the end of training also without save_steps, and training waits for
it; while a larger one is being written, from a copy on the host, training goes on."""
ZERO_OFFLOADED_BYTES = 4 + 4 + 4 + 4
"""Of each trained weight: fp32 copy, momentum, variance and gradient, as DeepSpeed's own estimator counts them
(deepspeed.readthedocs.io, Memory Requirements)."""


def host_terms(architecture: Architecture, job: Job, machines: int) -> list[Term]:
    """Return the summands of each machine's own memory, beside what its programs take."""
    return [*offloaded(architecture, job, machines), *staged(architecture, job, machines)]


def offloaded(architecture: Architecture, job: Job, machines: int) -> list[Term]:
    """Return what waits in the host's memory until a GPU needs it."""
    if not job.offload:
        return []
    weights, trained = _counts(architecture, job)
    if job.parallelism.uses_deepspeed:
        terms = [("optimizer", "states, fp32 copies and gradients", trained, ZERO_OFFLOADED_BYTES)]
        if job.parallelism.shards_weights:
            terms.append(("weights", "weights", weights, job.weight_bytes))
    else:
        terms = [
            ("optimizer", "optimizer states", trained, _state_bytes(job)),
            ("weights", "weights", weights, job.weight_bytes),
            ("gradients", "gradients", trained, job.trained_bytes),
        ]
    return [_shards(*term, job, machines) for term in terms]


def staged(architecture: Architecture, job: Job, machines: int) -> list[Term]:
    """Return the copies of what is written while training goes on; none where training waits.

    Of the weights there may be two: of what is being written, and of the best that wait for that.
    """
    weights, trained = _counts(architecture, job)
    saved, each = (trained, job.trained_bytes) if job.method.has_adapters else (weights, job.weight_bytes)
    of_tower = trained_of_tower(architecture, job, whole_model(architecture))
    beside = of_tower * job.method.has_adapters  # with full they are among the weights
    tower_state = _state_bytes(job, job.weight_bytes)
    whole = saved * each + trained * _state_bytes(job) + beside * job.weight_bytes + of_tower * tower_state
    if not job.parallelism.saves_in_background or whole <= LITTLE_BYTES:
        return []
    what = "of the vision tower"
    return where(
        (True, _shards("weights", "two copies of the weights that are saved", saved, 2 * each, job, machines)),
        (beside, _shards("weights", f"the same {what}", beside, 2 * job.weight_bytes, job, machines)),
        (True, _shards("optimizer", "copy of their optimizer states", trained, _state_bytes(job), job, machines)),
        (of_tower, _shards("optimizer", f"the same {what}", of_tower, tower_state, job, machines)),
    )


def _counts(architecture: Architecture, job: Job) -> tuple[int, int]:
    """Return how many weights the model has, adapters included, and how many are trained."""
    whole = whole_model(architecture)
    trained = trained_parameters(architecture, job, whole)
    return parameters_of(architecture, whole) + (trained if job.method.has_adapters else 0), trained


def _state_bytes(job: Job, weight_bytes: int = 0) -> float:
    """Return the bytes of the optimizer's states per trained weight, by default of those that the technique trains."""
    states = OPTIMIZER_BYTES[job.optimizer]
    return 2 * (weight_bytes or job.trained_bytes) if states is None else states


def _shards(part: str, what: str, count: int, each: float, job: Job, machines: int) -> Term:
    """Return what the ranks of one machine hold of `count` numbers; one of them, of what is not divided among ranks."""
    if not (job.parallelism.shards or job.parallelism.splits_matrices):
        return Term(part, what, f"{count:,} x {each:g} bytes", count * each)
    ranks, here = job.shard_ranks if job.parallelism.shards else job.devices, job.devices // machines
    return Term(part, what, f"{count:,} x {each:g} bytes x {here} of {ranks} shards", count * each * here / ranks)
