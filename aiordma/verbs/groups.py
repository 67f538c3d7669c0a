"""Groups: the multicast groups whose datagrams a queue pair receives."""

from __future__ import annotations

from typing import Any

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno
from aiordma.verbs.resource import Resource

__all__ = ["Groups"]


def _c_gid(gid: bytes) -> Any:
    if len(gid) != 16:
        msg = f"a GID has 16 bytes, not {len(gid)}"
        raise ValueError(msg)
    c_gid = ffi.new("union ibv_gid *")
    ffi.memmove(c_gid.raw, gid, 16)
    return c_gid


class Groups(Resource):
    """What a queue pair of type UD can do with multicast groups.  Part of `QueuePair`."""

    __slots__ = ()

    _groups: list[tuple[bytes, int]]

    def attach_mcast(self, gid: bytes, lid: int = 0) -> None:
        """Receive what is sent to a multicast group (`ibv_attach_mcast(3)`).

        `ConnectionId.join_multicast` does it; joining also tells the network.  The attachment
        ends with the queue pair.

        Args:
            gid: The group; 16 bytes.
            lid: Its local id on InfiniBand, 0 on RoCE.

        Raises:
            ValueError: Not a GID.
            OSError: Not a UD queue pair (EINVAL), or the device's limit is reached.
        """
        c_gid = _c_gid(gid)
        check_errno(lib.ibv_attach_mcast(self._require(), c_gid, lid), "ibv_attach_mcast")
        if (gid, lid) not in self._groups:
            self._groups.append((gid, lid))

    def detach_mcast(self, gid: bytes, lid: int = 0) -> None:
        """Receive nothing more of a group (`ibv_detach_mcast(3)`).

        `gid` and `lid` are those that it was attached with.  What has arrived already still
        completes.

        Raises:
            OSError: It is not attached (EINVAL).
        """
        c_gid = _c_gid(gid)
        check_errno(lib.ibv_detach_mcast(self._require(), c_gid, lid), "ibv_detach_mcast")
        if (gid, lid) in self._groups:
            self._groups.remove((gid, lid))

    def _detach_all(self, handle: Any) -> None:
        """Before the destruction, which the kernel refuses to an attached queue pair (EBUSY)."""
        for gid, lid in self._groups:
            lib.ibv_detach_mcast(handle, _c_gid(gid), lid)
