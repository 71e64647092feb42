"""What is not to be had is refused in one sentence; what is loaded, adapted and saved is what it seems."""

import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from peft.tuners.lora import LoraLayer
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
)

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.models import families
from common.models.families import check_heads
from common.models.loading import (
    any_shape_config,
    check_model,
    checked_config,
    load_base_model,
    load_tokenizer,
    longest_readable,
)
from common.models.merging import check_changes_logits, largest_difference, logit_tolerance
from common.models.real_models import MINILM, minilm_folder
from common.models.trained_weights import (
    add_lora,
    head_modules,
    parameter_counts,
    train_linear_layers,
    train_own_weights,
)
from tests.unit.toys import tiny_shape

FP32 = 1e-5
CPU = {"": "cpu"}
INFO = "common.models.loading.HfApi.model_info"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def test_a_folder_is_refused_that_lacks_a_part_of_a_model(run_config: RunConfig, tmp_path: Path) -> None:
    base, run = REPOSITORY / "assets" / "embedded_base", replace(run_config, model=str(tmp_path))
    with pytest.raises(BadInputError, match=r"no config\.json"):
        check_model(run.model)
    shutil.copy(base / "config.json", tmp_path)
    with pytest.raises(BadInputError, match="no weights"):
        check_model(run.model)
    (tmp_path / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:1_000_000])
    with pytest.raises(BadInputError, match="The tokenizer of"):
        load_tokenizer(run)
    with pytest.raises(BadInputError, match=r"The model .* cannot be loaded"):
        load_base_model(run, CPU)


@pytest.mark.parametrize(
    ("what", "becomes", "said"),
    [
        ("huggingface_hub.constants.HF_HUB_OFFLINE", True, r"HF_HUB_OFFLINE.*hf download nobody/no-such-model"),
        (INFO, Mock(side_effect=OSError("no route")), "cannot be reached"),
        (INFO, Mock(side_effect=RepositoryNotFoundError("404", response=Mock())), "not on the Hugging"),
    ],
    ids=["offline", "no route", "not there"],
)
def test_an_id_that_cannot_be_fetched_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, what: str, becomes: object, said: str
) -> None:
    monkeypatch.setattr(what, becomes)
    with pytest.raises(BadInputError, match=said):
        check_model("nobody/no-such-model")


@pytest.mark.parametrize(
    ("model", "revision", "said"),
    [
        ("./no/folder", "", "is no folder"),
        ("/no/folder", "", "is no folder"),
        ("just-a-word", "", "is no folder"),
        ("assets/embedded_base", "v1", "model_revision is 'v1', but it is for models of the Hub"),
        (MINILM, "v1", "model_revision is 'v1', but it is for models of the Hub"),
    ],
)
def test_what_is_neither_folder_nor_id_and_a_revision_of_what_is_here_are_refused(
    model: str, revision: str, said: str
) -> None:
    with pytest.raises(BadInputError, match=said):
        check_model(model, revision)


def test_lora_adapts_every_linear_layer_but_the_head_and_adds_nothing_yet(run_config: RunConfig) -> None:
    base, ids = load_base_model(run_config, CPU), torch.arange(10, 20).unsqueeze(0)
    before = base(ids).logits.detach()
    adapted = add_lora(base, run_config).eval()
    assert len(trained_names(adapted)) == 2 * 7 * base.config.num_hidden_layers
    assert all("lora_" in name and "lm_head" not in name for name in trained_names(adapted))
    assert torch.equal(before, adapted(ids).logits)


def test_rank_stabilised_scaling_is_alpha_over_root_rank(run_config: RunConfig) -> None:
    adapted = add_lora(load_base_model(run_config, CPU), replace(run_config, lora_r=4, lora_alpha=64))
    assert {module.scaling["default"] for module in adapted.modules() if isinstance(module, LoraLayer)} == {32.0}


def test_a_tied_head_is_counted_once_and_multiplies(run_config: RunConfig) -> None:
    base = load_base_model(run_config, CPU)
    assert parameter_counts(base) == (base.num_parameters(), base.num_parameters())


@pytest.mark.parametrize(
    ("largest", "passes", "refused"),
    [(10.0, 0.0, 1.5e-4), (10.0, 0.0, 1e-2), (10.0, 0.0, float("nan")), (20.4, 1.3e-4, 3e-4)],
)
def test_unequal_logits_are_refused(largest: float, passes: float, refused: float) -> None:
    """Larger ones round more coarsely: a run ended with logits up to 20, and differences of 1.26e-4 by merging."""
    logits = torch.tensor([[[largest, -3.0, 0.5]]])
    assert largest_difference(logits, logits + passes, "merged model", FP32) == pytest.approx(passes, abs=2e-6)
    with pytest.raises(RuntimeError, match="not what was trained"):
        largest_difference(logits, logits + refused, "merged model", FP32)


def test_larger_models_round_more_coarsely_in_fp32_alone() -> None:
    small, base, larger = (
        LlamaConfig(hidden_size=size, num_hidden_layers=layers) for size, layers in ((64, 2), (128, 4), (2048, 16))
    )
    assert [logit_tolerance("fp32", config) for config in (small, base, larger)] == [FP32, FP32, 16 * FP32]
    assert logit_tolerance("bf16", larger) == logit_tolerance("bf16", base)


def test_the_tokenizer_pads_with_another_token_than_the_end(run_config: RunConfig) -> None:
    tokenizer = load_tokenizer(run_config)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def trained_names(model: torch.nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("technique", ["lora", "qlora"])
def test_random_weights_have_the_real_shape_and_are_the_same_each_time(technique: str, tmp_path: Path) -> None:
    run = RunConfig(technique=technique, model=tiny_shape(tmp_path, **SMALL), weights="random")
    state = torch.random.get_rng_state()
    first = load_base_model(run, CPU)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(1)
    assert all(map(torch.equal, first.parameters(), load_base_model(run, CPU).parameters()))
    assert (first.config.vocab_size, first.config.eos_token_id) == (152064, load_tokenizer(run).eos_token_id)
    assert torch.isfinite(first(torch.arange(10, 20).unsqueeze(0)).logits).all()


def test_shapes_are_found_by_hub_id_and_others_refused_with_those_known() -> None:
    models = ("Qwen/Qwen2.5-7B-Instruct", "assets/embedded_base")
    assert [any_shape_config(model).hidden_size for model in models] == [3584, 128]
    with pytest.raises(BadInputError, match=r"no shape of nobody/other.*llama-3\.1-8b"):
        any_shape_config("nobody/other")
    with pytest.raises(BadInputError, match="roberta-large is of the kind roberta, which is no decoder of texts alone"):
        load_tokenizer(RunConfig(model="roberta-large", weights="random"))


@pytest.mark.parametrize(
    ("targets", "count", "kinds"),
    [
        ("all-linear", 28, {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}),
        ("q_proj,mlp.down_proj", 8, {"q_proj", "down_proj"}),
    ],
)
def test_linear_layers_are_trained_that_are_chosen_and_not_the_head(
    run_config: RunConfig, targets: str, count: int, kinds: set[str]
) -> None:
    model = load_base_model(run_config, CPU)
    chosen = train_linear_layers(model, targets)
    assert (len(chosen), {name.rpartition(".")[2] for name in chosen}) == (count, kinds)
    assert trained_names(model) == {f"{name}.weight" for name in chosen}


def test_all_weights_are_trained_or_what_is_no_layer_refused(run_config: RunConfig) -> None:
    model = load_base_model(run_config, CPU)
    with pytest.raises(BadInputError, match="has 'c_attn', but no linear layer is called so: choose some of q_proj"):
        train_linear_layers(model, "q_proj,c_attn")
    with pytest.raises(BadInputError, match="'lm_head'"):
        train_linear_layers(model, "lm_head")
    assert len(train_linear_layers(model, "all")) == len(list(model.parameters())) == len(trained_names(model))


def test_a_trained_adapter_that_changes_nothing_is_refused(
    run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = {"input_ids": torch.arange(8).view(1, 8)}
    fresh, trained = (add_lora(load_base_model(run_config, CPU), run_config) for _ in range(2))
    fresh.save_pretrained(tmp_path)
    check_changes_logits(fresh, batch, tmp_path)
    assert "the adapter changes nothing" in capsys.readouterr().out  # nor was it trained
    for name, weight in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(weight)
    trained.save_pretrained(tmp_path)
    check_changes_logits(trained, batch, tmp_path)
    assert not capsys.readouterr().out
    with pytest.raises(RuntimeError, match="was trained, but changes no logit"):
        check_changes_logits(fresh, batch, tmp_path)


# -- classifiers

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LABELS = ("accessibility", "complaints", "lost property", "opening hours", "school groups", "tickets")


def encoder(folder: Path, model: PreTrainedModel) -> RunConfig:
    """A run with a tiny encoder, which `folder` holds, and the shipped messages."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm_folder()).save_pretrained(folder)
    return RunConfig(
        task="classification",
        technique="full",
        target_modules="all",
        model=str(folder),
        data="assets/visitor_messages",
        max_length=64,
    )


@pytest.fixture
def bert(tmp_path: Path) -> RunConfig:
    return encoder(tmp_path / "bert", BertModel(BertConfig(vocab_size=30522, **TINY), add_pooling_layer=False))


@pytest.fixture
def roberta(tmp_path: Path) -> RunConfig:
    config = RobertaConfig(vocab_size=30522, max_position_embeddings=66, **TINY)
    return encoder(tmp_path / "roberta", RobertaModel(config, add_pooling_layer=False))


def head_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    heads = head_modules(model, RunConfig(task="classification"))
    return {name: weight for name, weight in model.named_parameters() if any(f"{head}." in name for head in heads)}


def test_a_head_starts_the_same_for_the_same_seed_whatever_was_drawn_before(bert: RunConfig) -> None:
    first = load_base_model(bert, CPU)
    torch.rand(7)
    again, other = load_base_model(bert, CPU), load_base_model(replace(bert, seed=7), CPU)
    for (name, weight), same, differs in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        starts = name in head_of(first) and weight.ndim == 2
        assert (torch.equal(weight, same), torch.equal(weight, differs)) == (True, not starts), name
        if starts:
            assert weight.std().item() == pytest.approx(first.config.initializer_range, rel=0.2)


def test_the_labels_of_the_data_stand_in_the_models_config(bert: RunConfig) -> None:
    config = load_base_model(bert, CPU).config
    assert (config.num_labels, tuple(config.id2label.values())) == (6, LABELS)
    assert config.label2id == {label: number for number, label in enumerate(LABELS)}


@pytest.mark.parametrize(("kind", "heads"), [("bert", ["pooler", "classifier"]), ("roberta", ["classifier"])])
def test_heads_are_trained_in_full_with_and_without_adapters(
    request: pytest.FixtureRequest, kind: str, heads: list[str]
) -> None:
    run = replace(request.getfixturevalue(kind), target_modules="query")
    model, lora = load_base_model(run, CPU), replace(run, technique="lora")
    head = set(head_of(model))
    assert head_modules(model, run) == heads
    train_own_weights(model, run)
    assert head < trained_names(model)
    assert {name.split(".")[-2] for name in trained_names(model) - head} == {"query"}
    check_heads(lora)
    trained = trained_names(add_lora(model, lora))
    assert len(trained) == len(head) + 2 * TINY["num_hidden_layers"]
    assert all("modules_to_save" in name or "lora_" in name for name in trained)


def test_norms_of_a_head_start_at_one_and_biases_at_zero(tmp_path: Path) -> None:
    run = encoder(tmp_path / "modernbert", ModernBertModel(ModernBertConfig(**TINY)))
    head = head_of(load_base_model(run, CPU))
    assert head.keys() == {"head.dense.weight", "head.norm.weight", "classifier.weight", "classifier.bias"}
    assert (head["head.norm.weight"].unique().tolist(), head["classifier.bias"].unique().tolist()) == ([1], [0])


def test_a_head_for_other_labels_is_started_anew_and_one_for_the_same_kept(bert: RunConfig) -> None:
    stored = BertForSequenceClassification(BertConfig(vocab_size=30522, num_labels=3, **TINY))
    stored.save_pretrained(bert.model)
    model, again = load_base_model(bert, CPU), load_base_model(bert, CPU)
    assert torch.equal(model.bert.pooler.dense.weight, stored.bert.pooler.dense.weight)
    assert (model.classifier.weight.shape, model.classifier.bias.count_nonzero()) == ((6, 32), 0)
    assert torch.equal(model.classifier.weight, again.classifier.weight)
    torch.nn.init.ones_(model.classifier.weight)
    model.save_pretrained(bert.model)
    assert load_base_model(bert, CPU).classifier.weight.eq(1).all()


def test_a_model_that_is_no_encoder_is_refused() -> None:
    with pytest.raises(BadInputError, match="is of the kind llama, but labels are predicted by encoders, such as BERT"):
        checked_config(RunConfig(task="classification", model="assets/embedded_base"))


@pytest.mark.parametrize(
    ("kind", "longest", "said"),
    [
        ("bert", 512, r"max_length is 513.* positions for 512 tokens: pass --max_length 512 or"),
        ("roberta", 64, "has positions for 64 tokens"),  # two of its 66 are for padding
    ],
)
def test_texts_longer_than_the_model_reads_are_refused(
    request: pytest.FixtureRequest, kind: str, longest: int, said: str
) -> None:
    run = request.getfixturevalue(kind)
    checked_config(replace(run, max_length=longest))
    with pytest.raises(BadInputError, match=said):
        checked_config(replace(run, max_length=longest + 1))


FROM_PADDING = ("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta",
                "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")  # fmt: skip


@pytest.mark.parametrize("kind", ["bert", "convbert", "deberta-v2", *FROM_PADDING])
def test_a_text_may_be_as_long_as_the_model_reads_and_no_longer(kind: str) -> None:
    settings = {"vocab_size": 40, "pad_token_id": 1, "max_position_embeddings": 18, "embedding_size": 32}
    settings |= {
        "longformer": {"attention_window": 4},
        "luke": {"entity_vocab_size": 4, "entity_emb_size": 8},
        "xmod": {"default_language": "en_XX"},
    }.get(kind, {})
    config = AutoConfig.for_model(kind, **TINY, **settings)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    longest = longest_readable(config)
    assert longest == (16 if kind in FROM_PADDING else 18)
    with torch.no_grad():
        model(torch.full((1, longest), 5), torch.ones(1, longest, dtype=torch.long))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, longest + 1), 5), torch.ones(1, longest + 1, dtype=torch.long))


@pytest.mark.parametrize("kind", ["flaubert", "xlm", "eurobert"])
def test_an_encoder_whose_head_is_not_known_is_refused_unless_all_of_it_is_trained(kind: str, tmp_path: Path) -> None:
    sizes = {"emb_dim": 32, "n_layers": 2, "n_heads": 4} if kind != "eurobert" else TINY
    config = AutoConfig.for_model(kind, vocab_size=99, pad_token_id=1, **sizes)
    run = encoder(tmp_path / kind, AutoModelForSequenceClassification.from_config(config))
    check_heads(run)
    for changed in ({"technique": "lora", "target_modules": "all-linear"}, {"target_modules": "q_lin"}):
        with pytest.raises(BadInputError, match="dense" if kind == "eurobert" else "sequence_summary"):
            check_heads(replace(run, **changed))


def test_adapters_are_on_all_linear_layers_where_peft_has_no_list_of_names(
    bert: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "recipe_targets", lambda run: "qkv")
    monkeypatch.setitem(families.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, "bert", r".*\.(query|value)")
    run = families.suited_to_model(replace(bert, technique="lora", target_modules="qkv"))
    assert run.target_modules == "all-linear"
