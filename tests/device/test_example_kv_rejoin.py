"""The KV cache whose server is killed: its clients rejoin, and read nothing of an earlier life."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.device.running import LIMIT_S, ROOT

pytestmark = [pytest.mark.device, pytest.mark.program]

ADDRESS = os.environ.get("AIORDMA_SOFTROCE_ADDR", "127.0.0.1")
KILLS = 2


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Those that are added are ended."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", ROOT / "examples" / "kv_rejoin.py", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str], words: str) -> str:
    """The next line of a process with these words."""
    assert process.stdout is not None
    while words not in (line := process.stdout.readline()):
        assert line, process.communicate(timeout=LIMIT_S)
    return line


def serving(processes: list[subprocess.Popen[str]], port: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server: it, and its port."""
    server = start("serve", f"--host={ADDRESS}", f"--port={port}")
    processes.append(server)
    return server, line_of(server, "listening on").split()[3]


def test_clients_rejoin_a_server_that_is_killed(processes: list[subprocess.Popen[str]]) -> None:
    server, port = serving(processes, "0")
    where = (f"--host={ADDRESS}", f"--port={port}")
    clients = [start("read", *where, f"--rejoin={KILLS}") for _ in range(2)]
    processes += clients
    for _ in range(KILLS):
        for client in clients:
            line_of(client, "blocks read, all of them right")
        server.kill()
        server.communicate(timeout=LIMIT_S)
        for client in clients:
            line_of(client, "the connection is lost")
        server, again = serving(processes, port)
        assert again == port
        for client in clients:
            line_of(client, "joined again")
    for client in clients:
        # Not by `communicate`, which passes over what `readline` has read ahead.
        assert client.stdout is not None
        said = client.stdout.read()
        _, complaints = client.communicate(timeout=LIMIT_S)
        assert (client.returncode, complaints) == (0, ""), said
        found = re.search(r"^\d+ blocks read, (\d+) regions of earlier lives refused$", said, re.M)
        assert found, said
        assert int(found[1]) == KILLS * 16, "each block was asked for again in each life"


def test_both_ends_are_interrupted(processes: list[subprocess.Popen[str]]) -> None:
    server, port = serving(processes, "0")
    client = start("read", f"--host={ADDRESS}", f"--port={port}")
    processes.append(client)
    line_of(client, "blocks read, all of them right")
    for process, status in ((client, 130), (server, 0)):  # a server ends in good order
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, complaints) == (status, "")


def test_a_client_whose_server_stays_away_gives_up(processes: list[subprocess.Popen[str]]) -> None:
    server, port = serving(processes, "0")
    where = (f"--host={ADDRESS}", f"--port={port}")
    client = start("read", *where, "--patience=1")
    processes.append(client)
    line_of(client, "blocks read, all of them right")
    server.kill()
    said, complaints = client.communicate(timeout=LIMIT_S)
    assert client.returncode == 1
    assert "the connection is lost" in said
    assert complaints.startswith("kv_rejoin.py: "), complaints
