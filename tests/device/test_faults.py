"""`aiordma.testing.faults`: what an ordinary program sees of each fault, on a device or the fabric.

Every call succeeds truly or raises a documented error within its bound, nothing is left, and
without the fault the same program works.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

import aiordma
from aiordma.cm import ConnectionId, EventChannel
from aiordma.testing import faults
from aiordma.verbs import ProtectionDomain
from aiordma.verbs.comp_channel import CompletionChannel
from tests.device.oracle import reported, until

pytestmark = [pytest.mark.device, pytest.mark.one_loop, pytest.mark.one_device]

Pair = tuple[aiordma.Connection, aiordma.Connection]
Program = Callable[[str], Awaitable[None]]

OVER_FABRIC = "AIORDMA_FABRIC" in os.environ
LIMIT_S = 45
SIZES = (5, 100_000, 1 << 20)


@pytest.fixture(autouse=True)
def nothing_set() -> Iterator[None]:
    """Each test takes its faults back, and what it loses on purpose is no fault."""
    before = CompletionChannel.all_lost_events
    yield
    CompletionChannel.all_lost_events = before


# Ordinary programs


async def messages(address: str) -> None:
    async def echo(conn: aiordma.Connection) -> None:
        with contextlib.suppress(aiordma.RdmaError):
            async for message in conn:
                await conn.send(message)

    async with (
        aiordma.serve(echo, address, 0) as server,
        aiordma.connect(address, server.port) as conn,
    ):
        for size in SIZES:
            data = os.urandom(size)
            await conn.send(data)
            with await conn.recv() as answer:
                assert bytes(answer) == data


async def streams(address: str) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    async with await aiordma.start_server(echo, address, 0) as server:
        reader, writer = await aiordma.open_connection(address, server.port)
        try:
            for size in SIZES:
                data = os.urandom(size)
                writer.write(data)
                answer, _ = await asyncio.gather(reader.readexactly(size), writer.drain())
                assert answer == data
            writer.write_eof()
            assert await reader.read() == b""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def requests(address: str) -> None:
    async def handler(request: aiordma.Request) -> bytes:
        return bytes(request.body)[::-1]

    async with (
        aiordma.serve_requests(handler, address, 0) as server,
        aiordma.connect(address, server.port) as conn,
    ):
        for size in SIZES:
            data = os.urandom(size)
            with await conn.request(data, timeout=LIMIT_S) as answer:
                assert bytes(answer) == data[::-1]


async def ends_well(program: Program, address: str) -> str:
    """Run a program; the error that it has seen, or "" ."""
    # A loop is told of a queue that cannot be armed or polled, and the connection ends of it.
    with reported():
        try:
            async with asyncio.timeout(LIMIT_S):
                await program(address)
        except (aiordma.RdmaError, OSError, asyncio.IncompleteReadError) as error:
            if type(error) is TimeoutError:
                pytest.fail("it hangs")
            return f"{type(error).__name__}: {error}"
    return ""


PROGRAMS = pytest.mark.parametrize("program", [messages, streams, requests])
#: Calls that make connections and listeners; those of the data path are below.
MAKING = (
    "ibv_alloc_pd", "ibv_create_comp_channel", "ibv_create_cq", "ibv_create_qp", "ibv_modify_qp",
    "ibv_reg_mr", "rdma_accept", "rdma_bind_addr", "rdma_connect", "rdma_create_event_channel",
    "rdma_create_id", "rdma_disconnect", "rdma_establish", "rdma_listen", "rdma_resolve_addr",
    "rdma_resolve_route",
)  # fmt: skip
POSTING = ("ibv_poll_cq", "ibv_post_recv", "ibv_post_send", "ibv_req_notify_cq")


# Calls that fail


@PROGRAMS
@pytest.mark.one_loop
@pytest.mark.parametrize("call", MAKING)
async def test_a_connection_cannot_be_made(program: Program, call: str, address: str) -> None:
    with faults.fail(call) as fault:
        said = await ends_well(program, address)
    # Soft-RoCE needs no `rdma_establish`, and iWARP has no other queue pair at first, and so on.
    if said:
        assert fault.struck == 1
    assert await ends_well(program, address) == ""


@pytest.mark.parametrize(
    ("program", "call", "after"),
    [
        (program, call, after)
        for program in (messages, streams, requests)
        for call in POSTING
        for after in (0, 1, 4, 9)
    ],
)
async def test_a_call_of_the_data_path_fails(
    program: Program, call: str, after: int, address: str
) -> None:
    with faults.fail(call, after=after) as fault:
        await ends_well(program, address)
    assert fault.struck == 1
    # Not even the channel is that of the old ones, which the kernel takes its time to end.
    assert await ends_well(program, address) == ""


@pytest.mark.parametrize("side", [0, 1])
async def test_a_write_of_a_stream_is_not_posted(address: str, side: int) -> None:
    """Both ends hear of it, though neither of them does anything more."""
    served: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    served = asyncio.get_running_loop().create_future()
    async with await aiordma.start_server(
        lambda reader, writer: served.set_result((reader, writer)), address, 0
    ) as server:
        ends = [await aiordma.open_connection(address, server.port), await served]
        await asyncio.sleep(0.1)  # the handshake is over
        readings = [asyncio.create_task(reader.read()) for reader, _ in ends]
        try:
            with faults.fail("ibv_post_send") as fault:
                ends[side][1].write(b"lost")
                await asyncio.wait(readings, timeout=3)
            assert fault.struck == 1
            assert all(each.done() for each in readings), "nobody is told"
        finally:
            for each in readings:
                each.cancel()
            await asyncio.wait(readings)
            assert all(each.cancelled() or each.exception() for each in readings)
            for _, writer in ends:
                writer.transport.abort()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()


async def test_a_request_is_not_posted(address: str) -> None:
    """The error is that of the post: neither end has broken the protocol."""

    async def handler(request: aiordma.Request) -> bytes:
        return bytes(request.body)

    async with (
        aiordma.serve_requests(handler, address, 0) as server,
        aiordma.connect(address, server.port) as conn,
    ):
        (await conn.request(b"question", timeout=LIMIT_S)).release()
        await asyncio.sleep(0.1)  # and its credit
        with (
            faults.fail("ibv_post_send") as fault,
            pytest.raises(aiordma.ConnectionLostError, match="ibv_post_send: ENOMEM"),
        ):
            await conn.request(b"question", timeout=LIMIT_S)
        assert fault.struck == 1


@pytest.mark.parametrize("imm", [None, 5])
@pytest.mark.parametrize(
    "data", [b"small", [b"of", b"parts"], bytes(3000), bytes(40_000), bytes(300_000)]
)
async def test_a_send_whose_post_fails_raises(
    pair: Pair, data: bytes | list[bytes], imm: int | None
) -> None:
    """And not only the next one."""
    client, _ = pair
    await client.flush()
    with (
        faults.fail("ibv_post_send", errno=errno.EAGAIN),
        pytest.raises(aiordma.ConnectionLostError, match=r"ibv_post_send: EAGAIN: [^(]*$"),
    ):
        await client.send(data, imm)


async def test_a_queue_that_cannot_wake_a_wait(pair: Pair, is_siw: bool) -> None:
    """A wait for own sends arms the queue for all completions; on iWARP it is so already."""
    client, _ = pair
    told = pytest.raises(aiordma.ConnectionLostError, match="ibv_req_notify_cq: EIO")
    with reported(), faults.fail("ibv_req_notify_cq", errno=errno.EIO) as fault:
        async with asyncio.timeout(20):
            await client.send(b"x")
            with contextlib.suppress(aiordma.ConnectionLostError) if is_siw else told:
                await client.flush()
        assert fault.struck or is_siw


@pytest.mark.parametrize("program", [messages, streams])
@pytest.mark.parametrize("call", POSTING)
async def test_the_error_names_the_call(program: Program, call: str, address: str) -> None:
    with faults.fail(call) as fault:
        said = await ends_well(program, address)
    assert fault.struck == 1
    if call != "ibv_poll_cq":  # the first poll looks for what nobody waits for yet
        assert f"{call}: ENOMEM" in said


async def test_a_listener_without_receives_says_that_it_is_short(address: str) -> None:
    with faults.fail("ibv_post_recv", after=1):
        said = await ends_well(messages, address)
    assert "the listener ran out of resources" in said


async def test_one_registration_of_a_large_message_fails(pair: Pair) -> None:
    """The peer's send has its region until the message is there: no memory becomes free."""
    client, server = pair
    data = os.urandom(4 << 20)
    begun = time.monotonic()
    with faults.fail("ibv_reg_mr", after=1) as fault:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.send(data))
            message = await server.recv()
    with message:
        assert bytes(message) == data
    assert fault.struck == 1
    assert time.monotonic() - begun < 10


@pytest.mark.one_loop
async def test_what_the_error_says(address: str) -> None:
    with faults.fail("ibv_reg_mr"), pytest.raises(aiordma.RdmaOSError) as caught:
        await messages(address)
    assert caught.value.errno == errno.ENOMEM
    assert "ibv_reg_mr: ENOMEM" in str(caught.value)
    number = errno.EACCES
    with (
        faults.fail("rdma_bind_addr", errno=number),
        pytest.raises(aiordma.RdmaOSError) as caught,
    ):
        await messages(address)
    assert caught.value.errno == number


@pytest.mark.one_loop
async def test_after_and_times(address: str) -> None:
    with EventChannel() as channel:
        tried: list[int | None] = []
        with faults.fail("rdma_create_id", after=1, times=2, errno=errno.EMFILE) as fault:
            for _ in range(5):
                try:
                    ConnectionId(channel).close()
                except OSError as error:
                    tried.append(error.errno)
                else:
                    tried.append(0)
            assert fault.struck == 2
        assert tried == [0, errno.EMFILE, errno.EMFILE, 0, 0]
        with faults.fail("rdma_create_id", times=None) as fault:
            for _ in range(3):
                with pytest.raises(OSError, match="rdma_create_id: ENOMEM"):
                    ConnectionId(channel)
        assert fault.struck == 3
        ConnectionId(channel).close()


@pytest.mark.one_loop
async def test_devices_that_the_program_opens_itself() -> None:
    device = aiordma.devices()[0]
    with device.open() as before, faults.fail("ibv_alloc_pd", times=None) as fault:
        with device.open() as since:
            for context in (before, since):
                with pytest.raises(OSError, match="ibv_alloc_pd"):
                    ProtectionDomain(context)
        assert fault.struck == 2
    with device.open() as context, ProtectionDomain(context):
        pass
    with faults.fail("ibv_open_device"), pytest.raises(OSError, match="ibv_open_device: ENOMEM"):
        device.open()


@pytest.mark.one_loop
async def test_two_faults_of_a_call_at_a_time(pair: Pair) -> None:
    """Each counts the calls; the first one that is due strikes, and each is cleared by itself."""
    with EventChannel() as channel:
        one = faults.fail("rdma_create_id", errno=errno.EMFILE, times=None)
        two = faults.fail("rdma_create_id", errno=errno.ENOMEM, times=None)
        with pytest.raises(OSError, match="EMFILE"):
            ConnectionId(channel)
        one.clear()
        one.clear()
        with pytest.raises(OSError, match="ENOMEM"):
            ConnectionId(channel)
        two.clear()
        ConnectionId(channel).close()
    assert (one.struck, two.struck) == (1, 1)
    assert repr(one) == "<Fault fail('rdma_create_id') cleared struck=1>"


# Completions


@PROGRAMS
@pytest.mark.parametrize("after", [0, 2, 7])
async def test_an_event_is_lost(program: Program, after: int, address: str) -> None:
    """Polling once a second finds what nothing tells of."""
    with faults.lose_event(after=after) as fault:
        assert await ends_well(program, address) == ""
    assert fault.struck == 1


async def test_an_event_that_is_lost_is_counted(pair: Pair) -> None:
    client, server = pair
    lost = CompletionChannel.all_lost_events
    receiving = asyncio.create_task(server.recv())
    await asyncio.sleep(0)
    with faults.lose_event(times=None) as fault:
        begun = time.monotonic()
        await client.send(b"unheard")
        with await receiving as message:
            assert bytes(message) == b"unheard"
        assert time.monotonic() - begun < 5
        assert fault.struck >= 1
    await until(lambda: CompletionChannel.all_lost_events > lost, 5)
    await client.send(b"heard")
    (await server.recv()).release()


async def test_completions_are_late(pair: Pair) -> None:
    client, server = pair

    async def there_and_back() -> float:
        begun = time.monotonic()
        await client.send(b"question")
        (await server.recv()).release()
        await server.send(b"answer")
        with await client.recv() as answer:
            assert bytes(answer) == b"answer"
        return time.monotonic() - begun

    async def quickest() -> float:
        """Of several: a busy machine is late by itself now and then."""
        return min([await there_and_back() for _ in range(5)])

    await there_and_back()
    with faults.delay_completions(0.2):
        assert 0.4 <= await there_and_back() < 5
        with faults.delay_completions(0.01):
            assert await quickest() < 0.4
        assert await there_and_back() >= 0.4
    await there_and_back()  # what was under way
    assert await quickest() < 0.2


@PROGRAMS
async def test_all_completions_of_a_program_are_late(program: Program, address: str) -> None:
    with faults.delay_completions(0.01):
        assert await ends_well(program, address) == ""


async def test_a_connection_ends_while_completions_are_late(pair: Pair) -> None:
    client, server = pair
    with faults.delay_completions(60):
        sending = asyncio.create_task(client.send(b"x"))
        await asyncio.sleep(0.05)
        await asyncio.wait([sending], timeout=0.05)
        client.abort()
        server.abort()
        async with asyncio.timeout(30):
            await client.wait_closed()
            await server.wait_closed()
    with contextlib.suppress(aiordma.RdmaError):
        await sending


# Ends


async def test_a_connection_ends(pair: Pair) -> None:
    client, _ = pair
    receiving = [asyncio.create_task(each.recv()) for each in pair]
    await asyncio.sleep(0)
    assert faults.end_connection(client).struck == 1
    for each in receiving:
        with pytest.raises(aiordma.ConnectionLostError):
            async with asyncio.timeout(10):
                await each
    for one in pair:
        with pytest.raises(aiordma.ConnectionLostError):
            await one.send(b"x")
        await one.wait_closed()
    with pytest.raises(aiordma.ResourceClosedError):
        faults.end_connection(client)


async def test_a_connection_ends_and_the_peer_is_not_told(pair: Pair, is_siw: bool) -> None:
    client, server = pair
    hearing = asyncio.create_task(server.recv())
    faults.end_connection(client, silently=True)
    with pytest.raises(aiordma.ConnectionLostError):
        async with asyncio.timeout(10):
            await client.recv()
    if not is_siw:
        # This side closes its connection then, which the other one hears.
        with pytest.raises(aiordma.ConnectionLostError):
            async with asyncio.timeout(10):
                await hearing
    hearing.cancel()
    await asyncio.wait([hearing])


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("after", [0, 3])
async def test_a_connection_ends_at_a_moment(pair: Pair, after: int, silently: bool) -> None:
    client, server = pair
    seen = 0
    with faults.end_connection(client, after=after, silently=silently) as fault:
        with pytest.raises(aiordma.ConnectionLostError):  # noqa: PT012
            async with asyncio.timeout(20):
                while seen < 50:
                    assert not fault.struck
                    await client.send(b"question")
                    with await server.recv() as question:
                        assert bytes(question) == b"question"
                    seen += 1
        assert fault.struck == 1
    assert seen <= after


async def test_a_stream_ends(address: str) -> None:
    served: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    served = asyncio.get_running_loop().create_future()
    async with await aiordma.start_server(
        lambda reader, writer: served.set_result((reader, writer)), address, 0
    ) as server:
        for form in range(3):
            reader, writer = await aiordma.open_connection(address, server.port)
            its_reader, its_writer = await served
            served = asyncio.get_running_loop().create_future()
            writer.write(b"whole")
            await writer.drain()
            assert await its_reader.readexactly(5) == b"whole"
            faults.end_connection([writer, writer.transport, (reader, writer)][form])
            for each in (reader, its_reader):
                with pytest.raises(ConnectionError):
                    async with asyncio.timeout(10):
                        await each.read()
            for end in (writer, its_writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()


@pytest.mark.one_loop
async def test_a_stream_ends_at_a_moment(address: str) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()

    async with await aiordma.start_server(echo, address, 0) as server:
        reader, writer = await aiordma.open_connection(address, server.port)
        with faults.end_connection(writer, after=2) as fault:
            with pytest.raises(ConnectionError):  # noqa: PT012
                async with asyncio.timeout(10):
                    for _ in range(20):
                        writer.write(b"line\n")
                        await writer.drain()
                        assert await reader.readline() == b"line\n"
            assert fault.struck == 1
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.one_loop
async def test_an_end_that_never_comes(pair: Pair) -> None:
    client, _ = pair
    with faults.end_connection(client, after=1000) as fault:
        await client.close()
    assert fault.struck == 0


# The peer's process

_PEER = """
import asyncio, sys, aiordma

async def echo(conn):
    async for message in conn:
        await conn.send(message)

async def main():
    async with aiordma.serve(echo, sys.argv[1], 0) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def peer(address: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A process that echoes, and its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PEER, address, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        port = int(await process.stdout.readline())
    yield process, port
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.mark.one_loop
@pytest.mark.parametrize("after", [None, 3])
async def test_the_peer_is_killed(
    peer: tuple[asyncio.subprocess.Process, int], address: str, after: int | None
) -> None:
    process, port = peer
    answers = 0
    async with asyncio.timeout(60), aiordma.connect(address, port) as conn:
        await conn.send(b"question")
        (await conn.recv()).release()
        with faults.kill_peer(process, after=after) as fault:
            with pytest.raises(aiordma.ConnectionLostError):  # noqa: PT012
                while True:
                    await conn.send(b"question")
                    with await conn.recv() as answer:
                        assert bytes(answer) == b"question"
                    answers += 1
            assert fault.struck == 1
    assert answers <= (after or 0)
    assert await process.wait() == -9
    with pytest.raises(ProcessLookupError, match="is over: -9"):
        faults.kill_peer(process)


# Arguments, and what is restored


@pytest.mark.one_loop
def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"'ibv_post_sent' .* did you mean ibv_post_send\?"):
        faults.fail("ibv_post_sent")
    with pytest.raises(ValueError, match="CALLS has ibv_alloc_mw"):
        faults.fail("x")
    for words in ({"after": -1}, {"times": 0}, {"errno": 0}, {"after": 1 << 40}):
        with pytest.raises(ValueError, match=next(iter(words))):
            faults.fail("ibv_post_send", **words)
    for seconds in (0, -1.0, float("nan"), 1e9):
        with pytest.raises(ValueError, match="seconds"):
            faults.delay_completions(seconds)
    with pytest.raises(TypeError, match="expected a Connection, a stream or a ConnectionId"):
        faults.end_connection(object())
    with pytest.raises(TypeError, match="process"):
        faults.kill_peer("x")  # type: ignore[arg-type]
    for number in (0, -1, os.getpid()):
        with pytest.raises(ValueError, match="process"):
            faults.kill_peer(number)
    with pytest.raises(ValueError, match="part"):
        faults.packet_loss(2)


@pytest.mark.one_loop
def test_a_fault_that_is_forgotten_is_taken_back() -> None:
    with pytest.warns(ResourceWarning, match=r"a fault was not cleared: fail\('rdma_create_id'\)"):
        faults.fail("rdma_create_id", times=None)
    with EventChannel() as channel, ConnectionId(channel):
        pass


@pytest.mark.one_loop
def test_so_many_faults_at_a_time() -> None:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(faults.fail("rdma_create_id")) for _ in range(64)]
        with pytest.raises(OSError, match="too many faults") as caught:
            faults.fail("rdma_create_id")
        assert caught.value.errno == errno.ENOSPC
        assert all(fault.struck == 0 for fault in made)
    with faults.fail("rdma_create_id"):
        pass


@pytest.mark.one_loop
def test_what_a_device_cannot_have() -> None:
    if OVER_FABRIC:
        return
    makers: list[Callable[[], faults.Fault]] = [
        lambda: faults.packet_loss(0.1),
        lambda: faults.partition(),
        lambda: faults.fail("ibv_query_port"),
    ]
    for make in makers:
        with pytest.raises(faults.UnsupportedFault, match="over the fabric only") as caught:
            make()
        assert isinstance(caught.value, aiordma.NotSupportedError)
        assert caught.value.errno == errno.EOPNOTSUPP


async def test_other_connections_go_on_at_the_end_of_a_fault(address: str) -> None:
    """What was put between is taken away while requests are under way."""

    async def talk() -> None:
        for _ in range(20):
            await messages(address)

    talking = asyncio.create_task(talk())
    for number in range(200):
        with faults.fail("rdma_reject"), faults.delay_completions(0.001 * (number % 3) + 0.0001):
            await asyncio.sleep(0.002)
        if talking.done():
            break
    async with asyncio.timeout(LIMIT_S):
        await talking
