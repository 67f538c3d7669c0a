"""The RNR timer: the delay after which a sender tries again when no receive is posted.

InfiniBand has 32 delays, each with a code of 5 bits (IBTA 1.4, section 9.7.5.2.8, table "Encoding
for RNR NAK timer field").  The codes are not in order: 0, which the connection manager sets, is the
longest delay.
"""

from __future__ import annotations

__all__ = ["RNR_TIMERS_MS", "rnr_timer_code"]

#: Milliseconds, by code.
RNR_TIMERS_MS = (
    655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28,
    1.92, 2.56, 3.84, 5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84,
    245.76, 327.68, 491.52,
)  # fmt: skip


def rnr_timer_code(milliseconds: float) -> int:
    """The code of the shortest delay that is at least as long as `milliseconds`.

    Raises:
        TypeError: Not a number.
        ValueError: Not in 0.01..655.36 ms.
    """
    if not isinstance(milliseconds, int | float) or isinstance(milliseconds, bool):
        msg = f"an RNR timer is a number of milliseconds, not {milliseconds!r}"
        raise TypeError(msg)
    if not RNR_TIMERS_MS[1] <= milliseconds <= RNR_TIMERS_MS[0]:
        msg = f"an RNR timer of {milliseconds} ms is not in 0.01..655.36"
        raise ValueError(msg)
    fitting = (delay for delay in RNR_TIMERS_MS if delay >= milliseconds)
    return RNR_TIMERS_MS.index(min(fitting))
