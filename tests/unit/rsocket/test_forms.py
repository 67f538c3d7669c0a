"""The forms in which the other tests here run a machine are what they say."""

from __future__ import annotations

import pytest

from .forms import Drained
from .lone import KEEPALIVE, Lone

pytestmark = pytest.mark.usefixtures("form")


def test_the_words_that_the_drain_takes(form: str) -> None:
    lone = Lone()
    for word in (1, 2, KEEPALIVE):
        lone.machine.on_word(word)
    assert lone.machine.readable == 3
    assert isinstance(lone.machine, Drained) is (form == "drained")
    if isinstance(lone.machine, Drained):
        assert lone.machine.taken == 2, "all data, and the rest is for Python"


@pytest.mark.parametrize("iwarp", [False, True])
def test_words_of_iwarp_come_by_memory(form: str, iwarp: bool) -> None:
    lone = Lone(iwarp=iwarp)
    lone.machine.on_word(7)
    assert lone.machine.readable == 7
