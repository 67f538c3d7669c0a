"""LineWriter: an output that is not read keeps its program from nothing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from aiordma.cli.lines import LineWriter

LIMIT_S = 20


def tell(lost: int) -> str:
    return f"lost {lost}"


@pytest.fixture
def pipe() -> Iterator[tuple[TextIO, TextIO]]:
    """Both ends, (read, write), with room for a page."""
    inlet, outlet = os.pipe()
    fcntl.fcntl(outlet, fcntl.F_SETPIPE_SZ, 4096)
    with open(inlet) as reading, open(outlet, "w", encoding="ascii") as writing:
        yield reading, writing


def test_g02_an_output_that_is_not_read_loses_lines_and_says_so(
    pipe: tuple[TextIO, TextIO],
) -> None:
    reading, writing = pipe
    writer = LineWriter(writing, tell)
    begun = time.monotonic()
    for number in range(20_000):
        writer.put(f"line {number}")
    writer.close(0.05)
    assert time.monotonic() - begun < LIMIT_S, "it has waited for the output"
    number = lost = 0
    while number < 20_000:
        what, said = reading.readline().split()
        if what == "lost":
            lost += int(said)
            number += int(said)
        else:
            assert (what, int(said)) == ("line", number), "out of order"
            number += 1
    assert number == 20_000
    assert lost > 10_000
    # From now on it is read.
    writer.put("and \u00e9 more")
    assert reading.readline() == "and \\xe9 more\n"
    writer.close(LIMIT_S)


def test_an_output_that_is_closed_is_no_error(pipe: tuple[TextIO, TextIO]) -> None:
    reading, writing = pipe
    reading.close()
    writer = LineWriter(writing, tell)
    for _ in range(3):
        writer.put("x")
        writer.close()
        assert not len(writer)


def test_no_output_is_no_error() -> None:
    writer = LineWriter(None, tell)
    writer.put("x")
    writer.close()
    assert not len(writer)


def test_a_process_ends_while_its_output_is_not_read() -> None:
    """In good order: the thread is not in the buffer of its stdout then."""
    program = (
        "import sys\n"
        "from aiordma.cli.lines import LineWriter\n"
        "writer = LineWriter(sys.stdout, str)\n"
        "for number in range(200_000): writer.put('x' * 100)\n"
        "writer.close()\n"
        "print('at the end', file=sys.stderr)\n"
    )
    inlet, outlet = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            check=False, stdout=outlet, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    finally:
        os.close(inlet)
        os.close(outlet)
    assert (done.returncode, done.stderr) == (0, "at the end\n")
