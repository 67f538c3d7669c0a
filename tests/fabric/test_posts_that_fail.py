"""A post that fails is the end of its connection, and each call that waits there is told."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.fabric.launching import launch

_STREAM = """
    import asyncio, ctypes, errno, sys
    import aiordma

    async def main():
        async def serve(reader, writer):
            try:
                await reader.read()
            except aiordma.ConnectionLostError:
                pass
            writer.close()

        async with await aiordma.start_server(serve, "127.0.0.1", 0) as server:
            reader, writer = await aiordma.open_connection("127.0.0.1", server.port)
            reading = asyncio.create_task(reader.read())
            await asyncio.sleep(0)  # it waits
            fault = ctypes.CDLL("libibverbs.so.1").fabric_fault
            fault.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
            fault(b"ibv_post_send", 0, 1, errno.ENOMEM)
            writer.write(b"all")
            try:
                async with asyncio.timeout(5):
                    await reading
            except aiordma.ConnectionLostError as error:
                print(error)
            writer.close()

    factory = None
    if sys.argv[1] == "uvloop":
        import uvloop
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_last_write_of_a_stream(loop: str) -> None:
    program = textwrap.dedent(_STREAM)
    done = launch("--", sys.executable, "-W", "error", "-c", program, loop)
    assert done.returncode == 0, done.stderr
    assert "ibv_post_send: ENOMEM" in done.stdout
