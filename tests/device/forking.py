"""What a forked child of a test does with its parent's objects."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

import aiordma
from tests.forks import fork_quietly

_CHILD_S = 60
_SILENT = (
    "abort", "abort_clients", "close", "close_clients", "closed", "is_closing",
    "poison_after_fork", "release", "revoke", "wait_closed",
)  # fmt: skip


def _all_of(descriptor: int) -> bytes:
    with open(descriptor, "rb") as answer:
        return answer.read()


async def in_child(function: Callable[[], Iterable[str]]) -> None:
    """Run `function` in a forked child; what it gives back is what is wrong."""
    read_end, write_end = os.pipe()
    pid = fork_quietly()
    if pid == 0:
        # No assertion, no exit handler: the child must not run the parent's test.
        try:
            os.close(read_end)
            signal.alarm(_CHILD_S)
            faults: list[str] = []
            sys.unraisablehook = lambda args: faults.append(f"unraisable: {args.exc_value!r}")
            faults += function()
            gc.collect()
            os.write(write_end, json.dumps(faults).encode())
            os._exit(0)
        except BaseException as exc:
            os.write(write_end, json.dumps([f"the child failed: {exc!r}"]).encode())
            os._exit(1)
    os.close(write_end)
    text = await asyncio.to_thread(_all_of, read_end)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert text, f"the child ended with {os.waitstatus_to_exitcode(status)}"
    assert json.loads(text) == []


def outcome(call: Callable[[], Any]) -> str:
    """What a call says at once; of a coroutine, what its first step says."""
    try:
        result = call()
        if asyncio.iscoroutine(result):
            try:
                result.send(None)
            except StopIteration:
                return "returned"
            return "waits"
    except aiordma.ForkedError:
        return "ForkedError"
    except BaseException as exc:
        return repr(exc)
    return "returned"


def _used(thing: Any, name: str) -> Any:
    value = getattr(thing, name)
    return value() if callable(value) else value


def refusals(*things: Any) -> Iterable[str]:
    """What public names of the objects do in place of a ForkedError."""
    for thing in things:
        for name in dir(type(thing)):
            if not name.startswith("_") and name not in _SILENT:
                said = outcome(lambda: _used(thing, name))  # noqa: B023  # called at once
                if said != "ForkedError":
                    yield f"{type(thing).__name__}.{name}: {said}"


def silences(*things: Any) -> Iterable[str]:
    """What the ends of the objects do in place of nothing."""
    for thing in things:
        for name in ("abort", "close", "close_clients", "wait_closed", "revoke", "__exit__"):
            if (method := getattr(thing, name, None)) is not None:
                said = outcome(method)
                if said != "returned":
                    yield f"{type(thing).__name__}.{name}: {said}"
        if "parent process" not in repr(thing):
            yield repr(thing)
