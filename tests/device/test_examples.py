"""The README's first example, run as it is written."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma.endpoint.wire import FRAME, RENDEZVOUS, FrameKind, Hello

pytestmark = [pytest.mark.device, pytest.mark.program]

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 60
MOST_LINES = 16

README = Path(__file__).parents[2] / "README.md"

BREAKS_OFF = """
import asyncio, os, sys
import aiordma

async def main(host, port):
    conn = await aiordma.connect(host, int(port))
    await conn.send(b"x")
    await conn.recv()
    os._exit(0)

asyncio.run(main(*sys.argv[1:]))
"""

STAYS = """
import asyncio, sys
import aiordma

async def main(host, port):
    async with aiordma.connect(host, int(port)) as conn:
        await conn.send(b"x")
        await conn.recv()
        print("connected", flush=True)
        await conn.recv()

asyncio.run(main(*sys.argv[1:]))
"""


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    """The first line of output, waited for within a limit."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
    assert ready, "the server said nothing"
    return process.stdout.readline()


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    """The server, without arguments, listening."""
    process = start(str(EXAMPLES / "server.py"))
    try:
        line = first_line(process)
        assert line == "listening on 0.0.0.0 18515\n", process.communicate(timeout=LIMIT_S)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def finish(client: subprocess.Popen[str]) -> None:
    out, err = client.communicate(timeout=LIMIT_S)
    assert (client.returncode, out, err) == (0, "hello\nover\nRDMA\n", "")


@pytest.mark.smoke
def test_the_first_program_of_the_readme(tmp_path: Path, address: str) -> None:
    """As it is printed there, but for the address, and the port, which others may have."""
    program, output = re.search(
        r"^```python\n(.*?)^```$.*?softroce -- python echo.py\n(.*?)^```$",
        README.read_text(),
        re.M | re.S,
    ).groups()  # type: ignore[union-attr]
    path = tmp_path / "echo.py"
    path.write_text(program.replace("10.80.0.1", address))
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        capture_output=True, check=False, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (output, "")


def test_client_and_server(server: subprocess.Popen[str], address: str) -> None:
    finish(start(str(EXAMPLES / "client.py"), address))
    assert server.poll() is None


def test_several_clients_at_a_time(server: subprocess.Popen[str], address: str) -> None:
    clients = [start(str(EXAMPLES / "client.py"), address, "18515") for _ in range(4)]
    for client in clients:
        finish(client)
    assert server.poll() is None


def test_a_client_that_breaks_off_harms_no_other(
    server: subprocess.Popen[str], address: str
) -> None:
    out, err = start("-c", BREAKS_OFF, address, "18515").communicate(timeout=LIMIT_S)
    assert (out, err) == ("", "")
    finish(start(str(EXAMPLES / "client.py"), address))
    assert server.poll() is None


# What a peer that speaks the wire protocol itself says of its limits, and sends.
PEERS = {
    "takes nothing": (Hello(64, 8, 64, 0), 100),
    "sends more than it takes": (Hello(64, 8, 64, 1), 2000),
    "answers with a flag": (Hello(64, 8, 64, 1), 100),
}


async def answer_with_flags(raw: aiordma.Connection) -> None:
    """Until the connection ends."""
    while True:
        answer = bytes(await raw.recv())
        if answer[0] == FrameKind.RENDEZVOUS:
            number = RENDEZVOUS.unpack_from(answer, 16)[2]
            await raw.send(FRAME.pack(FrameKind.DONE, 2, 0, 0, number))
        if answer[0] in (FrameKind.END, FrameKind.ABORT):
            raw.abort()


async def misbehave(address: str, how: str) -> None:
    """Send a message that cannot be sent back; the server ends that connection."""
    hello, size = PEERS[how]
    config = ConnectionConfig(raw=True, slot_size=4096, recv_depth=64, send_depth=16)
    if not hello.max_message_kib:
        with pytest.raises(aiordma.ConnectionRejectedError):
            await aiordma.connect(address, 18515, config=config, private_data=hello.pack(56))
        return
    raw = await aiordma.connect(address, 18515, config=config, private_data=hello.pack(56))
    await raw.send(FRAME.pack(FrameKind.CREDIT, 0, 0, 0, 0))
    await raw.send(FRAME.pack(FrameKind.DATA, 0, 0, 0, size) + bytes(size))
    with pytest.raises(ConnectionError):
        await answer_with_flags(raw)
    raw.abort()


async def test_g03_a_client_that_breaks_the_protocol_harms_no_other(
    server: subprocess.Popen[str], address: str
) -> None:
    async with asyncio.timeout(LIMIT_S), aiordma.connect(address, 18515) as bystander:
        for how in PEERS:
            await misbehave(address, how)
            await bystander.send(how.encode())
            assert bytes(await bystander.recv()) == how.encode()
    assert server.poll() is None


def test_b08_ctrl_c_ends_the_server_without_a_word(
    server: subprocess.Popen[str], address: str
) -> None:
    """Also while a client is connected and silent."""
    client = start("-c", STAYS, address, "18515")
    try:
        assert first_line(client) == "connected\n"
        server.send_signal(signal.SIGINT)
        assert (*server.communicate(timeout=LIMIT_S), server.returncode) == ("", "", 0)
        client.communicate(timeout=LIMIT_S)
    finally:
        client.kill()
        client.communicate(timeout=LIMIT_S)


async def test_b08_ctrl_c_ends_the_client_without_a_word(address: str) -> None:
    """It waits for an echo that does not come."""
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        client = start(str(EXAMPLES / "client.py"), address, str(listener.port))
        try:
            async with await listener.accept() as conn:
                assert bytes(await conn.recv()) == b"hello"
                client.send_signal(signal.SIGINT)
                out, err = await asyncio.to_thread(client.communicate, timeout=LIMIT_S)
                assert (out, err, client.returncode) == ("", "", 130)
        finally:
            client.kill()


# Runs programs, one after the other, in children that share what is imported, and interrupts each
# in its loop's second turn, while its first call is under way.
INTERRUPTED = """
import asyncio, json, os, runpy, signal, sys, traceback
import aiohttp, aiordma, aiordma.cm, aiordma.contrib.aiohttp, aiordma.contrib.httpx, httpx, trustme
import numpy
from tests.forks import fork_quietly

real = asyncio.Runner.run

def run(self, main, **options):
    async def soon():
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await main
        sys.exit(99)
    return real(self, soon(), **options)

asyncio.Runner.run = run
statuses = []
for words in json.loads(sys.argv[1]):
    pid = fork_quietly()
    if pid:
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        continue
    sys.argv = words
    sys.path.insert(0, os.path.dirname(words[0]))  # as for a program
    status = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as exc:
        status = exc.code
    except BaseException:
        print(words, file=sys.stderr)
        traceback.print_exc()
        status = 98
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
print(json.dumps(statuses))
"""
SERVERS = (
    ("rping.py", "server", "ADDRESS"),
    ("native_server.py", "ADDRESS"),
    ("by_hand.py", "ADDRESS"),
)
OTHERS = (
    ("rping.py", "client", "ADDRESS"),
    ("native_client.py", "ADDRESS"),
    ("datagrams.py", "ADDRESS"),
    ("tls_echo.py", "ADDRESS"),
    ("switched.py", "ADDRESS"),
    ("httpx_get.py", "http://ADDRESS:1/"),
    ("aiohttp_hello.py", "client", "http://ADDRESS:1/"),
    ("stream_echo.py", "client", "ADDRESS"),
    # uvloop does not wait for a program whose start is canceled, and complains at its end.
    ("demo.py", "--address", "ADDRESS", "--loop=asyncio"),
    ("kv.py", "get", "key", "--host", "ADDRESS"),
    ("parameter_server.py", "work", "--host", "ADDRESS"),
    ("copy_file.py", "send", "--host", "ADDRESS", __file__),
    ("chat.py", "join", "--host", "ADDRESS", "name"),
    ("telemetry.py", "subscribe", "--host", "ADDRESS"),
)


def command(words: tuple[str, ...], address: str) -> list[str]:
    name, *rest = words
    return [str(EXAMPLES / name), *(word.replace("ADDRESS", address) for word in rest)]


@pytest.mark.parametrize("words", SERVERS, ids=" ".join)
def test_b08_ctrl_c_ends_servers_without_a_word(words: tuple[str, ...], address: str) -> None:
    process = start(*command(words, address))
    try:
        assert "listening" in first_line(process)
        process.send_signal(signal.SIGINT)
        assert (*process.communicate(timeout=LIMIT_S), process.returncode) == ("", "", 130)
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_b08_ctrl_c_ends_examples_without_a_word(address: str) -> None:
    commands = [command(words, address) for words in OTHERS]
    process = start("-c", INTERRUPTED, json.dumps(commands))
    out, err = process.communicate(timeout=LIMIT_S)
    assert err == ""
    assert json.loads(out) == [130] * len(OTHERS)


def test_b08_each_example_is_interrupted() -> None:
    known = {words[0] for words in (*SERVERS, *OTHERS)}
    # Those of the README above; the server of the demo is the demo's; and those of the pages.
    known |= {"client.py", "server.py", "demo_server.py"}
    # These have interruptions among their own tests.
    known |= {
        "chat.py", "copy_file.py", "kv.py", "kv_rejoin.py", "kv_transfer.py",
        "parameter_server.py", "rpc.py", "telemetry.py",
    }  # fmt: skip
    known.add("by_hand_pyverbs.py")  # blocks in pyverbs, of the system's Python
    assert {path.name for path in EXAMPLES.glob("*.py")} == known


@pytest.mark.parametrize("name", ["client.py", "server.py"])
def test_the_first_example_is_short(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.AsyncFunctionDef) and ast.get_docstring(node):
            del node.body[0]
    lines = [line for line in ast.unparse(tree).splitlines() if line]
    assert len(lines) <= MOST_LINES
