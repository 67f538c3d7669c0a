"""Large messages that the adapter reads right into memory of the program: not on iWARP."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from typing import Any

import anyio
import numpy as np
import pytest

import aiordma
from aiordma import ConnectionConfig
from tests.device.meeting import paired
from tests.device.oracle import until
from tests.device.request_server import answer_to, handler, question
from tests.device.test_request_into import FETCHED, LIMIT_S, MIB, asking, is_idle
from tests.inside.endpoint import hold_reads, link_of

pytestmark = pytest.mark.device

#: Of a request whose READ is to begin before; a busy machine takes some tenths of a second for it.
DEADLINE_S = 3.0


@pytest.mark.kernel  # in the fabric it is the processor that writes
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("call", ["recv_into", "request"])
async def test_the_processor_does_not_write_to_it(
    address: str, monkeypatch: pytest.MonkeyPatch, call: str, checked: bool
) -> None:
    """The memory is read-only for the processor while a large message comes: a copy would crash."""
    size = 8 * MIB
    config = ConnectionConfig(rendezvous_threshold=0, check_large=checked)
    memory = mmap.mmap(-1, size)
    array = np.frombuffer(memory, "u1")
    libc = ctypes.CDLL(None, use_errno=True)
    sealed: list[int] = []

    def protect(how: int) -> None:
        assert libc.mprotect(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(size), how) == 0

    async with (
        aiordma.serve_requests(handler, address, 0, config=config) as server,
        aiordma.connect(address, server.port, config=config) as client,
        paired(address, config) as (sender, receiver),
    ):
        real = type(link_of(client)).post_read

        def post_read(self: Any, *args: Any) -> None:
            if not sealed:  # it is registered, and pinned
                protect(mmap.PROT_READ)
            sealed.append(1)
            real(self, *args)

        if call == "recv_into":  # from then on no large message is fetched before
            await asyncio.gather(sender.send(b"first"), receiver.recv_into(array))
        monkeypatch.setattr(type(link_of(client)), "post_read", post_read)
        try:
            if call == "request":
                assert await client.request(question(1, size, 0, 0), into=array) == size
            else:
                await asyncio.gather(sender.send(answer_to(1, size)), receiver.recv_into(array))
        finally:
            protect(mmap.PROT_READ | mmap.PROT_WRITE)
    assert len(sealed) == size // MIB
    assert array.tobytes() == answer_to(1, size)


@pytest.mark.parametrize("how", ["cancel", "deadline", "scope", "recv_into in a scope"])
async def test_a_call_ends_when_the_adapter_has_stopped_writing(address: str, how: str) -> None:
    """It ends by a cancellation or its deadline, but not before the READs under way have ended.

    A cancel scope of anyio cancels it in every turn of the loop until then.
    """
    size = MIB
    buffer = bytearray(size)
    scope = anyio.CancelScope()
    timeout = DEADLINE_S if how == "deadline" else None
    async with asking(address) as (client, _), paired(address, FETCHED) as (sender, receiver):

        async def call() -> None:
            with scope:
                if "recv_into" in how:
                    await receiver.recv_into(buffer)
                else:
                    await client.request(question(2, size, 0, 0), into=buffer, timeout=timeout)

        # From the first call on no large message is fetched before the next.
        await asyncio.gather(sender.send(b"first"), receiver.recv_into(bytearray(5)))
        sending = asyncio.create_task(sender.send(answer_to(1, size)))
        with hold_reads(receiver if "recv_into" in how else client) as held:
            calling = asyncio.create_task(call())
            await until(lambda: bool(held), LIMIT_S)
            if how == "cancel":
                calling.cancel()
            elif "scope" in how:
                scope.cancel()
            wait_s = 0.3 if timeout is None else DEADLINE_S + 0.3
            ended, _ = await asyncio.wait((calling,), timeout=wait_s)
            assert not ended
            with pytest.raises(BufferError):
                buffer.append(0)
        await asyncio.wait((calling,))
        assert calling.cancelled() == (how == "cancel")
        assert scope.cancelled_caught == ("scope" in how)
        if how == "deadline":
            with pytest.raises(aiordma.RequestDeadlineError):
                await calling
        buffer[:] = b"\xee" * size
        buffer.append(0)
        with await receiver.recv() as message:
            assert message == answer_to(1, size)
        await sending
        await is_idle(client)
        assert buffer == b"\xee" * size + b"\0"
