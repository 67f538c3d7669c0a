"""The figures of `aiordma perf`, and the lines and the document in which they stand."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.cli.perf.options import Plan
from aiordma.cli.perf.output import Printer
from aiordma.cli.perf.report import (
    Flow,
    Usage,
    bw_row,
    flow_figures,
    header,
    lat_figures,
    lat_row,
    peak_per_second,
)

# As perftest prints them, without the blanks.
LAT_COLUMNS = (
    "#bytes #iterations t_min[usec] t_max[usec] t_typical[usec] t_avg[usec] t_stdev[usec] "
    "99% percentile[usec] 99.9% percentile[usec]"
)
BW_COLUMNS = "#bytes #iterations BW peak[MiB/sec] BW average[MiB/sec] MsgRate[Mpps]"
FACTS = {
    "device": "rxe0", "transport": "IB", "loop": "asyncio", "server_loop": "uvloop",
    "client_addr": "10.80.0.1", "server_addr": "10.80.0.1",
}  # fmt: skip


def stamps(*samples: int) -> array[int]:
    made = array("q", [1_000_000])
    for sample in samples:
        made.append(made[-1] + sample)
    return made


def test_columns() -> None:
    assert " ".join(header(Plan.make("send", "lat"), gbits=False).split()) == LAT_COLUMNS
    plan = Plan.make("send", "bw")
    assert " ".join(header(plan, gbits=False).split()) == BW_COLUMNS
    in_gbits = BW_COLUMNS.replace("MiB/sec", "Gb/sec")
    assert " ".join(header(plan, gbits=True).split()) == in_gbits


def test_latency_of_known_samples() -> None:
    samples = [1000 * n for n in range(1, 1001)]
    random.Random(5).shuffle(samples)
    figures = lat_figures(64, stamps(*samples), half=False)
    assert (figures["MsgSize"], figures["n_iterations"]) == (64, 1000)
    assert (figures["t_min"], figures["t_max"]) == (1.0, 1000.0)
    assert figures["t_typical"] == figures["percentile_50"] == 500.0
    assert (figures["percentile_90"], figures["percentile_99"]) == (900.0, 990.0)
    assert figures["percentile_99.9"] == 999.0
    assert figures["t_avg"] == 500.5
    assert figures["t_stdev"] == pytest.approx(288.675, abs=1e-3)
    assert figures["samples_ns"] == samples
    half = lat_figures(64, stamps(*samples), half=True)
    for name in ("t_min", "t_max", "t_typical", "t_avg", "t_stdev", "percentile_99"):
        assert half[name] == pytest.approx(figures[name] / 2, abs=1e-3)


@given(st.lists(st.integers(0, 10**10), min_size=1, max_size=50))
def test_latency_of_any_samples(samples: list[int]) -> None:
    figures = lat_figures(2, stamps(*samples), half=False)
    order = [
        figures[name]
        for name in (
            "t_min", "percentile_50", "percentile_90", "percentile_99", "percentile_99.9", "t_max",
        )
    ]  # fmt: skip
    assert order == sorted(order)
    assert figures["t_min"] - 1e-3 <= figures["t_avg"] <= figures["t_max"] + 1e-3
    assert len(lat_row(figures).split()) == 9


def test_latency_without_an_iteration() -> None:
    with pytest.raises(ValueError, match="without an iteration"):
        lat_figures(2, stamps(), half=True)


def test_bandwidth() -> None:
    flow = Flow(messages=100, seconds=2.0, peak=80.0)
    figures = flow_figures(1 << 20, flow, gbits=False)
    assert (figures["BW_average"], figures["BW_peak"]) == (50.0, 80.0)
    assert (figures["MsgRate"], figures["n_iterations"]) == (5e-5, 100)
    in_gbits = flow_figures(1 << 20, flow, gbits=True)
    assert in_gbits["BW_average"] == pytest.approx(50 * (1 << 20) * 8 / 1e9)
    # A peak that was not measured is no less than the average.
    assert flow_figures(1, Flow(10, 1.0, 0.0), gbits=False)["MsgRate"] == 1e-5
    assert bw_row(figures).split() == ["1048576", "100", "80.00", "50.00", "0.000050"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=25))
def test_peak_is_that_of_all_pairs(times: list[tuple[int, int]]) -> None:
    """What perftest finds by trying all pairs."""
    now = 0
    posted: list[int] = []
    completed: list[int] = []
    for gap, takes in times:
        now += gap
        posted.append(now)
        completed.append(max(completed[-1] if completed else 0, now) + takes)
    slowest = min(
        (completed[j] - posted[i]) / (j - i + 1)
        for i in range(len(times))
        for j in range(i, len(times))
    )
    assert peak_per_second(posted, completed, 16) == pytest.approx(16e9 / slowest)


def test_peak_of_nothing() -> None:
    assert peak_per_second([], [], 16) == 0.0


def test_processor_time_per_message() -> None:
    assert Usage(0.5, 0.25).per(1000) == {"user": 500.0, "system": 250.0}
    assert Usage(0.5, 0.25).per(0) == {"user": 500000.0, "system": 250000.0}


def printed(plan: Plan, figures: dict[str, Any], **options: Any) -> None:
    printer = Printer(plan, **{"gbits": False, "unsorted": False, "json_path": None, **options})
    printer.begin(FACTS)
    printer.row(figures)
    printer.end()


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    printed(Plan.make("send", "lat"), lat_figures(64, stamps(2000, 4000, 6000), half=True))
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["64", "3", "1.00", "3.00", "2.00", "2.00", "0.82", "3.00", "3.00"] in lines
    assert "half round trip" in out
    printed(Plan.make("read", "lat"), lat_figures(64, stamps(2000), half=False), unsorted=True)
    out = capsys.readouterr().out
    assert "whole operation" in out
    assert "1, 2.000" in out.splitlines()


@pytest.mark.parametrize("unsorted", [False, True])
def test_document_for_programs(
    unsorted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = lat_figures(64, stamps(2000, 4000), half=True)
    plan = Plan.make("send", "lat", iters=2)
    printed(plan, dict(figures), json_path="-", unsorted=unsorted)
    document = json.loads(capsys.readouterr().out)
    info = document["test_info"]
    assert (info["test"], info["metric"], info["api"]) == ("send", "lat", "connection")
    assert (info["loop"], info["server_loop"], info["wait"]) == ("asyncio", "uvloop", "event")
    assert info["latency_of"] == "half round trip"
    [result] = document["results"]
    assert ("samples_ns" in result) is unsorted
    assert result.pop("samples_ns", [1000, 2000]) == [1000, 2000]
    assert set(result) == {
        "MsgSize", "n_iterations", "t_min", "t_max", "t_typical", "t_avg", "t_stdev",
        "percentile_50", "percentile_90", "percentile_99", "percentile_99.9",
    }  # fmt: skip
    # The same in a file, beside the lines.
    path = tmp_path / "perf.json"
    printed(plan, figures, json_path=str(path), unsorted=unsorted)
    assert LAT_COLUMNS.split()[0] in capsys.readouterr().out
    assert json.loads(path.read_text())["test_info"] == info
