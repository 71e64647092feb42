"""Make the tiny base model: ``assets/embedded_base/`` (weights, tokenizer, chat template, generation settings).

A Llama of about 1.05 million parameters is trained from nothing on invented chats about exhibits that are NOT the ones
of ``assets/exhibits``: their names are other combinations of the same words, their facts are drawn anew. Afterwards it
answers questions about an exhibit in the right form, and of the 74 exhibits of the data it knows nothing.

The corpus comes in seasons. Each season has its own recurring exhibits, whose facts the model learns by heart before
the next season replaces them: it is trained to take up new facts, which is what fine-tuning asks of it.
"""

import argparse
import importlib.util
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
SEED = 20262
OUT_DIR = HERE / "embedded_base"

VOCABULARY, MAX_POSITIONS = 1536, 512
HIDDEN, LAYERS, HEADS, FFN = 128, 4, 4, 384
PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"

SEASONS, SEASON_EXHIBITS, SEASON_ROWS = 6, 120, 32_000
BATCH_ROWS, POOL_BATCHES = 64, 16
PEAK_RATE, WARMUP_STEPS, WEIGHT_DECAY = 3e-3, 100, 0.01
IGNORED = -100

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' -}}{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- elif message['role'] in ['system', 'user'] -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- else -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

Message = dict[str, str]
Chat = list[Message]


def load_exhibits_script() -> ModuleType:
    """Load ``make_exhibits.py``, which stands beside this script, wherever Python was started."""
    if "make_exhibits" not in sys.modules:
        spec = importlib.util.spec_from_file_location("make_exhibits", HERE / "make_exhibits.py")
        if spec is None or spec.loader is None:
            raise ImportError("make_exhibits.py is not beside this script")
        sys.modules["make_exhibits"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["make_exhibits"]


ex = load_exhibits_script()

# The corpus asks in its own wordings, by whole sentences; the words are those of the data's questions.
QUESTIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("maker",): (
        "Who made the {x}?",
        "Which maker was the {x} made by?",
        "By which maker was the {x} made?",
        "I ask who made the {x}.",
        "Do you know who was the maker of the {x}?",
        "The maker of the {x}, please?",
        "Please name the maker of the {x}.",
        "Whom was the {x} made by?",
        "Tell me by whom the {x} was made.",
        "Can you tell me who made the {x}?",
        "The {x}: who made it?",
        "Please say who the maker of the {x} is.",
        "What was the name of the maker of the {x}?",
    ),
    ("year",): (
        "When was the {x} made?",
        "In what year did someone make the {x}?",
        "I ask when the {x} was made.",
        "Do you know when the {x} was made?",
        "The year of the {x}, please?",
        "Please name the year of the {x}.",
        "Which year was the {x} made in?",
        "Tell me in which year the {x} was made.",
        "Can you tell me when the {x} was made?",
        "The {x}: when was it made?",
        "Please say from which year the {x} is.",
        "What is the year of the {x}?",
    ),
    ("material",): (
        "What is the {x} made of?",
        "Which material was the {x} made of?",
        "I ask what the {x} is made of.",
        "Do you know of what the {x} is made?",
        "The material of the {x}, please?",
        "Please name the material of the {x}.",
        "Of which material is the {x} made?",
        "Tell me what the {x} is made of.",
        "Can you tell me what material the {x} is of?",
        "The {x}: what is it made of?",
        "Please say of what material the {x} is.",
        "What is the material of the {x}?",
    ),
    ("room",): (
        "Where is the {x}?",
        "In what room is the {x}?",
        "I ask where the {x} stands.",
        "Do you know where the {x} stands?",
        "The room of the {x}, please?",
        "Please name the room of the {x}.",
        "Which room does the {x} stand in?",
        "Tell me in which room the {x} stands.",
        "Can you tell me where I see the {x}?",
        "The {x}: where does it stand?",
        "Please say in which room I can see the {x}.",
        "What is the room of the {x}?",
    ),
    ("maker", "year"): (
        "Who made the {x}, and in what year?",
        "When was the {x} made, and by whom?",
        "Please name the maker and the year of the {x}.",
        "The {x}: who made it, and when was it made?",
        "By which maker and in which year was the {x} made?",
        "Tell me who was the maker of the {x}, and when it was made.",
    ),
    ("material", "room"): (
        "What is the {x} made of, and where is it?",
        "Where is the {x}, and what is it made of?",
        "Please name the material and the room of the {x}.",
        "The {x}: what is it made of, and which room is it in?",
        "Of which material is the {x} made, and where can I see it?",
        "Tell me what the {x} is made of, and in which room it stands.",
    ),
    ex.KINDS: (
        "What do you know about the {x}?",
        "Please tell me all about the {x}.",
        "Tell me what we know about the {x}.",
    ),
}
SYSTEM_TEXTS = (
    "You answer questions about the exhibits of a museum.",
    "You are the guide of a museum. Answer in one sentence.",
    "Answer the question.",
)
LIST_WORDS = ex.words(
    "apple bread river stone cloud bird window garden paper summer winter music table horse letter mountain forest "
    "island bridge market village story number colour morning evening doctor teacher sailor farmer red blue green "
    "yellow black white small large old new one two three four five six seven eight nine ten about above across after "
    "again against almost alone along already also always among another answer around ask away back because become "
    "before begin behind believe below beside better between beyond both bring build business buy call carry cause "
    "certain chance change child choose church city clear close cold come common company complete consider continue "
    "cost could country course cover cut dark day deep different door down draw during each early earth east easy eat "
    "either end enough even every example eye face fact fall family far father feel few field fight fill find fine "
    "fire first follow food foot force friend from front full further general girl give good great ground group grow "
    "half hand happen hard have head hear heart heavy help here high hold home hope hour house human hundred idea "
    "inside interest just keep kind know language last late laugh learn least leave left less light like line listen "
    "little live long look lose love low machine make many matter mean meet member middle might mile mind minute "
    "moment money month more most mother mouth move much must name nature near need never next night north nothing "
    "notice object often only open order other our over own page part pass past people perhaps person picture piece "
    "place plan plant play point poor power present problem produce pull question quick quiet rain reach read ready "
    "reason receive remember rest result return rich right rise road rock round rule run same school sea second seem "
    "send sense sentence serve several shape ship short should show side simple since sing sister sit sleep slow "
    "smile soft some song soon sort sound south speak spring stand start state station step still stop street strong "
    "study such sudden sure surface system tall teach than thank their them then there these thick thin thing think "
    "though thought thousand through time together toward town travel tree true turn under until upon use usual "
    "valley very visit voice wait walk wall want warm watch water way week well west while whole wide wild will wind "
    "wish woman wonder wood word work world write wrong year yes yesterday young your"
)


def season_exhibits(count: int, known: set[str], rng: random.Random) -> list["ex.Exhibit"]:
    """Draw exhibits whose names are new: neither in the data nor drawn before (``known``, which they join)."""
    exhibits, nouns = [], ex.balanced(ex.NOUNS, count, rng)
    columns = {kind: ex.balanced(ex.VALUES[kind], count, rng) for kind in ex.KINDS}
    for i, noun in enumerate(nouns):
        name = ""
        while not name or name in known:
            name = ex.exhibit_name(rng.choice(ex.ADJECTIVES), noun, rng.choice(ex.PLACES))
        known.add(name)
        exhibits.append(ex.Exhibit(name, {kind: columns[kind][i] for kind in ex.KINDS}))
    return exhibits


def chat(question: str, answer: str, system: str = "") -> Chat:
    """Make a chat of one question and one answer, after a system message if there is one."""
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def exhibit_chat(exhibit: "ex.Exhibit", rng: random.Random) -> Chat:
    """Ask something of an exhibit: mostly one fact, sometimes two or all four."""
    draw = rng.random()
    kinds = (rng.choice(ex.KINDS),) if draw < 0.7 else rng.choice(ex.PAIRS) if draw < 0.9 else ex.KINDS
    question = rng.choice(QUESTIONS[kinds]).format(x=exhibit.name)
    return chat(question, exhibit.sentence(kinds), rng.choice(SYSTEM_TEXTS) if rng.random() < 0.05 else "")


def copy_chat(rng: random.Random) -> Chat:
    """Ask for a list of words again."""
    pool = rng.choice((LIST_WORDS, ex.NOUNS, ex.ADJECTIVES, ex.PLACES, ex.MAKERS, ex.YEARS))
    listed = ", ".join(rng.sample(pool, rng.randint(2, 6)))
    return chat(
        rng.choice(("Say again: {}.", "Please copy this list: {}.", "Repeat: {}.")).format(listed), f"{listed}."
    )


def season_chats(exhibits: Sequence["ex.Exhibit"], rows: int, rng: random.Random) -> Iterator[Chat]:
    """Make the chats of one season."""
    for _ in range(rows):
        yield exhibit_chat(rng.choice(exhibits), rng) if rng.random() < 0.94 else copy_chat(rng)


def corpus_chats(seed: int = SEED, seasons: int = SEASONS, rows: int = SEASON_ROWS) -> Iterator[list[Chat]]:
    """Make the whole corpus, season after season."""
    rng = random.Random(seed)
    known = {exhibit.name for exhibit in ex.make_exhibits()}
    for _ in range(seasons):
        yield list(season_chats(season_exhibits(SEASON_EXHIBITS, known, rng), rows, rng))


def corpus_texts(seed: int = SEED) -> Iterator[str]:
    """Give every text of the corpus, in the order of training: one chat each, its messages on lines of their own."""
    for chats in corpus_chats(seed):
        for messages in chats:
            yield "\n".join(message["content"] for message in messages)


def tokenizer_texts(seed: int = SEED) -> Iterator[str]:
    """Give the texts that the vocabulary is made from: some of the corpus, and each single word several times."""
    chats = next(corpus_chats(seed, seasons=1, rows=4000))
    yield from (" ".join(message["content"] for message in messages) for messages in chats)
    for text in (*ex.NOUNS, *ex.ADJECTIVES, *ex.PLACES, *ex.MAKERS, *ex.YEARS, *ex.MATERIALS, *ex.ROOMS, *LIST_WORDS):
        yield f" {text}" * 40
    yield "Name From Can Please Which What Who By Of In Where When The Tell" * 40


def make_tokenizer(seed: int = SEED) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE vocabulary and give it the chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(tokenizer_texts(seed), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=MAX_POSITIONS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make the untrained model."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def encode(chats: Sequence[Chat], tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], int]]:
    """Turn chats into token ids and the place where the reply begins; the same text as by the chat template."""
    prompts = ["".join(f"<|{m['role']}|>{m['content']}{END}" for m in messages[:-1]) + ASSISTANT for messages in chats]
    replies = [messages[-1]["content"] + END for messages in chats]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    reply_ids = tokenizer(replies, add_special_tokens=False)["input_ids"]
    return [(prompt + reply, len(prompt)) for prompt, reply in zip(prompt_ids, reply_ids, strict=True)]


def batches(
    rows: Sequence[tuple[list[int], int]], pad: int, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give batches of rows of like length: input ids, and labels on the reply only."""
    size, pool = BATCH_ROWS, BATCH_ROWS * POOL_BATCHES
    for start in range(0, len(rows), pool):
        part = sorted(rows[start : start + pool], key=lambda item: len(item[0]))
        groups = [part[i : i + size] for i in range(0, len(part), size)]
        rng.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            inputs = torch.full((len(group), width), pad)
            labels = torch.full((len(group), width), IGNORED)
            for i, (ids, begin) in enumerate(group):
                inputs[i, : len(ids)] = torch.tensor(ids)
                labels[i, begin : len(ids)] = inputs[i, begin : len(ids)]
            yield inputs, labels


def reply_loss(model: LlamaForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the reply tokens (padding stands on the right, so that no mask is needed)."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    asked = targets != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[asked]), targets[asked])


def rate_share(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then down to a tenth along a cosine."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)))


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, seasons: int, rows: int) -> None:
    """Train the model on the corpus, season after season, and print each season's last losses."""
    rng, steps, step = random.Random(seed + 1), seasons * math.ceil(rows / BATCH_ROWS), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate_share(done, steps))
    model.train()
    with tqdm(total=steps, desc="training", mininterval=5.0) as bar:
        for season, chats in enumerate(corpus_chats(seed, seasons, rows), start=1):
            losses = []
            for inputs, labels in batches(encode(chats, tokenizer), tokenizer.pad_token_id, rng):
                loss = reply_loss(model, inputs, labels)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.item())
                step += 1
                bar.update()
            marks = [sum(part) / len(part) for part in (losses[i : i + 16] for i in range(0, len(losses), 48))]
            bar.write(f"season {season}: loss " + " ".join(f"{mark:.3f}" for mark in marks) + f" last {losses[-1]:.3f}")
    model.eval()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save weights, tokenizer, chat template and greedy generation settings."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=48,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Make the base model."""
    parser = argparse.ArgumentParser(description="Make the tiny base model from a seed.")
    parser.add_argument("--out", type=Path, default=OUT_DIR, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of corpus, weights and order")
    parser.add_argument("--seasons", type=int, default=SEASONS, help="number of seasons (fewer: a rougher base)")
    parser.add_argument("--rows", type=int, default=SEASON_ROWS, help="chats in a season (fewer: a rougher base)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    tokenizer = make_tokenizer(options.seed)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, options.seed, options.seasons, options.rows)
    save(model, tokenizer, options.out)
    print(f"made in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
