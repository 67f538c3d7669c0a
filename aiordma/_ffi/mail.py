"""Mail and MessageBase, the data path of a connection; see mail.c."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Mail", "MessageBase"]

if TYPE_CHECKING:
    from aiordma._ffi._mail import Mail, MessageBase
else:
    try:
        from aiordma._ffi._mail import Mail, MessageBase
    except ImportError:
        # Not built.  Then neither is the module that binds the RDMA libraries, so that no message
        # will ever arrive; but aiordma can be imported, and tells why.
        Mail = None

        class MessageBase:
            """Stands in for the compiled class."""

            __slots__ = ()
