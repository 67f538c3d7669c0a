"""Groups: the multicast groups of one datagram endpoint."""

from __future__ import annotations

import asyncio

from aiordma.cm.connection_event import ConnectionEvent
from aiordma.datagram.port import DatagramPort
from aiordma.loop.limit import Limit

__all__ = ["Groups"]

_HINT = "an endpoint joins and leaves one group after another; does the network answer the others?"


class Groups:
    """The multicast groups of one endpoint; joins and leaves one after another."""

    def __init__(self, port: DatagramPort) -> None:
        self._port = port
        self._one = asyncio.Lock()
        self._members: dict[str, tuple[ConnectionEvent, bool]] = {}

    def receives(self, gid: bytes) -> bool:
        """Whether the endpoint is a full member of the group with this GID."""
        return any(
            event.ah_attr is not None and event.ah_attr.dgid == gid and not send_only
            for event, send_only in self._members.values()
        )

    async def join(self, host: str, *, send_only: bool, timeout: float) -> ConnectionEvent:
        """Become a member; a member that only sends becomes a full member if needed."""
        with Limit(timeout, f"joining the group {host}", _HINT):
            async with self._one:
                cm_id = self._port.cm_id
                event, only_sends = self._members.get(host, (None, True))
                if event is not None:
                    if send_only or not only_sends:
                        return event
                    del self._members[host]
                    await cm_id.leave_multicast(host, timeout=timeout)
                event = await cm_id.join_multicast(host, send_only=send_only, timeout=timeout)
                self._members[host] = (event, send_only)
                return event

    async def leave(self, host: str, *, timeout: float) -> None:
        """End the membership."""
        self._members.pop(host, None)  # from now on nothing of the group is delivered
        with Limit(timeout, f"leaving the group {host}", _HINT):
            async with self._one:
                self._members.pop(host, None)
                await self._port.cm_id.leave_multicast(host, timeout=timeout)
