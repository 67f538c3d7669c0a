"""The port on which each command listens, or to which it connects, without `--port`."""

from __future__ import annotations

__all__ = ["DEFAULT_PORT"]

#: perftest's number, too; a port of the connection manager, whose ports are not TCP's.
DEFAULT_PORT = 18515
