"""The options of one test, checked, and as they travel to the server.

The client sends the server all options of the test, so that both ends cannot disagree.  The server
checks them by the same rules, because any program may connect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

__all__ = ["ALL_SIZES", "APIS", "LOOPS", "METRICS", "TESTS", "WAITS", "Plan"]

TESTS = ("send", "write", "read", "atomic", "stream")
METRICS = ("lat", "bw", "rate")
LOOPS = ("asyncio", "uvloop")
WAITS = ("event", "spin", "adaptive")
APIS = ("connection", "native", "protocol", "streams")

#: The sizes of `--all`: 2 bytes to 8 MiB, as perftest's `-a`.
ALL_SIZES = tuple(1 << exponent for exponent in range(1, 24))

_DEFAULT_SIZE = {"lat": 2, "bw": 65536, "rate": 64}
_MAX_SIZE = 1 << 30
_ATOMIC_SIZE = 8
_WARM_UP = 100  # round trips, or one depth of a bandwidth test
_BATCH = 16


def _apis(test: str, metric: str) -> tuple[str, ...]:
    """The interfaces that can run the test, the default first."""
    if test == "stream":
        return ("protocol", "streams")
    if metric == "lat":
        return ("connection", "native")
    return ("native", "connection")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One test, with nothing left to be chosen.

    Attributes:
        test: Kind of the requests: one of `TESTS`.
        metric: Quantity to measure: one of `METRICS`.
        api: Which of aiordma's interfaces to use.
        wait: How both ends wait for completions: one of `WAITS`.
        sizes: Bytes of a message; one measurement for each.
        iters: Iterations of a measurement; without meaning where `duration_s` is set.
        duration_s: Seconds of a measurement, or None.
        qps: Connections.
        tx_depth: Requests under way on each connection.
        rx_depth: Receives posted on each connection.
        post_list: Requests with one doorbell.
        warm_up: Iterations before each measurement.
        timeout_s: Seconds for connecting, and for each measurement in addition to `duration_s`.
    """

    test: str
    metric: str
    api: str
    wait: str
    sizes: tuple[int, ...]
    iters: int
    duration_s: float | None
    qps: int
    tx_depth: int
    rx_depth: int
    post_list: int
    warm_up: int
    timeout_s: float

    @classmethod
    def make(
        cls,
        test: str,
        metric: str,
        *,
        api: str | None = None,
        wait: str = "event",
        size: int | None = None,
        all_sizes: bool = False,
        iters: int = 1000,
        duration_s: float | None = None,
        qps: int = 1,
        tx_depth: int | None = None,
        rx_depth: int = 512,
        post_list: int | None = None,
        warm_up: int | None = None,
        timeout_s: float = 300.0,
    ) -> Self:
        """A plan from the options of a command line, with a value for each None.

        Raises:
            ValueError: The options contradict each other.
        """
        if all_sizes and size is not None:
            msg = "--size is one size, --all are all: give one of them"
            raise ValueError(msg)
        if test == "atomic":
            if all_sizes or size not in (None, _ATOMIC_SIZE):
                msg = f"an atomic operation has {_ATOMIC_SIZE} bytes: leave --size and --all out"
                raise ValueError(msg)
            size = _ATOMIC_SIZE
        if metric == "lat":
            for name, value in (("--tx-depth", tx_depth), ("--post-list", post_list)):
                if value not in (None, 1):
                    msg = f"lat has one message under way: leave {name} out"
                    raise ValueError(msg)
            tx_depth = 1
        depth = 128 if tx_depth is None else tx_depth
        one = _DEFAULT_SIZE[metric] if size is None else size
        if post_list is None:
            post_list = max(1, min(_BATCH, depth // 4))
            if test == "stream" or api not in (None, "native"):
                post_list = 1
        plan = cls(
            test=test,
            metric=metric,
            api=_apis(test, metric)[0] if api is None else api,
            wait=wait,
            sizes=ALL_SIZES if all_sizes else (one,),
            iters=iters,
            duration_s=duration_s,
            qps=qps,
            tx_depth=depth,
            rx_depth=rx_depth,
            post_list=post_list,
            warm_up=(_WARM_UP if metric == "lat" else depth) if warm_up is None else warm_up,
            timeout_s=timeout_s,
        )
        plan.check()
        return plan

    @classmethod
    def from_wire(cls, words: Mapping[str, Any]) -> Self:
        """The test that a client asks for.

        Raises:
            ValueError: It is not a test that can be run.
        """
        try:
            plan = cls(**{**words, "sizes": tuple(words["sizes"])})
            plan.check()
        except (TypeError, KeyError, AttributeError, OverflowError) as exc:
            msg = f"not a test: {exc}"
            raise ValueError(msg) from exc
        return plan

    def to_wire(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def check(self) -> None:
        """Check the plan.

        Raises:
            ValueError: A value is out of range, or two contradict each other.
            TypeError: A value is not a number.
        """
        for name, value, known in (
            ("TEST", self.test, TESTS),
            ("METRIC", self.metric, METRICS),
            ("--wait", self.wait, WAITS),
        ):
            if value not in known:
                msg = f"{name} is one of {', '.join(known)}, not {value!r}"
                raise ValueError(msg)
        self._check_api()
        for name, number, least, most in (
            ("--iters", self.iters, 1, 100_000_000),
            ("--qp", self.qps, 1, 1000),
            ("--tx-depth", self.tx_depth, 1, 16_000),
            ("--rx-depth", self.rx_depth, 1, 16_000),
            ("--post-list", self.post_list, 1, self.tx_depth),
            ("--warm-up", self.warm_up, 0, 1_000_000),
            *(("--size", size, 1, _MAX_SIZE) for size in self.sizes),
        ):
            if not isinstance(number, int):
                msg = f"{name} is a whole number, not {number!r}"
                raise TypeError(msg)
            if not least <= number <= most:
                msg = f"{name} is {least} to {most}, not {number}"
                raise ValueError(msg)
        if not self.sizes or len(self.sizes) > len(ALL_SIZES):
            msg = f"{len(self.sizes)} sizes"
            raise ValueError(msg)
        if self.duration_s is not None and not 0 < self.duration_s <= 86_400:
            msg = f"--duration is up to 86400 seconds, not {self.duration_s}"
            raise ValueError(msg)
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            msg = f"--timeout is a positive number of seconds, not {self.timeout_s}"
            raise ValueError(msg)
        if self.metric == "lat" and self.qps != 1:
            msg = "lat measures one connection: leave --qp out"
            raise ValueError(msg)

    def _check_api(self) -> None:
        known = _apis(self.test, self.metric)
        what = f"{self.test} {self.metric}"
        if self.api not in known:
            msg = f"--api of {what} is one of {', '.join(known)}, not {self.api!r}"
            raise ValueError(msg)
        if self.wait != "event" and self.api != "native":
            msg = f"--wait {self.wait} is for --api native; {self.api} waits for events"
            raise ValueError(msg)
        if self.post_list != 1 and self.api != "native":
            msg = f"--post-list is for --api native, not for {self.api}"
            raise ValueError(msg)
        if self.qps != 1 and self.test == "stream":
            msg = "stream measures one connection: leave --qp out"
            raise ValueError(msg)

    @property
    def is_half(self) -> bool:
        """Whether a latency is half a round trip."""
        return self.test in ("send", "stream")

    @property
    def limit_s(self) -> float:
        """Seconds that a measurement may take."""
        return self.timeout_s + (self.duration_s or 0.0)
