"""The fixtures of all tests that need a device: what is there, and what a test may leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import aiordma
from aiordma.verbs import AtomicCap, DeviceAttributes
from aiordma.verbs.comp_channel import CompletionChannel
from tests.device.oracle import adapter_objects, leased, rdma_descriptors, settle, until

__all__ = [
    "address", "clean", "device_is_there", "is_siw", "no_lost_events", "warm",
]  # fmt: skip

ADDRESS = os.environ.get("AIORDMA_SOFTROCE_ADDR", "")
IS_SIW = os.environ.get("AIORDMA_SOFTROCE_DEVICE") == "siw"
OVER_FABRIC = "AIORDMA_FABRIC" in os.environ


def name_of_device(is_siw: bool) -> str:
    """The name of the device: softroce's have one, those of the fabric that of the profile."""
    if OVER_FABRIC:
        return aiordma.devices()[0].name
    return "siw0" if is_siw else "rxe0"


def attributes() -> DeviceAttributes:
    """What the device can do: adapters differ, and so do the profiles of the fabric."""
    with aiordma.devices()[0].open() as context:
        return context.attributes


def has_atomics() -> bool:
    """Whether the device has atomic operations."""
    return attributes().atomic_cap != AtomicCap.NONE


@pytest.fixture(scope="session", autouse=True)
def device_is_there() -> None:
    """No skip: a machine without a device is the wrong machine for these tests."""
    reason = aiordma.why_unavailable()
    if reason is not None:
        pytest.exit(
            f"no RDMA device ({reason}); run: python -m aiordma_softroce -- "
            "python -m pytest tests/device",
            returncode=3,
        )


@pytest.fixture
def address() -> str:
    """Address of the RDMA device."""
    assert ADDRESS, "AIORDMA_SOFTROCE_ADDR is not set"
    return ADDRESS


@pytest.fixture
def is_siw() -> bool:
    """Whether the device is software iWARP."""
    return IS_SIW


@pytest.fixture(scope="session", autouse=True)
def warm(device_is_there: None) -> None:
    """What librdmacm opens once and keeps for the life of the process is no leak."""

    async def once() -> None:
        for address in filter(None, (ADDRESS, os.environ.get("AIORDMA_SOFTROCE_ADDR2"))):
            async with aiordma.listen(address, 0):
                pass
        await settle()  # its threads close descriptors

    asyncio.run(once())
    # What was imported will not be garbage. After every test all garbage is looked for, and to
    # look through the modules, too, takes longer than many tests.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_lost_events() -> Iterator[None]:
    """Every completion has raised its event: the safety poll once a second hides a lost wake-up.

    A test that loses events on purpose puts the number back.
    """
    yield
    assert CompletionChannel.all_lost_events == 0


@pytest.fixture(autouse=True)
async def clean(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """The oracle after every test: no task, fd, object, lease or unreported error is left."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 60  # a busy machine is no news, and logs are looked at
    reports: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reports.append(context))
    before = adapter_objects(), rdma_descriptors(), leased()
    lost = CompletionChannel.all_lost_events
    yield
    await settle()
    assert CompletionChannel.all_lost_events == lost, "only the safety poll has found them"
    for error in filter(None, (report.get("exception") for report in reports)):
        print("".join(traceback.format_exception(error)))
    assert not reports, f"errors that nobody handled: {reports}"
    with contextlib.suppress(TimeoutError):
        # A stream whose peer's program has ended closes by a timer, and no task waits for it.
        await until(lambda: (adapter_objects(), rdma_descriptors(), leased()) == before)
    assert (adapter_objects(), rdma_descriptors(), leased()) == before
