"""Copy files from one process to another by RDMA WRITE, with progress and a checksum.

The receiver exposes a window of a few chunks.  The sender reads the file into registered memory of
its own, and writes chunk after chunk into the window.  The immediate of each write tells the
receiver that the chunk has arrived; the receiver writes it to the disk, and reports that its place
is free.  So several chunks are on their way at a time, and the processor copies none of them.  At
the end the SHA-256 of both sides is compared.  Until then the receiver keeps the bytes in a file
`.*.part`, which is removed after any failure: under the file's name there is never a
part of a file, but the whole one, or the old, or none.

    copy_file.py receive [--host ADDRESS] [--port PORT] [FOLDER]
    copy_file.py send    [--host ADDRESS] [--port PORT] FILE...

Without RDMA hardware, in one command:

    python -m aiordma_softroce -- bash -c '
        coproc python examples/copy_file.py receive /tmp; read <&${COPROC[0]}
        python examples/copy_file.py send README.md; cmp README.md /tmp/README.md'
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import aiordma
from aiordma.verbs import MemoryRegion

CHUNK = 1 << 20
WINDOW = 8  # chunks on their way at a time


class CopyError(Exception):
    """The file did not arrive; the text says why."""


def place(index: int, size: int) -> slice:
    """Where a chunk of a file of `size` bytes lies in the window."""
    start = index % WINDOW * CHUNK
    return slice(start, start + min(CHUNK, size - index * CHUNK))


def count(size: int) -> int:
    """Chunks of a file of `size` bytes."""
    return -(-size // CHUNK)


# --- the receiver


@contextmanager
def arriving(folder: Path, name: str) -> Iterator[BinaryIO]:
    """A file that gets its name if all goes well, and vanishes otherwise."""
    if name != Path(name).name or name in ("", ".", "..") or "\0" in name:
        raise CopyError(f"{name!r} is not the name of a file")
    part = folder / f".{secrets.token_hex(8)}.part"
    try:
        with part.open("xb") as file:
            yield file
        part.replace(folder / name)
    finally:
        part.unlink(missing_ok=True)


async def receive_file(
    conn: aiordma.Connection, window: memoryview, folder: Path, offer: dict[str, Any]
) -> str:
    """Receive a file that was offered.

    Returns:
        Its SHA-256.

    Raises:
        CopyError: The bytes that arrived are not those of the sender.
        OSError: The file cannot be written, or the sender is gone.
    """
    size, digest = int(offer["size"]), hashlib.sha256()
    with arriving(folder, str(offer["name"])) as file:

        def save(chunk: memoryview) -> None:
            digest.update(chunk)
            file.write(chunk)

        await conn.send(b"{}")
        for index in range(count(size)):
            with await conn.recv() as message:
                if message.imm != index % WINDOW:
                    raise CopyError(f"chunk {index} is missing")
            await asyncio.to_thread(save, window[place(index, size)])
            await conn.send(b"{}")  # its place is free
        with await conn.recv() as message:
            expected = json.loads(bytes(message))["sha256"]
        if digest.hexdigest() != expected:
            raise CopyError(f"arrived damaged: SHA-256 {digest.hexdigest()}, sent {expected}")
    return digest.hexdigest()


async def receive(folder: Path, conn: aiordma.Connection) -> None:
    """Receive the files of a sender."""
    name = "?"
    try:
        lease = conn.expose(CHUNK * WINDOW, write=True)
        async with lease as region:
            await conn.send(region.to_bytes())
            async for message in conn:
                offer = json.loads(bytes(message))
                name = offer["name"]
                try:
                    digest = await receive_file(conn, lease.view, folder, offer)
                except CopyError as error:
                    await refuse(conn, str(error))
                    raise
                except OSError as error:
                    if isinstance(error, ConnectionError):
                        raise
                    await refuse(conn, f"cannot be written: {error.strerror}")
                    raise
                await conn.send(json.dumps({"sha256": digest}).encode())
                print(f"{name}: {offer['size']} bytes, sha256 {digest}", flush=True)
    except (OSError, CopyError, ValueError, LookupError, TypeError) as error:
        print(f"{name}: not received: {error}", file=sys.stderr, flush=True)


async def refuse(conn: aiordma.Connection, words: str) -> None:
    """Tell the sender, and wait until it has gone: chunks may be under way."""
    await conn.send(json.dumps({"error": words}).encode())
    with suppress(ConnectionError):
        async for _ in conn:
            pass


async def serve(host: str, port: int, folder: Path) -> None:
    """Receive files until Ctrl-C."""
    handler = functools.partial(receive, folder)
    async with aiordma.serve(handler, host, port, signals=True) as server:
        print("listening on", *server.sockname, flush=True)
        await server.serve_forever()


# --- the sender


class Progress:
    """Shows how much of a file was sent: in one line on a terminal, else in a line per tenth."""

    def __init__(self, name: str, size: int) -> None:
        self._name, self._size, self._shown = name, size, 0
        self._on_terminal = sys.stderr.isatty()

    def show(self, done: int) -> None:
        """Bytes that have arrived."""
        parts = 100 if self._on_terminal else 10
        part = done * parts // self._size
        if part > self._shown:
            self._shown = part
            end = "\r" if self._on_terminal and done < self._size else "\n"
            print(f"{self._name}: {part * 100 // parts} %", end=end, file=sys.stderr, flush=True)


async def answer_of(conn: aiordma.Connection) -> dict[str, Any]:
    """Return the receiver's next answer.

    Raises:
        CopyError: It cannot go on.
    """
    with await conn.recv() as message:
        answer: dict[str, Any] = json.loads(bytes(message))
    if "error" in answer:
        raise CopyError(answer["error"])
    return answer


async def send_file(
    conn: aiordma.Connection, window: aiordma.RemoteRegion, page: MemoryRegion, path: Path
) -> None:
    """Send a file."""
    digest = hashlib.sha256()
    started = time.perf_counter()
    writes: dict[int, asyncio.Task[int]] = {}
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        progress = Progress(path.name, size)

        def load(chunk: memoryview) -> None:
            filled = 0
            while filled < len(chunk):
                if not (got := file.readinto(chunk[filled:])):
                    raise CopyError("became shorter while it was sent")
                filled += got
            digest.update(chunk)

        async def arrived(index: int) -> None:
            await writes[index]
            del writes[index]
            await answer_of(conn)
            progress.show(min(size, (index + 1) * CHUNK))

        await conn.send(json.dumps({"name": path.name, "size": size}).encode())
        await answer_of(conn)
        try:
            for index in range(count(size)):
                if index >= WINDOW:
                    await arrived(index - WINDOW)
                where = place(index, size)
                await asyncio.to_thread(load, page.view[where])
                writes[index] = asyncio.create_task(
                    conn.write(window[where], page[where], imm=index % WINDOW)
                )
            for index in sorted(writes):
                await arrived(index)
        finally:
            for task in writes.values():
                task.cancel()
            await asyncio.gather(*writes.values(), return_exceptions=True)
    await conn.send(json.dumps({"sha256": digest.hexdigest()}).encode())
    await answer_of(conn)
    seconds = time.perf_counter() - started
    print(f"{path.name}: {size} bytes in {seconds:.2f} s, sha256 {digest.hexdigest()}", flush=True)


async def send(host: str, port: int, paths: list[Path]) -> None:
    """Send files, one after the other."""
    async with aiordma.connect(host, port) as conn:
        with await conn.recv() as message:
            window = aiordma.RemoteRegion.from_bytes(bytes(message))
        page = await conn.register(CHUNK * WINDOW)
        for path in paths:
            try:
                await send_file(conn, window, page, path)
            except CopyError as error:
                raise CopyError(f"{path}: {error}") from error
            except (ConnectionError, aiordma.CompletionError) as error:
                # A write also fails if the receiver's adapter does not answer, or if the kernel has
                # taken the memory of a receiver that was killed.
                raise CopyError(f"{path}: the receiver is gone: {error}") from error


def parse_arguments() -> argparse.Namespace:
    """Return the options; a mistake ends the program with status 2."""
    parser = argparse.ArgumentParser(description="Copy files over RDMA.")
    commands = parser.add_subparsers(dest="command", required=True)
    receiver = commands.add_parser("receive", help="receive files until Ctrl-C")
    sender = commands.add_parser("send", help="send files")
    for command, host in ((receiver, "0.0.0.0"), (sender, "10.80.0.1")):
        command.add_argument("--host", default=host, help="default: %(default)s")
        command.add_argument("--port", type=int, default=18522, help="default: %(default)s")
    receiver.add_argument("folder", type=Path, nargs="?", default=Path())
    sender.add_argument("files", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args()
    if options.command == "receive" and not options.folder.is_dir():
        parser.error(f"{options.folder} is not a folder")
    for path in getattr(options, "files", ()):
        if not path.is_file():
            parser.error(f"{path} is not a file")
    return options


def main() -> None:
    """Run the command line."""
    options = parse_arguments()
    try:
        if options.command == "receive":
            asyncio.run(serve(options.host, options.port, options.folder))
        else:
            asyncio.run(send(options.host, options.port, options.files))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
    except (CopyError, OSError) as error:
        sys.exit(f"copy_file: {error}")


if __name__ == "__main__":
    main()
