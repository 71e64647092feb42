"""GRPO's step is TRL's own; answers depend on their seed alone; and what is said of rewards that cannot be."""

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from common.base.errors import BadInputError
from common.base.parsing import parse_overrides
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks import inputs
from common.checks.inputs import check_inputs
from common.data.answer_ends import Stops
from common.data.prompts import check_prompts, tokenize_prompts
from common.data.rows import Row, Splits
from common.data.splits import load_splits
from common.models.loading import EMBEDDED_BASE, load_base_model, load_tokenizer
from common.models.trained_weights import with_trained_weights
from common.planning.device_maps import whole_model_on
from common.runtime.rank import end_rank
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.tasks.sampling import Answers, answers_to, ended_answers, seed_of
from common.tasks.scoring import rewards_of
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
    rows = list(trainer.train_dataset)[:PROMPTS]
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


@pytest.mark.parametrize("technique", ["full", "lora"])
def test_later_updates_compare_with_the_model_that_answered_and_the_one_before_training(
    technique: str, loop_of: Callable, folder: tuple
) -> None:
    """Which of the first step are the same: the weights that training begins with."""
    workflow, utils = folder
    settings = {"beta": 0.5, "num_iterations": 2, "learning_rate": 0.05, "warmup_steps": 0, "max_steps": 1}
    loop = loop_of(technique, **settings)
    for ((prompts, _),) in loop.steps():
        answers = utils.sample_groups(loop, prompts)
        advantages = utils.advantages_in_groups(rewards_of(answers, loop.run), GROUP)
        ((batch, _),) = utils.batches_to_learn(loop, answers, advantages)
        with torch.no_grad():
            first = utils.log_probs_of(loop, loop.model, batch)
        for _ in range(2):
            now = utils.log_probs_of(loop, loop.model, batch)
            workflow.policy_loss(now, {**batch, "before": first, "reference": first}, loop.run).backward()
            loop.update()
    assert (now - first).abs().max() > 0.1
    log, rows = RunRecorder(replace(loop.run, run_name="by-the-workflow"), ALONE), load_splits(loop.run).train[:8]
    torch.manual_seed(0)
    model = load_base_model(loop.run, whole_model_on("cpu"))
    trained = workflow.train(log, model, loop.tokenizer, Splits(rows, rows[:4], []))
    for (name, weight), expected in zip(trained.model.named_parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, msg=name)


def moved(loop: TrainingLoop, by: float) -> LlamaForCausalLM:
    """The loop's model with weights that differ by so much."""
    other, generator = copy.deepcopy(loop.model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += by * torch.randn(weight.shape, generator=generator)
    return other


# -- answers


def test_an_answer_depends_on_its_seed_alone(loop_of: Callable) -> None:
    """And so neither on the batch, nor on the rank, nor on what was sampled before."""
    loop = loop_of()
    prompts = [loop.train_rows[number] for number in range(6)] * 2
    seeds = [seed_of(42, 0, number) for number in range(len(prompts))]
    together = answers_to(loop.model, loop.tokenizer, prompts, loop.run, seeds)
    assert together.ids[:6] != together.ids[6:]
    for place in (0, 5, 11):
        torch.rand(place)
        alone = answers_to(loop.model, loop.tokenizer, [prompts[place]], loop.run, [seeds[place]])
        assert (alone.ids[0], alone.texts[0], alone.ended[0]) == tuple(
            each[place] for each in (together.ids, together.texts, together.ended)
        )


def test_tokens_are_sampled_by_their_probabilities(loop_of: Callable) -> None:
    """At a temperature; of 3,000 samples a frequency is off by less than 5 standard deviations."""
    count, loop = 3000, loop_of(temperature=0.5, max_new_tokens=1, per_device_eval_batch_size=1000)
    prompt = loop.train_rows[0]
    found = answers_to(loop.model, loop.tokenizer, [prompt] * count, loop.run, range(count))
    with torch.no_grad():
        logits = loop.model(torch.tensor([prompt["input_ids"]])).logits[0, -1]
    expected = (logits / 0.5).softmax(-1)
    frequency = torch.tensor([ids[0] for ids in found.ids]).bincount(minlength=len(logits)) / count
    assert expected.max() > 0.02
    assert ((frequency - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1 / count).all()


def test_an_answer_ends_with_its_end_token_or_where_it_must(loop_of: Callable) -> None:
    loop = loop_of(max_new_tokens=20)
    with torch.no_grad():
        loop.model.lm_head.weight[loop.tokenizer.eos_token_id] *= 3  # which some answers begin to sample
    prompts = [loop.train_rows[0]] * 40
    answers = answers_to(loop.model, loop.tokenizer, prompts, loop.run, range(40))
    assert 0 < sum(answers.ended) < 40
    for ids, ended, text in zip(answers.ids, answers.ended, answers.texts, strict=True):
        assert ended == (ids[-1] == loop.tokenizer.eos_token_id)
        assert ids.count(loop.tokenizer.eos_token_id) == ended
        assert ended or len(ids) == 20
        assert "<|end|>" not in text


def test_an_answer_that_a_text_ends_has_no_padding(loop_of: Callable) -> None:
    loop = loop_of()
    *_, end = loop.tokenizer("Room", add_special_tokens=False).input_ids
    text, pad = loop.tokenizer.decode([end]), loop.tokenizer.pad_token_id
    stops = Stops((loop.tokenizer.eos_token_id,), (text,))
    ids = [[5, end, pad, pad], [5, 6, 7, 8], [5, 6, loop.tokenizer.eos_token_id, pad]]
    answers = ended_answers(loop.tokenizer, stops, [loop.train_rows[0]] * 3, ids)
    assert (answers.ids, answers.ended) == ([ids[0][:2], ids[1], ids[2][:3]], [True, False, True])
    assert text not in answers.texts[0]


def test_samples_are_the_models_own_whatever_its_generation_config_adds(loop_of: Callable) -> None:
    found = []
    for penalty in (1.0, 5.0):
        loop = loop_of()
        loop.model.generation_config.repetition_penalty = penalty
        found.append(answers_to(loop.model, loop.tokenizer, [loop.train_rows[0]] * 8, loop.run, range(8)).ids)
    assert found[0] == found[1]


def test_groups_that_agree_teach_nothing_and_a_group_adds_up_to_nothing(folder: tuple) -> None:
    assert folder[1].advantages_in_groups(torch.full((16,), 0.95), 8).abs().max() == 0, "0.95 has no exact mean"
    advantages = folder[1].advantages_in_groups(torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 2.0]), 3)
    assert advantages[:3].tolist() == [0, 0, 0]
    assert advantages[3:].sum().item() == pytest.approx(0, abs=1e-6)
    assert advantages[3:].tolist() == pytest.approx([-1, 0, 1], rel=1e-3)


def test_each_token_counts_as_much_in_batches_of_any_size(loop_of: Callable, folder: tuple) -> None:
    """Of the whole step (dapo), or of its answer (grpo): the gradients of small batches add up to those of a large."""
    workflow, utils = folder
    for loss_type in ("dapo", "grpo"):
        gradients = []
        for size in (8, 2):
            loop = loop_of(loss_type=loss_type, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
            answers = utils.sample_groups(loop, prompts_of(loop))
            batches = utils.batches_to_learn(
                loop, answers, utils.advantages_in_groups(rewards_of(answers, loop.run), 4)
            )
            assert [is_last for _, is_last in batches] == [False] * (8 // size - 1) + [True]
            for batch, _ in batches:
                now = utils.log_probs_of(loop, loop.model, batch)
                workflow.policy_loss(now, {**batch, "before": now.detach()}, loop.run).backward()
            gradients.append(loop.model.lm_head.weight.grad.clone())
            total = sum(batch["weights"].sum().item() for batch, _ in batches)
            assert total == pytest.approx(1)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


# -- rows


def rows_of(*found: object, **settings: Any) -> list[Row]:
    return list(
        check_prompts(
            ((row, f"rows.jsonl, row {n}") for n, row in enumerate(found, 1)), "rows.jsonl", run_of(**settings)
        )
    )


def test_a_prompt_is_a_text_or_messages_and_keeps_its_other_columns() -> None:
    text, messages, problem = rows_of(
        {"Prompt": "What is 1 + 1?", "Answer": "2", "system": "Be brief."},
        {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "chosen": "2", "facts": ["2"]},
        {"problem": "What is 1 + 1?", "solution": 2},
    )
    assert [message["role"] for message in text["messages"]] == ["system", "user", "assistant"]
    assert (text["columns"]["answer"], text["messages"][1]["content"]) == ("2", "What is 1 + 1?")
    assert messages["messages"] == problem["messages"]
    assert (messages["columns"], messages["facts"]) == ({"chosen": "2", "facts": ["2"]}, ["2"])
    assert problem["columns"] == {"solution": 2}
    assert rows_of({"ask": "Who?", "prompt": "no"}, prompt_column="ask")[0]["messages"][0]["content"] == "Who?"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "Who?"}, "has no prompt"),
        ({"prompt": ""}, "empty user message"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "user and assistant"),
        ("Who?", "should have a column `prompt`"),
    ],
)
def test_a_row_without_a_prompt_is_refused(row: object, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        rows_of(row)


def test_a_prompt_that_is_too_long_is_refused_and_not_cut(tiny: str) -> None:
    run = run_of(model=tiny, max_length=8)
    with pytest.raises(BadInputError, match="no end of its prompt within its first 8 tokens"):
        tokenize_prompts(rows_of({"prompt": "Who made the Royal Harp of Lindor, and when?"}), load_tokenizer(run), run)


# -- rewards that cannot be


def raises(**_: object) -> list[float]:
    raise KeyError("colour")


def nothing(**_: object) -> None:
    return None


def too_few(completions: list[Any], **_: object) -> list[float]:
    return [1.0] * (len(completions) - 1)


def infinite(completions: list[Any], **_: object) -> list[float]:
    return [float("inf")] * len(completions)


def a_text(completions: list[Any], **_: object) -> list[str]:
    return ["1.0"] * len(completions)


def needs_more(solution: list[str], **_: object) -> list[float]:
    return [1.0] * len(solution)


def for_none(completions: list[Any], **_: object) -> list[None]:
    return [None] * len(completions)


async def later(**_: object) -> list[float]:
    return []


def answered(*texts: str) -> Answers:
    (row,) = rows_of({"prompt": "Who?", "facts": ["Lathom"]})
    prompt = {"input_ids": [1], "asked": row}
    return Answers([prompt] * len(texts), [[2]] * len(texts), list(texts), [True] * len(texts))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", r"fails in test_rewards.py, line \d+: KeyError: 'colour'"),
        ("needs_more", r"fails: TypeError.* given facts, prompts"),
        ("nothing", "returns None for 2 answers"),
        ("too_few", r"returns \[1.0\] for 2 answers"),
        ("infinite", "finite number"),
        ("a_text", r"returns \['1.0', '1.0'\] for 2 answers"),
        ("for_none", "None for all 2 answers"),
    ],
)
def test_a_reward_that_cannot_be_is_one_sentence(name: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said) as refused:
        rewards_of(answered("a", "b"), run_of(reward=f"tests.unit.test_rewards:{name}"))
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"reward": ""}, "pass functions as module:function"),
        ({"reward": "no_such_module:score"}, "cannot be imported"),
        ({"reward": "broken_reward:score"}, "cannot be imported .SyntaxError"),
        ({"reward": "tests.unit.test_rewards:no_such"}, "cannot be imported"),
        ({"reward": "tests.unit.test_rewards:TINY"}, "no function"),
        ({"reward": "tests.unit.test_rewards:later"}, "no function that returns numbers"),
        ({"reward_weights": "1,2"}, "a number for each"),
        ({"reward_weights": "much"}, "a number for each"),
        ({"reward_weights": "nan"}, "a number for each"),
    ],
)
def test_what_names_no_reward_is_refused(
    settings: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward.py").write_text("def score(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    places = list(sys.path)
    with pytest.raises(BadInputError, match=said):
        rewards_of(answered("a"), run_of(**settings))
    assert sys.path == places


def test_a_reward_is_found_where_the_command_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_here.py").write_text("def score(completions, **_):\n    return [3] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    assert rewards_of(answered("a"), run_of(reward="rewards_of_here:score")).tolist() == [3]


def test_rewards_are_added_up_with_their_weights_and_none_counts_nothing() -> None:
    names = ",".join(f"tests.unit.test_rewards:{name}" for name in ("vowels", "for_some"))
    answers = answered("aa", "b")
    plain = rewards_of(answers, run_of()).tolist()
    assert rewards_of(answers, run_of(reward=names)).tolist() == pytest.approx([plain[0] + 1, plain[1]])
    weighted = rewards_of(answers, run_of(reward=names, reward_weights="-1, 0.5"))
    assert weighted.tolist() == pytest.approx([0.5 - plain[0], -plain[1]])
    names = names.replace("for_some", "for_none")
    assert rewards_of(answers, run_of(reward=names)).tolist() == plain, "one of them applies to no row of this batch"


def test_a_column_that_some_rows_lack_is_none_there() -> None:
    rows = rows_of({"prompt": "Who?"}, {"prompt": "Who?", "right": "Lathom"})
    prompts = [{"input_ids": [1], "asked": row} for row in rows]
    answers = Answers(prompts, [[2]] * 2, ["a", "b"], [True] * 2)
    assert rewards_of(answers, run_of(reward="tests.unit.test_rewards:has_right")).tolist() == [0, 1]


def has_right(right: list[str | None], **_: object) -> list[float]:
    return [float(each is not None) for each in right]


def for_some(completions: list[list[dict[str, str]]], **_: object) -> list[float | None]:
    return [1.0 if "a" in message["content"] else None for (message,) in completions]


def test_the_folders_rule_wants_names_a_full_stop_and_no_year(folder: tuple) -> None:
    labels = (
        "Label: Harp, by Lathom.",
        "Label: Harp.",
        "Label: Harp, by Lathom in 1714.",
        "Label: Harp, by Lathom",
        "",
    )
    said = [[{"role": "assistant", "content": label}] for label in labels]
    assert folder[1].names_without_year(said, [["Harp", "Lathom"]] * len(labels)) == [1, 0.5, 0, 0, -1]


def test_a_sum_is_right_by_its_last_number(folder: tuple) -> None:
    said = [[{"role": "assistant", "content": text}] for text in ("13 + 8 = 21.", "21 is 13 + 8", "many", "21")]
    assert folder[1].is_right(said, ["21"] * 4) == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_generations": 1}, "num_generations is 1"),
        ({"per_device_train_batch_size": 6}, "no whole number of prompts: pass --batch_size 8"),
        ({"loss_type": "sft"}, "loss_type is sft, but task is rewards"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        run_of(**settings)


def test_code_to_run_is_named_by_who_starts_a_run_and_not_in_a_file(tmp_path: Path) -> None:
    for line in ("reward: evil:run", "run_folder: evil"):
        (tmp_path / "of_others.yaml").write_text(line)
        with pytest.raises(BadInputError, match="leads to code to run"):
            parse_overrides(run_of(), ["--config", str(tmp_path / "of_others.yaml")])
    assert parse_overrides(run_of(), ["--reward", "mine:score"]).reward == "mine:score"


def test_what_teaches_nothing_is_said_after_the_first_step(
    loop_of: Callable, folder: tuple, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = loop_of(max_new_tokens=1)
    answers = folder[1].sample_groups(loop, prompts_of(loop))
    folder[1].note_rewards(loop, answers, torch.tensor([1.0, 0.0] * 4))
    said = capsys.readouterr().out
    assert ("100% of the groups differ" in said, "have the same reward" in said) == (True, False)
    assert ("no answer has ended" in said) == (not any(answers.ended))
    folder[1].note_rewards(loop, answers, torch.ones(8))
    assert "WARNING: all answers to a prompt have the same reward, such as 1" in capsys.readouterr().out
    assert loop.noted == pytest.approx({
        "count": 16, "reward": 12, "groups_that_differ": 8, "answer_tokens": 16, "ended_share": 2 * sum(answers.ended),
    })  # fmt: skip


def test_a_prompt_without_room_for_its_answer_is_refused(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Who made it, and when, and of what?"}\n' * 3)
    run = run_of(
        model=tiny, data=str(tmp_path / "rows.jsonl"), max_new_tokens=120, max_length=128, results_root=str(tmp_path)
    )
    with pytest.raises(BadInputError, match=r"takes 1\d\d tokens with its answer .* has positions for 128"):
        check_inputs(run)


# -- vLLM


SIGNATURE = inspect.signature(VLLMGeneration)


class EchoingVllm:
    """Stands in for TRL's class: answers with two tokens and an end token, and goes on behind it."""

    def __init__(self, model: LlamaForCausalLM, accelerator: object, tokenizer: Any, **settings: Any) -> None:
        SIGNATURE.bind(model, accelerator, tokenizer, **settings)
        self.model, self.tokenizer, self.settings, self.synced = model, tokenizer, settings, []

    def sync_weights(self) -> None:
        self.synced.append(self.model.lm_head.weight.sum().item())

    def generate(self, prompts: list[list[int]], images: None, num_generations: int) -> tuple:
        end = self.tokenizer.eos_token_id
        ids = [[prompt[1], prompt[2], end, prompt[3]] if n % 2 else prompt[:4] for n, prompt in enumerate(prompts)]
        return prompts, ids, None, None


def test_what_vllm_answers_is_taken_up_to_its_end_with_the_weights_of_now(
    loop_of: Callable, folder: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.generation.vllm_generation.VLLMGeneration", EchoingVllm)
    loop = loop_of(temperature=0.7)
    assert folder[1].vllm_of(loop) is None
    loop.run = replace(loop.run, device="cuda", use_vllm=True)
    vllm = folder[1].vllm_of(loop)
    about = {"temperature": 0.7, "max_completion_length": NEW_TOKENS, "enable_sleep_mode": True}
    assert vllm.settings.items() >= about.items()
    answers = folder[1].sample_groups(loop, prompts_of(loop), vllm)
    with torch.no_grad():
        loop.model.lm_head.weight += 1
    folder[1].sample_groups(loop, prompts_of(loop), vllm)
    assert vllm.synced[0] != vllm.synced[1]
    assert answers.ended == [False, True] * 4
    assert [len(ids) for ids in answers.ids] == [4, 3] * 4
    assert answers.ids[1][-1] == loop.tokenizer.eos_token_id


def test_vllm_is_refused_without_a_gpu_and_where_it_is_not_installed(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInputError, match="use_vllm is True, which is for GPUs: leave --use_vllm out"):
        run_of(use_vllm=True)
    for check in ("check_gpus", "check_threads"):
        monkeypatch.setattr(inputs, check, lambda run: None)
    run = run_of(model=tiny, max_length=100, use_vllm=True, device="cuda", gpu="RTX A6000 48GB")
    with pytest.raises(BadInputError, match="vllm is not installed: `pip install 'trl"):
        inputs.check_settings(replace(run, results_root=str(tmp_path)))
