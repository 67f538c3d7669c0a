"""What the goals allow, what is taken now, and the least that it could be, out of one profile.

A floor is the least way through the same loop: for a message that is awaited a task that a function
in C resumes, for callbacks one call of Python's (floors.py), for a connection the same in C
(connecting.c).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tests.bench.goals import GOALS, Goal
from tests.bench.jobs import LOOPS
from tests.bench.layers import LAYERS
from tests.bench.profile_counts import Profile
from tests.bench.profile_jobs import MESSAGES
from tests.bench.profile_tables import TOP, by_function, by_layer
from tests.bench.tables import Row

HEAD = (
    "figure", "beside", "which takes, us", "goal", "so it may take", "takes", "the floor", "",
)  # fmt: skip
PAGE_HEAD = ("figure / beside, us", "goal, us", "takes, us", "the floor, us")
#: The program of a figure, and its floor, by the figure's job.
_OURS: Mapping[str, tuple[str, str]] = {
    **{f"aiordma send lat 64 connection {x}": (f"send {x}", f"resume {x}") for x in LOOPS},
    **{f"aiordma stream lat 64 protocol {x}": (f"protocol {x}", f"callback {x}") for x in LOOPS},
    "growth connect": ("connect uvloop", "connecting.c"),
}
#: The program that it stands beside, by that one's job.
_THEIRS: Mapping[str, str] = {
    "ib_send_lat -e": "ib_send_lat -e",
    "pyverbs": "pyverbs exchange",
    "growth connect": "cmtime",
    "pyverbs connect": "pyverbs connect",
}


def goals() -> list[tuple[Goal, str, str, str]]:
    """The goals whose programs are all profiled: ours, theirs, the floor."""
    found = []
    for goal in GOALS:
        ours, floor = _OURS.get(goal.ours[0], ("", ""))
        theirs = _THEIRS.get(goal.theirs[0], "") if goal.theirs else ""
        if ours and theirs:
            found.append((goal, ours, theirs, floor))
    return found


def verdict(goal: Goal, takes: float, least: float, may: float) -> str:
    """In a few words."""

    def enough(value: float) -> bool:
        return value < may if goal.strict else value <= may

    if enough(takes):
        return "reached"
    return "missed" if enough(least) else "missed; the floor is above it"


def rows(profiles: Sequence[Profile]) -> list[Row]:
    """A row for each goal that these profiles have something to say about."""
    us = {profile.row.row: profile.ns / profile.row.number / 1000 for profile in profiles}
    found: list[Row] = []
    for goal, ours, theirs, floor in goals():
        if not {ours, theirs, floor} <= us.keys():
            continue
        # A rate that is to be higher is a time that is to be lower.
        factor = goal.limit if goal.better == "lower" else 1 / goal.limit
        may = us[theirs] * factor
        cells = [goal.figure, goal.beside, f"{us[theirs]:,.1f}", goal.wanted, f"{may:,.1f}"]
        for name in ours, floor:
            ratio = us[name] / us[theirs] if goal.better == "lower" else us[theirs] / us[name]
            cells.append(f"{us[name]:,.1f} ({ratio:.3f})")
        found.append((*cells, verdict(goal, us[ours], us[floor], may)))
    return found


def page_row(row: Row) -> Row:
    """The same for a page, in fewer columns."""
    figure, beside, theirs, wanted, may, takes, floor, said = row
    return (f"{figure} / {beside}, {theirs}", f"{wanted}: {may}, {said}", takes, floor)


def pairs(profiles: Sequence[Profile]) -> list[tuple[Profile, Profile]]:
    """Our programs with their floors."""
    by_name = {profile.row.row: profile for profile in profiles}
    return [
        (by_name[ours], by_name[floor])
        for ours, floor in _OURS.values()
        if {ours, floor} <= by_name.keys()
    ]


def above(
    ours: Profile, floor: Profile, what: Callable[[Profile], Counter[str]]
) -> dict[str, float]:
    """Instructions for each unit that the floor has not, by their name; those it alone has less."""
    mine, its = what(ours), what(floor)
    return {
        name: mine[name] / ours.row.number - its[name] / floor.row.number for name in mine | its
    }


def above_head(profiles: Sequence[Profile]) -> Row:
    """The first line."""
    some = [ours for ours, _ in pairs(profiles) if ours.row.group == MESSAGES]
    return ("instructions above the floor", *(f"`{ours.row.row}`" for ours in some))


def above_rows(profiles: Sequence[Profile]) -> list[Row]:
    """Messages, by layer."""
    some = [pair for pair in pairs(profiles) if pair[0].row.group == MESSAGES]
    columns = [above(ours, floor, by_layer) for ours, floor in some]
    columns = [column | {"**together**": sum(column.values())} for column in columns]
    found = []
    for name in (*LAYERS, "**together**"):
        values = [column.get(name, 0.0) for column in columns]
        if any(abs(value) >= 0.5 for value in values):
            found.append((name, *(f"{round(value):,}" for value in values)))
    return found


def above_text(profiles: Sequence[Profile]) -> str:
    """The functions with the most instructions above the floor."""
    parts = []
    for ours, floor in pairs(profiles):
        found = above(ours, floor, by_function)
        most = sorted(found, key=lambda name: -found[name])[:TOP]
        listed = ", ".join(f"`{name}` {round(found[name]):,}" for name in most)
        parts.append(f"**{ours.row.row}**, above `{floor.row.row}`: {listed}.")
    return "\n\n".join(parts)
