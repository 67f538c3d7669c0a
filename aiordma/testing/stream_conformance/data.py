"""Checks of writing and receiving: every byte, once, in order, whatever it was written from."""

from __future__ import annotations

import array
import asyncio
import hashlib
import random
from typing import Any

from aiordma.testing.stream_conformance.link import Link, Subject, each_role
from aiordma.testing.stream_conformance.recorder import Record

__all__ = ["DataChecks", "raises"]


def raises(kinds: type[BaseException] | tuple[type[BaseException], ...], call: Any, *a: Any) -> str:
    """Return the message with which a call raises one of `kinds`; AssertionError if it does not."""
    try:
        call(*a)
    except kinds as error:
        return str(error)
    raise AssertionError(f"{call!r} with {a!r} raised nothing, {kinds} was expected")


class DataChecks(Subject):
    """Bytes."""

    @each_role
    async def test_first_call_is_connection_made(self, link: Link) -> None:
        """`connection_made` is called once, before anything else, with the transport."""
        await link.open()
        assert link.end.calls == ["connection_made"], link.end.describe()
        assert link.end.transport.get_protocol() is link.end
        assert not link.end.transport.is_closing()
        is_subclass = isinstance(link.end.transport, asyncio.Transport)
        assert is_subclass != self.differs("foreign class")

    @each_role
    async def test_bytes_arrive_in_order(self, link: Link) -> None:
        """Many small writes arrive whole and in order."""
        await link.open()
        pieces = [b"%d," % number for number in range(2000)]
        for piece in pieces:
            link.end.transport.write(piece)
        await link.peer.until_received(len(b"".join(pieces)))
        assert link.peer.received == b"".join(pieces)

    @each_role
    async def test_data_received_is_given_bytes(self, link: Link) -> None:
        """`data_received` is given `bytes`, which its owner may keep."""
        kept: list[Any] = []
        link.end.on["data_received"] = kept.append
        await link.open()
        for number in range(20):
            link.peer.transport.write(b"%d" % (number % 10))
            await link.end.until_received(number + 1)
        assert all(isinstance(data, bytes) for data in kept), kept
        assert b"".join(kept) == b"01234567890123456789"

    @each_role
    async def test_write_takes_any_buffer(self, link: Link) -> None:
        """Bytes, bytearrays and views, of read-only memory and of parts too."""
        await link.open()
        base = bytes(range(256))
        for data in (
            base,
            bytearray(base),
            memoryview(base),
            memoryview(bytearray(base)),
            memoryview(base + base)[128:384],
        ):
            link.peer.received.clear()
            link.end.transport.write(data)
            await link.peer.until_received(256)
            assert link.peer.received == bytes(data)

    @each_role
    async def test_write_takes_views_of_numbers(self, link: Link) -> None:
        """A contiguous view is its bytes, whatever its format and shape."""
        await link.open()
        numbers = array.array("I", range(1000))
        views = (
            memoryview(numbers),
            memoryview(numbers.tobytes()).cast("d"),
            memoryview(numbers.tobytes()).cast("B", (40, 100)),
        )
        for view in views:
            link.peer.received.clear()
            link.end.transport.write(view)
            await link.peer.until_received(4000)
            assert link.peer.received == numbers.tobytes()

    @each_role
    async def test_write_of_a_strided_view(self, link: Link) -> None:
        """A view with gaps is refused, and harms nothing."""
        await link.open()
        view = memoryview(bytes(range(200)))[::2]
        if self.differs("gaps are filled"):
            link.end.transport.write(view)
            await link.peer.until_received(100)
            assert link.peer.received == view.tobytes()
        elif not self.differs("gaps are fatal"):
            raises((BufferError, TypeError, ValueError), link.end.transport.write, view)
            await link.turns(1)
            assert link.peer.received == b"."
        else:
            link.end.transport.write(view)
            await link.end.until_lost()
            error = link.report()["exception"]
            assert isinstance(error, (BufferError, ValueError)), error
            assert link.end.lost is error
            assert not link.peer.received

    @each_role
    async def test_write_refuses_what_is_no_buffer(self, link: Link) -> None:
        """A wrong type raises TypeError and harms nothing."""
        await link.open()
        wrongs: tuple[Any, ...] = (1, "text", [b"bytes"], object())
        empties: tuple[Any, ...] = ([], None, "")
        for wrong in wrongs:
            raises(TypeError, link.end.transport.write, wrong)
        for empty in empties:
            if self.differs("nothing of any type"):
                link.end.transport.write(empty)
            else:
                raises(TypeError, link.end.transport.write, empty)
        raises(TypeError, link.end.transport.writelines, ["text"])
        await link.turns(1)
        assert link.peer.received == b"."

    @each_role
    async def test_write_of_nothing(self, link: Link) -> None:
        """An empty write is allowed and has no effect."""
        await link.open()
        for nothing in (b"", bytearray(), memoryview(b"")):
            link.end.transport.write(nothing)
        link.end.transport.writelines([])
        link.end.transport.writelines([b"", b""])
        await link.turns(3)
        assert link.peer.received == b"..."

    @each_role
    async def test_write_leaves_the_buffer_to_its_owner(self, link: Link) -> None:
        """The caller may change, or even shrink, its buffer as soon as `write` has returned."""
        await link.open()
        link.peer.transport.pause_reading()
        if self.differs("buffers are kept"):
            await link.fill()
            data = bytearray(100_000)
            link.end.transport.write(data)
            data[:] = b"\xff" * len(data)
            link.peer.transport.resume_reading()
            await link.peer.until(lambda: link.peer.received.endswith(b"\xff" * len(data)))
            return
        expected = bytearray()
        data = bytearray(100_000)
        for number in range(40):
            data[:] = bytes([number]) * len(data)
            expected += data
            link.end.transport.write(data if number % 2 else memoryview(data))
        link.end.transport.writelines([data, memoryview(data)])
        expected += data + data
        data[:] = b"\xff" * len(data)
        data.clear()  # BufferError if the transport still holds it
        link.peer.transport.resume_reading()
        await link.peer.until_received(len(expected))
        assert link.peer.received == expected

    @each_role
    async def test_writelines(self, link: Link) -> None:
        """`writelines` is many writes, of any iterable of any buffers."""
        await link.open()
        link.end.transport.writelines([b"one ", bytearray(b"two "), memoryview(b"three ")])
        link.end.transport.writelines(iter([b"four ", b"", b"five"]))
        await link.peer.until_received(23)
        assert link.peer.received == b"one two three four five"

    @each_role
    async def test_bulk_both_ways_at_once(self, link: Link) -> None:
        """Much data both ways at once, in pieces of random sizes, under the flow control."""
        await link.open()
        seed = random.randrange(2**32)
        print(f"seed of the data: {seed}")

        async def send(end: Record, source: random.Random) -> str:
            digest, left = hashlib.sha256(), self.bulk_size
            while left:
                data = source.randbytes(min(left, source.choice((1, 100, 5000, 65536, 300_000))))
                digest.update(data)
                left -= len(data)
                end.transport.write(data)
                await end.until(lambda: not end.is_paused)
                await asyncio.sleep(0)
            return digest.hexdigest()

        sent = await asyncio.gather(
            send(link.end, random.Random(seed)), send(link.peer, random.Random(seed + 1))
        )
        for digest, receiver in zip(sent, (link.peer, link.end), strict=True):
            await receiver.until_received(self.bulk_size)
            assert hashlib.sha256(receiver.received).hexdigest() == digest
