"""Files, mail, databases, queues and calls of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

from tests.programs.tried import LARGE, background, free_port, tried


@tried("an echo of 300 kB", client=("anyio",))
async def anyio_client(address: str) -> None:
    import anyio

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(echo, address, 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with await anyio.connect_tcp(address, port) as stream:
            assert stream.extra(anyio.abc.SocketAttribute.remote_address) == (address, port)
            got = bytearray()
            async with anyio.create_task_group() as group:
                group.start_soon(_send, stream)
                async for part in stream:
                    got += part
            assert got == bytes(LARGE)


async def _send(stream: Any) -> None:
    await stream.send(bytes(LARGE))
    await stream.send_eof()


@tried(
    "an echo",
    server=("anyio",),
    expected="TCP",
    why="its listener takes clients by `loop.sock_accept`",
)
async def anyio_listener(address: str) -> None:
    import socket

    import anyio

    async def echo(stream: Any) -> None:
        async with stream:
            await stream.send(await stream.receive())

    async with await anyio.create_tcp_listener(local_host=address) as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as group:
            group.start_soon(listener.serve, echo)
            # anyio's own client would go over RDMA, where nothing listens.
            with socket.socket() as sock:
                sock.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(sock, (address, port))
                await loop.sock_sendall(sock, b"hello")
                assert await loop.sock_recv(sock, 10) == b"hello"
            group.cancel_scope.cancel()


@tried("log in, put a file, list, get it", server=("aioftp",), client=("aioftp",))
async def aioftp_both(address: str) -> None:
    import aioftp

    with tempfile.TemporaryDirectory() as folder:
        root, here = Path(folder, "root"), Path(folder, "here")
        root.mkdir()
        here.mkdir()
        (here / "file").write_bytes(bytes(LARGE))
        user = aioftp.User("me", "secret", base_path=root)
        server = aioftp.Server([user])
        await server.start(address, 0)
        async with aioftp.Client.context(address, server.server_port, "me", "secret") as client:
            await client.upload(here / "file", "there", write_into=True)
            assert [str(path) for path, _ in await client.list()] == ["there"]
            await client.download("there", here / "back", write_into=True)
        await server.close()
        assert (here / "back").read_bytes() == bytes(LARGE)


@tried("a key exchange, a command, SFTP put and get", server=("asyncssh",), client=("asyncssh",))
async def asyncssh_both(address: str) -> None:
    import asyncssh

    key = asyncssh.generate_private_key("ssh-ed25519")

    async def shell(process: Any) -> None:
        process.stdout.write(process.command.upper())
        process.exit(0)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        Path(folder, "file").write_bytes(bytes(LARGE))
        Path(folder, "keys").write_bytes(key.export_public_key())

        def sftp(channel: Any) -> Any:
            return asyncssh.SFTPServer(channel, chroot=bytes(root))

        server = await asyncssh.listen(
            address, 0, server_host_keys=[key], authorized_client_keys=str(Path(folder, "keys")),
            process_factory=shell, sftp_factory=sftp,
        )  # fmt: skip
        async with asyncssh.connect(
            address, server.get_port(), client_keys=[key], known_hosts=None, username="me"
        ) as connection:
            done = await connection.run("hello", check=True)
            assert done.stdout == "HELLO"
            async with connection.start_sftp_client() as client:
                await client.put(str(Path(folder, "file")), "there")
                await client.get("there", str(Path(folder, "back")))
        server.close()
        await server.wait_closed()
        assert Path(folder, "back").read_bytes() == bytes(LARGE)


@tried("a mail of 300 kB", server=("aiosmtpd",), client=("aiosmtplib",))
async def aiosmtpd_aiosmtplib(address: str) -> None:
    from email.message import EmailMessage

    import aiosmtplib
    from aiosmtpd.smtp import SMTP

    mails: list[bytes] = []

    class Handler:
        async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
            mails.append(envelope.content)
            return "250 OK"

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(Handler()), address, 0)
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "me@here.test", "you@there.test", "hello"
    mail.set_content("line\n" * (LARGE // 5))
    await aiosmtplib.send(mail, hostname=address, port=server.sockets[0].getsockname()[1])
    assert len(mails) == 1
    assert len(mails[0]) > LARGE
    server.close()


@tried("log in, queries, a result of 1,000 rows", server=("mysql-mimic",), client=("aiomysql",))
async def mysql_mimic_aiomysql(address: str) -> None:
    import aiomysql
    from mysql_mimic import MysqlServer, Session

    class Numbers(Session):
        async def query(self, expression: Any, sql: str, attrs: Any) -> Any:
            return [(number, "x" * 100) for number in range(1000)], ["number", "text"]

        async def schema(self) -> dict[str, Any]:
            return {"table": {"number": "INTEGER", "text": "TEXT"}}

    port = free_port()
    server = MysqlServer(session_factory=Numbers)
    await server.start_server(host=address, port=port)
    connection = await aiomysql.connect(host=address, port=port, user="me")
    async with connection.cursor() as cursor:
        await cursor.execute("SELECT number, text FROM t")
        rows = await cursor.fetchall()
        assert [row[0] for row in rows] == list(range(1000))
    connection.close()
    server.close()


async def _redis(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As much of a Redis server as SET and GET need."""
    kept: dict[bytes, bytes] = {}
    with contextlib.suppress(asyncio.IncompleteReadError):
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            command = words[0].upper()
            if command == b"SET":
                kept[words[1]] = words[2]
                writer.write(b"+OK\r\n")
            elif command == b"GET":
                value = kept[words[1]]
                writer.write(b"$%d\r\n%s\r\n" % (len(value), value))
            elif command == b"HELLO":
                writer.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
            else:
                writer.write(b"+OK\r\n")
            await writer.drain()
    writer.close()


@tried("SET and GET of 300 kB, a pipeline", client=("redis",))
async def redis_client(address: str) -> None:
    import redis.asyncio

    async with await asyncio.start_server(_redis, address, 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = redis.asyncio.Redis(host=address, port=port)
        await client.set("large", bytes(LARGE))
        assert await client.get("large") == bytes(LARGE)
        async with client.pipeline(transaction=False) as pipe:
            for number in range(100):
                pipe.set(f"{number}", number).get(f"{number}")
            assert (await pipe.execute())[1::2] == [b"%d" % number for number in range(100)]
        await client.aclose()


async def _nats(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As much of a NATS server as one client that hears itself needs."""
    writer.write(
        b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576,"headers":true}\r\n'
    )
    subscribed: dict[bytes, bytes] = {}
    with contextlib.suppress(asyncio.IncompleteReadError):
        while line := (await reader.readline()).strip():
            verb, *words = line.split()
            if verb == b"PING":
                writer.write(b"PONG\r\n")
            elif verb == b"SUB":
                subscribed[words[0]] = words[-1]
            elif verb == b"PUB":
                payload = await reader.readexactly(int(words[-1]) + 2)
                number = subscribed[words[0]]
                writer.write(b"MSG %s %s %s\r\n%s" % (words[0], number, words[-1], payload))
            await writer.drain()
    writer.close()


@tried("subscribe and publish, 300 kB", client=("nats-py",))
async def nats_client(address: str) -> None:
    import nats

    async with await asyncio.start_server(_nats, address, 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = await nats.connect(f"nats://{address}:{port}", allow_reconnect=False)
        subscription = await client.subscribe("news")
        for size in (1, 1000, LARGE):
            await client.publish("news", bytes(size))
            assert (await subscription.next_msg(10)).data == bytes(size)
        await client.close()


@tried("unary and streaming calls", server=("grpclib",), client=("grpclib",))
async def grpclib_both(address: str) -> None:
    from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
    from grpclib.const import Cardinality, Handler
    from grpclib.encoding.base import CodecBase
    from grpclib.server import Server

    class Raw(CodecBase):
        __content_subtype__ = "raw"

        def encode(self, message: Any, message_type: Any) -> bytes:
            return bytes(message)

        def decode(self, data: bytes, message_type: Any) -> Any:
            return data

    class Echo:
        async def each(self, stream: Any) -> None:
            async for message in stream:
                await stream.send_message(message)

        def __mapping__(self) -> dict[str, Any]:
            return {
                "/echo/One": Handler(self.each, Cardinality.UNARY_UNARY, bytes, bytes),
                "/echo/Many": Handler(self.each, Cardinality.STREAM_STREAM, bytes, bytes),
            }

    port = free_port()
    server = Server([Echo()], codec=Raw())
    await server.start(address, port)
    async with Channel(address, port, codec=Raw()) as channel:
        one = UnaryUnaryMethod(channel, "/echo/One", bytes, bytes)
        assert await one(bytes(LARGE)) == bytes(LARGE)
        many = StreamStreamMethod(channel, "/echo/Many", bytes, bytes)
        assert await many([b"a", b"b", b"c"]) == [b"a", b"b", b"c"]
    server.close()
    await server.wait_closed()


@tried("write and read registers", server=("pymodbus",), client=("pymodbus",))
async def pymodbus_both(address: str) -> None:
    from pymodbus.client import AsyncModbusTcpClient
    from pymodbus.datastore import (
        ModbusDeviceContext,
        ModbusSequentialDataBlock,
        ModbusServerContext,
    )
    from pymodbus.server import ModbusTcpServer

    port = free_port()
    registers = ModbusDeviceContext(hr=ModbusSequentialDataBlock(1, [0] * 100))
    server = ModbusTcpServer(ModbusServerContext(devices=registers), address=(address, port))
    async with background(server.serve_forever(), lambda: server.transport is not None):
        async with AsyncModbusTcpClient(address, port=port) as client:
            await client.write_registers(10, [1, 2, 3])
            assert (await client.read_holding_registers(10, count=3)).registers == [1, 2, 3]
        await server.shutdown()


@tried("subscribe and publish with each quality", server=("amqtt",), client=("amqtt",))
async def amqtt_both(address: str) -> None:
    from amqtt.broker import Broker
    from amqtt.client import MQTTClient

    port = free_port()
    config = {
        "listeners": {"default": {"type": "tcp", "bind": f"{address}:{port}"}},
        "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
    }
    broker = Broker(config)
    await broker.start()
    client = MQTTClient(config={"auto_reconnect": False})
    await client.connect(f"mqtt://{address}:{port}/")
    await client.subscribe([("news", 2)])
    for quality in (0, 1, 2):
        await client.publish("news", bytes(10_000), qos=quality)
        message = await client.deliver_message(timeout_duration=20)
        assert message is not None
        assert message.data == bytes(10_000)
    await client.disconnect()
    await broker.shutdown()


@tried("browse, write and read a variable", server=("asyncua",), client=("asyncua",))
async def asyncua_both(address: str) -> None:
    from asyncua import Client, Server

    url = f"opc.tcp://{address}:{free_port()}/tried"
    server = Server()
    await server.init()
    server.set_endpoint(url)
    space = await server.register_namespace("tried")
    variable = await server.nodes.objects.add_variable(space, "number", 6.5)
    await variable.set_writable()
    async with server, Client(url) as client:
        node = client.get_node(variable.nodeid)
        assert await node.read_value() == 6.5
        await node.write_value(7.5)
        assert await variable.read_value() == 7.5


@tried("negotiation and lines", server=("telnetlib3",), client=("telnetlib3",))
async def telnetlib3_both(address: str) -> None:
    import telnetlib3

    async def shell(reader: Any, writer: Any) -> None:
        writer.write((await reader.readline()).upper())
        await writer.drain()
        writer.close()

    port = free_port()
    server = await telnetlib3.create_server(host=address, port=port, shell=shell, connect_maxwait=1)
    reader, writer = await telnetlib3.open_connection(address, port, connect_maxwait=1)
    writer.write("hello\r\n")
    assert await reader.readline() == "HELLO\r\n"
    writer.close()
    server.close()


@tried(
    "GET of a resource",
    server=("aiocoap",),
    client=("aiocoap",),
    expected="UDP",
    why="it speaks datagrams, for which the switch is not",
)
async def aiocoap_both(address: str) -> None:
    from aiocoap import GET, Context, Message, resource

    class Hello(resource.Resource):
        async def render_get(self, request: Any) -> Any:
            return Message(payload=b"hello")

    site = resource.Site()
    site.add_resource(["hello"], Hello())
    server = await Context.create_server_context(
        site, bind=(address, None), transports=["simplesocketserver"]
    )
    client = await Context.create_client_context(transports=["simple6"])
    request = Message(code=GET, uri=f"coap://{address}/hello")
    response = await client.request(request).response
    assert response.payload == b"hello"
    await client.shutdown()
    await server.shutdown()
