"""Toy models that the tests of several files share."""

import json
from pathlib import Path

from common.planning.model_configs import MODEL_CONFIGS
from common.training.loop import TrainingLoop


def tiny_shape(folder: Path, **sizes: int) -> str:
    """A real architecture's config, whose head is a matrix of its own, with sizes that a test can afford: its file."""
    config = json.loads((MODEL_CONFIGS / "qwen2.5-7b.json").read_text())
    tiny = {"num_attention_heads": 4, "num_key_value_heads": 2, **sizes}
    path = folder / "tiny.json"
    path.write_text(json.dumps({**config, **tiny, "max_window_layers": sizes["num_hidden_layers"]}))
    return str(path)


def train(loop: TrainingLoop) -> TrainingLoop:
    """Take all steps, as 2.1's workflow does."""
    for step in loop.steps():
        for batch, _ in step:
            loop.loss(batch, step.label_count).backward()
        loop.update()
    return loop
