"""What the programs of the bench print, and what is read out of it."""

from __future__ import annotations

import pytest

from tests.bench.parse import PARSERS

LATENCY = """\
 rdma_cm QPs\t : OFF
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]\
   99% percentile[usec]   99.9% percentile[usec]\x20
 64      300          59.60          67.53        59.62    \t       60.21       \t0.53   \t\t63.93\
   \t\t67.53 \x20
---------------------------------------------------------------------------------------
"""
BANDWIDTH = """\
 Test with events. Using rxe0_comp0
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      300              74.14              48.01  \t\t   0.000768
---------------------------------------------------------------------------------------
"""
TINY = BANDWIDTH.replace("65536", "1    ").replace("48.01", "0.01").replace("0.000768", "0.012749")
RSTREAM = """\
name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer
custom    64k     200     1       25m         0.56s      0.38    1390.56
"""
RSTREAM_SMALL = RSTREAM.replace("64k     200     1       25m ", "64      1       300     37k ")
PINGPONG = """\
  local address:  LID 0x0000, QPN 0x000011, PSN 0x1f8f1b, GID ::ffff:10.80.0.1
38400 bytes in 0.03 seconds = 8.99 Mbit/sec
300 iters in 0.03 seconds = 113.91 usec/iter
"""
SPENT = '{"client": {"user": 1.5, "system": 2}, "server": {"user": 3, "system": 4}}'
PERF_LAT = f'{{"results": [{{"t_avg": 80.5, "t_typical": 79, "cpu_us_per_message": {SPENT}}}]}}'
PERF_BW = f"""\
{{
 "test_info": {{"device": "rxe0"}},
 "results": [{{"BW_average": 70.25, "MsgRate": 0.001124, "cpu_us_per_message": {SPENT}}}]
}}
"""
CMTIME = """\
connecting
step              total ms     max ms     min us  us / conn
create id    :        0.89       0.09      11.00      17.76
resolve addr :        2.45       1.90     858.00      48.96
resolve route:        1.69       1.11     602.00      33.74
create qp    :        7.31       0.27     119.00     146.18
connect      :       37.74      34.81   10694.00     754.84
disconnect   :       20.50       0.41     209.00     410.06
destroy      :        0.59       0.02      11.00      11.82
"""
GROWTH = """\
{"rows": [{"figure": "connections", "ours": 120, "theirs": 200.5, "ratio": 0.6},
          {"figure": "memory", "ours": 15, "theirs": null, "ratio": null}]}
"""


@pytest.mark.parametrize(
    ("parser", "text", "figures"),
    [
        ("perftest_lat", LATENCY, {"us": [60.21]}),
        ("perftest_bw", BANDWIDTH, {"MiB/s": [48.01], "Mpps": [0.000768]}),
        ("perftest_bw", TINY, {"MiB/s": [0.0121584], "Mpps": [0.012749]}),
        ("rstream", RSTREAM, {"us": [1390.56], "MiB/s": [44.94592]}),
        ("rstream", RSTREAM_SMALL, {"us": [1390.56], "MiB/s": [0.0438924]}),
        ("pingpong", PINGPONG, {"us": [113.91 / 2]}),
        ("cmtime", CMTIME, {"connections a second": [1e6 / 1001.48]}),
        ("numbers", '{"lat": 3, "send us": [1, 2.5]}', {"lat": [3], "send us": [1, 2.5]}),
        ("perf", PERF_LAT, {"us": [80.5], "CPU us": [10.5]}),
        ("perf", PERF_BW, {"MiB/s": [70.25], "Mpps": [0.001124], "CPU us": [10.5]}),
        (
            "growth",
            GROWTH,
            {"connections, ours": [120], "connections, theirs": [200.5], "memory, ours": [15]},
        ),
    ],
)  # fmt: skip
def test_figures(parser: str, text: str, figures: dict[str, list[float]]) -> None:
    assert PARSERS[parser](text) == {
        name: pytest.approx(values, rel=1e-5) for name, values in figures.items()
    }


def test_words_before_the_json_do_no_harm() -> None:
    assert PARSERS["numbers"]('a warning\n{"lat": 1}\n') == {"lat": [1]}


@pytest.mark.parametrize("parser", sorted(PARSERS))
@pytest.mark.parametrize("text", ["", "Unable to init the socket connection\n"])
def test_other_output_is_refused(parser: str, text: str) -> None:
    with pytest.raises(ValueError, match="no "):
        PARSERS[parser](text)


def test_two_sizes_are_refused() -> None:
    row = BANDWIDTH.splitlines()[2]
    with pytest.raises(ValueError, match="2 rows"):
        PARSERS["perftest_bw"](BANDWIDTH.replace(row, f"{row}\n{row}"))
