"""The figures of a measurement, and how they are printed: perftest's columns and names.

Every sample is kept and sorted, so that percentiles are exact; perftest does the same.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiordma.cli.perf.options import Plan

__all__ = [
    "BW_HEADER", "LAT_HEADER", "Flow", "Usage", "bw_row", "flow_figures", "header", "lat_figures",
    "lat_row", "peak_per_second",
]  # fmt: skip

LAT_HEADER = (
    " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]"
    "    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]"
)
BW_HEADER = " #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]"
_MEBI = 1 << 20
_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time of one side.

    Attributes:
        user: Seconds in the program and its libraries.
        system: Seconds in the kernel on its behalf.
    """

    user: float
    system: float

    def per(self, messages: int) -> dict[str, float]:
        """Microseconds a message."""
        count = max(1, messages)
        return {
            "user": round(self.user * 1e6 / count, 3),
            "system": round(self.system * 1e6 / count, 3),
        }


@dataclass(frozen=True, slots=True)
class Flow:
    """The result of a bandwidth test.

    Attributes:
        messages: Number of messages.
        seconds: From the first post to the last completion.
        peak: Messages a second of the fastest stretch; see `peak_per_second`.
    """

    messages: int
    seconds: float
    peak: float


def lat_figures(size: int, stamps: Sequence[int], *, half: bool) -> dict[str, Any]:
    """The figures of a latency test.

    Args:
        size: Bytes of a message.
        stamps: The time at which each iteration began, and the last ended, in nanoseconds.
        half: Whether a sample is half of an iteration.

    Raises:
        ValueError: No iteration.
    """
    if len(stamps) < 2:
        msg = "there is no latency without an iteration"
        raise ValueError(msg)
    samples = array("q", (after - before for before, after in itertools.pairwise(stamps)))
    ordered = sorted(samples)
    unit = 2000.0 if half else 1000.0
    count = len(ordered)
    average = sum(ordered) / count
    variance = sum((one - average) ** 2 for one in ordered) / count

    def at(percent: float) -> float:
        return round(ordered[max(0, math.ceil(count * percent / 100) - 1)] / unit, 3)

    return {
        "MsgSize": size,
        "n_iterations": count,
        "t_min": round(ordered[0] / unit, 3),
        "t_max": round(ordered[-1] / unit, 3),
        "t_typical": at(50),
        "t_avg": round(average / unit, 3),
        "t_stdev": round(math.sqrt(variance) / unit, 3),
        "percentile_50": at(50),
        "percentile_90": at(90),
        "percentile_99": at(99),
        "percentile_99.9": at(99.9),
        "samples_ns": [one // 2 if half else one for one in samples],
    }


def flow_figures(size: int, flow: Flow, *, gbits: bool) -> dict[str, Any]:
    """The figures of a bandwidth or rate test; `gbits` for Gb/s instead of MiB/s."""
    rate = flow.messages / flow.seconds
    scale = size * 8 / _GIGA if gbits else size / _MEBI
    return {
        "MsgSize": size,
        "n_iterations": flow.messages,
        "BW_peak": round(max(flow.peak, rate) * scale, 6),
        "BW_average": round(rate * scale, 6),
        "MsgRate": round(rate / 1e6, 9),
        "seconds": round(flow.seconds, 9),
    }


def peak_per_second(posted: Sequence[int], completed: Sequence[int], weight: int) -> float:
    """Messages a second of the fastest stretch, as perftest counts them.

    A stretch begins when one of its lists is posted and ends when a later one, or the same, has
    completed.  perftest tries all pairs; the same minimum is found here in a few passes: each
    finds the best stretch for an assumed rate, whose own rate is the next assumption, until nothing
    is better.

    Args:
        posted: When each list was posted, nanoseconds.
        completed: When each had completed.
        weight: Messages of a list.
    """
    count = min(len(posted), len(completed))
    if not count:
        return 0.0
    pace = (completed[count - 1] - posted[0]) / count
    for _ in range(32):
        ahead, begin = -math.inf, 0
        best, first, last = math.inf, 0, count - 1
        for i in range(count):
            head = posted[i] - pace * i
            if head > ahead:
                ahead, begin = head, i
            tail = completed[i] - pace * (i + 1) - ahead
            if tail < best:
                best, first, last = tail, begin, i
        better = (completed[last] - posted[first]) / (last - first + 1)
        if better >= pace:
            break
        pace = better
    return weight * 1e9 / max(pace, 1e-9)


def header(plan: Plan, *, gbits: bool) -> str:
    """The line above the figures."""
    if plan.metric == "lat":
        return LAT_HEADER
    return BW_HEADER.format(unit="Gb/sec" if gbits else "MiB/sec")


def lat_row(figures: dict[str, Any]) -> str:
    """One line below `LAT_HEADER`."""
    names = ("t_min", "t_max", "t_typical", "t_avg", "t_stdev", "percentile_99", "percentile_99.9")
    widths = (15, 15, 17, 15, 17, 23, 25)
    numbers = "".join(
        f"{figures[name]:>{width}.2f}" for name, width in zip(names, widths, strict=True)
    )
    return f" {figures['MsgSize']:<7} {figures['n_iterations']:<10}{numbers}"


def bw_row(figures: dict[str, Any]) -> str:
    """One line below `BW_HEADER`."""
    return (
        f" {figures['MsgSize']:<11}{figures['n_iterations']:<15}{figures['BW_peak']:<20.2f}"
        f"{figures['BW_average']:<23.2f}{figures['MsgRate']:.6f}"
    )
