"""Faults of the library that seeds of the simulation have found, each in a program of its own."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.fabric.launching import launch

_HEAD = """
import asyncio, contextlib, errno, gc, time
import aiordma, aiordma.datagram.port, aiordma.streams.server
from aiordma.testing import faults

HOST = "127.0.0.1"

def told(loop, context):
    raise SystemExit(f"the loop was told: {context}")

def run(main):
    async def bounded():
        asyncio.get_running_loop().set_exception_handler(told)
        async with asyncio.timeout(8):
            await main()
    asyncio.run(bounded())
"""

_PROGRAMS = {
    # The peer had no credit, and was owed one, which nothing took to it but an answer.
    "a busy program takes as many messages as it says": """
        async def main():
            busy = asyncio.Event()

            async def handler(connection):
                (await connection.recv()).release()
                await busy.wait()

            config = aiordma.ConnectionConfig(recv_depth=2)
            async with aiordma.serve(handler, HOST, 0, config=config) as server:
                async with aiordma.connect(HOST, server.port) as connection:
                    for _ in range(3):
                        await connection.send(b"x")
                        await asyncio.sleep(0.05)
                    busy.set()
    """,
    # A connection was kept for the second in line, who waited for the first.
    "the first in line of a pool gets what is kept for the second": """
        async def main():
            async def handle(request):
                return b""

            async with aiordma.serve_requests(handle, HOST, 0) as server:
                async with aiordma.Pool(HOST, server.port, min_size=0, max_size=1) as pool:
                    async def lend():
                        async with pool.connection() as connection:
                            (await connection.request(b"")).release()

                    async def ask():
                        (await pool.request(b"")).release()

                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(ask())
                        tasks.create_task(lend())
    """,
    "a connection of a pool that is old, and has broken, is given back": """
        async def main():
            async def handle(request):
                await asyncio.sleep(0.2)
                request.connection.abort()

            async with aiordma.serve_requests(handle, HOST, 0) as server:
                async with aiordma.Pool(HOST, server.port, max_lifetime=0.1) as pool:
                    async with pool.connection() as connection:
                        try:
                            await connection.request(b"")
                        except aiordma.ConnectionLostError:
                            await connection.wait_closed()
                        else:
                            raise SystemExit("the request was answered")
                        await asyncio.sleep(0.1)
    """,
    "a post that fails ends an endpoint in which datagrams wait": """
        async def main():
            aiordma.datagram.port.SEND_DEPTH = 1
            lost = asyncio.get_running_loop().create_future()

            class Protocol(asyncio.DatagramProtocol):
                def connection_lost(self, exc):
                    lost.set_result(exc)

            there, _ = await aiordma.create_datagram_endpoint(
                asyncio.DatagramProtocol, (HOST, 0))
            near, _ = await aiordma.create_datagram_endpoint(
                Protocol, (HOST, 0), there.get_extra_info("sockname")[:2])
            with faults.fail("ibv_post_send", after=1, errno=errno.ENOMEM) as fault:
                for _ in range(5):
                    near.sendto(b"x")
                assert isinstance(await lost, OSError)
            assert fault.struck
            there.close()
            await there.wait_closed()
            await near.wait_closed()
    """,
    "an endpoint whose queue cannot be armed leaves nothing": """
        async def main():
            with faults.fail("ibv_req_notify_cq", times=2, errno=errno.EIO) as fault:
                try:
                    await aiordma.create_datagram_endpoint(asyncio.DatagramProtocol, (HOST, 0))
                except OSError as error:
                    assert error.errno == errno.EIO
                else:
                    raise SystemExit("it was made")
            assert fault.struck
            gc.collect()
    """,
    "a send whose queue cannot be armed ends the connection": """
        async def main():
            told = []
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: told.append(context))
            busy = asyncio.Event()

            async def handler(connection):
                await busy.wait()

            config = aiordma.ConnectionConfig(send_depth=1)
            async with aiordma.serve(handler, HOST, 0) as server:
                async with aiordma.connect(HOST, server.port, config=config) as connection:
                    with faults.fail("ibv_req_notify_cq", errno=errno.EIO) as fault:
                        try:
                            async with asyncio.TaskGroup() as tasks:
                                for _ in range(9):
                                    tasks.create_task(connection.send([b"x", bytes(100)]))
                            await connection.flush()
                        except* aiordma.ConnectionLostError as group:
                            error = group.exceptions[0]
                            assert error.__cause__.errno == errno.EIO
                        else:
                            raise SystemExit("the connection goes on")
                    assert fault.struck
                busy.set()
            assert told  # once: the channel has failed
    """,
    "recv() does not tell of the peer's end what this side has closed": """
        async def main():
            closes = asyncio.Event()

            async def handler(connection):
                for _ in range(3):
                    await connection.send(b"x")
                await connection.flush()
                closes.set()

            async with aiordma.serve(handler, HOST, 0) as server:
                connection = await aiordma.connect(HOST, server.port)
                await closes.wait()
                closing = asyncio.create_task(connection.close())
                await asyncio.sleep(0)
                await closing
                try:
                    await connection.recv()
                except aiordma.ResourceClosedError:
                    return
                raise SystemExit("a message was received after close()")
    """,
    "a connection that breaks closes its memory in the order of its age": """
        async def main():
            closed, close = [], aiordma.verbs.MemoryRegion.close
            over = asyncio.Event()

            def noted(region):
                closed.append(region.length)
                close(region)

            async def handler(connection):
                async with contextlib.AsyncExitStack() as leases:
                    for size in sizes:
                        lease = connection.expose(bytearray(size), read=True)
                        await leases.enter_async_context(lease)
                        regions.append(await connection.register(bytearray(size + 1)))
                    await connection.send(b"open")
                    aiordma.verbs.MemoryRegion.close = noted
                    with contextlib.suppress(ConnectionError):
                        await connection.recv()
                    await connection.wait_closed()
                over.set()

            sizes, regions = range(1000, 1800, 20), []
            async with aiordma.serve(handler, HOST, 0) as server:
                connection = await aiordma.connect(HOST, server.port)
                await connection.recv()
                connection.abort()
                await connection.wait_closed()
                await over.wait()
            leased = [size for size in closed if size in sizes]
            own = [size for size in closed if size - 1 in sizes]
            assert list(dict.fromkeys(leased)) == list(sizes), leased
            assert list(dict.fromkeys(own)) == [size + 1 for size in sizes], own
    """,
    "close() raises nothing where a queue cannot be armed": """
        async def main():
            asyncio.get_running_loop().set_exception_handler(lambda _, context: None)

            async def handler(connection):
                async for message in connection:
                    message.release()

            async with aiordma.serve(handler, HOST, 0) as server:
                connection = await aiordma.connect(HOST, server.port)
                with faults.fail("ibv_req_notify_cq", times=None, errno=errno.EIO) as fault:
                    await connection.close()
                assert fault.struck
    """,
    "a task that comes while a message is there stands behind those that wait": """
        async def main():
            sides, over = [], asyncio.Event()

            async def handler(connection):
                sides.append(connection)
                await over.wait()

            async def newcomer(here, there):
                await there.recv()
                return await here.recv()

            async with (
                aiordma.serve(handler, HOST, 0) as server,
                aiordma.connect(HOST, server.port) as here,
                aiordma.connect(HOST, server.port) as there,
            ):
                while len(sides) < 2:
                    await asyncio.sleep(0.01)
                first, second = [asyncio.create_task(here.recv()) for _ in range(2)]
                third = asyncio.create_task(newcomer(here, there))
                await asyncio.sleep(0.01)
                await sides[0].send(b"1")
                await first
                await sides[0].send(b"2")
                await sides[1].send(b"go")
                time.sleep(0.1)  # the loop finds both at once
                await asyncio.sleep(0.1)
                await sides[0].send(b"3")
                assert bytes(await second) == b"2" and bytes(await third) == b"3"
                over.set()
    """,
    # Room came while it was the first in line, and no task was parked on it.
    "a send that was begun and closed lets those behind it send": """
        async def main():
            go, over = asyncio.Event(), asyncio.Event()

            async def handler(connection):
                await go.wait()
                for _ in range(2):
                    (await connection.recv()).release()
                await over.wait()

            config = aiordma.ConnectionConfig(recv_depth=2)
            async with (
                aiordma.serve(handler, HOST, 0, config=config) as server,
                aiordma.connect(HOST, server.port, config=config) as connection,
            ):
                for _ in range(2):
                    await connection.send(b"x")
                begun = connection.send(b"y")
                begun.send(None)
                behind = asyncio.create_task(connection.send(b"z"))
                await asyncio.sleep(0)
                go.set()
                await asyncio.sleep(0.1)
                begun.close()
                async with asyncio.timeout(2):
                    await behind
                over.set()
    """,
    # It stood behind a task that took no message, and told nobody.
    "a task that receives while another one is told of the end is told, too": """
        async def main():
            async def handler(connection):
                async for message in connection:
                    message.release()

            async with (
                aiordma.serve(handler, HOST, 0) as server,
                aiordma.connect(HOST, server.port) as connection,
            ):
                waits = asyncio.create_task(connection.recv())
                await asyncio.sleep(0.05)
                comes = [
                    asyncio.create_task(connection.recv_into(bytearray(8))),
                    asyncio.create_task(connection.recv()),
                ]
                connection.abort()
                for task in waits, *comes:
                    try:
                        await asyncio.wait_for(task, 2)
                    except aiordma.ResourceClosedError:
                        continue
                    raise SystemExit("a message came after the end")
    """,
    "a task whose turn came too early keeps its place": """
        async def main():
            go, over = asyncio.Event(), asyncio.Event()

            async def handler(connection):
                await connection.send(b"x")
                await go.wait()
                await connection.send(bytes(1 << 20))
                await connection.send(b"y")
                await over.wait()

            config = aiordma.ConnectionConfig(recv_depth=2, rendezvous_threshold=0)
            async with (
                aiordma.serve(handler, HOST, 0, config=config) as server,
                aiordma.connect(HOST, server.port, config=config) as connection,
            ):
                (await connection.recv()).release()
                tasks = [asyncio.create_task(connection.recv()) for _ in range(2)]
                await asyncio.sleep(0)
                go.set()  # the announcement of the large message takes the last credit
                sizes = [len(await task) for task in tasks]
                assert sizes == [1 << 20, 1], sizes
                over.set()
    """,
    # Requests that were posted, or waited for room, after the failure waited for ever.
    "native requests end when their queue cannot be armed": """
        import contextlib
        from aiordma import verbs

        async def main():
            told = []
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: told.append(context))
            with contextlib.ExitStack() as stack:
                own = stack.enter_context
                context = own(aiordma.devices()[0].open())
                pd = own(verbs.ProtectionDomain(context))
                channel = own(verbs.CompletionChannel(context))
                cq = own(verbs.CompletionQueue(context, 4, channel))
                qp = own(verbs.QueuePair(pd, verbs.QPInitAttr(send_cq=cq, max_send_wr=1)))
                rights = verbs.Access.LOCAL_WRITE | verbs.Access.REMOTE_WRITE
                memory = own(verbs.MemoryRegion(pd, 64, rights))
                up = verbs.BringUp(qp)
                await up.connect(up.address)
                await qp.write(memory, memory.addr, memory.rkey)

                async def writes():
                    while True:
                        await qp.write(memory, memory.addr, memory.rkey)

                with faults.fail("ibv_req_notify_cq", errno=errno.EIO) as fault:
                    tasks = [writes() for _ in range(3)]
                    ends = await asyncio.gather(*tasks, return_exceptions=True)
                    assert all(isinstance(end, OSError) for end in ends), ends
                assert fault.struck
                assert told
    """,
    # asyncio told the loop of an exception that nobody could have raised.
    "a connection is lost in line for its handshake, and its task is canceled": """
        import ssl

        async def main():
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            begun, writers, told = asyncio.Queue(), [], []
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: told.append(context))

            async def handler(reader, writer):
                await reader.readline()
                task = asyncio.ensure_future(writer.start_tls(context))
                begun.put_nowait((task, writer.transport))
                await asyncio.wait([task])
                task.cancelled() or task.exception()
                writer.close()

            aiordma.streams.server.MOST_TLS_HANDSHAKES = 1
            async with await aiordma.start_server(handler, HOST, 0) as server:
                for _ in range(2):
                    _, writer = await aiordma.open_connection(HOST, server.port)
                    writer.write(b"STARTTLS\\n")
                    writers.append(writer)
                    task, transport = await begun.get()
                faults.end_connection(transport)
                while not transport.is_closing():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.01)  # the protocol is told in a turn of its own
                task.cancel()
                await asyncio.wait([task])
                for writer in writers:
                    writer.transport.abort()
                del task, transport
                gc.collect()
            assert not told, told
    """,
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_found(name: str) -> None:
    program = _HEAD + textwrap.dedent(_PROGRAMS[name]) + "\nrun(main)\n"
    done = launch("--", sys.executable, "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    assert "unclosed" not in done.stderr
