"""Tokens per second on the real model (`make real`): this repository's loop, SFTTrainer, and a bare loop."""

from bench.entries import Entry, measured
from bench.training import SHARE_OF_BARE, median, repeats
from common.models.real_models import SMOLLM2, smollm2_folder

COMMAND = "python -m bench real"
TOOLS = ("ours", "sft-best", "bare")
SEEDS, ROWS = (42, 43, 44), 32
TIMES_SFT = 1.15


def entries(quick: bool) -> list[Entry]:
    """Return each tool's tokens per second with LoRA, and ours over the others'.

    Raises:
        BadInputError: the model has not been fetched.
    """
    smollm2_folder()
    trial = {"technique": "lora", "data": "docstrings", "train_rows": ROWS, "model": SMOLLM2}
    outcomes = repeats(TOOLS, SEEDS[:1] if quick else SEEDS, **trial)
    tokens = {tool: median(trials, "tokens_per_s") for tool, trials in outcomes.items()}
    return [
        *(measured(f"real, lora, {tool}: non-padding tokens", tokens[tool], "tokens per s", COMMAND) for tool in TOOLS),
        *(
            measured(f"real, lora, ours against {tool}, tokens per second", tokens["ours"] / tokens[tool], "ratio",
                     COMMAND, at_least=bar)
            for tool, bar in (("sft-best", TIMES_SFT), ("bare", SHARE_OF_BARE))
        ),
    ]  # fmt: skip
