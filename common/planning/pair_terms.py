"""The memory of a DPO or GRPO step where it differs from a step on answers: TRL's head, the pass of the reference.

The head multiplies a tile of the logits at a time (trl/kernels/chunked_logprob.py). On a GPU a Triton kernel works
within the tile, on positions with an answer's token alone; elsewhere PyTorch's operations work beside it, on all
positions. The forward pass keeps its inputs alone; the backward pass computes each tile again, and adds the gradients
up in fp32. With adapters the reference reads the same rows after the policy, whose activations wait; its own are not
kept.

Letters as in `memory_plan`, and: P positions that the head reads, R of these and U columns that a tile has, C = R x U.
"""

from common.planning.layer_activations import widest_without_gradients
from common.planning.memory_plan import DeviceSums, Moment
from common.planning.terms import Kind, Term, activations, numbers, size_of

TILE_POSITIONS, TILE_COLUMNS = 4096, 32_768
# bytes beside a number of the tile, of PyTorch's operations in fp32: in the forward pass 3 tensors and a mask, in the
# backward pass 7 and a mask (`_forward_tile` and `_backward_tile`)
FORWARD_BESIDE, BACKWARD_BESIDE = 13, 29


class PairSums(DeviceSums):
    """The terms of one device in a step that learns from log-probabilities of pairs of answers, or of samples."""

    @property
    def positions(self) -> int:
        """`P`: positions that the head reads."""
        return self.batch.sequences * self.job.head_positions

    @property
    def columns(self) -> int:
        """`U`: columns of a tile."""
        return min(self.architecture.vocab, TILE_COLUMNS)

    def _at_work(self) -> dict[Moment, list[Term]]:
        """Return the moments of every step, and those before the backward pass: the head, and the reference's pass."""
        head = self.loss_without_gradients(self.batch.sequences, self.batch.length, self.batch.labelled)
        moments = {Moment.HEAD_FORWARD: head}
        if self.job.reads_reference:
            policy, a = self._head_inputs("inputs of the policy's head"), self.job.arithmetic_bytes
            matrices = [linear.cast_weights for stack, _ in self.stacks for linear in stack.linears]
            widest = max(matrices) * self.job.autocasts
            copy = numbers(Kind.WEIGHTS, "autocast's copy of the widest matrix", widest, a)
            layer = widest_without_gradients(self.architecture, self.job, self.batch.tokens, self.hidden_bytes)
            moments[Moment.REFERENCE_LAYER] = [policy, layer, copy]
            moments[Moment.REFERENCE_HEAD] = [policy, *head]
        return moments | super()._at_work()

    # -- the layers' backward pass

    def _gradients_so_far(self, count: int, what: str) -> list[Term]:
        return [*super()._gradients_so_far(count, what), *self._waiting_head()]

    def _embeddings_backward(self) -> list[Term]:
        return [*super()._embeddings_backward(), *self._waiting_head()]

    def _waiting_head(self) -> list[Term]:
        """Return a tied head's gradient, which beside earlier ones, or DDP's buckets, waits for the embeddings'."""
        waits = self.adds_to_gradients and self.trains_head and self.job.trains_all and self.architecture.tied
        what = "gradient of the tied head, before it is added"
        return [numbers(Kind.GRADIENTS, what, self.matrix * waits, self.job.trained_bytes)]

    # -- the head

    def _loss(self) -> list[Term]:
        # a CPU multiplies fp32 copies of a tile and of its columns, or its positions, to gradients
        rows, copies = min(self.positions, TILE_POSITIONS), self.job.cpu_operations and self.job.arithmetic_bytes < 4
        factor = max(self.columns, rows if self.trains_head else 0) * self.architecture.hidden
        copied = [
            Term(Kind.LOGITS, "a tile in fp32", "C 4", 4 * rows * self.columns * copies),
            activations("what it is multiplied with, in fp32", "max(U, R) H 4", 4 * factor * copies),
        ]
        beside = max(self._folded(self.positions, BACKWARD_BESIDE), copied, key=size_of)
        return [*self._tile(self.positions), *beside, *self._of_all_tiles()]

    def _head_backward(self) -> list[Term]:
        each = self.job.trained_bytes
        of_inputs, of_matrix = self.hidden_size(self.positions), self.matrix * (self.trains_head and each < 4)
        return [
            *self._tile(self.positions),
            *self._of_all_tiles(),
            activations("gradient of the head's inputs, in their format", "P H x", of_inputs * (self.hidden_bytes < 4)),
            numbers(Kind.GRADIENTS, "gradient of the head's matrix, as the weights are", of_matrix, each),
        ]

    def loss_without_gradients(self, rows: int, length: int, labelled: int) -> list[Term]:
        """Return what a forward pass of the head holds of so many sequences; the last hidden state is still there."""
        positions = rows * self.job.head_positions_of(length, labelled)
        return [
            *self._tile(positions),
            *self._folded(positions, FORWARD_BESIDE),
            activations("inputs of the head", "P H x", self.hidden_size(positions)),
            activations("last hidden state", "T H x", self.hidden_size(rows * length)),
        ]

    def _tile(self, positions: int) -> list[Term]:
        h, a, rows = self.architecture.hidden, self.job.arithmetic_bytes, min(positions, TILE_POSITIONS)
        of_columns, of_positions = h * (self.job.weight_bytes != a), h * a * (self.hidden_bytes != a)
        return [
            Term(Kind.LOGITS, "a tile of logits", "C a", rows * self.columns * a),
            numbers(Kind.WEIGHTS, "copy of a tile's columns", self.columns * of_columns, a),
            activations("copy of a tile's positions", "R H a", rows * of_positions),
        ]

    def _folded(self, positions: int, each: int) -> list[Term]:
        """Return what PyTorch's operations make beside a tile; Triton's kernels nothing."""
        size = min(positions, TILE_POSITIONS) * self.columns * each * self.job.cpu_operations
        return [Term(Kind.LOGITS, "computed beside a tile, in fp32", f"C {each}", size)]

    def _of_all_tiles(self) -> list[Term]:
        of_inputs, of_matrix = 4 * self.positions * self.architecture.hidden, self.matrix * self.trains_head
        return [
            self._head_inputs("inputs of the head"),
            activations("their gradients, summed in fp32", "P H 4", of_inputs),
            numbers(Kind.GRADIENTS, "gradient of the head's matrix, summed in fp32", of_matrix, 4),
        ]

    def _head_inputs(self, what: str) -> Term:
        return activations(what, "P H x", self.hidden_size(self.positions))
