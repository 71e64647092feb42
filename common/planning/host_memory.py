"""What a machine's own memory holds for its GPUs: what is offloaded, what is being read, and what is being written."""

import math

from common.hardware.devices import GIB
from common.planning.architectures import Architecture
from common.planning.between_steps import layer_input_bytes
from common.planning.job import Job
from common.planning.shares import stages_of, trained_parameters
from common.planning.terms import Kind, Term

# a full state of at most so many bytes is saved at the end of training also without save_steps, and training waits for
# it; while a larger one is being written, from a copy on the host, training goes on
LITTLE_BYTES = GIB
# of each trained weight: fp32 copy, momentum, variance and gradient, as DeepSpeed's own estimator counts them
# (deepspeed.readthedocs.io, Memory Requirements)
ZERO_OFFLOADED_BYTES = 4 + 4 + 4 + 4
# the largest file that Transformers' `save_pretrained` writes: its weights are on the host meanwhile
PLAIN_FILE_BYTES = 50e9
# where ranks hold parts: the largest file (the Hub's own), and the size up to which a model is one file
LARGEST_FILE_BYTES, SMALL_FILE_BYTES = 5_000_000_000, 16_000_000
LEAST_FILES = 16  # of a larger model: rank 0 holds one file's weights beside its own part


def file_bytes(total_bytes: int) -> int:
    """Return how large a file of a model of `total_bytes` may be, where ranks hold parts; a weight may be larger."""
    return max(SMALL_FILE_BYTES, min(LARGEST_FILE_BYTES, total_bytes // LEAST_FILES))


def host_moments(architecture: Architecture, job: Job, machines: int) -> dict[str, list[Term]]:
    """Return, by phase, the summands of the fullest machine's own memory, beside what its programs take."""
    offload = offloaded(architecture, job, machines)
    weights = [term for term in offload if term.part == Kind.WEIGHTS]
    return {
        "loading": [*weights, _being_read(architecture, job, machines)],
        "training": [*offload, *_staged(architecture, job, machines), *_layer_inputs(architecture, job, machines)],
        "saving": [_being_written(architecture, job, machines)],
        "merging": _being_merged(architecture, job, machines),
    }


def _being_read(architecture: Architecture, job: Job, machines: int) -> Term:
    sharing, count = job.parallelism, max(architecture.widest_matrix, architecture.embedding_parameters)
    ranks = 1 if sharing.in_one_process else job.devices // machines
    reads_parts = (sharing.uses_fsdp or sharing.splits_matrices) and not (job.draws_weights or job.method.quantizes)
    parts = (job.shard_ranks if sharing.uses_fsdp else job.devices) if reads_parts else 1
    formula = f"{ranks} x {count:,} x {job.weight_bytes} bytes" + (f" / {parts} ranks" if parts > 1 else "")
    what = "largest weight, each rank's own part" if parts > 1 else "largest weight on each rank"
    return Term(Kind.WEIGHTS, what, formula, ranks * count * job.weight_bytes / parts)


def _being_written(architecture: Architecture, job: Job, machines: int) -> Term:
    weights, trained = _counts(architecture, job)
    count, each = (trained, job.trained_bytes) if job.method.has_adapters else (weights, job.weight_bytes)
    sharing = job.parallelism
    if sharing.pipelines:
        return _stages(count, each, job, machines, job.devices)
    if sharing.shards_weights or sharing.splits_matrices:
        size = min(file_bytes(count * each), count * each)
        return Term(Kind.WEIGHTS, "one file's weights", f"of {count:,} x {each} bytes", size)
    return _plain_file(count * each)


def _being_merged(architecture: Architecture, job: Job, machines: int) -> list[Term]:
    if not job.method.has_adapters:
        return []
    weights, each, stages = architecture.parameters, job.whole_model_bytes, stages_of(architecture, job)
    if stages > 1:
        return [_stages(weights, each, job, machines, stages, on_host=job.method.quantizes)]
    if not job.method.quantizes:
        return [_plain_file(weights * each)]
    # merged on the host where the GPU has no room; with one rank (2.3) into both bases
    models, of_both = (2, ", of the dequantized base and of the original") if job.parallelism.is_single else (1, "")
    formula = f"{models} x {weights:,} x {each} bytes"
    return [Term(Kind.WEIGHTS, f"merged weights{of_both}", formula, models * weights * each)]


def _plain_file(size: float) -> Term:
    return Term(Kind.WEIGHTS, "one file's weights", "at most 50 GB", min(size, PLAIN_FILE_BYTES))


def _stages(count: int, each: int, job: Job, machines: int, stages: int, on_host: bool = False) -> Term:
    """Return what the first machine holds of `count` numbers, of which each of the first ranks writes a stage.

    File by file; of 4 bits, which a GPU without room for 16 merges `on_host`, all of the stage.
    """
    here, stage_bytes = min(job.devices // machines, stages), count * each / stages
    if on_host:
        formula = f"{here} x {count:,} x {each} bytes / {stages}"
        return Term(Kind.WEIGHTS, "merged stages", formula, here * stage_bytes)
    size = min(file_bytes(int(stage_bytes)), stage_bytes)
    return Term(Kind.WEIGHTS, "a file's weights on each rank", f"{here} x {size / GIB:.1f} GiB", here * size)


def offloaded(architecture: Architecture, job: Job, machines: int) -> list[Term]:
    """Return what waits in the host's memory until a GPU needs it."""
    if not job.offload:
        return []
    weights, trained = _counts(architecture, job)
    of_weights = (Kind.WEIGHTS, "weights", weights, job.weight_bytes)
    terms = [
        (Kind.OPTIMIZER, "optimizer states", trained, job.state_bytes(job.trained_bytes)),
        of_weights,
        (Kind.GRADIENTS, "gradients", trained, job.trained_bytes),
    ]
    if job.parallelism.uses_deepspeed:
        terms = [(Kind.OPTIMIZER, "states, fp32 copies and gradients", trained, ZERO_OFFLOADED_BYTES)]
        terms += [of_weights] if job.parallelism.shards_weights else []
    return [_shards(*term, job, machines) for term in terms]


def _layer_inputs(architecture: Architecture, job: Job, machines: int) -> list[Term]:
    """Return what checkpointing keeps where it is offloaded; PyTorch pins blocks of powers of two."""
    if not job.offloads_layer_inputs:
        return []
    each = 2 ** math.ceil(math.log2(layer_input_bytes(architecture, job)))
    count = job.devices // machines * architecture.stacks[0].layers
    return [Term(Kind.ACTIVATIONS, "layer inputs", f"{count} x {each / GIB:.3g} GiB", count * each)]


def _staged(architecture: Architecture, job: Job, machines: int) -> list[Term]:
    """Return the copy of what is written while training goes on: what is trained; none where training waits."""
    _, trained = _counts(architecture, job)
    of_tower = architecture.tower_parameters * job.trains_tower
    each, tower_each = job.trained_bytes, job.weight_bytes
    state, tower_state = job.state_bytes(each), job.state_bytes(tower_each)
    whole = trained * (each + state) + of_tower * (tower_each + tower_state)
    if not job.parallelism.saves_in_background or whole <= LITTLE_BYTES:
        return []
    terms = (
        (Kind.WEIGHTS, "copy of the weights that are saved", trained, each),
        (Kind.WEIGHTS, "the same of the vision tower", of_tower, tower_each),
        (Kind.OPTIMIZER, "copy of their optimizer states", trained, state),
        (Kind.OPTIMIZER, "the same of the vision tower", of_tower, tower_state),
    )
    return [_shards(part, what, count, each, job, machines) for part, what, count, each in terms if count]


def _counts(architecture: Architecture, job: Job) -> tuple[int, int]:
    """Return how many weights the model has, adapters included, and how many are trained."""
    trained = trained_parameters(architecture, job)
    return architecture.parameters + trained * job.method.has_adapters, trained


def _shards(part: Kind, what: str, count: int, each: float, job: Job, machines: int) -> Term:
    """Return what the ranks of one machine hold of `count` numbers; one of them, of what is not divided among ranks."""
    if not (job.parallelism.shards or job.parallelism.splits_matrices):
        return Term(part, what, f"{count:,} x {each:g} bytes", count * each)
    ranks, here = job.shard_ranks if job.parallelism.shards else job.devices, job.devices // machines
    return Term(part, what, f"{count:,} x {each:g} bytes x {here} of {ranks} shards", count * each * here / ranks)
