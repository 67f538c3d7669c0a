"""The memory of a container, by the files of control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiordma import ListenerLimits
from aiordma.memory import memlock
from aiordma.memory.memlock import memory_of_machine

MIB = 1 << 20
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
NONE_IN_V1 = 9223372036854771712  # what version 1 says where there is no limit


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A system of its own, as the process sees it."""
    monkeypatch.setattr(memlock, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memlock, "CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc").mkdir()
    memory_of_machine.cache_clear()
    yield tmp_path / "cgroup"
    memory_of_machine.cache_clear()


def belongs_to(line: str) -> None:
    (memlock.PROC / "cgroup").write_text(f"1:cpu:/elsewhere\n{line}\n")


def limited(group: Path, name: str, size: int | str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / name).write_text(f"{size}\n")


def test_a_container_has_what_its_group_may_use(groups: Path) -> None:
    belongs_to("0::/")
    limited(groups, "memory.max", 200 * MIB)
    assert memory_of_machine() == 200 * MIB
    assert ListenerLimits().pinned_bytes == ListenerLimits().process_pinned_bytes == 100 * MIB
    assert ListenerLimits().request_bytes == 50 * MIB
    assert memlock.memory_to_pin() <= 200 * MIB


def test_the_groups_above_limit_it_too(groups: Path) -> None:
    belongs_to("0::/pod/container")
    limited(groups / "pod/container", "memory.max", "max")
    limited(groups / "pod", "memory.max", 300 * MIB)
    assert memory_of_machine() == 300 * MIB


def test_a_group_that_is_seen_as_the_root(groups: Path) -> None:
    """The path is the machine's, and the container has the group itself mounted."""
    belongs_to("0::/kubepods/pod7/abc")
    limited(groups, "memory.max", 400 * MIB)
    assert memory_of_machine() == 400 * MIB


def test_version_1(groups: Path) -> None:
    belongs_to("4:memory:/pod")
    limited(groups / "memory", "memory.limit_in_bytes", NONE_IN_V1)
    assert memory_of_machine() == MACHINE
    limited(groups / "memory/pod", "memory.limit_in_bytes", 500 * MIB)
    memory_of_machine.cache_clear()
    assert memory_of_machine() == 500 * MIB


@pytest.mark.parametrize("line", ["0::/", "0::/../../beside", "4:memory:/pod"])
def test_no_limit_is_that_of_the_machine(groups: Path, line: str) -> None:
    belongs_to(line)
    assert memory_of_machine() == MACHINE


def test_a_system_without_groups(groups: Path) -> None:
    assert memory_of_machine() == MACHINE
