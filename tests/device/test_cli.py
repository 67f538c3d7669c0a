"""`aiordma devices`, `gids` and `doctor` where a device is."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiordma import devices as verbs_devices
from tests.device.shared import OVER_FABRIC, name_of_device
from tests.device.terminal import plain, terminal

pytestmark = [pytest.mark.device, pytest.mark.program]

LIMIT_S = 60
PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
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
    return name_of_device(is_siw)


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
        gid = ["RoCE", "v2", f"::ffff:{address}"]
        # Those of the fabric have no network card.
        assert [*gid, *(() if OVER_FABRIC else ["dummy0"])] in [line[1:5] for line in lines]


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


def test_gids_are_those_of_libibverbs(device_name: str, is_siw: bool) -> None:
    done = aiordma("gids", "--json", device_name)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    with verbs_devices()[0].open() as context:
        table = [
            (entry.port, entry.index, socket.inet_ntop(socket.AF_INET6, entry.gid))
            for entry in context.gid_table()
        ]
    assert [(gid["port"], gid["index"], gid["gid"]) for gid in told] == table
    assert {gid["type"] for gid in told} == {"iWARP" if is_siw else "RoCE v2"}
    assert {gid["netdev"] for gid in told} == {"dummy0"}


def test_gids_as_on_the_page(device_name: str, address: str, is_siw: bool) -> None:
    (block,) = re.findall(r"^```text\n\$ aiordma gids\n(.*?)^```$", PAGE, re.M | re.S)
    printed = block.replace("10.80.0.1", address).splitlines()
    done = aiordma("gids")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == printed[0].split()
    if is_siw:
        assert lines[1].split()[:3] == [device_name, "1", "0"]
        assert lines[1].split()[4:] == ["iWARP", "-", "dummy0"]
        return
    for line, wanted in zip(lines, printed, strict=True):
        pattern = r"\s+".join(re.escape(word).replace(r"\.\.\.", r"\S+") for word in wanted.split())
        assert re.fullmatch(pattern, line), (line, wanted)


def test_gids_in_a_terminal(device_name: str) -> None:
    with terminal([sys.executable, "-W", "error", "-m", "aiordma", "gids"]) as screen:
        assert screen.end() == 0
        assert "\x1b[" in screen.screen
        assert plain(screen.screen) == aiordma("gids").stdout


@pytest.mark.parametrize("node", ["uverbs0", "rdma_cm"])
def test_a_node_that_is_not_mapped(node: str) -> None:
    """As in a container: no module and no package is missing, and none is named."""
    path, aside = Path("/dev/infiniband") / node, Path("/dev/infiniband/aside")
    path.rename(aside)
    try:
        done = aiordma("doctor", "--json")
    finally:
        aside.rename(path)
    assert done.returncode == 1
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["device nodes"]["seen"] == f"{path} is missing, though the kernel has it"
    numbers = path.stat().st_rdev
    command = f"`mknod -m 666 {path} c {os.major(numbers)} {os.minor(numbers)}`"
    assert command in found["device nodes"]["advice"]
    assert f"--device={path}" in found["device nodes"]["advice"]
    assert found["device nodes"]["status"] == "FAIL"
    assert found["connection manager"]["status"] == "SKIP"
    words = " ".join(f"{check['seen']} {check['advice']}" for check in found.values())
    assert not any(word in words for word in ("modprobe", "apt", "dnf", "run `aiordma doctor`"))


def test_both_command_lines_say_the_same() -> None:
    for command in ("doctor", "devices", "gids"):
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
