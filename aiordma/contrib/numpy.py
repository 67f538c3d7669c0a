"""numpy arrays as messages, with dtype, shape and order; large arrays are not copied.

Needs numpy: `pip install aiordma[numpy]`.  The format is on the page docs/numpy.md.

Theory of operation
    A message has a header, and the bytes of the array behind it.  `Connection.send` copies up to
    256 KiB anyhow.  The header of a larger array is a message of its own, and the bytes are the
    next: the peer's adapter reads them out of the array that is sent, and `recv_into` puts them
    into the array that is received.  Nothing may come between the two, so only one task at a time
    sends, and one receives, arrays of a connection.

    A header that has arrived is kept until its array was received: by the next call, if this call
    is canceled.  After the header of a larger array its bytes are sent, whatever becomes of the
    task.

    The peer may send anything.  No memory is allocated before the dtype and the shape are known to
    be those of an array, and to match the size of the message.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import struct
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy
import numpy.typing

from aiordma._core import Message
from aiordma.endpoint.connection import Connection
from aiordma.errors import MessageTooLargeError, RdmaError
from aiordma.loop.lasting import result_of

__all__ = ["ArrayError", "recv_array", "send_array"]

Array = numpy.typing.NDArray[Any]

#: A larger array has a message of its own: the library would not copy it.
_COPIED = 1 << 18
_MAGIC = b"NPA1"
_HEAD = struct.Struct(">4sBxH")  # the magic, flags, bytes of the text
_BYTES_FOLLOW = 1  # a flag: the bytes are the next message
_ALIGNMENT = 64
_MOST_TEXT = 0xFFFF
_MOST_DIMENSIONS = 32
#: The names of dtypes; numpy would take more, such as words with commas.
_NAME = re.compile(r"[<>|=]?[biufcmMSUV][0-9]{0,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")


class ArrayError(RdmaError, ValueError):
    """The peer's message is not a numpy array; it was taken."""

    hint = "does the peer use aiordma.contrib.numpy.send_array, and send nothing in between?"


class _Header(NamedTuple):
    dtype: numpy.dtype[Any]
    shape: tuple[int, ...]
    order: str  # "C" or "F"
    follows: bool

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Arrived(NamedTuple):
    """An array whose header has arrived.

    Attributes:
        message: The message with its bytes; None if they are the next.
        start: Where they begin.
    """

    header: _Header
    message: Message | None
    start: int


class _Ends:
    """The arrays of one connection."""

    def __init__(self) -> None:
        self.sending = asyncio.Lock()
        self.receiving = asyncio.Lock()
        self.arrived: _Arrived | None = None
        self.task: asyncio.Task[None] | None = None  # that sends


_ends: WeakKeyDictionary[Connection, _Ends] = WeakKeyDictionary()


def _ends_of(connection: Connection) -> _Ends:
    return _ends.setdefault(connection, _Ends())


async def send_array(connection: Connection, array: Array) -> None:
    """Send an array; the peer receives it by `recv_array`.

    The bytes of a contiguous array, in C or in Fortran order, are sent as they are; any other is
    copied first, into C order.  An array of up to 256 KiB is one message; a larger one is two, and
    its bytes are not copied.

    Args:
        connection: The connection.  Other messages of this side must not come between those of an
            array: arrays of several tasks do not, but `send` in another task may.
        array: The array, of any dtype without Python objects.

    Returns as `Connection.send` does: then the array may be changed.

    Raises:
        TypeError: Not an array; a masked array; an array of objects; or a dtype that a header
            cannot describe, such as one of no bytes, with titles, or with over 64 KiB of names.
        MessageTooLargeError: The array has more bytes than the peer takes; nothing was sent.
        ResourceClosedError, ConnectionLostError, TimeoutError: As `Connection.send`.

    Cancellation: nothing was sent; or an array of more than 256 KiB is sent all the same, and stays
    exported until the peer has read it, or the connection is over.
    """
    header, data = _described(array)
    ends = _ends_of(connection)
    async with ends.sending:
        if ends.task is not None:  # its call was canceled
            await asyncio.wait((ends.task,))
        if data.nbytes <= _COPIED:
            await connection.send([header, data])
            return
        connection._require_size(data.nbytes)
        task = ends.task = asyncio.get_running_loop().create_task(
            _send_both(connection, header, data)
        )
        task.add_done_callback(lambda _: _sent(ends))
        await result_of(task)


async def _send_both(connection: Connection, header: bytes, data: Array) -> None:
    await connection.send(header)
    await connection.send(data)


def _sent(ends: _Ends) -> None:
    ends.task = None


async def recv_array(connection: Connection, out: Array | None = None) -> Array:
    """Receive the next array of the peer.

    An array of more than 256 KiB is read by the adapter right into its place; see
    `Connection.recv_into` for the cases in which it is copied.

    Args:
        connection: The connection.
        out: The array to receive into, with the dtype and the shape of the next array.  If it is
            not contiguous in the order of that array, the bytes are copied.

    Returns:
        `out`; or a new array, in the order of the peer's array, C or Fortran.

    Raises:
        TypeError: `out` is not an array, or has objects.
        ValueError: `out` is read-only, or has another dtype or shape than the next array, which is
            still the next.
        ArrayError: The peer's message is not an array.  It was taken: abort the connection, unless
            the programs have agreed on something else.
        MemoryError: There is no memory for the array, which is still the next.
        ConnectionEndedError, ResourceClosedError, ConnectionLostError: As `Connection.recv`.

    Cancellation: no array is lost; anything may be in `out`.
    """
    if out is not None:
        _check_out(out)
    ends = _ends_of(connection)
    async with ends.receiving:
        arrived = ends.arrived
        if arrived is None:
            arrived = ends.arrived = await _next(connection)
        header = arrived.header
        if out is not None and (out.dtype != header.dtype or out.shape != header.shape):
            msg = (
                f"out is {out.dtype} {out.shape}, the next array {header.dtype} {header.shape}: "
                "receive it without out, or with another"
            )
            raise ValueError(msg)
        if arrived.message is None:
            await _check_bytes(connection, ends, header)
        try:
            array = _place(header, out)
        except ArrayError:  # it is no array, and is not the next any more
            ends.arrived = None
            if arrived.message is not None:
                arrived.message.release()
            raise
        if arrived.message is None:
            await connection.recv_into(_flat(array))
        else:
            with memoryview(arrived.message) as view:
                _flat(array)[:] = view[arrived.start :]
            arrived.message.release()
        ends.arrived = None
        if out is None:
            return array
        if array is not out:
            out[...] = array
        return out


async def _next(connection: Connection) -> _Arrived:
    """The next header, and the message that has the bytes, if it is the same.

    Raises:
        ArrayError: The message has no header; it was taken.
    """
    message = await connection.recv()
    try:
        with memoryview(message) as view:
            header, start = _read(view)
            here = len(view) - start
        if here != (0 if header.follows else header.size):
            size = "in the next message" if header.follows else f"{header.size} bytes"
            msg = f"an array with {size} has {here} bytes behind its header"
            raise ArrayError(msg)
    except BaseException:
        message.release()
        raise
    if header.follows:
        message.release()
        return _Arrived(header, None, 0)
    return _Arrived(header, message, start)


async def _check_bytes(connection: Connection, ends: _Ends, header: _Header) -> None:
    """Wait for the message with the bytes of an array, and compare its size; it stays the next.

    Raises:
        ArrayError: It has another size.
    """
    try:
        size = await connection.recv_into(bytearray(1))
    except MessageTooLargeError as exc:
        size = exc.size
    if size != header.size:
        ends.arrived = None
        msg = f"an array of {header.size} bytes is followed by a message of {size}"
        raise ArrayError(msg)


def _check_out(out: Any) -> None:
    if not isinstance(out, numpy.ndarray):
        msg = f"out has to be a numpy array, not a {type(out).__name__}"
        raise TypeError(msg)
    if out.dtype.hasobject:
        msg = f"out has objects: {out.dtype}"
        raise TypeError(msg)
    if not out.flags.writeable:
        msg = "out is read-only"
        raise ValueError(msg)


def _place(header: _Header, out: Array | None) -> Array:
    """The array that the bytes are received into: `out`, if its bytes lie in the same order.

    Raises:
        ArrayError: numpy has no array of this shape.
    """
    if out is not None and (
        out.flags.c_contiguous if header.order == "C" else out.flags.f_contiguous
    ):
        return out
    try:
        return numpy.empty(header.shape, header.dtype, "F" if header.order == "F" else "C")
    except (ValueError, TypeError) as exc:
        msg = f"no array has the shape {header.shape}: {exc}"
        raise ArrayError(msg) from exc


def _flat(array: Array) -> Array:
    """The bytes of a contiguous array; a buffer has no format for the dtypes of times."""
    if not array.nbytes:
        return numpy.empty(0, numpy.uint8)
    flat = array if array.flags.c_contiguous else array.T
    return flat.reshape(-1).view(numpy.uint8)


def _described(array: Any) -> tuple[bytes, Array]:
    """The header of an array, and its bytes.

    Raises:
        TypeError: As `send_array`.
    """
    if not isinstance(array, numpy.ndarray) or isinstance(array, numpy.ma.MaskedArray):
        msg = f"not a numpy array but a {type(array).__name__}: convert it by numpy.asarray()"
        if isinstance(array, numpy.ma.MaskedArray):
            msg = "the mask would be lost: send `array.filled()`, or `array.data` and `array.mask`"
        raise TypeError(msg)
    array = numpy.asarray(array)
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    words = {"descr": _descr_of(array.dtype), "shape": array.shape, "order": order}
    follows = array.nbytes > _COPIED
    text = json.dumps(words, separators=(",", ":")).encode()
    text = text.ljust(-(_HEAD.size + len(text)) % _ALIGNMENT + len(text))
    if len(text) > _MOST_TEXT:
        msg = f"the dtype of the array takes {len(text)} bytes to describe, more than {_MOST_TEXT}"
        raise TypeError(msg)
    header = _HEAD.pack(_MAGIC, _BYTES_FOLLOW * follows, len(text)) + text
    return header, _flat(array if contiguous else numpy.ascontiguousarray(array))


def _descr_of(dtype: numpy.dtype[Any]) -> Any:
    """The dtype as numpy's files describe it, for JSON.

    Raises:
        TypeError: That does not describe all of it.
    """
    try:
        if not dtype.hasobject and dtype.itemsize:
            descr = json.loads(json.dumps(numpy.lib.format.dtype_to_descr(dtype)))
            if _dtype_of(descr) == dtype:
                return descr
    except (ValueError, TypeError, RecursionError):
        pass
    msg = (
        f"an array of {dtype} cannot be sent: it has objects, no bytes, or no form for a file; "
        "send numbers of another package as a view, such as array.view('u2')"
    )
    raise TypeError(msg)


def _read(view: memoryview) -> tuple[_Header, int]:
    """The header in a message, and where the bytes begin.

    Raises:
        ArrayError: The message has no valid header.
    """
    if len(view) < _HEAD.size or view[: len(_MAGIC)] != _MAGIC:
        msg = f"a message of {len(view)} bytes does not begin with the header of an array"
        raise ArrayError(msg)
    _, flags, length = _HEAD.unpack_from(view)
    start = _HEAD.size + length
    if start > len(view) or flags & ~_BYTES_FOLLOW:
        msg = "the header of an array is cut off, or of another version"
        raise ArrayError(msg)
    try:
        words = json.loads(bytes(view[_HEAD.size : start]))
        header = _Header(
            _dtype_of(words["descr"]), _shape_of(words["shape"]), words["order"],
            bool(flags & _BYTES_FOLLOW),
        )  # fmt: skip
    except Exception as exc:  # of json, and of numpy, whatever they raise
        msg = f"the header of an array is wrong: {exc}"
        raise ArrayError(msg) from exc
    if header.order not in ("C", "F") or header.dtype.hasobject or not header.dtype.itemsize:
        msg = f"no array of {header.dtype} in order {header.order!r} is received"
        raise ArrayError(msg)
    if header.follows and header.size <= _COPIED:
        msg = f"an array of {header.size} bytes does not follow its header"
        raise ArrayError(msg)
    return header, start


def _shape_of(words: Any) -> tuple[int, ...]:
    """The shape in a header.

    Raises:
        ValueError: It is not a shape.
    """
    if not isinstance(words, list) or len(words) > _MOST_DIMENSIONS:
        msg = "no shape"
        raise ValueError(msg)
    if any(type(each) is not int or not 0 <= each < 1 << 48 for each in words):
        msg = f"no shape: {words}"
        raise ValueError(msg)
    return tuple(words)


def _dtype_of(descr: Any) -> numpy.dtype[Any]:
    """The dtype in a header.

    Raises:
        ValueError, TypeError: It is not a dtype; numpy may raise others.
    """
    _check_names(descr)
    return numpy.lib.format.descr_to_dtype(descr)


def _check_names(descr: Any) -> None:
    """Raise ValueError unless the names of dtypes in it are those of numbers, times and bytes."""
    if isinstance(descr, list):
        for field in descr:
            if not isinstance(field, list) or len(field) not in (2, 3):
                msg = f"no field: {field}"
                raise ValueError(msg)
            _check_names(field[1])
            if len(field) == 3:
                _shape_of(field[2])
    elif not isinstance(descr, str) or _NAME.fullmatch(descr) is None:
        msg = f"no dtype: {descr!r}"
        raise ValueError(msg)
