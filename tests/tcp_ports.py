"""Who listens over TCP, as the system says: a look that disturbs no program."""

from __future__ import annotations

from pathlib import Path

__all__ = ["listens"]

_LISTEN = "0A"  # in /proc/net/tcp


def listens(port: int) -> bool:
    """Whether a TCP socket of the system, as those of software iWARP are, listens on the port."""
    end = f":{port:04X}"
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTEN and local.endswith(end):
                return True
    return False
