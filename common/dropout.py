"""Dropout that spends half the time on CPU: PyTorch draws a random number per element there, this one draws four."""

import torch

LANES = 2**16


class LaneDropout(torch.nn.Dropout):
    """Dropout whose mask comes from the four 16-bit lanes of each random 64-bit number; p is rounded to 1/65536."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Drop with probability p and scale the rest by 1 / (1 - p), in training; the same tensor otherwise."""
        if not self.training or input.device.type != "cpu":
            return super().forward(input)
        numbers = torch.randint(-(2**63), 2**63 - 1, (-(-input.numel() // 4),))
        lanes = numbers.view(torch.int16)[: input.numel()].view(input.shape)
        keep = lanes >= round(self.p * LANES) - LANES // 2
        return input * keep.to(input.dtype).mul_(1 / (1 - self.p))


def use_lane_dropout(model: torch.nn.Module) -> None:
    """Put it in the place of every `torch.nn.Dropout` of `model`."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Dropout and 0 < child.p < 1:
                setattr(module, name, LaneDropout(child.p))
