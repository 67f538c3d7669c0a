"""Networks that are built in a guest: VLANs, bridges, bonds and macvlan, with devices on top.

The scripts are those of docs/softroce-networks.md, and so are the facts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import Runner
from .networks import CARDS, check, packets, pings, received, run, write
from .programs import LISTENING, rping

pytestmark = pytest.mark.uml


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder with the scripts of the page."""
    write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("script", CARDS)
def test_the_page(softroce: Runner, scripts: Path, script: str) -> None:
    """The command of docs/softroce-networks.md."""
    check(softroce, script, scripts)


def test_iwarp_over_a_vlan(softroce: Runner, scripts: Path) -> None:
    """By devices of the VLAN's own, and without a wait."""
    script = (scripts / "vlan.sh").read_text()
    devices = "".join(f"rdma link add siwv{n} type siw netdev veth{n}.7\n" for n in (0, 1))
    (scripts / "vlan.sh").write_text(re.sub("^ready .*\n", devices, script, flags=re.M))
    card = received("veth1.7")
    program = f"{card}; ({rping('10.81.0.2')}); {card}"
    words = ("--hosts", "2", "--device", "siw", "--", "sh", "-e", "vlan.sh")
    lines = run(softroce, *words, "sh", "-e", "-c", program, folder=scripts)
    assert pings(lines) == 5
    assert packets(lines) > 10


def test_ipv6_over_a_vlan(softroce: Runner, scripts: Path) -> None:
    """With the rule and the routes of which the page tells."""
    program = f"""
        for end in 0 1; do
            ip -6 rule add pref 10 iif veth$end.7 lookup local
            ip address add fd81::$((end + 1))/64 dev veth$end.7 nodad
            ip -6 route add fd81::$((2 - end)) dev veth$end.7 src fd81::$((end + 1)) table 100
        done
        for end in 1 2; do
            until ibv_devinfo -v | grep -q fd81::$end,; do sleep 0.1; done
        done
        {received("veth1.7")}
        ({rping("fd81::2")})
        {received("veth1.7")}
    """
    words = ("--hosts", "2", "--", "sh", "-e", "vlan.sh", "sh", "-e", "-c", program)
    lines = run(softroce, *words, folder=scripts)
    assert pings(lines) == 5
    assert packets(lines) > 10


#: The active link of the bond goes down, and the other one takes its place.
_SWITCH = """
    cat /sys/class/net/bond0/bonding/active_slave
    ip link set veth0 down
    until grep veth2 /sys/class/net/bond0/bonding/active_slave; do sleep 0.02; done
"""


def test_soft_roce_on_a_bond_that_loses_a_link(softroce: Runner, scripts: Path) -> None:
    """New connections take the other link; the GID of those before is gone from its place."""
    listed = "ibv_devinfo -d rxea -v | grep ::ffff:10.81.0.1,"
    # The kernel replaces the GID behind the change.
    program = f"""
        rping -s -a 10.81.0.2 & {LISTENING}
        rping -c -a 10.81.0.2 &
        until rdma resource show qp | grep -q 'rxea.*RC state RTS'; do sleep 0.02; done
        before=$({listed})
        {_SWITCH}
        until after=$({listed}) && test "$after" != "$before"; do sleep 0.02; done
        echo "$before"; echo "$after"
        kill %1 %2
        wait || true
        {received("veth3")}
        ({rping("10.81.0.2")})
        {received("veth3")}
    """
    words = ("--hosts", "2", "--", "sh", "-e", "bond.sh", "bash", "-e", "-c", program)
    lines = run(softroce, *words, folder=scripts)
    before, after = (line.split(":")[0].strip() for line in lines if "GID[" in line)
    assert before != after
    assert [line for line in lines if line.startswith("veth")] == ["veth0", "veth2"]
    assert pings(lines) == 5
    assert packets(lines) > 10


def test_iwarp_on_a_bond_that_loses_a_link(softroce: Runner, scripts: Path) -> None:
    """A connection goes on."""
    script = (scripts / "bond.sh").read_text().replace("rxe", "siw")
    (scripts / "bond.sh").write_text(re.sub("^ready .*\n", "", script, flags=re.M))
    program = f"""
        rping -s -a 10.81.0.2 > /dev/null & {LISTENING}
        rping -c -v -a 10.81.0.2 > /dev/shm/said &
        came() {{ grep -c 'ping data: rdma-ping-' /dev/shm/said || true; }}
        until test $(came) -gt 20; do sleep 0.02; done
        {_SWITCH}
        {received("veth3")}
        before=$(came)
        until test $(came) -gt $((before + 20)); do sleep 0.02; done
        {received("veth3")}
    """
    words = ("--hosts", "2", "--device", "siw", "--", "sh", "-e", "bond.sh")
    lines = run(softroce, *words, "sh", "-e", "-c", program, folder=scripts)
    assert lines[:2] == ["veth0", "veth2"]
    assert packets(lines) > 10


@pytest.mark.parametrize("device", ["rxe", "siw"])
def test_which_cards_take_a_device(softroce: Runner, tmp_path: Path, device: str) -> None:
    """And that a guest has none of these cards before they are made."""
    script = f"""
        ls /sys/class/net
        ip link add br0 type bridge
        ip link add link dummy0 name dummy0.7 type vlan id 7
        ip link add link dummy0 name mv0 type macvlan mode bridge
        ip link add bond0 type bond mode active-backup
        for card in br0 dummy0.7 mv0 bond0; do
            if rdma link add d$card type {device} netdev $card 2> /dev/shm/said
            then echo $card: taken
            else echo $card: $(cat /dev/shm/said)
            fi
        done
    """
    words = ("--device", device, "--", "sh", "-e", "-c", script)
    cards, lines = [], run(softroce, *words, folder=tmp_path)
    while ": " not in lines[0]:
        cards.append(lines.pop(0))
    assert {"br0", "bond0"}.isdisjoint(cards)
    vlan = "taken" if device == "siw" else "error: Operation not permitted"
    assert lines == ["br0: taken", f"dummy0.7: {vlan}", "mv0: taken", "bond0: taken"]
