"""Telemetry: readings of a machine for any number of subscribers, each of which gets the newest.

A publisher takes readings at a fixed rate.  A subscriber lets one message wait at its side
(`recv_depth=1`), and for a slow subscriber the publisher keeps one more: the newest.  So a slow
subscriber sees fewer readings, none older than the time that it spent on the previous one plus the
time between two readings.  Slow and lost subscribers delay neither the publisher nor the others.

    telemetry.py publish   [--host ADDRESS] [--port PORT] [--rate HZ]
    telemetry.py subscribe [--host ADDRESS] [--port PORT] [--count N] [--work SECONDS]

`--work` is how long a subscriber works on a reading.  Ctrl-C ends both; when a subscriber leaves,
the publisher prints how many readings it was sent.
Without RDMA hardware, in one command:

    python -m aiordma_softroce -- bash -c '
        coproc python examples/telemetry.py publish; read <&${COPROC[0]}
        python examples/telemetry.py subscribe --count 4 --work 0.2
        python examples/telemetry.py subscribe --count 20'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import struct
import sys
import time

import aiordma

#: Number of the reading, when it was taken (CLOCK_MONOTONIC), and the time of the processor.
READING = struct.Struct("!Qdd")
#: Readings are for programs of one machine here: others would compare two clocks.
CONFIG = aiordma.ConnectionConfig(recv_depth=1)


# --- the publisher


class Publisher:
    """Takes readings, and sends them to all subscribers."""

    def __init__(self) -> None:
        self._subscribers = aiordma.Broadcast(slow="latest")

    async def serve(self, conn: aiordma.Connection) -> None:
        """Serve a subscriber until it leaves."""
        name = "{}:{}".format(*conn.get_extra_info("peername"))
        try:
            self._subscribers.add(conn)
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return
        try:
            async for _ in conn:  # subscribers say nothing, so that this is the wait for their end
                pass
        except ConnectionError:
            name += " (lost)"
        finally:
            self._subscribers.discard(conn)
            print(f"{name} has left after {conn.stats.messages_sent} readings", flush=True)

    async def publish(self, rate: float) -> None:
        """Take readings at this rate, in hertz."""
        loop = asyncio.get_running_loop()
        number, due = 0, loop.time()
        while True:
            number += 1
            reading = READING.pack(number, time.monotonic(), time.process_time())
            await self._subscribers.send(reading)
            due = max(due + 1 / rate, loop.time())
            await asyncio.sleep(due - loop.time())


async def publish(host: str, port: int, rate: float) -> None:
    """Serve subscribers until Ctrl-C."""
    publisher = Publisher()
    async with aiordma.serve(publisher.serve, host, port) as server:
        print("listening on", *server.sockname, flush=True)
        await publisher.publish(rate)


# --- a subscriber


async def subscribe(host: str, port: int, count: int, work: float) -> None:
    """Print how old `count` readings are, and how many were missed; 0: until Ctrl-C."""
    async with aiordma.connect(host, port, config=CONFIG) as conn:
        last, oldest, seen, missed = 0, 0.0, 0, 0
        async for message in conn:
            if not seen:
                print("subscribed", flush=True)
            with message:
                number, taken, _ = READING.unpack(message)
            oldest = max(oldest, time.monotonic() - taken)
            missed += number - last - 1 if last else 0
            last = number
            seen += 1
            if seen == count:
                break
            await asyncio.sleep(work)  # here a program would do something with it
        print(f"{seen} readings, {missed} missed, none older than {oldest:.3f} s", flush=True)
    if seen != count:
        raise ConnectionError("the publisher has ended")


def parse_arguments() -> argparse.Namespace:
    """Return the options; a mistake ends the program with status 2."""
    parser = argparse.ArgumentParser(description="Readings for subscribers, over RDMA.")
    commands = parser.add_subparsers(dest="command", required=True)
    publisher = commands.add_parser("publish", help="take readings until Ctrl-C")
    subscriber = commands.add_parser("subscribe", help="receive them")
    for command, host in ((publisher, "0.0.0.0"), (subscriber, "10.80.0.1")):
        command.add_argument("--host", default=host, help="default: %(default)s")
        command.add_argument("--port", type=int, default=18527, help="default: %(default)s")
    publisher.add_argument("--rate", type=positive, default=100.0, help="default: %(default)s Hz")
    subscriber.add_argument("--count", type=int, default=0, help="readings; default: all")
    subscriber.add_argument("--work", type=float, default=0.0, help="seconds for each; default: 0")
    return parser.parse_args()


def positive(text: str) -> float:
    """Return the number, for argparse."""
    number = float(text)
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError("not between 0 and 1,000,000")
    return number


def main() -> None:
    """Run the command line."""
    options = parse_arguments()
    try:
        if options.command == "publish":
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how a publisher ends
                asyncio.run(publish(options.host, options.port, options.rate))
        else:
            asyncio.run(subscribe(options.host, options.port, options.count, options.work))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
    except OSError as error:
        sys.exit(f"telemetry: {error}")


if __name__ == "__main__":
    main()
