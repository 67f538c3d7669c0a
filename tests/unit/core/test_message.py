"""Message: the bytes, and when their memory goes back."""

from __future__ import annotations

import copy
import gc
import operator as op
import struct
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from aiordma._core import Message
from aiordma.endpoint.link import lent
from tests.inside.core import detach, exports_of, is_released, lend


class Slot:
    """Memory of a connection, and what came back of it."""

    def __init__(self, data: bytes = b"hello", imm: int | None = None) -> None:
        self.memory = bytearray(data)
        self.back: list[bool] = []  # whether it was still exported
        self.message: Message = Message(memoryview(self.memory), imm, self.back.append)


def test_it_is_a_buffer() -> None:
    message = Slot(struct.pack("!I", 7)).message
    assert len(message) == 4
    assert bytes(message) == b"\0\0\0\x07"
    assert struct.unpack("!I", message) == (7,)
    assert bytearray(message) == b"\0\0\0\x07"
    assert b"".join([message, message]) == b"\0\0\0\x07" * 2
    view = memoryview(message)
    assert (view.nbytes, view.format, view.ndim) == (4, "B", 1)
    view.release()
    message.release()


def test_it_is_no_copy() -> None:
    slot = Slot(b"hello")
    slot.memory[0:1] = b"j"
    assert bytes(slot.message) == b"jello"


def test_bytes_are_kept_as_they_are() -> None:
    data = bytes(range(200))
    before = sys.getrefcount(data)
    back: list[bool] = []
    message = Message(data, 7, back.append)
    assert (bytes(message), len(message), message.imm) == (data, 200, 7)
    with memoryview(message) as view:
        assert view.readonly
        with pytest.raises(BufferError):
            message.release()
    assert message[16:] == data[16:]
    assert sys.getrefcount(data) == before + 1
    message.release()
    assert back == [False]
    assert sys.getrefcount(data) == before


@pytest.mark.parametrize("other", [b"hello", bytearray(b"hello"), memoryview(b"hello")])
def test_it_compares_by_its_bytes(other: object) -> None:
    message = Slot(b"hello").message
    assert message == other
    assert message == message
    assert message != b"other"
    assert message != "hello"
    assert message == Slot(b"hello").message


def test_it_cannot_be_hashed() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Slot().message)


def test_release_gives_the_memory_back_once() -> None:
    slot = Slot()
    slot.message.release()
    slot.message.release()
    assert len(slot.back) == 1
    assert len(slot.message) == 5, "the length stays"
    for use in (lambda: bytes(slot.message), lambda: memoryview(slot.message)):
        with pytest.raises(ValueError, match="the message was released"):
            use()
    slot.memory.extend(b"x")  # nobody looks at it any more


def test_a_with_block_releases() -> None:
    slot = Slot()
    with slot.message as message:
        assert bytes(message) == b"hello"
    assert len(slot.back) == 1


def test_an_exported_message_cannot_be_released() -> None:
    slot = Slot()
    view = memoryview(slot.message)
    with pytest.raises(BufferError):
        slot.message.release()
    assert slot.back == []
    assert bytes(view) == b"hello"
    view.release()
    slot.message.release()
    assert len(slot.back) == 1


def test_the_last_reference_gives_the_memory_back() -> None:
    slot = Slot()
    del slot.message
    gc.collect()
    assert slot.back == [False]
    slot.memory.clear()


def test_an_export_keeps_the_message_and_its_memory() -> None:
    slot = Slot()
    view = memoryview(slot.message)
    del slot.message
    gc.collect()
    assert slot.back == []
    assert bytes(view) == b"hello"
    with pytest.raises(BufferError):
        slot.memory.clear()
    view.release()
    assert slot.back == [False]
    slot.memory.clear()


def test_detached_bytes_are_the_messages_own() -> None:
    slot = Slot()
    with memoryview(slot.message), pytest.raises(BufferError):
        detach(slot.message)
    detach(slot.message)
    assert slot.back == [False]
    slot.memory[:] = b"other"
    assert bytes(slot.message) == b"hello"
    detach(slot.message)
    slot.message.release()
    del slot.message
    gc.collect()
    assert len(slot.back) == 1


def test_an_empty_message_is_a_message() -> None:
    slot = Slot(b"", imm=0)
    assert len(slot.message) == 0
    assert bytes(slot.message) == b""
    assert slot.message.imm == 0
    assert slot.message == b""


def test_it_prints_what_it_is_and_not_its_bytes() -> None:
    slot = Slot(b"secret", imm=0x2A)
    assert repr(slot.message) == "<Message 6 bytes imm=0x2a>"
    slot.message.release()
    assert repr(slot.message) == "<Message 6 bytes imm=0x2a released>"
    assert repr(Slot(b"x").message) == "<Message 1 bytes>"


@pytest.mark.parametrize("imm", ["text", None, 1.5, -1, 1 << 80, object])
def test_g11_it_prints_an_immediate_of_any_kind(imm: Any) -> None:
    shown = hex(imm) if isinstance(imm, int) else repr(imm)
    expected = "<Message 1 bytes>" if imm is None else f"<Message 1 bytes imm={shown}>"
    assert repr(Message(memoryview(b"x"), imm)) == expected


def test_memory_without_an_owner_needs_no_release() -> None:
    message: Any = Message(memoryview(b"abc"))
    assert message.imm is None
    assert bytes(message) == b"abc"
    message.release()


def test_it_is_not_copied_by_accident() -> None:
    with pytest.raises(TypeError):
        copy.deepcopy(Slot().message)


def test_the_memory_comes_back_at_once_and_without_the_collector() -> None:
    slot = Slot()
    gc.disable()
    try:
        del slot.message
        assert slot.back == [False]
    finally:
        gc.enable()
    slot.memory.clear()


def test_a_message_in_a_cycle_gives_its_memory_back_once() -> None:
    class Holder:
        def __init__(self, message: Message, back: list[bool]) -> None:
            self.message, self.back = message, back

        def __call__(self, exported: bool) -> None:
            self.back.append(exported)

    memory, back = bytearray(b"hello"), list[bool]()
    holder = Holder(Message(memoryview(b"")), back)
    # The message is told of by its holder, which it keeps alive: only the collector ends that.
    holder.message = Message(memoryview(memory), None, holder)
    seen = weakref.ref(holder.message)
    del holder
    assert back == []
    gc.collect()
    assert seen() is None
    assert back == [False]
    memory.clear()


def test_it_may_be_watched() -> None:
    slot, gone = Slot(), list[object]()
    watched = weakref.ref(slot.message, gone.append)
    assert watched() is slot.message
    del slot.message
    assert gone == [watched]
    assert watched() is None
    assert len(slot.back) == 1


def test_an_error_of_who_gets_the_memory_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(exported: bool) -> None:
        raise LookupError("whose?")

    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    message = Message(memoryview(b"hello"), None, refuse)
    with pytest.raises(LookupError):
        message.release()
    with pytest.raises(KeyError, match="mine"):  # nor does it hide another one
        dropped(refuse)
    assert [type(report.exc_value) for report in reported] == [LookupError]


def dropped(give_back: Callable[[bool], None]) -> None:
    message = Message(memoryview(b"hello"), None, give_back)
    try:
        raise KeyError("mine")
    finally:
        del message


@pytest.mark.parametrize("operator", ["lt", "le", "gt", "ge"])
def test_it_has_no_order(operator: str) -> None:
    with pytest.raises(TypeError, match="not supported between"):
        getattr(op, operator)(Slot(b"a").message, Slot(b"b").message)


def test_a12_a_released_one_compares_with_itself_only() -> None:
    message = Slot(b"a").message
    message.release()
    assert message == message
    assert (message == "a") is False
    other = Slot(b"a").message
    for left, right in ((message, b"a"), (message, other), (other, message)):
        assert (left == right) is False
        assert left != right


def test_an_error_of_a_message_that_nobody_has_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.object))

    def refuse(exported: bool) -> None:
        raise LookupError("whose?")

    for _ in range(100):
        Message(memoryview(b"hello"), None, refuse)
    assert reported == [Message] * 100


def test_a00_a_message_that_the_library_holds_can_be_released() -> None:
    """The program can do nothing about what goes on behind a canceled send."""
    slot = Slot(b"hello world")
    with memoryview(slot.message) as mine, mine[6:] as piece:
        loans = [lent(mine), lent(piece), lent(mine)]
    assert [bytes(loan) for loan in loans] == [b"hello world", b"world", b"hello world"]
    assert exports_of(slot.message) == 3
    with slot.message:
        pass
    assert slot.back == [True], "the memory is not to be used again as long as it is held"
    assert is_released(slot.message)
    with pytest.raises(ValueError, match="released"):
        memoryview(slot.message)
    held = memoryview(loans[1])
    del loans
    gc.collect()
    assert bytes(held) == b"world"
    with pytest.raises(BufferError):
        slot.memory.clear()
    held.release()
    del held
    slot.message.release()
    slot.memory.clear()  # the last loan has let go of it
    assert exports_of(slot.message) == 0


def test_a00_a_view_of_the_program_keeps_a_lent_message() -> None:
    slot = Slot()
    mine = memoryview(slot.message)
    loan = lent(mine)
    with pytest.raises(BufferError, match="1 exported"):
        slot.message.release()
    mine.release()
    slot.message.release()
    assert slot.back == [True]
    assert bytes(loan) == b"hello"


def test_a00_a_loan_outlives_its_message() -> None:
    slot = Slot(b"x" * 100)
    loan = lent(memoryview(slot.message))
    del slot.message
    gc.collect()
    assert slot.back == []  # it is lent, and so not gone
    assert bytes(loan) == b"x" * 100
    del loan
    assert slot.back == [False]


def test_a00_other_buffers_are_not_lent() -> None:
    wrong: Any = 3
    view = memoryview(bytearray(5))
    assert lent(view) is view
    slot = Slot()
    with pytest.raises(ValueError, match="no bytes"):
        lend(slot.message, view)
    with pytest.raises(TypeError):
        lend(slot.message, wrong)
    assert exports_of(slot.message) == 0
