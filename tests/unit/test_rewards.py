"""GRPO's step is TRL's own; answers depend on their seed alone; and what is said of rewards that cannot be."""

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from common.base.errors import BadInputError
from common.base.parsing import parse_overrides
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.prompts import check_prompts, tokenize_prompts
from common.data.rows import Row, Splits
from common.data.splits import load_splits
from common.models.loading import EMBEDDED_BASE, load_base_model, load_tokenizer
from common.models.trained_weights import with_trained_weights
from common.planning.device_maps import whole_model_on
from common.runtime.rank import end_rank
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.tasks.rewards import rewards_of
from common.tasks.sampling import Answers, answers_to, seed_of
from common.training.loop import TrainingLoop

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
GROUP, PROMPTS, NEW_TOKENS = 4, 2, 6
ALONE = Rank(0, 1, "cpu", "python")
FOLDER = REPOSITORY / "3.5_reinforcement_learning" / "run_0_cpu_x1"


def run_of(technique: str = "full", **settings: Any) -> RunConfig:
    own = {"target_modules": "all"} if technique == "full" else {"lora_dropout": 0.0, "target_modules": "all-linear"}
    usual = {"task": "rewards", "data": "assets/preferences", "reward": "tests.unit.test_rewards:vowels", "beta": 0.0,
             "num_generations": GROUP, "max_new_tokens": NEW_TOKENS, "report_to": "none",
             "per_device_train_batch_size": GROUP * PROMPTS}  # fmt: skip
    return RunConfig(technique=technique, **{**usual, **own, **settings})


def vowels(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """A reward that hardly ever is the same for two answers."""
    return [sum(map(message["content"].count, "aeiou")) + len(message["content"]) / 100 for (message,) in completions]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama whose answers are far from equally likely."""
    torch.manual_seed(0)
    tokenizer, folder = load_tokenizer(RunConfig(model=str(EMBEDDED_BASE))), tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.15,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **TINY,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The workflow of the run folder, and its utilities."""
    monkeypatch.syspath_prepend(FOLDER)
    return tuple(importlib.import_module(f"my_{kind}_reinforcement_learning") for kind in ("workflow", "utils"))


@pytest.fixture
def loop_of(tmp_path: Path, tiny: str) -> Iterator[Callable[..., TrainingLoop]]:
    def make(technique: str = "full", **settings: Any) -> TrainingLoop:
        run = run_of(technique, model=tiny, results_root=str(tmp_path), **settings)
        rows, log = load_splits(run).train[: 4 * PROMPTS], RunRecorder(run, ALONE)
        torch.manual_seed(0)
        model = with_trained_weights(load_base_model(run, whole_model_on("cpu")), run)
        return TrainingLoop(model, load_tokenizer(run), Splits(rows, rows[:4], []), log)

    yield make
    end_rank()


def prompts_of(loop: TrainingLoop, count: int = PROMPTS) -> dict[str, Any]:
    return loop.collated([loop.train_rows[number] for number in range(count)])


def trainer_of(loop: TrainingLoop, answers: Answers, tiny: str, folder: Path) -> GRPOTrainer:
    """TRL's trainer of the same weights, to whom the model has answered the same."""
    run = loop.run
    of_prompt = {"prompt_ids": [row["input_ids"] for row in answers.prompts], "completion_ids": answers.ids}
    rows = [{"prompt": row["asked"]["messages"][:-1]} for row in answers.prompts[::GROUP]]
    args = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", loss_type=run.loss_type, beta=run.beta,
        epsilon=run.epsilon, temperature=run.temperature, num_generations=GROUP, disable_dropout=True,
        per_device_train_batch_size=run.per_device_train_batch_size, gradient_accumulation_steps=1,
        max_completion_length=NEW_TOKENS, shuffle_dataset=False,
    )  # fmt: skip
    return GRPOTrainer(
        tiny, [vowels], args, train_dataset=Dataset.from_list(rows * 4), processing_class=loop.tokenizer,
        rollout_func=lambda prompts, trainer: {**of_prompt, "logprobs": [[0.0] * len(ids) for ids in answers.ids]},
    )  # fmt: skip


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize(("beta", "by"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.02)], ids=["", "divergence", "clipped"])
def test_loss_and_gradients_are_those_of_trl(
    loss_type: str, beta: float, by: float, loop_of: Callable, folder: tuple, tiny: str, tmp_path: Path
) -> None:
    """Rewards and advantages, too; the model before training is other weights where the loss reads it."""
    workflow, utils = folder
    loop = loop_of(loss_type=loss_type, beta=beta, temperature=0.8)
    answers = utils.sample_groups(loop, prompts_of(loop))
    advantages = utils.advantages_in_groups(rewards_of(answers, loop.run), GROUP)
    ((batch, is_last),) = utils.batches_to_learn(loop, answers, advantages)
    trainer = trainer_of(loop, answers, tiny, tmp_path)
    for model in (loop.model, trainer.model):
        model.double()  # in fp32 the places of padding alone make 2e-6
    before, reference = moved(loop, by), moved(loop, 0.01)
    rows = [row for row in trainer.train_dataset][:PROMPTS]
    if beta:
        trainer.ref_model = reference
    inputs = trainer._generate_and_score_completions([row for row in rows for _ in range(GROUP)])
    torch.testing.assert_close(sorted(inputs["advantages"].tolist()), sorted(advantages.tolist()))
    if by:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            inputs["old_per_token_logps"], _, _ = trainer._get_per_token_logps_and_entropies(
                before, ids, mask, inputs["completion_ids"].shape[1]
            )
    trainer.current_gradient_accumulation_steps = 1
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()
    with torch.no_grad():
        batch["before"] = utils.log_probs_of(loop, before, batch)
    batch["reference"] = utils.reference_log_probs(loop, reference, batch)
    loss = workflow.policy_loss(utils.log_probs_of(loop, loop.model, batch), batch, loop.run)
    loss.backward()
    assert is_last
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    of_trl = {name: weight.grad for name, weight in trainer.model.named_parameters()}
    largest = max(gradient.abs().max().item() for gradient in of_trl.values())
    for name, weight in loop.model.named_parameters():
        assert (weight.grad - of_trl[name]).abs().max() <= 1e-6 * max(1, largest), name
    assert largest > 0.01
    if by:
        ratio = (utils.log_probs_of(loop, loop.model, batch) - batch["before"]).exp()
        assert ((ratio - 1).abs() > loop.run.epsilon).any()


def moved(loop: TrainingLoop, by: float) -> LlamaForCausalLM:
    """The loop's model with weights that differ by so much."""
    other, generator = copy.deepcopy(loop.model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += by * torch.randn(weight.shape, generator=generator)
    return other
