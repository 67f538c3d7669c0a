"""Send a file from one process to another over RDMA, and show that it arrived, beside TCP.

    make demo [FILE=PATH]                    on a software device
    python examples/demo.py [--file PATH]    on this machine's RDMA device

The server (demo_server.py, where the conversation is written down) is a process of its own.  This
process is the client: it sends the file in messages of 1 MiB, gets the server's digest of them, and
then measures round trips.  Then it does the same over TCP, on the same machine and event loop, for
comparison.  The exit status is 0 only if the file arrived whole both times, and both processes
ended well within the time limit.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import random
import socket
import struct
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_server import Ends, TcpMessages

import aiordma
from aiordma import cm, verbs

SERVER = Path(__file__).with_name("demo_server.py")
CHUNK = 1 << 20  # larger than a message slot: the server fetches each chunk with RDMA READ
PING_SIZE = 64
SEED = 20
SIOCGIFADDR = 0x8915  # netdevice(7)
GID_TYPES = {0: "InfiniBand", 1: "RoCE v1", 2: "RoCE v2"}


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass
class Result:
    """What was measured over RDMA, or over TCP."""

    size: int = 0
    seconds: float = 0.0
    sha256: str = ""
    match: bool = False
    round_trips_us: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """MiB a second."""
        return self.size / self.seconds / (1 << 20)

    def latency_us(self, percent: int) -> float:
        """The round trip that `percent` of all did not exceed."""
        ordered = sorted(self.round_trips_us)
        return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def find_address() -> str:
    """Return the first IP address of this machine that an active RDMA device serves.

    Raises:
        DemoError: There is none; the text says what is missing.
    """
    if given := os.environ.get("AIORDMA_SOFTROCE_ADDR"):
        return given
    missing = aiordma.why_unavailable()
    if missing is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode())
                with suppress(OSError):  # an interface without an address, or without a device
                    address = socket.inet_ntoa(fcntl.ioctl(sock, SIOCGIFADDR, request)[20:24])
                    if is_served(address):
                        return address
        missing = "no active RDMA device serves an IP address of this machine: see `rdma link`"
    raise DemoError(
        f"{missing}\nTo run the demo on a software device, without hardware:\n"
        "    python -m aiordma_softroce -- python examples/demo.py"
    )


def is_served(address: str) -> bool:
    """Whether `address` belongs to a device whose port is active; OSError if to no device."""
    if address.startswith("127."):  # the kernel would take any device for it
        return False
    with closing(cm.EventChannel()) as channel, closing(cm.ConnectionId(channel)) as cm_id:
        cm_id.bind_addr((address, 0))
        port = cm_id.context.query_port(cm_id.port_num) if cm_id.context else None
        return port is not None and port.state == verbs.PortState.ACTIVE


def chunks(options: argparse.Namespace, size: int) -> Iterator[bytes]:
    """Yield `size` bytes, of the user's file or generated, in pieces of at most CHUNK."""
    lengths = (min(CHUNK, size - done) for done in range(0, size, CHUNK))
    if options.file is None:
        generator = random.Random(SEED)
        yield from (generator.randbytes(length) for length in lengths)
        return
    with options.file.open("rb") as source:
        for length in lengths:
            chunk = source.read(length)
            if len(chunk) < length:
                raise DemoError(f"{options.file} became shorter while it was sent")
            yield chunk


@contextmanager
def progress(over: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how much was sent: rich's bar on a terminal, else a line for each tenth."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.progress import Progress

        with Progress() as bar:
            task = bar.add_task(f"sending over {over:4}", total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    shown = -1

    def show(done: int) -> None:
        nonlocal shown
        tenths = 10 * done // total if total else 10
        if tenths > shown:
            shown = tenths
            bar = f"[{'###' * tenths:.<30}]"
            print(f"sending over {over:4}  {bar}  {10 * tenths} %  {done >> 20} MiB", flush=True)

    show(0)
    yield show


async def send_file(conn: Ends, over: str, options: argparse.Namespace, result: Result) -> None:
    """Send the file and note what the server says about it."""
    name = options.file.name if options.file else "generated"
    size = options.file.stat().st_size if options.file else options.size
    digest = hashlib.sha256()
    started = time.perf_counter()
    await conn.send(json.dumps({"name": name, "size": size}).encode())
    with progress(over, size) as show:
        for chunk in chunks(options, size):
            digest.update(chunk)
            if options.corrupt and not result.size:
                chunk = bytes([chunk[0] ^ 1]) + chunk[1:]
            await conn.send(chunk)
            result.size += len(chunk)
            show(result.size)
    await conn.send(digest.digest())
    verdict = json.loads(bytes(await conn.recv()))
    result.seconds = time.perf_counter() - started
    result.sha256 = verdict["sha256"]
    result.match = verdict["match"] is True and result.sha256 == digest.hexdigest()


async def ping(conn: Ends, count: int, result: Result) -> None:
    """Measure round trips of small messages, one after another."""
    for number in range(count):
        data = number.to_bytes(PING_SIZE, "little")
        started = time.perf_counter()
        await conn.send(data)
        answer = await conn.recv()
        result.round_trips_us.append((time.perf_counter() - started) * 1e6)
        with answer:
            if answer != data:
                raise DemoError(f"mismatch: ping {number} came back changed")


@asynccontextmanager
async def server_process(
    options: argparse.Namespace, address: str
) -> AsyncIterator[tuple[int, int | None]]:
    """Start the server; yield its ports as soon as it listens; require that it ends well.

    Raises:
        DemoError: It did not start, or ended with another status than 0.
    """
    words = [str(SERVER), address, f"--timeout={options.timeout}", f"--loop={options.loop}"]
    server = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE)
    assert server.stdout is not None
    try:
        ready = await server.stdout.readline()
        if not ready:
            raise DemoError(f"the server did not start, exit status {await server.wait()}")
        ports = json.loads(ready)
        yield ports["port"], ports["tcp_port"]
        if await server.wait():
            raise DemoError(f"the server failed, exit status {server.returncode}")
    finally:
        if server.returncode is None:
            with suppress(ProcessLookupError):  # it may have ended just now
                server.kill()
            await server.wait()


async def measure(conn: Ends, over: str, options: argparse.Namespace) -> Result:
    """Send the file, and measure round trips."""
    result = Result()
    await send_file(conn, over, options, result)
    await ping(conn, options.pings, result)
    return result


async def run(
    options: argparse.Namespace, address: str
) -> tuple[dict[str, Any], Result, Result | None]:
    """Run server and client, within the time limit.

    Returns:
        The path over RDMA, what was measured there, and what over TCP: None if TCP has no such
        address.
    """
    path, over_tcp = {}, None
    async with (
        asyncio.timeout(options.timeout),
        server_process(options, address) as (port, tcp_port),
    ):
        async with aiordma.connect(address, port) as conn:
            for name in ("device", "port", "gid", "gid_index", "link_layer", "mtu"):
                path[name] = conn.get_extra_info(name)
            over_rdma = await measure(conn, "RDMA", options)
        if tcp_port is not None:
            async with await TcpMessages.connect(address, tcp_port) as tcp:
                over_tcp = await measure(tcp, "TCP", options)
    return path, over_rdma, over_tcp


def gid_text(path: dict[str, Any]) -> str:
    """Return the GID as an IPv6 address, with its place in the device's table and its type."""
    for device in aiordma.devices():
        if device.name == path["device"]:
            with closing(device.open()) as context:
                for entry in context.gid_table():
                    # iWARP connections use no GID: there the port's first GID is shown.
                    if entry.port == path["port"] and (
                        entry.index == path["gid_index"] or context.is_iwarp
                    ):
                        kind = "iWARP" if context.is_iwarp else GID_TYPES.get(entry.type, "?")
                        text = socket.inet_ntop(socket.AF_INET6, entry.gid)
                        return f"{text} (index {entry.index}, {kind})"
    return socket.inet_ntop(socket.AF_INET6, path["gid"])


def report(
    path: dict[str, Any], rdma: Result, tcp: Result | None, options: argparse.Namespace
) -> None:
    """Print what was used and measured."""
    engine = os.environ.get("AIORDMA_SOFTROCE_ENGINE", "host")
    rows = {
        "device": f"{path['device']} (MTU {path['mtu']} bytes)",
        "port": path["port"],
        "GID": gid_text(path),
        "link layer": path["link_layer"].capitalize(),
        "engine": engine,
        "event loop": options.loop,
        "file": options.file or f"generated from seed {SEED}",
        "bytes": f"{rdma.size} in messages of up to {CHUNK}, hashed at both ends",
        "pings": f"{len(rdma.round_trips_us)} of {PING_SIZE} bytes",
    }
    print("", *(f"{name:16}{value}" for name, value in rows.items()), sep="\n")
    columns = [each for each in (rdma, tcp) if each]
    print(f"\n{'':16}", *(f"{name:>16}" for name in ("RDMA", "TCP")[: len(columns)]))
    for percent in (50, 99):
        cells = [f"{each.latency_us(percent):.1f} us" for each in columns]
        print(f"round trip, p{percent:<3}", *(f"{cell:>16}" for cell in cells))
    print(f"{'throughput':16}", *(f"{f'{each.rate:.1f} MiB/s':>16}" for each in columns))
    print()
    if tcp is None:
        print(f"TCP was not measured: no interface of this machine has {options.address}.")
    elif engine != "host":
        print(
            "The columns are no comparison, and either may come out ahead: both ends and an adapter"
            "\nthat is software shared one processor of a guest, whose system calls cost many times"
            "\nwhat they usually do. README.md and docs/benchmarks.md have figures that compare."
        )
    for name, result in (("RDMA", rdma), ("TCP", tcp)):
        if result:
            verdict = "match" if result.match else "MISMATCH"
            print(f"sha256 {verdict}: {result.sha256} arrived over {name}")


def byte_count(text: str) -> int:
    """Return the number that `text` means: digits, and K, M or G for 1024 times as much each."""
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    return int(text[:-1] if shift else text) << shift


def parse_arguments() -> argparse.Namespace:
    """Return the options; a mistake ends the program with status 2."""
    parser = argparse.ArgumentParser(description="Send a file over RDMA between two processes.")
    add = parser.add_argument
    add("--file", type=Path, metavar="PATH", help="send this file instead of generated data")
    add("--size", type=byte_count, default="32M", help="bytes to generate (default %(default)s)")
    add("--pings", type=int, default=1000, metavar="N", help="round trips (default %(default)s)")
    add("--address", help="IP address of the RDMA device to use (default: the first that works)")
    add("--timeout", type=float, default=120.0, metavar="SECONDS", help="for the whole run")
    loop = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"
    add("--loop", choices=("asyncio", "uvloop"), default=loop, help="default: uvloop if installed")
    add("--corrupt", action="store_true", help=argparse.SUPPRESS)  # shows that damage is found
    options = parser.parse_args()
    if options.file is not None and not options.file.is_file():
        parser.error(f"{options.file} is not a file")
    if options.size < 0 or options.pings < 1 or not options.timeout > 0:
        parser.error("sizes, counts and times are positive")
    return options


def main() -> int:
    """Run the command line and return the exit status."""
    options = parse_arguments()
    try:
        factory = None
        if options.loop == "uvloop":
            import uvloop

            factory = uvloop.new_event_loop
        options.address = options.address or find_address()
        with asyncio.Runner(loop_factory=factory) as runner:
            path, rdma, tcp = runner.run(run(options, options.address))
        report(path, rdma, tcp, options)
    except (DemoError, OSError, ImportError, aiordma.RdmaError) as error:
        text = str(error) or f"timeout, not done within {options.timeout} s"
        print(f"demo: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if rdma.match and (tcp is None or tcp.match) else 1


if __name__ == "__main__":
    sys.exit(main())
