"""What `make programs` concludes from what its witnesses have seen, and the table it writes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.listed import programs
from tests.programs.run import judged, table

OVER = ["connecting to 10.80.0.1 port 7 over RDMA: rxe0"]
TOLD = ["connecting to 10.80.0.1 port 7 not over RDMA: the program's rule"]
LISTENING = ["listening on 10.80.0.1 port 7 not over RDMA: the program's rule"]
DATAGRAMS = ["a datagram endpoint not over RDMA: the switch is for streams"]


def seen(**kwds: Any) -> dict[str, Any]:
    return {"error": "", "packets": 0, "tcp_connections": 0, "over": [], "not_over": []} | kwds


@pytest.mark.parametrize(
    ("witnesses", "way"),
    [
        (seen(packets=50, over=OVER), "RDMA"),
        (seen(packets=50, over=OVER, not_over=LISTENING), "RDMA"),
        (seen(tcp_connections=1, not_over=TOLD), "TCP"),
        (seen(tcp_connections=1, not_over=TOLD, over=OVER, packets=50), "RDMA and TCP"),
        (seen(not_over=DATAGRAMS), "UDP"),
        (seen(error="OSError: refused", packets=50, over=OVER), "fails: OSError: refused"),
        # What was said and not done, and what was done and not said.
        (seen(over=OVER), "nothing"),
        (seen(packets=50), "nothing"),
        (seen(tcp_connections=1), "TCP without a word"),
        (seen(tcp_connections=1, not_over=LISTENING), "TCP without a word"),
        (seen(tcp_connections=2, not_over=TOLD), "TCP without a word"),
        (seen(tcp_connections=1, packets=50, over=OVER), "TCP without a word"),
    ],
)
def test_h06_what_is_seen_decides(witnesses: dict[str, Any], way: str) -> None:
    assert judged(witnesses) == way


def test_h06_the_table_has_a_row_for_each() -> None:
    ways = {name: dict.fromkeys(("asyncio", "uvloop"), program.expected)
            for name, program in programs.items()}  # fmt: skip
    text = table(ways)
    assert text.count("\n| ") == len(programs) + 2
    assert all(program.why for program in programs.values() if program.expected != "RDMA")
    over = sum(program.expected == "RDMA" for program in programs.values())
    assert text.startswith(f"{over} of {len(programs)} pairs go over RDMA")
    for program in programs.values():
        for package in program.server + program.client:
            assert f"{package} " in text, "its version is in requirements.txt"
