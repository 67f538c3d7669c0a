"""A server, and connections to it, that are not real, for the tests of pools."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

from aiordma import ConnectionConfig, ConnectionLostError, ConnectionRejectedError, Pool
from tests.inside.service import Outcome, stopping_error

from ..conftest import LIMIT_S, settle

__all__ = ["Fake", "Serve", "Server", "new_pool", "nothing_left", "until"]


class Fake:
    """A connection."""

    def __init__(self, server: Server, address: tuple[str, int], local: str | None) -> None:
        self._server = server
        self.address = address
        self.local = local
        self._over = asyncio.get_running_loop().create_future()
        self._carries_requests = False
        self._outcome = self.outcome = Outcome()
        self.closed = False
        self.requests: list[bytes] = []
        server.made.append(self)

    def is_closing(self) -> bool:
        return self._over.done()

    def abort(self) -> None:
        self._outcome.closing = True
        if not self._over.done():
            self._over.set_result(None)

    async def close(self) -> None:
        self.closed = not self.is_closing()
        self.abort()
        await asyncio.sleep(0)

    async def wait_closed(self) -> None:
        await asyncio.shield(self._over)
        await self._server.ended.wait()

    async def request(self, buf: bytes, *, timeout: float | None = None, into: Any = None) -> bytes:
        assert into is None
        self.requests.append(buf)
        self._carries_requests = True
        if self.address in self._server.stopping:
            self._outcome.stopping = True
            raise stopping_error("the server is stopping")
        if self._server.raises:
            raise self._server.raises.pop()
        if self._server.breaks:
            sent = self._server.breaks.pop()
            if not self._server.ends_late:
                self.abort()
            error = ConnectionLostError(errno.ECONNRESET, "lost")
            error.request_sent = sent
            raise error
        await self._server.answering.wait()
        return buf


class Server:
    """What connections are made to.

    Attributes:
        up: Whether it accepts.
        down: Addresses that do not.
        silent: Addresses that do not answer.
        slow: Addresses that answer when the event is set.
        dialed: The addresses of all attempts.
        made: All connections.
        attempts: When a connect began.
        breaks: Requests that break their connection: whether they were sent.
        raises: What requests raise.
        stopping: Addresses that refuse requests.
        ends_late: Whether a broken connection is not closed at once.
        answering: Whether requests are answered.
        ended: Whether connections that are over have ended.
    """

    def __init__(self) -> None:
        self.up = True
        self.down: set[tuple[str, int]] = set()
        self.silent: set[tuple[str, int]] = set()
        self.slow: dict[tuple[str, int], asyncio.Event] = {}
        self.dialed: list[tuple[str, int]] = []
        self.made: list[Any] = []
        self.attempts: list[float] = []
        self.breaks: list[bool] = []
        self.raises: list[Exception] = []
        self.stopping: set[tuple[str, int]] = set()
        self.ends_late = False
        self.answering = asyncio.Event()
        self.answering.set()
        self.limits: list[float] = []
        self.ended = asyncio.Event()
        self.ended.set()

    async def connect(
        self,
        host: str,
        port: int,
        *,
        config: ConnectionConfig | None,
        timeout: float,
        memory: None = None,
        local_addr: tuple[str, int] = ("", 0),
    ) -> Fake:
        self.limits.append(timeout)
        self.attempts.append(asyncio.get_running_loop().time())
        self.dialed.append((host, port))
        await asyncio.sleep(0)
        if (host, port) in self.silent:
            await asyncio.Event().wait()
        if (host, port) in self.slow:
            await self.slow[host, port].wait()
        if not self.up or {(host, port), local_addr} & self.down:
            raise ConnectionRejectedError(errno.ECONNREFUSED, "no program listens")
        return Fake(self, (host, port), local_addr[0] or None)

    @property
    def live(self) -> list[Fake]:
        return [each for each in self.made if not each.is_closing()]


Serve = Callable[[], Server]


async def until(condition: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + LIMIT_S / 4
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it does not come true"
        await asyncio.sleep(0.001)


def new_pool(**options: Any) -> Pool:
    values: dict[str, Any] = {"host": "server", "timeout": 5.0}
    if "host" not in options:
        values["port"] = 7
    return Pool(**(values | options))


async def nothing_left(server: Server) -> None:
    await settle()
    assert not server.live
    assert asyncio.all_tasks() == {asyncio.current_task()}
