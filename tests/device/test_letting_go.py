"""What was closed goes with the last reference to it, and its memory with it.

Python's collector is off here: programs that care for latency turn it off, or freeze it, and a
closed connection that waits for it keeps megabytes.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig
from aiordma.endpoint.large.exposure import Exposer
from aiordma.memory.governor import Count
from aiordma.memory.pool import BufferPool
from tests.device.ends import connected
from tests.device.meeting import meet, part
from tests.device.oracle import reported, settle, until
from tests.device.streaming import Note, noted, stream_pair
from tests.inside.endpoint import exposer_of, says_goodbye, state_of, waiting_requests
from tests.native_ends import ALL

Ends = tuple[Connection, Connection]

_LEAN = ConnectionConfig(slot_size=256, recv_depth=4, send_depth=4)
_POOL = ConnectionConfig(slot_size=4096, recv_depth=32, send_depth=32, shared_slots=1000)
_QUEUES = ConnectionConfig(slot_size=4096, shared_queues=True)


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    """The objects of the library, by class.

    Without the counts of a budget of memory, which has one for each kind of bytes from the first
    of these bytes on.
    """
    return Counter(
        type(it).__qualname__
        for it in gc.get_objects()
        if type(it).__module__[:7] == "aiordma" and not isinstance(it, Count)
    )


async def leaves_nothing(scene: Callable[[], Awaitable[None]]) -> None:
    # What it leaves the first time is there for all that come, such as members of enumerations.
    await scene()
    await settle()
    before = alive()
    await scene()
    try:
        await until(lambda: not alive() - before)
    except TimeoutError:
        pytest.fail(f"still there: {alive() - before}")


async def fails(kind: type[BaseException], *calls: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Each call raises this, as a task of its own and where a task awaits it."""

    async def within(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        await call()

    doing = [make for call in calls for make in (call(), within(call))]
    done = [type(exc) for exc in await asyncio.gather(*doing, return_exceptions=True)]
    assert all(issubclass(each, kind) for each in done), done


async def _idle(ends: Ends) -> None:
    """They only meet."""


async def _messages(ends: Ends) -> None:
    for sender, receiver in (ends, ends[::-1]):
        waiting = asyncio.create_task(receiver.recv())
        await sender.send(b"short", imm=3)
        (await waiting).release()


async def _large(ends: Ends) -> None:
    client, server = ends
    for size in (100_000, 1_000_000):
        sending = asyncio.create_task(client.send(bytes(size)))
        (await server.recv()).release()
        await sending


async def _gathered(ends: Ends) -> None:
    client, server = ends
    for size in (1000, 100_000, 1_000_000):
        sending = asyncio.create_task(client.send([b"head", bytes(size), b"foot", bytes(size)]))
        (await server.recv()).release()
        await sending


async def _operations(ends: Ends) -> None:
    client, server = ends
    async with server.expose(bytearray(4096), read=True, write=True) as region:
        into = [bytearray(64) for _ in range(40)]  # more than may be under way
        await asyncio.gather(*(client.read(region, one) for one in into))
        await client.write(region, b"there")


async def _unread(ends: Ends) -> None:
    client, server = ends
    await client.send(b"nobody takes this")
    await client.close()
    await server.wait_closed()


async def _waiting(ends: Ends) -> None:
    waiting = [asyncio.create_task(end.recv()) for end in (*ends, *ends)]
    await asyncio.sleep(0)
    await ends[0].close()
    # Not raised here: an exception that a frame has, and that has the frame, is this test's own.
    ends_of_it = {type(exc) for exc in await asyncio.gather(*waiting, return_exceptions=True)}
    assert ends_of_it == {aiordma.ConnectionEndedError, aiordma.ResourceClosedError}


async def _aborted(ends: Ends) -> None:
    client, server = ends
    client.abort()
    with pytest.raises(aiordma.ConnectionLostError):
        await server.recv()


async def _refused(ends: Ends) -> None:
    """Calls that wait for their turn fail."""
    client, server = ends

    async def send() -> None:
        while True:
            await client.send(b"nobody takes this")
            await client.flush()

    async with server.expose(bytearray(4096), read=True) as region:
        calls: list[asyncio.Task[Any]] = [asyncio.create_task(send()) for _ in range(3)]
        calls += [asyncio.create_task(client.read(region, bytearray(4096))) for _ in range(50)]
        calls.append(asyncio.create_task(client.send(bytes(1_000_000))))
        await until(lambda: state_of(client).queued > 0)
        client.abort()
        done = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(it) for it in done} <= {int, type(None), aiordma.ResourceClosedError}
    assert aiordma.ResourceClosedError in map(type, done)


async def _unreadable(ends: Ends) -> None:
    """The connection breaks over an exception that was raised."""
    client, server = ends
    with pytest.MonkeyPatch.context() as patch:

        async def take(self: BufferPool, size: int) -> None:
            raise OSError(errno.ENOMEM, "no memory")

        patch.setattr(BufferPool, "take", take)
        done = await asyncio.gather(client.send(bytes(1_000_000)), return_exceptions=True)
    assert isinstance(done[0], aiordma.ConnectionLostError)
    await server.wait_closed()


async def _hurried(ends: Ends) -> None:
    """The peer leaves while END waits for large messages that the peer has not read."""
    client, server = ends
    with pytest.MonkeyPatch.context() as patch:

        async def drained(self: Exposer) -> None:
            await asyncio.Event().wait()

        patch.setattr(Exposer, "drained", drained)
        exposer_of(client)  # as if it had sent a large message
        closing = asyncio.create_task(client.close())
        await until(lambda: says_goodbye(client))
        await asyncio.sleep(0)  # the task of END has its first step
        server.abort()
        await closing


async def _lost_lease(ends: Ends) -> None:
    client, server = ends
    lease = server.expose(bytearray(4096), read=True)
    async with lease:
        client.abort()
        await server.wait_closed()
        assert lease.view == bytes(4096)


async def _events(ends: Ends) -> None:
    client, server = ends
    events = client.events()
    await server.close()
    await client.close()
    async for _ in events:
        """What there was."""


_CONNECTIONS = (
    _idle, _messages, _large, _operations, _unread, _waiting, _aborted, _refused, _unreadable,
    _hurried, _lost_lease, _events, _gathered,
)  # fmt: skip


@pytest.mark.parametrize("what", _CONNECTIONS, ids=lambda what: what.__name__[1:])
async def test_a_connection(address: str, what: Callable[[Ends], Awaitable[None]]) -> None:
    async with aiordma.listen(address, 0) as listener:

        async def scene() -> None:
            ends = await meet(listener, address)
            await what(ends)
            await part(*ends)

        await leaves_nothing(scene)


@pytest.mark.parametrize("config", [_LEAN, _POOL, _QUEUES], ids=["lean", "pool", "queues"])
async def test_a_connection_with_settings(address: str, config: ConnectionConfig) -> None:
    async with aiordma.listen(address, 0, config=config) as listener:

        async def scene() -> None:
            ends = await meet(listener, address, config=config)
            await _messages(ends)
            await part(*ends)

        await leaves_nothing(scene)


@pytest.mark.parametrize("side", [0, 1])
async def test_large_messages_that_are_announced(address: str, side: int) -> None:
    """They are of several buffers, the peer does not read them, and the connection is aborted."""
    config = ConnectionConfig(rendezvous_threshold=0, receive_buffer_size=1)
    parts = [b"head", bytes(1_000_000), b"foot", bytes(2_000_000)]
    async with aiordma.listen(address, 0, config=config) as listener:

        async def scene() -> None:
            ends = await meet(listener, address, config=config)
            sending = [asyncio.create_task(each.send(parts)) for each in (*ends, *ends)]
            await until(lambda: all(len(exposer_of(end)) for end in ends))
            ends[side].abort()
            done = [type(exc) for exc in await asyncio.gather(*sending, return_exceptions=True)]
            kinds: list[Any] = [aiordma.ConnectionLostError, aiordma.ConnectionLostError]
            kinds[side] = aiordma.ResourceClosedError
            assert done == kinds * 2
            await part(*ends)

        await leaves_nothing(scene)


async def test_a_message_outlives_its_connection(address: str) -> None:
    """Its bytes stay, as long as it does and no longer."""
    async with aiordma.listen(address, 0, config=_LEAN) as listener:

        async def scene() -> None:
            client, server = await meet(listener, address, config=_LEAN)
            await client.send(b"kept")
            message = await server.recv()
            await part(client, server)
            del client, server
            assert bytes(message) == b"kept"

        await leaves_nothing(scene)


async def test_a_listener(address: str) -> None:
    async def scene() -> None:
        async with aiordma.listen(address, 0) as listener:
            await part(*await meet(listener, address))

    await leaves_nothing(scene)


async def test_a_stream(address: str) -> None:
    async def scene() -> None:
        async with stream_pair(address) as ((reader, writer), (other_reader, other_writer)):
            writer.write(b"abc")
            assert await other_reader.readexactly(3) == b"abc"
            other_writer.close()
            assert await reader.read() == b""

    await leaves_nothing(scene)


async def test_who_keeps_write_keeps_the_memory_that_it_writes_to(address: str) -> None:
    """And nothing else of a stream that is over."""
    async with stream_pair(address) as ((_, writer), _):
        transport = writer.transport
        write, gone = transport.write, weakref.ref(transport)
        writer.write_eof()
    del writer, transport, _
    await until(lambda: gone() is None)
    write(b"x" * 1000)
    with pytest.raises(TypeError, match="bytes-like"):
        write("x")  # type: ignore[arg-type]


async def test_protocols(address: str) -> None:
    class Forgetful(Note):
        def connection_lost(self, exc: BaseException | None) -> None:
            super().connection_lost(exc)
            self.transport = None

    async def scene() -> None:
        async with noted(address, client=Forgetful, server=Forgetful) as both:
            both.client.transport.write(bytes(1 << 20))
            await both.server.received(1 << 20)
            both.client.transport.close()
            assert await both.server.ended() is None

    await leaves_nothing(scene)


async def test_native_ends(address: str) -> None:
    async def scene() -> None:
        async with connected(address) as ends:
            with aiordma.verbs.MemoryRegion(ends.server.pd, 64, ALL) as region:
                await ends.write(region.addr, region.rkey, b"there")

    await leaves_nothing(scene)


# What fails


async def _nobody(address: str) -> None:
    await fails(
        aiordma.ConnectionRejectedError,
        lambda: aiordma.connect(address, 9),
        lambda: aiordma.open_connection(address, 9),
    )


async def _rejected(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        requests = listener.requests()

        async def reject() -> None:
            for _ in range(2):
                (await anext(requests)).reject(b"no")

        rejecting = asyncio.create_task(reject())
        await fails(
            aiordma.ConnectionRejectedError, lambda: aiordma.connect(address, listener.port)
        )
        await rejecting


async def _unanswered(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        listener.requests()
        await fails(
            aiordma.ConnectTimeoutError,
            lambda: aiordma.connect(address, listener.port, timeout=0.1),
        )


async def _refused_for_now(address: str) -> None:
    """The error of the client names the refusals that it has tried again after."""
    async with aiordma.listen(address, 0, backlog=1) as listener:
        listener.requests()
        first = asyncio.create_task(aiordma.connect(address, listener.port))
        await until(lambda: waiting_requests(listener) == 1)
        await fails(
            aiordma.ConnectTimeoutError,
            lambda: aiordma.connect(address, listener.port, timeout=0.5),
        )
        first.cancel()
        await asyncio.wait([first])


async def _given_up(address: str) -> None:
    """The program cancels a connect, early and late."""
    async with stream_pair(address), aiordma.listen(address, 0) as listener:
        # What a whole connect leaves is kept by plans: how far the others come is left to chance.
        await part(*await meet(listener, address))
        for turns in (0, 1, 3, 10, 30):
            connecting: list[asyncio.Task[Any]] = [
                asyncio.create_task(aiordma.connect(address, listener.port)),
                asyncio.create_task(aiordma.open_connection(address, listener.port)),
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in connecting:
                task.cancel()
            await asyncio.wait(connecting)
            for task in connecting:
                if not task.cancelled() and task.exception() is None:
                    task.result().abort()


async def _nowhere_to_listen(address: str) -> None:
    hosts = ["192.0.2.1", "198.51.100.1"]
    await fails(aiordma.RdmaOSError, lambda: aiordma.start_server(lambda *_: None, hosts, 0))


async def _accepts_no_more(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:

        async def close() -> None:
            await asyncio.sleep(0)  # the tasks behind this one wait
            listener.close()

        closing = asyncio.create_task(close())
        await fails(aiordma.ResourceClosedError, listener.accept)
        await closing


async def _too_large(address: str) -> None:
    async with (
        aiordma.listen(address, 0, config=_LIMITED) as listener,
        aiordma.connect(address, listener.port, config=_LIMITED) as client,
        await listener.accept(),
    ):
        await fails(aiordma.MessageTooLargeError, lambda: client.send(bytes(1_000_000)))


async def _answer(request: aiordma.Request) -> bytes:
    if request.body == b"refuse":
        raise aiordma.RequestUnknownError("no such thing")
    await asyncio.Event().wait()
    return b""


async def _requests(address: str) -> None:
    async with aiordma.serve_requests(_answer, address, 0) as server:
        client = await aiordma.connect(address, server.port)
        for into in (None, bytearray(100)):
            await fails(
                aiordma.RequestUnknownError,
                lambda into=into: client.request(b"refuse", into=into),  # type: ignore[misc]
            )
            await fails(
                aiordma.RequestDeadlineError,
                lambda into=into: client.request(b"?", into=into, timeout=0.1),  # type: ignore[misc]
            )
        asyncio.get_running_loop().call_later(0.01, client.abort)
        await fails(
            aiordma.ResourceClosedError,
            lambda: client.request(b"?"),
            lambda: client.request(b"?", into=bytearray(100)),
        )
        await client.close()


async def _pool(address: str) -> None:
    """Nobody answers, then nothing is free, then the pool is closed."""
    async with aiordma.Pool(address, 9) as pool:
        await fails(TimeoutError, lambda: pool.request(b"?", timeout=0.1))
    async with (
        aiordma.serve_requests(_answer, address, 0) as server,
        aiordma.Pool(address, server.port, max_size=1) as pool,
        pool.connection(),
    ):

        async def borrow(timeout: float) -> None:
            async with pool.connection(timeout=timeout):
                """Never here."""

        await fails(TimeoutError, lambda: borrow(0.1))
        closing: list[asyncio.Task[None]] = []
        asyncio.get_running_loop().call_later(
            0.01, lambda: closing.append(asyncio.create_task(pool.close(0)))
        )
        await fails(aiordma.ResourceClosedError, lambda: borrow(10))
        await closing.pop()


async def _handler_of_streams(address: str) -> None:
    async def handle(reader: aiordma.RdmaStreamReader, writer: aiordma.RdmaStreamWriter) -> None:
        raise KeyError(await reader.read(3))

    async with await aiordma.start_server(handle, address, 0) as server:
        with reported() as reports:
            reader, writer = await aiordma.open_connection(address, server.port)
            writer.write(b"abc")
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
            assert [type(each["exception"]) for each in reports] == [KeyError]
            reports.clear()


async def _native(address: str) -> None:
    """A key that the peer does not have; the second write is flushed."""
    async with connected(address) as ends:
        with aiordma.verbs.MemoryRegion(ends.client.pd, 64, ALL) as region:

            async def read() -> None:
                await ends.client.qp.read(region, region.addr, 1)

            done = await asyncio.gather(read(), read(), return_exceptions=True)
            assert all(isinstance(it, aiordma.CompletionError) for it in done)


_LIMITED = ConnectionConfig(max_message_size=100_000)
_FAILURES = (
    _nobody, _rejected, _unanswered, _refused_for_now, _given_up, _nowhere_to_listen,
    _accepts_no_more, _too_large, _requests, _pool, _handler_of_streams, _native,
)  # fmt: skip


@pytest.mark.parametrize("what", _FAILURES, ids=lambda what: what.__name__[1:])
async def test_a_failure(address: str, what: Callable[[str], Awaitable[None]]) -> None:
    """A task that ends with an error keeps it, and an error the frames that it has passed."""
    await leaves_nothing(lambda: what(address))
