"""The losses that are put in to try the check: where they go, how long they are, what is seen."""

from __future__ import annotations

import ast

import pytest

from tests.bench import check, seeded, seeds
from tests.bench.goals import Results
from tests.bench.machine import ROOT
from tests.bench.seeds import PLACES, Place

C = """\
static int f(int a,
             int b);

static int f(int a,
             int b)
{
    return g(a, f(b));
}
"""
PYTHON = '''\
def f():
    """First."""
    return 1


class A:
    async def f(self):
        return 2
'''


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_place_is_a_function_of_the_library_and_has_a_row(place: Place) -> None:
    assert [(row.ours[0], row.beside) for row in place.goals()] == list(place.rows)
    source = (ROOT / "aiordma" / place.path).read_text()
    text = seeds.seeded(place, source, 4000)
    assert text.count("\n") == source.count("\n") + 1
    if place.path.endswith(".py"):
        ast.parse(text)


def test_there_are_ten_places_in_c_and_in_python() -> None:
    names = {place.name for place in PLACES}
    assert len(names) == len(PLACES) >= 10
    assert {place.path.rpartition(".")[2] for place in PLACES} == {"c", "py"}


def test_a_loop_in_c_is_the_first_of_the_definition() -> None:
    lines = seeds.seeded(Place("f", "f.c", ()), C, 400).splitlines()
    assert "n_ = 100;" in lines[6]
    assert lines[5] == "{"
    with pytest.raises(ValueError, match="found 0 times"):
        seeds.seeded(Place("g", "f.c", ()), C, 400)


def test_a_loop_in_python_comes_after_the_docstring() -> None:
    loop = f"for _ in bytes({(4000 - seeds.PYTHON_LOOP) / seeds.PYTHON_TURN:.0f}): pass"
    lines = seeds.seeded(Place("f", "f.py", ()), PYTHON, 4000).splitlines()
    assert lines[2] == f"    {loop}"
    lines = seeds.seeded(Place("A.f", "f.py", ()), PYTHON, 4000).splitlines()
    assert lines[7] == f"        {loop}"
    with pytest.raises(ValueError, match="found 0 times"):
        seeds.seeded(Place("A.g", "f.py", ()), PYTHON, 4000)


def figures(us: float) -> Results:
    """The first place's row, with this figure of ours."""
    (row,) = PLACES[0].goals()
    assert row.theirs is not None
    return {row.ours: [us], row.theirs: [60.0]}


def test_a_loop_is_a_part_of_the_figure_for_each_time_that_the_function_is_entered() -> None:
    twice = Place("f", "f.c", PLACES[0].rows, entered=2)
    assert seeded.loss_ns(PLACES[0], figures(80), 0.05) == pytest.approx(4000)
    assert seeded.loss_ns(twice, figures(80), 0.05) == pytest.approx(2000)


@pytest.mark.parametrize(("us", "verdict"), [(84.0, "SLOWER"), (80.8, "ok"), (76, "FASTER")])
def test_a_loss_is_seen_as_the_check_sees_it(us: float, verdict: str) -> None:
    (found,) = seeded.compared(PLACES[0].goals(), figures(80), figures(us))
    assert found.band <= check.BAND
    assert found.verdict.startswith(verdict)
