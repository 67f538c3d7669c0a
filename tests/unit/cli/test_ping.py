"""The figures and the lines of `aiordma ping`; messages are sent in tests/device."""

from __future__ import annotations

import json

import pytest

from aiordma.cli.ping import Printer, Tally


def test_the_figures() -> None:
    tally = Tally(sent=5, lost=1, times_ms=[1.0, 2.0, 3.0])
    assert (tally.answered, tally.waiting) == (3, 1)
    assert tally.loss_percent == 25.0, "of those whose fate is known"
    figures = tally.figures()
    assert figures is not None
    assert list(figures) == ["min", "avg", "max", "mdev"]
    assert figures == pytest.approx({"min": 1, "avg": 2, "max": 3, "mdev": (2 / 3) ** 0.5})


def test_no_figures_without_an_answer() -> None:
    assert Tally().figures() is None
    assert Tally().loss_percent == 0.0
    assert Tally(sent=2, lost=2).loss_percent == 100.0


def test_equal_times_have_no_deviation() -> None:
    figures = Tally(sent=3, times_ms=[0.1] * 3).figures()
    assert figures is not None
    assert figures["mdev"] == pytest.approx(0.0, abs=1e-9)


def test_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally(sent=4, lost=1, times_ms=[1.0, 2.0])
    Printer(as_json=False, quiet=True).summary("peer", tally, 1.5)
    assert capsys.readouterr().out == (
        "\n--- peer ping statistics ---\n"
        "4 messages sent, 2 answered, 1 not yet, 33.3333% lost, time 1500 ms\n"
        "rtt min/avg/max/mdev = 1.000/1.500/2.000/0.500 ms\n"
    )
    Printer(as_json=False, quiet=True).summary("peer", Tally(sent=1, lost=1), 0.5)
    assert capsys.readouterr().out == (
        "\n--- peer ping statistics ---\n1 messages sent, 0 answered, 100% lost, time 500 ms\n"
    )


def test_the_summary_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(as_json=True, quiet=False)
    printer.summary("peer", Tally(sent=1, lost=1), 0.5)
    told = json.loads(capsys.readouterr().out)
    assert (told["event"], told["loss_percent"], told["rtt_ms"]) == ("summary", 100.0, None)
    printer.say("lost", ("x", ""), seq=1, error="e\x1b[0m\n")
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert "\x1b" not in text


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(as_json=False, quiet=True)
    printer.say("answer", ("x", ""))
    printer.say("lost", ("x", ""))
    assert capsys.readouterr().out == ""


def test_a_name_shows_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    Printer(as_json=False, quiet=False).summary("a\x1b[31m", Tally(), 0.0)
    assert "\x1b" not in capsys.readouterr().out
