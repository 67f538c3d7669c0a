"""Faults of the library that seeds of the simulation have found, each in a program of its own."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.fabric.launching import launch

_HEAD = """
import asyncio, errno, gc
import aiordma
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
            config = aiordma.DatagramConfig(send_depth=1)
            lost = asyncio.get_running_loop().create_future()

            class Protocol(asyncio.DatagramProtocol):
                def connection_lost(self, exc):
                    lost.set_result(exc)

            there, _ = await aiordma.create_datagram_endpoint(
                asyncio.DatagramProtocol, (HOST, 0))
            near, _ = await aiordma.create_datagram_endpoint(
                Protocol, (HOST, 0), there.get_extra_info("sockname")[:2], config=config)
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
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_found(name: str) -> None:
    program = _HEAD + textwrap.dedent(_PROGRAMS[name]) + "\nrun(main)\n"
    done = launch("--", sys.executable, "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    assert "unclosed" not in done.stderr
