"""Device maps: which device holds which layers, and the name that torch has for a rank's device."""

from common.hardware.devices import device_name
from common.planning.device_maps import (
    balanced_shares,
    check_device_map,
    device_map_of,
    even_shares,
    read_device_map,
    shares_of_map,
    shares_that_fit,
    whole_model_on,
)

__all__ = [
    "balanced_shares", "check_device_map", "device_map_of", "device_name", "even_shares", "read_device_map",
    "shares_of_map", "shares_that_fit", "whole_model_on",
]  # fmt: skip
