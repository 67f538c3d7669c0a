"""Defects that were found by reading, kept out by tests."""

from __future__ import annotations

import array
import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig
from aiordma.cm import ConnectionId, EventChannel
from aiordma.link.dialing import shared_channel
from aiordma.verbs import Access
from tests.device.meeting import Pair, paired
from tests.forks import fork_quietly
from tests.inside.cm import kept_of
from tests.inside.endpoint import link_of
from tests.inside.verbs import handle_of

pytestmark = pytest.mark.device


async def test_ended_connections_leave_no_event_in_the_shared_channel(address: str) -> None:
    """At 4096 of them the channel would stop reading, for every connection of the loop."""
    async with aiordma.listen(address, 0) as listener:
        channel, release = shared_channel()
        try:
            for _ in range(3):
                client = await aiordma.connect(address, listener.port)
                server = await listener.accept()
                await client.close()
                with pytest.raises(aiordma.ConnectionEndedError):
                    await server.recv()
                await server.close()
            assert not kept_of(channel)
        finally:
            release()


async def test_empty_buffers_of_any_format(pair: Pair) -> None:
    client, server = pair
    for _ in range(3 * client.config.recv_depth):
        await client.send(array.array("i"))
        assert len(await server.recv()) == 0


async def test_a_forked_child_cannot_touch_the_connection(pair: Pair) -> None:
    client, server = pair
    await client.send(b"before")
    message = await server.recv()
    pid = fork_quietly()
    if pid == 0:
        # No assertion, no exit handler: the child must not run the parent's test.
        try:
            message.release()
            refused = 0
            for use in (
                lambda: handle_of(link_of(client).qp),
                lambda: link_of(client).context.name,
            ):
                try:
                    use()
                except aiordma.ForkedError:
                    refused += 1
            ok = link_of(client).closed and link_of(client).under_way > 0 and refused == 2
            os._exit(0 if ok else 1)
        except BaseException:
            os._exit(2)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    for _ in range(2 * client.config.recv_depth):
        await client.send(b"after")
        assert bytes(await server.recv()) == b"after"


async def test_i01_a_forked_child_sends_nothing(pair: Pair) -> None:
    """Its memory is a copy, but the adapter's rings are the parent's."""
    client, server = pair
    await client.send(b"before")
    (await server.recv()).release()
    send = client.send  # in the child the connection has none to give
    pid = fork_quietly()
    if pid == 0:
        try:
            sending = send(b"of the child")
            try:
                sending.send(None)
            except StopIteration:
                os._exit(1)  # it says that the message has gone
            except Exception:
                os._exit(0)
            os._exit(3)  # it waits
        except BaseException:
            os._exit(2)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "1: send() has returned in the child"
    for _ in range(2 * client.config.recv_depth):
        await client.send(b"of the parent")
        assert bytes(await server.recv()) == b"of the parent"


async def test_a06_a_forked_child_is_told_that_it_is_one(pair: Pair) -> None:
    client, _ = pair
    remote = aiordma.RemoteRegion(4096, 64, 1, Access.REMOTE_READ | Access.REMOTE_WRITE)
    calls: tuple[Callable[[], Coroutine[Any, Any, Any]], ...] = (
        lambda: client.send(b"x"),
        lambda: client.send(bytes(300_000)),
        lambda: client.send(b"x", imm=1),
        client.recv,
        client.__anext__,
        client.flush,
        client.close,
        lambda: client.read(remote, bytearray(8)),
        lambda: client.write(remote, bytes(8)),
        lambda: client.fetch_add(remote, 1),
        lambda: client.compare_swap(remote, 0, 1),
        lambda: client.register(64),
    )
    pid = fork_quietly()
    if pid == 0:
        wrong = 0
        try:
            for number, call in enumerate(calls):
                try:
                    call().send(None)
                except aiordma.ForkedError:
                    continue
                except BaseException:
                    pass
                wrong |= 1 << number
            os._exit(min(wrong.bit_length(), 100))
        except BaseException:
            os._exit(101)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the number of the last call that was wrong"


async def test_flush_waits_for_what_was_sent_before_only(pair: Pair) -> None:
    client, server = pair
    stop = False

    async def traffic() -> None:
        while not stop:
            await client.send(b"more")

    async def drain() -> None:
        async for message in server:
            message.release()

    tasks = [asyncio.create_task(traffic()), asyncio.create_task(drain())]
    async with asyncio.timeout(20):
        for _ in range(20):
            await client.flush()
    stop = True
    await tasks[0]
    await client.close()
    await tasks[1]


async def test_closing_a_channel_ends_the_steps_of_its_ids() -> None:
    channel = EventChannel()
    cm_id = ConnectionId(channel)
    step = asyncio.create_task(cm_id.resolve_addr(("10.80.0.77", 7471), timeout=100))
    await asyncio.sleep(0)
    channel.close()
    async with asyncio.timeout(5):
        with pytest.raises(aiordma.ResourceClosedError):
            await step
    cm_id.close()
    await channel.wait_closed()


@pytest.mark.virtual_time
async def test_a_large_message_that_nobody_takes_is_given_up(address: str) -> None:
    config = ConnectionConfig(
        slot_size=4096, rendezvous_threshold=0, receive_buffer_size=64 * 1024, stall_timeout_s=3
    )
    async with paired(address, config) as (client, server):
        await client.send(bytes(10_000))
        with pytest.raises(TimeoutError, match="took nothing for 3 s"):
            await client.send(bytes(10_000))
        assert len(await server.recv()) == 10_000
        assert len(await server.recv()) == 10_000  # announced, so it still arrives


async def test_many_short_connections_at_once(address: str) -> None:
    # Patient: the last is served when all others are, however slow the machine is.
    patient = aiordma.ListenerLimits(handshake_timeout_s=50)
    async with aiordma.listen(address, 0, backlog=100, limits=patient) as listener:

        async def serve() -> None:
            async with asyncio.TaskGroup() as group:
                async for connection in listener:
                    group.create_task(answer(connection))

        async def answer(connection: Connection) -> None:
            async with connection:
                async for message in connection:
                    await connection.send(message)

        async def ask(number: int) -> None:
            async with aiordma.connect(address, listener.port, timeout=50) as connection:
                await connection.send(number.to_bytes(4, "big"))
                assert int.from_bytes(await connection.recv(), "big") == number

        serving = asyncio.create_task(serve())
        async with asyncio.timeout(60):
            await asyncio.gather(*(ask(number) for number in range(40)))
        listener.close()
        await serving
