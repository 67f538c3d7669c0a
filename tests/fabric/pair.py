"""A server and a client beside it, within a run of the fabric: `-m tests.fabric.pair PLAN`.

PLAN is an object of JSON, see `Plan`; so is what is printed: the exit status and the output of
each side.  The client is started when the server is ready, and not before: its port is in the
registry of the run or among the kernel's, or it has said so.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypedDict

from tests.tcp_ports import listens

_POLL_S = 0.005
#: Until the last words of a program that has ended are read.
_LAST_WORDS_S = 10


class Plan(TypedDict):
    """What to run.

    Attributes:
        server: Words; none: the client alone.
        client: Words; none: the server alone, until it has said `ready`.
        ready: When the server is: `rdma PORT`, `tcp PORT`, or a text that it prints.
        endless: Whether the server has no end of its own and is killed after the client.
        again: A text with which a client ends that came too soon; then all begins anew, in the same
            limit.
        limit_s: Of all of it.
    """

    server: list[str]
    client: list[str]
    ready: str
    endless: bool
    again: str
    limit_s: float


class Side:
    """A program, and what it says as it says it."""

    def __init__(self, words: list[str]) -> None:
        # Into a pipe C programs write by the page, and what a killed one has not written is lost.
        self._process = subprocess.Popen(
            ["stdbuf", "-oL", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said += line

    def ended(self) -> bool:
        return self._process.poll() is not None

    def finish(self, deadline: float) -> dict[str, Any]:
        """Its end, or what there is at the deadline; `None` as status if it had to be killed."""
        status: int | None
        try:
            status = self._process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
            self.kill()
        self._reader.join(_LAST_WORDS_S)
        return {"status": status, "said": self.said}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _readiness(ready: str, server: Side) -> Callable[[], bool]:
    kind, _, port = ready.partition(" ")
    if kind == "rdma":
        library = ctypes.CDLL("libibverbs.so.1")
        return lambda: bool(library.fabric_listens(int(port)))
    if kind == "tcp":
        return lambda: listens(int(port))
    return lambda: ready in server.said


def run(plan: Plan) -> dict[str, Any]:
    """Run both; what became of each."""
    deadline = time.monotonic() + plan["limit_s"]
    while True:
        results = _once(plan, deadline)
        came_too_soon = plan["again"] and plan["again"] in results.get("client", {}).get("said", "")
        if not came_too_soon or time.monotonic() > deadline:
            return results


def _once(plan: Plan, deadline: float) -> dict[str, Any]:
    if not plan["server"]:
        return {"client": Side(plan["client"]).finish(deadline)}
    server = Side(plan["server"])
    is_ready = _readiness(plan["ready"], server)
    while not is_ready():
        if server.ended() or time.monotonic() > deadline:
            return {"server": server.finish(deadline)}
        time.sleep(_POLL_S)
    results = {}
    failed = False
    if plan["client"]:
        results["client"] = Side(plan["client"]).finish(deadline)
        failed = results["client"]["status"] != 0
    if plan["endless"] or failed:
        server.kill()
    results["server"] = server.finish(deadline)
    return results


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
