"""Places on the way of ordinary programs where time can be lost, and how a loss is put in.

A loss is a busy loop at the beginning of a function.  It is so long that the row's figure gets
worse by a part of itself: the loop's length is this part of the figure, divided by how often the
function is entered for it.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from tests.bench import plain
from tests.bench.goals import GOALS, Goal

#: Nanoseconds of the counting clock for one turn of a loop: two instructions, and a `pass`.
C_TURN, PYTHON_TURN = 4.0, 161.0
#: What a loop of Python takes without a turn.
PYTHON_LOOP = 2300.0


@dataclass(frozen=True)
class Place:
    """A function that each message of some rows passes.

    Attributes:
        function: Its name; a method's with the class before it.
        path: Its file, in the package.
        rows: The rows, as job and what it stands beside; the loss is a part of the first one's
            figure.  Where messages queue, a loss makes the batches longer, which hides a part of
            it: such a row has the echo behind it.
        entered: How often it is entered for one unit of the first job's figure in microseconds.
    """

    function: str
    path: str
    rows: tuple[tuple[str, str], ...]
    entered: float = 1.0

    @property
    def name(self) -> str:
        """Where it is."""
        return f"{self.path}: {self.function}"

    def goals(self) -> list[Goal]:
        """The rows that have to show the loss, one at least."""
        guarded = [goal for goal in (*plain.ROWS, *GOALS) if goal.guarded]
        return [
            next(goal for goal in guarded if (goal.ours[0], goal.beside) == row)
            for row in self.rows
        ]


def _echo(size: int = 64, loop: str = plain.MAIN) -> tuple[str, str]:
    return plain.name("echo", size, loop), "ib_send_lat -e"


_ONE_WAY = (plain.name("one-way", 64), "ib_send_bw -e")
_CALLS = (plain.name("callers", 100), "TCP")
_LINES, _PIECES = ((plain.name(*form), "TCP") for form in (plain.STREAMS[0], plain.STREAMS[2]))
_READ = ("aiordma read lat 64 connection uvloop", "ib_read_lat -e")
_CONNECTS = (plain.name("connects", plain.AT_ONCE), "cmtime")
PLACES: tuple[Place, ...] = (
    Place("aio_send", "_core/calls.c", (_echo(),)),
    Place("take_frame", "_core/message.c", (_echo(64, "asyncio"),)),
    Place("readable_run", "_core/drain.c", (_echo(4096),)),
    Place("put_bare", "_core/message.c", (_ONE_WAY, _echo())),
    # A request and an answer.
    Place("aio_take_first", "_core/calls.c", (_CALLS, _echo()), entered=2),
    Place("state_write", "_core/stream_state.c", (_LINES,)),
    Place("transfer", "_core/operation.c", (_READ,)),
    # By the client alone: the server iterates.
    Place("Connection.recv", "endpoint/connection.py", (_echo(),), entered=0.5),
    Place("aio_arrivals_join", "_core/arrivals.c", (_echo(1 << 20),)),
    Place("RdmaStreamWriter.drain", "streams/stream_reader.py", (_PIECES, _LINES)),
    # Both ends.
    Place("Link.open", "endpoint/link.py", (_CONNECTS,), entered=2),
)


def seeded(place: Place, source: str, loss_ns: float) -> str:
    """The file with a loop that takes so long at the beginning of the function.

    Raises:
        ValueError: The file has no such function, or more than one.
    """
    in_c = Path(place.path).suffix == ".c"
    at = (_in_c if in_c else _in_python)(place.function, source)
    if len(at) != 1:
        msg = f"{place.name}: found {len(at)} times"
        raise ValueError(msg)
    turns = loss_ns / C_TURN if in_c else max((loss_ns - PYTHON_LOOP) / PYTHON_TURN, 0)
    lines = source.splitlines(keepends=True)
    number, indent = at[0]
    if in_c:
        turn = '__asm__ volatile("1: dec %0; jnz 1b" : "+r"(n_) : : "cc")'
        loop = f"{{ long n_ = {turns:.0f}; {turn}; }}"
    else:
        loop = f"for _ in bytes({turns:.0f}): pass"
    lines.insert(number, f"{indent}{loop}\n")
    return "".join(lines)


def _in_c(function: str, source: str) -> list[tuple[int, str]]:
    """How many lines there are before each body, and its indentation."""
    pattern = re.compile(rf"^[A-Za-z][\w \*]*\b{function}\([^;{{}}]*\)\n\{{\n", re.MULTILINE)
    return [(source.count("\n", 0, found.end()), "    ") for found in pattern.finditer(source)]


def _in_python(function: str, source: str) -> list[tuple[int, str]]:
    """The same; the loop comes after the docstring."""
    where: list[ast.AST] = [ast.parse(source)]
    for name in function.split("."):
        where = [
            child
            for node in where
            for child in getattr(node, "body", [])
            if getattr(child, "name", None) == name
        ]
    found = []
    for node in where:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        first = node.body[ast.get_docstring(node) is not None]
        found.append((first.lineno - 1, " " * first.col_offset))
    return found
