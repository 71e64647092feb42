"""A stage of a pipeline as what a rank holds."""

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from typing_extensions import override

from common.base.errors import BadInputError, NotPlannedError
from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL, Tokens, without_labels
from common.models.saved_files import save_parts
from common.models.stages import Sharing
from common.planning.architectures import read_architecture
from common.runtime.world import Rank
from common.training.answer_logits import Batch
from common.training.part import Part, clip_divided
from common.training.pipeline import Pipeline


class Stage(Part):
    """Some layers of the model, in a pipeline; all ranks go through the same rows in the same order."""

    def __init__(self, module: Pipeline, run: RunConfig, rank: Rank) -> None:
        self.pipeline = module
        super().__init__(module.model, run, rank)
        self.usage = None  # what one device would hold is on no rank
        self.optimizer_name = f"optimizer {rank.rank}"

    @classmethod
    @override
    def check(cls, run: RunConfig) -> None:
        if run.method.has_adapters and run.targets_head:
            raise BadInputError(
                f"target_modules is {run.target_modules}, but a pipeline's head, which the last stage alone has, takes "
                "no adapter: leave lm_head out."
            )
        try:
            read_architecture(run.model, run.model_revision)
        except NotPlannedError as unknown:
            raise BadInputError(
                f"Layers are placed by their planned memory, but: {unknown} Pass --parallel ddp, or with a decoder "
                "go to 2.5 (mp)."
            ) from None

    @override
    def back_propagate(self, batch: Batch, label_count: int) -> None:
        self.pipeline.train_step(batch, label_count)
        self.pipeline.clock.steps.pop()  # it is counted, not timed

    @override
    def kept_buffers(self) -> list[torch.Tensor]:
        return self.pipeline.receive_buffers()

    @override
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over the whole model, after first and last stage have added up those of tied embeddings."""
        tied = self._tied_weight()
        if tied is not None:
            tied.grad = sum_of_first_and_last(tied.grad, self.rank)
        copy = tied if not self.rank.is_main else None  # counted on the first stage
        trained = [weight for weight in self.model.parameters() if weight.grad is not None]
        counted = [weight.grad for weight in trained if weight is not copy]
        return clip_divided(self.gradients(), counted, [], max_norm, self.rank.device)

    def _tied_weight(self) -> torch.nn.Parameter | None:
        """Return this stage's copy of trained embeddings that are also the head; None elsewhere."""
        causal = self.pipeline.causal
        if not causal.ends_are_tied or not (self.rank.is_main or self.pipeline.is_last):
            return None
        # an encoder's last stage has the head, but no embeddings that would be the same weight
        ends = causal.get_input_embeddings() if self.rank.is_main else causal.get_output_embeddings()
        return ends.weight if ends.weight.requires_grad else None

    @override
    def fill(self, rows: list[Tokens]) -> list[Tokens]:
        missing = -len(rows) % self.run.micro_batches
        return [*rows, *[without_labels(rows[-1])] * missing]

    @override
    def sums(self, batch: Batch) -> torch.Tensor:
        if self.takes_logits_to_keep:  # of a large vocabulary, only where some row has a label
            targets = (batch["shift_labels"] != IGNORED_LABEL).sum().float().to(self.rank.device)
            return torch.stack([self.pipeline.validate(batch), targets])
        logits = self.pipeline.logits(batch)
        labels = batch["labels"].to(self.rank.device)
        if logits is None:
            logits = torch.zeros(len(labels), self.pipeline.causal.config.num_labels, device=self.rank.device)
        return self.objective.results(logits, labels).sum(0)

    @override
    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        dist.broadcast(value, src=self.rank.world_size - 1)
        return value

    @override
    def logits(self, batch: Batch) -> torch.Tensor | None:
        return self.pipeline.logits(batch)  # on the last stage

    @override
    def export(self, folder: Path) -> None:
        save_parts(self.model, folder, Sharing(self.rank.rank, self.rank.world_size, group=0, groups=1))

    @override
    def for_record(self) -> dict[str, object]:
        """Return each stage's seconds of work in the latest steps, and the share of their time in which it waited."""
        if not self.pipeline.clock.steps:
            return {"stages": None}  # it resumed from its last step, and took none
        of_stages = self.pipeline.busy_s_and_idle_shares()
        for number, (busy_s, _) in enumerate(of_stages):
            if not busy_s:
                raise RuntimeError(f"Stage {number} of {len(of_stages)} computed nothing.")
        stages = [{"stage": n, "busy_s": busy_s, "idle_share": idle} for n, (busy_s, idle) in enumerate(of_stages)]
        return {"stages": stages}

    @override
    def parameter_counts(self) -> tuple[int, int]:
        causal, copy = self.pipeline.causal, None
        if self.pipeline.is_last and causal.ends_are_tied:
            copy = causal.get_output_embeddings().weight
        looked_up = causal.get_input_embeddings().weight if self.rank.is_main and not causal.ends_are_tied else None
        own = [weight for weight in self.model.parameters() if weight is not copy]
        trained = sum(weight.numel() for weight in own if weight.requires_grad)
        multiplied = sum(weight.numel() for weight in own if weight is not looked_up)
        counts = gather_object([(trained, multiplied)])
        return sum(trained for trained, _ in counts), sum(multiplied for _, multiplied in counts)


def sum_of_first_and_last(gradient: torch.Tensor, rank: Rank) -> torch.Tensor:
    """Return `gradient`, which becomes the sum of those of the first and the last stage."""
    other = rank.world_size - 1 if rank.is_main else 0
    received = torch.empty_like(gradient)
    # in one batch: on GPUs both ends would else wait in their sending for the other's receiving
    exchange = [dist.P2POp(dist.isend, gradient, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    return gradient.add_(received)
