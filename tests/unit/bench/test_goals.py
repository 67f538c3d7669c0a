"""Medians, ratios, goals and the check against what was recorded, on made-up figures."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench import (
    check,
    first,
    jobs,
    machine,
    plain,
    plain_buffers,
    plain_dask,
    plain_death,
    plain_many,
    plain_notes,
    plain_one_sided,
    plain_peer,
    plain_requests,
    plain_streams,
    plain_verbs,
    run,
    tables,
)
from tests.bench.goals import Goal, Sample, judge
from tests.bench.machine import Measured, steps
from tests.bench.parse import PARSERS
from tests.bench.report import between

LATENCY = Goal("lat", "C", ("a", "us"), ("c", "us"), 1.25, guarded=True)
BANDWIDTH = Goal("bw", "C", ("a", "MiB/s"), ("c", "MiB/s"), 0.97, "higher", guarded=True)
FIGURES = {
    ("a", "us"): [70.0, 90.0, 75.0],
    ("c", "us"): [60.0, 61.0, 59.0],
    ("a", "MiB/s"): [97.0],
    ("c", "MiB/s"): [100.0],
}


def test_the_median_is_not_moved_by_one_bad_round() -> None:
    sample = Sample((70.0, 900.0, 75.0))
    assert sample.median == 75
    assert sample.spread == pytest.approx(830 / 75)


def test_a_ratio_is_that_of_the_medians() -> None:
    outcome = judge(LATENCY, FIGURES)
    assert outcome.value == 75 / 60
    assert outcome.verdict == "reached"
    row = tables.goal_row(outcome)
    assert row == ("lat", "C", "75 us ±13.3%", "60 us ±1.7%", "1.250", "<= 1.25", "reached")
    on_a_page = tables.page_goal(row)
    assert on_a_page == ("lat / C", "75 us ±13.3% / 60 us ±1.7%", "1.250", "<= 1.25, reached")


def test_a_wide_table_is_several_on_a_page() -> None:
    head = ("", "a", "b", "c", "d")
    text = tables.stacked(head, [("x", "1", "", "3", "4"), ("y", "", "", "5", "")])
    assert text.split("\n\n") == [
        tables.markdown(("", "a", "b"), [("x", "1", "")]),
        tables.markdown(("", "c", "d"), [("x", "3", "4"), ("y", "5", "")]),
    ]
    assert tables.stacked(head[:4], [("x", "1", "2", "3")]).count("---") == 4


@pytest.mark.parametrize(
    ("goal", "verdict"),
    [
        (LATENCY, "reached"),
        (dataclasses.replace(LATENCY, limit=1.24), "missed"),
        (dataclasses.replace(LATENCY, strict=True), "missed"),
        (BANDWIDTH, "reached"),
        (dataclasses.replace(BANDWIDTH, limit=0.98), "missed"),
        (dataclasses.replace(BANDWIDTH, limit=0.97, strict=True), "missed"),
        (dataclasses.replace(LATENCY, theirs=None, limit=75), "reached"),
        (dataclasses.replace(LATENCY, theirs=None, limit=74), "missed"),
        (dataclasses.replace(LATENCY, theirs=("nobody", "us")), "not measured"),
        (dataclasses.replace(LATENCY, ours=("nobody", "us")), "not measured"),
    ],
)
def test_verdicts(goal: Goal, verdict: str) -> None:
    assert judge(goal, FIGURES).verdict == verdict


def test_a_row_without_a_goal_has_a_ratio_and_no_verdict() -> None:
    goal = dataclasses.replace(LATENCY, limit=math.inf)
    outcome = judge(goal, FIGURES)
    assert outcome.value == 75 / 60
    assert tables.goal_row(outcome)[4:] == ("1.250", "", "")
    assert judge(goal, {}).verdict == "not measured"


def test_every_goal_names_jobs_that_run() -> None:
    ran = {job.name for job in (*run.everything(), *jobs.growth())}
    named = {where[0] for goal in run.ROWS for where in (goal.ours, goal.theirs) if where}
    assert named <= ran


def test_names_of_jobs_are_unique_and_their_parsers_exist() -> None:
    every = [*run.everything(), *jobs.growth()]
    names = [job.name for job in every]
    assert len(set(names)) == len(names)
    assert {job.parse for job in every} <= set(PARSERS)


def test_the_rows_that_are_checked_do_not_share_a_name() -> None:
    rows, needed = run.guarded()
    names = [check.key(judge(goal, {})) for goal in rows]
    assert len(set(names)) == len(names) > 10
    assert {goal.ours[0] for goal in rows} <= {job.name for job in needed}
    ordinary = [goal for goal in plain.ROWS if goal.guarded]
    assert rows[: len(ordinary)] == ordinary
    slow = {goal.beside for goal in plain.ROWS if not goal.guarded}
    assert slow == {
        "pyverbs, event-driven", "the kernel's event", "in C with our sizes", "tcp://", "grpc.aio"
    }  # fmt: skip


def test_ordinary_programs_come_first_and_their_forms_exist() -> None:
    assert run.ROWS[: len(plain.ROWS)] == plain.ROWS
    modules = (
        plain_buffers, plain_dask, plain_death, plain_many, plain_notes, plain_one_sided,
        plain_peer, plain_requests, plain_streams, plain_verbs,
    )  # fmt: skip
    forms: dict[str, Any] = {file.__name__.rpartition(".")[2]: file.FORMS for file in modules}
    ours = [job for job in plain.jobs() if job.name.startswith("plain ")]
    for job in ours:
        program, _, form, number, loop = job.client[:5]
        assert form in forms[program.rpartition(".")[2]]
        assert job.name.startswith(f"plain {form} {number} {loop}")
    assert {goal.ours[0] for goal in plain.ROWS} <= {job.name for job in ours}


def test_rounds_take_turns() -> None:
    once, twice = (jobs.Job(name, "perf", (), rounds=n) for name, n in (("x", 1), ("y", 3)))
    order = [(step["name"], step["number"]) for step in steps([once, twice], rounds=2)]
    assert order == [("x", 0), ("y", 0), ("y", 1)]


# The check


def recorded(change: float, band: float = 0.05) -> dict[str, object]:
    """A record from which the latency has changed by this part since."""
    ratio = 1.25 / (1 + change)
    return {"rows": {"lat / C": {"ratio": ratio, "band": band}}}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (0.0, "ok"),
        (0.049, "ok"),
        (0.06, "SLOWER"),
        (-0.049, "ok"),
        (-0.06, "FASTER: record it"),
    ],
)
def test_a_change_outside_the_band_is_seen_in_both_directions(change: float, verdict: str) -> None:
    (row,) = check.compare([judge(LATENCY, FIGURES)], recorded(change))
    assert row.verdict == verdict
    assert row.passed == (verdict == "ok")
    assert f"{change:+.1%}" in tables.check_row(row)


def test_less_bandwidth_is_slower() -> None:
    record = {"rows": {"bw / C": {"ratio": 1.1, "band": 0.05}}}
    (row,) = check.compare([judge(BANDWIDTH, FIGURES)], record)
    assert row.verdict == "SLOWER"


def test_rows_that_are_missing_on_either_side_do_not_pass() -> None:
    (new, gone) = check.compare([judge(BANDWIDTH, FIGURES)], recorded(0))
    assert (new.verdict, gone.verdict) == ("NOT RECORDED: record it", "NOT MEASURED")
    assert not new.passed
    assert not gone.passed


def test_what_is_recorded_is_what_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    outcomes = [judge(LATENCY, FIGURES), judge(BANDWIDTH, FIGURES)]
    check.write(outcomes, {"python": "3.11.2"}, path)
    kept = check.read(path)
    assert all(row.passed for row in check.compare(outcomes, kept))
    kept["rows"]["lat / C"]["band"] = 0.08
    path.write_text(str(kept).replace("'", '"'))
    check.write(outcomes, {}, path)
    assert check.read(path)["rows"]["lat / C"]["band"] == 0.08


def test_nothing_is_recorded_if_a_figure_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    with pytest.raises(ValueError, match="lat / C was not measured"):
        check.write([judge(LATENCY, {})], {}, path)
    assert not path.exists()


def test_versions_that_differ_are_named() -> None:
    found = check.differences({"python": "3.12", "new": "1"}, {"python": "3.11", "cffi": "2"})
    assert found == [
        "cffi: 2 when recorded, absent now",
        "new: absent when recorded, 1 now",
        "python: 3.11 when recorded, 3.12 now",
    ]


# What the guest tells


def test_a_program_that_failed_or_spoke_otherwise_is_a_failure() -> None:
    measured = Measured()
    job = jobs.Job("x", "numbers", ())
    measured.add(job, {"error": "client: exit status 1", "client": "no device"})
    measured.add(job, {"error": "", "client": "no device"})
    measured.add(job, {"error": "", "client": '{"us": 5}'})
    measured.add(job, {"error": "", "client": '{"us": 6}'})
    assert measured.results == {("x", "us"): [5, 6]}
    assert len(measured.failures) == 2
    assert "no device" in measured.failures[0]


def test_only_what_is_between_the_markers_is_replaced() -> None:
    page = "before\n<!-- bench: x -->\nold\n<!-- end: x -->\nafter\n"
    new = between(page, "x", "| \\1 |")
    assert new == "before\n<!-- bench: x -->\n\n| \\1 |\n\n<!-- end: x -->\nafter\n"
    assert between(new, "x", "| \\1 |") == new
    with pytest.raises(ValueError, match="no pair of markers"):
        between(page, "y", "")


# Guests of each device, and guests that end too early


def told(*names: str) -> list[dict[str, Any]]:
    """What a guest tells that ends after these jobs."""
    lines = [{"name": name, "error": "", "client": '{"us": 1}'} for name in names]
    return [{"versions": {"python": "3"}}, *lines]


Guest = Callable[[list[str], str], Iterator[dict[str, Any]]]


def run_in(
    monkeypatch: pytest.MonkeyPatch, raw: Path, guest: Guest, devices: dict[str, str]
) -> Measured:
    """Run jobs of these names, each on its device, in guests that tell what `guest` does."""

    def guest_lines(
        plan: Path, stall_s: float, *, device: str, counted: bool
    ) -> Iterator[dict[str, Any]]:
        return guest([step["name"] for step in json.loads(plan.read_text())], device)

    monkeypatch.setattr(machine, "guest_lines", guest_lines)
    monkeypatch.setattr(machine, "prepare", lambda _device: None)
    monkeypatch.setattr(machine, "compile_programs", lambda: None)
    measured = Measured()
    every = [
        jobs.Job(name, "numbers", ("true",), rounds=1, device=device)
        for name, device in devices.items()
    ]
    machine.run(every, measured, raw)
    again = machine.read(raw, every)
    assert (again.results, again.failures) == (measured.results, measured.failures)
    return measured


def run_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *guests: list[dict[str, Any]]
) -> tuple[Measured, int]:
    """Run the jobs x, y and z in guests that tell this; how many were started, too."""
    left = iter(guests)
    started = []

    def guest(names: list[str], device: str) -> Iterator[dict[str, Any]]:
        started.append(names)
        yield from next(left)

    devices = dict.fromkeys("xyz", "rxe")
    return run_in(monkeypatch, tmp_path / "raw.jsonl", guest, devices), len(started)


def test_a_job_that_does_not_end_fails_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured, guests = run_with(monkeypatch, tmp_path, told("x"), told("z"))
    assert set(measured.results) == {("x", "us"), ("z", "us")}
    assert measured.failures == ["y: did not end, or ended the guest"]
    assert guests == 2


def test_a_guest_that_does_not_start_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured, guests = run_with(monkeypatch, tmp_path, [], [], told("x", "y", "z"))
    assert len(measured.results) == guests == 3
    assert not measured.failures


def test_a_guest_that_never_starts_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured, guests = run_with(monkeypatch, tmp_path, [], [], [])
    assert measured.failures == ["x: the guest does not start"]
    assert guests == machine.BOOTS


def test_each_device_has_guests_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []

    def guest(names: list[str], device: str) -> Iterator[dict[str, Any]]:
        started.append((device, names))
        yield from told(*names)

    devices = {"x": "rxe", "y": "siw", "z": "rxe"}
    measured = run_in(monkeypatch, tmp_path / "raw.jsonl", guest, devices)
    assert started == [("rxe", ["x", "z"]), ("siw", ["y"])]
    assert len(measured.results) == 3


def test_what_a_guest_told_is_in_the_file_before_it_tells_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raw = tmp_path / "raw.jsonl"
    there = []

    def guest(names: list[str], device: str) -> Iterator[dict[str, Any]]:
        for line in told("x"):
            yield line
            there.append(json.loads(raw.read_text().splitlines()[-1]) == line)

    run_in(monkeypatch, raw, guest, {"x": "rxe"})
    assert there == [True, True]


@pytest.mark.parametrize("busy", [False, True])
def test_what_is_not_counted_is_measured_on_an_idle_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    busy: bool,
) -> None:
    """By itself, and its versions are not those of the figures that are counted."""
    started = []

    def guest_lines(plan: Path, stall_s: float, **how: Any) -> Iterator[dict[str, Any]]:
        names = [step["name"] for step in json.loads(plan.read_text())]
        started.append((names, how["counted"]))
        yield {"versions": {"kernel": "6.1" if how["counted"] else "6.12"}}
        yield from told(*names)[1:]

    monkeypatch.setattr(machine, "guest_lines", guest_lines)
    monkeypatch.setattr(machine, "prepare", lambda _device: None)
    monkeypatch.setattr(machine, "compile_programs", lambda: None)
    monkeypatch.setattr(machine, "used_part", lambda: 0.5 if busy else 0.01)
    measured, raw = Measured(), tmp_path / "raw.jsonl"
    every = [jobs.Job(name, "numbers", ("true",), counted=name == "x") for name in "xy"]
    machine.run(every, measured, raw, rounds=1)
    assert started == [(["x"], True), (["y"], False)][: 2 - busy]
    assert {name for name, _ in measured.results} == set("x" if busy else "xy")
    assert not measured.failures
    assert ("50% of this machine is in use: y" in capsys.readouterr().out) == busy
    for each in (measured, machine.read(raw, every)):
        assert each.versions == {"kernel": "6.1"}


def test_the_use_of_this_machine_is_a_part_of_it() -> None:
    assert 0 <= machine.used_part(0.01) <= 1


# Programs up to their first connection


def test_the_time_of_a_process_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its start to its end, with bytecode, and the round that compiles it is not counted."""
    program = """
import os, sys, time
assert sys.argv[1] == "192.0.2.1"
assert not sys.dont_write_bytecode
assert sys.pycache_prefix
while time.process_time() < {seconds}:
    pass
"""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    programs = {"RDMA": program.format(seconds=0.3), "TCP": program.format(seconds=0.1)}
    monkeypatch.setattr(first, "PROGRAMS", programs)
    found = first.measure("192.0.2.1", 2)
    assert [*found] == ["RDMA s", "TCP s", "more s"]
    assert {len(seconds) for seconds in found.values()} == {2}
    assert min(found["RDMA s"]) >= 0.3
    assert all(0.1 <= seconds < 0.3 for seconds in found["TCP s"])
    assert found["more s"] == pytest.approx(
        [ours - theirs for ours, theirs in zip(found["RDMA s"], found["TCP s"], strict=True)]
    )


def test_a_program_that_fails_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "PROGRAMS", {"RDMA": "raise SystemExit(3)", "TCP": ""})
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        first.measure("192.0.2.1", 1)


def test_the_first_connection_is_judged_by_a_ratio_and_by_seconds() -> None:
    rows = [goal for goal in run.ROWS if goal.ours[0].startswith("first")]
    (counted, seconds) = rows
    found = {("first", "RDMA s"): [2.6], ("first", "TCP s"): [1.0]}
    assert judge(counted, found).verdict == "reached"
    assert tables.goal_row(judge(counted, found))[2:4] == ("2.6 s", "1 s")
    assert judge(seconds, found).verdict == "not measured", "the counted clock has no such seconds"
    assert judge(seconds, {("first, not counted", "more s"): [0.09]}).verdict == "reached"
    assert judge(seconds, {("first, not counted", "more s"): [0.11]}).verdict == "missed"
    assert [job.name for job in run.guarded()[1] if job.name.startswith("first")] == ["first"]
