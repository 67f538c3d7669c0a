"""A datagram protocol that raises loses the datagram that it was given, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.device.datagrams import Recorder, endpoint, where
from tests.device.oracle import reported
from tests.inside.datagram import catch_deliveries

pytestmark = pytest.mark.device

COUNT = 40


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_a01_the_rest_of_a_batch_is_handed_over_later(
    address: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[type[BaseException]] = []

    class Raising(Recorder):
        def datagram_received(self, data: bytes, addr: Any) -> None:
            super().datagram_received(data, addr)
            if data[0] % 10 == 3:
                raise kind

    async with (
        endpoint(Raising, (address, 0)) as server,
        endpoint(Recorder, remote_addr=where(server)) as client,
    ):
        # In place of the loop, which such an exception would leave.
        catch_deliveries(monkeypatch, lambda exc: left.append(type(exc)))
        with reported() as reports:
            for n in range(COUNT):
                client.transport.sendto(bytes([n]))
            await server.until(lambda: len(server.got) >= COUNT)
        told = [type(report["exception"]) for report in reports]
        assert sorted(server.data) == [bytes([n]) for n in range(COUNT)]
        raised = [kind] * (COUNT // 10)
        assert (left, told) == (([], raised) if kind is GeneratorExit else (raised, []))
