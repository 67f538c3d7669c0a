"""Streams over RDMA: what asyncio's calls do here, and what is RDMA's own."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import math
import socket
import tempfile
import warnings
from typing import Any

import pytest

import aiordma
from aiordma import StreamConfig
from aiordma.link.transport_socket import RdmaTransportSocket
from tests.device.oracle import (
    Connecting,
    adapter_objects,
    collect,
    rdma_descriptors,
    reported,
    settle,
    until,
)
from tests.device.shared import OVER_FABRIC, name_of_device
from tests.device.streaming import Note, noted, stream_pair
from tests.inside.streams import active_of, knows_end

pytestmark = pytest.mark.device


@pytest.mark.smoke
async def test_a_conversation_of_lines(address: str) -> None:
    async with stream_pair(address) as ((reader, writer), (theirs, answers)):
        writer.write(b"one\ntwo\n")
        assert await theirs.readline() == b"one\n"
        assert await theirs.readline() == b"two\n"
        answers.writelines([b"th", b"ree\n"])
        await answers.drain()
        assert await reader.readline() == b"three\n"
        writer.close()
        await writer.wait_closed()
        assert await theirs.read() == b""


async def test_what_the_transport_tells(address: str, is_siw: bool) -> None:
    async with stream_pair(address) as ((_, writer), (_, answers)):
        here, there = writer.transport, answers.transport
        assert isinstance(here, aiordma.RdmaTransport)
        for transport in (here, there):
            tell = transport.get_extra_info
            assert tell("device") == name_of_device(is_siw)
            if not OVER_FABRIC:  # the kernel names the driver, in sysfs
                assert tell("provider") == ("siw" if is_siw else "rdma_rxe")
            assert tell("port") == 1
            assert tell("backend") == "rdma"
            assert tell("transport") == ("IWARP" if is_siw else "IB")
            assert tell("mtu") in (256, 512, 1024, 2048, 4096)
            assert len(tell("gid")) == 16
            assert isinstance(tell("socket"), RdmaTransportSocket)
            assert tell("nothing", "else") == "else"
        assert here.get_extra_info("qpn") != there.get_extra_info("qpn")
        assert here.get_extra_info("peername") == there.get_extra_info("sockname")
        assert here.get_extra_info("sockname") == there.get_extra_info("peername")
        assert here.get_extra_info("peername")[0] == address


async def test_half_close(address: str) -> None:
    async with stream_pair(address) as ((reader, writer), (theirs, answers)):
        assert writer.can_write_eof()
        writer.write(b"question")
        writer.write_eof()
        assert await theirs.read() == b"question"
        for _ in range(3):
            answers.write(b"a" * 100_000)
            await answers.drain()
        answers.close()
        assert await reader.read() == b"a" * 300_000
        await answers.wait_closed()
        with pytest.raises(RuntimeError, match="after write_eof"):
            writer.write(b"more")


async def test_abort_reaches_the_peer(address: str) -> None:
    """As with TCP where SO_LINGER is 0: the peer is not told that this is the end of the stream."""
    async with noted(address, StreamConfig(linger_s=0)) as both:
        both.client.transport.abort()
        assert await both.client.ended() is None
        lost = await both.server.ended()
        assert isinstance(lost, ConnectionResetError)
        assert "eof" not in both.server.calls


async def test_writing_to_a_peer_that_has_left(address: str) -> None:
    """As with TCP: first an end of the stream, and an error for who goes on writing."""

    class Stays(Note):
        def __init__(self) -> None:
            super().__init__()
            self.keep_open = True

    async with noted(address, server=Stays) as both:
        both.client.transport.close()
        await until(lambda: "eof" in both.server.calls)
        both.server.transport.write(b"too late")
        assert not both.server.transport.is_closing()
        both.server.transport.write(b"and too late")
        lost = await both.server.ended()
        assert isinstance(lost, ConnectionResetError)
        assert lost.errno == errno.ECONNRESET


@pytest.mark.parametrize("size", [4, 100], ids=["line by line", "at once"])
async def test_j03_an_echo_that_does_not_drain_hears_the_end(address: str, size: int) -> None:
    """What a peer sent, and its end, come before the loss of what is written to it since.

    With 4 bytes at a time the reader still has lines of the peer when it knows of the end.
    """
    echoed: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

    async def echo(reader: aiordma.RdmaStreamReader, writer: aiordma.RdmaStreamWriter) -> None:
        heard = []
        try:
            while data := await reader.read(size):
                heard.append(data)
                writer.write(data)
                if data == b"bye\n":
                    await until(lambda: knows_end(reader))
            echoed.set_result(heard)
        except BaseException as exc:
            echoed.set_exception(exc)
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()

    async with asyncio.timeout(20), await aiordma.start_server(echo, address, 0) as server:
        reader, writer = await aiordma.open_connection(address, server.port)
        writer.write(b"hi!\n")
        assert await reader.readexactly(4) == b"hi!\n"
        writer.write(b"bye\n" * 5)
        writer.close()
        await writer.wait_closed()
        assert b"".join(await echoed) == b"hi!\n" + b"bye\n" * 5


async def test_a_peer_that_leaves_before_it_has_all(address: str) -> None:
    """What waited for it is lost, and that is said."""
    async with noted(address) as both:
        both.server.transport.pause_reading()
        both.client.transport.write(b"q" * 3_000_000)
        assert both.client.paused
        both.server.transport.close()
        lost = await both.client.ended()
        assert isinstance(lost, ConnectionResetError)
        assert "before it took everything" in str(lost)


async def test_a_close_that_does_not_get_on(address: str) -> None:
    config = StreamConfig(close_timeout_s=0.5)
    async with noted(address, config) as both:
        both.server.transport.pause_reading()
        both.client.transport.write(b"q" * 3_000_000)
        both.client.transport.close()
        assert isinstance(await both.client.ended(), aiordma.ConnectionLostError)
        both.server.transport.resume_reading()
        await both.server.ended()


async def test_idle_timeout(address: str) -> None:
    """The client says nothing of itself, and the server has no patience."""
    strict = StreamConfig(idle_timeout_s=0.4, keepalive_s=None)
    silent = StreamConfig(idle_timeout_s=None)
    served: list[Note] = []

    def factory() -> Note:
        served.append(Note())
        return served[-1]

    async with await aiordma.create_server(factory, address, 0, config=strict) as server:
        _, client = await aiordma.create_connection(Note, address, server.port, config=silent)
        assert isinstance(await client.ended(), ConnectionResetError)
        assert isinstance(await served[0].ended(), aiordma.ConnectionLostError)


@pytest.mark.virtual_time
async def test_g09_silent_streams_end_after_a_bound(address: str) -> None:
    """Those of programs that say nothing at all; two ends of this library may stay idle."""
    assert StreamConfig().idle_timeout_s == 7200
    rare = StreamConfig(keepalive_s=100, idle_timeout_s=1000)
    silent = StreamConfig(keepalive_s=100, idle_timeout_s=None)
    async with await aiordma.create_server(Note, address, 0, config=rare) as server:
        _, quiet = await aiordma.create_connection(Note, address, server.port, config=silent)
        _, alive = await aiordma.create_connection(Note, address, server.port, config=rare)
        begin = asyncio.get_running_loop().time()
        async with asyncio.timeout(2000):
            assert isinstance(await asyncio.shield(quiet.gone), ConnectionResetError)
        assert 1000 <= asyncio.get_running_loop().time() - begin < 1300
        await asyncio.sleep(3000)
        assert not alive.gone.done()
        assert active_of(server) == 1
        alive.transport.close()
        assert await alive.ended() is None


async def test_nobody_listens(address: str) -> None:
    async with await aiordma.start_server(lambda r, w: None, address, 0) as server:
        port = server.port
    with pytest.raises(aiordma.ConnectionRejectedError) as caught:
        await aiordma.open_connection(address, port)
    assert isinstance(caught.value, ConnectionRefusedError)


async def test_messages_and_streams_refuse_one_another(address: str) -> None:
    async with (
        aiordma.listen(address, 0) as listener,
        await aiordma.start_server(lambda r, w: None, address, 0) as server,
    ):
        with pytest.raises(aiordma.ConnectionRejectedError):
            await aiordma.open_connection(address, listener.port)
        with pytest.raises(aiordma.ConnectionRejectedError):
            await aiordma.connect(address, server.port)
        assert server.refused == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"sock": socket.socket}, ValueError),
        ({"host": None}, ValueError),
        ({"port": None}, ValueError),
        ({"port": 0}, ValueError),
        ({"port": 70_000}, ValueError),
        ({"family": socket.AF_UNIX}, ValueError),
        ({"proto": socket.IPPROTO_UDP}, ValueError),
        ({"server_hostname": "a"}, ValueError),
        ({"ssl_handshake_timeout": 1}, ValueError),
        ({"ssl_shutdown_timeout": 1}, ValueError),
        ({"happy_eyeballs_delay": -1}, ValueError),
        ({"timeout": math.nan}, ValueError),
        ({"timeout": 0}, aiordma.ConnectTimeoutError),
        ({"family": socket.AF_INET6}, aiordma.ConnectionFailedError),
    ],
)
async def test_arguments_of_no_use(
    address: str, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await aiordma.create_connection(Note, **{"host": address, "port": 7, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"ssl": True}, TypeError),
        ({"ssl_handshake_timeout": 1}, ValueError),
        ({"sock": socket.socket}, ValueError),
        ({"reuse_port": True}, ValueError),
        ({"family": socket.AF_UNIX}, ValueError),
        ({"family": socket.AF_INET6}, ValueError),
        ({"backlog": 0}, ValueError),
        ({"port": -1}, ValueError),
        ({"host": "192.0.2.1"}, OSError),
    ],
)
async def test_servers_of_no_use(
    address: str, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await aiordma.create_server(Note, **{"host": address, "port": 0, **arguments})


async def test_a_factory_that_raises(address: str) -> None:
    def factory() -> Any:
        msg = "no protocol today"
        raise LookupError(msg)

    async with await aiordma.create_server(Note, address, 0) as server:
        with pytest.raises(LookupError):
            await aiordma.create_connection(factory, address, server.port)
    with reported() as reports:
        async with await aiordma.create_server(factory, address, 0) as server:
            _, client = await aiordma.create_connection(Note, address, server.port)
            # Not an end of the stream: nobody has read what it may have sent.
            assert isinstance(await client.ended(), aiordma.ConnectionLostError)
            assert client.calls == ["made", "lost"]
    assert [type(report["exception"]) for report in reports] == [LookupError]


async def test_readinto(address: str) -> None:
    async with stream_pair(address) as ((_, writer), (reader, _)):
        into = bytearray(5)
        # What the reader has already comes first.
        writer.write(b"abcdefgh")
        assert await reader.readexactly(2) == b"ab"
        assert await reader.readinto(into) == 5
        assert into == b"cdefg"
        # What is not there yet comes straight from the ring.
        waiting = asyncio.create_task(reader.readinto(memoryview(into)[1:]))
        assert await waiting == 1
        assert into == b"chefg"
        waiting = asyncio.create_task(reader.readinto(into))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="already waiting"):
            await reader.readinto(bytearray(1))
        writer.write(b"123456")
        assert await waiting == 5
        assert into == b"12345"
        numbers = array.array("I", [0, 0])
        writer.write(b"\x01\0\0\0\x02\0\0")
        got = await reader.readinto(numbers)
        while got < 8:
            got += await reader.readinto(memoryview(numbers).cast("B")[got:])
        assert numbers.tobytes() == b"6\x01\0\0\0\x02\0\0"
        with pytest.raises(TypeError, match="writable"):
            await reader.readinto(b"constant")
        assert await reader.readinto(bytearray()) == 0
        # A wait that is canceled takes nothing with it.
        waiting = asyncio.create_task(reader.readinto(into))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        writer.write(b"kept")
        assert await reader.readexactly(4) == b"kept"
        writer.close()
        assert await reader.readinto(into) == 0
        assert await reader.readinto(into) == 0


async def test_readinto_of_much(address: str) -> None:
    data = bytes(range(256)) * 8192
    async with stream_pair(address) as ((_, writer), (reader, _)):

        async def send() -> None:
            for at in range(0, len(data), 70_000):
                writer.write(data[at : at + 70_000])
                await writer.drain()

        sending = asyncio.create_task(send())
        into = bytearray(len(data))
        at = 0
        with memoryview(into) as view:
            while at < len(data):
                at += await reader.readinto(view[at:])
        await sending
        assert into == data


async def test_readinto_of_a_stream_that_breaks(address: str) -> None:
    async with stream_pair(address, StreamConfig(linger_s=0)) as ((_, writer), (reader, _)):
        waiting = asyncio.create_task(reader.readinto(bytearray(5)))
        await asyncio.sleep(0)
        writer.transport.abort()
        with pytest.raises(ConnectionResetError):
            await waiting
        with pytest.raises(ConnectionResetError):
            await reader.readinto(bytearray(5))


async def test_sendfile(address: str) -> None:
    """By the loop's own fallback; uvloop has none."""
    loop = asyncio.get_running_loop()
    data = bytes(range(256)) * 3000
    async with noted(address) as both:
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.seek(0)
            if "uvloop" in type(loop).__module__:
                with pytest.raises(NotImplementedError):
                    await loop.sendfile(both.client.transport, file)
                return
            assert await loop.sendfile(both.client.transport, file) == len(data)
        assert await both.server.received(len(data)) == data
        both.client.transport.write(b"and on")
        assert (await both.server.received(len(data) + 6))[-6:] == b"and on"


async def test_a_transport_that_nobody_closed(address: str) -> None:
    """asyncio's warning, when the garbage collector finds it after its loop."""
    made: list[str] = []

    async def forget() -> None:
        server = await aiordma.create_server(Note, address, 0)
        transport, _ = await aiordma.create_connection(Note, address, server.port)
        made.append(repr(transport))
        server.close()

    def in_a_loop_of_its_own() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(forget())
        loop.close()

    before, connects = (adapter_objects(), rdma_descriptors()), Connecting()
    said: list[str] = []

    def note(message: Warning | str, *_: object) -> None:
        said.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # The words alone: a warning that is recorded keeps its source, and all that this leads to.
        warnings.showwarning = note  # type: ignore[assignment]
        await asyncio.to_thread(in_a_loop_of_its_own)
        connects.let_go()

        def all_collected() -> bool:
            # A thread that has ended its work may let go of it a little later.
            collect()
            return (adapter_objects(), rdma_descriptors()) == before

        await until(all_collected)
    assert f"unclosed transport {made[0]}" in said


async def test_a_loop_that_ends_with_everything_under_way(address: str) -> None:
    """asyncio.run cancels all tasks; what they held is given back."""
    config = StreamConfig(receive_buffer_size=4096, send_buffer_size=4096, close_timeout_s=0.5)
    before, connects = (adapter_objects(), rdma_descriptors()), Connecting()
    reports: list[str] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
            await writer.drain()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        # The words alone: the rest would keep what it tells of.
        loop.set_exception_handler(lambda _, context: reports.append(context["message"]))
        server = await aiordma.start_server(copy, address, 0, config=config)

        async def talk(writer: asyncio.StreamWriter) -> None:
            try:
                writer.write(b"x" * 500_000)
                await writer.drain()
            finally:
                writer.close()

        # On iWARP a connect that is given up in the middle keeps a thread for two minutes.
        opened = [
            await aiordma.open_connection(address, server.port, config=config) for _ in range(5)
        ]
        tasks = [asyncio.create_task(talk(writer)) for _, writer in opened[1:]]
        tasks.append(asyncio.create_task(server.serve_forever()))
        opened[0][1].write(b"x" * 500_000)
        await asyncio.sleep(0)
        server.abort_clients()
        opened[0][1].transport.abort()

    def run() -> None:
        with warnings.catch_warnings():
            # A transport that waits for its last bytes has lost its loop, and says so.
            warnings.simplefilter("ignore", ResourceWarning)
            asyncio.run(main(), debug=True)
            connects.let_go()
            collect()

    await asyncio.to_thread(run)
    await settle()

    def all_given_back() -> bool:
        collect()
        return (adapter_objects(), rdma_descriptors()) == before

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        await until(all_given_back, 60)
    assert not [report for report in reports if "destroyed" in report], reports
