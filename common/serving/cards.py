"""The card of what is handed on: base, licence, data, settings, scores and command, and no path of this machine."""

import os
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from common.base.paths import find_here
from common.base.secrets import without_secrets
from common.planning.model_configs import is_hub_id
from common.records.store import Record, fit_to_be_kept
from common.serving.tuned_runs import TunedRun

CARD_NAME = "README.md"
SETTINGS = ("technique", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "optim", "precision",
            "max_length", "train_on", "seed")  # fmt: skip
ADAPTER_SETTINGS = ("lora_r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules")
SCORES = {
    "similarity_score": "similarity score (1 - cosine, lower is better)",
    "similarity_score_minilm": "the same by MiniLM",
    "facts_said_share": "share of the facts that the answers have",
}
ENOUGH_QUESTIONS = 30
LICENCE_FIELDS = ("license", "license_name", "license_link")


def card_of(tuned: TunedRun, is_adapter: bool = False) -> ModelCard:
    """Return the card of the whole tuned model, or of its adapter alone."""
    record, base, licence = fit_to_be_kept(tuned.record), base_name(tuned), _licence_of_base(tuned)
    config = record["config"]
    about = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["fine-tuned", config["technique"]],
        base_model=base if "/" in base and tuned.run.weights == "pretrained" else None,
        **licence,
    )
    named = "No licence is named here, as no card of the base names one: look it up at the base's source."
    if licence:
        named = f"{licence.get('license_name', licence['license'])}, which the base's own card names."
    commit = f" (commit {record['model_commit']})" if record.get("model_commit") else ""
    settings = [*SETTINGS, *(ADAPTER_SETTINGS if tuned.run.method.has_adapters else ())]
    parts = [
        f"---\n{about.to_yaml()}\n---",
        f"# {base.rpartition('/')[2]}, tuned{' (adapter)' if is_adapter else ''}",
        f"{tuned.run.method.title} of `{config['model']}`{commit} on `{config['data']}` "
        f"({record['data']['training_rows']:,} training rows, {record['data']['training_tokens']:,} tokens).",
        f"## Licence\n\n{named} The data may have a licence of their own.",
        *(["## Use\n\n" + _use_of_adapter(base)] if is_adapter else []),
        "## Results\n\n" + _score_table(record),
        "## Settings\n\n" + _table(("setting", "value"), [(name, config[name]) for name in settings if name in config]),
        f"## Command\n\nIn the folder `{record['run_folder']}` of the repository:\n\n```\n{record['command']}\n```",
    ]
    return ModelCard(without_secrets("\n\n".join(parts)) + "\n")


def base_name(tuned: TunedRun) -> str:
    """Return the base's id on the Hub (`NAME/MODEL`), or the bare name of its folder."""
    model = tuned.recorded_base
    return model if is_hub_id(model) else Path(model).name


def _licence_of_base(tuned: TunedRun) -> dict[str, str]:
    """Return the fields about the licence in the card of the base, in its folder or the Hub's cache; or none."""
    base = base_name(tuned)
    cached = try_to_load_from_cache(base, CARD_NAME, revision=tuned.run.model_revision or None) if "/" in base else None
    card = find_here(Path(tuned.recorded_base) / CARD_NAME, os.path.isfile) or cached
    said = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict() if isinstance(card, str | Path) else {}
    found = {name: said[name] for name in LICENCE_FIELDS if isinstance(said.get(name), str)}
    if not found.get("license_link", "https:").startswith("http"):  # a file of the base's, which does not come along
        del found["license_link"]
    return found if "license" in found else {}


def _use_of_adapter(base: str) -> str:
    edit = (
        f"The base was a folder called `{base}`, and no model of the Hub: write where it is into "
        "`base_model_name_or_path` of `adapter_config.json` first.\n\n"
    )
    return f"""{"" if "/" in base else edit}```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, GenerationConfig

folder = "this folder, or its id on the Hub"
model, tokenizer = AutoPeftModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
question = [{{"role": "user", "content": "your question"}}]
batch = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
stops = GenerationConfig.from_pretrained(folder).eos_token_id
answer = model.generate(**batch, max_new_tokens=256, do_sample=False, eos_token_id=stops)
print(tokenizer.decode(answer[0, batch["input_ids"].shape[1] :], skip_special_tokens=True))
```"""


def _score_table(record: Record) -> str:
    after = record["quality"]["after"]
    evaluated = [when for when in ("before", "after") if record["quality"].get(when)]
    rows = [
        (label, *(f"{record['quality'][when][name]:.3f}" for when in evaluated))
        for name, label in SCORES.items()
        if after.get(name) is not None
    ]
    few = " (too few to judge by)" if after["questions"] < ENOUGH_QUESTIONS else ""
    return f"Of {after['questions']} questions{few} that had no part in training:\n\n{_table(('', *evaluated), rows)}"


def _table(headers: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [headers, ("---",) * len(headers), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
