"""Device tests: every one leaves the device, the loop and the process as it found them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

import aiordma
from aiordma.cm import EventChannel
from aiordma.verbs import ProtectionDomain
from tests.device.closing import Hall
from tests.device.ends import Ends, connected
from tests.device.meeting import Pair, paired
from tests.device.netem import netem
from tests.device.shared import *  # noqa: F403  # each folder on a device has these
from tests.device.shared import IS_SIW
from tests.device.switching import Switched
from tests.inside.link import forget_violations

# iWARP has no datagrams, and software iWARP no windows: there test_no_datagrams.py and
# test_no_windows.py say what it answers instead.
_DATAGRAMS = (
    "datagram", "datagram_arguments", "datagram_endpoint", "datagram_faults", "datagram_forged",
    "datagram_raising", "multicast",
)  # fmt: skip
_WINDOWS = ("windows", "windows_closing")
_BY_HAND = (
    "bring_up",
    "example_kv_transfer",
    "extended_queue",
)  # iWARP connects by the connection manager only: test_no_bring_up.py
_READS = ("into_by_reads",)  # on iWARP large messages are copied: test_buffers, test_request_into
_NOT_ON_IWARP = _DATAGRAMS + _WINDOWS + _BY_HAND + _READS
collect_ignore = [f"test_{name}.py" for name in _NOT_ON_IWARP if IS_SIW]


@pytest.fixture(autouse=True)
def own_share() -> None:
    """The lines in the log that peers of earlier tests have caused do not count."""
    forget_violations()


@pytest.fixture
def loop_name(request: pytest.FixtureRequest) -> str:
    """The kind of loop that the tests run on."""
    return str(request.config.getoption("--loop"))


@pytest.fixture
def is_uvloop(loop_name: str) -> bool:
    """Whether the tests run on uvloop."""
    return loop_name == "uvloop"


@pytest.fixture
def new_loop(is_uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes loops of the kind that is under test."""
    if is_uvloop:
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


@pytest.fixture(params=["at once", "late"])
def late(request: pytest.FixtureRequest) -> bool:
    """Whether a task is canceled when its wait has ended, and not at once; see `Steps`."""
    return bool(request.param == "late")


@pytest.fixture
def switched(is_uvloop: bool) -> Switched:
    """Runs a coroutine on a loop of its own, which makes connections over RDMA."""
    return Switched(is_uvloop)


@pytest.fixture
async def ends(address: str) -> AsyncIterator[Ends]:
    """Two connected ends of the native layer."""
    async with connected(address) as ends:
        yield ends


@pytest.fixture
async def pair(address: str) -> AsyncIterator[Pair]:
    """Two connected ends: (client, server)."""
    async with paired(address) as ends:
        yield ends


@pytest.fixture
async def events() -> AsyncIterator[EventChannel]:
    """An event channel."""
    channel = EventChannel()
    yield channel
    channel.close()  # before its last id, perhaps
    await channel.wait_closed()


@pytest.fixture
def wire() -> Iterator[None]:
    """The wire of two hosts has netem, without a fault to begin with."""
    with netem():
        yield


@pytest.fixture
async def pd() -> AsyncIterator[ProtectionDomain]:
    """A protection domain of the device, opened for this test alone."""
    with aiordma.devices()[0].open() as context, ProtectionDomain(context) as pd:
        yield pd
    await context.wait_closed()


@pytest.fixture
async def hall(address: str) -> AsyncIterator[Hall]:
    """A listening id of the native layer."""
    hall = Hall(address)
    yield hall
    await hall.close()
