"""Data sets and models of the Hub, from a server on this machine: configurations, revisions, gates, the cache."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save

from common.base.paths import REPOSITORY
from tests.local_hub import LocalHub, commit_of, serving
from tests.pace import patient

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
from common.planning.model_configs import cached_commit

answers = {}
for name, settings in json.loads(sys.argv[1]).items():
    run = replace(RunConfig(), **settings)
    try:
        if "model" in settings:
            tokenizer, model, shape = load_tokenizer(run), load_base_model(run, {"": "cpu"}), checked_config(run)
            adapter = add_lora(model, run).peft_config["default"]
            answers[name] = {
                "lengths": [tokenizer.model_max_length, shape.max_position_embeddings],
                "weight": round(model.get_input_embeddings().weight.sum().item(), 3),
                "commit": cached_commit(run.model, run.model_revision), "adapter's base": adapter.revision,
            }
        else:
            splits = load_splits(run)
            parts = (splits.train, splits.validation, splits.test)
            answers[name] = [[row["messages"][0]["content"] for row in part] for part in parts]
    except BadInputError as error:
        answers[name] = str(error)
print(json.dumps(answers), file=open(sys.argv[2], "w"))
"""
"""Run in a process of its own: `huggingface_hub` reads its environment once, when it is imported."""
ROWS, MODEL = {"data": "somebody/rows"}, {"model": "somebody/tiny"}
LONG = {**ROWS, "dataset_config": "long"}
GATED = {"gated": {**LONG, "data": "somebody/gated"}, "gated model": {"model": "somebody/gated"}}
READ = {
    "short": {**ROWS, "dataset_config": "short", "dataset_train_split": "train_sft", "dataset_test_split": "test_sft"},
    "long": LONG,
    "earlier": {**LONG, "dataset_revision": "v1"},
    "main": MODEL,
    "v1": {**MODEL, "model_revision": "v1"},
}
CACHED = ("earlier", "main", "v1")
"""Those that the cache has last, and are read without a network, too."""
REFUSED = [
    (ROWS, ("--dataset_config", "short", "long")),
    ({**ROWS, "dataset_config": "midi"}, ("--dataset_config", "midi", "short", "long")),
    ({**ROWS, "dataset_config": "short"}, ("no split 'train'", "train_sft, test_sft", "--dataset_train_split")),
    ({**LONG, "dataset_test_split": "t"}, ("no split 't'", "--dataset_test_split")),
    ({**LONG, "dataset_revision": "v9"}, ("v9", "--dataset_revision")),
    ({"data": "nobody/rows"}, ("nobody/rows", "--data")),
    ({"data": "nobody/gated"}, ("nobody/gated", "correct --data")),
    ({"data": "assets/exhibits", "dataset_config": "long"}, ("dataset_config is 'long'", "folder")),
    (GATED["gated"], ("somebody/gated", "hf auth login")),
    (GATED["gated model"], ("somebody/gated", "hf auth login")),
    ({"model": "somebody/none"}, ("somebody/none is not on the Hugging Face Hub",)),
    ({**MODEL, "model_revision": "v9"}, ("no revision v9", "--model_revision")),
]
REFUSED_OFFLINE = [
    (LONG, ("--dataset_revision",)),  # `datasets` would return the newest copy, which is that of v1
    ({**ROWS, "dataset_config": "none"}, ("--dataset_config",)),
    (GATED["gated model"], ("not in the cache", "hf download somebody/gated")),
    ({**MODEL, "model_revision": "v9"}, ("hf download somebody/tiny --revision v9",)),  # not another, which is cached
]


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


def answers(attempts: dict[str, dict[str, str]], hub: LocalHub, home: Path, **environment: str) -> dict[str, Any]:
    """Return what each attempt reads, or its refusal, in one new process with the cache `home`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    own |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "PYTHONPATH": str(REPOSITORY), **environment}
    command = [sys.executable, "-c", ATTEMPTS, json.dumps(attempts), str(home / "answers.json")]
    done = subprocess.run(command, env=own, cwd=home, capture_output=True, text=True, timeout=patient(240), check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((home / "answers.json").read_text())


def numbered(refused: list[tuple[dict[str, str], tuple[str, ...]]]) -> dict[str, dict[str, str]]:
    return {str(number): settings for number, (settings, _) in enumerate(refused)}


def check_refusals(found: dict[str, Any], refused: list[tuple[dict[str, str], tuple[str, ...]]]) -> None:
    for number, (_, said) in enumerate(refused):
        answer = found[str(number)]
        assert isinstance(answer, str), answer
        assert all(words in answer for words in said), (answer, said)
        assert "\n" not in answer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cache that is filled by `online` and read by `offline`."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def online(hub: LocalHub, home: Path) -> dict[str, Any]:
    return answers({**READ, **numbered(REFUSED)}, hub, home)


@pytest.fixture(scope="module")
def offline(hub: LocalHub, home: Path, online: dict[str, Any]) -> dict[str, Any]:
    assert any(request.startswith("GET") and request.endswith("model.safetensors") for request in hub.requests)
    hub.requests.clear()
    by_commit = {**MODEL, "model_revision": commit_of(hub.repositories["models/somebody/tiny"]["v1"])}
    attempts = {**{name: READ[name] for name in CACHED}, "by commit": by_commit, **numbered(REFUSED_OFFLINE)}
    found = answers(attempts, hub, home, HF_HUB_OFFLINE="1")
    assert not hub.requests, "offline, nothing is asked"
    return found


@pytest.mark.slow
def test_rows_of_the_hub_are_read_as_asked(online: dict[str, Any]) -> None:
    found = {name: [len(split) for split in online[name]] for name in ("short", "long", "earlier")}
    assert found == {"short": [18, 2, 4], "long": [24, 3, 3], "earlier": [24, 3, 3]}
    assert online["short"][2] == [f"test {number}?" for number in range(4)]
    for name in ("long", "earlier"):
        assert {question.split()[0] for split in online[name] for question in split} == {name}


@pytest.mark.slow
def test_what_the_hub_does_not_give_is_refused_with_the_next_step(
    hub: LocalHub, online: dict[str, Any], tmp_path: Path
) -> None:
    check_refusals(online, REFUSED)
    allowed = answers(GATED, hub, tmp_path, HF_TOKEN="hf_of_somebody")
    assert [len(split) for split in allowed["gated"]] == [24, 3, 3]
    assert allowed["gated model"]["lengths"] == [512, 512]


@pytest.mark.slow
def test_a_model_is_read_at_the_revision_that_is_asked_for(hub: LocalHub, online: dict[str, Any]) -> None:
    of_main, of_v1 = online["main"], online["v1"]
    commits = {name: commit_of(files) for name, files in hub.repositories["models/somebody/tiny"].items()}
    weight = pytest.approx(of_main["weight"] + 1536 * 128, abs=1)
    assert of_main | {"weight": 0} == {
        "lengths": [512, 512], "weight": 0, "commit": commits["main"], "adapter's base": None,
    }  # fmt: skip
    assert of_v1 == {"lengths": [256, 256], "weight": weight, "commit": commits["v1"], "adapter's base": "v1"}


@pytest.mark.slow
def test_offline_the_cache_is_read_as_asked_or_what_is_missing_is_said(
    online: dict[str, Any], offline: dict[str, Any]
) -> None:
    assert [offline[name] for name in CACHED] == [online[name] for name in CACHED]
    assert offline["by commit"] == {**online["v1"], "adapter's base": online["v1"]["commit"]}
    check_refusals(offline, REFUSED_OFFLINE)
