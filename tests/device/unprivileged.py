"""A program without privileges: what it is told where something is not allowed.

Run as: python unprivileged.py ADDRESS MEMLOCK_BYTES
Prints one line of JSON for each call: [name, classes of the exception, errno, text, hint].
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiordma
from aiordma._ffi import load_error
from aiordma.cli import doctor
from aiordma.cm import EventChannel

USER = 65534
MEMORY_BYTES = 1 << 20
LIMIT_S = 20


def told(name: str, error: BaseException | None) -> None:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    number, hint = getattr(error, "errno", None), getattr(error, "hint", "")
    print(json.dumps([name, kinds, number, str(error), hint]), flush=True)


async def attempt(name: str, call: Callable[[], Awaitable[Any]]) -> None:
    error: BaseException | None = None
    try:
        async with asyncio.timeout(LIMIT_S):
            await (await call()).close()
    except Exception as exc:
        error = exc
    told(name, error)


async def share() -> Any:
    async with aiordma.Memory(MEMORY_BYTES) as memory:
        return memory


async def main(address: str) -> None:
    try:
        EventChannel().close()
        told("channel", None)
    except Exception as exc:
        told("channel", exc)
    await attempt("connect", lambda: aiordma.connect(address, 7))
    await attempt("listen", lambda: aiordma.listen(address, 0))
    await attempt("memory", share)


if __name__ == "__main__":
    load_error()  # the libraries, while their files may be read
    limit = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    told(f"unavailable: {aiordma.why_unavailable()}", None)
    asyncio.run(main(sys.argv[1]))
    doctor.run(as_json=True)
