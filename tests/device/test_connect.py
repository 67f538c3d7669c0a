"""Connecting, being refused, and being told why."""

from __future__ import annotations

import asyncio
import errno
import random

import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma.cm import ConnectionId, EventChannel
from tests.device.oracle import until
from tests.inside.endpoint import fail_at_hello, waiting_requests

pytestmark = pytest.mark.device


async def test_private_data_both_ways(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:

        async def answer() -> aiordma.Connection:
            async for request in listener.requests():
                assert request.private_data == b"who is there?"
                assert request.peername is not None
                return await request.accept(b"me" * 88)
            raise AssertionError

        answering = asyncio.create_task(answer())
        async with (
            aiordma.connect(address, listener.port, private_data=b"who is there?") as client,
            await answering as server,
        ):
            assert client.private_data == b"me" * 88
            assert server.private_data == b"who is there?"


@pytest.mark.smoke
@pytest.mark.one_loop
async def test_every_length_of_a_refusal_arrives_exactly(address: str, is_siw: bool) -> None:
    rng = random.Random(148)
    lengths = [1, 2, 147, 148] if is_siw else range(1, 149)
    reasons = [rng.randbytes(length - 1) + b"\x01" for length in lengths]
    reasons += [b"\0", b"\0" * 147, b"\x80", b"ends in a mark\x80\0\0"]
    async with aiordma.listen(address, 0) as listener:

        async def refuse() -> None:
            requests = listener.requests()
            for reason in reasons:
                (await anext(requests)).reject(reason)

        async with asyncio.TaskGroup() as group:
            group.create_task(refuse())
            for reason in reasons:
                with pytest.raises(aiordma.ConnectionRejectedError) as caught:
                    await aiordma.connect(address, listener.port)
                assert caught.value.private_data == reason
                assert isinstance(caught.value, ConnectionRefusedError)


@pytest.mark.parametrize("left", [0, -0.5])
async def test_a_deadline_that_has_passed(address: str, left: float) -> None:
    async with aiordma.serve_requests(lambda _: asyncio.sleep(0), address, 0) as server:
        for connect in (aiordma.connect, aiordma.open_connection):
            with pytest.raises(aiordma.ConnectTimeoutError, match="that time was over before"):
                await connect(address, server.port, timeout=left)
        async with aiordma.connect(address, server.port) as client:
            with pytest.raises(aiordma.RequestDeadlineError):
                await client.request(b"?", timeout=left)
            assert await client.request(b"?", timeout=20) == b""


async def test_nobody_listens(address: str) -> None:
    with pytest.raises(ConnectionRefusedError) as caught:
        await aiordma.connect(address, 9)
    assert isinstance(caught.value, aiordma.ConnectionRejectedError)
    assert caught.value.hint


@pytest.mark.virtual_time
async def test_nobody_has_the_address() -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises((aiordma.ConnectionFailedError, aiordma.ConnectTimeoutError)) as caught:
        await aiordma.connect("10.80.0.77", 7471, timeout=6)
    assert caught.value.hint or "is the" in str(caught.value)
    assert loop.time() - begun < 8


@pytest.mark.kernel
async def test_the_way_there_has_no_rdma_device() -> None:
    with pytest.raises(OSError, match=r"no RDMA device|no route|did not answer"):
        await aiordma.connect("127.0.0.1", 7471, timeout=5)


async def test_no_route_to_the_address() -> None:
    with pytest.raises(OSError, match="ip route"):
        await aiordma.connect("192.0.2.1", 7471, timeout=5)


async def test_listen_on_an_address_that_is_not_here() -> None:
    with pytest.raises(OSError, match="rdma_bind_addr"):
        await aiordma.listen("10.80.9.9", 7471)


async def test_a_port_is_taken_once_and_free_again(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        port = listener.port
        with pytest.raises(OSError, match="another listener"):
            await aiordma.listen(address, port)
    for _ in range(5):
        async with aiordma.listen(address, port):
            pass


async def test_fifty_native_ids_on_one_event_channel(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        channel = EventChannel()
        ids = [ConnectionId(channel) for _ in range(50)]
        ports = [listener.port + number % 3 for number in range(50)]
        await asyncio.gather(
            *(
                cm_id.resolve_addr((address, port), timeout=20)
                for cm_id, port in zip(ids, ports, strict=True)
            )
        )
        await asyncio.gather(*(cm_id.resolve_route(timeout=20) for cm_id in ids))
        # The kernel may give one local port to several, as long as they go to different ports.
        ways = {(cm_id.source_port, port) for cm_id, port in zip(ids, ports, strict=True)}
        assert len(ways) == 50
        for cm_id in ids:
            cm_id.close()
        channel.close()
        await channel.wait_closed()


async def test_b06_more_than_the_backlog_are_told_so(address: str) -> None:
    async with aiordma.listen(address, 0, backlog=2) as listener:
        requests = listener.requests()
        early = [asyncio.create_task(_try_to_connect(address, listener.port)) for _ in range(2)]
        await until(lambda: waiting_requests(listener) == 2)
        late = [asyncio.create_task(_try_to_connect(address, listener.port, 4)) for _ in range(4)]
        tries = [*early, *late]
        done, pending = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
        while len(pending) > 2:
            more, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        for task in done:
            error = task.result()
            assert isinstance(error, aiordma.ConnectTimeoutError)
            assert isinstance(error.__cause__, aiordma.ConnectionRejectedError)
            assert error.__cause__.try_again
            assert "try again" in str(error)
            assert "4791" not in str(error)  # the way there is open
            assert "backlog" in error.hint
        assert listener.refused > len(late), "not one has been tried again"
        for _ in range(2):
            (await anext(requests)).reject(b"no")
        await asyncio.wait(pending)


async def _try_to_connect(address: str, port: int, timeout: float = 40) -> BaseException | None:
    try:
        connection = await aiordma.connect(address, port, timeout=timeout)
    except OSError as exc:
        return exc
    await connection.close()
    return None


@pytest.mark.virtual_time
async def test_a_request_that_nobody_answers_is_refused(address: str) -> None:
    limits = aiordma.ListenerLimits(handshake_timeout_s=2)
    async with aiordma.listen(address, 0, limits=limits) as listener:
        listener.requests()
        with pytest.raises(aiordma.ConnectionRejectedError) as caught:
            await aiordma.connect(address, listener.port)
        assert "not answered" in str(caught.value)


async def test_a_foreign_client_is_refused_with_the_reason(address: str) -> None:
    raw = ConnectionConfig(raw=True)
    async with aiordma.listen(address, 0) as listener:
        with pytest.raises(aiordma.ConnectionRejectedError) as caught:
            await aiordma.connect(address, listener.port, config=raw)
        assert caught.value.private_data.startswith(b"aiRJ")
        assert listener.refused == 1


async def test_a_listener_that_closes_refuses_who_waits(address: str) -> None:
    listener = await aiordma.listen(address, 0)
    requests = listener.requests()
    knocking = asyncio.create_task(_try_to_connect(address, listener.port))
    request = await anext(requests)
    waiting = asyncio.create_task(anext(requests, None))
    await asyncio.sleep(0)
    listener.close()
    assert await waiting is None
    request.reject()
    assert isinstance(await knocking, ConnectionRefusedError)
    await listener.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await aiordma.connect(address, request.sockname[1] if request.sockname else 0)


async def test_a_client_that_is_refused_at_the_end_of_a_listener_counts(address: str) -> None:
    listener = await aiordma.listen(address, 0)
    listener.requests()
    knocking = asyncio.create_task(_try_to_connect(address, listener.port))
    await until(lambda: waiting_requests(listener) == 1)
    listener.close()
    assert listener.refused == 1
    assert isinstance(await knocking, ConnectionRefusedError)
    await listener.wait_closed()


async def test_connections_outlive_their_listener(address: str) -> None:
    listener = await aiordma.listen(address, 0)
    client = await aiordma.connect(address, listener.port)
    server = await listener.accept()
    listener.close()
    await listener.wait_closed()
    await client.send(b"still here")
    assert bytes(await server.recv()) == b"still here"
    await client.close()
    await server.close()


async def test_an_adapter_that_fails_while_it_connects(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program has closed nothing: the connection is lost, for the adapter's reason."""
    broken = OSError(errno.EIO, "the adapter is gone")
    with fail_at_hello(monkeypatch, broken):
        async with aiordma.listen(address, 0) as listener:
            with pytest.raises(aiordma.ConnectionLostError) as raised:
                await aiordma.connect(address, listener.port)
    assert raised.value.__cause__ is broken
