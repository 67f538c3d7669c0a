"""A TLS 1.3 session over RDMA, with a certificate made for it.  Usage: tls_echo.py [ADDRESS]."""

import asyncio
import ssl
import sys

import trustme

import aiordma


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one line, in capitals."""
    writer.write((await reader.readline()).upper())
    writer.close()
    await writer.wait_closed()


async def main(host: str) -> None:
    """A server, and a client that trusts only the server's authority."""
    authority = trustme.CA()
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(host).configure_cert(server_context)
    client_context = ssl.create_default_context()
    client_context.minimum_version = ssl.TLSVersion.TLSv1_3
    authority.configure_trust(client_context)

    server = await aiordma.start_server(echo, host, 0, ssl=server_context)
    async with server:
        reader, writer = await aiordma.open_connection(host, server.port, ssl=client_context)
        writer.write(b"a secret\n")
        print((await reader.readline()).decode().strip())
        print(writer.get_extra_info("cipher")[1], "over", writer.get_extra_info("device"))
        writer.close()
        await writer.wait_closed()

        try:
            await aiordma.open_connection(host, server.port, ssl=ssl.create_default_context())
        except ssl.SSLCertVerificationError as exc:
            print("refused:", exc.verify_message)


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "10.80.0.1"))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
