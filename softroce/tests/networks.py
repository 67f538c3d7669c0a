"""The scripts of docs/softroce-networks.md, and a test that is run behind them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from .conftest import REPOSITORY, Runner
from .programs import rping

_PAGE = (REPOSITORY / "docs/softroce-networks.md").read_text()
_FILE = re.compile(r"`(\w+\.sh)`:\n\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ softroce (.*) -- sh -e (\w+\.sh) \./my_test (\S+)$", re.MULTILINE)
_COMMANDS = {script: (options, peer) for options, script, peer in _COMMAND.findall(_PAGE)}
#: The cards that packets to the peer of a script arrive on.
CARDS = {"vlan.sh": "veth1.7", "bridge.sh": "veth1", "macvlan.sh": "veth1", "bond.sh": "br0"}


def write(folder: Path) -> None:
    """Write the scripts of the page."""
    for name, text in _FILE.findall(_PAGE):
        (folder / name).write_text(text)


def run(softroce: Runner, *words: str, folder: Path) -> list[str]:
    """Run a command that has to succeed, with `uml` if no engine is named; return its lines."""
    done = softroce("--engine", "uml", *words, cwd=folder)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    lines: list[str] = done.stdout.decode().splitlines()
    return lines


def received(card: str) -> str:
    """Return a command that says how many packets have come in, for `packets`."""
    return f'echo "received: $(cat /sys/class/net/{card}/statistics/rx_packets)"'


def packets(lines: list[str]) -> int:
    """How many packets have come in between the two times that `received` was asked."""
    before, after = (int(line.split()[1]) for line in lines if line.startswith("received: "))
    return after - before


def pings(lines: list[str]) -> int:
    """How many pings a client has seen."""
    return sum("ping data: rdma-ping-" in line for line in lines)


def check(softroce: Runner, script: str, folder: Path, *options: str) -> None:
    """Run the command of the page for a script, with a test that pings from both sides."""
    assert set(_COMMANDS) == set(CARDS)
    words, peer = _COMMANDS[script]
    card = received(CARDS[script])
    program = f"{card}; ({rping(peer)}); {card}; ({rping('10.81.0.1')})"
    (folder / "my_test").write_text(f"#!/bin/sh -e\ntest $1 = {peer}\n{program}\n")
    (folder / "my_test").chmod(0o755)
    command = (*options, *shlex.split(words), "--", "sh", "-e", script, "./my_test", peer)
    lines = run(softroce, *command, folder=folder)
    assert pings(lines) == 10
    assert packets(lines) > 10
