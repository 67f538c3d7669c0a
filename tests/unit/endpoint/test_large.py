"""Large messages over the fake adapter: checksums, copies, budgets, and the end of what waits."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import random
from typing import Any

import pytest

from aiordma.endpoint.config import ConnectionConfig, hello_of
from aiordma.endpoint.wire import CHECKSUM, FRAME, FRAME_SIZE, RENDEZVOUS, FrameKind, Hello
from aiordma.errors import ConnectionLostError, ProtocolError
from aiordma.memory.governor import AHEAD, HELD, LARGE, SMALL, Account, Budget, Lease
from aiordma.verbs.enums import Access
from tests.inside.core import let_go, retain
from tests.inside.endpoint import (
    copy_up_to,
    exposer_of,
    greet,
    greeting_of,
    limit_fetches,
    look_each,
    meet,
    receiver_of,
    set_terms,
)

from ..conftest import settle
from ..memory.fake_memory import FakeRegion
from .fabric import Wire

UNCHECKED = ConnectionConfig(slot_size=64, recv_depth=4, send_depth=4, rendezvous_window=2)
CONFIG = dataclasses.replace(UNCHECKED, check_large=True)


pytestmark = pytest.mark.usefixtures("fake_regions")


async def opened(first: ConnectionConfig = CONFIG, second: ConnectionConfig = CONFIG) -> Wire:
    wire = Wire(first, second)
    await wire.open()
    return wire


def announcements(wire: Wire, side: int) -> list[bytes]:
    """Bodies of the RENDEZVOUS frames that a side has sent."""
    return [
        frame[FRAME_SIZE:]
        for frame in wire.links[side].sent
        if FRAME.unpack_from(frame)[0] == FrameKind.RENDEZVOUS
    ]


# ---- checksums -----------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("code", [errno.EFAULT, errno.EOPNOTSUPP, errno.EIO])
async def test_memory_that_the_kernel_does_not_pin_is_copied(
    monkeypatch: pytest.MonkeyPatch, code: int, parts: int
) -> None:
    """As some mappings of files; another failure is the sender's error."""
    copy_up_to(monkeypatch, 0)
    data = random.Random(5).randbytes(300_000)
    config = dataclasses.replace(CONFIG, slot_size=1024)  # which has room for several pieces
    wire = await opened(config, config)
    link: Any = wire.links[0]
    real, asked = link.register, list[Any]()

    async def refuse(buffer: Any, access: Access, lease: Lease) -> Any:
        asked.append(buffer)
        if not isinstance(buffer, int):
            raise OSError(code, "ibv_reg_mr")
        return await real(buffer, access, lease)

    link.register = refuse
    whole = memoryview(data)
    each = len(data) // parts
    buffers = [whole[n * each : (n + 1) * each] for n in range(parts)]
    send = asyncio.create_task(wire.ends[0].send(buffers if parts > 1 else data))
    receive = asyncio.create_task(wire.ends[1].recv())
    await wire.run()
    if code == errno.EIO:
        with pytest.raises(OSError, match="ibv_reg_mr"):
            await send
        receive.cancel()
        await asyncio.wait([receive])
    else:
        with await receive as message:
            assert message == data
        await wire.run()
        await send
        assert [size for size in asked if isinstance(size, int)] == [each] * parts
    await wire.close()
    assert FakeRegion.regions == {}


def old(config: ConnectionConfig, window: int) -> Hello:
    """The hello of a library that knows no checksums: its flags are 0."""
    data = bytearray(hello_of(config, b"", window).pack(56))
    data[6] = 0
    hello = Hello.parse(bytes(data))
    assert hello is not None
    assert not hello.flags
    return hello


@pytest.mark.parametrize("insists", [False, True])
async def test_g04_a_peer_that_knows_no_checksums(insists: bool) -> None:
    """It is talked to without, unless the program insists; then nothing unchecked is shown."""
    wire = Wire(CONFIG if insists else UNCHECKED, UNCHECKED)
    wire.links[0].context.is_software = True
    wire.meet(1)
    exposer_of(wire.ends[1]).sums = False  # as the old library does, whatever it is asked
    set_terms(wire.links[1].state, numbered=False)  # likewise
    greeting = greeting_of(wire.ends[1])
    meet(wire.ends[0], old(UNCHECKED, receiver_of(wire.ends[1]).window.size), 8)
    greet(wire.ends[0])
    wire.settle()
    await greeting
    send = asyncio.create_task(wire.ends[0].send(b"to the old one" * 50))
    receive = asyncio.create_task(wire.ends[1].recv())
    await wire.run()
    assert bytes(await receive) == b"to the old one" * 50
    await send
    assert [len(body) for body in announcements(wire, 0)] == [RENDEZVOUS.size]
    send = asyncio.create_task(wire.ends[1].send(b"from it" * 50))
    receive = asyncio.create_task(wire.ends[0].recv())
    await wire.run()
    if insists:
        with pytest.raises(ProtocolError, match="no checksums"):
            await receive
        await wire.lose()
        with pytest.raises(ConnectionLostError):
            await send
    else:
        assert bytes(await receive) == b"from it" * 50
        await send
        await wire.close()


@pytest.mark.parametrize("change", [-4, 4], ids=["left out", "too long"])
async def test_g04_an_announcement_without_the_checksum_that_was_asked_for(change: int) -> None:
    wire = await opened()
    body = RENDEZVOUS.pack(1 << 40, 7, 1) + bytes(4 + change)
    frame = FRAME.pack(FrameKind.RENDEZVOUS, 0, 0, 0, 100) + body
    link = wire.links[1]
    link.inject(frame)
    await settle()
    assert isinstance(link.failure, ProtocolError)
    await wire.lose()


# ---- memory that the peer may write ----------------------------------------------------------


async def test_g03_a_delivered_message_lies_in_no_memory_that_the_peer_could_write() -> None:
    wire = await opened()
    wire.links[1].reads_expose = True
    data = random.Random(3).randbytes(1000)
    landing: list[memoryview] = []
    wire.links[1].damage = landing.append
    send = asyncio.create_task(wire.ends[0].send(data))
    receive = asyncio.create_task(wire.ends[1].recv())
    await wire.run()
    message = await receive
    for view in landing:  # the peer keeps the key
        view[:] = b"\xee" * len(view)
    assert landing
    assert bytes(message) == data
    assert wire.links[1].pool.out == 0, "the landing buffer is of no use any more"
    message.release()
    await send
    await wire.close()


async def test_g03_a_buffer_whose_message_was_never_announced_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer may know its key from another message, and must not find what was not sent."""
    wire = await opened()
    kept: list[FakeRegion] = []
    monkeypatch.setattr(wire.links[0].outgoing, "give", kept.append)
    for _ in range(4):  # all the credits
        await wire.ends[0].send(b"x")
    big = asyncio.create_task(wire.ends[0].send(b"a secret" * 100))
    await settle()
    big.cancel()
    with pytest.raises(asyncio.CancelledError):
        await big
    assert kept == []
    assert FakeRegion.regions == {}
    await wire.run()
    await wire.close()


async def test_the_memory_of_the_program_is_closed_at_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right of the queue pair stays, so that a registration is all that opens memory."""
    copy_up_to(monkeypatch, 0)
    wire = await opened()
    for _ in range(2):
        send = asyncio.create_task(wire.ends[0].send(bytes(1000)))
        await wire.run()
        with await wire.ends[1].recv() as message:
            assert len(FakeRegion.regions) == 1, "where the message lies"
            assert bytes(message) == bytes(1000)
        await send
        assert wire.links[0].reads_allowed == 1
        await wire.run()
        assert FakeRegion.regions == {}
    await wire.close()


# ---- the end ---------------------------------------------------------------------------------


# ---- budgets and deadlines -------------------------------------------------------------------

ROOM = 1 << 16  # of the smallest buffer


def announce(wire: Wire, number: int, length: int = 1000) -> None:
    """What a hostile peer sends: 36 bytes."""
    body = RENDEZVOUS.pack(1 << 40, 7, number) + CHECKSUM.pack(0)
    wire.links[1].inject(FRAME.pack(FrameKind.RENDEZVOUS, 0, 0, 0, length) + body)


@pytest.mark.parametrize(
    ("ahead", "fetched"), [(1, 0), (ROOM - 1, 0), (ROOM, 1), (2 * ROOM, 2), (9 * ROOM, 2)]
)
async def test_g01_only_what_may_be_ahead_is_fetched_before_recv_asks(
    ahead: int, fetched: int
) -> None:
    config = dataclasses.replace(CONFIG, receive_buffer_size=ahead)
    wire = await opened(config, config)
    for number in (1, 2):
        announce(wire, number)
    await settle()
    assert wire.links[1].pool.out == fetched
    assert len(wire.links[1].reads) == fetched
    receive = asyncio.create_task(wire.ends[1].recv())
    await settle()
    assert wire.links[1].pool.out == max(fetched, 1), "recv() asks for the first"
    receive.cancel()
    await settle()
    await wire.lose()
    assert FakeRegion.regions == {}


async def test_g01_the_next_is_fetched_as_soon_as_one_was_taken() -> None:
    config = dataclasses.replace(CONFIG, receive_buffer_size=ROOM)
    wire = await opened(config, config)
    sends = [asyncio.create_task(wire.ends[0].send(bytes([n]) * 1000)) for n in range(2)]
    await wire.run()
    assert [send.done() for send in sends] == [True, False]
    with await wire.ends[1].recv() as message:
        assert bytes(message) == bytes(1000)
    await wire.run()
    assert sends[1].done(), "nothing asks for it, but there is room"
    await asyncio.gather(*sends)
    await wire.close()


async def test_g01_a_fetch_that_hangs_ends_with_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_fetches(monkeypatch, 0.05)
    wire = await opened()
    announce(wire, 1)
    with pytest.raises(ConnectionLostError, match="nothing of a large message") as error:
        await wire.ends[1].recv()
    assert isinstance(error.value.__cause__, TimeoutError)
    await wire.lose()
    assert FakeRegion.regions == {}


async def test_g01_what_the_program_keeps_is_pinned_up_to_the_budget_only() -> None:
    """What is beyond it is a copy, which nothing is counted for."""
    wire = await opened()
    budget = Budget(2 * ROOM)
    link = wire.links[1]
    link.account = Account(budget, "peer")
    link.at_close(link.account.close)
    kept = []
    for number in range(4):
        send = asyncio.create_task(wire.ends[0].send(bytes([number]) * 1000))
        receive = asyncio.create_task(wire.ends[1].recv())
        await wire.run()
        kept.append(await receive)
        await wire.run()
        await send
        assert link.pool.out == min(number + 1, 2)
    assert budget.held(HELD) == 2 * ROOM
    assert [bytes(message) for message in kept] == [bytes([n]) * 1000 for n in range(4)]
    for message, left in zip(kept, (1, 0, 0, 0), strict=True):
        message.release()
        await wire.run()
        assert link.pool.out == left
        assert budget.held(HELD) == left * ROOM
    await wire.close()


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("copied", [False, True])
async def test_g01_what_is_sent_counts_until_it_is_deregistered(
    monkeypatch: pytest.MonkeyPatch, *, copied: bool, lost: bool
) -> None:
    copy_up_to(monkeypatch, ROOM if copied else 0)
    wire = await opened()
    sends = wire.links[0].memory.sends
    send = asyncio.create_task(wire.ends[0].send(bytes(1000)))
    await settle()
    region: Any
    (region,) = FakeRegion.regions.values()
    size = sends.held()
    assert size == (ROOM if copied else 1000)
    retain(region)  # the thread that deregisters it is late
    if lost:
        await wire.lose()
        with pytest.raises(ConnectionLostError):
            await send
    else:
        receive = asyncio.create_task(wire.ends[1].recv())
        await wire.run()
        (await receive).release()
        await wire.run()
        await send
    assert (region.closed, sends.held()) == (True, size)
    let_go(region)
    assert sends.held() == 0
    if not lost:
        await wire.close()


@pytest.mark.parametrize("source", ["attacker", "honest"])
async def test_g01_a_slow_fetch_ends_while_another_source_waits(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Without anything else in the budget, or with one of its own source, it may take its time."""
    look_each(monkeypatch, 0.01)
    budget = Budget(2 * ROOM)  # one at a time
    assert budget.lease(AHEAD, ROOM, "ahead")
    config = dataclasses.replace(CONFIG, receive_buffer_size=1)
    wires = [await opened(config, config) for _ in range(2)]
    for wire, name in zip(wires, ("attacker", source), strict=True):
        wire.links[1].account = Account(budget, name)
        wire.links[1].at_close(wire.links[1].account.close)
    announce(wires[0], 1)
    stuck, receive = (asyncio.create_task(wire.ends[1].recv()) for wire in wires)
    await settle()
    await asyncio.sleep(0.1)  # ten looks, and nothing waits
    assert wires[0].links[1].failure is None
    send = asyncio.create_task(wires[1].ends[0].send(b"honest" * 100))
    loop = asyncio.get_running_loop()
    until = loop.time() + (0.1 if source == "attacker" else 15)
    while not receive.done() and loop.time() < until:
        wires[1].settle()
        await asyncio.sleep(0.001)
    assert receive.done() == (source == "honest")
    if source == "honest":
        with receive.result() as message:
            assert bytes(message) == b"honest" * 100
        with pytest.raises(ConnectionLostError, match="at less than 1048576 bytes per second"):
            await asyncio.wait_for(stuck, 5)
        await wires[1].run()
        await send
    for wire in wires:
        await wire.lose()
    await asyncio.gather(stuck, receive, send, return_exceptions=True)
    assert (budget.held(AHEAD), budget.held(SMALL, LARGE)) == (ROOM, 0)


async def test_g01_a_fetch_that_gets_on_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for each piece: many take longer than it in all."""
    limit_fetches(monkeypatch, 2)
    config = dataclasses.replace(CONFIG, one_sided_depth=2)
    wire = await opened(config, config)
    size = 5 << 20
    send = asyncio.create_task(wire.ends[0].send(bytes(size)))
    receive = asyncio.create_task(wire.ends[1].recv())
    link = wire.links[1]
    begun = asyncio.get_running_loop().time()
    pieces = 0
    while not receive.done():
        reads, link.reads = link.reads, type(link.reads)()
        wire.settle()  # everything but the reads
        link.reads.extend(reads)
        if link.reads and asyncio.get_running_loop().time() - begun > 0.5 * pieces:
            pieces += 1
            link.read()
        await asyncio.sleep(0.001)
    assert asyncio.get_running_loop().time() - begun > 2
    assert len(await receive) == size
    await wire.run()
    await send
    await wire.close()


async def test_g01_a_peer_that_serves_no_reads_is_refused() -> None:
    wire = Wire(CONFIG, CONFIG)
    window = receiver_of(wire.ends[0]).window.size
    meet(wire.ends[1], hello_of(CONFIG, b"", window, check=True), 0)
    greeting = greeting_of(wire.ends[1])
    wire.meet(0)
    greet(wire.ends[0])
    wire.settle()
    await greeting
    announce(wire, 1)
    with pytest.raises(ProtocolError, match="serves no RDMA reads"):
        await asyncio.wait_for(wire.ends[1].recv(), 5)
    assert FakeRegion.regions == {}
    await wire.lose()


@pytest.mark.parametrize("asking", [False, True])
@pytest.mark.parametrize(
    ("kind", "alive_if_asking"),
    [
        (FrameKind.CREDIT, ()),
        (FrameKind.PING, (False,)),
        (FrameKind.DATA, (False, True)),
        (FrameKind.PONG, (True,)),
        (FrameKind.END, ()),
    ],
)
async def test_g01_what_is_a_sign_of_life(
    kind: FrameKind, alive_if_asking: tuple[bool, ...], *, asking: bool
) -> None:
    """A peer may send these for ever, although this side's PING hangs behind a read."""
    wire = await opened()
    link = wire.links[1]
    if asking:
        assert link.state.ask_life() == 0
    link.state.was_alive()
    link.inject(FRAME.pack(kind, 0, 0, 0, 0))
    assert link.state.facts()["alive"] == (asking in alive_if_asking)
    await settle()
    assert link.failure is None
    await wire.lose()


async def test_g04_without_the_check_what_the_adapter_did_is_seen() -> None:
    def wrong_tail(view: memoryview) -> None:
        """What Soft-RoCE does: a read completes before its tail has arrived."""
        view[-7:] = bytes(7)

    wire = await opened(CONFIG, UNCHECKED)
    wire.links[1].damage = wrong_tail
    send = asyncio.create_task(wire.ends[0].send(b"x" * 1000))
    receive = asyncio.create_task(wire.ends[1].recv())
    await wire.run()
    message = await receive
    assert bytes(message) == b"x" * 993 + bytes(7)
    message.release()
    await send
    await wire.close()


async def test_g04_each_side_asks_for_itself() -> None:
    wire = await opened(CONFIG, UNCHECKED)
    for sender, size in ((0, RENDEZVOUS.size), (1, RENDEZVOUS.size + 4)):
        send = asyncio.create_task(wire.ends[sender].send(bytes(500)))
        receive = asyncio.create_task(wire.ends[1 - sender].recv())
        await wire.run()
        (await receive).release()
        await send
        assert [len(body) for body in announcements(wire, sender)] == [size]
    assert [end.get_extra_info("large_messages_checked") for end in wire.ends] == [True, False]
    await wire.close()


async def test_g01_what_is_fetched_ahead_has_to_fit_the_budget() -> None:
    wire = await opened()
    budget = Budget(2 * ROOM)
    wire.links[1].account = Account(budget, "peer")
    sends = [asyncio.create_task(wire.ends[0].send(bytes([n]) * 1000)) for n in range(2)]
    await wire.run()
    assert wire.links[1].pool.out == 1
    for number in range(2):
        receive = asyncio.create_task(wire.ends[1].recv())
        await wire.run()
        with await receive as message:
            assert bytes(message) == bytes([number]) * 1000
        await wire.run()
    await asyncio.gather(*sends)
    assert (budget.held(AHEAD), budget.held(SMALL, LARGE)) == (0, 0)
    await wire.close()


async def test_g01_the_messages_of_others_wait_for_one_that_hangs_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten connections with one budget; nine peers announce, and serve nothing."""
    limit_fetches(monkeypatch, 0.1)
    budget = Budget(2 * ROOM)  # one at a time
    assert budget.lease(AHEAD, ROOM, "ahead")
    patient = dataclasses.replace(CONFIG, receive_buffer_size=1)
    wires = [await opened(patient, patient) for _ in range(10)]
    regions = FakeRegion.regions
    for wire in wires:
        wire.links[1].account = Account(budget, "peer")
        wire.links[1].at_close(wire.links[1].account.close)
    receives = [asyncio.create_task(wire.ends[1].recv()) for wire in wires]
    for wire in wires[:9]:
        announce(wire, 1)
    await settle()
    assert len(regions) == 1
    send = asyncio.create_task(wires[9].ends[0].send(b"honest" * 100))
    loop = asyncio.get_running_loop()
    until = loop.time() + 15
    while not receives[9].done():
        wires[9].settle()
        assert len(regions) <= 2, "its own, and that of one that hangs"
        assert loop.time() < until, "a fetch that hangs holds its share"
        await asyncio.sleep(0.001)
    with receives[9].result() as message:
        assert bytes(message) == b"honest" * 100
    for receive in receives[:9]:
        with pytest.raises(ConnectionLostError, match="nothing of a large message") as error:
            await asyncio.wait_for(receive, 5)
        assert isinstance(error.value.__cause__, TimeoutError)
    await wires[9].run()
    await send
    for wire in wires:
        await wire.lose()
    assert (budget.held(AHEAD), budget.held(SMALL, LARGE)) == (ROOM, 0)
