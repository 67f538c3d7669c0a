"""Checks of the arguments of public calls, before anything is taken for the call.

A value that is no number, or does not fit, raises TypeError or ValueError at the call.  Further in
it would raise an error of `struct` or of C, after a slot, a credit or a registration was taken.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Awaitable
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiordma.tensors import has_memory, refuse_masked, view_of

if TYPE_CHECKING:
    from typing import TypeAlias

    import typing_extensions  # type checkers bring their own

    class _Array(Protocol):
        # For Python 3.11 numpy does not say that an array is a buffer.
        @property
        def __array_interface__(self) -> dict[str, Any]: ...

    class _Tensor(Protocol):
        def __dlpack__(self) -> Any: ...

        def __dlpack_device__(self) -> Any: ...

    class _Cuda(Protocol):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]: ...

    Buffer: TypeAlias = typing_extensions.Buffer | _Array | _Tensor | _Cuda
elif sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    Buffer = Any

__all__ = [
    "Buffer", "bytes_of", "check_awaitable", "check_kind", "check_seconds", "fitting", "name_of",
    "no_buffer", "parts_of", "payload_of", "refuse_objects", "seconds_left", "whole",
]  # fmt: skip

T = TypeVar("T")
#: The names of the fields of a structure, in the format of a buffer.
_FIELD_NAMES = re.compile(":[^:]*:")


def whole(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """The value as an int: an int, or an object with `__index__`, but no bool.

    Args:
        name: Of the argument.
        value: Its value.
        low: The least that it may be; None for no bound.
        high: The most.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is out of bounds.
    """
    number: int = value
    if type(value) is not int:
        if isinstance(value, bool):
            msg = f"{name} has to be a whole number, not {value!r}"
            raise TypeError(msg)
        try:
            number = index(value)  # of the class int itself
        except TypeError:
            msg = f"{name} has to be a whole number, not {value!r}"
            raise TypeError(msg) from None
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"{'' if low is None else low}..{'' if high is None else high}"
        msg = f"{name} is {number}, not in {bounds}"
        raise ValueError(msg)
    return number


def fitting(name: str, value: Any, bits: int) -> int:
    """The number, if it fits into an unsigned field of `bits` bits.

    Raises:
        ValueError: It does not.
        TypeError: It is no whole number.
    """
    if type(value) is int and not value >> bits:  # a request has many numbers
        return value
    number = whole(name, value)
    if not 0 <= number < 1 << bits:
        msg = f"{name} {number} does not fit into {bits} bits"
        raise ValueError(msg)
    return number


def check_seconds(name: str, value: Any, *, zero: bool = False, none: bool = True) -> None:
    """Raise unless the value is a time limit.

    Args:
        name: Of the argument.
        value: Its value, seconds.
        zero: Whether 0 is allowed.
        none: Whether None is allowed.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, not a number, or 0.
    """
    if (type(value) is float and value > 0) or (value is None and none):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"{name} has to be a number of seconds, not {value!r}"
        raise TypeError(msg)
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        bound = "negative" if zero else "not positive"
        msg = f"{name} {value} is {bound}"
        raise ValueError(msg)


def seconds_left(name: str, value: Any) -> float:
    """The time limit of a wait in seconds, 0 for a negative number.

    A limit may be the time that is left until a deadline.  As in asyncio, a call after the deadline
    is no mistake: the wait then ends with its TimeoutError at once.

    Raises:
        TypeError: It is no number.
        ValueError: It is NaN.
    """
    if isinstance(value, int | float) and value < 0:
        return 0.0
    check_seconds(name, value, zero=True, none=False)
    seconds: float = value
    return seconds


def check_kind(name: str, value: Any, kind: type[Any], *, none: bool = True) -> None:
    """Raise unless the value is of the class `kind`.

    Raises:
        TypeError: It is of another class; or it is None, and `none` is false.
    """
    if not isinstance(value, kind) and not (none and value is None):
        # Not its repr: a configuration has twenty fields, and bytes may be a key.
        msg = f"{name} has to be a {kind.__name__}, not {_kind_of(value)}"
        raise TypeError(msg)


def name_of(function: Any) -> str:
    """The name of a function of the program, for a line in the log."""
    while not hasattr(function, "__qualname__") and isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name


def check_awaitable(name: str, result: Any) -> None:
    """Raise unless the result of a function can be awaited.

    Raises:
        TypeError: It cannot.
    """
    if not isinstance(result, Awaitable):
        kind = _kind_of(result)
        msg = f"{name} has to be a coroutine function (`async def`): its result is {kind}"
        raise TypeError(msg)


def no_buffer(name: str, value: Any) -> TypeError:
    """The exception for a value without a buffer where bytes are sent, with a hint."""
    remedy = "; encode it, as in text.encode()" if isinstance(value, str) else ""
    msg = (
        f"{name} has to be bytes, bytearray, memoryview or another object with the buffer "
        f"protocol, not {_kind_of(value)}{remedy}"
    )
    return TypeError(msg)


def refuse_objects(name: str, view: memoryview) -> None:
    """Raise if the bytes of a buffer are references to Python objects.

    Those bytes are addresses, which are of no use to a peer; and the interpreter would follow bytes
    of a peer that replaced them.

    Raises:
        TypeError: An item of the buffer is, or contains, a reference.
    """
    if "O" in view.format and "O" in _FIELD_NAMES.sub("", view.format):
        msg = f"{name} has references to Python objects in it: use an array of numbers or of bytes"
        raise TypeError(msg)


def _kind_of(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def parts_of(name: str, value: Any) -> list[memoryview]:
    """The bytes of a buffer, or of each buffer in a list or tuple; as `bytes_of`.

    Raises:
        TypeError, ValueError: As `bytes_of`.
    """
    if isinstance(value, list | tuple):
        return [bytes_of(f"item {n} of {name}", each) for n, each in enumerate(value)]
    return [bytes_of(name, value)]


def bytes_of(name: str, value: Any, *, writable: bool = False) -> memoryview:
    """The bytes of a buffer, as a flat view; the caller may release it.

    Args:
        name: Of the argument.
        value: A contiguous buffer.
        writable: Whether it is to be written to.

    Raises:
        TypeError: It has no buffer, or is an array of Python objects, or a masked array.
        ValueError: It is not contiguous.
        BufferError: It is read-only, and is to be written to; or it gives no access to its bytes.
    """
    refuse_masked(name, value)
    try:
        view = memoryview(value)  # not bytes(5), which are five zeros
    except (TypeError, ValueError, BufferError) as exc:
        if has_memory(value):
            view = view_of(name, value, refused=not isinstance(exc, TypeError))
        elif isinstance(exc, TypeError):
            raise no_buffer(name, value) from None
        else:
            raise
    with view:
        refuse_objects(name, view)
        if not view.c_contiguous:
            msg = (
                f"{name} has to be contiguous: copy it, by numpy.ascontiguousarray() or by bytes()"
            )
            raise ValueError(msg)
        if writable and view.readonly:
            msg = "cannot read into a read-only buffer"
            raise BufferError(msg)
        if not view.nbytes:
            return memoryview(b"")  # of whatever format; an empty view cannot be cast
        return view.cast("B")


def payload_of(name: str, value: Any, most: int) -> bytes:
    """Bytes that travel with a handshake, as bytes.

    Args:
        name: Of the argument.
        value: A contiguous buffer.
        most: Bytes that there is room for.

    Raises:
        TypeError: It has no buffer, or an array of Python objects.
        ValueError: It is too long, or not contiguous.
    """
    data = value if type(value) is bytes else bytes(bytes_of(name, value))
    if len(data) > most:
        msg = f"{name} of {len(data)} bytes does not fit: there is room for {most}"
        raise ValueError(msg)
    return data
