"""TCP programs under librspreload, which turns their sockets into rsockets.

The library of rdma-core 44 looks at the arguments of socket() alone: a program that asks for
SOCK_CLOEXEC in the same call, as Python and Perl do, gets a TCP socket.  It does not know accept4()
and epoll, and with select() it takes accepted connections for others: socat is a client here only.
The library of 65 takes sockets with such flags, and knows both; but curl does not connect with it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

#: What LD_PRELOAD has to be.
LIBRARY = str(next(Path("/usr").glob("lib*/*/rsocket/librspreload.so")))
#: Whether it is the library of rdma-core 65, and not of 44 or 56.
IS_LATER = b"accept4\0" in Path(LIBRARY).read_bytes()


def build(source: Path, into: Path, *libraries: str) -> str:
    """Compile a program of one file; returns its path."""
    program = into / source.stem
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run(
        [*compiler, "-O1", "-Wall", "-Werror", "-o", program, source, *libraries], check=True
    )
    return str(program)


def fed(command: tuple[str, ...], source: Path, result: Path) -> tuple[str, ...]:
    """The command with its input from one file and its output into another."""
    return ("sh", "-c", f"exec {shlex.join(command)} <{source} >{result}")
