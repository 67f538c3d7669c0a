"""Calls that are newer than the installed libraries: a library of C has them."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aiordma._ffi import ffi, newer
from aiordma.errors import NotSupportedError
from aiordma.verbs import Context

SPEED = "ibv_query_port_speed"


class OpenContext(Context):
    """Of no device."""

    def __init__(self) -> None:
        self.made = ffi.new("char[64]")

    def __del__(self, *_: Any) -> None:
        """There is nothing to close."""

    def _require(self) -> Any:
        return ffi.cast("struct ibv_context *", self.made)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, made = Path(__file__).with_name("fake_newer.c"), tmp_path / "newer.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    words = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", made, source)
    subprocess.run([*compiler, *words], check=True)
    _, *rest = newer.CALLS[SPEED]
    monkeypatch.setitem(newer.CALLS, SPEED, (str(made), *rest))


@pytest.mark.usefixtures("library")
def test_the_speed_of_a_port() -> None:
    context = OpenContext()
    assert context.query_port_speed() == 800_000
    with pytest.raises(OSError, match=SPEED) as caught:
        context.query_port_speed(2)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(NotSupportedError, match="`active_speed` of `query_port`"):
        context.query_port_speed(3)
    for port in (-1, 1 << 32):
        with pytest.raises(ValueError, match="port"):
            context.query_port_speed(port)
    with pytest.raises(TypeError):
        context.query_port_speed("1")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", newer.CALLS)
def test_a_library_without_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(newer.CALLS, name, ("libc.so.6", *newer.CALLS[name][1:]))
    why = f"libc has no {name}: it came with rdma-core {newer.CALLS[name][1]}"
    with pytest.raises(NotSupportedError, match=why):
        newer.newer(name)
