"""Whether registers of floating-point numbers survive other processes, and handlers of signals.

Prints "equal" if they do.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys


def total(count: int) -> float:
    """A sum that keeps the registers busy."""
    return math.fsum(math.sqrt(number) * 1.0000001 for number in range(1, count))


def main() -> None:
    """Add in three processes at a time, interrupted again and again."""
    wanted = total(100_000)
    handled: list[float] = []
    signal.signal(signal.SIGALRM, lambda *_: handled.append(total(50)))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    others = []
    if len(sys.argv) == 1:
        words = (sys.executable, "-I", "-S", __file__, "other")
        others = [subprocess.Popen(words) for _ in range(2)]
    for _ in range(4):
        assert total(100_000) == wanted
    # At its end Python gives the signal its default action back, which ends the process.
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert handled
    assert set(handled) == {total(50)}
    assert [other.wait(timeout=60) for other in others] == [0] * len(others)
    if not sys.argv[1:]:
        print("equal")


if __name__ == "__main__":
    main()
