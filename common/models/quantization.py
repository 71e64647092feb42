"""Base models with their frozen weights in 4 bits (QLoRA): how they are quantized, loaded, looked at and de-quantized.

Imports bitsandbytes only inside functions: runs without quantized weights do without it.
"""

import importlib.util
import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.hardware.devices import GIB
from common.models.shards import global_numel

ARITHMETIC_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OF_BITSANDBYTES = ("bnb", "paged", "8bit")
"""Parts of the names of those of Transformers' optimizers that are bitsandbytes' own."""


def is_installed() -> bool:
    """Whether bitsandbytes can be imported; does not import it."""
    return importlib.util.find_spec("bitsandbytes") is not None


def check_bitsandbytes(run: RunConfig) -> None:
    """Refuse quantized weights and bitsandbytes' optimizers where bitsandbytes is missing.

    Raises:
        BadInputError: with the command that installs it.
    """
    if is_installed():
        return
    if run.method.quantizes:
        raise BadInputError(
            f"technique is qlora and quantization {run.quantization}, but bitsandbytes, which quantizes, is not "
            "installed: `pip install bitsandbytes`, or pass --technique lora in a folder of 2.1."
        )
    if any(part in run.optim for part in OF_BITSANDBYTES):
        raise BadInputError(
            f"optim is {run.optim}, which is part of bitsandbytes, and that is not installed: "
            "`pip install bitsandbytes`, or pass --optimizer adamw_torch_fused."
        )


def quantization_config(run: RunConfig) -> BitsAndBytesConfig:
    """NF4 as `run` asks; products are computed in the run's arithmetic.

    With FSDP what is stored looks like numbers of that arithmetic: FSDP flattens and divides only tensors of one type.
    """
    compute_dtype = ARITHMETIC_DTYPES[run.compute_dtype]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=run.quantization == "nf4-double",
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype if run.parallelism.uses_fsdp else torch.uint8,
    )


def prepare_quantized(model: PreTrainedModel) -> PreTrainedModel:
    """Ready to be trained on: all frozen, what is not quantized in fp32, and weights that stay as they are stored.

    On CPUs with AVX512-BF16 bitsandbytes repacks a weight when it is first used without gradients: from then on its
    scales have 8 significant bits, its products are computed in bf16, and *no gradient passes through it any more*,
    also in training. A baseline evaluation before the training is enough for that. So it is switched off.
    """
    for module in model.modules():
        if is_quantized(module):
            module.support_avx512bf16_for_cpu = False
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether this is a linear layer whose weights are stored in 4 bits; an adapter's wrapper of one is not."""
    return type(module._parameters.get("weight")).__name__ == "Params4bit"


def drop_quantized(model: torch.nn.Module) -> None:
    """Let go of the quantized weights: they cannot be moved to `meta` as others can."""
    for module in model.modules():
        if is_quantized(module):
            module.weight, module.quant_state = None, None


def weight_counts(model: torch.nn.Module) -> int:
    """All weights of a model; a tensor of 4-bit weights holds two or more in each of its elements.

    FSDP puts shards in the tensor's place, and how many weights it held is known to the layer alone.
    """
    states = {
        id(module.weight): getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)
        for module in model.modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor)
    }
    of_weights = ((weight, states.get(id(weight))) for weight in model.parameters())
    return sum(global_numel(weight) if state is None else state.shape.numel() for weight, state in of_weights)


# -- random weights


def random_model(
    run: RunConfig, config: PretrainedConfig, dtype: torch.dtype, attention: str, device: str | int, quantized: bool
) -> PreTrainedModel:
    """A model of a shape with random weights, made and quantized layer by layer: never whole in `dtype` on the device.

    The seed's weights are the same ones each time, quantized or not.
    """
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    quantizer = _quantizer(quantization_config(run)) if quantized else None
    if quantizer:
        quantizer.preprocess_model(model=model, device_map={"": device})
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(run.seed)
        for module in model.modules():
            if any(weight.is_meta for weight in module.parameters(recurse=False)):
                _materialise(model, module, device)
    model.tie_weights()
    model.to(device)  # buffers, which were made on the host
    if quantizer:
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    return model.eval()


def _quantizer(config: BitsAndBytesConfig) -> Any:
    from transformers.quantizers import AutoHfQuantizer

    return AutoHfQuantizer.from_config(config, pre_quantized=False)


@torch.no_grad()
def _materialise(model: PreTrainedModel, module: torch.nn.Module, device: str | int) -> None:
    """Give the weights of one module random values, as the model's class starts them, and quantize its matrix."""
    quantized = module.weight if is_quantized(module) else None
    if quantized is not None:
        module.weight = torch.nn.Parameter(torch.empty_like(quantized.data), requires_grad=False)
    module.to_empty(device=device, recurse=False)
    model._init_weights(module)
    if quantized is not None:
        from bitsandbytes.nn import Params4bit

        module.weight = Params4bit(module.weight.data, requires_grad=False, **quantized.__dict__).to(device)


# -- what is stored


@dataclass(frozen=True)
class StoredWeights:
    """What a quantized model's weights take."""

    stored_dtype: str
    """Of the tensors that hold the 4-bit numbers."""
    quantized_weights: int
    quantized_bytes: int
    """Of these, with their blocks' scales."""
    bits_per_quantized_weight: float
    other_weights: int
    """Embeddings, norms and head."""
    other_bytes: int
    unquantized_gib: float
    """Of all weights in the run's own number format, as LoRA keeps them."""

    @property
    def quantized_share(self) -> float:
        """Of all weights."""
        return self.quantized_weights / (self.quantized_weights + self.other_weights)

    @property
    def gib(self) -> float:
        """Of all weights, as they are stored."""
        return (self.quantized_bytes + self.other_bytes) / GIB

    def for_record(self) -> dict[str, object]:
        """Every figure."""
        return {**asdict(self), "quantized_share": self.quantized_share, "weights_gib": self.gib}


def stored_weights(model: torch.nn.Module, unquantized_dtype: torch.dtype) -> StoredWeights:
    """Count what a quantized model stores, adapters left out; LoRA would keep its base in `unquantized_dtype`."""
    quantized = {id(module.weight): module.weight for module in model.modules() if is_quantized(module)}
    others = [
        weight for name, weight in model.named_parameters() if id(weight) not in quantized and "lora_" not in name
    ]
    weights = sum(weight.quant_state.shape.numel() for weight in quantized.values())
    size = sum(_quantized_bytes(weight) for weight in quantized.values())
    other_weights = sum(weight.numel() for weight in others)
    return StoredWeights(
        stored_dtype=str(next(iter(quantized.values())).dtype).removeprefix("torch."),
        quantized_weights=weights,
        quantized_bytes=size,
        bits_per_quantized_weight=8 * size / weights,
        other_weights=other_weights,
        other_bytes=sum(weight.nbytes for weight in others),
        unquantized_gib=(weights + other_weights) * unquantized_dtype.itemsize / GIB,
    )


def _quantized_bytes(weight: Any) -> int:
    """Of the 4-bit numbers, their scales (and the scales of these), and the tables of levels."""
    state = weight.quant_state
    tensors = [weight.data, state.absmax, state.code]
    if state.nested:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    return sum(tensor.nbytes for tensor in tensors)


# -- back to ordinary weights


def dequantized(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same model with ordinary weights in `dtype`: each of its 4-bit numbers times its block's scale."""
    said_by_library = logging.getLogger("transformers.integrations.bitsandbytes")
    said_by_library.addFilter(_not_about_dtypes)
    plain = model.dequantize(dtype=dtype)
    said_by_library.removeFilter(_not_about_dtypes)
    for weight in plain.parameters():  # not buffers: rotary frequencies stay in fp32
        weight.data = weight.data.to(dtype)
    return plain


def _not_about_dtypes(record: logging.LogRecord) -> bool:
    return "modules are dequantized in" not in record.getMessage()


def relative_error(original: torch.nn.Module, quantized: torch.nn.Module) -> float:
    """Quantization's error: the 2-norm of what it changes in the quantized layers' weights, over that of the weights.

    Both models hold ordinary weights, `quantized` those that came back from 4 bits.
    """
    changed = wanted = 0.0
    others = dict(quantized.named_parameters())
    for name, weight in original.named_parameters():
        if weight.ndim == 2 and not torch.equal(weight, others[name]):
            changed += (weight.float() - others[name].float()).square().sum().item()
            wanted += weight.float().square().sum().item()
    return (changed / wanted) ** 0.5 if wanted else 0.0
