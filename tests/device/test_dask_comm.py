"""Comms of `rdma://`: messages, frames, addresses, ends and errors, as distributed expects them."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import logging
import ssl
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Any

import dask.config
import numpy as np
import pytest
from distributed.comm.addressing import get_address_host_port, get_local_address_for
from distributed.comm.core import CommClosedError, FatalCommClosedError
from distributed.protocol.serialize import Serialized

import aiordma
from aiordma.contrib import dask as backend
from aiordma.contrib.dask import PIECE_BYTES, SEPARATE_BYTES, RdmaComm, RdmaConnector
from tests.device.dask_comms import (
    Served,
    comms,
    connect,
    deserialize,
    get_address_host,
    listen,
    loc_of,
    passed,
    resolve_address,
    served,
    to_serialize,
)
from tests.device.forking import in_child
from tests.device.oracle import until
from tests.inside.contrib import connection_of, idle_frames, interface

pytestmark = [pytest.mark.device, pytest.mark.dask]

LIMIT_S = 30
SIZES = (
    0, 1, 1000, SEPARATE_BYTES - 1, SEPARATE_BYTES, 100_000, PIECE_BYTES, PIECE_BYTES + 1,
    2 * PIECE_BYTES + 5,
)  # fmt: skip


@pytest.fixture(autouse=True)
async def in_time() -> AsyncIterator[None]:
    """Each wait of these tests has a bound."""
    async with asyncio.timeout(2 * LIMIT_S):
        yield


# Messages


async def test_messages_of_both_sides(address: str) -> None:
    messages: Iterable[Any] = (
        {"op": "ping", "n": 1, "nested": {"a": (1, 2.5, None, True), "b": "text"}},
        {"bytes": b"x" * 100_000},
        {},
        "text",
        {"many": tuple(range(20_000))},
    )
    async with comms(address) as (client, server):
        for message in messages:
            assert await passed(client, server, message) == message
            assert await passed(server, client, message) == message


async def test_messages_go_ahead_of_the_reader_and_keep_their_order(address: str) -> None:
    async with comms(address) as (client, server):
        for n in range(30):
            await client.write({"n": n, "body": b"x" * (n * 1000)})
        for n in range(30):
            assert await server.read() == {"n": n, "body": b"x" * (n * 1000)}


@pytest.mark.parametrize("size", SIZES)
async def test_an_array_is_writable_and_has_memory_of_its_own(address: str, size: int) -> None:
    sent = np.arange(size, dtype="u4").view("u1")[:size]
    async with comms(address) as (client, server):
        one, two = [
            (await passed(*ends, {"array": to_serialize(sent)}))["array"]
            for ends in ((client, server), (server, client))
        ]
        for received in (one, two):
            assert np.array_equal(received, sent)
            assert received.flags.writeable
        one[:] = 0
        assert np.array_equal(two, sent), "the arrays share memory"


async def test_a_read_only_array_stays_so(address: str) -> None:
    async with comms(address) as (client, server):
        for size in (10, 2 * SEPARATE_BYTES):
            sent = np.ones(size, "u1")
            sent.flags.writeable = False
            received = (await passed(client, server, {"array": to_serialize(sent)}))["array"]
            assert np.array_equal(received, sent)
            assert not received.flags.writeable


async def test_arrays_of_a_message_can_be_freed_one_by_one(address: str) -> None:
    arrays = [np.full(50_000 * n, n, "u1") for n in range(5)]
    async with comms(address) as (client, server):
        received = await passed(client, server, [to_serialize(array) for array in arrays])
        for sent, got in zip(arrays, received, strict=True):
            assert np.array_equal(sent, got)
        owners = {id(owner_of(got)) for got in received[1:]}
        assert len(owners) == 4


async def test_small_arrays_of_a_message_do_not_keep_each_other(address: str) -> None:
    """Each may live for long: the memory of all the message would stay with it."""
    bytes_before = 3000  # pickled
    async with comms(address) as (client, server):
        for text, sent in (
            ("x" * bytes_before, [np.arange(5), np.arange(7)]),
            ("", [np.arange(5), *(np.arange(2000) for _ in range(10))]),
        ):
            message = {"text": text, "arrays": [to_serialize(each) for each in sent]}
            received = (await passed(client, server, message))["arrays"]
            for each, as_sent in zip(received, sent, strict=True):
                assert np.array_equal(each, as_sent)
                assert each.flags.writeable
                assert owner_of(each).nbytes == each.nbytes


async def test_the_memory_of_a_dead_array_serves_the_next(address: str) -> None:
    """And of an array that lives on, no other gets it, whatever refers to it."""
    size = 3 << 20
    async with comms(address) as (client, server):

        async def received(value: int) -> Any:
            message = {"array": to_serialize(np.full(size, value, "u1"))}
            return (await passed(client, server, message))["array"]

        first = await received(1)
        place = first.ctypes.data
        part = memoryview(first)[100:200]
        del first
        second = await received(2)
        assert second.ctypes.data != place
        assert set(part) == {1}
        del part
        third = await received(3)
        assert third.ctypes.data == place
        assert set(third.tolist()) == {3}
        with dask.config.set({"distributed.comm.rdma.keep": "1 MiB"}):
            async with comms(address):
                del third
                assert sum(idle_frames()) <= 1 << 20
    with (
        dask.config.set({"distributed.comm.rdma.keep": "much"}),
        pytest.raises(ValueError, match="much"),
    ):
        await connect(f"rdma://{address}:1", timeout=1)


def owner_of(thing: Any) -> Any:
    """The object to which the memory of an array or a view belongs."""
    while True:
        if isinstance(thing, memoryview):
            thing = thing.obj
        elif getattr(thing, "base", None) is not None:
            thing = thing.base
        else:
            return thing


async def test_frames_that_were_cut_arrive_side_by_side(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So distributed merges them without a copy, which it makes of those of other backends."""
    monkeypatch.setattr(RdmaComm, "max_shard_size", 1 << 20)
    sent = np.arange(700_000, dtype="u8")  # 5.6 MB: six shards, the last of which is shorter
    async with comms(address, deserialize=False) as (client, server):
        serialized = (await passed(client, server, {"array": to_serialize(sent)}))["array"]
        assert isinstance(serialized, Serialized)
        assert len(serialized.frames) == 6
        assert len({id(owner_of(frame)) for frame in serialized.frames}) == 1
        # On its way again, as the scheduler passes it on.
        again = (await passed(server, client, {"array": serialized}))["array"]
        assert len({id(owner_of(frame)) for frame in again.frames}) == 1
    async with comms(address) as (client, server):
        received = (await passed(client, server, {"array": to_serialize(sent)}))["array"]
        assert np.array_equal(received, sent)
        assert received.flags.writeable


async def test_a_short_end_of_a_cut_frame_does_not_arrive_early(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RdmaComm, "max_shard_size", 1 << 20)
    sent = np.arange((2 << 20) + 10, dtype="u4").view("u1")[: (2 << 20) + 10]
    async with comms(address) as (client, server):
        for _ in range(5):
            message = [to_serialize(sent), to_serialize(np.ones(100, "u1")), "text"]
            received = await passed(client, server, message)
            assert np.array_equal(received[0], sent)
            assert received[1].sum() == 100
            assert received[2] == "text"


async def test_many_short_frames(address: str) -> None:
    """More than fit into one message of the connection."""
    arrays = [np.full(20_000, n % 251, "u1") for n in range(300)]
    assert sum(each.nbytes for each in arrays) > PIECE_BYTES
    async with comms(address) as (client, server):
        received = await passed(client, server, [to_serialize(array) for array in arrays])
        assert all(np.array_equal(a, b) for a, b in zip(arrays, received, strict=True))


async def test_writes_of_two_tasks_arrive_one_after_the_other(address: str) -> None:
    """As a `rpc` of distributed that is left says so in a comm in which a call is under way."""
    large = {"x": to_serialize(np.full(6 << 20, 7, "u1"))}
    async with comms(address) as (client, server):
        writing = [asyncio.ensure_future(client.write(each)) for each in (large, large, {"n": 1})]
        messages = [await server.read() for _ in writing]
        await asyncio.gather(*writing)
        # Large frames are made in a thread, and the short message may pass them there.
        assert sorted(len(message.get("x", ())) for message in messages) == [0, 6 << 20, 6 << 20]
        assert all(set(message["x"].tolist()) == {7} for message in messages if "x" in message)
        assert {"n": 1} in messages


async def test_a_write_that_waits_for_another_can_be_canceled(address: str) -> None:
    async with comms(address) as (client, server):
        first = asyncio.ensure_future(client.write({"x": to_serialize(np.ones(64 << 20, "u1"))}))
        await until(lambda: connection_of(client).stats.messages_sent > 1)
        second = asyncio.ensure_future(client.write({"n": 1}))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert (await server.read())["x"].sum() == 64 << 20
        await first
        assert await passed(client, server, {"n": 2}) == {"n": 2}


async def test_many_frames_side_by_side(address: str) -> None:
    """They take time that is linear in their number."""
    count = 200_000
    words = [1 << 63 | 1, *(1 << 63 | 1 << 62 | 1 for _ in range(count - 1))]
    head = struct.pack(f"<QQ{count}Q", 16 + 8 * count, count, *words)
    async with comms(address, deserialize=False) as (client, server):
        await connection_of(client).send(head)
        await connection_of(client).send(bytes(count))
        assert await server.read() == 0  # the first frame, as MessagePack reads it


async def test_frames_are_passed_on_without_being_decoded(address: str) -> None:
    async with comms(address, deserialize=False) as (client, server):
        sent = np.arange(100_000)
        got = (await passed(client, server, {"x": to_serialize(sent), "op": "put"}))["x"]
        assert isinstance(got, Serialized)
        assert np.array_equal(deserialize(got.header, got.frames), sent)


async def test_frames_of_other_shapes(address: str) -> None:
    """Memory that is not flat, not contiguous, or of larger items."""
    flat = np.arange(120_000, dtype="f8").reshape(300, 400)
    async with comms(address) as (client, server):
        for sent in (flat, flat.T, flat[::2, ::3], np.asfortranarray(flat), flat[:0]):
            received = (await passed(client, server, {"x": to_serialize(sent)}))["x"]
            assert np.array_equal(received, sent)


async def test_a_message_that_cannot_be_serialized_is_no_end(address: str) -> None:
    async with comms(address) as (client, server):
        with pytest.raises(TypeError, match="Could not serialize"):
            await client.write({"x": to_serialize(Unserializable())}, on_error="raise")
        assert not client.closed()
        assert await passed(client, server, {"n": 1}) == {"n": 1}


class Unserializable:
    def __reduce__(self) -> str:
        raise ValueError("no bytes of mine")


async def test_peers_agree_in_a_handshake(address: str) -> None:
    async with comms(address) as (client, server):
        assert client.remote_info["address"] == server.local_info["address"]
        assert client.local_info["address"] == server.remote_info["address"]
        assert client.handshake_options == server.handshake_options
        assert client.handshake_options["compression"] is None  # of the same host


# Addresses


async def test_addresses_of_comms(address: str) -> None:
    async with comms(address) as (client, server):
        assert client.peer_address == server.local_address
        assert client.local_address == server.peer_address
        assert client.local_address.startswith(f"rdma://{address}:")
        assert client.same_host
        assert server.same_host
        assert client.extra_info["backend"] == "rdma"
        assert client.extra_info["device"] == aiordma.devices()[0].name
        assert client.local_address in repr(client)
        assert "closed" not in repr(client)
    assert "closed" in repr(client)


@pytest.mark.parametrize("loc", ["", "0.0.0.0", "0.0.0.0:0", ":0", "[::]:0"])
async def test_a_listener_on_all_addresses(address: str, loc: str) -> None:
    async with served(f"rdma://{loc}") as there:
        contact = there.listener.contact_address
        host, port = get_address_host_port(contact)
        assert host == address
        assert port > 0
        assert get_address_host_port(there.listener.listen_address)[1] == port
        client = await connect(contact)
        await client.close()


async def test_a_listener_on_a_given_port(address: str) -> None:
    async with served(loc_of(address)) as first:
        _, port = get_address_host_port(first.listener.contact_address)
        with pytest.raises(OSError, match="EADDRINUSE") as caught:
            async with served(f"rdma://{address}:{port}"):
                pass
        assert caught.value.errno == errno.EADDRINUSE
    async with served(f"rdma://{address}", default_port=port) as second:
        assert second.listener.contact_address == f"rdma://{address}:{port}"


async def test_a_default_host_is_the_contact(address: str) -> None:
    async with served("rdma://", default_host="192.0.2.7") as there:
        assert get_address_host(there.listener.contact_address) == "192.0.2.7"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_loopback_stands_for_a_device(address: str, host: str) -> None:
    async with served(f"rdma://{host}:0") as there:
        contact = there.listener.contact_address
        assert get_address_host(contact) == address
        port = get_address_host_port(contact)[1]
        client = await connect(f"rdma://{host}:{port}")
        server = await there.comms.get()
        assert client.same_host
        assert await passed(client, server, {"n": 1}) == {"n": 1}
        await asyncio.gather(client.close(), server.close())
        assert resolve_address(f"rdma://{host}:7") == f"rdma://{address}:7"
        assert get_local_address_for(f"rdma://{host}:7") == f"rdma://{address}"


async def test_a_listener_on_loopback_is_for_this_machine(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "is_local", lambda peer: peer[0] != address)
    async with served("rdma://127.0.0.1:0") as there:
        with pytest.raises(CommClosedError):
            await connect(there.listener.contact_address)
        assert there.comms.empty()
    assert "for this machine alone" in caplog.text
    async with served(loc_of(address)) as there:
        client = await connect(there.listener.contact_address)
        await client.close()


async def test_the_interface_of_the_configuration(address: str) -> None:
    name = interface()
    with dask.config.set({"distributed.comm.rdma.interface": name}):
        async with served("rdma://") as there:
            assert get_address_host(there.listener.contact_address) == address
    with dask.config.set({"distributed.comm.rdma.interface": "nosuch0"}):
        async with served("rdma://") as there:
            with pytest.raises(ValueError, match="nosuch0"):
                _ = there.listener.contact_address


async def test_the_settings_of_the_configuration(address: str) -> None:
    with dask.config.set(
        {"distributed.comm.rdma": {"keepalive": "7s", "idle-timeout": "70s", "wait": "adaptive"}}
    ):
        async with comms(address) as both:
            for comm in both:
                config = connection_of(comm).config
                assert (config.keepalive_s, config.idle_timeout_s) == (7, 70)
                assert config.wait == "adaptive"
    with (
        dask.config.set({"distributed.comm.rdma.wait": "never"}),
        pytest.raises(ValueError, match="wait"),
    ):
        await connect(f"rdma://{address}:1", timeout=1)


# Connects that fail


async def test_a_port_without_a_listener(address: str) -> None:
    with pytest.raises(CommClosedError, match="ConnectionRejectedError"):
        await RdmaConnector().connect(f"{address}:1")
    with pytest.raises(OSError, match="Timed out trying to connect to rdma://"):
        await connect(f"rdma://{address}:1", timeout=0.2)


async def test_a_listener_that_has_stopped(address: str) -> None:
    async with served(loc_of(address)) as there:
        contact = there.listener.contact_address
        there.listener.stop()
        with pytest.raises(CommClosedError):
            await RdmaConnector().connect(contact.removeprefix("rdma://"))
        with pytest.raises(ValueError, match="non-started"):
            _ = there.listener.listen_address
        there.listener.stop()


async def test_an_error_that_another_attempt_meets_again(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise aiordma.LibraryMissingError("librdmacm.so.1")

    monkeypatch.setattr(backend, "connect", missing)
    with pytest.raises(FatalCommClosedError, match="LibraryMissingError: librdmacm"):
        await connect(f"rdma://{address}:1", timeout=60)


@pytest.mark.parametrize("loc", ["10.0.0.1", "::1:5", "10.0.0.1:port"])
async def test_a_malformed_address(loc: str) -> None:
    with pytest.raises(ValueError, match=r"address|port|literal"):
        await connect(f"rdma://{loc}", timeout=5)


@pytest.mark.parametrize(
    "security",
    [{"require_encryption": True}, {"ssl_context": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}],
    ids=["required", "context"],
)
async def test_tls_is_refused(address: str, security: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"encryption required.*rdma:// has no TLS"):
        await connect(f"rdma://{address}:1", timeout=5, **security)
    with pytest.raises(RuntimeError, match=r"encryption required.*rdma:// has no TLS"):
        listen(loc_of(address), Served(), **security)


# Ends


async def test_messages_arrive_before_the_end(address: str) -> None:
    async with comms(address) as (client, server):
        for n in range(3):
            await client.write({"n": n})
        await client.close()
        assert client.closed()
        for n in range(3):
            assert await server.read() == {"n": n}
        with pytest.raises(CommClosedError, match="ConnectionEndedError"):
            await server.read()
        assert server.closed()
        with pytest.raises(CommClosedError):
            await server.write({})


async def test_an_idle_side_notices_the_end(address: str) -> None:
    async with comms(address) as (client, server):
        await client.close()
        await until(server.closed)
    async with comms(address) as (client, server):
        server.abort()
        await until(client.closed)


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_calls_after_the_end(address: str, end: str) -> None:
    async with comms(address) as (client, server):
        for _ in range(2):
            if end == "close":
                await client.close()
            else:
                client.abort()
        assert client.closed()
        for call in (client.read, lambda: client.write({"n": 1})):
            with pytest.raises(CommClosedError, match="closed by this side"):
                await call()
        with pytest.raises(CommClosedError):
            await server.read()


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_a_read_under_way_ends_with_the_comm(address: str, end: str) -> None:
    async with comms(address) as (client, _):
        reading = asyncio.ensure_future(client.read())
        await asyncio.sleep(0)
        if end == "close":
            await client.close()
        else:
            client.abort()
        with pytest.raises(CommClosedError):
            await reading


async def test_a_write_under_way_ends_with_the_peer(address: str) -> None:
    large = {"x": to_serialize(np.zeros(64 << 20, "u1"))}
    async with comms(address) as (client, server):
        writing = asyncio.ensure_future(client.write(large))
        await until(lambda: connection_of(client).stats.messages_sent > 1)
        assert not writing.done(), "nothing reads"
        server.abort()
        with pytest.raises(CommClosedError):
            await writing
        assert client.closed()


async def test_a_close_waits_for_the_write_under_way(address: str) -> None:
    large = {"x": to_serialize(np.ones(64 << 20, "u1"))}
    async with comms(address) as (client, server):
        writing = asyncio.ensure_future(client.write(large))
        await until(lambda: connection_of(client).stats.messages_sent > 1)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        with pytest.raises(CommClosedError, match="closed by this side"):
            await client.write({"n": 1})
        assert (await server.read())["x"].sum() == 64 << 20
        await asyncio.gather(writing, closing)
        with pytest.raises(CommClosedError, match="ConnectionEndedError"):
            await server.read()


@pytest.mark.parametrize("end", ["time", "cancel", "abort"])
async def test_a_close_waits_no_longer_for_a_peer_that_takes_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    async with comms(address) as (client, _):
        if end == "time":
            config = dataclasses.replace(connection_of(client).config, close_timeout_s=0.3)
            monkeypatch.setattr(connection_of(client), "config", config)
        writing = asyncio.ensure_future(client.write({"x": to_serialize(np.ones(64 << 20, "u1"))}))
        await until(lambda: connection_of(client).stats.messages_sent > 1)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        assert not closing.done()
        if end == "cancel":
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        elif end == "abort":
            client.abort()
            await closing
        else:
            await closing
        with pytest.raises(CommClosedError):
            await writing


async def test_a_comm_is_aborted_in_any_thread(address: str) -> None:
    """The collector runs in any, and a `rpc` of distributed aborts its comms in `__del__`."""
    async with comms(address) as (client, server):
        await asyncio.to_thread(client.abort)
        assert client.closed()
        with pytest.raises(CommClosedError, match="aborted"):
            await server.read()


async def test_the_coroutine_of_a_write_is_closed(address: str) -> None:
    """As a task whose loop has ended does; the coroutine cannot wait then."""
    async with comms(address) as (client, server):
        write = client.write({"x": to_serialize(np.ones(64 << 20, "u1"))})
        while True:
            waits = write.send(None)
            if waits is None:
                await asyncio.sleep(0)
                continue
            waits._asyncio_future_blocking = False
            # For its frames, which are made in a thread; then for sends, of which the last waits.
            wait_s = None if connection_of(client).stats.messages_sent < 2 else 0.2
            if not (await asyncio.wait([waits], timeout=wait_s))[0]:
                break
        write.close()
        assert client.closed()
        with pytest.raises(CommClosedError):
            await server.read()


async def test_canceled_calls_abort_the_comm(address: str) -> None:
    large = {"x": to_serialize(np.zeros(64 << 20, "u1"))}
    for call in ("read", "write"):
        async with comms(address) as (client, server):
            under_way = asyncio.ensure_future(
                client.read() if call == "read" else client.write(large)
            )
            if call == "read":
                await asyncio.sleep(0)
            else:  # its frames are made in a thread first: a write that has sent nothing is no end
                await until(lambda: connection_of(client).stats.messages_sent > 1)
            under_way.cancel()
            with pytest.raises(asyncio.CancelledError):
                await under_way
            assert client.closed()
            with pytest.raises(CommClosedError):
                await server.read()


async def test_a_forgotten_comm_is_closed(address: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served(loc_of(address)) as there:
        client: Any = await connect(there.listener.contact_address)
        server = await there.comms.get()
        text = client.local_address
        del client
        gc.collect()
        with pytest.raises(CommClosedError):
            await server.read()
    assert f"Closing dangling connection in <RdmaComm  local={text}" in caplog.text


async def test_a_comm_in_a_forked_child(address: str) -> None:
    async with comms(address) as (client, server):

        def child() -> Iterable[str]:
            if not client.closed():
                yield "it is open"
            reading = client.read()
            try:
                reading.send(None)
            except FatalCommClosedError as exc:
                if "spawn" not in str(exc):
                    yield str(exc)
            else:
                yield "it reads"
            client.abort()

        await in_child(child)
        assert await passed(client, server, {"n": 1}) == {"n": 1}


# Listeners, and peers that break the rules


async def test_a_plain_function_as_handler(address: str) -> None:
    taken: list[RdmaComm] = []
    async with listen(loc_of(address), taken.append) as listener:
        client = await connect(listener.contact_address)
        await until(lambda: bool(taken))
        assert await passed(client, taken[0], {"n": 1}) == {"n": 1}
        await asyncio.gather(client.close(), taken[0].close())


async def test_a_handler_that_fails(address: str, caplog: pytest.LogCaptureFixture) -> None:
    async def fails(comm: RdmaComm) -> None:
        comm.abort()
        raise RuntimeError("of the handler")

    async with listen(loc_of(address), fails) as listener:
        for _ in range(2):  # the listener goes on
            client = await connect(listener.contact_address)
            with pytest.raises(CommClosedError):
                await client.read()
    assert caplog.text.count("RuntimeError: of the handler") == 2


async def test_a_stop_ends_handshakes(address: str) -> None:
    async with served(loc_of(address)) as there:
        host, port = get_address_host_port(there.listener.contact_address)
        async with aiordma.connect(host, port) as silent:
            await silent.recv()  # the listener's half of the handshake
            there.listener.stop()
            there.listener.abort_handshaking_comms()
            with pytest.raises((aiordma.ConnectionLostError, aiordma.ConnectionEndedError)):
                await silent.recv()
        assert there.comms.empty()


GARBAGE = {
    "empty": [b""],
    "short": [b"abc"],
    "too few bytes": [struct.pack("<QQQ", 100, 1, 76) + bytes(80)],
    "too many frames": [struct.pack("<QQ", 64, 1 << 40) + bytes(48)],
    "a length beyond the head": [struct.pack("<QQQQ", 32, 2, 1000, 1000)],
    "more bytes than announced": [struct.pack("<QQ", 16, 0) + bytes(50)],
    "no frames": [struct.pack("<QQ", 16, 0)],
    "a frame behind nothing": [struct.pack("<QQQQ", 32, 2, 1 << 62 | 5, 1 << 62 | 5)],
    "a piece too many": [struct.pack("<QQQQ", 32, 2, 1 << 63 | 5, 0), bytes(6)],
    "an empty piece": [struct.pack("<QQQQ", 32, 2, 1 << 63 | 5, 0), b""],
    "a large head": [struct.pack("<QQ", 2 << 20, 0)],
    "large frames": [struct.pack("<QQQQ", 32, 2, 1 << 63 | 600_000, 1 << 63 | 600_000)],
    "a large frame": [struct.pack("<QQQ", 24, 1, 1 << 63 | 2 << 20)],
    "more memory than there is": [struct.pack("<QQQQ", 32, 2, 1 << 63 | 1 << 60, 0)],
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_a_peer_that_sends_something_else(
    address: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection ends, and no other."""
    caplog.set_level(logging.CRITICAL + 1, "distributed")
    async with served(loc_of(address)) as there:
        contact = there.listener.contact_address
        async with aiordma.connect(*get_address_host_port(contact)) as foreign:
            await foreign.recv()
            for message in GARBAGE[name]:
                await foreign.send(message)
            with pytest.raises((aiordma.ConnectionLostError, aiordma.ConnectionEndedError)):
                await foreign.recv()
        assert there.comms.empty()
        told = [each for each in caplog.records if each.name.startswith("aiordma")]
        assert not any(each.exc_info for each in told), "a line for a stranger, and no traceback"
        client = await connect(contact)
        server = await there.comms.get()
        assert await passed(client, server, {"n": 1}) == {"n": 1}
        await asyncio.gather(client.close(), server.close())
