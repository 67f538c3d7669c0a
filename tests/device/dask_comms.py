"""Two comms over the device; and names of distributed, whose functions have no types."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import distributed
from distributed.comm import addressing, core
from distributed.protocol.serialize import Serialize
from distributed.protocol.serialize import deserialize as deserialize_frames

from aiordma.contrib.dask import RdmaComm

Client: Any = distributed.Client
as_completed: Any = distributed.as_completed
connect: Any = core.connect
deserialize: Any = deserialize_frames
get_address_host: Any = addressing.get_address_host
listen: Any = core.listen
resolve_address: Any = addressing.resolve_address
to_serialize: Any = Serialize
wait: Any = distributed.wait


def loc_of(address: str) -> str:
    return f"rdma://{address}:0"


class Served:
    """A listener, and the comms that it has handed over."""

    def __init__(self) -> None:
        self.comms: asyncio.Queue[RdmaComm] = asyncio.Queue()
        self.listener: Any = None

    async def __call__(self, comm: RdmaComm) -> None:
        self.comms.put_nowait(comm)


@contextlib.asynccontextmanager
async def served(where: str, deserialize: bool = True, **options: Any) -> AsyncIterator[Served]:
    served = Served()
    async with listen(where, served, deserialize=deserialize, **options) as served.listener:
        yield served
    while not served.comms.empty():
        await served.comms.get_nowait().close()


@contextlib.asynccontextmanager
async def comms(address: str, deserialize: bool = True) -> AsyncIterator[tuple[RdmaComm, RdmaComm]]:
    """Two connected ends: (client, server)."""
    async with served(loc_of(address), deserialize) as there:
        client = await connect(there.listener.contact_address, deserialize=deserialize)
        server = await there.comms.get()
        try:
            yield client, server
        finally:
            await asyncio.gather(client.close(), server.close())


async def passed(sender: RdmaComm, receiver: RdmaComm, message: Any) -> Any:
    """The message, as the receiver has it."""
    _, read = await asyncio.gather(sender.write(message), receiver.read())
    return read
