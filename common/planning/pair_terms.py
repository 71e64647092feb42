"""The memory of a DPO step where it differs from a step on answers: TRL's head, and the pass of the reference.

The head multiplies a tile of the logits at a time: so many positions, and so many of the vocabulary's columns
(trl/kernels/chunked_logprob.py). On a GPU a Triton kernel works within the tile, on positions with an answer's token
alone; elsewhere PyTorch's operations work beside it, on all positions. Its forward pass keeps its inputs alone, and its
backward pass, which computes each tile again, adds the gradients up in fp32. With adapters the reference reads the same
rows after the policy, whose activations wait: what the reference makes keeps nothing.

Letters as in `memory_plan`, and: P positions that the head reads, R of these and U columns that a tile has, C = R x U.
"""

from common.planning.layer_activations import widest_without_gradients
from common.planning.memory_plan import DeviceSums
from common.planning.shares import widest_matrix
from common.planning.terms import Term, activations, numbers, size_of, where

TILE_POSITIONS, TILE_COLUMNS = 4096, 32_768
FORWARD_BESIDE, BACKWARD_BESIDE = 13, 29
"""Bytes beside a number of the tile, of PyTorch's operations in fp32: in the forward pass 3 tensors and a mask, in the
backward pass 7 and a mask (`_forward_tile` and `_backward_tile`)."""


class PairSums(DeviceSums):
    """The terms of one device in a step on pairs of answers."""

    @property
    def positions(self) -> int:
        """`P`: positions that the head reads."""
        return self.batch.sequences * self.job.head_positions

    @property
    def columns(self) -> int:
        """`U`: columns of a tile."""
        return min(self.architecture.vocab, TILE_COLUMNS)

    def moments(self) -> dict[str, list[Term]]:
        """Return those of every step, and those before the backward pass: the head, and the reference's pass."""
        job, waiting = self.job, self.before_backward()
        head = self.loss_without_gradients(self.batch.sequences, self.batch.length, self.batch.labelled)
        forward = {"forward of the head": [*waiting, *head]}
        if job.reads_reference:
            waiting.append(self._head_inputs("inputs of the policy's head"))
            widest = widest_matrix(self.architecture)
            copy = numbers("weights", "autocast's copy of the widest matrix", widest, job.arithmetic_bytes)
            layer = widest_without_gradients(self.architecture, job, self.batch.tokens, self.hidden_bytes)
            of_layer = where((True, layer), (job.autocasts, copy))
            forward["forward of a layer of the reference"] = [*waiting, *of_layer]
            forward["forward of the reference's head"] = [*waiting, *head]
        return {**forward, **super().moments()}

    # -- the layers' backward pass

    @property
    def gradients_within_mlp(self) -> int:
        """Those of an input that base and adapter read are added up when it is gone; no dropout makes a third.

        Where hidden states are in fp32 the moment counts for less: their gradients are fewer by then.
        """
        return 2 if self.job.method.has_adapters and self.hidden_bytes == 2 else 1

    def _gradients_so_far(self, count: int, what: str) -> list[Term]:
        return [*super()._gradients_so_far(count, what), *self._waiting_head()]

    def embeddings_backward(self) -> list[Term]:
        """Return the embeddings' gradient, its sum with a tied head's, and that where earlier ones are there, too."""
        return [*super().embeddings_backward(), *self._waiting_head()]

    def _waiting_head(self) -> list[Term]:
        """Return a tied head's gradient, which beside earlier ones, or DDP's buckets, waits for the embeddings'."""
        waits = self.adds_to_gradients and self.trains_head and self.job.trains_all and self.architecture.tied
        matrix = self.architecture.vocab * self.architecture.hidden
        what = "gradient of the tied head, before it is added"
        return where((waits, numbers("gradients", what, matrix, self.job.trained_bytes)))

    # -- the head

    def chunk_of_loss(self) -> list[Term]:
        """Return what the backward pass of the last tile holds."""
        beside = max((self._folded(self.positions, BACKWARD_BESIDE), self._summed()), key=size_of)
        return [*self._tile(self.positions), *beside, *self._of_all_tiles()]

    def chunk_of_head_backward(self) -> list[Term]:
        """Return what the head holds when its gradients are whole, and in the formats of inputs and weights."""
        x, matrix = self.hidden_bytes, self.architecture.vocab * self.architecture.hidden
        size, each = self.positions * self.architecture.hidden * x, self.job.trained_bytes
        return where(
            (True, [*self._tile(self.positions), *self._of_all_tiles()]),
            (x < 4, activations("gradient of the head's inputs, in their format", "P H x", size)),
            (
                self.trains_head and each < 4,
                numbers("gradients", "gradient of the head's matrix, as the weights are", matrix, each),
            ),
        )

    def loss_without_gradients(self, rows: int, length: int, labelled: int) -> list[Term]:
        """Return what a forward pass of the head holds of so many sequences; the last hidden state is still there."""
        positions = rows * self.job.head_positions_of(length, labelled)
        h, x = self.architecture.hidden, self.hidden_bytes
        return [
            *self._tile(positions),
            *self._folded(positions, FORWARD_BESIDE),
            activations("inputs of the head", "P H x", positions * h * x),
            activations("last hidden state", "T H x", rows * length * h * x),
        ]

    def _tile(self, positions: int) -> list[Term]:
        """Return a tile's buffer, and copies of what is multiplied, where that has another format."""
        h, a, rows = self.architecture.hidden, self.job.arithmetic_bytes, min(positions, TILE_POSITIONS)
        head_bytes = self.job.end_bytes if self.job.method.quantizes else self.job.weight_bytes
        return where(
            (True, Term("logits", "a tile of logits", "C a", rows * self.columns * a)),
            (head_bytes != a, numbers("weights", "copy of a tile's columns", self.columns * h, a)),
            (self.hidden_bytes != a, activations("copy of a tile's positions", "R H a", rows * h * a)),
        )

    def _folded(self, positions: int, each: int) -> list[Term]:
        """Return what PyTorch's operations make beside a tile; Triton's kernels nothing."""
        size = min(positions, TILE_POSITIONS) * self.columns * each
        return where((self.job.cpu_operations, Term("logits", "computed beside a tile, in fp32", f"C {each}", size)))

    def _summed(self) -> list[Term]:
        """Return the fp32 copies of a tile and its columns, or its positions, that a CPU multiplies to gradients."""
        h, rows = self.architecture.hidden, min(self.positions, TILE_POSITIONS)
        is_copied = self.job.cpu_operations and self.job.arithmetic_bytes < 4
        factor = max(self.columns, rows if self.trains_head else 0) * h
        return where(
            (is_copied, Term("logits", "a tile in fp32", "C 4", 4 * rows * self.columns)),
            (is_copied, activations("what it is multiplied with, in fp32", "max(U, R) H 4", 4 * factor)),
        )

    def _of_all_tiles(self) -> list[Term]:
        """Return the head's inputs, and the gradients that the tiles add up in fp32."""
        inputs = self.positions * self.architecture.hidden
        matrix = self.architecture.vocab * self.architecture.hidden
        return where(
            (True, self._head_inputs("inputs of the head")),
            (True, activations("their gradients, summed in fp32", "P H 4", 4 * inputs)),
            (self.trains_head, numbers("gradients", "gradient of the head's matrix, summed in fp32", matrix, 4)),
        )

    def _head_inputs(self, what: str) -> Term:
        return activations(what, "P H x", self.positions * self.architecture.hidden * self.hidden_bytes)
