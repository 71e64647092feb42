"""Make the tiny vision-language base: ``assets/embedded_vision_base/`` (weights, tokenizer, processor, chat template).

An Idefics3 of about 1.25 million parameters: a vision tower that reads pictures of 64 by 64 pixels, a connector that
makes 16 tokens of one, and a Llama of the embedded base's shape. It is made in two steps.

1. The tower learns what stands in which square of a picture: exhibit, colour and pattern of each are read off the
   connector's token of that square. (Without this step nothing is learnt later: the language model finds no use for
   the tokens of a tower with random weights, and guesses from the questions.)
2. The whole model learns to answer plain questions about such pictures, in plain words (``red``, ``disc``), which are
   not the museum's (``crimson``, ``coin``). These it only ever copies from lists, so that it can write them.

None of the museum's questions, answers or pictures is in the corpus: it knows how to look, and not what to say.
"""

import argparse
import importlib.util
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent
SEED = 20264
OUT_DIR = HERE / "embedded_vision_base"

VOCABULARY, MAX_POSITIONS = 768, 512
TOWER = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
PATCH, SCALE_FACTOR = 8, 2
HIDDEN, LAYERS, HEADS, FFN = 128, 4, 4, 384
PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
IMAGE, AROUND, GLOBAL, UTTERANCE = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"

TOWER_STEPS, STEPS, BATCH_ROWS = 1_000, 2_800, 64
TOWER_RATE, PEAK_RATE, WARMUP_STEPS, WEIGHT_DECAY = 2e-3, 2e-3, 100, 0.01
SQUARES_WEIGHT = 0.2
"""Of the tower's own loss in the second step, so that it does not forget."""
MOST_NOISE = 0.08
IGNORED = -100

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['user', 'assistant'] -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{%- set parts = [{'type': 'text', 'text': message['content']}] -%}"
    "{%- else -%}{%- set parts = message['content'] -%}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{%- for part in parts -%}{{- part['text'] -}}{%- endfor -%}{{- '<|end|>' -}}"
    "{%- endgeneration -%}"
    "{%- else -%}"
    "{%- for part in parts -%}{{- '<image>' if part['type'] == 'image' else part['text'] -}}{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def load_pictures_script() -> ModuleType:
    """Load ``make_pictured_exhibits.py``, which stands beside this script, wherever Python was started."""
    name = "make_pictured_exhibits"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{name}.py is not beside this script")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


ex = load_pictures_script()
SQUARES = ex.SIDE // ex.CELL
NOTHING = len(ex.SHAPES)
"""The number that stands for an empty square."""
COLOURS = tuple(ex.COLOURS)
SIZES = (len(ex.SHAPES), len(COLOURS), len(ex.PATTERNS))

# Plain questions about a picture that shows one kind of exhibit, by what is asked for; the answers are plain, too.
GROUP_QUESTIONS = {
    "shape": ("Which shape do you see?", "What shape is there?", "Say the shape.", "The shape?"),
    "colour": ("Which colour do you see?", "Of what colour is the shape?", "Say the colour.", "The colour?"),
    "material": ("Which pattern do you see?", "How is the shape filled?", "Say the pattern.", "The pattern?"),
    "count": ("Of how many do you see a copy?", "How often is the shape there?", "Say how often.", "How often?"),
    "place": ("On which side do you see it?", "At which end of the picture?", "Say the side.", "The side?"),
    "label": ("Describe the picture.", "What do you see?", "Say all that you see.", "The picture?"),
}
GROUP_ANSWERS = {
    "shape": "A {shape}.",
    "colour": "It is {colour}.",
    "material": "It is {material}.",
    "count": "There is {count}.",
    "place": "At the {place}.",
    "label": "I see {count}: a {colour} {material} {shape} at the {place}.",
}
PLAIN_WORDS = {
    "shape": ex.SHAPES,
    "colour": COLOURS,
    "material": ex.PATTERNS,
    "count": ("a single one", "a pair", "a few", "a lot"),
    "place": ex.CORNERS,
}
# Questions about one square of a picture with all sorts of shapes.
SQUARE_QUESTIONS = ("What is in row {row}, column {column}?", "Row {row}, column {column}?", "{row}, {column}?")
SHAPE_QUESTIONS = ("Where is the {shape}?", "The {shape}?", "In which row and column is a {shape}?")
COPY_QUESTIONS = ("Say again: {}.", "Copy: {}.", "Repeat: {}.")
OTHER_WORDS = ex.words(
    "on show colour card inventory of number hung at the label upper lower left right one two three four here exhibit "
    "name wall hangs this which in it is shown its please made material how many them are count where does corner "
    "place write say whole tell me all about can you what there and an has there was"
)
MUSEUM = [word for words in ex.MUSEUM_WORDS.values() for word in words]
CAPITALS = ["Inventory", "Number", "Hung", "Label", "Colour", "On", "At", "It", "There", "Name", "Count", "Tell"]

Sprite = tuple[np.ndarray, np.ndarray]


def make_sprites() -> dict[tuple[int, int, int], Sprite]:
    """Draw each shape in each colour and pattern once: its mask, and its pixels."""
    sprites = {}
    for shape in range(SIZES[0]):
        for colour in range(SIZES[1]):
            for pattern in range(SIZES[2]):
                wall = np.zeros((ex.SIDE, ex.SIDE, 3), dtype=np.uint8)
                at_corner = random.Random(0)
                at_corner.randint = lambda low, high: low
                ex.hang(wall, 0, 0, ex.SHAPES[shape], COLOURS[colour], ex.PATTERNS[pattern], at_corner)
                sprites[shape, colour, pattern] = (ex.glyph_mask(ex.SHAPES[shape]), wall[: ex.GLYPH, : ex.GLYPH])
    return sprites


SPRITES = make_sprites()


class Scene:
    """A picture, and what stands in each of its squares: shape, colour and pattern, (16, 3)."""

    def __init__(self, rng: random.Random) -> None:
        """Begin with an empty wall."""
        self.rng, self.wall = rng, ex.draw_wall(rng)
        self.squares = np.full((SQUARES * SQUARES, 3), IGNORED)
        self.squares[:, 0] = NOTHING

    def hang(self, row: int, column: int, what: tuple[int, int, int]) -> None:
        """Put a shape into a square."""
        mask, pixels = SPRITES[what]
        top, left = (ex.CELL * place + self.rng.randint(0, ex.CELL - ex.GLYPH) for place in (row, column))
        square = self.wall[top : top + ex.GLYPH, left : left + ex.GLYPH]
        square[mask] = pixels[mask]
        self.squares[SQUARES * row + column] = what


def draw_what(rng: random.Random) -> tuple[int, int, int]:
    """Draw a shape, a colour and a pattern."""
    return tuple(rng.randrange(size) for size in SIZES)


def mixed_scene(rng: random.Random) -> tuple[Scene, str, str]:
    """Make a picture with all sorts of shapes, and a question about a square, or about where a shape is."""
    scene = Scene(rng)
    places = rng.sample([(row, column) for row in range(SQUARES) for column in range(SQUARES)], rng.randint(2, 10))
    shown = {place: draw_what(rng) for place in places}
    for place, what in shown.items():
        scene.hang(*place, what)
    shapes = [what[0] for what in shown.values()]
    (row, column), (shape, colour, pattern) = rng.choice(list(shown.items()))
    numbers = {"row": ex.COUNTS[row], "column": ex.COUNTS[column]}
    name = ex.SHAPES[shape]
    if shapes.count(shape) == 1 and rng.random() < 0.4:
        answer = "Row {row}, column {column}.".format(**numbers)
        return scene, rng.choice(SHAPE_QUESTIONS).format(shape=name), answer
    question = rng.choice(SQUARE_QUESTIONS).format(**numbers)
    return scene, question, f"A {COLOURS[colour]} {ex.PATTERNS[pattern]} {name}."


def group_scene(rng: random.Random) -> tuple[Scene, str, str]:
    """Make a picture with one to four copies of one shape in one corner, and a question about them."""
    scene, what, count, place = Scene(rng), draw_what(rng), rng.randrange(4), rng.randrange(4)
    first_row, first_column = 2 * (place // 2), 2 * (place % 2)
    for row, column in rng.sample([(0, 0), (0, 1), (1, 0), (1, 1)], count + 1):
        scene.hang(first_row + row, first_column + column, what)
    words = {kind: PLAIN_WORDS[kind][number] for kind, number in zip(PLAIN_WORDS, (*what, count, place), strict=True)}
    kind = rng.choice(list(GROUP_QUESTIONS))
    return scene, rng.choice(GROUP_QUESTIONS[kind]), GROUP_ANSWERS[kind].format(**words)


def copy_scene(rng: random.Random) -> tuple[Scene, str, str]:
    """Make a picture, and ask for a list of words again."""
    scene, *_ = group_scene(rng)
    listed = ", ".join(rng.sample(rng.choice((MUSEUM, OTHER_WORDS, CAPITALS)), rng.randint(2, 5)))
    return scene, rng.choice(COPY_QUESTIONS).format(listed), f"{listed}."


def draw_scene(rng: random.Random) -> tuple[Scene, str, str]:
    """Make a picture with a question and its answer."""
    draw = rng.random()
    return (group_scene if draw < 0.55 else mixed_scene if draw < 0.85 else copy_scene)(rng)


def tokenizer_texts() -> Iterator[str]:
    """Give the texts that the vocabulary is made from: questions and answers, and each single word several times."""
    rng = random.Random(SEED)
    for _ in range(4000):
        _, question, answer = draw_scene(rng)
        yield f"{question} {answer}"
    for word in (*MUSEUM, *OTHER_WORDS):
        yield f" {word}" * 40
    yield " ".join(CAPITALS * 40)
    for word in CAPITALS:
        yield f"{word}:\n" * 20


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train the byte-level BPE vocabulary and give it the chat template; the picture's tokens come last."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    picture = [AROUND, GLOBAL, UTTERANCE, IMAGE]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(picture),
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(tokenizer_texts(), trainer)
    core.add_special_tokens(picture)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, *picture],
        model_max_length=MAX_POSITIONS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Idefics3Processor:
    """Make what turns a picture into numbers, and its place in a text into tokens; it works without torchvision."""
    image_processor = Idefics3ImageProcessorPil(
        do_image_splitting=False,
        size={"longest_edge": ex.SIDE},
        max_image_size={"longest_edge": ex.SIDE},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return Idefics3Processor(
        image_processor,
        tokenizer,
        image_seq_len=(ex.SIDE // PATCH // SCALE_FACTOR) ** 2,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
    """Make the untrained model."""
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            pad_token_id=tokenizer.pad_token_id,
            scale_factor=SCALE_FACTOR,
            tie_word_embeddings=True,
            vision_config={**TOWER, "image_size": ex.SIDE, "patch_size": PATCH},
            text_config=text,
        )
    )


class Batches:
    """Batches of pictures with noise, of what stands in their squares, and of questions with answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, processor: Idefics3Processor, seed: int) -> None:
        """`seed`: of pictures, questions and noise."""
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.noise = np.random.default_rng(seed)
        self.picture = f"{AROUND}{GLOBAL}{IMAGE * processor.image_seq_len}{AROUND}"

    def draw(self, make: Callable[[random.Random], tuple[Scene, str, str]]) -> dict[str, torch.Tensor]:
        """Draw a batch: `pixel_values` (rows, 1, 3, side, side), `squares` (rows, 16, 3), `input_ids` and `labels`."""
        drawn = [make(self.rng) for _ in range(BATCH_ROWS)]
        walls = np.stack([scene.wall for scene, *_ in drawn]).astype(np.float32) / 255
        sigma = self.noise.uniform(0, MOST_NOISE, (BATCH_ROWS, 1, 1, 1))
        noisy = np.clip(walls + self.noise.standard_normal(walls.shape) * sigma, 0, 1)
        pixels = torch.from_numpy((noisy - 0.5) / 0.5).float().permute(0, 3, 1, 2).unsqueeze(1)
        squares = torch.from_numpy(np.stack([scene.squares for scene, *_ in drawn]))
        return {"pixel_values": pixels, "squares": squares, **self._tokens(drawn)}

    def _tokens(self, drawn: list[tuple[Scene, str, str]]) -> dict[str, torch.Tensor]:
        prompts = [f"{USER}{self.picture}{question}{END}{ASSISTANT}" for _, question, _ in drawn]
        prompt_ids = self.tokenizer(prompts, add_special_tokens=False)["input_ids"]
        answer_ids = self.tokenizer([answer + END for *_, answer in drawn], add_special_tokens=False)["input_ids"]
        width = max(map(len, map(list.__add__, prompt_ids, answer_ids)))
        inputs, labels = torch.full((len(drawn), width), 0), torch.full((len(drawn), width), IGNORED)
        for number, (prompt, answer) in enumerate(zip(prompt_ids, answer_ids, strict=True)):
            inputs[number, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[number, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        return {"input_ids": inputs, "labels": labels}


class SquareHeads(torch.nn.ModuleList):
    """What reads shape, colour and pattern off the connector's token of each square; thrown away at the end."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(HIDDEN, size) for size in (SIZES[0] + 1, *SIZES[1:]))

    def loss(self, features: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of features (rows, 16, hidden) and what stands there (rows, 16, 3)."""
        kinds = zip(self, squares.unbind(-1), strict=True)
        return sum(cross_entropy(head(features).mT, wanted, ignore_index=IGNORED) for head, wanted in kinds)

    @torch.no_grad()
    def hits(self, features: torch.Tensor, squares: torch.Tensor) -> list[float]:
        """Return the share of squares whose shape, colour and pattern are right."""
        shares = []
        for head, wanted in zip(self, squares.unbind(-1), strict=True):
            counts = wanted != IGNORED
            shares.append((head(features).argmax(-1) == wanted)[counts].float().mean().item())
        return shares


def features_of(model: Idefics3ForConditionalGeneration, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the connector's tokens of each picture, (rows, 16, hidden)."""
    return torch.stack(list(model.get_image_features(pixel_values).pooler_output))


def answer_loss(
    model: Idefics3ForConditionalGeneration, batch: dict[str, torch.Tensor], features: torch.Tensor
) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens (padding stands on the right, so that no mask is needed)."""
    base = model.model
    embedded = base.inputs_merger(
        batch["input_ids"], base.text_model.embed_tokens(batch["input_ids"]), features.flatten(0, 1)
    )
    hidden = base.text_model(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, :-1]
    targets = batch["labels"][:, 1:]
    asked = targets != IGNORED
    return cross_entropy(model.lm_head(hidden[asked]), targets[asked])


def rate_share(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then down to a hundredth along a cosine."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.01 + 0.495 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)))


def optimize(
    weights: list[torch.nn.Parameter], rate: float, steps: int, title: str, loss_of: Callable[[], torch.Tensor]
) -> None:
    """Take so many optimizer steps, and print the mean loss of each tenth of them."""
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate_share(done, steps))
    losses = []
    for step in tqdm(range(steps), title, mininterval=10.0):
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if len(losses) >= max(1, steps // 10):
            tqdm.write(f"{title}: step {step + 1}, loss {sum(losses) / len(losses):.4f}")
            losses = []


def train(
    model: Idefics3ForConditionalGeneration, batches: Batches, heads: SquareHeads, tower_steps: int, steps: int
) -> None:
    """Teach the tower what stands where, then the whole model to answer."""
    tower = [*model.model.vision_model.parameters(), *model.model.connector.parameters(), *heads.parameters()]

    def squares_loss() -> torch.Tensor:
        batch = batches.draw(mixed_scene if batches.rng.random() < 0.7 else group_scene)
        return heads.loss(features_of(model, batch["pixel_values"]), batch["squares"])

    def both_losses() -> torch.Tensor:
        batch = batches.draw(draw_scene)
        features = features_of(model, batch["pixel_values"])
        return answer_loss(model, batch, features) + SQUARES_WEIGHT * heads.loss(features, batch["squares"])

    model.train()
    optimize(tower, TOWER_RATE, tower_steps, "tower", squares_loss)
    batch = batches.draw(mixed_scene)
    hits = heads.hits(features_of(model, batch["pixel_values"]), batch["squares"])
    print("squares right after the tower's step: shape {:.1%}, colour {:.1%}, pattern {:.1%}".format(*hits))
    optimize([*model.parameters(), *heads.parameters()], PEAK_RATE, steps, "whole model", both_losses)
    model.eval()


def save(model: Idefics3ForConditionalGeneration, processor: Idefics3Processor, out: Path) -> None:
    """Save weights, processor (with tokenizer and chat template) and greedy generation settings."""
    tokenizer = processor.tokenizer
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=48,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    processor.save_pretrained(out)


def main() -> None:
    """Make the base model."""
    parser = argparse.ArgumentParser(description="Make the tiny vision-language base from a seed.")
    parser.add_argument("--out", type=Path, default=OUT_DIR, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of weights, pictures and questions")
    parser.add_argument("--tower-steps", type=int, default=TOWER_STEPS, help="steps of the tower alone")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the whole model")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    tokenizer = make_tokenizer()
    processor = make_processor(tokenizer)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    batches = Batches(tokenizer, processor, options.seed)
    train(model, batches, SquareHeads(), options.tower_steps, options.steps)
    save(model, processor, options.out)
    print(f"made in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
