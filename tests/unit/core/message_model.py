"""The message protocol once more, as docs/wire.md tells it: a second opinion on `MessageState`.

One end of a connection, with the simplest of data.  Frames go in, what it posts comes out: tuples
("receive", slot) and ("send", kind, flags, credits, imm, argument, body).  `violation` is None
until the peer breaks the protocol; then nothing means anything any more.
"""

from __future__ import annotations

from collections import deque
from typing import Any

CREDIT, DATA, RENDEZVOUS, DONE, PING, PONG, END, ABORT, NOTE = range(9)
BARE = -DATA  # DATA whose header is the immediate
WRITTEN = -20  # the same, written into a landing
HAS_IMM, MORE, FREE, CREDIT_FRAMES = 1, 2, 4, 2
REVOKED = 2  # of PING: the argument is exposures that have ended
MOST_REVOKING, MOST_REVOKED = 8, 1024
REQUESTS = 0x80  # of DATA: the first frame of requests
LANDING_SHIFT = 3
NUMBER_SHIFT, NUMBERS = 4, 16  # of the first byte of a frame
SHUT = b"no frame opens this gate"
SINGLE = (PONG, PING, CREDIT, END, ABORT)  # the order in which they go


class Model:
    """One end."""

    def __init__(
        self,
        window: int,
        sends: int,
        controls: int,
        exchanges: int,
        chain: int,
        eager: int,
        fragmented: int,
        largest: int,
        bare: int,
        written: int,
        numbered: bool,
        identity: int,
    ) -> None:
        self.out: list[tuple[Any, ...]] = []
        self.violation: str | None = None
        self.numbered, self.frames_in = numbered, 0
        self.gate = b""  # the proof that the first frame has to have; or SHUT; empty: none
        self.proving = b""  # of this side, which the next CREDIT has
        self.said: set[int] = set()  # by the peer
        self.requests: set[int] = set()  # slots of messages from which on requests come
        self.requesting = False  # the next message is the first of these
        # Messages: whether large, slot, body and bytes of the header of each fragment, immediate
        # of the first.  The header of a message in landing n has -n bytes.
        self.arrived: deque[tuple[bool, list[tuple[int, bytes, int]], int | None]] = deque()
        self.fragments: list[tuple[int, bytes, int]] = []  # of the message that is arriving
        self.missing = 0  # bytes of it
        self.imm: int | None = None  # of it
        self.eager, self.fragmented, self.largest = eager, fragmented, largest
        self.bare = bare  # bytes of a message whose header is the immediate; 0: of none
        self.landing, self.where = 0, (0, 0)  # the newest of this side: number, address and key
        self.open: set[int] = set()  # landings that the peer may write to
        self.offered, self.freed = False, False
        self.written = written  # bytes of a message that goes into a landing; 0: of none
        self.target, self.target_free = 0, False  # the newest landing of the peer
        self.stage, self.writing = 0, False  # bytes; whether a write has not completed
        self.notes_allowed = False
        # Key, address, length and immediate of each note, and the slot that it lies in.
        self.notes: deque[tuple[int, int, int, int, int]] = deque()
        self.dones: deque[tuple[int, int]] = deque()
        self.slots, self.controls = sends, controls  # free
        self.under_way: deque[int] = deque()  # the kinds of sends
        self.reserve = controls + exchanges  # receives for frames without credit
        self.posted = window + self.reserve
        self.unused = self.granted = window
        self.marks: list[int] = []
        self.due, self.chain, self.exchanges = max(1, window // 2), chain, exchanges
        self.back: list[int] = []  # free receive slots that are posted together
        self.controls_pending: set[int] = set()
        self.dones_pending: deque[tuple[int, int]] = deque()
        self.credits, self.alive, self.asking = 0, False, False
        self.identity, self.peer = identity, 0  # of this side, and the first that the peer told
        self.told, self.wanted, self.ponged = False, False, False
        self.revoked: dict[int, int] = {}  # exposures of the peer, by the place where they are kept
        self.revoking: list[list[int]] = []  # of this side: first and last
        self.unposted: list[tuple[Any, ...]] = []  # sends that are posted together
        self.delivering, self.turn_flushes, self.in_a_row = False, False, 0

    @property
    def ungranted(self) -> int:
        return self.posted - self.reserve - self.unused

    def _take(self, alone: bool) -> int:
        credits = max(0, min(self.ungranted, 0xFFFF))
        self.marks += [self.granted] * (alone and credits > 0 and len(self.marks) < CREDIT_FRAMES)
        self.granted += credits
        self.unused += credits
        return credits

    def _post(self, kind: int, flags: int, imm: int, argument: int, body: bytes = b"") -> None:
        credits = self._take(kind == CREDIT)
        self.under_way.append(kind)
        if kind == PING and self.offered:
            self.offered = self.freed = False
            self.open.add(self.landing)
            flags, (argument, imm) = flags | self.landing << LANDING_SHIFT, self.where
        elif kind == PING and self.revoking:
            first, last = self.revoking.pop(0)
            flags, argument = flags | REVOKED, first << 32 | last
        elif kind in {CREDIT, PING, PONG}:
            argument, self.told = self.identity, True
            self.wanted &= kind != PING
        if self.freed:
            self.freed = False
            self.open.add(self.landing)
            flags |= FREE
        if kind == CREDIT:
            body, self.proving = self.proving, b""
        self.unposted.append(("send", kind, flags, credits, imm, argument, body))

    def prove(self, proof: bytes) -> None:
        """The peer has proved itself, and expects the proof of this side."""
        self.gate, self.proving = b"", proof

    def flush(self) -> None:
        self.out += self.unposted
        self.unposted.clear()

    def end_turn(self) -> None:
        """The turn of the loop, or the telling of events, has ended."""
        self.delivering, self.in_a_row = False, 0
        self.flush()

    def _credit_is_due(self) -> bool:
        if self.ungranted < self.due or (self.due == 1 and self.unused > 0):
            return False
        spent = self.granted - self.unused
        while self.marks and spent > self.marks[0]:
            del self.marks[0]
        return len(self.marks) < CREDIT_FRAMES

    def pump(self) -> None:
        if (self.offered or self.wanted or self.revoking) and not self.asking:
            self.asking = True
            self.controls_pending.add(PING)
        while self.controls:
            if self.dones_pending:
                kind, (argument, flags) = DONE, self.dones_pending.popleft()
            elif waiting := [kind for kind in SINGLE if kind in self.controls_pending]:
                kind, argument, flags = waiting[0], 0, 0
                self.controls_pending.remove(kind)
            elif self._credit_is_due():
                kind, argument, flags = CREDIT, 0, 0
            else:
                break
            self.controls -= 1
            self._post(kind, flags, 0, argument)
            self.flush()

    def offer(self, number: int, where: tuple[int, int]) -> None:
        """A larger landing is there."""
        self.landing, self.where, self.offered, self.freed = number, where, True, False
        self.pump()

    @property
    def ended(self) -> bool:
        """Whether the peer has said so."""
        return bool(self.said & {END, ABORT})

    def ask_identity(self, awaited: bool) -> None:
        """The program exposes memory, or, if it awaits the answer, uses that of the peer."""
        if self.ended and not awaited:
            return
        if not (self.told and (self.peer or self.ponged)):
            self.wanted = True
            self.pump()

    def revoke(self, number: int) -> None:
        """An exposure of this side has ended."""
        if not self.peer or self.ended:
            return
        for exposures in self.revoking:
            if number in {(exposures[1] + 1) % (1 << 32), (exposures[0] - 1) % (1 << 32)}:
                exposures[number == (exposures[1] + 1) % (1 << 32)] = number
                break
        else:
            self.revoking = [*self.revoking, [number, number]][-MOST_REVOKING:]
        self.pump()

    def admits(self, owner: int, number: int) -> int:
        """0, or 4 if the memory is not the peer's, 5 if the exposure has ended."""
        if not owner:
            return 0
        if owner != self.peer:
            return 4
        return 5 if number and self.revoked.get(number % MOST_REVOKED) == number else 0

    def say(self, kind: int, argument: int = 0) -> None:
        if kind == DONE:
            self.dones_pending.append((argument, 0))
        else:
            self.controls_pending.add(kind)
        self.pump()
        self.flush()

    def send(self, body: bytes, imm: int | None) -> bool:
        if imm is None and 0 < len(body) <= self.bare and not self.requesting:
            return self._send([body], imm, BARE)
        if (
            imm is None
            and self.eager < len(body) <= min(self.written, self.stage)
            and self.target_free
            and not self.writing
        ):
            return self._send([body], imm, WRITTEN)
        bodies = [body[at : at + self.eager] for at in range(0, len(body) or 1, self.eager)]
        if len(body) > self.fragmented:
            self.flush()
            return False
        return self._send(bodies, imm, DATA)

    def _send(self, bodies: list[bytes], imm: int | None, kind: int) -> bool:
        if len(bodies) > min(self.credits, self.slots):
            self.flush()
            return False
        self.credits, self.slots = self.credits - len(bodies), self.slots - len(bodies)
        left, flags = sum(map(len, bodies)), HAS_IMM * (imm is not None)
        flags, self.requesting = flags | REQUESTS * self.requesting, False
        for index, part in enumerate(bodies):
            more = MORE * (index < len(bodies) - 1)
            if kind == WRITTEN:
                self.target_free, self.writing = False, True
                flags = self.target << LANDING_SHIFT
            self._post(kind, flags | more, imm or 0, left, part)
            left, flags, imm = left - len(part), 0, None
        burst = self.in_a_row == 2
        if not (self.turn_flushes or (self.delivering and (self.arrived or burst))):
            self.flush()
        if not self.unposted and not burst:
            self.in_a_row += 1
            self.turn_flushes |= self.in_a_row == 2 and not self.delivering
        return True

    def complete(self) -> None:
        """The oldest send has succeeded."""
        kind = self.under_way.popleft()
        control = kind not in {DATA, BARE, WRITTEN, RENDEZVOUS, NOTE}
        self.writing &= kind != WRITTEN
        self.controls, self.slots = self.controls + control, self.slots + (not control)
        if control:
            self.pump()

    def frame(
        self, slot: int, data: bytes, word: int | None = None, *, written: bool = False
    ) -> None:
        """A frame, or bytes whose header is the immediate `word`, in a slot or in a landing."""
        self.posted -= 1
        self.requests.discard(slot)
        if self.violation is not None:
            return
        if self.gate:
            if word is not None or data[:1] != bytes([CREDIT]) or data[16:] != self.gate:
                self.violation = "proof"
                return
            self.gate = b""
        if word is None and len(data) < 16:
            self.violation = "short"
            return
        first = data[0] if word is None else word >> 24
        if self.numbered:
            if first >> NUMBER_SHIFT != self.frames_in % NUMBERS:
                self.violation = "number"
                return
            first &= NUMBERS - 1
        self.frames_in += 1
        if word is not None:
            flags = word >> 16 & 0xFF
            landing = flags >> LANDING_SHIFT if written else 0
            if written:
                if landing not in self.open or not 0 < len(data) <= self.largest:
                    self.violation = "write"
                    return
                self.open.remove(landing)
            if self.written:
                self.target_free |= bool(flags & FREE and self.target)
                flags &= ~FREE
            if first != DATA or flags != landing << LANDING_SHIFT:
                self.violation = "bare"
                return
            self.credits += word & 0xFFFF
            self._data(slot, DATA, 0, None, len(data), data, -landing)
            return
        kind, flags, body = first, data[1], data[16:]
        if self.written:
            self.target_free |= bool(flags & FREE and self.target)
            if kind == PING and 0 < flags >> LANDING_SHIFT <= 3:
                self.target, self.target_free = flags >> LANDING_SHIFT, True
            flags &= ~FREE
        self.credits += int.from_bytes(data[2:4], "big")
        imm = int.from_bytes(data[4:8], "big") if flags & HAS_IMM else None
        argument = int.from_bytes(data[8:16], "big")
        if kind == DATA and flags & REQUESTS:
            self.requests.add(slot)
        if kind in {DATA, RENDEZVOUS}:
            self._data(slot, kind, flags, imm, argument, body, 16)
            return
        if kind == NOTE:
            self._note(slot, flags, int.from_bytes(data[4:8], "big"), argument, body)
            return
        if kind > ABORT or (kind == END and self.missing):
            self.violation = "kind" if kind > ABORT else "order"
            return
        if kind == DONE:
            if len(self.dones) >= 1 << (self.exchanges - 1).bit_length():
                self.violation = "done"
                return
            self.dones.append((argument, flags))
        self.alive |= kind == DONE or kind == (PONG if self.asking else PING)
        self.asking &= kind != PONG
        if kind == PONG:
            self.ponged, self.wanted = True, self.wanted and not self.told
        if kind in {CREDIT, PONG} or (kind == PING and not flags >> LANDING_SHIFT):
            if kind == PING and flags & REVOKED:
                first, last = argument >> 32, argument & 0xFFFFFFFF
                count = min((last - first) % (1 << 32) + 1, MOST_REVOKED)
                for number in range(last - count + 1, last + 1):
                    number %= 1 << 32
                    self.revoked[number % MOST_REVOKED] = number
            else:
                self.peer = self.peer or argument
        if kind == PING:
            self.controls_pending.add(PONG)
        self.said.add(kind)
        self.free(slot, together=1)

    def _data(
        self, slot: int, kind: int, flags: int, imm: int | None, argument: int, body: bytes,
        head: int,
    ) -> None:  # fmt: skip
        if self.unused <= 0:
            self.violation = "credit"
            return
        self.unused -= 1
        more = kind == DATA and bool(flags & MORE)
        if self.missing and (kind == RENDEZVOUS or head < 0 or argument != self.missing):
            self.violation = "order"
        elif kind == DATA and (not 0 < len(body) < argument if more else argument != len(body)):
            self.violation = "length"
        elif more and argument > self.largest:
            self.violation = "size"
        if self.violation is not None:
            return
        self.alive = True
        self.imm = self.imm if self.missing else imm
        self.missing = argument - len(body) if more else 0
        self.fragments.append((slot, body, head))
        if not more:
            self.arrived.append((kind == RENDEZVOUS, self.fragments, self.imm))
            self.fragments = []

    def _note(self, slot: int, flags: int, imm: int, addr: int, body: bytes) -> None:
        """A note takes a credit, and keeps its slot until it is taken."""
        length = int.from_bytes(body[4:12], "big")
        if self.unused <= 0:
            self.violation = "credit"
            return
        self.unused -= 1
        if not self.notes_allowed:
            self.violation = "kind"
        elif self.missing:
            self.violation = "order"
        elif flags != HAS_IMM or len(body) != 12 or addr + length >= 1 << 64:
            self.violation = "note"
        else:
            self.alive = True
            self.notes.append((int.from_bytes(body[:4], "big"), addr, length, imm, slot))

    def write(self, kind: int, imm: int, where: int, rkey: int, length: int) -> bool:
        """A noted write: the WRITE, and at once the frame that tells of it."""
        self.flush()
        if not (self.credits and self.slots):
            return False
        self.credits, self.slots = self.credits - 1, self.slots - 1
        body = rkey.to_bytes(4, "big") + length.to_bytes(8, "big") if kind == NOTE else b""
        self.out.append(("write", where, rkey, length))
        self._post(kind, HAS_IMM, imm, where if kind == NOTE else 0, body)
        self.flush()
        return True

    def again(self) -> None:
        """The adapter completes a request that has completed before."""
        if self.violation is None:
            self.violation = "turn"

    def free(self, slot: int, together: int | None = None) -> None:
        """The slot of a frame is free."""
        self.back.append(slot)
        together = together or self.chain
        if len(self.back) >= together or self.ungranted + len(self.back) >= self.due:
            self._post_back()

    def _post_back(self) -> None:
        self.out += [("receive", slot) for slot in self.back]
        self.posted += len(self.back)
        self.back.clear()
        self.pump()

    def wait(self) -> None:
        """The program waits for a message, or has had its chance to answer."""
        if self.ungranted + len(self.back) >= self.due:
            self._post_back()
