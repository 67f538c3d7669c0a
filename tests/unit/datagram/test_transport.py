"""The datagram transport on an adapter of the test's own, event by event."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from aiordma import ConnectionLostError, metrics
from aiordma.datagram import destinations, transport
from aiordma.metrics.snapshot import DatagramMetrics
from tests.inside.datagram import connect, start, unanswered_of

from ..conftest import Run, settle
from .bench import Bench, FakePort, Protocol, transport_on

A, B = ("10.0.0.1", 7000), ("10.0.0.2", 7000)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    async def make(**options: Any) -> Bench:
        return await Bench(monkeypatch, **options).start()

    return make


Make = Callable[..., Any]


async def test_each_destination_waits_for_itself(bench: Make) -> None:
    b = await bench()
    for n, where in enumerate((A, B, A, B)):
        b.transport.sendto(bytes([n]), where)
    assert b.transport.get_write_buffer_size() == 4 * 9
    await b.find(B)
    assert b.sent == [b"\1", b"\3"]
    b.transport.sendto(b"\4", B)
    await b.find(A)
    b.transport.sendto(b"\5", A)
    assert b.sent == [b"\1", b"\3", b"\4", b"\0", b"\2", b"\5"]
    assert [key[1] for _, key in b.port.sent] == [B[0]] * 3 + [A[0]] * 3
    assert b.transport.get_write_buffer_size() == 0
    assert not b.looking["service", *A]
    b.transport.abort()
    await settle()


async def test_what_was_given_may_be_changed_at_once(bench: Make) -> None:
    b = await bench()
    data = bytearray(b"first")
    b.transport.sendto(data, A)
    data[:] = b"later"
    await b.find(A)
    b.port.room = 0
    b.transport.sendto(data, A)
    data[:] = b"wrong"
    b.port.complete()
    assert b.sent == [b"first", b"later"]
    b.transport.abort()
    await settle()


async def test_order_is_kept_when_slots_run_out(bench: Make) -> None:
    b = await bench()
    b.transport.sendto(b"0", A)
    await b.find(A)
    b.port.room = 1
    for n in range(1, 6):
        b.transport.sendto(b"%d" % n, A)
    assert b.sent == [b"0", b"1"]
    b.port.complete(2)
    assert b.sent == [b"0", b"1", b"2", b"3"]
    b.transport.sendto(b"6", A)
    b.port.complete(4)
    assert b.sent == [b"%d" % n for n in range(7)]
    b.transport.abort()
    await settle()


async def test_pause_and_resume(bench: Make) -> None:
    b = await bench()
    b.transport.set_write_buffer_limits(high=20, low=10)
    b.protocol.on["resume"] = lambda: b.transport.sendto(b"y", A)
    b.transport.sendto(b"12345", A)
    assert not b.calls
    b.transport.sendto(b"", A)  # counts, too
    assert b.calls == ["pause"]
    b.transport.sendto(b"x", A)
    await b.find(A)
    assert b.calls == ["pause", "resume"]
    # What a protocol sends while it is told comes behind what waited before.
    assert b.sent == [b"12345", b"", b"x", b"y"]
    b.transport.abort()
    await settle()


async def test_g09_answers_to_unknown_senders_leave_room_for_others(bench: Make) -> None:
    b = await bench(max_buffer_size=200)
    b.transport.set_write_buffer_limits(high=30, low=10)
    for n in range(20):
        b.transport.sendto(b"forged", ("10.1.0.1", 0, 1 + n))  # 14 bytes each
    await settle()
    assert b.calls == [("error", "RdmaOSError")] * 13, "and the protocol is not paused"
    b.calls.clear()
    assert b.transport.get_write_buffer_size() == 0
    for n in range(7):
        b.transport.sendto(bytes([n]) * 6, A)
    assert b.calls == ["pause"]
    await b.find(A)
    assert b.sent == [bytes([n]) * 6 for n in range(7)]
    assert b.calls == ["pause", "resume"]
    # A sender that is found gets its answer; the room of the others is given back.
    await b.find_key(("queue", "10.1.0.1", 1))
    assert b.sent[7:] == [b"forged"]
    for n in range(1, 7):
        await b.find_key(("queue", "10.1.0.1", 1 + n), OSError(113, "silent"))
    assert unanswered_of(b.transport) == 0
    assert b.transport.get_write_buffer_size() == 0
    for n in range(7):
        b.transport.sendto(b"forged", ("10.1.0.1", 0, 100 + n))
    b.calls.clear()
    await settle()
    assert not b.calls
    b.transport.abort()
    await settle()


async def test_a_destination_that_is_not_found(bench: Make) -> None:
    b = await bench()
    for _ in range(3):
        b.transport.sendto(b"x", A)
    b.transport.sendto(b"y", B)
    await b.find(A, ConnectionRefusedError(111, "nobody"))
    assert b.calls == [("error", "ConnectionRefusedError")]
    assert b.transport.get_write_buffer_size() == 9
    b.transport.sendto(b"again", A)  # looked for anew
    await b.find(A)
    await b.find(B)
    assert b.sent == [b"again", b"y"]
    b.transport.abort()
    await settle()


async def test_refresh(bench: Make) -> None:
    b = await bench(refresh_s=0.01)
    b.transport.sendto(b"1", A)
    await b.find(A)
    await asyncio.sleep(0.02)
    b.transport.sendto(b"2", A)  # goes out at once, and the service is asked for beside it
    assert b.sent == [b"1", b"2"]
    b.transport.sendto(b"3", A)
    await settle()
    assert len(b.looking["service", *A]) == 1
    b.port.room = 0
    b.transport.sendto(b"lost with it", A)
    await b.find(A, ConnectionRefusedError(111, "gone"))
    assert b.calls == [("error", "ConnectionRefusedError")]
    b.port.complete(3)
    assert b.transport.get_write_buffer_size() == 0
    b.transport.sendto(b"4", A)
    assert b.transport.get_write_buffer_size() == 9
    await b.find(A)
    assert b.sent == [b"1", b"2", b"3", b"4"]
    b.transport.abort()
    await settle()


async def test_too_many_destinations(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "MOST_DESTINATIONS", 1)
    b = await bench()
    b.transport.sendto(b"1", A)
    b.transport.sendto(b"2", B)  # the only place is being looked for
    await settle()
    assert b.calls == [("error", "RdmaOSError")]
    await b.find(A)
    b.port.room = 0
    b.transport.sendto(b"3", A)
    b.transport.sendto(b"4", B)  # A is in use
    await settle()
    assert b.calls == [("error", "RdmaOSError")] * 2
    b.port.complete()
    b.transport.sendto(b"5", B)  # A has to go
    await b.find(B)
    b.port.complete()
    assert b.sent == [b"1", b"3", b"5"]
    assert b.transport.get_write_buffer_size() == 0
    b.transport.abort()
    await settle()


async def test_close_waits_for_what_was_given(bench: Make) -> None:
    b = await bench()
    b.transport.sendto(b"1", A)
    b.transport.close()
    assert b.transport.is_closing()
    b.port.arrive(0, b"too late")
    await b.find(A)
    assert b.sent == [b"1"]
    assert not b.calls, "it is with the adapter still"
    assert not b.port.closed
    b.port.complete()
    b.transport.close()
    assert not b.calls, "in a turn of its own"
    await settle()
    assert b.calls == [("lost", None)]
    assert b.port.closed
    b.transport.abort()
    await settle()
    assert len(b.calls) == 1
    await b.transport.wait_closed()


async def test_close_does_not_wait_for_ever(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CLOSE_TIMEOUT_S", 0.05)
    b = await bench()
    b.transport.sendto(b"1", A)  # is never found
    b.transport.close()
    while not b.calls:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert b.calls == [("lost", None)]
    assert b.sent == []


async def test_close_with_a_destination_that_is_not_found(bench: Make) -> None:
    b = await bench()
    b.transport.sendto(b"1", A)
    b.transport.close()
    await b.find(A, ConnectionRefusedError(111, "nobody"))
    assert b.calls == [("error", "ConnectionRefusedError"), ("lost", None)]


async def test_a_failure_ends_it_with_its_cause(bench: Make) -> None:
    b = await bench()
    cause = ConnectionResetError(104, "the RDMA device was removed")
    b.port.fail(cause)
    b.port.fail(OSError(5, "a consequence"))
    b.transport.close()
    await settle()
    assert b.calls == [("lost", cause)]
    assert not b.reports


@pytest.mark.parametrize("reported", [False, True])
async def test_a_failure_before_it_begins(monkeypatch: pytest.MonkeyPatch, reported: bool) -> None:
    """Its protocol is not told of an end that came before the beginning."""
    b = Bench(monkeypatch)
    b.port.fail(ConnectionResetError(104, "the RDMA device was removed"))
    if reported:
        await settle()
    with pytest.raises(ConnectionLostError, match="the RDMA device was removed"):
        await start(b.transport, b.protocol)
    b.transport.abort()
    await settle()
    assert not b.calls
    assert b.port.closed


async def test_a_new_beginning_is_told_as_an_error(bench: Make) -> None:
    b = await bench()
    b.transport.sendto(b"1", A)
    await b.find(A)
    b.port.room = 0
    b.transport.sendto(b"2", A)
    b.port.room, b.port.sending = 1, 0
    b.port.on_restarted(OSError(100, "down"), 1)
    assert b.calls == [("error", "OSError")]
    assert b.sent == [b"1", b"2"]
    b.transport.abort()
    await settle()


async def test_each_datagram_is_counted(bench: Make) -> None:
    before = metrics.snapshot().totals
    b = await bench(max_buffer_size=100)
    b.transport.sendto(b"12", A)
    b.transport.sendto(b"345", A)
    assert seen_of(b) == (0, 0, 0, 0, 0, 0, 21), "none has been given to the adapter"
    await b.find(A)
    assert seen_of(b) == (2, 5, 0, 0, 0, 0, 0)
    b.transport.sendto(b"x", B)
    await b.find(B, OSError(113, "no way"))
    b.transport.sendto(bytes(1000), B)
    assert seen_of(b)[4] == 2, "no way to the receiver; no room"
    b.port.room = 0
    b.transport.sendto(b"9", A)
    b.port.on_restarted(OSError(100, "down"), 1)
    b.port.arrive(0, b"answer")
    (seen,) = ours_of(b)
    assert seen.waiting_to_be_received == 1
    await settle()
    assert seen_of(b) == (2, 5, 1, 6, 3, 0, 9)
    (seen,) = ours_of(b)
    assert (seen.state, seen.device, seen.qpn, seen.pinned_bytes) == ("open", "fake0", 17, 5000)
    assert (seen.sockname, seen.peername) == (("10.0.0.9", 5), None)
    b.transport.sendto(b"looked for", B)
    b.transport.abort()
    await settle()
    assert not ours_of(b)
    after = metrics.snapshot().totals
    assert after.datagrams_sent - before.datagrams_sent == 2
    assert after.datagram_bytes_sent - before.datagram_bytes_sent == 5
    assert after.datagrams_received - before.datagrams_received == 1
    assert after.datagram_bytes_received - before.datagram_bytes_received == 6
    assert after.datagrams_dropped - before.datagrams_dropped == 5, "two waited at the end"


async def test_datagrams_of_others_are_counted_apart(bench: Make) -> None:
    b = await bench()
    connecting = asyncio.create_task(connect(b.transport, A))
    await b.find(A)
    await connecting
    b.port.arrive(0, b"of another", host="10.0.0.2")
    await settle()
    assert not b.calls
    assert seen_of(b) == (0, 0, 0, 0, 0, 1, 0)
    (seen,) = ours_of(b)
    assert seen.peername == A
    b.transport.abort()
    await settle()


def ours_of(b: Bench) -> list[DatagramMetrics]:
    number = b.transport.get_extra_info("number")
    return [each for each in metrics.snapshot().datagrams if each.number == number]


def seen_of(b: Bench) -> tuple[int, ...]:
    (seen,) = ours_of(b)
    return (
        seen.datagrams_sent, seen.bytes_sent, seen.datagrams_received, seen.bytes_received,
        seen.dropped, seen.ignored, seen.waiting_to_be_sent,
    )  # fmt: skip


def test_sendto_after_the_end(bench: Make, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        b = await bench()
        b.transport.close()
        for _ in range(10):
            b.transport.sendto(b"x", A)
        with pytest.raises(TypeError):
            b.transport.sendto("text", A)
        await settle()
        assert b.calls == [("lost", None)]
        assert b.sent == []

    with caplog.at_level(logging.WARNING, "aiordma"):
        run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "sendto() on a closed datagram transport"
    ]


async def test_datagrams_come_in_turns(bench: Make) -> None:
    b = await bench()
    for n in range(200):
        b.port.arrive(n, b"%d" % n)
    assert not b.calls
    assert not b.port.posted
    await asyncio.sleep(0)
    assert len(b.calls) == 64
    assert b.port.posted == list(range(64))
    await settle(10)
    assert b.calls == [("received", b"%d" % n) for n in range(200)]
    assert b.port.posted == list(range(200))
    b.transport.abort()
    await settle()


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_nothing_is_delivered_after_the_end(bench: Make, end: str) -> None:
    b = await bench()
    b.protocol.on["received"] = lambda _: getattr(b.transport, end)()
    for n in range(100):
        b.port.arrive(n, b"%d" % n)
    await settle(10)
    assert b.calls == [("received", b"0"), ("lost", None)]


async def test_a_protocol_that_raises(bench: Make) -> None:
    b = await bench()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for name in ("received", "error", "pause", "lost"):
        b.protocol.on[name] = fail
    b.transport.set_write_buffer_limits(high=0)
    b.port.arrive(0, b"0")
    b.port.arrive(1, b"1")
    b.transport.sendto(b"x", A)
    await b.find(A, OSError(5, "no"))
    b.transport.abort()
    await settle()
    assert [report["message"] for report in b.reports] == [
        f"protocol.{name}() failed"
        for name in (
            "pause_writing", "datagram_received", "datagram_received", "error_received",
            "connection_lost",
        )
    ]  # fmt: skip
    assert b.port.closed


async def test_another_protocol(bench: Make) -> None:
    b = await bench()
    other = Protocol()
    b.transport.set_protocol(other)
    assert b.transport.get_protocol() is other
    b.port.arrive(0, b"x")
    b.transport.set_write_buffer_limits(high=0)
    b.transport.sendto(b"x", A)
    await settle()
    b.transport.abort()
    await settle()
    assert other.calls == ["pause", ("received", b"x"), ("lost", None)]
    assert not b.calls


def test_one_that_is_forgotten_warns(run: Run) -> None:
    port = FakePort()

    async def main() -> None:
        transport = transport_on(port)
        port.start(Mock())  # a real one is held by its completion channel
        del transport
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed <RdmaDatagramTransport open"):
        run(main())
    assert port.closed


async def test_a_full_buffer_drops_the_newest(bench: Make) -> None:
    b = await bench(max_buffer_size=30)
    for n in range(4):
        b.transport.sendto(bytes([n]) * 5, A)  # 13 each
    await settle()
    assert b.calls == [("error", "RdmaOSError")] * 2
    await b.find(A)
    assert b.sent == [bytes([n]) * 5 for n in (0, 1)]
    b.transport.abort()
    await settle()


async def test_abort(bench: Make) -> None:
    b = await bench()
    b.port.arrive(0, b"unread")
    b.transport.sendto(b"1", A)
    b.transport.abort()
    assert not b.calls
    await settle()
    assert b.calls == [("lost", None)]
    assert b.port.closed
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
