"""A parameter server: workers read the parameters and write their gradients, all one-sided.

The server exposes to each worker the parameters for reading, and a slot of its own for its
gradient.  In each round a worker gets a message, reads the parameters by RDMA READ, computes, and
writes its gradient into its slot by RDMA WRITE, whose immediate tells the server that it has
arrived.  When all workers have written, the server averages and makes a step.  A worker that is
lost, or late by `--patience`, is left out from then on; others may join at any time.

The problem is a linear regression, for which each worker has its own data.

    parameter_server.py serve [--workers N] [--rounds N] [--size N] [--patience SECONDS]
    parameter_server.py work

Without RDMA hardware, in one command:

    python -m aiordma_softroce -- bash -c '
        coproc python examples/parameter_server.py serve --workers 2; read <&${COPROC[0]}
        for i in 1 2; do python examples/parameter_server.py work & done; cat <&${COPROC[0]}'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field

import numpy as np

import aiordma

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]

SAMPLES = 4000  # of each worker
NOISE = 0.01
RATE = 0.3  # the part of the gradient that a step takes
END = b"end"


def truth(size: int) -> Vector:
    """The parameters that the data were made with."""
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


@dataclass(eq=False)
class Worker:
    """A worker, as the server has it."""

    number: int
    conn: aiordma.Connection
    gradient: Vector
    written: int = 0  # the last round whose gradient has arrived


@dataclass
class Training:
    """The parameters, and the workers that are there.

    Args:
        size: Number of parameters.
        patience_s: Seconds that a worker has for a round.
    """

    size: int
    patience_s: float
    workers: set[Worker] = field(default_factory=set)
    joined: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        """Begin with zeros."""
        self.parameters: Vector = np.zeros(self.size, np.float32)

    async def talk(self, conn: aiordma.Connection) -> None:
        """Serve a worker, until it is lost or the training has ended."""
        self.joined += 1
        worker = Worker(self.joined, conn, np.zeros(self.size, np.float32))
        async with (
            conn.expose(self.parameters, read=True) as parameters,
            conn.expose(worker.gradient, write=True) as slot,
        ):
            welcome = {
                "worker": worker.number,
                "size": self.size,
                "parameters": parameters.to_bytes().hex(),
                "gradient": slot.to_bytes().hex(),
            }
            await conn.send(json.dumps(welcome).encode())
            async with self.changed:
                self.workers.add(worker)
                self.changed.notify_all()
            try:
                async for message in conn:  # an empty one for each gradient
                    worker.written = message.imm or 0
                    async with self.changed:
                        self.changed.notify_all()
            finally:
                self.workers.discard(worker)
                async with self.changed:
                    self.changed.notify_all()

    async def wait_for_workers(self, count: int) -> None:
        """Wait until so many are there."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.workers) >= count)

    async def round(self, number: int) -> tuple[int, float]:
        """Make a step.

        Returns:
            The number of gradients, and the length of their average.
        """
        await self.wait_for_workers(1)
        asked = list(self.workers)
        for worker in asked:
            with contextlib.suppress(ConnectionError):  # then it is not among the workers soon
                await worker.conn.send(str(number).encode())

        def late() -> list[Worker]:
            return [each for each in asked if each in self.workers and each.written != number]

        try:
            async with asyncio.timeout(self.patience_s), self.changed:
                await self.changed.wait_for(lambda: not late())
        except TimeoutError:
            for worker in late():
                print(f"worker {worker.number} is late and left out", flush=True)
                worker.conn.abort()
                self.workers.discard(worker)
        gradients = [
            each.gradient
            for each in asked
            if each.written == number and np.isfinite(each.gradient).all()
        ]
        if not gradients:
            return 0, float("inf")
        average = np.mean(gradients, axis=0)
        self.parameters -= RATE * average
        return len(gradients), float(np.linalg.norm(average))

    async def train(self, rounds: int, tolerance: float) -> None:
        """Make rounds until the gradient is small."""
        for number in range(1, rounds + 1):
            count, length = await self.round(number)
            if number % 10 == 1 or length < tolerance:
                print(f"round {number}: {count} workers, gradient {length:.6f}", flush=True)
            if length < tolerance:
                break
        for worker in list(self.workers):
            with contextlib.suppress(ConnectionError):
                await worker.conn.send(END)
        error = float(np.abs(self.parameters - truth(self.size)).max())
        print(f"largest error of a parameter: {error:.4f}", flush=True)


async def serve(options: argparse.Namespace) -> None:
    """Train as soon as the workers are there."""
    training = Training(options.size, options.patience)
    serving = aiordma.serve(training.talk, options.host, options.port, signals=True)
    async with serving as server:
        print("listening on", *server.sockname, flush=True)
        await training.wait_for_workers(options.workers)
        await training.train(options.rounds, options.tolerance)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.patience), training.changed:
                await training.changed.wait_for(lambda: not training.workers)


class Data:
    """The data of a worker: random inputs, and noisy sums of them."""

    def __init__(self, worker: int, size: int) -> None:
        random = np.random.default_rng(worker)
        self.inputs = random.normal(size=(SAMPLES, size)).astype(np.float32)
        noise = random.normal(scale=NOISE, size=SAMPLES).astype(np.float32)
        self.results = self.inputs @ truth(size) + noise

    def gradient(self, parameters: Vector) -> Vector:
        """The gradient of the mean square error, halved."""
        error = self.inputs @ parameters - self.results
        return (self.inputs.T @ error / SAMPLES).astype(np.float32)


async def work(host: str, port: int) -> None:
    """Compute gradients until the server ends the training.

    Raises:
        PeerGoneError, CompletionError: The server is gone before.
    """
    async with aiordma.connect(host, port) as conn:
        welcome = json.loads(bytes(await conn.recv()))
        parameters = aiordma.RemoteRegion.from_bytes(bytes.fromhex(welcome["parameters"]))
        slot = aiordma.RemoteRegion.from_bytes(bytes.fromhex(welcome["gradient"]))
        data = Data(welcome["worker"], welcome["size"])
        # Registered once: the adapter reads and writes these two without a copy.
        mine = await conn.register(np.zeros(welcome["size"], np.float32))
        result = await conn.register(np.zeros(welcome["size"], np.float32))
        print("worker", welcome["worker"], flush=True)
        rounds = 0
        while (message := await conn.recv()) != END:
            await conn.read(parameters, mine)
            current = np.frombuffer(mine.view, np.float32)
            np.frombuffer(result.view, np.float32)[:] = data.gradient(current)
            await conn.write(slot, result, imm=int(message.decode()))
            rounds += 1
        print("worker", welcome["worker"], "has ended after", rounds, "rounds", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Return the options; a mistake ends the program with status 2."""
    parser = argparse.ArgumentParser(description="A parameter server over RDMA.")
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="keep the parameters, and train them")
    worker = commands.add_parser("work", help="compute gradients")
    for command, host in ((server, "0.0.0.0"), (worker, "10.80.0.1")):
        command.add_argument("--host", default=host, help="default: %(default)s")
        command.add_argument("--port", type=int, default=18521, help="default: %(default)s")
    add = server.add_argument
    add("--workers", type=int, default=2, metavar="N", help="to begin with; default: %(default)s")
    add("--rounds", type=int, default=1000, metavar="N", help="at most; default: %(default)s")
    add("--size", type=int, default=1000, metavar="N", help="parameters; default: %(default)s")
    add("--tolerance", type=float, default=1e-3, help="of the gradient; default: %(default)s")
    add("--patience", type=float, default=10.0, metavar="SECONDS",
        help="for the gradient of a worker; default: %(default)s")  # fmt: skip
    options = parser.parse_args()
    if options.command == "serve":
        if min(options.workers, options.rounds, options.size) < 1:
            parser.error("--workers, --rounds and --size are 1 or more")
        if not options.patience > 0:
            parser.error("--patience is positive")
    return options


def main() -> None:
    """Run the command line."""
    options = parse_arguments()
    try:
        if options.command == "serve":
            asyncio.run(serve(options))
        else:
            asyncio.run(work(options.host, options.port))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
    except (aiordma.PeerGoneError, aiordma.CompletionError) as error:
        # A read or write also fails if the server's adapter does not answer, or if the kernel has
        # taken the memory of a server that was killed.
        sys.exit(f"parameter_server: the server is gone: {error}")
    except (OSError, ValueError) as error:
        sys.exit(f"parameter_server: {error}")


if __name__ == "__main__":
    main()
