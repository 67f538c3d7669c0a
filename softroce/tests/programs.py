"""Shell commands for the guest that several tests use."""

from __future__ import annotations

#: Until something listens for connections; the guest's own time limit bounds it.
LISTENING = "until rdma resource show cm_id | grep -q LISTEN; do sleep 0.02; done"

#: What an rping says that ends with 255 because it sees its own end.
RACED = "rdma_get_cm_event: Bad file descriptor"


def rping(address: str, count: int = 5) -> str:
    """Return a shell script that pings `address` and has the status of the client.

    It may be run by `sh -e`, too.

    Now and then rping ends with 255 after its last ping: when all pings have come, that is 0.

    The client gives the address two seconds to be resolved, in which the kernel asks twice. On a
    wire that loses packets that is too few once in a hundred times: then it is run again. The
    server waits for a client for ever, and is ended if none came.

    On a wire that loses packets the server may not hear of the end, and is ended, too.
    """
    all_came = f'test "$(echo "$said" | grep -c "ping data: rdma-ping-")" = {count}'
    raced = f'echo "$said" | grep -q "{RACED}"'
    unresolved = 'echo "$said" | grep -q RDMA_CM_EVENT_ADDR_ERROR'
    client = f"status=0; said=$(rping -c -v -a {address} -C {count} 2>&1) || status=$?"
    return (
        f"rping -s -a {address} -C {count} & server=$!; {LISTENING}; "
        f'for try in 1 2 3 4; do {client}; {unresolved} || break; done; echo "$said"; '
        "test $status = 0 || test $status = 255 || kill $server; "
        f"if {unresolved}; then kill $server; fi; "
        "timeout 20 tail --pid=$server -s 0.1 -f /dev/null || kill $server; wait $server || :; "
        f"if test $status = 255 && {all_came} && {raced}; then status=0; fi; exit $status"
    )


def rstream(address: str) -> str:
    """Return a shell script that streams to `address` and has the status of the client."""
    return (
        f"rstream -b {address} -T b -S 65536 -I 10 -C 2 & {LISTENING}; "
        f"rstream -s {address} -T b -S 65536 -I 10 -C 2"
    )
