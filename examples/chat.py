"""A chat over asyncio's streams and RDMA: lines of text, for any number of clients.

A client sends its name as its first line.  Each further line goes to all others, and so does the
news that a client has come or left.  A client that reads slowly delays no other: the server keeps
a bounded number of lines for each, waits in `drain` for that client alone, and drops it when too
many lines wait or it has taken nothing for a time.

    chat.py serve [--host ADDRESS] [--port PORT]
    chat.py join  [--host ADDRESS] [--port PORT] NAME

`join` sends the lines of its standard input, and leaves at the end of it (Ctrl-D) or with Ctrl-C.
Without RDMA hardware, in one command:

    python -m aiordma_softroce -- bash -c '
        coproc python examples/chat.py serve; read <&${COPROC[0]}
        exec 3< <(sleep 60 | python examples/chat.py join ann); read -u3
        echo hello | python examples/chat.py join bob; head -3 <&3'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import threading

import aiordma

MAX_NAME = 30
MAX_LINE = 1000  # characters
MAX_WAITING = 100  # lines that a client has not taken
PATIENCE_S = 30.0  # for a client that takes nothing


class ChatError(Exception):
    """The conversation cannot begin, or go on; the text says why."""


# --- the server


class Guest:
    """A client that has sent its name."""

    def __init__(self, name: str, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.why = ""  # why it has left, unless by itself
        self._writer = writer
        self._lines = asyncio.Queue[str](MAX_WAITING)

    def tell(self, line: str) -> None:
        """Send a line soon; a client with too many waiting lines is let go."""
        try:
            self._lines.put_nowait(line)
        except asyncio.QueueFull:
            self.let_go("too slow")

    def let_go(self, why: str) -> None:
        """End the connection at once."""
        self.why = self.why or why
        self._writer.transport.abort()

    async def send_lines(self) -> None:
        """Send what `tell` was given, until the connection ends or takes nothing any more."""
        try:
            while True:
                self._writer.write(f"{await self._lines.get()}\n".encode())
                async with asyncio.timeout(PATIENCE_S):
                    await self._writer.drain()
        except TimeoutError:
            self.let_go("too slow")
        except ConnectionError:
            self.let_go("lost")


class Room:
    """The clients, by their names."""

    def __init__(self) -> None:
        self._guests: dict[str, Guest] = {}

    def tell(self, line: str, but: Guest) -> None:
        """Send a line to all guests but the given one."""
        for guest in self._guests.values():
            if guest is not but:
                guest.tell(line)

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client until it leaves or is lost."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                name = await read_line(reader)
            if name is not None:
                self._check(name)
                await self._serve(Guest(name, writer), reader)
        except ChatError as error:
            writer.write(f"! {error}\n".encode())
        except TimeoutError:
            writer.write(b"! no name was said\n")
        except ConnectionError:
            pass  # it has gone before sending its name
        finally:
            writer.close()

    async def _serve(self, guest: Guest, reader: asyncio.StreamReader) -> None:
        self._guests[guest.name] = guest
        sending = asyncio.create_task(guest.send_lines())
        try:
            guest.tell(f"* here: {', '.join(self._guests)}")
            self.tell(f"* {guest.name} has come", guest)
            while (line := await read_line(reader)) is not None:
                self.tell(f"{guest.name}: {line}", guest)
                await asyncio.sleep(0)  # the lines are sent before the next of many is read
        except ChatError as error:
            guest.why = str(error)
            raise
        except ConnectionError:
            guest.why = guest.why or "lost"
        finally:
            del self._guests[guest.name]
            self.tell(f"* {guest.name} has left" + (guest.why and f" ({guest.why})"), guest)
            sending.cancel()

    def _check(self, name: str) -> None:
        if not re.fullmatch(rf"[\w-]{{1,{MAX_NAME}}}", name):
            raise ChatError(f"a name has 1 to {MAX_NAME} letters, digits, - and _")
        if name in self._guests:
            raise ChatError(f"the name {name} is taken")


async def read_line(reader: asyncio.StreamReader) -> str | None:
    """Return the next line, without its end; None at the end of the stream.

    Raises:
        ChatError: It is too long.
        ConnectionError: The peer is lost.
    """
    try:
        line = await reader.readline()
    except ValueError:  # beyond the limit of the reader
        line = b" " * (MAX_LINE + 1)
    if not line:
        return None
    text = line.decode(errors="replace").rstrip("\r\n")
    if len(text) > MAX_LINE:
        raise ChatError(f"a line has at most {MAX_LINE} characters")
    return "".join(c if c.isprintable() else "?" for c in text)


async def serve(host: str, port: int) -> None:
    """Serve clients until Ctrl-C."""
    server = await aiordma.start_server(Room().welcome, host, port)
    print("listening on", *server.sockname, flush=True)
    async with server:
        await server.serve_forever()


# --- the client


class Keys:
    """The lines of standard input, which a thread reads; at most 64 are kept.

    The thread reads without a buffer, whose lock it could hold when the program ends.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines = asyncio.Queue[bytes]()
        self._room = threading.Semaphore(64)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with (
            contextlib.suppress(RuntimeError, OSError),  # the loop has ended; no standard input
            open(0, "rb", buffering=0, closefd=False) as keys,
        ):
            while self._room.acquire():
                line = keys.readline()
                self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
                if not line:
                    break

    async def next(self) -> bytes:
        """Return the next line; b"" at the end."""
        line = await self._lines.get()
        self._room.release()
        return line


async def send_keys(writer: asyncio.StreamWriter) -> None:
    """Send the lines of standard input, and their end."""
    keys = Keys()
    while line := await keys.next():
        writer.write(line if line.endswith(b"\n") else line + b"\n")
        await writer.drain()
    writer.write_eof()


async def join(host: str, port: int, name: str) -> None:
    """Take part in the conversation, until the end of standard input.

    Raises:
        ChatError: The server refused, or ended the conversation.
        ConnectionError: The connection was not made, or is lost.
    """
    reader, writer = await aiordma.open_connection(host, port)
    talking = asyncio.create_task(send_keys(writer))
    try:
        writer.write(f"{name}\n".encode())
        while line := (await reader.readline()).decode():
            if line.startswith("! "):
                raise ChatError(line.removeprefix("! ").rstrip())
            print(line, end="", flush=True)
        if not talking.done():
            raise ChatError("the server has ended the conversation")
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def parse_arguments() -> argparse.Namespace:
    """Return the options; a mistake ends the program with status 2."""
    parser = argparse.ArgumentParser(description="A chat over RDMA.")
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="host the conversation until Ctrl-C")
    client = commands.add_parser("join", help="take part in it")
    for command, host in ((server, "0.0.0.0"), (client, "10.80.0.1")):
        command.add_argument("--host", default=host, help="default: %(default)s")
        command.add_argument("--port", type=int, default=18523, help="default: %(default)s")
    client.add_argument("name")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    options = parse_arguments()
    try:
        if options.command == "serve":
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how a server ends
                asyncio.run(serve(options.host, options.port))
        else:
            asyncio.run(join(options.host, options.port, options.name))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
    except (ChatError, OSError) as error:
        sys.exit(f"chat: {error}")


if __name__ == "__main__":
    main()
