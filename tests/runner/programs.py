"""Shell commands for the guest that several tests use."""

from __future__ import annotations

#: Until something listens for connections; the guest's own time limit bounds it.
LISTENING = "until rdma resource show cm_id | grep -q LISTEN; do sleep 0.02; done"


def rping(address: str, count: int = 5) -> str:
    """Return a shell script that pings `address` and has the status of the client."""
    return (
        f"rping -s -a {address} -C {count} & {LISTENING}; "
        f"rping -c -v -a {address} -C {count}; status=$?; wait; exit $status"
    )


def rstream(address: str) -> str:
    """Return a shell script that streams to `address` and has the status of the client."""
    return (
        f"rstream -b {address} -T b -S 65536 -I 10 -C 2 & {LISTENING}; "
        f"rstream -s {address} -T b -S 65536 -I 10 -C 2"
    )
