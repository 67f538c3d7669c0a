"""Broadcast without connections: its arguments, and what is left of it in a forked child."""

from __future__ import annotations

import asyncio
import copy
import os
from typing import Any

import pytest

from aiordma import Broadcast, ForkedError
from tests.forks import fork_quietly


def test_it_is_made_in_a_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        Broadcast()


@pytest.mark.parametrize("slow", ["newest", None, 1, "WAIT"])
async def test_a_policy_has_one_of_three_names(slow: Any) -> None:
    with pytest.raises(ValueError, match="one of 'wait', 'drop', 'latest'"):
        Broadcast(slow=slow)


@pytest.mark.parametrize("connection", [None, "conn", 1, object()])
async def test_only_connections_are_added(connection: Any) -> None:
    broadcast = Broadcast()
    for call in (lambda: broadcast.add(connection), lambda: Broadcast([connection])):
        with pytest.raises(TypeError, match="a Broadcast has connections"):
            call()
    broadcast.discard(connection)
    assert connection not in broadcast
    assert len(broadcast) == 0
    assert list(broadcast) == []
    assert broadcast.stats == {}


@pytest.mark.parametrize("slow", ["wait", "drop", "latest"])
async def test_nobody_gets_a_message_that_is_checked_all_the_same(slow: Any) -> None:
    broadcast = Broadcast(slow=slow)
    delivery = await broadcast.send([b"a", b"b"], 7)
    assert (delivery.sent, [*delivery.waiting], [*delivery.dropped]) == (0, [], [])
    assert delivery.failed == {}
    assert repr(delivery) == "Delivery(sent=0, waiting=(), dropped=(), failed={})"
    wrong: Any
    for wrong in ("text", 5, None, [1]):
        with pytest.raises(TypeError):
            await broadcast.send(wrong)
    for imm, error in ((-1, ValueError), (1 << 32, ValueError), ("1", TypeError)):
        wrong = imm
        with pytest.raises(error):
            await broadcast.send(b"", wrong)
    for timeout, error in ((float("nan"), ValueError), ("1", TypeError), (True, TypeError)):
        wrong = timeout
        with pytest.raises(error):
            await broadcast.send(b"", timeout=wrong)
    if slow != "wait":
        with pytest.raises(ValueError, match="nothing waits"):
            await broadcast.send(b"", timeout=1)


async def test_it_is_not_copied() -> None:
    with pytest.raises(TypeError, match="cannot copy or pickle a Broadcast"):
        copy.copy(Broadcast())


async def test_another_loop() -> None:
    broadcast = Broadcast()

    async def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await broadcast.send(b"")

    await asyncio.to_thread(asyncio.run, elsewhere())


async def test_in_a_forked_child_it_is_dead() -> None:
    broadcast = Broadcast()
    child = fork_quietly()
    if not child:
        try:
            len(broadcast)
        except ForkedError:
            os._exit(7)
        finally:
            os._exit(1)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
