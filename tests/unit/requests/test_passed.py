"""A deadline that has passed before the request is made, with a pipe in memory."""

from __future__ import annotations

import pytest

from aiordma import RequestDeadlineError
from tests.inside.requests import held_by

from .pipe import lone, part


@pytest.mark.parametrize("left", [0, -0.5])
async def test_a_deadline_that_has_passed_sends_nothing(left: float) -> None:
    client = await lone()
    with pytest.raises(RequestDeadlineError, match="had passed") as caught:
        await client.request(b"?", left)
    assert isinstance(caught.value, TimeoutError)
    assert held_by(client.exchange.calls) == (0, 0, 0)
    assert not client.sent
    await part(client)
