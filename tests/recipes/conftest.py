"""What recipes share: runs that must end well, and tiny models at their random start, for what must be equal."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoProcessor,
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from tests.families import make_tiny
from tests.fixtures import TINY_ENCODER, Finished
from tests.recipes.folders import BASE, VISION_BASE

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "initializer_range": 0.1}  # fmt: skip
"""Sizes are multiples of bitsandbytes' blocks of 64; two layers, one for each stage of a pipeline. With the libraries'
`initializer_range` of 0.02 a model of this size is little but its residual stream, and a wrong gradient hardly seen."""


@pytest.fixture
def completed(run_workflow: Callable[..., Finished]) -> Callable[..., Finished]:
    """As `run_workflow`, for a run that has to complete."""

    def run(launcher: str, *overrides: str, **options: object) -> Finished:
        done = run_workflow(launcher, *overrides, **options)
        assert done.exit_code == 0, done.output
        assert done.record["status"] == "completed"
        return done

    return run


def text_settings(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    return {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "tie_word_embeddings": True,
            "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
            **TINY}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with tied embeddings, with the embedded base's tokenizer and chat template."""
    torch.manual_seed(0)
    tokenizer, folder = AutoTokenizer.from_pretrained(BASE), tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**text_settings(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def strong_summarizer(tmp_path_factory: pytest.TempPathFactory, tiny_summarizer: str) -> str:
    """The tiny BART with weights as large as the other tiny models have, for the same reason."""
    model, folder = AutoModelForSeq2SeqLM.from_pretrained(tiny_summarizer), tmp_path_factory.mktemp("strong-bart")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
                module.weight *= TINY_ENCODER["initializer_range"] / model.config.init_std
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_summarizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_vision_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Idefics3 for pictures of 64 by 64 pixels, with the embedded one's processor."""
    torch.manual_seed(0)
    processor, folder = AutoProcessor.from_pretrained(VISION_BASE), tmp_path_factory.mktemp("idefics3")
    text = {"model_type": "llama", **text_settings(processor.tokenizer)}
    vision = {"image_size": 64, "patch_size": 8, **TINY, "hidden_size": 32}
    config = Idefics3Config(image_token_id=processor.image_token_id, scale_factor=2, tie_word_embeddings=True,
                            text_config=text, vision_config=vision)  # fmt: skip
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two families whose layers differ: with linear attention, and with embeddings for each layer.

    Weights start so large that no two words of the base's answers are equal but for rounding.
    """
    starts, root = {"qwen3_5_text": 0.1, "gemma4_text": 0.2}, tmp_path_factory.mktemp("families")
    return {family: make_tiny(family, root / family, initializer_range=size) for family, size in starts.items()}


@pytest.fixture(scope="session")
def tiny_models(
    tiny_chat_model: str,
    encoders: dict[str, str],
    strong_summarizer: str,
    tiny_vision_model: str,
    tiny_families: dict[str, str],
) -> dict[str, str]:
    """By task, the folder of a tiny model; and by its name, of another one."""
    return {
        "chat": tiny_chat_model,
        "classification": encoders["bert"],
        "summarization": strong_summarizer,
        "visual_questions": tiny_vision_model,
        "preferences": tiny_chat_model,
        "rewards": tiny_chat_model,
        "roberta": encoders["roberta"],
        **tiny_families,
    }
