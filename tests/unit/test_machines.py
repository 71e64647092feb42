"""Several machines that work on one run: who differs is named, and they find the network between them."""

import importlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.splits import load_splits
from common.runtime import machines
from common.runtime.machines import check_members_agree, member_of, use_interface_to

RUN = RunConfig(task="summarization", technique="full", parallel="ddp", loop="machines", devices=3, nodes=3)
ROWS = [{"text": "a", "summary": "b"}]


def member(rank: int, **changes: object) -> dict[str, Any]:
    return {**member_of(rank, RUN, ROWS), "who": f"rank {rank} (host{rank})", **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": 2}, "rank 0 (host0) has rows 1, but rank 2 (host2) has 2;"),
        ({"data": "abc"}, "but rank 2 (host2) has abc;"),
        ({"code": "abc"}, "has code "),
        ({"model": "abc"}, "has model "),
        ({"versions": {}}, "but rank 2 (host2) has python missing, torch missing"),
        ({"settings": {**member(0)["settings"], "seed": 7}}, "has settings seed 42, but rank 2 (host2) has seed 7;"),
    ],
)
def test_who_differs_is_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError) as refusal:
        check_members_agree([member(0), member(1), member(2, **changes)])
    assert said in str(refusal.value)


def test_places_may_differ() -> None:
    run = replace(RUN, data="/data", results_root="/scratch", resume_from_checkpoint="/old/checkpoint-4")
    check_members_agree([member(0), member_of(1, run, ROWS)])


def test_other_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "3.2_summarization" / "run_0_cpu_x2")
    replicas, model = importlib.import_module("my_utils_summarization"), torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    monkeypatch.setattr(replicas, "gather_object", lambda own: own * 2)
    replicas.check_same_weights(model)
    monkeypatch.setattr(replicas, "gather_object", lambda own: [*own, ("host1", "0" * 12)])
    said = r"different weights \(rank 0 \(.+\) \w{12}, rank 1 \(host1\) 000000000000\)"
    with pytest.raises(BadInputError, match=said):
        replicas.check_same_weights(model)


@pytest.fixture
def no_interfaces_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sets is put back afterwards."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_interfaces_named")
@pytest.mark.parametrize(("default_route", "expected"), [("10.0.0.7", "eth7"), ("", None)])
def test_an_own_name_that_leads_to_the_loopback_is_not_the_interface(
    default_route: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = {"first-machine": "127.0.1.1", machines.ELSEWHERE: default_route}
    monkeypatch.setattr(machines, "own_address_towards", lambda address, port: routes[address])
    interfaces = {"lo": [SimpleNamespace(address="127.0.1.1")], "eth7": [SimpleNamespace(address="10.0.0.7")]}
    monkeypatch.setattr(machines.psutil, "net_if_addrs", lambda: interfaces)
    use_interface_to("first-machine", 29400)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == os.environ.get("NCCL_SOCKET_IFNAME") == expected


def test_rows_and_models_are_the_same_wherever_their_files_are(tmp_path: Path) -> None:
    def digests(place: str, ends_with: str = ".") -> set[str]:
        rows, model = tmp_path / place / "rows.csv", tmp_path / place / "model"
        rows.write_text("question,answer\n" + "\n".join(f"{n}?,{n}{ends_with}" for n in range(20)))
        run = RunConfig(data=str(rows), model=str(model))
        said = member_of(0, run, load_splits(run).train)
        return {said["data"], said["model"]}

    for place in ("a", "b"):
        shutil.copytree(REPOSITORY / "assets" / "embedded_base", tmp_path / place / "model")
    before = digests("a")
    assert before == digests("b")
    (tmp_path / "b" / "model" / "model.safetensors").write_bytes(b"other")
    assert not digests("b", ends_with="!") & before


@pytest.mark.usefixtures("no_interfaces_named")
@pytest.mark.parametrize("own", [{}, {"NCCL_SOCKET_IFNAME": "mine"}])
def test_gloo_and_nccl_use_the_interface_to_the_master(own: dict[str, str]) -> None:
    os.environ.update(own)
    use_interface_to("127.0.0.1", 29400)
    found = (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
    assert found == ("lo", own.get("NCCL_SOCKET_IFNAME", "lo"))
