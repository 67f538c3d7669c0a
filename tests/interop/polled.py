"""A queue pair on an extended completion queue: posts, and a task that polls for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

from aiordma.verbs import SGE, Opcode, RecvWR, SendWR, WorkCompletion
from tests.device.bringing_up import HandMade


class Polled:
    """The awaited operations of a queue pair, over a queue that a program has to poll."""

    def __init__(self, end: HandMade) -> None:
        self._end = end
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[WorkCompletion]] = {}

    async def run(self) -> None:
        """Give each completion to the task that waits for it."""
        cq = self._end.cq
        while True:
            cq.req_notify()
            while completions := cq.poll():
                for each in completions:
                    self._waiting.pop(each.wr_id).set_result(each)
            await self._end.channel.get_cq_event()
            cq.ack_events()

    def _expect(self) -> tuple[int, asyncio.Future[WorkCompletion]]:
        number = next(self._numbers)
        future: asyncio.Future[WorkCompletion] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        return number, future

    async def recv(self, piece: SGE) -> WorkCompletion:
        number, future = self._expect()
        self._end.qp.post_recv(RecvWR(number, [piece]))
        return await future

    async def _send(self, opcode: Opcode, piece: SGE, addr: int, rkey: int, **more: Any) -> None:
        number, future = self._expect()
        request = SendWR(number, [piece], opcode, remote_addr=addr, rkey=rkey, **more)
        self._end.qp.post_send(request)
        if not (completion := await future).ok:
            raise completion.error()

    async def read(self, piece: SGE, addr: int, rkey: int) -> None:
        await self._send(Opcode.RDMA_READ, piece, addr, rkey)

    async def write(self, piece: SGE, addr: int, rkey: int, imm: int | None = None) -> None:
        if imm is None:
            await self._send(Opcode.RDMA_WRITE, piece, addr, rkey)
        else:
            await self._send(Opcode.RDMA_WRITE_WITH_IMM, piece, addr, rkey, imm_data=imm)

    async def fetch_add(self, piece: SGE, addr: int, rkey: int, add: int) -> None:
        await self._send(Opcode.ATOMIC_FETCH_AND_ADD, piece, addr, rkey, compare_add=add)

    async def compare_swap(self, piece: SGE, addr: int, rkey: int, old: int, new: int) -> None:
        await self._send(Opcode.ATOMIC_CMP_AND_SWP, piece, addr, rkey, compare_add=old, swap=new)


@contextlib.asynccontextmanager
async def polled(end: HandMade) -> AsyncIterator[Polled]:
    """The end's queue pair, polled during the block."""
    operations = Polled(end)
    polling = asyncio.create_task(operations.run())
    try:
        yield operations
    finally:
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling
