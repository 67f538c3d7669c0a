"""Two hosts in one guest: packets cross the wire, and can be lost on it."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from .conftest import Runner
from .programs import rping

pytestmark = [pytest.mark.uml, pytest.mark.two_hosts]

_COUNT = "cat /sys/class/net/veth0/statistics/tx_packets"


@pytest.mark.parametrize("device", ["rxe", "siw"])
def test_packets_cross_the_wire(softroce: Runner, device: str) -> None:
    """Whichever end is the server, and without a word about which card to use."""
    addresses = ["10.80.0.2", "10.80.0.1", "fd80::2", "fd80::1"]
    pings = "; ".join(f"({rping(address, 50)}) >&2 || exit 9; {_COUNT}" for address in addresses)
    done = softroce(
        *("--engine", "uml", "--hosts", "2", "--device", device),
        *("--", "sh", "-c", f"{_COUNT}; {pings}"),
    )
    assert done.returncode == 0, done.stderr
    counts = [int(line) for line in done.stdout.splitlines()]
    assert len(counts) == 5
    # One way; each ping is several messages.
    assert all(after - before > 100 for before, after in itertools.pairwise(counts)), counts
    assert done.stderr.count(b"ping data: rdma-ping-49") == 4


def test_each_end_has_its_own_device(softroce: Runner) -> None:
    script = (
        "echo $AIORDMA_SOFTROCE_ADDR $AIORDMA_SOFTROCE_ADDR2; rdma -j link; "
        f"ip neighbor flush all; ({rping('10.80.0.2')}) >&2 && ip -j neighbor"
    )
    done = softroce("--engine", "uml", "--hosts", "2", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    addresses, links, neighbors = done.stdout.splitlines()
    assert addresses == b"10.80.0.1 10.80.0.2"
    assert [(link["ifname"], link["netdev"]) for link in json.loads(links)] == [
        ("rxea", "veth0"),
        ("rxeb", "veth1"),
    ]
    # The address was resolved by asking on the wire.
    known = {(entry["dst"], entry["dev"]) for entry in json.loads(neighbors)}
    assert ("10.80.0.2", "veth0") in known


def test_loss(softroce: Runner) -> None:
    script = f"({rping('10.80.0.2', 200)}) >&2; echo $?; tc -s qdisc show dev veth0; "
    script += "rdma statistic show link rxea/1"
    done = softroce(
        "--net", "netem loss 5%", "--engine", "uml", "--virtual-time", "--", "sh", "-c", script
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert text.startswith("0\n")
    dropped = re.search(r"dropped (\d+)", text)
    assert dropped is not None
    assert int(dropped[1]) > 0
    repeated = sum(
        int(number)
        for number in re.findall(r"(?:duplicate_request|completer_retry_err) (\d+)", text)
    )
    assert repeated > 0
    assert done.stderr.count(b"ping data: rdma-ping-") == 200
