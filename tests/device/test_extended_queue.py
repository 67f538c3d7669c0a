"""ExtendedCompletionQueue on Soft-RoCE, which has extended queues without a field more.

Adapters have times, too.
"""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from aiordma import NotSupportedError
from aiordma.verbs import (
    SGE,
    ExtendedCompletionQueue,
    Opcode,
    RecvWR,
    SendWR,
    WCFields,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from aiordma.verbs.context import DeviceClock
from aiordma.verbs.cq_ex import ExtendedCompletion
from tests.device.bringing_up import HandMade, connected, hand_made

pytestmark = pytest.mark.device

NONE = WCFields(0)
TIMES = WCFields.COMPLETION_TIMESTAMP | WCFields.COMPLETION_TIMESTAMP_WALLCLOCK
MORE = (*TIMES, WCFields.CVLAN, WCFields.FLOW_TAG)
LIMIT_S = 10


async def arrived(end: HandMade, count: int) -> list[ExtendedCompletion]:
    """The next completions, each after an event."""
    found = end.cq.poll()
    async with asyncio.timeout(LIMIT_S):
        while len(found) < count:
            end.cq.req_notify()
            found += end.cq.poll()
            if len(found) < count:
                assert await end.channel.get_cq_event() is end.cq
                end.cq.ack_events()
                found += end.cq.poll()
    assert len(found) == count
    return [cast("ExtendedCompletion", each) for each in found]


async def test_messages_by_hand() -> None:
    async with connected(fields=NONE) as (one, other):
        source, target = one.region(bytearray(b"12345678")), other.region(bytearray(64))
        other.qp.post_recv(RecvWR(7, [SGE(target)]))
        other.qp.post_recv(RecvWR(8, [SGE(target)]))
        one.qp.post_send(SendWR(1, [SGE(source)], Opcode.SEND_WITH_IMM, imm_data=0x01020304))
        one.qp.post_send(
            SendWR(
                2,
                [SGE(source)],
                Opcode.RDMA_WRITE_WITH_IMM,
                imm_data=5,
                remote_addr=target.addr + 8,
                rkey=target.rkey,
            )
        )
        first, second = await arrived(other, 2)
        assert (first.wr_id, first.opcode, first.byte_len) == (7, WCOpcode.RECV, 8)
        assert first.flags & ~WCFlags.GRH == WCFlags.WITH_IMM
        assert (first.imm_data, first.qp_num) == (0x01020304, other.qp.num)
        assert (second.wr_id, second.opcode, second.imm_data) == (8, WCOpcode.RECV_RDMA_WITH_IMM, 5)
        sent = await arrived(one, 2)
        assert [each.wr_id for each in sent] == [1, 2]
        for each in (first, second, *sent):
            assert type(each) is ExtendedCompletion
            assert each.ok
            assert each.timestamp is each.wallclock_ns is each.cvlan is each.flow_tag is None
        assert bytes(target.view[:16]) == 2 * b"12345678"


async def test_a_failure_and_what_is_flushed() -> None:
    async with connected(fields=NONE) as (one, other):
        source, target = one.region(bytearray(8)), other.region(bytearray(8))
        one.qp.post_recv(RecvWR(3, [SGE(source)]))
        one.qp.post_send(
            SendWR(
                4, [SGE(source)], Opcode.RDMA_WRITE, remote_addr=target.addr, rkey=target.rkey + 1
            )
        )
        found = {each.wr_id: each for each in await arrived(one, 2)}
        assert found[4].status == WCStatus.REM_ACCESS_ERR
        assert found[3].status == WCStatus.WR_FLUSH_ERR
        for each in found.values():
            assert each.qp_num == one.qp.num
            assert each.opcode is each.byte_len is each.timestamp is None


async def test_no_more_than_asked_for_and_nothing_lost() -> None:
    async with connected(fields=NONE) as (one, other):
        source, target = one.region(bytearray(8)), other.region(bytearray(8))
        writes = [
            SendWR(
                number, [SGE(source)], Opcode.RDMA_WRITE, remote_addr=target.addr, rkey=target.rkey
            )
            for number in range(8)
        ]
        one.qp.post_send(writes)
        numbers: list[int] = []
        async with asyncio.timeout(LIMIT_S):
            while len(numbers) < 8:
                some = one.cq.poll(1)
                assert len(some) <= 1
                numbers += [each.wr_id for each in some]
                await asyncio.sleep(0)
        assert numbers == list(range(8))
        # As many as have come are only counted, and the queue may grow with them in it.
        one.qp.post_send(writes)
        one.cq.resize(256)
        count = 0
        async with asyncio.timeout(LIMIT_S):
            while count < 8:
                count += one.cq.poll_count(3)
                await asyncio.sleep(0)
        assert one.cq.poll() == []


async def test_the_loop_does_not_manage_it() -> None:
    async with connected(fields=NONE) as (one, other):
        region = one.region(bytearray(8))
        for work in (one.qp.send(region), one.qp.recv(region), anext(one.cq)):
            with pytest.raises(RuntimeError, match="the program polls"):
                await work
        assert one.qp.outstanding == 0
        assert not one.cq.managed
        del other


@pytest.mark.parametrize("field", MORE)
async def test_a_field_that_the_device_has_not(field: WCFields) -> None:
    async with hand_made(1) as (end,):
        if field in TIMES and end.context.query_clock().timestamp_mask:
            ExtendedCompletionQueue(end.context, 16, fields=field).close()
            return
        with pytest.raises(NotSupportedError, match="no extended completion queues"):
            ExtendedCompletionQueue(end.context, 16, fields=field)


async def test_bad_arguments() -> None:
    async with hand_made(1) as (end,):
        with pytest.raises(ValueError, match="TM_INFO"):
            ExtendedCompletionQueue(end.context, 16, fields=WCFields.TM_INFO)
        with pytest.raises(TypeError, match="fields has to be a"):
            ExtendedCompletionQueue(end.context, 16, fields="timestamp")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least one completion"):
            ExtendedCompletionQueue(end.context, 0, fields=NONE)
        with ExtendedCompletionQueue(end.context, 16, fields=NONE) as queue:
            assert queue.fields & WCFields.BYTE_LEN
            assert repr(queue).startswith("<ExtendedCompletionQueue open")
            with pytest.raises(ValueError, match="cannot poll for 0"):
                queue.poll(0)


async def test_the_clock_of_a_device() -> None:
    """Of one that has a clock, as adapters have, and of one that has none."""
    async with hand_made(1) as (end,):
        clock = end.context.query_clock()
        if clock.timestamp_mask:
            assert clock.frequency_khz > 0
            before = end.context.read_clock()
            assert 0 <= before <= end.context.read_clock() <= clock.timestamp_mask
            return
        assert clock == DeviceClock(0, 0)
        with pytest.raises(NotSupportedError, match="ibv_query_rt_values_ex"):
            end.context.read_clock()
