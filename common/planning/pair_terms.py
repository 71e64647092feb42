"""The memory of a DPO step where it differs from a step on answers: TRL's head.

The head multiplies a tile of the logits at a time: so many positions, and so many of the vocabulary's columns
(trl/kernels/chunked_logprob.py). On a GPU a Triton kernel works within the tile, on positions with an answer's token
alone; elsewhere PyTorch's operations work beside it, on all positions. The backward pass of the head is the highest
moment: the reference's pass keeps nothing, and the forward pass holds less beside the same tile.
"""

from common.planning.memory_plan import DeviceSums
from common.planning.terms import Term, activations, numbers, where

TILE_POSITIONS, TILE_COLUMNS = 4096, 32_768
FORWARD_BESIDE, BACKWARD_BESIDE = 13, 29
"""Bytes beside a number of the tile, of PyTorch's operations in fp32: in the forward pass 3 tensors and a mask, in the
backward pass 7 and a mask (`_forward_tile` and `_backward_tile`)."""


class PairSums(DeviceSums):
    """The terms of one device in a step on pairs of answers."""

    @property
    def positions(self) -> int:
        """`P`: positions that the head reads."""
        of_each = self.batch.length - 1 if self.job.cpu_operations else self.batch.labelled
        return self.batch.sequences * of_each

    @property
    def tile(self) -> int:
        """`C`: numbers of a tile."""
        return self._tile_of(self.positions)

    def _tile_of(self, positions: int) -> int:
        return min(positions, TILE_POSITIONS) * min(self.architecture.vocab, TILE_COLUMNS)

    def chunk_of_loss(self) -> list[Term]:
        """Return what the backward pass of a tile holds, in the last of them."""
        return [*self._tiles(self.tile, BACKWARD_BESIDE), *self._head_copy(), *self._of_all_tiles()]

    def chunk_of_head_backward(self) -> list[Term]:
        """Return what the head holds when its gradients are whole, and in the formats of inputs and weights."""
        matrix, x = self.architecture.vocab * self.architecture.hidden, self.hidden_bytes
        size = self.positions * self.architecture.hidden * x
        in_its_format = numbers(
            "gradients", "gradient of the head's matrix, as the weights are", matrix, self.job.trained_bytes
        )
        return where(
            (True, self._of_all_tiles()),
            (x < 4, activations("gradient of the head's inputs, as they are", "P H x", size)),
            (self.trains_head and self.job.trained_bytes < 4, in_its_format),
        )

    def _tiles(self, tile: int, beside: int) -> list[Term]:
        each = self.job.arithmetic_bytes + (beside if self.job.cpu_operations else 0)
        return [Term("logits", "a tile of logits, and what is computed beside it", f"C {each}", tile * each)]

    def _of_all_tiles(self) -> list[Term]:
        """Return the head's inputs, and the gradients that the tiles add up in fp32."""
        inputs = self.positions * self.architecture.hidden
        matrix = self.architecture.vocab * self.architecture.hidden
        return where(
            (
                True,
                activations(
                    "inputs of the head, and their gradients in fp32", "P H (x + 4)", inputs * (self.hidden_bytes + 4)
                ),
            ),
            (self.trains_head, numbers("gradients", "gradient of the head's matrix, summed in fp32", matrix, 4)),
        )

    def loss_without_gradients(self, rows: int, length: int, labelled: int) -> list[Term]:
        """Return a tile, and the head's inputs, of validation rows."""
        positions = rows * (length - 1 if self.job.cpu_operations else labelled)
        inputs = positions * self.architecture.hidden * self.hidden_bytes
        return [
            *self._tiles(self._tile_of(positions), FORWARD_BESIDE),
            activations("inputs of the head", "P H x", inputs),
        ]
