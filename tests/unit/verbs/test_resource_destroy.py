"""Resource.destroy(): the strict form, which judges the order of closing as C does."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest

from aiordma.errors import RdmaOSError

from ..conftest import LIMIT_S, Run
from .fake_resource import ORDERS, PARENTS, Fake, check_order, fresh, graph

__all__ = ["fresh"]  # a fixture that every test here uses


def test_every_order_of_destroying_is_judged_as_c_does(run: Run) -> None:
    """Without a loop, and under one, where a thread may not have destroyed the child yet."""

    def destroy_in(order: tuple[str, ...]) -> None:
        made = graph()
        gone: set[str] = set()
        for name in order:
            below = {child for child in PARENTS if name in PARENTS[child]} - gone
            if below:
                with pytest.raises(RdmaOSError) as caught:
                    made[name].destroy()
                assert caught.value.errno == errno.EBUSY
                assert f"{len(below)} Fake" in str(caught.value)
                assert made[name].require() == name, "it is open and can be used"
            else:
                made[name].destroy()
                made[name].destroy()
                gone.add(name)
        for name in ("qp", "mr", "cq", "pd", "channel", "context"):
            made[name].destroy()
            assert made[name].closed

    async def main() -> None:
        for order in ORDERS:
            destroy_in(order)

    for order in ORDERS:
        Fake.log = []
        destroy_in(order)
        check_order()
    run(main())


def test_what_is_in_the_way_is_named(run: Run) -> None:
    class QueuePair(Fake):
        __slots__ = ()

    parent = Fake("parent")
    children = [QueuePair("first", parent), QueuePair("second", parent), Fake("other", parent)]
    parent.retain()
    with pytest.raises(RdmaOSError) as caught:
        parent.destroy()
    assert caught.value.errno == errno.EBUSY
    assert caught.value.strerror == (
        "the Fake cannot be destroyed: 2 QueuePairs made from it are still open, "
        "1 Fake made from it is still open, 1 unfinished operation"
    )
    for child in children:
        child.destroy()
    with pytest.raises(RdmaOSError, match=r"destroyed: 1 unfinished operation$"):
        parent.destroy()
    parent.let_go()
    parent.destroy()
    assert Fake.log == ["first", "second", "other", "parent"]


def test_a_closed_child_that_waits_for_an_open_one_is_in_the_way() -> None:
    channel = Fake("channel")
    cq = Fake("cq", channel)
    qp = Fake("qp", cq)
    cq.close()
    for parent in (channel, cq):
        with pytest.raises(RdmaOSError, match="1 Fake made from it"):
            parent.destroy()
    assert not channel.closed
    qp.destroy()
    channel.destroy()
    assert Fake.log == ["qp", "cq", "channel"]


async def test_a_child_that_a_thread_is_destroying_is_not_in_the_way() -> None:
    class Slow(Fake):
        __slots__ = ()

        def _destroy(self, handle: Any) -> None:
            assert may_go.wait(LIMIT_S)
            super()._destroy(handle)

    may_go = threading.Event()
    parent = Fake("parent")
    child = Slow("child", parent)
    child.destroy()
    parent.destroy()
    assert Fake.log == []
    may_go.set()
    await parent.wait_closed(LIMIT_S)
    assert Fake.log == ["child", "parent"]


def test_a_finalized_child_is_not_in_the_way() -> None:
    parent = Fake("parent")
    child = Fake("child", parent)
    with pytest.raises(RdmaOSError):
        parent.destroy()
    with pytest.warns(ResourceWarning):
        del child
    parent.destroy()
    assert Fake.log == ["child", "parent"]


def test_a_parent_named_twice_counts_once() -> None:
    parent = Fake("parent")
    child = Fake("child", parent, parent)
    with pytest.raises(RdmaOSError, match=r"destroyed: 1 Fake made from it is still open$"):
        parent.destroy()
    child.close()
    parent.destroy()
    assert Fake.log == ["child", "parent"]


def test_held_resources_outlive_their_holder() -> None:
    memory, user = Fake("memory"), Fake("user")
    memory.retain()
    memory.close()
    user.hold([memory, memory])
    memory.let_go()
    assert Fake.log == []
    with pytest.raises(RdmaOSError, match="1 Fake made from it"):
        memory.destroy()
    user.close()
    assert Fake.log == ["user", "memory"]
