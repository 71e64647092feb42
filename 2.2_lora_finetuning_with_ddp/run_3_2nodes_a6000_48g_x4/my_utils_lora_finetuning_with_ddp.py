"""What only DDP needs: each rank's device map."""

from common.planning.device_maps import whole_model_on
from common.runtime.world import Rank


def device_map(rank: Rank) -> dict[str, str]:
    """Place every layer on the rank's own device: rank 1 of two GPUs gets `{"": "cuda:1"}`."""
    return whole_model_on(rank.device)
