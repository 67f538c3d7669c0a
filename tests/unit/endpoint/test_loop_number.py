"""The group of a connection: the address of its peer, and the number of the loop in its hello."""

from __future__ import annotations

import asyncio

import pytest

from aiordma.endpoint.config import ConnectionConfig, hello_of
from aiordma.endpoint.wire import Hello
from tests.inside.endpoint import hello_from, meet, peer_loop_of

from ..conftest import Run
from .fabric import Wire

CONFIG = ConnectionConfig(slot_size=256, recv_depth=4, send_depth=4)


@pytest.mark.parametrize(
    ("number", "peer", "loop"),
    [
        (b"12345678", ("10.0.0.1", 1234), ("10.0.0.1", b"12345678")),
        (b"12345678", ("10.0.0.2", 1234), ("10.0.0.2", b"12345678")),
        (b"12345678", ("fe80::1%eth0", 1), ("fe80::1%eth0", b"12345678")),
        (b"12345678", None, None),
        (b"", ("10.0.0.1", 1234), None),
    ],
)
def test_a_peer_is_known_by_its_address_and_the_number_of_its_loop(
    run: Run, number: bytes, peer: tuple[str, int] | None, loop: tuple[str, bytes] | None
) -> None:
    async def main() -> None:
        wire = Wire(CONFIG, CONFIG)
        meet(wire.ends[0], hello_of(CONFIG, b"", loop_id=number), 8, peer)
        assert peer_loop_of(wire.ends[0]) == loop
        await wire.lose()

    run(main())


def test_all_hellos_of_a_loop_name_it_and_no_other_loop_does(run: Run) -> None:
    async def main() -> list[bytes]:
        wire = Wire(CONFIG, CONFIG)
        found = []
        for end, data in zip(wire.ends, (b"", b"data of the program"), strict=True):
            hello = Hello.parse(hello_from(end, data, 56))
            assert hello is not None
            assert hello.user_data == data
            found.append(hello.loop_id)
        await wire.lose()
        return found

    here, there = run(main()), asyncio.run(main())
    assert len(here[0]) == 8
    assert here[0] == here[1]
    assert there[0] == there[1]
    assert here != there
