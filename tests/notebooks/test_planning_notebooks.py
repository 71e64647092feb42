"""The planning notebooks, run with other parameters, show what the planner says; so does their readme."""

import json
import re
import shlex
from pathlib import Path

import nbformat
import papermill
import pytest

from bench.tables.pages import PLANNER_QUESTION
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.planner_command import answer, cluster_of, job_of, read_options
from common.hardware.devices import find_gpu
from common.planning.architectures import read_architecture
from common.planning.gpu_overhead import memory_with_overhead
from common.planning.job import BatchShape, Job
from common.planning.plans import plan_run
from common.planning.ranking import ranked_plans
from common.planning.shares import whole_model
from common.planning.time_plan import calibration_from, parse_link
from common.records.store import kept_records

FOLDER = REPOSITORY / "1.1_gpu_planning"
NOTEBOOKS = FOLDER / "run_0_cpu_x1"
README = FOLDER / "gpu_planning_readme.md"


def executed(name: str, tmp_path: Path, **parameters: object) -> nbformat.NotebookNode:
    path = NOTEBOOKS / f"{name}.ipynb"
    return papermill.execute_notebook(path, tmp_path / "out.ipynb", parameters, cwd=NOTEBOOKS, progress_bar=False)


def outputs_of(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    """Of that kind, such as text/html; what was printed counts as text/plain."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kept = [{"text/plain": output.get("text", ""), **output.get("data", {})} for output in outputs]
    return [each[kind] for each in kept if kind in each]


def shown(notebook: nbformat.NotebookNode) -> str:
    return "\n".join(outputs_of(notebook, "text/plain"))


def pictures(notebook: nbformat.NotebookNode) -> int:
    return len(outputs_of(notebook, "image/png"))


def figures(pattern: str, text: str) -> list[str]:
    """The numbers after the words of the pattern, in the order of the text."""
    return re.findall(rf"(?:{pattern}) ([\d.]+) GiB", text)


pytestmark = pytest.mark.usefixtures("forked_kernels")


def test_the_sum_by_hand_is_the_planners(tmp_path: Path) -> None:
    notebook = executed("vram_arithmetic", tmp_path, model="qwen2.5-7b", gpu="RTX A6000 48GB", batch_size=2)
    text, architecture = shown(notebook), read_architecture("qwen2.5-7b")
    job = Job("lora", "single", BatchShape(2, 1024, 1024))
    memory = memory_with_overhead(architecture, job, whole_model(architecture), find_gpu("a6000"))
    found = {name: figures(name, text)[0] for name in ("by hand", "planner", "with overhead")}
    allocated, peak = f"{memory.allocated_gib:.3f}", f"{memory.peak_gib:.3f}"
    assert found == {"by hand": allocated, "planner": allocated, "with overhead": peak}
    assert "trained: 1/64" in text
    assert pictures(notebook) == 5


def test_the_strategies_are_the_planners_in_its_order(tmp_path: Path) -> None:
    asked = {"model": "qwen2.5-7b", "gpu": "A100 40GB SXM", "gpus": 2, "batch_size": 2, "seq_len": 512}
    notebook = executed("choosing_a_strategy", tmp_path, **asked, fast_link="nvlink", large_counts=[8, 16])
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**asked, "link": "nvlink"}.items()]
    options = read_options(words)
    cluster = cluster_of(options)
    assert cluster.slowest_link == parse_link("nvlink", find_gpu("A100 40GB SXM"))
    plans = ranked_plans(read_architecture(asked["model"]), job_of(options), cluster, calibration_from(kept_records()))
    cells = re.findall(r"<td>(.*?)</td>", outputs_of(notebook, "text/html")[0])
    columns = len(cells) // len(plans)
    assert list(zip(cells[::columns], cells[2::columns], cells[3::columns], strict=True)) == [
        (plan.name, f"{plan.devices[plan.tightest].peak_gib:.1f}", str(plan.max_batch_size)) for plan in plans
    ]
    assert pictures(notebook) == 4


@pytest.mark.slow
def test_the_closed_form_is_near_the_dry_run_and_the_preflight_passes(tmp_path: Path) -> None:
    notebook = executed("dry_run_and_preflight", tmp_path, model="llama-3.2-1b", gpu="RTX A5000 24GB", seq_len=512)
    text = shown(notebook)
    gpu = find_gpu("a5000").name
    run = RunConfig(
        device="cuda", gpu=gpu, model="llama-3.2-1b", weights="random", precision="bf16", per_device_train_batch_size=2
    )
    closed_gib = plan_run(run, BatchShape(2, 512, 512)).devices[0].allocated_gib
    assert figures("closed form:", text)[0] == f"{closed_gib:.3f}"
    assert float(figures("dry run:", text)[0]) == pytest.approx(closed_gib, rel=0.02)
    assert re.search(r"^passed: ", text, re.MULTILINE)
    assert text.count("batch16-seed42") >= 2, "a row for each kept record"
    assert pictures(notebook) == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("vram_arithmetic", "--batch-size is 0, but must be above 0"),
        ("dry_run_and_preflight", "per_device_train_batch_size is 0, but must be at least 1"),
    ],
)
def test_bad_input_ends_the_notebook_with_the_planners_sentence(name: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(papermill.PapermillExecutionError) as failed:
        executed(name, tmp_path, batch_size=0)
    assert sentence in str(failed.value) + (tmp_path / "out.ipynb").read_text()


def parts_of(said: str) -> tuple[list[str], list[str], list[str]]:
    """Split what the planner says into the lines before its assumptions, these, and the lines after them."""
    lines = said.splitlines()
    first = lines.index("assumed:") + 1
    end = first + [line[:2] == "- " for line in lines[first:]].index(False)
    return lines[:first], lines[first:end], lines[end:]


def test_the_readme_shows_what_its_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text(encoding="utf-8")
    (command,) = re.findall(r"```\n\.venv/bin/python -m common\.planner (--model .*?)\n```", text)
    assert command == PLANNER_QUESTION, "`make tables` renders the answer to another question"
    said = []
    for more in ((), ("--json",), ("--json", "--precision", "bf16")):
        answer(read_options([*shlex.split(command), *more]))
        said.append(capsys.readouterr().out)
    begin, (assumption, *more), end = parts_of(said[0].strip())
    assert "\n".join([*begin, assumption, f"({len(more)} more)", *end]) in text
    usual, pure = (json.loads(each)["ranked"] for each in said[1:])
    assert (usual[0]["technique"], pure[0]["technique"]) == ("lora", "full")
    assert not any(entry["per_device"][0]["fits"] for entry in usual if entry["technique"] == "full")


def test_the_bills_and_the_frontier_are_the_planners(tmp_path: Path) -> None:
    asked = {"model": "llama-3.2-1b", "rows": 5_000, "mean_length": 300, "longest": 600, "techniques": ["full", "lora"]}
    notebook = executed("what_should_i_rent", tmp_path, **asked)
    hours = 4 * 1_235_814_400 * 5_000 * 3 * 300 / (0.61 * 989.4e12) / 3600
    assert f"H100 80GB SXM          3.99 {hours:6.2f}" in shown(notebook)
    (unbeaten,) = re.findall(r"machines and ways fit, (\d+) are not beaten", shown(notebook))
    *_, of_machines, of_servers = outputs_of(notebook, "text/html")
    machines = re.findall(r"<td>(\d x [^<]+)</td>", of_machines)
    assert 0 < len(machines) <= int(unbeaten) + 3  # what does not fit in another phase makes room for others
    assert re.search(r"an interruption costs \d+ minutes and [\d.]+ USD", shown(notebook))
    assert "by hand: 2.30 GiB of weights, 2.00 GiB of keys and values" in shown(notebook)
    rows = re.findall(r"<th>(\w+ [^<]+)</th>\s*(?:<td>\w+</td>\s*){2}<td>(.+)</td>\s*<td>(.+)</td>", of_servers)
    servers = {find_gpu(gpu).name: (float(weights_gib), float(cache_gib)) for gpu, weights_gib, cache_gib in rows}
    assert servers == dict.fromkeys(("RTX 4090 24GB", "A100 80GB SXM", "H100 80GB SXM"), (2.3, 2.0))
    assert pictures(notebook) == 2
