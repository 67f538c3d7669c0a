"""`aiordma ping` and `aiordma doctor PEER` over a wire with faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from tests.device.commands import aiordma, running
from tests.device.netem import faults

pytestmark = [pytest.mark.device, pytest.mark.two_hosts, pytest.mark.one_loop]


def other() -> tuple[str, str]:
    """The option by which a command connects from the other host."""
    return "-I", os.environ["AIORDMA_SOFTROCE_ADDR2"]


def set_mtu(card: str, mtu: int) -> None:
    subprocess.run(["ip", "link", "set", card, "mtu", str(mtu)], check=True)


def test_a_network_that_drops_large_packets(address: str) -> None:
    """The server's card takes 1,500 bytes, and the client's sends more."""
    with running("echo", "--host", address) as echo:
        echo.line()
        set_mtu("veth0", 1500)
        try:
            done = aiordma("doctor", "--json", "--timeout", "3", *other(), address)
        finally:
            set_mtu("veth0", 9000)
        assert echo.end(signal.SIGTERM).status == 0
    assert done.status == 1
    found = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert found["peer"]["status"] == "OK"
    for step in ("messages there", "messages back", "reads", "writes"):
        assert found[step]["status"] == "FAIL", step
        assert found[step]["seen"].startswith("4 KiB: ")
        assert found[step]["seen"].endswith("; up to 1 KiB passed")
        assert f"`ping -M do -s 4128 {address}`" in found[step]["advice"]


@pytest.mark.usefixtures("wire")
def test_a_wire_that_is_cut_and_mended(address: str) -> None:
    with running("echo", "--host", address) as echo:
        echo.line()
        with running("ping", "-i", "1", "-W", "2", *other(), address) as ping:
            assert ping.line().startswith(f"PING {address} ")
            assert "time=" in ping.line()
            faults("loss", "100%")
            while "lost: no answer within 2 s" not in ping.line():
                pass
            faults()
            while "time=" not in ping.line():
                pass
            done = ping.end()
        assert (done.status, done.err) == (0, "")
        assert echo.end().status == 0
