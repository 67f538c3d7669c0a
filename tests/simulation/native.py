"""Native: verbs and connection events by hand, with tasks that leave in the moment of a turn."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from types import TracebackType
from typing import Self

import aiordma
from aiordma.cm import ConnectionEvent, ConnectionId, ConnectionParameter, EventChannel, EventType
from aiordma.verbs import (
    SGE,
    Access,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    Opcode,
    ProtectionDomain,
    QPInitAttr,
    QueuePair,
    SendWR,
)
from tests.simulation.common import ADDRESS, BROKEN, count_of, unless_broken, within_turns
from tests.simulation.world import World

__all__ = ["native"]

_LOAN = struct.Struct("!QI")  # address and key of the server's memory
_PARAMETER = ConnectionParameter(1, 1, 7, 7)
#: Bytes of a write.
_SIZE = 64
#: Writes of a task beside a list that waits for room.
_MANY = 60


class _Side:
    """One side of a connection, with all that its queue pair needs."""

    def __init__(self, cm_id: ConnectionId, depth: int) -> None:
        self.cm_id = cm_id
        self.depth = depth
        self._stack = contextlib.ExitStack()
        own = self._stack.enter_context
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            own(cm_id)
            context = cm_id.context
            assert context is not None
            pd = own(ProtectionDomain(context))
            channel = own(CompletionChannel(context))
            cq = own(CompletionQueue(context, 2 * depth, channel))
            attr = QPInitAttr(send_cq=cq, max_send_wr=depth, max_recv_wr=1)
            self.qp: QueuePair = own(cm_id.create_qp(pd, attr))
            access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
            self.memory = own(MemoryRegion(pd, _SIZE, access))
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all, the last first."""
        self._stack.close()


class _Server:
    """Accepts who comes; several tasks read its events, and some of them leave."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sides: list[_Side] = []
        self.events = EventChannel()
        try:
            self.listener = ConnectionId(self.events)
        except BaseException:
            self.events.close()
            raise

    def listen(self) -> None:
        """Begin to listen."""
        self.listener.bind_addr((ADDRESS, 0))
        self.listener.listen()

    async def read(self) -> None:
        """Serve each event that comes."""
        while True:
            await self.serve(await self.events.get_event())

    async def read_for(self, turns: int) -> None:
        """Wait for an event for a few turns of the loop, and leave."""
        event = await within_turns(turns, self.events.get_event())
        if event is not None:
            await self.serve(event)

    async def serve(self, event: ConnectionEvent | None) -> None:
        """Accept a client that asks."""
        assert event is not None
        event.ack()
        if event.type != EventType.CONNECT_REQUEST:
            return
        assert event.connection_id is not None
        with contextlib.suppress(*BROKEN):
            side = _Side(event.connection_id, 2)
            self.sides.append(side)
            loan = _LOAN.pack(side.memory.addr, side.memory.rkey)
            await event.connection_id.accept(_PARAMETER, private_data=loan)

    def close(self) -> None:
        """Close all that is open."""
        for side in self.sides:
            side.__exit__(None, None, None)
        self.listener.close()
        self.events.close()


class _Client:
    """Writes to the server's memory, with several tasks."""

    def __init__(self, world: World, side: _Side, loan: bytes) -> None:
        self.world = world
        self.side = side
        self.address, self.key = _LOAN.unpack_from(loan)
        self.goes_on = self.over = False

    async def write(self) -> None:
        """Write once."""
        await self.side.qp.write(SGE(self.side.memory, 0, _SIZE), self.address, self.key)

    async def writes(self) -> None:
        """Write again and again, as long as others wait."""
        for _ in range(_MANY):
            if self.goes_on:
                await self.write()
        self.over |= self.goes_on

    async def all_at_once(self) -> None:
        """Post a list that needs all places of the queue."""
        memory = self.side.memory
        one = SendWR(
            sg_list=[SGE(memory, 0, 8)], opcode=Opcode.RDMA_WRITE,
            remote_addr=self.address, rkey=self.key,
        )  # fmt: skip
        async with asyncio.timeout(self.world.patience):
            await self.side.qp.submit([one] * self.side.depth)

    async def list_beside_writes(self) -> None:
        """A list has its turn, although others write on and on."""
        self.goes_on, self.over = True, False
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.side.depth + 1):
                tasks.create_task(self.writes())
            for _ in range(self.world.draw("before the list", 5)):
                await asyncio.sleep(0)
            await self.all_at_once()
            self.goes_on = False
        assert not self.over, "a list has waited until others had nothing more to write"

    async def leaves(self) -> None:
        """Tasks in line for room leave it."""
        await asyncio.gather(
            *(
                within_turns(self.world.draw("turns", 12), self.write())
                for _ in range(self.side.depth + 1 + self.world.draw("more", 4))
            )
        )


async def native(world: World) -> None:
    """A server and clients, each with a connection of its own."""

    async def connect(channel: EventChannel, port: int) -> tuple[_Side, bytes]:
        cm_id = ConnectionId(channel)
        try:
            await cm_id.resolve_addr((ADDRESS, port))
            await cm_id.resolve_route()
            side = _Side(cm_id, 1 + world.draw("depth", 4))
        except BaseException:
            cm_id.close()
            raise
        try:
            event = await cm_id.connect(_PARAMETER)
        except BaseException:
            side.__exit__(None, None, None)
            raise
        return side, event.private_data

    async def client(port: int) -> None:
        with unless_broken(world), contextlib.closing(EventChannel()) as channel:
            side, loan = await world.within(world.patience, "connecting", connect(channel, port))
            with side:
                each = _Client(world, side, loan)
                for _ in range(count_of(world, "rounds", 3)):
                    await world.one_of("way", (each.leaves, each.list_beside_writes))()
                    await each.all_at_once()

    async def late_client(port: int) -> None:
        """Comes while the listener closes: the answer is yes or no, but there is one."""
        with unless_broken(world), contextlib.closing(EventChannel()) as channel:
            try:
                call = connect(channel, port)
                side, _ = await world.within(world.patience, "connecting", call)
            except aiordma.ConnectionRejectedError:
                return
            side.__exit__(None, None, None)

    async def served(server: _Server) -> None:
        port = server.listener.source_port
        async with asyncio.TaskGroup() as tasks:
            for _ in range(world.draw("impatient readers", 5)):
                tasks.create_task(server.read_for(world.draw("reads for", 60)))
                await asyncio.sleep(0)
            reading = tasks.create_task(server.read())
            async with asyncio.TaskGroup() as clients:
                for _ in range(count_of(world, "clients", 3)):
                    clients.create_task(client(port))
            reading.cancel()
        async with asyncio.TaskGroup() as clients:
            for _ in range(world.draw("late clients", 5)):
                clients.create_task(late_client(port))
            for _ in range(world.draw("closes in", 30)):
                await asyncio.sleep(0)
            server.listener.close()

    with unless_broken(world):
        server = _Server(world)
        try:
            server.listen()
            await served(server)
        finally:
            server.close()
