"""Both ends of a conversation that every version of the library can have.

Usage: older_talk.py serve PORT | older_talk.py call PORT

It is run with PYTHONPATH, one end with an older version, and uses only what that version has.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import struct
import sys
from typing import Any

import aiordma

_LIMIT_S = 60
#: Through a slot, in fragments, into a landing, and fetched by the receiver.
SIZES = (0, 1, 60, 4_000, 4_100, 20_000, 65_536, 300_000, 1 << 20, 5_000_000)
_SEED = 20_261_130
_MANY = 400
_WORD = struct.Struct("!Q")


def _body(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def _name(region: aiordma.RemoteRegion) -> bytes:
    """The bytes of a name that every version understands."""
    if "version" in inspect.signature(region.to_bytes).parameters:
        return region.to_bytes(version=1)  # type: ignore[call-arg, unused-ignore]
    return region.to_bytes()


async def _echo(conn: aiordma.Connection) -> None:
    async for message in conn:
        await conn.send(bytes(message), imm=message.imm)


async def _say(conn: aiordma.Connection) -> None:
    rng = random.Random(_SEED)
    for _ in range(3):
        for size in SIZES:
            await conn.send(_body(size), imm=size)
            answer = await conn.recv()
            assert (answer.imm, bytes(answer)) == (size, _body(size)), size
    sizes = [rng.choice(SIZES[:6]) for _ in range(_MANY)]

    async def send() -> None:
        for size in sizes:
            await conn.send(_body(size))

    sending = asyncio.create_task(send())
    for size in sizes:
        assert bytes(await conn.recv()) == _body(size)
    await sending
    pieces: Any = [b"a" * 100, bytearray(b"b" * 100_000), b""]
    await conn.send(pieces)
    assert bytes(await conn.recv()) == b"".join(pieces)


async def _expose(conn: aiordma.Connection) -> None:
    memory = bytearray(4096)
    atomic = bytes(await conn.recv()) == b"atomics"
    async with conn.expose(memory, read=True, write=True, atomic=atomic) as name:
        await conn.send(_name(name))
        told = await conn.recv()
        assert told.imm == 77, told
        assert bytes(memory[8:3008]) == _body(3000)
        await conn.send(b"seen")
        assert bytes(await conn.recv()) == b"done"
    await conn.send(b"over")
    assert bytes(await conn.recv()) == b"bye"


async def _use(conn: aiordma.Connection) -> None:
    context = conn.pd.context
    atomics = not context.is_iwarp and bool(int(context.attributes.atomic_cap))
    await conn.send(b"atomics" if atomics else b"none")
    region = aiordma.RemoteRegion.from_bytes(bytes(await conn.recv()))
    await conn.write(region, _body(3000), offset=8)
    into = bytearray(3000)
    assert await conn.read(region, into, offset=8) == 3000
    assert into == _body(3000)
    if atomics:
        assert await conn.fetch_add(region, 5) == 0
        assert await conn.compare_swap(region, 5, 9) == 5
    await conn.write(region, b"", imm=77)
    assert bytes(await conn.recv()) == b"seen"
    await conn.send(b"done")
    assert bytes(await conn.recv()) == b"over"
    await conn.send(b"bye")


async def _fail(conn: aiordma.Connection) -> None:
    assert bytes(await conn.recv()) == b"?"
    raise ZeroDivisionError


async def _see_failure(conn: aiordma.Connection) -> None:
    await conn.send(b"?")
    said = ""
    try:
        await conn.recv()
    except aiordma.ConnectionLostError as error:
        said = str(error)
    assert "abort" in said or "without a word" in said, said


async def _handle(request: aiordma.Request) -> bytes:
    body = bytes(request.body)
    if body == b"fail":
        raise aiordma.RequestUnknownError("there is no such call")
    if body == b"rest":
        await asyncio.Event().wait()
    (size,) = _WORD.unpack_from(body)
    return _body(size)


async def _ask(conn: aiordma.Connection) -> None:
    async def one(number: int) -> None:
        size = SIZES[number % 8]
        padding = bytes(SIZES[number // 8 % 8])
        with await conn.request(_WORD.pack(size) + padding, timeout=_LIMIT_S) as answer:
            assert bytes(answer) == _body(size)

    for number in range(64):
        await one(number)
    await asyncio.gather(*map(one, range(600)))
    for body, error, limit in (
        (b"fail", aiordma.RequestUnknownError, _LIMIT_S),
        (b"rest", TimeoutError, 0.05),
    ):
        try:
            await conn.request(body, timeout=limit)
        except error:
            continue
        raise AssertionError(body)
    await one(3)


async def _serve(host: str, port: int) -> None:
    kinds = {b"echo": _echo, b"expose": _expose, b"use": _use, b"say": _say, b"fail": _fail}

    async def handle(conn: aiordma.Connection) -> None:
        await kinds[bytes(await conn.recv())](conn)

    async with (
        aiordma.serve(handle, host, port),
        aiordma.serve_requests(_handle, host, port + 1),
        await aiordma.start_server(_blocks, host, port + 2),
        aiordma.serve(handle, host, port + 3, **_keyed()),
    ):
        print("ready", flush=True)
        await asyncio.Event().wait()


async def _blocks(reader: aiordma.RdmaStreamReader, writer: aiordma.RdmaStreamWriter) -> None:
    while head := await reader.read(_WORD.size):
        head += await reader.readexactly(_WORD.size - len(head))
        writer.write(head + await reader.readexactly(*_WORD.unpack(head)))
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def _call(host: str, port: int) -> None:
    for kind, own in (
        (b"echo", _say), (b"expose", _use), (b"use", _expose), (b"say", _echo),
        (b"fail", _see_failure),
    ):  # fmt: skip
        async with await aiordma.connect(host, port) as conn:
            await conn.send(kind)
            await own(conn)
        print(kind.decode(), flush=True)
    async with await aiordma.connect(host, port + 1) as conn:
        await _ask(conn)
    print("requests", flush=True)
    reader, writer = await aiordma.open_connection(host, port + 2)
    for size in SIZES:
        block = _WORD.pack(size) + _body(size)
        writer.write(block)
        await writer.drain()
        assert await reader.readexactly(len(block)) == block, size
    writer.close()
    await writer.wait_closed()
    print("streams", flush=True)
    await _with_keys(host, port)
    print("keys", flush=True)


def _keyed() -> dict[str, Any]:
    """The arguments of a side with a key; none of a version that knows no keys."""
    if not hasattr(aiordma, "Keys"):
        return {}
    keys = aiordma.Keys({"one": bytes(range(32))})
    return {"config": aiordma.ConnectionConfig(keys=keys)}


async def _with_keys(host: str, port: int) -> None:
    """The side with a key, and the version that knows none, refuse each other with a reason."""
    keyed = _keyed()
    try:
        # The server of port + 3 has a key, if its version knows keys.
        await aiordma.connect(host, port if keyed else port + 3, **keyed)
    except aiordma.ConnectionRejectedError as error:
        refusal = str(error)
    else:
        raise AssertionError
    assert ("has not proved" if keyed else "refused for reason 8") in refusal, refusal


async def _main(role: str, port: str) -> None:
    host = os.environ["AIORDMA_FABRIC_ADDR"]
    print(aiordma.__file__, flush=True)
    async with asyncio.timeout(_LIMIT_S):
        await (_serve if role == "serve" else _call)(host, int(port))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
