"""Which of the device tests do not run over the fabric, and why; `conftest.py` leaves them out.

A pattern is the name of a file without `test_`, and that of a test; the first that fits is the
reason. What needs the kernel's own RDMA has the mark `kernel` instead.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["LEFT_OUT", "told", "why_left_out"]

_NETWORK = "the addresses, neighbors and routes of a network card"
_EVENT = "the kernel fails the call for an address without a route; here an event says so"
_GUARD = "Soft-RoCE's windows guard no memory, and this adapter's do"
_MTU = "Soft-RoCE drops a datagram that is too long; by the standard it is an error"
_ITSELF = "by the standard who sends to a group does not hear it; on Soft-RoCE it does"
_FIELDS = "the adapter of the fabric has the clock and the fields that Soft-RoCE lacks"
#: On every profile.
LEFT_OUT = {
    "addresses::test_a_dead_address_costs_the_head_start": _NETWORK,
    "addresses::test_all_addresses_fail": _EVENT,
    "addresses::test_errors_of_connects_and_listeners_name_host_and_port": _EVENT,
    "bring_up::test_connected_services[[]3]": "the fabric has no UC",
    "bring_up::test_an_address_that_goes_is_named": _NETWORK,
    "cli::test_devices_for_people": _NETWORK,
    "datagram::test_an_adapter_drops_what_is_longer_than_the_mtu": _MTU,
    "datagram::test_what_does_not_fit_the_receive_is_dropped": _MTU,
    "datagram::test_bad_requests_are_refused_at_the_call": "the errno for an index "
    "without a GID is the kernel's own",
    "datagram::test_the_header_of_a_device_that_talks_to_itself": "a fault of Soft-RoCE",
    "datagram_endpoint::test_ipv6": _NETWORK,
    "datagram_endpoint::test_b05_what_fails_is_named": _NETWORK,
    "extended_queue::test_a_field_that_the_device_has_not*": _FIELDS,
    "extended_queue::test_the_clock_of_a_device_that_has_none": _FIELDS,
    "multicast::*": _ITSELF,
    "shared_memory::test_a_large_message_ends_with_its_connection": _GUARD,
    "shared_memory::test_a_key_serves_each_peer_of_the_memory": _GUARD,
    "shared_memory::test_without_trust": _GUARD,
    "stream_server::test_a_client_that_comes_and_goes_while_it_is_accepted": "a handshake is over "
    "before the test can see it",
    "switch_programs::*": "a socket of TCP at the address of the adapter",
}
#: On one, beside those.
OF_PROFILE: dict[str, dict[str, str]] = {}

_reasons: Counter[str] = Counter()


def why_left_out(name: str, profile: str) -> str:
    """The reason, or an empty text for a test that runs; the name is that of a pattern."""
    every = OF_PROFILE.get(profile, {}) | LEFT_OUT
    return next((reason for pattern, reason in every.items() if fnmatchcase(name, pattern)), "")


def name_of(item: pytest.Item) -> str:
    """What a pattern stands for."""
    return f"{Path(str(item.path)).stem.removeprefix('test_')}::{item.name}"


def _profile() -> str:
    return Path(os.environ.get("AIORDMA_FABRIC_PROFILE", "standard")).stem


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them, and count the reasons."""
    left: list[pytest.Item] = []
    for item in items:
        if reason := why_left_out(name_of(item), _profile()):
            _reasons[reason] += 1
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def told() -> Iterable[str]:
    """A line for each reason, with the number of tests."""
    yield from (f"left out: {count} ({reason})" for reason, count in _reasons.most_common())
