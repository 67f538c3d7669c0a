"""The network cards, addresses and RDMA devices of a run, as commands of iproute2."""

from __future__ import annotations

from dataclasses import dataclass

from .options import DEFAULT_MTU, Options

ADDRESS = "10.80.0.1"
ADDRESS2 = "10.80.0.2"
ADDRESS_V6 = "fd80::1"
ADDRESS2_V6 = "fd80::2"

WRITE = "write"
#: The table of routes over wires whose two ends are in one guest.
WIRES = "100"


@dataclass(frozen=True)
class Device:
    """One RDMA device to be made.

    Attributes:
        name: of the RDMA device, such as ``rxe0``.
        card: the network card it sits on.
        addresses: those of the card; each must have appeared in the table of GIDs before the
            device can be used by address.
    """

    name: str
    card: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The commands to run, in this order, and the conditions to wait for afterwards.

    A step is either a command with its arguments, or `WRITE`, a file below ``/proc/sys`` and the
    text that goes into it.
    """

    steps: tuple[tuple[str, ...], ...]
    devices: tuple[Device, ...]


def plan(options: Options) -> Plan:
    """Return the set-up for `options`: one dummy card, or a pair with a wire between."""
    kind = options.device or "rxe"
    mtu = str(options.mtu or DEFAULT_MTU)
    return _pair(kind, mtu, options.net_words) if options.hosts == 2 else _single(kind, mtu)


def environment(options: Options, engine: str) -> dict[str, str]:
    """Return the environment variables that describe the guest to the command."""
    told = {
        "AIORDMA_SOFTROCE": "1",
        "AIORDMA_SOFTROCE_ENGINE": engine,
        "AIORDMA_SOFTROCE_DEVICE": options.device or "rxe",
        "AIORDMA_SOFTROCE_ADDR": ADDRESS,
    }
    if engine == "qemu":
        # Its root is shared by 9p, where a file that is open and has no name any more cannot be
        # truncated; Python's temporary files are of that kind.
        told["TMPDIR"] = "/dev/shm"
    if options.hosts == 2:
        told["AIORDMA_SOFTROCE_ADDR2"] = ADDRESS2
    if options.virtual_time:
        told["AIORDMA_SOFTROCE_VIRTUAL_TIME"] = "1"
    if options.counted:
        told["AIORDMA_SOFTROCE_COUNTED"] = "1"
    return told


def _single(kind: str, mtu: str) -> Plan:
    name = f"{kind}0"
    return Plan(
        steps=(
            *_card("dummy0", mtu, ADDRESS, ADDRESS_V6),
            ("rdma", "link", "add", name, "type", kind, "netdev", "dummy0"),
        ),
        devices=(Device(name, "dummy0", (ADDRESS, ADDRESS_V6)),),
    )


def _card(card: str, mtu: str, v4: str, v6: str) -> tuple[tuple[str, ...], ...]:
    return (
        # The kernel would hold fresh IPv6 addresses back for a second to look for duplicates.
        (WRITE, f"net/ipv6/conf/{card}/accept_dad", "0"),
        ("ip", "link", "set", "dev", card, "mtu", mtu, "up"),
        ("ip", "address", "replace", f"{v4}/24", "dev", card),
        ("ip", "address", "replace", f"{v6}/64", "dev", card, "nodad"),
    )


@dataclass(frozen=True)
class _End:
    """One end of the pair."""

    card: str
    device: str
    v4: str
    v6: str


def _pair(kind: str, mtu: str, net: tuple[str, ...]) -> Plan:
    """Return two cards in one kernel between which packets cross a wire.

    A kernel delivers packets to an address of its own through the loopback interface, whatever the
    card. Policy routing takes that short cut away: a packet that arrives on a card is looked up as
    local, and `WIRES` is asked for the way to an address before the local addresses are. It names
    the card at the other end. A packet from an address to the same address stays inside, as on any
    machine.

    Rules and settings for IPv4 are those of any card, so that a wire between cards that the command
    makes needs its two routes alone.
    """
    ends = (
        _End("veth0", f"{kind}a", ADDRESS, ADDRESS_V6),
        _End("veth1", f"{kind}b", ADDRESS2, ADDRESS2_V6),
    )
    steps: list[tuple[str, ...]] = [
        ("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"),
        # Sender and receiver are both addresses of this kernel, which it takes for forged.
        (WRITE, "net/ipv4/conf/all/accept_local", "1"),
        (WRITE, "net/ipv4/conf/all/rp_filter", "0"),
        # Each card answers for its own address alone.
        (WRITE, "net/ipv4/conf/all/arp_ignore", "1"),
        (WRITE, "net/ipv4/conf/all/arp_announce", "2"),
    ]
    for end in ends:
        steps += _card(end.card, mtu, end.v4, end.v6)
    # What this kernel sends itself comes "from lo" for a rule.
    steps += _routes("-4", ["not iif lo"], [(end.card, end.v4) for end in ends])
    # For IPv6 the connection manager asks for the way back to a peer without saying from where, and
    # must not be told that the peer is local.
    arriving = [f"iif {end.card}" for end in ends]
    steps += _routes("-6", arriving, [(end.card, end.v6) for end in ends])
    steps += [("rdma", "link", "add", end.device, "type", kind, "netdev", end.card) for end in ends]
    if net:
        steps += [("tc", "qdisc", "add", "dev", end.card, "root", *net) for end in ends]
    return Plan(
        steps=tuple(steps),
        devices=tuple(Device(end.device, end.card, (end.v4, end.v6)) for end in ends),
    )


def _routes(family: str, arriving: list[str], ends: list[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return rules and routes; `arriving` are the selectors of packets that a card has received."""
    rule, route = ("ip", family, "rule"), ("ip", family, "route")
    steps: list[tuple[str, ...]] = [
        (*rule, "add", "pref", "10", *words.split(), "lookup", "local") for words in arriving
    ]
    for (card, here), (_, there) in zip(ends, ends[::-1], strict=True):
        steps += [
            (*rule, "add", "pref", "20", "from", here, "to", here, "lookup", "local"),
            (*route, "add", there, "dev", card, "src", here, "table", WIRES),
        ]
    # A fresh kernel asks for local addresses first. The later rule must be there before the first
    # is removed, or no address is local for a moment.
    steps += [
        (*rule, "add", "pref", "30", "lookup", WIRES),
        (*rule, "add", "pref", "100", "lookup", "local"),
        (*rule, "del", "pref", "0", "lookup", "local"),
    ]
    return steps
