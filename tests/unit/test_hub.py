"""Data sets and models of the Hub, from a server on this machine: configurations, revisions, gates, the cache."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load, save

from common.base.paths import REPOSITORY
from tests.local_hub import LocalHub, commit_of, serving

CARD = b"""---
configs:
- config_name: short
  data_files:
  - {split: train_sft, path: short/train.jsonl}
  - {split: test_sft, path: short/test.jsonl}
- config_name: long
  data_files: long.jsonl
---
"""
ATTEMPTS = """
import json, sys
from dataclasses import replace
from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.splits import load_splits
from common.models.loading import checked_config, load_base_model, load_tokenizer
from common.models.trained_weights import add_lora
from common.runtime.recorder import commit_of_model

answers = []
for settings in json.loads(sys.argv[1]):
    run = replace(RunConfig(), **settings)
    try:
        if "model" in settings:
            tokenizer, model, shape = load_tokenizer(run), load_base_model(run, {"": "cpu"}), checked_config(run)
            adapter = add_lora(model, run).peft_config["default"]
            answers.append({
                "lengths": [tokenizer.model_max_length, shape.max_position_embeddings],
                "weight": round(model.get_input_embeddings().weight.sum().item(), 3),
                "commit": commit_of_model(run), "adapter's base": adapter.revision,
            })
        else:
            splits = load_splits(run)
            parts = (splits.train, splits.validation, splits.test)
            answers.append([[row["messages"][0]["content"] for row in part] for part in parts])
    except BadInputError as error:
        answers.append(str(error))
print(json.dumps(answers), file=open(sys.argv[2], "w"))
"""
"""Run in a process of its own: `huggingface_hub` reads its environment once, when it is imported."""
ROWS, MODEL = {"data": "somebody/rows"}, {"model": "somebody/tiny"}


def rows(name: str, count: int) -> bytes:
    lines = (json.dumps({"question": f"{name} {number}?", "answer": f"{number}"}) for number in range(count))
    return "\n".join(lines).encode()


def earlier_model(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return a model with other weights, of which config and tokenizer say that it reads half as many tokens."""
    config, tokenizer = (json.loads(files[name]) for name in ("config.json", "tokenizer_config.json"))
    weights = {name: weight + 1 for name, weight in load(files["model.safetensors"]).items()}
    return files | {
        "config.json": json.dumps(config | {"max_position_embeddings": 256}).encode(),
        "tokenizer_config.json": json.dumps(tokenizer | {"model_max_length": 256}).encode(),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
    }


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    files = {
        "README.md": CARD,
        "short/train.jsonl": rows("short", 20),
        "short/test.jsonl": rows("test", 4),
        "long.jsonl": rows("long", 30),
    }
    model = {path.name: path.read_bytes() for path in (REPOSITORY / "assets" / "embedded_base").iterdir()}
    kept = frozenset({"datasets/somebody/gated", "models/somebody/gated"})
    repositories = {
        "datasets/somebody/rows": {"main": files, "v1": {**files, "long.jsonl": rows("earlier", 30)}},
        "datasets/somebody/gated": {"main": files},
        "models/somebody/tiny": {"main": model, "v1": earlier_model(model)},
        "models/somebody/gated": {"main": model},
    }
    with serving(LocalHub(repositories, kept)) as hub:
        yield hub


def answers(attempts: list[dict[str, str]], hub: LocalHub, home: Path, **environment: str) -> list:
    """Return what each attempt reads, or its refusal, in one new process with the cache `home`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    own |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "PYTHONPATH": str(REPOSITORY), **environment}
    command = [sys.executable, "-c", ATTEMPTS, json.dumps(attempts), str(home / "answers.json")]
    done = subprocess.run(command, env=own, cwd=home, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((home / "answers.json").read_text())


@pytest.mark.slow
def test_the_hub_is_read_as_asked_and_then_from_the_cache(hub: LocalHub, tmp_path: Path) -> None:
    short = {**ROWS, "dataset_config": "short", "dataset_train_split": "train_sft", "dataset_test_split": "test_sft"}
    long, earlier = ({**ROWS, "dataset_config": "long", "dataset_revision": name} for name in ("", "v1"))
    hub.requests.clear()
    of_short, of_long, of_earlier, of_model, no_model = answers(
        [short, long, earlier, MODEL, {"model": "somebody/none"}], hub, tmp_path
    )
    assert [len(split) for split in of_short] == [18, 2, 4]
    assert of_short[2] == [f"test {number}?" for number in range(4)]
    assert [len(split) for split in of_long] == [24, 3, 3]
    assert {question.split()[0] for split in of_long for question in split} == {"long"}
    assert {question.split()[0] for split in of_earlier for question in split} == {"earlier"}
    assert of_model["lengths"] == [512, 512]
    assert "somebody/none is not on the Hugging Face Hub" in no_model
    assert any(request.startswith("GET") and request.endswith("model.safetensors") for request in hub.requests)

    hub.requests.clear()
    other = {**ROWS, "dataset_config": "none"}
    again = answers([long, earlier, MODEL, other, {"model": "somebody/gated"}], hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "--dataset_revision" in again[0], "`datasets` would return the newest copy, which is that of v1"
    assert again[1:3] == [of_earlier, of_model]
    assert "--dataset_config" in again[3]
    assert "not in the cache" in again[4]
    assert "hf download somebody/gated" in again[4]
    assert not hub.requests, "offline, nothing is asked"


@pytest.mark.slow
def test_what_the_hub_does_not_give_is_refused_with_the_next_step(hub: LocalHub, tmp_path: Path) -> None:
    gated, gated_model = {"data": "somebody/gated", "dataset_config": "long"}, {"model": "somebody/gated"}
    attempts = [
        (ROWS, ("--dataset_config", "short", "long")),
        ({**ROWS, "dataset_config": "midi"}, ("--dataset_config", "midi", "short", "long")),
        ({**ROWS, "dataset_config": "short"}, ("no split 'train'", "train_sft, test_sft", "--dataset_train_split")),
        ({**ROWS, "dataset_config": "long", "dataset_test_split": "t"}, ("no split 't'", "--dataset_test_split")),
        ({**ROWS, "dataset_config": "long", "dataset_revision": "v9"}, ("v9", "--dataset_revision")),
        ({"data": "nobody/rows"}, ("nobody/rows", "--data")),
        ({"data": "nobody/gated"}, ("nobody/gated", "correct --data")),
        ({"data": "assets/exhibits", "dataset_config": "long"}, ("dataset_config is 'long'", "folder")),
        (gated, ("somebody/gated", "hf auth login")),
        (gated_model, ("somebody/gated", "hf auth login")),
    ]
    for answer, (_, said) in zip(answers([settings for settings, _ in attempts], hub, tmp_path), attempts, strict=True):
        assert isinstance(answer, str), answer
        assert all(words in answer for words in said), (answer, said)
        assert "\n" not in answer
    allowed = answers([gated, gated_model], hub, tmp_path, HF_TOKEN="hf_of_somebody")
    assert [len(split) for split in allowed[0]] == [24, 3, 3]
    assert allowed[1]["lengths"] == [512, 512]


@pytest.mark.slow
def test_a_model_is_read_at_the_revision_that_is_asked_for(hub: LocalHub, tmp_path: Path) -> None:
    revisions = hub.repositories["models/somebody/tiny"]
    commit = commit_of(revisions["v1"])
    main, v1, by_commit = MODEL, {**MODEL, "model_revision": "v1"}, {**MODEL, "model_revision": commit}
    unknown = {**MODEL, "model_revision": "v9"}
    of_main, of_v1, refused = answers([main, v1, unknown], hub, tmp_path)
    for answer, name, length in ((of_main, "main", 512), (of_v1, "v1", 256)):
        assert answer["lengths"] == [length, length]
        assert answer["commit"] == commit_of(revisions[name])
    assert of_v1["weight"] - of_main["weight"] == pytest.approx(1536 * 128, abs=1)
    assert [of_main["adapter's base"], of_v1["adapter's base"]] == [None, "v1"]
    assert "no revision v9" in refused
    assert "--model_revision" in refused

    hub.requests.clear()
    again = answers([main, v1, by_commit, unknown], hub, tmp_path, HF_HUB_OFFLINE="1")
    assert again[:2] == [of_main, of_v1]
    assert again[2] == {**of_v1, "adapter's base": commit}
    assert "hf download somebody/tiny --revision v9" in again[3], "and not another revision, which is in the cache"
    assert not hub.requests, "offline, nothing is asked"
