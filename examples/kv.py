"""A key-value store for numpy arrays: messages say where a value is, RDMA READ fetches it.

The server keeps all values in a single piece of memory, registered once, which it exposes to each
client for reading.  To get a key, a client asks where the value is, reads it out of the server's
memory into its own array, without the server's program, and reports that it has it.  Until then
the place is held: a value that is replaced meanwhile goes to another place, so that no client ever
sees parts of two values.

    kv.py serve [--host ADDRESS] [--port PORT] [--memory MIB] [--device NAME]
    kv.py put KEY NUMBER...         kv.py put KEY --file ARRAY.npy
    kv.py get KEY                   kv.py get KEY --file ARRAY.npy
    kv.py delete KEY                kv.py keys

Without RDMA hardware, in one command:

    python -m aiordma_softroce -- bash -c '
        coproc python examples/kv.py serve; read <&${COPROC[0]}
        python examples/kv.py put weights 0.5 1 2; python examples/kv.py get weights'
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import aiordma
from aiordma.verbs import Access

Array = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT = 64
MAX_KEY = 1000  # characters
MAX_LINE = 65536  # bytes of a request's line
MAX_HELD = 64  # values that a client reads at a time
RAW_KINDS = "biufcSUmM"  # arrays of these are bytes, and no references to Python objects


class StoreError(Exception):
    """The store cannot do it; the text says why."""


# --- the server


@dataclass(eq=False)  # two versions of a value are two values
class Value:
    """A version of a value, and its place in the memory of the store."""

    offset: int
    size: int
    version: int
    dtype: str
    shape: list[int]
    checksum: int = 0

    def describe(self) -> dict[str, Any]:
        """Return all that a client needs to read it."""
        return {
            "offset": self.offset, "size": self.size, "version": self.version,
            "dtype": self.dtype, "shape": self.shape, "checksum": self.checksum,
        }  # fmt: skip


class Store:
    """Values in a single piece of memory.

    A place is taken with `allocate` and belongs to the value until it is replaced, deleted, or
    given up, and no client holds it any more.

    Args:
        size: Bytes of the memory.
    """

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        self.values: dict[str, Value] = {}
        self._free = [(0, size)]  # offset and length, by offset
        self._users = Counter[Value]()
        self._version = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that no value takes, in all gaps together."""
        return sum(length for _, length in self._free)

    def allocate(self, size: int, dtype: str, shape: list[int]) -> Value:
        """Return a place for a new version of a value.

        Raises:
            StoreError: No gap is large enough.
        """
        needed = _rounded(size)
        for index, (offset, length) in enumerate(self._free):
            if length >= needed:
                rest = [(offset + needed, length - needed)] if length > needed else []
                self._free[index : index + 1] = rest
                self._version += 1
                value = Value(offset, size, self._version, dtype, shape)
                self._users[value] = 1
                return value
        raise StoreError(
            f"the store is full: {size} bytes do not fit, {self.free_bytes} are free "
            "in all, perhaps in smaller pieces"
        )

    def publish(self, key: str, value: Value) -> None:
        """Make `value`, whose bytes are in its place, the value of `key`."""
        before = self.values.get(key)
        self.values[key] = value
        if before is not None:
            self.release(before)

    def put(self, key: str, data: memoryview, dtype: str, shape: list[int]) -> Value:
        """Store a new version of a value."""
        value = self.allocate(len(data), dtype, shape)
        self.memory[value.offset : value.offset + value.size] = data
        value.checksum = zlib.crc32(data)
        self.publish(key, value)
        return value

    def delete(self, key: str) -> None:
        """Forget a key."""
        self.release(self.get(key))
        del self.values[key]

    def get(self, key: str) -> Value:
        """Return the value of a key."""
        if key not in self.values:
            raise StoreError(f"no key {key!r}")
        return self.values[key]

    def hold(self, value: Value) -> None:
        """Keep the place of `value` for a client, until `release`."""
        self._users[value] += 1

    def release(self, value: Value) -> None:
        """Give up a use of `value`; the place is free after the last."""
        self._users[value] -= 1
        if self._users[value]:
            return
        del self._users[value]
        merged: list[tuple[int, int]] = []
        for offset, length in sorted([*self._free, (value.offset, _rounded(value.size))]):
            if merged and sum(merged[-1]) == offset:
                offset, length = merged[-1][0], merged[-1][1] + length
                merged.pop()
            merged.append((offset, length))
        self._free = merged


def _rounded(size: int) -> int:
    """Bytes of a place for `size` bytes."""
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)


class Session:
    """The requests of a client: each is a line of JSON, and for a put the bytes of the value."""

    def __init__(self, store: Store, memory: aiordma.Memory, conn: aiordma.Connection) -> None:
        self._store = store
        self._memory = memory
        self._conn = conn
        self._held: dict[int, Value] = {}  # by the number of the request that asked for it

    async def run(self) -> None:
        """Answer until the client closes or is lost; its places are free then."""
        try:
            async with self._conn.expose(self._memory[:], read=True) as region:
                await self._conn.send(region.to_bytes())
                async for message in self._conn:
                    with message:
                        answer = self._answer(message)
                    if answer is not None:
                        await self._conn.send(json.dumps(answer).encode())
        finally:
            for value in self._held.values():
                self._store.release(value)

    def _answer(self, message: aiordma.Message) -> dict[str, Any] | None:
        number = None
        try:
            line, _, _ = message[:MAX_LINE].partition(b"\n")
            request = json.loads(line)
            number = request["number"]
            answer = self._do(request, message, len(line) + 1)
        except StoreError as error:
            answer = {"error": str(error)}
        except (ValueError, LookupError, TypeError) as error:
            answer = {"error": f"not a request: {error!r}"}
        return None if answer is None else {"number": number, **answer}

    def _do(
        self, request: dict[str, Any], message: aiordma.Message, start: int
    ) -> dict[str, Any] | None:
        match request:
            case {"do": "get", "number": int(number), "key": str(key)}:
                value = self._store.get(key)
                if len(self._held) == MAX_HELD or number in self._held:
                    raise StoreError(f"a client reads at most {MAX_HELD} values at a time")
                self._store.hold(value)
                self._held[number] = value
                return value.describe()
            case {"do": "done", "number": int(number)}:
                if held := self._held.pop(number, None):
                    self._store.release(held)
                return None
            case {"do": "put", "key": str(key), "dtype": str(dtype), "shape": list(shape)}:
                if not 0 < len(key) <= MAX_KEY:
                    raise StoreError(f"a key has 1 to {MAX_KEY} characters")
                with memoryview(message)[start:] as data:
                    value = self._store.put(key, data, dtype, shape)
                return {"version": value.version}
            case {"do": "delete", "key": str(key)}:
                self._store.delete(key)
                return {}
            case {"do": "keys"}:
                return {"keys": sorted(self._store.values)}
        raise StoreError(f"no such request: {request}")


async def talk(store: Store, memory: aiordma.Memory, conn: aiordma.Connection) -> None:
    """Serve a client; `memory` has the bytes of the store."""
    await Session(store, memory, conn).run()


def shared(store: Store, device: str | None = None) -> aiordma.Memory:
    """The memory of the store, for all clients: each may read all values."""
    return aiordma.Memory(store.memory, device=device, trusted=Access.REMOTE_READ)


def config_for(size: int) -> aiordma.ConnectionConfig:
    """Settings with which a message can fill a store of `size` bytes."""
    return aiordma.ConnectionConfig(max_message_size=size + MAX_LINE)


async def serve(host: str, port: int, size: int, device: str | None) -> None:
    """Serve clients until Ctrl-C."""
    store, config = Store(size), config_for(size)
    async with (
        shared(store, device) as memory,
        aiordma.serve(
            functools.partial(talk, store, memory), host, port,
            config=config, memory=memory, signals=True,
        ) as server,
    ):  # fmt: skip
        print("listening on", *server.sockname, flush=True)
        await server.serve_forever()


# --- the client


class Client:
    """A connection to a store; made by `connect`.  Several tasks may use it.

    Args:
        conn: The connection.
        memory: The memory of the store, as the server has named it.
    """

    def __init__(self, conn: aiordma.Connection, memory: aiordma.RemoteRegion) -> None:
        self._conn = conn
        self._memory = memory
        self._turn = asyncio.Lock()  # a request, and the answer to it
        self._numbers = itertools.count()

    async def _ask(self, data: Any = b"", **request: Any) -> dict[str, Any]:
        async with self._turn:
            number = next(self._numbers)
            line = json.dumps({**request, "number": number}).encode()
            await self._conn.send([line, b"\n", data])
            while True:
                with await self._conn.recv() as message:
                    answer: dict[str, Any] = json.loads(bytes(message))
                if answer["number"] == number:
                    break
                if "offset" in answer:  # of a task that was canceled while it waited
                    await self._tell_done(answer)
        if "error" in answer:
            raise StoreError(answer["error"])
        return answer

    async def _tell_done(self, value: dict[str, Any]) -> None:
        """The server may use the place of `value` again."""
        await self._conn.send(json.dumps({"do": "done", "number": value["number"]}).encode())

    async def put(self, key: str, array: npt.ArrayLike) -> int:
        """Store an array; a client that reads the key gets the old value or the new.

        Returns:
            The version, which is larger than those of all values that were there before.

        Raises:
            StoreError: The store is full, or the key is too long.
            TypeError: The array has references to objects, or fields.
            ConnectionError: The server is gone.
        """
        array = np.asarray(array)
        if array.dtype.kind not in RAW_KINDS:
            raise TypeError(f"an array of {array.dtype} cannot be stored, only numbers and text")
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        shape = list(array.shape)
        answer = await self._ask(flat, do="put", key=key, dtype=array.dtype.str, shape=shape)
        return int(answer["version"])

    async def get(self, key: str) -> Array:
        """Return a copy of an array, by RDMA READ.

        Raises:
            StoreError: No such key, or the bytes were damaged.
            ConnectionError: The server is gone.
            CompletionError: The same: its host does not answer, or its memory went before its
                connections when it ended.
        """
        value = await self._ask(do="get", key=key)
        array = np.empty(value["shape"], np.dtype(value["dtype"]))
        data = array.reshape(-1).view(np.uint8).data
        try:
            if value["size"] != array.nbytes:
                raise StoreError(f"{key!r} has {value['size']} bytes, and says {array.nbytes}")
            if array.nbytes:
                await self._conn.read(self._memory, data, offset=value["offset"])
        finally:
            await self._tell_done(value)
        if zlib.crc32(data) != value["checksum"]:
            raise StoreError(f"the bytes of {key!r} do not have the checksum of the value")
        return array

    async def delete(self, key: str) -> None:
        """Forget a key."""
        await self._ask(do="delete", key=key)

    async def keys(self) -> list[str]:
        """The keys of the store, in alphabetical order."""
        return list((await self._ask(do="keys"))["keys"])


@asynccontextmanager
async def connect(host: str, port: int) -> AsyncIterator[Client]:
    """Connect to a store, for a block."""
    async with aiordma.connect(host, port) as conn:
        with await conn.recv() as message:
            memory = aiordma.RemoteRegion.from_bytes(bytes(message))
        yield Client(conn, memory)


async def run(options: argparse.Namespace) -> None:
    """Do what the command line says."""
    if options.command == "serve":
        await serve(options.host, options.port, options.memory << 20, options.device)
        return
    async with connect(options.host, options.port) as client:
        match options.command:
            case "put":
                array = np.load(options.file) if options.file else np.array(options.numbers)
                print("version", await client.put(options.key, array))
            case "get" if options.file:
                np.save(options.file, await client.get(options.key))
            case "get":
                print(await client.get(options.key))
            case "delete":
                await client.delete(options.key)
            case "keys":
                print(*await client.keys(), sep="\n")


def parse_arguments() -> argparse.Namespace:
    """Return the options; a mistake ends the program with status 2."""
    parser = argparse.ArgumentParser(description="A key-value store for numpy arrays over RDMA.")
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--port", type=int, default=18520, help="default: %(default)s")
    for name, words in (
        ("serve", "keep arrays until Ctrl-C"),
        ("put", "store an array"),
        ("get", "print an array, or write it to a file"),
        ("delete", "forget a key"),
        ("keys", "print all keys"),
    ):
        command = commands.add_parser(name, help=words, parents=[common])
        host = "0.0.0.0" if name == "serve" else "10.80.0.1"
        command.add_argument("--host", default=host, help="default: %(default)s")
        if name == "serve":
            command.add_argument("--memory", type=int, default=64, metavar="MIB")
            command.add_argument("--device", metavar="NAME", help="if there are several")
        if name in ("put", "get", "delete"):
            command.add_argument("key")
        if name == "put":
            command.add_argument("numbers", type=float, nargs="*", metavar="NUMBER")
        if name in ("put", "get"):
            command.add_argument("--file", type=Path, metavar="ARRAY.npy")
    options = parser.parse_args()
    if options.command == "serve" and not 0 < options.memory <= 1024:
        parser.error("--memory is 1 to 1024 MiB")
    if options.command == "put" and bool(options.numbers) == bool(options.file):
        parser.error("put takes numbers, or --file")
    return options


def main() -> None:
    """Run the command line."""
    options = parse_arguments()
    try:
        asyncio.run(run(options))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
    except (StoreError, OSError, ValueError) as error:
        sys.exit(f"kv: {error}")


if __name__ == "__main__":
    main()
