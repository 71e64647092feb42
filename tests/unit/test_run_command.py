"""The command that the planner's answer ends with is the plan's own, by the folder's own parser."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.folder_runs import run_of_folder
from common.checks.inputs import check_folder
from common.checks.planner_options import cluster_of, evaluation_of, job_of, read_options
from common.checks.run_command import command_of_run, last_lines, run_command
from common.hardware.devices import find_gpu
from common.planning.architectures import read_architecture
from common.planning.job import ALL_LINEAR, Job, job_of_run
from common.planning.model_configs import MODEL_CONFIGS
from common.planning.plans import Plan
from common.planning.ranking import ranked_plans

QUESTIONS = (
    "--model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 4 --attention flash",
    "--model qwen2.5-7b --gpu h100 --batch-size 4 --use-liger-kernel true",
    "--model llama-3.2-1b --gpu a5000 --gpus 4 --batch-size 4 --lora-rank 32 --target-modules q_proj,v_proj",
    "--model llama-3.2-3b --gpu v100-16gb --gpus 2 --seq-len 500",
    "--model llama-27m --gpu cpu --seq-len 128",
    "--model roberta-large --gpu a100-80gb --gpus 2 --classes 3 --seq-len 256 --batch-size 8",
    "--model bart-large-cnn --gpu v100-16gb --gpus 4 --target-len 100 --technique full",
    "--model llama-3.2-1b --gpu a6000 --task rewards --seq-len 256 --max-new-tokens 32 --batch-size 16",
)


def plans_of(question: str) -> list[Plan]:
    options = read_options(question.split())
    architecture = read_architecture(options.model, classes=options.classes)
    job = replace(job_of(options), evaluation=evaluation_of(options, architecture))
    return ranked_plans(
        architecture, job, cluster_of(options), {}, options.techniques,
        (options.parallel,) if options.parallel else None,
    )  # fmt: skip


def run_of(command: str) -> RunConfig:
    """Return the run that `make run FOLDER=... ARGS="..."` starts."""
    make, target, folder, arguments = shlex.split(command)
    assert (make, target, folder[:7], arguments[:5]) == ("make", "run", "FOLDER=", "ARGS=")
    return run_of_folder(Path(folder[7:]), shlex.split(arguments[5:]))


def in_common(job: Job) -> Job:
    """Return the job without what means nothing for it, or has two names."""
    adapters, own = job.method.has_adapters, {"cpu_operations": False, "evaluation": None, "draws_weights": False}
    if adapters and job.target_modules == ALL_LINEAR:
        own["target_modules"] = ()
    if job.parallelism.uses_deepspeed and job.precision == "bf16-mixed":
        own["precision"] = "bf16"
    return replace(
        job,
        **own,
        lora_rank=job.lora_rank if adapters else Job.lora_rank,
        quantization=job.quantization if job.method.quantizes else Job.quantization,
    )


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_plan_s_command_is_the_plan_s_run(question: str) -> None:
    model, plans = read_options(question.split()).model, plans_of(question)
    assert run_command(plans[0], model), "the recommended one has a command"
    for plan in plans:
        try:
            command = run_command(plan, model)
        except BadInputError:
            continue
        run, job = run_of(command), plan.job
        assert in_common(job_of_run(run, job.batch)) == in_common(job), command
        assert run.per_device_train_batch_size == job.batch.rows
        assert {name: getattr(run, name) for name in job.batch.lengths} == job.batch.lengths
        assert run.per_device_eval_batch_size in (0, job.evaluation.rows)  # 0: the run chooses as the planner did
        check_folder(run)  # its workflow does what is asked
        assert run.gpu == plan.cluster.gpus[0].name or run.device == "cpu"
        assert read_architecture(run.model).parameters == read_architecture(model).parameters


@pytest.mark.parametrize(
    ("model", "question", "said"),
    [
        ("qwen2.5-7b", "--gpu v100-16gb --gpus 2 --technique lora --parallel pp --batch-size 4",
         "fp16-mixed, which pp does not scale losses for"),
        ("qwen2.5-7b", "--gpu a6000 --gpus 2 --technique lora --parallel mp", "none does lora with mp"),
        ("roberta-large", "--gpu a6000 --seq-len 128 --technique full", "with --classes it is a classifier"),
    ],
)  # fmt: skip
def test_a_plan_that_no_folder_takes_says_why(model: str, question: str, said: str) -> None:
    plan = plans_of(f"--model {model} {question}")[0]
    with pytest.raises(BadInputError, match=said):
        run_command(plan, model)


@pytest.mark.parametrize(
    ("question", "folder", "ranks"),
    [
        (
            "--gpu a6000 --gpus 8 --nodes 2 --technique lora --parallel ddp --batch-size 14",
            "2.2_lora_finetuning_with_ddp/run_3_2nodes_a6000_48g_x4",
            4,
        ),
        (
            "--gpu a100-80g --gpus 16 --nodes 2 --technique full --parallel fsdp --dp-replicate-size 2",
            "2.6_full_finetuning_with_fsdp/run_4_2nodes_a100_80g_x8",
            8,
        ),
    ],
)
def test_a_plan_for_several_machines_has_the_command_of_each(question: str, folder: str, ranks: int) -> None:
    command = run_command(plans_of(f"--model qwen2.5-7b --seq-len 1024 {question}")[0], "qwen2.5-7b")
    launched = f"torchrun --nnodes 2 --nproc_per_node {ranks} --rdzv_backend c10d"
    assert command.startswith(f"on each machine: cd {folder} && {launched}")
    run = run_of_folder(Path(folder), shlex.split(command.partition(".py")[2]))
    assert (run.nodes, run.ranks_per_node) == (2, ranks)


def test_where_the_first_plan_has_no_command_the_next_one_s_stands_there() -> None:
    plans = plans_of("--model qwen2.5-7b --gpu v100-16gb --gpus 4")
    _, run = last_lines(plans, 1000, lambda plan: run_command(plan, "qwen2.5-7b"))
    reason, _, command = run.partition(" For QLoRA, ddp, checkpointed: ")
    assert "no run folder takes this plan: none does lora with mp" in reason
    assert run_of(command).technique == "qlora"


def test_a_model_of_one_s_own_is_named_by_its_place(tmp_path: Path) -> None:
    config = json.loads((MODEL_CONFIGS / "llama-3.2-1b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    for name in (str(tmp_path), f"{tmp_path}/config.json"):
        plan = plans_of(f"--model {name} --gpu a6000 --technique lora")[0]
        run = run_of(run_command(plan, name))
        assert (run.model, run.weights) == (str(tmp_path), "pretrained")


@pytest.mark.parametrize("own", [{}, {"task": "rewards", "parallel": "single", "devices": 1, "max_new_tokens": 20,
                                      "per_device_train_batch_size": 16}], ids=["chat", "rewards"])  # fmt: skip
def test_a_dry_run_s_command_is_its_run(tmp_path: Path, own: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", "hidden_size": 64, "num_hidden_layers": 6}))
    tried = {
        "technique": "full", "model": str(tmp_path), "precision": "bf16-mixed", "target_modules": "all",
        "gpu": find_gpu("a6000").name, "parallel": "ddp", "devices": 2, "per_device_train_batch_size": 3,
        "max_length": 96, **own,
    }  # fmt: skip
    run = run_of(command_of_run(RunConfig(**tried, weights="random"), "cuda"))
    expected = {**tried, "weights": "pretrained", "device": "cuda"}
    assert {name: getattr(run, name) for name in expected} == expected
