"""What connect() and listen() return is a coroutine, also to a program that forgets it."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiordma
from aiordma.endpoint.connect import Opening

from ..conftest import Run

CALLS: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
    "connect": lambda: aiordma.connect("127.0.0.1", 7471),
    "listen": lambda: aiordma.listen("127.0.0.1", 0),
    "open_connection": lambda: aiordma.open_connection("127.0.0.1", 7471),
    "create_connection": lambda: aiordma.create_connection(asyncio.Protocol, "127.0.0.1", 7471),
    "start_server": lambda: aiordma.start_server(lambda r, w: None, "127.0.0.1", 0),
    "create_server": lambda: aiordma.create_server(asyncio.Protocol, "127.0.0.1", 0),
    "create_datagram_endpoint": lambda: aiordma.create_datagram_endpoint(
        asyncio.DatagramProtocol, ("127.0.0.1", 0)
    ),
}


@pytest.fixture(autouse=True)
def collected() -> None:
    """What earlier tests have left is collected, and warns of itself, before the warnings count."""
    gc.collect()


@pytest.mark.parametrize("name", CALLS)
def test_a05_a_call_that_is_forgotten_warns(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _ = CALLS[name]()
        del _
        gc.collect()
    assert [str(warning.message) for warning in caught] == [f"coroutine '{name}' was never awaited"]
    assert caught[0].category is RuntimeWarning


class Opened:
    def __init__(self) -> None:
        self.closed = False

    async def __aenter__(self) -> Opened:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.closed = True


def opening(made: list[Opened]) -> Opening[Opened]:
    async def open_() -> Opened:
        await asyncio.sleep(0)
        made.append(Opened())
        return made[-1]

    return Opening(open_(), "open")


async def test_a05_asyncio_takes_it_for_a_coroutine() -> None:
    made: list[Opened] = []
    coroutine = opening(made)
    assert asyncio.iscoroutine(coroutine)
    task = asyncio.create_task(coroutine)
    assert "coro=<open() " in repr(task)
    assert await task is made[0]
    assert list(await asyncio.gather(opening(made), opening(made))) == made[1:]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(opening(made))
    assert task.result() is made[3]
    assert await asyncio.wait_for(opening(made), 5) is made[4]
    async with opening(made) as opened:
        assert not opened.closed
    assert opened.closed


async def test_a05_it_is_awaited_once() -> None:
    made: list[Opened] = []
    twice = opening(made)
    await twice
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        await twice
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        async with twice:
            pass
    assert len(made) == 1


async def test_a05_canceling_its_task_ends_it() -> None:
    made: list[Opened] = []
    task = asyncio.create_task(opening(made))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not made


@pytest.mark.parametrize("name", ["connect", "listen"])
def test_what_is_used_without_await_says_so(name: str) -> None:
    opening: Any = CALLS[name]()
    words = rf"{name}\(\) has to be awaited before "
    with pytest.raises(TypeError, match=words + r"send\(\)"):
        opening.send(b"x")
    for attribute in ("recv", "accept", "port"):
        with pytest.raises(AttributeError, match=words + attribute):
            getattr(opening, attribute)
    assert not hasattr(opening, "_asyncio_future_blocking")
    with pytest.warns(RuntimeWarning, match=words + r"close\(\)") as caught:
        opening.close()
    assert caught[0].filename == __file__
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        opening.close()
        del opening
        gc.collect()
    assert not again, "once is enough"


async def test_what_has_begun_is_closed_without_a_word() -> None:
    """As asyncio and the interpreter do."""
    made: list[Opened] = []
    begun = opening(made)
    begun.send(None)
    done = opening(made)
    await done
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begun.close()
        done.close()
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        await begun
    assert len(made) == 1


def test_an_empty_host_is_refused_at_the_call(run: Run) -> None:
    with pytest.raises(ValueError, match="host is empty"):
        aiordma.connect("", 7471)
    with pytest.raises(ValueError, match="host is empty"):
        run(aiordma.open_connection("", 7471))


@pytest.mark.parametrize("name", ["connect", "listen"])
def test_a_block_without_async_is_told_what_to_write(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not told as well that nothing was awaited
        with pytest.raises(TypeError, match=rf"`async with {name}\(\.\.\.\)`"):
            CALLS[name]().__enter__()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("without_collector")
async def test_what_a_failed_one_has_goes_with_its_task() -> None:
    gone: list[weakref.ref[Opened]] = []

    async def open_() -> None:
        held = Opened()
        gone.append(weakref.ref(held))
        await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(Opening(open_(), "open"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    await asyncio.sleep(0)
    assert gone[0]() is None
