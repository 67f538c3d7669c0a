"""CPython's tests over RDMA: like all on a device, they may not need the safety poll."""

from __future__ import annotations

from tests.device.shared import no_lost_events

__all__ = ["no_lost_events"]
