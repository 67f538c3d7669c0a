"""Datagrams: endpoints that send to one another, and may lose what they send, but nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from unittest import mock

import aiordma
from aiordma.datagram import port
from tests.simulation.common import ADDRESS, OTHER, count_of, is_broken, pattern, unless_broken
from tests.simulation.world import World

__all__ = ["datagrams"]

_HEAD = 8


class _Protocol(asyncio.DatagramProtocol):
    """Answers, or keeps what it gets."""

    def __init__(self, world: World, *, answers: bool) -> None:
        self.world = world
        self.answers = answers
        self.got: Counter[bytes] = Counter()
        self.transport: Any = None
        self.ended = asyncio.get_running_loop().create_future()
        self.made = self.lost = 0
        self.came = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        """The beginning, which comes once."""
        self.made += 1
        self.transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        """A datagram has come whole, or not at all."""
        check = self.world.check
        check(not self.lost, "a datagram after connection_lost()")
        number = int(bytes(data[:_HEAD]))
        check(data[_HEAD:] == pattern(number, len(data) - _HEAD), "a datagram has other bytes")
        self.got[bytes(data[:_HEAD])] += 1
        self.came.set()
        if self.answers:
            self.transport.sendto(data, address)

    def error_received(self, exc: Exception) -> None:
        """What could not be sent."""
        self.world.check(self.world.may_delay, f"error_received({exc!r})")
        self.came.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, which comes once."""
        self.lost += 1
        self.world.check(exc is None or self.world.may_break, f"connection_lost({exc!r})")
        if not self.ended.done():
            self.ended.set_result(None)


async def datagrams(world: World) -> None:
    """A service that answers, and clients that ask it, a few at a time."""
    with mock.patch.object(port, "SEND_DEPTH", world.one_of("send_depth", (64, 2, 1))):
        await _datagrams(world)


async def _datagrams(world: World) -> None:
    config = aiordma.DatagramConfig(
        recv_depth=world.one_of("recv_depth", (256, 4, 1)),
        # The connection manager repeats a request that got lost after four seconds.
        resolve_timeout_s=40.0 if world.may_delay else 5.0,
    )

    async def client(number: int, port: int) -> None:
        host = world.one_of("other adapter", (ADDRESS, OTHER))
        opening = aiordma.create_datagram_endpoint(
            lambda: _Protocol(world, answers=False), (host, 0), (ADDRESS, port), config=config
        )
        transport, protocol = await world.within(85 + world.patience, "opening", opening)
        try:
            await ask(number, transport, protocol)
        finally:
            if world.once_in("aborts", 4):
                transport.abort()
            else:
                transport.close()
            if world.once_in("aborts then", 4):
                transport.abort()
            await world.within(15 + world.patience, "the end", _awaited(protocol.ended))
            await asyncio.sleep(0)
            world.check(protocol.made == protocol.lost == 1, "an end was told twice, or never")

    async def ask(number: int, transport: Any, protocol: _Protocol) -> None:
        sent: set[bytes] = set()
        for index in range(count_of(world, "datagrams", 12)):
            name = number * 100 + index
            head = b"%8d" % name
            transport.sendto(head + pattern(name, world.draw("size", 900)))
            sent.add(head)
            if world.draw("waits", 2):
                protocol.came.clear()
                # It may get lost where receives run out, and on the wire.
                try:
                    async with asyncio.timeout(0.3):
                        await protocol.came.wait()
                except TimeoutError:
                    world.check(lossy, "a datagram got lost that had room everywhere")
        await asyncio.sleep(0.1)
        if not world.may_break:
            await again(number, transport, protocol, sent)
        world.check(set(protocol.got) <= sent, "an answer to what was not asked")
        twice = [head for head, count in protocol.got.items() if count > 1]
        world.check(world.may_delay or not twice, f"{twice} came twice")
        if not lossy:
            world.check(set(protocol.got) == sent, "an answer is missing")

    async def again(number: int, transport: Any, protocol: _Protocol, sent: set[bytes]) -> None:
        """Whatever got lost, an endpoint goes on: who asks again and again has an answer."""
        for index in range(50, 90):
            name = number * 100 + index
            head = b"%8d" % name
            sent.add(head)
            transport.sendto(head)
            await asyncio.sleep(0.3)
            if head in protocol.got:
                return
        world.check(False, "an endpoint does not go on")

    clients = count_of(world, "clients", 3)
    lossy = world.may_delay or config.recv_depth < 12 * clients
    opening = aiordma.create_datagram_endpoint(
        lambda: _Protocol(world, answers=True), (ADDRESS, 0), config=config
    )
    with unless_broken(world):
        transport, protocol = await world.within(85 + world.patience, "opening", opening)
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(clients):
                    port = transport.get_extra_info("sockname")[1]
                    tasks.create_task(client(number, port))
        except BaseExceptionGroup as group:
            if not is_broken(world, group) or not world.may_break:
                raise
        finally:
            transport.close()
            await world.within(15 + world.patience, "the end", _awaited(protocol.ended))
        world.check(protocol.made == protocol.lost == 1, "an end was told twice, or never")


async def _awaited(future: asyncio.Future[None]) -> None:
    await future
