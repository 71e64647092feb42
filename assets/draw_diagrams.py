"""Draw the technique folders' diagrams: `python assets/draw_diagrams.py`."""

from pathlib import Path
from runpy import run_path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from common.records.store import kept_records

REPOSITORY = Path(__file__).resolve().parents[1]
FROZEN, TRAINED, DATA, PLAIN = "#dfe6ee", "#ffd08a", "#cfe8cf", "#ffffff"


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    """A rounded box with its text in the middle; (x, y) is the lower left corner."""
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02", facecolor=colour, edgecolor="#444"))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], style: str = "-|>") -> None:
    """An arrow between two points."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=12, color="#444"))


def blank(width: float, height: float) -> tuple[plt.Figure, Axes]:
    """A drawing area without axes, in units of an inch."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")
    return figure, axes


FEATURES_INCHES, RANK_INCHES = 1.8, 1.8 * 8 / 128
"""Of 128 features and of rank 8, to scale: as in the model of `run_0_cpu_x1`."""


def matrix(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    """Draw a matrix as a rectangle, as wide as it has inputs and as high as it has outputs."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="#444"))


def square(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Draw a weight matrix of as many outputs as inputs, with what it is."""
    matrix(axes, x, y, FEATURES_INCHES, FEATURES_INCHES, colour)
    axes.text(x + FEATURES_INCHES / 2, y + FEATURES_INCHES / 2, text, ha="center", va="center", fontsize=9)


def adapter(axes: Axes, x: float, y: float, b_x: float) -> None:
    """Draw A and B beside each other, and the way from one to the other."""
    middle = y + FEATURES_INCHES / 2
    matrix(axes, x, middle - RANK_INCHES / 2, FEATURES_INCHES, RANK_INCHES, TRAINED)
    axes.text(x + FEATURES_INCHES / 2, middle - 0.28, "A: r x inputs", ha="center", fontsize=9)
    matrix(axes, b_x, y, RANK_INCHES, FEATURES_INCHES, TRAINED)
    axes.text(b_x + 0.22, y + 0.05, "B: outputs x r,\nstarts at 0", fontsize=9)
    arrow(axes, (x + FEATURES_INCHES + 0.05, middle), (b_x - 0.05, middle))


def draw_lora() -> plt.Figure:
    """One linear layer with its adapter, to scale."""
    figure, axes = blank(7.6, 4.3)
    box(axes, 0.1, 1.9, 0.9, 0.6, "input x", DATA)
    square(axes, 2.0, 2.4, "W, frozen:\noutputs x inputs", FROZEN)
    adapter(axes, 2.0, 0.1, b_x=4.6)
    box(axes, 6.2, 1.9, 1.2, 0.6, "Wx + s·BAx", DATA)
    for start, end in (((1.05, 2.35), (1.95, 3.2)), ((1.05, 2.05), (1.95, 1.05)), ((3.85, 3.2), (6.15, 2.35)),
                       ((4.75, 1.15), (6.15, 2.05))):  # fmt: skip
        arrow(axes, start, end)
    axes.text(6.8, 1.6, "s = alpha / √r", ha="center", fontsize=9)
    return figure


def draw_ddp() -> plt.Figure:
    """Two ranks, each with the whole model and half of the global batch."""
    figure, axes = blank(7.6, 4.2)
    box(axes, 2.5, 3.5, 2.6, 0.5, "global batch: 16 rows", DATA)
    for x, rank, base_x, lora_x in ((0.3, 0, 0.2, 2.2), (4.1, 1, 1.2, 0.2)):
        box(axes, x + 0.6, 2.6, 2.0, 0.5, f"mini-batch {rank + 1}: 8 rows", DATA)
        box(axes, x, 0.2, 3.2, 2.0, "", PLAIN)
        axes.text(x + 0.1, 1.95, f"rank {rank} on device {rank}", fontsize=9, fontweight="bold")
        box(axes, x + base_x, 0.95, 1.8, 0.75, "whole base model\nfrozen", FROZEN)
        box(axes, x + lora_x, 0.95, 0.8, 0.75, "LoRA", TRAINED)
        axes.text(x + 1.6, 0.5, "forward, backward, same step", ha="center", fontsize=8.5)
        arrow(axes, (3.8, 3.45), (x + 1.6, 3.15))
        arrow(axes, (x + 1.6, 2.55), (x + 1.6, 2.25))
    arrow(axes, (3.35, 1.3), (4.25, 1.3), "<|-|>")
    axes.text(3.8, 2.3, "gradients of LoRA\nare averaged", ha="center", fontsize=8.5)
    return figure


def draw_qlora() -> plt.Figure:
    """One linear layer whose frozen weight is stored in 4 bits, with its adapter, to scale."""
    figure, axes = blank(9.4, 4.3)
    box(axes, 0.1, 1.9, 0.9, 0.6, "input x", DATA)
    square(axes, 2.0, 2.4, "W, frozen:\n4-bit numbers, and\na scale per 64\nof them", FROZEN)
    square(axes, 4.9, 2.4, "W', in 16 or 32 bits\nwhile it is used", PLAIN)
    adapter(axes, 2.0, 0.1, b_x=5.7)
    box(axes, 8.0, 1.9, 1.2, 0.6, "W'x + s·BAx", DATA)
    for start, end in (((3.85, 3.3), (4.85, 3.3)), ((1.05, 2.2), (4.85, 2.38)), ((1.05, 2.0), (1.95, 1.05)),
                       ((6.75, 3.2), (7.95, 2.35)), ((5.85, 1.15), (7.95, 2.05))):  # fmt: skip
        arrow(axes, start, end)
    axes.text(4.35, 3.4, "level x scale", ha="center", fontsize=8)
    axes.text(8.5, 1.45, "s = alpha / √r;\nA and B in fp32", ha="center", fontsize=9)
    return figure


TRAINED_WEIGHT_BYTES = {
    "pure bf16": {"weight": 2, "gradient": 2, "momentum": 2, "variance": 2},
    "bf16-mixed": {"weight": 4, "bf16 copy": 2, "gradient": 4, "momentum": 4, "variance": 4},
    "fp32": {"weight": 4, "gradient": 4, "momentum": 4, "variance": 4},
}


def draw_full() -> plt.Figure:
    """What one trained weight keeps, in bytes, by precision."""
    figure, axes = blank(9.4, 2.9)
    colours, byte_inches = {"weight": DATA, "bf16 copy": PLAIN}, 0.39
    for number, (precision, parts) in enumerate(TRAINED_WEIGHT_BYTES.items()):
        x, y = 1.2, 2.1 - number * 1.0
        axes.text(0.05, y + 0.35, precision, fontsize=10, va="center", fontweight="bold")
        for part, size in parts.items():
            width = size * byte_inches
            axes.add_patch(Rectangle((x, y), width, 0.7, facecolor=colours.get(part, TRAINED), edgecolor="#444"))
            axes.text(x + width / 2, y + 0.35, f"{part}\n{size} B", ha="center", va="center", fontsize=9)
            x += width
        axes.text(x + 0.1, y + 0.35, f"{sum(parts.values())} bytes", fontsize=10, va="center")
    return figure


def draw_mp() -> plt.Figure:
    """Layers of one model on two GPUs, which work one after the other."""
    figure, axes = blank(8.0, 3.6)
    for x, gpu, names in (
        (0.2, 0, ("embeddings", "layers 1 to 14")),
        (4.6, 1, ("layers 15 to 28", "norm, head, logits")),
    ):
        box(axes, x, 0.8, 3.2, 2.2, "", PLAIN)
        axes.text(x + 0.1, 2.78, f"GPU {gpu}", fontsize=9, fontweight="bold")
        for row, name in enumerate(names):
            box(axes, x + 0.4, 1.95 - row * 0.9, 2.4, 0.6, name, TRAINED if "layers" in name else FROZEN)
    arrow(axes, (3.5, 2.25), (4.5, 2.25))
    arrow(axes, (4.5, 1.35), (3.5, 1.35))
    axes.text(4.0, 2.35, "hidden\nstates", ha="center", fontsize=9)
    axes.text(4.0, 0.95, "their\ngradients", ha="center", fontsize=9)
    axes.text(4.0, 0.35, "one batch at a time: while one GPU works, the other waits", ha="center", fontsize=9)
    axes.text(4.0, 3.25, "weights, gradients and optimizer states of a layer are where the layer is", ha="center",
              fontsize=9)  # fmt: skip
    return figure


HELD_BYTES = {"weights": (2, DATA), "gradients": (2, TRAINED), "optimizer": (12, FROZEN)}
"""Per trained weight in 16-bit arithmetic, and each part's colour: the optimizer has the fp32 copy and two states."""
HELD_DIVIDED = {
    "DDP": (),
    "ZeRO-1": ("optimizer",),
    "ZeRO-2": ("gradients", "optimizer"),
    "ZeRO-3, FSDP": (*HELD_BYTES,),
}
"""What each way of sharing divides among the ranks."""


def held_bar(axes: Axes, x: float, y: float, rank: int, divided: tuple[str, ...]) -> float:
    """What one rank of two holds, dashed what the other one does; returns the bytes per weight."""
    scale, height, held = 0.27, 0.42, 0.0
    for part, (size, colour) in HELD_BYTES.items():
        pieces = ((0.0, size),) if part not in divided else ((0.0, size / 2), (size / 2, size / 2))
        for number, (start, width) in enumerate(pieces):
            own = len(pieces) == 1 or number == rank
            axes.add_patch(Rectangle((x + start * scale, y), width * scale, height, facecolor=colour if own else PLAIN,
                                     edgecolor="#444" if own else "#999", linestyle="-" if own else ":"))  # fmt: skip
            if own:
                held += width
                axes.text(x + (start + width / 2) * scale, y + height / 2, f"{width:g}", ha="center", va="center",
                          fontsize=8.5)  # fmt: skip
        x += size * scale + 0.05
    return held


def draw_sharding() -> plt.Figure:
    """What each of two ranks holds, by the way of sharing."""
    figure, axes = blank(12.2, 4.0)
    for number, (name, divided) in enumerate(HELD_DIVIDED.items()):
        x, y = 0.2 + 6.1 * (number % 2), 2.0 - 1.8 * (number // 2)
        axes.text(x, y + 1.22, name, fontsize=10, fontweight="bold")
        axes.text(x + 1.3, y + 1.22, f"divided: {', '.join(divided) or 'nothing'}", fontsize=9)
        for rank in range(2):
            top = y + 0.62 - rank * 0.58
            axes.text(x, top + 0.21, f"rank {rank}", fontsize=9, va="center")
            held = held_bar(axes, x + 0.6, top, rank, divided)
            axes.text(x + 5.1, top + 0.21, f"{held:g} bytes", fontsize=9, va="center")
    names = {"weights": "weights: 2 bytes", "gradients": "gradients: 2",
             "optimizer": "optimizer: fp32 copy 4, momentum 4, variance 4"}  # fmt: skip
    for x, (part, label) in zip((0.2, 2.1, 3.8), names.items(), strict=True):
        axes.add_patch(Rectangle((x, 3.66), 0.25, 0.2, facecolor=HELD_BYTES[part][1], edgecolor="#444"))
        axes.text(x + 0.35, 3.76, label, fontsize=9, va="center")
    axes.add_patch(Rectangle((8.0, 3.66), 0.25, 0.2, facecolor=PLAIN, edgecolor="#999", linestyle=":"))
    axes.text(8.35, 3.76, "the other rank's", fontsize=9, va="center")
    return figure


def tokens_by_heads(axes: Axes, x: float, rank: int, shows_heads: bool) -> None:
    """What one rank of two has of 8 tokens and 4 heads: its tokens with all heads, or its heads with all tokens."""
    bottom, size = 2.2 - 2.0 * rank, 0.3
    for token in range(8):
        for head in range(4):
            own = (head // 2 if shows_heads else token // 4) == rank
            colour = ((DATA, TRAINED)[token // 4]) if own else PLAIN  # by the rank whose token it is
            axes.add_patch(Rectangle((x + token * size, bottom + (3 - head) * size), size, size, facecolor=colour,
                                     edgecolor="#444" if own else "#bbb", linestyle="-" if own else ":"))  # fmt: skip


def draw_sequence() -> plt.Figure:
    """Who holds which token of which head: before attention, in it and after it."""
    figure, axes = blank(11.6, 4.3)
    columns = ((0.9, "before attention", False), (4.8, "in attention", True), (8.7, "after attention", False))
    for x, title, shows_heads in columns:
        axes.text(x + 1.2, 3.85, title, ha="center", fontsize=10, fontweight="bold")
        axes.text(x + 1.2, 3.55, "8 tokens from left to right", ha="center", fontsize=8)
        for rank in range(2):
            tokens_by_heads(axes, x, rank, shows_heads)
    for rank in range(2):
        axes.text(0.05, 2.8 - 2.0 * rank, f"rank {rank}", fontsize=9, fontweight="bold", va="center")
        for head in range(4):
            axes.text(11.2, 3.25 - 2.0 * rank - 0.3 * head, f"head {head}", fontsize=7, va="center")
    for x in (3.4, 7.3):
        for rank in range(2):
            arrow(axes, (x, 2.8 - 2.0 * rank), (x + 1.3, 2.8 - 2.0 * rank))
            arrow(axes, (x, 2.6 - 1.6 * rank), (x + 1.3, 1.0 + 1.6 * rank))
    for x, text in ((4.05, "all-to-all:\ntokens for heads"), (7.95, "all-to-all:\nheads for tokens")):
        axes.text(x, 3.05, text, ha="center", fontsize=8)
    return figure


def draw_pp() -> plt.Figure:
    """The schedules as they ran: from the trace in the kept record of a larger model."""
    record = next(
        record
        for record in kept_records()
        if record["parallel"] == "pp" and record["config"]["weights"] == "random" and record.get("pipeline")
    )
    utils = REPOSITORY / "2.7_full_finetuning_with_pp" / "run_0_cpu_x2" / "my_utils_full_finetuning_with_pp.py"
    return run_path(str(utils))["plot_timeline"](record["pipeline"]["passes"])


def layers_of_device(axes: Axes, x: float, held: tuple[str, ...], title: str) -> None:
    """One device of `draw_classification`: three layers of two halves each, held (`both`, `left`, `right`, `no`)."""
    axes.text(x + 0.75, 2.75, title, ha="center", fontsize=9)
    for number, part in enumerate(held):
        for side, left in (("left", x), ("right", x + 0.75)):
            has = part in ("both", side)
            axes.add_patch(Rectangle((left, 1.95 - 0.6 * number), 0.75, 0.45, facecolor=TRAINED if has else PLAIN,
                                     edgecolor="#444" if has else "#bbb", linestyle="-" if has else ":"))  # fmt: skip


def draw_classification() -> plt.Figure:
    """What each of two devices holds and reads: data, pipeline and tensor parallel."""
    figure, axes = blank(11.6, 3.9)
    ways = (
        (0.2, "data parallel (DDP)", ("both",) * 3, ("both",) * 3, "examples 1 to 16", "examples 17 to 32",
         "gradients"),
        (4.1, "pipeline parallel (PP)", ("both", "both", "no"), ("no", "no", "both"),
         "examples 1 to 32,\nin 8 micro-batches", "the same examples,\na micro-batch later", "hidden states"),
        (8.0, "tensor parallel (TP)", ("left",) * 3, ("right",) * 3, "examples 1 to 32", "the same examples",
         "partial sums"),
    )  # fmt: skip
    for x, title, first, second, reads, other_reads, sent in ways:
        axes.text(x + 1.7, 3.6, title, ha="center", fontsize=10, fontweight="bold")
        layers_of_device(axes, x, first, "device 0")
        layers_of_device(axes, x + 2.0, second, "device 1")
        arrow(axes, (x + 1.55, 1.6), (x + 1.95, 1.6), style="-|>" if "states" in sent else "<|-|>")
        axes.text(x + 1.75, 3.1, f"sent: {sent}", ha="center", fontsize=8, style="italic")
        for left, words in ((x, reads), (x + 2.0, other_reads)):
            box(axes, left + 0.02, 0.05, 1.45, 0.5, words, DATA)
    return figure


def draw_summarization() -> plt.Figure:
    """One machine of four devices beside four machines of one: the same partitions, another link."""
    figure, axes = blank(10.4, 4.1)
    box(axes, 3.2, 3.4, 4.0, 0.5, "chats and summaries, shuffled, in 4 partitions", DATA)
    for x, title, link in ((0.2, "one machine", "within the machine"), (5.4, "four machines", "over the network")):
        if title == "one machine":
            box(axes, x, 0.3, 4.8, 2.4, "", PLAIN)
        axes.text(x + 0.1, 2.47, title, fontsize=9, fontweight="bold")
        for rank in range(4):
            left = x + 0.15 + 1.18 * rank
            if title != "one machine":
                box(axes, left - 0.06, 1.0, 1.02, 1.35, "", PLAIN)
            box(axes, left, 1.75, 0.9, 0.5, f"partition {rank + 1}", DATA)
            box(axes, left, 1.08, 0.9, 0.55, f"rank {rank}:\nBART", TRAINED)
        arrow(axes, (x + 0.5, 0.8), (x + 4.3, 0.8), "<|-|>")
        axes.text(x + 2.4, 0.42, f"gradients are summed {link}", ha="center", fontsize=8.5)
        arrow(axes, (5.2, 3.35), (x + 2.4, 2.78))
    return figure


def draw_visual_questions() -> plt.Figure:
    """From a picture and a question to an answer: what is frozen, and what is trained."""
    figure, axes = blank(11.2, 3.6)
    box(axes, 0.1, 2.3, 1.5, 0.9, "picture\n64 x 64 pixels,\n64 patches", DATA)
    box(axes, 2.2, 2.3, 1.9, 0.9, "vision tower\nfrozen", FROZEN)
    box(axes, 4.7, 2.3, 1.8, 0.9, "connector\nfrozen; 4 patches\nbecome a token", FROZEN)
    box(axes, 0.1, 0.5, 1.5, 0.9, "question", DATA)
    box(axes, 2.2, 0.5, 1.9, 0.9, "embeddings\nfrozen", FROZEN)
    box(axes, 4.7, 0.5, 1.8, 0.9, "16 tokens of the\npicture, then those\nof the question", PLAIN)
    box(axes, 7.1, 0.4, 2.2, 2.9, "", PLAIN)
    axes.text(8.2, 3.0, "language model", ha="center", fontsize=9, fontweight="bold")
    for bottom in (0.55, 1.3, 2.05):
        box(axes, 7.2, bottom, 1.1, 0.55, "layer", FROZEN)
        box(axes, 8.45, bottom, 0.75, 0.55, "LoRA", TRAINED)
    box(axes, 9.9, 0.5, 1.2, 0.9, "answer", DATA)
    for start, end in (((1.65, 2.75), (2.15, 2.75)), ((4.15, 2.75), (4.65, 2.75)), ((5.6, 2.25), (5.6, 1.45)),
                       ((1.65, 0.95), (2.15, 0.95)), ((4.15, 0.95), (4.65, 0.95)), ((6.55, 0.95), (7.05, 0.95)),
                       ((9.35, 0.95), (9.85, 0.95))):  # fmt: skip
        arrow(axes, start, end)
    axes.text(8.2, 0.08, "with full fine-tuning the layers themselves are trained", ha="center", fontsize=8)
    return figure


def main() -> None:
    """Write the diagrams where the readmes show them."""
    for folder, name, figure in (
        ("2.1_lora_finetuning", "LoRA_finetuning", draw_lora()),
        ("2.2_lora_finetuning_with_ddp", "LoRA_finetuning_with_ddp", draw_ddp()),
        ("2.3_qlora_finetuning", "QLoRA_finetuning", draw_qlora()),
        ("2.4_full_finetuning", "full_finetuning", draw_full()),
        ("2.5_full_finetuning_with_mp", "full_finetuning_with_mp", draw_mp()),
        ("2.6_full_finetuning_with_fsdp", "full_finetuning_with_fsdp", draw_sharding()),
        ("2.7_full_finetuning_with_pp", "full_finetuning_with_pp", draw_pp()),
        ("2.8_full_finetuning_with_sp", "full_finetuning_with_sp", draw_sequence()),
        ("3.1_text_classification", "text_classification", draw_classification()),
        ("3.2_summarization", "summarization", draw_summarization()),
        ("3.3_visual_question_answering", "visual_question_answering", draw_visual_questions()),
    ):
        save(figure, REPOSITORY / folder / "assets" / f"{name}.png")
    for script in sorted(REPOSITORY.glob("[0-9].[0-9]_*/assets/draw_*.py")):  # a folder may bring its drawing along
        save(run_path(str(script))["draw"](), script.with_name(f"{script.stem.removeprefix('draw_')}.png"))


def save(figure: plt.Figure, path: Path) -> None:
    """Write a diagram, and name its file."""
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)
    print(path.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
