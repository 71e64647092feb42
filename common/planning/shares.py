"""What part of a model a device holds, and how many of its weights are trained."""

from collections.abc import Iterator
from dataclasses import dataclass

from common.base.specs import HasSpecs
from common.planning.architectures import Architecture, Stack, slice_of_rank
from common.planning.job import Job


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

    def parameters(self, architecture: Architecture) -> int:
        """Return how many of its weights the device holds; a tied head apart from its embeddings has a copy of them."""
        count = sum(layers * stack.layer_parameters for stack, layers in self.stacks_of(architecture))
        if self.has_embeddings:
            count += architecture.embedding_parameters + architecture.other_embedding_parameters
            count += architecture.tower_parameters
        elif self.has_head and architecture.tied:
            count += architecture.embedding_parameters
        return count + self.has_head * (architecture.head_parameters + architecture.final_parameters)


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


def part_of_rank(architecture: Architecture, job: Job) -> Architecture:
    """Return what each rank holds of every layer: all of it, or with tensor parallelism its slice, if it has one."""
    return slice_of_rank(architecture, job.devices) if job.parallelism.splits_matrices else architecture


def sees(architecture: Architecture, job: Job, share: Share) -> bool:
    """Return whether a device turns images into tokens in a step."""
    return architecture.tower is not None and job.batch.tiles > 0 and share.has_embeddings


# -- how many weights are trained


def trains_head(architecture: Architecture, job: Job) -> bool:
    """Return whether what follows the layers is trained: a classifier's head is new, and so trained in any case."""
    return job.trains_all or architecture.classes > 0


def trained_parameters(architecture: Architecture, job: Job, share: Share | None = None) -> int:
    """Return how many weights get gradients, of the whole model or of one device's share; without a vision tower's."""
    share = share or whole_model(architecture)
    if job.trains_all:
        return share.parameters(architecture) - architecture.tower_parameters * share.has_embeddings
    head = architecture.head_parameters + architecture.final_parameters
    of_layers = sum(layers * job.trained_of_layer(stack) for stack, layers in share.stacks_of(architecture))
    return head * (share.has_head and trains_head(architecture, job)) + of_layers


def trained_weight_bytes(architecture: Architecture, job: Job, share: Share | None = None) -> float:
    """Return the bytes of all weights that get gradients, of the whole model or of one device's share."""
    share = share or whole_model(architecture)
    own = trained_parameters(architecture, job, share) * job.trained_bytes
    return own + architecture.tower_parameters * share.has_embeddings * job.trains_tower * job.weight_bytes


def small_adapter_weights(architecture: Architecture, job: Job, share: Share, limit: int) -> int:
    """Return how many of a device's adapter weights are in matrices of fewer than `limit` elements."""
    return sum(
        layers * size
        for stack, layers in share.stacks_of(architecture)
        for linear in stack.linears
        for size in (job.lora_rank * linear.inputs, job.lora_rank * linear.outputs)
        if job.adapts(linear) and size < limit
    )
