"""Next hops, as the kernel tells them by netlink."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from aiordma.datagram import neighbors
from aiordma.datagram.neighbors import Neighbors, NextHop, look

from ..conftest import Run, settle

HOST, GATEWAY, OWN = "10.0.0.1", "10.0.0.254", "10.0.0.9"
REACHABLE, STALE, INCOMPLETE, FAILED, NOARP = 0x02, 0x04, 0x01, 0x20, 0x40
UNICAST, LOCAL, UNREACHABLE = 1, 2, 7
INTERFACE = 4


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def refusal(code: int) -> bytes:
    return message(2, struct.pack("=i", -code) + bytes(16))


def route(kind: int = UNICAST, *attributes: bytes) -> bytes:
    out = attribute(4, struct.pack("=I", INTERFACE))
    return message(
        24, struct.pack("=8BI", 2, 32, 0, 0, 254, 0, 0, kind, 0) + out + b"".join(attributes)
    )


def neighbor(state: int, host: str = HOST) -> bytes:
    ip = ipaddress.ip_address(host)
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    body = struct.pack("=BxxxiHBB", family, INTERFACE, state, 0, 1)
    return message(28, body + attribute(1, ip.packed) + attribute(2, bytes(6)))


class FakeNetlink:
    """A kernel with one route and one neighbor."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.asked: list[bytes] = []

    def __call__(self, *_: Any) -> FakeNetlink:
        return self

    def __enter__(self) -> FakeNetlink:
        return self

    def __exit__(self, *_: object) -> None: ...

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def send(self, data: bytes) -> None:
        assert struct.unpack_from("=I", data)[0] == len(data)
        self.asked.append(data)

    def recv(self, room: int) -> bytes:
        return self.answers.pop(0)


def told(monkeypatch: pytest.MonkeyPatch, *answers: bytes, host: str = HOST) -> NextHop | None:
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", FakeNetlink(*answers))
        return look(host, OWN if ":" not in host else "", INTERFACE)


@pytest.mark.parametrize(
    ("state", "known"),
    [(REACHABLE, True), (STALE, True), (NOARP, True), (0x80, True), (INCOMPLETE, False),
     (FAILED, False), (0, False)],
)  # fmt: skip
def test_g09_states_of_a_neighbor(monkeypatch: pytest.MonkeyPatch, state: int, known: bool) -> None:
    assert told(monkeypatch, route(), neighbor(state)) == NextHop(HOST, INTERFACE, known)


def test_g09_a_neighbor_without_an_entry_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, route(), refusal(errno.ENOENT)) == NextHop(
        HOST, INTERFACE, known=False
    )


def test_g09_the_next_hop_may_be_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = socket.inet_aton(GATEWAY)
    netlink = FakeNetlink(route(UNICAST, attribute(5, packed)), neighbor(STALE, GATEWAY))
    monkeypatch.setattr(socket, "socket", netlink)
    assert look(HOST, OWN, INTERFACE) == NextHop(GATEWAY, INTERFACE, known=True)
    asked_route, asked_neighbor = netlink.asked
    assert socket.inet_aton(HOST) in asked_route
    assert socket.inet_aton(OWN) in asked_route
    assert packed in asked_neighbor


def test_g09_the_gateway_may_be_of_the_other_family(monkeypatch: pytest.MonkeyPatch) -> None:
    via = struct.pack("=H", socket.AF_INET6) + ipaddress.ip_address("fe80::5").packed
    found = told(monkeypatch, route(UNICAST, attribute(18, via)), neighbor(REACHABLE, "fe80::5"))
    assert found == NextHop("fe80::5", INTERFACE, known=True)


def test_g09_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, route(), neighbor(REACHABLE, "fd80::2"), host="fd80::2")
    assert found == NextHop("fd80::2", INTERFACE, known=True)


def test_g09_an_own_address_needs_no_neighbor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, route(LOCAL)) == NextHop(HOST, INTERFACE, known=True)
    here = look("127.0.0.1")  # the kernel of this machine
    assert here is not None
    assert here.known


@pytest.mark.parametrize(
    "answers",
    [
        (refusal(errno.ENETUNREACH),),
        (route(UNREACHABLE),),
        (route(), refusal(errno.EOPNOTSUPP)),
        (b"",),
        (bytes(16),),
        (message(24, b"short"),),
        (message(24, bytes(12)),),
        (route(UNICAST, struct.pack("=HH", 0, 5)), message(28, b"")),
        (route(UNICAST, attribute(5, b"odd")), neighbor(REACHABLE)),
    ],
)
def test_g09_what_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[bytes, ...]
) -> None:
    assert told(monkeypatch, *answers) is None


def test_g09_no_netlink_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "no netlink")

    monkeypatch.setattr(socket, "socket", refuse)
    assert look(HOST) is None
    assert look("no address") is None


# Waiting


class Netlink(socket.socket):
    """A socket that loses the next `overruns` messages."""

    overruns = 0

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        if Netlink.overruns:
            Netlink.overruns -= 1
            raise OSError(errno.ENOBUFS, "overrun")
        return super().recv(bufsize, flags)


class Kernel:
    """What the kernel knows, and the socket on which it tells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.says: list[NextHop | None] = []
        self.asks = 0
        self.sends_fail = False
        self.ends: list[socket.socket] = []
        monkeypatch.setattr(neighbors, "look", self.look)
        monkeypatch.setattr(neighbors, "have_it_found", self.have_it_found)
        monkeypatch.setattr(neighbors, "open_netlink", self.open)
        monkeypatch.setattr(Netlink, "overruns", 0)

    def look(self, *_: Any) -> NextHop | None:
        return self.says.pop(0) if self.says else UNKNOWN

    def have_it_found(self, hop: NextHop, source: str) -> None:
        self.asks += 1
        if self.sends_fail:
            raise PermissionError

    def open(self) -> socket.socket:
        here, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ends.append(end)
        return Netlink(fileno=here.detach())

    @property
    def is_asked(self) -> bool:
        """Whether the last socket is open."""
        try:
            self.ends[-1].send(b"")
        except OSError:
            return False
        return True

    async def told(self) -> None:
        async with asyncio.timeout(5):
            while not self.asks or self.says:  # noqa: ASYNC110 - threads do it
                await asyncio.sleep(0.001)
        await settle()


UNKNOWN = NextHop(HOST, INTERFACE, known=False)
KNOWN = NextHop(HOST, INTERFACE, known=True)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    made = Kernel(monkeypatch)
    yield made
    for end in made.ends:
        end.close()


async def test_g09_a_wait_ends_with_the_message_of_the_kernel(kernel: Kernel) -> None:
    waits = Neighbors()
    waiting = [asyncio.create_task(waits.wait(UNKNOWN, HOST, OWN)) for _ in range(3)]
    await kernel.told()
    for other in (neighbor(REACHABLE, GATEWAY), neighbor(INCOMPLETE), b"odd", message(3, b"")):
        kernel.ends[0].send(other)
    await settle()
    assert not any(task.done() for task in waiting)
    kernel.says = [KNOWN] * 6
    kernel.ends[0].send(neighbor(REACHABLE))
    assert await asyncio.gather(*waiting) == [True] * 3
    assert not kernel.is_asked, "no wait needs it"


async def test_g09_a_neighbor_that_does_not_answer(kernel: Kernel) -> None:
    waits = Neighbors()
    waiting = asyncio.create_task(waits.wait(UNKNOWN, HOST, OWN))
    await kernel.told()
    kernel.ends[0].send(neighbor(FAILED))
    with pytest.raises(OSError, match=f"{HOST} does not answer") as caught:
        await waiting
    assert caught.value.errno == errno.EHOSTUNREACH
    assert not kernel.is_asked


def test_g09_a_neighbor_that_became_known_meanwhile(kernel: Kernel, run: Run) -> None:
    kernel.says = [KNOWN]
    assert run(Neighbors().wait(UNKNOWN, HOST, OWN)) is True
    assert kernel.asks == 0
    kernel.says += [UNKNOWN, KNOWN]  # an interface without ARP knows at once
    assert run(Neighbors().wait(UNKNOWN, HOST, OWN)) is True
    assert kernel.asks == 1


def test_g09_the_kernel_cannot_be_made_to_ask(kernel: Kernel, run: Run) -> None:
    kernel.sends_fail = True
    assert run(Neighbors().wait(UNKNOWN, HOST, OWN)) is False
    kernel.sends_fail = False
    kernel.says = [None]
    assert run(Neighbors().wait(UNKNOWN, HOST, OWN)) is False


def test_g09_without_messages_the_kernel_is_asked_again(
    kernel: Kernel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(neighbors, "open_netlink", refuse)
    monkeypatch.setattr(neighbors, "AGAIN_S", 0.01)
    kernel.says += [*[UNKNOWN] * 6, KNOWN]
    assert run(Neighbors().wait(UNKNOWN, HOST, OWN)) is True
    assert kernel.asks == 3


async def test_g09_lost_messages_make_each_wait_look_again(kernel: Kernel) -> None:
    waits = Neighbors()
    waiting = asyncio.create_task(waits.wait(UNKNOWN, HOST, OWN))
    await kernel.told()
    kernel.says = [KNOWN]
    Netlink.overruns = 1
    kernel.ends[0].send(b"odd")
    assert await waiting
    assert not Netlink.overruns


async def test_g09_a_wait_that_is_canceled_leaves_nothing(kernel: Kernel) -> None:
    waits = Neighbors()
    waiting = asyncio.create_task(waits.wait(UNKNOWN, HOST, OWN))
    await kernel.told()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not kernel.is_asked
