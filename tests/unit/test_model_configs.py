"""The architectures in assets/model_configs have the parameter counts that are published for the real models.

One of them is no real model: its count follows from its sizes.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from common.models.loading import EMBEDDED_BASE
from common.planning.architectures import read_architecture
from common.planning.model_configs import MODEL_CONFIGS

PUBLISHED = {  # where: assets/README.md
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "roberta-large": 355_412_057,
    "all-minilm-l6-v2": 22_713_216,
    "bart-large-cnn": 406_290_432,
    "smollm3-3b": 3_075_098_624,
    "olmo-2-0425-1b": 1_484_916_736,
    "olmo-3-7b": 7_298_011_136,
    "olmoe-1b-7b-0924": 6_919_161_856,
    "phi-4": 14_659_507_200,
    "phi-3-mini-4k": 3_821_079_552,
    "gemma-3-1b": 999_885_952,
    "gpt2": 124_439_808,
}
# the names' billions, to three digits; the exact counts could not be looked up
ROUNDED = {
    "smolvlm-instruct": 2_250_000_000,
    "idefics3-8b-llama3": 8_460_000_000,
    "mixtral-8x7b": 46_700_000_000,
    "qwen3-30b-a3b": 30_500_000_000,
    "gpt-oss-20b": 20_900_000_000,
}
EMBEDDING, LINEAR_LAYERS, NORMS = 1536 * 512, 8 * (4 * 512 * 512 + 3 * 512 * 1536), 17 * 512
INVENTED = {"llama-27m": EMBEDDING + LINEAR_LAYERS + NORMS}
OF_PACKAGE = {"smollm2-135m": 134_515_008}  # counted in what `make real` writes
# in the order of its file: a layer's attention (32 heads of 128, 8 for keys and values), MLP and norms; both ends
MINISTRAL_LAYER = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096
OF_LIBRARY = {"ministral-3-8b": 34 * MINISTRAL_LAYER + 2 * 131072 * 4096 + 4096}
COUNTS = {
    **PUBLISHED,
    **INVENTED,
    **OF_PACKAGE,
    **OF_LIBRARY,
    **{name: pytest.approx(count, rel=0.002) for name, count in ROUNDED.items()},
}


def parameters(config: transformers.PreTrainedConfig, name: str) -> int:
    """Parameters of the model, tied ones once. On `meta` it takes no memory."""
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("path", sorted(MODEL_CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_parameters_are_the_published_and_the_planned_ones_and_facts_are_known_ones(path: Path) -> None:
    facts, config = json.loads(path.read_text()), AutoConfig.from_pretrained(path)
    published, architecture = config.architectures[0], read_architecture(path.stem)
    # a bare encoder is planned with the head that it was trained with
    planned = published.replace("BertModel", "BertForMaskedLM")
    counts = {name: parameters(config, name) for name in {published, planned}}
    assert counts[published] == COUNTS[path.stem]
    assert architecture.parameters == sum(architecture.by_part().values()) == counts[planned]
    sources = dict.fromkeys(INVENTED, "invented: ") | dict.fromkeys(ROUNDED, "recalled: ")
    sources |= dict.fromkeys(OF_PACKAGE, "the GGUF file of the package ")
    sources |= dict.fromkeys(OF_LIBRARY, "the defaults of the package transformers ")
    assert facts.pop("_source").startswith(sources.get(path.stem, "https://huggingface.co/"))
    check_facts(facts, config)
    assert config.dtype == (torch.bfloat16 if "dtype" in facts else None)


def test_every_count_is_of_a_file_and_the_invented_model_has_the_linear_layers_of_its_name() -> None:
    assert {path.stem for path in MODEL_CONFIGS.glob("*.json")} == COUNTS.keys()
    assert round(LINEAR_LAYERS / 1e6) == 27
    invented, embedded = (
        AutoConfig.from_pretrained(path) for path in (MODEL_CONFIGS / "llama-27m.json", EMBEDDED_BASE)
    )
    assert invented.vocab_size == embedded.vocab_size


def check_facts(facts: dict, config: transformers.PreTrainedConfig) -> None:
    """Compare each fact with what Transformers reads, also those of a vision tower and of the language layers."""
    unread = {"rope_scaling", "rope_theta", "dtype"}  # Transformers 5 reads the first two into `rope_parameters`
    for key in facts.keys() - unread:
        part = getattr(config, key)
        if isinstance(part, transformers.PreTrainedConfig):
            check_facts(facts[key], part)
        else:
            assert facts[key] == part, key
    if "rope_theta" in facts:
        rope = {**(facts.get("rope_scaling") or {}), "rope_theta": facts["rope_theta"]}
        assert rope.items() <= config.rope_parameters.items()
