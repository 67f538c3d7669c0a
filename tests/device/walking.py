"""A client that notes which files it passes: walking.py KIND ADDRESS PORT MODULE, in a traced copy.

Prints one JSON object: for each way the entries, in order, as [file, function] for Python and as an
address in MODULE for C.  Python's calls come from `sys.setprofile`, those of C from entries.c.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import aiordma
from aiordma.verbs import safety

BYTE = b"\x5a"


class Walk:
    """The ways of one client.

    Attributes:
        ways: What was entered, by the name of the way.
    """

    def __init__(self, module: str) -> None:
        self.ways: dict[str, list[Any]] = {}
        self._c = ctypes.PyDLL(module)
        self._c.way_entered.restype = ctypes.c_size_t
        self._root = f"{Path(aiordma.__file__).parent}/"

    @contextmanager
    def way(self, name: str) -> Iterator[None]:
        """Note what the block enters, in this thread."""
        seen: dict[tuple[str, str], int] = {}
        root, count = self._root, self._c.way_count

        def note(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(root):
                seen.setdefault((code.co_filename, code.co_qualname), count())

        self._c.way_begin()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._c.way_end()
        # A function of Python that was entered after `number` of C stands behind these.
        entries: list[Any] = []
        done = 0
        for (file, function), number in seen.items():
            entries += [self._c.way_entered(i) for i in range(done, number)]
            done = max(done, number)
            entries.append([file.removeprefix(root), function])
        entries += [self._c.way_entered(i) for i in range(done, count())]
        self.ways[name] = entries


#: Round trips before the one that is noted: the first of a connection carry the greeting's rest.
BEFORE = 3


async def messages(address: str, port: int, walk: Walk) -> None:
    """Connect, send a byte, receive it, close."""
    with walk.way("connect"):
        connection = await aiordma.connect(address, port)
    for _ in range(BEFORE):
        await connection.send(BYTE)
        (await connection.recv()).release()
    with walk.way("send"):
        await connection.send(BYTE)
    with walk.way("receive"):
        message = await connection.recv()
    assert bytes(message) == BYTE
    message.release()
    await connection.flush()  # a completion of the send is not of the close
    with walk.way("close"):
        await connection.close()


async def stream(address: str, port: int, walk: Walk) -> None:
    """Write a byte to a stream, and read it."""
    reader, writer = await aiordma.open_connection(address, port)
    for _ in range(BEFORE):
        writer.write(BYTE)
        assert await reader.readexactly(1) == BYTE
    with walk.way("write"):
        writer.write(BYTE)
    with walk.way("read"):
        data = await reader.readexactly(1)
    assert data == BYTE
    writer.close()
    await writer.wait_closed()


if __name__ == "__main__":
    kind, address, service, module = sys.argv[1:]
    walk = Walk(module)
    client = {"messages": messages, "stream": stream}[kind]
    gc.disable()  # what the collector ends is not of the way
    # Nor is the poll for events that were lost, for which a slow peer leaves time.
    safety._SAFETY_S = safety._IDLE_SAFETY_S = 3600.0
    for _ in range(2):  # the first loads what is loaded late
        asyncio.run(client(address, int(service), walk))
    print(json.dumps(walk.ways))
