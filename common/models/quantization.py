"""Quantize base models to 4 bits (QLoRA), count their weights, and dequantize them."""

from contextlib import AbstractContextManager

import torch
from torch.nn.utils import parametrize
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.base.errors import check_installed
from common.base.loggers import silent
from common.base.run_config import RunConfig
from common.models.shards import EXPERTS_NDIM, global_numel, has_fused_experts, is_quantized

ARITHMETIC_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_bitsandbytes(run: RunConfig) -> None:
    """Refuse quantized weights where bitsandbytes is missing."""
    if run.method.quantizes:
        asked_by = f"technique is qlora and quantization {run.quantization}"
        instead = "`pip install bitsandbytes`, or pass --technique lora in a folder of 2.1"
        check_installed("bitsandbytes", asked_by, instead)


def quantization_config(run: RunConfig) -> BitsAndBytesConfig:
    """Return the configuration of NF4 as `run` asks; products are computed in the run's arithmetic.

    With FSDP the numbers are stored in tensors of that dtype: FSDP flattens and divides only tensors of one dtype.
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
    """Freeze a quantized model for adapters, and turn off bitsandbytes' repacking on CPUs.

    PEFT's `prepare_model_for_kbit_training` casts the other modules to fp32, which flash attention does not accept.

    On CPUs with AVX512-BF16 bitsandbytes repacks a weight when it is first used without gradients: from then on its
    scales have 8 bits, its products are computed in bf16, and *no gradient passes through it any more*.
    """
    for module in list(model.modules()):
        if is_quantized(module):
            module.support_avx512bf16_for_cpu = False
        else:
            _dequantize_when_read(module)
    return model.requires_grad_(False)


def quantize_experts(config: BitsAndBytesConfig, _: str, module: torch.nn.Module) -> None:
    """Store a layer's experts in 4 bits as soon as they are read; `prepare_quantized` lets the layer compute."""
    from bitsandbytes.nn import Params4bit  # here: few runs have it

    how = {"quant_type": config.bnb_4bit_quant_type, "compress_statistics": config.bnb_4bit_use_double_quant}
    for name, weight in list(module.named_parameters(recurse=False)) if has_fused_experts(module) else ():
        if weight.ndim == EXPERTS_NDIM:
            module._parameters[name] = Params4bit(weight.data, **how).to(weight.device)


def _dequantize_when_read(experts: torch.nn.Module) -> None:
    """Let experts that `quantize_experts` stored be dequantized while their layer computes."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit_prequantized  # here: few runs have it

    for name, weight in list(experts.named_parameters(recurse=False)):
        if state := getattr(weight, "quant_state", None):
            replace_parameter_4bit_prequantized(experts, name, state.as_dict(packed=True), weight.device)
            (reading,) = experts.parametrizations[name]
            weight.quant_state = reading.quant_state  # else the scales would be there twice, and not move with it
            experts._state_dict_hooks.clear()  # it adds keys for scales, which checkpoints would look for in vain


def weight_counts(model: torch.nn.Module) -> int:
    """Return the number of a model's weights; a tensor of 4-bit weights holds two or more in each of its elements."""
    states = {  # of layers: where FSDP has put shards in the tensor's place, the layer alone knows
        id(module.weight): getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)
        for module in model.modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor)
    }
    of_weights = ((each, states.get(id(each)) or getattr(each, "quant_state", None)) for each in model.parameters())
    return sum(global_numel(weight) if state is None else state.shape.numel() for weight, state in of_weights)


def forked_random_numbers(*devices: str | int | torch.device) -> AbstractContextManager[None]:
    """Let what is drawn within, on the host and these devices, count for nothing afterwards."""
    return torch.random.fork_rng(devices=[device for device in map(torch.device, devices) if device.type == "cuda"])


def quantize_as(
    planned: torch.nn.Parameter, weight: torch.nn.Parameter, device: str | torch.device
) -> torch.nn.Parameter:
    """Return `weight` in 4 bits on `device` where `planned`, which stood in its place on `meta`, was to be so."""
    if not hasattr(planned, "quant_type"):
        return weight
    from bitsandbytes.nn import Params4bit  # here: few runs have it

    return Params4bit(weight.data, requires_grad=False, **planned.__dict__).to(device)


def dequantized(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with ordinary weights in `dtype`: each of its 4-bit numbers times its block's scale."""
    for module in filter(parametrize.is_parametrized, list(model.modules())):
        for name in list(module.parametrizations):
            experts = torch.nn.Parameter(getattr(module, name), requires_grad=False)
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            setattr(module, name, experts)
    with silent("transformers.integrations.bitsandbytes"):  # it says the dtype that is asked for here
        plain = model.dequantize(dtype=dtype)
    _restore_conv1d(plain)
    for weight in plain.parameters():  # not buffers: rotary frequencies stay in fp32
        weight.data = weight.data.to(dtype)
    return plain


def _restore_conv1d(model: PreTrainedModel) -> None:
    # GPT-2's own linear layers, whose matrices are transposed: quantizing made them `Linear`
    with torch.device("meta"):
        original = type(model)._from_config(model.config)
    for name, module in original.named_modules():
        if isinstance(module, Conv1D):
            linear = model.get_submodule(name)
            module.weight = torch.nn.Parameter(linear.weight.T.contiguous(), requires_grad=False)
            module.bias = linear.bias
            model.set_submodule(name, module)
