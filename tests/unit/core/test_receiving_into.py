"""`recv_into()`: C copies a message into memory of the program, which stays exported meanwhile."""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiordma._core import Message
from aiordma.errors import (
    ConnectionEndedError,
    MessageTooLargeError,
    ResourceClosedError,
)
from tests.exports import exported
from tests.inside.endpoint import left_is

from ..conftest import Run, settle
from ..endpoint.test_sender import ended, lost
from .test_message_waiting import Side, result, traced
from .test_wakeup import called_by_the_loop

TRACED = pytest.mark.parametrize("trace", [False, True])


async def parked(side: Side, buffer: Any) -> asyncio.Task[int]:
    """A task that waits in C for a message that is copied into the buffer."""
    task: asyncio.Task[int] = asyncio.create_task(side.core.recv_into(buffer))
    await settle()
    assert not task.done()
    assert side.state.receive_wakeup.waiting
    assert side.state.awaited_into
    return task


def nothing_is_held(side: Side, buffer: bytearray) -> None:
    """No call waits, and the buffer is not exported."""
    assert not side.state.receive_wakeup.waiting
    assert not side.state.awaited_into
    buffer.append(0)
    buffer.pop()


@TRACED
def test_a_message_that_is_there_takes_no_turn(run: Run, trace: bool) -> None:
    async def main() -> None:
        side, buffer = Side(), bytearray(b"-----")
        side.arrives(b"one")
        with traced(trace):
            task = asyncio.create_task(side.core.recv_into(buffer))
            await asyncio.sleep(0)
        assert task.done()
        assert await task == 3
        assert buffer == b"one--"
        nothing_is_held(side, buffer)
        assert side.state.facts()["messages_received"] == 1
        assert len(side.link.ready) + side.state.facts()["n_back"] == side.link.slots.recv.count

    run(main())


@TRACED
def test_a_parked_task_is_resumed_by_the_drain(run: Run, trace: bool) -> None:
    async def main() -> None:
        side, log, buffer = Side(), list[object](), bytearray(8)

        async def work() -> None:
            for _ in range(3):
                log.append(buffer[: await side.core.recv_into(buffer)])

        def drain(body: bytes) -> None:
            side.arrives(body)
            side.tell()
            log.append("drained")

        with traced(trace):
            task = asyncio.create_task(work())
            for body in (b"a", b"", b"ccc"):
                await settle()
                assert side.state.awaited_into
                await called_by_the_loop(lambda body=body: drain(body))  # type: ignore[misc]
            await task
        assert log == [b"a", "drained", b"", "drained", b"ccc", "drained"]
        nothing_is_held(side, buffer)

    run(main())


def test_a_bytearray_cannot_be_resized_while_it_is_waited_for(run: Run) -> None:
    async def main() -> None:
        side, buffer = Side(), bytearray(8)
        task = await parked(side, buffer)
        with pytest.raises(BufferError):
            buffer.append(0)
        side.arrives(b"x")
        with pytest.raises(BufferError):
            buffer.clear()
        await called_by_the_loop(side.tell)
        assert await result(task) == 1
        nothing_is_held(side, buffer)

    run(main())


def test_it_cannot_be_resized_where_c_leaves_the_call_to_python(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next task in line is in the way; between the two exports there is no gap."""

    async def main() -> None:
        side, buffer = Side(), bytearray(8)
        real, tries = side.core._recv_into_in_python, list[bool]()

        def go_on(into: bytearray, waited: bool) -> Any:
            with pytest.raises(BufferError):
                into.append(0)
            tries.append(waited)
            return real(into, waited)

        monkeypatch.setattr(side.core, "_recv_into_in_python", go_on)
        task = await parked(side, buffer)
        second = asyncio.create_task(side.recv())
        await settle()
        side.arrives(b"x")
        side.arrives(b"y")
        await called_by_the_loop(side.tell)
        assert await result(task) == 1
        assert tries == [True]
        assert await result(second) == b"y"
        nothing_is_held(side, buffer)

    run(main())


@pytest.mark.parametrize("arrival", ["before", "between", "after"])
@pytest.mark.parametrize("way", ["arrives", "by_python"])
def test_cancellation_loses_nothing(run: Run, way: str, arrival: str) -> None:
    async def main() -> None:
        side, buffer = Side(), bytearray(8)
        task = await parked(side, buffer)
        arrive: Callable[[bytes], None] = getattr(side, way)
        if arrival == "before":
            arrive(b"x")
        task.cancel()
        if arrival == "between":
            arrive(b"x")
        side.tell()
        with pytest.raises(asyncio.CancelledError):
            await task
        nothing_is_held(side, buffer)
        if arrival == "after":
            arrive(b"x")
        assert buffer == bytes(8)
        assert await result(asyncio.create_task(side.core.recv_into(buffer))) == 1
        assert buffer == b"x" + bytes(7)

    run(main())


@pytest.mark.parametrize("how", ["close", "throw", "drop"])
@pytest.mark.parametrize("stage", ["fresh", "waiting"])
def test_a_call_that_is_given_up_lets_go_of_the_buffer(run: Run, stage: str, how: str) -> None:
    async def main() -> None:
        side, buffer = Side(), bytearray(8)
        coroutine = side.core.recv_into(buffer)
        if stage == "waiting":
            coroutine.send(None)
            assert side.state.awaited_into
        elif how == "drop":
            coroutine.close()
        buffers = list[bool]()

        def left() -> None:
            buffers.append(side.state.awaited_into)

        with pytest.MonkeyPatch.context() as patch:
            left_is(patch, left)
            if how == "close":
                coroutine.close()
            elif how == "throw":
                with pytest.raises(OSError, match="thrown"):
                    coroutine.throw(OSError("thrown"))
            del coroutine
            gc.collect()
        assert buffers == ([False] if stage == "waiting" else [])
        nothing_is_held(side, buffer)
        side.arrives(b"x")
        assert await side.recv() == b"x"

    run(main())


@TRACED
@pytest.mark.parametrize("waits", [False, True])
def test_a_buffer_that_is_too_small_takes_nothing(run: Run, waits: bool, trace: bool) -> None:
    async def main() -> None:
        side, small, buffer = Side(), bytearray(2), bytearray(3)
        with traced(trace):
            task = await parked(side, small) if waits else None
            second = asyncio.create_task(side.core.recv_into(buffer)) if waits else None
            await settle()
            side.arrives(b"one")
            await called_by_the_loop(side.tell)
            for _ in range(1 if waits else 3):
                with pytest.raises(MessageTooLargeError, match="3 bytes, the buffer 2") as caught:
                    await (task or side.core.recv_into(small))
                assert caught.value.size == 3
            assert small == bytes(2)
            small.append(0)
            assert await (second or side.core.recv_into(buffer)) == 3
        assert buffer == b"one"
        nothing_is_held(side, buffer)

    run(main())


def test_the_program_can_release_its_memoryview(run: Run) -> None:
    """The call has an export of its own, of which the buffer behind both tells."""

    async def main() -> None:
        side, buffer = Side(), bytearray(8)
        with memoryview(buffer) as view:
            task = await parked(side, view)
        assert exported(buffer)
        side.arrives(b"x")
        await called_by_the_loop(side.tell)
        assert await result(task) == 1
        assert buffer[0] == ord("x")
        nothing_is_held(side, buffer)

    run(main())


class Masked:
    """As numpy's masked arrays, it has bytes that are not all of it; but it is no array."""

    mask = None


async def outcome(side: Side, thing: Any) -> object:
    """What a call comes to, if a message of two bytes is there."""
    side.arrives(b"ab")
    try:
        return await side.core.recv_into(thing)
    except Exception as exc:
        (await side.core.recv()).release()
        return type(exc), str(exc)
    finally:
        side.tell()


def test_c_takes_what_python_takes_and_refuses_what_it_refuses(run: Run) -> None:
    square = np.zeros((8, 8))
    with memoryview(bytearray(8)) as released:
        pass
    things: list[Any] = [
        None, 5, "text", object(), b"", b"read-only", memoryview(b"read-only"), bytearray(),
        bytearray(1), bytearray(2), released, memoryview(bytearray(64))[::2],
        memoryview(bytearray(8)), memoryview(bytearray()), square, square.T, square[:, 1],
        np.zeros(0), np.zeros(3, dtype=[("a", "<u2"), ("b", ">f8")]), np.zeros(3, dtype=object),
        np.ma.masked_array(np.zeros(8)), np.zeros(4, dtype=">u4"), np.zeros(()),
        np.zeros(4, dtype="M8[s]"), (ctypes.c_char * 8)(), ctypes.c_int(5),
        (ctypes.py_object * 2)(), array.array("d", [1.5]), array.array("d"),
        memoryview(bytearray(64)).cast("B", [4, 4, 4]), Message(memoryview(bytearray(5))),
        bytearray, Masked(), [bytearray(8)],
    ]  # fmt: skip

    async def main() -> None:
        quick, slow = Side(), Side()
        kinds = list[type]()
        for thing in things:
            first = await outcome(quick, thing)
            slow.state.delegate(True)  # C takes nothing
            assert await outcome(slow, thing) == first, thing
            kinds.append(type(first))
            assert not quick.state.awaited_into
        assert kinds.count(int) == 12

    run(main())


@pytest.mark.parametrize("how", ["end", "fail", "close"])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_end_reaches_who_is_parked(run: Run, how: str, before: int) -> None:
    async def main() -> None:
        side, buffer = Side(), bytearray(8)
        task = await parked(side, buffer)
        for number in range(before):
            side.arrives(bytes([number]))
        if how == "close":
            side.core._begin_close()
            before_end = 0  # a close drops what was not received
        else:
            getattr(side.receiver, how)(ended if how == "end" else lost)
            before_end = before
        errors = {
            "end": ConnectionEndedError, "fail": ConnectionResetError, "close": ResourceClosedError
        }  # fmt: skip
        for number in range(before_end):
            assert await result(task) == 1
            assert buffer[0] == number
            task = asyncio.create_task(side.core.recv_into(buffer))
        for _ in range(2):
            with pytest.raises(errors[how]):
                await result(task)
            task = asyncio.create_task(side.core.recv_into(buffer))
        await asyncio.wait([task])
        assert isinstance(task.exception(), errors[how])
        nothing_is_held(side, buffer)

    run(main())


def test_it_keeps_nothing_once_it_is_over(run: Run) -> None:
    async def main() -> None:
        side, buffer = Side(), bytearray(8)
        side.arrives(b"one")
        count = sys.getrefcount(buffer)
        receiving = side.core.recv_into(buffer)
        assert sys.getrefcount(buffer) == count + 1
        assert await receiving == 3
        assert sys.getrefcount(buffer) == count + 1
        del receiving
        assert sys.getrefcount(buffer) == count

    run(main())


def test_a_call_in_a_cycle_is_collected(run: Run) -> None:
    """The collector ends the export, and the wait."""

    async def main() -> None:
        side, buffer = Side(), bytearray(8)
        cycle: list[Any] = [side.core.recv_into(buffer)]
        cycle[0].send(None)
        cycle.append(cycle)
        del cycle
        gc.collect()
        nothing_is_held(side, buffer)
        side.arrives(b"x")
        with contextlib.closing(side.core.recv()) as receiving, pytest.raises(StopIteration):
            receiving.send(None)

    run(main())


if sys.version_info >= (3, 12):

    class Exporter:
        """A buffer that is written in Python, and counts its exports."""

        def __init__(self, raises: bool = False) -> None:
            self.data = bytearray(8)
            self.exports = 0
            self.raises = raises

        def __buffer__(self, flags: int) -> memoryview:
            self.exports += 1
            return memoryview(self.data)

        def __release_buffer__(self, view: memoryview) -> None:
            self.exports -= 1
            view.release()
            if self.raises:
                raise KeyError("released")

    @pytest.mark.parametrize("raises", [False, True])
    @pytest.mark.parametrize("how", ["there", "waits", "canceled", "too small", "dropped"])
    def test_a_buffer_of_python_code_is_released_once(
        run: Run, monkeypatch: pytest.MonkeyPatch, how: str, raises: bool
    ) -> None:
        async def main() -> None:
            side, buffer, reported = Side(), Exporter(raises), list[None]()
            # Without what is told, which has the frame that has the list.
            monkeypatch.setattr(sys, "unraisablehook", lambda _: reported.append(None))
            if how in ("there", "too small"):
                side.arrives(b"x" * (3 if how == "there" else 9))
                task = asyncio.create_task(side.core.recv_into(buffer))
            elif how == "dropped":
                coroutine = side.core.recv_into(buffer)
                coroutine.send(None)
                assert buffer.exports
                del coroutine
                gc.collect()
            else:
                task = await parked(side, buffer)
                assert buffer.exports
                if how == "canceled":
                    task.cancel()
                else:
                    side.arrives(b"xxx")
                    await called_by_the_loop(side.tell)
            if how != "dropped":
                await asyncio.wait([task])
                wrong = {"canceled": asyncio.CancelledError, "too small": MessageTooLargeError}
                if how in wrong:
                    with pytest.raises(wrong[how]):
                        task.result()
                else:
                    assert task.result() == 3
                    assert buffer.data[:3] == b"xxx"
            assert buffer.exports == 0
            assert bool(reported) == raises
            assert not side.state.awaited_into

        run(main())
