"""Peers that break the rules of requests: plain connections that send frames by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from functools import partial

import pytest

import aiordma
import aiordma.metrics
from aiordma import ListenerLimits
from aiordma.requests.wire import ANSWER_BODY, BODY_FOLLOWS, Kind, error_frame, frame
from tests.device.oracle import until
from tests.device.test_requests import LIMIT_S
from tests.inside.endpoint import take_frames_as_messages
from tests.inside.link import lengthen_log_periods

pytestmark = pytest.mark.device

RUDE: dict[str, list[tuple[bytes, int | None]]] = {
    "garbage": [(b"garbage, more than a header has", None)],
    "too short": [(b"", None)],
    "no answer asked": [(frame(Kind.ANSWER, 5), None)],
    "no error asked": [(error_frame(5, 1, "", ""), None)],
    "no body asked": [(bytes(100_000), 5)],
    "no answer's body asked": [(b"x", ANSWER_BODY | 5)],
    "twice": [(frame(Kind.REQUEST, 5), None)] * 2,
    "flood": [(frame(Kind.REQUEST, n), None) for n in range(300)],
    "headers without bodies": [
        (frame(Kind.REQUEST, n, flags=BODY_FOLLOWS), None) for n in range(300)
    ],
}


async def be_rude(connection: aiordma.Connection, frames: list[tuple[bytes, int | None]]) -> None:
    for data, imm in frames:
        await connection.send(data, imm)
    while True:
        await connection.recv()


@pytest.mark.parametrize("rude", RUDE)
async def test_a_rude_peer_ends_its_connection_and_no_other(
    address: str, rude: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_frames_as_messages(monkeypatch)

    async def serve(request: aiordma.Request) -> aiordma.Message:
        if not request.body:
            await asyncio.Event().wait()
        return request.body

    async with (
        aiordma.serve_requests(serve, address, 0) as server,
        aiordma.connect(address, server.port) as good,
        aiordma.connect(address, server.port) as bad,
        asyncio.timeout(LIMIT_S),
    ):
        assert await good.request(b"?") == b"?"
        with pytest.raises(aiordma.ProtocolError):
            await be_rude(bad, RUDE[rude])
        assert await good.request(b"?") == b"?"
        await until(lambda: len(server.connections) == 1, LIMIT_S)


async def test_all_requests_of_a_listener_have_a_budget(address: str) -> None:
    """Of many connections of a source, whose requests the handlers do not answer."""
    mib = 1 << 20
    limits = ListenerLimits(max_request_bytes=8 * mib)
    going_on = asyncio.Event()

    async def serve(request: aiordma.Request) -> bytes:
        await going_on.wait()
        return b"done"

    async def outcome(client: aiordma.Connection) -> str:
        try:
            return bytes(await client.request(bytes(mib))).decode()
        except aiordma.RequestRefusedError:
            return "refused"

    def held() -> int:
        (listener,) = aiordma.metrics.snapshot().listeners
        return listener.request_bytes

    async with (
        aiordma.serve_requests(serve, address, 0, limits=limits) as server,
        asyncio.timeout(LIMIT_S),
        contextlib.AsyncExitStack() as clients,
    ):
        connect = partial(aiordma.connect, address, server.port)
        crowd = [await clients.enter_async_context(connect()) for _ in range(5)]
        tasks = [asyncio.create_task(outcome(each)) for each in crowd for _ in range(4)]
        refused = len(tasks) - 6  # three quarters of the budget are this source's
        await until(lambda: sum(task.done() for task in tasks) >= refused, LIMIT_S)
        assert 5 * mib < held() <= 6 * mib
        going_on.set()
        assert Counter(await asyncio.gather(*tasks)) == {"done": 6, "refused": refused}
        assert await crowd[0].request(bytes(mib)) == b"done"
        await until(lambda: held() == 0, LIMIT_S)


def _levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of the lines about handlers' errors, without that of a server that takes long to stop."""
    told = (it for it in caplog.records if not it.getMessage().startswith("the server stops"))
    return [each.levelname for each in told if each.levelno > logging.INFO]


async def test_a_source_has_no_more_tracebacks_logged_than_its_share(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By requests, and by connections."""
    lengthen_log_periods(monkeypatch)

    async def fail(request: aiordma.Request) -> None:
        raise ZeroDivisionError("by 0")

    async def break_(connection: aiordma.Connection) -> None:
        raise ZeroDivisionError("by 0")

    async with (
        aiordma.serve_requests(fail, address, 0) as server,
        aiordma.connect(address, server.port) as client,
        asyncio.timeout(LIMIT_S),
    ):
        for _ in range(100):
            with pytest.raises(aiordma.RequestError, match="by 0"):
                await client.request(b"?")
    logged = _levels(caplog)
    assert logged == ["ERROR"] * 20 + ["WARNING"]
    assert "are not logged for" in caplog.text
    caplog.clear()
    async with aiordma.serve(break_, address, 0) as server, asyncio.timeout(LIMIT_S):
        for _ in range(30):
            async with aiordma.connect(address, server.port) as client:
                with pytest.raises(aiordma.ConnectionLostError):
                    await client.recv()
    logged = _levels(caplog)
    assert logged == ["ERROR"] * 20 + ["WARNING"]
    caplog.clear()
