"""What `aiordma perf` can be asked for, on the command line and by a client."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import pytest

from aiordma.cli.__main__ import main
from aiordma.cli.perf.options import ALL_SIZES, APIS, METRICS, TESTS, Plan


def test_defaults_are_those_of_perftest() -> None:
    lat, bw = Plan.make("send", "lat"), Plan.make("write", "bw")
    assert (lat.sizes, lat.iters, lat.tx_depth, lat.api) == ((2,), 1000, 1, "connection")
    assert (bw.sizes, bw.iters, bw.tx_depth, bw.api) == ((65536,), 1000, 128, "native")
    assert Plan.make("read", "rate").sizes == (64,)
    assert Plan.make("atomic", "lat").sizes == (8,)
    assert Plan.make("send", "bw", all_sizes=True).sizes == ALL_SIZES
    assert (ALL_SIZES[0], ALL_SIZES[-1], len(ALL_SIZES)) == (2, 8 << 20, 23)


@pytest.mark.parametrize(("test", "metric"), list(itertools.product(TESTS, METRICS)))
def test_a_plan_travels(test: str, metric: str) -> None:
    options: list[dict[str, Any]] = [{}, {"duration_s": 1.5}, {"timeout_s": 5.0, "warm_up": 0}]
    if test != "atomic":
        options.append({"all_sizes": True})
    for each in options:
        plan = Plan.make(test, metric, **each)
        assert Plan.from_wire(json.loads(json.dumps(plan.to_wire()))) == plan


INTERFACES = {
    "connection": {"send", "write", "read", "atomic"},
    "native": {"send", "write", "read", "atomic"},
    "protocol": {"stream"},
    "streams": {"stream"},
}


@pytest.mark.parametrize(("test", "metric"), list(itertools.product(TESTS, METRICS)))
def test_what_an_interface_can_do(test: str, metric: str) -> None:
    assert set(INTERFACES) == set(APIS)
    for api, tests in INTERFACES.items():
        if test in tests:
            assert Plan.make(test, metric, api=api).api == api
        else:
            with pytest.raises(ValueError, match=f"--api of {test} {metric} is one of"):
                Plan.make(test, metric, api=api)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"size": 0}, "--size is 1 to 1073741824, not 0"),
    ({"size": 1 << 31}, "--size is"),
    ({"size": 4, "all_sizes": True}, "give one of them"),
    ({"iters": 0}, "--iters is 1 to"),
    ({"duration_s": 0}, "--duration"),
    ({"duration_s": float("nan")}, "--duration"),
    ({"qps": 0}, "--qp is 1 to"),
    ({"tx_depth": 0}, "--tx-depth is 1 to"),
    ({"rx_depth": 20_000}, "--rx-depth is 1 to"),
    ({"tx_depth": 8, "post_list": 9}, "--post-list is 1 to 8, not 9"),
    ({"warm_up": -1}, "--warm-up"),
    ({"timeout_s": 0.0}, "--timeout"),
    ({"timeout_s": float("inf")}, "--timeout"),
    ({"api": "streams"}, "--api of send bw is one of native, connection"),
    ({"api": "connection", "wait": "spin"}, "--wait spin is for --api native"),
    ({"api": "connection", "post_list": 4}, "--post-list is for --api native"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Plan.make("send", "bw", **options)


def test_what_is_refused_for_latency_atomics_and_streams() -> None:
    for options in ({"tx_depth": 2}, {"post_list": 2}, {"qps": 2}):
        with pytest.raises(ValueError, match="leave --"):
            Plan.make("send", "lat", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="8 bytes"):
        Plan.make("atomic", "lat", size=64)
    with pytest.raises(ValueError, match="8 bytes"):
        Plan.make("atomic", "bw", all_sizes=True)
    with pytest.raises(ValueError, match="leave --qp out"):
        Plan.make("stream", "bw", qps=2)


@pytest.mark.parametrize(
    "change",
    [
        {"test": "receive"}, {"metric": "price"}, {"sizes": []}, {"sizes": [0]}, {"sizes": None},
        {"sizes": ["2"]}, {"iters": None}, {"qps": 10**9}, {"wait": "sleep"}, {"more": 1},
        {"sizes": [8] * 24}, {"iters": "5"}, {"timeout_s": "long"},
        {"iters": 5.5}, {"qps": 1.5}, {"warm_up": None}, {"warm_up": -1},
    ],
)  # fmt: skip
def test_a_server_believes_nothing(change: dict[str, Any]) -> None:
    words = {**Plan.make("send", "bw").to_wire(), **change}
    with pytest.raises(ValueError, match=r"."):
        Plan.from_wire(words)


COMMAND_LINES = [
    (["send"], "say what to measure"),
    (["send", "price", "h"], "Invalid value"),
    (["post", "lat", "h"], "Invalid value"),
    (["send", "lat", "h", "--local", "h"], "leave --local and --server out"),
    (["--server", "--local", "h"], "leave --server out"),
    (["send", "lat", "h", "-n", "5", "-D", "1"], "give one of them"),
    (["send", "lat", "h", "-n", "x"], "Invalid value"),
    (["send", "lat", "h", "-n", "0"], "--iters is 1 to"),
    (["send", "lat", "h", "-p", "65536"], "Invalid value"),
    (["send", "lat", "h", "-p", "0"], "--port 0 is for a server"),
    (["send", "lat", "h", "-q", "2"], "leave --qp out"),
    (["send", "lat", "h", "--loop", "trio"], "Invalid value"),
    (["send", "lat", "h", "--wait", "spin"], "--wait spin is for --api native"),
    (["send", "bw", "h", "-U"], "--report-unsorted is for lat"),
    (["send", "lat", "h", "--report_gbits"], "--report_gbits is for bw and rate"),
    (["send", "lat", "h", "--json", "/no/such/folder/file"], "/no/such/folder"),
]


@pytest.mark.parametrize(("words", "said"), COMMAND_LINES)
def test_a_wrong_command_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if words == ["send"]:
        words = ["send", "--local", "h"]
    assert main(["perf", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Usage: aiordma perf" in err


def test_without_uvloop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert main(["perf", "send", "lat", "h", "--loop", "uvloop"]) == 2
    assert "pip install 'aiordma[uvloop]'" in capsys.readouterr().err
