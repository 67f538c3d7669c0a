"""mckey: a multicast group, of which the program is a member that sends or one that receives.

After joining it sleeps for three seconds, in case that a subnet manager has to hear of it.  Like
udaddy it sends what malloc gave it, with its queue pair's number as immediate.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiordma import NotSupportedError
from aiordma.cm import ConnectionEvent, ConnectionId, EventChannel, PortSpace
from tests.interop.datagram_programs import ATTEMPTS, GROUP, IDLE, mckey
from tests.interop.mailbox import FRESH, MESSAGES, SIZE, TUNABLES, Mailbox, send_all
from tests.interop.native import End
from tests.interop.program import assert_bytes, running
from tests.native_ends import close_all

TRANSFERRED = ["data transfers complete", "test complete", "return status 0"]
NO_DATAGRAMS = "mckey: unable to create QP: Operation not supported"


@asynccontextmanager
async def member(address: str, *, send_only: bool) -> AsyncIterator[tuple[End, ConnectionEvent]]:
    """A member of the group: its end and the event that made it one."""
    events = EventChannel()
    try:
        cm_id = ConnectionId(events, PortSpace.UDP)
        with contextlib.ExitStack() as undo:
            undo.callback(cm_id.close)
            cm_id.bind_addr((address, 0))
            end = End(cm_id)
            undo.pop_all()
        try:
            yield end, await cm_id.join_multicast(GROUP, send_only=send_only)
            await cm_id.leave_multicast(GROUP)
        finally:
            await close_all(end)
    finally:
        events.close()
        await events.wait_closed()


async def assert_not_supported(address: str) -> None:
    with pytest.raises(NotSupportedError, match="iWARP"):
        async with member(address, send_only=True):
            pass


async def test_mckey_receives(address: str, is_siw: bool) -> None:
    """And beside it another member, since mckey shows nothing of what it gets but the number."""
    async with running(*mckey(address)) as receiver:
        if is_siw:
            await receiver.finish(255)
            assert NO_DATAGRAMS in receiver.lines
            await assert_not_supported(address)
            return
        joined = await receiver.line("mckey: joined dgid: ")
        assert joined.startswith(f"::ffff:{GROUP} ")
        async with (
            member(address, send_only=False) as (other, _),
            member(address, send_only=True) as (end, group),
        ):
            box = Mailbox(other, MESSAGES)
            await send_all(end, group, (bytes([number]) * SIZE for number in range(MESSAGES)))
            for number in range(MESSAGES):
                letter = await box.next()
                assert_bytes(letter.payload, bytes([number]) * SIZE)
                assert letter.completion.src_qp == end.qp.num
            # With one less it would never end.
            await receiver.finish()
    assert receiver.lines[-3:] == TRANSFERRED


async def test_mckey_sends(address: str, is_siw: bool) -> None:
    if is_siw:
        await assert_not_supported(address)
        return
    for _ in range(ATTEMPTS):
        async with member(address, send_only=False) as (end, _):
            box = Mailbox(end, MESSAGES)
            async with running(*IDLE, *mckey(address, "-s"), GLIBC_TUNABLES=TUNABLES) as sender:
                await sender.finish()
            assert sender.lines[-3:] == TRANSFERRED
            try:
                async with asyncio.timeout(3):
                    letters = [await box.next() for _ in range(MESSAGES)]
            except TimeoutError:
                continue  # it has destroyed its queue pair before all had left it: see IDLE
        for letter in letters:
            assert_bytes(letter.payload, FRESH * SIZE)
        assert len({letter.completion.src_qp for letter in letters}) == 1
        return
    pytest.fail(f"in {ATTEMPTS} attempts mckey never sent {MESSAGES} datagrams")
