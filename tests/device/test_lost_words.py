"""How a connection ended is told apart by what its calls raise."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

import aiordma
from aiordma.endpoint.wire import FrameKind
from tests.device.meeting import meet
from tests.device.test_two_processes import peer

pytestmark = pytest.mark.device

LIMIT_S = 20


async def test_b04_close_abort_and_violation_read_differently(address: str) -> None:
    async with asyncio.timeout(3 * LIMIT_S), aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        await client.send(b"last")
        await client.close()
        assert bytes(await server.recv()) == b"last"
        with pytest.raises(aiordma.ConnectionEndedError):
            await server.recv()
        await server.close()

        client, server = await meet(listener, address)
        await client.send(b"last")
        client.abort()
        assert bytes(await server.recv()) == b"last"
        for call in (server.recv, lambda: server.send(b"x")):
            with pytest.raises(aiordma.ConnectionLostError, match="peer aborted") as caught:
                await call()
            assert "abort()" in caught.value.hint
        await asyncio.gather(client.wait_closed(), server.close())

        client, server = await meet(listener, address)
        client._sender.control(FrameKind.DONE, 77)  # of an exchange that is not open
        with pytest.raises(aiordma.ProtocolError, match="exchange 77"):
            await server.recv()
        with pytest.raises(aiordma.ConnectionLostError, match="without a word") as caught:
            await client.recv()
        assert caught.value.hint
        await asyncio.gather(client.close(), server.close())


async def test_b04_a_crash_reads_as_a_crash(address: str, request: pytest.FixtureRequest) -> None:
    async with asyncio.timeout(3 * LIMIT_S):
        loop = str(request.config.getoption("--loop"))
        async with peer("echo", address, loop) as (port, pid):
            client = await aiordma.connect(address, port)
            await client.send(b"x")
            assert bytes(await client.recv()) == b"x"
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(aiordma.ConnectionLostError) as caught:
                await client.recv()
            # Its kernel says goodbye; or a request finds nobody, which is then the cause.
            error = caught.value
            assert "without a word" in str(error) or error.__cause__ is not None
            assert "aborted" not in str(error)
            assert error.hint
            await client.close()
