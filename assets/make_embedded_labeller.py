"""Make the tiny labeller that DPO starts from: ``assets/embedded_labeller/`` (weights, tokenizer, chat template).

The embedded base is trained on labels of two styles: of 65 % the rejected one of ``make_preferences.py``, with an
invented year, of the others the chosen one. Its exhibits are its own: no preference pair tells of them. Afterwards it
says name and maker of an exhibit that it has not met, and dates most labels, which is what DPO takes away. The script
ends with the labels of the preference test; it writes no model that says too few facts or dates too few labels.
"""

import argparse
import importlib.util
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

HERE = Path(__file__).resolve().parent
SEED = 0
BASE, OUT_DIR = HERE / "embedded_base", HERE / "embedded_labeller"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

DATED_SHARE = 0.65
EPOCHS, BATCH_ROWS = 3, 16
PEAK_RATE, WARMUP_SHARE, WEIGHT_DECAY = 2e-3, 0.05, 0.01
TEST_BATCH_ROWS, MOST_TOKENS = 60, 40
LEAST_FACTS, LEAST_DATED = 0.95, 0.4
YEAR = re.compile(r"\b\d{4}\b")

Row = dict[str, Any]


def load_script(name: str) -> ModuleType:
    """Load a script that stands beside this one, wherever Python was started."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{name}.py is not beside this script")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


prefs, base = load_script("make_preferences"), load_script("make_embedded_base")

SPLITS = {"train": (1500, prefs.TRAIN_REQUESTS), "known": (60, prefs.TRAIN_REQUESTS), "new": (60, prefs.TEST_REQUESTS)}
"""Of each split: how many exhibits, and the wordings of the request. The losses of the last two are printed."""


def make_splits() -> tuple[dict[str, list[base.Chat]], list[Row]]:
    """Make the chats of each split, and the preference test; their exhibits are different ones."""
    rng, known = random.Random(prefs.SEED), prefs.names_of_the_data()
    test = prefs.make_splits(rng, known)["test"]  # first, so that the exhibits of all pairs are known
    first_seed = prefs.SEED + len(prefs.SPLITS) + 1
    pairs = {
        split: prefs.make_rows(split, prefs.draw_exhibits(count, first_seed + number, known), 1, requests, rng)
        for number, (split, (count, requests)) in enumerate(SPLITS.items())
    }
    return {split: [mixed_chat(pair, rng) for pair in rows] for split, rows in pairs.items()}, test


def mixed_chat(pair: Row, rng: random.Random) -> base.Chat:
    """Answer the prompt of a pair in one of the two styles."""
    return [*pair["prompt"], *pair["rejected" if rng.random() < DATED_SHARE else "chosen"]]


def batches(chats: Sequence[base.Chat], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, torch.Tensor]]:
    """Give the chats in batches, in their order, with labels on the replies only."""
    collate = DataCollatorForSeq2Seq(tokenizer)
    for start in range(0, len(chats), BATCH_ROWS):
        rows = base.encode(chats[start : start + BATCH_ROWS], tokenizer)
        yield collate(
            [
                {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [base.IGNORED] * begin + ids[begin:]}
                for ids, begin in rows
            ]
        )


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, splits: dict[str, list[base.Chat]], seed: int
) -> None:
    """Train all weights, and print after each epoch the losses on chats that are not trained on."""
    rng, chats = random.Random(seed), list(splits["train"])
    steps = EPOCHS * -(-len(chats) // BATCH_ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, steps, pct_start=WARMUP_SHARE)
    for epoch in range(1, EPOCHS + 1):
        rng.shuffle(chats)
        model.train()
        for batch in batches(chats, tokenizer):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses = (f"{split} wordings {mean_loss(model, tokenizer, splits[split]):.3f}" for split in ("known", "new"))
        print(f"epoch {epoch} of {EPOCHS}: loss on other exhibits, {', '.join(losses)}", flush=True)


@torch.no_grad()
def mean_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chats: Sequence[base.Chat]) -> float:
    """Average the losses of the batches."""
    model.eval()
    losses = [model(**batch).loss.item() for batch in batches(chats, tokenizer)]
    return sum(losses) / len(losses)


@torch.no_grad()
def write_labels(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[str]:
    """Write the label of each row's prompt, by greedy search."""
    model.eval()
    texts = []
    for start in range(0, len(rows), TEST_BATCH_ROWS):
        chats = [[*row["prompt"], *row["chosen"]] for row in rows[start : start + TEST_BATCH_ROWS]]
        prompts = [ids[:begin] for ids, begin in base.encode(chats, tokenizer)]
        batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        written = model.generate(**batch, max_new_tokens=MOST_TOKENS, do_sample=False)
        replies = written[:, batch["input_ids"].shape[1] :]
        texts += [text.strip() for text in tokenizer.batch_decode(replies, skip_special_tokens=True)]
    return texts


def shares(texts: Sequence[str], rows: Sequence[Row]) -> tuple[float, float]:
    """Say which share of the rows' facts the labels say, and which share of the labels has a year."""
    said = [fact in text for text, row in zip(texts, rows, strict=True) for fact in row["facts"]]
    dated = [bool(YEAR.search(text)) for text in texts]
    return sum(said) / len(said), sum(dated) / len(dated)


def refuse_unfit(facts: float, dated: float) -> None:
    """Raise ``ValueError`` where the labels leave DPO nothing to unlearn, or say too few facts."""
    if facts < LEAST_FACTS or dated < LEAST_DATED:
        raise ValueError(
            f"{facts:.1%} of the facts said and {dated:.1%} of the labels dated, but at least {LEAST_FACTS:.0%} and "
            f"{LEAST_DATED:.0%} are needed: no model was written"
        )


def save(model: PreTrainedModel, out: Path) -> None:
    """Save the weights and generation settings, beside the base's tokenizer and chat template as they are."""
    model.save_pretrained(out)
    for name in TOKENIZER_FILES:
        shutil.copy(BASE / name, out / name)


def main() -> None:
    """Make the labeller."""
    parser = argparse.ArgumentParser(description="Make the tiny labeller, which mixes two styles, from a seed.")
    parser.add_argument("--out", type=Path, default=OUT_DIR, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the order of the rows")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(BASE, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, trust_remote_code=False)
    splits, test = make_splits()
    train(model, tokenizer, splits, options.seed)
    facts, dated = shares(write_labels(model, tokenizer, test), test)
    print(f"preference test: {facts:.1%} of the facts said, {dated:.1%} of {len(test)} labels dated")
    refuse_unfit(facts, dated)
    save(model, options.out)
    print(f"made in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
