"""Toy classifiers, whole and divided over two ranks: logits, losses, weights and what is saved. Run by torchrun.

torchrun --nproc_per_node 2 tensor_parallel_worker.py FOLDER CASE...: what each rank finds of each case.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.shards import full_weights, local_part
from common.runtime.rank import start_rank
from common.runtime.world import Rank
from common.training.optimizers import make_optimizer
from common.training.part import Part
from common.training.tensor_parallel import check_whole_weights_agree, clip_gradients, split_dimension
from common.training.usage import SentBytes
from tests.recipes.folders import CLASSIFICATION, module_of
from tests.unit.ranks import gradients_of, largest, tell

columns = module_of(CLASSIFICATION, "my_utils_tensor_parallel")

LAYERS, HIDDEN, ADAPTER_RANK, VOCABULARY, LENGTH, ROWS = 2, 48, 8, 64, 10, 6
LENGTHS = (10, 4, 7, 10, 2, 9)
LARGEST_NORM = 0.2
DROPPED_OUT = ("Roberta, full", "Bert, adapters", "Bert, adapters on all")
Batch = dict[str, torch.Tensor]
Case = tuple[str, str | list[str] | None]
Found = dict[str, float]


def cases() -> dict[str, Case]:
    targets = {"full": None, "adapters": ["query", "value"]}
    found = {f"{kind}, {how}": (kind, where) for kind in ("Bert", "Roberta") for how, where in targets.items()}
    return {**found, "Bert, adapters on all": ("Bert", "all-linear")}


def fill_at_random(model: torch.nn.Module, part: str) -> None:
    """Of weights that start at zero: those with a part of this name."""
    for name, weight in model.named_parameters():
        if part in name:
            torch.nn.init.normal_(weight, std=0.1)


def base_toy(kind: str, dropout: float = 0.0, heads: int = 4) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=heads * HIDDEN // 4,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        max_position_embeddings=LENGTH + 2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.1,
        num_labels=3,
    )
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    fill_at_random(model, "bias")  # else they may be added any number of times
    return model


def toy(kind: str, targets: str | list[str] | None, dropout: float = 0.0) -> PreTrainedModel | PeftModel:
    model = base_toy(kind, dropout).train()
    if targets is None:
        return model
    config = LoraConfig(r=ADAPTER_RANK, target_modules=targets, modules_to_save=["classifier"], lora_dropout=dropout)
    adapted = get_peft_model(model, config)
    fill_at_random(adapted, "lora_B")  # else half of the gradients would be zero
    return adapted


def batches(kind: str, count: int) -> list[Batch]:
    """Rows of uneven lengths, padded on the right; every third batch has fewer of them."""
    generator, found = torch.Generator().manual_seed(1), []
    padding, mask = {"Bert": 0, "Roberta": 1}[kind], (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).long()
    for number in range(count):
        ids = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator).where(mask == 1, padding)
        labels = torch.randint(0, 3, (ROWS,), generator=generator)
        rows = slice(3 if number % 3 == 2 else ROWS)
        found.append({"input_ids": ids[rows], "attention_mask": mask[rows], "labels": labels[rows]})
    return found


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(logits_of(model, batch), batch["labels"], reduction="sum") / len(batch["labels"])


Clip = Callable[[Iterable[torch.Tensor], float], torch.Tensor]


def trained(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: list[Batch], clip: Clip
) -> tuple[list[float], list[float]]:
    """Losses and norms of gradients, step by step; the learning rate falls as a scheduler says."""
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, len(steps))
    losses, norms = [], []
    for batch in steps:
        loss = loss_of(model, batch)
        loss.backward()
        norms.append(clip(model.parameters(), LARGEST_NORM).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


OPTIMIZERS = {"sgd": ("sgd", 0.5), "fused": ("adamw_torch_fused", 1e-3), "foreach": ("adamw_torch", 1e-3)}


def optimizer_of(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    optim, learning_rate = OPTIMIZERS[name]
    return make_optimizer(model, RunConfig(optim=optim, learning_rate=learning_rate, weight_decay=0.1))


def relative(first: list[float], second: list[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(first, second, strict=True))


def compare(case: Case, mesh: DeviceMesh, folder: Path, rank: Rank) -> Found:
    steps, one, divided = batches(case[0], 5), toy(*case), columns.split_by_plan(toy(*case), mesh)
    optimizer = optimizer_of(divided, "sgd")
    losses, norms = trained(one, optimizer_of(one, "sgd"), steps, clip_grad_norm_)
    own_losses, own_norms = trained(divided, optimizer, steps, partial(clip_gradients, device="cpu"))
    check_whole_weights_agree(divided)
    return {
        **passes(case, mesh, steps[0]),
        "losses": relative(own_losses, losses),
        "norms": relative(own_norms, norms),
        "smallest norm": min(norms),
        "weights": largest(dict(one.named_parameters()), whole_weights(divided)),
        "way": largest(dict(toy(*case).named_parameters()), whole_weights(divided)),
        "saved": saved_difference(case, divided, steps[0], folder, rank),
        "held of what is divided": held_share([each for each in divided.parameters() if is_divided(each)]),
        "held of the rest": held_share([each for each in divided.parameters() if not is_divided(each)]),
    }


def is_divided(weight: torch.Tensor) -> bool:
    return split_dimension(weight) is not None


def held_share(weights: list[torch.Tensor]) -> float:
    """How much of weights this rank holds."""
    return sum(local_part(weight).numel() for weight in weights) / sum(weight.numel() for weight in weights)


def passes(case: Case, mesh: DeviceMesh, batch: Batch) -> Found:
    one, divided, forward, backward = toy(*case), columns.split_by_plan(toy(*case), mesh), SentBytes(), SentBytes()
    columns.check_split(divided, mesh.size())
    with torch.no_grad():
        logits = (logits_of(divided, batch) - logits_of(one, batch)).abs().max().item()
    loss_of(one, batch).backward()
    with forward:
        loss = loss_of(divided, batch)
    with backward:
        loss.backward()
    gradients, own = gradients_of(one), gradients_of(divided)
    return {
        "logits": logits,
        "gradients": largest(gradients, own),
        "without a gradient": len(gradients.keys() ^ own.keys()),
        "forward bytes": forward.sent_bytes,
        "backward bytes": backward.sent_bytes,
    }


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every trained weight (of a model without adapters: every one), on each rank."""
    whole = full_weights([named for named in model.named_parameters() if named[1].requires_grad], True)
    return {name: weight.clone() for name, weight in whole.items()}


def saved_difference(case: Case, divided: torch.nn.Module, batch: Batch, folder: Path, rank: Rank) -> float:
    """Of the logits of what plain libraries load, and the divided model's."""
    Part.export(SimpleNamespace(model=divided, rank=rank, is_whole=False), folder)
    is_adapted = isinstance(divided, PeftModel)
    plain = (
        PeftModel.from_pretrained(base_toy(case[0]), folder) if is_adapted else type(divided).from_pretrained(folder)
    )
    with torch.no_grad():
        return (logits_of(plain.eval(), batch) - logits_of(divided.eval(), batch)).abs().max().item()


def said(what: Callable[..., object], *arguments: object) -> str:
    """What it was refused with; empty if it was not."""
    try:
        what(*arguments)
    except (BadInputError, RuntimeError) as error:
        return str(error)
    return ""


def said_after_dropout(case: Case, mesh: DeviceMesh, name: str, seed: int, precision: torch.dtype) -> str:
    """Of a divided model's copies after three steps with dropout, its masks from `seed`."""
    divided = columns.split_by_plan(toy(*case, dropout=0.1), mesh)
    optimizer = optimizer_of(divided, name)
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        trained(divided, optimizer, batches(case[0], 3), partial(clip_gradients, device="cpu"))
    return said(check_whole_weights_agree, divided)


def refusals(mesh: DeviceMesh, rank: Rank) -> dict[str, str]:
    """What is refused, and what is not, in words."""
    found = {}
    for name in DROPPED_OUT:
        for how, optimizer, seed, precision in (
            ("alike", "fused", 5, torch.float32),
            ("alike", "foreach", 5, torch.bfloat16),
            ("otherwise", "fused", rank.rank, torch.float32),
        ):
            said_of_it = said_after_dropout(cases()[name], mesh, optimizer, seed, precision)
            found[f"seeded {how}: {name}, {precision}"] = said_of_it
    three, with_nan = base_toy("Bert", heads=3), base_toy("Bert")
    found["three heads"] = said(columns.split_by_plan, three, mesh)
    found["three heads: divided"] = "".join(
        name for name, each in three.named_parameters() if isinstance(each, DTensor)
    )
    divided = columns.split_by_plan(base_toy("Bert"), mesh)
    with patch.dict(columns.PLAN):
        del columns.PLAN["output.dense"], columns.PLAN["intermediate.dense"]
        short = columns.split_by_plan(base_toy("Bert"), mesh)
    found["a part of the plan"] = said(columns.check_split, short, 2)
    found["three ranks"] = said(columns.check_split, divided, 3)
    parallelize_module(divided.bert.pooler, mesh, {"dense": ColwiseParallel()})
    found["pooler divided"] = said(columns.check_split, divided, 2)
    torch.nn.init.constant_(with_nan.classifier.bias, float("nan"))
    found["no number"] = said(check_whole_weights_agree, with_nan)
    return found


def main() -> None:
    rank = start_rank(RunConfig(task="classification", technique="full", parallel="tp", devices=2))
    mesh, folder = init_device_mesh("cpu", (rank.world_size,)), Path(sys.argv[1])
    found = {name: compare(cases()[name], mesh, folder / str(number), rank) for number, name in enumerate(sys.argv[2:])}
    tell({**found, "refusals": refusals(mesh, rank)})


if __name__ == "__main__":
    main()
