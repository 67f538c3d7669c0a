"""The picture of a connection's life in docs/architecture.md is the table of the C."""

from __future__ import annotations

import re
from pathlib import Path

from aiordma._core import MessageState

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
STEPS, RIGHTS = MessageState.life_table()


def picture() -> str:
    """The states in their order, what each allows, and between them the event that leads down."""
    columns = list(RIGHTS["NEW"])
    lines = [" ".join([" " * 15, *columns])]
    leads_to = dict(zip(STEPS["CLOSED"], list(STEPS)[1:], strict=True))
    for state, rights in RIGHTS.items():
        lines += [f"      | {event}" for event, target in leads_to.items() if target == state]
        marks = [("x" if rights[name] else "-").center(len(name)) for name in columns]
        lines.append(" ".join([f"{state:15}", *marks]).rstrip())
    return "\n".join(lines)


def test_each_event_leads_to_the_state_below_it_from_any_state_above() -> None:
    """Which is what makes the life a line, and the picture of it so short."""
    order = list(STEPS)
    for number, event in enumerate(STEPS["NEW"], 1):
        for at, state in enumerate(order):
            assert STEPS[state][event] == order[max(at, number)]


def test_the_picture_is_the_table() -> None:
    found = re.search(r"<!-- begin: life -->\n(.*?)<!-- end: life -->", PAGE.read_text(), re.DOTALL)
    assert found, "the page has no picture"
    wanted = f"\n```text\n{picture()}\n```\n\n"
    assert found[1] == wanted, f"the picture has to be:\n{wanted}"


def test_the_page_explains_each_state_and_each_event() -> None:
    section = PAGE.read_text().split("\n## The life of a connection\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([A-Z_]+)` \|", section, re.MULTILINE)
    assert rows == [*STEPS, *STEPS["NEW"]]
    for right in RIGHTS["NEW"]:
        assert f"**{right}**" in section
