"""The overlaps of lent parts, held against a list of all pairs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

import aiordma
from aiordma.memory.lent import LentPart, Overlaps
from aiordma.verbs import SGE, Access
from tests.inside.memory import let_go, retain

READ, WRITE, ATOMIC = Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC
SIZE = 1000


def part_of(start: int, stop: int, rights: Access, owner: object) -> Any:
    region = cast("Any", SimpleNamespace(addr=1 << 40, length=SIZE))
    part = SGE(region, start, stop - start)
    return SimpleNamespace(
        part=part, rights=rights, owner=owner, addr=region.addr + start, length=stop - start,
        closed=False,
    )  # fmt: skip


def conflict(one: Any, other: Any) -> bool:
    apart = one.addr >= other.addr + other.length or other.addr >= one.addr + one.length
    return not apart and one.owner is not other.owner and bool((one.rights | other.rights) & WRITE)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("longest", [3, 60, SIZE])
def test_any_parts_come_and_go(seed: int, longest: int) -> None:
    dice = random.Random(f"{seed}/{longest}")
    overlaps, owners = Overlaps(allowed=False), [object() for _ in range(4)]
    lent: list[Any] = []
    refused = 0
    for _ in range(400):
        if lent and dice.random() < 0.4:
            overlaps.remove(lent.pop(dice.randrange(len(lent))))
            continue
        start = dice.randrange(SIZE)
        stop = min(SIZE, start + dice.randint(1, longest))
        rights = dice.choice((READ, READ, ATOMIC, WRITE, READ | WRITE))
        part = part_of(start, stop, rights, dice.choice(owners))
        if any(conflict(part, other) for other in lent):
            refused += 1
            with pytest.raises(aiordma.RdmaOSError, match="lent to another connection"):
                overlaps.add(part)
        else:
            overlaps.add(part)
            lent.append(part)
        assert len(overlaps) == overlaps.open == len(lent)
    assert refused
    for part in lent:
        overlaps.remove(part)
        overlaps.remove(part)
    assert len(overlaps) == 0


def test_where_overlaps_are_allowed() -> None:
    overlaps = Overlaps(allowed=True)
    for _ in range(3):
        overlaps.add(part_of(0, SIZE, WRITE, object()))
    assert len(overlaps) == 3


async def test_the_end_of_a_part_waits_for_its_last_use() -> None:
    ended: list[Any] = []
    region = cast("Any", SimpleNamespace(addr=4096, length=SIZE, rkey=5))
    part = LentPart(SGE(region, 10, 20), READ, None, None, ended.append)
    assert (part.addr, part.length, part.rkey) == (4106, 20, 5)
    retain(part)
    part.close()
    part.close()
    assert part.closed
    assert not ended
    with pytest.raises(aiordma.ResourceClosedError):
        retain(part)
    let_go(part)
    assert ended == [part]
    await part.wait_closed()
    assert ended == [part]
