"""ConnectRequest: a client that knocks, until it is accepted or refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.arguments import check_kind, payload_of
from aiordma.cm.address import Address
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ANSWER_ROOM, ConnectionId, Stage
from aiordma.cm.connection_parameter import ConnectionParameter
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.link import Link
from aiordma.endpoint.plan import plan_of
from aiordma.endpoint.wire import HELLO_SIZE, Hello
from aiordma.errors import ConnectionLostError, ConnectTimeoutError, ResourceBusyError
from aiordma.link.admission import when_gone
from aiordma.link.dialing import shared_channel
from aiordma.link.refusal import RefusalReason, refusal, seal_refusal
from aiordma.link.source import source_of
from aiordma.loop import fork
from aiordma.loop.limit import PatientLimit
from aiordma.loop.running import check_loop, check_thread

if TYPE_CHECKING:
    from aiordma.endpoint.listener import Listener
    from aiordma.link.admission import Place

__all__ = ["ConnectRequest"]

_log = logging.getLogger("aiordma")


class ConnectRequest:
    """A request to connect, from `Listener.requests()`; answer it once, by accept or reject.

    Attributes:
        peername: The client's (address, port).
        sockname: The (address, port) that it asked for.
        hello: The client's half of the handshake; None for a raw listener.
    """

    def __init__(self, listener: Listener, cm_id: ConnectionId, event: ConnectionEvent) -> None:
        self._listener = listener
        self._cm_id = cm_id
        self._event = event
        self._answered = False
        self._timer: asyncio.TimerHandle | None = None
        self._place: Place | None = None  # of a handshake that the listener began
        self.hello: Hello | None = None
        self.peername: Address | None
        self.sockname: Address | None
        self.peername, self.sockname = cm_id._ends()
        self._source = source_of(self.peername[0] if self.peername is not None else None)
        fork.guard_public(self)

    @property
    def private_data(self) -> bytes:
        """What the client's program sent along."""
        return self._event.private_data if self.hello is None else self.hello.user_data

    def _start_timer(self) -> None:
        config = self._listener.config
        self._timer = asyncio.get_running_loop().call_later(
            config.handshake_timeout_s, self._time_out
        )

    def _time_out(self) -> None:
        if not self._answered:
            _log.info("a request from %s was not answered in time", self.peername)
            self._listener.refused += 1
            self._refuse(RefusalReason.TIMEOUT)

    def _answer(self) -> None:
        if self._answered:
            msg = "the request was answered already"
            raise ResourceBusyError(errno.EALREADY, msg)
        self._answered = True
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

    async def _open(self, config: ConnectionConfig) -> Link:
        """What the adapter holds for the connection, counted until it is gone."""
        try:
            give_back = self._listener._ledger.take(self._source, plan_of(config).pinned)
        except OSError:
            self._listener.refused += 1
            self._refuse(RefusalReason.FULL)
            raise
        with contextlib.ExitStack() as undo:
            undo.callback(self._leave)
            undo.callback(give_back)
            _, release = shared_channel()
            undo.callback(release)
            try:
                link = await Link.open(self._cm_id, config)
            except BaseException as exc:
                self._listener._shortages.tell(self.peername, exc)
                self._refuse(RefusalReason.RESOURCES)
                raise
            undo.pop_all()
        link.at_close(release)
        link.budget = self._listener._budget
        link.qp._gone.add_done_callback(when_gone(link.in_loop, self._leave, give_back))
        return link

    def _leave(self) -> None:
        if self._place is not None:
            self._place.leave()

    def _turn(self, link: Link, acted: Callable[[], bool]) -> None:
        """The client has to act now, and is dropped if it does not and others wait."""
        task = asyncio.current_task()
        if self._place is None or task is None:
            return

        def drop() -> bool:
            # Its confirmation and its greeting may be here, and this loop late.
            self._cm_id.event_channel._catch_up()
            link.sweep()
            if acted():
                return False
            _log.info("dropped %s: no greeting in time, and others wait", self.peername)
            self._listener.dropped += 1
            return task.cancel()

        self._place.turn(drop)

    async def _accept(self, private_data: bytes, config: ConnectionConfig) -> Connection:
        link = await self._open(config)
        try:
            connection = Connection(link, config)
        except BaseException:
            link.close()
            self._refuse(RefusalReason.RESOURCES)
            raise
        # Not more than the client wants, and serves.
        plan = plan_of(config)
        parameter = plan.parameter(self._event.responder_resources, self._event.initiator_depth)
        try:
            # Before the answer: the client's first messages may come with its confirmation.
            ends = self.peername, self.sockname
            connection._meet(self.hello, self._event.initiator_depth, ends)
            if self.hello is None:
                self._turn(link, lambda: self._cm_id.stage is Stage.CONNECTED)
                await self._confirmed(parameter, private_data, lambda: connection._receiver.heard)
            else:
                greeting = connection._await_greeting()
                data = plan.hello(
                    private_data, connection._window, ANSWER_ROOM, check=link.check_large
                )
                self._turn(link, greeting.done)
                await self._confirmed(parameter, data, greeting.done)
                await greeting
        except BaseException:
            connection.abort()
            raise
        self._leave()
        if self.hello is None:
            connection.private_data = self._event.private_data
            connection._watch()
        return connection

    async def _confirmed(
        self, parameter: ConnectionParameter, private_data: bytes, spoken: Callable[[], bool]
    ) -> None:
        """Answer, and wait for the confirmation; or for less, from a client that has spoken.

        Such a client may have sent all that it wanted, and be gone already: its disconnection comes
        in place of the confirmation, and the program gets the connection with what was sent.
        """
        try:
            await self._cm_id.accept(parameter, private_data=private_data, timeout=None)
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
        self._send_refusal(data)

    def _refuse(self, reason: RefusalReason) -> None:
        """Refuse in the library's own name."""
        if self._timer is not None:
            self._timer.cancel()
        self._answered = True
        self._listener._forget(self)
        self._leave()
        self._send_refusal(refusal(reason))

    def _refuse_if_open(self) -> None:
        if not self._answered:
            self._refuse(RefusalReason.BUSY)

    def _send_refusal(self, data: bytes) -> None:
        try:
            self._cm_id.reject(data)
        except OSError as exc:
            _log.debug("refusing %s: %s", self.peername, exc)
        self._cm_id.close()

    def __repr__(self) -> str:
        state = "answered" if self._answered else "open"
        return f"<ConnectRequest {state} peer={self.peername}>"
