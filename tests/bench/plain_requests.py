"""Requests as a user writes them: aiordma, grpc.aio, aiohttp, and pyzmq's DEALER and ROUTER.

`main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`, with NUMBER tasks that ask one request
after the other, each of `SIZE` bytes, and its answer as long.

- `ask`, over "rdma" by `Connection.request` and `serve_requests`; over "grpc" by a unary call of
  bytes on one channel; over "aiohttp" by POST, with a connection that is kept for each task; over
  "dealer" by one DEALER, whose answers a task gives to those who wait, and a ROUTER.
- `pooled` is `ask` by `Pool.request`, with a time limit and `idempotent`, and `timed-requests` is
  `ask` with the same limit.

The client prints one JSON object.  The packages are there for `make bench` alone: without one of
them its job fails, and says so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Awaitable, Callable

import aiordma
from tests.bench.plain_peer import LOOPS, timed_calls

__all__ = ["main"]

SIZE = 200
#: Calls of all tasks together, by the number of tasks.
CALLS = {16: 1600, 100: 2000}
#: Seconds that no answer takes.
LIMIT_S = 3600.0
BODY = bytes(SIZE)
METHOD = "bench.Bench", "Ask"
FORMS = ("ask", "pooled", "timed-requests")
Call = Callable[[bytes], Awaitable[bytes]]


async def tell(call: Call, tasks: int) -> None:
    """Measure, and print."""
    print(json.dumps(await timed_calls(call, tasks, BODY, CALLS[tasks])))


async def reply_to(request: aiordma.Request) -> bytes:
    """The handler: read a request, and answer it."""
    return bytes(request.body)


async def serve_rdma(address: str, port: int) -> None:
    """Serve, and go on until this process is ended."""
    async with aiordma.serve_requests(reply_to, address, port) as server:
        await server.serve_forever()


async def use_rdma(form: str, tasks: int, address: str, port: int) -> None:
    """By a connection, or by a pool."""
    if form == "pooled":
        async with aiordma.Pool(address, port) as pool:
            await pool.wait()

            async def by_pool(body: bytes) -> bytes:
                return bytes(await pool.request(body, timeout=LIMIT_S, idempotent=True))

            await tell(by_pool, tasks)
        return
    async with aiordma.connect(address, port) as conn:

        async def timed(body: bytes) -> bytes:
            return bytes(await conn.request(body, timeout=LIMIT_S))

        async def plain(body: bytes) -> bytes:
            return bytes(await conn.request(body))

        await tell(timed if form == "timed-requests" else plain, tasks)


async def serve_grpc(address: str, port: int) -> None:
    """Serve, and go on until this process is ended."""
    import grpc

    async def answer(body: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return body

    service, method = METHOD
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"{address}:{port}")
    await server.start()
    await server.wait_for_termination()


async def use_grpc(_: str, tasks: int, address: str, port: int) -> None:
    """By one channel."""
    import grpc

    async with grpc.aio.insecure_channel(f"{address}:{port}") as channel:
        call = channel.unary_unary("/{}/{}".format(*METHOD))

        async def ask(body: bytes) -> bytes:
            answer: bytes = await call(body)
            return answer

        await tell(ask, tasks)


async def serve_aiohttp(address: str, port: int) -> None:
    """Serve, and go on until this process is ended."""
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_post("/ask", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    await asyncio.Event().wait()


async def use_aiohttp(_: str, tasks: int, address: str, port: int) -> None:
    """By a session that keeps a connection for each task."""
    import aiohttp

    url = f"http://{address}:{port}/ask"
    connector = aiohttp.TCPConnector(limit=tasks)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(body: bytes) -> bytes:
            async with session.post(url, data=body) as answer:
                return await answer.read()

        await tell(ask, tasks)


async def serve_dealer(address: str, port: int) -> None:
    """Serve, and go on until this process is ended."""
    import zmq.asyncio

    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.bind(f"tcp://{address}:{port}")
    while True:
        await socket.send_multipart(await socket.recv_multipart())


async def use_dealer(_: str, tasks: int, address: str, port: int) -> None:
    """By one DEALER, and a number for each request."""
    import zmq.asyncio

    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.connect(f"tcp://{address}:{port}")
    waiting: dict[bytes, asyncio.Future[bytes]] = {}
    numbers = itertools.count()
    loop = asyncio.get_running_loop()

    async def read() -> None:
        while True:
            number, answer = await socket.recv_multipart()
            waiting.pop(number).set_result(answer)

    async def ask(body: bytes) -> bytes:
        number = next(numbers).to_bytes(8, "big")
        future: asyncio.Future[bytes] = loop.create_future()
        waiting[number] = future
        await socket.send_multipart((number, body))
        return await future

    reader = asyncio.create_task(read())
    await tell(ask, tasks)
    reader.cancel()
    await asyncio.wait([reader])
    socket.close(linger=0)


SERVES = {
    "rdma": serve_rdma, "grpc": serve_grpc, "aiohttp": serve_aiohttp, "dealer": serve_dealer,
}  # fmt: skip
USES = {"rdma": use_rdma, "grpc": use_grpc, "aiohttp": use_aiohttp, "dealer": use_dealer}


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, form, number, loop, over, address, port = words
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        if role == "server":
            runner.run(SERVES[over](address, int(port)))
        else:
            runner.run(USES[over](form, int(number), address, int(port)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
