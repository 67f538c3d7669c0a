"""Datagrams: asyncio's DatagramProtocol over a queue pair of unreliable datagrams."""
