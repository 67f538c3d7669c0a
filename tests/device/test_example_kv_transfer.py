"""The transfer of a KV cache: two processes, and one that is killed in the middle."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.device.running import LIMIT_S, ROOT

pytestmark = [pytest.mark.device, pytest.mark.program]


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
        [sys.executable, "-W", "error", ROOT / "examples" / "kv_transfer.py", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def decoding(processes: list[subprocess.Popen[str]], requests: int) -> str:
    """Start a decode process; its port."""
    processes.append(start("decode", "--host=127.0.0.1", "--port=0", f"--requests={requests}"))
    assert processes[0].stdout is not None
    line = processes[0].stdout.readline()
    assert line.startswith("listening on 127.0.0.1 "), line
    return line.split()[-1]


def prefilling(processes: list[subprocess.Popen[str]], port: str) -> subprocess.Popen[str]:
    processes.append(start("prefill", "--host=127.0.0.1", f"--port={port}"))
    return processes[-1]


def test_every_block_of_every_request_arrives(processes: list[subprocess.Popen[str]]) -> None:
    port = decoding(processes, 30)
    prefill = prefilling(processes, port)
    assert prefill.communicate(timeout=LIMIT_S) == ("30 requests computed\n", "")
    said, complaints = processes[0].communicate(timeout=LIMIT_S)
    assert (processes[0].returncode, prefill.returncode, complaints) == (0, 0, "")
    found = re.findall(r"^request (\d+): \d+ blocks of 4 layers, right$", said, re.M)
    assert sorted(map(int, found)) == list(range(1, 31))


def test_a_prefill_process_that_is_killed(processes: list[subprocess.Popen[str]]) -> None:
    port = decoding(processes, 5_000)
    prefill = prefilling(processes, port)
    assert processes[0].stdout is not None
    assert processes[0].stdout.readline()  # a request was served; the rest is under way
    prefill.kill()
    _, complaints = processes[0].communicate(timeout=LIMIT_S)
    assert processes[0].returncode == 1
    assert complaints.startswith("kv_transfer.py: unhandled errors in a TaskGroup"), complaints


def test_a_decode_process_that_is_interrupted(processes: list[subprocess.Popen[str]]) -> None:
    decoding(processes, 1)
    processes[0].send_signal(signal.SIGINT)
    _, complaints = processes[0].communicate(timeout=LIMIT_S)
    assert (processes[0].returncode, complaints) == (130, "")
