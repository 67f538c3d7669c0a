"""Rows P, A9, R and S of the matrix: what becomes of peers and of what they need.

test_matrix.py runs this file, over the fabric.  There a process that is stopped has no adapter
either, as a machine that stands still or has lost its power.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma.cm import ConnectionParameter, EventChannel, EventType
from aiordma.testing import faults
from aiordma.verbs import SGE, Opcode, SendWR
from aiordma.verbs.comp_channel import CompletionChannel
from tests.device.meeting import are_alive, meet, paired, part, qp_of, still_accepts
from tests.device.oracle import polled, until
from tests.device.shared import *  # noqa: F403  # nothing is left behind
from tests.device.streaming import noted
from tests.device.test_faults import Program, ends_well, messages, requests, streams
from tests.native_ends import End, acked, begun, listening, resolved

HERE = os.environ["AIORDMA_FABRIC_ADDR"]
LIMIT_S = 30
QUICK = ConnectionConfig(ack_timeout=12, close_timeout_s=1)
#: With a process of its own at the other end, whose adapter may have to wait for a processor: what
#: it does not answer is repeated for about a second.
BESIDE = ConnectionConfig(ack_timeout=15, close_timeout_s=1)
PROGRAMS = pytest.mark.parametrize("program", [messages, streams, requests])


@pytest.fixture(autouse=True)
def nothing_lost() -> Iterator[None]:
    """What a queue that cannot be armed did not tell of is no fault."""
    before = CompletionChannel.all_lost_events
    yield
    CompletionChannel.all_lost_events = before


_PEER = """
import asyncio, sys, time, aiordma
from aiordma.cm import ConnectionId, EventChannel

async def serve(conn):
    async for message in conn:
        if bytes(message) == b"block":
            time.sleep(2)
        await conn.send(message)

async def echo(host):
    async with aiordma.serve(serve, host, 0) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()

async def silent(host):
    with EventChannel() as events, ConnectionId(events) as listener:
        listener.bind_addr((host, 0))
        listener.listen()
        print(listener.source_port, flush=True)
        event = await events.get_event()
        print(event.type.name, flush=True)
        await asyncio.Event().wait()

async def connect(host, port):
    print("connecting", flush=True)
    await aiordma.connect(host, int(port), timeout=60)

asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
"""


@asynccontextmanager
async def peer(*words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Another process, and the first line that it says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PEER, *words, stdout=subprocess.PIPE
    )
    try:
        yield process, await line_of(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line_of(process: asyncio.subprocess.Process) -> str:
    """The next line that a process says."""
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        return (await process.stdout.readline()).decode().strip()


async def stopped(process: asyncio.subprocess.Process) -> None:
    """Stop a process with its adapter."""

    def stands() -> bool:
        with open(f"/proc/{process.pid}/stat") as file:
            return file.read().rpartition(") ")[2].startswith("T")

    process.send_signal(signal.SIGSTOP)
    await until(stands)


# P1 to P4


async def test_p01_a_server_is_killed_before_it_answers() -> None:
    async with asyncio.timeout(LIMIT_S), peer("silent", HERE) as (process, port):
        connecting = asyncio.create_task(aiordma.connect(HERE, int(port), timeout=20))
        assert await line_of(process) == "CONNECT_REQUEST"
        process.kill()
        with pytest.raises(aiordma.RdmaError) as caught:
            await connecting
        assert not isinstance(caught.value, TimeoutError)


async def test_p01_a_client_is_killed_before_it_is_answered() -> None:
    with EventChannel() as events, listening(events, HERE) as listener:
        async with (
            asyncio.timeout(LIMIT_S),
            peer("connect", HERE, str(listener.source_port)) as (process, _),
        ):
            request = (await acked(events, EventType.CONNECT_REQUEST)).connection_id
            assert request is not None
            end = End(request).build()
            process.kill()
            await process.wait()
            with pytest.raises((aiordma.RdmaError, OSError)):
                await request.accept(timeout=5)
            end.close()


@pytest.mark.parametrize("long", [False, True], ids=["for a moment", "for long"])
async def test_p04_a_machine_stands_still(*, long: bool) -> None:
    """The adapter repeats for about two seconds; after them the program is told."""
    config = BESIDE if long else ConnectionConfig()
    async with asyncio.timeout(LIMIT_S), peer("echo", HERE) as (process, port):
        async with aiordma.connect(HERE, int(port), config=config) as conn:
            await stopped(process)
            answering = asyncio.create_task(conn.recv())
            await conn.send(b"are you there?")
            if long:
                with pytest.raises(aiordma.ConnectionLostError):
                    await answering
            else:
                await asyncio.sleep(0.4)  # how long it stands
            process.send_signal(signal.SIGCONT)
            if not long:
                with await answering as answer:
                    assert bytes(answer) == b"are you there?"
        async with aiordma.connect(HERE, int(port)) as conn:
            await conn.send(b"again")
            (await conn.recv()).release()


async def test_p03_a_machine_loses_its_power_and_comes_back() -> None:
    """Nobody says goodbye, and the one that comes back knows nothing of the connection."""
    async with (
        asyncio.timeout(LIMIT_S),
        peer("echo", HERE) as (process, port),
        aiordma.connect(HERE, int(port), config=BESIDE) as conn,
    ):
        await stopped(process)
        with pytest.raises(aiordma.ConnectionLostError):  # noqa: PT012
            await conn.send(b"x")
            await conn.recv()
        process.kill()
        await process.wait()
        async with (
            peer("echo", HERE) as (_, again),
            aiordma.connect(HERE, int(again), config=BESIDE) as other,
        ):
            await other.send(b"x")
            (await other.recv()).release()


# P5 to P7


async def test_p05_a_server_comes_back_to_its_port_two_hundred_times() -> None:
    port = 0
    async with asyncio.timeout(LIMIT_S):
        for number in range(200):
            async with aiordma.listen(HERE, port) as listener:
                port = listener.port
                if number % 10 == 0:
                    await still_accepts(listener, HERE)
            if number % 10 == 5:
                with pytest.raises(ConnectionRefusedError):
                    await aiordma.connect(HERE, port)


async def test_p06_both_ends_close_at_once() -> None:
    rng = random.Random(6)

    async def close_after(turns: int, end: aiordma.Connection) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await end.close()

    async with asyncio.timeout(LIMIT_S), aiordma.listen(HERE, 0) as listener:
        for _ in range(200):
            ends = await meet(listener, HERE)
            await asyncio.gather(*(close_after(rng.randrange(12), end) for end in ends))


async def test_p06_both_ends_of_a_stream_close_at_once() -> None:
    async with asyncio.timeout(LIMIT_S):
        for _ in range(50):
            async with noted(HERE) as both:
                both.client.transport.close()
                both.server.transport.close()
                assert await both.client.ended() is None
                assert await both.server.ended() is None


async def test_p07_the_end_without_a_goodbye_is_no_end_of_the_stream() -> None:
    async with asyncio.timeout(LIMIT_S), noted(HERE) as both:
        both.client.transport.write(b"before")
        await both.server.received(6)
        faults.end_connection(both.client.transport)
        assert isinstance(await both.server.ended(), ConnectionError)
        assert "eof" not in both.server.calls
        assert both.server.data == b"before"


async def test_a09_a_peer_whose_loop_stands_still() -> None:
    """Its adapter goes on: nothing is lost, although it takes longer than the adapters' retries."""
    async with (
        asyncio.timeout(LIMIT_S),
        peer("echo", HERE) as (_, port),
        aiordma.connect(HERE, int(port), config=BESIDE) as conn,
    ):
        for text in (b"block", b"and more"):
            await conn.send(text)
        for text in (b"block", b"and more"):
            with await conn.recv() as answer:
                assert bytes(answer) == text


# R1 to R7


_SWEEP = """
import asyncio, os, resource, sys, warnings
import aiordma
from tests.device import test_faults

def highest():
    return max(int(fd) for fd in os.listdir("/proc/self/fd"))

async def main():
    host = sys.argv[1]
    await test_faults.messages(host)
    await test_faults.streams(host)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = set()
    for program in (test_faults.messages, test_faults.streams):
        for room in range(40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest() + room, hard))
            try:
                said = await test_faults.ends_well(program, host)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            told.add(said.partition(":")[0])
            assert await test_faults.ends_well(program, host) == ""
            if room > 4 and not said:
                break
    print(*sorted(told))

asyncio.run(main())
"""


def test_r03_every_number_of_descriptors() -> None:
    """In a process of its own, whose limit is set to each number from what is open upward."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _SWEEP, HERE],
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "OSError" in done.stdout


@PROGRAMS
@pytest.mark.parametrize(
    "call",
    ["ibv_alloc_pd", "ibv_create_comp_channel", "ibv_create_cq", "ibv_create_qp", "ibv_reg_mr",
     "rdma_create_id", "rdma_create_event_channel"],
)  # fmt: skip
async def test_r04_an_object_beyond_the_quota(program: Program, call: str) -> None:
    """EAGAIN is what the control group says.

    What ENOMEM does is in tests/device/test_faults.py: large messages wait for memory then.
    """
    struck = 0
    for after in range(8):
        with faults.fail(call, after=after, errno=errno.EAGAIN) as fault:
            said = await ends_well(program, HERE)
        if not fault.struck:
            assert said == ""
            break
        struck += fault.struck
    assert struck
    assert await ends_well(program, HERE) == ""


async def test_r01_a_peer_that_finds_no_memory_says_so() -> None:
    """One of the two ends is short of it: the sender itself, or the one that fetches."""
    told: set[str] = set()
    async with asyncio.timeout(LIMIT_S):
        for after in range(6):
            async with paired(HERE, QUICK) as (client, server):
                with faults.fail("ibv_reg_mr", after=after, times=None, errno=errno.EAGAIN):
                    receiving = asyncio.create_task(server.recv())
                    try:
                        await client.send(bytes(2 << 20))
                        await client.flush()
                    except aiordma.RdmaError as error:
                        told.add(str(error))
                    receiving.cancel()
                    with contextlib.suppress(aiordma.RdmaError, asyncio.CancelledError):
                        (await receiving).release()
    assert any("ibv_reg_mr: EAGAIN" in each for each in told), told
    assert any("it ran out of memory" in each for each in told), told
    assert not any("without a word" in each for each in told), told


async def test_r07_connections_come_and_go_and_leave_nothing() -> None:
    """A thousand; after the second half the process has the memory of the first."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    async def many(listener: aiordma.Listener) -> int:
        for _ in range(25):
            ends = await asyncio.gather(*(meet(listener, HERE) for _ in range(20)))
            await part(*(end for pair in ends for end in pair))
        gc.collect()
        return resident()

    async with asyncio.timeout(LIMIT_S), aiordma.listen(HERE, 0) as listener:
        before = await many(listener)
        after = await many(listener)
    assert after - before < 4 << 20


# S1, S3, S8


async def test_s01_private_data_of_every_length_is_refused_or_taken() -> None:
    rng = random.Random(1)
    async with asyncio.timeout(LIMIT_S), aiordma.listen(HERE, 0, config=QUICK) as listener:
        serving = asyncio.create_task(take_all(listener))
        with EventChannel() as events:
            for case in range(120):
                end = End(await resolved(events, HERE, listener.port)).build()
                data = rng.randbytes(case % 57)
                with contextlib.suppress(aiordma.RdmaError):
                    await end.cm_id.connect(
                        ConnectionParameter(4, 4, 6, 6), private_data=data, timeout=5
                    )
                end.close()
        serving.cancel()
        await asyncio.wait([serving])
        await still_accepts(listener, HERE)


async def take_all(listener: aiordma.Listener) -> None:
    async for conn in listener:
        conn.abort()


@pytest.mark.parametrize("exponent", [8, 31])
async def test_s03_timers_of_a_client_do_not_hold_the_server(exponent: int) -> None:
    """However long its adapter's would wait, a client without power is noticed when it is due."""
    own = ConnectionConfig(keepalive_s=0.1, idle_timeout_s=0.6, close_timeout_s=0.5)
    theirs = ConnectionConfig(ack_timeout=exponent, close_timeout_s=0.5)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT_S), aiordma.listen(HERE, 0, config=own) as listener:
        client, server = await meet(listener, HERE, config=theirs)
        await are_alive((client, server))
        begun = loop.time()
        faults.end_connection(client, silently=True)
        with pytest.raises(aiordma.ConnectionLostError):
            await server.recv()
        assert loop.time() - begun < 5
        await part(client, server)
        await still_accepts(listener, HERE)


async def test_s03_a_client_that_retries_for_ever_does_not_make_the_server() -> None:
    raw = ConnectionConfig(raw=True, close_timeout_s=1)
    async with asyncio.timeout(LIMIT_S), aiordma.listen(HERE, 0, config=raw) as listener:
        with EventChannel() as events:
            end = End(await resolved(events, HERE, listener.port)).build()
            connecting = await begun(end.cm_id.connect(ConnectionParameter(4, 4, 7, 7)))
            server = await listener.accept()
            await connecting
            assert qp_of(server).query().retry_cnt <= 6
            end.close()
            await server.close()


async def test_s08_a_peer_cannot_end_the_keys_of_others() -> None:
    """SEND with invalidation of a key that is not the sender's own: its connection ends."""
    raw = ConnectionConfig(raw=True, close_timeout_s=1)
    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.listen(HERE, 0, config=raw) as listener,
        paired(HERE) as (client, victim),
        victim.expose(bytearray(b"secret"), read=True) as region,
    ):
        with EventChannel() as events:
            end = End(await resolved(events, HERE, listener.port)).build()
            connecting = await begun(end.cm_id.connect(ConnectionParameter(4, 4, 6, 6)))
            server = await listener.accept()
            await connecting
            memory = end.region(16)
            end.qp.post_send(
                SendWR(
                    wr_id=1,
                    opcode=Opcode.SEND_WITH_INV,
                    sg_list=[SGE(memory, 0, 16)],
                    invalidate_rkey=region.rkey,
                )
            )
            (completion,) = await polled(end.cq, 1)
            assert not completion.ok
            with pytest.raises(aiordma.ConnectionLostError):
                await server.recv()
            end.close()
            await server.close()
        into = bytearray(6)
        await client.read(region, into)
        assert into == b"secret"
