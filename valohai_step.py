"""What a step of valohai.yaml needs around a workflow: where machines meet, its input, and a name for its model.

    python valohai_step.py torchrun-options
    python valohai_step.py world-options
    python valohai_step.py data-option
    python valohai_step.py name-model --alias chat-summarizer

Valohai puts the files of an input into a folder, and reads metadata of an output from a file of the same name with
`.metadata.json` after it.
"""

import json
import os
from pathlib import Path

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser

JOIN_TIMEOUT_S = 900  # how long machines wait for each other, which install at different speeds


def members() -> tuple[int, str, str, bool]:
    """Return a distributed task's count of machines, the first one's address, our own, and whether we are the first."""
    try:
        from valohai import distributed

        first, own = distributed.master(), distributed.me()
        return distributed.required_count, first.primary_local_ip, own.primary_local_ip, own.is_master
    except Exception as error:  # the library may be missing or broken, and a broken file breaks it in many ways
        raise BadInputError(
            f"Valohai does not say where the machines of a distributed task meet ({type(error).__name__}: {error}): "
            "start the step as a Task of the type Distributed, with valohai-utils installed."
        ) from None


def torchrun_options() -> str:
    """Return torchrun's options on this machine of a distributed task; one rank on each."""
    count, first, own, is_first = members()
    return (
        f"--nnodes {count} --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint {first}:29400 --local_addr {own} "
        f"--rdzv_conf is_host={int(is_first)},join_timeout={JOIN_TIMEOUT_S}"
    )


def world_options() -> str:
    """Return the run's settings that say how many machines a distributed task has."""
    count, *_ = members()
    return f"--devices {count} --nodes {count}"


def data_option(inputs: Path) -> str:
    """Return `--data FOLDER` if the step got files as its input `data`, else nothing: then its parameter counts."""
    folder = inputs / "data"
    return f"--data {folder}" if folder.is_dir() and any(folder.iterdir()) else ""


def name_model(outputs: Path, alias: str, version: str) -> list[Path]:
    """Write the metadata of the model's files for Valohai; return the files of the model.

    Together they become a version of the dataset `alias`, to which its alias of the same name points from now on:
    `dataset://ALIAS/ALIAS` is a folder that loads. The weights alone are `datum://ALIAS`.
    """
    models = sorted(outputs.glob("results/*/model"))
    if len(models) > 1:
        raise BadInputError(
            f"{outputs} has {len(models)} models ({', '.join(model.parent.name for model in models)}), but "
            f"{alias!r} names one: run one workflow in a step."
        )
    dataset = {"valohai.dataset-versions": [{"uri": f"dataset://{alias}/{version}", "targeting_aliases": [alias]}]}
    files = [path for model in models for path in sorted(model.iterdir())]
    for path in files:
        metadata = {**dataset, "valohai.alias": alias} if path.name == "model.safetensors" else dataset
        path.with_name(path.name + ".metadata.json").write_text(json.dumps(metadata) + "\n", encoding="utf-8")
    return files


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    printed = {
        "torchrun-options": torchrun_options,
        "world-options": world_options,
        "data-option": lambda: data_option(Path(os.environ.get("VH_INPUTS_DIR", "/valohai/inputs"))),
    }
    parser = OneSentenceParser(description=__doc__)
    parser.add_argument("command", choices=[*printed, "name-model"])
    parser.add_argument("--alias", help="with name-model: the model's name; an empty one: none")
    options = parser.parse_args()
    if (options.command == "name-model") != (options.alias is not None):
        parser.error(f"the command is {options.command}: name-model needs --alias NAME, the others take none")
    if options.command in printed:
        print(printed[options.command]())
    elif not options.alias:
        print("The model gets no alias.")
    else:
        outputs = Path(os.environ.get("VH_OUTPUTS_DIR", "/valohai/outputs"))
        files = name_model(outputs, options.alias, version=os.environ.get("VH_JOB_ID", "local"))
        named = f"The {len(files)} files of the model are {options.alias!r} from now on."
        print(named if files else f"{outputs} has no model to name: the first member of a distributed task saves it.")


if __name__ == "__main__":
    main()
