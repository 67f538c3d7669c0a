"""MessageState against a model of the protocol, with random frames in random order.

The adapter is the test: it has what is posted, and completes it when it likes.  The peer keeps to
the protocol, mostly; in some cases it does not.  After each step C and the model have posted the
same frames and the same receives, and have the same numbers.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from random import Random
from socket import ntohl
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._core import (
    EVENT_FRAMES,
    PROOF_SIZE,
    SUB_NOTED,
    SUB_OPERATE,
    SUB_RECV,
    SUB_SHIFT,
    MessageState,
    Registration,
)
from aiordma._ffi import ffi
from aiordma.endpoint.outcome import violation
from aiordma.endpoint.wire import FRAME, FRAME_SIZE
from aiordma.endpoint.wire import NOTE as NOTE_BODY
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs.enums import Access, Opcode, WCOpcode

from .completing import Completing, QueuePair, completion
from .message_model import (
    ABORT,
    BARE,
    CREDIT,
    DATA,
    DONE,
    END,
    FREE,
    HAS_IMM,
    LANDING_SHIFT,
    MORE,
    NOTE,
    NUMBER_SHIFT,
    NUMBERS,
    PING,
    PONG,
    RENDEZVOUS,
    REQUESTS,
    REVOKED,
    SHUT,
    WRITTEN,
    Model,
)

pytestmark = pytest.mark.slow

SEED = os.environ.get("AIORDMA_TEST_SEED", "20261123")
CASES = 1000
SLOT, SENDS, CONTROLS = 96, 4, 6
EAGER, FRAGMENTED, LARGEST, BARE_SIZE = SLOT - FRAME_SIZE, 250, 1000, SLOT
STAGE, TARGETS = 200, {number: (number << 40, number) for number in range(1, 4)}
IDENTITY, LAST_EXPOSURE = 0xFEDC_BA98_7654_3210, (1 << 32) - 1
WORDS = {
    "short": "shorter than its header", "credit": "without credit", "length": "bytes came",
    "kind": "message kind", "bare": "an immediate that announces",
    "done": "more answers", "size": "of at most", "order": "are missing",
    "write": "a write with an immediate", "number": "came twice, or is missing",
    "turn": "twice, or out of order", "note": "a note of a write", "proof": "does not prove",
}  # fmt: skip


def address(memory: Any) -> int:
    return int(ffi.cast("uintptr_t", memory))


class Local:
    """Registered memory of the program."""

    def __init__(self, pd: object) -> None:
        self._registration = Registration(1 << 30, 4096, 11, 0, pd)


class Case:
    """One end twice, and the adapter below it."""

    def __init__(self, seed: str) -> None:
        rng = self.rng = Random(seed)
        window = rng.choice((1, 2, 3, 5, 16, 40, 100))
        self.exchanges = rng.choice((1, 3, 8))
        receives = window + CONTROLS + self.exchanges
        self.malice = rng.choice((0.0, 0.0, 0.02))
        self.out: list[tuple[Any, ...]] = []
        self.chained = 0  # sends that were posted with the next
        self.joined = self.landed = 0  # messages in fragments, and in landings
        self.posted: deque[int] = deque()
        self.under_way: deque[tuple[int, int]] = deque()  # sub-index and slot of each send
        self.slots = ffi.new("uint8_t[]", receives * SLOT)
        self.source = ffi.new("uint8_t[]", (SENDS + CONTROLS) * SLOT)
        self.adapter = QueuePair(self._sent, self._received)
        self.turns = 0  # whose end C has asked for
        loop: Any = SimpleNamespace(is_running=lambda: True, call_soon=self._call_soon)
        state = self.c = MessageState(
            loop, sends=SENDS, receives=receives, send_depth=SENDS,
            arrivals=1 << (receives - 1).bit_length(), controls=CONTROLS,
            exchanges=self.exchanges, answers=self.exchanges, reads=1, eager_size=EAGER,
            largest=LARGEST, raw=False, grows=False,
        )  # fmt: skip
        start = address(self.source)
        state.bind(
            self.adapter.address, 0, 0, 0, (start, SLOT, 5, SENDS),
            (address(self.slots), SLOT, 7, receives), (start + SENDS * SLOT, SLOT, 6), 0,
        )  # fmt: skip
        state.set_handler(self._resumed)
        bare = rng.choice((0, BARE_SIZE))
        self.landings = ffi.new("uint8_t[]", 4 * LARGEST)
        self.stage = ffi.new("uint8_t[]", STAGE)
        written = rng.choice((0, 150, 1 << 20))
        self.numbered = rng.random() < 0.7
        state.agree(
            0, EAGER, bare_size=bare, fragmented_size=FRAGMENTED, written_size=written,
            numbered=self.numbered, identity=IDENTITY,
        )  # fmt: skip
        self.local = Local(pd := object())
        state.allow_operations(1000, True)
        state.operate_on(Case, Local, RemoteRegion, pd)
        state.listen_for_operations()
        assert state.post_receives(receives) == 0
        self.out.clear()
        self.frames_in = self.frames_out = 0
        self.completing = Completing(state)
        self.model = Model(
            window, SENDS, CONTROLS, self.exchanges, state.facts()["chain"], EAGER, FRAGMENTED,
            LARGEST, bare, written, self.numbered, IDENTITY,
        )  # fmt: skip
        if rng.random() < 0.7:
            state.allow_notes()
            self.model.notes_allowed = True
        self.noted = 0  # notes that were taken
        self.taken: list[int] = []  # slots of messages that the program has
        self.receives = receives
        keys = Random(f"{seed} keys")
        self.proof, self.impostor = keys.randbytes(PROOF_SIZE), keys.random() < 0.3
        self.before_proof = 0  # steps until the peer has proved itself
        self.gated = False  # whether the peer has to prove itself in a frame
        match keys.randrange(6):
            case 0:  # a listener
                self.model.gate, self.gated = self.proof, True
                state.require_proof(self.proof)
            case 1:  # a client, whose answer is on its way
                self.model.gate, self.before_proof = SHUT, keys.randrange(1, 6)
                state.require_proof(None)

    def _call_soon(self, state: MessageState, events: int) -> None:
        assert (state, events) == (self.c, 0)
        self.turns += 1

    # The adapter

    def _sent(self, wr: Any) -> None:
        piece, sub = wr.sg_list[0], wr.wr_id >> SUB_SHIFT
        if wr.opcode == Opcode.RDMA_WRITE:
            to = wr.wr.rdma
            assert (piece.addr, piece.lkey) == (1 << 30, 11)
            assert wr.next != ffi.NULL, "nothing tells of it"
            assert wr.next.wr_id >> SUB_SHIFT == sub - SUB_OPERATE + SUB_NOTED
            assert not wr.next.next
            self.out.append(("write", to.remote_addr, to.rkey, piece.length))
            self._sent(wr.next)
            return
        if wr.next:
            self.chained += 1
        frame = bytes(ffi.buffer(ffi.cast("char *", piece.addr), piece.length))
        slot = sub if sub < SUB_NOTED else (piece.addr - address(self.source)) // SLOT
        written = wr.opcode == Opcode.RDMA_WRITE_WITH_IMM
        assert piece.lkey == (9 if written else 5 if slot < SENDS else 6)
        self.under_way.append((sub, slot))
        number = self.frames_out % NUMBERS * self.numbered
        self.frames_out += 1
        if written or wr.opcode == Opcode.SEND_WITH_IMM:
            word = ntohl(wr.imm_data)
            kind, flags = WRITTEN if written else BARE, word >> 16 & 0xFF
            assert word >> 24 == DATA | number << NUMBER_SHIFT
            self.out.append(("send", kind, flags, word & 0xFFFF, 0, len(frame), frame))
            if written:
                to = wr.wr.rdma
                assert (to.remote_addr, to.rkey) == TARGETS[flags >> LANDING_SHIFT]
        else:
            first, flags, credits, imm, argument = FRAME.unpack_from(frame)
            assert first >> NUMBER_SHIFT == number
            kind = first & (NUMBERS - 1)
            self.out.append(("send", kind, flags, credits, imm, argument, frame[FRAME_SIZE:]))
        if wr.next:
            self._sent(wr.next)

    def _received(self, wr: Any) -> None:
        while wr:
            slot = wr.wr_id >> SUB_SHIFT & ~SUB_RECV
            assert slot not in self.posted, "posted twice"
            self.posted.append(slot)
            self.out.append(("receive", slot))
            wr = wr.next

    def number(self) -> int:
        """Of the peer's next frame, at its place; now and then one came twice, or was lost."""
        number, self.frames_in = self.frames_in, self.frames_in + 1
        if self.rng.random() < self.malice / 8:
            number += self.rng.choice((-1, 1, 5))
        return number % NUMBERS * self.numbered << NUMBER_SHIFT

    def complete_twice(self) -> None:
        """The adapter completes a receive, or a send, that it has completed before."""
        busy = {slot for _, slot in self.under_way}
        slots = [s for s in range(SENDS + CONTROLS) if s not in busy]
        if self.rng.random() < 0.5 or not slots:
            slot = next(s for s in range(self.receives) if s != self.posted[0])
            wc = completion(SUB_RECV | slot, WCOpcode.RECV, FRAME_SIZE)
        else:
            wc = completion(self.rng.choice(slots))
        self.model.again()
        assert self.completing.take(wc)

    def write(self) -> None:
        """The peer writes into a landing; a hostile peer into none, or with another immediate."""
        rng, slot = self.rng, self.posted.popleft()
        number = rng.choice([*self.model.open] or [1])
        data = rng.randbytes(self.model.missing or rng.randrange(1, 400))
        free = rng.choice((0, FREE)) if self.model.written else 0
        word = (DATA | self.number()) << 24 | (number << LANDING_SHIFT | free) << 16 | 1
        if rng.random() < self.malice:
            word ^= 1 << rng.randrange(16, 32)
            data = rng.choice((data, b"", bytes(LARGEST + 1)))
        at = (word >> 16 + LANDING_SHIFT & 3) * LARGEST
        ffi.memmove(self.landings + at, data, min(len(data), LARGEST))
        self.model.frame(slot, data, word, written=True)
        opcode = WCOpcode.RECV_RDMA_WITH_IMM
        assert self.completing.take(completion(SUB_RECV | slot, opcode, len(data), word))

    def arrive(self, frame: bytes) -> None:
        slot, number = self.posted.popleft(), self.number()
        word = None
        if frame[0] == DATA and len(frame) > FRAME_SIZE and self.rng.random() < 0.3:
            # A whole message without immediate, or the last fragment, may come without a header.
            _, flags, credits, _, argument = FRAME.unpack_from(frame)
            if flags in {0, FREE} and argument == len(frame) - FRAME_SIZE:
                word, frame = (
                    (DATA | number) << 24 | flags << 16 | credits,
                    frame[FRAME_SIZE:],
                )
        if self.rng.random() < self.malice:
            word = number << 24 | self.rng.choice((0, DATA << 24 | 1 << 16, 7 << 24, 1 << 16))
        elif word is None:
            frame = bytes([frame[0] | number]) + frame[1:]
        ffi.buffer(self.slots)[slot * SLOT : slot * SLOT + len(frame)] = frame
        self.model.frame(slot, frame, word)
        assert self.completing.take(completion(SUB_RECV | slot, WCOpcode.RECV, len(frame), word))

    # The peer

    def greeting(self) -> bytes:
        """The first frame of a client with a key, or something else with its proof."""
        rng, proof, kind = self.rng, self.proof, CREDIT
        if self.impostor:
            at = rng.randrange(PROOF_SIZE)
            changed = proof[:at] + bytes([proof[at] ^ 1 << rng.randrange(8)]) + proof[at + 1 :]
            proof = rng.choice((proof, changed, proof[:-1], proof + b"x", b""))
            kind = rng.randrange(1, 10) if proof is self.proof else CREDIT
        return FRAME.pack(kind, rng.choice((0, 1)), rng.choice((0, 3)), 0, 0) + proof

    def frame(self) -> bytes:
        rng, model = self.rng, self.model
        if model.gate and rng.random() < 0.9:
            return self.greeting()
        returned = rng.choice((0, 0, 1, 3))
        if rng.random() < self.malice:
            if rng.random() < 0.2:
                return FRAME.pack(DATA, MORE, returned, 0, LARGEST + rng.randrange(2)) + b"part"
            if rng.random() < 0.2:  # other bytes came than the header says
                body = rng.randbytes(rng.randrange(1, EAGER))
                length = len(body) + rng.choice((-1, 1))
                return FRAME.pack(DATA, rng.choice((0, MORE)), returned, 0, length) + body
            whole = FRAME.pack(rng.randrange(10), rng.randrange(4), returned, 0, rng.randrange(3))
            return whole + rng.randbytes(rng.randrange(8)) if rng.random() < 0.7 else whole[:9]
        kinds = [CREDIT, PING, PONG, ABORT]
        if model.unused > 0:
            kinds += [DATA] * 12
        if model.notes_allowed and rng.random() < self.malice:
            kinds += [NOTE] * 20
        if not model.missing:
            kinds.append(END)
            if model.notes_allowed and model.unused > 0:
                kinds += [NOTE] * 4
            if model.unused > 0 and sum(large for large, _, _ in model.arrived) < 3:
                kinds.append(RENDEZVOUS)
        if not model.dones or rng.random() < self.malice:
            kinds += [DONE] * (1 + 20 * bool(model.dones))
        kind = rng.choice(kinds)
        body, flags, argument = b"", rng.choice((0, 1)), rng.randrange(1 << 40)
        if kind == DATA:
            most = model.unused * EAGER  # what the peer has credits for
            argument = model.missing or rng.choice((0, 1, 20, 48, min(rng.randrange(400), most)))
            body = rng.randbytes(min(argument, EAGER))
            flags |= MORE * (argument > EAGER)
            flags |= REQUESTS * (rng.random() < 0.1)
        if kind == RENDEZVOUS:
            body = rng.randbytes(20)
        if kind in {CREDIT, PING, PONG}:  # the peer may be older, and tell no identity
            argument = rng.choice((0, 0, 0, argument, rng.getrandbits(64)))
        if kind == PING and rng.random() < 0.5:
            first = self.exposure()
            last = rng.choice((first, first + rng.randrange(2000), rng.getrandbits(32)))
            flags, argument = flags | REVOKED, first << 32 | last % (1 << 32)
        imm = rng.getrandbits(32)
        if kind == NOTE:
            body = NOTE_BODY.pack(rng.getrandbits(32), rng.choice((0, 5, 1 << 62)))
            flags, good = HAS_IMM, rng.random() >= self.malice * 4
            if not good:
                flags, body = rng.choice(((0, body), (5 | REQUESTS, body), (1, body[:-1])))
                argument = rng.choice((argument, (1 << 64) - 1))
        if model.written and kind != DONE:
            flags |= rng.choice((0, 0, 0, FREE))
            if kind == PING and rng.random() < 0.5:
                number = rng.randrange(1, 4)
                flags, (argument, imm) = flags | number << LANDING_SHIFT, TARGETS[number]
        return FRAME.pack(kind, flags, returned, imm, argument) + body

    # The program

    def step(self) -> None:
        rng, c, model = self.rng, self.c, self.model
        if self.before_proof:
            self.before_proof -= 1
            if not self.before_proof:
                model.prove(self.proof)
                c.prove(self.proof)
        match rng.randrange(12):
            case 0 | 1 | 2 if self.posted:
                ready = model.open and model.unused > 0 and not model.missing
                ends = self.malice and model.open and model.missing  # with the rest in a landing
                if rng.random() < (0.3 if ready else 0.1 if ends else self.malice / 4):
                    self.write()
                else:
                    self.arrive(self.frame())
            case 11 if self.rng.random() < self.malice / 4 and self.posted:
                self.complete_twice()
            case 11:
                self.land()
            case 3 if self.under_way:
                wc = ffi.new("struct ibv_wc *")
                wc.wr_id, wc.opcode = self.under_way.popleft()[0] << SUB_SHIFT, int(WCOpcode.SEND)
                model.complete()
                assert self.completing.take(wc)
            case 4:
                self.take()
            case 5 if self.taken:
                slot = self.taken.pop(rng.randrange(len(self.taken)))
                model.free(slot)
                assert c.release_slot(slot) == 0
            case 6 if rng.random() < 0.3:
                self.write_noted()
            case 6:
                self.send()
            case 7:
                kind = rng.choice((PING, CREDIT, END, ABORT, DONE))
                if rng.random() < 0.2:
                    awaited = rng.random() < 0.5
                    model.ask_identity(awaited)
                    assert c.ask_identity(awaited) == 0
                elif rng.random() < 0.4:
                    number = self.exposure()
                    model.revoke(number)
                    assert c.revoke(number) == 0
                elif kind == PING and model.asking:
                    assert c.ask_life() is None
                elif kind == PING:
                    model.asking = True
                    model.say(PING)
                    assert c.ask_life() == 0
                elif kind != DONE or len(model.dones_pending) < self.exchanges:
                    model.say(kind, 5 if kind == DONE else 0)
                    assert c.send_control(kind, 5 if kind == DONE else 0) == 0
            case 8:
                model.wait()
                assert c.credit() == 0
            case 9:
                assert self.turns == model.turn_flushes
                self.turns, model.turn_flushes = 0, False
                model.end_turn()
                c(0)
            case 10:  # the drain resumes a task, which answers more than once
                model.delivering = True
                c(EVENT_FRAMES)
                model.end_turn()

    def exposure(self) -> int:
        """The number of one: few, so that some follow one another, and where they begin again."""
        return self.rng.choice((self.rng.randrange(1, 20), LAST_EXPOSURE - self.rng.randrange(3)))

    def _resumed(self, events: int) -> None:
        assert events == EVENT_FRAMES
        for _ in range(self.rng.randrange(4)):
            self.send()
            if self.rng.random() < 0.15:
                self.take()

    def land(self) -> None:
        """Memory comes: a landing, or a stage for that of the peer."""
        rng, c, model = self.rng, self.c, self.model
        if model.written and rng.random() < 0.5:
            model.stage = STAGE
            c.set_stage(address(self.stage), 9, STAGE)
        elif model.landing < 3 and rng.random() < 0.3:
            number = rng.randrange(model.landing, 3) + 1
            at = address(self.landings) + number * LARGEST
            model.offer(number, (at, number))
            assert c.offer_landing(number, at, number, self.landings) == 0

    def send(self) -> None:
        body = self.rng.randbytes(self.rng.randrange(self.rng.choice((40, 40, 300))))
        imm = self.rng.choice((None, 0, 77))
        if self.rng.random() < 0.1:
            self.c.begin_requests()
            self.model.requesting = True
        assert (self.c.send(body, imm) == 0) == self.model.send(body, imm)

    def write_noted(self) -> None:
        rng, where = self.rng, self.rng.getrandbits(40)
        rights, notes = Access.REMOTE_WRITE, rng.random() < 0.5
        remote = RemoteRegion(where, 5000, rng.getrandbits(32), rights, notes=notes)
        imm, kind = rng.getrandbits(32), NOTE if notes else DATA
        posted = self.c.write(remote, self.local, 7, imm) is not None
        assert posted == self.model.write(kind, imm, where + 7, remote.rkey, 4096)

    def take(self) -> None:
        """What the loop does after a drain, and the program with what there is."""
        c, model = self.c, self.model
        while (announced := c.next_large(self.receives)) is not None:
            _, _, body, slot = announced
            (parts,) = (parts for large, parts, _ in model.arrived if large and parts[0][0] == slot)
            assert parts[0][1][: len(body)] == body
            parts[0] = (-1, *parts[0][1:])
            model.free(slot, together=1)
            assert c.repost_slot(slot) == 0
        while model.dones:
            assert c.next_done() == model.dones.popleft()
        assert c.next_done() is None
        while model.notes:
            note = model.notes.popleft()
            assert c.next_note() == note
            self.taken.append(note[-1])
            self.noted += 1
        assert c.next_note() is None
        if not model.arrived:
            assert c.peek() is None
            return
        large, parts, imm = model.arrived.popleft()
        slot, body, head = parts[0]
        begins = slot in model.requests
        assert c.peek() == (None if large else slot, 0 if large else len(body), imm, begins)
        if (len(parts) > 1 or head < 0) and self.rng.random() < 0.9:
            self.join(parts, imm)
            return
        for slot, body, head in parts:
            c.skip()
            if head < 0:
                self.taken.append(slot)
            elif not large:
                at = slot * SLOT + head
                assert bytes(ffi.buffer(self.slots)[at : at + len(body)]) == body
                self.taken.append(slot)

    def join(self, parts: list[tuple[int, bytes, int]], imm: int | None) -> None:
        """C joins a message in fragments, and gives their slots back."""
        message = self.c.take()
        assert message is not None
        assert bytes(message) == b"".join(body for _, body, _ in parts)
        assert message.imm == imm
        landing = -parts[0][2]
        self.model.freed |= 0 < landing == self.model.landing
        for slot, _, _ in parts:
            self.model.free(slot)
        self.joined += landing <= 0
        self.landed += landing > 0

    def check(self) -> None:
        c, model = self.c, self.model
        assert self.adapter.wrong is None
        assert self.out == model.out
        facts = c.facts()
        assert facts["n_unposted"] == len(model.unposted)
        assert (c.credits, facts["n_free"], facts["n_control_free"]) == (
            model.credits,
            model.slots,
            model.controls,
        )
        if model.violation is not None:
            with pytest.raises(Exception, match=WORDS[model.violation]):
                raise violation(*facts["wrong"])
            return
        assert facts["wrong"] is None
        assert facts["posted"] == model.posted
        assert (c.unused, facts["granted"]) == (model.unused, model.granted)
        assert (facts["alive"], facts["asking"]) == (model.alive, model.asking)
        assert c.knows_peer == bool(model.peer or model.ponged)
        assert facts["n_revoking"] == len(model.revoking)
        number = self.exposure()
        for owner in (0, IDENTITY, model.peer):
            assert c.admission(owner, number) == model.admits(owner, number)
        assert c.has_pending == len(model.controls_pending) + len(model.dones_pending)
        assert c.arrived == len(model.arrived)
        assert len(self.posted) >= model.unused, "a credit without a receive"
        for kind in (DONE, END, ABORT):
            assert bool(c.said & 1 << kind) == (kind in model.said)

    def run(self) -> None:
        for _ in range(self.rng.randint(20, 300)):
            self.step()
            self.check()
            if self.model.violation is not None:
                return


def test_c_does_what_the_model_does() -> None:
    print(f"seed {SEED}; AIORDMA_TEST_SEED changes it")
    seen: Counter[str] = Counter()
    for index in range(CASES):
        case = Case(name := f"{SEED}/{index}")
        try:
            case.run()
        except BaseException as exc:
            exc.add_note(f"case {name}")
            raise
        seen[case.model.violation or "kept"] += 1
        seen["chained"] += case.chained
        seen["joined"] += case.joined
        seen["landed"] += case.landed
        seen["noted"] += case.noted
        seen["proved"] += case.model.frames_in > 0 and case.gated and not case.model.gate
        seen["proof sent"] += any(item[-1] == case.proof for item in case.out)
        seen.update(f"sent {item[1]}" for item in case.out if item[0] == "send")
    print(seen)
    # A generator that never gets anywhere would show nothing.
    for what in (
        *WORDS,
        "kept",
        "chained",
        "joined",
        "landed",
        "noted",
        "proved",
        "proof sent",
        *(f"sent {kind}" for kind in (CREDIT, DATA, BARE, WRITTEN, DONE, PING, PONG, END, NOTE)),
    ):
        assert seen[what], (what, seen)
