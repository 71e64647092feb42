"""The planner's answers: its contract, its reasons, its refusals, and its speed."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.specs import TECHNIQUES
from common.checks.planner_command import main
from common.hardware.devices import CPU_DEVICE, find_gpu
from common.planning.architectures import as_classifier, read_architecture
from common.planning.device_maps import device_map_of
from common.planning.gpu_overhead import CPU_PROCESS_GIB
from common.planning.job import BatchShape, Job
from common.planning.plans import ABOUT_AS_FAST, architecture_of_run, job_of_run, make_plan, plan_run, ranked_plans
from common.planning.shares import trained_parameters, whole_model
from common.planning.step_speed import step_flops
from common.planning.terms import PARTS
from common.planning.time_plan import Cluster

A6000, A5000 = find_gpu("a6000"), find_gpu("a5000")
ENTRY_KEYS = {
    *("technique", "parallel", "per_device", "max_batch_size", "step_time_s", "tokens_per_s", "tokens_per_s_best"),
    *("cost_usd_per_epoch", "why"),
}
DEVICE_KEYS = {"device", *(f"{part}_gib" for part in PARTS), "overhead_gib"} | {
    *("allocated_gib", "peak_gib", "safe_gib", "capacity_gib", "fits")
}


def ask(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["planner", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # noqa: ANN201
    return lambda command: ask(command, capsys, monkeypatch)


def test_the_json_is_as_contracted(asked) -> None:  # noqa: ANN001
    code, out, _ = asked("--model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 2 --seq-len 512 --json")
    answer = json.loads(out)
    assert code == 0
    assert {"model", "ranked", "recommendation", "run", "assumptions"} <= answer.keys()
    for entry in answer["ranked"]:
        assert entry.keys() >= ENTRY_KEYS
        assert [device["device"] for device in entry["per_device"]] == [0, 1]
        for device in entry["per_device"]:
            assert device.keys() >= DEVICE_KEYS
            total = sum(device[f"{part}_gib"] for part in (*PARTS, "overhead"))
            assert total == pytest.approx(device["peak_gib"])
            assert device["allocated_gib"] < device["peak_gib"] < device["safe_gib"]
            assert device["fits"] == (device["safe_gib"] <= device["capacity_gib"])
    fits = [all(device["fits"] for device in entry["per_device"]) for entry in answer["ranked"]]
    assert fits == sorted(fits, reverse=True)


def test_a_named_way_is_the_only_entry(asked) -> None:  # noqa: ANN001
    code, out, _ = asked("--model llama-3.1-8b --technique lora --parallel ddp --gpu a6000 --gpus 4 --json")
    entries = json.loads(out)["ranked"]
    assert code == 0
    assert [(entry["technique"], entry["parallel"]) for entry in entries] == [("lora", "ddp")]
    assert entries[0]["step_time_s"] > 0
    assert entries[0]["cost_usd_per_epoch"] > 0


def test_short_summaries_take_less_than_ones_as_long_as_the_text(asked) -> None:  # noqa: ANN001
    command = "--model bart-large-cnn --technique full --parallel single --gpu a6000 --batch-size 4 --seq-len 1024"
    long, short, same = (
        json.loads(asked(f"{command} {option} --json")[1]) for option in ("", "--target-len 128", "--target-len 1024")
    )
    assert short["ranked"][0]["per_device"][0]["peak_gib"] < 0.8 * long["ranked"][0]["per_device"][0]["peak_gib"]
    assert short["ranked"][0]["step_time_s"] < 0.7 * long["ranked"][0]["step_time_s"]
    assert same["ranked"] == long["ranked"]
    assert "rows of 1,024 tokens with summaries of 128, learnt as a whole" in short["assumptions"][0]
    entry = short["ranked"][0]
    assert entry["tokens_per_s"] == pytest.approx(4 * (1024 + 128) / entry["step_time_s"])
    _, out, _ = asked(f"{command} --target-len 128 --explain")
    assert "encoder S = E = 1024 tokens, T = TE = B S = 4,096, decoder S = 128 tokens, T = B S = 512" in out


def test_the_terms_are_explained(asked) -> None:  # noqa: ANN001
    _, out, _ = asked("--model llama-3.1-8b --technique lora --parallel single --gpu a6000 --explain")
    assert "VRAM = weights + gradients + optimizer states + activations" in out
    assert "8,030,261,248 x 2 bytes" in out
    assert "T H 4" in out


def test_what_does_not_fit_ends_with_1_and_advice(asked) -> None:  # noqa: ANN001
    code, out, _ = asked("--model llama-3.1-70b --technique full --parallel single --gpu a6000")
    assert code == 1
    assert "does not fit" in out
    assert "--technique lora" in out


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--model nothing --gpu a6000", "There is no shape of nothing"),
        ("--model llama-3.1-8b --gpu a6001", "Did you mean RTX A6000 48GB?"),
        ("--model llama-3.1-8b --gpu a6001", "--gpu-memory-gib 24 --gpu-tflops 70"),
        ("--model llama-3.1-8b --gpu mine --gpu-memory-gib 24", "pass its --gpu-tflops"),
        ("--model llama-3.1-8b --gpu a6000 --gpu a5000 --gpus 3", "name one for all, or each of them"),
        ("--model llama-3.1-8b --gpu a6000 --gpus 4 --nodes 3", "cannot be spread evenly"),
        ("--model llama-3.1-8b --gpu a6000 --gpus 4 --nodes 2 --parallel mp", "mp is one process on one machine"),
        (
            "--model llama-3.1-8b --gpu a6000 --gpus 4 --parallel ddp --dp-replicate-size 2",
            "for --parallel fsdp, not ddp",
        ),
        ("--model llama-3.1-8b --gpu a6000 --gpus 4 --dp-replicate-size 3", "cannot form 3 equal groups"),
        ("--model llama-3.1-8b --gpu a6000 --batch-size 0", "--batch-size is 0, but must be above 0"),
        ("--model roberta-large --gpu a6000 --seq-len 1000", "pass --seq-len 512 or less"),
        ("--model llama-3.1-8b --gpu a6000 --technique full --quantization nf4", "14.5 instead of 16 bytes"),
        ("--model llama-3.1-8b --gpu a6000 --technique lora --quantization nf4", "pass --technique qlora"),
        ("--model llama-3.1-8b --gpu a6000 --technique lora --target-modules wq", "no linear layer 'wq'"),
        (
            "--model llama-3.2-1b --gpu a6000 --gpus 20 --parallel mp --technique full",
            "16 layers, too few for 20 stages",
        ),
        ("--model llama-3.1-8b --gpu v100-16gb --precision bf16", "does not compute in bf16"),
        ("--model llama-3.1-8b --gpu a6000 --gpus 2 --link wifi", "pass nvlink, pcie, or ethernet-"),
        ("--model llama-3.1-8b", "No --gpu is named"),
        ("--model llama-3.1-8b --gpu a6000 --gpus 2 --parallel ddp --micro-batches 2", "is for --parallel pp"),
        (
            "--model llama-3.1-8b --gpu a6000 --technique lorra",
            "'lorra' is none of its choices",
        ),
        ("--model llama-3.1-8b --gpu a6000 --gpus 4 --link nvlink", "An NVLink bridge joins two RTX A6000 48GB, not 4"),
        ("--model llama-3.1-8b --gpu a6000 --parallel single --against-nodes 4", "compares data-parallel plans"),
        ("--model llama-3.1-8b --gpu a6000 --gpus 2 --parallel tp", "planned for encoders (BERT, RoBERTa) alone"),
        ("--model roberta-large --gpu a6000 --gpus 3 --parallel tp --seq-len 64", "16 attention heads, which 3 ranks"),
        (
            "--model roberta-large --gpu a6000 --gpus 2 --parallel tp --seq-len 64 --quantization nf4",
            "does not divide weights in 4 bits",
        ),
        ("--model roberta-large --gpu a6000 --classes 1", "--classes is 1, but a classifier has at least 2"),
        ("--model llama-3.1-8b --gpu a6000 --classes 3", "classifiers are planned for encoders"),
        (
            "--model roberta-large --gpu a6000 --gpus 2 --parallel tp --technique full --seq-len 64 --against-nodes 2",
            "compares data-parallel plans",
        ),
        ("--model llama-3.1-8b --gpu a6000 --optimizer lion", "'lion' is not known to the planner"),
        (
            "--model llama-3.1-8b --gpu a6000 --target-len 64",
            "llama-3.1-8b is no encoder-decoder",
        ),
        ("--model bart-large-cnn --gpu a6000 --target-len 0", "--target-len is 0, but must be above 0"),
        ("--model bart-large-cnn --gpu a6000 --target-len 2000", "--target-len 2000 is longer than bart-large-cnn"),
    ],
)
def test_bad_questions_end_in_one_sentence(command: str, sentence: str, asked) -> None:  # noqa: ANN001
    code, out, err = asked(command)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_a_gpu_by_hand(asked) -> None:  # noqa: ANN001
    command = "--model llama-3.2-1b --gpu mine --gpu-memory-gib 30 --gpu-tflops 100 --usd-per-hour 2 --json"
    _, out, _ = asked(command)
    entry = json.loads(out)["ranked"][0]
    assert entry["per_device"][0]["capacity_gib"] == 30
    assert entry["cost_usd_per_epoch"] > 0


USUAL_LOOP_S = 0.5  # what `LOOP` takes on a usual machine; test machines were seen to take 0.7 to 1.3 s
LOOP = "for _ in range(20_000_000): pass"


def processor_s(*arguments: str) -> float:
    """Return the seconds of a processor that Python takes with them: other tests share the machine."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, check=True, capture_output=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def test_the_answer_takes_less_than_a_second_and_no_torch() -> None:
    question = ["--model", "llama-3.1-8b", "--gpu", "a6000", "--gpus", "4"]
    turns = [(processor_s("-m", "common.planner", *question), processor_s("-c", LOOP)) for _ in range(4)]
    assert 0 < min(answer_s / max(1, loop_s / USUAL_LOOP_S) for answer_s, loop_s in turns) < 1
    light = "import sys, common.planner; print('torch' in sys.modules, 'pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", light], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_512_gpus_on_64_machines_are_one_command(asked) -> None:  # noqa: ANN001
    code, out, _ = asked("--model llama-3.1-70b --gpu h100 --gpus 512 --nodes 64 --seq-len 2048 --json")
    answer = json.loads(out)
    assert code == 0
    assert answer["figures"] == "projected"
    assert len(answer["ranked"][0]["per_device"]) == 512


def test_on_several_machines_hybrid_sharding_is_ranked_and_explained(asked) -> None:  # noqa: ANN001
    question = "--model llama-3.1-8b --gpu a100-80g --gpus 16 --nodes 2 --technique full"
    ranked = json.loads(asked(f"{question} --json")[1])["ranked"]
    step_s = {(plan["parallel"], plan["dp_replicate_size"]): plan["step_time_s"] for plan in ranked}
    assert step_s["fsdp", 2] < step_s["fsdp", 1]
    assert "mp" not in {parallel for parallel, _ in step_s}  # one process has no GPUs of another machine
    _, out, _ = asked(f"{question} --parallel fsdp --dp-replicate-size 2 --explain")
    assert "GB within a copy by NVLink" in out
    assert "that 8 rings share" in out
    assert "fsdp-2x8: hybrid sharding, 2 copies of the model, each sharded by 8 GPUs" in out


def test_it_says_from_which_network_on_more_machines_pay(asked) -> None:  # noqa: ANN001
    question = (
        "--model qwen2.5-7b --gpu a100-80g --technique full --parallel fsdp --gradient-checkpointing --batch-size 8"
    )
    together = json.loads(asked(f"{question} --gpus 16 --nodes 2 --json")[1])
    alone = json.loads(asked(f"{question} --gpus 8 --json")[1])["ranked"][0]
    assert together["one_machine"]["fits"]
    assert together["one_machine"]["tokens_per_s"] == pytest.approx(alone["tokens_per_s"])
    gbit = together["one_machine"]["more_pay_from_gbit_per_s"]
    for share, pays in ((0.9, False), (1.1, True)):
        over_it = json.loads(asked(f"{question} --gpus 16 --nodes 2 --link ethernet-{share * gbit:.6f} --json")[1])
        plan = next(each for each in over_it["ranked"] if each["dp_replicate_size"] == 2)
        assert (plan["tokens_per_s"] > alone["tokens_per_s"]) == pays
    assert f"more machines pay from {gbit:.3g} Gbit/s between them" in asked(f"{question} --gpus 16 --nodes 2")[1]
    assert "one_machine" not in json.loads(asked(f"{question} --gpus 8 --json")[1])
    large = "--model llama-3.1-70b --technique full --parallel fsdp --gpu h100 --gpus 16 --nodes 2 --seq-len 1024"
    assert "one machine alone cannot hold it" in asked(large)[1]


def test_the_page_of_several_machines_has_the_planners_figures(asked) -> None:  # noqa: ANN001
    page = (REPOSITORY / "docs" / "several_machines.md").read_text(encoding="utf-8").replace("\\\n", "")
    full = re.search(r"common\.planner (--model .*--nodes 2.*)", page)[1]
    lora = "--model qwen2.5-7b --gpu a6000 --gpus 8 --nodes 2 --technique lora --parallel ddp --seq-len 1024"
    said = re.findall(r"from ([\d.]+) Gbit/s on", page)
    found = [
        json.loads(asked(f"{question} --json")[1])["one_machine"] for question in (full, f"{lora} --batch-size 14")
    ]
    assert said == [f"{each['more_pay_from_gbit_per_s']:.3g}" for each in found]


def test_the_largest_batch_fits_and_one_row_more_does_not() -> None:
    architecture = read_architecture("llama-3.2-3b")
    for parallel, devices in (("single", 1), ("ddp", 2), ("mp", 2)):
        job = Job(technique="lora", parallel=parallel, devices=devices, batch=BatchShape(1, 1024, 1024))
        cluster = Cluster((A5000,) * devices)
        largest = make_plan(architecture, job, cluster, {}).max_batch_size
        at, above = (
            make_plan(architecture, replace(job, batch=BatchShape(rows, 1024, 1024)), cluster, {})
            for rows in (largest, largest + 1)
        )
        assert at.fits
        assert not above.fits


def test_full_where_it_fits_and_adapters_where_it_does_not(asked) -> None:  # noqa: ANN001
    def best(gpu: str, model: str) -> str:
        _, out, _ = asked(f"--model {model} --gpu {gpu} --seq-len 512 --json")
        return json.loads(out)["ranked"][0]["technique"]

    assert best("a6000", "llama-3.2-1b") == "full"
    _, out, _ = asked("--model llama-3.2-1b --gpu a100-80g --gpus 2 --batch-size 8 --json")
    assert json.loads(out)["ranked"][0]["parallel"] == "ddp"  # it fits one GPU, so each has its own rows
    _, out, _ = asked("--model llama-3.1-8b --gpu a6000 --gpus 4 --technique full --batch-size 4 --json")
    assert json.loads(out)["ranked"][0]["parallel"] == "fsdp"  # it does not, so they share it
    _, out, _ = asked(
        "--model llama-3.1-8b --gpu a6000 --gpus 4 --technique full --batch-size 8 --link ethernet-1 --json"
    )
    assert json.loads(out)["ranked"][0]["parallel"] == "pp"  # and where links are slow, by layers
    assert best("a6000", "llama-3.1-8b") == "lora"
    assert best("t4", "llama-3.1-8b") == "qlora"


def test_an_unknown_architecture_is_planned_by_dry_run(tmp_path: Path, asked) -> None:  # noqa: ANN001
    facts = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**facts, "vocab_size": 500, "n_positions": 128}))
    code, out, _ = asked(f"--model {path} --gpu t4 --technique full --seq-len 64 --precision fp16-mixed --json")
    answer = json.loads(out)
    assert code == 0
    assert "'gpt2'" in answer["assumptions"][0]
    assert answer["run"].startswith("make run FOLDER=2.4_full_finetuning/run_")
    assert f"--model {tmp_path}" in answer["run"]
    assert answer["ranked"][0]["tokens_per_s_best"] is None
    device = answer["ranked"][0]["per_device"][0]
    assert 0 < device["peak_gib"] - device["overhead_gib"] < 0.1
    full, pure = (
        json.loads(asked(f"--model {path} --gpu a6000 --technique full --seq-len 64 {precision} --json")[1])
        for precision in ("", "--precision bf16")
    )
    weights = [entry["ranked"][0]["per_device"][0]["weights_gib"] for entry in (full, pure)]
    assert weights[0] > 1.9 * weights[1]  # full fine-tuning keeps its weights in fp32, as in the closed form
    code, _, err = asked(f"--model {path} --gpu t4 --technique qlora --seq-len 64 --precision fp16-mixed")
    assert code == 2
    assert "Dry runs stand in for lora and full" in err


def test_a_run_is_planned_on_its_folder_s_gpu_or_on_the_cpu() -> None:
    batch = BatchShape(8, 256, 255)
    on_gpu = RunConfig(gpu="RTX A6000 48GB", device="cuda", model="qwen2.5-7b", precision="bf16")
    assert plan_run(on_gpu, batch).cluster.gpus == (A6000,)
    on_cpu = plan_run(RunConfig(), batch)
    assert on_cpu.cluster.gpus[0].name == CPU_DEVICE
    assert on_cpu.devices[0].parts_gib["overhead"] == pytest.approx(CPU_PROCESS_GIB)
    with pytest.raises(BadInputError, match="'adafactor' is not known to the planner"):
        plan_run(RunConfig(optim="adafactor"), batch)


def test_a_divided_run_is_placed_as_its_device_map_says(tmp_path: Path) -> None:
    batch = BatchShape(8, 512, 511)
    run = RunConfig(
        parallel="pp", devices=2, device="cuda", gpu=A6000.name, model="llama-3.2-1b", precision="bf16",
        per_device_train_batch_size=8, micro_batches=4, schedule="gpipe",
    )  # fmt: skip
    balanced = plan_run(run, batch)
    assert (balanced.job.schedule, balanced.job.micro_batches, balanced.job.devices) == ("gpipe", 4, 2)
    assert [share.in_flight for share in balanced.shares] == [4, 4]
    one_f_one_b = replace(run, schedule="1f1b")  # whose first stage holds more
    balanced, even = (plan_run(replace(one_f_one_b, device_map=way), batch) for way in ("balanced", "even"))
    assert [share.layers for share in even.shares] == [(8,), (8,)]
    fullest = [max(device.safe_gib for device in plan.devices) for plan in (balanced, even)]
    assert fullest[0] < fullest[1]
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"": 1, "model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 0}))
    by_file = plan_run(replace(run, device_map=str(path), schedule="1f1b"), batch)
    assert [(share.layers, share.has_embeddings, share.has_head, share.in_flight) for share in by_file.shares] == [
        ((2,), True, False, 2),
        ((14,), False, True, 1),
    ]
    in_turn = plan_run(run.changed_to(parallel="mp", device_map=str(path)), batch)
    assert [(share.layers, share.in_flight) for share in in_turn.shares] == [((2,), 1), ((14,), 1)]
    assert 0 < even.max_batch_size < balanced.max_batch_size
    assert by_file.max_batch_size % 4 == 0
    with pytest.raises(BadInputError, match="no device map nowhere"):
        plan_run(replace(run, device_map="nowhere.json"), batch)


def test_stages_on_one_cpu_device_are_planned_as_one() -> None:
    batch = BatchShape(8, 256, 255)
    marked = plan_run(RunConfig(parallel="mp", stages=2), batch)
    assert (marked.job.parallel, len(marked.devices)) == ("single", 1)
    assert marked.devices[0].peak_gib == plan_run(RunConfig(), batch).devices[0].peak_gib
    assert (
        len(
            plan_run(RunConfig(parallel="pp", devices=2, per_device_train_batch_size=8, micro_batches=2), batch).devices
        )
        == 2
    )


def test_full_runs_train_linear_layers_and_the_command_line_asks_for_them(asked) -> None:  # noqa: ANN001
    architecture, batch = read_architecture("llama-3.2-1b"), BatchShape(1, 1024, 1024)
    run = RunConfig(technique="full", model="llama-3.2-1b", precision="bf16")

    def trained(**settings: str) -> int:
        return trained_parameters(architecture, job_of_run(replace(run, **settings), batch))

    linears = sum(linear.parameters for linear in architecture.stacks[0].linears) * architecture.layers
    by_part = architecture.by_part()
    assert (trained(), trained(target_modules="all")) == (linears, architecture.parameters)
    assert trained(target_modules="q_proj,v_proj") == by_part["q_proj"] + by_part["v_proj"]

    def optimizer_gib(options: str) -> float:
        _, out, _ = asked(f"--model llama-3.2-1b --technique full --parallel single --gpu a6000 {options} --json")
        return json.loads(out)["ranked"][0]["per_device"][0]["optimizer_gib"]

    every = optimizer_gib("")
    assert optimizer_gib("--target-modules all-linear") / every == pytest.approx(linears / architecture.parameters)
    assert optimizer_gib("--target-modules q_proj") / every == pytest.approx(
        by_part["q_proj"] / architecture.parameters
    )


def test_tensor_parallel_and_classifiers_are_asked_for_by_name(asked) -> None:  # noqa: ANN001
    def entry(options: str) -> dict:
        _, out, _ = asked(f"--model roberta-large --technique full --gpu a100-80g --seq-len 512 {options} --json")
        return json.loads(out)["ranked"][0]

    one, four = entry("--parallel single --batch-size 32"), entry("--parallel tp --gpus 4 --batch-size 32")
    assert (four["parallel"], len(four["per_device"])) == ("tp", 4)
    assert four["per_device"][0]["optimizer_gib"] < 0.4 * one["per_device"][0]["optimizer_gib"]
    assert one["step_time_s"] / 4 < four["step_time_s"] < one["step_time_s"]
    assert "sum up its results" in four["why"]
    code, out, _ = asked("--model roberta-large --gpu a100-80g --gpus 2 --parallel tp --seq-len 128 --classes 6 --json")
    assert [entry["technique"] for entry in json.loads(out)["ranked"]] == ["full", "lora"]
    assert code == 0
    labels = entry("--parallel single --batch-size 32 --classes 3")
    assert labels["per_device"][0]["logits_gib"] < 1e-5 < one["per_device"][0]["logits_gib"]
    _, out, _ = asked("--model roberta-large --gpu a100-80g --gpus 4 --seq-len 512 --json")
    assert "tp" not in {entry["parallel"] for entry in json.loads(out)["ranked"]}
    _, out, _ = asked("--model roberta-large --gpu a100-80g --gpus 2 --seq-len 128 --classes 6 --json")
    assert {entry["parallel"] for entry in json.loads(out)["ranked"]} == {"ddp", "pp", "tp"}
    _, out, _ = asked("--model roberta-large --gpu a6000 --classes 3 --seq-len 512 --technique lora --explain")
    assert "with one of 3 labels each" in out
    assert "adapters, and the head's trained copy" in out


def test_runs_that_classify_have_a_head_for_their_labels() -> None:
    batch = BatchShape(16, 128, 1, padded=True, classes=4)
    run = RunConfig(
        task="classification",
        model="all-minilm-l6-v2",
        target_modules="query,value",
        per_device_train_batch_size=16,
        attention="sdpa",
    )
    assert architecture_of_run(run, batch) == as_classifier(read_architecture("all-minilm-l6-v2"), 4)
    assert architecture_of_run(run, replace(batch, classes=0)) == read_architecture("all-minilm-l6-v2")
    plan = plan_run(run, batch)
    assert (plan.architecture.classes, plan.job.cpu_operations) == (4, True)
    assert not job_of_run(replace(run, device="cuda", gpu=A6000.name), batch).cpu_operations
    shared = plan_run(replace(run, parallel="tp", devices=2), batch)
    assert (shared.job.parallel, shared.rows_per_step, len(shared.devices)) == ("tp", 16, 2)
    assert shared.devices[0].allocated_gib < plan.devices[0].allocated_gib
    assert shared.time.sent_gb > 0 == plan.time.sent_gb
    pipe = replace(run, parallel="pp", devices=2, micro_batches=4, device="cuda", gpu=A6000.name)
    stages = plan_run(pipe, batch)
    held = device_map_of(stages.architecture, stages.shares, [0, 1])
    assert (held["bert.embeddings"], held["bert.pooler"], held["classifier"]) == (0, 1, 1)
    assert [trained_parameters(stages.architecture, stages.job, share) > 0 for share in stages.shares] == [True, True]
    assert stages.max_batch_size > 16


def test_rows_of_ddp_are_each_rank_s() -> None:
    architecture = read_architecture("llama-3.2-1b")
    job = Job(technique="lora", parallel="single", batch=BatchShape(4, 512, 512))
    one = make_plan(architecture, job, Cluster((A6000,)), {})
    two = make_plan(architecture, replace(job, parallel="ddp", devices=2), Cluster((A6000,) * 2), {})
    assert two.rows_per_step == 2 * one.rows_per_step
    assert one.tokens_per_s < two.tokens_per_s <= 2 * one.tokens_per_s
    assert two.epoch_usd(1000) == pytest.approx(one.epoch_usd(1000), rel=0.1)


def test_each_technique_has_its_usual_precision_unless_one_is_asked_for(asked) -> None:  # noqa: ANN001
    def precisions(command: str) -> dict[str, str]:
        _, out, _ = asked(f"--model llama-3.2-1b {command} --json")
        return {entry["technique"]: entry["precision"] for entry in json.loads(out)["ranked"]}

    assert precisions("--gpu a6000") == {"full": "bf16-mixed", "lora": "bf16", "qlora": "bf16"}
    assert set(precisions("--gpu v100-16gb").values()) == {"fp16-mixed"}
    assert set(precisions("--gpu a6000 --precision bf16").values()) == {"bf16"}


def test_advice_names_what_would_help(asked) -> None:  # noqa: ANN001
    _, out, _ = asked("--model llama-3.1-8b --technique lora --parallel single --gpu a6000 --seq-len 100000")
    assert "shorter rows (--seq-len)" in out
    assert "4-bit" not in out


def test_a_card_that_likely_holds_it_is_tight_until_it_is_safe_to(asked) -> None:  # noqa: ANN001
    command = (
        "--model llama-3.2-1b --technique full --parallel single --gpu mine --gpu-tflops 100 --seq-len 128 "
        "--no-gradient-checkpointing --gpu-memory-gib"
    )
    roomy = json.loads(asked(f"{command} 100 --json")[1])["ranked"][0]["per_device"][0]
    # without the blocks that PyTorch gives back where there is no room for them
    least_gib = json.loads(asked(f"{command} 1 --json")[1])["ranked"][0]["per_device"][0]["peak_gib"]
    safe_gib = roomy["safe_gib"]
    for capacity_gib, verdict, code in (
        (least_gib - 0.01, "no", 1),
        (least_gib + 0.01, "tight", 0),
        (safe_gib - 0.01, "tight", 0),
        (safe_gib + 0.01, "yes", 0),
    ):
        exit_code, out, _ = asked(f"{command} {capacity_gib} --json")
        entry = json.loads(out)["ranked"][0]
        assert entry["per_device"][0]["fits"] == (verdict == "yes")
        assert ("tight" in entry["why"], "does not fit" in entry["why"]) == (verdict == "tight", verdict == "no")
        assert (exit_code, f"│ {verdict} " in asked(f"{command} {capacity_gib}")[1]) == (code, True)


def test_of_plans_that_are_about_as_fast_a_tight_one_is_not_the_first(asked) -> None:  # noqa: ANN001
    command = "--model llama-3.2-1b --technique lora --gpus 2 --gpu mine --gpu-tflops 100 --no-gradient-checkpointing"
    _, out, _ = asked(f"{command} --gpu-memory-gib 100 --json")
    roomy = json.loads(out)
    ddp = next(entry for entry in roomy["ranked"] if entry["parallel"] == "ddp")
    tight_gib = ddp["per_device"][0]["safe_gib"] - 0.1
    _, out, _ = asked(f"{command} --gpu-memory-gib {tight_gib} --json")
    first, *others = json.loads(out)["ranked"]
    assert roomy["ranked"][0]["parallel"] == "ddp"
    assert (first["parallel"], "tight" in first["why"]) == ("fsdp", False)
    assert any(entry["parallel"] == "ddp" and "tight" in entry["why"] for entry in others)
    assert "tight" in roomy["sorted_by"]


def test_no_tight_plan_stands_above_one_as_fast_that_is_not() -> None:
    """Whatever the technique, and also where the same way is tight only without gradient checkpointing."""
    architecture, tight = read_architecture("llama-3.2-1b"), 0
    asked = Job(technique="lora", parallel="single", batch=BatchShape(4, 1024, 1024))
    for memory_gib, checkpointing in product(range(8, 36), (None, False)):
        cluster = Cluster((replace(A6000, name="mine", memory_gib=memory_gib),) * 2)
        plans = ranked_plans(architecture, asked, cluster, TECHNIQUES, None, checkpointing, {})
        for above, below in combinations([plan for plan in plans if plan.may_fit], 2):
            as_fast = below.tokens_per_s >= ABOUT_AS_FAST * above.tokens_per_s
            assert not (above.is_tight and not below.is_tight and as_fast)
        tight += sum(plan.is_tight for plan in plans)
    assert tight > 10


def test_the_answer_ends_with_what_to_do_and_its_command(asked) -> None:  # noqa: ANN001
    question = "--model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 4 --seq-len 1024"
    _, out, _ = asked(question)
    _, answer, _ = asked(f"{question} --json")
    recommended, run = out.strip().splitlines()[-2:]
    first = json.loads(answer)["ranked"][0]
    assert recommended.startswith("Recommended: LoRA, ddp")
    for figure in (f"{first['tokens_per_s']:,.0f} tokens per s", f"{first['cost_usd_per_epoch']:.2f} USD"):
        assert figure in recommended
    assert run == f"Run: {json.loads(answer)['run']}"
    assert "make run FOLDER=2.2_lora_finetuning_with_ddp/run_1_a6000_48g_x2" in run
    code, out, _ = asked("--model llama-3.1-70b --technique full --parallel single --gpu a6000")
    assert code == 1
    assert out.strip().splitlines()[-1].startswith("Run: nothing")


def test_the_second_figure_is_no_less_than_the_first(asked) -> None:  # noqa: ANN001
    _, out, _ = asked("--model llama-3.1-8b --gpu h100 --batch-size 2 --seq-len 2048 --json")
    entries = json.loads(out)["ranked"]
    best = {entry["technique"]: entry["tokens_per_s_best"] for entry in entries}
    assert best["qlora"] is None  # of models of this size nothing is published on this kind of GPU
    assert all(best[entry["technique"]] >= entry["tokens_per_s"] for entry in entries if best[entry["technique"]])
    fused, compiled = (
        json.loads(asked(f"--model llama-3.1-8b --gpu h100 --batch-size 2 --seq-len 2048 {option} --json")[1])
        for option in ("--use-liger-kernel true", "--torch-compile true")
    )
    for faster in (fused, compiled):
        assert faster["ranked"][0]["tokens_per_s"] > 1.1 * entries[0]["tokens_per_s"]


# -- models that see

SEEING = "--model smolvlm-instruct --gpu a6000 --batch-size 4 --seq-len 1600"


def test_a_model_that_sees_is_planned_with_its_tower_and_pictures(asked) -> None:  # noqa: ANN001
    code, out, _ = asked(f"{SEEING} --technique lora --explain")
    assert code == 0
    for line in (
        "vision tower and connector",
        "pictures, and which of their pixels count",
        "forward of the vision tower",
        "pixels = 10,027,008, N = 49,572 patches, tokens = 5,508 of pictures, Hv = 1,152, Iv = 4,304",
        "rows of 1,600 tokens, of which a picture in 17 squares takes 1,377, learnt as a whole",
    ):
        assert line in out, line
    assert asked(f"{SEEING} --technique lora --explain --tiles 17")[1] == out
    trained = asked(f"{SEEING} --technique lora --explain --freeze-vision-tower false")[1]
    for line in ("the vision tower's trained copy", "momentum and variance of the vision tower"):
        assert line in trained, line
        assert line not in out, line


def test_a_model_that_sees_is_ranked_by_the_ways_of_its_task(asked) -> None:  # noqa: ANN001
    for gpus, parallel in ((1, "single"), (2, "ddp")):
        _, out, _ = asked(f"{SEEING} --gpus {gpus} --json")
        ways = {(entry["technique"], entry["parallel"]) for entry in json.loads(out)["ranked"]}
        assert ways == {("full", parallel), ("lora", parallel)}


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--model llama-3.1-8b --tiles 2", "--tiles is 2, but llama-3.1-8b has no vision tower"),
        ("--model smolvlm-instruct --tiles 0", "--tiles is 0, but must be above 0"),
        ("--model smolvlm-instruct --seq-len 1000", "17 x 81 = 1,377 tokens of smolvlm-instruct: pass a longer"),
        ("--model smolvlm-instruct --seq-len 1600 --technique qlora", "--technique is qlora, but models with pictures"),
        ("--model smolvlm-instruct --seq-len 1600 --gpus 2 --parallel fsdp", "trained with single or ddp"),
    ],
)
def test_pictures_that_do_not_go_are_refused(asked, command: str, sentence: str) -> None:  # noqa: ANN001
    code, _, err = asked(f"--gpu a6000 {command}")
    assert code == 2
    assert sentence in err


def seeing(technique: str, tiles: int, **changes: object) -> Job:
    return Job(technique, "single", BatchShape(4, 1600, 1600, tiles=tiles), **changes)


def test_a_frozen_tower_is_read_once_and_a_trained_one_three_times() -> None:
    """A forward pass takes 2 operations per weight and patch, a backward pass 4."""
    model = read_architecture("smolvlm-instruct")
    encoder, share = model.tower.encoder, whole_model(model)
    blind = step_flops(model, seeing("lora", 0), share).total
    frozen, trained = (
        step_flops(model, seeing("lora", 17, trains_tower=trains), share).total - blind for trains in (False, True)
    )
    patches, squares = 4 * 17 * 729, 4 * 17
    layers = encoder.layers * (encoder.stacks[0].matrix_weights + 2 * 729 * encoder.hidden)  # scores and their sums
    connector = model.tower.connector
    expected = 2 * patches * layers + 2 * squares * 81 * connector.inputs * connector.outputs
    assert frozen == pytest.approx(expected)
    assert trained == pytest.approx(3 * expected)
    again = seeing("lora", 17, trains_tower=True, gradient_checkpointing=True)
    more = (
        step_flops(model, again, share).recomputed
        - step_flops(model, replace(again, trains_tower=False), share).recomputed
    )
    assert more == pytest.approx(2 * patches * layers)


def test_pictures_take_time_and_a_trained_tower_s_gradients_are_sent() -> None:
    model, cluster = read_architecture("smolvlm-instruct"), Cluster((A6000,) * 2)
    two = {"parallel": "ddp", "devices": 2}
    plans = {
        name: make_plan(model, replace(seeing("lora", tiles, trains_tower=trains), **two), cluster, {}).time
        for name, tiles, trains in (
            ("blind", 0, False),
            ("few", 2, False),
            ("frozen", 17, False),
            ("trained", 17, True),
        )
    }
    seconds = [time.compute_s for time in plans.values()]
    assert seconds == sorted(seconds)
    more_gb = plans["trained"].sent_gb - plans["frozen"].sent_gb
    assert more_gb == pytest.approx(2 * model.tower_parameters / 1e9)  # half of it twice, in bf16
    assert plans["trained"].optimizer_s > plans["frozen"].optimizer_s


def test_a_run_that_sees_is_planned_with_what_its_processor_makes_of_a_picture() -> None:
    run = RunConfig(task="visual_questions", technique="lora", target_modules="all-linear", model="smolvlm-instruct")
    batch = BatchShape(2, 1600, 64)
    assert job_of_run(run, batch).batch.tiles == 17
    assert job_of_run(replace(run, weights="random"), batch).batch.tiles == 1
    assert job_of_run(run, replace(batch, tiles=5)).batch.tiles == 5
    assert not job_of_run(run, batch).trains_tower
    assert job_of_run(replace(run, freeze_vision_tower=False), batch).trains_tower
    assert job_of_run(replace(run, task="chat"), batch).batch.tiles == 0
    plan = plan_run(replace(run, device="cuda", gpu=A6000.name, devices=1), batch)
    looking = [phase.memory.moment for phase in plan.phases[0]]
    assert "forward of the vision tower" in looking


def test_layers_of_a_model_that_sees_are_not_divided() -> None:
    model = read_architecture("smolvlm-instruct")
    with pytest.raises(BadInputError, match="has a vision tower: such models are not divided"):
        device_map_of(model, [whole_model(model)], [0])


def test_pairs_are_planned_for_techniques_that_train_on_them(asked) -> None:  # noqa: ANN001
    question = "--model llama-3.2-1b --gpu a6000 --gpus 2 --parallel ddp --batch-size 4 --seq-len 512 --json"
    chat, pairs = (json.loads(asked(f"{question} {task}")[1])["ranked"] for task in ("", "--task preferences"))
    assert {plan["technique"] for plan in chat} - {plan["technique"] for plan in pairs} == {"qlora"}
    chat, pairs = ({plan["technique"]: plan for plan in each} for each in (chat, pairs))
    assert pairs.keys() == {"full", "lora"}
    peaks = ({name: each[name]["per_device"][0]["peak_gib"] for name in pairs} for each in (chat, pairs))
    assert all(pair > single for single, pair in zip(*(each.values() for each in peaks), strict=True))


def test_the_command_of_a_plan_of_pairs_is_its_folders(asked) -> None:  # noqa: ANN001
    _, out, _ = asked("--task preferences --model assets/embedded_labeller --gpu cpu --technique lora --seq-len 57")
    assert "Run: make run FOLDER=3.4_preference_tuning/run_0_cpu_x1" in out
