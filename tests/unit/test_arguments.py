"""Arguments that are refused: the text says what they have to be, and shows none of their bytes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy
import pytest

import aiordma
from aiordma import ConnectionConfig, StreamConfig
from aiordma.arguments import bytes_of, check_kind, name_of, payload_of
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import check_memory
from tests.inside.endpoint import check_remote


def test_another_configuration_is_named_by_its_type() -> None:
    with pytest.raises(TypeError) as caught:
        aiordma.connect("10.0.0.1", 7, config=StreamConfig())  # type: ignore[arg-type]
    assert str(caught.value) == "config has to be a ConnectionConfig, not StreamConfig"
    with pytest.raises(TypeError, match="config has to be a ConnectionConfig, not None"):
        check_kind("config", None, ConnectionConfig, none=False)


def test_the_bytes_of_a_region_are_not_shown() -> None:
    region = aiordma.RemoteRegion(0x1000, 64, 0x12345678, Access.REMOTE_READ)
    with pytest.raises(TypeError, match=r"RemoteRegion\.from_bytes") as caught:
        check_remote(region.to_bytes())
    assert "4Vx" not in str(caught.value)
    assert "b'" not in str(caught.value)
    check_remote(region)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("x", r"not str; encode it, as in text\.encode\(\)"),
        ([1, 2], "not list"),
        (None, "not None"),
    ],
)
def test_what_is_no_buffer(value: Any, words: str) -> None:
    for refuses in (
        lambda: payload_of("private data", value, 36),
        lambda: bytes_of("the memory", value),
        lambda: check_memory(value, Access.LOCAL_WRITE),
    ):
        with pytest.raises(TypeError, match=f"has to be bytes, bytearray, .*{words}"):
            refuses()


def test_a_buffer_with_gaps_is_refused_with_the_remedy() -> None:
    values: list[Any] = [numpy.arange(10)[::2], memoryview(b"abcdef")[::2]]
    for gaps in values:
        with pytest.raises(
            ValueError, match=r"a message has to be contiguous: .*ascontiguousarray"
        ):
            bytes_of("a message", gaps)
        assert bytes_of("a message", bytes(gaps)).nbytes == memoryview(gaps).nbytes


def test_memory_that_is_read_only() -> None:
    with pytest.raises(BufferError, match="use a writable one, such as a bytearray"):
        check_memory(b"abc", Access.LOCAL_WRITE)


@pytest.mark.parametrize(
    "objects",
    [
        numpy.array([object()] * 3), numpy.array([], dtype=object),
        numpy.zeros((2, 4), dtype=object)[:, ::2], numpy.zeros(2, dtype="i4,O"),
        numpy.zeros(2, dtype=[("inner", [("O", "i4"), ("x", "O")])]), (ctypes.py_object * 2)(),
    ],
)  # fmt: skip
def test_references_to_objects_are_no_bytes(objects: Any) -> None:
    for refuses in (
        lambda: payload_of("private data", objects, 36),
        lambda: bytes_of("the memory", objects),
        lambda: bytes_of("the memory", objects, writable=True),
        lambda: check_memory(objects, Access.LOCAL_WRITE),
    ):
        with pytest.raises(TypeError, match="references to Python objects"):
            refuses()


@pytest.mark.parametrize(
    "numbers",
    [
        numpy.zeros(2, dtype=[("O", "i4"), ("xO", "f8")]), numpy.zeros((2, 3), dtype=">c16"),
        numpy.zeros(2, dtype=[("inner", [("O", "i4")])]), (ctypes.c_int * 2)(), bytearray(3),
    ],
)  # fmt: skip
def test_structures_of_numbers_are_bytes(numbers: Any) -> None:
    size = memoryview(numbers).nbytes
    assert bytes_of("the memory", numbers, writable=True).nbytes == size
    check_memory(numbers, Access.LOCAL_WRITE)


class Called:
    """An object that is called."""

    def __call__(self) -> None:
        """Do nothing."""


def test_a_function_has_a_name() -> None:
    """For a line in the log, whatever a program has given as a function."""
    named = functools.partial(name_of)
    named.__qualname__ = "by itself"  # type: ignore[attr-defined]
    assert [
        name_of(each)
        for each in (name_of, Called().__call__, functools.partial(name_of), named, Called())
    ] == ["name_of", "Called.__call__", "name_of", "by itself", "Called"]
