"""ConnectRequest: a client that knocks, until it is accepted or refused."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.arguments import check_kind, payload_of
from aiordma.cm.address import Address
from aiordma.cm.connection_id import ANSWER_ROOM, Stage
from aiordma.cm.connection_parameter import ConnectionParameter
from aiordma.endpoint.config import ConnectionConfig, plan_of
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import HELLO_SIZE, Hello
from aiordma.errors import ConnectionLostError, ConnectTimeoutError, ResourceBusyError
from aiordma.link.acceptor import Request
from aiordma.link.refusal import RefusalReason, seal_refusal
from aiordma.loop import fork
from aiordma.loop.limit import PatientLimit
from aiordma.loop.running import check_loop, check_thread

if TYPE_CHECKING:
    from aiordma.endpoint.listener import Listener

__all__ = ["ConnectRequest"]


class ConnectRequest:
    """A request to connect, from `Listener.requests()`; answer it once, by accept or reject.

    Attributes:
        peername: The client's (address, port).
        sockname: The (address, port) that it asked for.
        hello: The client's half of the handshake; None for a raw listener.
    """

    def __init__(self, listener: Listener, request: Request) -> None:
        self._listener = listener
        self._request = request
        self._timer: asyncio.TimerHandle | None = None
        self.hello: Hello | None = request.greeting
        self.peername: Address | None = request.peername
        self.sockname: Address | None = request.sockname
        fork.guard_public(self)

    @property
    def private_data(self) -> bytes:
        """Bytes that the client's program sent along."""
        return self._request.event.private_data if self.hello is None else self.hello.user_data

    def _start_timer(self) -> None:
        config = self._listener.config
        self._timer = asyncio.get_running_loop().call_later(
            config.handshake_timeout_s, self._time_out
        )

    def _time_out(self) -> None:
        if not self._request.answered:
            self._refuse(RefusalReason.TIMEOUT, "it was not answered in time")

    def _answer(self) -> None:
        if self._request.answered:
            msg = "the request was answered already"
            raise ResourceBusyError(errno.EALREADY, msg)
        self._request.answered = True
        self._settle()

    def _refuse(self, reason: RefusalReason, why: str) -> None:
        """Refuse in the library's own name."""
        self._settle()
        self._request.refuse(reason, why)

    def _settle(self) -> None:
        """The program need not answer any more."""
        self._listener._forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def accept(
        self, private_data: bytes = b"", *, config: ConnectionConfig | None = None
    ) -> Connection:
        """Accept; the connection once the client has confirmed.

        Args:
            private_data: Bytes for the client's program, at most 176 (196 with `config.raw`).
            config: Settings instead of the listener's; `raw` cannot differ.

        Raises:
            ValueError: The private data is too long; the request is still open.
            RuntimeError: This is not the listener's event loop; the request is still open.
            ResourceBusyError: It was answered before.
            ConnectionAbortedError: The client has given up.
            TimeoutError: The client did not confirm within `config.handshake_timeout_s`.
            OSError: This side is short of memory or adapter resources; ENOBUFS, the listener has
                all connections that its limits allow.  The client is refused.

        Cancellation: the client is refused.
        """
        check_loop(self._listener._loop, "request")
        check_kind("config", config, ConnectionConfig)
        config = config or self._listener.config
        if config.raw != self._listener.config.raw:
            msg = "raw cannot differ between a listener and its connections"
            raise ValueError(msg)
        room = ANSWER_ROOM - (0 if config.raw else HELLO_SIZE)
        private_data = payload_of("private data", private_data, room)
        self._answer()
        try:
            with PatientLimit(config.handshake_timeout_s):
                return await self._accept(private_data, config)
        except TimeoutError as exc:
            text = f"{self.peername} did not confirm within {config.handshake_timeout_s} s"
            raise ConnectTimeoutError(errno.ETIMEDOUT, text) from exc

    async def _accept(self, private_data: bytes, config: ConnectionConfig) -> Connection:
        request, plan = self._request, plan_of(config)
        link = await request.open(functools.partial(Link.open, config=config), plan.pinned)
        link.buffers.budget = self._listener._budget
        try:
            connection = Connection(link, config)
        except BaseException:
            link.close()
            request.refuse(RefusalReason.RESOURCES, "out of resources")
            raise
        event = request.event
        # Not more than the client wants, and serves.
        parameter = plan.parameter(event.responder_resources, event.initiator_depth)
        try:
            # Before the answer: the client's first messages may come with its confirmation.
            ends = self.peername, self.sockname
            connection._meet(self.hello, event.initiator_depth, ends)
            if self.hello is None:
                request.turn(link, lambda: request.cm_id.stage is Stage.CONNECTED)
                await self._confirmed(parameter, private_data, lambda: connection._state.heard)
            else:
                greeting = connection._await_greeting()
                data = plan.hello(
                    private_data, connection._window, ANSWER_ROOM, check=link.check_large
                )
                request.turn(link, lambda: greeting.done() or bool(connection._state.said))
                await self._confirmed(parameter, data, greeting.done)
                await greeting
        except BaseException:
            connection.abort()
            raise
        request.leave()
        if self.hello is None:
            connection.private_data = event.private_data
            connection._watch()
        return connection

    async def _confirmed(
        self, parameter: ConnectionParameter, private_data: bytes, spoken: Callable[[], bool]
    ) -> None:
        """Answer, and wait for the confirmation; or for less, from a client that has spoken.

        Such a client may have sent all that it wanted, and be gone already: its disconnection comes
        in place of the confirmation, and the program gets the connection with its messages.
        """
        try:
            await self._request.cm_id.accept(parameter, private_data=private_data, timeout=None)
        except ConnectionLostError:
            if not spoken():
                raise

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse; the client's program finds up to 148 bytes of `private_data` in its exception.

        Raises:
            ValueError: The private data is too long; the request is still open.
            RuntimeError: The listener's event loop runs in another thread; the request is still
                open.
            ResourceBusyError: It was answered before.
        """
        check_thread(self._listener._loop, "request")
        data = bytes(memoryview(private_data))
        if self.hello is not None:
            data = seal_refusal(data)
        if len(data) > 148:
            msg = f"a refusal carries at most 148 bytes of private data, not {len(data)}"
            raise ValueError(msg)
        self._answer()
        self._request.reject(data)

    def __repr__(self) -> str:
        state = "answered" if self._request.answered else "open"
        return f"<ConnectRequest {state} peer={self.peername}>"
