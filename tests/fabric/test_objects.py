"""What a process over the fabric is told of its objects, and of its own addresses."""

from __future__ import annotations

import sys

from tests.fabric.launching import launch

_OBJECTS = """
import os
import aiordma
from aiordma.cm import ConnectionId, EventChannel
from aiordma.testing.kernel_objects import object_counts, objects_of_process
from aiordma.verbs import CompletionQueue, MemoryRegion, ProtectionDomain, SharedReceiveQueue

def tell(what):
    new = set(objects_of_process(os.getpid())) - before
    print(what, sorted(new), dict(object_counts() - counts))

before, counts = set(objects_of_process(os.getpid())), object_counts()
with aiordma.devices()[0].open() as context:
    tell("context")
    before, counts = set(objects_of_process(os.getpid())), object_counts()
    with CompletionQueue(context, 4):
        tell("queue")
    with ProtectionDomain(context) as pd:
        tell("domain")
        before, counts = set(objects_of_process(os.getpid())), object_counts()
        with MemoryRegion(pd, bytearray(64)):
            tell("region")
        with SharedReceiveQueue(pd, 4):
            tell("shared")
before, counts = set(objects_of_process(os.getpid())), object_counts()
with EventChannel() as channel:
    tell("channel")
    before, counts = set(objects_of_process(os.getpid())), object_counts()
    with ConnectionId(channel):
        tell("id")
try:
    objects_of_process(1)
except PermissionError as error:
    print(error.strerror)
"""
#: The connection manager opens a device for itself, and keeps it.
_SAID = """\
context ['device context 1 of the fabric'] {'ctx': 1}
queue ['completion queue 1 of the fabric'] {'cq': 1}
domain ['protection domain 1 of the fabric'] {'pd': 1}
region ['memory region 1 of the fabric'] {'mr': 1}
shared ['shared receive queue 1 of the fabric'] {'srq': 1}
channel ['device context 1 of the fabric', 'event channel 1 of the fabric'] {'ctx': 1}
id ['connection id 1 of the fabric'] {'cm_id': 1}
over the fabric a process knows its own objects
"""


_MIGRATED = """
from aiordma._ffi import ffi, lib
from aiordma.cm.address import to_sockaddr
from aiordma.cm.enums import EventType

channel = lib.rdma_create_event_channel()
made = ffi.new("struct rdma_cm_id **")
assert lib.rdma_create_id(channel, made, ffi.NULL, lib.RDMA_PS_TCP) == 0
address = ffi.cast("struct sockaddr *", to_sockaddr(("127.0.0.1", 5000)))
assert lib.rdma_resolve_addr(made[0], ffi.NULL, address, 1000) == 0
assert lib.rdma_resolve_route(made[0], 1000) == 0
assert lib.rdma_migrate_id(made[0], channel) == 0
event = ffi.new("struct rdma_cm_event **")
for _ in range(2):
    assert lib.rdma_get_cm_event(channel, event) == 0
    print(EventType(event[0].event).name)
    lib.rdma_ack_cm_event(event[0])
lib.rdma_destroy_id(made[0])
lib.rdma_destroy_event_channel(channel)
"""


def test_events_keep_their_order_when_an_id_moves_to_its_own_channel() -> None:
    done = launch("--", sys.executable, "-c", _MIGRATED)
    said = "ADDR_RESOLVED\nROUTE_RESOLVED\n"
    assert (done.stdout, done.stderr) == (said, "")


def test_objects_are_counted() -> None:
    done = launch("--", sys.executable, "-c", _OBJECTS)
    assert (done.stdout, done.stderr) == (_SAID, "")


def test_loopback_is_an_address_of_an_adapter() -> None:
    """Dask takes that of a device in its place: here it is one."""
    code = (
        "from aiordma.contrib.dask import RdmaBackend\n"
        "print(RdmaBackend().resolve_address('localhost:5'))"
    )
    done = launch("--", sys.executable, "-c", code)
    assert (done.stdout, done.stderr) == ("127.0.0.1:5\n", "")


_NO_SHARED_QUEUES = """
import aiordma
from aiordma.verbs import ProtectionDomain, SharedReceiveQueue

with aiordma.devices()[0].open() as context, ProtectionDomain(context) as pd:
    try:
        SharedReceiveQueue(pd, 4)
    except aiordma.NotSupportedError as error:
        print(error.strerror)
"""


def test_an_adapter_without_shared_receive_queues_is_named() -> None:
    done = launch("--profile", "irdma", "--", sys.executable, "-c", _NO_SHARED_QUEUES)
    assert done.stderr == ""
    assert done.stdout == "ibv_create_srq: the device irdma0 has no shared receive queues\n"


_OFF = """
import errno, sys, time
from aiordma._ffi import ffi, lib
from aiordma.cm.address import to_sockaddr

for host in sys.argv[1:]:
    made = ffi.new("struct rdma_cm_id **")
    assert lib.rdma_create_id(ffi.NULL, made, ffi.NULL, lib.RDMA_PS_TCP) == 0  # its calls wait
    address = ffi.cast("struct sockaddr *", to_sockaddr((host, 7471)))
    for _ in range(2):
        began = time.monotonic()
        assert lib.rdma_resolve_addr(made[0], ffi.NULL, address, 100) == -1
        print(host, errno.errorcode[ffi.errno], time.monotonic() - began >= 0.1)
    lib.rdma_destroy_id(made[0])
"""


def test_a_host_that_is_off_costs_the_time_of_a_resolution() -> None:
    """One in an adapter's network; loopback has no hosts, and others are not reached."""
    off, unreachable = ("10.80.0.77", "fd80::2"), ("10.80.1.1", "fd81::1", "127.0.0.9")
    done = launch(
        *("--addresses=127.0.0.1,10.80.0.1,fd80::1", "--"),
        *(sys.executable, "-c", _OFF, *off, *unreachable),
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        *(f"{host} ETIMEDOUT True" for host in off for _ in range(2)),
        *(f"{host} ENETUNREACH False" for host in unreachable for _ in range(2)),
    ]
