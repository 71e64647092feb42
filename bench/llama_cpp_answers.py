"""llama.cpp's own answers beside Transformers', from the GGUF files of tuned models.

    python -m bench.llama_cpp_answers        into bench/llama_cpp.json; about five minutes on two cores

Needs the package llama-cpp-python, which compiles llama.cpp (about 15 minutes on one core). Tuned are the embedded
base, with LoRA, and a small base of each family and pre-tokenizer with random weights, in full. Each tuned model is
written as GGUF with matrices of every type, and answers the same test questions greedily here and there.
"""

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from llama_cpp import Llama, llama_cpp
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from common.base.paths import REPOSITORY
from common.data.rows import Row
from common.data.splits import load_splits
from common.data.templates import begins_by_itself
from common.models.loading import EMBEDDED_BASE
from common.records.store import package_version, write_json
from common.serving.gguf_file import PRE_TOKENIZERS, WEIGHT_TYPES, check_tokenizer, export_gguf
from common.serving.tuned_runs import TunedRun, find_run
from common.tasks.answers import generate_answers

RECORD = REPOSITORY / "bench" / "llama_cpp.json"
LORA, FULL = "2.1_lora_finetuning/run_0_cpu_x1", "2.4_full_finetuning/run_0_cpu_x1"
SETTINGS = ("--independent_judge", "none", "--max_length", "256")
PACKAGES = ("llama_cpp_python", "gguf", "transformers", "torch")
VOCABULARY, CONTEXT = 1536, 512
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT}  # fmt: skip
# Pre-tokenizers in llama.cpp's words, by the `model_type` of small bases
FAMILIES = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}
# What pre-tokenizers divide differently
TEXTS = (
    "In 1527, 12345678 guests; I'VE seen they'll don't.",
    "  two  spaces\tand\ta tab \n\n\n three lines\r\nand  \n two ",
    "Übergrößenträger naïve façade, Ångström: Ελληνικά, кириллица, 日本語の文, العربية 12٣",
    "emoji 🙂👍🏽 and signs ... !!?? (a+b)*c == {x: [1, 2]}; #tag @me 50% $3.20 ½ ²",
    "<|user|>in the text<|end|> <|assistant|> spaced",
    "e\u0301 decomposed, a\u00a0no-break space, \u200bzero width",
)


def make_base(model_type: str, pre_tokenizer: str, folder: Path) -> Path:
    """Save a small base with random weights, and a tokenizer that divides texts as `pre_tokenizer` does."""
    expression = next(each for each, name in PRE_TOKENIZERS.items() if name == pre_tokenizer)
    embedded = AutoTokenizer.from_pretrained(EMBEDDED_BASE, trust_remote_code=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(expression), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=embedded.all_special_tokens, initial_alphabet=alphabet
    )
    rows = (REPOSITORY / "assets" / "exhibits" / "train.jsonl").read_text(encoding="utf-8")
    contents = re.findall(r'"content": "([^"]*)"', rows)
    tokenizer.train_from_iterator([*contents, *TEXTS * 3], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=embedded.eos_token, pad_token=embedded.pad_token,
        chat_template=embedded.chat_template, model_max_length=CONTEXT,
    )  # fmt: skip
    config = AutoConfig.for_model(
        model_type, vocab_size=len(fast), pad_token_id=fast.pad_token_id, eos_token_id=fast.eos_token_id,
        bos_token_id=None, **SIZES,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def tuned_on(base: Path | str, workflow: str, results: Path, *settings: str) -> TunedRun:
    """Run a workflow of the repository on a base, and return the run."""
    name = Path(base).name
    command = [sys.executable, "-m", "common.launch", workflow, "--model", str(base), "--results_root", str(results)]
    subprocess.run([*command, "--run_name", name, *SETTINGS, *settings], cwd=REPOSITORY, check=True)
    (folder,) = results.rglob(f"{name}/run_record.json")
    return find_run(str(folder.parent))


def compare(tuned: TunedRun, weight_type: str, folder: Path) -> dict[str, Any]:
    """Write a tuned model as GGUF into `folder`, and let llama.cpp tokenize and answer its run's test questions.

    Return how many prompts, texts and answers are the same, and the largest difference of a prompt's next logits, over
    the largest logit.
    """
    tokenizer = AutoTokenizer.from_pretrained(tuned.whole_model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(tuned.whole_model, dtype=torch.float32, trust_remote_code=False).eval()
    rows = load_splits(tuned.run).test
    file = export_gguf(tuned.whole_model, folder / f"{tuned.folder.name}-{weight_type}.gguf", weight_type)
    llama = load_llama(file)
    prompts, answers, differences = zip(
        *(_question(row, tokenizer, model, llama, tuned.run.max_new_tokens) for row in rows), strict=True
    )
    texts = [tokenizer(text)["input_ids"] == _tokens(text, llama) for text in TEXTS]
    return {
        "base": Path(tuned.run.model).name,
        "model_type": model.config.model_type,
        "pre_tokenizer": check_tokenizer(tokenizer),
        "weight_type": weight_type,
        "questions": len(rows),
        "equal_prompts": sum(prompts),
        "texts": len(texts),
        "equal_texts": sum(texts),
        "equal_answers": sum(answers),
        "logit_difference": max(differences),
    }


def load_llama(file: Path) -> Llama:
    """Load a file into llama.cpp, on one thread, with its weights as they are (`--no-repack` of llama-server).

    Where Q8_0 was packed again for a processor's AMX units, llama.cpp crashed on a virtual machine.
    """
    settings = llama_cpp.llama_model_default_params()
    settings.use_extra_bufts = False
    with patch.object(llama_cpp, "llama_model_default_params", return_value=settings):  # no argument of Llama's
        return Llama(str(file), n_ctx=CONTEXT, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)


def _question(
    row: Row, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, llama: Llama, max_new_tokens: int
) -> tuple[bool, bool, float]:
    """Return whether a question's tokens and its answer are the same, and the difference of the first logits."""
    question = row["messages"][:-1]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    tokens = _tokens(text.removeprefix(tokenizer.bos_token if begins_by_itself(tokenizer) else ""), llama)
    batch = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**batch).logits[0, -1]
    llama.reset()
    llama.eval(tokens)
    difference = (torch.tensor(llama.scores[llama.n_tokens - 1]) - expected).abs().max() / expected.abs().max()
    (answer,) = generate_answers(model, tokenizer, [row], max_new_tokens)
    said = llama.create_completion(tokens, max_tokens=max_new_tokens, temperature=0, repeat_penalty=1.0)
    is_same = said["choices"][0]["text"] == answer
    if not is_same:
        print(f"{answer!r} in Transformers, in llama.cpp {said['choices'][0]['text']!r}")
    return batch["input_ids"][0].tolist() == tokens, is_same, difference.item()


def _tokens(text: str, llama: Llama) -> list[int]:
    return llama.tokenize(text.encode(), add_bos=True, special=True)  # a begin token only where the file asks for it


def main() -> None:
    """Tune, compare, and write the record."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        bases = {
            model_type: make_base(model_type, pre_tokenizer, place / f"small_{model_type}")
            for model_type, pre_tokenizer in FAMILIES.items()
        }
        full = ("--learning_rate", "2e-3", "--max_steps", "300")
        runs = [tuned_on("assets/embedded_base", LORA, place / "results", "--max_steps", "120")]
        runs += [tuned_on(base, FULL, place / "results", *full) for base in bases.values()]
        found = [compare(tuned, weight_type, place) for tuned, weight_type in product(runs, WEIGHT_TYPES)]
    packages = {name: package_version(name) for name in PACKAGES}
    write_json({"packages": packages, "compared": found}, RECORD)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
