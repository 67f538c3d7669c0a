"""Where datagrams go: what peers make an endpoint look for takes nothing from the program's own."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from aiordma.datagram import destinations
from aiordma.datagram.config import DatagramConfig, Key
from aiordma.datagram.destinations import Destination, Destinations
from aiordma.datagram.neighbors import Neighbors, NextHop
from aiordma.errors import ConnectTimeoutError
from aiordma.loop.workers import WorkerPool, answering, answering_slowly
from aiordma.verbs.ah import AHAttributes, gid_of
from aiordma.verbs.context import GidEntry
from aiordma.verbs.enums import GIDType
from tests.inside.datagram import answered_of, asked_of, line_of, set_ways

from ..conftest import settle
from .bench import FakeHandle

pytestmark = pytest.mark.usefixtures("no_adapter")

PLACES = 4
_way = destinations.quick_way


class Network:
    """Hosts that answer, others that do not, and services that are found when the test says so."""

    def __init__(self, **options: Any) -> None:
        self.known: set[str] = set()
        self.blind: set[str] = set()
        self.answers: dict[str, asyncio.Future[bool]] = {}
        self.services: dict[Key, asyncio.Future[None]] = {}
        self.known_services: set[Key] = set()  # found as soon as they are asked for
        self.made: list[WorkerPool] = []
        self.found: list[Key] = []
        self.failed: list[tuple[Key, OSError]] = []
        none: Any = None
        self.all = Destinations(
            none, none, DatagramConfig(**options),
            lambda destination: self.found.append(destination.key),
            lambda destination, error: self.failed.append((destination.key, error)),
        )  # fmt: skip

    def quick_way(self, port: Any, host: str, source: Any) -> Any:
        attr = AHAttributes(dgid=gid_of(host))
        if host in self.known:
            return attr, "", NextHop(host, 4, known=True), FakeHandle(("queue", host, 1))
        return attr, "", None if host in self.blind else NextHop(host, 4, known=False), None

    async def wait(self, hop: NextHop, host: str, source: str) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.answers[host] = answer
        try:
            return await answer
        finally:
            del self.answers[host]

    async def make(self, attr: AHAttributes, pool: Any) -> Any:
        self.made.append(pool)
        return FakeHandle(("queue", "10.0.0.1", 1))

    async def request(self, destination: Destination) -> None:
        answer = self.services[destination.key] = asyncio.get_running_loop().create_future()
        if destination.key not in self.known_services:
            await answer
        handle: Any = FakeHandle(destination.key)
        destination.ah = handle

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - threads do it
                await asyncio.sleep(0.001)


@pytest.fixture
def no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(name: str) -> Any:
        return lambda *args: getattr(current[0], name)(*args)

    monkeypatch.setattr(destinations, "MOST_UNRESOLVED", PLACES)
    monkeypatch.setattr(destinations, "quick_way", of("quick_way"))
    monkeypatch.setattr(Neighbors, "wait", lambda _, *args: current[0].wait(*args))
    set_ways(
        monkeypatch,
        lambda *args: current[0].make(*args),
        lambda destination: current[0].request(destination),
    )


current: list[Network] = []


def network(**options: Any) -> Network:
    current[:] = [Network(**options)]
    return current[0]


def source(number: int) -> Key:
    return ("queue", f"10.1.{number >> 8}.{number & 0xFF}", number + 1)


SERVICE: Key = ("service", "10.0.0.2", 7000)


async def test_g09_forged_sources_take_no_place_of_a_service() -> None:
    net = network()
    for number in range(500):
        net.all.get(source(number))
        await asyncio.sleep(0)

    def all_others_failed() -> bool:
        assert len(line_of(net.all)) <= PLACES, "the line of senders has no end"
        return len(net.failed) >= 500 - 2 * PLACES

    await net.until(all_others_failed)
    assert len(net.answers) == PLACES, "the kernel is asked for more neighbors at a time"
    assert {error.errno for _, error in net.failed} == {errno.ENOBUFS}
    assert "10.1." in str(net.failed[0][1])
    assert "queue pair" in str(net.failed[0][1])
    net.all.get(SERVICE)
    await settle()
    net.services[SERVICE].set_result(None)
    await settle()
    assert net.found == [SERVICE]
    net.known.add("10.0.0.7")
    net.all.get(("queue", "10.0.0.7", 9))
    await net.until(lambda: len(net.found) == 2)
    net.all.close()
    await settle()


async def test_g09_forged_sources_do_not_fill_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "MOST_DESTINATIONS", 8)
    net = network()
    asked: list[Key] = [("service", "10.0.0.2", 7000 + n) for n in range(4)]
    for key in asked:
        net.all.get(key)
        await settle()
        net.services[key].set_result(None)
        await settle()
    for number in range(100):
        net.all.get(source(number))
        assert len(net.all) <= 8
    assert [key for key in asked if key in asked_of(net.all)] == asked, "pushed out by sources"
    # All of the sources are being looked for: more services are none the worse for it.
    more: list[Key] = [("service", "10.0.0.3", 7000 + n) for n in range(4)]
    for key in more:
        net.all.get(key)
        await settle()
        net.services[key].set_result(None)
        await settle()
    assert net.found == asked + more
    assert not [key for key, _ in net.failed if key[0] == "service"]
    net.all.close()
    await settle()


async def test_g09_services_in_use_leave_no_room_for_a_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(destinations, "MOST_DESTINATIONS", 2)
    net = network()
    for port in (1, 2):
        net.all.get(("service", "10.0.0.2", port))
    with pytest.raises(OSError, match="2 destinations are in use") as caught:
        net.all.get(source(1))
    assert caught.value.errno == errno.ENOBUFS
    net.all.close()
    await settle()


async def test_g09_a_source_that_answers_is_found() -> None:
    net = network()
    net.all.get(source(1))
    await net.until(lambda: bool(net.answers))
    net.answers["10.1.0.1"].set_result(True)
    await net.until(lambda: bool(net.found))
    assert net.made == [answering]
    net.all.get(source(2))
    await net.until(lambda: bool(net.answers))
    net.answers["10.1.0.2"].set_exception(OSError(errno.EHOSTUNREACH, "silent"))
    await net.until(lambda: bool(net.failed))
    assert str(net.failed[0][1]) == "[Errno 113] 10.1.0.2 queue pair 3: silent"
    net.all.close()
    await settle()


async def test_g09_where_the_kernel_does_not_tell_few_threads_may_block() -> None:
    net = network()
    net.blind.add("10.1.0.1")
    net.all.get(source(1))
    net.all.get(source(2))
    await net.until(lambda: "10.1.0.2" in net.answers)
    net.answers["10.1.0.2"].set_result(False)  # the kernel cannot be made to ask
    await net.until(lambda: len(net.found) == 2)
    assert net.made == [answering_slowly] * 2
    net.all.close()
    await settle()


async def test_g09_a_source_that_is_looked_for_again_keeps_its_way() -> None:
    net = network(refresh_s=0.001)
    net.known.add("10.1.0.1")
    destination = net.all.get(source(1))
    await net.until(lambda: bool(net.found))
    for number in range(2, 2 + PLACES):
        net.all.get(source(number))
    await net.until(lambda: len(net.answers) == PLACES)
    net.known.clear()
    await asyncio.sleep(0.002)
    assert net.all.get(source(1)) is destination
    await net.until(lambda: destination in line_of(net.all))
    for number in range(20, 20 + PLACES):
        net.all.get(source(number))
    await net.until(lambda: len(line_of(net.all)) == PLACES and destination not in line_of(net.all))
    assert destination.ah is not None
    assert not net.failed
    assert destination.key in answered_of(net.all)
    net.all.close()
    await settle()


async def test_g09_the_time_in_the_line_does_not_count() -> None:
    net = network(resolve_timeout_s=0.1)
    most = destinations.MOST_AT_A_TIME
    keys: list[Key] = [("service", "10.0.0.2", 1 + n) for n in range(most + 1)]
    net.known_services.add(keys[-1])
    for key in keys:
        net.all.get(key)
    await settle()
    assert len(net.services) == most
    await net.until(lambda: len(net.failed) == most)
    assert all(isinstance(error, ConnectTimeoutError) for _, error in net.failed)
    assert "10.0.0.2 port 1: not found within 0.1 s" in str(net.failed[0][1])
    await net.until(lambda: net.found == [keys[-1]])
    net.all.close()
    await settle()


class FakePort:
    """As much of a port as the way to a source needs."""

    def __init__(self, kind: GIDType) -> None:
        self.kind = kind
        self.users = 0
        self.context = self.cm_id = self.pd = self
        self.port_num = 1
        self.name = "fake0"

    def gid_table(self) -> list[GidEntry]:
        return [GidEntry(gid_of("10.0.0.9"), 3, 1, GIDType.ROCE_V2, 4)]

    def query_gid(self, port: int, index: int) -> GidEntry:
        return GidEntry(gid_of("10.0.0.9"), index, port, self.kind, 4)

    def _retain(self) -> None:
        self.users += 1

    def _let_go(self) -> None:
        self.users -= 1


@pytest.mark.parametrize(
    ("kind", "hop", "made"),
    [
        (GIDType.ROCE_V2, NextHop("10.0.0.1", 4, known=True), True),
        (GIDType.ROCE_V2, NextHop("10.0.0.1", 4, known=False), False),
        (GIDType.ROCE_V2, None, False),
        (GIDType.IB, None, True),
    ],
)
def test_g09_a_handle_is_made_at_once_where_no_network_is_asked(
    monkeypatch: pytest.MonkeyPatch, kind: GIDType, hop: NextHop | None, made: bool
) -> None:
    asked: list[Any] = []

    def look(*args: Any) -> NextHop | None:
        asked.append(args)
        return hop

    monkeypatch.setattr(destinations, "look", look)
    monkeypatch.setattr(destinations, "AddressHandle", lambda pd, attr: "made")
    port: Any = FakePort(kind)
    way: Any = _way(port, "10.0.0.1", None)
    attr, local, found, ah = way
    assert (attr.sgid_index, local, found) == (3, "10.0.0.9", hop)
    assert ah == ("made" if made else None)
    assert asked == ([] if kind == GIDType.IB else [("10.0.0.1", "10.0.0.9", 4)])
    assert port.users == 0
