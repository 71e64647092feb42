"""What a step of valohai.yaml needs around a workflow: the option for its input, and a name for the model it made.

    python -m common.valohai_step data-option
    python -m common.valohai_step name-model --alias chat-summarizer

Valohai puts the files of an input into a folder, and takes what it should know of an output from a file of the same
name with `.metadata.json` after it.
"""

import argparse
import json
import os
from pathlib import Path

from common.base.command_line import exit_with
from common.base.errors import BadInputError

WEIGHTS = "model.safetensors"
SIDECAR = ".metadata.json"


def data_option(inputs: Path) -> str:
    """`--data FOLDER` where the step got files as its input `data`, else nothing: then its parameter counts."""
    folder = inputs / "data"
    return f"--data {folder}" if folder.is_dir() and any(folder.iterdir()) else ""


def name_model(outputs: Path, alias: str, version: str) -> list[Path]:
    """Write what Valohai should know of the model's files; returns what was written.

    Together they become a version of the dataset `alias`, to which its alias of the same name points from now on:
    `dataset://ALIAS/ALIAS` is a folder that loads. The weights alone are `datum://ALIAS`.

    Raises:
        BadInputError: there is more than one model.
    """
    models = sorted(outputs.glob("results/*/model"))
    if len(models) > 1:
        raise BadInputError(
            f"{outputs} has {len(models)} models ({', '.join(model.parent.name for model in models)}), but "
            f"{alias!r} names one: run one workflow in a step."
        )
    version_of = {"uri": f"dataset://{alias}/{version}", "targeting_aliases": [alias]}
    sidecars = []
    for path in [path for model in models for path in sorted(model.iterdir())]:
        known: dict[str, object] = {"valohai.dataset-versions": [version_of]}
        if path.name == WEIGHTS:
            known["valohai.alias"] = alias
        sidecars.append(path.with_name(path.name + SIDECAR))
        sidecars[-1].write_text(json.dumps(known) + "\n", encoding="utf-8")
    return sidecars


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("data-option", help="print `--data FOLDER` where the step got files as its input `data`")
    naming = commands.add_parser("name-model", help="write beside the model's files what Valohai should call them")
    naming.add_argument("--alias", required=True, help="the model's name; an empty one: none")
    options = parser.parse_args()
    if options.command == "data-option":
        print(data_option(Path(os.environ.get("VH_INPUTS_DIR", "/valohai/inputs"))))
    elif not options.alias:
        print("The model gets no alias.")
    else:
        _name_model(options.alias)


def _name_model(alias: str) -> None:
    outputs = Path(os.environ.get("VH_OUTPUTS_DIR", "/valohai/outputs"))
    try:
        sidecars = name_model(outputs, alias, version=os.environ.get("VH_JOB_ID", "local"))
    except BadInputError as mistake:
        exit_with(mistake)
    if sidecars:
        print(f"The {len(sidecars)} files of the model are {alias!r} from now on.")
    else:
        print(f"{outputs} has no model to name: of a distributed task the first member saves it.")


if __name__ == "__main__":
    main()
