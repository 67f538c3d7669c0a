"""Software iWARP has no memory windows, and says so at the first call that would need one."""

from __future__ import annotations

import pytest

import aiordma
from aiordma.verbs import MemoryWindow, MWType, Opcode, SendWR
from tests.device.ends import Ends
from tests.device.windows import TYPES

pytestmark = [pytest.mark.device, pytest.mark.siw]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
async def test_a_window(ends: Ends, kind: MWType) -> None:
    assert ends.server.context.attributes.max_mw == 0
    with pytest.raises(aiordma.NotSupportedError, match=rf"siw\d+ has no .*{kind.name}"):
        MemoryWindow(ends.server.pd, kind)


async def test_a_raw_request(ends: Ends) -> None:
    with pytest.raises(aiordma.NotSupportedError, match="BIND_MW"):
        ends.server.qp.post_send(SendWR(opcode=Opcode.BIND_MW))
    assert ends.server.qp.outstanding == 0
