"""Arguments of streams: a table of calls and what they refuse; the stream goes on."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

import aiordma
from aiordma import ConnectionConfig, StreamConfig
from tests.device.bad_arguments import (
    LIMIT_S,
    NO_BUFFER,
    NO_DEADLINE,
    NO_INT,
    NO_INT_OR_NONE,
    NO_SECONDS,
    STRIDED,
    Bad,
    no_mistakes,
)  # fmt: skip

pytestmark = pytest.mark.device

CONFIG = StreamConfig(iomap_slots=2)
NO_CONFIG: list[Any] = [5, "x", ConnectionConfig()]


async def echo(reader: Any, writer: Any) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_g05_streams(address: str) -> None:
    async with asyncio.timeout(LIMIT_S * 3):
        server = await aiordma.start_server(echo, address, 0, config=CONFIG)
        port = server.port
        reader, writer = await aiordma.open_connection(address, port, config=CONFIG)
        transport: Any = writer.transport

        async def works() -> None:
            for _ in range(100):  # more than there are credits
                writer.write(b"ping")
                await writer.drain()
                assert await reader.readexactly(4) == b"ping"

        def create(**options: Any) -> Any:
            return aiordma.create_server(asyncio.Protocol, address, 0, **options)

        def connect(**options: Any) -> Any:
            known = {"host": address, "port": port, **options}
            return aiordma.create_connection(asyncio.Protocol, **known)

        buffers = [*NO_BUFFER, 5, True, STRIDED]
        table: list[Bad] = [
            ("write", transport.write, buffers),
            ("writelines", transport.writelines, [5, None, ["x"], [None], [5]]),
            ("set_write_buffer_limits", transport.set_write_buffer_limits, ["x", object(), -1]),
            ("set_write_buffer_limits(low)", lambda x: transport.set_write_buffer_limits(8, x),
             ["x", object(), -1, 9]),
            ("iomap.map", transport.iomap.map, [*NO_BUFFER, True, 0, -1]),
            ("iomap.map(offset)", lambda x: transport.iomap.map(64, x), [*NO_INT, -1, 1 << 63]),
            ("iomap.register", transport.iomap.register, [*NO_BUFFER, True, 0, -1]),
            ("create_server(backlog)", lambda x: create(backlog=x), [*NO_INT_OR_NONE, 0, -1]),
            ("create_server(config)", lambda x: create(config=x), NO_CONFIG),
            ("create_server(family)", lambda x: create(family=x), [99, "x", None, 1.5]),
            ("create_connection(host)", lambda x: connect(host=x), [5, None, b"x"]),
            ("create_connection(port)", lambda x: connect(port=x), [1.5, None, -1, 0, 65536, True]),
            ("create_connection(config)", lambda x: connect(config=x), NO_CONFIG),
            ("create_connection(timeout)", lambda x: connect(timeout=x), NO_DEADLINE),
            ("create_connection(delay)", lambda x: connect(happy_eyeballs_delay=x), NO_SECONDS),
            ("create_connection(local_addr)", lambda x: connect(local_addr=x), [5, "x", ("a",)]),
        ]  # fmt: skip

        async def still_works(name: str) -> None:
            if transport.is_closing():
                pytest.fail(f"{name} ended the stream")
            await works()

        with no_mistakes() as mistakes:
            await works()
            await mistakes.of_waits(table, still_works)
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()


def test_g05_settings() -> None:
    table: list[tuple[Any, str]] = [
        (kind, name)
        for kind in (StreamConfig, ConnectionConfig, aiordma.DatagramConfig)
        for name in kind.__dataclass_fields__
    ]
    with no_mistakes() as mistakes:
        for kind, name in table:
            for wrong in ("5", b"5", object(), [5], -5, math.nan):

                def make(x: Any, kind: Any = kind, name: str = name) -> Any:
                    return kind(**{name: x})

                mistakes.of_call(f"{kind.__name__}.{name}", make, wrong)
