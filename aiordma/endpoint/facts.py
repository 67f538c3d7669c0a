"""Descriptions of a connection: for `aiordma.metrics`, and for `repr`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiordma.endpoint.link import Link
from aiordma.link.adapter_side import reason_of

__all__ = ["line", "seen"]


def seen(
    link: Link, facts: Mapping[str, Any], stage: str, cause: BaseException | None
) -> dict[str, Any]:
    """The connection as `aiordma.metrics` shows it.  In any thread, so without asking the adapter.

    Args:
        link: The adapter's side of the connection.
        facts: What `Connection.get_extra_info` knows.
        stage: "connecting", "open", "closing" or "closed".
        cause: Why the connection broke, if it did.
    """
    state = link.state
    receive_slots, send_slots = link.slots.counts
    return {
        **facts,
        "number": link.number,
        "state": stage,
        "device": link.context.name,
        "qpn": link.qp.num,
        "cause": None if cause is None else reason_of(cause),
        **state.counters,
        "waiting_to_be_received": state.arrived,
        "waiting_to_be_sent": state.queued,
        "under_way": max(0, link.under_way),
        "credits": min(max(0, state.credits), 0xFFFF),
        "receive_slots": receive_slots,
        "send_slots": send_slots,
        "pinned_bytes": 0 if link.closed else link.pinned_bytes,
    }


def line(number: int, facts: Mapping[str, Any], stage: str, cause: BaseException | None) -> str:
    """The connection in one line, for `repr`; the arguments are those of `seen`."""
    why = "" if cause is None else f" cause={type(cause).__name__}: {reason_of(cause)}"
    return (
        f"<Connection #{number} {stage} peer={facts.get('peername')} "
        f"device={facts.get('device')}{why}>"
    )
