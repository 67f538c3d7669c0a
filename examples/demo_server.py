"""The server process of demo.py: takes one file, says whether it arrived whole, then echoes.

The conversation, one line a message:

    client  {"name": ..., "size": ...}     what will come, in JSON
    client  chunk, chunk, ...              `size` bytes altogether
    client  SHA-256 of the file            32 bytes
    server  {"sha256": ..., "match": ...}  computed over the bytes that arrived
    client  ping, ping, ...                each answered with the same bytes
    client  closes
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys

import aiordma


async def receive_file(conn: aiordma.Connection) -> None:
    """Take a file and answer with the verdict."""
    metadata = json.loads(bytes(await conn.recv()))
    digest, received = hashlib.sha256(), 0
    while received < metadata["size"]:
        # The message lies in the memory that the adapter wrote to; the `with` block gives it back.
        with await conn.recv() as message:
            digest.update(message)
            received += len(message)
    announced = bytes(await conn.recv())
    match = received == metadata["size"] and digest.digest() == announced
    verdict = {"sha256": digest.hexdigest(), "match": match}
    await conn.send(json.dumps(verdict).encode())


async def serve(host: str, timeout: float) -> None:
    """Serve one client.

    Args:
        host: Address of the RDMA device.
        timeout: Seconds for all of it.

    Raises:
        OSError: No device has the address, or the connection broke; TimeoutError is one.
    """
    async with asyncio.timeout(timeout), aiordma.listen(host, 0) as listener:
        # The parent reads this line: it is the event that says that a client may come.
        print(json.dumps({"port": listener.port}), flush=True)
        async with await listener.accept() as conn:
            await receive_file(conn)
            async for message in conn:
                await conn.send(message)


def run(loop: str, host: str, timeout: float) -> None:
    """Run `serve` on asyncio's own loop or on uvloop."""
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(host, timeout))


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description="The server of demo.py, which starts it.")
    parser.add_argument("host", help="address of the RDMA device")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    options = parser.parse_args()
    try:
        run(options.loop, options.host, options.timeout)
    except (OSError, aiordma.RdmaError) as error:
        print(f"demo server: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
