"""The compiled types of the data path; see fast.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "CMEvents", "Held", "Loan", "Mail", "Message", "Operation", "Owner", "Parked", "Readable",
    "Reader", "Registration", "StreamCalls", "Wakeup", "alarm_open", "alarm_set",
]  # fmt: skip

try:
    from aiordma._ffi._fast import (
        CMEvents,
        Held,
        Loan,
        Mail,
        Message,
        Operation,
        Owner,
        Parked,
        Readable,
        Reader,
        Registration,
        StreamCalls,
        Wakeup,
        alarm_open,
        alarm_set,
    )
except ModuleNotFoundError:
    # Not built.  Then neither is the module that binds the RDMA libraries, so that nothing will
    # ever arrive; but aiordma can be imported, and tells why.
    if not TYPE_CHECKING:
        alarm_open = alarm_set = CMEvents = Held = Loan = None
        Mail = Message = Operation = Parked = Readable = Reader = Registration = None
        StreamCalls = Wakeup = None

        class Owner:
            """Stands in for the compiled class."""

            __slots__ = ("_children", "_ending", "_handle", "_outcome", "_parents", "_state")

            @staticmethod
            def _set_rules(*rules: object) -> None:
                pass
