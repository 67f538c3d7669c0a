"""The device that the fixtures use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiordma
from aiordma import RdmaStreamReader, RdmaStreamWriter
from aiordma.cm import ConnectionId, EventChannel
from aiordma.testing.softroce import SoftroceError, host

__all__ = ["DeviceError", "address", "device", "stream_pair"]

StreamEnd = tuple[RdmaStreamReader, RdmaStreamWriter]


class DeviceError(Exception):
    """There is a device, and it has no address."""


def address() -> str:
    """Return the address of the device: the fabric's, softroce's, or that of the first active one.

    Raises:
        DeviceError: none is active, or its network card has no address.
    """
    for name in ("AIORDMA_FABRIC_ADDR", "AIORDMA_SOFTROCE_ADDR"):
        if told := os.environ.get(name):
            return told
    names = host.active()
    if not names:
        raise DeviceError("no RDMA device has an active port")
    try:
        return host.address_of(names[0])
    except SoftroceError as error:
        raise DeviceError(str(error)) from None


def device(address: str) -> aiordma.Device:
    """Return the device whose network card has this address; else the first."""
    found = aiordma.devices()
    if "AIORDMA_FABRIC" in os.environ:
        name = _name_of(address)
        return next(each for each in found if each.name == name)
    for each in found:
        try:
            if host.address_of(each.name) == address:
                return each
        except SoftroceError:
            continue  # without an address
    return found[0]


def _name_of(address: str) -> str | None:
    """The name of the device that the connection manager finds for an address."""
    with EventChannel() as channel, ConnectionId(channel) as cm_id:
        cm_id.bind_addr((address, 0))
        return cm_id.context.name if cm_id.context is not None else None


@asynccontextmanager
async def stream_pair(address: str, seconds: float) -> AsyncIterator[tuple[StreamEnd, StreamEnd]]:
    """Two ends of a stream, each (reader, writer): the client's and the server's."""
    accepted: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()

    def note(reader: RdmaStreamReader, writer: RdmaStreamWriter) -> None:
        if not accepted.done():
            accepted.set_result((reader, writer))

    async with await aiordma.start_server(note, address, 0) as server:
        async with asyncio.timeout(seconds):
            client = await aiordma.open_connection(address, server.port)
        try:
            async with asyncio.timeout(seconds):
                remote = await accepted
            try:
                yield client, remote
            finally:
                await _close(remote[1])
        finally:
            await _close(client[1])


async def _close(writer: RdmaStreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return  # a test may have broken it
