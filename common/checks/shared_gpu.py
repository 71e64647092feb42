"""Two ranks on one GPU, which talk by NCCL as they would on two: what they send, and the losses that they train to.

Each rank has a torchrun of its own, as on two machines. `smoke` checks and times what ranks send. A pair takes five SGD
steps beside one device, whose losses it must have. `restart` kills a rank of a pair, which must start again and end
with the losses of a pair that nothing happened to. On the CPU the same runs over gloo. Neither speed nor the links of
two cards are seen so.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.base.paths import REPOSITORY
from common.base.torchrun import meeting_file
from common.checks.processes import FAILS, LEFT_OUT, WORKS, failed, not_installed, run_processes
from common.records.store import RECORD_NAME, Record, load_record
from common.runtime.machines import LOOPBACK

Found = dict[str, Any]  # `status`, `why`, and what was measured
SMOKE, RESTART = "smoke", "restart"
RESTARTED_PAIR, KILLED_STEP = "2.2 DDP", 3
LIMIT_S = 100.0
LORA = "2.1_lora_finetuning/run_0_cpu_x1/my_workflow_lora_finetuning.py"
LORA_DDP = "2.2_lora_finetuning_with_ddp/run_0_cpu_x2/my_workflow_lora_finetuning_with_ddp.py"
QLORA = "2.3_qlora_finetuning/run_0_cpu_x1/my_workflow_qlora_finetuning.py"
FULL = "2.4_full_finetuning/run_0_cpu_x1/my_workflow_full_finetuning.py"
SHARDED = "2.6_full_finetuning_with_fsdp/run_0_cpu_x2/my_workflow_full_finetuning_with_fsdp.py"
PIPELINE = "2.7_full_finetuning_with_pp/run_0_cpu_x2/my_workflow_full_finetuning_with_pp.py"
CLASSIFIER = "3.1_text_classification/run_0_cpu_x2/my_workflow_text_classification.py"
SUMMARIZER = "3.2_summarization/run_0_cpu_x2/my_workflow_summarization_{}.py"

# with which two ranks take the steps of one device: the same rows in the same order, nothing drawn by chance, and an
# optimizer that does not hide a gradient's scale. Of 33 rows one is left for the last step, where one rank has none
SAME = (
    "--train_rows=33", "--validation_rows=9", "--per_device_eval_batch_size=4", "--test_rows=2", "--max_new_tokens=1",
    "--max_steps=5", "--eval_steps=0.2", "--warmup_steps=0", "--optimizer=sgd", "--learning_rate_scaling=none",
    "--train_sampling_strategy=group_by_length", "--report_to=none", "--independent_judge=none",
)  # fmt: skip
OF_RANK, WHOLE = "--batch_size=4", "--batch_size=8"
ALONE = ("--parallel=single", "--devices=1")
# at these rates losses fall clearly within five steps; some of the gradients are longer than the norm, others are not
ALL_WEIGHTS = ("--learning_rate=0.05", "--max_grad_norm=6.5")
ADAPTERS = ("--learning_rate=0.001", "--max_grad_norm=46", "--lora_dropout=0")
# by precision, the largest relative difference of a loss. In fp32 sums differ in their order alone. bf16 rounds to 8
# bits, FSDP also between the layers: on a CPU the difference was up to 2e-3
TOLERANCES = {"fp32": 1e-4, "bf16-mixed": 5e-3}


@dataclass(frozen=True)
class Pair:
    """Two ranks of a workflow, and the one device whose losses they must have.

    Attributes:
        script, parallel, settings: What the ranks run.
        one, one_settings: What the one device runs.
        both: Settings of both, besides `SAME`.
        precision: Of both, and so the tolerance.
        packages: What must be importable.
        has_encoder: The model is a small encoder without dropout, which is made for it.
    """

    name: str
    script: str
    parallel: str
    settings: tuple[str, ...]
    one: str
    one_settings: tuple[str, ...]
    both: tuple[str, ...]
    precision: str = "fp32"
    packages: tuple[str, ...] = ()
    has_encoder: bool = False


PAIRS = {
    each.name: each
    for each in (
        Pair("2.2 DDP", LORA_DDP, "ddp", (OF_RANK,), LORA, (WHOLE,), ADAPTERS),
        Pair("2.3 DDP", QLORA, "ddp", (OF_RANK,), QLORA, (WHOLE,), ADAPTERS, packages=("bitsandbytes",)),
        Pair("2.6 DDP", SHARDED, "ddp", (OF_RANK,), FULL, (WHOLE,), ALL_WEIGHTS),
        Pair("2.6 FSDP", SHARDED, "fsdp", (OF_RANK,), FULL, (WHOLE,), ALL_WEIGHTS),
        Pair("2.6 FSDP, bf16", SHARDED, "fsdp", (OF_RANK,), FULL, (WHOLE,), ALL_WEIGHTS, "bf16-mixed"),
        Pair(
            "2.6 QLoRA", SHARDED, "fsdp", ("--technique=qlora", OF_RANK), QLORA, (WHOLE,), ADAPTERS,
            packages=("bitsandbytes",),
        ),
        Pair("2.6 ZeRO-3", SHARDED, "zero3", (OF_RANK,), FULL, (WHOLE,), ALL_WEIGHTS, packages=("deepspeed",)),
        Pair("2.7 PP", PIPELINE, "pp", (WHOLE, "--micro_batches=4"), FULL, (WHOLE,), ALL_WEIGHTS),
        Pair(
            "3.1 TP", CLASSIFIER, "tp", (WHOLE,), CLASSIFIER, (*ALONE, WHOLE),
            ("--learning_rate=0.03", "--max_grad_norm=4.3"), has_encoder=True,
        ),
        Pair(
            "3.2 DDP", SUMMARIZER.format("machines"), "ddp", (OF_RANK,),
            SUMMARIZER.format("torchrun"), (*ALONE, "--partitions=2", OF_RANK),
            ("--learning_rate=0.1", "--max_grad_norm=0.92"),
        ),
    )
}  # fmt: skip
PART_NAMES = (SMOKE, *PAIRS, RESTART)


# -- two ranks


def environment_of(rank: int, device: str) -> dict[str, str]:
    """Return what a rank is told: on a GPU, how NCCL takes two ranks on it.

    NCCL refuses two ranks of a host on one GPU (`Duplicate GPU detected` in its init.cc), and knows a host by
    `NCCL_HOSTID`: here each rank names another, and they talk through sockets. From 2.30 on NCCL has a switch of its
    own for it, which older versions ignore.
    """
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if device == "cpu":
        return told
    return told | {
        "NCCL_HOSTID": f"h{rank}", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket",
        "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
    }  # fmt: skip


def torchruns(program: Sequence[str], max_restarts: int = 0) -> list[list[str]]:
    """Return the commands of two torchruns with one rank each, which meet in a file of their own."""
    file = meeting_file()
    return [
        [
            "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", f"--max_restarts={max_restarts}",
            "--rdzv_backend=c10d", "--rdzv_conf=store_type=file", f"--rdzv_endpoint={file}",
            f"--local_addr={LOOPBACK}", *program,
        ]
        for _ in range(2)
    ]  # fmt: skip


def ranks_of(
    pair: Pair, device: str, folder: Path, name: str, *settings: str, max_restarts: int = 0
) -> list[list[str]]:
    """Return the commands of a pair's two ranks, whose record is in the results `name` of `folder`."""
    own = ("--devices=2", "--nodes=2", f"--parallel={pair.parallel}", *pair.settings)
    return torchruns([pair.script, *common_settings(pair, device, folder, name), *own, *settings], max_restarts)


def common_settings(pair: Pair, device: str, folder: Path, name: str) -> list[str]:
    """Return what ranks and the one device have in common, but for the results' `name`."""
    model = [f"--model={encoder_in(folder)}"] if pair.has_encoder else []
    places = [f"--results_root={folder}", f"--run_name={name}"]
    return [*SAME, *pair.both, *model, f"--precision={pair.precision}", f"--device={device}", *places]


def encoder_in(folder: Path) -> Path:
    """Make a small BERT at its random start, without dropout, unless it is there."""
    path = folder / "encoder"
    if not path.exists():
        import torch  # here: the other pairs need not wait for these imports
        from transformers import AutoTokenizer, BertConfig, BertModel

        tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "assets" / "embedded_base", trust_remote_code=False)
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=64, initializer_range=0.2, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        BertModel(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def run_all(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], limit_s: float) -> Found:
    """Run commands at once; return why one of them failed, or that they took too long: empty where all is well."""
    ended = run_processes(commands, environments, limit_s)
    bad = next((each for each in ended if each.returncode), None) or next(
        (each for each in ended if each.returncode is None), None
    )
    return failed(bad, limit_s) if bad else {}


# -- what is found out


def smoke(device: str, limit_s: float, folder: Path) -> Found:
    """Send each kind of message between two ranks: its milliseconds."""
    file = folder / "milliseconds.json"
    commands = torchruns(["-m", "common.checks.collectives", device, str(file)])
    wrong = run_all(commands, [environment_of(rank, device) for rank in range(2)], limit_s)
    if wrong:
        return wrong
    taken_ms = json.loads(file.read_text(encoding="utf-8"))
    why = "1 MiB in " + ", ".join(f"{name} {each:.1f} ms" for name, each in taken_ms.items())
    return {"status": WORKS, "why": why, "milliseconds": taken_ms}


def try_pair(pair: Pair, device: str, limit_s: float, folder: Path) -> Found:
    """Take the steps of two ranks and those of one device at the same time, and compare their losses."""
    one = [pair.one, *pair.one_settings, *common_settings(pair, device, folder, "one")]
    commands = [*ranks_of(pair, device, folder, "two"), one]
    wrong = run_all(commands, [environment_of(rank, device) for rank in (0, 1, 0)], limit_s)
    return wrong or compared(record_in(folder, "two"), record_in(folder, "one"), TOLERANCES[pair.precision])


def restart(device: str, limit_s: float, folder: Path) -> Found:
    """Kill rank 1 of a pair; both ranks must start again after the newest checkpoint, and end with the same losses."""
    pair, once = PAIRS[RESTARTED_PAIR], folder / "killed-once"
    fault = {"FAULT": f"kill rank=1 step={KILLED_STEP} once={once}"}
    commands = [
        *ranks_of(pair, device, folder, "killed", "--save_steps=1", max_restarts=1),
        *ranks_of(pair, device, folder, "whole", "--save_steps=1"),
    ]
    environments = [environment_of(rank, device) | told for told in (fault, {}) for rank in range(2)]
    wrong = run_all(commands, environments, limit_s)
    if wrong or not once.exists():
        return wrong or {"status": FAILS, "why": f"rank 1 was not killed in step {KILLED_STEP}"}
    return compared(record_in(folder, "killed"), record_in(folder, "whole"), TOLERANCES[pair.precision])


def record_in(folder: Path, name: str) -> Record:
    """Return the record of a run."""
    return load_record(folder / "results" / name / RECORD_NAME)


def compared(record: Record, reference: Record, tolerance: float) -> Found:
    """Return whether two runs have the same losses, in training and in validation: their largest relative difference.

    |a - b| / |b|, b the reference's.
    """
    kinds = ("training_losses", "validation_losses")
    ours, theirs = ([tuple(each) for kind in kinds for each in run[kind]] for run in (record, reference))
    losses = {
        "losses": [loss for _, loss in record["training_losses"]],
        "one_device_losses": [loss for _, loss in reference["training_losses"]],
    }
    if [step for step, _ in ours] != [step for step, _ in theirs]:
        return {"status": FAILS, "why": "it has not the steps of the other run", **losses}
    differences = [abs(a - b) / abs(b) for (_, a), (_, b) in zip(ours, theirs, strict=True)]
    is_near = all(each <= tolerance for each in differences)  # False where a loss is no number
    worst = max(differences, key=lambda each: math.inf if math.isnan(each) else each)
    why = f"losses differ by {worst:.1e} at most, {tolerance:.0e} may be"
    return {"status": WORKS if is_near else FAILS, "why": why, **losses, "worst_relative": worst}


def find_out(name: str, device: str, limit_s: float = LIMIT_S) -> Found:
    """Return what was found of a part on `cuda` or `cpu`; whatever it started has ended then."""
    pair = PAIRS.get(RESTARTED_PAIR if name == RESTART else name)
    missing = not_installed(pair.packages) if pair else ""
    with tempfile.TemporaryDirectory(prefix="shared-gpu-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        if missing:
            return {"status": LEFT_OUT, "why": missing}
        if name == SMOKE:
            return smoke(device, limit_s, folder)
        if name == RESTART:
            return restart(device, limit_s, folder)
        return try_pair(pair, device, limit_s, folder)
