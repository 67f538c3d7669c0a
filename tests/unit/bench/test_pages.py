"""The tables of docs/ that `make bench` writes, on made-up figures and on none."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import aiordma
from tests.bench import (
    growth_queues,
    growth_sharing,
    jobs,
    machine,
    pages,
    plain,
    report,
    run,
    sweeps,
    tenfold,
)
from tests.bench.goals import judge
from tests.bench.machine import Measured
from tests.bench.pages import PAGES


def measured(**figures: float) -> Measured:
    """One round of each figure; its name is that of the job, a bar, and its own."""
    results: Any = {tuple(name.split("|")): [value] for name, value in figures.items()}
    return Measured(results)


def table(maker: pages.Maker, **figures: float) -> list[list[str]]:
    """The cells of the rows below the heads."""
    parts = maker(measured(**figures), []).split("\n\n")
    lines = [line for part in parts for line in part.splitlines()[2:]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_has_its_markers_and_takes_what_was_not_measured(name: str) -> None:
    rows = [judge(goal, {}) for goal in run.ROWS]
    text = (report.DOCS / name).read_text()
    made = report.page(text, name, Measured(), rows)
    assert report.page(made, name, Measured(), rows) == made
    assert made.count("<!-- bench:") == text.count("<!-- bench:") == len(PAGES[name])


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "-"), (0.0123, "0.0123"), (99.4, "99.4"), (679.6, "680"), (1e4, "10,000")]
)  # fmt: skip
def test_numbers_have_the_digits_that_mean_something(value: float | None, said: str) -> None:
    assert pages.text(value) == said


def test_a_sweep_stands_beside_the_other_program() -> None:
    curve = sweeps.OVER_DEPTH[0]
    ours, theirs = (f"{curve.job_name(who, 16)}|MiB/s" for who in ("ours", "theirs"))
    rows = table(PAGES["benchmarks-all.md"]["depths"], **{ours: 30.0, theirs: 40.0})
    assert next(row for row in rows if row[0] == "16") == ["16", "30", "0.75"]
    assert [row[1:] for row in rows if row[0] == "1"] == [["-", "-"]] * len(sweeps.OVER_DEPTH)
    depths = [str(depth) for depth in sweeps.DEPTHS]
    assert [row[0] for row in rows] == depths * len(sweeps.OVER_DEPTH)


def test_sweeps_go_from_one_byte_to_four_mebibytes_and_to_a_depth_of_256() -> None:
    assert (sweeps.SIZES[0], sweeps.SIZES[-1]) == (1, 4 << 20)
    assert set(plain.ECHOES) <= set(sweeps.SIZES)
    assert (sweeps.DEPTHS[0], sweeps.DEPTHS[-1]) == (1, 256)
    words = [job.client for job in sweeps.OVER_DEPTH[1].jobs()]
    assert all("-t" in command for command in words)


def test_ways_to_wait() -> None:
    name = "wait spin send rate 128|Mpps"
    rows = table(PAGES["perf.md"]["waits"], **{name: 0.0185, "wait spin send lat|us": 3955.9})
    assert [row[-1] for row in rows] == ["3,956", "-", "18.5", "-"]
    assert rows[2][0] == "`send rate 128`, k/s"
    named = {job.name for job in jobs.waits()}
    assert {"wait spin send rate 128", "wait event read lat"} <= named


def test_large_messages_stand_beside_tcp_and_beside_c() -> None:
    figures = {
        "plain echo 65536 uvloop TCP|us": 400.0,
        "ib_send_lat -e 65536|us": 700.0,
        "plain echo 65536 uvloop|us": 840.0,
    }
    rows = table(PAGES["benchmarks.md"]["bulk"], **figures)
    assert rows[0] == ["half a round trip, us", "400", "700", "840"]
    assert all(set(row[1:]) == {"-"} for row in rows[1:])


def test_the_short_page_has_a_few_of_the_rows() -> None:
    found = measured(**{"plain echo 64 uvloop|us": 84.0, "ib_send_lat -e|us": 70.0})
    rows = pages.short(found, run.outcomes(found, run.ROWS)).splitlines()[2:]
    assert rows[0] == "| echo, 64 B, half round trip | ib_send_lat -e | 1.20, less is better |"
    assert [row.endswith(" | - |") for row in rows[1:]] == [True] * (len(pages.SHORT) - 1)


def test_ordinary_programs_stand_beside_tcp_on_the_same_loop() -> None:
    figures = {"plain callers 1 asyncio|us": 300.0, "plain callers 1 asyncio TCP|us": 400.0}
    rows = table(PAGES["benchmarks-all.md"]["plain"], **figures)
    calls = [row[1:] for row in rows if row[0] == "1 caller, a call"]
    assert calls == [["-", "-", "-"], ["300", "400", "0.75"]]
    assert "65,536 bytes, half a round trip" in [row[0] for row in rows]
    assert len(rows) == 2 * (len(plain.BESIDE_TCP) + len(plain.STREAMS))


def test_messages_among_many() -> None:
    name = "growth messages|cost per message at {} connections, {}"
    figures = {
        name.format("1,000", "ours"): 108.0,
        name.format("1,000", "theirs"): 100.0,
        "growth messages|cost per message at 1,000 connections, 10 of them used, ours": 104.0,
    }
    rows = table(PAGES["growth.md"]["messages"], **figures)
    assert rows[-1] == ["1,000", "108", "104", "1.08"]


@pytest.mark.parametrize(
    ("job", "program"), [("sharing", growth_sharing), ("queues", growth_queues)]
)
def test_few_that_are_busy_are_all_where_there_are_few(job: str, program: Any) -> None:
    first = program.SETTINGS[0]
    at_few = program.name(first, program.FEW, "all busy, us")
    at_many = program.name(first, 1000, "10 busy, us")
    figures = {f"growth {job}|{at_few}, ours": 107.0, f"growth {job}|{at_many}, ours": 108.0}
    rows = {row[0]: row[1] for row in table(PAGES["growth.md"][job], **figures)}
    assert rows["10: 10 busy, us"] == "107"
    assert rows["1,000: 10 busy, us"] == "108"
    assert "10: all busy, us" not in rows
    assert rows["1,000: all busy, us"] == "-"


def test_registration() -> None:
    figures = {"growth registration|cache hit, 64 MiB, beside registering it, ours": 42.0}
    rows = table(PAGES["growth.md"]["registration"], **figures)
    assert rows[-1] == ["64 MiB", "-", "-", "42", "-"]
    assert rows[0][0] == "4 KiB"


# Ten times as many


def test_what_an_idle_connection_pins() -> None:
    # As tests/device/test_many.py measures it.
    assert tenfold.pinned(aiordma.ConnectionConfig()) == 65_536
    few: dict[str, Any] = {
        "slot_size": 4096,
        "recv_depth": 32,
        "send_depth": 16,
        "rendezvous_window": 2,
    }
    assert tenfold.pinned(aiordma.ConnectionConfig(**few)) == 49_152
    pool = aiordma.ConnectionConfig(shared_slots=9600, **few)
    assert tenfold.pinned(pool) == 49_152


def test_what_is_above_its_limit_is_marked() -> None:
    figures = {
        "growth memory|memory mappings per connection, connecting end, ours": 4.0,
        "growth memory|processor time per idle connection, connecting end, ours": 21.0,
        "growth connect|connections a second, 100 at once, ours": 130.0,
        "growth registration|rxe0: max_mr, ours": 250_000.0,
        "growth registration|rxe0: max_cqe, ours": 32_767.0,
    }
    rows = {row[0]: row[1:] for row in table(PAGES["growth.md"]["tenfold"], **figures)}
    assert rows["memory mappings"][:2] == ["40,000", "**400,000**"]
    assert rows["local ports towards one listener"][:2] == ["10,000", "**100,000**"]
    assert rows["memory regions"][1:] == ["100,000", "250,000 (`max_mr`)"]
    assert rows["memory regions, pool, all idle"][1] == "100,000"
    busy = rows["processor time without PING, each second"]
    assert busy[:2] == ["210 ms", "**2.1 s**"]
    queues = rows["completion queues, default settings"]
    assert queues[:2] == ["43", "428"]
    assert rows["connecting, both ends together"][:2] == ["76.9 s", "13 min"]
    assert rows["Python memory"][0] == "-"
    assert rows["pinned, default settings"][0] == "655 MB"


# Parts of a run


def test_a_part_of_a_run_keeps_its_output_apart() -> None:
    whole, part = run.files(), run.files(["Growth sharing"])
    assert not set(whole) & set(part)
    assert not set(part) & set(run.files(["growth queues"]))
    assert not set(part) & set(run.files(["Growth", "queues"]))
    assert all(path.parent == whole[0].parent for path in part)


def test_a_part_is_all_jobs_with_one_of_the_texts() -> None:
    every = run.everything()
    assert run.named(every, []) == every
    part = [job.name for job in run.named(every, ["ibverbs", "plain echo 64 uvloop"])]
    echo = "plain echo 64 uvloop"
    assert part == [echo, f"{echo} TCP", f"{echo} pyzmq", "ibverbs"]


def test_a_part_takes_the_place_of_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = measured(**{"plain echo 64 uvloop|us": 90.0, "ib_send_lat -e|us": 60.0, "gone|us": 1.0})
    old.versions = {"python": "3", "of others": "5"}
    (tmp_path / "benchmarks.json").write_text(report.document(old, []))
    written: list[Any] = []
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "write", lambda *words: written.append(words))
    part = measured(**{"plain echo 64 uvloop|us": 80.0})
    part.versions = {"python": "3", "new": "1"}
    monkeypatch.setattr(run, "measure", lambda only, rounds: part)
    assert run.some(["plain"], None, part=True, again=False) == 0
    ((whole, rows),) = written
    assert whole.results == {("plain echo 64 uvloop", "us"): [80], ("ib_send_lat -e", "us"): [60]}
    assert rows[0].value == pytest.approx(80 / 60)
    assert whole.versions == {"python": "3", "of others": "5", "new": "1"}
    assert run.some(["plain"], None, part=False, again=False) == 0
    part.versions = {"python": "4"}
    assert run.some(["plain"], None, part=True, again=False) == 1
    assert len(written) == 1
    assert "python: 3 when recorded, 4 now" in part.failures[0]


def test_the_program_in_c_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "FOLDER", tmp_path)
    machine.compile_programs()
    program = tmp_path / "one_sided"
    assert subprocess.run([program], check=False, timeout=30).returncode == 2
