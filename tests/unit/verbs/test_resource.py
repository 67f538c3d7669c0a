"""Resource: any order of closing ends in the order that C needs."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from aiordma.errors import ForkedError, RdmaOSError, ResourceClosedError

from ..conftest import LIMIT_S, Run
from .fake_resource import ORDERS, PARENTS, Fake, check_order, fresh, graph

__all__ = ["fresh"]  # a fixture that every test here uses


class Stubborn(Fake):
    """C refuses to destroy it."""

    __slots__ = ()

    def _destroy(self, handle: Any) -> None:
        super()._destroy(handle)
        raise OSError(16, "Device or resource busy")


def test_every_order_of_closing_without_a_loop() -> None:
    assert len(ORDERS) == 720
    for order in ORDERS:
        Fake.log = []
        made = graph()
        for count, name in enumerate(order):
            made[name].close()
            made[name].close()
            assert made[name].closed
            # Inline: what can go is gone when close() returns.
            done = set(order[: count + 1])
            free = {n for n in done if not any(n in _above(c) for c in PARENTS if c not in done)}
            assert set(Fake.log) == free
        check_order()
    assert Fake.threads == {"MainThread"}


def _above(name: str) -> set[str]:
    """Everything that has to outlive `name`."""
    parents = set(PARENTS[name])
    return parents.union(*(_above(parent) for parent in parents)) if parents else parents


async def test_every_order_of_closing_under_a_loop() -> None:
    for order in ORDERS:
        Fake.log = []
        made = graph()
        for name in order:
            made[name].close()
        await asyncio.gather(*(made[name].wait_closed(LIMIT_S) for name in order))
        check_order()
    assert Fake.threads == {"aiordma-reaper"}, "the loop's thread must not destroy"


def test_every_order_of_leaving_with_blocks() -> None:
    for order in itertools.islice(ORDERS, 0, None, 7):
        Fake.log = []
        made = graph()
        for name in order:
            with made[name] as same:
                assert same is made[name]
        check_order()


def test_a_closed_resource_refuses_calls_and_children() -> None:
    parent = Fake("parent")
    child = Fake("child", parent)
    parent.close()
    assert Fake.log == []
    for use in (parent.require, parent.retain):
        with pytest.raises(ResourceClosedError, match="the Fake is closed"):
            use()
    assert child.require() == "child", "the child goes on"
    child.close()
    assert Fake.log == ["child", "parent"]


def test_a_failed_child_does_not_count() -> None:
    good, closed = Fake("good"), Fake("closed")
    closed.close()
    for parents in ((closed, good), (good, closed)):
        with pytest.raises(ResourceClosedError):
            Fake("child", *parents)
        gc.collect()
        assert good.children == 0
    # What C had made for it is destroyed all the same, and nobody is warned of it.
    assert Fake.log == ["closed", "child", "child"]
    good.close()
    assert Fake.log[3:] == ["good"]


@pytest.mark.parametrize("end", [Fake.close, Fake.destroy])
def test_a_busy_resource_stays_open(end: Callable[[Fake], None]) -> None:
    resource = Fake("busy")
    resource.busy = True
    with pytest.raises(RdmaOSError, match="busy"):
        end(resource)
    assert not resource.closed
    assert resource.require() == "busy"
    resource.busy = False
    end(resource)
    assert Fake.log == ["busy"]


def test_a_refusal_of_c_is_logged_and_told_and_does_not_keep_the_parents(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        parent = Fake("parent")
        child = Stubborn("child", parent)
        parent.close()
        child.close()
        with pytest.raises(OSError, match="busy"):
            await child.wait_closed(LIMIT_S)
        await parent.wait_closed(LIMIT_S)

    with caplog.at_level(logging.WARNING, "aiordma"):
        run(main())
    assert Fake.log == ["child", "parent"]
    assert "destroying Stubborn failed" in caplog.text


async def test_waiting_has_a_bound_and_the_end_still_comes() -> None:
    parent = Fake("parent")
    child = Fake("child", parent)
    parent.close()
    with pytest.raises(TimeoutError):
        await parent.wait_closed(0.01)
    waiter = asyncio.create_task(parent.wait_closed(LIMIT_S))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    child.close()
    await parent.wait_closed(LIMIT_S)
    await parent.wait_closed(LIMIT_S)
    assert Fake.log == ["child", "parent"]


def test_closing_from_many_threads_destroys_once() -> None:
    for _ in range(50):
        Fake.log = []
        made = graph()
        barrier = threading.Barrier(len(made))

        def close(resource: Fake, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(LIMIT_S)
            resource.close()

        threads = [threading.Thread(target=close, args=(resource,)) for resource in made.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        check_order()


def test_a_forgotten_resource_warns_and_is_destroyed() -> None:
    resource = Fake("forgotten")
    with pytest.warns(ResourceWarning, match="unclosed <Fake open>"):
        del resource
    assert Fake.log == ["forgotten"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_forgotten_resource_is_destroyed_where_warnings_are_errors() -> None:
    resource = Fake("forgotten")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del resource
    assert Fake.log == ["forgotten"]


def test_a_new_child_in_the_place_of_one_that_has_gone_without_its_end() -> None:
    """Its identity may be the same, and the entry of the other is still there."""
    parent, other = Fake("parent"), Fake("other")
    gone = weakref.ref(other)
    other.close()
    del other
    child = Fake.__new__(Fake)
    parent._made = {id(child): gone}  # type: ignore[dict-item]
    child.__init__("child", parent)  # type: ignore[misc]
    assert parent._living() == [child]
    child.close()
    parent.close()


def test_a_forgotten_child_keeps_its_parent_until_then() -> None:
    parent = Fake("parent")
    child = Fake("child", parent)
    parent.close()
    with pytest.warns(ResourceWarning, match="unclosed"):
        del child
    assert Fake.log == ["child", "parent"]


def test_a_closed_or_borrowed_resource_does_not_warn() -> None:
    class Borrowed(Fake):
        __slots__ = ()
        _borrowed = True

    Fake("closed").close()
    Borrowed("borrowed")
    gc.collect()
    assert Fake.log == ["closed"], "somebody else's handle is not ours to destroy"


def test_a_constructor_that_failed_does_not_warn() -> None:
    class Failing(Fake):
        __slots__ = ()

        def __init__(self) -> None:
            raise OSError(12, "no memory")

    with pytest.raises(OSError, match="no memory"):
        Failing()
    gc.collect()


def test_what_it_prints_tells_its_state() -> None:
    parent = Fake("parent")
    child = Fake("child", parent)
    states = [repr(parent)]
    parent.close()
    states.append(repr(parent))
    child.close()
    states.append(repr(parent))
    assert states == ["<Fake open>", "<Fake closing>", "<Fake gone>"]


def test_what_went_with_its_device_is_gone(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """EIO: the kernel has destroyed it already."""

    class Removed(Fake):
        __slots__ = ()

        def _destroy(self, handle: Any) -> None:
            super()._destroy(handle)
            raise OSError(errno.EIO, "Input/output error")

    async def main() -> None:
        parent = Fake("parent")
        child = Removed("child", parent)
        child.close()
        parent.close()
        await child.wait_closed(LIMIT_S)
        await parent.wait_closed(LIMIT_S)

    with caplog.at_level(logging.WARNING, "aiordma"):
        run(main())
    assert Fake.log == ["child", "parent"]
    assert not caplog.records


async def test_the_end_can_be_asked_for_before_and_after() -> None:
    early, late, refused = Fake("early"), Fake("late"), Stubborn("refused")
    told: list[str] = []
    early.when_gone(lambda: told.append("early"))
    for one in (early, late, refused):
        one.close()
    await early.wait_closed()
    await late.wait_closed()
    assert told == ["early"]
    late.when_gone(lambda: told.append("late"))
    assert told == ["early", "late"]
    with pytest.raises(OSError, match="busy"):
        await refused.wait_closed()
    with pytest.raises(OSError, match="busy"):
        await refused.wait_closed()


def test_what_was_made_from_it_is_dead_in_a_child_process_too() -> None:
    made = graph()
    made["context"].poison_after_fork()
    assert all(one.closed for one in made.values())
    for one in made.values():
        with pytest.raises(ForkedError):
            one.require()
        one.close()
    assert Fake.log == []


def test_who_is_no_child_is_not_counted_as_one() -> None:
    parent = Fake("context")
    child, other = Fake("pd", parent), Fake("pd", parent)
    child.release([parent, parent])
    with pytest.raises(KeyError):
        parent.let_go(child)
    assert parent.children == 1
    parent.close()
    assert Fake.log == []
    other.close()
    assert Fake.log == ["pd", "context"]
    child.close()
