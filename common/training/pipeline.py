"""Pipeline parallel: each rank holds one stage of the model, and works on one micro-batch while others work on theirs.

PyTorch's schedules order the passes, and send hidden states and gradients; this module weighs the loss, and times.
"""

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL
from common.models.chunked_loss import losses_or_logits
from common.models.known_padding import padding_known
from common.models.loading import weight_dtype
from common.models.stages import StageMap, add_lora_to_stage, load_stage
from common.models.trained_weights import train_own_weights
from common.runtime.world import Rank
from common.training.answer_logits import Batch, loss_is_chunked, on_device


def trained_stage(run: RunConfig, stage_map: StageMap, rank: Rank) -> PreTrainedModel | PeftModel:
    """Return this rank's layers with the trained weights switched on, or with adapters; each stage must have some."""
    stage = load_stage(run, stage_map, rank.rank, rank.device)
    if run.method.has_adapters:
        return add_lora_to_stage(stage, run, stage_map, rank.rank)
    train_own_weights(stage, run)
    return stage


def hidden_dtype(model: PreTrainedModel, loaded: torch.dtype, autocasts: bool) -> torch.dtype:
    """Return the dtype of hidden states; under autocast layer norms, which end an encoder's layers, give fp32."""
    ends_with_layer_norm = not hasattr(model.base_model, "embed_tokens")
    return torch.float32 if autocasts and ends_with_layer_norm else loaded


Mark = Any  # a moment: seconds on CPU, on a GPU an event of its stream, which is read when the work is done
TIMED_STEPS = 100  # whose passes are kept: a long training has millions


class PassClock:
    """Times the passes of this rank's stage, on a GPU by events; `steps`: start, end and passes of the latest ones."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.passes: list[tuple[str, Mark, Mark]] = []
        self.steps: deque[tuple[Mark, Mark, list[tuple[str, Mark, Mark]]]] = deque(maxlen=TIMED_STEPS)

    def mark(self) -> Mark:
        """Return the moment."""
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def timed(self, kind: str, work: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return what `work`, a pass of one micro-batch, returns, and keep its time."""
        start = self.mark()
        done = work(*args, **kwargs)
        self.passes.append((kind, start, self.mark()))
        return done

    def step(self, work: Callable, *args: Any, **kwargs: Any) -> None:
        """Do `work`, a whole step of a schedule; its passes belong to it."""
        self.passes, start = [], self.mark()
        work(*args, **kwargs)
        self.steps.append((start, self.mark(), self.passes))
        self.passes = []  # what follows, say validation, is of no training step

    def busy_and_total_s(self) -> tuple[float, float]:
        """Return the seconds in which this stage computed, and all seconds of the latest steps."""
        passes_s = [self._seconds(start, end) for *_, passes in self.steps for _, start, end in passes]
        return sum(passes_s), sum(self._seconds(start, end) for start, end, _ in self.steps)

    def last_passes(self) -> list[tuple[str, int, float, float]]:
        """Return of each pass of the last step: forward, loss or backward; micro-batch; start and end (s)."""
        begin, _, passes = self.steps[-1]
        micro_batches = defaultdict(itertools.count)
        return [
            (kind, next(micro_batches[kind]), self._seconds(begin, start), self._seconds(begin, end))
            for kind, start, end in passes
        ]

    def _seconds(self, start: Mark, end: Mark) -> float:
        if self.device == "cpu":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class TimedStage(PipelineStage):
    """A stage whose passes are timed by the clock of its `Pipeline`."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Time the forward pass of one micro-batch."""
        return self.submod.clock.timed("forward", super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Time the backward pass of one micro-batch."""
        return self.submod.clock.timed("backward", super().backward_one_chunk, *args, **kwargs)

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Check what is sent alone. PyTorch before 2.12 calls this for the last stage, too, which sends nothing."""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)


class Pipeline(torch.nn.Module):
    """This rank's stage (`trained_stage`) as a schedule calls it, and its latest schedule.

    The schedule's buffers have the shape of a batch's hidden states. A batch of another shape gets a new one, on all
    ranks alike, which costs a handshake of 1 to 4 ms (two ranks with gloo): of each shape one would take memory.

    Attributes:
        takes_chunks: Whether this is a last stage whose `loss` computes the logits, in chunks, from hidden states.
        positions: Where the last stage has a loss, shape (positions,); None = the stage returns logits everywhere.
        loss_divisor: What the sum of the losses is divided by.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, run: RunConfig, rank: Rank) -> None:
        super().__init__()
        self.model, self.rank = model, rank
        self.causal = model.get_base_model() if isinstance(model, PeftModel) else model
        self.causal.config.use_cache = False
        self.is_first, self.is_last = rank.rank == 0, rank.rank == rank.world_size - 1
        autocasts = run.precision.startswith("bf16")
        self.autocast = torch.autocast(run.device, torch.bfloat16, enabled=autocasts)
        self.hidden_dtype = hidden_dtype(self.causal, weight_dtype(run), autocasts)
        self.takes_chunks = self.is_last and loss_is_chunked(run, model)
        if self.takes_chunks:
            self.losses_of = losses_or_logits(self.causal)
        self.positions: torch.Tensor | None = None
        self.loss_divisor = 1.0
        self.schedule_name, self.micro_batches = run.schedule, run.micro_batches
        self.clock = PassClock(rank.device)
        self.schedule: PipelineScheduleSingle | None = None
        self.made_for: tuple[object, ...] = ()  # shape of a batch (rows, tokens), schedule, micro-batches, purpose

    def forward(self, given: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return hidden states or logits from token ids (rows, tokens) or hidden states (rows, tokens, hidden)."""
        inputs = {"input_ids" if self.is_first else "inputs_embeds": given, "attention_mask": attention_mask}
        with self.autocast:
            if not self.is_last:
                return self.causal.base_model(**inputs).last_hidden_state
            if self.positions is None:
                return self.causal(**inputs).logits
            if self.takes_chunks:
                return self.causal.base_model(**inputs).last_hidden_state[:, self.positions]
            return self.causal(**inputs, logits_to_keep=self.positions).logits

    def loss(self, output: torch.Tensor, target: torch.Tensor, in_backward: bool = False) -> torch.Tensor:
        """Return the sum of the losses of what the last stage returned, over `loss_divisor`.

        `output` has shape (rows, positions, hidden or classes), `target` (rows, positions). With `in_backward` the
        gradients of chunks are computed in the backward pass, for schedules that keep many losses waiting.
        """
        if self.takes_chunks:
            with self.autocast:
                losses = self.losses_of(output, target, in_backward).sum()
        else:
            flat = output.float().flatten(0, -2)
            losses = cross_entropy(flat, target.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        return losses / self.loss_divisor

    def train_step(self, batch: Batch, loss_divisor: float, schedule: str = "", micro_batches: int = 0) -> torch.Tensor:
        """Do the forward and backward passes of all micro-batches; return the loss on the last stage, 0 on others.

        `batch` (`Part.inputs_for_loss`) is the same on every rank, with a number of rows that the micro-batches divide.
        The loss is a sum over `loss_divisor`, so that uneven micro-batches weigh what they should.
        """
        name, count = schedule or self.schedule_name, micro_batches or self.micro_batches
        self.train()
        return self._run(batch, loss_divisor, name, count, "training")

    def bare_step(self, batch: Batch, micro_batches: int) -> None:
        """Do the passes of this stage alone, from made-up hidden states: nothing is sent, received or waited for."""
        self.train()
        inputs = self._inputs(batch)
        parts = [inputs[name].chunk(micro_batches) for name in ("input_ids", "attention_mask", "labels")]
        for ids, mask, labels in zip(*parts, strict=True):
            shape = (*ids.shape, self.causal.config.hidden_size)
            made_up = torch.rand(shape, dtype=self.hidden_dtype, device=ids.device, requires_grad=True)
            output = self(ids if self.is_first else made_up, mask)
            if self.is_last:
                self.loss(output, labels).backward()
            else:
                output.backward(torch.ones_like(output))

    @torch.no_grad()
    def validate(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses of all labelled tokens, on the last stage; 0 on others."""
        self.eval()
        return self._run(batch, 1.0, "gpipe", self.micro_batches, "validation")

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Return all logits, fp32, shape (rows, tokens, vocabulary), on the last stage; None on others."""
        self.eval()
        self.positions = None
        inputs = on_device(batch, self.rank.device)
        made = self._pass(inputs, "gpipe", self.micro_batches, "logits")
        return made.float() if self.is_last else None

    def receive_buffers(self) -> list[torch.Tensor]:
        """Return what the last step's hidden states and gradients were received in."""
        if self.schedule is None:
            return []
        stage = self.schedule._stage
        infos = tree_leaves((stage.args_recv_info, stage.grad_recv_info))
        return [info.buffer for info in infos if isinstance(getattr(info, "buffer", None), torch.Tensor)]

    def busy_s_and_idle_shares(self) -> list[tuple[float, float]]:
        """Return each stage's seconds of work, and its share of the steps' time in which it waited."""
        of_stages = gather_object([self.clock.busy_and_total_s()])
        longest_s = max(total_s for _, total_s in of_stages)  # a step ends for all with its last stage
        return [(busy_s, 1 - busy_s / longest_s) for busy_s, _ in of_stages]

    def _run(self, batch: Batch, loss_divisor: float, name: str, count: int, purpose: str) -> torch.Tensor:
        inputs = self._inputs(batch)
        self.loss_divisor = loss_divisor
        losses: list[torch.Tensor] = []
        target = {"target": inputs["labels"], "losses": losses} if self.is_last else {}
        with padding_known(batch):
            self._pass(inputs, name, count, purpose, return_outputs=False, **target)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.rank.device)

    def _pass(self, inputs: Batch, name: str, count: int, purpose: str, **given: Any) -> torch.Tensor | None:
        made_for = (inputs["input_ids"].shape, name, count, purpose)
        if self.made_for != made_for:
            self.schedule = None  # its buffers are free before the next one's are there
            self.schedule, self.made_for = self._new_schedule(*made_for), made_for
        pass_all = partial(self.clock.step, self.schedule.step) if purpose == "training" else self.schedule.eval
        ids = (inputs["input_ids"],) if self.is_first else ()
        return pass_all(*ids, attention_mask=inputs["attention_mask"], **given)

    def _inputs(self, batch: Batch) -> Batch:
        """Return the batch on this rank's device; the stage takes from it where to compute logits."""
        inputs = on_device(batch, self.rank.device)
        self.positions = inputs.get("logits_to_keep")
        return inputs

    def _new_schedule(self, shape: torch.Size, name: str, count: int, purpose: str) -> PipelineScheduleSingle:
        size = (shape[0] // count, shape[1], self.causal.config.hidden_size)
        hidden = torch.empty(size, dtype=self.hidden_dtype, device="meta").requires_grad_(purpose == "training")
        given = torch.empty(size[:2], dtype=torch.long, device="meta") if self.is_first else hidden
        # the last stage's output goes nowhere, and its shape is not looked at
        place = (self.rank.rank, self.rank.world_size, torch.device(self.rank.device))
        stage = TimedStage(self, *place, input_args=given, output_args=hidden)
        # GPipe keeps the losses of all micro-batches waiting, 1F1B back-propagates each at once on the last stage
        loss = partial(self.clock.timed, "loss", self.loss, in_backward=name == "gpipe" and count > 1)
        schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[name]
        return schedule(stage, count, loss_fn=None if purpose == "logits" else loss, scale_grads=False)
