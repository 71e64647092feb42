"""Tiny models of each family whose rows several ranks share, beside one rank with whole rows. Run by torchrun.

torchrun --nproc_per_node 4 sequence_worker.py FOLDER: of each case the largest differences, and what was sent.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from common.base.run_config import RunConfig
from common.data.batches import lay_end_to_end
from common.data.rows import IGNORED_LABEL
from common.models.separate_rows import KINDS, separate_rows, without_mask
from common.runtime.rank import rank_started
from common.runtime.world import Rank
from common.training.answer_logits import keep_answer_logits, own_tokens
from common.training.usage import SentBytes
from tests.families import DECODERS
from tests.recipes.folders import SP
from tests.unit.ranks import largest, tell

RANKS, WORDS = 4, 200
LENGTHS = (5, 23, 9)
"""Of the rows: 37 tokens together, which neither two nor four ranks divide evenly."""
WINDOWS = {family: {"sliding_window": 6} for family in ("gemma3_text", "gemma4_text", "mistral", "mixtral", "phi3")}
"""Fewer tokens than a rank's part has: a window reaches over a seam."""
MIXTURES = ("mixtral", "qwen3_moe")
"""Experts' products are not there in fp64."""
IN_FP32 = (*MIXTURES, "gemma3_text", "gemma4_text")
"""In parts at least: Gemma's norms are."""
UNUSUAL = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "opt": {"dropout": 0.0}}


def rows() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(5, WORDS, (length,), generator=draw).tolist() for length in LENGTHS]
    unlearnt = [IGNORED_LABEL] * 3
    return [{"input_ids": row, "labels": [*unlearnt, *row[3:]]} for row in ids]


def tiny(family: str) -> torch.nn.Module:
    about = {**DECODERS[family].sizes, **WINDOWS.get(family, {}), **UNUSUAL.get(family, {})}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    config = AutoConfig.for_model(family, vocab_size=WORDS, **special, **about)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    return model if family in MIXTURES else model.double()


def loss_of(model: torch.nn.Module, inputs: dict[str, object]) -> torch.Tensor:
    targets = inputs.pop("labels")
    del inputs["shift_labels"]
    logits = model(**inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    loss.backward()
    return loss.detach()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def compared(family: str, sp_size: int, rank: Rank) -> dict[str, float]:
    from my_utils_full_finetuning_with_sp import divide_rows  # the run folder's

    whole, shared = tiny(family), tiny(family)
    separate_rows(whole)
    expected = loss_of(whole, without_mask(keep_answer_logits(lay_end_to_end(rows()))))
    run = RunConfig(technique="full", target_modules="all", parallel="ddp", devices=RANKS, sp_size=sp_size)
    divide_rows(shared, run)
    batch = without_mask(lay_end_to_end(rows()))
    with SentBytes() as sent:
        found = loss_of(shared, own_tokens(batch, rank.rank % sp_size, sp_size))
    sums = [found, *gradients(shared).values()]
    for each in sums:
        dist.all_reduce(each)  # of all groups, which have the same rows
        each /= RANKS // sp_size
    size = max(each.abs().max().item() for each in gradients(whole).values())
    return {
        "loss": abs(found - expected).item() / expected.item(),
        "gradients": largest(gradients(whole), gradients(shared)) / size,
        "sent_bytes": sent.sent_bytes,
    }


def main() -> None:
    sys.path.insert(0, str(SP))
    run = RunConfig(technique="full", target_modules="all", parallel="ddp", devices=RANKS, sp_size=2)
    with rank_started(run) as rank:
        tell({f"{family}, {size}": compared(family, size, rank) for family in sorted(KINDS) for size in (2, RANKS)})


if __name__ == "__main__":
    main()
