"""Toy models that answer, whole on every rank and in stages that ranks share: logits, answers, parts. Run by torchrun.

torchrun --nproc_per_node 4 answering_worker.py FOLDER CASE...: what each rank finds of each case.
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate.utils import wait_for_everyone
from peft import PeftModel
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.models.answering import load_answering, sharing_of
from common.models.loading import load_base_model
from common.models.merging import save_merged
from common.models.saved_files import wait_for_parts
from common.models.trained_weights import add_lora
from common.runtime.rank import start_rank
from common.runtime.recorder import PeakMemory
from common.runtime.world import Rank
from common.tasks.predictions import predict_rows
from tests.unit.pipeline_worker import VOCABULARY, save_toy
from tests.unit.ranks import tell

SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}
CASES = {
    "Llama, tied": {},
    "Qwen3, untied": {"kind": "Qwen3", "tied": False},
    "Qwen2, in its later layers sliding": {"kind": "Qwen2", "config": SLIDING},
    "Roberta": {"kind": "Roberta", "tied": False},
    "Llama, random": {"weights": "random"},
    "Llama, 4 bits": {"technique": "qlora"},
    "Llama, 4 bits, random": {"technique": "qlora", "weights": "random"},
    "Llama, 4 bits, bf16, pp": {"technique": "qlora", "parallel": "pp", "precision": "bf16"},
}
LENGTHS = (9, 4, 7, 9, 2, 6, 5)


def padded_rows() -> dict[str, torch.Tensor]:
    """Rows of uneven lengths, padded on the left, as questions are."""
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, : max(LENGTHS) - length], ids[row, : max(LENGTHS) - length] = 0, 1
    return {"input_ids": ids, "attention_mask": mask}


def logits_by_row(model: PreTrainedModel, run: RunConfig, rank: Rank) -> torch.Tensor:
    """As a workflow's evaluation finds them: every row once, by the ranks together."""
    rows = padded_rows()
    log = SimpleNamespace(rank=rank, run=run, memory=PeakMemory(rank))

    def found(numbers: list[int]) -> list[list[float]]:
        batch = {name: tensor[numbers] for name, tensor in rows.items()}
        return model(**batch).logits.reshape(len(numbers), -1)[:, -3:].tolist()

    return torch.tensor(predict_rows(log, list(LENGTHS), "logits", "before", found, model))


def save_adapter(adapted: PeftModel, rank: Rank, folder: Path) -> None:
    """Write an adapter that was not just begun."""
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(7))
    if rank.is_main:
        adapted.save_pretrained(folder / "adapter")
    wait_for_everyone()


def merged_differs(run: RunConfig, rank: Rank, folder: Path) -> float:
    """By how much an adapter that was merged stage by stage differs from one that was merged whole."""
    save_adapter(add_lora(load_base_model(run, {"": "cpu"}, quantized=False), run), rank, folder)
    if rank.rank < 2:
        load = partial(load_answering, run, rank, quantized=False)
        save_merged(run, rank, folder / "adapter", load, folder / "merged")
    else:
        wait_for_parts()
    wait_for_everyone()
    saved = load_base_model(run, {"": "cpu"}, source=folder / "merged")
    whole = PeftModel.from_pretrained(load_base_model(run, {"": "cpu"}, quantized=False), folder / "adapter")
    pairs = zip(saved.parameters(), whole.merge_and_unload().parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


@torch.no_grad()
def compare(case: dict[str, object], folder: Path, rank: Rank) -> dict[str, float]:
    kind, is_random = case.get("kind", "Llama"), "weights" in case
    if rank.is_main:
        save_toy(folder, kind, case.get("tied", True), 2048 if is_random else VOCABULARY, **case.get("config", {}))
    wait_for_everyone()
    classifies = kind == "Roberta"
    parallel = "tp" if classifies else case.get("parallel", "fsdp")
    run = RunConfig(
        task="classification" if classifies else "chat",
        max_length=32,
        technique=case.get("technique", "full"),
        parallel=parallel,
        dp_replicate_size=2 if parallel == "fsdp" else 1,
        precision=case.get("precision", "fp32"),
        devices=rank.world_size,
        model=str(folder),
        weights=case.get("weights", "pretrained"),
        per_device_eval_batch_size=1,
        **({"micro_batches": 4, "per_device_train_batch_size": 4} if parallel == "pp" else {}),
        **({"lora_r": 2, "lora_dropout": 0.0} if "technique" in case else {}),
    )
    source = folder if classifies else None  # a tuned model, which has its head
    whole, staged = load_base_model(run, {"": "cpu"}, source), load_answering(run, rank, source)
    rows, sharing = padded_rows(), sharing_of(staged, rank)
    found = {
        "logits": (staged(**rows).logits - whole(**rows).logits).abs().max().item(),
        "logits by row": (logits_by_row(staged, run, rank) - logits_by_row(whole, run, rank)).abs().max().item(),
        "held": len(list(staged.parameters())) / len(list(whole.parameters())),
        "stages": sharing.stages,
    }
    hidden, own = whole.base_model(**rows).last_hidden_state, staged.base_model(**rows).last_hidden_state
    found["hidden"] = (hidden - own).abs().max().item() if sharing.is_last else 0.0
    if not classifies:
        answers = [each.generate(**rows, max_new_tokens=6, do_sample=False) for each in (whole, staged)]
        found["same answers"] = torch.equal(*answers)
    if parallel == "pp":
        save_adapter(add_lora(load_base_model(run, {"": "cpu"}), run), rank, folder)
        adapted = [PeftModel.from_pretrained(each, folder / "adapter")(**rows).logits for each in (whole, staged)]
        found["adapted"] = (adapted[0] - adapted[1]).abs().max().item()
    if kind == "Qwen3":
        with torch.enable_grad():
            found["merged"] = merged_differs(RunConfig(**{**vars(run), "technique": "lora", "lora_r": 2}), rank, folder)
    return found


if __name__ == "__main__":
    this_rank = start_rank(RunConfig(parallel="ddp", devices=4))
    tell({name: compare(CASES[name], Path(sys.argv[1]) / f"toy{n}", this_rank) for n, name in enumerate(sys.argv[2:])})
