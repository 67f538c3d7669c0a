"""A KV cache that a prefill process writes into the memory of a decode process, block by block.

NIXL and Mooncake, the transfer engines of servers for language models, work like this. The queue
pairs are brought up over a TCP connection of the program, which then carries the requests. The
decode process chooses blocks of its cache for each request; the prefill process computes one layer
after another, and writes each into those blocks by RDMA WRITE while it computes the next. The last
write carries the number of the request as an immediate, which wakes the task that waits for it.
Here the bytes of a layer are made up, and the decode process checks all of them.

It needs InfiniBand or RoCE: on iWARP only the connection manager connects queue pairs. On a machine
without a device:

    python -m aiordma_softroce -- bash -c '
        python examples/kv_transfer.py decode &
        sleep 2; python examples/kv_transfer.py prefill --host 127.0.0.1; wait'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiordma
from aiordma.verbs import (
    SGE,
    Access,
    BringUp,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    Opcode,
    ProtectionDomain,
    QPInitAttr,
    QueuePair,
    RecvWR,
    SendFlags,
    SendWR,
)

LAYERS = 4
BLOCK = 16 << 10  # bytes of a block of a layer
BLOCKS = 64  # of the cache, in each layer
DEPTH = 64  # requests of the queue pair under way
NOTICES = 16  # receives for immediates


def content(request: int, layer: int, block: int) -> bytes:
    """The bytes of a block: a program has keys and values of tokens here."""
    text = f"request {request}, layer {layer}, block {block}; ".encode()
    return (text * (BLOCK // len(text) + 1))[:BLOCK]


def place(layer: int, block: int) -> int:
    """Where a block is in a cache."""
    return (layer * BLOCKS + block) * BLOCK


class End:
    """A queue pair, and a cache that is registered once for all transfers."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        context = stack.enter_context(aiordma.devices()[0].open())
        self.pd = stack.enter_context(ProtectionDomain(context))
        channel = stack.enter_context(CompletionChannel(context))
        self.cq = stack.enter_context(CompletionQueue(context, DEPTH + NOTICES, channel))
        attr = QPInitAttr(send_cq=self.cq, max_send_wr=DEPTH, max_recv_wr=NOTICES)
        self.qp = stack.enter_context(QueuePair(self.pd, attr))
        access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
        self.cache = stack.enter_context(MemoryRegion(self.pd, LAYERS * BLOCKS * BLOCK, access))


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The words of the peer, until it closes the TCP connection."""
    with contextlib.suppress(ConnectionError):
        while line := await reader.readline():
            yield json.loads(line)


def say(writer: asyncio.StreamWriter, **words: Any) -> None:
    """Say something to the peer."""
    if not writer.is_closing():
        writer.write(json.dumps(words).encode() + b"\n")


# The decode process


class Decode:
    """The end that owns the cache, and gives requests to the prefill process."""

    def __init__(self, end: End, writer: asyncio.StreamWriter) -> None:
        self._end = end
        self._writer = writer
        self._free = list(range(BLOCKS))
        self._enough = asyncio.Condition()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def run(self, reader: asyncio.StreamReader, requests: int) -> None:
        """Have `requests` requests computed, as many at a time as the cache has blocks for."""
        end = self._end
        up = BringUp(end.qp)
        end.qp.post_recv([RecvWR(0) for _ in range(NOTICES)])
        await up.exchange(reader, self._writer)
        say(self._writer, addr=end.cache.addr, rkey=end.cache.rkey)
        helpers = [asyncio.create_task(self._notice()), asyncio.create_task(self._watch(reader))]
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(1, requests + 1):
                    group.create_task(self._serve(number, 5 + number % 11))
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)

    async def _serve(self, number: int, count: int) -> None:
        blocks = await self._take(count)
        arrived = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if self._writer.is_closing():
                raise ConnectionResetError("the prefill process is gone")
            say(self._writer, request=number, blocks=blocks)
            await arrived  # the keys and values of all tokens are here
            for layer in range(LAYERS):
                for block in blocks:
                    start = place(layer, block)
                    if self._end.cache.view[start : start + BLOCK] != content(number, layer, block):
                        raise ValueError(f"request {number}: layer {layer}, block {block}")
            print(f"request {number}: {count} blocks of {LAYERS} layers, right", flush=True)
        finally:
            del self._waiting[number]
            self._free += blocks
            async with self._enough:
                self._enough.notify_all()

    async def _take(self, count: int) -> list[int]:
        async with self._enough:
            await self._enough.wait_for(lambda: len(self._free) >= count)
            blocks, self._free = self._free[:count], self._free[count:]
        return blocks

    async def _notice(self) -> None:
        """Take the immediates: each ends the wait of a request."""
        async for completion in self._end.cq:
            if not completion.ok:
                return  # flushed
            self._end.qp.post_recv(RecvWR(0))
            arrived = self._waiting.get(completion.imm_data or 0)
            if arrived is not None and not arrived.done():
                arrived.set_result(None)

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Watch for the end of the TCP connection: a queue pair would wait for ever."""
        async for _ in lines(reader):
            pass
        for arrived in self._waiting.values():
            if not arrived.done():
                arrived.set_exception(ConnectionResetError("the prefill process is gone"))
        self._writer.close()
        self._end.qp.to_error()


async def decode(args: argparse.Namespace) -> None:
    """Wait for a prefill process, and give it requests."""
    caller: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await caller.put((reader, writer))

    with contextlib.ExitStack() as stack:
        end = End(stack)
        server = await asyncio.start_server(accept, args.host or "0.0.0.0", args.port)
        stack.callback(server.close)
        print("listening on", *server.sockets[0].getsockname()[:2], flush=True)
        reader, writer = await caller.get()
        try:
            await Decode(end, writer).run(reader, args.requests)
        finally:
            writer.close()


# The prefill process


async def compute(end: End, where: dict[str, Any], number: int, blocks: list[int]) -> None:
    """Compute the layers of a request, and write each into the blocks of the decode process."""
    for layer in range(LAYERS):
        for block in blocks:
            start = place(layer, block)
            end.cache.view[start : start + BLOCK] = content(number, layer, block)
        # One doorbell and one completion per layer. The adapter keeps the order, so the immediate
        # of the last write says that all of them have arrived.
        writes = [
            SendWR(
                sg_list=[SGE(end.cache, place(layer, block), BLOCK)],
                opcode=Opcode.RDMA_WRITE,
                send_flags=SendFlags(0),
                remote_addr=where["addr"] + place(layer, block),
                rkey=where["rkey"],
            )
            for block in blocks
        ]
        if layer == LAYERS - 1:
            writes[-1].opcode, writes[-1].imm_data = Opcode.RDMA_WRITE_WITH_IMM, number
        await end.qp.submit(writes)


async def prefill(args: argparse.Namespace) -> None:
    """Serve a decode process until it closes the connection."""
    reader, writer = await asyncio.open_connection(args.host, args.port)
    count = 0
    with contextlib.ExitStack() as stack:
        try:
            end = End(stack)
            await BringUp(end.qp).exchange(reader, writer)
            words = lines(reader)
            where = await anext(words)
            async with asyncio.TaskGroup() as group:
                async for each in words:
                    group.create_task(compute(end, where, each["request"], each["blocks"]))
                    count += 1
        finally:
            writer.close()
    print(f"{count} requests computed")


def main() -> None:
    """Run the decode or the prefill process."""
    parser = argparse.ArgumentParser(prog="kv_transfer.py", description="Transfer a KV cache.")
    parts = parser.add_subparsers(required=True, metavar="decode | prefill")
    for part, text in ((decode, "own the cache"), (prefill, "fill the cache of a decode process")):
        options = parts.add_parser(part.__name__, help=text)
        options.set_defaults(part=part)
        options.add_argument("--host", default="" if part is decode else "10.80.0.1")
        options.add_argument("--port", type=int, default=18524)
    parts.choices["decode"].add_argument("--requests", type=int, default=12)
    args = parser.parse_args()
    asyncio.run(args.part(args))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
    except (OSError, ExceptionGroup) as error:
        sys.exit(f"kv_transfer.py: {error}")
