"""`aiordma devices` and `aiordma doctor` where a device is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

LIMIT_S = 60
WITHOUT_CLICK = "import sys; sys.modules['click'] = None; from aiordma.cli.__main__ import main; "


def aiordma(*words: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "aiordma", *words)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *words],
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.fixture
def device_name(is_siw: bool) -> str:
    return "siw0" if is_siw else "rxe0"


@pytest.mark.smoke
def test_devices_for_people(device_name: str, address: str, is_siw: bool) -> None:
    done = aiordma("devices")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["name", device_name]
    assert ["transport", "iWARP" if is_siw else "InfiniBand"] in lines
    assert ["state", "ACTIVE"] in lines
    assert ["link_layer", "Ethernet"] in lines
    if not is_siw:
        assert any(line[1:5] == ["RoCE", "v2", f"::ffff:{address}", "dummy0"] for line in lines)


def test_devices_for_programs(device_name: str, address: str, is_siw: bool) -> None:
    done = aiordma("devices", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    [device] = json.loads(done.stdout)
    assert device["name"] == device_name
    assert len(device["node_guid"]) == 19
    assert "firmware" in device
    [port] = device["ports"]
    assert port["port"] == 1
    assert port["state"] == "ACTIVE"
    assert port["active_mtu"] == 4096
    assert port["link_layer"] == "Ethernet"
    assert port["netdev"] == "dummy0"
    if is_siw:
        assert [gid["type"] for gid in port["gids"]] == ["iWARP"]
        return
    gids = {gid["gid"]: gid for gid in port["gids"]}
    assert gids[f"::ffff:{address}"]["type"] == "RoCE v2"
    assert gids[f"::ffff:{address}"]["netdev"] == "dummy0"
    assert [gid["index"] for gid in port["gids"]] == sorted(gid["index"] for gid in port["gids"])


def test_doctor_finds_nothing_wrong(device_name: str) -> None:
    done = aiordma("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "FAIL" not in done.stdout
    assert f"{device_name} port 1 ACTIVE" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("RDMA can be used: 0 failed")


def test_both_command_lines_say_the_same() -> None:
    for command in ("doctor", "devices"):
        with_click = aiordma(command, "--json")
        without = run("-c", f"{WITHOUT_CLICK}sys.exit(main(['{command}', '--json']))")
        assert without.stderr == with_click.stderr == ""
        assert without.returncode == with_click.returncode == 0
        assert json.loads(without.stdout) == json.loads(with_click.stdout)


def test_doctor_warns_of_the_fork_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMAV_FORK_SAFE", "1")
    done = aiordma("doctor", "--json")
    assert done.returncode == 0
    found: dict[str, Any] = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["fork variables"]["status"] == "WARN"
    assert "multiprocessing" in found["fork variables"]["advice"]
    assert {check["status"] for name, check in found.items() if name != "fork variables"} == {"OK"}
