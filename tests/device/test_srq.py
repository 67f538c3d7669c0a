"""Shared receive queues."""

from __future__ import annotations

import asyncio
import functools
import itertools

import pytest

import aiordma
from aiordma.cm import EventType
from aiordma.verbs import (
    SGE,
    AsyncEventType,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    QPState,
    QueuePair,
    RecvWR,
    SharedReceiveQueue,
)
from aiordma.verbs.async_event import AsyncEvent
from aiordma.verbs.resource import Resource
from tests.device.fan import Fan, fan
from tests.device.oracle import adapter_objects, polled, until
from tests.inside.verbs import (
    awaits_low_water,
    forget_queue,
    is_gone,
    last_receive_of,
    promised,
    tell,
    token_of,
)

pytestmark = [pytest.mark.device, pytest.mark.one_loop, pytest.mark.shared_queue]


def receives(made: Fan, numbers: range, size: int = 1024) -> list[RecvWR]:
    """Receive n lands at n * size, modulo the region."""
    places = made.mr.length // size
    return [RecvWR(wr_id=n, sg_list=[SGE(made.mr, n % places * size, size)]) for n in numbers]


async def send(made: Fan, client: int, payload: bytes) -> None:
    """One message, from a piece of memory of its own."""
    with MemoryRegion(made.pd, bytearray(payload)) as region:
        await made.clients[client].send(region)


@pytest.mark.smoke
async def test_whoever_sends_takes_the_next_receive(address: str) -> None:
    async with fan(address, 3) as made:
        made.srq.post_recv(receives(made, range(6)))
        assert made.srq.outstanding == 6
        for i, client in enumerate((2, 0, 1, 1)):
            await send(made, client, bytes([client]) * (10 + i))
            async with asyncio.timeout(10):
                completion = await anext(made.cq)
            assert completion.wr_id == i
            assert made.server_of(completion.qp_num) == client
            assert completion.byte_len == 10 + i
            assert bytes(made.mr.view[i * 1024 :][: 10 + i]) == bytes([client]) * (10 + i)
        assert made.srq.outstanding == 2


async def test_queue_pairs_with_a_shared_queue_have_no_receives(address: str) -> None:
    async with fan(address, 1) as made:
        (qp,) = made.servers
        assert qp.srq is made.srq
        with pytest.raises(ValueError, match="SharedReceiveQueue"):
            qp.post_recv(receives(made, range(1)))
        with pytest.raises(ValueError, match="SharedReceiveQueue"):
            await qp.recv(made.mr)
        with pytest.raises(ValueError, match="SharedReceiveQueue"):
            qp.prepare_recv(receives(made, range(1)))
        assert made.clients[0].srq is None
        assert qp.outstanding == 0
        with ProtectionDomain(made.context) as other, pytest.raises(ValueError, match="domain"):
            QueuePair(other, QPInitAttr(send_cq=made.cq, srq=made.srq))


async def test_an_awaited_receive(address: str) -> None:
    async with fan(address, 2) as made:
        first = asyncio.create_task(made.srq.recv(SGE(made.mr, 0, 512)))
        second = asyncio.create_task(made.srq.recv(SGE(made.mr, 512, 512)))
        await asyncio.sleep(0)
        await send(made, 1, b"from one")
        await send(made, 0, b"from nil")
        async with asyncio.timeout(10):
            one, nil = await first, await second
        assert (made.server_of(one.qp_num), one.byte_len) == (1, 8)
        assert (made.server_of(nil.qp_num), nil.byte_len) == (0, 8)
        assert bytes(made.mr.view[:8]) == b"from one"
        assert bytes(made.mr.view[512:520]) == b"from nil"


async def test_a_canceled_receive_keeps_its_memory_until_it_is_taken(address: str) -> None:
    async with fan(address, 1) as made:
        region = MemoryRegion(made.pd, 4096)
        waiting = asyncio.create_task(made.srq.recv(region))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        region.close()
        with pytest.raises(TimeoutError):
            await region.wait_closed(0.05)
        assert made.srq.outstanding == 1
        await send(made, 0, b"nobody sees it")
        await region.wait_closed(10)
        assert made.srq.outstanding == 0


async def test_what_does_not_fit(address: str) -> None:
    async with fan(address, 1, max_wr=4) as made:
        srq = made.srq
        srq.post_recv(receives(made, range(3)))
        with pytest.raises(aiordma.RdmaOSError, match="1 free places, 2 are needed"):
            srq.post_recv(receives(made, range(2)))
        assert srq.outstanding == 3
        two = [SGE(made.mr, 0, 8), SGE(made.mr, 8, 8)]
        if srq.limits.max_sge == 1:
            with pytest.raises(ValueError, match="max_sge is 1"):
                srq.post_recv(RecvWR(sg_list=two))
        with pytest.raises(ValueError, match="64 bits"):
            srq.post_recv(RecvWR(wr_id=1 << 64))
        region = MemoryRegion(made.pd, 64)
        region.close()
        with pytest.raises(aiordma.ResourceClosedError):
            srq.post_recv(RecvWR(sg_list=[SGE(region, 0, 8)]))
        assert srq.outstanding == 3
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="positive"):
                SharedReceiveQueue(made.pd, wrong)
            with pytest.raises(ValueError, match="positive"):
                SharedReceiveQueue(made.pd, 8, wrong)
        for most in ((made.context.attributes.max_srq_wr + 1, 1), (8, 1 << 20)):
            with pytest.raises(OSError, match="above the device's limit"):
                SharedReceiveQueue(made.pd, *most)


async def test_the_receives_count_once_in_each_completion_queue(address: str, is_siw: bool) -> None:
    async with fan(address, 3, max_wr=20) as made:
        # Three send queues of 4, and 20 receives, whoever takes them.
        assert promised(made.cq) == 3 * 4 + 20
        assert made.cq.cqe >= promised(made.cq)
        with CompletionQueue(made.context, 8, made.channel) as small:
            attr = QPInitAttr(send_cq=made.cq, recv_cq=small, max_send_wr=4, srq=made.srq)
            if is_siw:  # cannot grow
                with pytest.raises(ValueError, match="room for 8 completions, 20 could arrive"):
                    QueuePair(made.pd, attr)
                assert promised(made.cq) == 3 * 4 + 20
            else:
                qp = QueuePair(made.pd, attr)
                assert promised(small) == 20
                assert small.cqe >= 20
                qp.close()
                await qp.wait_closed()
            assert promised(small) == 0
        for qp in made.servers:
            qp.close()
            await qp.wait_closed()
        assert promised(made.cq) == 0


# Low-water mark


async def test_low_water_comes_from_the_completions(address: str) -> None:
    async with fan(address, 2, max_wr=10) as made:
        srq = made.srq
        made.cq.manage()
        assert await srq.low_water(1) == 10  # nothing is posted: at once
        srq.post_recv(receives(made, range(6)))
        # The event of the device is lost: the completions alone have to do.
        forget_queue(srq)
        waiting = asyncio.create_task(srq.low_water(5))
        await send(made, 0, b"6 -> 5")
        await until(lambda: srq.outstanding == 5)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await send(made, 1, b"5 -> 4")
        async with asyncio.timeout(10):
            assert await waiting == 6


async def test_low_water_comes_from_the_device(address: str) -> None:
    async with fan(address, 1, max_wr=10) as made:
        srq = made.srq
        srq.post_recv(receives(made, range(6)))
        waiting = asyncio.create_task(srq.low_water(5))
        high = asyncio.create_task(srq.low_water(6))
        await asyncio.sleep(0)
        # Nobody polls the CQ, so that nothing completes: the device alone can know.
        await send(made, 0, b"6 -> 5")
        async with asyncio.timeout(10):
            assert await high == 4
        assert not waiting.done()
        await send(made, 0, b"5 -> 4")
        async with asyncio.timeout(10):
            assert await waiting == 4
        assert srq.outstanding == 6
        assert len(await polled(made.cq, 2)) == 2
        assert srq.outstanding == 4


async def test_low_water_can_be_canceled(address: str) -> None:
    async with fan(address, 1, max_wr=10) as made:
        srq = made.srq
        made.cq.manage()
        srq.post_recv(receives(made, range(6)))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await srq.low_water(4)
        assert not awaits_low_water(srq)
        waiting = asyncio.create_task(srq.low_water(4))
        await asyncio.sleep(0)
        for i in range(3):
            assert not waiting.done()
            await send(made, 0, bytes([i]))
            await until(functools.partial(lambda n: srq.outstanding == n, 5 - i))
        async with asyncio.timeout(10):
            assert await waiting == 7
        for wrong in (0, 11):
            with pytest.raises(ValueError, match=r"not in 1\.\.10"):
                await srq.low_water(wrong)


async def test_refilled_at_the_mark(address: str) -> None:
    async with fan(address, 2, max_wr=8) as made:
        numbers = itertools.count()

        async def refill() -> None:
            async for free in made.srq.refills(5):
                base = next(numbers) * 8
                made.srq.post_recv(receives(made, range(base, base + free)))

        async def take() -> list[int | None]:
            return [(await anext(made.cq)).byte_len for _ in range(100)]

        refilling, taking = asyncio.create_task(refill()), asyncio.create_task(take())
        await asyncio.sleep(0)
        for i in range(100):
            await send(made, i % 2, bytes(i + 1))
        async with asyncio.timeout(10):
            assert await taking == list(range(1, 101))
            made.srq.close()
            await refilling


# Attributes


async def test_query_and_modify(address: str, is_siw: bool) -> None:
    async with fan(address, 1, max_wr=10) as made:
        srq = made.srq
        assert srq.limits.max_wr >= 10
        for wrong in (-1, srq.limits.max_wr + 1):
            with pytest.raises(ValueError, match="limit"):
                srq.modify(limit=wrong)
        srq.post_recv(receives(made, range(8)))
        with pytest.raises(ValueError, match="8 receives are posted"):
            srq.modify(max_wr=7)
        srq.modify(limit=3)
        if is_siw:  # neither can be done there
            with pytest.raises(aiordma.NotSupportedError, match="ibv_query_srq"):
                srq.query()
            with pytest.raises(aiordma.NotSupportedError, match="ibv_modify_srq"):
                srq.modify(max_wr=40)
            assert promised(made.cq) == 4 + 10
            return
        assert srq.query().srq_limit == 3
        srq.modify(max_wr=40)
        assert promised(made.cq) == 4 + 40
        srq.post_recv(receives(made, range(8, 40)))
        assert srq.room.free == 0
        for i in range(40):
            await send(made, 0, bytes([i]) * 5)
        completions = [completion for _ in range(3) for completion in made.cq.poll(16)]
        assert [completion.wr_id for completion in completions] == list(range(40))
        srq.modify(max_wr=10)
        assert promised(made.cq) == 4 + 10


# The end


@pytest.mark.parametrize("kind", [AsyncEventType.SRQ_ERR])
async def test_an_error_of_the_device_ends_every_wait(address: str, kind: AsyncEventType) -> None:
    # No software adapter raises it, so that the event is made up here.
    async with fan(address, 1) as made:
        srq = made.srq
        receive = asyncio.create_task(srq.recv(made.mr))
        srq.post_recv(receives(made, range(3)))
        mark = asyncio.create_task(srq.low_water(2))
        await asyncio.sleep(0)
        tell(token_of(srq), AsyncEvent(kind, 0, 0, made.context))
        for waiting in (receive, mark):
            with pytest.raises(aiordma.RdmaOSError, match="SRQ_ERR") as caught:
                await waiting
            assert caught.value.event == "SRQ_ERR"
        with pytest.raises(aiordma.RdmaOSError):
            srq.post_recv(receives(made, range(1)))
        with pytest.raises(aiordma.RdmaOSError):
            await srq.low_water(2)


@pytest.mark.parametrize("thread", [False, True], ids=["here", "in a thread"])
async def test_closing_ends_every_wait(address: str, thread: bool) -> None:
    loop = asyncio.get_running_loop()
    async with fan(address, 1) as made:
        srq = made.srq
        receive = asyncio.create_task(srq.recv(made.mr))
        await asyncio.sleep(0)
        mark = asyncio.create_task(srq.low_water(1))
        await asyncio.sleep(0)
        if thread:
            debug = loop.get_debug()
            loop.set_debug(True)  # the loop's futures then refuse other threads
            await asyncio.to_thread(srq.close)
            loop.set_debug(debug)
        else:
            srq.close()
        for waiting in (receive, mark):
            with pytest.raises(aiordma.ResourceClosedError):
                await waiting
        with pytest.raises(aiordma.ResourceClosedError):
            srq.post_recv(receives(made, range(1)))


async def test_closed_in_any_order() -> None:
    """A queue pair is a child of the shared queue, and that of the protection domain."""
    with aiordma.devices()[0].open() as context:
        before = adapter_objects()
        for order in itertools.permutations(range(5)):
            pd = ProtectionDomain(context)
            mr = MemoryRegion(pd, 4096)
            channel = CompletionChannel(context)
            cq = CompletionQueue(context, 64, channel)
            srq = SharedReceiveQueue(pd, 8)
            srq.post_recv([RecvWR(sg_list=[SGE(mr, 0, 64)]) for _ in range(8)])
            qp = QueuePair(pd, QPInitAttr(send_cq=cq, srq=srq))
            parts: list[Resource] = [pd, mr, cq, srq, qp, channel]
            for i in (*order, 5):
                parts[i].close()
            for part in parts:
                await part.wait_closed(10)
            assert promised(cq) == 0
        assert adapter_objects() == before


async def test_memory_stays_until_the_shared_queue_is_gone(address: str) -> None:
    async with fan(address, 1) as made:
        region = MemoryRegion(made.pd, 4096)
        made.srq.post_recv([RecvWR(sg_list=[SGE(region, 0, 64)]) for _ in range(3)])
        with pytest.raises(aiordma.RdmaOSError):
            region.destroy()
        region.close()
        made.srq.close()  # its queue pair still holds it
        with pytest.raises(TimeoutError):
            await region.wait_closed(0.05)
        made.servers[0].close()
        await region.wait_closed(10)
        assert is_gone(made.srq)
        await made.srq.wait_closed(10)


async def test_a_queue_pair_that_dies_inside_a_message(address: str, is_siw: bool) -> None:
    """On Soft-RoCE the receive that it had taken never comes back; its memory stays pinned."""
    async with fan(address, 2) as made:
        srq, cq = made.srq, made.cq
        cq.manage()
        srq.post_recv(receives(made, range(4), size=16 * 1024))
        first, piece = MemoryRegion(made.pd, bytearray(b"x" * 8192)), MemoryRegion(made.pd, 8192)
        key, piece.lkey = piece.lkey, 0xDEAD00
        # The first part of the message leaves, and then the adapter finds the second's key wrong.
        with pytest.raises(aiordma.CompletionError):
            async with asyncio.timeout(10):
                await made.clients[0].send([first, piece])
        piece.lkey = key
        if not is_siw:  # of which nothing arrives
            await until(lambda: bytes(made.mr.view[:1]) == b"x")
        dying = made.servers[0]
        dying.to_error()
        # Linux 6.12 says so on Soft-RoCE; 6.1 and software iWARP do not.
        told = await asyncio.to_thread(last_receive_of(dying).wait, 2)
        assert not (told and is_siw)
        dying.close()
        await dying.wait_closed()
        # The other queue pair takes what is left.
        for n in range(3):
            await send(made, 1, bytes([n]))
        good: list[int] = []
        async with asyncio.timeout(10):
            while len(good) < 3:
                completion = await anext(cq)
                if completion.ok:
                    good.append(completion.wr_id)
                else:  # Linux 6.1 gives the receive back as flushed
                    assert (completion.wr_id, completion.qp_num) == (0, dying.num)
        if is_siw:
            assert good == [0, 1, 2]
        else:
            assert good == [1, 2, 3]
            # Kept where nobody was told of a flush; the memory of it stays registered.
            assert srq.outstanding == int(told)
        first.close()
        piece.close()


async def test_the_peer_leaves(address: str) -> None:
    """Its queue pair is over; the receives are everybody's."""
    async with fan(address, 2) as made:
        made.srq.post_recv(receives(made, range(2)))
        iterator = aiter(made.events)
        await made.ids[0].disconnect()
        async with asyncio.timeout(10):
            kinds = {(await anext(iterator)).type, (await anext(iterator)).type}
        assert kinds == {EventType.DISCONNECTED}
        assert made.servers[0].state == QPState.ERR
        await send(made, 1, b"still here")
        async with asyncio.timeout(10):
            completion = await anext(made.cq)
        assert made.server_of(completion.qp_num) == 1
        assert made.srq.outstanding == 1


# Prepared receives


async def test_prepared_receives(address: str) -> None:
    """Posted again and again, patched between, taken by any queue pair."""
    async with fan(address, 2) as made:
        post = made.srq.prepare_recv(receives(made, range(2)))
        other = MemoryRegion(made.pd, 64)
        assert len(post) == 2
        post.execute().patch(0, wr_id=10).patch(1, wr_id=11, region=other, length=64).execute()
        assert made.srq.outstanding == 4
        for n, client in enumerate((1, 0, 1, 0)):
            await send(made, client, b"%d" % n)
        async with asyncio.timeout(10):
            seen = [(await anext(made.cq)).wr_id for _ in range(4)]
        assert seen == [0, 1, 10, 11]
        assert bytes(made.mr.view[:1]) == b"2"  # the third, in the place of the first
        assert bytes(other.view[:1]) == b"3"
        assert made.srq.outstanding == 0
        other.close()
        with pytest.raises(aiordma.ResourceClosedError):
            post.execute()
        assert made.srq.outstanding == 0
        assert made.srq.room.free == made.srq.max_wr
        post.free()
        with pytest.raises(aiordma.ResourceClosedError, match="freed"):
            post.execute()


async def test_prepared_receives_that_are_refused(address: str) -> None:
    async with fan(address, 1) as made:
        most = made.srq.max_wr
        with pytest.raises(ValueError, match=f"1 to {most} receives"):
            made.srq.prepare_recv([])
        with pytest.raises(ValueError, match=f"1 to {most} receives"):
            made.srq.prepare_recv(receives(made, range(most + 1)))
        post = made.srq.prepare_recv(receives(made, range(1)))
        with pytest.raises(IndexError):
            post.patch(1, wr_id=3)
        with pytest.raises(IndexError):
            post.patch(piece=1, length=3)
        with pytest.raises(ValueError, match="64 bits"):
            post.patch(wr_id=1 << 64)
        with pytest.raises(ValueError, match="region"):
            post.patch(offset=made.mr.length, length=1)
        with (
            ProtectionDomain(made.context) as pd,
            MemoryRegion(pd, 64) as foreign,
            pytest.raises(ValueError, match="another protection domain"),
        ):
            post.patch(region=foreign, length=64)
        for _ in range(most):
            post.execute()
        with pytest.raises(aiordma.RdmaOSError, match="0 free places"):
            post.execute()
        assert made.srq.outstanding == most
