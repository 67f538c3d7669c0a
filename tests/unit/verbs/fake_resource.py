"""Resources without a library behind them, for tests of the order in which they end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiordma.errors import RdmaOSError
from aiordma.loop.workers import reaper
from aiordma.verbs.resource import Resource
from tests.inside.loop import all_done

from ..conftest import LIMIT_S

__all__ = ["ORDERS", "PARENTS", "Fake", "check_order", "fresh", "graph"]


class Fake(Resource):
    """A resource whose handle is its name; `log` is what C would have seen."""

    __slots__ = ("busy", "name")
    log: list[str]
    threads: set[str]

    def __init__(self, name: str, *parents: Resource) -> None:
        self.name = name
        self.busy = False
        super().__init__(name, parents)

    # What other objects of the library do to one.

    @property
    def children(self) -> int:
        """How many use it."""
        return self._children

    def require(self) -> Any:
        """Its handle, if it is open."""
        return self._require()

    def retain(self) -> None:
        """One more uses it."""
        self._retain()

    def let_go(self, child: Resource | None = None) -> None:
        """One uses it no more."""
        self._let_go(child)

    def hold(self, others: list[Resource]) -> None:
        """It uses others from now on."""
        self._hold(others)

    def release(self, others: list[Resource]) -> None:
        """It uses them no more."""
        self._release(others)

    def when_gone(self, function: Callable[[], object]) -> None:
        """Have it called when it is destroyed."""
        self._when_gone(function)

    def _before_close(self) -> None:
        if self.busy:
            raise RdmaOSError(16, "busy")

    def _destroy(self, handle: Any) -> None:
        assert handle == self.name
        assert self._children == 0, "destroyed before its children"
        Fake.log.append(self.name)
        Fake.threads.add(threading.current_thread().name)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    Fake.log = []
    Fake.threads = set()
    yield
    assert all_done(reaper, LIMIT_S)


# Who needs whom, as on a real connection: a queue pair needs almost everything.
PARENTS = {
    "context": (),
    "channel": ("context",),
    "pd": ("context",),
    "mr": ("pd",),
    "cq": ("context", "channel"),
    "qp": ("pd", "cq", "mr"),
}
ORDERS = list(itertools.permutations(PARENTS))


def graph() -> dict[str, Fake]:
    made: dict[str, Fake] = {}
    for name, parents in PARENTS.items():
        made[name] = Fake(name, *(made[parent] for parent in parents))
    return made


def check_order() -> None:
    assert sorted(Fake.log) == sorted(PARENTS)
    for name, parents in PARENTS.items():
        for parent in parents:
            assert Fake.log.index(name) < Fake.log.index(parent), Fake.log
