"""Which device holds which layers. Pure: imports no torch, touches no device."""


def device_name(kind: str, local_rank: int) -> str:
    """The device that a rank works on, as torch spells it: `cpu`, or `cuda:1` for local rank 1."""
    return "cpu" if kind == "cpu" else f"{kind}:{local_rank}"


def whole_model_on(device: str) -> dict[str, str]:
    """The device map of one device, and of each rank with DDP: the empty prefix stands for every layer."""
    return {"": device}
