"""The members of a world: how they join, their roll call, and what happens when one is lost; one process a machine.

The first member opens a store at the meeting place (or a launcher has), the others connect, and everyone announces
itself. Before any group is made each member knows who the others are, and that all have the same code, libraries, rows
and settings: what differs is refused with names, on every machine.
"""

import json
import operator
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing import TimeoutError as NoResultError
from multiprocessing.pool import ThreadPool
from typing import TypeVar
from uuid import uuid4

import torch.distributed as dist
from tenacity import RetryCallState, Retrying, retry_if_result, stop_after_delay, wait_fixed

from common.base.command_line import ended_by_one_sentence
from common.base.errors import BadInputError, LeftBehindError, is_of_the_network, said_by
from common.base.run_config import RunConfig
from common.runtime.machines import Member, check_members_agree, use_interface_to
from common.runtime.rendezvous import Meeting
from common.runtime.world import BACKENDS

Result = TypeVar("Result")

POLL_S = 0.1
LEAVE_S = 5.0  # how long the first member, who may hold the store, waits until the others have read what they need
NAMED_S = 3.0  # longer than a step may take: before gradients time out, the watch names the rank that hangs
STORE_TIMEOUT = timedelta(seconds=60)  # how long an answer of the store may take: as long as a link may be away
LOST_MEMBER_EXIT_CODE = 3


@dataclass(frozen=True)
class World:
    """The members that came, in the order of their ranks.

    Attributes:
        start: Which start of this world it is, from 1: a launcher restarts the members when one was lost or has come.
        first_size: How many members there were at the first start.
    """

    members: tuple[Member, ...]
    start: int
    first_size: int

    def goes_on_with(self, run: RunConfig) -> RunConfig:
        """Return the run; a later start divides the rows as the first did, so that fewer members take equal steps."""
        return run if self.start == 1 else replace(run, partitions=run.partitions or self.first_size)


class LostMemberError(Exception):
    """Raised when another member ends, or does not answer in time."""


@contextmanager
def world_joined(meeting: Meeting, run: RunConfig, member: Member, timeout_s: float) -> Iterator[World]:
    """Join the members' process group after a roll call; whoever starts a rank in the block finds it there.

    Raises:
        BadInputError: If nobody is reached within `timeout_s`, someone is missing, or members differ.
        LostMemberError: If a member ends, or does not answer within the run's `step_timeout_s`, while they work.
    """
    print(meeting)
    deadline_s = time.monotonic() + timeout_s
    _server = None if meeting.has_store or meeting.rank else open_store(meeting)  # it lives as long as the world
    store = connect(meeting, timeout_s, deadline_s)
    use_interface_to(meeting.address, meeting.port)
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
            f"({said_by(error)}): start all again, with --resume_from_checkpoint and the newest checkpoint of this "
            "run's results, or by torchrun with --max_restarts, which resumes by itself."
        ) from None


def run_as_member(work: Callable[[], object]) -> None:
    """Run `work`; it ends as any run does, and if a member is lost in one sentence and exit code 3."""
    try:
        with ended_by_one_sentence():
            work()
    except LostMemberError as lost:
        print(f"error: {lost}", file=sys.stderr)
        sys.exit(LOST_MEMBER_EXIT_CODE)


def in_time(work: Callable[[], Result], within_s: float) -> Result:
    """Return what `work` returns, or raise what it raises: torch's store may wait without end for a silent peer.

    Raises:
        LeftBehindError: If it does neither within so many seconds.
    """
    with ThreadPool(1) as pool:  # of a daemon thread, which keeps nobody from ending
        try:
            return pool.apply_async(work).get(within_s)
        except NoResultError:
            raise LeftBehindError(f"no answer within {within_s:.0f} s") from None


def _poll(ask: Callable[[], Result], until_s: float) -> Result:
    """Ask until there is an answer, or `time.monotonic` reaches `until_s`; return the last answer."""

    def last_answer(state: RetryCallState) -> Result:
        return state.outcome.result()

    return Retrying(
        retry=retry_if_result(operator.not_), wait=wait_fixed(POLL_S),
        stop=stop_after_delay(until_s - time.monotonic()), retry_error_callback=last_answer,
    )(ask)  # fmt: skip


# -- the connection


def open_store(meeting: Meeting) -> dist.Store:
    """Open the members' common store, in the first member's process.

    Raises:
        BadInputError: If its port is taken.
    """
    try:
        socket.create_server(("", meeting.port)).close()  # torch's store would tell of it at length
    except OSError as error:
        raise BadInputError(
            f"Rank 0 cannot listen on port {meeting.port} ({os.strerror(error.errno)}): `ss -ltnp` says who does; end "
            "it, or pass another port to all machines."
        ) from None
    return _store_at("localhost", meeting, is_server=True)


def connect(meeting: Meeting, timeout_s: float, deadline_s: float) -> dist.Store:
    """Return the members' common store, reached at the meeting's address, by the first member, too.

    Raises:
        BadInputError: If nobody answers as the store would until the clock of `time.monotonic` says `deadline_s`.
    """
    reasons = ["no answer"]
    try:
        if _poll(lambda: _knock(meeting, deadline_s, reasons), deadline_s):
            left_s = max(1.0, deadline_s - time.monotonic())
            return in_time(lambda: _store_at(meeting.address, meeting, is_server=False), left_s)
    except (LeftBehindError, RuntimeError) as error:
        reasons.append(f"who listens there is not the first member: {said_by(error)}")
    own = "; `ip -brief address` lists this machine's own" if meeting.rank == 0 else ""
    raise BadInputError(
        f"Rank {meeting.rank} of {meeting.world_size} did not reach the first machine at "
        f"{meeting.address}:{meeting.port} ({meeting.source}) within {timeout_s:g} s ({reasons[-1]}): start rank 0 "
        f"there, correct the address, or open the port in its firewall (`nc -zv {meeting.address} {meeting.port}` "
        f"tries it){own}."
    )


def _knock(meeting: Meeting, deadline_s: float, reasons: list[str]) -> bool:
    """Return whether somebody listens at the meeting's address: torch's store reports each failed attempt at length."""
    try:
        left_s = max(POLL_S, deadline_s - time.monotonic())
        socket.create_connection((meeting.address, meeting.port), timeout=left_s).close()
    except OSError as error:
        reasons.append(error.strerror or reasons[-1])  # a time-out of our own has no reason
        return False
    return True


def _store_at(host: str, meeting: Meeting, is_server: bool) -> dist.Store:
    return dist.TCPStore(host, meeting.port, meeting.world_size, is_server, STORE_TIMEOUT, wait_for_workers=False)


# -- the roll call


def roll_call(store: dist.Store, member: Member, meeting: Meeting, deadline_s: float) -> tuple[dist.Store, World]:
    """Return everyone who is there, and a part of the store for this start alone; each arrival is said.

    Raises:
        BadInputError: If someone is missing at `deadline_s` (of `time.monotonic`), has this member's rank, or differs.
    """

    def take_part() -> tuple[dist.Store, World]:
        if not meeting.has_store and store.add(f"times/{member.rank}", 1) > 1:  # a launcher gives each its own
            raise BadInputError(f"Two machines have one rank: {member} came second; give each its own --machine_rank.")
        arrivals = _Arrivals(meeting.world_size)
        return (_call if member.rank == 0 else _answer)(store, member, arrivals, deadline_s)

    try:
        call, world = in_time(take_part, deadline_s - time.monotonic() + 2 * LEAVE_S)
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
        BadInputError: With the ranks that are missing.
    """
    missing = sorted(set(range(world_size)) - set(ranks))
    if missing:
        raise BadInputError(
            f"{len(ranks)} of {world_size} members came in time; missing: rank {', '.join(map(str, missing))}. Start "
            "them, wait longer by --join_timeout_s, or start all with the number that there is."
        )


class _Arrivals:
    """The ranks that have come to a call, printed as they come."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.start_s = world_size, time.monotonic()
        self.ranks: list[int] = []

    def look(self, call: dist.Store) -> bool:
        """Return whether all are there now."""
        ranks = [rank for rank in range(self.world_size) if call.check([f"member/{rank}"])]
        if len(ranks) > len(self.ranks):
            print(f"{len(ranks)}/{self.world_size} members after {time.monotonic() - self.start_s:.1f} s")
        self.ranks = ranks
        return len(ranks) == self.world_size


def _call(store: dist.Store, member: Member, arrivals: _Arrivals, deadline_s: float) -> tuple[dist.Store, World]:
    """Call the others, as the first member, and tell them in the end who was there."""
    own = uuid4().hex  # a launcher's store still has what was said at an earlier start
    call = _announced(store, own, member, own)
    store.set("call", own)
    _poll(lambda: arrivals.look(call), deadline_s)
    said = [json.loads(call.get(f"member/{rank}")) for rank in arrivals.ranks]
    first_size = int(store.compare_set("first_size", "", str(arrivals.world_size)))
    there = {"said": said, "first_size": first_size, "start": store.add("starts", 1)}  # once all that can fail has not
    call.set("there", json.dumps(there))
    _poll(lambda: call.check([f"seen/{rank}" for rank in arrivals.ranks if rank]), time.monotonic() + LEAVE_S)
    return call, _world_of(**there)


def _answer(store: dist.Store, member: Member, arrivals: _Arrivals, deadline_s: float) -> tuple[dist.Store, World]:
    """Answer the newest call, as one of the others, until the first member has counted this one."""
    own = uuid4().hex

    def counted() -> tuple[dist.Store, World] | None:
        if not store.check(["call"]):
            return None
        call = _announced(store, store.get("call").decode(), member, own)
        there = json.loads(call.get("there")) if call.check(["there"]) else None
        if there and own not in {each["token"] for each in there["said"]}:  # an earlier start's
            return None
        arrivals.look(call)
        if not there:
            return None
        call.set(f"seen/{member.rank}", "1")
        return call, _world_of(**there)

    found = _poll(counted, deadline_s + LEAVE_S)  # the first member counts to its own deadline
    if found:
        return found
    check_all_came(arrivals.ranks or [member.rank], arrivals.world_size)
    raise BadInputError(f"Rank 0 did not say who came, while {member} waited for it: its own output says why.")


def _announced(store: dist.Store, call: str, member: Member, token: str) -> dist.Store:
    """Return a call's part of the store, in which this member has announced itself."""
    part = dist.PrefixStore(f"call/{call}", store)
    part.set(f"member/{member.rank}", json.dumps({"token": token, "member": asdict(member)}))
    return part


def _world_of(start: int, first_size: int, said: list[dict[str, object]]) -> World:
    return World(tuple(Member(**each["member"]) for each in said), start, first_size)


def leave(call: dist.Store, meeting: Meeting, timeout_s: float) -> None:
    """Leave the world; the first member, whose process may hold the store, waits for the others.

    Else they would think it lost.
    """
    call.set(f"done/{meeting.rank}", "1")
    if meeting.rank == 0:
        call.wait([f"done/{rank}" for rank in range(meeting.world_size)], timedelta(seconds=timeout_s))
