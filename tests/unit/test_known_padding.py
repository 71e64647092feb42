"""Masks of a batch whose padding is known: Transformers' own, and nothing is asked of the device for them."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from common.models.known_padding import _is_padded, padding_known
from tests.families import ENCODER_SIZES, SIZES

CONFIGS = {
    "decoder": ("llama", SIZES),
    "sliding window": ("mistral", {**SIZES, "sliding_window": 4}),
    "encoder": ("bert", ENCODER_SIZES),
}
NO_PADDING, PADDING = torch.ones(3, 9, dtype=torch.long), torch.ones(3, 9, dtype=torch.long)
PADDING[1, 6:] = 0


class Asked(TorchDispatchMode):
    """Counts the numbers that Python asks of a tensor."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    kind, sizes = CONFIGS[request.param]
    config = AutoConfig.for_model(kind, vocab_size=32, **sizes)
    return AutoModel.from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("mask", [NO_PADDING, PADDING], ids=["none padded", "one padded"])
def test_hidden_states_are_those_of_transformers_own_mask(model: torch.nn.Module, mask: torch.Tensor) -> None:
    batch = {"input_ids": torch.arange(27).view(3, 9), "attention_mask": mask}
    with torch.no_grad(), Asked() as before:
        expected = model(**batch).last_hidden_state
    with torch.no_grad(), padding_known(batch), Asked() as known:
        found = model(**batch).last_hidden_state
    always_needs_mask = getattr(model.config, "sliding_window", None) is not None
    assert (before.count > 0) != always_needs_mask  # the control: this is what was asked
    assert known.count == 0
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


def test_where_no_row_is_padded_attention_gets_no_mask() -> None:
    """It would rule out the fastest kernels."""
    asked_for = {"batch_size": 3, "q_length": 9, "kv_length": 9}
    for mask, is_needed in ((NO_PADDING, False), (PADDING, True)):
        with padding_known({"attention_mask": mask}):
            made = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**asked_for, attention_mask=mask.bool())
        assert (made is not None) == is_needed


def test_what_is_known_of_a_batch_ends_with_it() -> None:
    with pytest.raises(ZeroDivisionError), padding_known({"attention_mask": PADDING}):
        raise ZeroDivisionError
    assert _is_padded.get() is None
