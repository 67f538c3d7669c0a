"""One checker for each of the four ways in which these C libraries report failure.

The caller names the convention by choosing the function; the man page's RETURN VALUE decides.

    check_pointer     NULL, reason in errno       alloc, create, open, reg
    check_minus_one   -1, reason in errno         rdma_*, ibv_get_cq_event, ibv_query_gid, ...
    check_errno       the errno itself, positive  ibv_modify_*, ibv_query_*, ibv_destroy_*, post
    check_negative    below 0; -errno, or unspecified for ibv_poll_cq; else a count

errno is read as `ffi.errno`, at once.  cffi stores C's errno for the calling thread before it takes
the interpreter lock again, because taking that lock makes system calls of its own, and puts it back
before the next call.  So `ffi.errno` is the C function's errno until the same thread makes
its next cffi call; `ctypes.get_errno()` is something else.

Where C reports a failure without a reason the error is EIO: 0 would read "Success", and a stale
errno from an earlier call is worse than none.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from aiordma._ffi import ffi
from aiordma.errors import os_error

if TYPE_CHECKING:
    from aiordma._ffi import CData

__all__ = ["check_errno", "check_minus_one", "check_negative", "check_pointer"]

# A negative number from these says that the call failed and nothing more: providers return their
# own codes, and -2 from mlx5 is not "No such file or directory".
_UNSPECIFIED = frozenset({"ibv_poll_cq"})


def check_pointer(value: CData, verb: str) -> CData:
    """Check a call that returns NULL and sets errno on failure.

    Args:
        value: Result of the call.
        verb: Name of the C function, for the text.

    Returns:
        `value`.

    Raises:
        OSError: The subclass for errno, if `value` is NULL.
    """
    if value:
        return value
    raise os_error(ffi.errno or errno.EIO, verb)


def check_minus_one(value: int, verb: str) -> int:
    """Check a call that returns -1 and sets errno on failure.

    Args:
        value: Result of the call.
        verb: Name of the C function, for the text.

    Returns:
        `value`, 0 or the count or handle that the call returns.

    Raises:
        OSError: The subclass for errno, if `value` is negative.
    """
    if value >= 0:
        return value
    raise os_error(ffi.errno or errno.EIO, verb)


def check_errno(value: int, verb: str) -> None:
    """Check a call that returns 0, or an errno as a positive number.

    Providers do not all keep to it: the software iWARP provider returns -errno from its post calls,
    and older ones -1 with errno set.  Those failures raise too.

    Args:
        value: Result of the call.
        verb: Name of the C function, for the text.

    Raises:
        OSError: The subclass for the errno, if `value` is not 0.
    """
    if not value:
        return
    if value == -1:
        # EPERM is 1: with errno set -1 is the other convention, without it either is possible.
        raise os_error(ffi.errno or errno.EIO, verb, detail="[returned -1]")
    raise os_error(abs(value), verb)


def check_negative(value: int, verb: str) -> int:
    """Check a call that returns a count, or a number below zero on failure.

    Args:
        value: Result of the call.
        verb: Name of the C function, for the text.

    Returns:
        `value`, zero or positive.

    Raises:
        OSError: The subclass for the errno, if `value` is negative; EIO, with the number in the
            text, for a verb whose negative numbers mean nothing in particular.
    """
    if value >= 0:
        return value
    if verb in _UNSPECIFIED:
        raise os_error(errno.EIO, verb, detail=f"[returned {value}]")
    raise os_error(-value, verb)
