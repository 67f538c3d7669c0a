"""Make a failure smaller: the same failure, with fewer clients, messages, bytes and faults.

Each choice of a run has a name, and a case can bound it (`Case.most`).  A bound is kept if the run
still fails in the same way, in one of a few orders: other choices are the same then, but what
happens meanwhile comes in another order.  Each run is a process of its own, so that a failure that
ends the process can be made smaller, too.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.simulation.run import FAILED, PASSED, enter, read
from tests.simulation.world import Case

__all__ = ["shrink"]

#: Orders that are tried for each bound.
_ORDERS = 3
_DRAWN = re.compile(r"^drawn (\{.*\})$", re.MULTILINE)
_NUMBERS = re.compile(r"\d+")


def _kind(output: str) -> str:
    """What a failure is, without its numbers: its first words, or the last line of a traceback."""
    lines = [line.strip(" |+-") for line in output.splitlines()]
    first = next((line for line in lines if line.startswith("FAILED")), "ended")
    reason = first.partition("): ")[2].split("; ")[0]
    if "Traceback" in reason:
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Stuck)\b", line)]
        reason = errors[-1] if errors else reason
    return _NUMBERS.sub("N", reason)


@dataclasses.dataclass
class _Try:
    """What came of a case: "" if it passes."""

    kind: str
    drawn: dict[str, int]


def _run(case: Case) -> _Try:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(dataclasses.asdict(case), file)
        file.flush()
        status, output, ended = enter([f"--replay={file.name}"], quiet=True)
    drawn = _DRAWN.search(output)
    if status == PASSED:
        return _Try("", {})
    kind = _kind(output) if status == FAILED and ended is None else f"status {status}"
    return _Try(kind, json.loads(drawn[1]) if drawn else {})


def _lower(value: int) -> Iterator[int]:
    """Bounds to try instead of a value: nothing, then halves from below."""
    tried = 0
    while tried < value:
        yield tried
        tried = max(tried + 1, (tried + value) // 2) if tried else max(1, value // 8)


def shrink(file: Path) -> int:
    """Lower all bounds of a failure as far as it goes, and write it back; the exit status."""
    case, _ = read(file)
    now = _run(case)
    if not now.kind:
        print(f"{file}: it does not fail")
        return FAILED
    print(f"it fails: {now.kind}")
    runs, better = 1, True
    while better:
        better = False
        for name in sorted(now.drawn, key=lambda each: -now.drawn[each]):
            for bound in _lower(now.drawn.get(name, 0)):
                most = {**case.most, name: bound}
                tries = (dataclasses.replace(case, most=most, order=n) for n in range(_ORDERS))
                for smaller in tries:
                    found = _run(smaller)
                    runs += 1
                    if found.kind == now.kind:
                        break
                else:
                    continue
                case, now, better = smaller, found, True
                file.write_text(json.dumps(dataclasses.asdict(case), indent=1) + "\n")
                break
    told = ", ".join(f"{name} {value}" for name, value in now.drawn.items() if value)
    print(f"{runs} runs; what is left: {told or 'nothing'}")
    print(f"  again: python -m tests.simulation.run --replay {file}")
    return PASSED
