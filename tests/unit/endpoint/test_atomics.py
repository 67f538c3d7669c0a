"""`fetch_add` and `compare_swap`: C posts those that the rules admit, and Python has the others."""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from aiordma.errors import (
    ConnectionLostError,
    NotSupportedError,
    RemoteAccessError,
    ResultLostError,
)
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs import Access
from aiordma.verbs.enums import Opcode, WCStatus
from tests.inside.verbs import uses_of

from ..conftest import settle
from ..core.test_message_waiting import traced
from ..verbs.test_memory_region import Lib, c
from .operating import BOTH, MIB, REMOTE
from .test_copied_operations import Copying, copying
from .test_operations import outcome

__all__ = ["c"]

INTEGERS = RemoteRegion(1 << 40, 64, 77, BOTH | Access.REMOTE_ATOMIC)
ADD, SWAP = int(Opcode.ATOMIC_FETCH_AND_ADD), int(Opcode.ATOMIC_CMP_AND_SWP)
MOST = (1 << 64) - 1
#: Each call, and what goes to the adapter.
CALLS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "add": (lambda end: end.fetch_add(INTEGERS, 5), (ADD, 1 << 40, 5, 0)),
    "subtract": (lambda end: end.fetch_add(INTEGERS, -1, offset=8), (ADD, (1 << 40) + 8, MOST, 0)),
    "wrap": (lambda end: end.fetch_add(INTEGERS, (1 << 64) + 3), (ADD, 1 << 40, 3, 0)),
    "swap": (
        lambda end: end.compare_swap(INTEGERS, MOST, 1, offset=56),
        (SWAP, (1 << 40) + 56, MOST, 1),
    ),
}


async def add(remote: Any, offset: Any, value: Any, end: Any) -> Any:
    """One call."""
    return await end.fetch_add(remote, value, offset=offset)


async def swap(remote: Any, offset: Any, values: tuple[Any, Any], end: Any) -> Any:
    """The other."""
    return await end.compare_swap(remote, *values, offset=offset)


async def changing(**settings: Any) -> Copying:
    """A place where C posts atomics: the first one has gone by way of Python."""
    place = await copying(**settings)
    end = place.end
    assert end.state.fetch_add(INTEGERS, 1, 0) is None
    task = asyncio.create_task(end.fetch_add(INTEGERS, 1))
    await settle()
    place.lands(end.adapter.numbers[0], bytes(8))
    await place.ended()
    assert await task == 0
    end.adapter.posted.clear()
    return place


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("software", [False, True])
@pytest.mark.parametrize("name", CALLS)
async def test_the_call_returns_the_integer_before(
    c: Lib, name: str, software: bool, trace: bool
) -> None:
    place = await changing(software=software)
    end, (call, posted) = place.end, CALLS[name]
    for before in (0, 1, 1 << 63, MOST):
        with traced(trace):
            task = asyncio.create_task(call(end))
            await settle()
            opcode, local, length, _, where, rkey, compare_add, swap = end.adapter.posted.pop()
            assert (opcode, where, compare_add, swap) == posted
            assert (length, rkey, local % 8) == (8, 77, 0)
            place.lands(end.adapter.numbers[0], before.to_bytes(8, "little"))
            await place.ended()
            assert await task == before
    assert end.state.facts()["operating"] == 0
    await place.close()


@pytest.mark.parametrize("name", CALLS)
async def test_a_result_that_is_missing_is_an_error(c: Lib, name: str) -> None:
    place = await changing(software=True)
    end = place.end
    task = asyncio.create_task(CALLS[name][0](end))
    await settle()
    await place.ended()  # nothing has landed
    said = "compare_swap" if name == "swap" else "fetch_add"
    with pytest.raises(ResultLostError, match=said):
        await task
    await place.close()


async def test_c_takes_what_python_takes_and_refuses_what_it_refuses(c: Lib) -> None:
    """An argument, wrong or not, has the outcome that it had where C posts none."""
    remotes = [
        INTEGERS, INTEGERS[8:16], INTEGERS[4:20], INTEGERS[:7], INTEGERS[:0], REMOTE,
        RemoteRegion(1 << 40, MIB, 7, Access(0)), RemoteRegion(3, 64, 7, Access.REMOTE_ATOMIC),
        b"bytes", None,
    ]  # fmt: skip
    numbers = [0, 5, -1, MOST, MOST + 1, -(1 << 70), True, 1.5, "1", None]
    quick, slow = await changing(), await changing()
    good = 0

    async def tried(place: Copying, call: Callable[[Any], Any]) -> Any:
        end = place.end
        if place is slow:
            end.state.rest_operations()  # so C takes nothing
        task = asyncio.create_task(call(end))
        await settle(3)
        if end.adapter.numbers:
            place.lands(end.adapter.numbers[0], (7).to_bytes(8, "little"))
            await place.ended()
        return outcome(task)

    adds = itertools.product(remotes, (0, 8, 4, 56, 57, 64, -8, 1 << 70, True, "1"), (1,))
    swaps = itertools.product(
        (INTEGERS,),
        (0, 8),
        [*((number, 1) for number in numbers), *((1, number) for number in numbers)],
    )
    calls: list[Callable[[Any], Any]] = [
        *(partial(add, *each) for each in adds),
        *(partial(add, INTEGERS, 0, number) for number in numbers),
        *(partial(swap, *each) for each in swaps),
    ]
    for call in calls:
        first = await tried(quick, call)
        assert await tried(slow, call) == first
        assert [sent[:1] + sent[2:3] + sent[4:] for sent in quick.end.adapter.posted] == [
            sent[:1] + sent[2:3] + sent[4:] for sent in slow.end.adapter.posted
        ]
        good += first == 7
    assert good > 15
    await quick.close()
    await slow.close()


async def test_a_canceled_atomic_keeps_its_memory_until_its_completion(c: Lib) -> None:
    place = await changing()
    end = place.end
    task = asyncio.create_task(end.fetch_add(INTEGERS, 1))
    await settle()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    lent = end.state.bounce_region
    assert (uses_of(lent), end.state.facts()["operating"]) == (1, 1)
    again = asyncio.create_task(end.fetch_add(INTEGERS, 1))
    await settle()
    first, second = (posted[1] for posted in end.adapter.posted)
    assert abs(first - second) >= 8, "the adapter still writes there"
    place.lands(end.adapter.numbers[1], (9).to_bytes(8, "little"))
    await place.ended()
    assert again.result() == 9
    assert (uses_of(lent), end.state.facts()["operating"]) == (0, 0)
    await place.close()


async def test_an_object_that_is_used_again_forgets_that_it_was_an_atomic(c: Lib) -> None:
    """A number has one object, for a READ and for an atomic by turns."""
    place = await changing(depth=1)
    end = place.end
    for number in range(4):
        task = asyncio.create_task(end.fetch_add(INTEGERS, 1))
        await settle()
        place.lands(end.adapter.numbers[0], number.to_bytes(8, "little"))
        await place.ended()
        assert await task == number
        into = bytearray(16)
        reading = asyncio.create_task(end.read(into))
        await settle()
        place.lands(end.adapter.numbers[0], bytes([number] * 16))
        await place.ended()
        assert await reading == 16
        assert into == bytes([number] * 16)
    await place.close()


@pytest.mark.parametrize("status", [WCStatus.SUCCESS, WCStatus.REM_ACCESS_ERR])
async def test_an_atomic_that_ends_by_way_of_python(c: Lib, status: WCStatus) -> None:
    place = await changing()
    end = place.end
    task = asyncio.create_task(end.fetch_add(INTEGERS, 1))
    await settle()
    number = end.adapter.numbers[0]
    place.lands(number, (11).to_bytes(8, "little"))
    end.operations.on_ended(number, (0, int(status), 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0))
    await asyncio.wait([task])
    if status == WCStatus.SUCCESS:
        assert task.result() == 11
    else:
        assert isinstance(task.exception(), RemoteAccessError)
    await place.close()


async def test_the_end_of_the_connection_ends_it(c: Lib) -> None:
    place = await changing()
    end = place.end
    tasks = [asyncio.create_task(call(end)) for call, _ in CALLS.values()]
    await settle()
    end.outcome.cause = ConnectionLostError(errno.ECONNRESET, "gone")
    end.state.advance("SHUT")
    assert end.state.fetch_add(INTEGERS, 1, 0) is None
    end.link.close()
    await asyncio.wait(tasks)
    for task in (*tasks, asyncio.create_task(end.fetch_add(INTEGERS, 1))):
        with pytest.raises(ConnectionLostError):
            await task
    for function in end.gone:
        function()
    await place.close()


async def test_more_than_there_are_numbers_wait_in_line(c: Lib) -> None:
    place = await changing(depth=2)
    end = place.end
    tasks = [asyncio.create_task(end.fetch_add(INTEGERS, n)) for n in range(5)]
    for task in tasks:
        task.add_done_callback(lambda _: None)
    while not all(task.done() for task in tasks):
        await settle(3)
        for number in end.adapter.numbers:
            place.lands(number, (1).to_bytes(8, "little"))
        await place.ended()
    assert [task.result() for task in tasks] == [1] * 5
    assert [posted[6] for posted in end.adapter.posted] == list(range(5))
    await place.close()


async def test_an_end_without_reads_has_no_atomics(c: Lib) -> None:
    place = Copying(read_depth=0)
    with pytest.raises(NotSupportedError):
        await place.end.fetch_add(INTEGERS, 1)
    await place.lend()
    assert place.end.state.fetch_add(INTEGERS, 1, 0) is None
    with pytest.raises(NotSupportedError):
        await place.end.fetch_add(INTEGERS, 1)
    await place.close()


@pytest.mark.parametrize("name", CALLS)
async def test_iwarp_has_no_atomics(c: Lib, name: str) -> None:
    place = await copying()
    place.end.link.context.is_iwarp = True
    for _ in range(2):
        with pytest.raises(NotSupportedError):
            await CALLS[name][0](place.end)
    assert place.end.adapter.posted == []
    await place.close()


async def test_another_thread_posts_nothing(c: Lib) -> None:
    place = await changing()
    got = list[object]()

    def foreign() -> None:
        got.append(place.end.state.fetch_add(INTEGERS, 1, 0))
        got.append(place.end.state.compare_swap(INTEGERS, 1, 2, 0))

    thread = threading.Thread(target=foreign)
    thread.start()
    await asyncio.to_thread(thread.join, 20)
    assert got == [None, None]
    assert place.end.adapter.posted == []
    await place.close()


async def test_the_native_calls_name_their_arguments(c: Lib) -> None:
    place = await changing()
    state: Any = place.end.state
    with pytest.raises(TypeError, match="remote, value, offset"):
        state.fetch_add(INTEGERS)
    with pytest.raises(TypeError, match="remote, expected, desired, offset"):
        state.compare_swap(INTEGERS, 1, 2)
    await place.close()
