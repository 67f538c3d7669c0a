"""Networks that are built in a guest: VLANs, bridges, bonds and macvlan, with devices on top.

docs/softroce.md has the facts in a table.
"""

from __future__ import annotations

import pytest

from .conftest import Runner
from .programs import rping

pytestmark = pytest.mark.uml

UML = ("--engine", "uml")
_HERE, _THERE = "10.81.0.1", "10.81.0.2"
#: Of a GID: ::ffff:10.81.0.1 and ::ffff:10.81.0.2.
_GIDS = ("ffff:0a51:0001", "ffff:0a51:0002")


def _wire(card: str, other: str) -> str:
    """Return commands for two cards: an address each, and the way from one to the other.

    They are those of the runner's own pair (network.py), in whose guest this is.
    """
    ends = ((card, _HERE, _THERE, 201), (other, _THERE, _HERE, 202))
    lines = []
    for name, here, there, table in ends:
        settings = {"accept_local": 1, "rp_filter": 0, "arp_ignore": 1, "arp_announce": 2}
        lines += [f"echo {value} > /proc/sys/net/ipv4/conf/{name}/{setting}"
                  for setting, value in settings.items()]  # fmt: skip
        lines += [
            f"ip link set {name} up",
            f"ip address add {here}/24 dev {name}",
            f"ip rule add pref 11 iif {name} lookup local",
            f"ip rule add pref 21 from {here} to {here} lookup local",
            f"ip rule add pref 31 to {there} lookup {table}",
            f"ip route replace {there} dev {name} src {here} table {table}",
        ]
    return "\n".join(lines)


def _await(gid: str) -> str:
    """Wait until a device can be used by this address; the guest's own time limit bounds it."""
    return f"until grep -qs {gid} /sys/class/infiniband/*/ports/1/gids/*; do sleep 0.02; done"


_READY = "\n".join(map(_await, _GIDS))


def _received(card: str) -> str:
    return f'echo "received: $(cat /sys/class/net/{card}/statistics/rx_packets)"'


def _run(softroce: Runner, *options: str, script: str) -> list[str]:
    done = softroce(*UML, *options, "--", "sh", "-e", "-c", script)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    lines: list[str] = done.stdout.decode().splitlines()
    return lines


def _packets(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("received: ")]


@pytest.mark.parametrize(
    "words",
    [
        "br0 type bridge",
        "link dummy0 name dummy0.7 type vlan id 7",
        "link dummy0 name mv0 type macvlan mode bridge",
        "bond0 type bond mode active-backup",
    ],
)
def test_each_kind_can_be_made(softroce: Runner, words: str) -> None:
    name = "dummy0.7" if "vlan id" in words else next(
        word for word in words.split() if word in ("br0", "mv0", "bond0")
    )  # fmt: skip
    lines = _run(softroce, script=f"ip link add {words}; ip -details link show {name}")
    kind = words.partition("type ")[2].split()[0]
    assert any(line.split()[:1] == [kind] for line in lines), lines


@pytest.mark.parametrize("device", ["rxe", "siw"])
def test_which_cards_take_a_device(softroce: Runner, device: str) -> None:
    """A VLAN takes no Soft-RoCE of its own: it is reached by the device of the card below it."""
    lines = _run(
        softroce,
        script=f"""
        ip link add br0 type bridge
        ip link add link dummy0 name dummy0.7 type vlan id 7
        ip link add link dummy0 name mv0 type macvlan mode bridge
        ip link add bond0 type bond mode active-backup
        for card in br0 dummy0.7 mv0 bond0; do
            if rdma link add d$card type {device} netdev $card 2> said; then said=taken
            else said=$(cat said); fi
            echo $card: $said
        done
        """.replace("said;", "/dev/shm/said;").replace("cat said", "cat /dev/shm/said"),
    )
    vlan = "taken" if device == "siw" else "error: Operation not permitted"
    assert lines == ["br0: taken", f"dummy0.7: {vlan}", "mv0: taken", "bond0: taken"]


@pytest.mark.parametrize("device", ["rxe", "siw"])
def test_over_a_vlan(softroce: Runner, device: str) -> None:
    """Soft-RoCE has the addresses of the VLANs on its card; its packets have their tags."""
    # Software iWARP has a device on each VLAN.
    more = "".join(
        f"rdma link add {device}v{end} type {device} netdev veth{end}.7\n" for end in (0, 1)
    )
    script = f"""
        for end in 0 1; do ip link add link veth$end name veth$end.7 type vlan id 7; done
        {_wire("veth0.7", "veth1.7")}
        {more if device == "siw" else _READY}
        {_received("veth0.7")}
        ({rping(_HERE)})
        {_received("veth0.7")}
    """
    lines = _run(softroce, "--hosts", "2", "--device", device, script=script)
    assert sum("ping data: rdma-ping-" in line for line in lines) == 5
    before, after = _packets(lines)
    assert after - before > 10


def test_over_a_macvlan(softroce: Runner) -> None:
    """By its own device; that of the card below claims the address, and gets no packet of it."""
    script = f"""
        rdma link delete rxea
        ip link add link veth0 name mv0 type macvlan mode bridge
        {_wire("mv0", "veth1")}
        rdma link add rxem type rxe netdev mv0
        {_READY}
        ({rping(_HERE)})
        {_received("mv0")}
    """
    lines = _run(softroce, "--hosts", "2", script=script)
    assert sum("ping data: rdma-ping-" in line for line in lines) == 5
    assert _packets(lines)[0] > 10


def test_over_a_bond_and_a_bridge(softroce: Runner) -> None:
    """A bond of two links to a bridge; when the active link goes down, the other one carries on."""
    script = f"""
        rdma link delete rxea
        rdma link delete rxeb
        ip link add veth2 type veth peer name veth3
        ip link add bond0 type bond mode active-backup miimon 20
        ip link add br0 type bridge
        for link in 0 2; do
            ip link set veth$link down; ip link set veth$link master bond0
        done
        for port in 1 3; do ip link set veth$port master br0; ip link set veth$port up; done
        {_wire("bond0", "br0")}
        rdma link add rxea type rxe netdev bond0
        rdma link add rxeb type rxe netdev br0
        {_READY}
        ({rping(_HERE)})
        cat /sys/class/net/bond0/bonding/active_slave
        ip link set veth0 down
        until grep -q veth2 /sys/class/net/bond0/bonding/active_slave; do sleep 0.02; done
        {_received("veth2")}
        ({rping(_HERE)})
        {_received("veth2")}
    """
    lines = _run(softroce, "--hosts", "2", script=script)
    assert "veth0" in lines
    assert sum("ping data: rdma-ping-" in line for line in lines) == 10
    before, after = _packets(lines)
    assert after - before > 10
