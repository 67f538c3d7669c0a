"""Whether the ratios are still those that were recorded.

A recorded file holds for each guarded row its ratio, the band around it, and the versions that it
was taken with.  Other versions of Python, of the kernel or of a library have other instructions:
they are named, and the comparison is made with the same band all the same.  Both directions count:
a gain that is not recorded would hide the loss that comes after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.goals import Outcome

RECORDED = Path(__file__).with_name("recorded.json")
#: Each side of the ratio: twice what two boots were seen to differ.  A row whose boots differ by
#: more has a band of its own in the file, twice theirs: where two processes take turns by chance
#: (streams, Dask), or a thousand timers fall into turns of the loop together or not (idle).
BAND = 0.02


def key(outcome: Outcome) -> str:
    """What a row is called in the file."""
    return f"{outcome.goal.figure} / {outcome.goal.beside}"


@dataclass(frozen=True)
class Compared:
    """One row: `recorded` or `now` is None if there is no such figure."""

    name: str
    better: str
    recorded: float | None
    now: float | None
    band: float

    @property
    def change(self) -> float | None:
        """By which part the ratio has changed."""
        if self.recorded is None or self.now is None:
            return None
        return self.now / self.recorded - 1

    @property
    def verdict(self) -> str:
        """In words; "ok" is the only one that passes."""
        if self.now is None:
            return "NOT MEASURED"
        if self.change is None:
            return "NOT RECORDED: record it"
        if abs(self.change) <= self.band:
            return "ok"
        slower = (self.change > 0) == (self.better == "lower")
        return "SLOWER" if slower else "FASTER: record it"

    @property
    def passed(self) -> bool:
        """Whether the ratio is within its band."""
        return self.verdict == "ok"


def compare(outcomes: Sequence[Outcome], recorded: Mapping[str, Any]) -> list[Compared]:
    """Hold the rows against what was recorded; rows that are gone are rows not measured."""
    rows = recorded.get("rows", {})
    found = []
    for outcome in outcomes:
        row = rows.get(key(outcome), {})
        ratio, band = row.get("ratio"), row.get("band", BAND)
        found.append(Compared(key(outcome), outcome.goal.better, ratio, outcome.value, band))
    names = {one.name for one in found}
    for name, row in rows.items():
        if name not in names:
            found.append(Compared(name, "lower", row["ratio"], None, row["band"]))
    return found


def differences(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    """The versions that are not those of the record, a line each."""
    return [
        f"{name}: {then.get(name, 'absent')} when recorded, {now.get(name, 'absent')} now"
        for name in sorted({*now, *then})
        if now.get(name) != then.get(name)
    ]


def read(path: Path = RECORDED) -> dict[str, Any]:
    """What was recorded; empty if nothing was."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write(outcomes: Sequence[Outcome], versions: Mapping[str, str], path: Path = RECORDED) -> None:
    """Record; a row keeps the band that it has.

    Raises:
        ValueError: A row was not measured.
    """
    before = read(path).get("rows", {})
    rows = {}
    for outcome in outcomes:
        if outcome.value is None:
            msg = f"{key(outcome)} was not measured: nothing is recorded"
            raise ValueError(msg)
        band = before.get(key(outcome), {}).get("band", BAND)
        rows[key(outcome)] = {"ratio": round(outcome.value, 4), "band": band}
    text = json.dumps({"versions": dict(versions), "rows": rows}, indent=2)
    path.write_text(text + "\n")
