"""What is not to be had is refused in one sentence; what is loaded, adapted and saved is what it seems."""

import json
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
    largest_difference,
    load_base_model,
    load_tokenizer,
    logit_tolerance,
    longest_readable,
)
from common.models.minilm import MINILM, minilm_folder
from common.models.trained_weights import (
    add_lora,
    head_modules,
    parameter_counts,
    train_linear_layers,
    train_own_weights,
)
from common.planning.architectures import MODEL_CONFIGS
from common.training.export import check_changes_logits

FP32 = 1e-5
CPU = {"": "cpu"}


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no config\.json"):
        check_model(str(tmp_path))
    shutil.copy(REPOSITORY / "assets" / "embedded_base" / "config.json", tmp_path)
    with pytest.raises(BadInputError, match="no weights"):
        check_model(str(tmp_path))


def test_an_uncached_id_offline_is_refused_with_the_command_that_fetches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInputError, match=r"HF_HUB_OFFLINE.*hf download nobody/no-such-model"):
        check_model("nobody/no-such-model")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("no route"), "cannot be reached"),
        (RepositoryNotFoundError("404", response=Mock()), "not on the Hugging"),
    ],
)
def test_an_id_that_cannot_be_fetched_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    monkeypatch.setattr("common.models.loading.HfApi.model_info", Mock(side_effect=error))
    with pytest.raises(BadInputError, match=said):
        check_model("nobody/no-such-model")


def test_a_folder_without_a_tokenizer_or_with_half_its_weights_is_refused(
    run_config: RunConfig, tmp_path: Path
) -> None:
    base, folder = REPOSITORY / "assets" / "embedded_base", tmp_path / "model"
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    (folder / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:1_000_000])
    run = replace(run_config, model=str(folder))
    with pytest.raises(BadInputError, match="The tokenizer of"):
        load_tokenizer(run)
    with pytest.raises(BadInputError, match="The weights of"):
        load_base_model(run, CPU)


@pytest.mark.parametrize("model", ["./no/folder", "/no/folder", "just-a-word"])
def test_what_is_neither_folder_nor_id_is_refused(model: str) -> None:
    with pytest.raises(BadInputError, match="is no folder"):
        check_model(model)


@pytest.mark.parametrize("model", ["assets/embedded_base", MINILM])
def test_the_revision_of_a_model_that_is_here_is_refused(model: str) -> None:
    with pytest.raises(BadInputError, match="model_revision is 'v1', but it is for models of the Hub"):
        check_model(model, "v1")


def test_lora_adapts_every_linear_layer_but_the_head_and_adds_nothing_yet(run_config: RunConfig) -> None:
    base = load_base_model(run_config, CPU)
    ids = torch.arange(10, 20).unsqueeze(0)
    before = base(ids).logits.detach()
    adapted = add_lora(base, run_config).eval()
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert all("lora_" in name for name in trained)
    assert len(trained) == 2 * 7 * base.config.num_hidden_layers
    assert not any("lm_head" in name for name in trained)
    assert torch.equal(before, adapted(ids).logits)


def test_rank_stabilised_scaling_is_alpha_over_root_rank(run_config: RunConfig) -> None:
    adapted = add_lora(load_base_model(run_config, CPU), replace(run_config, lora_r=4, lora_alpha=64))
    scales = {module.scaling["default"] for module in adapted.modules() if isinstance(module, LoraLayer)}
    assert scales == {32.0}


def test_a_tied_head_is_counted_once_and_multiplies(run_config: RunConfig) -> None:
    base = load_base_model(run_config, CPU)
    trained, multiplied = parameter_counts(base)
    assert multiplied == base.num_parameters() == trained


def test_unequal_logits_are_refused() -> None:
    logits = torch.tensor([[[10.0, -3.0, 0.5]]])
    assert largest_difference(logits, logits, "adapter", FP32) == 0
    for other in (logits + 1.5e-4, logits + 1e-2, logits * float("nan")):
        with pytest.raises(RuntimeError, match="not what was trained"):
            largest_difference(logits, other, "adapter", FP32)


def test_larger_logits_round_more_coarsely() -> None:
    """A run of two epochs ended with logits up to 20, and differences of 1.26e-4 by merging."""
    logits = torch.tensor([[[20.4, -3.0, 0.5]]])
    assert largest_difference(logits, logits + 1.3e-4, "merged model", FP32) > 1e-4
    with pytest.raises(RuntimeError, match="not what was trained"):
        largest_difference(logits, logits + 3e-4, "merged model", FP32)


def test_larger_models_round_more_coarsely_in_fp32_alone() -> None:
    base, larger = (LlamaConfig(hidden_size=size, num_hidden_layers=layers) for size, layers in ((128, 4), (2048, 16)))
    assert logit_tolerance("fp32", base) == FP32
    assert logit_tolerance("fp32", LlamaConfig(hidden_size=64, num_hidden_layers=2)) == FP32
    assert logit_tolerance("fp32", larger) == 16 * FP32
    assert logit_tolerance("bf16", larger) == logit_tolerance("bf16", base)


def test_the_tokenizer_pads_with_another_token_than_the_end(run_config: RunConfig) -> None:
    tokenizer = load_tokenizer(run_config)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def tiny_shape(folder: Path) -> Path:
    """A real architecture's config with sizes that a test can afford, and its real vocabulary."""
    config = json.loads((MODEL_CONFIGS / "qwen2.5-7b.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    layers = {"num_key_value_heads": 2, "layer_types": None, "max_window_layers": 2}
    path = folder / "tiny.json"
    path.write_text(json.dumps({**config, **sizes, **{k: v for k, v in layers.items() if k in config}}))
    return path


def test_random_weights_have_the_real_shape_and_are_the_same_each_time(run_config: RunConfig, tmp_path: Path) -> None:
    run = replace(run_config, model=str(tiny_shape(tmp_path)), weights="random")
    state = torch.random.get_rng_state()
    first, again = load_base_model(run, CPU), load_base_model(run, CPU)
    assert torch.equal(state, torch.random.get_rng_state())
    assert first.config.vocab_size == 152064
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert load_tokenizer(run).eos_token_id == first.config.eos_token_id


def test_shapes_are_found_by_hub_id_and_others_refused_with_those_known() -> None:
    assert any_shape_config("Qwen/Qwen2.5-7B-Instruct").hidden_size == 3584
    assert any_shape_config("assets/embedded_base").hidden_size == 128
    with pytest.raises(BadInputError, match=r"no shape of nobody/other.*llama-3\.1-8b"):
        any_shape_config("nobody/other")
    with pytest.raises(BadInputError, match="roberta-large is of the kind roberta, which does not continue a text"):
        load_tokenizer(RunConfig(model="roberta-large", weights="random"))


def test_linear_layers_alone_are_trained_and_not_the_head(run_config: RunConfig) -> None:
    model = load_base_model(run_config, CPU)
    assert len(train_linear_layers(model)) == 4 * 7
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert len(trained) == 4 * 7
    assert all(name.endswith("_proj.weight") for name in trained)


def test_some_linear_layers_or_all_weights_can_be_chosen(run_config: RunConfig) -> None:
    model = load_base_model(run_config, CPU)
    chosen = train_linear_layers(model, "q_proj,mlp.down_proj")
    assert {name.rpartition(".")[2] for name in chosen} == {"q_proj", "down_proj"}
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == {
        f"{name}.weight" for name in chosen
    }
    assert len(train_linear_layers(model, "all")) == len(list(model.parameters()))
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_name_that_matches_no_layer_is_refused(run_config: RunConfig) -> None:
    model = load_base_model(run_config, CPU)
    with pytest.raises(BadInputError, match="has 'c_attn', but no linear layer is called so: choose some of q_proj"):
        train_linear_layers(model, "q_proj,c_attn")
    with pytest.raises(BadInputError, match="'lm_head'"):
        train_linear_layers(model, "lm_head")


def test_a_trained_adapter_that_changes_nothing_is_refused(
    run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = {"input_ids": torch.arange(8).view(1, 8)}
    fresh = add_lora(load_base_model(run_config, CPU), run_config)
    fresh.save_pretrained(tmp_path)
    check_changes_logits(fresh, batch, tmp_path)
    assert "the adapter changes nothing" in capsys.readouterr().out  # nor was it trained
    trained = add_lora(load_base_model(run_config, CPU), run_config)
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
        assert torch.equal(weight, same), name
        assert torch.equal(weight, differs) != starts, name
        if starts:
            assert weight.std().item() == pytest.approx(first.config.initializer_range, rel=0.2)


def test_the_labels_of_the_data_stand_in_the_models_config(bert: RunConfig) -> None:
    config = load_base_model(bert, CPU).config
    assert tuple(config.id2label.values()) == LABELS
    assert config.label2id == {label: number for number, label in enumerate(LABELS)}
    assert config.num_labels == 6


def test_heads_are_called_as_the_models_have_them(bert: RunConfig, roberta: RunConfig) -> None:
    assert head_modules(load_base_model(bert, CPU), bert) == ["pooler", "classifier"]
    assert head_modules(load_base_model(roberta, CPU), roberta) == ["classifier"]


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_heads_are_trained_in_full_with_and_without_adapters(request: pytest.FixtureRequest, kind: str) -> None:
    run = request.getfixturevalue(kind)
    model = load_base_model(run, CPU)
    train_own_weights(model, replace(run, target_modules="query"))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    head = set(head_of(model))
    assert head < trained
    assert {name.split(".")[-2] for name in trained - head} == {"query"}
    adapted = add_lora(model, replace(run, technique="lora", target_modules="query"))
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert len(trained) == len(head) + 2 * TINY["num_hidden_layers"]
    assert all("modules_to_save" in name or "lora_" in name for name in trained)


def test_norms_of_a_head_start_at_one_and_biases_at_zero(tmp_path: Path) -> None:
    run = encoder(tmp_path / "modernbert", ModernBertModel(ModernBertConfig(**TINY)))
    head = head_of(load_base_model(run, CPU))
    assert head.keys() == {"head.dense.weight", "head.norm.weight", "classifier.weight", "classifier.bias"}
    assert head["head.norm.weight"].eq(1).all()
    assert head["classifier.bias"].eq(0).all()


def test_a_head_for_other_labels_is_started_anew(bert: RunConfig) -> None:
    config = BertConfig(vocab_size=30522, num_labels=3, **TINY)
    BertForSequenceClassification(config).save_pretrained(bert.model)
    stored = BertForSequenceClassification.from_pretrained(bert.model)
    model = load_base_model(bert, CPU)
    assert model.classifier.weight.shape == (6, 32)
    assert torch.equal(model.bert.pooler.dense.weight, stored.bert.pooler.dense.weight)
    assert model.classifier.bias.count_nonzero() == 0
    assert torch.equal(model.classifier.weight, load_base_model(bert, CPU).classifier.weight)


def test_a_head_for_the_same_labels_is_kept(bert: RunConfig) -> None:
    trained = load_base_model(bert, CPU)
    torch.nn.init.ones_(trained.classifier.weight)
    trained.save_pretrained(bert.model)
    assert load_base_model(bert, CPU).classifier.weight.eq(1).all()


def test_a_model_that_is_no_encoder_is_refused() -> None:
    with pytest.raises(BadInputError, match="is of the kind llama, but labels are predicted by encoders, such as BERT"):
        checked_config(RunConfig(task="classification", model="assets/embedded_base"))


def test_texts_longer_than_the_model_reads_are_refused(bert: RunConfig, roberta: RunConfig) -> None:
    checked_config(replace(bert, max_length=512))
    with pytest.raises(BadInputError, match=r"max_length is 513.* positions for 512 tokens: pass --max_length 512 or"):
        checked_config(replace(bert, max_length=513))
    checked_config(roberta)  # two of its 66 positions are for padding
    with pytest.raises(BadInputError, match="has positions for 64 tokens"):
        checked_config(replace(roberta, max_length=65))


FROM_PADDING = ("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta",
                "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")  # fmt: skip


@pytest.mark.parametrize("kind", ["bert", "convbert", "deberta-v2", *FROM_PADDING])
def test_a_text_may_be_as_long_as_the_model_reads_and_no_longer(kind: str) -> None:
    settings = {"vocab_size": 40, "pad_token_id": 1, "max_position_embeddings": 18, "embedding_size": 32}
    settings |= {"longformer": {"attention_window": 4}, "xmod": {"default_language": "en_XX"}}.get(kind, {})
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


def test_encoders_whose_heads_are_known_may_have_adapters(bert: RunConfig, roberta: RunConfig) -> None:
    for run in (bert, roberta):
        check_heads(replace(run, technique="lora", target_modules="query"))
