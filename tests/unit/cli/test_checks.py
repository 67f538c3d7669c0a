"""What `aiordma doctor` looks at: whatever is broken is told, and nothing hangs."""

from __future__ import annotations

import errno
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


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without a device."""
    made = Machine(tmp_path)
    made.install(monkeypatch)
    return made


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


def test_a_missing_provider(machine: Machine) -> None:
    machine.add()
    machine.add_node("uverbs0", "rxe0")
    found = checks_device.providers()
    assert found.status is Status.FAIL
    assert "ibverbs-providers" in found.advice


def test_a_missing_kernel_module(machine: Machine) -> None:
    machine.add()
    for check in (checks_device.providers, checks_device.nodes):
        found = check()
        assert found.status is Status.FAIL
        assert "modprobe ib_uverbs" in found.advice


def test_a_missing_node(machine: Machine) -> None:
    machine.add()
    machine.add_node("uverbs0", "rxe0")
    (machine.dev / "uverbs0").write_text("")
    found = checks_device.nodes()
    assert found.status is Status.FAIL
    assert found.seen == f"{machine.dev}/rdma_cm is missing; {machine.dev}/uverbs0 is no device"
    assert "--device=/dev/infiniband/rdma_cm" in found.advice


def test_a_link_that_is_down(machine: Machine) -> None:
    machine.add(state="1: DOWN")
    assert checks_device.ports().status is Status.FAIL
    assert checks_device.gids().status is Status.WARN
    machine.add("rxe1")
    found = checks_device.ports()
    assert found.status is Status.WARN
    assert found.seen == "rxe0 port 1 DOWN, rxe1 port 1 ACTIVE"


def test_roce_without_an_ip_address(machine: Machine) -> None:
    port = machine.add(gids=(LINK_LOCAL, EMPTY))
    found = checks_device.gids()
    assert found.status is Status.WARN
    assert "ip address add" in found.advice
    # On InfiniBand the link-local GID is the usual one.
    (port / "link_layer").write_text("InfiniBand\n")
    assert checks_device.gids().status is Status.OK


def test_a_port_without_any_gid(machine: Machine) -> None:
    machine.add(gids=(EMPTY,))
    assert checks_device.gids().status is Status.FAIL


def test_files_that_cannot_be_read_are_no_crash(machine: Machine) -> None:
    (machine.sysfs / "odd0" / "ports" / "1" / "state").mkdir(parents=True)
    (machine.sysfs / "odd1").write_text("no folder")
    assert checks_device.ports().status is Status.FAIL
    assert checks_device.gids().status is Status.WARN
    assert sysfs.netdev("odd0", 1) == ""


INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ((INFINITY, INFINITY), Status.OK),
        ((0, INFINITY), Status.FAIL),
        ((32768, 32768), Status.FAIL),  # less than a connection needs
        ((65536, 65536), Status.WARN),
        ((8 << 20, 8 << 20), Status.OK),
        ((1 << 30, INFINITY), Status.OK),
    ],
)
def test_locked_memory(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], status: Status
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(checks_system, "may_lock", lambda: False)
    found = checks_system.locked_memory()
    assert found.status is status
    assert ("ulimit -l unlimited" in found.advice) is (status is not Status.OK)


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
            assert f"room for {room} connections with default settings" in found.seen


def test_b03_the_size_follows_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_system, "may_lock", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr(checks_system, "DEFAULTS", ConnectionConfig(recv_depth=4, send_depth=4,
                                                                    slot_size=1024))  # fmt: skip
    assert "room for 2 connections" in checks_system.locked_memory().seen


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_b02_a_node_without_permission(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    machine.add()
    machine.add_node("uverbs0", "rxe0")
    for name in ("rdma_cm", "uverbs0"):
        (machine.dev / name).symlink_to("/dev/null")
    monkeypatch.setattr(device_nodes, "trouble", lambda node: code if node.name == "uverbs0" else 0)
    found = checks_device.nodes()
    assert found.status is Status.FAIL
    assert found.seen == f"{machine.dev}/uverbs0 may not be opened by this user"
    assert "0666" in found.advice
    assert "modprobe" not in found.advice


def test_b02_a_manager_without_permission(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise os_error(errno.EACCES, "rdma_create_event_channel")

    machine.add()
    monkeypatch.setattr(checks_device, "EventChannel", refused)
    found = checks_device.connection_manager()
    assert found.status is Status.FAIL
    assert "0666" in f"{found.seen} {found.advice}"
    assert "modprobe" not in f"{found.seen} {found.advice}"


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
