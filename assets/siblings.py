"""Copy run folders of a technique from one source; siblings differ in their literals alone (`RUN`, `LORA`, `MACHINES`).

    python -m assets.siblings            copy each technique's first run folder to its siblings
    python -m assets.siblings --check    exit 1 where a sibling is no copy

The source is the folder `run_0_...`. From a sibling's literal follow the parameters cells of its notebooks, its
`my_accelerate_config.yaml` and the number of processes in its docstring. A notebook's outputs stay where its cells do.
"""

import ast
import json
import re
import shlex
import sys
from pathlib import Path

import nbformat
import yaml

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import LITERAL, assignments, literal_of, run_folders
from common.runtime.torchrun import nodes_command
from common.training.deepspeed_config import deepspeed_config

DEEPSPEED_CONFIG_NAME = "my_deepspeed_config.json"
OWN_CHANGES = ("LORA", "MACHINES")  # literals: how the runs of a technique, or of a loop, differ from `RUN`
COMMENTS = {
    "CPU": """\
One rank per CPU device. MULTI_CPU would start one process only (Accelerate 1.15); MULTI_GPU with use_cpu starts all,
# and they talk over gloo. The run checks that they came.""",
    "GPU": """\
One rank per GPU; they talk over NCCL. Precision is the run's own setting, so that `no` stands here.""",
    "DEEPSPEED": f"""\
DeepSpeed's settings stand in {DEEPSPEED_CONFIG_NAME}, for scripts of your own, too (the values `auto` are filled in
# by Accelerate there, by this run here).""",
}
TORCHRUN = shlex.join(nodes_command(1, 0)).replace(" 0 ", r" \d+ ")
ACCELERATE = r"accelerate launch --config_file my_accelerate_config.yaml "
ACCELERATE_ON_NODE = f"{ACCELERATE}--machine_rank NUMBER --main_process_ip ADDRESS"
"""How a workflow's docstring starts its ranks on one machine, and with Accelerate on each of several."""
PARAMETER = re.compile(r"^(?P<name>\w+) = (?P<value>.*?)(?P<comment>  #.*)?$", re.MULTILINE)


def accelerate_config(run: RunConfig) -> str:
    """Return the file that `accelerate launch --config_file` takes."""
    kind = "CPU" if run.device == "cpu" else "DEEPSPEED" if run.parallelism.uses_deepspeed else "GPU"
    of_deepspeed = {"deepspeed_config_file": DEEPSPEED_CONFIG_NAME, "zero3_init_flag": False}
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if kind == "DEEPSPEED" else "MULTI_GPU",
        "use_cpu": kind == "CPU",
        "num_machines": run.nodes,
        **({"main_process_port": 29500} if run.nodes > 1 else {}),
        "num_processes": run.devices,
        "machine_rank": 0,
        "mixed_precision": "no",
        **({"deepspeed_config": of_deepspeed} if kind == "DEEPSPEED" else {}),
    }
    return f"# {COMMENTS[kind]}\n{yaml.safe_dump(settings, sort_keys=False)}"


def _module_for(run: RunConfig, source: Path, own: Path) -> str:
    """Return the text of `source` with the literals of `own`, if it has any, and its number of processes."""
    text = source.read_text(encoding="utf-8")
    if LITERAL.search(text):
        text = text.replace(_literals(text), _literals(own.read_text(encoding="utf-8")))
    text = re.sub(TORCHRUN, shlex.join(nodes_command(run.nodes, run.devices // run.nodes)), text)
    if run.nodes > 1:  # a launcher on each machine
        number = ", which has NUMBER 0" if re.search(ACCELERATE, text) else ""
        text = text.replace(
            "From this folder:", f"From this folder, on each machine (ADDRESS is the first one's{number}):"
        )
        text = re.sub(ACCELERATE, lambda _: f"{ACCELERATE_ON_NODE} \\\n        ", text)
    return text


def _literals(text: str) -> str:
    """Return the lines with a folder's own literals: `RUN`, and `LORA` or `MACHINES` right after it."""
    own = assignments(text)
    last = [own[name] for name in ("RUN", *OWN_CHANGES) if name in own][-1]
    return "".join(text.splitlines(keepends=True)[own["RUN"].lineno - 1 : last.end_lineno])


def parameters_for(run: RunConfig, cell: str) -> str:
    """Return a parameters cell with the values of `run` for the names that are settings."""

    def line_for(found: re.Match[str]) -> str:
        setting = getattr(run, found["name"], None)
        if not hasattr(run, found["name"]) or setting == ast.literal_eval(found["value"]):
            return found[0]
        written = json.dumps(setting) if isinstance(setting, str) else repr(setting)  # quotes as the formatter has them
        return f"{found['name']} = {written}{found['comment'] or ''}"

    return PARAMETER.sub(line_for, cell)


def _notebook_for(run: RunConfig, source: Path, sibling: Path) -> str:
    """Return the source's cells with the sibling's parameters, and its own outputs where the cells are the same."""
    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.update(execution_count=None, outputs=[])
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = parameters_for(run, cell.source)
    own_cells = nbformat.read(sibling, as_version=4).cells if sibling.is_file() else []
    if [cell.source for cell in own_cells] == [cell.source for cell in notebook.cells]:
        return sibling.read_text(encoding="utf-8")
    return nbformat.writes(notebook) + "\n"


def contents_for(folder: Path, run: RunConfig, source: Path) -> dict[Path, str]:
    """Return what the files of a run folder should hold, as copies of the `source` folder's."""
    modules, notebooks = sorted(source.glob("my_*.py")), source.glob("*.ipynb")
    contents = {folder / path.name: _module_for(run, path, folder / path.name) for path in modules}
    starts_as_there = run.parallelism.in_one_process == literal_of(source).parallelism.in_one_process
    if folder != source and starts_as_there and run.nodes == 1:  # a notebook starts no ranks on other machines
        contents |= {folder / path.name: _notebook_for(run, path, folder / path.name) for path in notebooks}
    if run.parallelism.replicates or run.parallelism.shards:
        contents[folder / "my_accelerate_config.yaml"] = accelerate_config(run)
    if run.parallelism.uses_deepspeed:
        contents[folder / DEEPSPEED_CONFIG_NAME] = json.dumps(deepspeed_config(run), indent=2) + "\n"
    return contents


def stale_files(root: Path = REPOSITORY) -> dict[Path, str]:
    """Return the files of run folders that are not what they should be, with what they should hold."""
    stale, folders = {}, run_folders(root)
    for folder, run in folders.items():
        place = str(folder.relative_to(root))
        if run.run_folder != place:
            raise BadInputError(f"The literal in {place} has run_folder {run.run_folder!r}: write {place!r}.")
        source = min(path for path in folders if path.parent == folder.parent)
        stale |= {
            path: text
            for path, text in contents_for(folder, run, source).items()
            if not path.is_file() or path.read_text("utf-8") != text
        }
    return stale


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    parser = OneSentenceParser(description="Copy each technique's first run folder to its siblings.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a sibling is no copy")
    check_only = parser.parse_args().check
    stale = stale_files()
    for path, content in stale.items():
        if not check_only:
            path.write_text(content, encoding="utf-8")
        print(f"{'no copy (`make siblings` makes it)' if check_only else 'wrote'}: {path.relative_to(REPOSITORY)}")
    sys.exit(int(check_only and bool(stale)))


if __name__ == "__main__":
    main()
