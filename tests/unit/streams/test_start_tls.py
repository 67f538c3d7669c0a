"""Going over to TLS: no byte comes between the old protocol and the new one."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import pytest

from aiordma.streams.tls import start_tls

from ..conftest import Run, settle


class Transport(asyncio.Transport):
    """Has bytes for whatever protocol it is told of, unless it may not read."""

    _start_tls_compatible = True

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.reading = True
        self.protocol: Any = None

    def pause_reading(self) -> None:
        self.log.append("pause")
        self.reading = False

    def resume_reading(self) -> None:
        self.log.append("resume")
        self.reading = True

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol
        made = protocol.connection_made

        def connection_made(transport: asyncio.BaseTransport) -> None:
            self.log.append("made")
            made(transport)

        protocol.connection_made = connection_made
        # The peer's hello came with the last bytes of the old protocol.
        asyncio.get_running_loop().call_soon(self.arrive)

    def arrive(self) -> None:
        if self.reading:
            self.log.append("data")

    def write(self, data: Any) -> None:
        """The handshake goes nowhere."""

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.log.append("close")

    def abort(self) -> None:
        self.close()


@pytest.mark.parametrize("server_side", [False, True])
def test_i05_nothing_is_read_until_the_new_protocol_is_told(run: Run, server_side: bool) -> None:
    async def main() -> None:
        transport = Transport()
        purpose = ssl.Purpose.CLIENT_AUTH if server_side else ssl.Purpose.SERVER_AUTH
        context = ssl.create_default_context(purpose)
        going = asyncio.create_task(
            start_tls(
                transport, asyncio.Protocol(), context, server_side=server_side,
                server_hostname=None if server_side else "name",
            )
        )  # fmt: skip
        await settle()
        assert transport.log == ["pause", "made", "resume"]
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        assert transport.log[-1] == "close"
        transport.protocol.connection_lost(None)

    run(main())
