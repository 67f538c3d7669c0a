"""The compiled types of the data path; see core.h, and module.c for the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "EVENT_ARRIVED", "EVENT_IDLE", "EVENT_OPERATED", "INDEX_BITS", "LARGEST_REQUEST",
    "STREAM_CONTROLS", "STREAM_CONTROL_SIZE", "STREAM_DATA", "STREAM_FAILED", "STREAM_IDLE",
    "STREAM_MESSAGE", "STREAM_PROBE", "STREAM_RECV", "STREAM_ROOM", "SUB_OPERATE", "SUB_READ",
    "SUB_RECV", "SUB_SHIFT", "WANT_SENT", "CMEvents", "Drain", "Held", "Loan", "Message",
    "MessageState", "Operation", "Owner", "Parked", "QueueState", "Readable", "Registration",
    "StreamState", "Wakeup", "alarm_open", "alarm_set", "copy", "crc32c", "crc32c_hardware",
    "crc32c_table",
]  # fmt: skip

try:
    from aiordma._core._compiled import (
        EVENT_ARRIVED,
        EVENT_IDLE,
        EVENT_OPERATED,
        INDEX_BITS,
        LARGEST_REQUEST,
        STREAM_CONTROL_SIZE,
        STREAM_CONTROLS,
        STREAM_DATA,
        STREAM_FAILED,
        STREAM_IDLE,
        STREAM_MESSAGE,
        STREAM_PROBE,
        STREAM_RECV,
        STREAM_ROOM,
        SUB_OPERATE,
        SUB_READ,
        SUB_RECV,
        SUB_SHIFT,
        WANT_SENT,
        CMEvents,
        Drain,
        Held,
        Loan,
        Message,
        MessageState,
        Operation,
        Owner,
        Parked,
        QueueState,
        Readable,
        Registration,
        StreamState,
        Wakeup,
        alarm_open,
        alarm_set,
        copy,
        crc32c,
        crc32c_hardware,
        crc32c_table,
    )
except ImportError:
    # Not built, or rdma-core's libraries are not there.  Then the module that binds these cannot be
    # loaded either, so that nothing will ever arrive; but aiordma can be imported, and tells why.
    if not TYPE_CHECKING:
        for _name in __all__:
            globals()[_name] = 0 if _name.isupper() else None

        class Owner:
            """Stands in for the compiled class."""

            __slots__ = ("_children", "_ending", "_handle", "_outcome", "_parents", "_state")

            @staticmethod
            def _set_rules(*rules: object) -> None:
                pass
