"""Peers that break the rules of requests, or that owe answers: the connection ends, or goes on."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiordma import ConnectionLostError, ProtocolError, RequestDeadlineError, RequestError
from aiordma.requests import calls
from aiordma.requests.wire import (
    ANSWER_BODY,
    BODY_FOLLOWS,
    GIVEN_UP,
    HEADER_SIZE,
    INITIAL_BYTES,
    INITIAL_REQUESTS,
    ErrorCode,
    Kind,
    error_frame,
    frame,
)
from tests.inside.requests import held_by, held_of

from ..conftest import settle
from .pipe import NOTHING, ROOM, End, echo, joined, lone, part

HEADER = frame(Kind.REQUEST, 5)
#: The messages, with their immediates, and words of the error.
RUDE: dict[str, tuple[list[tuple[bytes, int | None]], str]] = {
    "garbage": ([(b"garbage garbage garbage", None)], "no request"),
    "short": ([(b"", None)], "that is no request"),
    "no body asked": ([(b"x", 5)], "body of request 5"),
    "no answer asked": ([(frame(Kind.ANSWER, 5), None)], "answer to request 5"),
    "no error asked": ([(error_frame(5, 1, "", ""), None)], "error for request 5"),
    "no answer's body": ([(b"x", ANSWER_BODY | 5)], "answer to request 5"),
    "twice": ([(HEADER, None)] * 2, "request 5 twice"),
    "body twice": (
        [(frame(Kind.REQUEST, 5, flags=BODY_FOLLOWS), None), (b"1", 5), (b"2", 5)],
        "body of request 5",
    ),
    "flood": (
        [(frame(Kind.REQUEST, n), None) for n in range(INITIAL_REQUESTS + 1)],
        "more than 16 requests",
    ),
    "flood of headers": (
        [(frame(Kind.REQUEST, n, flags=BODY_FOLLOWS), None) for n in range(INITIAL_REQUESTS + 1)],
        "more than 16 requests",
    ),
    "grants nothing": ([(frame(Kind.GRANT, 0), None)], "grant of no request"),
}


@pytest.mark.parametrize("rude", RUDE)
async def test_a_rude_peer_ends_its_connection(rude: str) -> None:
    end = await lone()
    messages, words = RUDE[rude]
    # With a waiting task the requests would be taken; the grant is the initial one.
    waits = "twice" not in rude and "flood" not in rude
    waiting = asyncio.create_task(anext(end.requests())) if waits else None
    asking = asyncio.create_task(end.request(b"?"))
    await settle()
    for data, imm in messages:
        end.arrive(data, imm)
    with pytest.raises(ConnectionLostError, match=words) as caught:
        await asking
    assert isinstance(end.cause, ProtocolError)
    assert isinstance(caught.value, ProtocolError)
    assert caught.value.request_sent
    if waiting is not None:
        with pytest.raises(ProtocolError):
            await waiting
    with pytest.raises(ProtocolError):
        await end.request(b"?")
    await part(end)


async def test_a_flood_that_takes_no_refusals_ends() -> None:
    """Refusals that have no room are bounded."""
    end = await lone()
    end.requests(limit=1, limit_bytes=1)
    end.credits = 0
    large = bytes(INITIAL_BYTES)
    for number in range(INITIAL_REQUESTS):
        end.ask(number, large)
    await settle()
    assert end.cause is None
    assert held_of(end.exchange.served)[:2] == (INITIAL_REQUESTS, 1)
    end.arrive(frame(Kind.REQUEST, 99))
    await settle()
    assert isinstance(end.cause, ProtocolError)
    await part(end)


async def test_a_flood_that_takes_no_answers_ends() -> None:
    """Each answer is given up after a time, and the words about that wait for room."""
    end = await lone()
    requests = end.requests(limit=1)
    end.credits = 0
    for number in range(1000):
        end.arrive(frame(Kind.REQUEST, number))
        await settle()
        if end.cause is not None:
            break
        request = await anext(requests)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await request.reply(b"!")
        await settle()
    assert number <= INITIAL_REQUESTS + 2
    assert isinstance(end.cause, ProtocolError)
    with pytest.raises(ProtocolError, match="not taken 17 answers"):
        await anext(requests)
    await part(end)


async def test_answers_that_were_given_up_and_told_do_not_count() -> None:
    end = await lone()
    requests = end.requests(limit=1)
    for number in range(5 * INITIAL_REQUESTS):
        end.credits = 0
        end.arrive(frame(Kind.REQUEST, number))
        request = await anext(requests)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await request.reply(b"!")
        end.give(None)
        await settle()
    assert end.cause is None
    await part(end)


async def abandon(end: End, count: int) -> None:
    asking = [asyncio.create_task(end.request(b"?")) for _ in range(count)]
    await settle()
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


async def test_each_abandoned_call_gives_the_peer_all_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after one whose answer has crossed its cancellation."""
    monkeypatch.setattr(calls, "UNANSWERED_S", 0.8)
    end = await lone()
    await abandon(end, 1)
    await asyncio.sleep(0.15)
    end.arrive(frame(Kind.ANSWER, end.sent[0][0][7]) + b"!")
    await settle()
    await abandon(end, 1)
    begun = end.loop.time()
    while end.cause is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert end.loop.time() - begun >= 0.75


async def test_what_a_peer_owes_is_bounded_whatever_it_grants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "MOST_ABANDONED", 8)
    end = await lone()
    end.arrive(frame(Kind.GRANT, ANSWER_BODY - 1, (1 << 64) - 1))
    await settle()
    await abandon(end, 8)
    for _ in range(20):
        with pytest.raises(RequestDeadlineError):
            await end.request(b"?", 0.001)
    assert held_by(end.exchange.calls)[0] == 8
    end.arrive(error_frame(end.sent[0][0][7], ErrorCode.CANCELED, "", ""))
    asking = asyncio.create_task(end.request(b"?"))
    await settle()
    end.arrive(frame(Kind.ANSWER, end.sent[-1][0][7]) + b"!")
    assert await asking == b"!"
    await part(end)


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.ANSWER])
async def test_a_body_in_a_frame_is_no_larger_than_a_slot(kind: Kind) -> None:
    """It is copied at once; a larger one comes as a message, which is not."""
    end = await lone()
    asking = asyncio.create_task(end.request(b"?"))
    await settle()
    number = end.sent[-1][0][7]
    requests = end.requests()
    if kind == Kind.REQUEST:
        end.arrive(frame(kind, 0) + bytes(ROOM - HEADER_SIZE))
        assert len((await anext(requests)).body) == ROOM - HEADER_SIZE
        number = 1
    end.arrive(frame(kind, number) + bytes(ROOM + 1))
    with pytest.raises(ConnectionLostError):
        await anext(requests)
    assert isinstance(end.cause, ProtocolError)
    assert "a message of its own" in str(end.cause)
    with pytest.raises(ConnectionLostError):
        await asking
    await part(end)


async def test_a_peer_that_answers_no_cancellation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "UNANSWERED_S", 0.4)
    end = await lone()
    for _ in range(6):  # a peer that ends a call now and then goes on
        await abandon(end, 2)
        await asyncio.sleep(0.12)
        assert end.cause is None
        end.arrive(error_frame(end.sent[-1][0][7], ErrorCode.CANCELED, "", ""))
        await settle()
    asking = asyncio.create_task(end.request(b"?"))
    await asyncio.sleep(0.6)  # so does a peer that has a call whose task waits
    assert end.cause is None
    end.arrive(frame(Kind.ANSWER, end.sent[-1][0][7]))
    await asking
    with pytest.raises(ConnectionLostError):
        await anext(end.requests())
    assert isinstance(end.cause, ProtocolError)
    assert "no cancellation" in str(end.cause)
    await part(end)


async def test_no_time_runs_when_all_cancellations_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "UNANSWERED_S", 0.02)
    client, server = await joined()
    requests = server.requests()
    await settle()
    await abandon(client, 5)
    await settle()
    assert held_by(client.exchange.calls) == NOTHING
    await asyncio.sleep(0.06)
    assert client.cause is None
    del requests
    await part(client, server)


async def test_frames_that_come_late_are_no_violation() -> None:
    end = await lone()
    end.arrive(frame(Kind.CANCEL, 77))
    end.arrive(error_frame(77, 1, "", "", GIVEN_UP))
    await settle()
    assert end.cause is None
    await part(end)


async def test_an_answer_twice_is_a_violation() -> None:
    client = await lone()
    asking = asyncio.create_task(client.request(b"?"))
    await settle()
    number = client.sent[0][0][7]
    client.arrive(b"!", ANSWER_BODY | number)
    client.arrive(frame(Kind.ANSWER, number))
    assert await asking == b"!"
    await settle()
    assert isinstance(client.cause, ProtocolError)
    await part(client)


@pytest.mark.parametrize("seed", range(20))
async def test_random_frames_end_in_order_or_in_a_violation(seed: int) -> None:
    rng = random.Random(seed)
    end = await lone()
    asking = [asyncio.create_task(end.request(b"?")) for _ in range(4)]
    serving = asyncio.create_task(echo(end.requests(limit=8)))
    await settle()
    for _ in range(300):
        number = rng.randrange(8)
        kind = rng.choice(list(Kind))
        flags = rng.choice([0, 0, 1, 2])
        body = rng.randbytes(rng.choice([0, 0, 3]))
        if rng.random() < 0.3:
            end.arrive(body, number | rng.choice([0, ANSWER_BODY]))
        elif rng.random() < 0.02:
            end.arrive(rng.randbytes(rng.randrange(40)))
        else:
            end.arrive(frame(kind, number, rng.randrange(4), flags) + body)
        await settle(2)
    results = await asyncio.gather(*asking, return_exceptions=True)
    for result in results:
        assert isinstance(result, (bytes, ProtocolError, RequestError))
    assert isinstance(end.cause, ProtocolError)
    with pytest.raises(ProtocolError):
        await serving
    await part(end)
