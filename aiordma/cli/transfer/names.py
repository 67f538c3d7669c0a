"""Names of files: those of a server, and `HOST:[PORT]/NAME` on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiordma.cli.ports import DEFAULT_PORT

__all__ = ["Remote", "parse_remote", "split_name"]

_MOST_BYTES = 4096
_MOST_BYTES_OF_A_PART = 255
_REMOTE = re.compile(
    r"(?:\[(?P<ipv6>[^\[\]/]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>[0-9]*)/(?P<name>.*)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on a server.

    Attributes:
        host: Name or numeric address.
        port: 1..65535.
        name: As the server knows it; may be empty, or end with `/`, for "the same name there".
    """

    host: str
    port: int
    name: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.name}"


def parse_remote(text: str) -> Remote | None:
    """`HOST:PORT/NAME` or `[IPV6]:PORT/NAME`; None for any other text, which is a local path.

    Without PORT, as in `HOST:/NAME`, it is the default port.

    Raises:
        ValueError: The port is out of range.
    """
    found = _REMOTE.fullmatch(text)
    if found is None:
        return None
    port = int(found["port"] or DEFAULT_PORT)
    if not 1 <= port <= 0xFFFF:
        msg = f"port {port} of {text} is not in 1..65535"
        raise ValueError(msg)
    return Remote(found["ipv6"] or found["host"], port, found["name"])


def split_name(name: str) -> list[str]:
    """The parts of a file's name on a server: folders, then the file.

    The name cannot leave the folder that is served.  Whether a part is a symbolic link can only be
    checked when it is opened (folder.py).

    Raises:
        ValueError: The name is absolute or empty, has `.`, `..` or an empty part, a NUL, or is
            too long.
    """
    if not name:
        msg = "the name is empty"
        raise ValueError(msg)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        msg = f"{name!a} is not Unicode"
        raise ValueError(msg) from None
    parts = name.split("/")
    if name.startswith("/"):
        msg = f"{name!r} is absolute: names are relative to the folder that is served"
        raise ValueError(msg)
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        msg = f"{name!r} has a part that is empty, `.` or `..`, or has a NUL"
        raise ValueError(msg)
    if size > _MOST_BYTES or any(len(part.encode()) > _MOST_BYTES_OF_A_PART for part in parts):
        msg = f"a name of {size} bytes is too long"
        raise ValueError(msg)
    return parts
