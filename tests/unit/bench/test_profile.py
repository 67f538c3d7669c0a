"""Profiles: whose an address is, which layer it belongs to, and the tables made of it."""

from __future__ import annotations

import base64
import ctypes
import json
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest

from tests.bench import (
    floors,
    jobs,
    machine,
    profile,
    profile_counts,
    profile_limits,
    profile_tables,
    report,
)
from tests.bench.layers import UNKNOWN
from tests.bench.profile_counts import Profile
from tests.bench.profile_jobs import HALF, ROWS
from tests.bench.symbols import KERNEL, Maps, Place, Table, kernel

KALLSYMS = """\
ffffffff81000000 T _text
ffffffff81000100 T __x64_sys_read
ffffffff81000140 t memset_erms
ffffffff81000180 D jiffies
ffffffffc0000000 t rxe_crc32\t[rdma_rxe]
"""
PYTHON = "/usr/lib/libpython3.11.so.1.0"


def block(kind: str, *pairs: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<QQ", *pair) for pair in ((ord(kind), len(pairs)), *pairs))


def test_a_name_stands_for_its_size() -> None:
    table = Table([(0x100, 0x10, "f", "lib"), (0x200, 0, "g", "lib")])
    assert table.find(0xFF) is None
    assert table.find(0x10F) == Place("lib", "f", 0x100)
    assert table.find(0x110) == Place("lib", "f+", 0x100)
    assert table.find(0x9999) == Place("lib", "g", 0x200)


def test_of_several_names_the_one_with_the_most_code_counts() -> None:
    table = Table([(1, 0, "a", ""), (1, 9, "z", ""), (1, 9, "y", "")])
    assert table.find(1) == Place("", "y", 1)


def test_the_kernels_symbols() -> None:
    table = kernel(KALLSYMS)
    assert table.find(0xFFFFFFFF81000141) == Place(KERNEL, "memset_erms", 0xFFFFFFFF81000140)
    # Data is no function.
    assert table.find(0xFFFFFFFF81000180) == Place(KERNEL, "memset_erms", 0xFFFFFFFF81000140)
    assert table.find(0xFFFFFFFFC0000004) == Place("rdma_rxe", "rxe_crc32", 0xFFFFFFFFC0000000)


def test_a_function_of_this_process_is_found() -> None:
    maps = Maps(Path("/proc/self/maps").read_text())
    libc = ctypes.CDLL(None)
    address = ctypes.cast(libc.qsort_r, ctypes.c_void_p).value
    assert address is not None
    place = maps.find(address)
    assert place.begin == address
    assert "libc" in place.file
    assert "qsort_r" in place.function
    assert maps.find(16) == Place("", "?", 0)


def test_the_last_window_of_a_program_counts() -> None:
    data = block("J") + block("S", (1, 2)) + block("S", (3, 4)) + block("J") + block("J")
    assert profile_counts.windows(data) == [[(3, 4)], [], []]


@pytest.mark.parametrize(
    "data", [block("S", (1, 2)), block("X"), block("J") + block("S", (1, 2))[:-8]]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, struct.error)):
        profile_counts.windows(data)


def test_counts_are_attributed_and_held_against_the_clock() -> None:
    row = next(row for row in ROWS if row.unit == HALF)
    counts = [(0xFFFFFFFF81000100, 6), (0xFFFFFFFF81000104, 6), (0xFFFFFFFF81000144, 30), (16, 8)]
    found = profile_counts.attribute(row, "125\n", kernel(KALLSYMS), counts)
    assert found.instructions == 50
    assert found.closure == pytest.approx(0.8)
    # Calls are what was executed where a function begins.
    assert found.calls == {"read": 6}
    assert not found.events
    assert profile_tables.by_layer(found) == {
        "kernel: system calls, files, checks": 12,
        "kernel: memory": 30,
        UNKNOWN: 8,
    }


def test_the_programs_in_c_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "FOLDER", tmp_path)
    machine.compile_programs(("instructions", "marks", "floors"))
    listed = subprocess.run(
        ["readelf", "-sW", "--dyn-syms", tmp_path / "instructions.so"],
        capture_output=True, text=True, check=True, timeout=30,
    ).stdout  # fmt: skip
    assert "qemu_plugin_install" in listed
    assert "qemu_plugin_version" in listed
    module = floors.load(tmp_path / "floors.so")
    with pytest.raises(OSError, match="an id"):
        module.connect(False, "no address", 1)
    # A window from one call to the next; whether there is a device to make an id for is the same.
    window = tmp_path / "window"
    script = "import ctypes as c; l = c.CDLL(None); i = c.c_void_p()\n"
    script += "for _ in range(2): l.rdma_create_id(None, c.byref(i), None, 0x106)"
    environment = {
        "LD_PRELOAD": f"{tmp_path / 'marks.so'}:librdmacm.so.1",
        "BENCH_START": "rdma_create_id:1",
        "BENCH_STOP": "rdma_create_id:2",
        "BENCH_WINDOW": str(window),
    }
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=30)
    ns, _, maps = window.read_text().partition("\n")
    assert int(ns) > 0
    assert "marks.so" in maps


def run(tmp_path: Path) -> tuple[Path, Path]:
    """Files as a run leaves them: one program failed."""
    first, second = ROWS[:2]
    symbols = base64.b64encode(zlib.compress(KALLSYMS.encode())).decode()
    lines: list[dict[str, object]] = [
        {"versions": {}},
        {"name": first.row, "error": "", "window": "100\n", "client": "", "server": ""},
        {"name": second.row, "error": "client: exit status 1", "window": "", "client": "why"},
        {"symbols": symbols},
    ]
    told, counts = tmp_path / "lines", tmp_path / "counts"
    told.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts.write_bytes(block("J") + block("S", (0xFFFFFFFF81000140, 50)) + block("J"))
    return told, counts


def test_what_failed_is_told(tmp_path: Path) -> None:
    found = list(profile_counts.read(*run(tmp_path), ROWS))
    assert isinstance(found[0], Profile)
    assert found[0].closure == 1
    assert found[1] == f"{ROWS[1].row}: client: exit status 1: why"


def test_a_guest_that_ended_early_is_told(tmp_path: Path) -> None:
    told, counts = run(tmp_path)
    told.write_text("\n".join(told.read_text().splitlines()[:-1]))
    assert list(profile_counts.read(told, counts, ROWS)) == [
        "the guest ended before its last program"
    ]


def test_the_pages_have_room_for_the_tables(tmp_path: Path) -> None:
    for name in "profile.md", "hot-path.md":
        (tmp_path / name).write_text((report.DOCS / name).read_text())
    place = Place(KERNEL, "memset_erms", 0)
    profiles = [
        Profile(
            row,
            2 * 7654 * row.number,
            Counter({place: 7654 * row.number}),
            calls=Counter(read=row.number),
        )
        for row in ROWS
    ]
    profile.write(profiles, tmp_path)
    text = (tmp_path / "profile.md").read_text()
    # Of messages, of floors and of connecting, each as many tables as a phone asks for.
    assert text.count("| **together** | 7,654") == 2 + 2 + 3
    assert "100.000%" in text
    assert text.count("<!-- profile:") == text.count("<!-- end:") == 12
    assert "| read | 1 |" in (tmp_path / "hot-path.md").read_text()


def test_the_programs_of_a_profile_have_names_of_their_own() -> None:
    assert len({row.row for row in ROWS}) == len(ROWS)
    assert all(row.number > 0 for row in ROWS)
    assert {row.job.name for row in ROWS} == {row.row for row in ROWS}
    assert all(str(jobs.MARKS) in " ".join(row.job.client) for row in ROWS[:1])


def test_a_profile_in_parts_is_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        profile.main(["--record", "send"])
    assert "needs all programs" in capsys.readouterr().err


def test_the_missed_goals_are_all_in_the_table() -> None:
    """Whatever has a goal for a message of 64 bytes or a connection: both loops, both peers."""
    listed = profile_limits.goals()
    names = {row.row for row in ROWS}
    assert len(listed) == 2 * (2 * len(jobs.LOOPS)) + 2
    assert all({ours, theirs, floor} <= names for _, ours, theirs, floor in listed)


@pytest.mark.parametrize(
    ("takes", "floor", "said"),
    [(120, 110, "reached"), (130, 110, "missed"), (130, 126, "missed; the floor is above it")],
)
def test_a_goal_is_held_against_its_floor(takes: int, floor: int, said: str) -> None:
    by_name = {row.row: row for row in ROWS}
    times = {"ib_send_lat -e": 100, "send uvloop": takes, "resume uvloop": floor}
    profiles = [
        Profile(by_name[name], us * by_name[name].number * 1000) for name, us in times.items()
    ]
    (row,) = profile_limits.rows(profiles)
    assert row[2:5] == ("100.0", "<= 1.25", "125.0")
    assert row[5:] == (f"{takes}.0 ({takes / 100:.3f})", f"{floor}.0 ({floor / 100:.3f})", said)


def test_what_is_above_the_floor() -> None:
    by_name = {row.row: row for row in ROWS}
    ours, floor = by_name["send uvloop"], by_name["resume uvloop"]
    copied, freed = Place(KERNEL, "memcpy", 0), Place(KERNEL, "kfree", 0)
    profiles = [
        Profile(ours, 1, Counter({copied: 90 * ours.number, freed: 4 * ours.number})),
        Profile(floor, 1, Counter({copied: 20 * floor.number, freed: 5 * floor.number})),
    ]
    assert profile_limits.above_rows(profiles) == [("kernel: memory", "69"), ("**together**", "69")]
    said = profile_limits.above_text(profiles)
    assert said == "**send uvloop**, above `resume uvloop`: `memcpy` 70, `kfree` -1."


def test_a_rate_is_a_time_the_other_way_round() -> None:
    by_name = {row.row: row for row in ROWS}
    times = {"cmtime": 100, "connect uvloop": 250, "connecting.c": 160}
    profiles = [
        Profile(by_name[name], us * by_name[name].number * 1000) for name, us in times.items()
    ]
    (row,) = profile_limits.rows(profiles)
    assert row[2:] == ("100.0", ">= 0.5", "200.0", "250.0 (0.400)", "160.0 (0.625)", "missed")
