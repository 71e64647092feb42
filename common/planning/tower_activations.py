"""What a vision tower takes in a training step: its images, its forward pass, and what it keeps where it is trained.

Letters beside those of `memory_plan`: N patches of all images' tiles, Hv the tower's hidden size, Iv its MLP's.
"""

from common.planning.architectures import Tower
from common.planning.job import BatchShape, Job
from common.planning.layer_activations import LayerActivations
from common.planning.terms import Kind, Term, activations, times_each

# as processors make them: a channel in fp32, and whether a pixel counts as int64
PIXEL_BYTES, PIXEL_MASK_BYTES = 4, 8
POSITION_BYTES = 8
NORM_BYTES = 4  # of a layer norm's result, which is in fp32 in any precision


def job_of_tower(tower: Tower, job: Job) -> Job:
    """Return the job of the tower's encoder by itself, in which every tile is a row, and every patch a token."""
    rows = job.batch.rows // job.micro_batches * job.batch.tiles
    batch = BatchShape(rows, tower.encoder.max_length, labelled=0)
    return job.alone(batch, technique="full", target_modules=(), lora_dropout=0.0, evaluation=None)


class TowerActivations:
    """The terms of a tower and its connector, beside their weights; `job` is that of the whole model."""

    def __init__(self, tower: Tower, job: Job) -> None:
        self.tower, self.job, self.stack = tower, job, tower.encoder.stacks[0]
        self.hidden_bytes = job.weight_bytes  # `x` of the tower: of a hidden state between its layers
        own_job = job_of_tower(tower, job)
        self.layer = LayerActivations(tower.encoder, own_job, own_job.batch, self.hidden_bytes)
        self.patches = own_job.batch.tokens  # of all tiles
        self.hidden = self.patches * tower.encoder.hidden  # numbers of their hidden states
        self.pixels = own_job.batch.rows * tower.tile**2
        self.tokens = own_job.batch.rows * tower.tokens  # that stand for all tiles in the decoder

    def inputs(self) -> list[Term]:
        """Return the batch's images, which are there all the time that a step takes."""
        each = self.tower.channels * PIXEL_BYTES + PIXEL_MASK_BYTES
        what = "pictures, and which of their pixels count"
        return [Term(Kind.BUFFERS, what, f"pixels x {each}", self.pixels * each)]

    def forward(self) -> list[Term]:
        """Return what a layer's forward pass works on, whether or not anything of it is kept.

        Embeddings, the layer's input, its sum with the attention's result, and the norm of that are there when the MLP
        activates; or the first two, a norm, and the attention's queries, keys, values, result and projection.
        """
        encoder, a, x = self.tower.encoder, self.job.arithmetic_bytes, self.hidden_bytes
        in_mlp = (3 * x + NORM_BYTES) * encoder.hidden + 2 * a * encoder.intermediate
        in_attention = (2 * x + NORM_BYTES + 5 * a) * encoder.hidden
        what, formula = "what one layer makes of them", "N max((3 x + 4) Hv + 2 Iv a, (2 x + 4 + 5 a) Hv)"
        cast = max(linear.weights for linear in self.stack.linears) * a * self.job.autocasts
        each = self.tower.channels * x + PIXEL_MASK_BYTES  # the tower copies tiles that are not padding
        return [
            activations("vision tower: squares that are not padding", f"pixels x {each}", self.pixels * each),
            activations(f"vision tower: hidden states, and {what}", formula, self.patches * max(in_mlp, in_attention)),
            Term(Kind.WEIGHTS, "autocast's copy of a matrix of the vision tower", "Hv Iv a", cast),
        ]

    def result(self) -> list[Term]:
        """Return what waits while the decoder's layers go forward: the encoder's output, and the tokens made of it."""
        tokens = 2 * self.tokens * self.tower.connector.outputs * self.job.arithmetic_bytes
        return [
            activations("vision tower: its output in fp32", "N Hv 4", self.hidden * NORM_BYTES),
            activations("pictures' tokens, twice", "2 tokens H a", tokens),
        ]

    def saved(self, one_left: bool = False) -> list[Term]:
        """Return what a trained tower keeps for its backward pass; `one_left`: the first of its layers is left."""
        if not self.job.trains_tower:
            return []
        layers, a, hidden = 1 if one_left else self.stack.layers, self.job.arithmetic_bytes, self.hidden
        of_patches = self.pixels * self.tower.channels * a + POSITION_BYTES * self.patches
        layer = self.layer.saved(self.stack)
        if self.job.gradient_checkpointing:
            layer = [activations("layer input", "N Hv x", hidden * self.hidden_bytes)]
        return [
            *times_each(layer, layers, f"vision tower, {layers} x "),
            activations("vision tower: pixels, and the patches' places", "3 pixels a + 8 N", of_patches),
            activations("vision tower: input of the last norm", "N Hv 4", hidden * NORM_BYTES * (not one_left)),
            activations("input of the connector", "N Hv a", hidden * a * (not one_left)),
        ]

    def cached_copies(self) -> list[Term]:
        """Return copies of a trained tower's matrices that checkpointing does not keep, but autocast until it ends."""
        layers = self.stack.layers * (self.job.trains_tower and self.job.gradient_checkpointing)
        return times_each(self.layer.weight_copies(self.stack.linears), layers, f"vision tower, {layers} x ")

    def layer_backward(self) -> list[Term]:
        """Return what is alive only while one of the tower's layers is back-propagated."""
        in_mlp = self.patches * self.tower.encoder.intermediate * self.job.arithmetic_bytes
        saved = self.layer.saved(self.stack) if self.job.gradient_checkpointing else []
        return [
            *times_each(saved, 1, "vision tower, computed again: "),
            activations("vision tower: gradients within the MLP", "N Iv a", in_mlp),
            activations("vision tower: gradients of hidden states", "2 N Hv x", 2 * self.hidden * self.hidden_bytes),
        ]
