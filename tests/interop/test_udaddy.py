"""udaddy: datagrams to a service that was resolved, and as many back.

Each datagram carries the number of its sender's queue pair as an immediate; there the answers go.
What the server answers with is the memory into which it has received: the header of the last
message and the beginning of its text.  The port is always 7174: `-p` is another option here.
"""

from __future__ import annotations

import asyncio
import ipaddress

import pytest

from aiordma import NotSupportedError
from aiordma.cm import PortSpace
from aiordma.verbs import GRH, AddressHandle, AHAttributes
from tests.interop.datagram_programs import PORT, SERVICES, assert_well, udaddy
from tests.interop.mailbox import FRESH, MESSAGES, SIZE, TUNABLES, Letter, Mailbox, send_all
from tests.interop.native import End, Server, dialed, serving
from tests.interop.program import Program, assert_bytes, running
from tests.native_ends import close_all

NO_DATAGRAMS = "udaddy: unable to create QP: Operation not supported"


def message(number: int) -> bytes:
    """Bytes that no other message has."""
    return f"{number} ".encode().ljust(SIZE, bytes([number]))


async def assert_no_datagrams(address: str) -> None:
    """iWARP has none: neither program has a way around."""
    with pytest.raises(NotSupportedError, match="iWARP"):
        async with serving(address, PORT, PortSpace.UDP):
            pass
    async with running(*udaddy("-s", address)) as client:
        await client.finish(255)
    assert NO_DATAGRAMS in client.lines


# aiordma serves


async def answer(end: End, letter: Letter, number: int) -> None:
    """To where the datagram came from, by what its header and completion tell."""
    region = end.region(SIZE)
    region.view[:] = message(number)
    context = end.cm_id.context
    assert context is not None
    attributes = AHAttributes.from_wc(context, letter.completion, letter.header)
    with await AddressHandle.create(end.pd, attributes) as ah:
        qkey = end.qp.query().qkey
        await end.qp.send(
            region, ah=ah, remote_qpn=letter.completion.src_qp, remote_qkey=qkey, imm=end.qp.num
        )


@pytest.mark.parametrize("shared", [False, True], ids=["a queue pair each", "one for all"])
async def test_aiordma_serves_udaddy(address: str, is_siw: bool, *, shared: bool) -> None:
    if is_siw:
        await assert_no_datagrams(address)
        return
    ends: list[End] = []
    boxes: list[Mailbox] = []

    async def accept(server: Server) -> None:
        request = (await server.request()).connection_id
        assert request is not None
        if shared and ends:
            await request.accept(qp=ends[0].qp)
            request.close()
            return
        ends.append(End(request, depth=SERVICES * MESSAGES))
        boxes.append(Mailbox(ends[-1], (SERVICES if shared else 1) * MESSAGES))
        await request.accept()

    async with (
        serving(address, PORT, PortSpace.UDP) as server,
        running(*udaddy("-s", address), GLIBC_TUNABLES=TUNABLES) as client,
    ):
        try:
            for _ in range(SERVICES):
                await accept(server)
            letters: dict[int, list[Letter]] = {}
            for n in range(SERVICES * MESSAGES):
                letter = await boxes[n % len(boxes)].next()
                assert_bytes(letter.payload, FRESH * SIZE)
                letters.setdefault(letter.completion.src_qp, []).append(letter)
            assert [len(some) for some in letters.values()] == [MESSAGES] * SERVICES
            for n in range(MESSAGES):
                for some in letters.values():
                    (end,) = (e for e in ends if e.qp.num == some[n].completion.qp_num)
                    await answer(end, some[n], n)
            await client.finish()
        finally:
            for end in ends:
                await close_all(end)
    assert_well(client)


async def test_aiordma_refuses_udaddy(address: str, is_siw: bool) -> None:
    if is_siw:
        await assert_no_datagrams(address)
        return
    async with (
        serving(address, PORT, PortSpace.UDP) as server,
        running(*udaddy("-s", address, services=1)) as client,
    ):
        request = (await server.request()).connection_id
        assert request is not None
        request.reject(b"not you")
        await client.finish(2)
        request.close()
    assert "udaddy: event: RDMA_CM_EVENT_UNREACHABLE, error: 2" in client.lines


# udaddy serves


async def talk(server: Program, address: str, asked: asyncio.Barrier) -> None:
    boxes: list[Mailbox] = []
    async with dialed(
        server,
        address,
        PORT,
        lambda end: boxes.append(Mailbox(end, MESSAGES)),
        space=PortSpace.UDP,
    ) as service:
        # It looks at datagrams when all have asked for it.
        await asked.wait()
        end, there = service.end, service.answer
        await send_all(end, there, (message(number) for number in range(MESSAGES)))
        for _ in range(MESSAGES):
            letter = await boxes[-1].next()
            assert letter.completion.src_qp == there.qp_num
            header, text = letter.payload[: GRH.SIZE], letter.payload[GRH.SIZE :]
            # On RoCE v2 the header ends with that of IPv4, and that one with the addresses.
            assert header[-8:] == ipaddress.ip_address(address).packed * 2
            assert_bytes(text, message(MESSAGES - 1)[: SIZE - GRH.SIZE])


async def test_udaddy_serves_aiordma(address: str, is_siw: bool) -> None:
    async with running(*udaddy("-b", address), GLIBC_TUNABLES=TUNABLES) as server:
        asked = asyncio.Barrier(SERVICES)
        if is_siw:
            with pytest.raises(NotSupportedError, match="iWARP"):
                await talk(server, address, asked)
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(SERVICES):
                group.create_task(talk(server, address, asked))
        await server.finish()
    assert_well(server)
