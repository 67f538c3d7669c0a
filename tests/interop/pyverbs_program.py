"""pyverbs_peer.py as a program, and what its private data look like from here."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tests.interop.program import Program, running

# Debian's python3-pyverbs is for Debian's Python.
PYTHON = "/usr/bin/python3"
ROOT = Path(__file__).parents[2]
#: The last line of a peer that has found everything as it must be.
DONE = "all as it must be"


def pyverbs(scene: str, role: str, address: str, port: int) -> AbstractAsyncContextManager[Program]:
    """Run pyverbs_peer.py beside a block."""
    command = (PYTHON, "-X", "dev", "-m", "tests.interop.pyverbs_peer")
    return running(*command, scene, role, address, str(port), PYTHONPATH=str(ROOT))


def trimmed(data: bytes, size: int) -> bytes:
    """Private data without the zeros that InfiniBand pads it with."""
    assert not data[size:].strip(b"\0"), data
    return data[:size]
