"""Runs the parts of a lease: the most wanted first, none that cannot end in time, each in a process of its own."""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any

from bench.gpu_check import without_places
from bench.processes import END_S, FAILS, KEPT_LINES, LEFT_OUT, end_group, start_process, why_ended

RESULTS = "results.jsonl"
POLL_S = 0.05


@dataclass(frozen=True)
class Part:
    """Something to measure, in a process of its own.

    Attributes:
        name: What it is called in the results; a part of a name that is there is not run again.
        call: The function that measures, `module:function`; it returns what is kept, as JSON can hold it. One that
            catches its own failure says so as a part of `common.gpu_check` does: by `status` and `why`.
        arguments: That the function is given.
        expected_s: How long it should take: with less time left it is not begun.
        limit_s: When it is ended as one that hangs.
        beside: How many such parts may run at once, none of which measures speed; 1: it has the machine for itself.
        left_out: Why it cannot be run here; empty = it can.
    """

    name: str
    call: str
    arguments: dict[str, Any] = field(default_factory=dict)
    expected_s: float = 20.0
    limit_s: float = 60.0
    beside: int = 1
    left_out: str = ""


# -- what is kept


@dataclass(frozen=True)
class Results:
    """The lines of a lease's parts, in a file; `card` is the GPU that they are of, or the CPU."""

    path: Path
    card: str

    def of_this_card(self) -> list[dict[str, Any]]:
        """Return the lines that the file has of this card, each part's last one."""
        return [line for line in read_results(self.path) if line["card"] == self.card]

    def left_to_do(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that are not done, in their order; last those that have failed before."""
        status = {line["part"]: line["status"] for line in self.of_this_card()}
        wanted = [part for part in parts if status.get(part.name) != "done"]
        return sorted(wanted, key=lambda part: status.get(part.name) == "failed")

    def add(self, part: Part, status: str, why: str = "", seconds: float = 0.0, **found: Any) -> dict[str, Any]:
        """Add a part's line, and say it; `status` is done, failed, cut off or left out."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"part": part.name, "card": self.card, "status": status, "why": why, "seconds": round(seconds, 1)}
        line = without_places(about | {"at": at} | found)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(line))  # after a line that was cut off another begins
            file.flush()
            os.fsync(file.fileno())
        print("; ".join(filter(None, [f"{part.name}: {line['status']}, {seconds:.0f} s", line["why"]])), flush=True)
        return line


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return each part's last line, by card; a line that was cut off in the middle is none."""
    by: dict[tuple[str, str], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):
            line = json.loads(text)
            by[line["card"], line["part"]] = line
    return list(by.values())


# -- a part's process


class Started:
    """A part whose process imports, and waits until it is told to go; `folder` takes its log and what it finds."""

    def __init__(self, part: Part, folder: Path) -> None:
        self.part, self.out, self.start_s, self.limit_s = part, folder / "result.json", 0.0, 0.0
        self.log: IO[str] = (folder / "log").open("w+", errors="replace")
        task = {"call": part.call, "arguments": part.arguments, "out": str(self.out), "waits": True}
        self.process = start_process(["-m", "bench.apart", json.dumps(task)], self.log, stdin=PIPE, text=True)

    def go(self, most_s: float) -> None:
        """Let it measure, for `most_s` at most."""
        self.start_s, self.limit_s = time.monotonic(), min(self.part.limit_s, most_s)
        with suppress(BrokenPipeError):  # it ended already, which is told
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def is_over(self) -> bool:
        """Return whether it has ended, or should have."""
        return self.process.poll() is not None or time.monotonic() > self.start_s + self.limit_s

    def end(self) -> tuple[int | None, list[str]]:
        """End the process and all that it started; return its exit code, None where it had not ended, and its words."""
        exit_code = self.process.poll()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        end_group(self.process)
        with self.log:
            self.log.seek(0)
            return exit_code, self.log.read().splitlines()


# -- all parts


def spend(parts: Sequence[Part], results: Results, seconds: float) -> None:
    """Run the parts that are not done yet, in their order, until `seconds` are over.

    Where this process is told to end, the parts at work are, too, and their lines say so.
    """
    deadline_s = time.monotonic() + seconds - END_S  # so that there is time to end a part
    waiting = []
    for part in results.left_to_do(parts):
        if part.left_out:
            results.add(part, "left out", part.left_out)
        else:
            waiting.append(part)
    running, ready = [], None
    with tempfile.TemporaryDirectory(prefix="lease-") as folder:
        try:
            while waiting or running:
                for each in [each for each in running if each.is_over()]:
                    running.remove(each)
                    _finish(each, results)
                left_s = deadline_s - time.monotonic()
                part = next((part for part in waiting if part.expected_s < left_s), None)
                if part is None and not running:
                    break
                if ready and ready.part is not part:  # there is no time for it any more
                    ready.end()
                    ready = None
                if part and not ready:
                    ready = Started(part, Path(tempfile.mkdtemp(dir=folder)))
                if ready and len(running) < min(each.beside for each in (part, *(other.part for other in running))):
                    print(f"{part.name} ... ({left_s:.0f} s left)", flush=True)
                    ready.go(left_s)
                    running.append(ready)
                    waiting.remove(part)
                    ready = None
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            end_group(*(each.process for each in running))
            for each in running:
                each.end()
                results.add(each.part, "cut off", "the lease was ended", time.monotonic() - each.start_s)
            raise
        finally:
            if ready:
                ready.end()
    if waiting:
        names = ", ".join(f"{part.name} ({part.expected_s:.0f} s)" for part in waiting)
        print(f"no time left for {len(waiting)} parts: {names}", flush=True)


def _finish(ended: Started, results: Results) -> None:
    seconds = time.monotonic() - ended.start_s
    exit_code, words = ended.end()
    if ended.out.is_file():  # whatever became of the process afterwards
        found = json.loads(ended.out.read_text("utf-8"))
        status = {FAILS: "failed", LEFT_OUT: "left out"}.get(found.get("status"), "done")
        results.add(ended.part, status, found.get("why", ""), seconds, result=found)
    elif exit_code is None and ended.limit_s < ended.part.limit_s:
        results.add(ended.part, "cut off", f"the lease was over after {ended.limit_s:.0f} s of it", seconds)
    else:
        why = why_ended(exit_code, "\n".join(words), ended.limit_s)
        results.add(ended.part, "failed", why, seconds, output=words[-KEPT_LINES:])
