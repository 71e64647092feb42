"""How much memory each phase of a run takes on a device, and which models are alive in it, in closed form.

A training step is `memory_plan`'s. The other phases have no backward pass: beside the models that are alive, a forward
pass holds what one layer works on, and generating the keys and values of all tokens so far. Letters as in
`memory_plan`, for the rows that are validated or answered; N new tokens, W beams.

Where training divides the weights, a model that answers, judges or is compared is in stages: each rank that shares it
holds some of its layers, and all of them work on the same rows, as many as each would answer alone, times the stages.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from common.hardware.devices import CPU_DEVICE, Gpu
from common.planning.architectures import Architecture, Block, StackKind
from common.planning.between_steps import FSDP_GATHERED_AT_LOSS, FSDP_GATHERED_IN_FORWARD
from common.planning.gpu_overhead import memory_with_overhead, with_overhead
from common.planning.job import LOGITS_AT_ONCE, EvaluationShape, Job
from common.planning.layer_activations import widest_of_mlp
from common.planning.memory_plan import DeviceSums, Moment, device_sums
from common.planning.shares import Share, part_of_rank, sees, stages_of, whole_model
from common.planning.terms import DeviceMemory, Kind, Term, activations, numbers, size_of, times_each
from common.planning.tower_activations import TowerActivations

TRAINING = "training"
ROLLOUTS = "rollouts"  # with rewards: answers to learn from, sampled before each step
# in the order of a run; validation and saving come again and again in training
PHASES = ("loading", "baseline evaluation", TRAINING, "validation", "saving", "merging", "final evaluation")
ROOM_FOR_MODELS = 0.9  # of a device's memory: what models may take
# of all-MiniLM-L6-v2, the independent judge, which is in fp32; its MLP is four times as wide as its hidden states
JUDGE_WEIGHTS, JUDGE_HIDDEN = 22_713_216, 384
LAYER = "forward of a layer"


@dataclass(frozen=True)
class Phase:
    """A phase of a run on one device: one of `PHASES`, and its highest moment, the GPU's own overhead included.

    `alive` says which models are in the device's memory.
    """

    name: str
    alive: str
    memory: DeviceMemory


def has_room_for_whole(whole_gib: float, quantized_gib: float, memory_gib: float) -> bool:
    """Return whether a device holds QLoRA's base and, beside it, a model in 16 bits, which judges its answers."""
    return whole_gib + quantized_gib < ROOM_FOR_MODELS * memory_gib


@dataclass(frozen=True)
class PhaseSums:
    """The terms of a run's phases on one device."""

    architecture: Architecture
    job: Job
    share: Share
    gpu: Gpu
    reloads_adapter: bool = True  # its rank loads the saved adapter again
    merges: bool = True  # and merges it
    stage: Share | None = None  # of a model that answers beside training; None: all of it, or with mp as in training

    @property
    def shape(self) -> EvaluationShape:
        """What the phases beside training work on."""
        return self.job.evaluation

    # -- phases

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases in their order; training alone where no evaluation is planned."""
        memory = memory_with_overhead(self.architecture, self.job, self.share, self.gpu)
        training = Phase(TRAINING, "trained model", memory)
        if self.job.evaluation is None:
            return (training,)
        before = self.evaluation("baseline evaluation", tuned=False)
        after, rollouts = self.evaluation("final evaluation", tuned=True), []
        if self.job.batch.goal.rewards:
            rollouts = [self._answering_beside(ROLLOUTS, self.shape.rows)]
        return self.loading(), before, *rollouts, training, self.validation(), self.saving(), self.merging(), after

    def loading(self) -> Phase:
        """Return the model when its last weight is there; or a module that is whole before it is divided.

        Of files each rank reads its part alone; weights that are drawn, quantized or DeepSpeed's come by modules.
        """
        job, architecture, there = self.job, self.architecture, self._trained.weights()
        moments, sharing = [("the last weight", [*there, *self._dequantized_experts()])], job.parallelism
        is_divided = sharing.shards_weights or sharing.splits_matrices or sharing.pipelines
        if is_divided and (job.draws_weights or job.method.quantizes or sharing.uses_deepspeed):
            embeddings, each = architecture.embedding_parameters, job.weight_bytes
            has_own_head = not (architecture.tied or architecture.classes)
            last = max(architecture.widest_matrix, embeddings * has_own_head)
            ranks = job.shard_ranks if sharing.shards_weights else job.devices
            parts = embeddings * (not sharing.pipelines)
            first = [
                numbers(Kind.WEIGHTS, "embeddings before they are divided", embeddings, each),
                numbers(Kind.WEIGHTS, "part of the embeddings", parts, each, ranks),
            ]
            module = numbers(Kind.WEIGHTS, "a module before it is divided", last, each)
            moments += [("the last module, whole", [*there, module]), ("the embeddings, whole", first)]
        return self._phase("loading", "trained model", *moments)

    def validation(self) -> Phase:
        """Return a batch of validation beside all that training keeps."""
        if self.job.batch.goal.rewards:
            return self._answering_beside("validation", self.shape.validated)
        sums, parts, shape = self._trained, self.job.micro_batches, self.shape
        lengths = {"length": shape.length, "labelled": shape.labelled}
        batch = replace(self.job.batch, rows=self._filled_up(shape.validated), **lengths)
        own = batch.part_of(self.job.sp_size)
        rows, length = own.sequences, own.length
        kept = [*self._kept_beside(rows * length), *self._autocast_copies()]
        layer = [*self._layer(rows // parts, length, length, trains=True), *self._images(rows)]
        moments = [
            (LAYER, [*kept, *sums.gathered(FSDP_GATHERED_IN_FORWARD), *layer]),
            (Moment.TOWER_FORWARD, [*kept, *self._images(rows, looking=True)]),
        ]
        if self.share.has_head:
            loss = sums.loss_without_gradients(rows, length, own.labelled)
            moments.append((Moment.LOSS, [*kept, *sums.gathered(FSDP_GATHERED_AT_LOSS), *loss]))
        return self._phase("validation", "trained model, optimizer", *moments)

    def _answering_beside(self, name: str, rows: int) -> Phase:
        """Return a phase of generating answers to so many prompts at once, beside all that training keeps."""
        moments = self._answers(self.job.weight_bytes, rows, trains=True).items()
        kept = self._trained.between_steps
        return self._phase(name, "trained model, optimizer", *((moment, [*kept, *terms]) for moment, terms in moments))

    def saving(self) -> Phase:
        """Return a checkpoint: it is written from where it is, or copied to the host, tensor by tensor."""
        moment = ("a checkpoint is written", self._trained.between_steps)
        return self._phase("saving", "trained model, optimizer", moment)

    def merging(self) -> Phase:
        """Return the comparison of the trained model's logits with those of what was saved, loaded again."""
        architecture, shape, a, parts = self.architecture, self.shape, self.job.arithmetic_bytes, self.job.micro_batches
        sharing, method = self.job.parallelism, self.job.method
        # as `common.training.export.rows_to_compare` chooses them
        length, target_length = shape.compared_length or shape.length, shape.labelled
        at_once = LOGITS_AT_ONCE // (architecture.embedding_parameters // architecture.hidden)  # a classifier's, too
        if len(architecture.stacks) == 1:
            longest = length if architecture.tower else at_once  # longer rows are cut, but not within an image
            target_length = length = min(length, longest)
        rows = self._filled_up(min(shape.validated, max(1, at_once // target_length)))
        rows *= self.job.batch.goal.sequences_per_row
        count = rows * (1 if architecture.classes else target_length) * architecture.vocab
        kept = self._kept_beside(rows * length)
        # as any user loads it: with 4-bit bases the adapter on one
        saved = self._in_4_bits() if method.quantizes else self._whole_weights("weights of what was saved")
        passing = [*self._layer(rows // parts, length, target_length, trains=True), *self._images(rows)]
        reading = [*self._layer(rows, length, target_length, a), *self._images(rows)]
        in_forward, at_loss = (self._trained.gathered(n) for n in (FSDP_GATHERED_IN_FORWARD, FSDP_GATHERED_AT_LOSS))
        what = "logits before and after, and two tensors of their differences"
        compared = Term(Kind.LOGITS, what, "4 P V 4", 16 * count)
        reloaded = 4 * count * (method.has_adapters and self.reloads_adapter)
        adapted = Term(Kind.LOGITS, "logits with the adapter that was loaded", "P V 4", reloaded)
        moments = [
            (Moment.TOWER_FORWARD, [*kept, *self._images(rows, looking=True)]),
            (LAYER, [*kept, *in_forward, *passing]),
            ("a weight is gathered and saved", [*self._trained.between_steps, *self._gathered_to_save()]),
            ("what was saved is loaded", saved),
        ]
        if self.share.has_head or not sharing.pipelines:  # the last stage compares
            expected = [Term(Kind.LOGITS, "the trained model's logits", "P V 4", 4 * count), adapted]
            copying = at_loss if sharing.uses_deepspeed else []  # FSDP lets go when the forward ends
            each = 2 * a if parts > 1 else a  # of a pipeline with those of its micro-batches
            with_copy = each + (4 if a < 4 else 0)
            what = "whole logits of a few rows, and their copies"
            logits, copied = (Term(Kind.LOGITS, what, f"P V {size}", count * size) for size in (each, with_copy))
            moments += [
                ("the saved model's vision tower", [*saved, *expected, *self._images(rows, looking=True)]),
                ("the trained model's logits", [*kept, *at_loss, logits]),
                ("the trained model's logits in fp32", [*kept, *copying, copied]),
                ("forward of a layer of the saved model", [*saved, *expected, *reading]),
                ("the comparison with the saved model's", [*saved, compared]),
            ]
            if method.quantizes and self._has_room_for_whole():
                moments.append(("the comparison with the merged model's", [*self._whole_weights(), compared]))
        elif self.stage:
            each = a + (4 if a < 4 else 0)
            what = "logits that the last stage sends, in fp32, too"
            received = Term(Kind.LOGITS, what, f"P V {each}", count * each)
            moments += [
                ("forward of a layer of the saved model", [*saved, adapted, *reading]),
                ("the saved model's logits", [*saved, adapted, received]),
            ]
        # 4 bits have no room for the sum: without room for 16 the host merges, and one rank (2.3) does so in any case
        is_here = method.has_plain_adapters or (not sharing.is_single and self._has_room_for_whole())
        if method.has_adapters and is_here and self.merges:
            what = "an adapter's product, and its sum with the matrix"
            product = numbers(Kind.WEIGHTS, what, architecture.widest_matrix, 4 + 4)
            moments.append(("an adapter is merged", [*self._whole_weights("weights that are merged"), product]))
        return self._phase("merging", "trained model; then the saved one", *moments)

    def evaluation(self, name: str, tuned: bool) -> Phase:
        """Return the answers to a batch of questions (or its labels, or summaries), and their judging."""
        shape, a = self.shape, self.job.whole_model_bytes
        answering, judging, alive = self._evaluated(tuned)
        moments = self._answers(a, self._answered)
        moments[Moment.TOWER_FORWARD] = self._images(self._answered, looking=True)
        if self.job.batch.goal.compares:  # how likely both given answers to a batch of prompts are
            rows = self._answered * self.job.batch.goal.sequences_per_row
            head = self._whole.loss_without_gradients(rows, shape.length, shape.labelled)
            moments["forward of a layer of the given answers"] = self._layer(rows, shape.length, shape.length, a)
            moments["head of the given answers"] = head
        if shape.has_independent_judge:
            size = self._rows_at_once(1) * shape.judged_length * (4 + 2 * 4) * JUDGE_HIDDEN * 4
            what = "the judge's hidden states, and what one layer makes of them"
            weights = numbers(Kind.WEIGHTS, "independent judge", JUDGE_WEIGHTS, 4)
            moments["the independent judge"] = [weights, activations(what, "T 12 H 4", size)]
        if shape.other_tokens and self._whole.share.has_head:
            what = "logits of another text, those that are learnt, and their fp32 copies"
            logits = Term(Kind.LOGITS, what, "S V 8", shape.other_tokens * self.architecture.vocab * 8)
            moments["other texts"] = [*self._layer(1, shape.other_tokens, shape.other_tokens, a), logits]
        all_moments = [(moment, [*answering, *terms]) for moment, terms in moments.items()]
        if shape.judged:
            length = max(shape.new_tokens, shape.judged_length)
            size = 2 * self._answered * length * self.architecture.hidden * 4
            hidden = activations("hidden states in fp32", "2 T H 4", size)
            all_moments.append(("the base judges", [*judging, *self._layer(self._answered, length, length, a), hidden]))
        return self._phase(name, alive, *all_moments)

    def _phase(self, name: str, alive: str, *moments: tuple[str, list[Term]]) -> Phase:
        """Return the phase at its highest moment."""
        moment, terms = max(moments, key=lambda each: size_of(each[1]))
        memory = DeviceMemory(moment, tuple(term for term in terms if term.count))
        return Phase(name, alive, with_overhead(self.job, self.gpu, memory))

    # -- models

    @cached_property
    def _trained(self) -> DeviceSums:
        return device_sums(part_of_rank(self.architecture, self.job), self.job, self.share)

    @cached_property
    def _whole(self) -> DeviceSums:
        """Return the device's stage of the base; all of it where there are none, with mp the device's part of it."""
        share = self.stage or (self.share if self.job.parallelism.layers_in_turn else whole_model(self.architecture))
        return device_sums(self.architecture, self.job.alone(replace(self.job.batch, rows=1)), share)

    def _whole_weights(self, what: str = "weights, not quantized") -> list[Term]:
        return [numbers(Kind.WEIGHTS, what, self._whole.parameters, self.job.whole_model_bytes)]

    def _in_4_bits(self) -> list[Term]:
        return [*self._whole.base_weights(), *self._dequantized_experts()]

    def _dequantized_experts(self) -> list[Term]:
        return [self._trained.layer.dequantized_experts(self.architecture.stacks[-1])]

    def _has_room_for_whole(self) -> bool:
        gib = (sum(term.gib for term in terms) for terms in (self._whole_weights(), self._whole.base_weights()))
        return has_room_for_whole(*gib, self.gpu.memory_gib)

    @property
    def _answered(self) -> int:
        """Rows that this device answers at once, with those that share its model."""
        return self._rows_at_once(1 if self.stage is None else stages_of(self.architecture, self.job))

    def _rows_at_once(self, stages: int) -> int:
        """Return the rows of a batch of a model that so many ranks share; the independent judge is whole on each."""
        ranks = 1 if self.job.parallelism.in_one_process else self.job.devices
        return self.shape.answered(self.job.shares_answered(stages), ranks // stages)

    def _gathered_to_save(self) -> list[Term]:
        job, architecture = self.job, self.architecture
        count = max(architecture.widest_matrix, architecture.embedding_parameters)
        if job.method.has_adapters:
            adapted = [linear for stack in architecture.stacks for linear in stack.linears if job.adapts(linear)]
            count = max(job.lora_rank * max(linear.inputs, linear.outputs) for linear in adapted)
        count *= job.parallelism.shards_weights or job.parallelism.splits_matrices
        return [numbers(Kind.BUFFERS, "the largest weight that is saved, gathered", count, job.trained_bytes)]

    def _evaluated(self, tuned: bool) -> tuple[list[Term], list[Term], str]:
        """Return the weights that answer, those that are there while the base judges, and which models these are."""
        if not self.job.method.quantizes:
            weights = self._whole_weights("weights")
            if tuned and self.job.parallelism.layers_in_turn:  # a model on several GPUs does not wait on the host
                return weights, times_each(weights, 2, "2 x "), "tuned model and base"
            return weights, weights, "tuned model; then the base" if tuned else "base"
        quantized, whole = self._in_4_bits(), self._whole_weights()
        if not self._has_room_for_whole():
            return quantized, quantized, "adapter on the quantized base" if tuned else "quantized base"
        if tuned:
            return whole, whole, "a merged model; then the base"
        return quantized, [*quantized, *whole], "quantized base; base"

    def _filled_up(self, rows: int) -> int:
        """Return the rows that a pipeline works on: as many as its micro-batches divide."""
        return -(-rows // self.job.micro_batches) * self.job.micro_batches

    def _kept_beside(self, tokens: int) -> list[Term]:
        """Return what training keeps while so many tokens pass; in a pipeline's buffers are now these.

        A stage keeps what it hands on until all micro-batches are through.
        """
        sums = self._trained
        if not self.job.parallelism.pipelines:
            return sums.between_steps
        size, formula = sums.hidden_size(tokens), "T H x, but for the last part"
        received, sent = size * (not self.share.has_embeddings), size * (not self.share.has_head)
        return [
            *sums.weights(),
            *sums.optimizer_states(),
            Term(Kind.BUFFERS, "hidden states to receive", "T H x, all parts", received),
            activations("hidden states that were handed on", formula, sent * (1 - 1 / self.job.micro_batches)),
        ]

    def _autocast_copies(self) -> list[Term]:
        trained = sum(
            layers * sum(linear.cast_weights for linear in stack.linears if self.job.trains(linear))
            for stack, layers in self._trained.stacks
        )
        what = "autocast's copies of the trained matrices"
        return [numbers(Kind.WEIGHTS, what, trained * self.job.autocasts, self.job.arithmetic_bytes)]

    # -- a forward pass without gradients

    def _images(self, rows: int, looking: bool = False) -> list[Term]:
        """Return the images of so many rows, and what a vision tower made of them; `looking`: what it works on."""
        if not sees(self.architecture, self.job, self.share):
            return []
        job = replace(self.job, batch=replace(self.job.batch, rows=rows), micro_batches=1)
        tower = TowerActivations(self.architecture.tower, job)
        return [*tower.inputs(), *(tower.forward() if looking else tower.result())]

    def _layer(self, rows: int, length: int, target_length: int, a: int = 0, trains: bool = False) -> list[Term]:
        """Return what the widest layer works on, in numbers of `a` bytes, 0: those that training computes with.

        Hidden states (the embeddings, of which a stage lets go, the layer's input, its sum with the attention's result,
        and the norm of that), and what the MLP or the attention makes of the last. Where the model `trains`, a rank has
        its part of the layers, and an adapter's result may come beside the widest tensors.
        Eager attention repeats keys and values for each head, and makes scores, masked ones and their softmax in fp32;
        the layer keeps the last, and the mask, until it ends. `target_length` is that of an encoder-decoder's decoder.
        """
        job, is_eager, a = self.job, self.job.attention == "eager", a or self.job.arithmetic_bytes
        architecture = part_of_rank(self.architecture, job) if trains else self.architecture
        linears = [linear for stack in architecture.stacks for linear in stack.linears if trains and job.adapts(linear)]
        adapted = {linear.block for linear in linears if not linear.ends_block}
        states = 4 - (trains and job.parallelism.pipelines)
        of_mlp, mlp_formula = widest_of_mlp(architecture, a)
        of_mlp += architecture.intermediate * (1 + architecture.family.fuses_linears) * (Block.MLP in adapted)
        of_attention = (3 if is_eager else 5) + (Block.ATTENTION in adapted)
        crosses = [stack.kind == StackKind.CROSS_DECODER for stack in architecture.stacks]
        longest = max(target_length if each else length for each in crosses)
        tokens, pairs = rows * longest, rows * longest**2 * is_eager
        # a shorter format is cast to fp32 before; gpt-oss's stays, beside scores without and with what is learnt
        in_softmax = 3 * a if architecture.family.is_gpt_oss_like else a + 4 + (4 if a < 4 else 0)
        in_mlp = (tokens * of_mlp * a, pairs * (architecture.heads + 1) * a)
        of_scores = pairs * (architecture.heads * in_softmax + a)
        made, scores = max(in_mlp, (tokens * of_attention * architecture.query_size * a, of_scores), key=sum)
        formula = f"T ({states} H + max({mlp_formula}, {of_attention} Q)) a"
        hidden = states * tokens * architecture.hidden * a
        return [
            activations("hidden states, and what one layer makes of them", formula, hidden + made),
            activations("attention scores and their mask", "B heads S S x", scores),
            *([*self._trained.summed(rows * length), *self._dequantized_experts()] if trains else []),
        ]

    def _answers(self, a: int, answered: int, trains: bool = False) -> dict[str, list[Term]]:
        """Return the moments of generating a batch of answers; without new tokens, of finding its labels."""
        rows, length = answered * self.shape.beams, self.shape.prompt_length
        reading = [*self._layer(answered, length, length, a, trains), *self._images(answered)]
        if not self.shape.new_tokens:
            return {"labels": reading}
        size, last = rows * self.architecture.vocab * (a + 4), length + self.shape.new_tokens
        logits = Term(Kind.LOGITS, "logits of a token, and their fp32 copy", "B V (a + 4)", size)
        if len(self.architecture.stacks) > 1:
            return self._summaries(rows, logits, a)
        copy = Term(Kind.BUFFERS, "a layer's keys while a token is added", "B (S + N) K a", self._keys(rows, last, a))
        # of one token generate copies what each row's experts have (transformers/generation/utils.py:
        # `_optimize_model_for_decode`); both of an expert's matrices are there for a moment
        copies = self.architecture.experts > 0 and self.gpu.name != CPU_DEVICE
        width = 3 * self.architecture.intermediate * self.architecture.hidden * copies
        experts = Term(Kind.BUFFERS, "copies of the chosen experts", "3 B I H a", rows * width * a)
        return {
            "the prompts": [*self._cached(rows, length, a), *reading, logits],
            "the last new token": [*self._cached(rows, last, a), *self._layer(rows, 1, 1, a), copy, experts, logits],
        }

    def _summaries(self, rows: int, logits: Term, a: int) -> dict[str, list[Term]]:
        length = self.shape.prompt_length
        of_texts = self._cached(rows, length, a, "keys and values of the texts")
        new = self._cached(rows, self.shape.new_tokens, a, "keys and values of the new tokens")
        size = rows * length * self.architecture.hidden * a
        encoded = activations("encoder's output for each beam", "B W S H a", size)
        copies = Term(Kind.BUFFERS, "a layer's, before they are kept", "2 B W S K a", 2 * self._keys(rows, length, a))
        return {
            "the texts": self._layer(self._answered, length, 0, a),
            "the first new token": [*of_texts, encoded, copies, logits],
            "the last new token": [*of_texts, encoded, *new, *self._layer(rows, 0, 1, a), logits],
        }

    def _keys(self, rows: int, tokens: int, a: int) -> int:
        return rows * tokens * self.architecture.key_size * a

    def _cached(self, rows: int, tokens: int, a: int, what: str = "keys and values of all tokens") -> list[Term]:
        layers = sum(layers for stack, layers in self._whole.stacks if stack.kind != StackKind.ENCODER)
        return [Term(Kind.BUFFERS, what, "L B (S + N) 2 K a", 2 * layers * self._keys(rows, tokens, a))]
