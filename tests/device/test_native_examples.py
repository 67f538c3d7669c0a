"""The examples of the native level, each a process of its own, run as they are written."""

from __future__ import annotations

import pytest

from tests.device.oracle import adapter_objects
from tests.device.shared import has_atomics
from tests.seeds.programs import PORT, running

pytestmark = [pytest.mark.device, pytest.mark.one_loop]


@pytest.mark.smoke
async def test_the_native_examples(address: str) -> None:
    before = adapter_objects()
    async with running("native_server.py") as server:
        assert await server.first_line() == f"listening on 0.0.0.0 {PORT}\n"
        async with running("native_client.py", address) as client:
            assert await client.finish() == (
                "lent by the server: 1024 bytes\nread: left by a server\necho: hello, verbs\n"
            )
        assert await server.finish() == (
            "a client says: hello, verbs\n"
            "in memory: left by a client\n"
            f"counter: {int(has_atomics())}\n"
        )
    assert adapter_objects() == before
