"""The wire between two hosts: what its cards lose, double, reorder and delay (`tc-netem(8)`)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["dropped", "faults", "netem"]

_CARDS = ("veth0", "veth1")


def _tc(verb: str, *words: str, cards: Sequence[str] = _CARDS) -> None:
    kind = () if verb == "del" else ("netem", "limit", "100000")
    for card in cards:
        subprocess.run(["tc", "qdisc", verb, "dev", card, "root", *kind, *words], check=True)


@contextmanager
def netem(*words: str) -> Iterator[None]:
    """Both cards have netem in the block; without words it does nothing to begin with."""
    _tc("add", *words)
    try:
        yield
    finally:
        _tc("del")


def faults(*words: str, cards: Sequence[str] = _CARDS) -> None:
    """What netem does to each packet from now on; without words nothing."""
    _tc("change", *words, cards=cards)


def dropped() -> int:
    """Packets that the netem of a card has lost."""
    shown = subprocess.run(
        ["tc", "-s", "-j", "qdisc", "show", "dev", _CARDS[0], "root"],
        check=True,
        capture_output=True,
    )
    (qdisc,) = json.loads(shown.stdout)
    return int(qdisc["drops"])
