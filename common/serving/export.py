"""Hand a tuned model on: a whole model with its tokenizer and a card, in a folder or on the Hub.

python -m common.export mine --to merged --output my_model
python -m common.export mine --to gguf --weight_type q8_0              one file for llama.cpp
python -m common.export mine --to hub --repo_id me/my_model            what would be uploaded
python -m common.export mine --to hub --repo_id me/my_model --push     uploads it, private
"""

import argparse
import shutil
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError, said_by
from common.base.parsing import OneSentenceParser
from common.records.store import Record, fit_to_be_kept
from common.serving.gguf_file import WEIGHT_TYPES, export_gguf
from common.serving.tuned_runs import TunedRun, find_run

SETTINGS = ("technique", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "optim", "precision",
            "max_length", "train_on", "seed")  # fmt: skip
ADAPTER_SETTINGS = ("lora_r", "lora_alpha", "lora_dropout", "target_modules")
SCORES = {
    "similarity_score": "similarity score (1 - cosine, lower is better)",
    "similarity_score_minilm": "the same by MiniLM",
    "facts_said_share": "share of the facts said",
}
CARD_NAME = "README.md"


def export_merged(tuned: TunedRun, output: Path) -> Path:
    """Copy the whole tuned model with its tokenizer into a new folder, with a card beside it; return the folder.

    Raises:
        BadInputError: the run has no whole model any more, or the folder exists.
    """
    check_whole_model(tuned)
    if output.exists():
        raise BadInputError(f"--output is {output}, which exists already: name a new folder.")
    shutil.copytree(tuned.whole_model, output)
    card_of(tuned).save(output / CARD_NAME)
    return output


def check_whole_model(tuned: TunedRun) -> None:
    """Refuse a run whose whole model is gone.

    Raises:
        BadInputError: with the folder that is missing.
    """
    if not (tuned.whole_model / "config.json").is_file():
        raise BadInputError(f"{tuned.folder.name} holds no folder {tuned.whole_model.name}: repeat the run.")


def card_of(tuned: TunedRun) -> ModelCard:
    """Return the model's card: base, data, settings, scores and command, without a path of this machine."""
    record = fit_to_be_kept(tuned.record)
    config, base, data = record["config"], record["config"]["model"], record["config"]["data"]
    on_hub = {"base_model": base} if "/" in base and not base.startswith("assets/") else {}
    about = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["fine-tuned", config["technique"]], **on_hub
    )
    commit = f" (commit {record['model_commit']})" if record.get("model_commit") else ""
    settings = [*SETTINGS, *(ADAPTER_SETTINGS if tuned.run.method.has_adapters else ())]
    parts = [
        f"---\n{about.to_yaml()}\n---",
        f"# {base.rpartition('/')[2]}, tuned",
        f"{tuned.run.method.title} of `{base}`{commit} on `{data}` ({record['data']['training_rows']:,} training rows, "
        f"{record['data']['training_tokens']:,} tokens). Licence: that of the base, which its own card names.",
        "## Results\n\n" + _score_table(record),
        "## Settings\n\n" + _table(("setting", "value"), [(name, config[name]) for name in settings if name in config]),
        f"## Command\n\n```\n{record['command']}\n```",
    ]
    return ModelCard("\n\n".join(parts) + "\n")


def _score_table(record: Record) -> str:
    before, after = record["quality"]["before"], record["quality"]["after"]
    rows = [
        (label, *(f"{scores[name]:.3f}" for scores in (before, after)))
        for name, label in SCORES.items()
        if before.get(name) is not None
    ]
    return f"Of {after['questions']} questions that had no part in training:\n\n" + _table(
        ("", "before", "after"), rows
    )


def _table(headers: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [headers, ("---",) * len(headers), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def upload(folder: Path, repo_id: str) -> str:
    """Upload a folder into a private repository of the Hub, and return its address.

    Raises:
        BadInputError: there is no token, or the Hub refuses.
    """
    if not get_token():
        raise BadInputError("There is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN.")
    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repo_id)
    except Exception as error:  # offline, no access, a name that is taken: each has a class of its own
        raise BadInputError(
            f"{repo_id} was not uploaded ({said_by(error)}): look at --repo_id and the token."
        ) from None
    return str(address)


def read_options() -> argparse.Namespace:
    """Return the command line's options.

    Raises:
        BadInputError: a name is missing.
    """
    parser = OneSentenceParser(prog="python -m common.export", description=__doc__)
    parser.add_argument("run", help="results folder, or the name of a run")
    parser.add_argument("--to", choices=("merged", "gguf", "hub"), default="merged", help="what is made")
    parser.add_argument(
        "--output", type=Path, help="a new folder, or with gguf a new file; default: in the run's results"
    )
    parser.add_argument("--weight_type", "--weight-type", choices=WEIGHT_TYPES, default="f16", help="with gguf")
    parser.add_argument("--repo_id", "--repo-id", default="", help="with hub: NAME/MODEL")
    parser.add_argument("--push", action="store_true", help="with hub: upload; without it files are listed")
    options = parser.parse_args()
    if options.to == "hub" and options.repo_id.count("/") != 1:
        raise BadInputError("--to hub needs --repo_id NAME/MODEL.")
    return options


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    options = read_options()
    tuned = find_run(options.run)
    if options.to == "gguf":
        check_whole_model(tuned)
        file = options.output or tuned.folder / f"tuned-{options.weight_type}.gguf"
        print(f"model and tokenizer: {export_gguf(tuned.whole_model, file, options.weight_type)}")
        print(f"serve it: llama-server -m {file}")
        return
    folder = export_merged(tuned, options.output or tuned.folder / "exported")
    print(f"model, tokenizer and card: {folder}\nserve it: vllm serve {folder}")
    if options.to == "hub":
        for file in sorted(folder.iterdir()):
            print(f"{file.stat().st_size / 2**20:>10,.1f} MiB  {file.name}")
        print(f"uploaded: {upload(folder, options.repo_id)}" if options.push else "not uploaded: pass --push")
