"""The gate of a connection with keys: no frame counts before the peer has proved itself."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._core import (
    EVENT_FAILED,
    EVENT_FRAMES,
    FRAME_SIZE,
    PROOF_SIZE,
    SUB_RECV,
    MessageState,
)
from aiordma.endpoint.config import CONTROL_SIZE, CONTROL_SLOTS, ConnectionConfig
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.verbs.enums import WCOpcode
from tests.inside.endpoint import set_terms

from ..endpoint.fabric import new_state
from .completing import Completing, QueuePair, completion, fields

NUMBER_SHIFT = 4
PROOF = bytes(range(1, 33))
STRIDE = 128
GREETING = FRAME.pack(FrameKind.CREDIT, 0, 5, 0, 7)


def test_there_is_room_for_a_greeting_with_its_proof() -> None:
    """C writes it into a slot of this size, and receives it in the smallest."""
    assert FRAME_SIZE + PROOF_SIZE <= CONTROL_SIZE
    with pytest.raises(ValueError, match="slot_size"):
        ConnectionConfig(slot_size=FRAME_SIZE + PROOF_SIZE - 1)


class Gated:
    """A state with memory, and what it has sent."""

    def __init__(self, numbered: bool = True) -> None:
        config = ConnectionConfig(slot_size=STRIDE)
        loop = SimpleNamespace(is_running=lambda: True, call_soon=lambda *args: None)
        self.state: MessageState = new_state(config, loop, config.receives, 4)
        self.completing = Completing(self.state)
        self.memory = {
            name: ctypes.create_string_buffer(count * size)
            for name, count, size in (
                ("send", 4, STRIDE), ("receive", config.receives, STRIDE),
                ("frames", CONTROL_SLOTS, CONTROL_SIZE),
            )
        }  # fmt: skip
        self.sent: list[bytes] = []
        self._adapter = QueuePair(self._send, lambda wr: None)
        at = {name: ctypes.addressof(memory) for name, memory in self.memory.items()}
        self.state.bind(
            self._adapter.address, 0, 0, 0, (at["send"], STRIDE, 1, 4),
            (at["receive"], STRIDE, 2, config.receives), (at["frames"], CONTROL_SIZE, 3), 0,
        )  # fmt: skip
        assert self.state.post_receives(config.receives) == 0
        self.slot = 0
        self._numbered = numbered

    def agree(self) -> None:
        """Both hellos are there."""
        set_terms(self.state, credits=0, eager_size=STRIDE - FRAME_SIZE, numbered=self._numbered)

    def _send(self, wr: Any) -> None:
        while wr:
            sge = wr.sg_list[0]
            self.sent.append(ctypes.string_at(int(sge.addr), sge.length))
            wr = wr.next

    def take(self, data: bytes, imm: int | None = None) -> int:
        """A frame arrives in the next slot; the events."""
        ctypes.memmove(
            ctypes.addressof(self.memory["receive"]) + self.slot * STRIDE, data, len(data)
        )
        wc = completion(SUB_RECV | self.slot, WCOpcode.RECV, len(data), imm)
        self.slot += 1
        self.completing.events = 0
        assert self.completing.take(wc)
        return self.completing.events

    @property
    def wrong(self) -> Any:
        """How the peer broke the protocol."""
        return self.state.failure[2]


@pytest.mark.parametrize("numbered", [False, True])
def test_the_greeting_with_the_proof_opens(numbered: bool) -> None:
    one = Gated(numbered)
    one.state.require_proof(PROOF)
    one.agree()
    assert one.take(GREETING + PROOF) == EVENT_FRAMES
    assert one.wrong is None
    assert one.state.facts()["credits"] == 5
    first = 1 << NUMBER_SHIFT if numbered else 0
    one.take(bytes([FrameKind.PING | first]) + GREETING[1:])
    assert one.wrong is None
    assert one.sent[-1][0] & 15 == FrameKind.PONG


def frames() -> dict[str, tuple[bytes, int | None]]:
    """Frames that prove nothing."""
    flipped = {
        f"bit {bit} of byte {at}": (
            GREETING + PROOF[:at] + bytes([PROOF[at] ^ 1 << bit]) + PROOF[at + 1 :], None
        )
        for at in range(PROOF_SIZE)
        for bit in (0, 7)
    }  # fmt: skip
    kinds = {kind.name: (bytes([kind]) + GREETING[1:] + PROOF, None) for kind in FrameKind if kind}
    return {
        "bare": (GREETING + PROOF, 0), "without": (GREETING, None), "empty": (b"", None),
        "short": (GREETING + PROOF[:-1], None), "long": (GREETING + PROOF + b"x", None),
        "numbered": (b"\x10" + GREETING[1:] + PROOF, None), **flipped, **kinds,
    }  # fmt: skip


@pytest.mark.parametrize("name", frames())
@pytest.mark.parametrize("shut", [False, True])
def test_any_other_frame_changes_nothing_and_ends_the_connection(name: str, shut: bool) -> None:
    one = Gated()
    one.state.require_proof(None if shut else PROOF)
    one.agree()
    before = fields(one.state)
    data, imm = frames()[name]
    assert one.take(data, imm) == EVENT_FAILED
    assert one.wrong == ("PROOF", len(data), 0)
    after = fields(one.state)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"posted", "receives", "owed", "wrong"}
    # Nor does the right one, once this was wrong.
    one.take(GREETING + PROOF)
    assert one.wrong == ("PROOF", len(data), 0)
    assert one.sent == []
    assert one.state.facts()["credits"] == before["credits"]


def test_a_shut_gate_takes_no_proof() -> None:
    one = Gated()
    one.state.require_proof(None)
    assert one.take(GREETING + bytes(PROOF_SIZE)) == EVENT_FAILED
    assert one.wrong == ("PROOF", FRAME_SIZE + PROOF_SIZE, 0)


def test_the_first_greeting_takes_the_proof_along_and_no_later_frame_does() -> None:
    one = Gated()
    one.state.require_proof(None)
    one.state.prove(PROOF)
    one.agree()
    assert one.state.send_control(FrameKind.CREDIT, 0, 0) == 0
    assert one.state.send_control(FrameKind.CREDIT, 0, 0) == 0
    assert [len(each) for each in one.sent] == [FRAME_SIZE + PROOF_SIZE, FRAME_SIZE]
    assert one.sent[0][FRAME_SIZE:] == PROOF
    assert one.sent[0][0] == FrameKind.CREDIT
    one.take(FRAME.pack(FrameKind.PING, 0, 0, 0, 0))
    assert one.wrong is None


def test_a_frame_without_data_has_room_for_a_proof() -> None:
    assert CONTROL_SIZE >= FRAME_SIZE + PROOF_SIZE


@pytest.mark.parametrize("wrong", [b"", PROOF[:-1], PROOF + b"x", "text", 7])
def test_a_proof_has_its_size(wrong: Any) -> None:
    one = Gated()
    for call in (one.state.require_proof, one.state.prove):
        with pytest.raises((TypeError, ValueError)):
            call(wrong)
    one.agree()
    one.take(GREETING)
    assert one.wrong is None, "nothing has changed"
