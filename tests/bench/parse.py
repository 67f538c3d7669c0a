"""What the programs print, as numbers: microseconds, MiB/s, millions of messages a second.

Each parser takes the output of a client and returns its figures by name.

Raises:
    ValueError: The output is not the expected one; nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Figures = dict[str, list[float]]


def _table(text: str, first: str) -> list[dict[str, str]]:
    """The rows after a headline that begins with this word, each by its column."""
    lines = [line.split() for line in text.splitlines()]
    # `BW peak[MB/sec]` and `99% percentile[usec]` are two words of one column.
    for number, line in enumerate(lines):
        if line[:1] == [first]:
            columns = re.sub(r"(BW|percentile|%) (?=\S)", r"\1_", " ".join(line)).split()
            rows = [row for row in lines[number + 1 :] if len(row) == len(columns)]
            return [dict(zip(columns, row, strict=True)) for row in rows]
    msg = f"no table with {first!r}: {text[-300:]!r}"
    raise ValueError(msg)


def _only(rows: list[dict[str, str]], text: str) -> dict[str, str]:
    if len(rows) != 1:
        msg = f"{len(rows)} rows where one is expected: {text[-300:]!r}"
        raise ValueError(msg)
    return rows[0]


def perftest_lat(text: str) -> Figures:
    """ib_send_lat and the like, one size: the average."""
    return {"us": [float(_only(_table(text, "#bytes"), text)["t_avg[usec]"])]}


def perftest_bw(text: str) -> Figures:
    """ib_send_bw and the like, one size: the average.

    It prints two digits after the point of the one figure, six of the other.
    """
    row = _only(_table(text, "#bytes"), text)
    rate, mib = float(row["MsgRate[Mpps]"]), float(row["BW_average[MB/sec]"])
    if mib < 10:
        mib = rate * 1e6 * int(row["#bytes"]) / 2**20
    return {"MiB/s": [mib], "Mpps": [rate]}


def rstream(text: str) -> Figures:
    """rstream: microseconds of one transfer, and MiB/s."""
    row = _only(_table(text, "name"), text)
    size = row["bytes"]
    factor = {"k": 1024, "m": 1024**2}.get(size[-1], 1)
    number = int(size.rstrip("km")) * factor
    us = float(row["usec/xfer"])
    return {"us": [us], "MiB/s": [number / us * 1e6 / 2**20]}


def pingpong(text: str) -> Figures:
    """ibv_rc_pingpong: half of what it calls an iteration, a round trip."""
    found = re.search(r"iters in [\d.]+ seconds = ([\d.]+) usec/iter", text)
    if found is None:
        msg = f"no time of an iteration: {text[-300:]!r}"
        raise ValueError(msg)
    return {"us": [float(found[1]) / 2]}


def cmtime(text: str) -> Figures:
    """cmtime: connections a second, of the steps from the creation of the ids to the connection.

    To bind, disconnect and destroy is not part of it.
    """
    steps = ("create id", "resolve addr", "resolve route", "create qp", "connect")
    rows = dict(re.findall(r"^(\w[\w ]*?) *:(?: +[\d.]+){3} +([\d.]+)$", text, re.MULTILINE))
    if missing := [step for step in steps if step not in rows]:
        msg = f"no step {missing[0]!r}: {text[-300:]!r}"
        raise ValueError(msg)
    return {"connections a second": [1e6 / sum(float(rows[step]) for step in steps)]}


def _json(text: str) -> Any:
    """The object in the output: its first line that begins one, and what follows."""
    found = re.search(r"^\{.*", text, re.MULTILINE | re.DOTALL)
    if found is None:
        msg = f"no JSON: {text[-300:]!r}"
        raise ValueError(msg)
    return json.loads(found[0])


def numbers(text: str) -> Figures:
    """The peers in this folder: an object of numbers, or of lists of them."""
    return {
        str(name): [float(number) for number in (value if isinstance(value, list) else [value])]
        for name, value in _json(text).items()
    }


def perf(text: str) -> Figures:
    """`aiordma perf --json -`, one size."""
    results = _json(text)["results"]
    if len(results) != 1:
        msg = f"{len(results)} results where one is expected"
        raise ValueError(msg)
    row = results[0]
    spent = sum(sum(side.values()) for side in row["cpu_us_per_message"].values())
    if "t_avg" in row:
        return {"us": [row["t_avg"]], "CPU us": [spent]}
    return {"MiB/s": [row["BW_average"]], "Mpps": [row["MsgRate"]], "CPU us": [spent]}


def growth(text: str) -> Figures:
    """The programs for growth: each row's sides, by its name."""
    found: Figures = {}
    for row in _json(text)["rows"]:
        for side in "ours", "theirs":
            if row[side] is not None:
                found[f"{row['figure']}, {side}"] = [float(row[side])]
    return found


PARSERS: Mapping[str, Callable[[str], Figures]] = {
    "perftest_lat": perftest_lat,
    "perftest_bw": perftest_bw,
    "rstream": rstream,
    "pingpong": pingpong,
    "cmtime": cmtime,
    "numbers": numbers,
    "perf": perf,
    "growth": growth,
}
