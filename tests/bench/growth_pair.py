"""Where the time of one connection goes: C, Python, and what C alone would take.

    python -m aiordma.testing.softroce --engine qemu --counted -- \\
        python tests/bench/growth_pair.py

Both ends are in this process, so that a pair is all there is.  Three measurements:

- ours: `connect` and `accept`, some at a time, until both ends have their connection;
- the same with a clock around each C function, and around the methods of compiled types that call
  some: what the kernel and the C libraries take of it, by function.  The rest is Python, cffi's
  part of the calls, and the event loop;
- bare: the same C calls without this library, from a loop of Python that keeps nothing and checks
  nothing: one channel for each side, read when an event is due.  Nothing in Python can be faster.

And what the end takes, of all pairs together, until the adapter has nothing of them; the same of
streams.

What the kernel does on its own, such as moving packets, falls into whatever runs at the moment.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aiordma
from aiordma._core import CMEvents, MessageState, QueueState
from aiordma._ffi import ffi, lib
from aiordma.cm.address import to_sockaddr
from tests.bench.growth import CONFIGS, LEAN, Row, own_address, parser, publish, run

PORT = 7480
_SLAB = 8192


#: The methods of compiled types that call C libraries, on the way to a connection and to its end.
METHODS: tuple[tuple[type, str], ...] = (
    (CMEvents, "next"),
    (CMEvents, "resolve"),
    (MessageState, "post_receives"),
    (MessageState, "post_send"),
    (MessageState, "send"),
    (QueueState, "retire"),
)


class Clock:
    """Times C functions, from `start` to `stop`, while it is wound around them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.nanoseconds: Counter[str] = Counter()
        self._plain: dict[str, Any] = {}
        self._methods: dict[tuple[type, str], Any] = {}
        self._runs = False

    def start(self) -> None:
        """Begin."""
        self._runs = True

    def stop(self) -> None:
        """End."""
        self._runs = False

    def __enter__(self) -> Clock:
        lib.ibv_create_cq  # noqa: B018 (loads the module, all of it)
        names = vars(lib)
        for name in list(names):
            if callable(names[name]) and name.startswith(("ibv_", "rdma_", "aio_")):
                self._plain[name] = names[name]
                names[name] = self.timed(name, names[name])
        for kind, name in METHODS:
            plain = self._methods[kind, name] = vars(kind)[name]
            timed = self.timed(f"{kind.__name__}.{name}", getattr(kind, name))
            setattr(kind, name, staticmethod(timed) if isinstance(plain, staticmethod) else timed)
        return self

    def timed(self, name: str, function: Any) -> Any:
        def call(*args: Any, clock: Any = time.perf_counter_ns) -> Any:
            begun = clock()
            result = function(*args)
            if self._runs:
                self.nanoseconds[name] += clock() - begun
                self.calls[name] += 1
            return result

        return call

    def __exit__(self, *exc_info: object) -> None:
        vars(lib).update(self._plain)
        for (kind, name), plain in self._methods.items():
            setattr(kind, name, plain)


async def ours(
    address: str, setting: str, count: int, at_once: int, clock: Clock | None
) -> tuple[float, float]:
    """Microseconds a pair, to connect it and to close it."""
    config = CONFIGS[setting]
    ends: list[aiordma.Connection] = []

    async def together(listener: aiordma.Listener, many: int) -> float:
        begun = time.perf_counter()
        accepts = [asyncio.ensure_future(listener.accept()) for _ in range(many)]
        ends.extend(
            await asyncio.gather(
                *(aiordma.connect(address, listener.port, config=config) for _ in range(many))
            )
        )
        ends.extend(await asyncio.gather(*accepts))
        return time.perf_counter() - begun

    took = 0.0
    async with aiordma.listen(address, 0, config=config, backlog=1000) as listener:
        await together(listener, 2)  # what is loaded and looked up once
        if clock is not None:
            clock.start()
        for _ in range(count // at_once):
            took += await together(listener, at_once)
        if clock is not None:
            clock.stop()
        begun = time.perf_counter()
        await asyncio.gather(*(end.close() for end in ends))
        closing = time.perf_counter() - begun
    return took / (count // at_once * at_once) * 1e6, closing / (len(ends) // 2) * 1e6


async def streams(address: str, count: int) -> tuple[float, float]:
    """The same of streams, by `open_connection`."""
    accepted: asyncio.Queue[Any] = asyncio.Queue()

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait(writer)

    async def together(many: int) -> tuple[float, float]:
        begun = time.perf_counter()
        opening = (aiordma.open_connection(address, server.port) for _ in range(many))
        writers: list[Any] = [writer for _, writer in await asyncio.gather(*opening)]
        writers += [await accepted.get() for _ in range(many)]
        connected = time.perf_counter()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.transport.wait_closed() for writer in writers))
        closed = time.perf_counter()
        return (connected - begun) / many * 1e6, (closed - connected) / many * 1e6

    async with await aiordma.start_server(take, address, 0) as server:
        await together(2)
        return await together(count)


def _check(code: int) -> None:
    if code:
        raise OSError(ffi.errno or code, "a C call failed")


class Bare:
    """One end, of C objects alone."""

    def __init__(self, cm_id: Any, cq: Any) -> None:
        self.id = cm_id
        context = cm_id.verbs
        self.pd = lib.ibv_alloc_pd(context)
        self.memory = ffi.from_buffer(mmap.mmap(-1, _SLAB))
        self.mr = lib.ibv_reg_mr_iova(
            self.pd, self.memory, _SLAB, int(ffi.cast("uintptr_t", self.memory)), 1
        )
        attr = ffi.new("struct ibv_qp_init_attr *")
        attr.send_cq = attr.recv_cq = cq
        attr.qp_type = lib.IBV_QPT_RC
        attr.cap = (LEAN.sends, LEAN.receives, 1, 1, 0)
        self.qp = lib.ibv_create_qp(self.pd, attr)
        self._advance(1, 1)
        slots = ffi.new("uint16_t[]", list(range(LEAN.receives)))
        addr = int(ffi.cast("uintptr_t", self.memory))
        _check(lib.aio_post_recv_slots(self.qp, 0, addr, 256, self.mr.lkey, slots, LEAN.receives))
        self.param = ffi.new("struct rdma_conn_param *")
        self.param.responder_resources = self.param.initiator_depth = 8
        self.param.retry_count = self.param.rnr_retry_count = 6
        self.param.qp_num = self.qp.qp_num

    def _advance(self, first: int, last: int) -> None:
        if lib.aio_qp_advance(self.id, self.qp, first, last, 0, 16, 6, 6, 12, 8, 8) < 0:
            raise OSError("a transition failed")

    def connect(self) -> None:
        """The client's last call but one."""
        _check(lib.rdma_connect(self.id, self.param))

    def accept(self) -> None:
        """The server's."""
        self._advance(2, 3)
        _check(lib.rdma_accept(self.id, self.param))

    def establish(self) -> None:
        """The client's last."""
        self._advance(2, 3)
        _check(lib.rdma_establish(self.id))
        addr = int(ffi.cast("uintptr_t", self.memory))
        _check(lib.aio_post_send(self.qp, 1, addr, 16, self.mr.lkey, 2, False, 0))

    def close(self) -> None:
        """Destroy all of it."""
        lib.rdma_disconnect(self.id)
        lib.ibv_destroy_qp(self.qp)
        lib.ibv_dereg_mr(self.mr)
        lib.ibv_dealloc_pd(self.pd)
        lib.rdma_destroy_id(self.id)


def bare(address: str, count: int) -> float:
    """Microseconds a pair, one after the other."""
    out = ffi.new("struct rdma_cm_id **")
    there, here = lib.rdma_create_event_channel(), lib.rdma_create_event_channel()
    events = {channel: CMEvents(int(ffi.cast("uintptr_t", channel))) for channel in (there, here)}
    where = ffi.cast("struct sockaddr *", keep := to_sockaddr((address, PORT)))

    def wait(channel: Any) -> Any:
        found = events[channel].next()
        if not isinstance(found, tuple):
            raise OSError(found, "rdma_get_cm_event")
        return ffi.cast("struct rdma_cm_id *", events[channel].id)

    _check(lib.rdma_create_id(there, out, ffi.NULL, lib.RDMA_PS_TCP))
    listener = out[0]
    _check(lib.rdma_bind_addr(listener, where))
    _check(lib.rdma_listen(listener, 100))
    ends: list[Bare] = []
    took = 0.0
    cq: Any = None
    for number in range(count + 1):
        begun = time.perf_counter()
        _check(lib.rdma_create_id(here, out, ffi.NULL, lib.RDMA_PS_TCP))
        client_id = out[0]
        _check(lib.rdma_resolve_addr(client_id, ffi.NULL, where, 2000))
        wait(here)
        _check(lib.rdma_resolve_route(client_id, 2000))
        wait(here)
        if cq is None:
            room = 2 * (count + 1) * (LEAN.sends + LEAN.receives)
            cq = lib.ibv_create_cq(client_id.verbs, room, ffi.NULL, ffi.NULL, 0)
            _check(lib.ibv_req_notify_cq(cq, 0))
        client = Bare(client_id, cq)
        client.connect()
        server = Bare(wait(there), cq)
        server.accept()
        wait(here)
        client.establish()
        wait(there)
        if number:  # the first one is for what is loaded once
            took += time.perf_counter() - begun
        ends += client, server
    for end in ends:
        end.close()
    lib.ibv_destroy_cq(cq)
    lib.rdma_destroy_id(listener)
    lib.rdma_destroy_event_channel(here)
    lib.rdma_destroy_event_channel(there)
    del keep
    return took / count * 1e6


async def measure(options: argparse.Namespace) -> list[Row]:
    """All figures."""
    address = options.address or own_address()
    count, at_once, setting = options.count, options.at_once, options.setting
    rounds = [await ours(address, setting, count, at_once, None) for _ in range(options.rounds)]
    rows = [
        Row("a pair", statistics.median(connecting for connecting, _ in rounds), unit="us"),
        Row("closing a pair", statistics.median(closing for _, closing in rounds), unit="us"),
    ]
    opened, closed = await streams(address, min(count, 20))
    rows.append(Row("a pair of streams", opened, unit="us"))
    rows.append(Row("closing a pair of streams", closed, unit="us"))
    with Clock() as clock:
        timed, _ = await ours(address, setting, count, at_once, clock)
    made = count // at_once * at_once
    in_c = sum(clock.nanoseconds.values()) / 1000 / made
    rows.append(Row("with a clock around each C call", timed, unit="us"))
    rows.append(Row("of it in C: kernel, libibverbs, librdmacm", in_c, unit="us"))
    for name, nanoseconds in clock.nanoseconds.most_common(20):
        calls = clock.calls[name] / made
        rows.append(Row(f"  {calls:.1f} {name}", nanoseconds / 1000 / made, unit="us"))
    rows.append(Row("bare: the same calls without this library", bare(address, count), unit="us"))
    return rows


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--count", type=int, default=50, help="pairs")
    options.add_argument("--at-once", type=int, default=5, help="connects at a time")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--setting", choices=sorted(CONFIGS), default="lean")
    given = options.parse_args()
    publish(f"one connection, {given.loop}", run(given.loop, measure(given)), given.json)


if __name__ == "__main__":
    main()
