"""Queue pairs brought up by hand: the states, both ways of messages, one-sided operations, ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiordma import (
    CompletionError,
    ConnectTimeoutError,
    FlushedError,
    NotSupportedError,
    ProtocolError,
    RdmaOSError,
    ResourceClosedError,
)
from aiordma._ffi import lib
from aiordma.loop.workers import connecting
from aiordma.verbs import (
    GRH,
    MTU,
    SGE,
    Access,
    AddressHandle,
    AHAttributes,
    BringUp,
    BringUpConfig,
    MigrationState,
    QPAddress,
    QPAttrMask,
    QPState,
    QPType,
    RecvWR,
    SendWR,
)
from tests.device.bringing_up import connected, hand_made, tcp_pair
from tests.device.oracle import until
from tests.device.shared import has_atomics
from tests.inside.loop import all_done
from tests.inside.verbs import moves
from tests.native_ends import begun

TEXT = b"by hand"
DEPTH_BYTES = 64

# The states


async def test_each_end_passes_the_states() -> None:
    async with hand_made() as (one, other):
        states = [one.qp.state]
        first, second = one.bring_up(psn=1), other.bring_up(psn=2)
        states.append(one.qp.state)
        assert states == [QPState.RESET, QPState.INIT]
        assert first.address.qp_num == one.qp.num
        await first.connect(second.address)
        await second.connect(first.address)
        found = one.qp.query()
        assert found.qp_state == QPState.RTS
        assert (found.dest_qp_num, found.sq_psn, found.rq_psn) == (other.qp.num, 1, 2)
        assert found.ah_attr.dgid == second.address.gid
        assert found.ah_attr.sgid_index == first.gid_index
        assert (found.timeout, found.retry_cnt, found.rnr_retry) == (14, 6, 6)
        assert found.min_rnr_timer == 12


APART = """
import asyncio, socket
from aiordma.verbs import BringUp
from tests.device.bringing_up import hand_made

async def main():
    async with hand_made() as (one, _):
        BringUp(one.qp)

asyncio.run(main())
"""


@pytest.mark.kernel
async def test_another_namespace_has_no_gid_of_this() -> None:
    """A shared device lists the GIDs of all namespaces, and works with none of another."""
    run = await asyncio.create_subprocess_exec(
        "unshare", "-n", sys.executable, "-c", APART,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, _ = await run.communicate()
    assert run.returncode == 1
    assert b"EADDRNOTAVAIL" in out, out.decode()
    assert b"interface of this network namespace; gid_index takes any" in out


@pytest.mark.kernel
async def test_the_doctor_in_another_namespace() -> None:
    run = await asyncio.create_subprocess_exec(
        "unshare", "-n", sys.executable, "-m", "aiordma", "doctor",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, _ = await run.communicate()
    assert b"no GID is of an interface of this network namespace" in out, out.decode()
    assert run.returncode == 1


async def test_the_lower_mtu_and_the_lower_depth_hold() -> None:
    mine = {"path_mtu": MTU.MTU_512, "max_dest_rd_atomic": 2}
    async with connected(mine, {"max_rd_atomic": 7}) as (one, other):
        assert one.qp.query().path_mtu == other.qp.query().path_mtu == MTU.MTU_512
        assert other.qp.query().max_rd_atomic == 2
        assert one.qp.query().max_dest_rd_atomic == 2
        # Longer than many packets: they are cut and put together alike.
        sent = bytes(range(256)) * 20
        source, target = one.region(bytearray(sent)), other.region(len(sent))
        received = await begun(other.qp.recv(target))
        await one.qp.send(source)
        await received
        assert bytes(target.view) == sent


async def test_the_same_by_modify_alone() -> None:
    """As C programs do it, with an address vector."""
    async with hand_made() as (one, other):
        gid = BringUp(one.qp).address.gid  # only to learn it
        one.qp.modify(qp_state=QPState.RESET)
        for end, peer, psn in ((one, other, 10), (other, one, 20)):
            end.qp.modify(
                QPAttrMask.STATE | QPAttrMask.PKEY_INDEX | QPAttrMask.PORT
                | QPAttrMask.ACCESS_FLAGS,
                qp_state=QPState.INIT, pkey_index=0, port_num=1,
                qp_access_flags=Access.REMOTE_WRITE,
            )  # fmt: skip
            end.qp.modify(
                qp_state=QPState.RTR, path_mtu=MTU.MTU_1024, dest_qp_num=peer.qp.num,
                rq_psn=30 - psn, max_dest_rd_atomic=1, min_rnr_timer=12,
                ah_attr=AHAttributes(dgid=gid, sgid_index=index_of(end, gid), port_num=1),
            )  # fmt: skip
            end.qp.modify(
                qp_state=QPState.RTS, timeout=14, retry_cnt=6, rnr_retry=6, sq_psn=psn,
                max_rd_atomic=1,
            )  # fmt: skip
        source, target = one.region(bytearray(TEXT)), other.region(len(TEXT))
        await one.qp.write(source, target.addr, target.rkey)
        assert bytes(target.view) == TEXT


def index_of(end: Any, gid: bytes) -> int:
    table = end.context.gid_table()
    return next(int(e.index) for e in table if e.gid == gid and e.type.name == "ROCE_V2")


async def test_alternate_paths_are_of_infiniband() -> None:
    """The kernel refuses them elsewhere by a bare EINVAL."""
    async with connected() as (one, _):
        way = one.qp.query().ah_attr
        with pytest.raises(NotSupportedError, match="alternate paths on InfiniBand only"):
            one.qp.modify(alt_ah_attr=way, alt_pkey_index=0, alt_port_num=1, alt_timeout=9)
        found = one.qp.query()
        assert found.qp_state == QPState.RTS
        assert found.path_mig_state == MigrationState.MIGRATED
        assert (found.alt_port_num, found.alt_timeout) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"qp_stat": 1}, ValueError, "no attribute qp_stat"),
        ({"cap": 1}, ValueError, "no attribute cap"),
        ({"ah_attr": 1}, TypeError, "ah_attr has to be a AHAttributes, not int"),
        ({"dest_qp_num": 1 << 24}, ValueError, "24 bits"),
        ({"rq_psn": -1}, ValueError, "24 bits"),
        ({"timeout": 32}, ValueError, "5 bits"),
        ({"retry_cnt": 8}, ValueError, "3 bits"),
        ({"qkey": 1.5}, TypeError, "whole number"),
        ({"alt_timeout": 3}, ValueError, "needs alt_ah_attr"),
        ({"mask": QPAttrMask.STATE, "qkey": 3}, ValueError, "does not fit the changes"),
    ],
)
async def test_wrong_changes(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    async with hand_made(1) as (end,):
        end.bring_up()
        with pytest.raises(error, match=words):
            end.qp.modify(**changes)
        assert end.qp.state == QPState.INIT


async def test_a_step_out_of_order_is_refused() -> None:
    async with hand_made(1) as (end,):
        up = end.bring_up()
        with pytest.raises(OSError, match="ibv_modify_qp: EINVAL"):
            end.qp.modify(qp_state=QPState.RTS, sq_psn=0)
        with pytest.raises(TypeError, match="peer has to be a QPAddress, not None"):
            await up.connect()
        with pytest.raises(TypeError, match="not str"):
            await up.connect("10.0.0.1")  # type: ignore[arg-type]
        assert end.qp.state == QPState.INIT
        with pytest.raises(OSError, match="EINVAL"):
            BringUp(end.qp, BringUpConfig(port_num=9))


async def test_a_send_before_the_connection() -> None:
    async with hand_made(2) as ends:
        ends[1].bring_up()
        for end, state in zip(ends, ("RESET", "INIT"), strict=True):
            with pytest.raises(OSError, match=f"in {state}: connect it before it sends") as caught:
                await end.qp.send(end.region(bytearray(TEXT)))
            assert caught.value.errno == errno.EINVAL


# Conversations


async def test_every_operation() -> None:
    everything = {"access": Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC}
    async with connected(everything, everything) as (one, other):
        mine, theirs = one.region(4096), other.region(4096)
        theirs.view[:16] = struct.pack("=QQ", 40, 7)
        await one.qp.read(SGE(mine, 0, 16), theirs.addr, theirs.rkey)
        assert struct.unpack_from("=QQ", mine.view) == (40, 7)
        if has_atomics():
            await one.qp.fetch_add(SGE(mine, 16, 8), theirs.addr, theirs.rkey, 2)
            await one.qp.compare_swap(SGE(mine, 24, 8), theirs.addr, theirs.rkey, 42, 43)
            assert struct.unpack_from("=QQ", mine.view, 16) == (40, 42)
            assert struct.unpack_from("=Q", theirs.view) == (43,)
        received = await begun(other.qp.recv(SGE(theirs, 64, 64)))
        await one.qp.write(SGE(mine, 0, 8), theirs.addr + 128, theirs.rkey, imm=0xFEED)
        assert (await received).imm_data == 0xFEED
        assert theirs.view[128:136] == mine.view[:8]


async def test_completions_come_to_an_iterator() -> None:
    async with connected() as (one, other):
        source, target = one.region(bytearray(TEXT)), other.region(DEPTH_BYTES)
        other.qp.post_recv([RecvWR(n, [SGE(target, 8 * n, 8)]) for n in range(8)])
        one.qp.post_send([SendWR(100 + n, [SGE(source, 0, len(TEXT))]) for n in range(8)])
        seen = [await anext(other.cq) for _ in range(8)]
        assert [wc.wr_id for wc in seen] == list(range(8))
        assert all(wc.ok and wc.byte_len == len(TEXT) for wc in seen)
        assert [(await anext(one.cq)).wr_id for _ in range(8)] == list(range(100, 108))


@pytest.mark.parametrize(
    "kind",
    # The fabric has no unreliable connections.
    [pytest.param(QPType.UC, marks=pytest.mark.kernel), QPType.RC],
)
async def test_connected_services(kind: QPType) -> None:
    async with connected(qp_type=kind) as (one, other):
        source, target = one.region(bytearray(TEXT)), other.region(len(TEXT))
        received = await begun(other.qp.recv(target))
        await one.qp.send(source)
        assert (await received).byte_len == len(TEXT)
        assert bytes(target.view) == TEXT


async def test_datagrams() -> None:
    async with hand_made(qp_type=QPType.UD) as (one, other):
        first, second = one.bring_up(), other.bring_up(qkey=5)
        with pytest.raises(ValueError, match="has no peer"):
            await first.connect(second.address)
        await first.connect()
        await second.connect()
        source, target = one.region(bytearray(TEXT)), other.region(GRH.SIZE + 64)
        received = await begun(other.qp.recv(target))
        way = first.way_to(second.address)
        with await AddressHandle.create(one.pd, way) as ah:
            await one.qp.send(source, ah=ah, remote_qpn=other.qp.num, remote_qkey=5)
        wc = await received
        assert bytes(GRH.payload(target.view, wc)) == TEXT
        assert wc.src_qp == one.qp.num


# Over a stream of the program's own


async def test_exchange_over_tcp() -> None:
    async with hand_made() as (one, other), tcp_pair() as (here, there):
        first, second = one.bring_up(), other.bring_up()
        peers = await asyncio.gather(first.exchange(*here), second.exchange(*there))
        assert list(peers) == [second.address, first.address]
        source, target = one.region(bytearray(TEXT)), other.region(len(TEXT))
        received = await begun(other.qp.recv(target))
        await one.qp.send(source)
        await received
        assert bytes(target.view) == TEXT
        # The stream is the program's own from here on.
        here[1].write(b"more")
        assert await there[0].readexactly(4) == b"more"


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\0" * 64, b"hi"])
async def test_a_stranger_at_the_other_end(words: bytes) -> None:
    async with hand_made(1) as (end,), tcp_pair() as (here, there):
        there[1].write(words)
        there[1].write_eof()
        with pytest.raises(ProtocolError, match="not the address of a queue pair"):
            await end.bring_up().exchange(*here)
        assert end.qp.state == QPState.INIT


async def test_streams_that_are_none() -> None:
    async with hand_made(1) as (end,), tcp_pair() as (here, there):
        up = end.bring_up()
        for pair, name in (((None, None), "reader"), (here[::-1], "reader"), ((here[0], 5), "wri")):
            with pytest.raises(TypeError, match=f"{name}.* has to be one of asyncio's streams"):
                await up.exchange(*pair)
        here[1].write_eof()
        assert await there[0].read() == b""  # nothing was sent


async def test_the_other_end_leaves_or_says_nothing() -> None:
    async with hand_made(1) as (end,), tcp_pair() as (here, there):
        up = end.bring_up()
        with pytest.raises(ConnectTimeoutError, match=r"has not connected within 0\.05 s"):
            await up.exchange(*here, timeout=0.05)
        await there[0].readexactly(QPAddress.SIZE)
        there[1].write_eof()
        with pytest.raises(ConnectionResetError, match="closed the stream"):
            await up.exchange(*here)


async def test_cancellation_leaves_a_queue_pair_that_can_start_again() -> None:
    async with hand_made() as (one, other), tcp_pair() as (here, there):
        up = one.bring_up()
        task = await begun(up.exchange(*here))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await there[0].readexactly(QPAddress.SIZE)
        one.qp.modify(qp_state=QPState.RESET)
        first, second = one.bring_up(), other.bring_up()
        await asyncio.gather(first.exchange(*here), second.exchange(*there))
        assert one.qp.state == other.qp.state == QPState.RTS


class SlowNeighbor:
    """The change to RTR waits, as it does while a neighbor does not answer.

    Attributes:
        asked: Set in the loop when it waits.
        answer: Ends the wait.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        loop, real = asyncio.get_running_loop(), lib.ibv_modify_qp
        self.asked = asyncio.Event()
        self.answer = threading.Event()

        def modify(qp: Any, attr: Any, mask: int) -> int:
            if attr.qp_state == QPState.RTR:
                loop.call_soon_threadsafe(self.asked.set)
                assert self.answer.wait(30)
            return int(real(qp, attr, mask))

        patch.setattr(lib, "ibv_modify_qp", modify)


async def given_up(
    up: BringUp, peer: QPAddress, slow: SlowNeighbor, how: str
) -> asyncio.Task[None]:
    """A connect that waits for the neighbor, and for no longer than a second with a time limit."""
    task = await begun(up.connect(peer, timeout=1 if how == "time limit" else 30))
    await asyncio.wait_for(slow.asked.wait(), 30)
    if how == "canceled":
        task.cancel()
    return task


async def test_a_slow_neighbor_keeps_a_thread_waiting_and_not_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hand_made() as (one, other):
        first, second = one.bring_up(), other.bring_up()
        slow = SlowNeighbor(monkeypatch)
        task = await begun(first.connect(second.address))
        await slow.asked.wait()  # the loop goes on, or this would wait for ever
        assert not task.done()
        slow.answer.set()
        await task
        assert one.qp.state == QPState.RTS


@pytest.mark.parametrize("how", ["time limit", "canceled", "closed"])
async def test_a_slow_neighbor_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The C queue pair outlives the call, whatever becomes of its caller."""
    async with hand_made() as (one, other):
        first, second = one.bring_up(), other.bring_up()
        slow = SlowNeighbor(monkeypatch)
        task = await given_up(first, second.address, slow, how)
        if how == "closed":
            one.qp.close()
            slow.answer.set()
            with pytest.raises(ResourceClosedError):
                await task
        elif how == "canceled":
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with pytest.raises(ConnectTimeoutError, match="no answer from the neighbor"):
                await task
        slow.answer.set()


@pytest.mark.parametrize("how", ["time limit", "canceled"])
async def test_a_peer_that_was_given_up_gets_no_queue_pair_that_began_anew(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its neighbor answers late: the queue pair would be connected to it, and it could write."""
    async with hand_made(3) as (one, late, right):
        first, left = one.bring_up(), late.bring_up()
        slow = SlowNeighbor(monkeypatch)
        task = await given_up(first, left.address, slow, how)
        with pytest.raises((ConnectTimeoutError, asyncio.CancelledError)):
            await task
        for _ in range(2):
            with pytest.raises(RdmaOSError, match="still looks for the neighbor"):
                one.qp.modify(qp_state=QPState.RESET)
            with pytest.raises(RdmaOSError, match="still looks for the neighbor"):
                await first.connect(left.address)
        slow.answer.set()
        await until(lambda: one.qp.state is QPState.RTR)
        await until(lambda: not moves(one.qp))
        one.qp.modify(qp_state=QPState.RESET)
        again, peer = one.bring_up(), right.bring_up()
        await again.connect(peer.address)
        assert one.qp.query().dest_qp_num == right.qp.num


async def test_what_no_thread_has_begun_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is canceled while it stands in line changes nothing any more."""
    count = 20  # more than there are threads
    async with hand_made(count + 1) as (right, *ends):
        ups, peer = [end.bring_up() for end in ends], right.bring_up()
        slow = SlowNeighbor(monkeypatch)
        tasks = [asyncio.create_task(up.connect(peer.address, timeout=30)) for up in ups]
        await slow.asked.wait()
        tasks[-1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[-1]
        ends[-1].qp.modify(qp_state=QPState.RESET)
        slow.answer.set()
        await asyncio.gather(*tasks[:-1])
        assert ends[-1].qp.state is QPState.RESET


async def test_two_tasks_connect_the_same_queue_pair() -> None:
    async with hand_made() as (one, other):
        first, second = one.bring_up(), other.bring_up()
        calls = (first.connect(second.address) for _ in range(3))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(it) for it in results] == [type(None), RdmaOSError, RdmaOSError]
        assert one.qp.state is QPState.RTS


async def test_a_connect_goes_on_until_its_caller_does() -> None:
    """The thread may have ended before: a second call would start in the middle of the first."""
    async with hand_made() as (one, other):
        first, second = one.bring_up(), other.bring_up()
        task = await begun(first.connect(second.address))
        assert all_done(connecting, 30), "a blocking call is stuck"
        assert not task.done()
        with pytest.raises(RdmaOSError):
            await first.connect(second.address)
        with pytest.raises(RdmaOSError):
            one.qp.modify(qp_state=QPState.RESET)
        await task
        assert one.qp.state is QPState.RTS


# Ends


@pytest.mark.parametrize("settings", [{"timeout": 8, "retry_cnt": 1}, {}])
async def test_a_peer_that_is_gone_fails_a_send(settings: dict[str, int]) -> None:
    """By default, too: Soft-RoCE would take 7 retries for retries without an end."""
    async with connected(settings) as (one, other):
        source = one.region(bytearray(TEXT))
        other.qp.close()
        await other.qp.wait_closed()
        with pytest.raises(CompletionError):
            await one.qp.send(source)
        assert one.qp.state == QPState.ERR


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def second_address(address: str) -> Iterator[tuple[bytes, Callable[[], object]]]:
    """The GID of another address of the same card, and a function that takes the address away."""
    (card,) = (
        link["ifname"]
        for link in json.loads(ip("-j", "address"))
        if address in [each.get("local") for each in link["addr_info"]]
    )
    words = ("10.80.0.99/32", "dev", card)
    ip("address", "add", *words)
    try:
        yield (
            ipaddress.IPv6Address("::ffff:10.80.0.99").packed,
            lambda: ip("address", "del", *words),
        )
    finally:
        if "10.80.0.99" in ip("address"):
            ip("address", "del", *words)


@pytest.mark.kernel  # an address of a network card goes away
async def test_an_address_that_goes_is_named(address: str) -> None:
    async with hand_made() as (one, two):
        with second_address(address) as (gid, take_away):
            await until(lambda: gid in [each.gid for each in one.context.gid_table()])
            up, other = one.bring_up(gid_index=index_of(one, gid)), two.bring_up()
            take_away()
            await until(lambda: gid not in [each.gid for each in one.context.gid_table()])
            with pytest.raises(RdmaOSError, match=r"GID ::ffff:10\.80\.0\.99, index") as caught:
                await up.connect(other.address)
    assert caught.value.errno == errno.ENODATA
    assert "aiordma gids" in caught.value.hint


async def test_a_queue_pair_is_brought_up_once() -> None:
    """The kernel would take a second change to INIT, and the two would tell different numbers."""
    async with hand_made(1) as (end,):
        end.bring_up()
        with pytest.raises(OSError, match="is in INIT, not in RESET"):
            end.bring_up()
        with pytest.raises(OSError, match="ibv_query_gid_ex") as caught:
            end.context.query_gid(1, 99)
        assert "aiordma gids" in str(caught.value) + getattr(caught.value, "hint", "")


async def test_to_error_ends_what_waits_and_reset_begins_anew() -> None:
    async with connected() as (one, other):
        source, target = one.region(bytearray(TEXT)), one.region(64)
        waiting = await begun(one.qp.recv(target))
        with pytest.raises(RdmaOSError, match="1 requests are under way"):
            one.qp.modify(qp_state=QPState.RESET)
        one.qp.to_error()
        with pytest.raises(FlushedError):
            await waiting
        with pytest.raises(FlushedError):
            await one.qp.send(source)
        for end in (one, other):
            end.qp.modify(qp_state=QPState.RESET)
        first, second = one.bring_up(), other.bring_up()
        await first.connect(second.address)
        await second.connect(first.address)
        theirs = other.region(64)
        received = await begun(other.qp.recv(theirs))
        await one.qp.send(source)
        await received
        assert bytes(theirs.view[: len(TEXT)]) == TEXT
        assert one.qp.outstanding == other.qp.outstanding == 0


async def test_reset_frees_prepared_posts() -> None:
    async with connected() as (one, _):
        target = one.region(64)
        post = one.qp.prepare_recv(RecvWR(1, [SGE(target)]))
        one.qp.modify(qp_state=QPState.RESET)
        with pytest.raises(Exception, match="freed"):
            post.execute()


async def test_many_at_a_time() -> None:
    """Each end has its own stream; the neighbor is asked by threads."""

    async def pair(number: int) -> None:
        async with hand_made() as (one, other), tcp_pair() as (here, there):
            first, second = one.bring_up(), other.bring_up()
            await asyncio.gather(first.exchange(*here), second.exchange(*there))
            source, target = one.region(bytearray(b"%d" % number)), other.region(8)
            received = await begun(other.qp.recv(target))
            await one.qp.send(source)
            assert bytes(target.view[: (await received).byte_len or 0]) == b"%d" % number

    await asyncio.gather(*map(pair, range(20)))
