"""What the kernel holds for RDMA programs, asked over netlink: `rdma resource show` in Python.

Theory of operation
    One request for the summaries of all devices (RDMA_NLDEV_CMD_RES_GET, as a dump). The answer is
    a message for each device, with an entry for each kind of object, and a message that says that
    it is over. Numbers are those of <rdma/rdma_netlink.h>; each attribute is its length, its type
    and its value, padded to four bytes.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator

__all__ = ["resources"]

_NETLINK_RDMA = 20
_RES_GET = 5 << 10 | 9  # RDMA_NL_NLDEV, RDMA_NLDEV_CMD_RES_GET
_SUMMARY, _ENTRY, _NAME, _CURR = 15, 16, 17, 18
_REQUEST_DUMP = 0x1 | 0x300  # NLM_F_REQUEST, NLM_F_DUMP
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF
_LIMIT_S = 20.0


def resources() -> Iterator[tuple[str, int]]:
    """The kind of object and how many there are, for each kind and each device.

    Raises:
        OSError: The kernel refuses.
        TimeoutError: It says nothing.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_RDMA) as sock:
        sock.settimeout(_LIMIT_S)
        sock.send(_HEADER.pack(_HEADER.size, _RES_GET, _REQUEST_DUMP, 1, 0))
        while True:
            data = sock.recv(65536)
            while data:
                length, kind, _, _, _ = _HEADER.unpack_from(data)
                body, data = data[_HEADER.size : length], data[_aligned(length) :]
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("=i", body)[0], "rdma resource show")
                if kind == _DONE:
                    return
                yield from _of_one_device(body)


def _of_one_device(body: bytes) -> Iterator[tuple[str, int]]:
    for kind, summary in _attributes(body):
        if kind == _SUMMARY:
            for _, entry in _attributes(summary):
                fields = dict(_attributes(entry))
                name = fields[_NAME].rstrip(b"\0").decode()
                yield name, int.from_bytes(fields[_CURR], sys.byteorder)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind = _ATTRIBUTE.unpack_from(data)
        yield kind & _TYPE_MASK, data[_ATTRIBUTE.size : length]
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
