"""The tables of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath

from tests.bench.layers import LAYERS, UNKNOWN, layer_of
from tests.bench.profile_counts import EVENTS, Profile
from tests.bench.symbols import KERNEL, Place
from tests.bench.tables import Row

TOP = 15
#: What happens less often than so many times for each unit is left out.
SELDOM = 0.01
#: What lies behind this name in a libc without other names: what the loader chooses for this CPU.
_CHOSEN = "__nss_database_lookup+"


def number(value: float) -> str:
    """Instructions."""
    return f"{value:,.0f}" if value >= 0.5 else ""


def often(value: float) -> str:
    """How often for each unit."""
    return "" if value < SELDOM else f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def by_layer(profile: Profile) -> Counter[str]:
    """Instructions of each layer."""
    found: Counter[str] = Counter()
    for place, count in profile.counts.items():
        found[layer_of(place)] += count
    return found


def _rows(
    profiles: Sequence[Profile],
    counters: Sequence[Counter[str]],
    names: Iterable[str],
    text: Callable[[float], str],
) -> list[Row]:
    """A row for each name that any of them has."""
    rows = []
    for name in names:
        cells = [
            text(counter[name] / profile.row.number)
            for profile, counter in zip(profiles, counters, strict=True)
        ]
        if any(cells):
            rows.append((name, *cells))
    return rows


def head(profiles: Sequence[Profile], what: str) -> Row:
    """The first line."""
    return (f"{what} for each {profiles[0].row.unit}", *(f"`{p.row.row}`" for p in profiles))


def layer_rows(profiles: Sequence[Profile]) -> list[Row]:
    """Where the instructions go, and how much of the counted time they are."""
    rows = _rows(profiles, [by_layer(profile) for profile in profiles], LAYERS, number)
    rows.append(("**together**", *(number(p.instructions / p.row.number) for p in profiles)))
    rows.append(("counted time, us", *(f"{p.ns / p.row.number / 1000:,.1f}" for p in profiles)))
    rows.append(("of that, counted instructions", *(f"{p.closure:.3%}" for p in profiles)))
    return rows


def call_rows(profiles: Sequence[Profile]) -> list[Row]:
    """System calls, those first that are made most."""
    calls = [profile.calls for profile in profiles]
    weight: Counter[str] = sum(calls, Counter())
    return _rows(profiles, calls, sorted(weight, key=lambda name: (-weight[name], name)), often)


def event_rows(profiles: Sequence[Profile]) -> list[Row]:
    """What else happens."""
    return _rows(profiles, [profile.events for profile in profiles], EVENTS.values(), often)


def called(place: Place) -> str:
    """A function's name, and whose it is."""
    if place.file == KERNEL:
        return place.function
    file = PurePath(place.file).name or UNKNOWN
    short = file.partition(".")[0]
    if place.function == "?":
        return f"{short} (no names)"
    if short == "libc" and place.function == _CHOSEN:
        return "libc: memcpy and the like"
    return f"{short}: {place.function}"


def by_function(profile: Profile) -> Counter[str]:
    """Instructions of each function."""
    found: Counter[str] = Counter()
    for place, count in profile.counts.items():
        found[called(place)] += count
    return found


def top(profile: Profile, many: int = TOP) -> list[tuple[str, float]]:
    """The functions with the most instructions."""
    listed = by_function(profile).most_common(many)
    return [(name, count / profile.row.number) for name, count in listed]


def top_text(profiles: Sequence[Profile]) -> str:
    """The same as text, a paragraph for each program."""
    parts = []
    for profile in profiles:
        listed = ", ".join(f"`{name}` {number(count)}" for name, count in top(profile))
        parts.append(f"**{profile.row.row}**: {listed}.")
    return "\n\n".join(parts)
