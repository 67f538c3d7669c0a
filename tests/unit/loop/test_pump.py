"""FdPump: drained until empty, fair to other tasks, and off the loop before the descriptor goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from aiordma.loop.pump import FdPump

from ..conftest import LIMIT_S, LOOPS, settle


class Pipe:
    """A pipe whose reading end is pumped; `read` is what the drain took."""

    def __init__(self) -> None:
        self.fd, self.write_fd = os.pipe()
        self.read: list[bytes] = []
        self.failures: list[BaseException] = []
        self.arrived = asyncio.Event()
        self.broken = asyncio.Event()

    def drain(self) -> bool:
        try:
            while True:
                self.read.append(os.read(self.fd, 1))
                self.arrived.set()
        except BlockingIOError:
            return False

    def failed(self, exc: BaseException) -> None:
        self.failures.append(exc)
        self.broken.set()

    def pump(self, drain: Callable[[], bool] | None = None) -> FdPump:
        return FdPump(asyncio.get_running_loop(), self.fd, drain or self.drain, self.failed)

    def write(self, data: bytes) -> None:
        os.write(self.write_fd, data)

    async def until(self, count: int) -> None:
        while len(self.read) < count:
            self.arrived.clear()
            await self.arrived.wait()

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.write_fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


async def turn() -> None:
    """A round of the loop in which every readable descriptor is seen: ours is, and it is last."""
    fd = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        seen = asyncio.Event()
        loop.add_reader(fd, seen.set)
        await seen.wait()
        loop.remove_reader(fd)
        await settle()
    os.close(fd)


async def test_drains_until_the_descriptor_is_empty(pipe: Pipe) -> None:
    pump = pipe.pump()
    assert not os.get_blocking(pipe.fd)
    pipe.write(b"abcdef")
    await pipe.until(6)
    pipe.write(b"gh")
    await pipe.until(8)
    assert b"".join(pipe.read) == b"abcdefgh"
    assert pump.loop is asyncio.get_running_loop()
    pump.close()


async def test_other_tasks_run_while_a_drain_asks_for_more() -> None:
    fd = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    rounds: list[int] = []
    turns = 0
    done = asyncio.Event()

    async def bystander() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    def drain() -> bool:
        if not rounds:
            os.eventfd_read(fd)  # from now on nothing is readable: only `more` calls again
        rounds.append(turns)
        if len(rounds) == 20:
            done.set()
        return len(rounds) < 20

    task = asyncio.create_task(bystander())
    pump = FdPump(asyncio.get_running_loop(), fd, drain, lambda exc: None)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_S / 2):
            await done.wait()
    assert done.is_set(), f"{len(rounds)} rounds, and the drain has asked for more"
    await task
    await settle()
    assert len(rounds) == 20, "called although it asked for no more"
    assert all(b > a for a, b in itertools.pairwise(rounds)), "others starved"
    pump.close()
    os.close(fd)


async def test_an_exception_ends_the_pump_and_is_reported_once(pipe: Pipe) -> None:
    calls = 0

    def drain() -> bool:
        nonlocal calls
        calls += 1
        raise OSError(5, "gone")

    pump = pipe.pump(drain)
    pipe.write(b"x")  # never consumed: a pump that went on would spin
    await pipe.broken.wait()
    await turn()
    assert calls == 1
    assert [str(exc) for exc in pipe.failures] == ["[Errno 5] gone"]
    assert pump.loop is None
    pump.kick()
    pump.close()
    assert calls == 1


@pytest.mark.parametrize("name", list(LOOPS))
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a01_what_ends_the_loop_does_not_end_the_pump(
    name: str, pipe: Pipe, kind: type[BaseException]
) -> None:
    def drain() -> bool:
        if not pipe.read:
            pipe.read.append(os.read(pipe.fd, 1))
            raise kind
        return pipe.drain()

    async def main() -> None:
        pump = pipe.pump(drain)
        pipe.write(b"abc")
        await pipe.until(3)
        assert pump.loop is asyncio.get_running_loop()
        pump.close()

    loop = LOOPS[name]()
    reported: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    task = loop.create_task(main())
    if kind is GeneratorExit:
        loop.run_until_complete(asyncio.wait_for(task, LIMIT_S))
    else:
        with pytest.raises(kind):
            loop.run_until_complete(asyncio.wait_for(task, LIMIT_S))
        loop.run_until_complete(task)
    loop.close()
    assert b"".join(pipe.read) == b"abc"
    assert not pipe.failures
    assert [type(exc) for exc in reported] == ([kind] if kind is GeneratorExit else [])


async def test_closing_in_the_middle_of_a_drain_is_the_end(pipe: Pipe) -> None:
    calls = 0

    def drain() -> bool:
        nonlocal calls
        calls += 1
        pump.close()
        pipe.arrived.set()
        return True

    pump = pipe.pump(drain)
    pipe.write(b"x")
    await pipe.arrived.wait()
    await turn()
    assert calls == 1


async def test_closing_cancels_a_continuation(pipe: Pipe) -> None:
    calls = 0

    def drain() -> bool:
        nonlocal calls
        calls += 1
        return True

    pump = pipe.pump(drain)
    pump.kick()
    pump.close()
    pump.close()
    await settle()
    assert calls == 1


async def test_a_descriptor_that_is_used_again_belongs_to_its_new_owner() -> None:
    old, new = Pipe(), Pipe()
    pump = old.pump()
    pump.close()
    os.dup2(new.fd, old.fd)  # the same number, another file
    second = FdPump(asyncio.get_running_loop(), old.fd, new.drain, new.failed)
    new.write(b"n")
    await new.until(1)
    pump.close()  # must not take the reader of the new owner
    new.write(b"m")
    await new.until(2)
    assert old.read == []
    second.close()
    old.close()
    new.close()


async def test_pause_leaves_the_bytes_and_resume_takes_them(pipe: Pipe) -> None:
    pump = pipe.pump()
    pump.pause()
    pump.pause()
    pipe.write(b"abc")
    await turn()
    pump.kick()
    assert pipe.read == []
    pump.resume()
    pump.resume()
    await pipe.until(3)
    assert b"".join(pipe.read) == b"abc"
    pump.close()
    pump.pause()
    pump.resume()
    pipe.write(b"d")
    await turn()
    assert len(pipe.read) == 3


async def test_a_drain_that_asked_for_more_goes_on_after_a_pause(pipe: Pipe) -> None:
    left = [3]

    def drain() -> bool:
        left[0] -= 1
        if not left[0]:
            pipe.arrived.set()
        return left[0] > 0

    pump = pipe.pump(drain)
    pump.kick()
    pump.pause()
    await settle()
    assert left == [2]
    pump.resume()
    await settle()
    assert left == [0], "what it had left before the pause raises no event"
    pump.close()


async def test_kick_drains_without_readiness(pipe: Pipe) -> None:
    pump = pipe.pump()
    pipe.write(b"x")
    pump.kick()
    assert pipe.read == [b"x"]
    pump.close()
    pipe.write(b"y")
    pump.kick()
    assert pipe.read == [b"x"]


async def test_closing_from_another_thread_is_handed_to_the_loop(pipe: Pipe) -> None:
    pump = pipe.pump()
    thread = threading.Thread(target=pump.close)
    thread.start()
    thread.join(LIMIT_S)
    assert pump.loop is None
    await settle()
    pipe.write(b"x")
    await turn()
    assert pipe.read == []


def test_closing_after_the_loop_does_nothing(pipe: Pipe) -> None:
    async def main() -> FdPump:
        return pipe.pump()

    pump = asyncio.run(main())
    pump.close()
    assert pump.loop is None


def test_closing_between_two_runs_of_the_loop(pipe: Pipe) -> None:
    with asyncio.Runner() as runner:

        async def start() -> FdPump:
            return pipe.pump()

        pump = runner.run(start())
        pump.close()
        pipe.write(b"x")
        runner.run(turn())
        assert pipe.read == []


async def test_a_poisoned_pump_touches_nothing(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    remove, removed = loop.remove_reader, list[object]()
    monkeypatch.setattr(loop, "remove_reader", removed.append)
    pump = pipe.pump()
    pump.poison_after_fork()
    assert pump.loop is None
    pump.close()
    pump.pause()
    pump.kick()
    pipe.write(b"x")
    await turn()
    assert pipe.read == [], "it reads what is the parent's"
    assert pipe.fd not in removed, "the parent's reader was taken away"
    remove(pipe.fd)


class Owner:
    """Owns the reading end of a pipe; its finalizer closes the pump, as a channel's does."""

    def __init__(self, pipe: Pipe, loop: asyncio.AbstractEventLoop) -> None:
        self.pipe = pipe
        self.drained = 0
        self.pump = FdPump(loop, pipe.fd, self.drain, self.fail)

    def drain(self) -> bool:
        self.drained += len(os.read(self.pipe.fd, 100))
        return False

    def fail(self, exc: BaseException) -> None:
        raise AssertionError from exc

    def __del__(self) -> None:
        self.pump.close()


async def test_an_owner_is_not_kept_alive(pipe: Pipe) -> None:
    loop = asyncio.get_running_loop()
    owner = Owner(pipe, loop)
    pump = owner.pump
    pipe.write(b"ab")
    await turn()
    assert owner.drained == 2
    del owner
    assert pump.loop is None, "its finalizer did not run"
    assert not loop.remove_reader(pipe.fd), "the reader is still there"


async def test_a_descriptor_without_an_owner_does_not_spin(pipe: Pipe) -> None:
    """The collector clears references first and finalizes then, perhaps in another thread."""

    class Cleared(Owner):
        def __del__(self) -> None:
            pass

    loop = asyncio.get_running_loop()
    owner = Cleared(pipe, loop)
    pump = owner.pump
    del owner
    pipe.write(b"ab")
    await turn()
    assert not loop.remove_reader(pipe.fd)
    assert pump.loop is loop, "it still knows whose thread has to end it"
    pump.close()
