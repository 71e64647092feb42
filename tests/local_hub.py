"""A server on this machine that speaks as much of the Hugging Face Hub's protocol as downloads need."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

Revisions = dict[str, dict[str, bytes]]
"""The files of a repository, by branch, tag or commit."""


class LocalHub(ThreadingHTTPServer):
    """Repositories of models and datasets, read only, as the Hub serves them.

    Attributes:
        repositories: By kind and id, as `datasets/somebody/rows`.
        gated: Those whose files are refused without a token.
        requests: Method and path of each request, for tests that must know whether something was downloaded again.
    """

    def __init__(self, repositories: dict[str, Revisions], gated: frozenset[str] = frozenset()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.gated, self.requests = repositories, gated, list[str]()

    @property
    def url(self) -> str:
        """Return what `HF_ENDPOINT` is to be."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(hub: LocalHub) -> Iterator[LocalHub]:
    """Answer requests until the block ends."""
    Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


def commit_of(files: dict[str, bytes]) -> str:
    """Return 40 hexadecimal digits that follow from the files, as a commit's do."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing: `requests` has it."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        is_asked_about, parts = path.startswith("/api/"), path.removeprefix("/api").strip("/").split("/")
        if parts[0] not in ("models", "datasets"):
            parts = ["models", *parts]  # files of models have no kind in their path
        name, action, (revision, *rest) = "/".join(parts[:3]), "".join(parts[3:4]), parts[4:] or ["main"]
        if name not in self.server.repositories:
            return self._refuse(401 if is_asked_about else 404, "RepoNotFound", f"{name} is not here")
        files, file = self._files_at(name, revision), "/".join(rest)
        if files is None:
            return self._refuse(404, "RevisionNotFound", f"{name} has no revision {revision}")
        is_closed = name in self.server.gated and "Authorization" not in self.headers
        match action:
            case "auth-check" | "resolve" if is_closed:
                self._refuse(401, "GatedRepo", f"Access to {name} is restricted")
            case "auth-check":
                self._json({})
            case "" | "revision":
                self._json({
                    "id": name.partition("/")[2], "sha": commit_of(files), "private": False, "tags": [],
                    "gated": "auto" if name in self.server.gated else False, "disabled": False, "downloads": 0,
                    "siblings": [{"rfilename": each} for each in files],
                })  # fmt: skip
            case "tree":
                self._json([_entry(each, files) for each in files if each.startswith(file)])
            case "paths-info":
                self._json([_entry(each, files) for each in json.loads(body)["paths"] if each in files])
            case "resolve" if file in files:
                self._send(200, files[file], {
                    "X-Repo-Commit": commit_of(files), "ETag": f'"{hashlib.sha1(files[file]).hexdigest()}"',
                    "Content-Type": "application/octet-stream",
                })  # fmt: skip
            case _:
                self._refuse(404, "EntryNotFound", f"{name} has no {action} {file}")

    do_HEAD = do_POST = do_GET  # noqa: N815 (so `BaseHTTPRequestHandler` calls them)

    def _files_at(self, name: str, revision: str) -> dict[str, bytes] | None:
        revisions = self.server.repositories[name]
        commits = {commit_of(files): files for files in revisions.values()}
        return revisions.get(revision) or commits.get(revision)

    def _json(self, answer: object) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(file: str, files: dict[str, bytes]) -> dict[str, object]:
    return {"type": "file", "path": file, "size": len(files[file]), "oid": hashlib.sha1(files[file]).hexdigest()}
