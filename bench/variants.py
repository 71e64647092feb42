"""Compare PEFT's variants of LoRA on the real model (`make real`): the same 40 steps, each at two learning rates.

python -m bench.variants                                  # every run that has no record yet, two at a time
python -m bench.variants dora --learning_rate 5e-4        # one of them
"""

import argparse
import os
import shlex
import subprocess
import sys
from itertools import product
from multiprocessing.pool import ThreadPool

from peft import LoraConfig, OFTConfig, PeftConfig, get_peft_model

from bench.run_record import keep_record
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.models.real_models import SMOLLM2
from common.records.store import VARIANTS as RECORDS
from common.training.loop import TrainingLoop
from common.training.steps import evaluate_after, evaluate_before, load, record, sum_up

ON = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, **ON}
OFT = "oft"
VARIANTS: dict[str, PeftConfig] = {
    "lora": LoraConfig(**LORA),
    "rank-stabilized": LoraConfig(use_rslora=True, **LORA),
    "dora": LoraConfig(use_dora=True, **LORA),
    "pissa": LoraConfig(init_lora_weights="pissa_niter_16", **LORA),
    OFT: OFTConfig(oft_block_size=32, **ON),
}
RATES = (5e-4, 2e-3)
PROCESSES = 2
RUN = RunConfig(
    run_folder="2.1_lora_finetuning/run_0_cpu_x1",
    model=SMOLLM2,
    data="assets/docstrings",
    per_device_train_batch_size=8,
    max_steps=40,
    eval_steps=10,
    validation_rows=48,
    test_rows=20,
    report_to="none",
)


def run_of(variant: str, rate: float) -> RunConfig:
    """Return a variant's run, whose settings say of the adapters what PEFT's config does (OFT's have no such)."""
    config = VARIANTS[variant]
    adapters = {} if variant == OFT else {
        "lora_r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
    }  # fmt: skip
    return RUN.changed_to(learning_rate=rate, run_name=f"variant-{variant}-lr{rate:g}", **adapters)


def compare(variant: str, rate: float) -> None:
    """Train one variant by 2.1's loop, and record it with its name and its own command."""
    run, config = run_of(variant, rate), VARIANTS[variant]
    with run_started(run) as log:
        model, tokenizer, data = load(log)
        before = evaluate_before(log, tokenizer, data, model=model)
        with log.phase("build trainer"):
            loop = TrainingLoop(get_peft_model(model, config), tokenizer, data, log)
        with log.phase("training"):
            for step in loop.steps():
                for batch, _ in step:
                    loop.loss(batch, step.label_count).backward()
                loop.update()
        trained = sum_up(loop)
        after = evaluate_after(log, loop.model.merge_and_unload().eval(), tokenizer, data)
        asked = {"command": shlex.join(["python", *_command(variant, rate)]), "variant": variant}
        record(log, before, after, **trained, **asked)
        keep_record(log.folder, REPOSITORY / RECORDS)


def compare_apart(variant: str, rate: float) -> None:
    """Train one variant in a process of its own, with one thread, unless it has a record."""
    if not (REPOSITORY / RECORDS / f"variant-{variant}-lr{rate:g}.json").exists():
        command = [sys.executable, *_command(variant, rate)]
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


def _command(variant: str, rate: float) -> list[str]:
    return ["-m", "bench.variants", variant, "--learning_rate", f"{rate:g}"]


def main() -> None:
    """Run one variant, or each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", nargs="?", choices=VARIANTS, help="one of PEFT's; without it: all")
    parser.add_argument("--learning_rate", type=float, help="of the one variant")
    options = parser.parse_args()
    if options.variant:
        if options.learning_rate is None:
            parser.error("a single variant needs --learning_rate.")
        compare(options.variant, options.learning_rate)
        return
    with ThreadPool(PROCESSES) as pool:
        pool.starmap(compare_apart, product(VARIANTS, RATES), chunksize=1)


if __name__ == "__main__":
    main()
