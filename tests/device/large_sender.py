"""A peer that sends a large message until it is killed: `large_sender.py ADDRESS PORT SIZE`."""

from __future__ import annotations

import asyncio
import sys

import aiordma


async def main(address: str, port: int, size: int) -> None:
    """Send it again and again, until the process is killed."""
    config = aiordma.ConnectionConfig(rendezvous_threshold=0)
    async with aiordma.connect(address, port, config=config) as connection:
        data = bytes(size)
        while True:
            await connection.send(data)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
