"""The members of a world: how they join, their roll call, and what happens when one is lost; one process a machine.

The first member opens a store at the meeting place (or a launcher has), the others connect, and everyone announces
itself. Before any group is made each member knows who the others are, and that all have the same code, libraries, rows
and settings: what differs is refused with names, on every machine.
"""

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from hashlib import sha256
from importlib.metadata import version
from threading import Thread
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

import psutil

from common.base.command_line import ended_by_one_sentence
from common.base.errors import BadInputError, LeftBehindError, is_of_the_network, said_by
from common.base.run_config import RunConfig
from common.runtime.rendezvous import Meeting
from common.runtime.world import BACKENDS

if TYPE_CHECKING:
    from torch.distributed import Store

Result = TypeVar("Result")

POLL_S = 0.1
LEAVE_S = 5.0
"""How long the first member, who may hold the store, waits until the others have read what they need."""
NAMED_S = 3.0
"""By how much gradients are waited for longer than a step may take: whoever sees the other ranks names who hangs."""
STORE_TIMEOUT_S = 60.0
"""How long an answer of the store may take: as long as a link may be away."""
COMPARED_PACKAGES = ("torch", "transformers", "accelerate")
OWN_SETTINGS = ("model", "data", "resume_from_checkpoint", "results_root")
"""Fields of a run that may differ from machine to machine: its places."""
LOST_MEMBER_EXIT_CODE = 3


@dataclass(frozen=True)
class Member:
    """What a member says of itself; all but rank and host must be the same everywhere."""

    rank: int
    host: str
    rows: int
    """Training rows of the whole data, before they are divided."""
    data: str
    """A digest of the rows."""
    versions: Mapping[str, str]
    """Of the packages that compute."""
    settings: Mapping[str, object]
    """The run's, but for its places."""

    def __str__(self) -> str:
        """For a sentence."""
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class World:
    """The members that came, in the order of their ranks."""

    members: tuple[Member, ...]
    start: int
    """Which start of this world it is, from 1: a launcher starts the members again when one was lost or has come."""
    first_size: int
    """How many members there were at the first start."""

    def goes_on_with(self, run: RunConfig) -> RunConfig:
        """The run; at a later start its rows are divided as at the first, so that fewer members take the same steps."""
        return run if self.start == 1 else replace(run, partitions=run.partitions or self.first_size)


class LostMemberError(Exception):
    """Another member went, or did not answer in time."""


def member_of(meeting: Meeting, run: RunConfig, rows: Sequence[Mapping[str, object]]) -> Member:
    """What this process says of itself; `rows` are the training rows that it has read."""
    return Member(
        rank=meeting.rank,
        host=socket.gethostname(),
        rows=len(rows),
        data=sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:12],
        versions={"python": platform.python_version(), **{name: version(name) for name in COMPARED_PACKAGES}},
        settings={name: value for name, value in run.to_dict().items() if name not in OWN_SETTINGS},
    )


@contextmanager
def world_joined(meeting: Meeting, run: RunConfig, member: Member, timeout_s: float) -> Iterator[World]:
    """The members' process group from its start on, after a roll call; whoever starts a rank then finds it there.

    Raises:
        BadInputError: nobody is reached within `timeout_s`, someone is missing, or members differ.
        LostMemberError: a member goes, or does not answer within the run's `step_timeout_s`, while they work.
    """
    import torch.distributed as dist

    print(meeting)
    deadline_s = time.monotonic() + timeout_s
    server = None if meeting.has_store or meeting.rank else open_store(meeting)
    store = connect(meeting, timeout_s, deadline_s)
    use_interface_to(meeting)
    call, world = roll_call(store, member, meeting, deadline_s)
    os.environ.update(
        RANK=str(meeting.rank), WORLD_SIZE=str(meeting.world_size), MASTER_ADDR=meeting.address,
        MASTER_PORT=str(meeting.port),
    )  # fmt: skip
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("GROUP_RANK", str(meeting.rank))  # which machine it is, for the record
    try:
        dist.init_process_group(
            BACKENDS[run.device], store=call, rank=meeting.rank, world_size=meeting.world_size,
            timeout=timedelta(seconds=run.step_timeout_s + NAMED_S),
        )  # fmt: skip
        yield world
        in_time(lambda: leave(call, meeting, run.step_timeout_s), run.step_timeout_s + LEAVE_S)
    except (RuntimeError, LeftBehindError) as error:
        if not is_of_the_network(error):
            raise
        raise LostMemberError(
            f"Another of {meeting.world_size} members went away, or {member} waited {run.step_timeout_s:g} s for it "
            f"({said_by(error)}): start all again, with --resume_from_checkpoint and the newest checkpoint of this run's results, "
            "or by torchrun with --max_restarts, which resumes by itself."
        ) from None
    finally:
        del server  # it lives as long as the world


def run_as_member(work: Callable[[], object]) -> None:
    """Run `work`; it ends as any run does, and where a member is lost in one sentence and exit code 3."""
    try:
        with ended_by_one_sentence():
            work()
    except LostMemberError as lost:
        print(f"error: {lost}", file=sys.stderr)
        sys.exit(LOST_MEMBER_EXIT_CODE)


def in_time(work: Callable[[], Result], within_s: float) -> Result:
    """What `work` returns, or raises: torch's store may wait without end for somebody who fell silent.

    Raises:
        LeftBehindError: it does neither within so many seconds.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # to be raised where it is waited for
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    if not wait([future], within_s).done:
        raise LeftBehindError(f"no answer within {within_s:.0f} s")
    return future.result()


# -- the way there


def open_store(meeting: Meeting) -> "Store":
    """The members' common store, in the first member's process.

    Raises:
        BadInputError: its port is taken.
    """
    from torch.distributed import TCPStore

    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", meeting.port))
        except OSError as error:
            raise BadInputError(
                f"Rank 0 cannot listen on port {meeting.port} ({error.strerror}): `ss -ltnp` says who does; end it, or "
                "pass another port to all machines."
            ) from None
    patience = timedelta(seconds=STORE_TIMEOUT_S)
    return TCPStore("localhost", meeting.port, meeting.world_size, True, patience, wait_for_workers=False)


def connect(meeting: Meeting, timeout_s: float, deadline_s: float) -> "Store":
    """The members' common store, reached at the meeting's address; the first member finds out whether it is its own.

    torch's store tells at length of every vain try, so the way is tried out before.

    Raises:
        BadInputError: nobody answers as the store would, until the clock of `time.monotonic` says `deadline_s`.
    """
    reason = _nobody_listens(meeting, deadline_s)
    if not reason:
        try:
            return in_time(lambda: _reach_store(meeting), max(1.0, deadline_s - time.monotonic()))
        except (LeftBehindError, RuntimeError) as error:
            reason = f"who listens there is not the first member: {said_by(error)}"
    own = "; `ip -brief address` lists this machine's own" if meeting.rank == 0 else ""
    place = f"{meeting.address}:{meeting.port}"
    raise BadInputError(
        f"Rank {meeting.rank} of {meeting.world_size} did not reach the first machine at {place} ({meeting.source}) "
        f"within {timeout_s:g} s ({reason}): start rank 0 there, mend the address, or open the port in its firewall "
        f"(`nc -zv {meeting.address} {meeting.port}` tries it){own}."
    )


def _nobody_listens(meeting: Meeting, deadline_s: float) -> str:
    """Why nobody can be reached until then; empty when somebody is."""
    reason = "no answer"
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            socket.create_connection((meeting.address, meeting.port), timeout=left_s).close()
        except OSError as error:
            reason = error.strerror or reason  # a time-out of our own has none
        else:
            return ""
        time.sleep(POLL_S)
    return reason


def _reach_store(meeting: Meeting) -> "Store":
    from torch.distributed import TCPStore

    patience = timedelta(seconds=STORE_TIMEOUT_S)
    return TCPStore(meeting.address, meeting.port, meeting.world_size, False, patience, wait_for_workers=False)


def use_interface_to(meeting: Meeting) -> None:
    """Have gloo and NCCL use the network interface by which the master is reached: gloo would take the host name's."""
    variables = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ]
    family, *_, place = socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as way:
        way.connect(place)  # sends nothing, but chooses the way
        own = way.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            os.environ |= dict.fromkeys(variables, name)
            return


# -- the roll call


def roll_call(store: "Store", member: Member, meeting: Meeting, deadline_s: float) -> "tuple[Store, World]":
    """Everyone who is there, and a part of the store for this start alone; each arrival is said.

    Raises:
        BadInputError: someone is missing at `deadline_s` (of `time.monotonic`), has this member's rank, or differs.
    """
    ask = _call if member.rank == 0 else _answer
    within_s = deadline_s - time.monotonic() + 2 * LEAVE_S
    try:
        call, world = in_time(lambda: ask(store, member, meeting, deadline_s), within_s)
    except (LeftBehindError, RuntimeError) as error:  # a connection that is gone has no class of its own
        raise BadInputError(
            f"The first machine went away or fell silent while {member} waited for the others ({said_by(error)}): its "
            "own output says why."
        ) from None
    check_all_came([each.rank for each in world.members], meeting.world_size)
    check_members_agree(world.members)
    return call, world


def check_all_came(ranks: Sequence[int], world_size: int) -> None:
    """Refuse a world that is not complete.

    Raises:
        BadInputError: with the ranks that are missing.
    """
    missing = sorted(set(range(world_size)) - set(ranks))
    if missing:
        raise BadInputError(
            f"{len(ranks)} of {world_size} members came in time; missing: rank {', '.join(map(str, missing))}. Start "
            "them, wait longer by --join_timeout_s, or start all with the number that there is."
        )


def _take_rank(store: "Store", member: Member, meeting: Meeting) -> None:
    if not meeting.has_store and store.add(f"times/{member.rank}", 1) > 1:  # a launcher gives each its own
        raise BadInputError(f"Two machines have one rank: {member} came second; give each its own --machine_rank.")


def _call(store: "Store", member: Member, meeting: Meeting, deadline_s: float) -> "tuple[Store, World]":
    """The first member's part: it calls, and says in the end who was there."""
    _take_rank(store, member, meeting)
    world_size = meeting.world_size
    own = uuid4().hex  # a launcher's store still has what was said at an earlier start
    call, arrivals = _part_of(store, own), _Arrivals(world_size)
    _announce(call, member, own)
    store.set("call", own)
    while len(arrivals.look(call)) < world_size and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    said = [json.loads(call.get(f"member/{rank}")) for rank in arrivals.ranks]
    start, first_size = store.add("starts", 1), int(store.compare_set("first_size", "", str(world_size)))
    call.set("there", json.dumps({"start": start, "first_size": first_size, "said": said}))
    leave_s = time.monotonic() + LEAVE_S
    while time.monotonic() < leave_s and not call.check([f"seen/{rank}" for rank in arrivals.ranks if rank]):
        time.sleep(POLL_S)
    return call, _world_of(start, first_size, said)


def _answer(store: "Store", member: Member, meeting: Meeting, deadline_s: float) -> "tuple[Store, World]":
    """The others' part: they answer the newest call, until one has counted them."""
    _take_rank(store, member, meeting)
    own, arrivals = uuid4().hex, _Arrivals(meeting.world_size)
    while time.monotonic() < deadline_s + LEAVE_S:  # the first member counts to its own deadline
        if store.check(["call"]):
            call = _part_of(store, store.get("call").decode())
            _announce(call, member, own)
            there = json.loads(call.get("there")) if call.check(["there"]) else None
            if there is None:
                arrivals.look(call)
            elif own in {each["token"] for each in there["said"]}:  # else an earlier start's
                call.set(f"seen/{member.rank}", "1")
                world = _world_of(**there)
                arrivals.say(len(world.members))
                return call, world
        time.sleep(POLL_S)
    check_all_came(arrivals.ranks or [member.rank], meeting.world_size)
    raise BadInputError(f"Rank 0 did not say who came, while {member} waited for it: its own output says why.")


class _Arrivals:
    """Who has come to a call, said as they come."""

    def __init__(self, world_size: int) -> None:
        """Nobody has come yet."""
        self.world_size, self.start_s, self.said = world_size, time.monotonic(), 0
        self.ranks: list[int] = []

    def look(self, call: "Store") -> list[int]:
        """The ranks that are there now."""
        self.ranks = [rank for rank in range(self.world_size) if call.check([f"member/{rank}"])]
        self.say(len(self.ranks))
        return self.ranks

    def say(self, count: int) -> None:
        """One line, when they have become more."""
        if count > self.said:
            self.said = count
            print(f"{count}/{self.world_size} members after {time.monotonic() - self.start_s:.1f} s")


def _part_of(store: "Store", call: str) -> "Store":
    from torch.distributed import PrefixStore

    return PrefixStore(f"call/{call}", store)


def _announce(call: "Store", member: Member, token: str) -> None:
    call.set(f"member/{member.rank}", json.dumps({"token": token, "member": asdict(member)}))


def _world_of(start: int, first_size: int, said: list[dict[str, object]]) -> World:
    return World(tuple(Member(**each["member"]) for each in said), start, first_size)


def leave(call: "Store", meeting: Meeting, timeout_s: float) -> None:
    """The first member, whose process may hold the store, leaves last: else the others would think it lost."""
    call.set(f"done/{meeting.rank}", "1")
    if meeting.rank == 0:
        call.wait([f"done/{rank}" for rank in range(meeting.world_size)], timedelta(seconds=timeout_s))


def check_members_agree(members: Sequence[Member]) -> None:
    """Refuse machines that would not train one model on one set of rows; everyone sees the same list.

    Raises:
        BadInputError: with the names and both values.
    """
    first = members[0]
    for other in members[1:]:
        for what in ("versions", "settings", "rows", "data"):
            mine, theirs = getattr(first, what), getattr(other, what)
            if mine != theirs:
                mine, theirs = _different(mine, theirs)
                raise BadInputError(
                    f"Machines differ: {first} has {what} {mine}, but {other} has {theirs}; give all the same."
                )


def _different(mine: object, theirs: object) -> tuple[object, object]:
    """Of two dictionaries what differs."""
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return mine, theirs
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return tuple(", ".join(f"{name} {side.get(name, 'missing')}" for name in names) for side in (mine, theirs))
