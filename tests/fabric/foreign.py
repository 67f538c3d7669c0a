"""The programs of rdma-core and perftest: what each is run with, or why it is left out.

`PROGRAMS` has every program of the packages; docs/fabric-programs.md has the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CASES", "LEFT_OUT", "PACKAGES", "SHOWS", "Case"]

#: Packages of Debian, and the versions with which all of this was seen.
PACKAGES = {
    "rdmacm-utils": "44.0",
    "ibverbs-utils": "44.0",
    "perftest": "4.5+0.17",
}

_ADDRESS = "127.0.0.1"
_GROUP = "239.80.0.7"


@dataclass(frozen=True, slots=True)
class Case:
    """A run of a program with itself.  In the words `{port}` is a port of the test's own.

    Attributes:
        name: Of the test.
        server: The command of the side that waits; empty: there is none.
        client: The command of the other one; empty: there is none.
        ready: As `pair.Plan` has it.
        server_says: A pattern that must be found in what it says.
        client_says: Likewise.
        status: With which both must end; an error is a part of what is shown.
        endless: Whether the server has no end of its own.
        again: What a client says that came too soon, and is run again with a new server.
    """

    name: str
    server: str
    client: str
    ready: str = "rdma {port}"
    server_says: str = ""
    client_says: str = ""
    status: int = 0
    endless: bool = False
    again: str = ""

    @property
    def program(self) -> str:
        """The first word: the one that is on trial."""
        return (self.client or self.server).split()[0]


def _by_address(name: str, words: str, says: str = "", **kwds: object) -> Case:
    """A program whose client is its server with `-s ADDRESS`."""
    client = f"{words} -s {_ADDRESS}"
    return Case(name, words, client, server_says=says, client_says=says, **kwds)  # type: ignore[arg-type]


def _pingpong(name: str, words: str) -> Case:
    """An ibv_*_pingpong, over TCP; its 1000 turns are counted by itself."""
    command = f"{words} -p {{port}} -g 0"
    says = r"(?m)^1000 iters in "
    return Case(name, command, f"{command} {_ADDRESS}", "tcp {port}", says, says)


def _refused_pingpong(name: str, words: str, says: str) -> Case:
    return Case(name, "", f"{words} -p {{port}} -g 0 {_ADDRESS}", client_says=says, status=1)


def _perf(
    name: str, words: str, size: int, *, by_cm: bool = False, server_tells: bool = True
) -> Case:
    """A program of perftest: a table with one row of this size and 200 turns."""
    command = f"{words} -F -n 200 -d fab0 -p {{port}} " + ("-R" if by_cm else "-x 0")
    says = rf"(?m)^ {size} +200 "
    ready = ("rdma" if by_cm else "tcp") + " {port}"
    server_says = says if server_tells else ""
    # With -R the server listens twice, and a client that comes between is refused.
    again = "RDMA_CM_EVENT_REJECTED" if by_cm else ""
    client = f"{command} {_ADDRESS}"
    return Case(name, command, client, ready, server_says, says, again=again)


def _raw(program: str) -> Case:
    words = f"{program} --client -d fab0 -E 00:00:00:00:00:01 -B 00:00:00:00:00:02 -F"
    return Case(program, "", words, client_says=_RAW_SAYS, status=1)


_DONE = r"test complete\nreturn status 0\n\Z"
_RAW_SAYS = r"create QP|Raw Ethernet"
_RPING = "rping {side} -v -C 5 -p {{port}} -a " + _ADDRESS

CASES = (
    Case(
        "rping",
        _RPING.format(side="-s"),
        _RPING.format(side="-c -V"),
        server_says=r"(?s)server ping data: rdma-ping-0: .*server ping data: rdma-ping-4: ",
        client_says=r"(?s)ping data: rdma-ping-0: .*ping data: rdma-ping-4: ",
    ),
    Case(
        "rping-many-clients",
        f"rping -s -P -p {{port}} -a {_ADDRESS}",
        f"rping -c -v -V -C 5 -p {{port}} -a {_ADDRESS}",
        client_says=r"ping data: rdma-ping-4: ",
        endless=True,
    ),
    _by_address("ucmatose", "ucmatose -c 20 -C 10 -S 2000 -p {port}", _DONE),
    _by_address("ucmatose-other-channel", "ucmatose -m -c 20 -C 10 -p {port}", _DONE),
    _by_address("udaddy", "udaddy -c 5 -C 10", _DONE, ready="rdma 7174"),
    Case(
        "mckey",
        f"mckey -m {_GROUP} -b {_ADDRESS}",
        f"mckey -m {_GROUP} -b {_ADDRESS} -s",
        "receiving data transfers",
        _DONE,
        _DONE,
    ),
    Case(
        "cmtime",
        f"cmtime -b {_ADDRESS} -p {{port}}",
        f"cmtime -s {_ADDRESS} -p {{port}} -c 20",
        client_says=r"(?s)^connect  .*^disconnect  .*^destroy  ".replace("^", r"\n"),
        endless=True,
    ),
    Case(
        "rdma_client",
        "rdma_server -p {port}",
        f"rdma_client -s {_ADDRESS} -p {{port}}",
        server_says=r"end 0\n\Z",
        client_says=r"end 0\n\Z",
    ),
    Case(
        "rdma_xclient",
        "rdma_xserver -p {port} -c r",
        f"rdma_xclient -s {_ADDRESS} -p {{port}} -c r",
        client_says=r"post_send: Invalid argument",
        status=22,
        endless=True,
    ),
    _by_address("rstream", "rstream -S 4096 -C 100 -p {port}", r"custom +4k +100 +1 +800k "),
    _by_address("rstream-nonblocking", "rstream -T n -S 1000000 -C 10 -p {port}", r"custom "),
    _by_address("riostream", "riostream -S 4096 -C 100 -p {port}", r"custom +4k +100 +1 +800k "),
    Case(
        "rcopy",
        "rcopy -p {port}",
        f"rcopy {{given}} {_ADDRESS}:{{taken}} -p {{port}}",
        server_says=r"transferring\.\.\.300000 bytes\.\.\.closing\.\.\.done",
        client_says=r"(?m)^300000 bytes in ",
        endless=True,
    ),
    Case(
        "udpong",
        "",
        f"udpong -s {_ADDRESS} -p {{port}}",
        client_says=r"rsocket failed: Protocol not supported",
        status=255,
    ),
    Case("ibv_devices", "", "ibv_devices", client_says=r"(?m)^    fab0 +\t02fab0fffe000000$"),
    Case("ibv_devinfo", "", "ibv_devinfo -v", client_says=r"(?s)hca_id:\tfab0.*PORT_ACTIVE \(4\)"),
    Case("ibv_asyncwatch", "ibv_asyncwatch", "", "fab0: async event FD ", endless=True),
    _pingpong("ibv_rc_pingpong", "ibv_rc_pingpong -c"),
    _pingpong("ibv_rc_pingpong-events", "ibv_rc_pingpong -c -e"),
    _pingpong("ibv_rc_pingpong-new-send", "ibv_rc_pingpong -c -N"),
    _pingpong("ibv_rc_pingpong-timestamps", "ibv_rc_pingpong -c -t"),
    _pingpong("ibv_ud_pingpong", "ibv_ud_pingpong -c"),
    _pingpong("ibv_ud_pingpong-events", "ibv_ud_pingpong -c -e"),
    _pingpong("ibv_srq_pingpong", "ibv_srq_pingpong -c"),
    _pingpong("ibv_srq_pingpong-events", "ibv_srq_pingpong -c -e"),
    _refused_pingpong("ibv_uc_pingpong", "ibv_uc_pingpong", "Couldn't create QP"),
    _refused_pingpong("ibv_xsrq_pingpong", "ibv_xsrq_pingpong", "Couldn't Open the XRC Domain 95"),
    _perf("ib_send_lat", "ib_send_lat", 2),
    _perf("ib_send_lat-cm", "ib_send_lat", 2, by_cm=True),
    _perf("ib_send_lat-events", "ib_send_lat -e", 2),
    _perf("ib_send_lat-ud", "ib_send_lat -c UD", 2),
    _perf("ib_send_bw", "ib_send_bw", 65536),
    _perf("ib_send_bw-cm", "ib_send_bw", 65536, by_cm=True),
    _perf("ib_send_bw-both-ways", "ib_send_bw -b", 65536),
    _perf("ib_send_bw-ud", "ib_send_bw -c UD", 4096),
    _perf("ib_read_lat", "ib_read_lat", 2, server_tells=False),
    _perf("ib_read_bw", "ib_read_bw", 65536),
    _perf("ib_read_bw-cm", "ib_read_bw", 65536, by_cm=True),
    _perf("ib_write_lat", "ib_write_lat", 2),
    _perf("ib_write_bw", "ib_write_bw", 65536),
    _perf("ib_write_bw-cm", "ib_write_bw", 65536, by_cm=True),
    _perf("ib_atomic_lat", "ib_atomic_lat", 8, server_tells=False),
    _perf("ib_atomic_bw", "ib_atomic_bw -A FETCH_AND_ADD", 8),
    _perf("ib_atomic_bw-swap", "ib_atomic_bw -A CMP_AND_SWAP", 8),
    *(_raw(f"raw_ethernet_{name}") for name in ("bw", "lat", "fs_rate")),
)

#: What each program shows that is run, of each package.
SHOWS = {
    "rdmacm-utils": {
        "rping": "connections; SEND, READ and WRITE, each byte compared; `-P` threads",
        "ucmatose": "20 connections at a time, both directions; `-m` moves ids to another channel",
        "udaddy": "datagrams by the connection manager, 5 at a time",
        "mckey": "a multicast group, sender and receiver",
        "cmtime": "20 connections at a time, each step",
        "rdma_client": "`rdma_getaddrinfo`, `rdma_create_ep`, calls that wait",
        "rdma_server": "the same, of the side that listens",
        "rdma_xclient": "refused: it sends inline without having asked for it: `EINVAL`",
        "rdma_xserver": "listens; its client is refused",
        "rstream": "rsockets, blocking and not",
        "riostream": "rsockets, and writes past the stream",
        "rcopy": "a file over rsockets, which arrives byte by byte",
        "udpong": "refused: rsockets of datagrams: `EPROTONOSUPPORT`",
    },
    "ibverbs-utils": {
        "ibv_asyncwatch": "opens the device and waits for its events",
        "ibv_devices": "the list of devices",
        "ibv_devinfo": "all attributes of a device and its port",
        "ibv_rc_pingpong": "RC, bytes compared; `-e` events, `-N` `ibv_wr_*`, `-t` timestamps",
        "ibv_srq_pingpong": "a shared receive queue of 16 queue pairs; `-e` events",
        "ibv_uc_pingpong": "refused: no UC",
        "ibv_ud_pingpong": "UD by hand; `-e` events",
        "ibv_xsrq_pingpong": "refused: no XRC",
    },
    "perftest": {
        "ib_atomic_bw": "fetch-and-add, compare-and-swap",
        "ib_atomic_lat": "fetch-and-add, one at a time",
        "ib_read_bw": "READ; `-R` by the connection manager",
        "ib_read_lat": "READ, one at a time",
        "ib_send_bw": "SEND; `-R`, `-b` both ways, `-c UD`",
        "ib_send_lat": "SEND, one at a time; `-R`, `-e` events, `-c UD`",
        "ib_write_bw": "WRITE; `-R`",
        "ib_write_lat": "WRITE, one at a time",
        "raw_ethernet_bw": "refused: no raw packets",
        "raw_ethernet_fs_rate": "refused: no raw packets",
        "raw_ethernet_lat": "refused: no raw packets",
    },
}

#: Why the others are left out.
LEFT_OUT = {
    "raw_ethernet_burst_lat": "raw packets, and the rate limits of an adapter",
    "run_perftest_loopback": "a script that starts two of the others",
    "run_perftest_multi_devices": "a script that starts the others on several devices",
}
