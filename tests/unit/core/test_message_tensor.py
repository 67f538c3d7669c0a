"""A message as a tensor: DLPack, its flags, and the message's memory under it."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import numpy as np
import pytest

from aiordma._core import Message
from aiordma.arguments import bytes_of
from tests.inside.core import detach, exports_of

from .test_message import Slot

NEW: dict[str, Any] = {"max_version": (1, 0)}


def test_numpy_takes_it() -> None:
    slot = Slot(bytes(range(24)))
    array = np.from_dlpack(slot.message)
    assert (array.dtype, array.shape, array.flags.writeable) == (np.dtype(np.uint8), (24,), False)
    slot.memory[0] = 77
    assert array.tobytes() == slot.memory
    assert array.view("i8").tolist() == np.frombuffer(slot.memory, "i8").tolist()


def test_the_message_is_not_released_under_it() -> None:
    """Not under a part of it either, and not by the end of the last reference."""
    slot = Slot()
    part: Any = np.from_dlpack(slot.message)[2:]
    with pytest.raises(BufferError, match="1 exported buffer"):
        slot.message.release()
    del slot.message
    gc.collect()
    assert slot.back == []
    assert part.tobytes() == b"llo"
    del part
    gc.collect()
    assert slot.back == [False]


def test_a_capsule_that_nobody_takes() -> None:
    slot = Slot()
    capsules = [slot.message.__dlpack__(**NEW), slot.message.__dlpack__(**NEW)]
    assert exports_of(slot.message) == 2
    capsules.clear()
    assert exports_of(slot.message) == 0
    slot.message.release()


def test_it_is_let_go_by_a_thread_of_its_own() -> None:
    """A consumer calls the deleter where it likes, and without the interpreter lock."""
    slot = Slot()
    at = _pointer(slot.message.__dlpack__(**NEW), b"dltensor_versioned", taken=True)
    assert exports_of(slot.message) == 1
    deleter = ctypes.c_void_p.from_address(at + 16).value
    assert deleter
    thread = threading.Thread(target=ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter), args=(at,))
    thread.start()
    thread.join()
    assert exports_of(slot.message) == 0
    slot.message.release()
    assert slot.back == [False]


@pytest.mark.parametrize("words", [{}, {"max_version": None}, {"max_version": (0, 8)}])
def test_a_consumer_that_knows_no_read_only_tensors_gets_a_copy(words: Any) -> None:
    slot = Slot()
    capsule = slot.message.__dlpack__(**words)
    assert exports_of(slot.message) == 0
    at = _pointer(capsule, b"dltensor")
    data = ctypes.c_void_p.from_address(at).value
    assert data
    slot.memory[:] = b"other"
    assert ctypes.string_at(data, 5) == b"hello"
    with pytest.raises(BufferError, match=r"read-only.*max_version=\(1, 0\)"):
        slot.message.__dlpack__(copy=False, **words)


def test_a_copy_is_of_the_bytes_alone() -> None:
    """Also of a message whose bytes are a bytes object, which nothing may write to."""
    message = Message(memoryview(b"hello"))
    detach(message)
    array = np.from_dlpack(message, copy=True)
    array[:] = 0
    assert message == b"hello"
    message.release()


@pytest.mark.parametrize("size", [0, 1])
def test_sizes(size: int) -> None:
    message = Slot(b"x" * size).message
    array = np.from_dlpack(message)
    assert array.tobytes() == b"x" * size


def test_it_lies_in_memory_of_the_processor() -> None:
    message = Slot().message
    assert message.__dlpack_device__() == (1, 0)
    assert message.__dlpack__(dl_device=(1, 0), stream=None, copy=False, **NEW)
    wrong: list[dict[str, Any]] = [{"dl_device": (2, 0)}, {"dl_device": (1, 1)}, {"stream": 1}]
    for words in wrong:
        with pytest.raises(BufferError, match="no other device or stream"):
            message.__dlpack__(**NEW, **words)
    assert exports_of(message) == 0


@pytest.mark.parametrize(
    "words",
    [
        {"max_version": 1}, {"max_version": (1,)}, {"max_version": ("1", 0)}, {"dl_device": 1},
        {"dl_device": (1, 0, 0)}, {"other": 1},
    ],
)  # fmt: skip
def test_wrong_arguments(words: dict[str, Any]) -> None:
    message = Slot().message
    with pytest.raises(TypeError):
        message.__dlpack__(**words)
    assert exports_of(message) == 0


def test_a_message_that_was_released() -> None:
    message = Slot().message
    message.release()
    for take in (
        lambda: message.__dlpack__(**NEW), message.__dlpack__, lambda: bytes_of("it", message),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="the message was released"):
            take()


def _pointer(capsule: Any, name: bytes, *, taken: bool = False) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    at = get(capsule, name)
    if taken:
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
        rename(capsule, b"used")
    assert at
    return int(at)
