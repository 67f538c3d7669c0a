"""The RDMA objects that the kernel holds, of a process or of all: `rdma resource show` in Python.

Over the fabric (`docs/fabric.md`) there are only those of this process, and its library counts
them.

Theory of operation
    One request for the list of devices (RDMA_NLDEV_CMD_GET, as a dump), and for each device one for
    each kind of object (RDMA_NLDEV_CMD_RES_QP_GET and its sisters, as dumps). An answer has a table
    with an entry for each object, and in it the process and a number. The counts of all processes
    need a single request (RDMA_NLDEV_CMD_RES_GET, as a dump). The numbers are those of
    <rdma/rdma_netlink.h>; each attribute is its length, its type and its value, padded to four
    bytes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["object_counts", "objects_of_process"]

_NETLINK_RDMA = 20
_CLIENT = 5 << 10  # RDMA_NL_NLDEV
_GET = _CLIENT | 1
_RES_GET = _CLIENT | 9
_REQUEST_DUMP = 0x1 | 0x300  # NLM_F_REQUEST, NLM_F_DUMP
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_INDEX = struct.Struct("=HHI")
_TYPE_MASK = 0x3FFF
_DEV_INDEX, _DEV_NAME, _PROCESS = 1, 2, 28
_SUMMARY, _SUMMARY_NAME, _SUMMARY_COUNT = 15, 17, 18
_LIMIT_S = 20.0


@dataclass(frozen=True)
class _Kind:
    name: str
    command: int
    table: int
    number: int


_KINDS = (
    _Kind("queue pair", 10, 19, 21),
    _Kind("connection id", 11, 30, 63),
    _Kind("completion queue", 12, 35, 61),
    _Kind("memory region", 13, 40, 62),
    _Kind("protection domain", 14, 46, 60),
    _Kind("shared receive queue", 23, 88, 90),
)
#: The kinds of the fabric, by their numbers in `enum fabric_kind` (fabric.h): what the kernel calls
#: each, and what it is called here.
_OF_FABRIC = {
    0: ("ctx", "device context"),
    1: ("pd", "protection domain"),
    2: ("mr", "memory region"),
    3: ("mw", "memory window"),
    4: ("", "completion channel"),
    5: ("cq", "completion queue"),
    6: ("srq", "shared receive queue"),
    7: ("qp", "queue pair"),
    8: ("", "address handle"),
    9: ("", "event channel"),
    10: ("cm_id", "connection id"),
}


def object_counts() -> Counter[str]:
    """Return how many objects of each kind there are, of all processes and over all devices.

    Kinds have the kernel's names: ``qp``, ``cq``, ``mr``, ``pd``, ``cm_id``, ``srq``, ``ctx``.

    Raises:
        OSError: the kernel has no RDMA, or refuses.
        TimeoutError: it does not answer.
    """
    total: Counter[str] = Counter()
    if "AIORDMA_FABRIC" in os.environ:
        total.update({name: _of_fabric(kind) for kind, (name, _) in _OF_FABRIC.items() if name})
        return total
    with _socket() as sock:
        for body in _dump(sock, _RES_GET):
            for kind, summary in _attributes(body):
                entries = _attributes(summary) if kind == _SUMMARY else ()
                for _, entry in entries:
                    fields = dict(_attributes(entry))
                    total[_text(fields[_SUMMARY_NAME])] += _number(fields[_SUMMARY_COUNT])
    return total


def objects_of_process(process: int) -> list[str]:
    """Return a text for each RDMA object of a process, such as ``queue pair 17 of rxe0``.

    Raises:
        OSError: the kernel has no RDMA, or refuses; over the fabric it is another process.
        TimeoutError: it does not answer.
    """
    found = []
    if "AIORDMA_FABRIC" in os.environ:
        if process != os.getpid():
            raise PermissionError(errno.EPERM, "over the fabric a process knows its own objects")
        for number, (_, text) in _OF_FABRIC.items():
            # It counts and numbers none: the third queue pair is one that is there beside two.
            found += [f"{text} {each} of the fabric" for each in range(1, _of_fabric(number) + 1)]
        return found
    with _socket() as sock:
        devices = [dict(_attributes(body)) for body in _dump(sock, _GET)]
        for device in devices:
            name = _text(device[_DEV_NAME])
            index = _INDEX.pack(_INDEX.size, _DEV_INDEX, _number(device[_DEV_INDEX]))
            for kind in _KINDS:
                for body in _dump(sock, _CLIENT | kind.command, index):
                    found += [
                        f"{kind.name} {number} of {name}" for number in _of(body, kind, process)
                    ]
    return found


def _of_fabric(kind: int) -> int:
    return int(_fabric().fabric_count(kind))


@functools.cache
def _fabric() -> ctypes.CDLL:
    """The library that stands in place of libibverbs.

    Raises:
        OSError: It is that of rdma-core.
    """
    library = ctypes.CDLL("libibverbs.so.1")
    if not hasattr(library, "fabric_count"):
        raise OSError(errno.ENODEV, "AIORDMA_FABRIC is set, but libibverbs is not the fabric's")
    library.fabric_count.restype = ctypes.c_int64
    return library


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_RDMA)
    made.settimeout(_LIMIT_S)
    return made


def _of(body: bytes, kind: _Kind, process: int) -> Iterator[int]:
    """The numbers of the objects of a process in one answer."""
    for table, entries in _attributes(body):
        if table != kind.table:
            continue
        for _, entry in _attributes(entries):
            fields = dict(_attributes(entry))
            if _number(fields.get(_PROCESS, b"")) == process and kind.number in fields:
                yield _number(fields[kind.number])


def _dump(sock: socket.socket, command: int, attributes: bytes = b"") -> Iterator[bytes]:
    """Ask, and return the body of each message of the answer."""
    size = _HEADER.size + len(attributes)
    sock.send(_HEADER.pack(size, command, _REQUEST_DUMP, 1, 0) + attributes)
    while True:
        data = sock.recv(1 << 18)
        while data:
            length, kind, _, _, _ = _HEADER.unpack_from(data)
            body, data = data[_HEADER.size : length], data[_aligned(length) :]
            if kind == _ERROR:
                raise OSError(-struct.unpack_from("=i", body)[0], "rdma resource show")
            if kind == _DONE:
                return
            yield body


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind = _ATTRIBUTE.unpack_from(data)
        yield kind & _TYPE_MASK, data[_ATTRIBUTE.size : length]
        data = data[_aligned(length) :]


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode()


def _number(value: bytes) -> int:
    return int.from_bytes(value, sys.byteorder)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
