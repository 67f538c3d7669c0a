"""Keys: who may connect, with the same key, another one, none, or no right to have one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import ipaddress
import logging
import operator
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

import aiordma
from aiordma import (
    AuthenticationError,
    CompletionError,
    Connection,
    ConnectionConfig,
    ConnectionRejectedError,
    ConnectRequest,
    Keys,
)
from aiordma.cm import ConnectionId, EventChannel, EventType
from aiordma.endpoint import keys as protocol
from aiordma.endpoint.wire import FRAME, FrameKind, Hello
from aiordma.verbs import SGE, Access
from aiordma_softroce.network import ADDRESS_V6
from tests.device.foreign import DEPTHS, Foreign, ForeignListener, foreign_listener
from tests.device.meeting import are_alive, meet, part
from tests.device.oracle import until
from tests.device.stepping import Steps, for_every_step, run_canceled
from tests.device.test_addresses import link_local
from tests.inside.cm import ends_of
from tests.inside.endpoint import state_of, waiting_requests
from tests.inside.link import acceptor_of
from tests.native_ends import acked, beside, resolved

pytestmark = pytest.mark.device

LIMIT_S = 20
OLD, NEW = bytes(range(32)), bytes(range(32, 64))


def keyed(**keys: bytes) -> ConnectionConfig:
    """A configuration with these keys."""
    return ConnectionConfig(keys=Keys(keys))


def seen_by_client(cm_id: ConnectionId) -> protocol.Ends:
    """Where the two sides are, as a client made by hand sees it."""
    peer, own = ends_of(cm_id)
    assert cm_id.context is not None
    return protocol.Ends(own, peer, b"" if cm_id.context.is_iwarp else cm_id.peer_gid)


def seen_by_listener(cm_id: ConnectionId) -> protocol.Ends:
    """The same, as a listener made by hand sees it."""
    assert cm_id.context is not None
    return protocol.Ends(*ends_of(cm_id), b"" if cm_id.context.is_iwarp else cm_id.local_gid)


async def refused(host: str, port: int, config: ConnectionConfig | None) -> AuthenticationError:
    """The error of a connect that is refused for its key, which is no secret's."""
    with pytest.raises(AuthenticationError) as caught:
        await aiordma.connect(host, port, config=config)
    error = caught.value
    assert error.errno == errno.EACCES
    assert isinstance(error, PermissionError)
    assert isinstance(error, ConnectionRejectedError)
    for secret in (OLD, NEW):
        assert repr(secret)[2:10] not in repr(error)
        assert secret.hex() not in str(error)
    return error


# ---- both sides with keys ------------------------------------------------------------------


async def test_the_same_key_connects_and_both_sides_know_it(address: str) -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.listen(address, 0, config=keyed(a=OLD)) as listener,
    ):
        ends = await meet(listener, address, config=keyed(a=OLD), private_data=b"eleven bytes"[:11])
        client, server = ends
        assert server.private_data == b"eleven byte"
        assert client.get_extra_info("key_id") == server.get_extra_info("key_id") == "a"
        await are_alive(ends)
        large = secrets.token_bytes(1 << 20)
        sending = asyncio.create_task(client.send(large))
        assert bytes(await server.recv()) == large
        await sending
        await part(*ends)
        assert (listener.refused, listener.denied) == (0, 0)


async def test_requests_are_served_to_clients_with_the_key(address: str) -> None:
    async def answer(request: aiordma.Request) -> bytes:
        assert request.connection.get_extra_info("key_id") == "a"
        return bytes(request.body)[::-1]

    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.serve_requests(answer, address, 0, config=keyed(a=OLD)) as server,
    ):
        await refused(address, server.port, keyed(a=NEW))
        async with aiordma.Pool(address, server.port, config=keyed(a=OLD)) as pool:
            assert bytes(await pool.request(b"abc")) == b"cba"


async def test_a_pool_goes_on_trying_until_it_has_the_key(address: str) -> None:
    async def answer(request: aiordma.Request) -> bytes:
        return bytes(request.body)[::-1]

    keys = Keys({"a": NEW})
    config = ConnectionConfig(keys=keys)
    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.serve_requests(answer, address, 0, config=keyed(a=OLD)) as server,
        aiordma.Pool(address, server.port, config=config, timeout=0.5, max_pause=0.1) as pool,
    ):
        await until(lambda: pool.stats.errors > 0, LIMIT_S)
        with pytest.raises(TimeoutError) as caught:
            await pool.request(b"abc")
        assert isinstance(caught.value.__cause__, AuthenticationError)
        keys.replace({"a": OLD})
        await pool.wait(LIMIT_S)
        assert bytes(await pool.request(b"abc")) == b"cba"


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        ({"a": OLD}, {"a": NEW}, "no such key, or another one"),
        ({"a": OLD}, {"b": OLD}, "no such key, or another one"),
        ({"a": OLD}, None, "only clients that prove"),
        (None, {"a": OLD}, "it has no keys"),
    ],
)
async def test_others_are_told_that_they_do_not_have_the_key(
    address: str, theirs: Any, ours: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = None if theirs is None else keyed(**theirs)
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0, config=config) as listener:
        with caplog.at_level(logging.WARNING, "aiordma"):
            for _ in range(30):
                error = await refused(
                    address, listener.port, None if ours is None else keyed(**ours)
                )
                assert words in str(error)
        assert listener.refused == listener.denied == 30
        assert len([each for each in caplog.records if each.message.startswith("refused (")]) == 20
        assert not listener.connections
        ends = await meet(listener, address, config=config)
        await are_alive(ends)
        await part(*ends)


async def test_a_key_is_replaced_while_clients_connect(address: str) -> None:
    """In the order that the docs give: no client is refused."""
    of_listener, of_client = Keys({"old": OLD}), Keys({"old": OLD})
    stop = asyncio.Event()
    seen: list[list[str]] = [[] for _ in range(4)]

    async def connect_all_the_time(port: int, used: list[str]) -> None:
        config = ConnectionConfig(keys=of_client)
        while not stop.is_set():
            async with aiordma.connect(address, port, config=config) as client:
                used.append(client.get_extra_info("key_id"))

    async def serve(conn: Connection) -> None:
        async for _ in conn:
            pass

    async def some_more() -> None:
        """Each client has begun and made a connection since; no other is under way."""
        counts = [len(used) + 2 for used in seen]
        await until(lambda: all(map(operator.ge, map(len, seen), counts)), LIMIT_S)

    config = ConnectionConfig(keys=of_listener)
    async with asyncio.timeout(60), aiordma.serve(serve, address, 0, config=config) as server:
        clients = [asyncio.create_task(connect_all_the_time(server.port, used)) for used in seen]
        await some_more()
        of_listener.replace({"old": OLD, "new": NEW})
        await some_more()
        of_client.replace({"new": NEW, "old": OLD})
        await some_more()
        assert {used[-1] for used in seen} == {"new"}
        of_listener.replace({"new": NEW})
        await some_more()
        assert server.listener.denied == 0
        stop.set()
        await asyncio.gather(*clients)
        await refused(address, server.port, keyed(old=OLD))


async def test_a_key_that_is_removed_connects_nobody_any_more(address: str) -> None:
    """Also where the handshake is under way: else its client would be there after the key."""
    keys, both = Keys({"a": OLD}), {"a": OLD, "b": NEW}
    config = ConnectionConfig(keys=keys)

    async def authorize(request: ConnectRequest) -> bool:
        keys.replace({"b": NEW} if request.private_data == b"removed" else both)
        return True

    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.listen(address, 0, config=config, authorize=authorize) as listener,
    ):
        with pytest.raises(AuthenticationError, match="no such key"):
            await aiordma.connect(
                address, listener.port, config=keyed(a=OLD), private_data=b"removed"
            )
        assert (listener.refused, listener.denied) == (1, 1)
        keys.replace(both)
        ends = await meet(listener, address, config=keyed(a=OLD))
        await are_alive(ends)
        await part(*ends)
        async with scribe(address, listener.port, Keys(both)) as client:
            keys.replace({"b": NEW})
            await client.say(GREETING + client.proof)
            await until(lambda: not acceptor_of(listener).handshakes)
            assert not listener.connections
            assert listener.denied == 2


async def test_a_key_that_is_removed_before_the_program_answers(address: str) -> None:
    keys = Keys({"a": OLD})
    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.listen(address, 0, config=ConnectionConfig(keys=keys)) as listener,
    ):
        requests = listener.requests()
        async with beside(refused(address, listener.port, keyed(a=OLD))) as refusing:
            request = await anext(requests)
            keys.replace({"b": NEW})
            with pytest.raises(AuthenticationError, match="key 'a' was removed"):
                await request.accept()
            await refusing
        assert listener.denied == 1


async def test_a_program_that_answers_by_hand_sees_the_key(address: str) -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.listen(address, 0, config=keyed(a=OLD)) as listener,
    ):
        requests = listener.requests()
        connecting = asyncio.ensure_future(
            aiordma.connect(address, listener.port, config=keyed(a=OLD))
        )
        request = await anext(requests)
        assert request.key_id == "a"
        for other in (ConnectionConfig(), keyed(a=OLD)):
            with pytest.raises(ValueError, match="keys cannot differ"):
                await request.accept(config=other)
        with pytest.raises(ValueError, match="127"):
            await request.accept(bytes(128))
        config = dataclasses.replace(listener.config, recv_depth=8)
        server = await request.accept(bytes(127), config=config)
        client = await connecting
        assert client.private_data == bytes(127)
        await part(client, server)
        with pytest.raises(ValueError, match="11"):
            aiordma.connect(address, listener.port, config=keyed(a=OLD), private_data=bytes(12))


# ---- clients that break the rules ----------------------------------------------------------

GREETING = FRAME.pack(FrameKind.CREDIT, 0, 0, 0, 0)
PROOF_SIZE = 32


def hello(data: bytes = b"") -> bytes:
    return Hello(8, 4, 1024, 1024, data).pack(56)


@dataclass
class Scribe:
    """A client made by hand, to which a listener has answered.

    Attributes:
        answer: The private data of the answer.
        proof: The proof that the listener waits for.
    """

    end: Foreign
    answer: bytes
    proof: bytes

    @property
    def own_proof(self) -> bytes:
        """The proof that the listener has sent."""
        end = protocol.ANSWER_SIZE + len(hello())
        return self.answer[end - PROOF_SIZE : end]

    async def say(self, data: bytes) -> None:
        """Send these bytes as the first frame; the listener may end the connection first."""
        self.end.mr.view[: len(data)] = data
        with contextlib.suppress(CompletionError, OSError):
            await self.end.qp.send(SGE(self.end.mr, 0, len(data)))


@contextlib.asynccontextmanager
async def scribe(
    address: str, port: int, keys: Keys, request: bytes | None = None
) -> AsyncIterator[Scribe]:
    """Connect by hand, by these keys or with these private data."""
    with EventChannel() as events:
        end = Foreign(await resolved(events, address, port))
        try:
            pledge = protocol.Pledge(keys, hello())
            event = await end.cm_id.connect(
                DEPTHS, private_data=request or pledge.request, timeout=LIMIT_S
            )
            proof = b""
            if request is None:
                proof = pledge.check(event.private_data, seen_by_client(end.cm_id))
            yield Scribe(end, event.private_data, proof)
        finally:
            end.close()
            for part in end.parts:
                await part.wait_closed()
    await events.wait_closed()


@contextlib.asynccontextmanager
async def guarded(address: str, **limits: Any) -> AsyncIterator[aiordma.Listener]:
    """A listener with a key, at whose end the owner of the key still connects."""
    limits = {"limits": aiordma.ListenerLimits(**limits)} if limits else {}
    async with (
        asyncio.timeout(60),
        aiordma.listen(address, 0, config=keyed(a=OLD), **limits) as listener,
    ):
        yield listener
        await until(lambda: not listener.connections)
        ends = await meet(listener, address, config=keyed(a=OLD))
        await are_alive(ends)
        await part(*ends)


async def test_by_hand_with_the_key(address: str) -> None:
    """The scribe does it right, so that its failures below are for what it does wrong."""
    async with guarded(address) as listener:
        async with scribe(address, listener.port, Keys({"a": OLD})) as client:
            await client.say(GREETING + client.proof)
            server = await listener.accept()
            assert server.get_extra_info("key_id") == "a"
        server.abort()
        await server.wait_closed()


def _flip(proof: bytes, at: int) -> bytes:
    return proof[:at] + bytes([proof[at] ^ 1]) + proof[at + 1 :]


#: What a client says first, that does not prove itself.
FIRST_WORDS: dict[str, Callable[[Scribe], bytes]] = {
    "nothing behind the greeting": lambda c: GREETING,
    "zeros": lambda c: GREETING + bytes(32),
    "a bit at the beginning is wrong": lambda c: GREETING + _flip(c.proof, 0),
    "a bit at the end is wrong": lambda c: GREETING + _flip(c.proof, 31),
    "a byte is missing": lambda c: GREETING + c.proof[:31],
    "a byte too many": lambda c: GREETING + c.proof + b"x",
    "reflected": lambda c: GREETING + c.own_proof,
    "of another kind": lambda c: FRAME.pack(FrameKind.PING, 0, 0, 0, 0) + c.proof,
    "with another number": lambda c: b"\x10" + GREETING[1:] + c.proof,
    "a message": lambda c: FRAME.pack(FrameKind.DATA, 0, 0, 0, 32) + bytes(32),
    "a large message": lambda c: FRAME.pack(FrameKind.RENDEZVOUS, 0, 0, 0, 1 << 20) + bytes(16),
    "a landing": lambda c: FRAME.pack(FrameKind.PING, 1 << 3, 0, 7, 4096),
    "the end": lambda c: FRAME.pack(FrameKind.END, 0, 0, 0, 0),
    "less than a header": lambda c: b"aiRD",
    "empty": lambda c: b"",
}


@pytest.mark.parametrize("words", FIRST_WORDS)
async def test_a_client_that_does_not_prove_itself_is_refused(address: str, words: str) -> None:
    async with guarded(address) as listener:
        async with scribe(address, listener.port, Keys({"a": OLD})) as client:
            await client.say(FIRST_WORDS[words](client))
            await until(lambda: listener.denied == 1)
            await until(lambda: not acceptor_of(listener).handshakes)
        assert not waiting_requests(listener)
        assert listener.refused == 0  # it was answered


async def test_a_recorded_handshake_is_of_no_use(address: str) -> None:
    """All that the owner of the key has sent, request and greeting, is played again."""
    async with guarded(address) as listener:
        pledge = protocol.Pledge(Keys({"a": OLD}), hello())
        async with scribe(address, listener.port, Keys({"a": OLD}), pledge.request) as client:
            proof = pledge.check(client.answer, seen_by_client(client.end.cm_id))
            await client.say(GREETING + proof)
            server = await listener.accept()
        server.abort()
        await server.wait_closed()
        async with scribe(address, listener.port, Keys({"a": OLD}), pledge.request) as client:
            await client.say(GREETING + proof)
            await until(lambda: listener.denied == 1)


@pytest.mark.parametrize("shared", [False, True])
async def test_who_has_proved_nothing_reaches_no_memory(
    address: str, is_siw: bool, shared: bool
) -> None:
    """Not even that of another connection whose name it knows, in the domain of all."""
    # As of `Memory`: software iWARP knows neither windows nor rights of queue pairs.
    open_to_all = is_siw and shared
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(asyncio.timeout(LIMIT_S))
        memory = None
        if shared:
            rights = Access.REMOTE_READ | Access.REMOTE_WRITE
            memory = await enter(aiordma.Memory(bytearray(b"own " * 1024), trusted=rights))
        listener = await enter(aiordma.listen(address, 0, config=keyed(a=OLD), memory=memory))
        client, server = await meet(listener, address, config=keyed(a=OLD))
        lent = bytearray(b"own " * 1024) if memory is None else memory[:]
        async with server.expose(lent, read=True, write=True) as remote:
            got = []
            for operation in ("read", "write"):
                async with scribe(address, listener.port, Keys({"a": OLD})) as thief:
                    thief.end.mr.view[:4] = b"evil"
                    with contextlib.suppress(CompletionError):
                        await getattr(thief.end.qp, operation)(
                            SGE(thief.end.mr, 0, 4), remote.addr, remote.rkey
                        )
                    got.append(bytes(thief.end.mr.view[:4]))
            assert got[0] == (b"own " if open_to_all else b"evil")
            into = bytearray(4)
            await client.read(remote, into)
            while open_to_all and into != bytearray(b"evil"):  # within the time of the test
                await client.read(remote, into)
            assert bytes(into) == (b"evil" if open_to_all else b"own ")
        await part(client, server)


@pytest.mark.parametrize("cut", [1, 16, 24])
async def test_a_request_that_is_cut_off_is_refused(address: str, cut: int) -> None:
    """Its data claim the whole field, so that no padding stands for what is missing."""
    request = protocol.Pledge(Keys({"a": OLD}), hello()).request
    data = bytes(56 - len(hello()) - protocol.REQUEST_SIZE + cut)
    request = hello(data)[:6] + request[6:7] + hello(data)[7:]
    request += b"\1" * (56 - len(request))
    async with guarded(address) as listener:
        with pytest.raises(ConnectionRejectedError):
            async with scribe(address, listener.port, Keys({"a": OLD}), request):
                pass
        assert listener.refused == 1


async def test_silent_clients_are_dropped_and_keep_nobody_out(address: str) -> None:
    async with guarded(address, handshake_timeout_s=0.5, max_half_open=8) as listener:
        async with contextlib.AsyncExitStack() as silent:
            for _ in range(4):  # a source has half of the places
                await silent.enter_async_context(scribe(address, listener.port, Keys({"a": OLD})))
            ends = await meet(listener, address, config=keyed(a=OLD))
            await part(*ends)
            await until(lambda: not acceptor_of(listener).handshakes)
        assert listener.denied == 0


async def test_a_flood_without_the_key_takes_no_memory(address: str) -> None:
    """Refused at the request, before a queue pair is made; the owner of the key gets in."""
    async with guarded(address) as listener:
        flood = [
            aiordma.connect(address, listener.port, config=config)
            for config in (keyed(a=NEW), keyed(b=OLD), None) * 40
        ]
        flooding = asyncio.gather(*flood, return_exceptions=True)
        ends = await meet(listener, address, config=keyed(a=OLD))
        assert all(isinstance(each, AuthenticationError) for each in await flooding)
        assert listener.denied == 120
        assert len(listener.connections) == 1
        await part(*ends)


@pytest.mark.parametrize("state", ["asked", "answered", "greeted"])
async def test_a_client_that_vanishes(address: str, state: str) -> None:
    async with guarded(address) as listener:
        if state == "asked":
            with EventChannel() as events:
                end = Foreign(await resolved(events, address, listener.port))
                pledge = protocol.Pledge(Keys({"a": OLD}), hello())
                with contextlib.suppress(TimeoutError):
                    await end.cm_id.connect(DEPTHS, private_data=pledge.request, timeout=0)
                end.close()
                for each in end.parts:
                    await each.wait_closed()
            await events.wait_closed()
        else:
            async with scribe(address, listener.port, Keys({"a": OLD})) as client:
                if state == "greeted":
                    await client.say(GREETING + client.proof)
        if state == "greeted":
            server = await listener.accept()
            with pytest.raises(aiordma.ConnectionLostError):
                await server.recv()
            await server.close()
        await until(lambda: not acceptor_of(listener).handshakes)


# ---- listeners that break the rules --------------------------------------------------------


Answer = Callable[[protocol.Claim, bytes, Any], bytes]
_SAID = hello()


def _right(claim: protocol.Claim, request: bytes, ends: Any) -> bytes:
    return claim.answer(_SAID, ends)[0]


def _of(change: Callable[[bytes], bytes]) -> Answer:
    return lambda claim, request, ends: change(_right(claim, request, ends))


#: What a listener answers that does not prove itself.
ANSWERS: dict[str, Answer] = {
    "an older library": lambda claim, request, ends: _SAID,
    "the flag was removed": _of(lambda data: data[:6] + bytes([data[6] & ~0x20]) + data[7:]),
    "the further flag was removed": _of(lambda data: data[:20] + b"\0" + data[21:]),
    "zeros": _of(lambda data: data[:-32] + bytes(32)),
    "a bit is wrong": _of(lambda data: _flip(data, len(data) - 1)),
    "terms were changed": _of(lambda data: data[:8] + b"\1\0" + data[10:]),
    "the nonce was changed": _of(lambda data: _flip(data, 21)),
    "to another address": lambda claim, request, ends: _right(
        claim, request, ends._replace(client=("10.9.9.9", 7))
    ),
    "at another port": lambda claim, request, ends: _right(
        claim, request, ends._replace(listener=(ends.listener[0], ends.listener[1] ^ 1))
    ),
    "with another GID": lambda claim, request, ends: _right(
        claim, request, ends._replace(gid=b"another GID")
    ),
    "reflected": lambda claim, request, ends: (
        claim.answer(_SAID, ends)[0][:-32] + claim.answer(_SAID, ends)[1]
    ),
    "the request itself": lambda claim, request, ends: request,
}


@contextlib.asynccontextmanager
async def answering(address: str, answer: Answer) -> AsyncIterator[ForeignListener]:
    """A listener made by hand that has the key, and answers each request as it is told."""
    async with foreign_listener(address) as listener:

        async def answer_all() -> None:
            made: list[Foreign] = []
            try:
                while True:
                    event = await acked(listener.events, EventType.CONNECT_REQUEST, skip=_LATER)
                    assert event.connection_id is not None
                    end = Foreign(event.connection_id)
                    made.append(end)
                    claim = protocol.Claim.of(Keys({"a": OLD}), event.private_data)
                    assert claim is not None
                    ends = seen_by_listener(end.cm_id)
                    data = answer(claim, event.private_data, ends)
                    with contextlib.suppress(OSError):  # the client closes at once
                        await end.cm_id.accept(DEPTHS, private_data=data)
            finally:
                for end in made:
                    end.close()
                    for each in end.parts:
                        await each.wait_closed()

        async with beside(answer_all()):
            yield listener


_LATER = (EventType.ESTABLISHED, EventType.DISCONNECTED, EventType.TIMEWAIT_EXIT)


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_listener_that_does_not_prove_itself(address: str, answer: str) -> None:
    async with asyncio.timeout(LIMIT_S), answering(address, ANSWERS[answer]) as listener:
        with pytest.raises((AuthenticationError, aiordma.ProtocolError)) as caught:
            await aiordma.connect(address, listener.port, config=keyed(a=OLD))
        assert isinstance(caught.value, AuthenticationError) or answer == "the request itself"


async def test_a_listener_made_by_hand_that_proves_itself(address: str) -> None:
    async with asyncio.timeout(LIMIT_S), answering(address, _right) as listener:
        client = await aiordma.connect(address, listener.port, config=keyed(a=OLD))
        client.abort()
        await client.wait_closed()


async def test_a_client_takes_no_frame_before_the_listener_has_proved_itself(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gate is shut before the first receive is posted, and until the answer is compared."""
    at_begin, at_check = list[int](), list[int]()
    begin, check = Connection.__init__, protocol.Pledge.check
    made: list[Connection] = []

    def gate(state: Any) -> int:
        return int(state.facts()["gate"])

    def begins(self: Connection, link: Any, config: ConnectionConfig) -> None:
        at_begin.append(gate(link.state))
        made.append(self)
        begin(self, link, config)

    def checks(self: protocol.Pledge, *args: Any) -> bytes:
        at_check.extend(gate(state_of(each)) for each in made)
        return check(self, *args)

    monkeypatch.setattr(Connection, "__init__", begins)
    monkeypatch.setattr(protocol.Pledge, "check", checks)
    async with asyncio.timeout(LIMIT_S), answering(address, _right) as listener:
        client = await aiordma.connect(address, listener.port, config=keyed(a=OLD))
        assert (at_begin, at_check, gate(state_of(client))) == ([1], [1], 0)
        made.clear()
        client.abort()
        await client.wait_closed()


async def test_a_recorded_answer_is_of_no_use(address: str) -> None:
    recorded: list[bytes] = []

    def answer(claim: protocol.Claim, request: bytes, ends: Any) -> bytes:
        recorded.append(_right(claim, request, ends))
        return recorded[0]

    async with asyncio.timeout(LIMIT_S), answering(address, answer) as listener:
        client = await aiordma.connect(address, listener.port, config=keyed(a=OLD))
        client.abort()
        await client.wait_closed()
        await refused(address, listener.port, keyed(a=OLD))


async def test_a_client_that_removes_its_key_connects_no_more(address: str) -> None:
    keys = Keys({"a": OLD})

    def answer(claim: protocol.Claim, request: bytes, ends: Any) -> bytes:
        keys.replace({"b": NEW})
        return _right(claim, request, ends)

    async with asyncio.timeout(LIMIT_S), answering(address, answer) as listener:
        with pytest.raises(AuthenticationError, match="key 'a' was removed"):
            await aiordma.connect(address, listener.port, config=ConnectionConfig(keys=keys))


# ---- addresses, and processes that are killed ------------------------------------------------


@pytest.mark.kernel
async def test_both_sides_see_the_same_addresses(address: str) -> None:
    config = keyed(a=OLD)
    async with asyncio.timeout(LIMIT_S), aiordma.listen(None, 0, config=config) as listener:
        for target in (address, f"::ffff:{address}", ADDRESS_V6, link_local()):
            ends = await meet(listener, target, config=config)
            await are_alive(ends)
            await part(*ends)


_CLIENT = """
import asyncio, sys, aiordma
async def main():
    config = aiordma.ConnectionConfig(keys=aiordma.Keys({"a": bytes(range(32))}))
    async with aiordma.connect(sys.argv[1], int(sys.argv[2]), config=config) as connection:
        await connection.send(b"here")
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["asked", "connected"])
async def test_a_client_that_is_killed(address: str, state: str) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def authorize(request: ConnectRequest) -> bool:
        asked.set()
        await go_on.wait()
        return True

    server: Connection | None = None
    async with (
        asyncio.timeout(60),
        aiordma.listen(address, 0, config=keyed(a=OLD), authorize=authorize) as listener,
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CLIENT, address, str(listener.port)
        )
        try:
            await asked.wait()
            if state == "connected":
                go_on.set()
                server = await listener.accept()
                assert bytes(await server.recv()) == b"here"
        finally:
            process.kill()
            await process.wait()
        if server is not None:
            with pytest.raises(aiordma.ConnectionLostError):
                await server.recv()
            await server.close()
        go_on.set()
        await until(lambda: not acceptor_of(listener).handshakes)
        ends = await meet(listener, address, config=keyed(a=OLD))
        await are_alive(ends)
        await part(*ends)


# ---- cancellation --------------------------------------------------------------------------


async def test_connect_is_canceled_at_each_step(address: str, late: bool) -> None:
    config = keyed(a=OLD)

    async def scenario(steps: Steps) -> None:
        async with aiordma.listen(address, 0, config=config) as listener:

            async def connect() -> Connection:
                return await aiordma.connect(address, listener.port, config=config)

            client = await run_canceled(connect(), steps)
            if client is not None:
                ends = client, await listener.accept()
                await are_alive(ends)
                await part(*ends)
            ends = await meet(listener, address, config=config)
            await part(*ends)

    assert await for_every_step(scenario, late=late, complete=False) >= 2


async def test_accepting_by_hand_is_canceled_at_each_step(address: str, late: bool) -> None:
    config = keyed(a=OLD)

    async def scenario(steps: Steps) -> None:
        async with aiordma.listen(address, 0, config=config) as listener:
            requests = listener.requests()

            async def connect() -> Connection | None:
                with contextlib.suppress(OSError):
                    return await aiordma.connect(address, listener.port, config=config)
                return None

            connecting = asyncio.create_task(connect())
            request = await anext(requests)
            server = await run_canceled(request.accept(), steps)
            client = await connecting
            if server is not None and client is not None:
                await are_alive((client, server))
            await part(client, server)

    assert await for_every_step(scenario, late=late, complete=False) >= 1


# ---- authorize, allow and deny --------------------------------------------------------------


async def test_authorize_sees_who_asks_and_decides(address: str) -> None:
    seen: list[ConnectRequest] = []
    gids: list[bytes | None] = []

    def yes(request: ConnectRequest) -> bool:
        seen.append(request)
        gids.append(request.gid)
        return request.private_data != b"no"

    async def later(request: ConnectRequest) -> bool:
        await asyncio.sleep(0)
        return yes(request)

    for authorize in (yes, later):
        seen.clear()
        gids.clear()
        async with (
            asyncio.timeout(LIMIT_S),
            aiordma.listen(address, 0, config=keyed(a=OLD), authorize=authorize) as listener,
        ):
            ends = await meet(listener, address, config=keyed(a=OLD), private_data=b"yes")
            await are_alive(ends)
            with pytest.raises(ConnectionRejectedError, match="does not let this client"):
                await aiordma.connect(
                    address, listener.port, config=keyed(a=OLD), private_data=b"no"
                )
            assert [each.private_data for each in seen] == [b"yes", b"no"]
            assert seen[0].key_id == "a"
            assert seen[0].peername == ends[0].get_extra_info("sockname")[:2]
            peer = ends[0].get_extra_info("gid")
            assert gids[0] == (None if ends[0].pd.context.is_iwarp else peer)
            assert (listener.refused, listener.denied) == (1, 1)
            with pytest.raises(RuntimeError, match="authorize"):
                listener.requests()
            await part(*ends)


def _raise(request: ConnectRequest) -> bool:
    raise LookupError(request)


def _nothing(request: ConnectRequest) -> Any:
    return None


async def _forever(request: ConnectRequest) -> bool:
    await asyncio.Event().wait()
    return True


async def _canceled(request: ConnectRequest) -> bool:
    forgotten = asyncio.get_running_loop().create_future()
    forgotten.cancel()
    await forgotten
    return True


async def _accepts(request: ConnectRequest) -> bool:
    await request.accept()
    return True


def _rejects(request: ConnectRequest) -> bool:
    request.reject(b"go away")
    return True


@pytest.mark.parametrize(
    ("authorize", "words", "logged"),
    [
        (_raise, "does not let", "has raised"),
        (_nothing, "does not let", "has raised"),
        (_canceled, "does not let", "has raised"),
        (_accepts, "does not let", "has raised"),
        (_forever, "not answered in time", ""),
        (_rejects, r"reject|refus", ""),
    ],
)
async def test_an_authorize_that_fails_refuses_and_the_listener_goes_on(
    address: str, authorize: Any, words: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    def one(request: ConnectRequest) -> Any:
        return True if request.private_data == b"ok" else authorize(request)

    limits = aiordma.ListenerLimits(handshake_timeout_s=0.3)
    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.listen(address, 0, authorize=one, limits=limits) as listener,
    ):
        connecting = asyncio.ensure_future(aiordma.connect(address, listener.port))
        await until(lambda: bool(acceptor_of(listener).handshakes) or connecting.done())
        ends = await meet(listener, address, private_data=b"ok")
        with pytest.raises(ConnectionRejectedError, match=words) as caught:
            await connecting
        assert caught.value.private_data == (b"go away" if authorize is _rejects else b"")
        assert listener.denied == (authorize is not _forever)
        await are_alive(ends)
        await part(*ends)
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert len(errors) == bool(logged)
    assert all(logged in each.message for each in errors)


async def test_a_listener_closes_while_authorize_runs(address: str) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def authorize(request: ConnectRequest) -> bool:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return True

    async with asyncio.timeout(LIMIT_S):
        async with aiordma.listen(address, 0, authorize=authorize) as listener:
            connecting = asyncio.ensure_future(aiordma.connect(address, listener.port))
            await began.wait()
        await ended.wait()
        with pytest.raises(OSError, match="rejected"):
            await connecting


async def test_networks_that_may_connect_and_may_not(address: str) -> None:
    def refusing(**networks: Any) -> Any:
        return aiordma.listen(address, 0, **networks)

    wide, host = f"{address}/8", f"{address}"
    wide = str(ipaddress.ip_network(wide, strict=False))
    async with asyncio.timeout(LIMIT_S):
        for networks in ({"allow": [wide]}, {"deny": ["192.0.2.0/24", "fd00::/8"]}):
            async with refusing(**networks) as listener:
                ends = await meet(listener, address)
                await are_alive(ends)
                await part(*ends)
        excluding: list[dict[str, list[str]]] = [
            {"allow": []},
            {"allow": ["192.0.2.0/24"]},
            {"allow": [wide], "deny": [host]},
            {"deny": [wide]},
        ]
        for networks in excluding:
            async with refusing(**networks) as listener:
                with pytest.raises(ConnectionRejectedError, match="does not let this client"):
                    await aiordma.connect(address, listener.port)
                assert listener.denied == 1
