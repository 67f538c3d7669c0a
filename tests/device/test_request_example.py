"""examples/rpc.py, run as it is written."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.device.test_examples import EXAMPLES, LIMIT_S, first_line, start

pytestmark = [pytest.mark.device, pytest.mark.program]

EXAMPLE = str(Path(EXAMPLES) / "rpc.py")
PORT = "18516"
SAID = """\
1 + 2 = 3
100 calls at a time: 9900
add: RequestError: TypeError: unsupported operand type(s) for +: 'int' and 'str'
multiply: RequestUnknownError: no method 'multiply'
sleep: RequestDeadlineError: no answer to the request within 0.5 s
requests: 104
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_service_and_client_and_the_end_by_a_signal(address: str, number: signal.Signals) -> None:
    server = start(EXAMPLE, "server", address)
    try:
        assert first_line(server) == f"listening on {address} {PORT}\n"
        out, err = start(EXAMPLE, "client", address).communicate(timeout=LIMIT_S)
        # The rest of a time limit is a little less than 0.5 s.
        lines = [line if "within" not in line else line.split(" within")[0] for line in
                 out.splitlines()]  # fmt: skip
        wanted = [line.split(" within")[0] for line in SAID.splitlines()]
        assert (lines, err) == (wanted, "")
        assert first_line(server) == "a caller gave up\n"
        server.send_signal(number)
        out, err = server.communicate(timeout=LIMIT_S)
    finally:
        server.kill()
        server.communicate()
    assert (server.returncode, out) == (0, "")
    # The exception of `add` is logged, and nothing else.
    assert err.count("Traceback") == 1
    assert "TypeError: unsupported operand" in err


def test_the_usage_is_told() -> None:
    for words in ((), ("serve",)):
        run = start(EXAMPLE, *words)
        out, err = run.communicate(timeout=LIMIT_S)
        assert (run.returncode, out) == (2, "")
        assert err == "usage: rpc.py (server | client) [HOST] [PORT]\n"


def test_a_server_without_an_address_listens_on_all(address: str) -> None:
    server = start(EXAMPLE, "server")
    try:
        assert first_line(server) == f"listening on 0.0.0.0 {PORT}\n"
        # Without its address the client asks the software device's own.
        where = () if address == "10.80.0.1" else (address,)
        out, err = start(EXAMPLE, "client", *where).communicate(timeout=LIMIT_S)
        assert (out.splitlines()[0], err) == ("1 + 2 = 3", "")
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=LIMIT_S)
    finally:
        server.kill()
        server.communicate()
    assert server.returncode == 0
