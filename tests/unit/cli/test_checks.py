"""What `aiordma doctor` looks at: whatever is broken is told, and nothing hangs."""

from __future__ import annotations

import errno
import os
import platform
import resource
import threading
from pathlib import Path

import pytest

from aiordma import ConnectionConfig, device_nodes
from aiordma.cli import bounded, checks_device, checks_system, doctor, sysfs
from aiordma.cli.finding import Finding, Status, ok
from aiordma.endpoint.config import plan_of
from aiordma.errors import os_error
from aiordma.memory import memlock

from .machine import EMPTY, LINK_LOCAL, Machine

LIMIT_S = 60


def test_a_check_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(bounded, "LIMIT_S", 0.05)

    def hang() -> Finding:
        release.wait(LIMIT_S)
        return ok("late")

    try:
        found = doctor.examine(hang)
    finally:
        release.set()
    assert found.status is Status.FAIL
    assert found.seen == "no answer within 0.05 s"


def test_a_check_that_breaks() -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("oh")

    found = doctor.examine(broken)
    assert found.status is Status.FAIL
    assert found.seen == "the check itself failed: ZeroDivisionError: oh"


def test_a_healthy_machine(machine: Machine) -> None:
    machine.add()
    assert checks_device.kernel_devices() == ok("rxe0")
    assert checks_device.ports() == ok("rxe0 port 1 ACTIVE")
    assert checks_device.gids() == ok("number of GIDs: rxe0 port 1: 1")


def test_a_machine_without_a_device_fails_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checks that need the device are no warnings: they were not made."""
    assert checks_device.kernel_devices().status is Status.FAIL
    checks = {
        name: check
        for name, check in doctor.CHECKS.items()
        if check.__module__ == checks_device.__name__
    }
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert doctor.run(as_json=False) == 1
    *lines, verdict = capsys.readouterr().out.splitlines()
    skipped = [line for line in lines if line.startswith("SKIP  ")]
    assert len(skipped) == len(checks) - 1
    assert all("not checked: " in line for line in skipped)
    assert verdict == (
        f"RDMA cannot be used like this: 1 failed, 0 warnings, {len(skipped)} not checked"
    )


def test_the_fabric_has_no_device_of_a_kernel(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no failure, after which a peer would not be tried."""
    monkeypatch.setenv("AIORDMA_FABRIC", "/a/folder")
    found = checks_device.kernel_devices()
    assert (found.status, found.seen) == (
        Status.SKIP,
        "not checked: the fabric is in use, which has none",
    )


def test_a_missing_provider(machine: Machine) -> None:
    machine.add()
    machine.add_node("uverbs0", "rxe0", made=True)
    found = checks_device.providers()
    assert found.status is Status.FAIL
    assert "ibverbs-providers" in found.advice


def test_a_missing_kernel_module(machine: Machine) -> None:
    machine.add()
    for check in (checks_device.providers, checks_device.nodes):
        found = check()
        assert found.status is Status.FAIL
        assert "modprobe ib_uverbs" in found.advice


def test_a_missing_node_of_a_device_is_no_missing_driver(machine: Machine) -> None:
    """As in a container into which it is not mapped: no module and no package is missing."""
    machine.add()
    machine.add_node("uverbs0", "rxe0")
    machine.add_manager(made=True)
    node = f"{machine.dev}/uverbs0"
    found = checks_device.nodes()
    assert found.status is Status.FAIL
    assert found.seen == f"{node} is missing, though the kernel has it"
    assert found.advice == (
        f"in a container, map it by --device={node}; elsewhere `mknod -m 666 {node} c 231 192`"
    )
    found = checks_device.providers()
    assert found.status is Status.SKIP
    assert found.seen == f"not checked: {node} missing"
    assert "install" not in found.advice


def test_a_missing_node_of_the_manager(machine: Machine) -> None:
    machine.add()
    machine.add_node("uverbs0", "rxe0", made=True)
    found = checks_device.nodes()
    assert found.seen == f"{machine.dev}/rdma_cm is missing, as is its kernel module"
    assert found.advice == "`modprobe rdma_ucm`"
    machine.add_manager()
    found = checks_device.nodes()
    assert "though the kernel has it" in found.seen
    assert f"--device={machine.dev}/rdma_cm" in found.advice
    assert f"`mknod -m 666 {machine.dev}/rdma_cm c 10 256`" in found.advice
    assert "modprobe" not in found.advice


def test_a_node_that_is_none(machine: Machine) -> None:
    machine.add()
    machine.add_node("uverbs0", "rxe0")
    machine.add_manager(made=True)
    (machine.dev / "uverbs0").write_text("")
    found = checks_device.nodes()
    assert found.status is Status.FAIL
    assert found.seen == f"{machine.dev}/uverbs0 is no device"
    assert found.advice.startswith("remove it; ")


def test_a_link_that_is_down(machine: Machine) -> None:
    machine.add(state="1: DOWN")
    assert checks_device.ports().status is Status.FAIL
    assert checks_device.gids().status is Status.SKIP
    machine.add("rxe1")
    found = checks_device.ports()
    assert found.status is Status.WARN
    assert found.seen == "rxe0 port 1 DOWN, rxe1 port 1 ACTIVE"
    assert found.advice == "`ip link set dev dummy0 up`, and is the cable of dummy0 in?"


def test_a_link_of_infiniband_that_is_down(machine: Machine) -> None:
    for state, words in (("1: DOWN", "cable"), ("2: INIT", "subnet manager")):
        port = machine.add("mlx5_0" if state == "1: DOWN" else "mlx5_1", state=state)
        (port / "link_layer").write_text("InfiniBand\n")
        assert words in checks_device.ports().advice
        assert "ip link" not in checks_device.ports().advice


def test_roce_without_an_ip_address(machine: Machine) -> None:
    port = machine.add(gids=(LINK_LOCAL, EMPTY))
    found = checks_device.gids()
    assert found.status is Status.WARN
    assert "ip address add" in found.advice
    # On InfiniBand the link-local GID is the usual one.
    (port / "link_layer").write_text("InfiniBand\n")
    assert checks_device.gids().status is Status.OK


def test_a_device_of_another_network_namespace(machine: Machine) -> None:
    """A shared device lists the GIDs of all namespaces, as in a pod."""
    machine.here.clear()
    machine.add()
    found = checks_device.gids()
    assert found.status is Status.FAIL
    assert found.seen == "rxe0 port 1: no GID is of an interface of this network namespace"
    port = machine.add("rxe1")
    (port / "gids" / "0").write_text("2001:0db8:0000:0000:0000:0000:0000:0007")
    machine.here.add("2001:db8::7")
    assert checks_device.gids().status is Status.WARN


def test_a_port_without_any_gid(machine: Machine) -> None:
    machine.add(gids=(EMPTY,))
    assert checks_device.gids().status is Status.FAIL


def test_files_that_cannot_be_read_are_no_crash(machine: Machine) -> None:
    (machine.sysfs / "odd0" / "ports" / "1" / "state").mkdir(parents=True)
    (machine.sysfs / "odd1").write_text("no folder")
    assert checks_device.ports().status is Status.FAIL
    assert checks_device.gids().status is Status.SKIP
    assert sysfs.netdev("odd0", 1) == ""


INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "status", "command"),
    [
        ((INFINITY, INFINITY), Status.OK, ""),
        ((0, INFINITY), Status.FAIL, "`ulimit -l unlimited`"),
        ((32768, 32768), Status.FAIL, ""),  # less than a connection needs
        ((65536, 65536), Status.WARN, ""),
        ((65536, 8 << 20), Status.WARN, "`ulimit -l 8192`"),
        ((8 << 20, 8 << 20), Status.OK, ""),
        ((1 << 30, INFINITY), Status.OK, ""),
    ],
)
def test_locked_memory(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], status: Status, command: str
) -> None:
    """`ulimit` raises it to the hard limit and no further."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(checks_system, "may_lock", lambda: False)
    found = checks_system.locked_memory()
    assert found.status is status
    assert ("limits.d" in found.advice) is (status is not Status.OK)
    assert command in found.advice
    assert ("ulimit -l" in found.advice) is bool(command)


@pytest.mark.parametrize("room", [0, 1, 3, 31, 32])
def test_b03_how_many_connections_fit(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    each = plan_of(ConnectionConfig()).pinned
    monkeypatch.setattr(checks_system, "may_lock", lambda: False)
    for limit in (room * each, (room + 1) * each - 1):
        if not limit:
            continue
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        found = checks_system.locked_memory()
        if room == 0:
            assert found.status is Status.FAIL
            assert "a connection with default settings needs" in found.seen
            assert "slot_size" in found.advice
        else:
            assert found.status is (Status.WARN if room < 32 else Status.OK)
            number = "one connection" if room == 1 else f"{room} connections"
            assert f"room for {number} with default settings" in found.seen


def test_b03_the_size_follows_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_system, "may_lock", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr(checks_system, "DEFAULTS", ConnectionConfig(recv_depth=4, send_depth=4,
                                                                    slot_size=1024))  # fmt: skip
    assert "room for 2 connections" in checks_system.locked_memory().seen


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EACCES, "0666"),
        (errno.EPERM, "--device="),
        (errno.EMFILE, "`ulimit -n`"),
        (errno.EIO, "dmesg"),
    ],
)
@pytest.mark.parametrize("name", ["rdma_cm", "uverbs0"])
def test_b02_a_node_that_cannot_be_opened(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, code: int, remedy: str
) -> None:
    def refused() -> None:
        raise os_error(errno.ENOENT, "rdma_create_event_channel")

    machine.add()
    machine.add_node("uverbs0", "rxe0", made=True)
    machine.add_manager(made=True)
    monkeypatch.setattr(device_nodes, "trouble", lambda node: code if node.name == name else 0)
    found = checks_device.nodes()
    assert found.status is Status.FAIL
    assert found.seen.startswith(f"{machine.dev}/{name} ")
    assert found.seen.endswith(os.strerror(code))
    assert remedy in found.advice
    assert "{" not in found.advice
    monkeypatch.setattr(checks_device, "EventChannel", refused)
    manager = checks_device.connection_manager()
    assert manager.status is Status.SKIP
    assert manager.seen == f"not checked: {found.seen}"
    assert manager.advice == "see `device nodes`, above"
    for each in (found, manager):
        assert "modprobe" not in f"{each.seen} {each.advice}"


def test_a_manager_that_fails_with_good_nodes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise os_error(errno.EMFILE, "rdma_create_event_channel")

    machine.add()
    machine.add_node("uverbs0", "rxe0", made=True)
    machine.add_manager(made=True)
    monkeypatch.setattr(checks_device, "EventChannel", refused)
    found = checks_device.connection_manager()
    assert "`ulimit -n`" in f"{found.seen} {found.advice}"


@pytest.mark.parametrize(
    ("capabilities", "uid_map", "exempt"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("000001ffffffffff", "0 1000 1", False),  # root of a user namespace only
        ("0000000000000000", "0 0 4294967295", False),
    ],
)
def test_who_is_exempt_from_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capabilities: str, uid_map: str, exempt: bool
) -> None:
    (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    (tmp_path / "uid_map").write_text(f"   {uid_map}\n")
    monkeypatch.setattr(memlock, "PROC", tmp_path)
    assert memlock.may_lock() is exempt


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    found = checks_system.open_files()
    assert found.status is Status.WARN
    assert found.seen == "256 (can be raised to 4096)"
    assert "`ulimit -n 1024`" in found.advice
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert "ulimit" not in checks_system.open_files().advice


@pytest.fixture
def no_fork_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_fork_variables")
@pytest.mark.parametrize("name", ["RDMAV_FORK_SAFE", "IBV_FORK_SAFE"])
def test_fork_variables(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert checks_system.fork_variables().status is Status.OK
    # libibverbs asks whether it is there, not what it says.
    monkeypatch.setenv(name, "0")
    found = checks_system.fork_variables()
    assert found.status is Status.WARN
    assert found.seen == f"{name} set"
    monkeypatch.setattr(platform, "release", lambda: "5.10.0-28-amd64")
    found = checks_system.fork_variables()
    assert found.status is Status.OK, "older kernels need it"
