"""CPython's tests of asyncio's streams, TLS, connections and sendfile, over RDMA."""

from __future__ import annotations

import asyncio
import gc
import os
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.harvest import Policy, cases, name_of, over_rdma
from tests.conformance.rdma_loop import RdmaLoop
from tests.conformance.relay import Relay
from tests.conformance.table import RUN, why_left_out

CASES = {
    name_of(case): case
    for module in sorted({run.partition(".")[0] for run in RUN})
    for case in cases(module)
    if why_left_out(name_of(case)) is None
}


@pytest.fixture(scope="session")
def relay() -> Iterator[Relay]:
    relay = Relay(os.environ["AIORDMA_SOFTROCE_ADDR"])
    RdmaLoop.relay = relay
    yield relay
    relay.stop()


@pytest.fixture
def policy(relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever asks asyncio for a new loop gets one that goes over RDMA."""
    monkeypatch.chdir(tmp_path)  # some tests write files where they are
    # asyncio gives TLS 30 seconds to end, which 4 MiB in a guest beside other load do not keep to.
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 120.0)
    asyncio.set_event_loop_policy(Policy())
    yield
    asyncio.set_event_loop_policy(None)


@pytest.mark.parametrize("name", sorted(CASES))
def test_cpython(name: str, policy: None, relay: Relay) -> None:
    before = RdmaLoop.made
    relay.failures.clear()
    result = unittest.TestResult()
    # The tests leave sockets to the collector, and are no more our programs than asyncio is.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unittest.TestSuite([over_rdma(CASES[name])]).run(result)
        gc.collect()
    for _, trace in (*result.errors, *result.failures):
        pytest.fail(f"{trace}\nthe relay's failures: {relay.failures}", pytrace=False)
    assert not result.skipped, f"skipped, and not in the table: {result.skipped}"
    assert result.testsRun == 1
    assert RdmaLoop.made > before, "nothing went over RDMA: the test belongs into the table"
