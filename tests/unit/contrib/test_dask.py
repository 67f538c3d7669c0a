"""The backend of Dask without a device: how it is found, addresses, and the pieces of a frame."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

import dask.config
import numpy as np
import psutil
import pytest

import aiordma
from aiordma.contrib import dask as backend
from aiordma.contrib.dask import PIECE_BYTES, RdmaBackend, RdmaListener
from tests.inside.contrib import bytes_of_frame, pieces_of, settings


def test_the_scheme_leads_to_the_backend() -> None:
    (found,) = importlib.metadata.entry_points(group="distributed.comm.backends", name="rdma")
    assert found.load() is RdmaBackend


def test_addresses_without_a_device() -> None:
    made = RdmaBackend()
    assert made.get_address_host("10.1.2.3:5") == "10.1.2.3"
    assert made.get_address_host_port("[fe80::1%eth0]:5") == ("fe80::1%eth0", 5)
    assert made.resolve_address("10.1.2.3:5") == "10.1.2.3:5"
    assert made.resolve_address("[2001:db8::1]:5") == "[2001:db8::1]:5"
    with pytest.raises(ValueError, match="port"):
        made.get_address_host("10.1.2.3")


def test_no_device_for_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backend, "SYSFS", tmp_path)
    monkeypatch.setattr(backend, "why_unavailable", lambda: "no RDMA device: none is listed")
    with pytest.raises(aiordma.DeviceNotFoundError, match=r"none is listed.*interface"):
        RdmaBackend().resolve_address("127.0.0.1:5")


async def test_the_interface_of_a_device_stands_for_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the table of a port, by the device's folder, and by the hardware address of iWARP."""
    monkeypatch.setattr(backend, "get_ip_interface", {"eth7": "10.7.7.7"}.__getitem__)
    for files in (
        {"roce0/ports/1/gid_attrs/ndevs/0": "eth7\n"},
        {"ib0/ports/1/gids/0": "fe80:0000:0000:0000:0002:c903:0000:1234\n",
         "ib0/device/net/eth7/mtu": "1\n"},
        {"siw0/ports/1/gids/0": "0246:8ace:1357:0000:0000:0000:0000:0000\n"},
    ):  # fmt: skip
        root = tmp_path / next(iter(files)).partition("/")[0]
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.setattr(backend, "SYSFS", root)
        monkeypatch.setattr(psutil, "net_if_addrs", cards)
        assert RdmaBackend().resolve_address("localhost:5") == "10.7.7.7:5"


def cards() -> dict[str, list[Any]]:
    class Card:
        family = psutil.AF_LINK
        address = "02:46:8a:ce:13:57"

    return {"eth7": [Card()]}


@pytest.mark.parametrize("arguments", [{"require_encryption": True}, {"ssl_context": object()}])
def test_encryption_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="rdma:// has no TLS"):
        RdmaBackend().get_listener("10.1.2.3:0", print, deserialize=True, **arguments)


def test_a_listener_that_was_not_started() -> None:
    listener = RdmaListener("10.1.2.3:0", lambda _: None)
    for name in ("listen_address", "contact_address"):
        with pytest.raises(ValueError, match="non-started"):
            getattr(listener, name)
    listener.stop()


@pytest.mark.parametrize("size", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 10**8 + 7])
def test_pieces_are_whole_and_alike(size: int) -> None:
    data = memoryview(bytes(size))
    lengths = [len(piece) for piece in pieces_of(data)]
    assert sum(lengths) == size
    assert max(lengths) <= PIECE_BYTES
    assert max(lengths) - min(lengths) < len(lengths)


@pytest.mark.parametrize(
    "frame",
    [
        b"bytes", bytearray(3), memoryview(b"part")[1:], np.arange(12.0).reshape(3, 4),
        np.zeros((2, 3), order="F"), np.zeros(3, complex), np.zeros(3, [("a", "i2"), ("b", "f8")]),
        np.arange(9)[::2], np.zeros((3, 0)), b"",
    ],
)  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda frame: frame, memoryview, PickleBuffer])
def test_the_bytes_of_a_frame(frame: Any, wrap: Any) -> None:
    view = bytes_of_frame(wrap(frame))
    assert (view.ndim, view.format) == (1, "B")
    assert bytes(view) == memoryview(frame).tobytes("A")


@pytest.mark.parametrize("wrap", [lambda frame: frame, memoryview, PickleBuffer])
def test_the_bytes_of_a_frame_are_no_view_of_a_view(wrap: Any) -> None:
    """CPython before 3.13 has crashed after comms whose frames had these."""
    array = np.arange(12.0).reshape(3, 4)
    owner: Any = bytes_of_frame(wrap(array)).obj
    assert owner is array


@pytest.mark.parametrize(
    ("name", "value"), [("wait", "never"), ("keepalive", "0s"), ("spin-us", "many")]
)
def test_bad_settings(name: str, value: str) -> None:
    with (
        dask.config.set({f"distributed.comm.rdma.{name}": value}),
        pytest.raises(ValueError, match=r".+"),
    ):
        settings()
