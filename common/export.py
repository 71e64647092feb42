"""Hand a tuned model on, with its tokenizer and a card: in a folder, as a file for llama.cpp or Ollama, or on the Hub.

python -m common.export mine --to merged --output my_model
python -m common.export mine --to adapter --output my_adapter          of LoRA and QLoRA: the adapter alone
python -m common.export mine --to gguf --weight_type q8_0              one file for llama.cpp
python -m common.export mine --to ollama                               that file, and a Modelfile
python -m common.export mine --to hub --repo_id me/my_model            what would be uploaded
python -m common.export mine --to hub --repo_id me/my_model --push     uploads it, private
"""

import argparse
import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, get_token
from peft.utils import CONFIG_NAME

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError, reading
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.data.answer_ends import save_stops, saved_stops
from common.models import real_models
from common.models.loading import read_tokenizer
from common.serving.cards import CARD_NAME, base_name, card_of
from common.serving.gguf_file import MODELFILE, OLLAMA, WEIGHT_TYPES, export_gguf, export_ollama
from common.serving.tuned_runs import TunedRun, check_adapter, find_run

# what is made in the run's results, by `--to`, where no `--output` is named; `{}`: the type of weights
FOLDERS = {
    "merged": "exported", "adapter": "exported_adapter", "ollama": "ollama", "gguf": "tuned-{}.gguf",
}  # fmt: skip
WEIGHT_TYPE = "f16"
VLLM_LEAST_RANK = 8


def export_merged(tuned: TunedRun, output: Path) -> Path:
    """Copy the whole tuned model with its tokenizer into a new folder, with a card beside it; return the folder."""
    _check_holds(tuned, tuned.whole_model, "config.json")
    return _copied(tuned, tuned.whole_model, output)


def _copied(tuned: TunedRun, source: Path, output: Path) -> Path:
    _check_new(output)
    card, tokenizer = card_of(tuned, is_adapter=source != tuned.whole_model), read_tokenizer(source)
    saved_stops(source, tokenizer)  # refused before anything is written
    shutil.copytree(source, output)
    save_stops(output, tokenizer)  # runs of an older version did not
    card.save(output / CARD_NAME)
    return output


def export_adapter(tuned: TunedRun, output: Path) -> Path:
    """As `export_merged`, of the adapter: its settings name the base by its id and commit, or its folder's name."""
    if not tuned.run.method.has_adapters:
        raise BadInputError(f"{tuned.folder.name} is of {tuned.run.technique}, without adapters: use --to merged.")
    if tuned.run.weights == "random":
        raise BadInputError(f"The base of {tuned.folder.name} had random weights, which nobody has: use --to merged.")
    adapter = tuned.folder / "adapter"
    for name in (CONFIG_NAME, "tokenizer_config.json"):  # runs of an older version saved no tokenizer there
        _check_holds(tuned, adapter, name)
    check_adapter(adapter)
    _copied(tuned, adapter, output)
    settings = json.loads((output / CONFIG_NAME).read_text(encoding="utf-8"))
    settings |= {"base_model_name_or_path": base_name(tuned), "revision": tuned.run.model_revision or None}
    (output / CONFIG_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return output


def _check_holds(tuned: TunedRun, folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        may_lack_room = folder == tuned.whole_model and tuned.run.method.has_adapters
        instead = ", or pass --to adapter where it was not merged for want of room" if may_lack_room else ""
        raise BadInputError(f"{tuned.folder.name} holds no {folder.name}/{name}: repeat the run{instead}.")


def _check_new(output: Path) -> None:
    if os.path.lexists(output):
        raise BadInputError(f"--output is {output}, which exists already: name a new folder.")


def upload(folder: Path, repo_id: str) -> str:
    """Upload a folder into a private repository of the Hub, and return its address."""
    if not get_token():
        raise BadInputError("There is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN.")
    api = HfApi()
    with reading(repo_id, "Look at --repo_id and the token.", "uploaded"):
        address = api.create_repo(repo_id, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repo_id)
    return str(address)


def _options() -> argparse.Namespace:
    parser = OneSentenceParser(prog="python -m common.export", description=__doc__)
    parser.add_argument("run", help="results folder, or the name of a run")
    kinds, of_gguf = ("merged", "adapter", "gguf", "ollama", "hub"), f"with gguf and ollama; default: {WEIGHT_TYPE}"
    parser.add_argument("--to", choices=kinds, default="merged", help="what is made")
    parser.add_argument("--output", type=Path, help="a new folder, with gguf a new file; default: in the run's results")
    parser.add_argument("--weight_type", "--weight-type", choices=WEIGHT_TYPES, help=of_gguf)
    parser.add_argument("--repo_id", "--repo-id", default="", help="with hub: NAME/MODEL")
    parser.add_argument("--push", action="store_true", help="with hub: upload; without it files are listed")
    options = parser.parse_args()
    to, is_hub = options.to, options.to == "hub"
    if is_hub and options.repo_id.count("/") != 1:
        raise BadInputError("--to hub needs --repo_id NAME/MODEL.")
    if is_hub and options.output:
        raise BadInputError(f"--to hub keeps no folder here: leave --output {options.output} out.")
    if options.push and not is_hub:
        raise BadInputError(f"--push uploads to the Hub, but --to is {to}: leave --push out.")
    if options.weight_type and to not in ("gguf", "ollama"):
        raise BadInputError(f"--weight_type is for --to gguf or ollama, but --to is {to}: leave it out.")
    options.weight_type = options.weight_type or WEIGHT_TYPE
    return options


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    options = _options()
    tuned = find_run(options.run)
    folder = options.output or tuned.folder / FOLDERS.get(options.to, "").format(options.weight_type)
    if options.to == "adapter":
        _to_adapter(tuned, folder)
        return
    _check_holds(tuned, tuned.whole_model, "config.json")
    if options.to == "hub":
        _to_hub(tuned, options)
    elif options.to == "gguf":
        print(f"model and tokenizer: {export_gguf(tuned.whole_model, folder, options.weight_type)}")
        print(f"serve it: {shlex.join(['llama-server', '--jinja', '-m', str(folder)])}")
    elif options.to == "ollama":
        _to_ollama(tuned, folder, options.weight_type)
    else:
        print(f"model, tokenizer and card: {export_merged(tuned, folder)}")
        print(f"serve it: {shlex.join(['vllm', 'serve', str(folder)])}")


def _to_hub(tuned: TunedRun, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=tuned.folder) as aside:
        folder = export_merged(tuned, Path(aside) / "exported")
        for file in sorted(folder.iterdir()):
            print(f"{file.stat().st_size / 2**20:>10,.1f} MiB  {file.name}")
        print(f"uploaded: {upload(folder, options.repo_id)}" if options.push else "not uploaded: pass --push")


def _to_adapter(tuned: TunedRun, folder: Path) -> None:
    print(f"adapter, tokenizer and card: {export_adapter(tuned, folder)}")
    base = base_name(tuned)
    if "/" not in base:
        print(f"the base {base} is not on the Hub: write where it is into base_model_name_or_path of {CONFIG_NAME}")
    rank = 1 << (max(tuned.run.lora_r, VLLM_LEAST_RANK) - 1).bit_length()  # vLLM takes powers of two
    commit = ["--revision", tuned.run.model_revision] if tuned.run.model_revision else []
    here = real_models.FOLDER if base == real_models.SMOLLM2 else REPOSITORY / Path(tuned.recorded_base).expanduser()
    place = base if "/" in base else str(here)
    served = ["vllm", "serve", place, *commit, "--enable-lora", "--max-lora-rank", str(rank)]
    served += ["--generation-config", str(folder)]  # where generation stops: the base's may say otherwise
    print(f"serve it: {shlex.join([*served, '--lora-modules', f'tuned={folder}'])}")


def _to_ollama(tuned: TunedRun, folder: Path, weight_type: str) -> None:
    _check_new(folder)
    print(f"model and {MODELFILE}: {export_ollama(tuned.whole_model, folder, weight_type)}")
    name = tuned.folder.name
    created = shlex.join(["ollama", "create", name, "-f", str(folder / MODELFILE)])
    print(f"create it, with Ollama {OLLAMA} or newer: {created}")
    print(f"run it: {shlex.join(['ollama', 'run', name])}")


if __name__ == "__main__":
    main()
