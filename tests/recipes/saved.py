"""What runs saved, loaded with plain libraries."""

from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.folders import BASE


def logits_of(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    """Of a question, by the tokenizer in `folder`."""
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)("Who made it?")["input_ids"]])
    with torch.no_grad():
        return model.eval()(ids).logits


def check_adapter_and_merged(results: Path) -> None:
    """Both say the same, and something else than the base; the adapter is on all layers, and each part was trained."""
    adapter, merged = results / "adapter", results / "merged"
    base = AutoModelForCausalLM.from_pretrained(BASE)
    logits, before = logits_of(AutoModelForCausalLM.from_pretrained(merged), merged), logits_of(base, merged)
    assert (before - logits).abs().max() > 1e-2
    assert (logits_of(PeftModel.from_pretrained(base, adapter), merged) - logits).abs().max() < 1e-4
    weights = load_file(adapter / "adapter_model.safetensors")
    assert len(weights) == 2 * 7 * base.config.num_hidden_layers
    assert [name for name, weight in weights.items() if "lora_B" in name and not weight.any()] == []
    assert not (adapter / "README.md").exists()  # PEFT's, which names a path
