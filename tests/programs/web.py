"""Web servers and clients."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.programs.tried import LARGE, background, free_port, tried

_OF_AIOHTTP = "it connects its sockets by `loop.sock_connect`: use [the connector](programs.md)"


async def _ask_with_httpx(url: str) -> None:
    import httpx

    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{url}/hello")).text == "hello"
        assert (await client.post(f"{url}/size", content=bytes(LARGE))).text == str(LARGE)
        assert (await client.get(f"{url}/large")).content == bytes(LARGE)


async def _ask_with_aiohttp(url: str) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/hello") as response:
            assert await response.text() == "hello"
        async with session.post(f"{url}/size", data=bytes(LARGE)) as response:
            assert await response.text() == str(LARGE)


def _of_aiohttp() -> Any:
    from aiohttp import web

    async def hello(_: Any) -> Any:
        return web.Response(text="hello")

    async def size(request: Any) -> Any:
        return web.Response(text=str(len(await request.read())))

    async def large(_: Any) -> Any:
        return web.Response(body=bytes(LARGE))

    app = web.Application()
    app.router.add_get("/hello", hello)
    app.router.add_post("/size", size)
    app.router.add_get("/large", large)
    return web.AppRunner(app)


@tried("GET, POST and an answer of 300 kB", server=("aiohttp",), client=("httpx",))
async def aiohttp_server(address: str) -> None:
    from aiohttp import web

    runner = _of_aiohttp()
    await runner.setup()
    await web.TCPSite(runner, address, 0).start()
    await _ask_with_httpx(f"http://{address}:{runner.addresses[0][1]}")
    await runner.cleanup()


@tried("the same with TLS", server=("aiohttp",), client=("httpx",))
async def https(address: str) -> None:
    import ssl

    import httpx
    import trustme
    from aiohttp import web

    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(address).configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)
    runner = _of_aiohttp()
    await runner.setup()
    await web.TCPSite(runner, address, 0, ssl_context=theirs).start()
    async with httpx.AsyncClient(verify=ours) as client:
        url = f"https://{address}:{runner.addresses[0][1]}"
        assert (await client.post(f"{url}/size", content=bytes(LARGE))).text == str(LARGE)
    await runner.cleanup()


@tried(
    "GET and POST",
    server=("aiohttp",),
    client=("aiohttp",),
    expected="TCP",
    why=_OF_AIOHTTP,
)
async def aiohttp_client(address: str) -> None:
    import socket

    from aiohttp import web

    runner = _of_aiohttp()
    await runner.setup()
    with socket.create_server((address, 0)) as listening:
        await web.SockSite(runner, listening).start()
        await _ask_with_aiohttp(f"http://{address}:{listening.getsockname()[1]}")
        await runner.cleanup()


@tried("GET, POST and an answer of 300 kB", server=("uvicorn", "fastapi"), client=("httpx",))
async def uvicorn_fastapi(address: str) -> None:
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import PlainTextResponse

    app = FastAPI()

    @app.get("/hello", response_class=PlainTextResponse)
    async def hello() -> str:
        return "hello"

    # FastAPI looks the annotations up in the module, where these names are not.
    async def size(request: Any) -> Any:
        return PlainTextResponse(str(len(await request.body())))

    size.__annotations__["request"] = Request
    app.post("/size")(size)

    async def large() -> Any:
        return Response(bytes(LARGE))

    app.add_api_route("/large", large)

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host=address, port=port, log_level="warning"))
    serving = asyncio.ensure_future(server.serve())
    async with background(serving, lambda: server.started):
        await _ask_with_httpx(f"http://{address}:{port}")
        server.should_exit = True
        await asyncio.shield(serving)


@tried("GET, POST and an answer of 300 kB", server=("hypercorn", "quart"), client=("httpx",))
async def hypercorn_quart(address: str) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from quart import Quart, request

    app = Quart(__name__)
    ready = asyncio.Event()
    stop = asyncio.Event()

    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    @app.post("/size")
    async def size() -> str:
        return str(len(await request.get_data()))

    @app.get("/large")
    async def large() -> bytes:
        return bytes(LARGE)

    config = Config()
    port = free_port()
    config.bind = [f"{address}:{port}"]
    config.accesslog = config.errorlog = None

    async def until_stopped() -> None:
        ready.set()  # awaited once the sockets are there
        await stop.wait()

    serving = asyncio.ensure_future(serve(app, config, shutdown_trigger=until_stopped))
    async with background(serving, ready.is_set):
        await _ask_with_httpx(f"http://{address}:{port}")
        stop.set()
        await asyncio.shield(serving)


@tried("GET, POST and an answer of 300 kB", server=("sanic",), client=("httpx",))
async def sanic_server(address: str) -> None:
    from sanic import Sanic, response

    Sanic.test_mode = True
    app = Sanic("tried", configure_logging=False)

    @app.get("/hello")
    async def hello(_: Any) -> Any:
        return response.text("hello")

    @app.post("/size")
    async def size(request: Any) -> Any:
        return response.text(str(len(request.body)))

    @app.get("/large")
    async def large(_: Any) -> Any:
        return response.raw(bytes(LARGE))

    port = free_port()
    server = await app.create_server(address, port, return_asyncio_server=True)
    assert server is not None
    await server.startup()
    await server.start_serving()
    await _ask_with_httpx(f"http://{address}:{port}")
    server.close()
    await server.wait_closed()


@tried(
    "GET and POST",
    server=("tornado",),
    client=("tornado",),
    expected="TCP",
    why="it reads and writes sockets of its own (`loop.add_reader`)",
)
async def tornado_both(address: str) -> None:
    from tornado.httpclient import AsyncHTTPClient
    from tornado.web import Application, RequestHandler

    class Hello(RequestHandler):
        def get(self) -> None:
            self.write("hello")

        def post(self) -> None:
            self.write(str(len(self.request.body)))

    port = free_port()
    server = Application([("/", Hello)]).listen(port, address)
    client = AsyncHTTPClient()
    url = f"http://{address}:{port}/"
    assert (await client.fetch(url)).body == b"hello"
    assert (await client.fetch(url, method="POST", body=bytes(LARGE))).body == b"300000"
    client.close()
    server.stop()
    await server.close_all_connections()


@tried(
    "messages of 1 B to 300 kB, pings, the close", server=("websockets",), client=("websockets",)
)
async def websockets_both(address: str) -> None:
    from websockets.asyncio.client import connect
    from websockets.asyncio.server import serve

    async def echo(websocket: Any) -> None:
        async for message in websocket:
            await websocket.send(message)

    async with serve(echo, address, 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with connect(f"ws://{address}:{port}") as websocket:
            assert websocket.remote_address == (address, port)
            for size in (1, 1000, LARGE):
                await websocket.send(bytes(size))
                assert await websocket.recv() == bytes(size)
            await (await websocket.ping())


async def _picows(address: str, **options: Any) -> None:
    from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect, ws_create_server

    class Echo(WSListener):
        def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
            if frame.msg_type == WSMsgType.BINARY:
                transport.send(frame.msg_type, frame.get_payload_as_bytes())
            elif frame.msg_type == WSMsgType.CLOSE:
                transport.send_close()
                transport.disconnect()

    answers: asyncio.Queue[bytes] = asyncio.Queue()

    class Client(WSListener):
        def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
            if frame.msg_type == WSMsgType.BINARY:
                answers.put_nowait(frame.get_payload_as_bytes())

    port = free_port()
    server = await ws_create_server(lambda _: Echo(), address, port, **options)
    transport, _ = await ws_connect(Client, f"ws://{address}:{port}/", **options)
    for size in (1, 1000, LARGE):
        transport.send(WSMsgType.BINARY, bytes(size))
        assert await answers.get() == bytes(size)
    transport.send_close()
    transport.disconnect()
    await transport.wait_disconnected()
    server.close()


@tried(
    "messages of 1 B to 300 kB",
    server=("picows", "aiofastnet"),
    client=("picows",),
    expected="TCP",
    why="aiofastnet takes the place of the loop's calls; `use_aiofastnet=False` is the next row",
)
async def picows_aiofastnet(address: str) -> None:
    await _picows(address)


@tried(
    "the same with `use_aiofastnet=False`",
    server=("picows",),
    client=("picows",),
)
async def picows_both(address: str) -> None:
    await _picows(address, use_aiofastnet=False)


@tried(
    "an event and its answer",
    server=("python-socketio", "uvicorn"),
    client=("python-socketio", "aiohttp"),
    expected="TCP",
    why=f"its client is aiohttp's: {_OF_AIOHTTP}",
)
async def socketio_both(address: str) -> None:
    import socket

    import socketio
    import uvicorn

    server = socketio.AsyncServer(async_mode="asgi")

    @server.event
    async def shout(_: str, data: str) -> str:
        return data.upper()

    config = uvicorn.Config(socketio.ASGIApp(server), log_level="warning")
    web = uvicorn.Server(config)
    with socket.create_server((address, 0)) as listening:
        port = listening.getsockname()[1]
        serving = asyncio.ensure_future(web.serve(sockets=[listening]))
        async with background(serving, lambda: web.started):
            async with socketio.AsyncSimpleClient() as client:
                await client.connect(f"http://{address}:{port}")
                assert await client.call("shout", "hello") == "HELLO"
            web.should_exit = True
            await asyncio.shield(serving)
