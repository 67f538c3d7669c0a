"""Keys: clients with the key, with another one and with none, while the keys are replaced.

Whoever is connected has the key, at both sides, whatever gets lost, and wherever a client leaves;
and nobody who has it is refused for it.
"""

from __future__ import annotations

import asyncio
import contextlib

import aiordma
from tests.simulation.common import (
    ADDRESS,
    BROKEN,
    OTHER,
    count_of,
    settings,
    unless_broken,
    within_turns,
)
from tests.simulation.world import World

__all__ = ["keys"]

_SECRETS = {name: (name * 32).encode()[:32] for name in ("one", "two", "three")}
_OTHER = b"nobody has this secret in common"


def _only(*names: str) -> dict[str, bytes]:
    return {name: _SECRETS[name] for name in names}


class _Place:
    """A listener whose keys are replaced, and who knows which it had at any time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys = aiordma.Keys(_only("one"))
        self.config = aiordma.ConnectionConfig(keys=self.keys)
        self.greeted = 0

    async def serve(self, connection: aiordma.Connection) -> None:
        """Greet a client that has proved itself."""
        name = connection.get_extra_info("key_id")
        self.world.check(name in _SECRETS, f"a client with key {name!r} was accepted")
        self.greeted += 1
        with contextlib.suppress(*BROKEN):
            await connection.send(name.encode())
            await connection.recv()  # until the client leaves

    async def replace(self, own: aiordma.Keys) -> None:
        """Give all a new key, in the order in which nobody is refused."""
        for old, new in (("one", "two"), ("two", "three")):
            await asyncio.sleep(self.world.draw("before a key", 30) / 1000)
            self.keys.replace(_only(old, new))
            own.replace(_only(new, old))
            # Who has begun with the old key has come to its end, or will not.
            await asyncio.sleep(30)
            self.keys.replace(_only(new))


async def _come(world: World, place: _Place, port: int, kind: str, own: aiordma.Keys) -> None:
    """Connect as a client of a kind, stay for a greeting, and leave; now and then at once."""
    config = settings(world)
    config = {
        "right": aiordma.ConnectionConfig(keys=own, recv_depth=config.recv_depth),
        "wrong": aiordma.ConnectionConfig(keys=aiordma.Keys({"one": _OTHER})),
        "none": config,
    }[kind]
    source = world.one_of("adapter", (None, (OTHER, 0)))

    async def visit() -> None:
        async with aiordma.connect(ADDRESS, port, config=config, local_addr=source) as connection:
            world.check(kind == "right", f"a client with {kind} key is connected")
            with await connection.recv() as message:
                name = connection.get_extra_info("key_id")
                world.check(bytes(message) == name.encode(), "the two sides have different keys")

    try:
        if world.once_in("patient", 3):
            await within_turns(world.draw("turns", 60), visit())
        else:
            await world.within(max(world.patience, 15), "a visit", visit())
    except aiordma.AuthenticationError:
        world.check(kind != "right", "a client with the key was refused")
    except aiordma.ConnectionEndedError:
        return


async def keys(world: World) -> None:
    """A listener with keys, and clients of all kinds."""
    place = _Place(world)
    own = aiordma.Keys(_only("one"))

    async def come_again() -> None:
        for _ in range(count_of(world, "visits", 4)):
            kind = world.one_of("kind", ("right", "right", "wrong", "none"))
            with unless_broken(world):
                await _come(world, place, server.port, kind, own)
            await asyncio.sleep(world.draw("pause", 20) / 5_000)

    world.may_log += ("refused", "further refused clients")
    async with (
        aiordma.serve(place.serve, ADDRESS, 0, config=place.config) as server,
        asyncio.TaskGroup() as tasks,
    ):
        if world.draw("replaces", 2):
            tasks.create_task(place.replace(own))
        for _ in range(count_of(world, "clients", 4)):
            tasks.create_task(come_again())
