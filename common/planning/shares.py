"""What part of a model a device holds, and how many of its weights are trained."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.base.specs import HasSpecs
from common.planning.architectures import Architecture, Stack, slice_of_rank
from common.planning.job import OPTIMIZER_BYTES, BatchShape, Job


@dataclass(frozen=True)
class Share:
    """The part of the model that one device holds."""

    layers: tuple[int, ...]  # of each stack
    has_embeddings: bool = True
    has_head: bool = True
    in_flight: int = 1  # micro-batches whose activations wait for their backward pass at once
    keeps_first_gradients: bool = False  # of ranks that keep a part of the gradients each: those that come first

    def stacks_of(self, architecture: Architecture) -> Iterator[tuple[Stack, int]]:
        """Yield each stack with how many of its layers the device holds."""
        return zip(architecture.stacks, self.layers, strict=True)


def whole_model(architecture: Architecture) -> Share:
    """Return the share of a device that holds every layer."""
    return Share(tuple(stack.layers for stack in architecture.stacks))


def stages_of(architecture: Architecture, job: HasSpecs) -> int:
    """Return how many ranks share a model that answers beside training; 1 = each has it whole.

    Those that share its weights in training do, or, where there are too few layers, as many of them as divide the
    ranks: each holds some of the layers then.
    """
    sharing, layers = job.parallelism, architecture.layers
    if sharing.in_one_process or len(architecture.stacks) > 1:
        return 1
    together = job.devices
    if not (sharing.pipelines or sharing.splits_matrices):
        together = job.shard_ranks if sharing.shards_weights else 1
    return max(count for count in range(1, together + 1) if together % count == 0 and count <= layers)


def widest_matrix(architecture: Architecture) -> int:
    """Return the weights of the largest matrix in a layer."""
    return max(linear.weights for stack in architecture.stacks for linear in stack.linears)


def part_of_rank(architecture: Architecture, job: Job) -> Architecture:
    """Return what each rank holds of every layer: all of it, or with tensor parallelism its slice, if it has one."""
    return slice_of_rank(architecture, job.devices) if job.parallelism.splits_matrices else architecture


def sees(architecture: Architecture, job: Job, share: Share) -> bool:
    """Return whether a device turns images into tokens in a step."""
    return architecture.tower is not None and job.batch.tiles > 0 and share.has_embeddings


def alone(job: Job, batch: BatchShape) -> Job:
    """Return the job with such a batch on one device, which holds the whole model."""
    return replace(job, batch=batch, parallel="single", devices=1, dp_replicate_size=1, micro_batches=1, offload=False)


# -- how many weights


def parameters_of(architecture: Architecture, share: Share) -> int:
    """Return how many weights of the model a device holds; a tied head apart from its embeddings has a copy of them."""
    count = sum(layers * stack.layer_parameters for stack, layers in share.stacks_of(architecture))
    if share.has_embeddings:
        count += architecture.embedding_parameters + architecture.other_embedding_parameters
        count += architecture.tower_parameters
    elif share.has_head and architecture.tied:
        count += architecture.embedding_parameters
    return count + share.has_head * (architecture.head_parameters + architecture.final_parameters)


def tower_parameters(architecture: Architecture, share: Share) -> int:
    """Return how many weights of a vision tower and its connector a device holds: they are where the embeddings are."""
    return architecture.tower_parameters * share.has_embeddings


def quantized_weights(architecture: Architecture) -> int:
    """Return how many weights of the whole model QLoRA keeps in 4 bits: the layers' matrices."""
    return sum(stack.layers * stack.matrix_weights for stack in architecture.stacks)


# -- how many of them are trained


def trains_head(architecture: Architecture, job: Job) -> bool:
    """Return whether what follows the layers is trained: a classifier's head is new, and so trained in any case."""
    return job.trains_all or architecture.classes > 0


def trained_of_layer(stack: Stack, job: Job) -> int:
    """Return how many weights of a layer get gradients, adapters included."""
    if job.trains_all:
        return stack.layer_parameters
    return sum(
        linear.parameters * job.trains(linear) + linear.lora_parameters(job.lora_rank) * job.adapts(linear)
        for linear in stack.linears
    )


def trained_parameters(architecture: Architecture, job: Job, share: Share | None = None) -> int:
    """Return how many weights get gradients, of the whole model or of one device's share; without a vision tower's."""
    share = share or whole_model(architecture)
    if job.trains_all:
        return parameters_of(architecture, share) - tower_parameters(architecture, share)
    head = architecture.head_parameters + architecture.final_parameters
    of_layers = sum(layers * trained_of_layer(stack, job) for stack, layers in share.stacks_of(architecture))
    return head * (share.has_head and trains_head(architecture, job)) + of_layers


def trained_weight_bytes(architecture: Architecture, job: Job, share: Share | None = None) -> float:
    """Return the bytes of all weights that get gradients, of the whole model or of one device's share."""
    share = share or whole_model(architecture)
    own = trained_parameters(architecture, job, share) * job.trained_bytes
    return own + tower_parameters(architecture, share) * job.trains_tower * job.weight_bytes


def small_adapter_weights(architecture: Architecture, job: Job, share: Share, limit: int) -> int:
    """Return how many of a device's adapter weights are in matrices of fewer than `limit` elements."""
    return sum(
        layers * size
        for stack, layers in share.stacks_of(architecture)
        for linear in stack.linears
        for size in (job.lora_rank * linear.inputs, job.lora_rank * linear.outputs)
        if job.adapts(linear) and size < limit
    )


def state_bytes(job: Job, weight_bytes: int) -> float:
    """Return the bytes of the optimizer's states per trained weight of so many bytes."""
    states = OPTIMIZER_BYTES[job.optimizer]
    return 2 * weight_bytes if states is None else states
