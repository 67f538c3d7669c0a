"""One program on one loop: `python -m tests.programs.one NAME asyncio|uvloop ADDRESS`.

The last line of its output is an object for the table: what went which way, by three witnesses.
The adapter counts its packets, the kernel the TCP connections that it opens, and the switch says
what it decides.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import traceback
from pathlib import Path

from aiordma.streams.policy import new_event_loop
from tests.programs.listed import programs

_LIMIT_S = 60
_SENT = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts")


def packets_sent() -> int:
    return int(_SENT.read_text())


def _tcp_connections() -> int:
    names, values = (
        line.split()[1:]
        for line in Path("/proc/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    return int(dict(zip(names, values, strict=True))["ActiveOpens"])


def main(name: str, loop: str, address: str) -> None:
    """Run it, and print what was seen."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("aiordma")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    packets, connections = packets_sent(), _tcp_connections()
    error = ""
    try:
        with asyncio.Runner(loop_factory=lambda: new_event_loop(uvloop=loop == "uvloop")) as runner:
            runner.run(asyncio.wait_for(programs[name].exchange(address), _LIMIT_S))
    except Exception as exc:
        traceback.print_exc()
        error = f"{type(exc).__name__}: {exc}"
    seen = {
        "name": name,
        "loop": loop,
        "error": error,
        "packets": packets_sent() - packets,
        "tcp_connections": _tcp_connections() - connections,
        "over": [line for line in lines if " over RDMA: " in line and " not over " not in line],
        "not_over": [line for line in lines if " not over RDMA: " in line],
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
