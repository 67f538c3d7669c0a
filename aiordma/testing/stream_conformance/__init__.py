"""Does a transport keep asyncio's contract?  A kit of tests for writers of transports.

Derive a class from `StreamConformance` in a file of tests and say how two protocols are connected;
pytest finds the tests, pytest-asyncio runs them (in its strict mode, mark the class with
`pytest.mark.asyncio`)::

    import asyncio
    from contextlib import asynccontextmanager
    from aiordma.testing.stream_conformance import StreamConformance


    class TestMyTransport(StreamConformance):
        @asynccontextmanager
        async def connection(self, server_factory, client_factory):
            loop = asyncio.get_running_loop()
            server = await loop.create_server(server_factory, "127.0.0.1", 0)
            try:
                await loop.create_connection(client_factory, *server.sockets[0].getsockname())
                yield  # the check runs
            finally:
                server.close()

The rules are those of asyncio's documentation and, where it is silent, of asyncio's own selector
transport. Each check runs twice, on the client's transport and on the server's. No check waits
longer than `bound_s`, and none needs pytest itself: they are coroutine methods that raise
AssertionError. To have pytest show the values of a failed comparison, call
`pytest.register_assert_rewrite` with the name of this package before importing it.
"""

from __future__ import annotations

from aiordma.testing.stream_conformance.buffered import BufferedChecks
from aiordma.testing.stream_conformance.closing import ClosingChecks
from aiordma.testing.stream_conformance.data import DataChecks
from aiordma.testing.stream_conformance.errors import ErrorChecks
from aiordma.testing.stream_conformance.flow import FlowChecks
from aiordma.testing.stream_conformance.link import DEVIATIONS, Subject
from aiordma.testing.stream_conformance.surroundings import SurroundingChecks

__all__ = ["DEVIATIONS", "StreamConformance", "Subject"]


class StreamConformance(
    DataChecks, FlowChecks, ClosingChecks, BufferedChecks, ErrorChecks, SurroundingChecks
):
    """All checks. Override `connection`, and name the `deviations` of the transport."""

    @classmethod
    def names(cls) -> list[str]:
        """Names of all checks, for a run without pytest."""
        return sorted(name for name in dir(cls) if name.startswith("test_"))
