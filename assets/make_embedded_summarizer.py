"""Make the tiny summarizer that 3.2 fine-tunes: ``assets/embedded_summarizer/`` (weights, tokenizer, beam search).

A BART of about one million parameters is trained from nothing on invented chats that are NOT those of
``assets/chat_summaries``: chats drawn from another seed. First it writes down a few turns, of which a tenth of the
tokens is hidden (BART's own way; without it the decoder did not find out within 1,300 steps how to take a name from the
chat, with it within 300). Then it notes what was settled in catchwords ("who: Ada, Ben; what: go bowling; day:
Tuesday; ..."). It has never seen a sentence of a summary, which is what fine-tuning teaches.
"""

import argparse
import importlib.util
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BatchEncoding,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

HERE = Path(__file__).resolve().parent
SEED = 20265
OUT_DIR = HERE / "embedded_summarizer"

START, PAD, END, UNKNOWN = "<s>", "<pad>", "</s>", "<unk>"
VOCABULARY, VOCABULARY_CHATS, MAX_POSITIONS = 900, 4000, 256
HIDDEN, LAYERS, HEADS, FFN = 128, 2, 4, 384
STEPS, DENOISING_SHARE, BATCH_ROWS, POOL_BATCHES = 1600, 0.6, 32, 16
TURNS, HIDDEN_SHARE = (1, 2, 2, 3), 0.1
PEAK_RATE, WARMUP_STEPS, WEIGHT_DECAY = 1e-3, 200, 0.01

Text = tuple[str, str]
"""What is read, and what is to be written."""


def load_chats_script() -> ModuleType:
    """Load ``make_chats.py``, which stands beside this script, wherever Python was started."""
    spec = importlib.util.spec_from_file_location("make_chats", HERE / "make_chats.py")
    if spec is None or spec.loader is None:
        raise ImportError("make_chats.py is not beside this script")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


chats = load_chats_script()


def corpus(seed: int) -> Iterator[dict[str, str]]:
    """Give chats with their notes, without end; none settles what a chat of the data settles."""
    rng = random.Random(seed)
    kept = {row["summary"] for rows in chats.make_splits().values() for row in rows}
    while True:
        row = chats.make_row(rng)
        if row["summary"] not in kept:
            yield {"dialogue": row["dialogue"], "notes": row["notes"]}


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE vocabulary; every text ends with the end token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, PAD, END, UNKNOWN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rows = itertools.islice(corpus(seed), VOCABULARY_CHATS)
    core.train_from_iterator((text for row in rows for text in row.values()), trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, core.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=START,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=MAX_POSITIONS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> BartForConditionalGeneration:
    """Make the untrained model."""
    sizes = {
        f"{side}_{what}": value
        for side in ("encoder", "decoder")
        for what, value in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", FFN))
    }
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=HIDDEN,
        max_position_embeddings=MAX_POSITIONS,
        dropout=0.0,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=None,
        **sizes,
    )
    return BartForConditionalGeneration(config)


def turns_to_write_down(seed: int) -> Iterator[Text]:
    """Give some turns of a chat twice, without end."""
    rng = random.Random(seed)
    for row in corpus(seed + 1):
        turns, count = row["dialogue"].split("\r\n"), rng.choice(TURNS)
        start = rng.randrange(len(turns) - count + 1)
        some = "\r\n".join(turns[start : start + count])
        yield some, some


def chats_to_note(seed: int) -> Iterator[Text]:
    """Give chats with their notes, without end."""
    return ((row["dialogue"], row["notes"]) for row in corpus(seed))


def batches(
    texts: Iterator[Text], tokenizer: PreTrainedTokenizerFast, seed: int, hidden_share: float
) -> Iterator[BatchEncoding]:
    """Give batches of texts of like length, without end; of what is read, a share of the tokens is hidden."""
    collate, rng = DataCollatorForSeq2Seq(tokenizer), random.Random(seed)
    while True:
        pool = sorted(itertools.islice(texts, BATCH_ROWS * POOL_BATCHES), key=lambda text: len(text[0]))
        groups = [pool[start : start + BATCH_ROWS] for start in range(0, len(pool), BATCH_ROWS)]
        rng.shuffle(groups)
        for group in groups:
            read, written = (tokenizer(list(side))["input_ids"] for side in zip(*group, strict=True))
            read = [hide(ids, tokenizer, rng, hidden_share) for ids in read]
            rows = zip(read, written, strict=True)
            yield collate(
                [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels} for ids, labels in rows]
            )


def hide(ids: list[int], tokenizer: PreTrainedTokenizerFast, rng: random.Random, share: float) -> list[int]:
    """Put the unknown token in place of some; the end stays."""
    unknown, end = tokenizer.unk_token_id, tokenizer.eos_token_id
    return [unknown if token != end and rng.random() < share else token for token in ids]


def train(model: BartForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> None:
    """Train the model to write down, then to note what was settled; the last steps' mean loss stands on the bar."""
    denoising = batches(turns_to_write_down(seed), tokenizer, seed, HIDDEN_SHARE)
    noting = batches(chats_to_note(seed + 2), tokenizer, seed, 0.0)
    first = round(steps * DENOISING_SHARE)
    work = itertools.chain(itertools.islice(denoising, first), itertools.islice(noting, steps - first))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP_STEPS, steps)
    model.train()
    mean_loss = 0.0
    with tqdm(total=steps, desc="training", mininterval=5.0) as bar:
        for step, batch in enumerate(work):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            mean_loss += (loss.item() - mean_loss) / min(step + 1, 50)
            bar.set_postfix(loss=f"{mean_loss:.3f}", refresh=False)
            bar.update()
    model.eval()


def save(model: BartForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save weights, tokenizer and the settings of its beam search."""
    model.generation_config = GenerationConfig(
        num_beams=4,
        max_new_tokens=64,
        decoder_start_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Make the base model."""
    parser = argparse.ArgumentParser(description="Make the tiny summarizer from a seed.")
    parser.add_argument("--out", type=Path, default=OUT_DIR, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of corpus, weights and order")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (fewer: a rougher base)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    tokenizer = make_tokenizer(options.seed)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, options.seed + 2, options.steps)
    save(model, tokenizer, options.out)
    print(f"made in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
