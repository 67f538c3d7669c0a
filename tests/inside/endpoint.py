"""Private parts of aiordma/endpoint/ that tests ask for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

from aiordma import Connection, ConnectionConfig, ConnectRequest, Listener
from aiordma._core import MessageState
from aiordma.cm import ConnectionId
from aiordma.cm.address import Address
from aiordma.endpoint import one_sided, receiving, sending, slots
from aiordma.endpoint.events import ConnectionEvents
from aiordma.endpoint.large import exposure, fetch
from aiordma.endpoint.large.exposure import Exposer
from aiordma.endpoint.large.fetch import Fetcher
from aiordma.endpoint.lease import Lease
from aiordma.endpoint.link import Link, LinkOwner
from aiordma.endpoint.listener import _confirmed
from aiordma.endpoint.one_sided import Operations
from aiordma.endpoint.receiving import Receiver
from aiordma.endpoint.sending import Sender
from aiordma.endpoint.wire import Hello
from aiordma.link.log_share import LogShare
from aiordma.memory.cache import RegistrationCache
from aiordma.memory.governor import Budget, Growth, Member
from aiordma.memory.lent import LentPart
from aiordma.requests import place
from aiordma.verbs import MemoryRegion

if TYPE_CHECKING:
    import pytest


def limit_fetches(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give up a connection when nothing has arrived of a large message for so many seconds."""
    monkeypatch.setattr(fetch, "FETCH_TIMEOUT_S", seconds)


def limit_revoking(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long a call that was left waits for its memory once the connection is ended."""
    monkeypatch.setattr(fetch, "_REVOKE_S", seconds)


def limit_identity(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long an operation waits for the peer to say which memory is its own."""
    monkeypatch.setattr(one_sided, "_IDENTITY_S", seconds)


def tell_of_sends_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the log tell of sends that wait for so long, while this side receives nothing."""
    monkeypatch.setattr(sending, "_LONG_S", seconds)
    monkeypatch.setattr(sending, "_TOLD", LogShare("sends that wait"))


def note_slow_peers_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the log say that a peer is slow when a send has waited for so long."""
    monkeypatch.setattr(sending, "_VERY_LONG_S", seconds)


def sends_are_looked_at_by(monkeypatch: pytest.MonkeyPatch, timer: Callable[..., Any]) -> None:
    """Have the timer of sends that wait be this, in place of `call_later`."""
    monkeypatch.setattr(sending, "call_later", timer)


def has_timer(connection: Connection) -> bool:
    """Whether a timer looks at sends that wait."""
    timer = connection._sender._timer
    return timer is not None and timer.function is not None


def link_of(connection: Connection) -> Link:
    """What the connection stands on: queue pair, completion queue, memory."""
    return connection._link


def sender_of(connection: Connection) -> Sender:
    """The sending half."""
    return connection._sender


def receiver_of(connection: Connection) -> Receiver:
    """The receiving half."""
    return connection._receiver


def exposer_of(connection: Connection) -> Exposer:
    """The large messages that the peer has not read."""
    return connection._large.exposer


def fetches_of(connection: Connection) -> int:
    """How many large messages of the peer are announced and not yet read."""
    fetcher = connection._large.fetcher
    return len(fetcher._fetches) if fetcher is not None else 0


def fetched_ahead(connection: Connection) -> int:
    """Bytes of the buffers for large messages that the program has not asked for."""
    fetcher = connection._large.fetcher
    assert fetcher is not None, "none was announced"
    return fetcher._held


def kept_for_answers(connection: Connection) -> int:
    """Bytes of registered memory that are kept for large messages to send."""
    return connection._link.buffers.outgoing._kept


def pinned_beside(connection: Connection) -> int:
    """How many regions beside the slots are pinned for its queue pair."""
    return len(connection._link.buffers._pinned)


def large_budget_of(listener: Listener) -> Budget:
    """The budget of all large messages of its connections."""
    return listener._budget


def source_of(connection: Connection) -> str:
    """The source to which the large messages of a connection are charged."""
    return str(connection._link.buffers.account.source)


def when_it_waits_for_the_greeting(patch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """Have `call` called when a listener's connection waits for the client's first message."""
    real = Connection._await_greeting

    def awaiting(connection: Connection) -> asyncio.Future[None]:
        call()
        return real(connection)

    patch.setattr(Connection, "_await_greeting", awaiting)


def memory_of(connection: Connection) -> dict[MemoryRegion | LentPart, None]:
    """The regions that it closes at its end, in their order."""
    return connection._one_sided.memory


def registrations_of(connection: Connection) -> RegistrationCache | None:
    """The cache of registrations for its one-sided operations, if it has one."""
    return connection._one_sided._cache


def iterators_of(connection: Connection) -> list[ConnectionEvents]:
    """The iterators over its events that there are."""
    hub = connection._events
    assert hub is not None, "none was asked for"
    return list(hub._iterators)


def says_goodbye(connection: Connection) -> bool:
    """Whether a task says the last word."""
    return connection._goodbye._task is not None


def peer_left(connection: Connection) -> None:
    """As if the peer's disconnection had been read."""
    connection._ending.peer_left()


def cause_of(connection: Connection) -> BaseException | None:
    """The first cause of its end."""
    return connection._outcome.cause


def awaits_reason(connection: Connection) -> bool:
    """Whether requests were flushed, and the reason is not known yet."""
    return connection._link._unexplained is not None


def operations_of(connection: Connection) -> Operations:
    """The READs, WRITEs and atomics that Python posts."""
    return connection._one_sided.operations


def state_of(connection: Connection) -> MessageState:
    """The state in C."""
    return connection._state


def waiting_requests(listener: Listener) -> int:
    """How many requests to connect wait for the program."""
    return len(listener._pending)


def share_of(connection: Connection) -> Member | None:
    """Its share of a pool of slots, if it has one."""
    return connection._link.slots._member


def budget_of(connection: Connection) -> Growth:
    """The slots of the pool of which it has its own."""
    share = share_of(connection)
    assert share is not None
    return share.growth


def waiting_in(half: Sender | Receiver) -> int:
    """The tasks that stand in line for a message, or for room for one."""
    return len(half._waiters) if isinstance(half, Receiver) else half._state.queued


def resumed_in(receiver: Receiver) -> int:
    """The tasks of the line that were resumed and have not looked yet."""
    return receiver._resumed


# The steps of a connection, one by one


def meet(
    connection: Connection, hello: Hello | None, reads: int, peer: Address | None = None
) -> None:
    """Take the numbers of the peer's half of the handshake."""
    connection._meet(hello, reads, peer)


def greeting_of(connection: Connection) -> asyncio.Future[None]:
    """Wait for the first frame of the connecting side."""
    return connection._await_greeting()


def greet(connection: Connection) -> None:
    """Say the first frame."""
    connection._greet()


def confirm(request: Any, *, spoken: bool) -> Coroutine[Any, Any, None]:
    """Accept a request, and wait for the confirmation of its client, which `spoken` a frame."""
    offer: Any = None
    return _confirmed(request, offer, b"", lambda: spoken)


def handler_of(connection: Connection) -> Callable[[int], None]:
    """What C calls with the events that are Python's."""
    return connection._on_events


def notice_silence(connection: Connection) -> None:
    """As if an interval of the keepalive were over, in which nothing came."""
    connection._on_interval(silent=True)


def say_last(connection: Connection, cause: BaseException) -> bool:
    """Tell the peer why it ends; whether there is anything to tell."""
    return connection._last_word(cause)


def end_with(connection: Connection, cause: BaseException) -> None:
    """No more messages, and why."""
    connection._over(cause)


def ending_of(connection: Connection) -> asyncio.Task[None]:
    """The task that ends it."""
    task = connection._ending._task
    assert task is not None, "it has not begun to end"
    return task


def tell_failed(owner: LinkOwner) -> None:
    """As a link does that has failed."""
    owner._on_failed()


# Large messages, and operations


def copied_up_to() -> int:
    """The bytes of a large message that is copied, in place of being registered, at most."""
    return int(vars(exposure)["COPIED_BYTES"])  # as a test has set it


def copy_up_to(patch: pytest.MonkeyPatch, size: int) -> None:
    """Set that."""
    for module in (fetch, exposure):
        patch.setattr(module, "COPIED_BYTES", size)


def look_each(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """How often it is looked whether a slow fetch is in the way of others."""
    patch.setattr(fetch, "_LOOK_S", seconds)


def read_in_chunks(patch: pytest.MonkeyPatch, size: int) -> None:
    """The most bytes that a READ asks for."""
    patch.setattr(fetch, "_READ_CHUNK", size)


def copy_in_steps(patch: pytest.MonkeyPatch, size: int) -> None:
    """The most bytes of a large message that are copied in a turn of the loop."""
    for module in (receiving, place):
        patch.setattr(module, "COPY_STEP", size)


@contextlib.contextmanager
def hold_reads(connection: Connection) -> Iterator[list[int]]:
    """Keep the READs of large messages that complete from being noticed, until the end."""
    link, held, real = connection._link, list[int](), Fetcher.on_read
    fetchers: list[Fetcher] = []

    def on_read(self: Fetcher, number: int) -> None:
        if self._link is link:
            fetchers.append(self)
            held.append(number)
        else:
            real(self, number)

    with mock.patch.object(Fetcher, "on_read", on_read):
        yield held
    for fetcher, number in zip(fetchers, held, strict=True):
        real(fetcher, number)


def attend(operations: Operations) -> None:
    """Have the link listen for operations, which it does not when none has been posted lately."""
    operations._listen()


def still_listens(operations: Operations) -> bool:
    """Whether the link listens for operations after the time to linger has passed twice."""
    for _ in range(2):
        if operations._listening is not None:
            operations._listening.cancel()
            operations._stop_listening_if_idle()
    return operations._listening is not None


def begin_end(lease: Lease) -> None:
    """Begin to end a lease."""
    lease._begin()


def check_remote(remote: object) -> None:
    """Refuse what is no RemoteRegion."""
    one_sided.check_remote(remote)


def after_frames(patch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Have a call made after a connection has divided the events of its state."""
    real = Connection._on_events

    def on_events(connection: Connection, events: int) -> None:
        real(connection, events)
        call()

    patch.setattr(Connection, "_on_events", on_events)


def ask_for_inline(patch: pytest.MonkeyPatch, size: int) -> None:
    """Have queue pairs asked for so many bytes of inline data."""
    patch.setattr(slots, "_INLINE", size)


def receive_in_python(
    connection: Connection, go_on: Callable[[], Coroutine[Any, Any, Any]]
) -> None:
    """Have C leave the next `recv` to Python, where it is `go_on`."""
    connection._recv_in_python = lambda waited: go_on()  # type: ignore[method-assign]
    connection._state.delegate(True)


def left_is(patch: pytest.MonkeyPatch, function: Callable[[], object]) -> None:
    """Have C call `function` when a task has left its wait for a message by an exception."""
    patch.setattr(Connection, "_receive_abandoned", lambda _: function())


def take_frames_as_messages(patch: pytest.MonkeyPatch) -> None:
    """Have `recv` return the frames of requests, for a test that answers them by hand."""
    patch.setattr(Receiver, "_require_requests", lambda self: None)


def set_terms(state: MessageState, **terms: Any) -> None:
    """Change some of the terms of a handshake, and the credits; the others stay."""
    facts = state.facts()
    now = {
        name: facts[name]
        for name in (
            "eager_size", "bare_size", "fragmented_size", "written_size", "landed_size", "numbered"
        )
    }  # fmt: skip
    credits = terms.pop("credits", state.credits) - state.credits
    state.agree(credits, **(now | terms))


@contextlib.contextmanager
def fail_at_hello(patch: pytest.MonkeyPatch, cause: BaseException) -> Iterator[None]:
    """Have the adapter of each connection fail once its request is on its way."""
    real = Connection.__init__

    def made(self: Connection, link: Link, config: ConnectionConfig) -> None:
        real(self, link, config)
        link.loop.call_soon(link.fail, cause)

    with patch.context() as patched:
        patched.setattr(Connection, "__init__", made)
        yield


def id_of_request(request: ConnectRequest) -> ConnectionId:
    """The id of the connection that is to be."""
    return request._request.cm_id
