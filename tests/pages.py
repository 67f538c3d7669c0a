"""The blocks of code on the pages of docs/, and the notes that tell how a test runs them.

A note is an HTML comment right before a block; the built pages do not have it.

- Without a note a block is run by `tests/device/test_pages.py`.  Python that begins with a
  docstring is a file, whose name is the last "`<name>.py`" of the paragraph before; so is Python
  behind a paragraph that ends with "`<name>.py`:".  A console block is run command by command, and
  its output compared.  Other Python is run where `await` is allowed, in a namespace that all blocks
  of the page share.
- `<!-- run` and code until `-->`: this code runs before the block, or around it: a line `...` of
  the code stands for the block.
- `<!-- run on Soft-RoCE`, and code or none: the same, but not on iWARP, which lacks the ability.
- `<!-- run by tests/device/<file>::<test> -->`: this test runs it; those of softroce/tests, too.
- `<!-- not run: reason -->`: no test does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
KINDS = ("python", "console")
_OPENS = re.compile(r"^( *)(`{3,})(\w+)\s*$")
_COMMENT = re.compile(r"<!--(.*?)-->\s*\Z", re.S)
_NAMES = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.py)`")
_SOFTROCE = "run on Soft-RoCE"
_RUN_BY = re.compile(r"run by ((?:softroce/)?tests/[\w/]+\.py)::(\w+)\Z")
_RUNNER = re.compile(r"python -m aiordma_softroce (?:--?[\w-]+ (?:\w+ )?)*?-- ")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str  # below docs/
    line: int  # of its first line
    kind: str
    text: str
    note: str  # the comment before it
    name: str  # of the file that it is, or ""

    @property
    def where(self) -> str:
        return f"docs/{self.page}:{self.line}"

    @property
    def reason(self) -> str:
        """Why no test runs it, or ""."""
        word, _, reason = self.note.partition(":")
        return reason.strip() if word == "not run" else ""

    @property
    def other_test(self) -> tuple[str, str] | None:
        """File and name of the test that runs it, if that is not the general one."""
        found = _RUN_BY.match(self.note)
        return (found[1], found[2]) if found else None

    @property
    def around(self) -> str:
        """The code of the note, which is run with the block."""
        word, _, code = self.note.partition("\n")
        return code if word in ("run", _SOFTROCE) else ""

    @property
    def is_for_iwarp(self) -> bool:
        """Whether it can be run on iWARP, too."""
        return not self.note.startswith(_SOFTROCE)

    @property
    def is_general(self) -> bool:
        """Whether the general test runs it."""
        return not self.note or self.note.partition("\n")[0] in ("run", _SOFTROCE)

    @property
    def program(self) -> str:
        """The block with the code of its note around it."""
        lines = self.around.splitlines()
        places = [number for number, line in enumerate(lines) if line.strip() == "..."]
        if not places:
            return f"{self.around}\n{self.text}"
        assert len(places) == 1, self.where
        indent = lines[places[0]].partition("...")[0]
        inner = [f"{indent}{line}" if line else line for line in self.text.splitlines()]
        lines[places[0] : places[0] + 1] = inner
        return "\n".join(lines) + "\n"


def pages() -> list[str]:
    """All pages, below docs/."""
    return sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def blocks(page: str) -> list[Block]:
    """The blocks of Python and console of a page, in order."""
    return list(_blocks(page, (DOCS / page).read_text()))


def _blocks(page: str, text: str) -> Iterator[Block]:
    lines = text.splitlines(keepends=True)
    number = 0
    while number < len(lines):
        opened = _OPENS.match(lines[number])
        begin = number = number + 1
        if not opened:
            continue
        indent, fence, kind = opened.groups()
        while lines[number].strip() != fence:
            number += 1
        if kind in KINDS:
            body = "".join(line.removeprefix(indent) for line in lines[begin:number])
            before = "".join(lines[: begin - 1])
            comment = _COMMENT.search(before)
            note = ""
            if comment:
                # The last comment: an earlier one has other text, or a block, behind it.
                begins = before.rindex("<!--")
                note = before[begins + 4 :].rpartition("-->")[0].strip()
                before = before[:begins]
            yield Block(page, begin + 1, kind, body, note, _name(kind, body, before))
        number += 1


def _name(kind: str, body: str, before: str) -> str:
    paragraph = before.rstrip().rpartition("\n\n")[2]
    names = _NAMES.findall(paragraph)
    is_file = body.startswith('"""') or (names and paragraph.endswith(f"`{names[-1]}`:"))
    return names[-1] if kind == "python" and names and is_file else ""


@dataclass
class Step:
    """One command of a console block, and the lines that it has to print."""

    command: str
    lines: list[str]


_HERE = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


def steps(text: str) -> list[Step]:
    """The commands of a console block; continued lines and here-documents belong to them."""
    found: list[Step] = []
    going, until = False, ""
    for line in text.splitlines():
        if until:
            found[-1].command += f"\n{line}"
            until = "" if line.strip() == until else until
            continue
        if going:
            found[-1].command += f"\n{line}"
        elif line.startswith("$ "):
            found.append(Step(line.removeprefix("$ "), []))
        else:
            found[-1].lines.append(line)
            continue
        going = line.endswith("\\")
        here = _HERE.search(line)
        until = here[1] if here else ""
    return found


def without_runner(command: str) -> str:
    """The command that softroce runs, for a test that is where softroce would run it."""
    return _RUNNER.sub("", command, count=1)
